"""What a Dask worker does: plain data in, encoded tiles out, compiled programs kept in between."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import queue
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypedDict

from jaxlsgd.core.rows import MethodRows
from jaxlsgd.engine import machine
from jaxlsgd.study.grid import Cell, canonical
from jaxlsgd.study.store import codec as files

PACKAGE = Path(__file__).parents[1]
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


def code() -> str:
    """A digest of the package's source, which a version number alone does not tell."""
    total = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        total.update(f"{path.relative_to(PACKAGE).as_posix()}\n".encode() + path.read_bytes())
    return total.hexdigest()[:12]


def pack(cells: list[Cell]) -> bytes:
    """Cells as plain data, so that no class of ours is pickled."""
    return canonical([cell.plain() for cell in cells])


class Answer(TypedDict, total=False):
    """What comes back: one of these. No exception travels, for not every one can be pickled."""

    tiles: list[bytes]  # encoded
    error: str
    unlike: dict[str, Any]  # the environment of a worker that would compute other digits


def run_job(cells: bytes, first: int, expected: dict[str, Any]) -> Answer:
    """Runs a job.

    Args:
      cells: made by `pack`.
      first: the first replication.
      expected: the environment that the run was begun with.
    """
    from distributed import get_worker

    found = _environment(get_worker().state.nthreads)
    if machine.difference(found, expected):
        return {"unlike": found}
    try:
        return {"tiles": _tiles([Cell.of(plain) for plain in json.loads(cells)], first)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _tiles(cells: list[Cell], first: int) -> list[bytes]:
    from jaxlsgd.study import build

    tiles = [b""] * len(cells)

    def on_rows(index: int, rows: dict[str, MethodRows]) -> None:
        tiles[index] = files.encode_tile(cells[index], first, rows)

    with _device() as device:
        build.compute_job(cells, first, device, on_rows=on_rows)
    return tiles


def _environment(threads: int) -> dict[str, Any]:
    with _lock:  # two threads must not start JAX at once
        return _environment_once(threads)


@functools.cache
def _environment_once(threads: int) -> dict[str, Any]:
    _keep_memory()
    machine.prepare(threads)
    import jax

    return machine.describe(jax.local_devices()[0]) | {"code": code()}


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
