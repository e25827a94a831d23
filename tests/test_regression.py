"""Regression on tables: mathematics against slow loops, whole fits against statsmodels and coverage."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from refusals import refused
from scipy import stats

import jaxlsgd
from benchmarks.table_cases import DESIGN, population
from benchmarks.table_data import compare
from benchmarks.tables import minimiser, run_cell
from jaxlsgd import algorithms, fit_table
from jaxlsgd.federation import final_message
from jaxlsgd.federation.agreement import Stacked, stack
from jaxlsgd.regression import local_sgd, pilot
from jaxlsgd.regression.families import family_of
from jaxlsgd.regression.fit_table import DEFAULTS
from jaxlsgd.regression.in_memory import fit_block
from jaxlsgd.regression.options import Options, check_options
from jaxlsgd.regression.standardise import coordinates

TUNING = np.array([0.7, 0.4])


def options(**changes: Any) -> Options:
    return check_options({**DEFAULTS, "family": "logistic", **changes})


@pytest.fixture(scope="module")
def sites() -> pd.DataFrame:
    """Five clients of 60 to 400 rows, with a column each of scale 1e-3 and 1e6."""
    rng = np.random.default_rng(5)
    site = np.repeat(list("abcde"), [60, 100, 200, 300, 400])
    x = rng.standard_normal((len(site), 2)) * [1e-3, 1e6] + [0.0, 3e6]
    z = -0.5 + 500 * x[:, 0] + 5e-7 * (x[:, 1] - 3e6) + 0.3 * (site == "b")
    table = pd.DataFrame({"site": site, "dose": x[:, 0], "income": x[:, 1]})
    table["cost"] = z + rng.standard_t(5, len(site))
    table["sick"] = (rng.uniform(size=len(site)) < 1 / (1 + np.exp(-z))).astype(int)
    table["visits"] = rng.poisson(np.exp(0.5 * z))
    return table


# The pieces.


def test_coordinates_go_there_and_back():
    rng = np.random.default_rng(0)
    X = np.column_stack([np.ones(50), rng.normal(3e6, 1e6, 50), rng.normal(0, 1e-3, 50)])
    y = rng.normal(7.0, 2.0, 50)
    frame = coordinates(X, y, ("Intercept", "a", "b"), 0, scaled=True)
    theta = np.array([0.2, -1.0, 2.0])
    fitted = frame.y_center + frame.y_scale * (frame.features(X) @ theta)
    np.testing.assert_allclose(X @ frame.coefficients(theta), fitted, rtol=1e-10)


def test_messages_are_sums_over_rows():
    """G, ḡ_k and S_k against a loop over rows; S_k has the client's mean taken out."""
    rng = np.random.default_rng(1)
    sizes = [3, 1, 5]
    client = np.repeat(np.arange(3), sizes)
    X, y = rng.normal(size=(9, 2)), rng.integers(0, 2, 9).astype(float)
    p, theta, ridge = np.array([0.5, 0.2, 0.3]), np.array([0.3, -0.2]), np.array([0.0, 0.1])
    sent = {
        str(k): final_message("logistic", (X[client == k], y[client == k]), theta, least_rows=0)
        for k in range(3)
    }
    plain = stack(sent, {str(k): p[k] for k in range(3)})
    found = plain.penalised(ridge, theta)
    G, sample, pooled = np.diag(ridge), np.zeros((2, 2)), np.zeros((2, 2))
    for k in range(3):
        mu = 1 / (1 + np.exp(-X[client == k] @ theta))
        A = X[client == k]
        g = np.array([(m - b) * a for m, b, a in zip(mu, y[client == k], A, strict=True)])
        n = len(g)
        for m, a in zip(mu, A, strict=True):
            G = G + p[k] / n * m * (1 - m) * np.outer(a, a)
        S = np.cov(g.T) if n > 1 else np.outer(g[0], g[0])
        sample += p[k] ** 2 * S / n
        pooled += p[k] ** 2 / n**2 * sum(np.outer(row, row) for row in g)
        np.testing.assert_allclose(found.score[k], g.mean(axis=0) + ridge * theta)
    np.testing.assert_allclose(found.G, G, rtol=1e-12)
    np.testing.assert_allclose(plain.noise, sample, rtol=1e-12)
    np.testing.assert_allclose(plain.noise_uncentred, pooled, rtol=1e-12)


def test_a_pass_is_the_plain_round_of_local_sgd():
    """Averages after every round against `plain_rounds`, with weighted batches and a ridge."""
    rng = np.random.default_rng(2)
    K, length, d, sizes = 3, 12, 2, np.array([12, 5, 7])
    A, y = rng.normal(size=(K, length, d)), rng.integers(0, 2, (K, length)).astype(float)
    p, penalty = np.array([0.5, 0.2, 0.3]), np.array([[0.2, 0.05], [0.05, 0.1]])
    order = local_sgd.reshuffled(np.random.default_rng(3), sizes, steps=6, E=3, width=3)
    eta = np.array([0.3, 0.2], np.float32)
    family = family_of("logistic")
    rows, setting = local_sgd.ClientRows(A, y), local_sgd.Setting(p, np.zeros(1), penalty)
    to32 = lambda tree: jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)  # noqa: E731
    carried = local_sgd.start((), np.array([0.5, -0.5]))
    done, averages = local_sgd.run_pass(
        family.loss, (), to32(rows), to32(setting), order, eta, carried
    )

    def loss(x, batch):
        a, target, weight = batch
        return weight @ family.loss.value(jnp, a @ x, target, TUNING) + 0.5 * x @ penalty @ x

    # The same rows, laid in the order of the steps: those of zeros are padding.
    who, index = np.arange(K)[:, None], order.index.reshape(6, K, 3)
    real = order.weight.reshape(6, K, 3) > 0
    batches = local_sgd.Batches(
        A[who, index] * real[..., None], y[who, index], order.weight.max((0, 1, 3))
    )
    laid, _ = local_sgd.run_batches(family.loss, (), to32(batches), to32(setting), eta, carried)
    np.testing.assert_allclose(laid.x, done.x, rtol=2e-6)

    rounds = algorithms.plain_rounds(loss, weights=p)
    state = rounds.init(jnp.array([0.5, -0.5]))
    who = np.arange(K)[None, :, None]
    for m in range(2):
        index = np.asarray(order.index[m])
        batch = to32((A[who, index], y[who, index], np.asarray(order.weight[m])))
        state, _ = rounds.round(state, batch, eta[m])
        np.testing.assert_allclose(averages[m], state.params, rtol=2e-6)
    np.testing.assert_allclose(done.x, averages[-1])


def test_orders_of_rows():
    """A pass meets all rows once with weight N/n_k; small clients begin again; draws are uniform."""
    sizes = np.array([23, 4, 10])
    index, weight = local_sgd.reshuffled(np.random.default_rng(0), sizes, 10, 5, 8)
    assert index.shape == (2, 5, 3, 8)
    for k in (0, 2):
        met = index[:, :, k][weight[:, :, k] > 0]
        assert sorted(met) == list(range(sizes[k]))
        np.testing.assert_allclose(weight[:, :, k].sum(), 10, rtol=1e-6)
    small = index[:, :, 1, 0].ravel()
    assert sorted(small[:4]) == sorted(small[4:8]) == [0, 1, 2, 3]
    _, absent = local_sgd.reshuffled(np.random.default_rng(0), np.array([0, 10]), 10, 5, 8)
    assert np.all(absent[:, :, 0] == 0)
    again, _ = local_sgd.reshuffled(np.random.default_rng(1), sizes, 10, 5, 8)
    assert not np.array_equal(index, again)
    mixed = np.random.default_rng(2).permutation(37)  # rows of clients, in the order of a file
    dealt, once = local_sgd.dealt(np.random.default_rng(0), mixed, sizes, 10, 8)
    assert dealt.shape == (10, 3, 8)
    for k, own in enumerate(np.split(mixed, [23, 27])):
        met = dealt[:, k][dealt[:, k] < 37]
        assert sorted(met) == sorted(own)
        assert np.ptp((dealt[:, k] < 37).sum(axis=1)) <= 1
    np.testing.assert_allclose(once, [10 / 23, 10 / 4, 1], rtol=1e-6)
    nobody, none = local_sgd.dealt(np.random.default_rng(0), mixed[:10], np.array([0, 10]), 10, 8)
    assert none[0] == 0 and np.all(nobody[:, 0] == 10)
    drawn, equal = local_sgd.with_replacement(np.random.default_rng(0), sizes, 1000, 5, 8)
    np.testing.assert_allclose(equal.sum(axis=-1), 1)
    counts = np.bincount(drawn[:, :, 1, 0].ravel(), minlength=4)
    assert abs(counts - 250).max() < 5 * np.sqrt(1000 * 0.25 * 0.75)  # a false alarm in 10^6


def test_the_rule_keeps_drift_below_its_share():
    """Clients whose Hessians and gradients go together: E falls, or η does, and the bound is named."""
    d, K = 2, 2
    H = np.stack([0.2 * np.eye(d), 1.8 * np.eye(d)])
    g = np.array([[1.0, 0.0], [-1.0, 0.0]])
    S = np.stack([np.eye(d)] * K)
    sizes = np.array([10_000, 10_000])
    found = Stacked(("a", "b"), sizes, np.array([0.5, 0.5]), g, S, H)
    given = {"sizes": sizes, "batches": np.array([100.0, 100.0]), "back": np.eye(d)}
    rule = functools.partial(pilot.choose_rule, found, S, **given, steps=100, share=0.05)
    five = rule(local_steps=5)
    assert five.bound == "drift"
    assert five.passes == 20
    eta = five.eta * np.arange(1, 401.0) ** -pilot.ALPHA
    drift = 0.5 * 4 * eta.mean() * abs(np.einsum("k,kij,kj->i", [0.5, 0.5], H, g)).max()
    np.testing.assert_allclose(drift, 0.05 * np.sqrt(1 / 20_000), rtol=1e-6)
    chosen = rule(local_steps=None)
    assert chosen.E == 1
    assert chosen.bound == "stability"
    np.testing.assert_allclose(chosen.eta, 0.5 / (1.8 + 0.01))


# Whole fits.

RESPONSES = {"gaussian": "cost", "logistic": "sick", "poisson": "visits"}
OTHERS = {
    "gaussian": sm.families.Gaussian(),
    "logistic": sm.families.Binomial(),
    "poisson": sm.families.Poisson(),
}


@pytest.mark.parametrize("family", RESPONSES)
def test_a_fit_agrees_with_statsmodels(sites: pd.DataFrame, family: str):
    """A run, pooled: estimates within 0.1 of its robust standard errors, those within 6 % (the run's 5 %)."""
    y = sites[RESPONSES[family]]
    X = sm.add_constant(sites[["dose", "income"]] * [1e3, 1e-6])
    theirs = sm.GLM(y, X, family=OTHERS[family]).fit(cov_type="HC0")
    back = np.array([1.0, 1e3, 1e-6])
    ours = fit_table(
        sites,
        response=RESPONSES[family],
        client="site",
        family=family,
        features=["dose", "income"],
        variance="pooled",
        methods=["one_step"],
    )
    found = ours.coefficients()
    errors = theirs.bse.to_numpy() * back
    assert np.abs(found.estimate - theirs.params.to_numpy() * back).max() <= 0.1 * errors.max()
    assert np.all(np.abs(found.estimate - theirs.params.to_numpy() * back) < 0.1 * errors)
    assert np.all((found.std_error / errors > 0.99) & (found.std_error / errors < 1.06))
    assert not ours.warnings


@pytest.mark.parametrize("name", ["breast cancer", "diabetes"])
def test_real_tables_against_statsmodels(name: str):
    """With no argument but response, client and family; `benchmarks.table_data` has three more."""
    found = compare(name)
    assert found["gap"] < 0.25
    assert 0.9 < found["least"] <= found["most"] < 1.1


@pytest.mark.parametrize(
    ("family", "target"),
    [("logistic", "population"), ("logistic", "sample"), ("poisson", "population")],
)
def test_intervals_cover(family: str, target: str):
    """(estimate − truth)/SE over 30 small tables: mean square 1 within 4 standard errors.

    The truth is exact (see `benchmarks.table_cases`), and `benchmarks.tables` has 500 tables a cell. Four
    coefficients are worth at least one: 30 squares of normals have a standard error of √(2/30).
    """
    found = run_cell(family, target, tables=30, most=800)
    assert abs(np.mean(found.errors**2) - 1) < 4 * np.sqrt(2 / 30)
    assert found.covered.mean() > 0.87


def test_columns_of_condition_ten_thousand(sites: pd.DataFrame):
    """Two columns that differ by 1e-4 of themselves, one in millions: the rule needs no help."""
    noise = np.random.default_rng(0).standard_normal(len(sites))
    twin = sites["dose"] * 1e9 + 1e2 * noise
    frame = sites[["site", "dose", "cost"]].assign(twin=twin)
    found = fit_table(frame, response="cost", client="site")
    X = np.column_stack([np.ones(len(frame)), frame["dose"] * 1e3, noise])
    theirs = sm.OLS(frame["cost"], X).fit()
    # cost = b₁ dose·10³ + b₂ noise, and noise = (twin − dose·10⁹)/100.
    exact = np.array(
        [theirs.params.iloc[1] * 1e3 - theirs.params.iloc[2] * 1e7, theirs.params.iloc[2] / 100]
    )
    gap = np.abs(found.coefficients().estimate[1:] - exact) / found.coefficients().std_error[1:]
    assert np.all(gap < 0.1)
    (said,) = found.warnings
    assert said.startswith("dose and twin almost determine one another (1 − r about")


def test_an_interval_for_the_rows_alone_is_far_shorter_and_says_so(sites: pd.DataFrame):
    """The planted mistake: taking the run's own error for that of the sample would cover nothing."""
    both = {
        target: fit_table(
            sites,
            response="sick",
            client="site",
            family="logistic",
            features=["dose", "income"],
            target=target,
        )
        for target in ("population", "sample")
    }
    ratio = both["sample"].coefficients().std_error / both["population"].coefficients().std_error
    assert np.all(ratio < 0.3)
    assert "not the population" in str(both["sample"])
    assert "about the population" in str(both["population"])


def test_one_pass_is_as_good_as_the_sample_allows():
    """One pass: standard errors within 15 % of the sample's, estimates near; random scaling is offered."""
    world = population("logistic", least=400, most=800)
    block = world.table(np.random.default_rng(0))
    methods = ("one_step", "random_scaling[schedule]")
    fit = fit_block(DESIGN, block, options(rows="fresh", methods=methods))
    many = fit_block(DESIGN, block, options(methods=["one_step"]))
    ratio = fit.coefficients().std_error / many.coefficients().std_error
    assert np.all(
        np.abs(np.log(ratio)) < 0.35
    )  # 80 rounds, half of them left out at worst: ±4 standard errors
    gap = fit.coefficients().estimate - minimiser(world.family, block)
    assert np.all(np.abs(gap) < many.coefficients().std_error)
    assert fit.communication.passes == 1
    scaling = fit.interval("random_scaling[schedule]")
    assert np.all(scaling.upper > scaling.lower)
    with refused("methods", "unsupported"):
        options(methods=["random_scaling[schedule]"])
    with refused("rows", "conflict"):
        options(target="sample", rows="fresh")


def test_a_ridge_is_that_of_the_standardised_slopes(sites: pd.DataFrame):
    """Against the closed form for least squares, intercept free."""
    fit = fit_table(sites, response="cost", client="site", features=["dose", "income"], ridge=0.5)
    X = sites[["dose", "income"]].to_numpy()
    s, y = X.std(axis=0), sites["cost"].to_numpy()
    Z = (X - X.mean(axis=0)) / s
    slopes = np.linalg.solve(Z.T @ Z / len(y) + 0.5 * np.eye(2), Z.T @ (y - y.mean()) / len(y)) / s
    found = fit.coefficients()
    assert np.all(np.abs(found.estimate[1:] - slopes) < 0.1 * found.std_error[1:])
    assert "penalised" in str(fit)


def test_robust_families_report_their_numbers(sites: pd.DataFrame):
    """The median by the smoothed quantile is near that of statsmodels; Huber near least squares."""
    features = ["dose", "income"]
    common = {"response": "cost", "client": "site", "features": features}
    median = fit_table(sites, family="quantile", **common)
    X = sm.add_constant(sites[features] * [1e3, 1e-6])
    theirs = sm.QuantReg(sites["cost"], X).fit(q=0.5)
    gap = median.coefficients().estimate / [1.0, 1e3, 1e-6] - theirs.params.to_numpy()
    # Smoothing moves it, by less than the noise.
    assert np.all(np.abs(gap) < 0.75 * theirs.bse.to_numpy())
    assert "quantile 0.5, smoothed over a bandwidth of" in str(median)
    huber = fit_table(sites, family="huber", delta=1.5, **common)
    assert "quadratic up to residuals of 1.5" in str(huber)
    rlm = sm.GLM(sites["cost"], X).fit(cov_type="HC0")
    gap = huber.coefficients().estimate / [1.0, 1e3, 1e-6] - rlm.params.to_numpy()
    assert np.all(np.abs(gap) < rlm.bse.to_numpy())


# What comes out.


@pytest.fixture(scope="module")
def fitted(sites: pd.DataFrame) -> jaxlsgd.TableFit:
    return fit_table(
        sites,
        formula="sick ~ income + C(site)",
        client="site",
        family="logistic",
        methods=["one_step", "plug_in[finite]"],
    )


def test_outputs_agree(fitted: jaxlsgd.TableFit):
    frame = fitted.to_frame()
    assert list(frame.index.get_level_values("method").unique()) == ["one_step", "plug_in[finite]"]
    assert "C(site)[T.b]" in frame.loc["one_step"].index
    z = frame["estimate"] / frame["std_error"]
    np.testing.assert_allclose(z, frame["statistic"])
    np.testing.assert_allclose(
        frame["upper"] - frame["estimate"],
        stats.t.ppf(0.975, 1060 - 6) * frame["std_error"],
        rtol=1e-6,
    )
    content = json.loads(fitted.to_json())
    assert content["coefficients"][1]["estimate"] == frame["estimate"].iloc[1]
    assert content["communication"]["acf"] == 1 / content["communication"]["local_steps"]
    assert "population" in content["about"]["words"]
    assert fitted.to_csv().splitlines()[0].startswith("method,coefficient,estimate")
    assert len(fitted.to_csv().splitlines()) == 1 + len(frame)
    assert r"C(site)[T.b] &" in fitted.to_latex()
    page = fitted._repr_html_()
    assert page.count("<tr>") == len(frame) + 2
    text = str(fitted)
    assert "exchanges per step" in text
    assert "The run adds" in text
    assert fitted.estimate["income"] == frame.loc["one_step"].loc["income", "estimate"]


def test_figures(fitted: jaxlsgd.TableFit, tmp_path: Path):
    figure = fitted.plot(tmp_path / "forest.svg")
    labels = [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
    assert labels == list(fitted.names[1:])
    along = fitted.plot_path("income", tmp_path / "along.svg")
    (line,) = along.axes[0].lines
    assert list(line.get_xdata()) == [one.round for one in fitted.along]
    assert line.get_ydata()[-1] == fitted.estimate["income"]
    with refused("name", "choice"):
        fitted.plot_path("incom")


def test_intervals_with_one_bound_and_of_functions(fitted: jaxlsgd.TableFit):
    both, lower = fitted.interval(level=0.9), fitted.interval(level=0.95, side="lower")
    np.testing.assert_allclose(lower.lower, both.lower)
    assert np.all(lower.upper == np.inf)
    ratio = fitted.function(lambda b: b["income"] * 1e6)
    j = fitted.names.index("income")
    np.testing.assert_allclose(ratio.lower, fitted.interval().lower[j] * 1e6, rtol=1e-9)
    difference = fitted.function(lambda b: b["C(site)[T.b]"] - b["C(site)[T.c]"])
    V = fitted.coefficients().covariance
    b, c = fitted.names.index("C(site)[T.b]"), fitted.names.index("C(site)[T.c]")
    half = stats.t.ppf(0.975, 1060 - 6) * np.sqrt(V[b, b] + V[c, c] - 2 * V[b, c])
    np.testing.assert_allclose(difference.upper - difference.estimate, half, rtol=1e-6)
    with refused("g", "value", "gradient"):
        fitted.function(lambda b: b["income"] * 0)
    with refused("method", "choice"):
        fitted.interval("two_step")
