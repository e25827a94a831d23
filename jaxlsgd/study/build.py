"""From plain data to what the engine runs. A tile is a pure function of its cell and its range."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxlsgd import problems, schedules
from jaxlsgd.core.estimator import Estimator
from jaxlsgd.core.problem import Problem
from jaxlsgd.core.rows import CellRows, MethodRows
from jaxlsgd.inference.plug_in import plug_in
from jaxlsgd.inference.random_scaling import random_scaling
from jaxlsgd.runs.simulation import Task, cell_rows, run_together
from jaxlsgd.study.errors import told
from jaxlsgd.study.grid import Cell
from jaxlsgd.study.parts import MethodSpec, ProblemSpec, thawed
from jaxlsgd.study.spec import Study

_PROBLEMS = {"linear": problems.linear, "logistic": problems.logistic}
_METHODS = {"plug_in": plug_in, "random_scaling": random_scaling}
# Two threads that built the same task at once would make two of each method, and compile both.
_building = threading.RLock()


@functools.lru_cache(maxsize=64)
def problem(spec: ProblemSpec) -> Problem:
    """The problem, under the name that the study gives it."""
    if spec.kind.startswith("paper-"):
        made = problems.paper_problem(spec.kind.removeprefix("paper-"))
    else:
        arguments = {key: thawed(value) for key, value in spec.arguments}
        made = _PROBLEMS[spec.kind](**arguments)
    return dataclasses.replace(made, name=spec.name)


@functools.lru_cache(maxsize=64)
def method(spec: MethodSpec) -> Estimator:
    """The interval method, under the name that the study gives it."""
    arguments = {key: thawed(value) for key, value in spec.arguments}
    return _METHODS[spec.kind](**arguments, name=spec.name)


def task(cell: Cell, save_at: tuple[int, ...] | None = None) -> Task:
    """The engine's description of a cell."""
    with _building:
        return _task(cell, problem(cell.problem), save_at)


def _task(cell: Cell, made: Problem, save_at: tuple[int, ...] | None = None) -> Task:
    plan = cell.plan()
    saves = cell.saved_rounds(plan.num_rounds) if save_at is None else save_at
    methods = tuple(method(spec) for spec in cell.methods)
    return Task(made, plan, methods, cell.levels, saves, cell.dtype)


def tasks(cells: tuple[Cell, ...]) -> tuple[Task, ...]:
    """The descriptions of cells that run together, made once for all their tiles."""
    with _building:
        return _tasks(cells)


@functools.lru_cache(maxsize=4)
def _tasks(cells: tuple[Cell, ...]) -> tuple[Task, ...]:
    # To the engine, problems that differ only in their name and step size are one.
    shared = problem(cells[0].problem)
    return tuple(_task(cell, shared) for cell in cells)


def about(cell: Cell) -> CellRows:
    """What a reader must know of a cell besides its rows."""
    return cell_rows(task(cell), {})


def compute_job(
    cells: Sequence[Cell],
    first: int,
    device: Any = None,
    on_call: Callable[[int, int], None] = lambda index, steps: None,
    on_rows: Callable[[int, dict[str, MethodRows]], None] = lambda index, rows: None,
) -> None:
    """The rows of replications first, …, first + tile_size − 1 of cells that see the same draws.

    Args:
      cells: alike in all but schedule, horizon and step size.
      first: the first replication; a tile is always run at full width.
      device: where to run.
      on_call: hears that the cell of this index has made so many steps more.
      on_rows: gets the rows of the cell of this index as soon as they are there.
    """
    key, size = jax.random.key(cells[0].seed), cells[0].tile_size
    together = tasks(tuple(cells))
    run_together(key, together, first, size, device, on_rows=on_rows, on_call=on_call)


def check(study: Study) -> None:
    """Refuses what only the builders can tell, before anything is written.

    Every problem and method is built, every method is tried on every problem that it meets, and
    every schedule is written out to every horizon that it meets.
    """
    for i, spec in enumerate(study.problems):
        told(f"problems[{i}] ({spec.name})", functools.partial(problem, spec))
    for i, spec in enumerate(study.methods):
        told(f"methods[{i}] ({spec.name})", functools.partial(method, spec))
    brief = schedules.constant(1).plan(schedules.power_decay(0.5), num_steps=1)
    for spec, methods in dict.fromkeys((cell.problem, cell.methods) for cell in study.cells):
        made = tuple(method(part) for part in methods)
        told(f"problem {spec.name}", functools.partial(Task, problem(spec), brief, made))
    paths = {(cell.schedule, cell.extent, cell.methods): cell for cell in study.cells}
    for cell in paths.values():
        told(f"schedule {cell.schedule} to {cell.extent}", functools.partial(_check_path, cell))


def _check_path(cell: Cell) -> None:
    plan = cell.plan()
    cell.saved_rounds(plan.num_rounds)
    for spec in cell.methods:
        # These two need no more than the schedule's family: a value missing from the paper's
        # table, or a schedule without an exponent, would otherwise come to light after the run.
        if dict(spec.arguments).get("critical") in ("asymptotic", "paper"):
            for level in cell.levels:
                method(spec).multiplier(level, plan, ())
