"""What a run says of its own intervals: nothing that was not tested, and nothing outside what was measured."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from refusals import refused

from jaxlsgd import Fit, Plan, algorithms, load_cell, one_step, plug_in, problems, random_scaling
from jaxlsgd import schedules as all_schedules
from jaxlsgd.analysis import failures, measures, verdict
from jaxlsgd.core import cell_file, storage
from jaxlsgd.core.causes import DIVERGED, MOST_GROWTH, Cause, causes
from jaxlsgd.core.estimator import Sync
from jaxlsgd.core.problem import Problem
from jaxlsgd.core.rows import MethodRows
from jaxlsgd.inference.binned_rounds import binned_rounds, mean_place
from jaxlsgd.inference.one_step import AnchoredDetail
from jaxlsgd.report import tables
from jaxlsgd.runs.cell import Cell
from jaxlsgd.runs.simulate import simulate

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from benchmarks import stress_cases  # noqa: E402
from benchmarks import verdict as benchmark  # noqa: E402

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
JUDGE = one_step()
# A judge of the paper's optimiser alone.
NARROW = dataclasses.replace(JUDGE, any_optimiser=False)
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
    rows = {}
    for method in cell.methods:
        estimate = np.full((1, 1, 2), 0.0 if method.name == "one_step" else gap)
        cause = np.array([[(causes or {}).get(method.name, Cause.COMPLETED)]], np.uint8)
        rows[method.name] = MethodRows(
            estimate, np.ones((1, 1, 2)), np.full((1, 1, 1, 2), 1.96), np.zeros((1, 1), bool), cause
        )
    details = {m.name: DETAIL if m.notes else () for m in cell.methods}
    return Fit(cell, rows, details, {})


# What is said.


def test_a_chance_is_given_this_run_and_the_judge_is_not_judged():
    found = a_fit(gap=1.5).verdicts()
    (one,) = found  # neither of the judge, nor of what is made of its statistics
    assert one.method == "plug_in" and one.doubted
    # P(−1.96 ≤ Z + 1.5 ≤ 1.96)
    np.testing.assert_allclose(one.chance, 0.6770, atol=1e-4)
    assert found["plug_in"] is one and found.judge == "one_step" and found.withheld == ""
    told = str(a_fit(gap=1.5))
    assert "hold the truth, given this run, if one_step is right:" in told
    assert "plug_in: 68 % on average, 68 % for x[0]: its centre is 1.5 standard errors from" in told
    assert "one_step: it is the judge, and is not judged by itself" in told
    assert "one_step[average]: it is made of the same statistics as one_step, which judges" in told
    assert "A chance is not coverage" in told
    assert "expect" not in told


def test_contrasts_are_not_judged_by_a_judge_of_parameters():
    contrast = random_scaling(contrasts=[[1.0, -1.0], [1.0, 1.0]], name="difference")
    found = a_fit(methods=(one_step(), contrast)).verdicts()
    assert not found and "difference: it is for other coordinates than one_step" in str(found)


def test_a_judge_without_an_interval_judges_nothing():
    found = a_fit(causes={"one_step": Cause.CORRECTION}).verdicts()
    assert not found and found.withheld == "one_step, which judges, has no interval"


# Where it is withheld.


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"algorithm": ADAM}, "server_adam is outside the theory"),
        ({"plan": plan_of(51)}, r"rounds of 51 local steps are longer than any .*\(at most 50\)"),
        ({"plan": plan_of(num_steps=100)}, "100 observations per client are fewer"),
        ({"plan": plan_of(num_steps=30_000)}, r"30,000 .* more .*\(500 to 20,000\)"),
        ({"plan": plan_of(alpha=0.9)}, "another family .*from 0.505 to 0.8"),
        (
            {
                "plan": all_schedules.constant(5).plan(
                    all_schedules.constant_step(0.1), num_steps=1_000
                )
            },
            "steps of 0.1 are of another family",
        ),
        ({"plan": Plan.from_arrays([5] * 200, [0.01] * 200)}, r"steps of custom\[200\]"),
        ({"problem": problems.linear(2, 51)}, "51 clients"),
        ({"problem": problems.linear(21, 2)}, "21 parameters"),
    ],
)
def test_outside_what_was_measured_it_is_withheld(change: dict[str, Any], told: str):
    given = {"problem": LINEAR, "plan": plan_of(), "algorithm": algorithms.local_sgd()} | change
    assert verdict.outside(algorithms.local_sgd(), LINEAR, plan_of(), NARROW) == ""
    assert re.search(told, verdict.outside(**given, judge=NARROW))
    # What the optimiser does is no matter to a judge that any optimiser is a pilot of.
    wide = verdict.outside(**given, judge=JUDGE)
    optimiser = re.search("theory|family|custom", told)
    assert wide == "" if optimiser else re.search(told, wide)


def test_observations_that_drift_are_outside():
    drifting = dataclasses.replace(
        LINEAR, drifts=True, observe=lambda draws, moment: LINEAR.observe(draws, moment.client)
    )
    assert "drift" in verdict.outside(algorithms.local_sgd(), drifting, plan_of(), JUDGE)


@pytest.mark.parametrize(
    "change", [{"algorithm": ADAM, "methods": (NARROW, *METHODS[1:])}, {"plan": plan_of(51)}]
)
def test_a_fit_that_is_withheld_says_why_and_nothing_else(change: dict[str, Any]):
    result = a_fit(**change)
    found = result.verdicts()
    assert not found and found.withheld == result.cell.outside()
    told = str(result)
    assert f"No verdict on these intervals, withheld: {found.withheld}." in told
    assert "Chance" not in told and "it is the judge" not in told
    assert found.withheld in result._repr_html_()


def test_notes_are_said_though_the_verdict_is_withheld():
    result = a_fit(plan_of(51))
    few = DETAIL._replace(df=np.full(2, 7.0), used=np.array(0.7))
    result = dataclasses.replace(result, details=result.details | {"one_step": few})
    assert "one_step: 30 % of the observations count for nothing, as too far away" in str(result)
    assert "only 7 degrees of freedom" in str(result)


def test_the_range_is_what_the_benchmarks_span():
    """The limits are those of cells that were run, and no cell that it is given in is outside."""
    spans = []
    for case in stress_cases.cases():
        if case.num_steps < 500:  # hard on purpose
            continue
        assert verdict.outside(case.algorithm, case.problem, case.plan(), JUDGE) == ""
        spans.append((case.problem, case.plan()))
    inside = [
        case
        for case in benchmark.cases()
        if not verdict.outside(case.algorithm, case.problem, case.plan, NARROW)
    ]
    assert (
        len(benchmark.cases()) - len(inside) == 1
    )  # FedAdam, which the default judges all the same
    for case in benchmark.cases():
        assert verdict.outside(case.algorithm, case.problem, case.plan, JUDGE) == ""
    spans += [(case.problem, case.plan) for case in inside]
    steps = [plan.num_steps for _, plan in spans]
    alphas = [a for _, plan in spans if (a := plan.step_size.alpha)]  # not of constant steps
    assert verdict.MEASURED == verdict.Measured(
        max(int(plan.E.max()) for _, plan in spans),
        max(problem.num_clients for problem, _ in spans),
        max(problem.dim for problem, _ in spans),
        (min(steps), max(steps)),
        (min(alphas), max(alphas)),
    )


def test_a_measure_that_is_withheld_is_missing_and_a_note_says_why():
    result = a_fit(plan_of(51))
    cell = result.cell.with_rows(result.rows)
    for row in measures.summarise(cell):
        assert row["chance"] is row["n_doubted"] is row["coverage_trusted"] is None
        assert row["withheld"] == cell.withheld[row["method"]]
    text = " ".join(tables.render(cell, measures=["chance"]).split())
    assert "No verdict on plug_in: rounds of 51 local steps" in text
    assert "No verdict on one_step: it is the judge" in text
    assert "No verdict" not in tables.render(cell)  # which shows none
    assert tables.render(cell, "csv").splitlines()[0].endswith(",cost,withheld")
    assert tables.render(cell, "csv", measures=["rmse"]).splitlines()[0].endswith(",cost")
    inside = a_fit(gap=1.5)
    rows = measures.summarise(inside.cell.with_rows(inside.rows))
    assert {row["chance"] is None for row in rows if row["method"] == "plug_in"} == {False}


def test_rounds_saved_early_are_not_judged():
    plan = plan_of()
    cell = Cell(LINEAR, plan, METHODS, save_at=(10,))
    one = a_fit().rows
    rows = {name: MethodRows.stacked([_first(x), _first(x)]) for name, x in one.items()}
    found = verdict.chances(cell.with_rows(rows), "plug_in")
    assert np.isnan(found[0]).all() and not np.isnan(found[1]).any()  # 50 and 1,000 observations


def _first(rows: MethodRows) -> MethodRows:
    fields = dataclasses.fields(rows)
    return MethodRows(*(getattr(rows, field.name)[0] for field in fields))


def test_why_it_is_withheld_is_kept_in_a_file(tmp_path):
    result = a_fit(plan_of(51))
    cell = result.cell.with_rows(result.rows)
    path = cell.save(tmp_path / "cell.npz")
    assert load_cell(path).withheld == cell.withheld
    # Files of earlier versions do not say, so nothing is judged.
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files if name != "sha256"}
    header = json.loads(arrays["header"].tobytes())
    del header["cell"]["withheld"]
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    path.write_bytes(storage.seal(arrays))
    old = load_cell(path)
    assert set(old.withheld) == set(old.methods)
    assert "did not record" in old.withheld["plug_in"]
    header["cell"]["withheld"] = {"plug_in": "\x1b[2J"}
    with pytest.raises(cell_file.Unfit, match="printable"):
        cell_file.about_from_json(header["cell"], list(cell.methods))
    header["cell"]["withheld"] = {"someone": "else"}
    with pytest.raises(cell_file.Unfit, match="verdicts"):
        cell_file.about_from_json(header["cell"], list(cell.methods))


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
