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


class Silent:
    """Shows nothing; warnings go to the log."""

    def start(self, totals: Totals) -> None:
        """Begins."""

    def advance(self, replications: float, work: float) -> None:
        """Notes work done."""

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

    def start(self, totals: Totals) -> None:
        self._totals, self._cells = totals, totals.cells_done
        self._began = self._shown = time.monotonic()

    def advance(self, replications: float, work: float) -> None:
        self._replications += replications
        self._work += work

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
        left = elapsed / share - elapsed if share > 0 else float("nan")
        return (
            f"cells {self._cells}/{self._totals.cells}, {min(share, 1):.0%}, "
            f"{self._replications / elapsed:,.0f} replications/s, "
            f"{duration(left)} left, peak {peak_memory() / 1e6:,.0f} MB"
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
