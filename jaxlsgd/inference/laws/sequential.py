"""Critical values for people who look more than once: at any time, or at looks that are known beforehand.

An estimate whose error times t is a sum of martingale differences moves like a Brownian motion over its clock:
t (x̂_t − x*) ≈ σ B(t). With Z = B(t)/√t, looking at many t asks for a bound on all |Z| at once.

**At any time.** For a mixture over drifts λ ~ N(0, ρ²) and u = tρ²,

    M_t = (1 + u)^{−1/2} exp(Z² u / (2 (1 + u)))

is a martingale that begins at 1, so that P(M_t ≥ 1/α for some t) ≤ α (Ville). Robbins' interval is where M_t < 1/α:

    q_t = √[(1 + u)/u · log((1 + u)/α²)],

and min(1, 1/M_t) is a p-value that is valid whenever it is read. q_t is smallest where u = log((1 + u)/α²), and is
then √(1 + u): u = 8.20 and q = 3.03 for 95 %. One-sided, λ is half normal and M_t has the factor 2 Φ(Z √(u/(1 + u))).

**At known looks** t_1 < … < t_K the constant c with P(|Z_k| ≤ c s_k for all k) = level is exact, by recursive
integration: the density of B(t_k) on paths that have stayed inside is that of B(t_{k−1}) times a normal kernel
(Armitage, McPherson and Rowe). The shape s_k is 1 (Pocock) or √(t_K/t_k) (O'Brien and Fleming).

References: Robbins, Ann. Math. Statist. 41 (1970); Armitage, McPherson and Rowe, J. R. Statist. Soc. A 132 (1969);
Pocock, Biometrika 64 (1977); O'Brien and Fleming, Biometrics 35 (1979); Jennison and Turnbull, Group Sequential
Methods (2000), chapter 2; Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas, Ann. Statist. 52 (2024).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import lambertw, log_ndtr, ndtr, ndtri

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal

FloatArray = NDArray[np.float64]
Shape = Literal["pocock", "obrien_fleming"]
MOST_LOOKS = 1_000
_NODES_PER_SD = 2.5  # of an increment between two looks
_LARGEST = 38.0  # standard deviations, where the normal tail ends in float64


def best_ratio(level: float = 0.95, sides: int = 2) -> float:
    """Return u = tρ² at which Robbins' interval of a level is shortest for its t.

    Args:
      level: how often the intervals hold at all times.
      sides: 2, or 1 for an interval with one bound, which is nearly that of the level 2 · level − 1.
    """
    alpha = _alpha(level, sides)
    return float(-lambertw(-(alpha**2) / np.e, -1).real - 1)


def _alpha(level: float, sides: int) -> float:
    checks.level(level)
    return (1 - level) * (1 if _sides(sides) == 2 else 2)


def robbins(level: Any, u: Any) -> FloatArray:
    """Return q_t, two-sided, at u = tρ²; infinite at u = 0."""
    u = np.asarray(u, np.float64)
    with np.errstate(divide="ignore"):
        return np.sqrt((1 + u) / u * (np.log1p(u) - 2 * np.log1p(-np.asarray(level))))


def robbins_one_sided(level: Any, u: Any) -> FloatArray:
    """Return q_t with P(Z_t ≤ q_t for all t) ≥ level, at u = tρ²."""
    u, level = np.broadcast_arrays(np.asarray(u, np.float64), np.asarray(level, np.float64))
    goal = -np.log1p(-level)
    low, high = np.full(u.shape, -_LARGEST), robbins(level, u)
    for _ in range(60):  # the evidence grows with Z
        middle = (low + high) / 2
        beyond = log_evidence(middle, u, 1) >= goal
        low, high = np.where(beyond, low, middle), np.where(beyond, middle, high)
    return np.where(np.isfinite(robbins(level, u)), high, np.inf)


def log_evidence(z: Any, u: Any, sides: int = 2) -> FloatArray:
    """Return log M_t, the evidence against a drift of 0: an e-process, whose mean is at most 1 whenever it is read.

    Args:
      z: the statistic Z.
      u: tρ².
      sides: 2, or 1 for evidence of a positive drift.
    """
    z, u = np.asarray(z, np.float64), np.asarray(u, np.float64)
    found = (z**2 * u / (1 + u) - np.log1p(u)) / 2
    if sides == 2:
        return found
    return found + np.log(2) + log_ndtr(z * np.sqrt(u / (1 + u)))


def robbins_p(z: Any, u: Any, sides: int = 2) -> FloatArray:
    """Return the p-value min(1, 1/M_t), valid at any time; so is the least of those so far."""
    return np.exp(-np.maximum(log_evidence(z, u, sides), 0.0))


def looks_value(
    level: float, clocks: Sequence[float], shape: Shape = "pocock", sides: int = 2
) -> float:
    """Return c with P(|Z_k| ≤ c s_k at all looks) = level, or of Z_k without its sign for one side.

    Args:
      level: how often the intervals hold at all looks.
      clocks: t_1 < … < t_K, on any scale: observations, or information.
      shape: "pocock", s_k = 1; or "obrien_fleming", s_k = √(t_K/t_k), which hardly stops early.
      sides: 2, or 1 for an interval with one bound.

    Example::

        looks_value(0.95, range(1, 6))  # 2.4132
    """
    checks.level(level)
    return _looks_value(float(level), check_clocks(clocks), _shape(shape), _sides(sides))


@functools.lru_cache(maxsize=256)
def _looks_value(level: float, clocks: tuple[float, ...], shape: Shape, sides: int) -> float:
    # Between one look, and as many as there are without anything in common.
    share = (1 - level) / sides
    low, high = -ndtri(share), -ndtri(share / len(clocks))
    if len(clocks) == 1:
        return float(low)
    found: Any = brentq(
        lambda c: _held(c, clocks, shape, sides) - level, low - 1e-9, high + 1e-9, xtol=1e-9
    )
    return float(found)


def looks_p(
    z: float, clocks: Sequence[float], at: float, shape: Shape = "pocock", sides: int = 2
) -> float:
    """Return the p-value of Z = z at clock `at`: how likely the band that just reaches it is left at some look.

    It is valid at every look, and below 1 − level if and only if the interval of that level excludes the null.

    Args:
      z: the statistic.
      clocks: of all looks.
      at: the clock of this look.
      shape: as for `looks_value`.
      sides: 2, or 1 for the alternative that Z is large.
    """
    clocks = check_clocks(clocks)
    size = abs(z) if _sides(sides) == 2 else z
    c = float(size) / float(shape_of(at, clocks, _shape(shape)))
    if not np.isfinite(c):
        return float("nan") if np.isnan(c) else float(c < 0)
    if sides == 2 and c <= 0:
        return 1.0
    return float(min(1.0, max(1 - _held(c, clocks, shape, sides), 0.0)))


def shape_of(at: Any, clocks: Any, shape: Shape) -> FloatArray:
    """Return s_k, by which the constant is multiplied at clock `at`."""
    at = np.asarray(at, np.float64)
    return np.ones(at.shape) if shape == "pocock" else np.sqrt(clocks[-1] / at)


def held(c: float, clocks: Sequence[float], shape: Shape = "pocock", sides: int = 2) -> float:
    """Return P(|Z_k| ≤ c s_k at all looks); the arguments are those of `looks_value`."""
    return _held(float(c), check_clocks(clocks), _shape(shape), _sides(sides))


def _held(c: float, clocks: tuple[float, ...], shape: Shape, sides: int) -> float:
    t = np.asarray(clocks) / clocks[-1]
    bound = c * shape_of(t, t, shape) * np.sqrt(t)
    floor = -bound if sides == 2 else np.minimum(-9.0 * np.sqrt(t), bound - 1e-3)
    nodes = weights = density = np.empty(0)
    for k, (low, high) in enumerate(zip(floor, bound, strict=True)):
        sd = np.sqrt(t[0] if k == 0 else t[k] - t[k - 1])
        if k == len(t) - 1 and k > 0:
            reach = ndtr((high - nodes) / sd) - ndtr((low - nodes) / sd)
            return float(np.sum(weights * density * reach))
        # The density on this grid is smoothed by the increment before it and integrated against the next.
        least = min(sd, np.sqrt(t[k + 1] - t[k])) if k + 1 < len(t) else sd
        x, w = _legendre(_count((high - low) / least))
        fresh = (low + high) / 2 + (high - low) / 2 * x
        if k == 0:
            after = _normal(fresh / sd) / sd
        else:
            after = _normal((fresh[:, None] - nodes) / sd) @ (weights * density) / sd
        nodes, weights, density = fresh, (high - low) / 2 * w, after
    return float(np.sum(weights * density))


def _normal(z: FloatArray) -> FloatArray:
    return np.exp(-0.5 * z * z) / np.sqrt(2 * np.pi)


def _count(widths: float) -> int:
    """Return how many nodes a range of that many standard deviations needs, in steps, so that few are made."""
    return int(16 * np.ceil((24 + _NODES_PER_SD * widths) / 16))


@functools.lru_cache(maxsize=64)
def _legendre(count: int) -> tuple[FloatArray, FloatArray]:
    return np.polynomial.legendre.leggauss(count)


def check_clocks(clocks: Sequence[float]) -> tuple[float, ...]:
    """Refuse clocks that are not positive and ascending, or too many."""
    found = tuple(float(t) for t in clocks)
    steps = np.diff((0.0, *found))
    if not found or not np.all(np.isfinite(steps)) or np.any(steps <= 0):
        raise refusal("looks", "be positive and ascending", clocks)
    if len(found) > MOST_LOOKS:
        rule = f'be at most {MOST_LOOKS:,}; valid="always" is for more'
        raise refusal("looks", rule, f"{len(found):,} of them")
    return found


def _shape(shape: Shape) -> Shape:
    return checks.choice("shape", shape, Shape)


def _sides(sides: int) -> int:
    if sides not in (1, 2):
        raise refusal("sides", "be 1 or 2", sides)
    return sides
