"""What a Dask worker does: plain data in, encoded tiles out, compiled programs kept in between."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import queue
import signal
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypedDict

from jaxlsgd.core import identity
from jaxlsgd.core.checks import describe
from jaxlsgd.engine import machine
from jaxlsgd.inference.laws import tables
from jaxlsgd.study import imports
from jaxlsgd.study.cells import CellSpec, canonical
from jaxlsgd.study.jobs import Tile
from jaxlsgd.study.parts import Part
from jaxlsgd.study.store import files, law_tables

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_lock = threading.Lock()


def dask_setup(worker: Any) -> None:
    """Dask's hook at the start of a local worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which asks it to end
    # JAX takes seconds to start: they pass while the run prepares the study.
    threading.Thread(target=_environment, args=(worker.state.nthreads,), daemon=True).start()


def environment(dask_worker: Any) -> dict[str, Any]:
    """What may move the digits of this worker's rows, once JAX is set up in it."""
    return _environment(dask_worker.state.nthreads)


Packed = tuple[bytes, bytes]  # JSON, pickled objects


def pack(cells: list[CellSpec], first: int) -> Packed:
    """A job for a worker: cells as plain data, with the objects and imported sources that they need.

    What comes with the package, or from an imported file, is built by the worker; only what was given or
    registered in Python is pickled.
    """
    parts = {part for c in cells for part in (c.problem, c.algorithm, *c.methods)}
    own = {x for x in parts if x.identity and not imports.imported(x.role, x.kind)}
    content = {
        "cells": [cell.plain() for cell in cells],
        "first": first,
        "imports": imports.loaded(),
    }
    return canonical(content), _pickled(frozenset(own))


@functools.lru_cache(maxsize=8)
def _pickled(parts: frozenset[Part]) -> bytes:
    """Objects by role, name and identity; code of your own by value, as no worker has its modules."""
    import cloudpickle

    named = {name for part in parts for name in identity.modules(part.made)}
    own = [sys.modules[name] for name in named - {"__main__"} if name in sys.modules]
    own = [module for module in own if module.__name__ not in _by_value()]
    for module in own:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps({(x.role, x.name, x.identity): x.made for x in parts})
    finally:
        for module in own:
            cloudpickle.unregister_pickle_by_value(module)


def _by_value() -> Collection[str]:
    """Modules that somebody else has asked cloudpickle to take by value."""
    import cloudpickle

    return cloudpickle.list_registry_pickle_by_value()


class Answer(TypedDict, total=False):
    """What comes back: one of these. No exception travels, for not every one can be pickled."""

    tiles: list[bytes]  # encoded
    tables: dict[str, list[float | None]]  # with the tiles, see `store.kept_tables`
    error: str
    unlike: dict[str, Any]  # the environment of a worker that would compute other digits


def work(packed: Packed, expected: dict[str, Any]) -> Answer:
    """Runs a job.

    Args:
      packed: made by `pack`.
      expected: the environment that the run started with.
    """
    from distributed import get_worker

    found = _environment(get_worker().state.nthreads)
    if machine.difference(found, expected):
        return {"unlike": found}
    try:
        return _answer(*_unpack(packed))
    except Exception as error:
        return {"error": describe(error)}


def _unpack(packed: Packed) -> tuple[list[CellSpec], int]:
    content, objects = json.loads(packed[0]), packed[1]
    with _lock:
        imports.load_only(content["imports"])
        cells = [_built(canonical(plain), objects) for plain in content["cells"]]
    return cells, content["first"]


_cells: dict[bytes, CellSpec] = {}  # those of the last jobs: built once, compiled once


def _built(plain: bytes, objects: bytes) -> CellSpec:
    if plain not in _cells:
        spec = CellSpec.read(json.loads(plain))
        methods = tuple(_part(method, objects) for method in spec.methods)
        parts = {x: _part(getattr(spec, x), objects) for x in ("problem", "algorithm")}
        if len(_cells) > _MOST_CELLS:
            _cells.clear()
        _cells[plain] = dataclasses.replace(spec, methods=methods, **parts)
    return _cells[plain]


def _part(given: Any, objects: bytes) -> Any:
    key = (given.role, given.name, given.content)
    if key not in _parts:
        made = _unpickled(objects).get((given.role, given.name, given.identity))
        _parts[key] = dataclasses.replace(given, made=made).built().made
    return dataclasses.replace(given, made=_parts[key])


@functools.lru_cache(maxsize=8)
def _unpickled(objects: bytes) -> dict[tuple[str, str, str], Any]:
    import cloudpickle

    return cloudpickle.loads(objects)


_parts: dict[Any, Any] = {}
_MOST_CELLS = 1_000


def learn(rows: dict[str, list[float | None]]) -> None:
    """Takes tables of earlier runs."""
    tables.remember(law_tables.from_plain(rows))


def _answer(cells: list[CellSpec], first: int) -> Answer:
    from jaxlsgd.study.jobs import Done, Tabulated, run_job

    tiles: dict[CellSpec, bytes] = {}
    used = tables.Rows()
    job = tuple(Tile(cell, first) for cell in cells)
    with _device() as device:
        for event in run_job(job, device):
            if isinstance(event, Tabulated):
                used |= event.rows
            elif isinstance(event, Done):
                tiles[event.tile.cell] = files.encode_tile(event.tile.cell, first, event.rows)
    return {"tiles": [tiles[cell] for cell in cells], "tables": law_tables.plain(used)}


def _environment(threads: int) -> dict[str, Any]:
    with _lock:  # two threads must not start JAX at once
        return _environment_once(threads)


@functools.cache
def _environment_once(threads: int) -> dict[str, Any]:
    _keep_memory()
    machine.prepare(threads)
    import jax

    return machine.describe(jax.local_devices()[0])


def _keep_memory() -> None:
    """Lets this process keep freed memory, as others do; Dask has its workers return it at once.

    A tile frees and asks for the same arrays over and over, and each time the system clears them.
    """
    with suppress(OSError, AttributeError):  # not glibc
        change = ctypes.CDLL(None).mallopt
        change(_M_TRIM_THRESHOLD, 1 << 27)
        change(_M_MMAP_THRESHOLD, 1 << 25)


@contextmanager
def _device() -> Iterator[Any]:
    """A device that no other thread of this process uses."""
    with _lock:
        free = _free()
    device = free.get()
    try:
        yield device
    finally:
        free.put(device)


@functools.cache
def _free() -> queue.Queue[Any]:
    import jax

    free: queue.Queue[Any] = queue.Queue()
    for device in jax.local_devices():
        free.put(device)
    return free
