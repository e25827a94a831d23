"""What all executors have in common: jobs in, events out, in the one thread of the caller."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any, NamedTuple, Protocol

from jaxlsgd.inference.laws.tables import Rows
from jaxlsgd.study.jobs import Job, Tabulated, Tile, TileAdvanced, TileFinished
from jaxlsgd.study.progress import Stop


class TileFailed(NamedTuple):
    """Why there are no rows of a tile."""

    tile: Tile
    error: Exception


# None comes now and then while nothing happens, so that the caller can check the clock.
Event = TileAdvanced | Tabulated | TileFinished | TileFailed | None
Events = Generator[Event, None, None]


class Executor(Protocol):
    """A place where jobs run: devices of this process, a Dask cluster, or joined processes."""

    environment: dict[str, Any]  # what may move the digits of rows there
    size: int  # jobs at once

    def learn(self, rows: Rows) -> None:
        """Hands tables of earlier runs to whoever computes."""
        ...

    def run(self, jobs: Iterable[Job], stop: Stop) -> Events:
        """Runs jobs, which are taken only as there is room for them, and yields how it goes.

        A job that fails is tried again tile by tile, so that one bad tile fails alone. When `stop` asks
        for it, no further job is started. If the caller leaves early, jobs in flight are dropped.
        """
        ...
