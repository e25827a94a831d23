"""Tiles on the devices of this process: one thread a device, results handed to the one writer."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxlsgd.rows import MethodRows
from jaxlsgd.study.grid import Cell

_TICK = 0.2  # seconds between looks at the clock while nothing is finished


class Tile(NamedTuple):
    """A fixed range of replications of one cell: the unit of work, of commits and of resuming."""

    cell: Cell
    first: int


class Finished(NamedTuple):
    """A tile's rows, or why there are none."""

    tile: Tile
    rows: dict[str, MethodRows] | None
    error: Exception | None


Compute = Callable[[Tile, Any], dict[str, MethodRows]]


class Stop:
    """Asks a run to end: once to finish the tiles in flight, twice to drop them.

    An instance is a signal handler: `signal.signal(signal.SIGTERM, stop)`.

    Args:
      max_time: seconds after which it asks by itself, once.
    """

    def __init__(self, max_time: float | None = None) -> None:
        self._requests = 0
        self._deadline = None if max_time is None else time.monotonic() + max_time

    def __call__(self, *signal_arguments: Any) -> None:
        self._requests += 1

    @property
    def draining(self) -> bool:
        """Whether no further tile is to begin."""
        late = self._deadline is not None and time.monotonic() >= self._deadline
        return late or self._requests > 0

    @property
    def dropping(self) -> bool:
        """Whether the tiles in flight are to be left unfinished."""
        return self._requests > 1


class Dropped(Exception):
    """Raised inside a tile that is left unfinished."""


def run_tiles(
    tiles: Iterable[Tile], compute: Compute, devices: Sequence[Any], stop: Stop
) -> Generator[Finished | None, None, None]:
    """Yields tiles as they finish, and None now and then while none does.

    A tile is taken only when a device is free, so that `stop` (or an error that the caller learns
    of) keeps all later ones from beginning. When the caller leaves early, tiles in flight drop.
    """
    feed = _Feed(tiles, stop)
    finished: queue.Queue[Finished | None] = queue.Queue()
    work = [_worker(feed, compute, device, finished) for device in devices]
    try:
        busy = len(work)
        while busy:
            try:
                result = finished.get(timeout=_TICK)
            except queue.Empty:
                yield None
                continue
            if result is None:
                busy -= 1
            else:
                yield result
    except BaseException:
        stop()
        stop()
        raise
    finally:
        for thread in work:
            thread.join()


class _Feed:
    """Hands tiles to threads, one at a time."""

    def __init__(self, tiles: Iterable[Tile], stop: Stop) -> None:
        self._tiles, self._stop, self._lock = iter(tiles), stop, threading.Lock()

    def __iter__(self) -> Iterator[Tile]:
        while not self._stop.draining:
            with self._lock:
                tile = next(self._tiles, None)
            if tile is None:
                return
            yield tile


def _worker(
    feed: _Feed, compute: Compute, device: Any, finished: queue.Queue[Finished | None]
) -> threading.Thread:
    def work() -> None:
        try:
            for tile in feed:
                try:
                    finished.put(Finished(tile, compute(tile, device), None))
                except Exception as error:  # told by the caller, tile by tile
                    finished.put(Finished(tile, None, error))
        finally:
            finished.put(None)

    thread = threading.Thread(target=work, name=f"jaxlsgd-{device}", daemon=True)
    thread.start()
    return thread
