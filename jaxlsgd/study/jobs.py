"""Tiles put together into jobs: the same replications of several cells, whose draws are made once."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxlsgd.engine import cost
from jaxlsgd.engine.lanes import widths_for
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


def planned(
    cells: Iterable[CellSpec],
    firsts: Iterable[int],
    lacks: Callable[[CellSpec, int], bool],
    workers: int,
) -> Iterator[Job]:
    """The tiles that cells lack as jobs, those that share programs behind one another.

    Args:
      cells: of the study.
      firsts: the first replication of each tile, in order. There may be millions: jobs are made as they
        are taken.
      lacks: whether a tile is to be computed.
      workers: how many jobs run at once. The last jobs are split so that each worker has one.
    """
    ranges = (
        [Tile(cell, first) for cell in group if lacks(cell, first)]
        for group in _alike(cells)
        for first in firsts
    )
    return _even_at_the_end((job for tiles in ranges if tiles for job in _bounded(tiles)), workers)


def grouped(tiles: Iterable[Tile], workers: int) -> list[Job]:
    """Given tiles as jobs; see `planned`."""
    there: dict[CellSpec, set[int]] = {}
    for tile in tiles:
        there.setdefault(tile.cell, set()).add(tile.first)
    firsts = sorted(set().union(*there.values()))
    return list(planned(there, firsts, lambda cell, first: first in there[cell], workers))


def _alike(cells: Iterable[CellSpec]) -> list[list[CellSpec]]:
    """Cells that can run together, those that share programs behind one another."""
    kinds: dict[Any, dict[Any, list[CellSpec]]] = {}
    for cell in cells:
        kinds.setdefault(program_kind(cell), {}).setdefault(draws_of(cell), []).append(cell)
    return [group for groups in kinds.values() for group in groups.values()]


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
    return cell.num_steps * stepping(cell.problem, cell.algorithm) * cell.tile_size


@functools.lru_cache(maxsize=4096)
def stepping(problem: Part, algorithm: Part) -> int:
    """How many clients step in a round."""
    return algorithm.built().made.stepping(problem.fact("num_clients"))


def draw_bytes(cell: CellSpec) -> int:
    """Memory of the draws, which cells that run together share."""
    made, own = cell.problem.built().made, cell.algorithm.built().made
    return cell.tile_size * cost.draws_bytes(made, cell.dtype, algorithm=own, ahead=True)


def state_bytes(cell: CellSpec) -> int:
    """Memory of one tile besides the draws: the clients and the statistics."""
    return cell.tile_size * _own_bytes(cell.problem, cell.algorithm, cell.methods, cell.dtype)


@functools.lru_cache(maxsize=4096)
def _own_bytes(problem: Part, algorithm: Part, methods: tuple[Part, ...], dtype: str) -> int:
    made = tuple(method.built().made for method in methods)
    return cost.own_bytes(problem.built().made, made, dtype, algorithm=algorithm.built().made)


def job_bytes(job: Job, platform: str = "cpu") -> int:
    """Memory of a job on its device: draws, and each tile's clients and statistics, as lanes if they are."""
    cell = job[0].cell
    parts = cell.problem, cell.algorithm, cell.methods
    widths = _lane_widths(*parts, cell.tile_size, cell.dtype, platform)
    lanes = sum(widths_for(len(job), widths)) if widths else len(job)
    return draw_bytes(cell) + lanes * state_bytes(cell)


@functools.lru_cache(maxsize=4096)
def _lane_widths(
    problem: Part, algorithm: Part, methods: tuple[Part, ...], size: int, dtype: str, platform: str
) -> tuple[int, ...]:
    made, own = tuple(method.built().made for method in methods), algorithm.built().made
    return cost.lane_widths(problem.built().made, made, size, dtype, platform, own)


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


def _even_at_the_end(jobs: Iterator[Job], workers: int) -> Iterator[Job]:
    while batch := list(itertools.islice(jobs, workers)):
        over = len(batch) % workers
        for i, job in enumerate(batch):
            share = workers // over + (i < workers % over) if over else 1
            yield from _split(job, share) if over else (job,)
