"""Finite-horizon factors of many runs, tabulated and interpolated, against the recursions."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from jaxlsgd import plug_in, problems, random_scaling, schedules
from jaxlsgd.core.estimator import Horizon, NotTabulated
from jaxlsgd.inference import finite_horizon
from jaxlsgd.runs.cell import Cell
from jaxlsgd.runs.simulate import Finished, run_cells

VALUES = np.exp(np.random.default_rng(4).uniform(np.log(0.05), np.log(1.5), (3, 4)))


def plan(E: Any, steps: int, gamma0: float = 0.5) -> schedules.Plan:
    return schedules.custom(E).plan(schedules.power_decay(gamma0), num_steps=steps)


PLANS = {
    "every step": plan([1] * 300, 300),
    "growing": plan([1] * 20 + list(range(1, 40)), 500),
    "long rounds": plan([1] * 25 + [50] * 10, 500),
    "overshooting": plan([1] * 100 + [5] * 40, 300, 1.2),
}


@pytest.mark.parametrize("observations", [False, True])
@pytest.mark.parametrize("name", PLANS)
def test_interpolated_factors_are_those_of_the_recursions(name: str, observations: bool) -> None:
    """To 2e-6, where 1,000 replications show differences of 1e-2."""
    given = PLANS[name]
    found = finite_horizon.horizon_factors(VALUES, given, observations)
    scaling = finite_horizon.scaling_factors(VALUES, given)
    with jax.enable_x64(True):
        horizon = Horizon.of(given, np.float64)
        for run, values in enumerate(VALUES):
            right = finite_horizon.horizon_factors(jax.numpy.asarray(values), horizon, observations)
            np.testing.assert_allclose(found.pair[run], right.pair, rtol=2e-6)
            # Of a start that has faded nothing is left to compare.
            size = np.abs(right.start).max()
            np.testing.assert_allclose(found.start[run], right.start, rtol=2e-6, atol=1e-5 * size)
            exact = finite_horizon.scaling_factors(jax.numpy.asarray(values), horizon)
            np.testing.assert_allclose(scaling[run], exact, rtol=2e-6)


def test_a_run_does_not_depend_on_its_company() -> None:
    given = plan([1] * 40 + [3] * 30, 130)
    alone = finite_horizon.horizon_factors(VALUES[:1], given).pair
    wide = np.concatenate([VALUES[:1], 0.01 * VALUES, 1.4 * VALUES])
    np.testing.assert_array_equal(finite_horizon.horizon_factors(wide, given).pair[:1], alone)


@pytest.mark.parametrize("values", [[1e-9, 1.0], [0.5, 50.0], [np.nan, np.nan]])
def test_what_is_too_steep_or_too_wide_is_not_tabulated(values: list[float]) -> None:
    with pytest.raises(NotTabulated):
        finite_horizon.horizon_factors(np.array([values]), PLANS["every step"])


def test_a_run_that_diverged_is_not_a_number_and_leaves_the_others_alone() -> None:
    given = PLANS["every step"]
    some = np.concatenate([VALUES, np.full((1, 4), np.nan)])
    found = finite_horizon.horizon_factors(some, given).pair
    assert np.isnan(found[-1]).all()
    np.testing.assert_array_equal(found[:-1], finite_horizon.horizon_factors(VALUES, given).pair)


def test_rows_that_are_read_in_tiles_are_those_read_one_by_one() -> None:
    """The same estimates to the last bit; half-widths as far as float32 allows."""
    methods = (plug_in("finite"), random_scaling("finite"))
    exact = tuple(dataclasses.replace(method, reads_tiles=False) for method in methods)
    rows = []
    for chosen in (methods, exact):
        cell = Cell(problems.linear(2, 3), PLANS["growing"], chosen)
        events = run_cells(jax.random.key(0), [cell], 0, 16)
        rows += [event.rows for event in events if isinstance(event, Finished)]
    for name, mine in rows[0].items():
        other = rows[1][name]
        np.testing.assert_array_equal(mine.estimate, other.estimate)
        np.testing.assert_allclose(mine.half_width, other.half_width, rtol=2e-5)
        np.testing.assert_array_equal(mine.cause, other.cause)
