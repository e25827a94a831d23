"""Tasks that are run together draw once, and find what each finds alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from jaxlsgd import plug_in, problems, random_scaling
from jaxlsgd.core.problem import Problem
from jaxlsgd.core.rows import MethodRows
from jaxlsgd.engine import tile
from jaxlsgd.runs.simulation import Task, run_replications, run_together
from tests.engine_helpers import paper_plan

METHODS = (random_scaling(), plug_in())
FIELDS = [field.name for field in dataclasses.fields(MethodRows)]
COUNT = 16
Rows = dict[str, MethodRows]


def task(problem: Problem, name: str, num_steps: int, **changes: Any) -> Task:
    settings = {"methods": METHODS, **changes}
    return Task(problem, paper_plan(name, num_steps=num_steps), **settings)


def together(tasks: list[Task], first: int = 0) -> dict[int, Rows]:
    found: dict[int, Rows] = {}
    run_together(jax.random.key(3), tasks, first, COUNT, on_rows=found.__setitem__)
    return found


def assert_same(a: Rows, b: Rows) -> None:
    assert list(a) == list(b)
    for name in a:
        for field in FIELDS:
            np.testing.assert_array_equal(getattr(a[name], field), getattr(b[name], field))


@pytest.fixture(scope="module", params=["linear", "logistic"])
def tasks(request: pytest.FixtureRequest) -> list[Task]:
    problem = problems.paper_problem(request.param)
    return [
        task(problem, "P(1/2)", 700, save_at=(3, 30)),
        task(problem, "C1", 64),
        task(problem, "C5", 333, levels=(0.8, 0.99)),
        task(problem, "Log", 129),
    ]


def test_company_and_order_change_no_bit(tasks: list[Task]) -> None:
    found = together(tasks)
    turned = together(tasks[::-1])
    for i, alone in enumerate(tasks):
        assert_same(found[i], together([alone])[0])
        assert_same(found[i], turned[len(tasks) - 1 - i])


def test_rows_are_those_of_a_task_that_draws_as_it_goes(tasks: list[Task]) -> None:
    for i, rows in together(tasks, first=5).items():
        alone = run_replications(jax.random.key(3), tasks[i], 5, COUNT)
        for name in rows:
            for field in FIELDS:
                ours, theirs = getattr(rows[name], field), getattr(alone[name], field)
                # Two programs, whose rounding may differ; none was seen to.
                np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)


def test_short_plans_are_told_first_and_steps_add_up(tasks: list[Task]) -> None:
    order: list[int] = []
    steps = [0] * len(tasks)

    def count(index: int, done: int) -> None:
        steps[index] += done

    run_together(
        jax.random.key(3), tasks, 0, COUNT, on_rows=lambda i, _: order.append(i), on_call=count
    )
    assert order == sorted(range(len(tasks)), key=lambda i: tasks[i].plan.num_steps)
    assert steps == [one.layout.steps for one in tasks]


def test_draws_are_made_once(tasks: list[Task], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    draw = tile._draw_block

    def counted(program: Any, data: Any, keys: Any, first: Any) -> Any:
        made.append(int(first))
        return draw(program, data, keys, first)

    monkeypatch.setattr(tile, "_draw_block", counted)
    together(tasks)
    assert made == list(range(0, 701, 64))


def test_many_draws_are_not_kept() -> None:
    """A large problem draws within its blocks, and is run cell by cell all the same."""
    problem = problems.linear(20, 10)
    program = tile.make_program(problem, METHODS, shared_draws=True)
    assert not program.draws_ahead
    pair = [task(problem, "C5", 100), task(problem, "C1", 70)]
    for i, rows in together(pair).items():
        assert_same(rows, run_replications(jax.random.key(3), pair[i], 0, COUNT))


def test_an_error_stops_all_and_strangers_are_refused() -> None:
    linear, logistic = problems.linear(2, 2), problems.logistic(2, 2)
    with pytest.raises(ValueError, match="must be one or more that share"):
        together([task(linear, "C1", 10), task(logistic, "C1", 10)])
    with pytest.raises(ValueError, match="must be one or more that share"):
        together([task(linear, "C1", 10), task(linear, "C1", 10, dtype="float64")])
    with pytest.raises(ValueError, match="must be one or more that share"):
        together([])

    def fail(index: int, steps: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        run_together(jax.random.key(0), [task(linear, "C1", 10)], 0, 4, on_rows=print, on_call=fail)
