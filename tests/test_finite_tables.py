"""Finite-horizon critical values against a slow form of their own: all rounds, all terms, another integral."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import root_scalar
from scipy.special import ndtr

from jaxlsgd import schedules
from jaxlsgd.inference.laws import finite_horizon, tables

# The largest error that the module states; measured here as 0.03 %.
CLOSE = 5e-4
BIASES = np.array([0.0, 0.3, 1.5])


def paper_plan(name: str, gamma: float, num_steps: int) -> schedules.Plan:
    step = schedules.power_decay(gamma)
    return schedules.paper(name).with_warmup(0.05).plan(step, num_steps=num_steps)


def slow_covariance(plan: schedules.Plan, eigenvalue: float) -> np.ndarray:
    """Cov(P_n, P_m) of all rounds, from how each round's noise enters the sums."""
    rho = (1 - plan.eta * eigenvalue) ** plan.E
    rates = (1 - plan.eta * eigenvalue) ** 2
    noise = [sum(r**power for power in range(E)) for r, E in zip(rates, plan.E, strict=True)]
    rows, row = [], np.zeros(plan.num_rounds)
    for n in range(plan.num_rounds):
        row = row * rho[n]
        row[n] = 1
        rows.append(row + (rows[-1] if rows else 0))
    enters = np.array(rows)
    return np.asarray((enters * (plan.eta**2 * np.array(noise))) @ enters.T)


class Slow:
    """(Z + b)² − c² |√D ζ + hZ + bd|² by eigenvalues, and its sign by Gil-Pelaez' formula."""

    def __init__(self, plan: schedules.Plan, eigenvalue: float, fastest: float) -> None:
        C, T = slow_covariance(plan, eigenvalue), plan.num_rounds
        share, weight = np.arange(1, T + 1) / T, 1 / plan.E / np.sum(1 / plan.E)
        turn = np.eye(T) - np.outer(share, np.eye(T)[-1])
        apart, along = turn @ C @ turn.T, turn @ C[:, -1]
        root = np.sqrt(weight / C[-1, -1])
        rest = apart - np.outer(along, along) / C[-1, -1]
        values, vectors = np.linalg.eigh(root[:, None] * rest * root)
        self.D = np.maximum(values, 0)
        self.h = vectors.T @ (root * along) / np.sqrt(C[-1, -1])
        fade = np.cumsum(np.cumprod(np.maximum(1 - plan.eta * fastest, 0) ** plan.E))
        self.d = vectors.T @ (np.sqrt(weight) * (fade / fade[-1] - share))

    def tail(self, b: float, c: float) -> float:
        u = np.arange(-13.0, 9.0, 0.1)
        t = np.exp(u)[:, None] / (1 + b**2 + c**2 * (self.D.sum() + (self.h**2).sum()))
        spread = 1 / (1 + 2j * t * c**2 * self.D)
        a2 = 1j * t[:, 0] * (1 - c**2 * spread @ self.h**2)
        a1 = 2j * t[:, 0] * b * (1 - c**2 * spread @ (self.h * self.d))
        a0 = 1j * t[:, 0] * b**2 * (1 - c**2 * spread @ self.d**2)
        log = a0 + a1**2 / (2 * (1 - 2 * a2)) - 0.5 * np.log(1 - 2 * a2)
        values = np.imag(np.exp(log + 0.5 * np.log(spread).sum(1)))
        return 0.5 + 0.1 * values.sum() / np.pi

    def critical_value(self, b: float, level: float) -> float:
        found = root_scalar(lambda c: self.tail(b, c) - (1 - level), bracket=(0.3, 100.0))
        return found.root


@pytest.mark.parametrize(
    ("name", "gamma", "num_steps", "eigenvalue"),
    [
        ("C1", 0.5, 100, 0.05),
        ("C5", 0.5, 300, 0.5),
        ("P(1/2)", 2.0, 400, 1.4),  # 1 − η_1 λ < −1: the first rounds swing
        ("C1", 0.5, 330, 0.4),  # not all rounds are kept
    ],
)
def test_the_quick_form_agrees_with_the_slow_one(
    name: str, gamma: float, num_steps: int, eigenvalue: float
) -> None:
    plan, fastest = paper_plan(name, gamma, num_steps), 0.45
    noise = finite_horizon.noise_form(finite_horizon.path(plan, eigenvalue))
    form = finite_horizon.quadratic_form(noise, finite_horizon.start_path(plan, fastest))
    slow = Slow(plan, eigenvalue, fastest)
    found = finite_horizon.critical_value(form, BIASES, 0.95)
    right = [slow.critical_value(float(b), 0.95) for b in BIASES]
    np.testing.assert_allclose(found, right, rtol=CLOSE)
    # A planted bug: the start's bend left out of V̂.
    straight = finite_horizon.quadratic_form(noise, noise.share)
    wrong = finite_horizon.critical_value(straight, BIASES, 0.95)
    assert np.max(np.abs(wrong / right - 1)) > 100 * CLOSE


def test_the_tail_keeps_its_digits_where_it_is_small() -> None:
    """Down to 1e-8, against quadrature over the two ζ of a small form, given which Z is normal."""
    D, d = np.array([0.2, 0.1]), np.array([0.5, 0.3])
    form = finite_horizon.Form(D, np.zeros(2), np.zeros(2), d**2, 0.0)
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    first, second = np.meshgrid(nodes, nodes, indexing="ij")
    mass = np.outer(weights, weights) / (2 * np.pi)
    for b, c in ((2.0, 3.0), (3.0, 4.0), (5.0, 4.0)):
        root = c * np.hypot(np.sqrt(D[0]) * first + d[0] * b, np.sqrt(D[1]) * second + d[1] * b)
        right = np.sum(mass * (ndtr(b - root) + ndtr(-b - root)))
        found = finite_horizon.tail_probability(form, np.array([b]), np.array([c]))
        np.testing.assert_allclose(found, right, rtol=1e-3)


def test_a_tables_row_is_the_same_in_any_company_and_made_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows must not depend on which tile came first, nor on whether they were read from a file."""
    monkeypatch.setattr(tables, "_cache", {})
    plan = paper_plan("C5", 0.5, 150)
    together = tables.table_rows(plan, 0.95, range(-3, 2), 1)
    monkeypatch.setattr(tables, "_cache", {})
    tables._noises_of.cache_clear()
    used: tables.Rows = {}
    with tables.recording(used):
        alone = [tables.table_rows(plan, 0.95, range(i, i + 1), 1)[0] for i in range(-3, 2)]
    np.testing.assert_array_equal(np.array(alone), together)
    assert len(used) == 5
    monkeypatch.setattr(tables, "_cache", {})
    tables.remember(used)
    monkeypatch.setattr(tables, "_made", None)
    again: tables.Rows = {}
    with tables.recording(again):
        np.testing.assert_array_equal(tables.table_rows(plan, 0.95, range(-3, 2), 1), together)
    assert again.keys() == used.keys()


def test_the_oldest_rows_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_cache", {})
    monkeypatch.setattr(tables, "_MOST", 3)
    for i in range(5):
        tables.remember({str(i): np.array([float(i)])})
    assert [tables.cached(str(i)) is not None for i in range(5)] == [False, False, True, True, True]
