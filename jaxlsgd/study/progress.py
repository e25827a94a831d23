"""Progress of a study: cells, replications per second, time left, peak memory."""

from __future__ import annotations

import logging
import resource
import sys
import time
from typing import NamedTuple, TextIO

from jaxlsgd.core.text import printable

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
