"""How a run is asked to end, by a signal, another thread or a time limit."""

from __future__ import annotations

import time
from typing import Any


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
