"""The law of the random scaling statistic, from one exact integral and without simulation.

The statistic's limit is t* = B(1)/sqrt(int_0^1 (B(r) - g(r) B(1))^2 dr). Write B(r) = r Z + bridge(r),
h(r) = r - g(r), kappa_k = k pi, h_k = sqrt(2) int h(r) sin(kappa_k r) dr and zeta_k, Z i.i.d. N(0, 1). Then
{|t*| > c} is the event that Z^2 - c^2 sum_k (zeta_k/kappa_k + h_k Z)^2 is positive. The determinant of
I - s (that form) is known in closed form (a Schur complement on Z; the rest is diagonal):

    D(s) = (sinh a / a) (1 + H(a^2) - s),    a = c sqrt(s),    H(y) = sum_k h_k^2 kappa_k^2 y/(kappa_k^2 + y).

H is concave, so D has one positive root s_0 = 1/lambda_+: one positive eigenvalue. Dividing it out leaves the
product over all the negative eigenvalues, with s = s_0 cosh^2 u, y = c^2 s and y_0 = c^2 s_0,

    Pi(u) = (sinh a / a) s_0 (1 - c^2 sum_k h_k^2 kappa_k^4 / ((kappa_k^2 + y)(kappa_k^2 + y_0))),

    P(|t*| > c) = (2/pi) int_0^inf du / (cosh u sqrt(Pi(u))).

No eigenvalue is ever computed. The integrand is even and analytic for |Im u| < pi/2, so that equally spaced
nodes converge geometrically: some 35 of them reach rounding error at the usual levels.

Reference: Li, Liang, Chang and Zhang, "Statistical Estimation and Inference via Local SGD in Federated
Learning", Section 4.2, for the statistic; Imhof (1961) and Abadir and Paruolo (1997) for ratios like it.
"""

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import root_scalar

FloatArray = NDArray[np.float64]

# Sine terms kept one by one. The rest, whose |h|^2 is known exactly, is kept as one more term.
_TERMS = 512
# P(|t*| > c) is of the order of exp(-c/2), which is zero in float64 long before this.
_LARGEST = 2000.0


class Spectrum(NamedTuple):
    """h in the sine basis: all that the law of t* depends on."""

    kappa2: FloatArray  # (_TERMS + 1,)  (k pi)^2
    energy: FloatArray  # (_TERMS + 1,)  h_k^2 (k pi)^2


@functools.lru_cache(maxsize=64)
def beta_spectrum(beta: float) -> Spectrum:
    """The spectrum of h(r) = r - r^{1/(1-beta)}, by Gauss-Legendre panels graded to both ends."""
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
    """The spectrum of the piecewise linear h(r_m) = r_m - m/T, for E as the bytes of an int64 array.

    kappa h_k = sqrt(2) int h'(r) cos(kappa r) dr, exactly: a sum over runs of equal E, not over rounds.
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
    """exp(i k angles) for k = 1.._TERMS, by one product each, in an array that is overwritten."""
    rotation = np.exp(1j * angles)
    power = np.ones_like(rotation)
    for _ in range(_TERMS):
        power *= rotation
        yield power


def _spectrum(sines: FloatArray, square: float) -> Spectrum:
    """The spectrum of the h_k in `sines`, with the rest of |h|^2 = `square` as one last term."""
    rest = max(square - float(sines @ sines), 0.0)
    # For h_k ~ 1/k (an h that jumps, the slowest case) this kappa makes the next order of the rest right too.
    kappa2 = np.append((np.pi * np.arange(1, _TERMS + 1)) ** 2, 3 * (np.pi * (_TERMS + 0.5)) ** 2)
    return Spectrum(kappa2, np.append(sines**2, rest) * kappa2)


def tail(c: FloatArray, spectrum: Spectrum) -> FloatArray:
    """P(|t*| > c) for every element of c >= 0, in blocks that keep the work arrays in cache."""
    flat = np.ravel(c)
    parts = [_tail_block(flat[start : start + 32], spectrum) for start in range(0, flat.size, 32)]
    return np.concatenate([*parts, np.empty(0)]).reshape(c.shape)


def quantile(level: float, spectrum: Spectrum) -> float:
    """The c with P(|t*| > c) = 1 - level; in logarithms, almost linear far out."""

    def excess(c: float) -> float:
        return math.log(max(float(tail(np.array(c), spectrum)), 5e-324)) - math.log1p(-level)

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
    tail = 2 / np.pi * step * np.sum(np.exp(-log_product / 2) / cosh, axis=1)
    return np.where(c == 0, 1.0, np.minimum(tail, 1.0))


def _positive_root(c: FloatArray, spectrum: Spectrum) -> FloatArray:
    """s_0 with s_0 = 1 + H(c^2 s_0); Newton from the right of a convex function descends to it."""
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
