"""Tiles put together into jobs: the same replications of several cells, whose draws are made once."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxlsgd.engine import cost
from jaxlsgd.study.grid import CellSpec
from jaxlsgd.study.parts import Part

# A job is lost as a whole if its process is killed, and finished as a whole if the run is asked to
# stop, so it must not be long: this is about half a minute on one core.
MOST_WORK = 2_000_000_000  # client-steps
MOST_CELLS = 32
MOST_BYTES = 1_000_000_000  # of the states that are in memory side by side


class Tile(NamedTuple):
    """A fixed range of replications of one cell: the unit of commits and of resuming."""

    cell: CellSpec
    first: int


Job = tuple[Tile, ...]  # the unit of work: one range of cells that see the same draws


def grouped(tiles: Iterable[Tile], workers: int) -> list[Job]:
    """Tiles as jobs, those that share programs next to one another.

    Args:
      tiles: what is to be done.
      workers: how many jobs run at once; the last jobs are split so that every worker gets one.
    """
    kinds: dict[Any, dict[Any, list[Tile]]] = {}
    for tile in tiles:
        ranges = kinds.setdefault(program_kind(tile.cell), {})
        ranges.setdefault((draws_of(tile.cell), tile.first), []).append(tile)
    groups = [group for ranges in kinds.values() for group in _in_order(ranges)]
    return _even_at_the_end([job for group in groups for job in _bounded(group)], workers)


def draws_of(cell: CellSpec) -> tuple[Any, ...]:
    """What cells have in common that can run together; schedule, horizon and step size are free."""
    parts = cell.problem.content, cell.algorithm.content, cell.methods
    return (*parts, cell.levels, cell.seed, cell.dtype, cell.tile_size)


def program_kind(cell: CellSpec) -> tuple[Any, ...]:
    """What decides the compiled programs of a cell: not its schedule, horizon or step size."""
    return (_program_kind(cell.problem, cell.algorithm, cell.methods), cell.dtype, cell.tile_size)


@functools.lru_cache(maxsize=4096)
def _program_kind(problem: Part, algorithm: Part, methods: tuple[Part, ...]) -> tuple[Any, ...]:
    made = problem.built().made
    parts = dict.fromkeys(p for method in methods for p in method.built().made.accumulators)
    sizes = [(np.shape(leaf), str(leaf.dtype)) for leaf in jax.tree.leaves(made.clients)]
    return made.structure(), made.num_clients, tuple(sizes), tuple(parts), algorithm.built().made


def work(cell: CellSpec) -> int:
    """Client-steps of one tile."""
    return cell.num_steps * cell.problem.fact("num_clients") * cell.tile_size


def draw_bytes(cell: CellSpec) -> int:
    """Memory of the draws, which cells that run together share."""
    return cell.tile_size * cost.draws_bytes(cell.problem.built().made, cell.dtype, ahead=True)


def state_bytes(cell: CellSpec) -> int:
    """Memory of one tile besides the draws: the clients and the statistics."""
    return cell.tile_size * _own_bytes(cell.problem, cell.algorithm, cell.methods, cell.dtype)


@functools.lru_cache(maxsize=4096)
def _own_bytes(problem: Part, algorithm: Part, methods: tuple[Part, ...], dtype: str) -> int:
    made = tuple(method.built().made for method in methods)
    return cost.own_bytes(problem.built().made, made, dtype, algorithm=algorithm.built().made)


def job_bytes(job: Job) -> int:
    """Memory of a job on its device: draws, and each tile's clients and statistics."""
    return draw_bytes(job[0].cell) + sum(state_bytes(tile.cell) for tile in job)


def _in_order(ranges: dict[Any, list[Tile]]) -> list[list[Tile]]:
    """Problem by problem, and of each the replications from the first on."""
    place = {draws: i for i, (draws, _) in reversed(list(enumerate(ranges)))}
    return [ranges[key] for key in sorted(ranges, key=lambda key: (place[key[0]], key[1]))]


def _bounded(tiles: list[Tile]) -> list[Job]:
    total = sum(work(tile.cell) for tile in tiles)
    parts = max(-(-len(tiles) // _most(tiles)), -(-total // MOST_WORK))
    return _split(tiles, parts)


def _most(tiles: Sequence[Tile]) -> int:
    """How many of these tiles, which all need the same memory, may be in one job."""
    return max(1, min(MOST_CELLS, MOST_BYTES // state_bytes(tiles[0].cell)))


def _split(tiles: Sequence[Tile], parts: int) -> list[Job]:
    """At most so many parts of about equal steps: the longest first, each to the least so far."""
    bins: list[list[Tile]] = [[] for _ in range(min(parts, len(tiles)))]
    steps, most = [0] * len(bins), _most(tiles)
    for tile in sorted(tiles, key=lambda tile: -tile.cell.num_steps):
        least = min((i for i in range(len(bins)) if len(bins[i]) < most), key=steps.__getitem__)
        bins[least].append(tile)
        steps[least] += tile.cell.num_steps
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
