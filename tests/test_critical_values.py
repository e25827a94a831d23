"""Critical values: against published digits, brute-force eigenvalues, simulation, and nonsense input."""

import csv
import doctest
import functools
import itertools
import math
import re
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import scipy.special
from refusals import refused
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.special import polygamma

from jaxlsgd.inference.laws import critical_values, standard
from jaxlsgd.inference.laws import critical_values as cv
from jaxlsgd.report.paper import tables

FOUR_DECIMALS = {0.0: 6.7473, 1 / 3: 6.3616, 1 / 2: 5.8069, 2 / 3: 4.9711}
WARMED_UP_C5 = np.repeat([1, 5], [250, 950])


def plan_of(E):
    return types.SimpleNamespace(E=np.asarray(E))


def g_of_beta(beta):
    return lambda r: r ** (1 / (1 - beta))


def g_of_plan(E):
    inverse = np.concatenate([[0.0], np.cumsum(1 / np.asarray(E))])
    return lambda r: np.interp(r, inverse / inverse[-1], np.linspace(0, 1, inverse.size))


def sine_coefficients(g, terms, points=None):
    """h_k by adaptive oscillatory quadrature, piece by piece: nothing in common with the package."""
    edges = [0.0, 1.0] if points is None else [0.0, *points, 1.0]
    pairs = list(itertools.pairwise(edges))

    def one(k):
        parts = [
            quad(lambda r: r - g(r), low, high, weight="sin", wvar=k * np.pi) for low, high in pairs
        ]
        return math.sqrt(2) * sum(part[0] for part in parts)

    return np.array([one(k) for k in range(1, terms + 1)])


def tail_by_eigenvalues(c, h):
    """P(|t*| > c) from eigvalsh of the truncated form, whose diagonal rest is added in two orders."""
    kappa = np.pi * np.arange(1, h.size + 1)
    roots = np.column_stack([h, np.diag(1 / kappa)])
    form = -(c**2) * roots.T @ roots
    form[0, 0] += 1
    eigenvalues = np.linalg.eigvalsh(form)
    assert np.sum(eigenvalues > 1e-12) == 1
    ratios = -eigenvalues[:-1] / eigenvalues[-1]
    rest_2 = c**2 / eigenvalues[-1] * float(polygamma(1, h.size + 1)) / np.pi**2
    rest_4 = (c**2 / eigenvalues[-1]) ** 2 * float(polygamma(3, h.size + 1)) / 6 / np.pi**4

    def integrand(v):
        x = 1 + v**2
        log_product = np.log1p(ratios * x).sum() + rest_2 * x - rest_4 * x**2 / 2
        return math.exp(-log_product / 2) / x

    # The two-order rest is an expansion in small a/kappa: past this point the integrand is nothing.
    return 2 / np.pi * quad(integrand, 0, 100 / c, epsrel=1e-11, limit=400)[0]


@pytest.mark.parametrize(("beta", "expected"), FOUR_DECIMALS.items())
def test_the_four_published_betas_to_four_decimals(beta, expected):
    assert round(cv.critical_value(0.95, beta=beta), 4) == expected


def test_the_warmed_up_plan_of_the_paper():
    assert round(cv.for_plan(plan_of(WARMED_UP_C5), 0.95), 3) == 5.555


@pytest.mark.parametrize("c", [0.3, 1.0, 3.0, 6.7473, 15.0])
def test_beta_zero_is_the_product_over_the_bridge(c):
    def integrand(v):
        a = c * math.sqrt(1 + v**2)
        return math.sqrt(a / math.sinh(a)) / (1 + v**2)

    expected = 2 / np.pi * quad(integrand, 0, 600 / c, epsrel=1e-12, epsabs=0, limit=500)[0]
    assert cv.p_value(c) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 0.8])
def test_tail_against_brute_force_eigenvalues(beta):
    h = sine_coefficients(g_of_beta(beta), 200)
    for c in (1.0, 3.0, 5.0, 8.0):
        assert cv.p_value(c, beta=beta) == pytest.approx(tail_by_eigenvalues(c, h), rel=1e-6)


def test_tail_of_a_plan_against_brute_force_eigenvalues():
    E = np.array([1, 1, 1, 4, 4, 2, 7, 7, 7, 3])
    r = np.cumsum(1 / E)
    h = sine_coefficients(g_of_plan(E), 200, points=(r[:-1] / r[-1]).tolist())
    for c in (1.0, 4.0, 7.0):
        expected = tail_by_eigenvalues(c, h)
        assert cv.p_value_for_plan(plan_of(E), c) == pytest.approx(expected, rel=1e-6)


def test_terms_that_are_left_out_do_not_matter(monkeypatch):
    make_beta, make_plan = (
        critical_values.beta_spectrum.__wrapped__,
        critical_values.plan_spectrum.__wrapped__,
    )
    schedules = [WARMED_UP_C5, np.tile([1, 5], 700), np.arange(3_000) ** 2 % 11 + 1]
    spectra = [functools.partial(make_beta, beta) for beta in (0.05, 0.5, 0.95)]
    spectra += [functools.partial(make_plan, E.tobytes()) for E in schedules]
    kept = [critical_values.quantile(0.95, spectrum()) for spectrum in spectra]
    monkeypatch.setattr(critical_values, "_TERMS", 1_500)
    more = [critical_values.quantile(0.95, spectrum()) for spectrum in spectra]
    np.testing.assert_allclose(kept, more, rtol=1e-10)


def test_p_value_and_critical_value_are_inverse():
    levels = [1e-3, 0.5, 0.8, 0.95, 0.98, 0.999, 0.9999, 1 - 1e-9]
    for beta in (0.0, 0.2, 0.5, 0.9, 0.99):
        values = [cv.critical_value(level, beta=beta) for level in levels]
        np.testing.assert_allclose(cv.p_value(values, beta=beta), 1 - np.array(levels), rtol=1e-10)
    plan = plan_of(WARMED_UP_C5)
    values = [cv.for_plan(plan, level) for level in levels]
    np.testing.assert_allclose(cv.p_value_for_plan(plan, values), 1 - np.array(levels), rtol=1e-10)


def test_critical_values_grow_with_level_and_shrink_with_beta():
    levels = np.concatenate([np.linspace(0.01, 0.99, 30), [0.999, 0.9999, 0.999999]])
    for beta in (0.0, 0.4, 0.7):
        assert np.all(np.diff([cv.critical_value(level, beta=beta) for level in levels]) > 0)
    betas = [0.0, 1e-3, 0.1, 0.3, 0.6, 0.9, 0.99, 0.999, 1 - 2**-53]
    assert np.all(np.diff([cv.critical_value(0.95, beta=beta) for beta in betas]) < 0)


@pytest.mark.parametrize("c", [0.5, 1.5, 2.3722, 4.0])
def test_beta_near_one_tends_to_the_uncentred_statistic(c):
    # g = 0 on [0, 1): t* = B(1)/sqrt(int B^2), and the determinant is cosh a - (a / c^2) sinh a.
    a_0 = brentq(lambda a: a * math.tanh(a) - c**2, 1e-6, 200, xtol=1e-14)

    def integrand(u):
        a = a_0 * math.cosh(u)
        product = (a / c**2 * math.sinh(a) - math.cosh(a)) / math.sinh(u) ** 2
        return 1 / math.cosh(u) / math.sqrt(product)

    end = math.acosh(1 + 80 / a_0)
    expected = 2 / np.pi * quad(integrand, 1e-9, end, epsrel=1e-9, limit=200)[0]
    assert cv.p_value(c, beta=1 - 2**-53) == pytest.approx(expected, rel=1e-7)
    # One round so long that g jumps: float64 cannot tell where it begins from where it ends.
    plan = plan_of(np.append(np.ones(5, int), 2**62))
    near = plan_of(np.append(np.ones(5, int), 10**7))
    assert cv.p_value_for_plan(plan, c) == pytest.approx(cv.p_value_for_plan(near, c), rel=1e-5)


def test_p_value_shapes_signs_and_ends():
    statistic = np.array([[0.0, -2.0, 2.0], [np.inf, -np.inf, 1e300]])
    values = cv.p_value(statistic, beta=0.5)
    assert isinstance(values, np.ndarray)
    assert values.shape == statistic.shape
    assert values.dtype == np.float64
    assert values[0, 0] == 1.0
    assert values[0, 1] == values[0, 2] == pytest.approx(cv.p_value(2, beta=0.5), rel=1e-14)
    assert np.all(values[1] == 0.0)
    assert cv.p_value([]).shape == (0,)
    for scalar in (2, 2.0, np.float32(2), np.array(2.0)):
        assert type(cv.p_value(scalar)) is float
    assert type(cv.critical_value(np.float64(0.95))) is float
    assert type(cv.for_plan(plan_of([1, 2, 3]), 0.95)) is float
    many = np.abs(np.random.default_rng(1).standard_normal(100)) * 4
    np.testing.assert_allclose(
        cv.p_value(many, beta=0.5), [cv.p_value(x, beta=0.5) for x in many], rtol=1e-12
    )


def test_extreme_arguments_stay_probabilities():
    c = np.concatenate([[0.0], np.logspace(-300, 300, 61)])
    for beta in (0.0, 0.5, 0.999, 1 - 2**-53):
        tail = cv.p_value(c, beta=beta)
        assert np.all((tail >= 0) & (tail <= 1))
        assert np.all(np.diff(tail) <= 1e-15)
    for E in ([1, 10**12], [10**12, 1], [10**6, 1, 10**6], [1, 1, 1, 2**62]):
        assert 1.9 < cv.for_plan(plan_of(E), 0.95) < 6.748


@pytest.mark.parametrize("rounds", [2, 10, 1_000, 40_000])
def test_a_constant_plan_has_the_value_of_beta_zero(rounds):
    plan = plan_of(np.full(rounds, 5))
    assert cv.for_plan(plan, 0.95) == pytest.approx(cv.critical_value(0.95), rel=1e-13)


@pytest.mark.parametrize(("beta", "tolerance"), [(1 / 3, 0.01), (1 / 2, 0.005)])
def test_a_power_plan_tends_to_the_value_of_its_family(beta, tolerance):
    errors = []
    for rounds in (100, 10_000, 1_000_000):
        E = np.ceil(np.arange(1, rounds + 1) ** beta - 1e-9).astype(np.int64)
        errors.append(abs(cv.for_plan(plan_of(E), 0.95) / cv.critical_value(0.95, beta=beta) - 1))
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < tolerance


def test_a_plan_of_a_hundred_thousand_different_rounds():
    E = np.random.default_rng(3).permutation(100_000) % 9 + 1
    # Exchangeable noise in E averages out: g is almost the identity.
    assert cv.for_plan(plan_of(E), 0.95) == pytest.approx(cv.critical_value(0.95), rel=1e-3)


@pytest.mark.parametrize(
    ("name", "g", "value"),
    [
        ("beta 0", g_of_beta(0.0), lambda level: cv.critical_value(level)),
        ("beta 1/2", g_of_beta(0.5), lambda level: cv.critical_value(level, beta=0.5)),
        ("beta 0.8", g_of_beta(0.8), lambda level: cv.critical_value(level, beta=0.8)),
        ("plan", g_of_plan(WARMED_UP_C5), lambda level: cv.for_plan(plan_of(WARMED_UP_C5), level)),
    ],
)
def test_coverage_of_a_million_simulated_paths(name, g, value):
    """False-alarm rate: 12 comparisons at 4 standard errors each, below 8e-4 in all.

    t* is drawn from its sine series, 64 terms and the mean of the rest, so that no time grid biases it: the
    variance left out changes the integral by some 1e-4 of itself, second order in the probability.
    """
    rng = np.random.default_rng(20_260_101)
    kappa = np.pi * np.arange(1, 65)
    r = (np.arange(2**18) + 0.5) / 2**18
    h_values = r - g(r)
    h = np.array([math.sqrt(2) * np.mean(h_values * np.sin(k * r)) for k in kappa])
    rest_noise, rest_h = 1 / 6 - np.sum(kappa**-2), max(np.mean(h_values**2) - h @ h, 0.0)
    parts = []
    for _ in range(50):
        Z = rng.standard_normal(20_000)
        terms = rng.standard_normal((20_000, 64)) / kappa + Z[:, None] * h
        parts.append(np.abs(Z) / np.sqrt((terms**2).sum(axis=1) + rest_noise + rest_h * Z**2))
    draws = np.concatenate(parts)
    for level in (0.8, 0.95, 0.99):
        error = math.sqrt(level * (1 - level) / draws.size)
        assert abs(np.mean(draws <= value(level)) - level) < 4 * error, (name, level)
        # A planted error of 3 % in the critical value is seen.
        assert abs(np.mean(draws <= 1.03 * value(level)) - level) > 4 * error, (name, level)


def test_paper_values_are_those_printed_and_near_the_exact_ones():
    assert cv.paper_value(0, 0.95) == 6.753
    assert cv.paper_value(1 / 3, 0.98) == 8.0945
    assert cv.paper_value(0.333333, 0.8) == 3.712
    assert len(cv.PAPER_GRID) == 16
    for beta, level in cv.PAPER_GRID:
        exact = cv.critical_value(level, beta=beta)
        assert cv.paper_value(beta, level) == pytest.approx(exact, rel=8e-3)
    for beta, level in ((0.25, 0.95), (0, 0.99)):
        with refused("beta, level", "choice") as caught:
            cv.paper_value(beta, level)
        assert "critical_value" in str(caught.value)  # which takes any


def read_rows(path):
    return list(csv.DictReader(path.read_text().splitlines()))


def wald_rows():
    return read_rows(Path(cv.__file__).with_name("wald_critical_values.csv"))


def test_wald_table_is_whole_and_grows_both_ways():
    rows = wald_rows()
    assert len(rows) == 20 * 6
    assert all(int(row["replications"]) >= 400_000 for row in rows)
    values = np.array([float(row["value"]) for row in rows]).reshape(20, 6)
    assert np.all(np.diff(values, axis=0) > 0)
    assert np.all(np.diff(values, axis=1) > 0)
    assert cv.wald_critical_value(3, 0.95) == values[2, 2]


def test_wald_table_in_one_dimension_is_the_exact_square():
    """False-alarm rate: 6 comparisons at 4 standard errors, below 4e-4; the table is fixed, so it never flips."""
    for row in wald_rows()[:6]:
        exact = cv.critical_value(float(row["level"])) ** 2
        assert abs(float(row["value"]) - exact) < 4 * float(row["standard_error"]), row
        assert float(row["standard_error"]) < 2e-3 * exact


def test_wald_table_against_paths_on_a_grid():
    """False-alarm rate: 6 comparisons at 4 standard errors, below 4e-4; grid bias is under a quarter of one."""
    rng = np.random.default_rng(5)
    replications, steps = 20_000, 1_000
    r = np.arange(1, steps + 1)[:, None] / steps
    for dim in (2, 6):
        parts = []
        for _ in range(replications // 500):
            path = np.cumsum(rng.standard_normal((500, steps, dim)), axis=1) / math.sqrt(steps)
            end = path[:, -1]
            bridge = path - r * end[:, None]
            M = bridge.transpose(0, 2, 1) @ bridge / steps
            parts.append(np.sum(end * np.linalg.solve(M, end[..., None])[..., 0], axis=1))
        W = np.concatenate(parts)
        for level in (0.8, 0.95, 0.99):
            error = math.sqrt(level * (1 - level) / replications)
            assert abs(np.mean(W <= cv.wald_critical_value(dim, level)) - level) < 4 * error


def test_wald_script_makes_the_table_it_says(tmp_path):
    script = Path(__file__).resolve().parents[1] / "scripts" / "make_wald_table"
    output = tmp_path / "wald.csv"
    options = ["--dims", "2", "--terms", "32", "--replications", "4000", "--output", str(output)]
    subprocess.run([sys.executable, str(script), *options], check=True, timeout=120)
    for row in read_rows(output):
        # 12 correlated comparisons at 5 standard errors: false-alarm rate below 1e-5.
        table = cv.wald_critical_value(int(row["dim"]), float(row["level"]))
        assert abs(float(row["value"]) - table) < 5 * float(row["standard_error"]), row


def test_table2_has_every_cell_and_agrees_within_its_error():
    rows = tables.critical_values(4_000, seed=3, steps=200)
    assert [(row["beta"], row["level"]) for row in rows] == list(cv.PAPER_GRID)
    for row in rows:
        # Smoothing and 200 steps bias the quantile by up to 3 %; 5 standard errors come on top.
        bound = 5 * row["simulated_mcse"] + 0.03 * row["exact"]
        assert abs(row["simulated"] - row["exact"]) < bound, row
    assert tables.critical_values(4_000, seed=3, steps=200) == rows
    assert tables.critical_values(4_000, seed=4, steps=200) != rows


nan = float("nan")
BAD_CALLS = [
    ("level", cv.critical_value, {"value": (0, 1, 95, -0.1), "not_finite": (nan,)}),
    ("level", cv.critical_value, {"type": ("0.95", None, True, [0.9, 0.95], 0.9 + 0j)}),
    ("beta", lambda x: cv.critical_value(0.95, beta=x), {"value": (-0.1, 1, 1.5)}),
    (
        "beta",
        lambda x: cv.critical_value(0.95, beta=x),
        {"not_finite": (nan,), "type": ("0", None)},
    ),
    ("beta", lambda x: cv.p_value(1.0, beta=x), {"value": (1,), "not_finite": (nan,)}),
    ("beta", lambda x: cv.p_value(1.0, beta=x), {"type": (False,)}),
    ("statistic", cv.p_value, {"not_finite": (nan, [0.0, nan])}),
    ("statistic", cv.p_value, {"type": ("x", None, [[1], 2], 1j, object())}),
    ("statistic", lambda x: cv.p_value_for_plan(plan_of([1, 2]), x), {"not_finite": (nan,)}),
    ("level", lambda x: cv.for_plan(plan_of([1, 2]), x), {"value": (2,)}),
    ("plan.E", lambda E: cv.for_plan(plan_of(E), 0.95), {"value": ([3], [0, 1], [-1, 2])}),
    ("plan.E", lambda E: cv.for_plan(plan_of(E), 0.95), {"type": ([], [1.5, 2.0], ["a", "b"])}),
    ("plan.E", lambda E: cv.for_plan(plan_of(E), 0.95), {"shape": ([[1, 2], [3, 4]], 3)}),
    ("plan.E", lambda plan: cv.for_plan(plan, 0.95), {"type": (object(),)}),
    ("dim", lambda x: cv.wald_critical_value(x, 0.95), {"value": (0, 21)}),
    ("dim", lambda x: cv.wald_critical_value(x, 0.95), {"type": (1.0, True, None, nan)}),
    ("level", lambda x: cv.wald_critical_value(2, x), {"choice": (0.5, 0.951)}),
    ("level", lambda x: cv.wald_critical_value(2, x), {"value": (95,), "not_finite": (nan,)}),
    ("beta, level", lambda x: cv.paper_value(0, x), {"choice": (0.5,)}),
    ("level", lambda x: cv.paper_value(0, x), {"value": (1,), "not_finite": (nan,)}),
]


@pytest.mark.parametrize(
    ("argument", "code", "call", "value"),
    [
        (argument, code, call, value)
        for argument, call, wrong in BAD_CALLS
        for code, values in wrong.items()
        for value in values
    ],
)
def test_bad_input_is_refused_by_name_rule_and_value(argument, code, call, value):
    with refused(argument, code, "must ", "got "):
        call(value)


def test_the_levels_there_are_get_listed():
    with refused("level", "choice", "0.8, 0.9, 0.95, 0.975, 0.98, 0.99"):
        cv.wald_critical_value(2, 0.85)


@pytest.mark.parametrize("module", [cv, critical_values, tables])
def test_examples_in_the_docstrings_run(module):
    results = doctest.testmod(module)
    assert results.failed == 0


def test_the_exact_law_needs_no_jax():
    for module in (cv, critical_values):
        source = Path(str(module.__file__)).read_text()
        assert not re.search(r"^\s*(import jax|from jax)(\s|\.)", source, re.MULTILINE)


@pytest.mark.parametrize("p", [0.4, 0.025, 1e-4, 1e-9, 1e-15])
def test_quantiles_of_student_for_many_degrees_of_freedom(p):
    df = np.random.default_rng(1).uniform(1, 60, (300, 5))
    df[0] = 1e6, 3, 2.999, 1, 1e300
    many = standard.student_quantiles(df, np.full((300, 1), p))
    np.testing.assert_allclose(many, scipy.special.stdtrit(df, p), rtol=1e-11)


def test_quantiles_of_student_with_several_probabilities():
    df, p = np.full((200, 5), 7.0), np.linspace(0.01, 0.9, 200)[:, None]
    found = standard.student_quantiles(df, p)
    np.testing.assert_allclose(found, scipy.special.stdtrit(df, p), rtol=1e-13)
