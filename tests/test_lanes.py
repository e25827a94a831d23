"""Cells as lanes: side by side in one program, each finds what it finds alone."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlsgd import algorithms, plug_in, problems, random_scaling, schedules
from jaxlsgd.core.estimator import Accumulator, Estimator, Measurement, Rolling, Sync
from jaxlsgd.core.rows import MethodRows
from jaxlsgd.engine import program as program_lib
from jaxlsgd.engine.cost import lane_widths
from jaxlsgd.engine.lanes import widths_for
from jaxlsgd.engine.layout import BLOCK_STEPS, LANE_WINDOW, SLOTS, lay_out, lay_out_whole
from jaxlsgd.engine.program import LOOPS
from jaxlsgd.runs.cell import Cell
from jaxlsgd.runs.simulate import Advanced, Finished, run_cells
from tests.engine_helpers import NO_LAW, paper_plan

pytestmark = pytest.mark.for_users

KEY = jax.random.key(5)
METHODS = (random_scaling(), plug_in())
PROBLEM = problems.linear(2, 3)
COUNT, WIDTHS = 16, (1, 4)
Rows = dict[str, MethodRows]


def cell(E: Any, steps: int, **changes: Any) -> Cell:
    """A cell in float64, where rounding is far below any other difference."""
    plan = schedules.custom(E).plan(schedules.power_decay(0.5), num_steps=steps)
    return Cell(PROBLEM, plan, **{"methods": METHODS, "dtype": "float64", **changes})


def run(cells: list[Cell], lanes: tuple[int, ...]) -> dict[int, Rows]:
    events = run_cells(KEY, cells, 3, COUNT, lanes=lanes)
    return {event.cell: event.rows for event in events if isinstance(event, Finished)}


def arrays(rows: Rows) -> dict[str, Any]:
    return {name: dataclasses.asdict(part) for name, part in rows.items()}


CELLS = [
    # From a round at every step to rare ones; two saved rounds in one block, and one in another.
    cell([1] * 1000 + [30] * 20, 1500, save_at=(3, 40, 41, 700)),
    cell([1] * 200, 200, save_at=(5, 64, 100)),
    cell([40] * 9, 350),
    cell([1] * 1000 + [25] * 20, 1400),
    cell([2] * 250, 500),
    cell([1] * 350, 350),
]


@pytest.fixture(scope="module")
def found() -> dict[int, Rows]:
    return run(CELLS, WIDTHS)


def test_lanes_are_cells_one_by_one_up_to_rounding(found: dict[int, Rows]) -> None:
    for i, rows in run(CELLS, ()).items():
        chex.assert_trees_all_close(arrays(found[i]), arrays(rows), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("chosen", [[0], [4, 1], [5, 3, 1, 0]], ids=["alone", "two", "four"])
def test_rows_are_the_same_bytes_in_any_company(found: dict[int, Rows], chosen: list[int]) -> None:
    """Other neighbours, other places, other widths; the cells that a resumed study lacks, say."""
    again = run([CELLS[i] for i in chosen], WIDTHS)
    for place, i in enumerate(chosen):
        chex.assert_trees_all_equal(arrays(again[place]), arrays(found[i]))


def test_saved_rounds_change_no_other(found: dict[int, Rows]) -> None:
    def last(rows: Rows) -> Any:
        return jax.tree.map(lambda leaf: leaf[-1], arrays(rows))

    for i, rows in run([dataclasses.replace(one, save_at=None) for one in CELLS], WIDTHS).items():
        chex.assert_trees_all_equal(last(rows), last(found[i]))


def test_short_plans_end_first_and_steps_add_up() -> None:
    order, steps = [], [0] * len(CELLS)
    for event in run_cells(KEY, CELLS, 3, COUNT, lanes=WIDTHS):
        if isinstance(event, Finished):
            order.append(event.cell)
        else:
            assert isinstance(event, Advanced)
            steps[event.cell] += event.steps
    assert order == sorted(range(len(CELLS)), key=lambda i: CELLS[i].plan.num_steps)
    assert steps == [one.layout.steps for one in CELLS]


class Rolled(NamedTuple):
    """Averages since a roll added up, and what it was at the rolls, also added up."""

    now: Any
    past: Any


def rolled() -> Estimator:
    """A method that shows when it was rolled: before every block with the number of E_1, in threes."""

    def init(params: Any) -> Rolled:
        return Rolled(jnp.zeros_like(params), jnp.zeros_like(params))

    def add(state: Rolled, sync: Sync) -> Rolled:
        return state._replace(now=state.now + sync.params)

    def roll(state: Rolled) -> Rolled:
        return Rolled(0 * state.now, 2 * state.past + state.now)

    def roll_before(E: np.ndarray, eta: np.ndarray, dim: int) -> np.ndarray:
        return np.arange(E[0], E.sum() // BLOCK_STEPS + 1, 3)

    def measure(states: Any, horizon: Any) -> Measurement:
        return Measurement(states[0].past, states[0].now)

    part = Accumulator(init, add, rolling=Rolling(add, roll, roll_before, store=("past",)))
    return Estimator("rolled", (part,), measure, NO_LAW)


def test_statistics_are_rolled_where_the_plan_of_a_lane_says() -> None:
    method = rolled()
    cells = [cell([E] * 700, 690, methods=(method,)) for E in (1, 2, 3)]
    side, one_by_one = run(cells, (4,)), run(cells, ())
    for i in range(len(cells)):
        chex.assert_trees_all_close(arrays(side[i]), arrays(one_by_one[i]), rtol=1e-12)
    past = [rows["rolled"].estimate for rows in side.values()]
    assert np.abs(past[0] - past[1]).min() > 0.1


@pytest.mark.parametrize("lanes", [(), (4,)], ids=["one by one", "lanes"])
def test_the_loop_of_a_gpu_finds_the_same(
    lanes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draws where they are used, iterations unrolled (here by two), statistics at every step."""
    methods = (random_scaling(mode="diagonal"),)
    cells = [cell([5] * 40, 200, methods=methods), cell([40] * 3, 120, methods=methods)]
    ours = run(cells, ())
    monkeypatch.setattr(program_lib, "LOOPS", {"cpu": LOOPS["gpu"]._replace(unroll=2)})
    theirs = run(cells, lanes)
    for i in range(len(cells)):
        chex.assert_trees_all_close(arrays(theirs[i]), arrays(ours[i]), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("count", "widths", "wanted"),
    [
        (20, (1, 4, 8), [8, 8, 4]),
        (15, (1, 4, 8), [8, 8]),
        (5, (1, 4, 8), [4, 1]),
        (1, (1, 4, 8), [1]),
        (3, (1, 4), [4]),
        (20, (24,), [24]),
        (25, (24,), [24, 24]),
        (0, (1, 4), []),
    ],
)
def test_widths(count: int, widths: tuple[int, ...], wanted: list[int]) -> None:
    assert widths_for(count, widths) == wanted


def test_widths_are_those_of_the_problem_and_not_of_the_company() -> None:
    assert lane_widths(problems.linear(5, 10), METHODS, 512) == (1, 4)
    assert lane_widths(problems.linear(100, 10), METHODS, 512) == ()
    assert lane_widths(problems.linear(2, 33), METHODS, 16) == (), "ordered otherwise for one lane"
    assert lane_widths(problems.linear(2, 33), METHODS, 16, platform="gpu") == (24,)
    # What might depend on the width runs one after another on a CPU.
    assert lane_widths(problems.linear(2, 3), METHODS, 16, algorithm=algorithms.fedprox(0.1)) == ()
    assert lane_widths(problems.linear(2, 3), (rolled(),), 16) == ()
    assert lane_widths(problems.linear(5, 10), METHODS, 4096, platform="gpu") == (8,)
    assert lane_widths(problems.linear(5, 10), METHODS, 1000, platform="gpu") == (24,)
    assert lane_widths(problems.linear(5, 10), METHODS, 512, platform="tpu") == ()


def test_whole_blocks_are_the_blocks_of_a_plan() -> None:
    plan = paper_plan("P(1/2)", num_steps=3000)
    saves = (3, 40, plan.num_rounds)
    whole = lay_out_whole(plan, saves)
    plain = [call for group in lay_out(plan).groups for call in group]
    assert len(whole.calls) == len(plain)
    for ours, theirs in zip(whole.calls, plain, strict=True):
        chex.assert_trees_all_equal(ours.block[:6], theirs.block[:6])
        assert ours.slots >= theirs.slots
        valid = ours.block.syncs.valid
        closed = [np.asarray(leaf)[valid] for leaf in ours.block.syncs]
        right = [np.asarray(leaf)[theirs.block.syncs.valid] for leaf in theirs.block.syncs]
        chex.assert_trees_all_equal(closed, right)
    rooms = [call.slots for call in whole.calls]
    changes = [i for i in range(1, len(rooms)) if rooms[i] != rooms[i - 1]]
    assert set(rooms) <= {*SLOTS, BLOCK_STEPS}
    assert changes
    assert all(i % LANE_WINDOW == 0 for i in changes)
    read = {save: call for reads in whole.reads.values() for save, call in reads}
    assert sorted(read) == [0, 1]
    for save, call in read.items():
        last = int(plan.ends[saves[save] - 1])
        assert int(call.block.first) + np.flatnonzero(call.block.eta)[-1] == last
