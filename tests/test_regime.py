"""The regime diagnostic and the check of the functional limit theorem."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import jaxlsgd
from jaxlsgd.inference import diagnostics
from jaxlsgd.runs.fclt import fclt_check

STEP = jaxlsgd.schedules.power_decay(0.5)


@pytest.fixture(scope="module")
def result() -> jaxlsgd.Fit:
    plan = jaxlsgd.schedules.paper("C5").with_warmup(0.05).plan(STEP, num_steps=1000)
    methods = (jaxlsgd.random_scaling(), jaxlsgd.plug_in(), jaxlsgd.plug_in("finite"))
    problem = jaxlsgd.problems.linear(3, 4)
    return jaxlsgd.fit(jax.random.key(3), problem, plan, methods=methods)


def test_regime_says_what_is_needed_and_it_is_enough(result: jaxlsgd.Fit) -> None:
    found = result.regime(tolerance=0.05)
    detail = result.details["plug_in[finite]"]
    np.testing.assert_allclose(found.inflation, detail.inflation, rtol=1e-4)
    assert not found.reached and "Not in the asymptotic regime" in str(found)
    assert found.needed is not None and found.needed > 1000
    schedule = result.cell.plan.schedule
    longer = schedule.plan(STEP, num_steps=found.needed)
    shorter = schedule.plan(STEP, num_steps=int(found.needed * 0.9))
    state = result.states["plug_in"][0]
    assert diagnostics.figures(state, longer).worst <= 0.05
    assert diagnostics.figures(state, shorter).worst > 0.05
    assert "In the asymptotic regime" in str(result.regime(tolerance=0.5))


def test_regime_of_a_given_sequence_has_no_horizon() -> None:
    plan = jaxlsgd.schedules.custom([3] * 40).plan(STEP, num_rounds=40)
    found = jaxlsgd.fit(jax.random.key(0), jaxlsgd.problems.linear(2, 3), plan).regime(0.01)
    assert found.needed is None and "is not known for a given sequence" in str(found)
    with pytest.raises(ValueError, match="tolerance"):
        jaxlsgd.fit(jax.random.key(0), jaxlsgd.problems.linear(2, 3), plan).regime(0.0)


def test_fclt_is_brownian_and_a_wrong_scale_is_not() -> None:
    """C1 from x*: 55 covariances of 400 · 2 values each, five standard errors: once in 30,000 runs."""
    truths = np.zeros((3, 2))
    problem = jaxlsgd.problems.linear(2, 3, client_truths=truths)
    plan = jaxlsgd.schedules.constant(1).plan(jaxlsgd.schedules.power_decay(1.0), num_steps=3000)
    found = fclt_check(jax.random.key(0), problem, plan, replications=400)
    assert found.largest_z < 5
    assert found.normality.min() > 1e-5
    wrong = jaxlsgd.problems.linear(2, 3, client_truths=truths, noise=1.3)
    object.__setattr__(wrong, "S", problem.S)  # a planted bug: S of another problem
    assert fclt_check(jax.random.key(0), wrong, plan, replications=400).largest_z > 5


def test_fclt_needs_a_known_truth() -> None:
    problem = jaxlsgd.problems.linear(2, 3)
    plan = jaxlsgd.schedules.constant(1).plan(STEP, num_steps=10)
    with pytest.raises(ValueError, match="grid"):
        fclt_check(jax.random.key(0), problem, plan, replications=2, grid=[0.0, 1.0])
    object.__setattr__(problem, "G", None)
    with pytest.raises(ValueError, match="truth, G and S"):
        fclt_check(jax.random.key(0), problem, plan, replications=2)
