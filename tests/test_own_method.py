"""A method from outside: batch means, built from public names alone, wherever a method is used."""

from __future__ import annotations

import dataclasses
import functools
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from refusals import Why, refused

import jaxlsgd
from jaxlsgd import Accumulator, Estimator, JointLaw, Law, Measurement, Sync, flatten
from jaxlsgd.core import checks
from jaxlsgd.inference import NORMAL, joint
from jaxlsgd.runs.cell import Cell, Growth, as_tuple, method_rows

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
    with refused("plan", "missing", "batch_means"):
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
    with refused("how", "unsupported"):
        joint.simultaneous(result.joint(BATCH_MEANS.name), how="sup_t")


def test_tables_and_figures_name_it(cell: jaxlsgd.CellRows, tmp_path: Any) -> None:
    assert "batch_means[z]" in jaxlsgd.measures.coverage_table(cell)
    assert "batch_means[z]" in jaxlsgd.report.tables.render(cell)
    rows = [row for row in jaxlsgd.report.figures.first_coordinate(cell) if row["length"]]
    figure = jaxlsgd.report.figures.along_rounds(rows)
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
    with refused("methods (batch_means).update", "shape"):
        jaxlsgd.simulate(jax.random.key(0), problem, plan, replications=2, methods=method)


# What a method returns is checked from shapes: nothing has run, so nothing was compiled or drawn.


def measured(**changes: Any) -> Estimator:
    """The method with another result, of which some fields are replaced."""

    def changed(states: Any, horizon: Any) -> Any:
        return measure(states, horizon)._replace(**changes)

    return dataclasses.replace(BATCH_MEANS, name="changed", measure=changed, matrix=None)


def short(states: Any, horizon: Any) -> Any:
    return covariance(states, horizon)[0]


MALFORMED = {
    "a short estimate": (
        measured(estimate=jnp.zeros(1)),
        ("methods (changed).measure", "shape", "estimate", "(2,)"),
    ),
    "one scale for all": (
        measured(scale=jnp.ones(())),
        ("methods (changed).measure", "shape", "scale", "got ()"),
    ),
    "a scale of another length": (
        measured(scale=np.ones(3)),
        ("methods (changed).measure", "shape", "scale", "(3,)"),
    ),
    "a list for a scale": (
        measured(scale=[1.0, 1.0]),
        ("methods (changed).measure", "type", "scale", "[1.0, 1.0]"),
    ),
    "text for an estimate": (
        measured(estimate="none"),
        ("methods (changed).measure", "type", "estimate", "'none'"),
    ),
    "no estimate": (
        measured(estimate=None),
        ("methods (changed).measure", "type", "estimate", "None"),
    ),
    "complex numbers": (
        measured(scale=jnp.ones(2, jnp.complex64)),
        ("methods (changed).measure", "type", "scale", "complex64"),
    ),
    "a floor for each coordinate": (
        measured(floored=jnp.zeros(2, bool)),
        ("methods (changed).measure", "shape", "`floored`", "(2,)"),
    ),
    "text for a detail": (
        measured(detail={"df": "many"}),
        ("methods (changed).measure", "type", "`detail['df']`", "'many'"),
    ),
    "a pair": (
        dataclasses.replace(BATCH_MEANS, measure=lambda s, h: (s[0].mean, s[0].mean)),
        ("methods (batch_means).measure", "type", "jaxlsgd.Measurement"),
    ),
    "nothing": (
        dataclasses.replace(BATCH_MEANS, measure=lambda s, h: None),
        ("methods (batch_means).measure", "type", "jaxlsgd.Measurement", "None"),
    ),
    "a vector for a matrix": (
        dataclasses.replace(BATCH_MEANS, matrix=short),
        ("methods (batch_means).matrix", "shape", "(2, 2)"),
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_measurement_is_refused_before_anything_runs(
    case: str, problem: jaxlsgd.Problem, plan: jaxlsgd.Plan
) -> None:
    method, why = MALFORMED[case]
    for methods in (method, (jaxlsgd.plug_in(), method)):
        with refused(*why):
            Cell(problem, plan, as_tuple(methods))
    with refused(*why):
        jaxlsgd.track(method, np.zeros(2, np.float32), rows="fresh")


def test_a_table_is_not_fitted_with_a_malformed_method() -> None:
    rng = np.random.default_rng(0)
    table = {"y": rng.normal(size=300), "x": rng.normal(size=300)}
    for method, why in (
        (
            dataclasses.replace(BATCH_MEANS, matrix=short),
            ("methods (batch_means).matrix", "shape", "(2, 2)"),
        ),
        (dataclasses.replace(BATCH_MEANS, matrix=None), ("methods", "unsupported", "batch_means")),
    ):
        with refused(*why):
            jaxlsgd.fit_table(table, response="y", methods=[method])


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (np.ones(3), ("methods (batch_means).law.multiplier", "shape", "(4, 2)", "(3,)")),
        ("many", ("methods (batch_means).law.multiplier", "type", "'many'")),
    ],
)
def test_a_multiplier_that_does_not_fit_is_named(value: Any, why: Why, plan: jaxlsgd.Plan) -> None:
    law = Law(lambda level, plan, detail: value, STUDENT.tail)
    method = dataclasses.replace(BATCH_MEANS, law=law)
    found = Measurement(np.zeros((4, 2)), np.ones((4, 2)), np.zeros(4, bool))
    growth = Growth(np.zeros(4), np.zeros(4))
    with refused(*why):
        method_rows(method, found, plan, (0.95,), growth)
    fits = dataclasses.replace(method, law=law._replace(multiplier=lambda *given: np.ones((4, 1))))
    assert method_rows(fits, found, plan, (0.95,), growth).half_width.shape == (1, 4, 2)


# An error inside somebody's own function names the function and whose it is.


def fails(*given: Any) -> Any:
    del given
    raise KeyError("nothing here")


def fine(key: Any, client: Any) -> Any:
    return jax.random.normal(key, (2,))


def of_problem(**changes: Any) -> Callable[[], Any]:
    given = {"init": np.zeros(2), "sample": fine, "num_clients": 2, "name": "mine"}
    given["loss"] = lambda x, seen: jnp.sum((x - seen) ** 2)
    return lambda: jaxlsgd.Problem(**(given | changes))


def of_method(**changes: Any) -> Callable[[], Any]:
    return in_cell(methods=(dataclasses.replace(BATCH_MEANS, **changes),))


def of_algorithm(**changes: Any) -> Callable[[], Any]:
    return in_cell(algorithm=jaxlsgd.Algorithm("mine", **changes))


def in_cell(**changes: Any) -> Callable[[], Any]:
    step = jaxlsgd.schedules.constant_step(0.3)
    plan = jaxlsgd.schedules.constant(1).plan(step, num_rounds=20 * SIZE)
    return lambda: Cell(jaxlsgd.problems.linear(2, 3), plan, **changes)


draws = {"sample": None, "draws": jaxlsgd.Draws(2)}
FAILING = {
    "`loss` of problem 'mine'": of_problem(loss=fails),
    "`sample` of problem 'mine'": of_problem(sample=fails),
    "`observe` of problem 'mine'": of_problem(observe=fails, **draws),
    "`gradient` of problem 'mine'": of_problem(gradient=fails),
    "`hessian` of problem 'mine'": of_problem(hessian=functools.partial(fails, 1)),
    "`loss` of the problem": of_problem(loss=jax.jit(fails), name=""),
    "`init` of method 'batch_means'": of_method(accumulators=(Accumulator(fails, fails),)),
    "`update` of method 'batch_means'": of_method(
        accumulators=(batches(SIZE)._replace(update=fails),)
    ),
    "`measure` of method 'batch_means'": of_method(measure=fails),
    "`matrix` of method 'batch_means'": of_method(matrix=fails),
    "`init_server` of algorithm 'mine'": of_algorithm(init_server=fails),
    "`init_client` of algorithm 'mine'": of_algorithm(init_client=fails),
    "`begin` of algorithm 'mine'": of_algorithm(begin=fails),
    "`direction` of algorithm 'mine'": of_algorithm(direction=fails),
    "`send` of algorithm 'mine'": of_algorithm(send=fails),
    "`receive` of algorithm 'mine'": of_algorithm(receive=fails),
}


@pytest.mark.parametrize("what", FAILING)
def test_an_error_inside_somebodys_own_function_names_it(what: str) -> None:
    line = fails.__code__.co_firstlineno + 2
    with pytest.raises(KeyError, match="nothing here") as caught:
        FAILING[what]()
    note = f"in your {what} (test_own_method.py, line {line})"
    assert checks.user_code_note(caught.value) == note
    assert checks.describe(caught.value) == f"{note}: KeyError: 'nothing here'"
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "fails" in frames


def test_errors_of_the_package_have_no_such_note(problem: jaxlsgd.Problem) -> None:
    with refused("contrasts", "shape") as caught:
        in_cell(methods=(jaxlsgd.random_scaling(contrasts=[[1.0]]),))()
    assert checks.user_code_note(caught.value) == ""
    with pytest.raises(TypeError) as caught_too:
        of_problem(loss=lambda x: x)()  # called with two arguments: no line of its own was reached
    assert checks.user_code_note(caught_too.value).startswith(
        "in your `loss` of problem 'mine' (test_own_"
    )
