"""How a run is asked to end, by a signal, another thread or a time limit."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from jaxlsgd.core.display import printable
from jaxlsgd.study.store import lock, provenance
from jaxlsgd.study.store.files import StoreError


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


_log = logging.getLogger("jaxlsgd.study")


class Totals(NamedTuple):
    """What a run has to do."""

    cells: int
    cells_done: int
    replications: int  # to run now
    work: float  # of them, in client-steps
    kinds: int = 1  # of programs that are to be compiled for them


class Pace:
    """How long work that has begun will take: programs are compiled first, then work goes at some rate.

    Seconds without progress before the first work of a kind count as compiling, and are expected again for
    each kind to come. The rate is that of the later half of the work so far.
    """

    BASIS = 3.0  # seconds of work before anything is said

    def __init__(self, totals: Totals, now: float) -> None:
        self._totals, self._last = totals, now
        self._waits: list[float] = []  # for each kind that has begun
        self._marks = [(0.0, 0.0)]  # seconds at work, and what was done by then

    def begin(self, now: float) -> None:
        """Notes that a kind has come to its first work."""
        self._waits.append(now - self._last)
        self._last = now

    def advance(self, work: float, now: float) -> None:
        """Notes work done."""
        seconds, done = self._marks[-1]
        self._marks.append((seconds + now - self._last, done + work))
        self._last = now
        if len(self._marks) > 200:
            del self._marks[1:-1:2]

    def left(self, now: float) -> float | None:
        """Seconds that are left; None while there is nothing to tell them from."""
        seconds, done = self._marks[-1]
        if done >= self._totals.work * (1 - 1e-9):
            return 0.0
        # The first work comes with what was compiled for it, and says nothing of the rate.
        if seconds <= 0 or (passed := seconds + now - self._last) < self.BASIS:
            return None
        half = max(mark for mark in self._marks if mark[0] <= seconds / 2)
        to_come = max(0, self._totals.kinds - len(self._waits))
        waiting = to_come * max(self._waits, default=0.0)
        return waiting + (self._totals.work - done) * (passed - half[0]) / (done - half[1])


class Silent:
    """Shows nothing; warnings go to the log."""

    def start(self, totals: Totals) -> None:
        """Begins."""

    def advance(self, replications: float, work: float) -> None:
        """Notes work done."""

    def begin(self) -> None:
        """Notes the first work with programs of another kind."""

    def cell_done(self) -> None:
        """Notes that a cell is complete."""

    def tick(self) -> None:
        """Called a few times per second: the moment to show something."""

    def say(self, text: str) -> None:
        """Says something that must not be missed."""
        _log.warning("%s", text)

    def close(self) -> None:
        """Ends."""


class Lines(Silent):
    """A plain line every few seconds, for logs and pipes."""

    every = 5.0

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._totals = Totals(0, 0, 0, 0.0)
        self._cells = 0
        self._replications = self._work = 0.0
        self._began = self._shown = time.monotonic()
        self._pace = Pace(self._totals, self._began)

    def start(self, totals: Totals) -> None:
        self._totals, self._cells = totals, totals.cells_done
        self._began = self._shown = time.monotonic()
        self._pace = Pace(totals, self._began)

    def begin(self) -> None:
        self._pace.begin(time.monotonic())

    def advance(self, replications: float, work: float) -> None:
        self._replications += replications
        self._work += work
        self._pace.advance(work, time.monotonic())

    def cell_done(self) -> None:
        self._cells += 1

    def tick(self) -> None:
        now = time.monotonic()
        if now - self._shown >= self.every:
            self._shown = now
            self._show(self.line(now))

    def say(self, text: str) -> None:
        self._write(f"jaxlsgd: {printable(text)}\n")

    def close(self) -> None:
        self._show(self.line(time.monotonic()))

    def line(self, now: float) -> str:
        """The state of the run in one line."""
        elapsed = max(now - self._began, 1e-9)
        share = self._work / self._totals.work if self._totals.work else 1.0
        left = self._pace.left(now)
        told = "estimating the time left" if left is None else f"{duration(left)} left"
        return (
            f"cells {self._cells}/{self._totals.cells}, {min(share, 1):.0%}, "
            f"{self._replications / elapsed:,.0f} replications/s, "
            f"{told}, peak {peak_memory() / 1e6:,.0f} MB"
        )

    def _show(self, line: str) -> None:
        self._write(line + "\n")

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            pass  # a closed terminal must not end a study


class Live(Lines):
    """One line that is written over, for terminals."""

    every = 0.2

    def say(self, text: str) -> None:
        self._write(f"\r\x1b[Kjaxlsgd: {printable(text)}\n")

    def close(self) -> None:
        super().close()
        self._write("\n")

    def _show(self, line: str) -> None:
        self._write(f"\r\x1b[K{line}")


def for_stream(stream: TextIO, quiet: bool = False) -> Silent:
    """The progress that suits a stream."""
    if quiet:
        return Silent()
    return Live(stream) if stream.isatty() else Lines(stream)


def duration(seconds: float) -> str:
    """Hours, minutes and seconds: '1:02:03'."""
    if not 0 <= seconds < 1e9:
        return "?"
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def peak_memory() -> int:
    """The most memory that the process has used so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Journal:
    """Appends lines to `run.log`. A log that cannot be written must not end a study.

    Args:
      directory: of the results, held by the writer.
    """

    def __init__(self, directory: Path) -> None:
        self.problem = ""  # why there is no log
        self._lock, self._handle = threading.Lock(), -1
        path, flags = directory / lock.LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND
        try:
            self._handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
            lock.refuse_shared(path, self._handle)
            if not os.fstat(self._handle).st_size:
                os.write(self._handle, lock.LOG_HEAD.encode())
        except (OSError, StoreError) as error:
            self.problem = f"no log is kept: {getattr(error, 'strerror', None) or error}"
            self.close()

    def note(self, text: str) -> None:
        """Adds a line; further lines of the text are indented."""
        line = printable(text).replace("\n", "\n    ")
        content = f"{provenance.now()} {line}\n".encode(errors="backslashreplace")
        with self._lock, contextlib.suppress(OSError):
            if self._handle >= 0:
                os.write(self._handle, content)

    def close(self) -> None:
        """Ends."""
        with self._lock, contextlib.suppress(OSError):
            if self._handle >= 0:
                os.close(self._handle)
            self._handle = -1


class Noted(Silent):
    """Progress that is also noted in a journal, once there is one."""

    def __init__(self, inner: Silent) -> None:
        self._inner = inner
        self._journal: Journal | None = None
        self._early: list[str] = []

    def attach(self, journal: Journal) -> None:
        """Notes everything from now on, and what was said before."""
        self._journal = journal
        if journal.problem:
            self._inner.say(journal.problem)
        for text in self._early:
            journal.note(text)

    def note(self, text: str) -> None:
        """Notes something that is not shown."""
        if self._journal is None:
            self._early.append(text)
        else:
            self._journal.note(text)

    def start(self, totals: Totals) -> None:
        self._inner.start(totals)

    def advance(self, replications: float, work: float) -> None:
        self._inner.advance(replications, work)

    def begin(self) -> None:
        self._inner.begin()

    def cell_done(self) -> None:
        self._inner.cell_done()

    def tick(self) -> None:
        self._inner.tick()

    def say(self, text: str) -> None:
        self.note(text)
        self._inner.say(text)

    def close(self) -> None:
        self._inner.close()


def started(environment: dict[str, Any]) -> str:
    """The line that a run begins with: who, and with what."""
    what = ", ".join(f"{key} {value}" for key, value in environment.items() if value)
    return f"start: process {os.getpid()} on {os.uname().nodename}; {what}"
