"""The law of (ȳ_T − x*)/√V̂_T at a finite horizon, in one direction, without simulation.

Along an eigenvector of G with eigenvalue λ the linearised path is the Gaussian process

    s_m = ρ_m s_{m−1} + ε_m,    ρ_m = (1 − η_m λ)^{E_m},    Var ε_m = σ² η_m² Σ_{l<E_m} (1 − η_m λ)^{2l},

plus a deterministic part from the start x_0, which fades at the rate ρ_m of a second eigenvalue, the
largest. The sums P_n = s_1 + … + s_n have means and covariances known from a few recursions, and
P(|P_T/T| > c √V̂_T), with V̂_T = Σ_n (P_n − (n/T) P_T)²/(E_n T² Σ1/E), is the probability that a
quadratic form in normals is positive:

    (Z + b)² − c² Σ_k (√D_k ζ_k + h_k Z + d_k)² > 0.

Given Z the ζ_k are independent, so its characteristic function is a product and one Gaussian
integral, and Gil-Pelaez' formula turns that into the probability. The start matters: it bends the
path's first rounds, which widens V̂ long after its bias in ȳ has faded.
"""

from __future__ import annotations

import functools
import threading
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import RectBivariateSpline
from scipy.optimize import root_scalar

from jaxlsgd.core.checks import refusal
from jaxlsgd.schedules import Plan

FloatArray = NDArray[np.float64]
# Rounds kept of a long path. Between them it is assumed linear, which costs about 1/_NODES of V̂ and so
# half of that in the critical value.
_NODES = 400
# Terms of the quadratic form kept one by one; the rest enter by their mean.
_TERMS = 32
# Gil-Pelaez' integral over the logarithm of t in the form's own unit, by the trapezoidal rule.
_LOG_T = np.arange(-7.0, 9.0, 0.15)
# Knots of the table of critical values, in log λ and in the start's bias over the standard error.
_EIGENVALUE_STEP = 0.5 * np.log(2.0)
# Dense near 0: a slow direction's critical value falls steeply with the bias.
_BIASES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0)


# Tiles of one cell, each in its own thread, need the same table at the same time.
_TABLES = threading.Lock()


class Path(NamedTuple):
    """Second moments of the path's sums at the kept rounds, for σ = 1."""

    covariance: FloatArray  # (nodes, nodes) Cov(P_n, P_m); the last node is T
    share: FloatArray  # (nodes,) n/T
    weight: FloatArray  # (nodes,) the node's share of Σ1/E_n


class Form(NamedTuple):
    """The quadratic form above; the last term stands for all that follow, with `rest` their ΣD_k."""

    D: FloatArray  # (_TERMS + 1,), 0 in the last
    hh: FloatArray  # h_k²
    hd: FloatArray  # h_k d_k, for b = 1
    dd: FloatArray  # d_k², for b = 1
    rest: float


def local_factors(plan: Plan, eigenvalue: float) -> tuple[FloatArray, FloatArray]:
    """ρ_m and Var ε_m of every round, without cancellation for small η_m λ, and for 1 − η_m λ ≤ 0 too."""
    step = plan.eta * eigenvalue
    lost = lost_share(plan, eigenvalue)
    apart = step * (2 - step)
    flat = np.abs(apart) < 1e-14
    geometric = np.where(flat, plan.E, lost * (2 - lost) / np.where(flat, 1.0, apart))
    return _power(plan, eigenvalue), plan.eta**2 * geometric


def lost_share(plan: Plan, eigenvalue: float) -> FloatArray:
    """1 − ρ_m, without cancellation where η_m λ is small."""
    step = plan.eta * eigenvalue
    near = -np.expm1(plan.E * np.log1p(-np.minimum(step, 0.5)))
    return np.where(step < 0.5, near, 1 - _power(plan, eigenvalue))


def _power(plan: Plan, eigenvalue: float) -> FloatArray:
    """ρ_m = (1 − η_m λ)^{E_m}."""
    rate = 1 - plan.eta * eigenvalue
    size = np.exp(plan.E * np.log(np.maximum(np.abs(rate), 1e-300)))
    return np.where((rate < 0) & (plan.E % 2 == 1), -size, size)


@np.errstate(over="ignore", invalid="ignore")
def path(plan: Plan, eigenvalue: float) -> Path:
    """Moments of the path's sums in one eigendirection, in O(T); refuses one that overflows."""
    rho, noise = local_factors(plan, eigenvalue)
    variance, cross = _forward(rho, noise)
    ahead = np.zeros(plan.num_rounds)  # U_n = Σ_{k>n} ρ_{n+1}…ρ_k
    for n in range(plan.num_rounds - 2, -1, -1):
        ahead[n] = rho[n + 1] * (1 + ahead[n + 1])
    kept, weight = nodes(plan)
    log = np.cumsum(np.log(np.maximum(np.abs(rho), 1e-300)))[kept]
    sign = np.cumprod(np.where(rho < 0, -1.0, 1.0))[kept]
    # For n ≤ m: Cov(P_n, P_m) = Var P_n + Cov(P_n, s_n)(U_n − ρ_{n+1}…ρ_m U_m)
    decay = np.outer(sign, sign) * np.exp(np.minimum(log[None, :] - log[:, None], 700.0))
    reach = ahead[kept][:, None] - decay * ahead[kept][None, :]
    upper = np.triu(variance[kept][:, None] + cross[kept][:, None] * reach)
    if not np.isfinite(upper).all():
        raise ValueError(
            f"plan: must have first steps short enough for an eigenvalue λ = {eigenvalue:.4g}, "
            f"got η_1 λ = {plan.eta[0] * eigenvalue:.4g}, with which the path overflows"
        )
    share = (kept + 1.0) / plan.num_rounds
    return Path(upper + np.triu(upper, 1).T, share, weight)


def _forward(rho: FloatArray, noise: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Var P_n and Cov(P_n, s_n) of every round."""
    variance, cross = np.empty(rho.size), np.empty(rho.size)
    v = c = total = 0.0
    for n, (r, e) in enumerate(zip(rho.tolist(), noise.tolist(), strict=True)):
        v = r * r * v + e
        total += 2 * r * c + v
        c = r * c + v
        variance[n], cross[n] = total, c
    return variance, cross


def nodes(plan: Plan, most: int = _NODES) -> tuple[NDArray[np.int64], FloatArray]:
    """Rounds to keep, evenly spaced in r_m = Σ1/E, and the share of V̂'s sum of each."""
    clock = np.cumsum(1 / plan.E)
    T = plan.num_rounds
    if T <= most:
        kept = np.arange(T)
    else:
        even = np.searchsorted(clock, clock[-1] * np.arange(1, most + 1) / most * (1 - 1e-12))
        kept = np.unique(np.append(even, [0, T - 1]).clip(0, T - 1))
    place = np.interp(np.arange(T), kept, np.arange(kept.size))
    low = place.astype(np.int64)
    up = place - low
    each = 1 / plan.E / clock[-1]
    weight = np.bincount(low, each * (1 - up), kept.size).astype(np.float64)
    weight += np.bincount(np.minimum(low + 1, kept.size - 1), each * up, kept.size)
    return kept.astype(np.int64), weight


class Noise(NamedTuple):
    """The form's part that does not depend on the start."""

    D: FloatArray  # (nodes,) descending
    h: FloatArray  # (nodes,)
    vectors: FloatArray  # (nodes, nodes), columns
    root: FloatArray  # (nodes,) root of the rounds' weights
    share: FloatArray  # (nodes,) n/T


def noise_form(found: Path) -> Noise:
    """Splits the path's deviations from n ȳ_T into their part along ȳ_T and the rest."""
    C, share = found.covariance, found.share
    last, whole = C[:, -1], C[-1, -1]
    along = last - share * whole  # Cov(P_n − (n/T) P_T, P_T)
    apart = C - np.outer(share, last) - np.outer(last, share) + np.outer(share, share) * whole
    rest = apart - np.outer(along, along) / whole
    root = np.sqrt(found.weight)
    values, vectors = np.linalg.eigh(root[:, None] * rest * root[None, :] / whole)
    values, vectors = np.maximum(values[::-1], 0.0), vectors[:, ::-1]
    return Noise(values, vectors.T @ (root * along / whole), vectors, root, share)


def start_path(plan: Plan, eigenvalue: float, kept: NDArray[np.int64] | None = None) -> FloatArray:
    """Σ_{m≤n} ρ_1…ρ_m at the kept rounds, over its value at T; a step that overshoots ends it."""
    rho = np.maximum(1 - plan.eta * eigenvalue, 0.0) ** plan.E
    total = np.cumsum(np.cumprod(rho))[nodes(plan)[0] if kept is None else kept]
    return np.asarray(total / total[-1] if total[-1] > 0 else np.ones(total.size), np.float64)


def quadratic_form(noise: Noise, start: FloatArray) -> Form:
    """The form, for a start that biases ȳ_T by one standard deviation."""
    d = noise.vectors.T @ (noise.root * (start - noise.share))

    def kept(terms: FloatArray) -> FloatArray:
        return np.append(terms[:_TERMS], terms[_TERMS:].sum())

    D = np.append(noise.D[:_TERMS], np.zeros(1))
    rest = float(noise.D[_TERMS:].sum())
    return Form(D, kept(noise.h**2), kept(noise.h * d), kept(d * d), rest)


def tail_probability(form: Form, bias: float, c: float) -> float:
    """P(|ȳ_T − x*| > c √V̂_T) where the start biases ȳ_T by `bias` standard deviations."""
    size = 1 + bias**2 * (1 + c**2 * form.dd.sum())
    t = np.exp(_LOG_T) / (size + c**2 * (form.D.sum() + form.rest + form.hh.sum()))
    spread = 1 / (1 + 2j * t[:, None] * c**2 * form.D)
    a2 = 1j * t * (1 - c**2 * (spread @ form.hh))
    a1 = 2j * t * bias * (1 - c**2 * (spread @ form.hd))
    a0 = 1j * t * (bias**2 * (1 - c**2 * (spread @ form.dd)) - c**2 * form.rest)
    # A sum of logarithms stays on the branch that starts at 0; the root of a product would not.
    log = a0 + a1**2 / (2 * (1 - 2 * a2)) - 0.5 * np.log(1 - 2 * a2) + 0.5 * np.log(spread).sum(1)
    values = np.imag(np.exp(log))
    step = _LOG_T[1] - _LOG_T[0]
    # Below the first node the integrand is proportional to t: a geometric series.
    integral = step * (values.sum() + values[0] / np.expm1(step))
    return float(np.clip(0.5 + integral / np.pi, 0.0, 1.0))


def critical_value(form: Form, bias: float, level: float) -> float:
    """The c with P(|ȳ_T − x*| > c √V̂_T) = 1 − level."""

    def excess(c: float) -> float:
        return tail_probability(form, bias, c) - (1 - level)

    high = 8.0
    while excess(high) > 0:
        high *= 2
        if high > 1e9:
            raise ValueError(
                f"level: must have a finite critical value under the plan, got {level!r}; its first "
                "steps may be too long for the problem (η_1 λ > 2)"
            )
    return root_scalar(excess, bracket=(0.0, high), method="brentq", xtol=1e-6, rtol=1e-7).root


def tail_curve(
    plan: Plan, eigenvalue: float, fastest: float, bias: float, thresholds: FloatArray
) -> FloatArray:
    """P(|ȳ_T − x*| > c √V̂_T) at each threshold c, in one direction; `fastest` is the largest λ."""
    form = quadratic_form(_exact_noise(plan, eigenvalue), start_path(plan, fastest))
    return np.array([tail_probability(form, bias, float(c)) for c in thresholds])


@functools.lru_cache(maxsize=64)
def _exact_noise(plan: Plan, eigenvalue: float) -> Noise:
    return noise_form(path(plan, eigenvalue))


@functools.lru_cache(maxsize=64)
def _noise(plan: Plan, index: int) -> Noise:
    return noise_form(path(plan, float(np.exp(index * _EIGENVALUE_STEP))))


@functools.lru_cache(maxsize=65536)
def _tabulated(plan: Plan, level: float, index: int, bias: float, fastest: int) -> float:
    """A knot; infinite where the path overflows, so that one such run does not end a batch."""
    start = start_path(plan, float(np.exp(fastest * _EIGENVALUE_STEP)))
    try:
        form = quadratic_form(_noise(plan, index), start)
        return critical_value(form, bias, level)
    except ValueError:
        return np.inf


def interpolated(
    plan: Plan, eigenvalues: FloatArray, biases: FloatArray, level: float
) -> FloatArray:
    """Critical values for every direction of many runs, from tables that are made once per plan.

    A bicubic spline in log λ and the bias, linear in the logarithm of the start's fading rate, which is
    the run's largest eigenvalue. At levels from 80 to 99 % the interpolation error was measured as less
    than 0.1 % where the path is nearly stationary, at most 2 % for biases up to 1 and 4 % beyond; up to
    5 % for 20 rounds and up to 20 % for ten. A bias above 6 is replaced by 6.

    Args:
      plan: the plan that was run.
      eigenvalues: λ > 0, (..., d).
      biases: bias that the start leaves in ȳ_T, over its standard deviation, (..., d).
      level: confidence level.

    Returns:
      Critical values (..., d); NaN for a run whose eigenvalues are not positive and finite, infinite
      where the plan's first steps are so long that the path overflows.
    """
    if plan.num_rounds < 2:
        raise refusal("plan", "have at least 2 rounds", plan.num_rounds)
    values, shift = np.broadcast_arrays(
        np.asarray(eigenvalues, np.float64), np.abs(np.asarray(biases, np.float64))
    )
    shift = np.minimum(shift, _BIASES[-1])
    result = np.full(values.shape, np.nan)
    good = np.all(np.isfinite(values) & (values > 0) & np.isfinite(shift), axis=-1)
    place = np.log(np.where(good[..., None], values, 1.0)) / _EIGENVALUE_STEP
    fastest = np.floor(place.max(axis=-1)).astype(int)
    for knot in np.unique(fastest[good]):
        runs = good & (fastest == knot)
        share = (place[runs].max(axis=-1) - knot)[..., None]
        with _TABLES:
            ends = [_spline(plan, place[runs], shift[runs], level, int(knot) + i) for i in (0, 1)]
        result[runs] = np.exp((1 - share) * ends[0] + share * ends[1])
    return result


def _spline(
    plan: Plan, place: FloatArray, shift: FloatArray, level: float, fastest: int
) -> FloatArray:
    low = int(np.floor(place.min())) - 1
    rows = np.arange(low, max(low + 4, int(np.floor(place.max())) + 3))
    columns = _BIASES[: max(4, int(np.searchsorted(_BIASES, shift.max())) + 2)]
    table = np.array([[_tabulated(plan, level, int(i), j, fastest) for j in columns] for i in rows])
    known = int(np.argmin(np.append(np.isfinite(table).all(axis=1), False)))
    if known < 4:
        return np.full(place.shape, np.inf)
    found = RectBivariateSpline(rows[:known], columns, np.log(table[:known])).ev(place, shift)
    return np.where(place <= rows[known - 1], found, np.inf)
