"""Jobs: the same replications of several cells, whose draws are made once.

`planned` makes jobs of tiles, `run_job` runs one, and `check` refuses a study before any is made.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxlsgd import schedules
from jaxlsgd.core.checks import Dtype
from jaxlsgd.core.problem import Problem
from jaxlsgd.core.rows import CellRows, MethodRows
from jaxlsgd.engine import cost
from jaxlsgd.engine.lanes import widths_for
from jaxlsgd.inference.laws import tables
from jaxlsgd.runs.cell import Cell
from jaxlsgd.runs.simulate import Device, Finished, run_cells
from jaxlsgd.study.cells import CellSpec, draws_of
from jaxlsgd.study.errors import refusing
from jaxlsgd.study.parts import Part
from jaxlsgd.study.study import Study

# A job is lost if its process is killed, and finished before a run stops, so it must not be long. Cells
# that share their draws with fewer others cost more: on two busy cores, one run each, four times as many jobs
# took 29.8 CPU seconds for 27.1 with `one_step`, and twice as many 5.5 for 4.6 in lanes, which are faster.
MOST_WORK = 300_000_000  # client-steps
MOST_WORK_IN_LANES = 2_000_000_000
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
    """Yield the tiles that cells lack as jobs, with jobs that share programs next to each other.

    Args:
      cells: of the study.
      firsts: the first replication of each tile, in order. There may be millions, so jobs are made one
        by one.
      lacks: whether a tile is to be computed.
      workers: how many jobs run at once; the last jobs are split so that each worker has one.
    """
    ranges = (
        [Tile(cell, first) for cell in group if lacks(cell, first)]
        for group in _alike(cells)
        for first in firsts
    )
    return _even_at_the_end((job for tiles in ranges if tiles for job in _bounded(tiles)), workers)


def grouped(tiles: Iterable[Tile], workers: int) -> list[Job]:
    """Return given tiles as jobs; see `planned`."""
    there: dict[CellSpec, set[int]] = {}
    for tile in tiles:
        there.setdefault(tile.cell, set()).add(tile.first)
    firsts = sorted(set().union(*there.values()))
    return list(planned(there, firsts, lambda cell, first: first in there[cell], workers))


def _alike(cells: Iterable[CellSpec]) -> list[list[CellSpec]]:
    """Return groups of cells that can run together; groups that share programs are neighbours."""
    kinds: dict[Any, dict[Any, list[CellSpec]]] = {}
    for cell in cells:
        kinds.setdefault(program_kind(cell), {}).setdefault(draws_of(cell), []).append(cell)
    return [group for groups in kinds.values() for group in groups.values()]


def program_kind(cell: CellSpec) -> tuple[Any, ...]:
    """Return what decides the compiled programs of a cell; schedule, horizon and step size do not."""
    return (_program_kind(cell.problem, cell.algorithm, cell.methods), cell.dtype, cell.tile_size)


@functools.lru_cache(maxsize=4096)
def _program_kind(problem: Part, algorithm: Part, methods: tuple[Part, ...]) -> tuple[Any, ...]:
    made = problem.built().made
    parts = dict.fromkeys(p for method in methods for p in method.built().made.accumulators)
    sizes = [(np.shape(leaf), str(leaf.dtype)) for leaf in jax.tree.leaves(made.clients)]
    return made.structure(), made.num_clients, tuple(sizes), tuple(parts), algorithm.built().made


def work(cell: CellSpec) -> int:
    """Return the client-steps of one tile."""
    return cell.num_steps * stepping(cell.problem, cell.algorithm) * cell.tile_size


@functools.lru_cache(maxsize=4096)
def stepping(problem: Part, algorithm: Part) -> int:
    """Return how many clients step in a round."""
    return algorithm.built().made.stepping(problem.fact("num_clients"))


def _draw_bytes(cell: CellSpec) -> int:
    """Return the memory of the draws, which the cells of a job share."""
    made, own = cell.problem.built().made, cell.algorithm.built().made
    return cell.tile_size * cost.draws_bytes(made, cell.dtype, algorithm=own, ahead=True)


def state_bytes(cell: CellSpec) -> int:
    """Return the memory of the clients and statistics of one tile."""
    return cell.tile_size * _own_bytes(cell.problem, cell.algorithm, cell.methods, cell.dtype)


@functools.lru_cache(maxsize=4096)
def _own_bytes(problem: Part, algorithm: Part, methods: tuple[Part, ...], dtype: Dtype) -> int:
    made = tuple(method.built().made for method in methods)
    return cost.own_bytes(problem.built().made, made, dtype, algorithm=algorithm.built().made)


def job_bytes(job: Job, platform: str = "cpu") -> int:
    """Return the memory of a job on its device: the draws, and a state per tile, or per lane if there are lanes."""
    cell = job[0].cell
    widths = _widths(cell, platform)
    lanes = sum(widths_for(len(job), widths)) if widths else len(job)
    return _draw_bytes(cell) + lanes * state_bytes(cell)


def _widths(cell: CellSpec, platform: str = "cpu") -> tuple[int, ...]:
    """Return how many tiles like that of a cell may run as lanes of one program; () if they do not."""
    parts = cell.problem, cell.algorithm, cell.methods
    return _lane_widths(*parts, cell.tile_size, cell.dtype, platform)


@functools.lru_cache(maxsize=4096)
def _lane_widths(
    problem: Part,
    algorithm: Part,
    methods: tuple[Part, ...],
    size: int,
    dtype: Dtype,
    platform: str,
) -> tuple[int, ...]:
    made, own = tuple(method.built().made for method in methods), algorithm.built().made
    return cost.lane_widths(problem.built().made, made, size, dtype, platform, own)


def _bounded(tiles: list[Tile]) -> list[Job]:
    total = sum(work(tile.cell) for tile in tiles)
    most = MOST_WORK_IN_LANES if _widths(tiles[0].cell) else MOST_WORK
    parts = max(-(-len(tiles) // _most(tiles)), -(-total // most))
    return _split(tiles, parts)


def _most(tiles: Sequence[Tile]) -> int:
    """Return how many of these tiles, which need the same memory each, fit in one job."""
    return max(1, min(MOST_CELLS, MOST_BYTES // state_bytes(tiles[0].cell)))


def _split(tiles: Sequence[Tile], parts: int) -> list[Job]:
    """Split tiles into at most so many parts of about equal steps, by longest-first bin packing."""
    bins: list[list[Tile]] = [[] for _ in range(min(parts, len(tiles)))]
    steps, most = [0] * len(bins), _most(tiles)
    for tile in sorted(tiles, key=lambda tile: -tile.cell.num_steps):
        least = min((i for i in range(len(bins)) if len(bins[i]) < most), key=steps.__getitem__)
        bins[least].append(tile)
        steps[least] += tile.cell.num_steps
    return [tuple(job) for job in bins]


def _even_at_the_end(jobs: Iterator[Job], workers: int) -> Iterator[Job]:
    """Yield jobs, the last of which are split so that all workers are busy."""
    while batch := list(itertools.islice(jobs, workers)):
        over = len(batch) % workers
        for i, job in enumerate(batch):
            share = workers // over + (i < workers % over) if over else 1
            yield from _split(job, share) if over else (job,)


# Two threads that built the same cells at once would do it twice.
_building = threading.RLock()


class TileAdvanced(NamedTuple):
    """Further steps that a tile has made."""

    tile: Tile
    steps: int


class TileFinished(NamedTuple):
    """All rows of a tile."""

    tile: Tile
    rows: dict[str, MethodRows]


class Tabulated(NamedTuple):
    """Table rows that laws have looked up or computed for a job; see `inference.laws.tables`."""

    rows: tables.Rows


def run_job(
    job: Job, device: Device | None = None
) -> Iterator[TileAdvanced | Tabulated | TileFinished]:
    """Run the same replications of cells that see the same draws, and yield what happens.

    Args:
      job: tiles of cells that differ in schedule, horizon and step size only.
      device: where to run; a tile is always run at full width.
    """
    spec = job[0].cell
    with _building:
        cells = _runnable_together(tuple(tile.cell for tile in job))
    key = jax.random.key(spec.seed)
    events, used = run_cells(key, cells, job[0].first, spec.tile_size, device), tables.Rows()
    while True:
        with tables.recording(used):
            event = next(events, None)
        if event is None:
            return
        if isinstance(event, Finished):
            if used:
                yield Tabulated(used)
                used = tables.Rows()
            yield TileFinished(job[event.cell], event.rows)
        else:
            yield TileAdvanced(job[event.cell], event.steps)


def runnable(
    spec: CellSpec, save_at: tuple[int, ...] | None = None, problem: Problem | None = None
) -> Cell:
    """Return a cell as `runs` takes it.

    Args:
      spec: the cell.
      save_at: rounds to save instead of its own.
      problem: an equal problem to use instead of its own.
    """
    plan = spec.plan()
    return Cell(
        problem or spec.problem.built().made,
        plan,
        tuple(method.built().made for method in spec.methods),
        spec.levels,
        save_at or spec.saved_rounds(plan),
        spec.dtype,
        spec.algorithm.built().made,
    )


@functools.lru_cache(maxsize=4)
def _runnable_together(specs: tuple[CellSpec, ...]) -> tuple[Cell, ...]:
    # Problems that differ only in their name and step size must be one object to share programs.
    shared = specs[0].problem.built().made
    return tuple(runnable(spec, problem=shared) for spec in specs)


def about(spec: CellSpec) -> CellRows:
    """Return what a reader needs of a cell besides its rows."""
    return runnable(spec).with_rows({})


def without_truth(study: Study) -> str:
    """Return a warning with the problems that declare no truth, or "" if there is none."""
    names = [part.name for part in study.problems if part.made and part.made.truth is None]
    if not names:
        return ""
    return (
        f"coverage will be unknown: no truth is declared by {', '.join(names)}; give Problem(truth=...), "
        "or return jaxlsgd.problems.solve(problem).problem, which estimates it"
    )


def check(study: Study) -> None:
    """Refuse, before anything is written, parts that do not go together.

    Every method and algorithm is tried on every problem it is combined with, and every schedule is written
    out to every horizon it is combined with.
    """
    brief = schedules.constant(1).plan(schedules.power_decay(0.5), num_steps=1)
    tried = dict.fromkeys((spec.problem, spec.algorithm, spec.methods) for spec in study.cells)
    for problem, algorithm, methods in tried:
        made = tuple(method.built().made for method in methods)
        own = any(part.identity for part in (problem, algorithm, *methods))
        with refusing(f"problem {problem.name}", own=own):
            run_by = {"algorithm": algorithm.built().made, "dtype": study.dtype}
            Cell(problem.built().made, brief, made, **run_by)
            if study.until is not None:
                chosen = study.until.chosen(made, study.levels)
                study.until.places(chosen.coordinates(problem.built().made))
    paths = {(spec.schedule, spec.extent, spec.methods): spec for spec in study.cells}
    for spec in paths.values():
        own = any(method.identity for method in spec.methods)
        with refusing(f"schedule {spec.schedule} to {spec.extent}", own=own):
            plan = spec.plan()
            spec.saved_rounds(plan)
            for method in spec.methods:
                method.built().made.check_plan(plan, spec.levels)
