"""A method from outside: batch means, built from public names alone, wherever a method is used."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import jaxlsgd
from jaxlsgd import Accumulator, Estimator, JointLaw, Law, Measurement, Sync, flatten
from jaxlsgd.inference import NORMAL, joint

SIZE = 25  # rounds per batch


class Batches(NamedTuple):
    """Non-overlapping batches of the path x̄_{t_m}."""

    mean: Any  # (d,) of all rounds
    current: Any  # (d,) the open batch: its sum so far over the size of a whole one
    center: Any  # (d,) mean of the closed batches
    square: Any  # (d, d) their sum of squares around it
    m: Any  # () rounds


@functools.cache
def batches(size: int) -> Accumulator:
    def init(params: Any) -> Batches:
        zero = jnp.zeros_like(flatten(params))
        return Batches(zero, zero, zero, jnp.outer(zero, zero), jnp.zeros((), jnp.int32))

    def update(state: Batches, sync: Sync) -> Batches:
        x, m = flatten(sync.params), state.m + 1
        mean, batch = state.mean + (x - state.mean) / m, state.current + x / size
        gap = batch - state.center
        center = state.center + gap / jnp.maximum(m // size, 1)
        square = state.square + jnp.outer(gap, batch - center)
        closed = Batches(mean, jnp.zeros_like(x), center, square, m)
        still_open = state._replace(mean=mean, current=batch, m=m)
        return jax.tree.map(lambda a, b: jnp.where(m % size == 0, a, b), closed, still_open)

    return Accumulator(init, update, shared=("m",))


def covariance(states: Any, horizon: Any) -> Any:
    n = states[0].m // SIZE
    return states[0].square / jnp.where(n > 1, n * (n - 1), jnp.nan)


def measure(states: Any, horizon: Any) -> Measurement:
    scale = jnp.sqrt(jnp.diagonal(covariance(states, horizon)))
    return Measurement(states[0].mean, jnp.where(jnp.isnan(scale), jnp.inf, scale))


def degrees(plan: Any) -> int:
    return plan.num_rounds // SIZE - 1


def hotelling(plan: Any, detail: Any) -> JointLaw:
    del detail

    def factor(q: int) -> tuple[float, int]:
        rest = degrees(plan) - q + 1
        return q * degrees(plan) / rest, rest

    return JointLaw(
        quantile=lambda level, q: factor(q)[0] * scipy.stats.f.ppf(level, q, factor(q)[1]),
        tail=lambda w, q: (float(scipy.stats.f.sf(w / factor(q)[0], q, factor(q)[1])), 0.0),
    )


STUDENT = Law(
    multiplier=lambda level, plan, detail: scipy.stats.t.isf((1 - level) / 2, degrees(plan)),
    tail=lambda statistic, plan, detail: 2 * scipy.stats.t.sf(np.abs(statistic), degrees(plan)),
    joint=hotelling,
    from_plan=True,
)
BATCH_MEANS = Estimator(
    name="batch_means",
    accumulators=(batches(SIZE),),
    measure=measure,
    law=STUDENT,
    matrix=covariance,
    standard_error=True,
    needs_plan=True,
    label="batch means",
)
WITH_NORMAL = dataclasses.replace(BATCH_MEANS, name="batch_means[z]", law=NORMAL, needs_plan=False)
METHODS = (jaxlsgd.plug_in(), BATCH_MEANS, WITH_NORMAL)


@pytest.fixture(scope="module")
def problem() -> jaxlsgd.Problem:
    return jaxlsgd.problems.linear(2, 3, client_truths=np.zeros((3, 2)))


@pytest.fixture(scope="module")
def plan() -> jaxlsgd.Plan:
    """A constant step, so that the path is stationary, and 20 batches."""
    step = jaxlsgd.schedules.constant_step(0.3)
    return jaxlsgd.schedules.constant(1).plan(step, num_rounds=20 * SIZE)


@pytest.fixture(scope="module")
def cell(problem: jaxlsgd.Problem, plan: jaxlsgd.Plan) -> jaxlsgd.CellRows:
    save_at = (SIZE, 10 * SIZE)
    return jaxlsgd.simulate(
        jax.random.key(0), problem, plan, replications=400, methods=METHODS, save_at=save_at
    )


@pytest.fixture(scope="module")
def result(problem: jaxlsgd.Problem, plan: jaxlsgd.Plan) -> jaxlsgd.Fit:
    return jaxlsgd.fit(jax.random.key(0), problem, plan, methods=METHODS)


def test_in_a_loop_of_ones_own_it_is_the_covariance_of_batch_means(plan: jaxlsgd.Plan) -> None:
    path = np.random.default_rng(0).normal(size=(7 * SIZE + 3, 2)).astype(np.float32)
    state, update = WITH_NORMAL.init(path[0]), jax.jit(WITH_NORMAL.update)
    for x in path:
        state = update(state, Sync(params=x, E=1, eta=0.1))
    means = path[: 7 * SIZE].reshape(7, SIZE, 2).mean(axis=1)
    expected = np.cov(means, rowvar=False) / 7
    chex.assert_trees_all_close(covariance(state, None), expected, rtol=1e-4, atol=1e-6)
    center, lower, upper = WITH_NORMAL.interval(state, level=0.9)
    half = scipy.stats.norm.isf(0.05) * np.sqrt(np.diagonal(expected))
    chex.assert_trees_all_close(center, path.mean(axis=0), rtol=1e-4, atol=1e-6)
    chex.assert_trees_all_close((center - lower, upper - center), (half, half), rtol=1e-4)
    with pytest.raises(ValueError, match="plan: must be given: batch_means needs the plan"):
        BATCH_MEANS.interval(state, level=0.9)


def test_it_covers_and_its_standard_error_is_measured(cell: jaxlsgd.CellRows) -> None:
    """Two coverages of 400 runs at 4.5 standard errors: a false alarm once in 70,000 runs."""
    rows = jaxlsgd.measures.summarise(cell, last_only=True)
    for row in (row for row in rows if row["method"] == BATCH_MEANS.name):
        assert abs(row["coverage"] - 0.95) < 4.5 * np.sqrt(0.95 * 0.05 / 400)
        assert abs(row["model_se_error"]) < 0.15
    narrow, wide = (cell.methods[name].half_width for name in (WITH_NORMAL.name, BATCH_MEANS.name))
    assert np.all(narrow[1:] < wide[1:])
    scales = [cell.methods[name].scale for name in (WITH_NORMAL.name, BATCH_MEANS.name)]
    chex.assert_trees_all_equal(*scales)


def test_too_few_batches_are_no_interval_and_no_error(cell: jaxlsgd.CellRows) -> None:
    first = cell.methods[WITH_NORMAL.name]
    assert np.isinf(first.half_width[0]).all() and not first.ok[0].any()
    assert cell.methods["plug_in"].ok[0].all()


def test_others_are_not_changed_by_its_company(
    problem: jaxlsgd.Problem, plan: jaxlsgd.Plan, cell: jaxlsgd.CellRows
) -> None:
    alone = jaxlsgd.simulate(
        jax.random.key(0), problem, plan, replications=400, methods=jaxlsgd.plug_in()
    )
    chex.assert_trees_all_equal(
        alone.methods["plug_in"].estimate[-1], cell.methods["plug_in"].estimate[-1]
    )


def test_one_run_with_joint_tests(result: jaxlsgd.Fit) -> None:
    assert "batch_means" in str(result)
    for method in (BATCH_MEANS, WITH_NORMAL):
        single = result.test(method.name, null=0.01)
        alone = result.joint_test(method.name, contrasts=[[0.0, 1.0]], null=0.01)
        assert alone.statistic == pytest.approx(single.statistic[1] ** 2, rel=1e-4)
        assert alone.p_value == pytest.approx(single.p_value[1], rel=1e-4)
        both = result.joint_test(method.name)
        region = joint.ellipsoid(result.joint(method.name))
        assert both.constraints == 2 and both.reject != region.contains([0.0, 0.0])
        assert np.all(
            joint.simultaneous(result.joint(method.name)).upper > result.interval(method.name).upper
        )
    z = result.joint(WITH_NORMAL.name)
    assert np.all(joint.simultaneous(z, how="sup_t").upper < joint.simultaneous(z).upper)
    with pytest.raises(ValueError, match="how: must be bonferroni or sidak"):
        joint.simultaneous(result.joint(BATCH_MEANS.name), how="sup_t")


def test_tables_and_figures_name_it(cell: jaxlsgd.CellRows, tmp_path: Any) -> None:
    assert "batch_means[z]" in jaxlsgd.measures.coverage_table(cell)
    assert "batch_means[z]" in jaxlsgd.report.tables.render(cell)
    rows = [row for row in jaxlsgd.report.panels.first_coordinate(cell) if row["length"]]
    figure = jaxlsgd.report.panels.along_rounds(rows)
    titles = [axis.get_title(loc="left") for axis in figure.axes[::2]]
    names = ["Plug-in", "Batch means (batch_means)", "Batch means (batch_means[z])"]
    assert titles == [f"{name}: coverage (%)" for name in names]
    assert jaxlsgd.report.figures.save_all(cell, tmp_path)


def test_a_state_that_changes_its_kind_is_refused(
    problem: jaxlsgd.Problem, plan: jaxlsgd.Plan
) -> None:
    part = batches(SIZE)
    broken = part._replace(update=lambda state, sync: part.update(state, sync)._replace(m=0.5))
    method = dataclasses.replace(BATCH_MEANS, accumulators=(broken,))
    with pytest.raises(ValueError, match=r"methods \(batch_means\).*: must .*got"):
        jaxlsgd.simulate(jax.random.key(0), problem, plan, replications=2, methods=method)
