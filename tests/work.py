"""How much work something is, whatever the machine is doing besides: lines of Python that it runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Lines:
    """A count of lines."""

    run = 0


@contextmanager
def counted() -> Iterator[Lines]:
    """Counts the lines of Python that this thread runs inside."""
    lines, before = Lines(), sys.gettrace()

    def trace(frame: Any, event: str, argument: Any) -> Any:
        lines.run += 1
        return trace

    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)
