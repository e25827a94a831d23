"""Progress of one long computation: a bar or a live line in a terminal or notebook, else plain lines on request."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from jaxlsgd.core.checks import refusal

Report = Callable[[float], None]  # is called with the share that is done, from 0 to 1
Progress = bool | Report | None
_EVERY = {True: 0.2, False: 5.0}  # seconds between two lines, live and plain


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
    if progress is not None and not isinstance(progress, bool) and not callable(progress):
        raise refusal("progress", "be None, True, False or a function of the share", progress)
    out = stream or sys.stderr  # None under pythonw
    terminal = out is not None and out.isatty()
    live = terminal or _in_notebook()
    if callable(progress):
        yield progress
    elif out is None or progress is False or (progress is None and not live):
        yield None
    else:
        rich = terminal and importlib.util.find_spec("rich") is not None
        began = time.monotonic() if after > 0 else None
        display = _bar(what, out) if rich else _lines(what, out, live, began)
        with display if began is None else _later(display, began + after) as report:
            yield report


@contextlib.contextmanager
def _later(display: contextlib.AbstractContextManager[Report], when: float) -> Iterator[Report]:
    """Open a display at the first report after some time."""
    opened: list[Report] = []
    with contextlib.ExitStack() as stack:

        def report(share: float) -> None:
            if not opened and share < 1 and time.monotonic() >= when:
                opened.append(stack.enter_context(display))
            for each in opened:
                each(share)

        yield report


def _in_notebook() -> bool:
    """Return whether this runs in a Jupyter kernel, without importing IPython."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


@contextlib.contextmanager
def _bar(what: str, stream: TextIO) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(file=stream), transient=True) as bar:
        task = bar.add_task(what, total=1.0)
        yield lambda share: bar.update(task, completed=share)


@contextlib.contextmanager
def _lines(what: str, stream: TextIO, live: bool, since: float | None = None) -> Iterator[Report]:
    began = last = time.monotonic() if since is None else since

    def report(share: float) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < _EVERY[live] and share < 1:
            return
        last = now
        left = (now - began) * (1 - share) / share if share > 0 else 0.0
        text = f"{what}: {share:.0%}, {left:.0f} s left"
        with contextlib.suppress(OSError, ValueError):  # a closed terminal must not end a run
            stream.write(f"\r\x1b[K{text}" if live else f"{text}\n")
            stream.flush()

    try:
        yield report
    finally:
        if live:
            with contextlib.suppress(OSError, ValueError):
                stream.write("\r\x1b[K")
                stream.flush()
