"""From a study's cells to what the engine runs. A tile is a pure function of its cell and its range."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from jaxlsgd import schedules
from jaxlsgd.core import tables
from jaxlsgd.core.blame import blaming
from jaxlsgd.core.problem import Problem
from jaxlsgd.core.rows import CellRows, MethodRows
from jaxlsgd.runs.cell import Cell
from jaxlsgd.runs.simulation import Finished, run_cells
from jaxlsgd.study.errors import refusing
from jaxlsgd.study.grid import CellSpec
from jaxlsgd.study.jobs import Job, Tile
from jaxlsgd.study.spec import Study

# Two threads that built the same cells at once would do it twice.
_building = threading.RLock()


class Worked(NamedTuple):
    """A tile has made so many more steps."""

    tile: Tile
    steps: int


class Done(NamedTuple):
    """A tile's rows."""

    tile: Tile
    rows: dict[str, MethodRows]


class Tabulated(NamedTuple):
    """What laws have looked up or tabulated for a job, see `core.tables`."""

    rows: tables.Rows


def run_job(job: Job, device: Any = None) -> Iterator[Worked | Tabulated | Done]:
    """Runs the same replications of cells that see the same draws, and yields how it goes.

    Args:
      job: tiles of cells that differ in schedule, horizon and step size only.
      device: where to run; a tile is always run at full width.
    """
    spec = job[0].cell
    with _building:
        cells = _cells(tuple(tile.cell for tile in job))
    key = jax.random.key(spec.seed)
    events, used = run_cells(key, cells, job[0].first, spec.tile_size, device), tables.Rows()
    while True:
        with tables.noting(used):
            event = next(events, None)
        if event is None:
            return
        if isinstance(event, Finished):
            if used:
                yield Tabulated(used)
                used = tables.Rows()
            yield Done(job[event.cell], event.rows)
        else:
            yield Worked(job[event.cell], event.steps)


def cell(spec: CellSpec, save_at: tuple[int, ...] | None = None) -> Cell:
    """The engine's description of a cell."""
    return _cell(spec, spec.problem.built().made, save_at)


def _cell(spec: CellSpec, problem: Problem, save_at: tuple[int, ...] | None = None) -> Cell:
    plan = spec.plan()
    saves = spec.saved_rounds(plan.num_rounds) if save_at is None else save_at
    methods = tuple(method.built().made for method in spec.methods)
    algorithm = spec.algorithm.built().made
    return Cell(problem, plan, methods, spec.levels, saves, spec.dtype, algorithm)


@functools.lru_cache(maxsize=4)
def _cells(specs: tuple[CellSpec, ...]) -> tuple[Cell, ...]:
    # To the engine, problems that differ only in their name and step size are one.
    shared = specs[0].problem.built().made
    return tuple(_cell(spec, shared) for spec in specs)


def about(spec: CellSpec) -> CellRows:
    """What a reader must know of a cell besides its rows."""
    return cell(spec).with_rows({})


def check(study: Study) -> None:
    """Refuses what only the objects can tell, before anything is written.

    Every method and algorithm is tried on every problem that it meets, and every schedule is written
    out to every horizon that it meets.
    """
    brief = schedules.constant(1).plan(schedules.power_decay(0.5), num_steps=1)
    tried = dict.fromkeys((spec.problem, spec.algorithm, spec.methods) for spec in study.cells)
    for problem, algorithm, methods in tried:
        made = tuple(method.built().made for method in methods)
        own = any(part.identity for part in (problem, algorithm, *methods))
        with refusing(f"problem {problem.name}", own=own):
            Cell(
                problem.built().made,
                brief,
                made,
                algorithm=algorithm.built().made,
                dtype=study.dtype,
            )
    paths = {(spec.schedule, spec.extent, spec.methods): spec for spec in study.cells}
    for spec in paths.values():
        own = any(method.identity for method in spec.methods)
        with refusing(f"schedule {spec.schedule} to {spec.extent}", own=own):
            _check_path(spec)


def _check_path(spec: CellSpec) -> None:
    plan = spec.plan()
    spec.saved_rounds(plan.num_rounds)
    for method in spec.methods:
        # A critical value that does not exist (missing from the paper's table, a schedule without an
        # exponent) would otherwise come to light after the run.
        made = method.built().made
        made.check_plan(plan)
        with blaming(made.law.multiplier, f"`law.multiplier` of method {made.name!r}"):
            made.law.check(spec.levels, plan)
