"""The protocol of executors: jobs in, events out, in the thread of the caller."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any, NamedTuple, Protocol

from jaxlsgd.inference.laws.tables import Rows
from jaxlsgd.study.jobs import Job, Tabulated, Tile, TileAdvanced, TileFinished
from jaxlsgd.study.progress import Stop


class TileFailed(NamedTuple):
    """The reason why a tile has no rows."""

    tile: Tile
    error: Exception


# None comes while nothing happens, so that the caller can check the clock.
Event = TileAdvanced | Tabulated | TileFinished | TileFailed | None
Events = Generator[Event, None, None]


class Executor(Protocol):
    """A place where jobs run: devices of this process, or a Dask cluster."""

    environment: dict[str, Any]  # everything that may change the last digits of rows
    size: int  # jobs at once

    def remember(self, rows: Rows) -> None:
        """Pass tables of earlier runs to the processes that compute."""
        ...

    def run(self, jobs: Iterable[Job], stop: Stop) -> Events:
        """Run jobs, taking each only when there is room for it, and yield what happens.

        A job that fails is tried again tile by tile, so that one bad tile fails alone. While `stop` is
        draining, no further job is started. If the caller leaves early, jobs in flight are dropped.
        """
        ...
