"""The truth's own error: on its way from a problem to files, tables and the page, and where it is warned of."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import page_helpers
import pandas
import pytest
import xarray
from refusals import Why, refused
from report_helpers import fake_cell
from scipy.stats import norm

from jaxlsgd import Draws, Problem, load_cell, measures, plug_in, problems, random_scaling
from jaxlsgd.core.cell_file import Unfit, about_from_json, about_to_json
from jaxlsgd.inference.rivals.bootstrap import bootstrap, perturbed
from jaxlsgd.inference.rivals.federation_tree import split_clients
from jaxlsgd.report import export, tables
from jaxlsgd.report.page import build
from jaxlsgd.report.tables import Selection
from jaxlsgd.runs.cell import Cell
from jaxlsgd.schedules import constant, power_decay

COVARIANCE = np.array([[4.0, 1.0], [1.0, 9.0]]) * 1e-4
PLAN = constant(5).plan(power_decay(0.5), num_steps=100)


def estimated(**more: Any) -> Problem:
    return dataclasses.replace(problems.linear(2, 4), truth_covariance=COVARIANCE, **more)


def cell_with(error: Any, **more: Any):
    cell = fake_cell(**more)
    return dataclasses.replace(
        cell, truth_error=dict.fromkeys(cell.methods, np.asarray(error, float))
    )


def test_a_problem_has_standard_errors_of_its_truth():
    np.testing.assert_allclose(estimated().truth_error, [0.02, 0.03])
    assert problems.linear(2, 4).truth_error is None
    exact = dataclasses.replace(estimated(), truth_covariance=np.zeros((2, 2)))
    assert exact.truth_covariance is None and exact.truth_error is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"truth": None}, ("truth_covariance", "unwanted")),
        ({"truth_covariance": np.eye(3)}, ("truth_covariance", "shape", "(2, 2)")),
        ({"truth_covariance": np.ones(2)}, ("truth_covariance", "shape", "(2, 2)")),
        ({"truth_covariance": -np.eye(2)}, ("truth_covariance", "value", "-1.0")),
        ({"truth_covariance": np.full((2, 2), np.nan)}, ("truth_covariance[0, 0]", "not_finite")),
    ],
)
def test_what_is_no_covariance_is_refused(change: Any, why: Why):
    with refused(*why):
        dataclasses.replace(estimated(), **change)


def test_problems_that_come_with_the_package_are_exact():
    """Closed forms, integrals to eleven digits, or sums over rows that are there: nothing is simulated."""
    rng = np.random.default_rng(0)
    rows = [rng.normal(size=(20, 2)) for _ in range(2)]
    for problem in (
        *(problems.linear(2, 3), problems.logistic(2, 3, heterogeneity=1.0)),
        *(problems.paper_linear(), problems.paper_logistic(), problems.drifting(2, 3)),
        *(problems.instrumental(2, 3), problems.multinomial(2, 3)),
        *(problems.regression(2, 3, family) for family in ("gaussian", "huber", "poisson")),
        problems.dataset(rows, [part.sum(1) for part in rows], loss="squared"),
    ):
        assert problem.truth is not None and problem.truth_error is None, problem.name


def test_a_contrast_has_the_error_of_a_contrast():
    method = random_scaling(contrasts=[[1.0, 0.0], [1.0, -1.0]])
    # Var(x₀ − x₁) = 4 + 9 − 2 · 1
    np.testing.assert_allclose(method.truth_error(estimated()), [0.02, math.sqrt(11e-4)])
    assert method.truth_error(problems.linear(2, 4)) is None


def test_problems_made_of_others_have_the_error_of_these():
    np.testing.assert_allclose(problems.minibatch(estimated(), 8).truth_error, [0.02, 0.03])
    copies = perturbed(estimated(), copies=3)
    np.testing.assert_allclose(copies.truth_error, np.tile([0.02, 0.03], 4))
    # All copies are off by the same, so that their mean is as well.
    np.testing.assert_allclose(bootstrap(3).truth_error(copies), [0.02, 0.03])
    np.testing.assert_allclose(split_clients(estimated(), 2).truth_error, [0.02, 0.03] * 2)


def test_a_cell_has_it_by_method():
    contrast = random_scaling(contrasts=[[1.0, -1.0]], name="gap")
    rows = Cell(estimated(), PLAN, (plug_in(), contrast)).with_rows({})
    np.testing.assert_allclose(rows.truth_error["plug_in"], [0.02, 0.03])
    np.testing.assert_allclose(rows.truth_error["gap"], [math.sqrt(11e-4)])
    assert Cell(problems.linear(2, 4), PLAN, (plug_in(),)).with_rows({}).truth_error == {}


def test_it_is_kept_with_the_rows(tmp_path: Path):
    cell = cell_with([0.02, 0.03])
    found = load_cell(cell.save(tmp_path / "cell.npz"))
    for name in cell.methods:
        np.testing.assert_array_equal(found.truth_error[name], [0.02, 0.03])
    about, methods = json.loads(json.dumps(about_to_json(cell))), list(cell.methods)
    for wrong in (
        *({"nobody": [0.1, 0.1]}, {"plug_in": [0.1]}, {"plug_in": [0.1, -0.1]}, []),
        *({"plug_in": ["0.1", 0.1]}, {"plug_in": None}, {"plug_in": [math.inf, 0.1]}),
    ):
        with pytest.raises(Unfit):
            about_from_json(about | {"truth_error": wrong}, methods)
    with pytest.raises(Unfit, match="truth"):
        about_from_json(about | {"truth": dict.fromkeys(methods)}, methods)


def test_files_of_exact_truths_are_what_they_were(tmp_path: Path):
    about, methods = about_to_json(fake_cell()), list(fake_cell().methods)
    assert "truth_error" not in about
    assert about_from_json(json.loads(json.dumps(about)), methods).truth_error == {}
    assert load_cell(fake_cell().save(tmp_path / "cell.npz")).truth_error == {}


def normal_cell(share: float, level: float = 0.95, bias: float = 0.0, count: int = 40):
    """Exact normal intervals of standard error 1, whose truths have an error of so many of these."""
    cell = fake_cell(replications=count, levels=(level,), truth=(0.0, 0.0))
    estimate = bias + norm.ppf((np.arange(count) + 0.5) / count)[None, :, None] * np.ones(2)
    half = np.full((1, 1, count, 2), norm.ppf((1 + level) / 2))
    rows = {
        name: dataclasses.replace(part, estimate=estimate, half_width=half)
        for name, part in cell.methods.items()
    }
    error = dict.fromkeys(rows, np.array([share, share / 2]))
    return dataclasses.replace(cell, methods=rows, truth_error=error)


@pytest.mark.parametrize(("level", "bias"), [(0.95, 0.0), (0.9, 0.0), (0.95, 0.4)])
def test_the_effect_on_coverage_is_that_of_a_shifted_truth(level: float, bias: float):
    """Against counting: 20,001 quantiles of a normal law, and a truth that is off by 1.96 of its errors."""
    cell = normal_cell(0.2, level, bias, 20_001)
    row = measures.summarise(cell)[0]
    assert row["truth_error"] == 0.2
    assert row["truth_error_share"] == pytest.approx(0.2)
    rows = cell.methods["plug_in"]
    estimate, half = rows.estimate[0, :, 0], rows.half_width[0, 0, :, 0]
    at = [np.mean(np.abs(estimate - shift) <= half) for shift in (0.0, 0.392, -0.392)]
    counted = max(abs(at[0] - at[1]), abs(at[0] - at[2]))
    assert row["coverage_truth_error"] == pytest.approx(counted, abs=1e-4)
    other = measures.summarise(cell)[1]  # of half the error: about a quarter of the effect
    assert bias or other["coverage_truth_error"] == pytest.approx(counted / 4, rel=0.05)


def test_an_exact_truth_and_an_unknown_one():
    exact = measures.summarise(fake_cell())[0]
    assert [exact[name] for name in measures.TRUTH] == [0.0, 0.0, 0.0]
    unknown = measures.summarise(fake_cell(truth=None))[0]
    assert [unknown[name] for name in measures.TRUTH] == [None, None, None]
    for cell in (fake_cell(), fake_cell(truth=None)):
        assert "the truth of x" not in measures.coverage_table(cell) + tables.render(cell)


@pytest.mark.parametrize("share", [0.099, 0.101])
def test_a_tenth_of_an_intervals_standard_error_is_warned_of(share: float):
    cell, warned = normal_cell(share), share > 0.1
    for text in (
        str(measures.coverage_table(cell)),
        *(tables.render(cell, format) for format in ("text", "markdown", "latex")),
    ):
        plain = " ".join(text.split())
        assert ("Careful with linear" in plain) == warned
        assert f"the truth of x[0] is known to ±{'0.1' if warned else '0.099'}" in plain
        assert ("coverage may be off by up to about 0.45 points" in plain) == warned
        assert (
            "num" in plain and "steps=1000) finds a truth that is good enough" in plain
        ) == warned
    count = "In 2 of 4 rows it is above 0.1." in " ".join(measures.coverage_table(cell).split())
    assert count == warned


def test_tables_speak_of_what_they_show():
    """The second coordinate has half the error of the first."""
    cell = normal_cell(0.15)
    second = tables.render(cell, selection=Selection(coordinate="x[1]"))
    assert (
        "Careful" not in second and "the truth of x[1] is known to ±0.075, at most 0.075" in second
    )
    assert max(map(len, tables.render(cell).splitlines())) <= 100


def test_programs_get_columns():
    cell = normal_cell(0.2)
    rows = json.loads(tables.render(cell, "json"))
    expected = {(row["method"], row["coordinate"]): row for row in measures.summarise(cell)}
    read = list(csv.DictReader(io.StringIO(tables.render(cell, "csv"))))
    for row, line in zip(rows, read, strict=True):
        right = expected[row["method"], row["coordinate"]]
        for name in measures.TRUTH:
            assert row[name] == float(line[name]) == right[name] > 0


def test_exports_have_it(tmp_path: Path):
    cells = [cell_with([0.02, 0.03]), fake_cell("C5"), fake_cell("Log", truth=None)]
    frames = [
        pandas.read_parquet(export.write(cells, tmp_path / "x.parquet", "parquet")),
        pandas.read_csv(export.write(cells, tmp_path / "x.csv", "csv")),
    ]
    for frame in frames:
        found = frame.groupby(["schedule", "coordinate"]).truth_error.agg(["min", "max"])
        np.testing.assert_array_equal(found.loc["C1"], [[0.02, 0.02], [0.03, 0.03]])
        np.testing.assert_array_equal(found.loc["C5"], 0.0)
        assert found.loc["Log"].isna().to_numpy().all()
    file = export.write(cells, tmp_path / "x.nc", "netcdf")
    for arrays in (xarray.load_dataset(file), export.to_xarray(cells)):
        np.testing.assert_array_equal(arrays.truth_error[0, 0], [0.02, 0.03])
        np.testing.assert_array_equal(arrays.truth_error[1, 0], 0.0)
        assert np.isnan(arrays.truth_error[2]).all()


def test_a_notebook_shows_it():
    assert "1 ± 0.03" in cell_with([0.03, 0.02], truth=(1.0, 0.0))._repr_html_()


def test_the_page_states_it_and_warns(tmp_path: Path):
    """Intervals of the made-up study have standard errors near 0.1, and the second truth is known worst."""
    text = {
        error: build.page(page_helpers.write(tmp_path / f"{error}", truth_error=[error, 2 * error]))
        for error in (1e-4, 0.1)
    }
    little, much = (part.partition("<h2")[2] for part in text.values())
    assert "the truth of x[1] is known to ±0.0002, at most" in little and "Careful" not in little
    assert "Careful with linear: " in much and "the truth of x[1] is known to ±0.2" in much
    exact = build.page(page_helpers.write(tmp_path / "exact"))
    assert "is known to ±" not in exact


def test_a_stored_study_keeps_it(tmp_path: Path):
    results = page_helpers.write(tmp_path / "study", truth_error=[0.01, 0.02])
    for cell in results.read_all():
        for name in cell.methods:
            np.testing.assert_array_equal(cell.truth_error[name], [0.01, 0.02])


def test_a_solved_problem_carries_its_error():
    problem = Problem(
        init={"x": np.zeros(())},
        loss=lambda params, seen: 0.5 * (params["x"] - seen) ** 2,
        num_clients=2,
        draws=Draws(normal=1),
        observe=lambda draws, client: draws.normal[0] + client,
    )
    found = problems.solve(problem, 10_000)
    # The mean of two clients of variance 1 each, 10,000 times: √(½/10,000)
    np.testing.assert_allclose(found.problem.truth_error, [math.sqrt(0.5e-4)], rtol=0.03)
    np.testing.assert_array_equal(found.problem.truth_error, found.standard_error)
