"""Measures against formulas written out by hand, with planted failures."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
import warnings

import jax
import numpy as np
import pytest
from refusals import refused

import jaxlsgd
from jaxlsgd.analysis import measures
from jaxlsgd.core.rows import CellRows, MethodRows

Z = 1.959963984540054


def make_cell(
    estimate,
    half,
    *,
    truth=(1.0, 2.0),
    algorithm="local_sgd",
    schedule="C1",
    name="plug_in",
    standard_error=True,
    levels=(0.95,),
    floored=None,
):
    """One method, one saved round; estimate (replications, coordinates), half like it per level."""
    estimate, half = np.asarray(estimate, float), np.asarray(half, float)
    half = half[None] if half.ndim == 2 else half
    floored = np.zeros(len(estimate), bool) if floored is None else np.asarray(floored)
    rows = MethodRows(estimate[None], half[0][None] / Z, half[None], floored[None])
    coordinates = tuple(f"x[{j}]" for j in range(estimate.shape[1]))
    return CellRows(
        problem="linear",
        algorithm=algorithm,
        schedule=schedule,
        num_steps=1000,
        num_rounds=250,
        save_at=(250,),
        steps_at=(1000,),
        levels=levels,
        coordinates={name: coordinates},
        truth={name: None if truth is None else np.asarray(truth, float)},
        standard_error={name: standard_error},
        labels={name: "plug-in"},
        methods={name: rows},
    )


@pytest.fixture
def arrays():
    rng = np.random.default_rng(3)
    estimate = np.array([1.0, 2.0]) + 0.3 * rng.normal(size=(60, 2)) + 0.05
    return estimate, 0.4 + 0.1 * rng.random((60, 2))


def test_measures_are_the_formulas_written_out(arrays):
    estimate, half = arrays
    row = measures.summarise(make_cell(estimate, half))[1]
    x, w, theta, n = estimate[:, 1], half[:, 1], 2.0, 60
    sd = math.sqrt(sum((v - x.mean()) ** 2 for v in x) / (n - 1))
    mse = sum((v - theta) ** 2 for v in x) / n
    se2 = (w / Z) ** 2
    model = math.sqrt(se2.mean())
    hit = [abs(v - theta) <= u for v, u in zip(x, w, strict=True)]
    p = sum(hit) / n
    centred = np.mean(np.abs(x - x.mean()) <= w)
    mse_error = math.sqrt(sum(((v - theta) ** 2 - mse) ** 2 for v in x) / (n * (n - 1)))
    model_error = math.sqrt(se2.var(ddof=1) / (4 * n * model**2))
    distance = np.hypot(estimate[:, 0] - 1, estimate[:, 1] - 2)
    fourth = np.mean((2 * w - 2 * w.mean()) ** 4)
    s2 = (2 * w).var(ddof=1)
    expected = {
        "bias": x.mean() - theta,
        "bias_mcse": sd / math.sqrt(n),
        "empirical_se": sd,
        "empirical_se_mcse": sd / math.sqrt(2 * (n - 1)),
        "model_se": model,
        "model_se_mcse": model_error,
        "model_se_error": model / sd - 1,
        "model_se_error_mcse": (model / sd)
        * math.sqrt(se2.var(ddof=1) / (4 * n * model**4) + 1 / (2 * (n - 1))),
        "rmse": math.sqrt(mse),
        "rmse_mcse": mse_error / (2 * math.sqrt(mse)),
        "coverage": p,
        "coverage_mcse": math.sqrt(p * (1 - p) / n),
        "coverage_all": p,
        "coverage_bias_eliminated": centred,
        "coverage_bias_eliminated_mcse": math.sqrt(centred * (1 - centred) / n),
        "length": 2 * w.mean(),
        "length_mcse": 2 * w.std(ddof=1) / math.sqrt(n),
        "length_sd": 2 * w.std(ddof=1),
        "length_sd_mcse": math.sqrt((fourth - s2**2) / n) / (2 * math.sqrt(s2)),
        "l2_error": distance.mean(),
        "l2_error_mcse": distance.std(ddof=1) / math.sqrt(n),
        "acf": 0.25,
    }
    assert {key: row[key] for key in expected} == pytest.approx(expected, rel=1e-12)
    assert (row["n_ok"], row["n_failed"], row["n_floored"]) == (60, 0, 0)
    assert 0.5 < p < 1, "the case must not be trivial"


def test_wilson_known_values():
    assert measures.wilson(8, 10) == pytest.approx((0.490162, 0.943318), abs=1e-6)
    assert measures.wilson(0, 20) == pytest.approx((0.0, 0.161125), abs=1e-6)
    low, high = measures.wilson(950, 1000)
    assert (low, high) == pytest.approx((0.934685, 0.961874), abs=1e-5)


def test_diverged_rows_are_counted_and_left_out(arrays):
    estimate, half = (a.copy() for a in arrays)
    clean = measures.summarise(make_cell(estimate[:50], half[:50]))[0]
    estimate[50:55] = np.inf
    half[55:58] = np.nan
    estimate[58:] = -np.inf
    floored = np.zeros(60, bool)
    floored[[0, 3, 59]] = True  # the last one diverged as well
    row = measures.summarise(make_cell(estimate, half, floored=floored))[0]
    assert (row["n_ok"], row["n_failed"], row["n_floored"]) == (50, 10, 2)
    assert row["replications"] == 60
    for key in ("bias", "coverage", "coverage_mcse", "length_sd", "l2_error", "rmse"):
        assert row[key] == pytest.approx(clean[key])
    assert row["coverage_all"] == pytest.approx(clean["coverage"] * 50 / 60)
    p = row["coverage_all"]
    assert row["coverage_all_mcse"] == pytest.approx(math.sqrt(p * (1 - p) / 60))


def test_one_diverged_coordinate_takes_its_replication_out(arrays):
    estimate, half = (a.copy() for a in arrays)
    estimate[7, 1] = np.nan
    assert [row["n_ok"] for row in measures.summarise(make_cell(estimate, half))] == [59, 59]


@pytest.mark.parametrize("count", [3, 0])
def test_nothing_completed_is_none_without_a_warning(count):
    cell = make_cell(np.full((count, 2), np.nan), np.full((count, 2), np.inf))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (row, _) = measures.summarise(cell)
        other = measures.paired_difference(cell, "plug_in", cell, "plug_in")
        table = measures.coverage_table(cell)
    assert row["n_ok"] == 0 and row["n_failed"] == count
    assert row["coverage_all"] == (0.0 if count else None)
    free = {"coverage_all", "coverage_all_mcse", "coverage_all_low", "coverage_all_high", "acf"}
    facts = {"label", "cost", "same_replications", *measures.IDENTITY, *measures.COUNTS}
    found = set(row) - free - facts
    assert found and all(row[key] is None for key in found)
    assert other["n_pairs"] == 0 and other["length_difference"] is None
    assert f"0/{count}" in table


def test_one_replication_has_no_standard_deviation():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        row = measures.summarise(make_cell([[1.1, 2.0]], [[0.2, 0.2]]))[0]
    assert row["bias"] == pytest.approx(0.1) and row["bias_mcse"] is None
    assert row["coverage"] == 1.0 and row["empirical_se"] is None and row["length_sd"] is None


def test_unknown_truth_gives_none_and_never_a_wrong_number(arrays):
    row = measures.summarise(make_cell(*arrays, truth=None))[0]
    unknown = ("bias", "rmse", "coverage", "coverage_all", "coverage_low", "l2_error", "bias_mcse")
    assert all(row[key] is None for key in unknown)
    known = ("empirical_se", "model_se", "coverage_bias_eliminated", "length", "length_sd")
    assert all(row[key] > 0 for key in known)


def test_model_se_is_for_methods_that_declare_a_standard_error(arrays):
    for name in ("plug_in", "random_scaling", "mine"):
        found = measures.summarise(make_cell(*arrays, name=name))[0]
        assert found["model_se"] > 0 and found["method"] == name
        found = measures.summarise(make_cell(*arrays, name=name, standard_error=False))[0]
        assert found["model_se"] is None and found["model_se_error"] is None


def test_a_method_keeps_its_model_se_under_another_name():
    plan = jaxlsgd.schedules.constant(2).plan(jaxlsgd.schedules.power_decay(0.5), num_rounds=20)
    methods = [
        jaxlsgd.plug_in(),
        jaxlsgd.plug_in(name="mine"),
        jaxlsgd.plug_in("finite", name="ours"),
        jaxlsgd.random_scaling(name="plug_in_not"),
    ]
    problem = jaxlsgd.problems.linear(2, 2)
    cell = jaxlsgd.simulate(jax.random.key(0), problem, plan, replications=8, methods=methods)
    found = {row["method"]: row for row in measures.summarise(cell) if row["coordinate"] == "x[0]"}
    assert found["mine"]["model_se"] == found["plug_in"]["model_se"] > 0
    assert found["ours"]["model_se"] > 0
    assert found["plug_in_not"]["model_se"] is None
    assert [row["label"] for row in found.values()] == [
        "plug-in",
        "plug-in",
        "plug-in, finite horizon",
        "random scaling",
    ]


def test_model_se_does_not_depend_on_the_level(arrays):
    estimate, half = arrays
    wide = half * 2.5758293035489004 / Z
    rows = measures.summarise(make_cell(estimate, np.stack([half, wide]), levels=(0.95, 0.99)))
    by_level = {row["level"]: row for row in rows if row["coordinate"] == "x[0]"}
    assert by_level[0.99]["model_se"] == pytest.approx(by_level[0.95]["model_se"])
    assert by_level[0.99]["length"] > by_level[0.95]["length"]


def test_rows_of_saved_rounds(arrays):
    estimate, half = arrays
    rows = MethodRows(
        np.stack([estimate, estimate + 9]),
        np.stack([half, half]),
        np.stack([half, half])[:, None],
        np.zeros((2, 60), bool),
    )
    saved = {"save_at": (25, 250), "steps_at": (50, 1000), "methods": {"plug_in": rows}}
    cell = dataclasses.replace(make_cell(estimate, half), **saved)
    found = measures.summarise(cell)
    assert [(r["save_round"], r["save_steps"], r["coordinate"]) for r in found] == [
        (25, 50, "x[0]"),
        (25, 50, "x[1]"),
        (250, 1000, "x[0]"),
        (250, 1000, "x[1]"),
    ]
    assert found[0]["acf"] == 0.5 and found[2]["acf"] == 0.25
    assert found[0]["coverage"] > 0.5 and found[2]["coverage"] == 0.0
    assert measures.summarise(cell, last_only=True) == found[2:]


def correlated(rng, n=400, shift=0.02):
    common = rng.normal(size=(n, 1))
    estimate = 1.0 + 0.3 * common
    half = 0.55 + 0.05 * rng.normal(size=(n, 1)) ** 2
    first = make_cell(estimate, half, truth=(1.0,))
    other = make_cell(estimate + shift, 1.2 * half, truth=(1.0,), schedule="C5")
    return first, other


def test_paired_errors_are_smaller_than_unpaired_ones():
    a, b = correlated(np.random.default_rng(0))
    found = measures.paired_difference(b, "plug_in", a, "plug_in")
    rows = [measures.summarise(cell)[0] for cell in (b, a)]
    assert found["n_pairs"] == 400
    for key in ("coverage", "length"):
        assert found[f"{key}_difference"] == pytest.approx(rows[0][key] - rows[1][key])
        apart = math.hypot(rows[0][f"{key}_mcse"], rows[1][f"{key}_mcse"])
        assert found[f"{key}_difference_mcse"] < 0.8 * apart
    assert found["length_ratio"] == pytest.approx(1.2)
    assert found["length_ratio_mcse"] == pytest.approx(0, abs=1e-12)


def test_pairs_are_those_completed_in_both():
    a, b = correlated(np.random.default_rng(1))
    a.methods["plug_in"].estimate[0, :5] = np.nan
    b.methods["plug_in"].half_width[0, 0, 3:9] = np.inf
    found = measures.paired_difference(b, "plug_in", a, "plug_in")
    assert found["n_pairs"] == 391
    assert found["length_ratio"] == pytest.approx(1.2)


def test_differences_compare_everything_with_the_reference():
    a, b = correlated(np.random.default_rng(2))
    found = measures.differences([a, b])
    assert [(row["schedule"], row["reference_schedule"]) for row in found] == [("C5", "C1")]
    (row,) = measures.differences([a, b], reference=("C5", "plug_in"))
    assert row["schedule"] == "C1" and row["length_difference"] < 0
    assert measures.differences([a, b], reference=("Log", "plug_in")) == []


def test_differences_stay_within_an_algorithm():
    a, b = correlated(np.random.default_rng(2))
    others = [dataclasses.replace(cell, algorithm="fedprox") for cell in (a, b)]
    for reference in (None, ("C1", "plug_in")):
        found = measures.differences([a, *others, b], reference=reference)
        where = [(row["algorithm"], row["schedule"], row["reference_schedule"]) for row in found]
        assert where == [("local_sgd", "C5", "C1"), ("fedprox", "C5", "C1")]
    across = measures.paired_difference(others[1], "plug_in", a, "plug_in")
    assert (across["algorithm"], across["reference_algorithm"]) == ("fedprox", "local_sgd")


def test_paired_difference_refuses_what_is_not_there():
    a, b = correlated(np.random.default_rng(2))
    with refused("method", "choice"):
        measures.paired_difference(a, "plug_in", b, "x")
    with refused("coordinate", "choice"):
        measures.paired_difference(a, "plug_in", b, "plug_in", coordinate="y")
    with refused("level", "choice"):
        measures.paired_difference(a, "plug_in", b, "plug_in", level=0.5)


def test_coverage_table_is_aligned_and_says_how_many(arrays):
    lines = measures.coverage_table(make_cell(*arrays)).splitlines()
    assert "coverage %" in lines[0] and lines[2].endswith("60/60") and len(lines) == 4
    assert len({len(line) for line in lines}) == 1


def test_coverage_table_names_the_algorithm_where_it_is_not_local_sgd(arrays):
    plain, other = make_cell(*arrays), make_cell(*arrays, algorithm="fedprox")
    assert "algorithm" not in measures.coverage_table([plain, plain])
    header, _, first, *_, last = measures.coverage_table([plain, other]).splitlines()
    assert header.split()[:2] == ["problem", "algorithm"]
    assert (first.split()[1], last.split()[1]) == ("local_sgd", "fedprox")
    assert "fedprox" in measures.coverage_table(other)


def test_measures_start_without_jax():
    code = "import sys, jaxlsgd.analysis.measures; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
