"""Losses f(z, b) of a linear predictor z = aᵀx with two derivatives; responses; conditional moments.

`problems.regression` and `fit_table` minimise the same losses. Each is written once, for NumPy and JAX.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from jaxlsgd.core.problem import Array

POISSON_TERMS = 48
_LEGENDRE = np.polynomial.legendre.leggauss(96)

# (xp, z, b, numbers) → f, f' or f''. `xp` is numpy or jax.numpy, and z and b are its arrays. `numbers` are those
# of the loss: floats, which become constants of a program, or an array, so that fits share one program.
Part = Callable[..., Any]
# (z, z_k) → e₁, e₂, e₃; see `_moments`.
Conditional = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]


class Loss(NamedTuple):
    """A loss and its first two derivatives in z."""

    value: Part
    first: Part
    second: Part


def _sigmoid(xp: ModuleType, z: Any) -> Any:
    return jax.nn.sigmoid(z) if xp is jnp else special.expit(z)


def _bump(xp: ModuleType, z: Any) -> Any:
    """Return σ'(z); σ(z)(1 − σ(z)) would round to 0 for large z."""
    return _sigmoid(xp, z) * _sigmoid(xp, -z)


# ½(z − b)²
SQUARED = Loss(
    lambda xp, z, b, numbers=(): 0.5 * (z - b) ** 2,
    lambda xp, z, b, numbers=(): z - b,
    lambda xp, z, b, numbers=(): xp.ones_like(z),
)
# log(1 + eᶻ) − bz
LOGISTIC = Loss(
    lambda xp, z, b, numbers=(): xp.logaddexp(z, 0.0) - b * z,
    lambda xp, z, b, numbers=(): _sigmoid(xp, z) - b,
    lambda xp, z, b, numbers=(): _bump(xp, z),
)
# eᶻ − bz
POISSON = Loss(
    lambda xp, z, b, numbers=(): xp.exp(z) - b * z,
    lambda xp, z, b, numbers=(): xp.exp(z) - b,
    lambda xp, z, b, numbers=(): xp.exp(z),
)


def _likely(xp: ModuleType, z: Any, numbers: Any) -> Any:
    """Return αeᶻ/(1 + αeᶻ)."""
    return _sigmoid(xp, z + xp.log(numbers[0]))


# numbers (α,): (b + 1/α) log(1 + αeᶻ) − bz, of counts with mean eᶻ and variance eᶻ + αe²ᶻ
NEGATIVE_BINOMIAL = Loss(
    lambda xp, z, b, numbers: (
        (b + 1 / numbers[0]) * xp.logaddexp(z + xp.log(numbers[0]), 0.0) - b * z
    ),
    lambda xp, z, b, numbers: (b + 1 / numbers[0]) * _likely(xp, z, numbers) - b,
    lambda xp, z, b, numbers: (b + 1 / numbers[0]) * _bump(xp, z + xp.log(numbers[0])),
)


def _clipped(xp: ModuleType, z: Any, b: Any, numbers: Any) -> Any:
    return xp.clip(z - b, -numbers[0], numbers[0])


def _huber(xp: ModuleType, z: Any, b: Any, numbers: Any) -> Any:
    inside = _clipped(xp, z, b, numbers)
    return inside * (z - b - 0.5 * inside)


# numbers (c,): ½r² for |r| ≤ c, else c(|r| − ½c), of r = z − b
HUBER = Loss(
    _huber,
    _clipped,
    lambda xp, z, b, numbers: (xp.abs(z - b) <= numbers[0]).astype(z.dtype),
)


def _quantile(xp: ModuleType, z: Any, b: Any, numbers: Any) -> Any:
    level, h = numbers[0], numbers[1]
    return h * xp.logaddexp((z - b) / h, 0.0) - level * (z - b)


# numbers (τ, h): the check loss of level τ, smoothed by a logistic kernel: h log(1 + e^(r/h)) − τr, r = z − b
QUANTILE = Loss(
    _quantile,
    lambda xp, z, b, numbers: _sigmoid(xp, (z - b) / numbers[1]) - numbers[0],
    lambda xp, z, b, numbers: _bump(xp, (z - b) / numbers[1]) / numbers[1],
)

# The losses of regressions on rows, by the name of the family, and what their numbers are called.
FAMILIES = {
    "gaussian": SQUARED,
    "logistic": LOGISTIC,
    "poisson": POISSON,
    "huber": HUBER,
    "quantile": QUANTILE,
    "negative_binomial": NEGATIVE_BINOMIAL,
}
NUMBERS = {
    "huber": ("delta",),
    "quantile": ("tau", "bandwidth"),
    "negative_binomial": ("dispersion",),
}


class Noise(NamedTuple):
    """The law of b − z_k: noise times a standard normal, or a Student variable of `degrees`."""

    scale: float
    degrees: float | None  # None for the normal law

    @property
    def variance(self) -> float:
        """The variance, if it is finite."""
        nu = self.degrees
        return self.scale**2 * (1.0 if nu is None else nu / (nu - 2))

    @property
    def width(self) -> float:
        """The scale on which the distribution function varies: Student's has poles at ± i scale √ν."""
        nu = self.degrees
        return self.scale * (1.0 if nu is None else min(1.0, np.sqrt(nu) / np.pi))

    def cdf(self, x: np.ndarray) -> np.ndarray:
        """P(noise ≤ x)."""
        x = x / self.scale
        return special.ndtr(x) if self.degrees is None else special.stdtr(self.degrees, x)

    def pdf(self, x: np.ndarray) -> np.ndarray:
        """The density."""
        x, nu = x / self.scale, self.degrees
        if nu is None:
            return np.exp(-0.5 * x**2) / (np.sqrt(2 * np.pi) * self.scale)
        level = np.exp(special.gammaln((nu + 1) / 2) - special.gammaln(nu / 2))
        height = level / np.sqrt(nu * np.pi)
        return height * (1 + x**2 / nu) ** (-(nu + 1) / 2) / self.scale


# Responses: (z_k, extra normals, uniforms, noise) → b.


def respond_normal(z: Array, normal: Array, uniform: Array, noise: Array) -> Array:
    """Return z_k + noise · N(0, 1)."""
    del uniform
    return z + noise * normal[0]


@functools.cache
def respond_student(degrees: float) -> Callable[..., Array]:
    """Return a function for z_k + noise · t_ν, by Bailey's polar method: √(ν(U^(−2/ν) − 1)) cos 2πV is t_ν.

    The 23 bits of one uniform cut off tails with 4 % of the variance at ν = 2.5. U therefore takes 23 more from a
    second uniform, which leaves 0.2 %.
    """

    def respond(z: Array, normal: Array, uniform: Array, noise: Array) -> Array:
        del normal
        U = jnp.maximum((uniform[0] - 2.0**-24) + uniform[1] * 2.0**-23, 2.0**-47)
        radius = jnp.sqrt(degrees * jnp.expm1(-2 / degrees * jnp.log(U)))
        return z + noise * radius * jnp.cos(2 * jnp.pi * uniform[2])

    return respond


def respond_label(z: Array, normal: Array, uniform: Array, noise: Array) -> Array:
    """Return 1 with probability σ(z_k), else 0."""
    del normal, noise
    return (uniform[0] < jax.nn.sigmoid(z)).astype(z.dtype)


def respond_count(z: Array, normal: Array, uniform: Array, noise: Array) -> Array:
    """Return a Poisson count of rate e^z_k, by inversion of one uniform; at most `POISSON_TERMS`."""
    del normal, noise
    rate = jnp.exp(z)
    term = jnp.exp(-rate)
    below, count = term, jnp.zeros_like(rate)
    for k in range(1, POISSON_TERMS + 1):
        count = count + (uniform[0] > below)
        term = term * (rate / k)
        below = below + term
    return count


# Conditional moments.


def squared_moments(noise: Noise) -> Conditional:
    """Return the moments of `SQUARED`."""
    return lambda z, z_k: (z - z_k, (z - z_k) ** 2 + noise.variance, np.ones_like(z))


def logistic_moments() -> Conditional:
    """Return the moments of `LOGISTIC`."""

    def at(z: np.ndarray, z_k: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        p, q = special.expit(z), special.expit(z_k)
        return p - q, (p - q) ** 2 + q * special.expit(-z_k), p * special.expit(-z)

    return at


def poisson_moments() -> Conditional:
    """Return the moments of `POISSON`."""

    def at(z: np.ndarray, z_k: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        m, rate = np.exp(z), np.exp(z_k)
        return m - rate, (m - rate) ** 2 + rate, m

    return at


def huber_moments(noise: Noise, threshold: float) -> Conditional:
    """Return the moments of `HUBER`: tails by the distribution function, the middle by Gauss and Legendre's rule."""

    def at(z: np.ndarray, z_k: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        gap = z - z_k
        above, below = noise.cdf(gap - threshold), noise.cdf(-gap - threshold)  # r > c, r < −c
        r = threshold * _LEGENDRE[0]
        density = noise.pdf(gap[..., None] - r) * (threshold * _LEGENDRE[1])
        first = threshold * (above - below) + density @ r
        return first, threshold**2 * (above + below) + density @ r**2, 1 - above - below

    return at


def quantile_moments(noise: Noise, level: float, bandwidth: float) -> Conditional:
    """Return the moments of `QUANTILE`.

    σ(·/h) is the distribution function of a logistic variable, and σ² that of the maximum of two.
    """
    step, reach = 0.2, 40.0
    v = np.arange(-reach, reach + step / 2, step)
    p, slope = special.expit(v), step * special.expit(v) * special.expit(-v)

    def at(z: np.ndarray, z_k: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        x = (z - z_k)[..., None] - bandwidth * v
        cdf = noise.cdf(x)
        one, two = cdf @ slope, cdf @ (2 * p * slope)
        return one - level, two - 2 * level * one + level**2, noise.pdf(x) @ slope

    return at
