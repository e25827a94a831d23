"""What a run says of its own intervals, and how its methods compare."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from refusals import refused

from jaxlsgd import Fit, Plan, algorithms, one_step, plug_in, problems, random_scaling
from jaxlsgd import schedules as all_schedules
from jaxlsgd.analysis import failures, measures
from jaxlsgd.analysis.chance import chances
from jaxlsgd.core.causes import DIVERGED, MOST_GROWTH, Cause, causes
from jaxlsgd.core.estimator import Sync
from jaxlsgd.core.problem import Problem
from jaxlsgd.core.rows import MethodRows
from jaxlsgd.inference.binned_rounds import binned_rounds, mean_place
from jaxlsgd.inference.one_step import AnchoredDetail
from jaxlsgd.runs.cell import Cell
from jaxlsgd.runs.simulate import simulate

LINEAR = problems.linear(2, 3)
METHODS = (one_step(), one_step(center="average"), plug_in())
DETAIL = AnchoredDetail(
    df=np.full(2, 50.0),
    offset=np.zeros(2),
    used=np.ones(()),
    reason=np.array(0),
    ahead=np.zeros(()),
    gap=np.ones(()),
    rounds=np.array(200.0),
    settled=np.zeros(()),
)
ADAM = algorithms.server_adam()


def plan_of(E: int = 5, gamma0: float = 0.5, num_steps: int = 1_000, **more: Any) -> Plan:
    step = all_schedules.power_decay(gamma0, **more)
    return all_schedules.constant(E).plan(step, num_steps=num_steps)


def a_fit(
    plan: Plan | None = None,
    problem: Problem = LINEAR,
    gap: float = 0.0,
    causes: dict[str, Cause] | None = None,
    **more: Any,
) -> Fit:
    """A fit whose rows are made up: one_step at 0 with standard error 1, the others `gap` away."""
    cell = Cell(problem, plan or plan_of(), **{"methods": METHODS} | more)
    rows, d = {}, problem.dim
    for method in cell.methods:
        estimate = np.full((1, 1, d), 0.0 if method.name == "one_step" else gap)
        cause = np.array([[(causes or {}).get(method.name, Cause.COMPLETED)]], np.uint8)
        rows[method.name] = MethodRows(
            estimate, np.ones((1, 1, d)), np.full((1, 1, 1, d), 1.96), np.zeros((1, 1), bool), cause
        )
    details = {m.name: DETAIL if m.notes else () for m in cell.methods}
    return Fit(cell, rows, details, {})


# How methods compare.


def test_another_method_is_compared_with_the_reference():
    found = a_fit(gap=1.5).compare()
    assert list(found) == ["one_step[average]", "plug_in"]  # not the reference itself
    one = found["plug_in"]
    assert one.reference == "one_step"
    np.testing.assert_allclose(one.distance, 1.5)
    # P(−1.96 ≤ Z + 1.5 ≤ 1.96)
    np.testing.assert_allclose(one.chance, 0.6770, atol=1e-4)
    told = str(a_fit(gap=1.5))
    line = "  plug_in: centre 1.5 (x[0]: 1.5) standard errors away, chance 68 % (x[0]: 68 %)"
    assert line in told.splitlines()
    assert "if one_step is right. It is not the method's coverage." in told
    assert "chance 68 % (x[0]: 68 %)" in a_fit(gap=1.5)._repr_html_()


def test_the_worst_coordinate_is_named_if_there_are_several():
    result = a_fit(gap=1.0)
    rows = result.rows["plug_in"]
    rows.estimate[..., 1], rows.half_width[..., 0] = -3.0, 0.1
    line = "plug_in: centre 2.0 (x[1]: 3.0) standard errors away, chance 10 % (x[0]: 5 %)"
    assert line in str(result)
    single = a_fit(problem=problems.linear(1, 3), gap=1.5)
    assert "plug_in: centre 1.5 standard errors away, chance 68 %\n" in str(single) + "\n"


def test_the_reference_is_what_it_declares():
    """Standard errors, and a theory that holds for any optimiser, whatever the name and the place."""
    other = dataclasses.replace(plug_in(), any_optimiser=True)
    assert {
        one.reference for one in a_fit(methods=(random_scaling(), other)).compare().values()
    } == {"plug_in"}
    for methods in [
        (plug_in(), random_scaling()),
        (plug_in(), dataclasses.replace(one_step(), any_optimiser=False)),
        (plug_in(), one_step(center="average")),  # whose scale is no standard error
        (one_step(),),
    ]:
        result = a_fit(methods=methods)
        assert not result.compare() and "Compared" not in str(result)
    assert a_fit(algorithm=ADAM).compare()["plug_in"].chance is not None
    always = one_step(valid="always", best_at=500)
    assert a_fit(methods=(always, plug_in())).compare()["plug_in"].reference == always.name


def test_contrasts_are_not_compared_with_parameters():
    contrast = random_scaling(contrasts=[[1.0, -1.0], [1.0, 1.0]], name="difference")
    assert list(a_fit(methods=(one_step(), contrast, plug_in())).compare()) == ["plug_in"]


@pytest.mark.parametrize("cause", [Cause.CORRECTION, Cause.EXPLODED])
def test_without_an_interval_nothing_is_compared(cause: Cause):
    assert not a_fit(causes={"one_step": cause}).compare()
    assert list(a_fit(causes={"plug_in": cause}).compare()) == ["one_step[average]"]
    exact = a_fit(gap=1.5)
    exact.rows["one_step"].scale[:] = 0.0
    assert not exact.compare()


def test_no_chance_is_given_by_a_reference_whose_rounds_disagree():
    result = a_fit(gap=1.5)
    apart = DETAIL._replace(gap=np.array(20.0))
    assert not DETAIL.disagrees and apart.disagrees
    assert not apart._replace(reason=np.array(1)).disagrees  # there is no interval
    assert not apart._replace(gap=np.array(np.nan)).disagrees
    result = dataclasses.replace(result, details=result.details | {"one_step": apart})
    one = result.compare()["plug_in"]
    assert one.chance is None
    np.testing.assert_allclose(one.distance, 1.5)
    told = str(result)
    assert "No chance is given: the last rounds of one_step disagree with those before." in told
    assert "  plug_in: centre 1.5 (x[0]: 1.5) standard errors away\n" in told
    assert "one_step: the last rounds disagree with those before (p < 0.001)" in told


def test_no_chance_is_given_if_the_observations_drift():
    drifting = dataclasses.replace(
        LINEAR, drifts=True, observe=lambda draws, moment: LINEAR.observe(draws, moment.client)
    )
    result = a_fit(problem=drifting)
    assert result.compare()["plug_in"].chance is None
    assert "No chance is given: the observations drift." in str(result)
    assert "%" not in str(result).partition("Compared with")[2]


def test_chances_of_many_runs_are_missing_without_an_interval():
    def rows(estimate: Any, half: Any) -> MethodRows:
        center, width = np.reshape(estimate, (1, 3, 1)), np.reshape(half, (1, 1, 3, 1))
        return MethodRows(center, width[0] / 1.96, width, np.zeros((1, 3), bool))

    found = chances(rows([0.0, 1.0, 2.0], [1.96, 1.96, np.inf]), rows(np.zeros(3), [1.96] * 3))
    np.testing.assert_allclose(found[0, 0, :, 0], [0.95, 0.8300, np.nan], atol=1e-4)


def test_notes_are_said_of_methods_with_an_interval():
    result = a_fit()
    few = DETAIL._replace(df=np.full(2, 7.0), used=np.array(0.7), ahead=np.array(0.6))
    result = dataclasses.replace(result, details=result.details | {"one_step": few})
    told = str(result).partition("Notes on these intervals:")[2]
    assert "one_step: 30 % of the observations count for nothing, as too far away" in told
    assert "only 7 degrees of freedom" in told
    assert "most of the width is for how much the Hessian still changes" in told
    assert "average" not in told and "Notes" not in str(a_fit())


# What else a fit says.


def test_the_estimate_is_the_centre_of_the_first_method():
    result = a_fit(gap=3.0)
    np.testing.assert_array_equal(result.estimate, [0, 0])
    np.testing.assert_array_equal(result.estimate_of("plug_in"), [3, 3])  # ȳ_T
    np.testing.assert_array_equal(result.estimate_of("plug_in"), result.interval("plug_in")[0])
    with refused("method", "choice"):
        result.estimate_of("nothing")
    contrast = random_scaling(contrasts=[[1.0, -1.0], [1.0, 1.0]], name="difference")
    with refused("method", "unsupported"):
        a_fit(methods=contrast).estimate_of("difference")


def test_the_heading_names_the_algorithm_and_a_problem_without_a_name():
    assert str(a_fit()).startswith("local_sgd on linear: 3 clients")
    nameless = dataclasses.replace(LINEAR, name="")
    assert str(a_fit(problem=nameless)).startswith("local_sgd on a problem of 2 parameters: 3 ")
    assert str(a_fit(algorithm=ADAM)).startswith("server_adam on linear")


@pytest.mark.parametrize("cause", [Cause.UNDEFINED, Cause.CORRECTION, *DIVERGED])
def test_diverged_is_the_run_and_not_a_method(cause: Cause):
    result = a_fit(causes={"one_step": cause})
    assert result.failures == {"one_step": cause}
    assert result.diverged is (cause in DIVERGED)
    told = str(result)
    assert ("The run diverged" in told) is (cause in DIVERGED)
    assert ("smaller step size" in told) is (cause in DIVERGED)
    assert ("longer run or a larger step size" in told) is (cause == Cause.CORRECTION)
    assert ("There is no interval" in told) is (cause == Cause.UNDEFINED)
    assert "not affected" not in told
    assert "did not fail does not show that its intervals hold" in told
    with refused("method", "data") as caught:
        result.joint_test("one_step")
    assert "one_step" in str(caught.value) and cause.text in str(caught.value)


# A path that has not arrived.


def test_a_sound_path_tells_a_failed_correction_from_an_explosion():
    estimate, half = np.zeros((5, 1)), np.ones((1, 5, 1))
    estimate[0], half[0, 1] = np.nan, np.nan
    growth = [0, 0, MOST_GROWTH + 1, np.nan, 0]
    for path, names in {
        0.5: ["CORRECTION"] * 4 + ["COMPLETED"],
        np.nan: ["NON_FINITE", "NON_FINITE", "EXPLODED", "LOSS", "COMPLETED"],
        MOST_GROWTH + 1: ["NON_FINITE", "NON_FINITE", "EXPLODED", "LOSS", "COMPLETED"],
    }.items():
        found = causes(estimate, half, np.zeros(5, bool), growth, np.full(5, path))
        assert [Cause(one).name for one in found] == names


def test_the_mean_place_is_that_of_all_rounds_that_count():
    rng = np.random.default_rng(0)
    on_host = binned_rounds().on_host
    assert on_host is not None
    x, places, weights = rng.normal(size=2) + 10, [], []
    state = on_host.init(x)
    for m in range(1, 120):
        E = 1 + m // 20
        places.append(x)
        weights.append(E * (m > 8))  # the first 8 observations do not count
        x = x + rng.normal(size=2)
        sync = Sync(x, E, 0.1 / np.sqrt(m), hessian=np.eye(2), gradient_sum=rng.normal(size=2))
        state = on_host.update(state, sync)
    assert state.clock.bin > 1
    np.testing.assert_allclose(mean_place(state), np.average(places, 0, weights), rtol=1e-12)


def test_steps_that_are_too_small_are_no_divergence():
    """The path has not arrived, and no run has an interval."""
    start = problems.linear(5, 4).true_vector
    assert start is not None
    problem = problems.linear(5, 4, init=start + 3)
    plan = plan_of(50, 0.03, 10_000)
    runs, increments = 64, one_step(gradients="increments")
    cell = simulate(
        jax.random.key(0), problem, plan, replications=runs, tile_size=runs, methods=increments
    )
    found = failures.counts(cell.methods[increments.name], -1)
    assert found == {Cause.UNDEFINED: runs} | {one: 0 for one in found if one != Cause.UNDEFINED}
    (row, *_) = measures.summarise(cell)
    assert row["n_undefined"] == row["n_failed"] == runs
    assert "no interval yet" in measures.coverage_table(cell)
