"""Jobs on the devices of this process: one thread per device, events for the one writer."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jaxlsgd.engine import machine
from jaxlsgd.inference.laws import tables
from jaxlsgd.study.executors.base import Event, Events, TileFailed
from jaxlsgd.study.jobs import Job, TileFinished, run_job
from jaxlsgd.study.progress import Dropped, Stop

_TICK = 0.2  # seconds between looks at the clock while nothing happens


class Threads:
    """Devices of this process."""

    def __init__(self, devices: Sequence[Any]) -> None:
        self.devices = list(devices)
        self.environment = machine.describe(self.devices[0])
        self.size = len(self.devices)

    def learn(self, rows: tables.Rows) -> None:
        """See `Executor.learn`."""
        tables.remember(rows)

    def run(self, jobs: Iterable[Job], stop: Stop) -> Events:
        """See `Executor.run`."""
        crew = _Crew(jobs, self.devices, stop)
        try:
            while crew.busy:
                yield from crew.events()
        except BaseException:
            stop()
            stop()
            raise
        finally:
            crew.leave()


class _Crew:
    """The threads, and the events that they report."""

    def __init__(self, jobs: Iterable[Job], devices: Sequence[Any], stop: Stop) -> None:
        self._jobs, self._stop, self._lock = iter(jobs), stop, threading.Lock()
        self._events: queue.SimpleQueue[Event | threading.Thread] = queue.SimpleQueue()
        # Bounded, so that devices wait for a slow disk and little is lost when the process is killed.
        self._room = threading.Semaphore(len(devices))
        self._left = False
        self.busy = {
            threading.Thread(target=self._work, args=(d,), name=f"jaxlsgd-{d}", daemon=True)
            for d in devices
        }
        for thread in self.busy:
            thread.start()

    def events(self) -> Iterator[Event]:
        """The next event; a tile's rows make room for others when the caller comes back for more."""
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

    def leave(self) -> None:
        """Waits for the threads, whatever they still have to report."""
        self._left = True
        for thread in list(self.busy):
            while thread.is_alive():
                self._room.release()
                thread.join(timeout=_TICK / 10)

    def _work(self, device: Any) -> None:
        try:
            while not self._stop.draining and (job := self._next()) is not None:
                for tile in self._attempt(job, device):
                    self._attempt((tile,), device)
        finally:
            self._events.put(threading.current_thread())

    def _next(self) -> Job | None:
        with self._lock:
            return next(self._jobs, None)

    def _attempt(self, job: Job, device: Any) -> list[Any]:
        """Runs a job; returns the tiles that are to be tried again, one by one."""
        left = dict.fromkeys(job)
        try:
            for event in run_job(job, device):
                if self._stop.dropping:
                    raise Dropped
                if isinstance(event, TileFinished):
                    self._room.acquire()
                    del left[event.tile]
                self._events.put(event)
        except Exception as error:  # reported by the caller, tile by tile
            if len(job) > 1 and not self._stop.draining:
                return list(left)
            cause = error if len(job) == 1 else Dropped()
            for tile in left:
                self._events.put(TileFailed(tile, cause))
        return []
