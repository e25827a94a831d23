"""Tiles put together into jobs: the same replications of several cells, whose draws are made once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jaxlsgd.core.rows import MethodRows
from jaxlsgd.study import costs
from jaxlsgd.study.grid import Cell

# A job is lost whole when its process is killed, and finished whole when it is asked to end, so it
# must not be long: this is about half a minute of a core.
MOST_WORK = 2_000_000_000  # client-steps
MOST_CELLS = 32
MOST_BYTES = 1_000_000_000  # of the states that are in memory side by side


class Tile(NamedTuple):
    """A fixed range of replications of one cell: the unit of commits and of resuming."""

    cell: Cell
    first: int


Job = tuple[Tile, ...]  # the unit of work: one range of cells that see the same draws


class Finished(NamedTuple):
    """A tile's rows, or why there are none."""

    tile: Tile
    rows: dict[str, MethodRows] | None
    error: Exception | None


def grouped(tiles: Iterable[Tile], workers: int) -> list[Job]:
    """Tiles as jobs, those that share programs behind one another.

    Args:
      tiles: what is to be done.
      workers: how many jobs run at once. The last jobs are split so that each worker has one.
    """
    kinds: dict[Any, dict[Any, list[Tile]]] = {}
    for tile in tiles:
        ranges = kinds.setdefault(costs.program_kind(tile.cell), {})
        ranges.setdefault((draws_of(tile.cell), tile.first), []).append(tile)
    groups = [group for ranges in kinds.values() for group in _in_order(ranges)]
    return _even_at_the_end([job for group in groups for job in _bounded(group)], workers)


def draws_of(cell: Cell) -> tuple[Any, ...]:
    """What cells have in common that can run together; schedule, horizon and step size are free."""
    problem = cell.problem.kind, cell.problem.arguments
    return (*problem, cell.methods, cell.levels, cell.seed, cell.dtype, cell.tile_size)


def _in_order(ranges: dict[Any, list[Tile]]) -> list[list[Tile]]:
    """Problem by problem, and of each the replications from the first on."""
    place = {draws: i for i, (draws, _) in reversed(list(enumerate(ranges)))}
    return [ranges[key] for key in sorted(ranges, key=lambda key: (place[key[0]], key[1]))]


def _bounded(tiles: list[Tile]) -> list[Job]:
    work = sum(costs.work(tile.cell) for tile in tiles)
    parts = max(-(-len(tiles) // _most(tiles)), -(-work // MOST_WORK))
    return _split(tiles, parts)


def _most(tiles: Sequence[Tile]) -> int:
    """How many of these tiles, which are alike in their memory, may be in one job."""
    return max(1, min(MOST_CELLS, MOST_BYTES // costs.state_bytes(tiles[0].cell)))


def _split(tiles: Sequence[Tile], parts: int) -> list[Job]:
    """At most so many parts of about equal steps: the longest first, each to the least so far."""
    bins: list[list[Tile]] = [[] for _ in range(min(parts, len(tiles)))]
    steps, most = [0] * len(bins), _most(tiles)
    for tile in sorted(tiles, key=lambda tile: -costs.steps(tile.cell)):
        least = min((i for i in range(len(bins)) if len(bins[i]) < most), key=steps.__getitem__)
        bins[least].append(tile)
        steps[least] += costs.steps(tile.cell)
    return [tuple(job) for job in bins]


def _even_at_the_end(jobs: list[Job], workers: int) -> list[Job]:
    over = len(jobs) % workers
    if not over:
        return jobs
    even = jobs[: len(jobs) - over]
    for i, job in enumerate(jobs[len(even) :]):
        share = workers // over + (i < workers % over)
        even += _split(job, share)
    return even
