"""Run jobs in a Dask worker: JSON data and pickled objects in, encoded tiles out."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypedDict

from jaxlsgd.core import identity
from jaxlsgd.core.checks import describe
from jaxlsgd.engine import machine
from jaxlsgd.inference.laws import tables
from jaxlsgd.runs.simulate import Device
from jaxlsgd.study import imports, jobs
from jaxlsgd.study.cells import CellSpec, canonical
from jaxlsgd.study.jobs import Tabulated, Tile, TileFinished
from jaxlsgd.study.parts import Part
from jaxlsgd.study.store import files, law_tables

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_MOST_CELLS = 1_000
_lock = threading.Lock()
_parts: dict[tuple[str, str, Any], Any] = {}  # objects by role, name and content


def dask_setup(worker: Any) -> None:
    """Dask's hook at the start of a local worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which ends its workers
    # JAX takes seconds to start: begin while the run prepares the study.
    threading.Thread(target=_environment, args=(worker.state.nthreads,), daemon=True).start()


def environment(dask_worker: Any) -> dict[str, Any]:
    """Set up JAX in this worker, and return everything that may change the digits of its rows."""
    return _environment(dask_worker.state.nthreads)


Packed = tuple[bytes, bytes]  # JSON, pickled objects


def pack(cells: list[CellSpec], first: int) -> Packed:
    """Return a job for a worker: cells as JSON data, with the objects and imported sources that they need.

    The worker builds what comes with the package or from an imported file; what was given or registered
    in Python is pickled.
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
    """Pickle objects by role, name and identity; the user's code by value, as workers lack its modules."""
    import cloudpickle

    named = {name for part in parts for name in identity.modules(part.made)}
    own = [sys.modules[name] for name in named - {"__main__"} if name in sys.modules]
    registered = cloudpickle.list_registry_pickle_by_value()  # by others, and theirs to remove
    own = [module for module in own if module.__name__ not in registered]
    for module in own:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps({(x.role, x.name, x.identity): x.made for x in parts})
    finally:
        for module in own:
            cloudpickle.unregister_pickle_by_value(module)


class Answer(TypedDict, total=False):
    """The result of a job. Errors are text, as not every exception can be pickled."""

    tiles: list[bytes]  # encoded
    tables: dict[str, list[float | None]]  # with the tiles, see `store.law_tables`
    error: str
    unlike: dict[str, Any]  # the environment of a worker that would compute other digits


def work(packed: Packed, expected: dict[str, Any]) -> Answer:
    """Run a job.

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


_built_cells: dict[bytes, CellSpec] = {}  # of the last jobs: built once, compiled once


def _built(plain: bytes, objects: bytes) -> CellSpec:
    if plain not in _built_cells:
        spec = CellSpec.read(json.loads(plain))
        methods = tuple(_part(method, objects) for method in spec.methods)
        parts = {x: _part(getattr(spec, x), objects) for x in ("problem", "algorithm")}
        if len(_built_cells) > _MOST_CELLS:
            _built_cells.clear()
        _built_cells[plain] = dataclasses.replace(spec, methods=methods, **parts)
    return _built_cells[plain]


def _part(given: Part, objects: bytes) -> Part:
    key = (given.role, given.name, given.content)
    if key not in _parts:
        made = _unpickled(objects).get((given.role, given.name, given.identity))
        _parts[key] = dataclasses.replace(given, made=made).built().made
    return dataclasses.replace(given, made=_parts[key])


@functools.lru_cache(maxsize=8)
def _unpickled(objects: bytes) -> dict[tuple[str, str, str], Any]:
    import cloudpickle

    return cloudpickle.loads(objects)


def remember(rows: dict[str, list[float | None]]) -> None:
    """Remember tables of earlier runs."""
    tables.remember(law_tables.from_plain(rows))


def _answer(cells: list[CellSpec], first: int) -> Answer:
    tiles: dict[CellSpec, bytes] = {}
    used = tables.Rows()
    job = tuple(Tile(cell, first) for cell in cells)
    with _device() as device:
        for event in jobs.run_job(job, device):
            if isinstance(event, Tabulated):
                used |= event.rows
            elif isinstance(event, TileFinished):
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
    """Keep freed memory in this process; Dask makes its workers return it at once.

    A tile frees and allocates the same arrays many times, and the system would clear them each time.
    """
    with suppress(OSError, AttributeError):  # not glibc
        change = ctypes.CDLL(None).mallopt
        change(_M_TRIM_THRESHOLD, 1 << 27)
        change(_M_MMAP_THRESHOLD, 1 << 25)


@contextmanager
def _device() -> Iterator[Device]:
    """Yield a device that is free for a thread, a CPU as often as there are threads."""
    with _lock:
        free = _free()
    device = free.get()
    try:
        yield device
    finally:
        free.put(device)


@functools.cache
def _free() -> queue.Queue[Device]:
    free: queue.Queue[Device] = queue.Queue()
    for device in machine.chosen():
        free.put(device)
    return free
