"""Methods that leave out the first rounds: as if these had never been."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import paper_plan

from jaxlsgd import Estimator, Study, Sync, plug_in, random_scaling, simulate
from jaxlsgd.problems import linear
from jaxlsgd.schedules import Plan
from jaxlsgd.study import parts

ROUNDS, LEFT_OUT = 40, 9
PAIRS = [
    (plug_in(), plug_in(burn_in=LEFT_OUT)),
    (plug_in(average="observations"), plug_in(average="observations", burn_in=LEFT_OUT)),
    (random_scaling(), random_scaling(burn_in=LEFT_OUT)),
    (random_scaling("diagonal"), random_scaling("diagonal", burn_in=LEFT_OUT)),
    (
        random_scaling(critical="schedule"),
        random_scaling(critical="schedule", burn_in=LEFT_OUT),
    ),
    (
        random_scaling(average="observations"),
        random_scaling(average="observations", burn_in=LEFT_OUT),
    ),
]
PLAN = paper_plan("P(1/2)", 0.5, num_rounds=ROUNDS)


def fed(method: Estimator, first: int) -> Any:
    """The state after the rounds from one on."""
    rng = np.random.default_rng(3)
    x = jnp.asarray(np.cumsum(rng.normal(size=(ROUNDS, 3)), 0), jnp.float32)

    def body(state: Any, m: Any) -> tuple[Any, None]:
        sync = Sync(x[m], jnp.asarray(PLAN.E)[m], 0.1, 0.1 * x[m], jnp.eye(3) * (1 + m))
        return method.update(state, sync), None

    return jax.lax.scan(body, method.init(jnp.zeros(3)), jnp.arange(first, ROUNDS))[0]


@pytest.mark.parametrize(("whole", "late"), PAIRS, ids=lambda method: method.name)
def test_it_is_the_method_that_began_later(whole: Estimator, late: Estimator) -> None:
    rest = Plan.from_arrays(PLAN.E[LEFT_OUT:], PLAN.eta[LEFT_OUT:])
    rest = Plan(rest.E, rest.eta, PLAN.schedule, PLAN.step_size)
    found = late.interval(fed(late, 0), 0.95, PLAN)
    expected = whole.interval(fed(whole, LEFT_OUT), 0.95, rest)
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, found), jax.tree.map(np.asarray, expected))
    everything = whole.interval(fed(whole, 0), 0.95, PLAN)
    assert np.abs(np.asarray(everything.estimate) - np.asarray(found.estimate)).max() > 0.1
    assert f"burn-in {LEFT_OUT}" in late.name and late.name.startswith(whole.name.rstrip("]"))


def test_in_the_engine_and_for_a_far_start() -> None:
    """From 10 away, what is left out is what the average cannot forget."""
    problem, plan = linear(3, 4, init=np.full(3, 10.0)), paper_plan("C5", 0.5, num_steps=600)
    methods = (plug_in(), plug_in(burn_in=plan.num_rounds // 5), random_scaling(burn_in=5))
    cell = simulate(jax.random.key(1), problem, plan, replications=64, methods=methods)
    errors = [
        np.abs(rows.estimate[-1] - problem.true_vector).mean() for rows in cell.methods.values()
    ]
    assert errors[1] < 0.5 * errors[0] and errors[2] < errors[0]


def test_before_the_first_round_that_counts_nothing_is_known() -> None:
    method = random_scaling(burn_in=ROUNDS + 5)
    lower, upper = method.interval(fed(method, 0), 0.95, PLAN)[1:]
    assert np.isinf(np.asarray(upper) - np.asarray(lower)).all()


def test_studies_can_ask_for_it() -> None:
    study = Study(
        problems=["paper-linear"],
        schedules=["C5"],
        horizons=[100],
        methods=[{"kind": "plug_in", "burn_in": 4}, "one_step[average]"],
    )
    assert list(parts.names(study.methods)) == ["plug_in[burn-in 4]", "one_step[average]"]


def test_what_cannot_be_had_is_refused() -> None:
    with pytest.raises(ValueError, match="burn_in: must be 0 for horizon='finite'.*got 3"):
        plug_in("finite", burn_in=3)
    with pytest.raises(ValueError, match="burn_in: must be 0 for critical='finite_horizon'"):
        random_scaling(critical="finite_horizon", burn_in=3)
    with pytest.raises(ValueError, match="burn_in: must be"):
        plug_in(burn_in=0.2)  # type: ignore[arg-type]
