"""Jobs on the devices of this process: one thread a device, results handed to the one writer."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

from jaxlsgd.core.rows import MethodRows
from jaxlsgd.study.jobs import Finished, Job, Tile
from jaxlsgd.study.stop import Dropped, Stop

_TICK = 0.2  # seconds between looks at the clock while nothing is finished

OnTile = Callable[[Tile, dict[str, MethodRows]], None]
Compute = Callable[[Job, Any, OnTile], None]


def run_jobs(
    jobs: Iterable[Job], compute: Compute, devices: Sequence[Any], stop: Stop
) -> Generator[Finished | None, None, None]:
    """Yields tiles as they finish, and None now and then while none does.

    A job is taken only when a device is free, so that `stop` (or an error that the caller learns
    of) keeps all later ones from beginning. When the caller leaves early, jobs in flight drop.
    """
    feed = _Feed(jobs, stop)
    # Bounded, so that devices wait for a slow disk and little is lost when the process is killed.
    finished: queue.Queue[Finished | None] = queue.Queue(len(devices))
    work = [_worker(feed, compute, device, finished, stop) for device in devices]
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
        while any(thread.is_alive() for thread in work):
            with contextlib.suppress(queue.Empty):
                finished.get(timeout=_TICK / 10)


class _Feed:
    """Hands jobs to threads, one at a time."""

    def __init__(self, jobs: Iterable[Job], stop: Stop) -> None:
        self._jobs, self._stop, self._lock = iter(jobs), stop, threading.Lock()

    def __iter__(self) -> Iterator[Job]:
        while not self._stop.draining:
            with self._lock:
                job = next(self._jobs, None)
            if job is None:
                return
            yield job


def _worker(
    feed: _Feed,
    compute: Compute,
    device: Any,
    finished: queue.Queue[Finished | None],
    stop: Stop,
) -> threading.Thread:
    def attempt(job: Job) -> list[Job]:
        """Runs a job; returns what is to be tried again, tile by tile."""
        left = dict.fromkeys(job)

        def on_tile(tile: Tile, rows: dict[str, MethodRows]) -> None:
            del left[tile]
            finished.put(Finished(tile, rows, None))

        try:
            compute(job, device, on_tile)
        except Exception as error:  # told by the caller, tile by tile
            if len(job) > 1 and not stop.draining:
                return [(tile,) for tile in left]
            cause = error if len(job) == 1 else Dropped()
            for tile in left:
                finished.put(Finished(tile, None, cause))
        return []

    def work() -> None:
        try:
            for job in feed:
                for tile in attempt(job):
                    attempt(tile)
        finally:
            finished.put(None)

    thread = threading.Thread(target=work, name=f"jaxlsgd-{device}", daemon=True)
    thread.start()
    return thread
