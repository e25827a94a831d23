"""The law of the joint random-scaling statistic for q parameters at once, under any schedule.

With h_k and κ_k = kπ as in `critical_values` and ζ_k, Z i.i.d. N(0, I_q), the limit of the statistic is

    W = ZᵀM⁻¹Z,    M = Σ_k (ζ_k/κ_k + h_k Z)(ζ_k/κ_k + h_k Z)ᵀ = N + cZᵀ + Zcᵀ + |h|² ZZᵀ.

The law is invariant under rotations, so that Z = r e_1 with r ~ χ_q. With a = e_1ᵀN⁻¹e_1, b = e_1ᵀN⁻¹c and
g = cᵀN⁻¹c two rank-one updates give

    W = r²a / (1 + 2rb + r²(|h|²a + b² − ag)),

and {W > w} is a quadratic inequality in r. Only (a, b, g) is simulated; r is integrated out, so that the tail is
smooth in w and the standard error of a critical value is about 0.3 %.
"""

import functools
import math
from typing import NamedTuple

import numpy as np
from scipy.optimize import root_scalar
from scipy.special import chdtrc

from jaxlsgd.core import checks
from jaxlsgd.inference.laws.critical_values import FloatArray, Spectrum

DIMS = 20
_TERMS = 64  # of M drawn one by one; the rest is drawn as a Gaussian matrix of the same moments
_DRAWS = 60_000
_CHUNK = 2_000
_SEED = 20


class WaldDraws(NamedTuple):
    """Simulated (a, b, g), and |h|²."""

    a: FloatArray  # (draws,)
    b: FloatArray  # (draws,)
    g: FloatArray  # (draws,)
    square: float


class Tail(NamedTuple):
    """A simulated probability and its standard error."""

    probability: float
    error: float


def draw(dim: int, spectrum: Spectrum) -> WaldDraws:
    """Return the draws for q = `dim` from 1 to 20; the same at every call."""
    dim = checks.count("dim", dim, 1, DIMS)
    return _draw(dim, spectrum.kappa2.tobytes(), spectrum.energy.tobytes())


@functools.lru_cache(maxsize=32)
def _draw(dim: int, kappa2_bytes: bytes, energy_bytes: bytes) -> WaldDraws:
    kappa2, energy = np.frombuffer(kappa2_bytes), np.frombuffer(energy_bytes)
    generator = np.random.Generator(np.random.PCG64(_SEED))
    parts = [_chunk(generator, dim, kappa2, energy) for _ in range(_DRAWS // _CHUNK)]
    a, b, g = (np.concatenate(column) for column in zip(*parts, strict=True))
    return WaldDraws(a, b, g, float(np.sum(energy / kappa2)))


def _chunk(
    generator: np.random.Generator, dim: int, kappa2: FloatArray, energy: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Draw N and c, and reduce them to (a, b, g)."""
    scaled = generator.standard_normal((_CHUNK, dim, _TERMS)) / np.sqrt(kappa2[:_TERMS])
    # sums over k > K of 1/kappa^2 and of 1/kappa^4: the known infinite sums less those of the terms drawn
    mean = 1 / 6 - np.sum(1 / kappa2[:_TERMS])
    spread = math.sqrt(1 / 90 - np.sum(1 / kappa2[:_TERMS] ** 2))
    noise = generator.standard_normal((_CHUNK, dim, dim)) * spread
    N = scaled @ scaled.transpose(0, 2, 1) + (noise + noise.transpose(0, 2, 1)) / math.sqrt(2)
    N += mean * np.eye(dim)
    c = scaled @ np.sqrt(energy / kappa2)[:_TERMS]
    beyond = math.sqrt(float(np.sum(energy[_TERMS:] / kappa2[_TERMS:] ** 2)))
    c += beyond * generator.standard_normal((_CHUNK, dim))
    first = np.broadcast_to(np.eye(dim)[:, 0], c.shape)
    solved = np.asarray(np.linalg.solve(N, np.stack([first, c], axis=-1)), np.float64)
    return solved[:, 0, 0], solved[:, 0, 1], np.sum(c * solved[:, :, 1], axis=1)


def tail(w: float, dim: int, spectrum: Spectrum) -> Tail:
    """Return P(W > w)."""
    each = _given_draws(float(w), dim, draw(dim, spectrum))
    return Tail(float(each.mean()), float(each.std() / math.sqrt(each.size)))


def quantile(level: float, dim: int, spectrum: Spectrum) -> float:
    """Return the w with P(W > w) = 1 − level."""
    level, dim = checks.level(level), checks.count("dim", dim, 1, DIMS)
    return _quantile(level, dim, spectrum.kappa2.tobytes(), spectrum.energy.tobytes())


@functools.lru_cache(maxsize=256)
def _quantile(level: float, dim: int, kappa2: bytes, energy: bytes) -> float:
    draws = _draw(dim, kappa2, energy)

    def excess(log_w: float) -> float:
        return float(_given_draws(math.exp(log_w), dim, draws).mean()) - (1 - level)

    low, high = -6.0, 4.0
    while excess(high) > 0:
        high += 2
    return math.exp(root_scalar(excess, bracket=(low, high), method="brentq", xtol=1e-8).root)


def _given_draws(w: float, dim: int, draws: WaldDraws) -> FloatArray:
    """Return P(W > w | a, b, g), averaged over the two equally likely signs of b."""
    if w <= 0:
        return np.ones_like(draws.a)
    a, g = draws.a, draws.g
    lead = a - w * (draws.square * a + draws.b**2 - a * g)
    root = np.sqrt(np.maximum((w * draws.b) ** 2 + lead * w, 0.0))
    total = np.zeros_like(a)
    for b in (draws.b, -draws.b):
        # lead r^2 - 2 w b r - w > 0: from the smaller root on, and up to the larger if lead < 0
        there = (lead > 0) | ((b < 0) & (root > 0))
        near = w / np.where(there, root - w * b, 1.0)
        far = np.where(there & (lead < 0), (w * b - root) / np.where(lead < 0, lead, -1.0), np.inf)
        total += np.where(there, chdtrc(dim, near**2) - chdtrc(dim, far**2), 0.0)
    return total / 2
