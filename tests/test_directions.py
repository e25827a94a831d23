"""Finite-horizon critical values of several directions; tables, p-values, and the edges."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused

import jaxlsgd
from jaxlsgd import schedules
from jaxlsgd.core.estimator import Horizon
from jaxlsgd.inference import finite_horizon
from jaxlsgd.inference.laws import finite_horizon as finite_law
from jaxlsgd.inference.laws import tables
from jaxlsgd.inference.laws.random_scaling import Directions, direction_multiplier


def paper_plan(name: str, gamma: float, num_steps: int) -> schedules.Plan:
    step = schedules.power_decay(gamma)
    return schedules.paper(name).with_warmup(0.05).plan(step, num_steps=num_steps)


def factors(eigenvalues: list[float], plan: schedules.Plan, dtype: str):
    with jax.enable_x64(dtype == "float64"):
        values = jnp.asarray(eigenvalues, dtype)
        found = finite_horizon.horizon_factors(values, Horizon.of(plan, dtype))
        return jax.tree.map(lambda x: np.asarray(x, np.float64), found)


# --- several directions at once ---


def sums_from_noise(plan: schedules.Plan, eigenvalue: float) -> np.ndarray:
    """L with P = L ε: how the noise of each round enters the path's sums, (T, T)."""
    rho = (1 - plan.eta * eigenvalue) ** plan.E
    rows, row = [], np.zeros(plan.num_rounds)
    for n in range(plan.num_rounds):
        row = row * rho[n]
        row[n] = 1
        rows.append(row + (rows[-1] if rows else 0))
    return np.array(rows)


def noise_of(plan: schedules.Plan, a: float, b: float) -> np.ndarray:
    """η² Σ_{l<E} ((1 − ηa)(1 − ηb))^l of each round, term by term."""
    rates = (1 - plan.eta * a) * (1 - plan.eta * b)
    terms = [sum(r**power for power in range(E)) for r, E in zip(rates, plan.E, strict=True)]
    return plan.eta**2 * np.array(terms)


def pair_covariance(plan: schedules.Plan, a: float, b: float) -> np.ndarray:
    return (sums_from_noise(plan, a) * noise_of(plan, a, b)) @ sums_from_noise(plan, b).T


def mean_scaling(plan: schedules.Plan, C: np.ndarray) -> float:
    """E V̂ of sums with covariance C."""
    share, weight = clocks(plan)
    spread = np.diagonal(C) - share * (C[:, -1] + C[-1]) + share**2 * C[-1, -1]
    return float(weight @ spread) / plan.num_rounds**2


def clocks(plan: schedules.Plan) -> tuple[np.ndarray, np.ndarray]:
    share = np.arange(1, plan.num_rounds + 1) / plan.num_rounds
    return share, 1 / plan.E / np.sum(1 / plan.E)


@pytest.mark.parametrize("name", ["C1", "C5", "P(1/2)"])
@pytest.mark.parametrize(("dtype", "error"), [("float64", 1e-10), ("float32", 1e-4)])
def test_the_mean_of_the_scaling_matrix_is_exact(name: str, dtype: str, error: float) -> None:
    plan, values = paper_plan(name, 3.0, 400), (0.05, 0.3, 0.9)
    expected = [[mean_scaling(plan, pair_covariance(plan, a, b)) for b in values] for a in values]
    with jax.enable_x64(dtype == "float64"):
        found = finite_horizon.scaling_factors(jnp.asarray(values, dtype), Horizon.of(plan, dtype))
    np.testing.assert_allclose(np.asarray(found), expected, rtol=error)


def two_directions(
    plan: schedules.Plan, values: tuple[float, float], correlation: float, share: float
) -> tuple[Directions, np.ndarray, np.ndarray]:
    """A coordinate of two directions, `share` of whose own variances is the first's; its Cov(P)."""
    C = [[pair_covariance(plan, a, b) for b in values] for a in values]
    S = np.array([[1.0, correlation], [correlation, 1.0]])
    last = np.array([[c[-1, -1] for c in line] for line in C]) / plan.num_rounds**2
    scaling = np.array([[mean_scaling(plan, c) for c in line] for line in C])
    view = np.sqrt(np.array([share, 1 - share]) / np.diagonal(last))
    whole = sum(view[i] * view[j] * S[i, j] * C[i][j] for i in (0, 1) for j in (0, 1))
    ratio = np.diagonal(scaling) / np.diagonal(last)
    variance = np.array([view @ (S * last) @ view])
    detail = Directions(np.array(values), view[None], variance, scaling * S, ratio, np.zeros(1), S)
    return detail, np.asarray(whole), view


def exact_critical(plan: schedules.Plan, covariance: np.ndarray, level: float) -> float:
    noise = finite_law.noise_form(finite_law.Path(covariance, *clocks(plan)))
    form = finite_law.quadratic_form(noise, np.ones(plan.num_rounds))
    return float(finite_law.critical_value(form, 0.0, level))


@pytest.mark.parametrize(
    ("values", "correlation", "allowed"),
    [
        ((0.2, 0.8), -0.9, 0.14),
        ((0.2, 0.8), 0.0, 0.012),
        ((0.2, 0.8), 0.9, 0.012),
        ((0.05, 1.0), -0.9, 0.18),
        ((0.05, 1.0), 0.0, 0.09),
        ((0.05, 1.0), 0.9, 0.07),
    ],
)
@pytest.mark.parametrize("name", ["C5", "P(1/2)"])
def test_the_rule_for_a_coordinate_of_two_directions(
    name: str, values: tuple[float, float], correlation: float, allowed: float
) -> None:
    """Its error at 95 %, against the exact law of their sum."""
    plan, worst, naive = paper_plan(name, 2.0, 900), 0.0, 0.0
    for share in (0.2, 0.5, 0.8):
        detail, covariance, _ = two_directions(plan, values, correlation, share)
        exact = exact_critical(plan, covariance, 0.95)
        found = direction_multiplier(0.95, plan, detail)[0]
        worst = max(worst, abs(found / exact - 1))
        # A planted bug: the cross terms of V̂ left out.
        alone = detail._replace(scaling=np.diag(np.diagonal(detail.scaling)))
        wrong = direction_multiplier(0.95, plan, alone)[0]
        naive = max(naive, abs(wrong / exact - 1))
    assert worst < allowed
    assert correlation == 0 or naive > allowed


def test_the_rule_against_simulation() -> None:
    """40,000 paths of two directions at once: covers 95 % within a point and 4 standard errors."""
    plan, values = paper_plan("P(1/2)", 2.0, 600), (0.1, 0.6)
    detail, _, view = two_directions(plan, values, 0.6, 0.5)
    rng, paths = np.random.default_rng(3), 40_000
    s, total, sums = np.zeros((2, paths)), np.zeros((2, paths)), []
    rates = (1 - np.outer(plan.eta, values)) ** plan.E[:, None]
    for m, rho in enumerate(rates):
        own = [[noise_of(plan, a, b)[m] for b in values] for a in values]
        own = np.array(own) * [[1.0, 0.6], [0.6, 1.0]]
        s = rho[:, None] * s + np.linalg.cholesky(own) @ rng.standard_normal((2, paths))
        total = total + s
        sums.append(view @ total)
    share, weight = clocks(plan)
    V = sum(w * (P - n * sums[-1]) ** 2 for w, n, P in zip(weight, share, sums, strict=True))
    q = direction_multiplier(0.95, plan, detail)[0]
    assert abs(np.mean(np.abs(sums[-1]) <= q * np.sqrt(V)) - 0.95) < 0.01 + 4 * 0.0011


# --- tables, p-values and the edges ---


@pytest.mark.parametrize("name", ["C1", "P(1/2)"])
@pytest.mark.parametrize(("num_steps", "allowed"), [(60, 0.055), (2_000, 0.02)])
def test_the_interpolation_error_is_what_is_stated(
    name: str, num_steps: int, allowed: float
) -> None:
    plan, values = paper_plan(name, 1.0, num_steps), np.array([0.1, 0.33, 0.75])
    for bias in (0.0, 0.15, 0.5, 0.9):
        found = tables.interpolated(plan, values, np.full(3, bias), 0.95)
        for value, c in zip(values, found, strict=True):
            noise = finite_law.noise_form(finite_law.path(plan, float(value)))
            form = finite_law.quadratic_form(noise, finite_law.start_path(plan, 0.75))
            assert c == pytest.approx(finite_law.critical_value(form, bias, 0.95), rel=allowed)


def test_p_values_invert_critical_values() -> None:
    plan = paper_plan("C5", 2.0, 900)
    detail, _, _ = two_directions(plan, (0.1, 0.5), 0.3, 0.5)
    law = jaxlsgd.random_scaling("finite").law
    for level in (0.5, 0.95, 0.99):
        q = law.multiplier(level, plan, detail)
        assert law.tail(q, plan, detail)[0] == pytest.approx(1 - level, rel=0.02)
        assert law.tail(-q, plan, detail)[0] == pytest.approx(1 - level, rel=0.02)
    assert law.tail(np.zeros(1), plan, detail)[0] == 1.0
    assert law.tail(np.full(1, 1e4), plan, detail)[0] == pytest.approx(1e-6)


def test_contrasts_are_coordinates_of_another_basis() -> None:
    problem, plan = jaxlsgd.problems.linear(3, 2), paper_plan("C5", 0.5, 500)
    swap = np.eye(3)[::-1]
    methods = (
        jaxlsgd.random_scaling("finite", name="all"),
        jaxlsgd.random_scaling(contrasts=swap, critical="finite", name="swapped"),
    )
    found = jaxlsgd.fit(jax.random.key(0), problem, plan, methods=methods)
    for part in (0, 1, 2):
        straight, turned = found.interval("all")[part], found.interval("swapped")[part]
        np.testing.assert_allclose(np.asarray(turned)[::-1], straight, rtol=1e-5)


@pytest.mark.parametrize("value", [1e-8, 0.5, 1.0, 2.0])
def test_nothing_is_nan_at_the_edges(value: float) -> None:
    """No curvature at all, 1 − η_1 λ = 0 exactly, and −1."""
    plan = schedules.paper("C5").plan(schedules.constant_step(5.0), num_rounds=30)
    assert plan.eta[0] == 1.0
    for dtype in ("float32", "float64"):
        chex.assert_tree_all_finite(factors([value, 0.3], plan, dtype))
    rho, noise = finite_law.local_factors(plan, value)
    np.testing.assert_allclose(rho, (1 - value) ** 5, atol=1e-12)
    np.testing.assert_allclose(noise, sum((1 - value) ** (2 * k) for k in range(5)), rtol=1e-9)
    assert np.isfinite(tables.interpolated(plan, np.array([value]), np.zeros(1), 0.95)).all()


def test_steps_that_are_too_long_are_not_hidden() -> None:
    plan = paper_plan("P(1/2)", 1.0, 200_000)
    with refused("plan", "conflict"):
        finite_law.path(plan, 400.0)
    found = tables.interpolated(
        plan.prefix(2_000), np.array([[0.5], [5e3]]), np.zeros((2, 1)), 0.95
    )
    assert np.isfinite(found[0, 0]) and np.isinf(found[1, 0])  # one wild run does not end the batch
    found = tables.interpolated(plan, np.array([[np.nan]]), np.zeros((1, 1)), 0.95)
    assert np.isnan(found).all()


def test_a_singular_hessian_is_reported() -> None:
    """The loss does not depend on the second parameter: Ĝ has an eigenvalue 0, Ŝ too."""
    problem = jaxlsgd.Problem(
        init=np.zeros(2),
        loss=lambda x, obs: 0.5 * (x[0] - obs) ** 2,
        num_clients=2,
        sample=lambda key, client: jax.random.normal(key),
    )
    plan = paper_plan("C5", 0.5, 100)
    methods = (jaxlsgd.plug_in(), jaxlsgd.plug_in("finite"))
    found = jaxlsgd.fit(jax.random.key(0), problem, plan, methods=methods)
    assert all(found.rows[method.name].floored.all() for method in methods)
    assert str(found).count("a numerical floor acted") == 2
    assert not found.diverged
    for method in methods:
        with refused("state", "data"):
            found.joint_test(method.name)
