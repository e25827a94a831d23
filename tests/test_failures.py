"""What counts as a failure: causes of replications, and where they are told."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused
from report_helpers import fake_cell
from study_helpers import TOML, call, small

import jaxlsgd
from jaxlsgd import Problem, one_step, plug_in, problems, random_scaling, schedules, simulate
from jaxlsgd.analysis import failures, measures
from jaxlsgd.analysis.moments import wilson
from jaxlsgd.core.causes import MOST_GROWTH, Cause, causes
from jaxlsgd.core.rows import MethodRows
from jaxlsgd.engine import probe
from jaxlsgd.report import figures, tables
from jaxlsgd.study.store import files
from jaxlsgd.study.store.reader import Results

INCREMENTS = one_step(gradients="increments")
METHODS = (
    INCREMENTS,
    plug_in(),
    random_scaling(),
    random_scaling(mode="diagonal", name="diagonal"),
)


def run(problem: Problem, gamma0: float, num_steps: int = 300, **more: Any) -> Any:
    plan = schedules.paper("C5").plan(schedules.power_decay(gamma0), num_steps=num_steps)
    more = {"replications": 8, "methods": METHODS, "devices": jax.devices()[:1]} | more
    return simulate(jax.random.key(0), problem, plan, **more)


def last(cell: Any) -> dict[str, set[int]]:
    return {name: set(rows.cause[-1].tolist()) for name, rows in cell.methods.items()}


def test_an_exploded_path_with_finite_estimates_is_flagged() -> None:
    """Every method that averages the whole path; the numbers are finite, so only a rule can tell."""
    cell = run(problems.linear(5, 10), 14.0, dtype="float64")
    for name in ("plug_in", "random_scaling", "diagonal"):
        rows = cell.methods[name]
        assert np.isfinite(rows.estimate).all() and np.isfinite(rows.half_width).all()
        assert set(rows.cause[-1]) == {Cause.EXPLODED}
        assert not rows.ok.any()


def test_a_method_that_leaves_the_wild_part_out_completes_where_others_have_exploded() -> None:
    """With 1,000 observations one_step[increments] has a calm part to go by; its errors are those of a calm run."""
    cell = run(problems.linear(5, 10), 10.0, 1000)
    assert last(cell)["plug_in"] == {Cause.EXPLODED}
    assert last(cell)[INCREMENTS.name] == {Cause.COMPLETED}
    error = cell.methods[INCREMENTS.name].estimate[-1] - cell.truth[INCREMENTS.name]
    assert np.abs(error).max() < 0.2
    text = measures.coverage_table(cell)
    assert measures.DIFFERENT in text and measures.DIFFERENT in tables.render(cell)
    one = jaxlsgd.fit(
        jax.random.key(0), problems.linear(5, 10), _plan(10.0, 1000), methods=METHODS[:2]
    )
    assert one.failures == {"plug_in": Cause.EXPLODED}
    assert "plug_in: exploded" in str(one) and "not affected" not in str(one)
    assert f"That {INCREMENTS.name} did not fail does not show that its intervals hold." in str(one)
    assert one.diverged and not one.compare()


def _plan(gamma0: float, num_steps: int) -> Any:
    return schedules.paper("C5").plan(schedules.power_decay(gamma0), num_steps=num_steps)


def _healthy() -> dict[str, tuple[Problem, float]]:
    away = [np.full(5, far / np.sqrt(5)) for far in (10.0, 100.0)]
    linear = problems.linear(5, 10)
    return {
        "paper linear": (problems.paper_linear(), 0.5),
        "paper logistic": (problems.paper_logistic(), 2.0),
        "tiny steps": (linear, 1e-6),
        "10 away": (problems.linear(5, 10, init=away[0]), 0.5),
        "100 away": (problems.linear(5, 10, init=away[1]), 0.5),
        "logistic, 10 away": (problems.logistic(5, 10, init=away[0]), 2.0),
        "starts at the truth": (problems.linear(5, 10, init=linear.true_vector), 0.5),
        "one of all": (problems.linear(1, 1), 0.5),
        "no noise, at the truth": (problems.linear(2, 3, noise=0.0, heterogeneity=0.0), 0.5),
    }


@pytest.mark.parametrize("name", list(_healthy()))
def test_healthy_runs_are_never_flagged(name: str) -> None:
    """At early rounds too. Their loss grows by less than 1 of the 100 that the rule allows."""
    problem, gamma0 = _healthy()[name]
    # Those that average share their estimate, so one stands for all.
    cell = run(problem, gamma0, replications=32, save_at=(2, 3, 10), methods=plug_in())
    for rows in cell.methods.values():
        assert np.isin(rows.cause, (Cause.COMPLETED, Cause.FLOORED)).all()
        worst = probe.growth(problem, "float32", rows.estimate.reshape(-1, problem.dim)).max()
        assert worst < MOST_GROWTH / 20


def test_contrasts_of_an_exploded_path_are_flagged_too() -> None:
    method = random_scaling(contrasts=[[1.0, -1.0, 0.0]])
    assert last(run(problems.linear(3, 4), 14.0, methods=method)) == {method.name: {Cause.EXPLODED}}
    assert last(run(problems.linear(3, 4), 0.5, methods=method)) == {method.name: {Cause.COMPLETED}}


def _silent_loss(x: jax.Array, observation: jax.Array) -> jax.Array:
    return jnp.where(observation > 0, jnp.nan, 0.0) + 0.0 * jnp.sum(x)


def test_a_loss_that_is_no_number_is_seen_though_its_gradient_is_zero() -> None:
    problem = Problem(
        init=np.zeros(2),
        loss=_silent_loss,
        gradient=lambda x, observation: jnp.zeros(2),
        hessian=lambda x, observation: jnp.eye(2),
        num_clients=2,
        sample=lambda key, client: jax.random.normal(key),
    )
    cell = run(problem, 0.5, 40, methods=plug_in())
    assert np.isfinite(cell.methods["plug_in"].estimate).all()
    assert last(cell) == {"plug_in": {Cause.LOSS}}


def test_one_round_is_undefined_and_not_a_divergence() -> None:
    cell = run(problems.linear(2, 3), 0.5, 40, save_at=(1,))
    for name in (INCREMENTS.name, "random_scaling", "diagonal"):
        assert set(cell.methods[name].cause[0]) == {Cause.UNDEFINED}
    one = jaxlsgd.fit(jax.random.key(0), problems.linear(2, 3), _plan(0.5, 1))
    assert (
        "There is no interval" in str(one)
        and "too few rounds" in str(one)
        and "diverged" not in str(one)
    )
    assert one.failures and not one.diverged


def test_the_order_of_causes() -> None:
    estimate = np.zeros((6, 1))
    half = np.ones((1, 6, 1))
    estimate[0], half[0, 1], half[0, 2] = np.inf, np.nan, np.inf
    growth = [np.nan, 0, 0, 101, np.nan, 100]
    floored = np.array([1, 1, 1, 1, 1, 1], bool)
    found = causes(estimate, half, floored, growth)
    names = ["NON_FINITE", "NON_FINITE", "UNDEFINED", "EXPLODED", "LOSS", "FLOORED"]
    assert [Cause(one).name for one in found] == names


def test_growth_is_that_of_the_loss_written_out() -> None:
    """Of a quadratic without data: f(x) = 3 + ‖x‖²/2, so growth is (‖x‖² − ‖x_0‖²)/(2 f(x_0))."""
    problem = Problem(
        init=np.array([1.0, 1.0]),
        loss=lambda x, observation: 3 + 0.5 * jnp.sum(x**2) + 0.0 * observation,
        num_clients=3,
        sample=lambda key, client: jax.random.normal(key),
    )
    x = np.array([[0.0, 0.0], [10.0, 0.0], [1e30, 0.0], [np.nan, 0.0]])
    found = probe.growth(problem, "float32", x)
    np.testing.assert_allclose(found[:2], [-1 / 4, 49 / 4], rtol=1e-6)
    assert found[2] == np.inf and np.isnan(found[3])


def test_causes_are_kept_in_tiles(tmp_path: Path) -> None:
    spec = small().cells[0]
    shape = (2, 16, 2)
    cause = np.arange(32, dtype=np.uint8).reshape(2, 16) % 6
    rows = MethodRows(
        np.zeros(shape), np.ones(shape), np.ones((2, 1, 16, 2)), np.zeros((2, 16), bool), cause
    )
    both = {method.name: rows for method in spec.methods}
    again = files.decode_tile(files.encode_tile(spec, 0, both), spec, 0)
    for method in again.values():
        np.testing.assert_array_equal(method.cause, cause)
    wrong = {name: dataclasses.replace(rows, cause=cause + 200) for name in both}
    with refused("", "damaged", "arrays", kind=files.Damaged):
        files.decode_tile(files.encode_tile(spec, 0, wrong), spec, 0)


WILD = TOML.replace("num_clients = 3", "num_clients = 3\ngamma0 = [0.5, 50.0]")


def test_the_command_line_tells_how_many_failed_and_why(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(WILD.replace('"C1", ', ""))
    place = {"cwd": tmp_path}
    code, out, err = call("run", "study.toml", "--out", "results", **place)
    cell = next(c for c in Results(tmp_path / "results").cells() if "gamma0-50" in c)
    assert code == 0
    assert "80 of 160 replications failed" in out
    assert "more than 1 % of the replications failed in 1 cell: " + cell in err
    code, out, err = call("run", "study.toml", "--out", "results", "--quiet", **place)
    assert (code, out) == (0, "") and cell in err  # resumed, with nothing to do but to warn
    code, out, _ = call("failures", "results", **place)
    assert code == 0 and f"{cell}  plug_in  " in out and "80 of 80: 0-79" in out
    assert (
        call("failures", "results", "--cell", "gamma0-0", **place)[1] == "no replication failed\n"
    )
    code, _, err = call("failures", "results", "--cell", "nowhere", **place)
    assert code == 2 and "--cell: must be part of a cell's id, got 'nowhere'" in err


def test_tables_say_why_and_where_methods_differ() -> None:
    cell = fake_cell(diverged=3)
    text = tables.render(cell)
    assert "3 not finite" in text and "all runs %" in text
    assert measures.DIFFERENT not in text
    told = measures.coverage_table(cell)
    assert "plug_in: 3 of 40 failed (3 not finite)" in told and "all runs %" in told
    other = MethodRows(*(getattr(cell.methods["plug_in"], name) for name in _FIELDS))
    cell.methods["plug_in"] = dataclasses.replace(other, cause=np.full((1, 40), Cause.EXPLODED))
    assert measures.DIFFERENT in tables.render(cell)
    assert "40 exploded" in tables.render(cell)


_FIELDS = ("estimate", "scale", "half_width", "floored")


def test_failures_list_methods_causes_and_numbers() -> None:
    found = failures.failures(fake_cell(diverged=3))
    assert {(one.method, one.cause, one.replications) for one in found} == {
        (name, Cause.NON_FINITE, (0, 1, 2)) for name in fake_cell().methods
    }
    assert failures.failures(fake_cell()) == []


@pytest.mark.parametrize(("count", "warned"), [(1, False), (2, True)])
def test_a_cell_is_named_where_more_than_one_per_cent_failed(count: int, warned: bool) -> None:
    tally = failures.Tally()
    tally.add("cell", fake_cell(replications=100, diverged=count).methods, 100)
    assert tally.total() == f"{count} of 100 replications failed ({count} not finite)"
    assert ("cell (2 of 100: 2 not finite)" in tally.warning("results")) == warned


def test_replications_beyond_those_asked_for_do_not_count() -> None:
    tally = failures.Tally()
    tally.add("cell", fake_cell(diverged=5).methods, 3)
    assert tally.total().startswith("3 of 3 replications failed")


def test_one_replication_has_no_standard_error() -> None:
    row = measures.summarise(fake_cell(replications=1))[0]
    assert row["coverage"] in (0.0, 1.0) and row["coverage_mcse"] is None
    text = measures.coverage_table(fake_cell(replications=1)) + tables.render(
        fake_cell(replications=1)
    )
    assert "(0" not in text and "nan" not in text


def test_a_coverage_of_all_or_none_has_an_interval_and_not_an_error_of_zero() -> None:
    text = tables.render(fake_cell(replications=20, truth=(50.0, 50.0)))
    low, high = wilson(0, 20)
    assert f"0.0 [{100 * low:.1f}, {100 * high:.1f}]" in text and "in brackets" in text.lower()
    assert "0.0000" not in text
    told = measures.coverage_table(fake_cell(replications=20, truth=(50.0, 50.0)))
    assert "[0.0, 16.1]" in told and "Wilson" in told


def test_a_coverage_that_is_unknown_is_explained() -> None:
    for text in (
        tables.render(fake_cell(truth=None)),
        measures.coverage_table(fake_cell(truth=None)),
    ):
        assert measures.NO_TRUTH in text
    assert measures.NO_TRUTH not in tables.render(fake_cell())


def test_wilson_holds_the_proportion_for_every_number_of_trials() -> None:
    n = np.arange(1, 5001)
    for hits in (np.zeros_like(n), n, n // 2, n - 1):
        low, high = wilson(hits, n)
        assert (low <= hits / n).all() and (hits / n <= high).all()
        assert (low >= 0).all() and (high <= 1).all()
    assert (wilson(n, n)[1] == 1).all() and (wilson(0 * n, n)[0] == 0).all()


@pytest.mark.parametrize("n", [250, 400, 500])
def test_full_and_zero_coverage_can_be_drawn(tmp_path: Path, n: int) -> None:
    for name, truth in (("none", 50.0), ("all", 0.0)):
        cell = fake_cell(replications=n, truth=(truth, truth))
        if name == "all":
            cell.methods["plug_in"].half_width[:] = 100.0
        assert figures.save_all(cell, tmp_path / name)
    # A bar that rounding has turned around is drawn all the same.
    row = measures.summarise(fake_cell())[0] | {"coverage": 1.0, "coverage_high": 1 - 1e-15}
    assert figures.by_schedule([row], "coverage")


def test_figures_say_how_many_failed(tmp_path: Path) -> None:
    rows = figures.first_coordinate(fake_cell(diverged=8))
    drawn = figures.by_schedule(rows, "coverage")
    assert "8 of 40 runs failed in 1 cell (8 not finite)" in drawn.get_supxlabel()
    well = figures.by_schedule(figures.first_coordinate(fake_cell()), "coverage").get_supxlabel()
    assert "failed" not in well


@pytest.mark.parametrize("figure", ["coverage", "tradeoff"])
def test_figures_for_print_say_how_many_failed(tmp_path: Path, figure: str) -> None:
    told = "8 of 40 runs failed in 1 cell (8 not finite)"
    for diverged, said in ((8, True), (0, False)):
        path = figures.save_for_print(
            fake_cell(diverged=diverged), tmp_path, figure, format="svg", width="page"
        )
        drawn = " ".join(re.sub(r"<[^>]*>", "", path.read_text("utf-8")).split())
        assert (told in drawn) == said


def test_a_figure_counts_failures_of_what_it_draws() -> None:
    cell = fake_cell(saves=3)
    first, second = cell.methods
    cell.methods[second] = fake_cell(saves=3, diverged=8).methods[second]
    rows = measures.summarise(cell)
    assert rows[0]["method"] == first  # whose error is drawn
    assert "failed" not in figures.error_along_rounds(rows).get_supxlabel()


def test_a_fit_prints_no_p_value_of_zero_and_a_neutral_floor() -> None:
    problem = problems.linear(2, 3, center=[50.0, 50.0])
    text = str(jaxlsgd.fit(jax.random.key(0), problem, _plan(0.5, 300), methods=[plug_in()]))
    assert "<1e-15" in text and "          0\n" not in text
    one = jaxlsgd.fit(jax.random.key(0), problem, _plan(0.5, 300), methods=[random_scaling()])
    one.rows["random_scaling"].floored[:] = True
    assert "a numerical floor acted" in str(one) and "eigenvalues" not in str(one)
    assert "T = 1 round, 1 observation per client" in str(
        jaxlsgd.fit(jax.random.key(0), problem, _plan(0.5, 1), methods=[plug_in()])
    )
