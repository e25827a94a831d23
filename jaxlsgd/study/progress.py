"""Progress of a run: how it is shown, how it is logged, and how it is stopped.

`Stop` ends a run, `progress_of` returns what shows it, `RunLog` keeps what happened in `run.log`.
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
from jaxlsgd.core.progress import Lines, Progress, Report, TimeLeft, check, display_if_wanted
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


class SilentProgress:
    """Progress that shows nothing; warnings go to Python's log. Subclasses show more."""

    def __init__(self) -> None:
        self.start(Totals(0, 0, 0, 0.0))

    def start(self, totals: Totals) -> None:
        """Begin."""
        self.time_left = TimeLeft(totals.work, totals.kinds, time.monotonic())

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


class ShownProgress(SilentProgress):
    """Progress on a display: a bar, a live line, or plain lines.

    Args:
      display: from `core.progress.display_for`.
    """

    def __init__(self, display: Lines) -> None:
        self._display = display
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
        if now - self._shown >= self._display.every:
            self._shown = now
            self._display.show(self._share, self.line(now))

    def warn(self, text: str) -> None:
        self._display.note(f"jaxlsgd: {printable(text)}")

    def close(self) -> None:
        self._display.close()
        self._display.note(self.line(time.monotonic()))

    @property
    def _share(self) -> float:
        return min(1.0, self._work / self._totals.work) if self._totals.work else 1.0

    def line(self, now: float) -> str:
        """Return the state of the run in one line."""
        rate = self._replications / max(now - self._began, 1e-9)
        return (
            f"cells {self._cells}/{self._totals.cells}, {self._share:.0%}, {rate:,.0f} replications/s, "
            f"{self.time_left.text(now)}, peak {peak_memory() / 1e6:,.0f} MB"
        )


class SharedProgress(SilentProgress):
    """Progress for a function that is called with the share that is done.

    Args:
      report: the function.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        super().__init__()

    def start(self, totals: Totals) -> None:
        super().start(totals)
        self._work, self._total = 0.0, totals.work

    def advance(self, replications: float, work: float) -> None:
        super().advance(replications, work)
        self._work += work
        self._report(min(1.0, self._work / self._total) if self._total else 1.0)


def progress_of(
    progress: Progress | SilentProgress, stream: TextIO | None = None
) -> SilentProgress:
    """Return how a run shows its progress.

    Args:
      progress: as for `simulate`: None shows it in a terminal or notebook, True everywhere, False nowhere; a
        function is called with the share that is done. Or a `SilentProgress` or a subclass of it.
      stream: where to write, stderr if None.
    """
    if isinstance(progress, SilentProgress):
        return progress
    check(progress)
    if callable(progress):
        return SharedProgress(progress)
    display = display_if_wanted(progress, stream)
    return SilentProgress() if display is None else ShownProgress(display)


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
