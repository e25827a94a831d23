"""Progress of one long computation: a bar or one live line where somebody looks on, plain lines on request."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from jaxlsgd.core.checks import refusal

Tell = Callable[[float], None]
Progress = bool | Tell | None
_EVERY = {True: 0.2, False: 5.0}  # seconds between two lines, live and plain


@contextlib.contextmanager
def shown(
    progress: Progress, what: str, stream: TextIO | None = None, after: float = 0.0
) -> Iterator[Tell | None]:
    """Something to call with the share that is done, or None where nobody wants to know.

    Args:
      progress: None shows it in a terminal or notebook and nowhere else; True shows it everywhere, as
        plain lines where neither is; False never does; a function is called with the share, from 0 to 1.
      what: what is going on.
      stream: where to write, stderr if None.
      after: seconds before anything is written, for what is often done sooner.
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
        with display if began is None else _later(display, began + after) as tell:
            yield tell


@contextlib.contextmanager
def _later(display: contextlib.AbstractContextManager[Tell], when: float) -> Iterator[Tell]:
    """A display that is opened by the first call from some time on, or never."""
    opened: list[Tell] = []
    with contextlib.ExitStack() as stack:

        def tell(share: float) -> None:
            if not opened and share < 1 and time.monotonic() >= when:
                opened.append(stack.enter_context(display))
            for each in opened:
                each(share)

        yield tell


def _in_notebook() -> bool:
    """Whether a kernel of Jupyter runs this; without one, IPython is not even imported."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


@contextlib.contextmanager
def _bar(what: str, stream: TextIO) -> Iterator[Tell]:
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(file=stream), transient=True) as bar:
        task = bar.add_task(what, total=1.0)
        yield lambda share: bar.update(task, completed=share)


@contextlib.contextmanager
def _lines(what: str, stream: TextIO, live: bool, since: float | None = None) -> Iterator[Tell]:
    began = last = time.monotonic() if since is None else since

    def tell(share: float) -> None:
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
        yield tell
    finally:
        if live:
            with contextlib.suppress(OSError, ValueError):
                stream.write("\r\x1b[K")
                stream.flush()
