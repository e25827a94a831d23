"""Progress of a run: how it is shown, how it is logged, and how it is stopped.

`Stop` ends a run, `SilentProgress` and its subclasses show it, `RunLog` keeps what happened in `run.log`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple, TextIO

from jaxlsgd.core.display import printable
from jaxlsgd.study.store import lock, provenance
from jaxlsgd.study.store.files import StoreError

_log = logging.getLogger("jaxlsgd.study")


class Stop:
    """A request to end a run: made once, the tiles in flight are finished; twice, they are dropped.

    An instance is a signal handler: `signal.signal(signal.SIGTERM, stop)`.

    Args:
      max_time: seconds after which the request is made once.
    """

    def __init__(self, max_time: float | None = None) -> None:
        self._requests = 0
        self._deadline = None if max_time is None else time.monotonic() + max_time
        self.signal: int = signal.SIGINT  # that made the last request; this one if none did

    def __call__(self, number: int = signal.SIGINT, frame: object = None) -> None:
        self._requests += 1
        self.signal = number

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


class Totals(NamedTuple):
    """The work of a run."""

    cells: int
    cells_done: int
    replications: int  # to run now
    work: float  # of them, in client-steps
    kinds: int = 1  # of programs that are to be compiled for them


class TimeLeft:
    """Estimate of the time that a run still takes.

    Seconds without progress before the first work of a kind of programs count as compiling, and are expected
    again for each kind to come. The rate of work is that of the later half of the work so far.
    """

    BASIS = 3.0  # seconds of work before there is an estimate

    def __init__(self, totals: Totals, now: float) -> None:
        self._totals, self._last = totals, now
        self._waits: list[float] = []  # for each kind that has begun
        self._marks = [(0.0, 0.0)]  # seconds at work, and the work done by then

    def begin(self, now: float) -> None:
        """Record that a kind of programs begins its first work."""
        self._waits.append(now - self._last)
        self._last = now

    def advance(self, work: float, now: float) -> None:
        """Record work done."""
        seconds, done = self._marks[-1]
        self._marks.append((seconds + now - self._last, done + work))
        self._last = now
        if len(self._marks) > 200:
            del self._marks[1:-1:2]

    def seconds(self, now: float) -> float | None:
        """Return the estimate; None while there is no basis for one."""
        left = self._totals.work - self._marks[-1][1]
        if left <= self._totals.work * 1e-9:
            return 0.0
        each = self.seconds_per_work(now)
        to_come = max(0, self._totals.kinds - len(self._waits))
        return None if each is None else to_come * max(self._waits, default=0.0) + left * each

    def seconds_per_work(self, now: float) -> float | None:
        """Return how long work takes now, without compiling; None while there is no basis for it."""
        seconds, done = self._marks[-1]
        # The first work includes compiling, so it is no basis for the rate.
        if seconds <= 0 or (passed := seconds + now - self._last) < self.BASIS:
            return None
        half = max(mark for mark in self._marks if mark[0] <= seconds / 2)
        return (passed - half[0]) / (done - half[1])


class SilentProgress:
    """Progress that shows nothing; warnings go to Python's log. Subclasses show more."""

    def __init__(self) -> None:
        self.start(Totals(0, 0, 0, 0.0))

    def start(self, totals: Totals) -> None:
        """Begin."""
        self.time_left = TimeLeft(totals, time.monotonic())

    def begin(self) -> None:
        """Record that a kind of programs begins its first work."""
        self.time_left.begin(time.monotonic())

    def advance(self, replications: float, work: float) -> None:
        """Record work done."""
        self.time_left.advance(work, time.monotonic())

    def cell_done(self) -> None:
        """Record that a cell is complete."""

    def tick(self) -> None:
        """Show the progress if it is time to; called a few times per second."""

    def warn(self, text: str) -> None:
        """Show a message that must not be missed."""
        _log.warning("%s", text)

    def close(self) -> None:
        """End."""


class LineProgress(SilentProgress):
    """A plain line every few seconds, for logs and pipes."""

    every = 5.0

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        super().__init__()

    def start(self, totals: Totals) -> None:
        super().start(totals)
        self._totals, self._cells = totals, totals.cells_done
        self._replications = self._work = 0.0
        self._began = self._shown = time.monotonic()

    def advance(self, replications: float, work: float) -> None:
        super().advance(replications, work)
        self._replications += replications
        self._work += work

    def cell_done(self) -> None:
        self._cells += 1

    def tick(self) -> None:
        now = time.monotonic()
        if now - self._shown >= self.every:
            self._shown = now
            self._show(self.line(now))

    def warn(self, text: str) -> None:
        self._write(f"jaxlsgd: {printable(text)}\n")

    def close(self) -> None:
        self._show(self.line(time.monotonic()))

    def line(self, now: float) -> str:
        """Return the state of the run in one line."""
        elapsed = max(now - self._began, 1e-9)
        share = self._work / self._totals.work if self._totals.work else 1.0
        seconds = self.time_left.seconds(now)
        left = "estimating the time left" if seconds is None else f"{duration(seconds)} left"
        return (
            f"cells {self._cells}/{self._totals.cells}, {min(share, 1):.0%}, "
            f"{self._replications / elapsed:,.0f} replications/s, "
            f"{left}, peak {peak_memory() / 1e6:,.0f} MB"
        )

    def _show(self, line: str) -> None:
        self._write(line + "\n")

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            pass  # a closed terminal must not end a study


class LiveProgress(LineProgress):
    """One line that is overwritten, for terminals."""

    every = 0.2

    def warn(self, text: str) -> None:
        self._write(f"\r\x1b[Kjaxlsgd: {printable(text)}\n")

    def close(self) -> None:
        super().close()
        self._write("\n")

    def _show(self, line: str) -> None:
        self._write(f"\r\x1b[K{line}")


def for_stream(stream: TextIO, quiet: bool = False) -> SilentProgress:
    """Return the progress that suits a stream."""
    if quiet:
        return SilentProgress()
    return LiveProgress(stream) if stream.isatty() else LineProgress(stream)


def duration(seconds: float) -> str:
    """Return hours, minutes and seconds as text: '1:02:03'."""
    if not 0 <= seconds < 1e9:
        return "?"
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def peak_memory() -> int:
    """Return the most memory that the process has used so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class RunLog:
    """The file `run.log` of a directory: what happened in its runs. It may fail without ending a study.

    Args:
      progress: shows warnings as well.
    """

    def __init__(self, progress: SilentProgress) -> None:
        self.progress = progress
        self._early: list[str] | None = []  # lines from before the file was opened
        self._lock, self._handle = threading.Lock(), -1

    def open(self, directory: Path, heading: str) -> None:
        """Open the log of a directory, which the writer holds, and begin with a heading."""
        path, flags = directory / lock.LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND
        try:
            self._handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
            lock.refuse_shared(path, self._handle)
            if not os.fstat(self._handle).st_size:
                os.write(self._handle, lock.LOG_HEAD.encode())
        except (OSError, StoreError) as error:
            self.close()
            cause = getattr(error, "strerror", None) or error
            self.progress.warn(f"no log is kept: {cause}")
        early, self._early = self._early or [], None
        for text in (heading, *early):
            self.note(text)

    def note(self, text: str) -> None:
        """Add a line; further lines of the text are indented."""
        line = printable(text).replace("\n", "\n    ")
        content = f"{provenance.now()} {line}\n".encode(errors="backslashreplace")
        with self._lock, contextlib.suppress(OSError):
            if self._handle >= 0:
                os.write(self._handle, content)
            elif self._early is not None:
                self._early.append(text)

    def warn(self, text: str) -> None:
        """Add a line, and show it."""
        self.note(text)
        self.progress.warn(text)

    def close(self) -> None:
        """Close the file."""
        with self._lock, contextlib.suppress(OSError):
            if self._handle >= 0:
                os.close(self._handle)
            self._handle = -1
