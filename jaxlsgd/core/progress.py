"""Progress of a long computation: one display for simulations, fits, studies and tables.

In a terminal it is a bar if rich is installed and a line that is written over if not; in a notebook a bar; elsewhere, if
it is asked for, a plain line every few seconds. Start at `shown`; `TimeLeft` has the forecast.
"""

from __future__ import annotations

import contextlib
import html
import importlib
import importlib.util
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from jaxlsgd.core.checks import refusal

Report = Callable[[float], None]  # is called with the share that is done, from 0 to 1
Progress = bool | Report | None
MEASURING = "measuring the time"  # in place of a forecast that has no basis yet


class TimeLeft:
    """Estimate of the time that a computation still takes.

    Seconds without progress before the first work of a kind of programs count as compiling, and are expected
    again for each kind to come. The rate of work is the median over the later half of time and work so far, as
    programs that are compiled in mid-run make single parts of the work slow.

    Args:
      work: to be done, in any unit.
      kinds: of programs that are to be compiled for it.
      now: the time at which it begins.
    """

    BASIS = 3.0  # seconds of work before there is an estimate

    def __init__(self, work: float, kinds: int, now: float) -> None:
        self._work, self._kinds, self._last = work, kinds, now
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
        left = self._work - self._marks[-1][1]
        if left <= self._work * 1e-9:
            return 0.0
        each = self.seconds_per_work(now)
        to_come = max(0, self._kinds - len(self._waits))
        return None if each is None else to_come * max(self._waits, default=0.0) + left * each

    def seconds_per_work(self, now: float) -> float | None:
        """Return how long work takes now, without compiling; None while there is no basis for it."""
        seconds, done = self._marks[-1]
        # The first work includes compiling, so it is no basis for the rate.
        if seconds <= 0 or (passed := seconds + now - self._last) < self.BASIS:
            return None
        # Of work that came in no time nobody knows how long it took.
        start = max(mark for mark in self._marks if mark[0] <= 0)[1]
        half = max(
            mark
            for mark in self._marks
            if mark[0] <= seconds / 2 and start <= mark[1] <= (start + done) / 2
        )
        if done <= half[1]:
            return None
        later = [mark for mark in self._marks if mark >= half]
        parts = [(y[0] - x[0], y[1] - x[1]) for x, y in itertools.pairwise(later)]
        rates = sorted((time / work, work) for time, work in parts if work > 0)
        counted = itertools.accumulate(work for _, work in rates)
        middle = (done - half[1]) / 2
        usual = next(rate for (rate, _), sum in zip(rates, counted, strict=True) if sum >= middle)
        return usual + (passed - seconds) / (done - half[1])

    def text(self, now: float) -> str:
        """Return the estimate in words."""
        seconds = self.seconds(now)
        return MEASURING if seconds is None else f"{duration(seconds)} left"


def duration(seconds: float) -> str:
    """Return hours, minutes and seconds as text: '1:02:03'."""
    if not 0 <= seconds < 1e9:
        return "?"
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


class Lines:
    """A display of plain lines, for logs and pipes."""

    every = 5.0  # seconds between two

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def show(self, share: float, text: str) -> None:
        """Show how far the computation is."""
        self.write(f"{text}\n")

    def note(self, text: str) -> None:
        """Show a message that stays."""
        self.write(f"{text}\n")

    def close(self) -> None:
        """Remove what does not stay."""

    def write(self, text: str) -> None:
        """Write to the stream; a closed terminal must not end a run."""
        with contextlib.suppress(OSError, ValueError):
            self.stream.write(text)
            self.stream.flush()


class LiveLine(Lines):
    """A display of one line that is written over, for terminals."""

    every = 0.2

    def show(self, share: float, text: str) -> None:
        self.write(f"\r\x1b[K{text}")

    def note(self, text: str) -> None:
        self.write(f"\r\x1b[K{text}\n")

    def close(self) -> None:
        self.write("\r\x1b[K")


class RichBar(Lines):
    """A display of a bar by rich, for terminals."""

    every = 0.2

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._bar: Any = None

    def show(self, share: float, text: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        with contextlib.suppress(OSError, ValueError):
            if self._bar is None:
                columns = BarColumn(bar_width=16), TextColumn("{task.description}", markup=False)
                self._bar = Bar(*columns, console=Console(file=self.stream), transient=True)
                self._bar.add_task(text, total=1.0, completed=share)
                self._bar.start()
            self._bar.update(0, completed=share, description=text)

    def note(self, text: str) -> None:
        if self._bar is None:
            return super().note(text)
        with contextlib.suppress(OSError, ValueError):
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            if self._bar is not None:
                self._bar.stop()
        self._bar = None


class NotebookBar(Lines):
    """A display of a bar in a notebook, which is gone at the end."""

    every = 0.5

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._handle: Any = None

    def show(self, share: float, text: str) -> None:
        self._put(f'<progress max="1" value="{share:.4f}"></progress> {html.escape(text)}')

    def close(self) -> None:
        if self._handle is not None:
            self._put("")

    def _put(self, content: str) -> None:
        ipython = importlib.import_module("IPython.display")  # it is there in a notebook
        if self._handle is None:
            self._handle = ipython.display(ipython.HTML(content), display_id=True)
        else:
            self._handle.update(ipython.HTML(content))


def display_for(stream: TextIO) -> Lines:
    """Return the display that suits a stream; in a notebook, a bar."""
    if in_notebook():
        return NotebookBar(stream)
    if not stream.isatty():
        return Lines(stream)
    return LiveLine(stream) if importlib.util.find_spec("rich") is None else RichBar(stream)


def in_notebook() -> bool:
    """Return whether this runs in a Jupyter kernel, without importing IPython."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


def check(progress: object) -> None:
    """Refuse what is not a `Progress`."""
    if progress is not None and not isinstance(progress, bool) and not callable(progress):
        raise refusal(
            "progress", "be None, True, False or a function of the share", progress, code="type"
        )


def display_if_wanted(progress: Progress, stream: TextIO | None) -> Lines | None:
    """Return the display on a stream, stderr if None; None if a `progress` that is no function wants none."""
    out = stream or sys.stderr
    if out is None or progress is False:  # None under pythonw
        return None
    return display_for(out) if progress is True or out.isatty() or in_notebook() else None


@contextlib.contextmanager
def shown(
    progress: Progress, what: str, stream: TextIO | None = None, after: float = 0.0
) -> Iterator[Report | None]:
    """Yield a function to call with the share that is done, or None if progress is not shown.

    Args:
      progress: None shows progress in a terminal or notebook and nowhere else; True shows it everywhere, as
        plain lines outside of both; False shows nothing; a function is called with the share, from 0 to 1.
      what: name of the computation.
      stream: where to write, stderr if None.
      after: seconds before anything is written, so that short computations write nothing.
    """
    check(progress)
    if callable(progress):
        yield progress
    elif (display := display_if_wanted(progress, stream)) is None:
        yield None
    else:
        try:
            yield _reporter(display, what, time.monotonic() + after)
        finally:
            display.close()


def _reporter(display: Lines, what: str, begin: float) -> Report:
    """Return a function that shows shares from some time on."""
    left: TimeLeft | None = None
    done, due = 0.0, begin

    def report(share: float) -> None:
        nonlocal left, done, due
        now = time.monotonic()
        if left is None:  # before it, programs were compiled
            left = TimeLeft(1.0, 1, now)
            left.begin(now)
        left.advance(max(0.0, share - done), now)
        done = max(done, share)
        # What is over before it was ever due is not shown at all.
        if now >= due if share < 1 else due > begin or now >= begin:
            due = now + display.every
            display.show(share, f"{what}: {share:.0%}, {left.text(now)}")

    return report
