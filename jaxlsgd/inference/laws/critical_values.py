"""The law of the random scaling statistic, from one exact integral and without simulation.

The statistic's limit is t* = B(1)/√∫₀¹(B(r) − g(r)B(1))² dr. Write B(r) = rZ + bridge(r), h(r) = r − g(r),
κ_k = kπ, h_k = √2 ∫h(r) sin(κ_k r) dr and ζ_k, Z i.i.d. N(0, 1). Then {|t*| > c} is the event that
Z² − c² Σ_k (ζ_k/κ_k + h_k Z)² is positive. The determinant of I − s (that form) has a closed form (a Schur
complement on Z; the rest is diagonal):

    D(s) = (sinh a / a) (1 + H(a²) − s),    a = c√s,    H(y) = Σ_k h_k² κ_k² y/(κ_k² + y).

H is concave, so D has one positive root s_0 = 1/λ₊: one positive eigenvalue. Dividing it out leaves the
product over all negative eigenvalues, with s = s_0 cosh² u, y = c²s and y_0 = c²s_0,

    Π(u) = (sinh a / a) s_0 (1 − c² Σ_k h_k² κ_k⁴ / ((κ_k² + y)(κ_k² + y_0))),

    P(|t*| > c) = (2/π) ∫₀^∞ du / (cosh u √Π(u)).

No eigenvalue is ever computed. The integrand is even and analytic for |Im u| < π/2, so that equally spaced
nodes converge geometrically: some 35 of them reach rounding error at the usual levels.

Reference: Li, Liang, Chang and Zhang, "Statistical Estimation and Inference via Local SGD in Federated
Learning", Section 4.2, for the statistic; Imhof (1961) and Abadir and Paruolo (1997) for ratios like it.
"""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import root_scalar

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal

FloatArray = NDArray[np.float64]

# Sine terms kept one by one. The rest, whose |h|^2 is known exactly, is kept as one more term.
_TERMS = 512
# P(|t*| > c) is of the order of exp(-c/2), which is zero in float64 long before this.
_LARGEST = 2000.0


class Spectrum(NamedTuple):
    """h in the sine basis: all that the law of t* depends on."""

    kappa2: FloatArray  # (_TERMS + 1,)  (kπ)²
    energy: FloatArray  # (_TERMS + 1,)  h_k² (kπ)²


@functools.lru_cache(maxsize=64)
def beta_spectrum(beta: float) -> Spectrum:
    """Return the spectrum of h(r) = r − r^{1/(1−β)}, by Gauss-Legendre panels graded to both ends."""
    # Halving panels follow r^p at 0 for p near 1 and at 1 for p large; even ones follow sin(_TERMS pi r).
    halves = 0.5 ** np.arange(1, 54)
    edges = np.unique(np.concatenate([np.linspace(0, 1, _TERMS // 2 + 1), halves, 1 - halves]))
    nodes, weights = np.polynomial.legendre.leggauss(16)
    width = np.diff(edges)[:, None]
    r = (edges[:-1, None] + width * (nodes + 1) / 2).ravel()
    h = (r - r ** (1 / (1 - beta))) * (width * weights / 2).ravel()
    sines = np.sqrt(2) * np.array([h @ power.imag for power in _rotations(np.pi * r)])
    return _spectrum(sines, 2 * beta**2 / (3 * (3 - 2 * beta) * (3 - beta)))


@functools.lru_cache(maxsize=16)
def plan_spectrum(E: bytes) -> Spectrum:
    """Return the spectrum of the piecewise linear h(r_m) = r_m − m/T, for E as the bytes of an int64 array.

    κ h_k = √2 ∫h'(r) cos(κr) dr, exactly: a sum over runs of equal E, not over rounds.
    """
    steps = np.frombuffer(E, np.int64)
    ends = np.append(np.flatnonzero(np.diff(steps)) + 1, steps.size)
    rounds = np.diff(ends, prepend=0)
    width = rounds / steps[ends - 1]
    width /= width.sum()
    middle = np.cumsum(width) - width / 2
    # From the pieces' own widths, never as a difference of two r: one huge E makes a piece of 1e-12 or less.
    rise = width - rounds / steps.size
    slope = 2 * rise / width
    rotations = zip(_rotations(np.pi * middle), _rotations(np.pi * width / 2), strict=True)
    sums = np.array([slope @ (place.real * size.imag) for place, size in rotations])
    h = np.append(0.0, np.cumsum(rise))
    square = width @ (h[:-1] ** 2 + h[:-1] * h[1:] + h[1:] ** 2) / 3
    return _spectrum(np.sqrt(2) * sums / (np.pi * np.arange(1, _TERMS + 1)) ** 2, float(square))


def _rotations(angles: FloatArray) -> Iterator[NDArray[np.complex128]]:
    """Yield exp(i k · angles) for k = 1, …, _TERMS, by one product each, in an array that is overwritten."""
    rotation = np.exp(1j * angles)
    power = np.ones_like(rotation)
    for _ in range(_TERMS):
        power *= rotation
        yield power


def _spectrum(sines: FloatArray, square: float) -> Spectrum:
    """Return the spectrum of the h_k in `sines`, with the rest of |h|² = `square` as one last term."""
    rest = max(square - float(sines @ sines), 0.0)
    # For h_k ~ 1/k (an h that jumps, the slowest case) this kappa makes the next order of the rest right too.
    kappa2 = np.append((np.pi * np.arange(1, _TERMS + 1)) ** 2, 3 * (np.pi * (_TERMS + 0.5)) ** 2)
    return Spectrum(kappa2, np.append(sines**2, rest) * kappa2)


def _pivot_tail(c: FloatArray, spectrum: Spectrum) -> FloatArray:
    """Return P(|t*| > c) for every element of c ≥ 0, in blocks that keep the work arrays in cache."""
    flat = np.ravel(c)
    parts = [_tail_block(flat[start : start + 32], spectrum) for start in range(0, flat.size, 32)]
    return np.concatenate([*parts, np.empty(0)]).reshape(c.shape)


def quantile(level: float, spectrum: Spectrum) -> float:
    """Return the c with P(|t*| > c) = 1 − level, sought in logarithms, which are almost linear far out."""

    def excess(c: float) -> float:
        return math.log(max(float(_pivot_tail(np.array(c), spectrum)), 5e-324)) - math.log1p(-level)

    high = 8.0
    while excess(high) > 0:
        high *= 2
    return root_scalar(excess, bracket=(0.0, high), method="brentq", xtol=1e-15, rtol=1e-14).root


def _tail_block(c: FloatArray, spectrum: Spectrum) -> FloatArray:
    kappa2, energy = spectrum
    clipped = np.clip(c, 1e-30, _LARGEST)
    s_0 = _positive_root(clipped, spectrum)
    a_0 = clipped * np.sqrt(s_0)
    # Beyond `end` the integrand is below exp(-40) of its top; a step of 1/4 errs by exp(-4 pi^2).
    end = np.minimum(np.arccosh(1 + 80 / a_0), 42.0)
    count = math.ceil(max(32.0, 4 * end.max()))
    step = end / count
    cosh = np.cosh(step[:, None] * (np.arange(count) + 0.5))
    a = a_0[:, None] * cosh
    weights = energy * kappa2 / (kappa2 + a_0[:, None] ** 2)
    schur = (1 / (kappa2 + (a**2)[..., None]) @ weights[..., None])[..., 0]
    factor = s_0[:, None] * (1 - clipped[:, None] ** 2 * schur)
    log_product = a + np.log(-np.expm1(-2 * a) / (2 * a)) + np.log(factor)
    found = 2 / np.pi * step * np.sum(np.exp(-log_product / 2) / cosh, axis=1)
    return np.where(c == 0, 1.0, np.minimum(found, 1.0))


def _positive_root(c: FloatArray, spectrum: Spectrum) -> FloatArray:
    """Return the root s_0 of s_0 = 1 + H(c² s_0); Newton from the right of a convex function descends to it."""
    kappa2, energy = spectrum
    s = np.full_like(c, 1 + energy.sum())
    for _ in range(100):
        y = c**2 * s
        inverse = 1 / (kappa2 + y[:, None])
        value = s - 1 - y * (inverse @ energy)
        slope = 1 - c**2 * (inverse**2 @ (energy * kappa2))
        last, s = s, np.maximum(s - value / slope, 1.0)
        # Newton squares the error, so that the step after one of 1e-9 is below rounding.
        if np.all(np.abs(s - last) <= 1e-9 * s):
            break
    return s


# Table 2 of the paper: rows beta, columns two-sided level (its one-sided 90, 95, 97.5 and 99 % points).
_PAPER_LEVELS = (0.8, 0.9, 0.95, 0.98)
_PAPER_TABLE = {
    0.0: (3.877, 5.324, 6.753, 8.634),
    1 / 3: (3.712, 5.048, 6.339, 8.0945),
    1 / 2: (3.446, 4.621, 5.851, 7.386),
    2 / 3: (3.027, 4.012, 4.993, 6.292),
}
PAPER_GRID = tuple((beta, level) for beta in _PAPER_TABLE for level in _PAPER_LEVELS)


class HasSchedule(Protocol):
    """Anything with the local steps per round as an integer array `E` of shape (T,)."""

    @property
    def E(self) -> ArrayLike:
        """Local steps per round, integers ≥ 1, shape (T,)."""
        ...


def p_value(statistic: ArrayLike, *, beta: float = 0.0) -> float | FloatArray:
    """Return the two-sided p-value P(|t*(β)| > |statistic|).

    Args:
      statistic: (estimate − hypothesis)/√V_jj, a number or an array of any shape; infinities give 0.
      beta: growth of the communication interval, E_m ~ m^β, in [0, 1).

    Returns:
      The p-value, of the shape of `statistic` (a float for a number).

    Example:
      >>> from jaxlsgd.inference import critical_values
      >>> critical_values.p_value([0.0, -6.7473]).round(4).tolist()
      [1.0, 0.05]

    Reference: Corollary 4.3 of the paper, read as a test.
    """
    spectrum = beta_spectrum(_check_beta(beta))
    return _tail(statistic, spectrum)


def critical_value(level: float, *, beta: float = 0.0) -> float:
    """Return the c with P(|t*(β)| ≤ c) = level: the half-width of an interval in units of √V_jj.

    Args:
      level: two-sided coverage in (0, 1); 0.95 gives the 97.5 % point of t*(β).
      beta: growth of the communication interval, E_m ~ m^β, in [0, 1).

    Returns:
      The critical value.

    Example:
      >>> from jaxlsgd.inference import critical_values
      >>> [round(critical_values.critical_value(0.95, beta=b), 4) for b in (0, 1/3, 1/2, 2/3)]
      [6.7473, 6.3616, 5.8069, 4.9711]

    Reference: Table 2 of the paper, whose simulated numbers are up to 0.8 % off (see `paper_value`).
    """
    return _beta_quantile(checks.level(level), _check_beta(beta))


def p_value_for_plan(plan: HasSchedule, statistic: ArrayLike) -> float | FloatArray:
    """Return the two-sided p-value P(|t*| > |statistic|) under the time change of an actual schedule.

    g is the piecewise linear map with g(r_m) = m/T, r_m = Σ_{n≤m} 1/E_n / Σ_{n≤T} 1/E_n.

    Args:
      plan: anything with an integer array `E` of shape (T,), T at least 2.
      statistic: (estimate − hypothesis)/√V_jj, a number or an array of any shape; infinities give 0.

    Returns:
      The p-value, of the shape of `statistic` (a float for a number).

    Example:
      >>> import types
      >>> from jaxlsgd.inference import critical_values
      >>> critical_values.p_value_for_plan(types.SimpleNamespace(E=[1, 2, 2, 3]), 0.0)
      1.0

    Reference: Corollary 4.2 of the paper, with g from the schedule and not from its family.
    """
    return _tail(statistic, plan_spectrum(check_plan(plan)))


def for_plan(plan: HasSchedule, level: float) -> float:
    """Return the critical value under the time change of an actual schedule.

    Args:
      plan: anything with an integer array `E` of shape (T,), T at least 2.
      level: two-sided coverage in (0, 1).

    Returns:
      The c with P(|t*| ≤ c) = level, for g(r_m) = m/T.

    Example:
      >>> import types
      >>> from jaxlsgd.inference import critical_values
      >>> round(critical_values.for_plan(types.SimpleNamespace(E=[1] * 250 + [5] * 950), 0.95), 3)
      5.555

    Reference: Corollary 4.2 of the paper, with g from the schedule and not from its family.
    """
    return _plan_quantile(checks.level(level), check_plan(plan))


def paper_value(beta: float, level: float) -> float:
    """Return the critical value printed in the paper, for reproducing its tables.

    Args:
      beta: 0, 1/3, 1/2 or 2/3.
      level: two-sided coverage, 0.8, 0.9, 0.95 or 0.98.

    Returns:
      The printed number: 50,000 simulated paths of 1,000 steps, smoothed.

    Example:
      >>> from jaxlsgd.inference import critical_values
      >>> critical_values.paper_value(0, 0.95)
      6.753

    Reference: Table 2 of the paper.
    """
    beta, level = _check_beta(beta), checks.level(level)
    for row, values in _PAPER_TABLE.items():
        for column, value in zip(_PAPER_LEVELS, values, strict=True):
            if math.isclose(beta, row, abs_tol=1e-6) and math.isclose(level, column, abs_tol=1e-9):
                return value
    rule = (
        "be in the paper's Table 2, beta in {0, 1/3, 1/2, 2/3} and level in {0.8, 0.9, 0.95, 0.98}"
    )
    raise refusal("beta, level", rule, (beta, level), "; critical_value takes any", code="choice")


def paper_p_value(statistic: ArrayLike, *, beta: float) -> float | FloatArray:
    """Return the two-sided p-value that agrees with the paper's critical values.

    The exact law with its scale stretched so that the printed values are its quantiles, linearly between
    them, and beyond the first and last as there. Stretches are below 1 %.

    Args:
      statistic: (estimate − hypothesis)/√V_jj, a number or an array of any shape.
      beta: 0, 1/3, 1/2 or 2/3.

    Returns:
      The p-value, of the shape of `statistic`.

    Example:
      >>> from jaxlsgd.inference import critical_values
      >>> round(critical_values.paper_p_value(6.753, beta=0), 6)
      0.05

    Reference: Table 2 of the paper.
    """
    size = np.abs(_check_statistic(statistic))
    printed = [paper_value(beta, level) for level in _PAPER_LEVELS]
    exact = [critical_value(level, beta=beta) for level in _PAPER_LEVELS]
    return p_value(size * np.interp(size, printed, np.divide(exact, printed)), beta=beta)


def wald_critical_value(dim: int, level: float) -> float:
    """Return the critical value of the joint statistic for `dim` parameters at once (β = 0).

    W = B_q(1)ᵀ [∫(B_q(r) − rB_q(1))(B_q(r) − rB_q(1))ᵀ dr]⁻¹ B_q(1) with q = `dim`; for q = 1 it is t*(0)².

    Args:
      dim: number of parameters tested jointly, 1 to 20.
      level: 0.8, 0.9, 0.95, 0.975, 0.98 or 0.99.

    Returns:
      The w with P(W ≤ w) = level, simulated; `wald_critical_values.csv` beside this file has its error.

    Example:
      >>> from jaxlsgd.inference import critical_values
      >>> 100 < critical_values.wald_critical_value(2, 0.95) < 105
      True

    Reference: Corollary 4.2 of the paper; Lobato (2001) for the statistic U_q and an older table.
    """
    level, values = checks.level(level), _wald_table()[checks.count("dim", dim, 1, 20)]
    for column, value in values.items():
        if math.isclose(level, column, abs_tol=1e-9):
            return value
    raise refusal(
        "level", f"be one that was simulated ({', '.join(map(str, values))})", level, code="choice"
    )


def wald_has_level(level: float) -> bool:
    """Return whether `wald_critical_value` was simulated at a level."""
    return any(math.isclose(level, column, abs_tol=1e-9) for column in _wald_table()[1])


@functools.cache
def _wald_table() -> dict[int, dict[float, float]]:
    table: dict[int, dict[float, float]] = {}
    with Path(__file__).with_name("wald_critical_values.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            table.setdefault(int(row["dim"]), {})[float(row["level"])] = float(row["value"])
    return table


def _tail(statistic: ArrayLike, spectrum: Spectrum) -> float | FloatArray:
    tail = _pivot_tail(np.abs(_check_statistic(statistic)), spectrum)
    return tail if tail.ndim else float(tail)


@functools.lru_cache(maxsize=1024)
def _beta_quantile(level: float, beta: float) -> float:
    return quantile(level, beta_spectrum(beta))


@functools.lru_cache(maxsize=64)
def _plan_quantile(level: float, E: bytes) -> float:
    return quantile(level, plan_spectrum(E))


def _check_statistic(value: ArrayLike) -> FloatArray:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):  # a ragged list
        array = np.array(None)
    real = array.dtype.kind in "iuf"
    if not real or np.isnan(array).any():
        code = "not_finite" if real else "type"
        raise refusal("statistic", "be real numbers without NaN", value, code=code)
    return array.astype(np.float64)


def _check_beta(beta: float) -> float:
    number = checks.number("beta", beta, rule := "be a number of at least 0 and below 1")
    if not 0 <= number < 1:
        raise refusal("beta", rule, beta)
    return number


def check_plan(plan: HasSchedule) -> bytes:
    """Return the E_m of a plan as bytes, the key of its law in caches; refuse anything but integers ≥ 1."""
    E = np.asarray(getattr(plan, "E", None))
    whole = E.dtype.kind in "iu"
    steps = E.astype(np.int64) if whole else np.zeros(1)
    if steps.ndim != 1 or (steps < 1).any():
        code = "type" if not whole else "shape" if E.ndim != 1 else "value"
        raise refusal("plan.E", "be a one-dimensional array of integers >= 1", E, code=code)
    if steps.size < 2:
        raise refusal("plan.E", "have at least 2 rounds", steps.size)
    return steps.tobytes()
