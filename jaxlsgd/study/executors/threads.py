"""Run jobs on the devices of this process, with one thread per device; on a CPU, with one per core."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Iterator, Sequence

from jaxlsgd.engine import machine
from jaxlsgd.inference.laws import tables
from jaxlsgd.runs.simulate import Device
from jaxlsgd.study.executors.base import Event, Events, TileFailed
from jaxlsgd.study.jobs import Job, Tile, TileFinished, run_job
from jaxlsgd.study.progress import Dropped, Stop

_TICK = 0.2  # seconds between two events while nothing happens
_GRACE = (
    0.5  # seconds in which threads whose tiles are dropped may end, before they are left behind
)
NAME = "jaxlsgd-"  # of threads begins so


class Threads:
    """Executor on devices of this process."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = list(devices)
        self.environment = machine.describe(self.devices[0])
        self.size = len(self.devices)

    def remember(self, rows: tables.Rows) -> None:
        """See `Executor.remember`."""
        tables.remember(rows)

    def run(self, jobs: Iterable[Job], stop: Stop) -> Events:
        """See `Executor.run`."""
        crew = _Crew(jobs, self.devices, stop)
        try:
            while crew.busy and not stop.dropping:
                yield from crew.events()
            # A thread in XLA's compiler cannot be interrupted. It ends by itself, and writes nothing.
            crew.leave(_GRACE if stop.dropping else None)
        except BaseException:
            stop()
            stop()
            crew.leave()
            raise


class _Crew:
    """The threads of one run, and the events that they report."""

    def __init__(self, jobs: Iterable[Job], devices: Sequence[Device], stop: Stop) -> None:
        self._jobs, self._stop, self._lock = iter(jobs), stop, threading.Lock()
        self._events: queue.SimpleQueue[Event | threading.Thread] = queue.SimpleQueue()
        # Devices wait for a slow disk, so that little is lost if the process is killed.
        self._room = threading.Semaphore(len(devices))
        self.busy = {
            threading.Thread(target=self._work, args=(d,), name=f"{NAME}{d}", daemon=True)
            for d in devices
        }
        for thread in self.busy:
            thread.start()

    def events(self) -> Iterator[Event]:
        """Yield the next event; the rows of a tile count as written when the caller comes back."""
        try:
            event = self._events.get(timeout=_TICK)
        except queue.Empty:
            yield None
            return
        if isinstance(event, threading.Thread):
            self.busy.discard(event)
            return
        yield event
        if isinstance(event, TileFinished):
            self._room.release()

    def leave(self, most: float | None = None) -> None:
        """Wait for the threads, or for some seconds at most, and discard their events."""
        deadline = None if most is None else time.monotonic() + most
        for thread in list(self.busy):
            while thread.is_alive() and (deadline is None or time.monotonic() < deadline):
                self._room.release()
                thread.join(timeout=_TICK / 10)
        if self.busy:
            self._room.release(len(self.busy))

    def _work(self, device: Device) -> None:
        try:
            while not self._stop.draining and (job := self._next()) is not None:
                for tile in self._attempt(job, device):
                    self._attempt((tile,), device)
        finally:
            self._events.put(threading.current_thread())

    def _next(self) -> Job | None:
        with self._lock:
            return next(self._jobs, None)

    def _attempt(self, job: Job, device: Device) -> list[Tile]:
        """Run a job; return the tiles that are to be tried again, one by one."""
        left = dict.fromkeys(job)
        try:
            for event in run_job(job, device):
                if self._stop.dropping:
                    raise Dropped
                if isinstance(event, TileFinished):
                    self._room.acquire()
                    del left[event.tile]
                self._events.put(event)
        except Exception as error:
            if len(job) > 1 and not self._stop.draining:
                return list(left)
            cause = error if len(job) == 1 else Dropped()
            for tile in left:
                self._events.put(TileFailed(tile, cause))
        return []
