"""Cells that are run together draw once, and find what each finds alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest
from refusals import refused

from jaxlsgd import algorithms, plug_in, problems, random_scaling
from jaxlsgd.core.problem import Problem
from jaxlsgd.core.rows import MethodRows
from jaxlsgd.engine import draws
from jaxlsgd.engine.program import make_program
from jaxlsgd.runs.cell import LOCAL_SGD, Cell
from jaxlsgd.runs.simulate import Advanced, Finished, run_cells
from tests.engine_helpers import PAPER_PROBLEMS, paper_plan, rows_of

METHODS = (random_scaling(), plug_in())
COUNT = 16
Rows = dict[str, MethodRows]


def cell(problem: Problem, name: str, num_steps: int, **changes: Any) -> Cell:
    settings = {"methods": METHODS, **changes}
    return Cell(problem, paper_plan(name, num_steps=num_steps), **settings)


def together(cells: list[Cell], first: int = 0) -> dict[int, Rows]:
    return rows_of(jax.random.key(3), cells, first, COUNT)


def alone(one: Cell, first: int = 0) -> Rows:
    """A cell that draws as it goes."""
    return rows_of(jax.random.key(3), [one], first, COUNT, shared_draws=False)[0]


def as_arrays(rows: Rows) -> dict[str, Any]:
    return {name: dataclasses.asdict(part) for name, part in rows.items()}


def assert_same(a: Rows, b: Rows) -> None:
    assert list(a) == list(b)
    chex.assert_trees_all_equal(as_arrays(a), as_arrays(b))


@pytest.fixture(scope="module", params=PAPER_PROBLEMS)
def cells(request: pytest.FixtureRequest) -> list[Cell]:
    problem = PAPER_PROBLEMS[request.param]()
    return [
        cell(problem, "P(1/2)", 700, save_at=(3, 30)),
        cell(problem, "C1", 64),
        cell(problem, "C5", 333, levels=(0.8, 0.99)),
        cell(problem, "Log", 129),
    ]


def test_company_and_order_change_no_bit(cells: list[Cell]) -> None:
    found = together(cells)
    turned = together(cells[::-1])
    for i, one in enumerate(cells):
        assert_same(found[i], together([one])[0])
        assert_same(found[i], turned[len(cells) - 1 - i])


def test_rows_are_those_of_a_cell_that_draws_as_it_goes(cells: list[Cell]) -> None:
    for i, rows in together(cells, first=5).items():
        ours, theirs = as_arrays(rows), as_arrays(alone(cells[i], first=5))
        # Two programs, whose rounding may differ; none was seen to.
        chex.assert_trees_all_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_short_plans_are_finished_first_and_steps_add_up(cells: list[Cell]) -> None:
    order: list[int] = []
    steps = [0] * len(cells)
    for event in run_cells(jax.random.key(3), cells, 0, COUNT):
        if isinstance(event, Finished):
            order.append(event.cell)
        else:
            assert isinstance(event, Advanced)
            steps[event.cell] += event.steps
    assert order == sorted(range(len(cells)), key=lambda i: cells[i].plan.num_steps)
    assert steps == [one.layout.steps for one in cells]


def test_draws_are_made_once(cells: list[Cell], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    draw = draws._draw_block

    def counted(program: Any, data: Any, keys: Any, first: Any) -> Any:
        made.append(int(first))
        return draw(program, data, keys, first)

    monkeypatch.setattr(draws, "_draw_block", counted)
    together(cells)
    assert made == list(range(0, 701, 64))


def test_many_draws_are_not_kept() -> None:
    """A large problem draws within its blocks, for the cells that run side by side."""
    problem = problems.linear(20, 10)
    assert not make_program(problem, METHODS, LOCAL_SGD, shared_draws=True).draws_ahead
    pair = [cell(problem, "C5", 100), cell(problem, "C1", 70)]
    for i, rows in together(pair).items():
        ours, theirs = as_arrays(rows), as_arrays(alone(pair[i]))
        # Two programs, whose rounding differs: of a few steps from 0, up to 1e-7 of numbers near 0.1.
        chex.assert_trees_all_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_cells_with_little_in_common_are_refused() -> None:
    linear, logistic = problems.linear(2, 2), problems.logistic(2, 2)
    one = cell(linear, "C1", 10)
    others = {
        "problem": cell(logistic, "C1", 10),
        "dtype": cell(linear, "C1", 10, dtype="float64"),
        "algorithm": cell(linear, "C1", 10, algorithm=algorithms.fedprox(0.1)),
        "methods": cell(linear, "C1", 10, methods=METHODS[:1]),
    }
    for what, other in others.items():
        with refused("cells[1]", "conflict") as caught:
            together([one, other])
        assert f"another {what}" in str(caught.value)
    with refused("cells", "missing"):
        together([])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_caller_may_stop_and_keeps_its_own_settings(dtype: str) -> None:
    one = cell(problems.linear(2, 2), "C1", 10, dtype=dtype)
    events = run_cells(jax.random.key(0), [one], 0, 4)
    assert isinstance(next(events), Advanced)
    # Between two events the caller's code runs under the caller's precision.
    assert jnp.zeros(()).dtype == jnp.result_type(float) == jnp.float32
    events.close()
    assert jnp.result_type(float) == jnp.float32
