"""Losses f(z, b) of a linear predictor z = aᵀx: derivatives for JAX, responses, conditional moments.

Functions come from cached builders: JAX tells functions apart by identity, and equal ones share a program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from jaxlsgd.core.problem import Array
from jaxlsgd.problems._moments import Conditional

POISSON_TERMS = 48
_LEGENDRE = np.polynomial.legendre.leggauss(96)


class Loss(NamedTuple):
    """A loss and its derivatives in z, as functions of (z, b)."""

    value: Callable[[Any, Any], Any]
    first: Callable[[Any, Any], Any]
    second: Callable[[Any, Any], Any]


class Noise(NamedTuple):
    """The law of b − z_k: noise times a standard normal, or a Student variable of `degrees`."""

    scale: float
    degrees: float | None  # None for the normal law

    @property
    def variance(self) -> float:
        """Its variance, where it has one."""
        nu = self.degrees
        return self.scale**2 * (1.0 if nu is None else nu / (nu - 2))

    @property
    def width(self) -> float:
        """On what scale its distribution function varies: Student's has poles at ± i scale √ν."""
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


@functools.cache
def squared() -> Loss:
    """½(z − b)²."""
    return Loss(lambda z, b: 0.5 * (z - b) ** 2, lambda z, b: z - b, lambda z, b: jnp.ones_like(z))


@functools.cache
def logistic() -> Loss:
    """log(1 + eᶻ) − bz."""
    return Loss(
        lambda z, b: jax.nn.softplus(z) - b * z,
        lambda z, b: jax.nn.sigmoid(z) - b,
        lambda z, b: jax.nn.sigmoid(z) * jax.nn.sigmoid(-z),
    )


@functools.cache
def poisson() -> Loss:
    """eᶻ − bz."""
    return Loss(
        lambda z, b: jnp.exp(z) - b * z, lambda z, b: jnp.exp(z) - b, lambda z, b: jnp.exp(z)
    )


@functools.cache
def huber(threshold: float) -> Loss:
    """½r² for |r| ≤ c, else c(|r| − ½c), of r = z − b."""

    def value(z: Any, b: Any) -> Any:
        inside = jnp.clip(z - b, -threshold, threshold)
        return inside * (z - b - 0.5 * inside)

    return Loss(
        value,
        lambda z, b: jnp.clip(z - b, -threshold, threshold),
        lambda z, b: (jnp.abs(z - b) <= threshold).astype(z.dtype),
    )


@functools.cache
def quantile(level: float, bandwidth: float) -> Loss:
    """The check loss of level τ, smoothed by a logistic kernel: h log(1 + e^(r/h)) − τr, r = z − b."""

    def second(z: Any, b: Any) -> Any:
        v = (z - b) / bandwidth
        return jax.nn.sigmoid(v) * jax.nn.sigmoid(-v) / bandwidth

    return Loss(
        lambda z, b: bandwidth * jax.nn.softplus((z - b) / bandwidth) - level * (z - b),
        lambda z, b: jax.nn.sigmoid((z - b) / bandwidth) - level,
        second,
    )


# Responses: (z_k, extra normals, uniforms, noise) → b.


def respond_normal(z: Array, normal: Array, uniform: Array, noise: Array) -> Array:
    """z_k + noise · N(0, 1)."""
    del uniform
    return z + noise * normal[0]


@functools.cache
def respond_student(degrees: float) -> Callable[..., Array]:
    """z_k + noise · t_ν, by Bailey's polar method: √(ν(U^(−2/ν) − 1)) cos 2πV is exactly t_ν.

    One uniform has 23 bits. They would end the tail where 4 % of the variance is still missing at ν = 2.5, so
    that U takes 23 more from a second one: then 0.2 % are.
    """

    def respond(z: Array, normal: Array, uniform: Array, noise: Array) -> Array:
        del normal
        U = jnp.maximum((uniform[0] - 2.0**-24) + uniform[1] * 2.0**-23, 2.0**-47)
        radius = jnp.sqrt(degrees * jnp.expm1(-2 / degrees * jnp.log(U)))
        return z + noise * radius * jnp.cos(2 * jnp.pi * uniform[2])

    return respond


def respond_label(z: Array, normal: Array, uniform: Array, noise: Array) -> Array:
    """1 with probability σ(z_k), else 0."""
    del normal, noise
    return (uniform[0] < jax.nn.sigmoid(z)).astype(z.dtype)


def respond_count(z: Array, normal: Array, uniform: Array, noise: Array) -> Array:
    """A Poisson count of rate e^z_k, by inversion of one uniform; at most `POISSON_TERMS`."""
    del normal, noise
    rate = jnp.exp(z)
    term = jnp.exp(-rate)
    below, count = term, jnp.zeros_like(rate)
    for k in range(1, POISSON_TERMS + 1):
        count = count + (uniform[0] > below)
        term = term * (rate / k)
        below = below + term
    return count


# Conditional moments e₁, e₂, e₃; see `_gaussian_moments`.


def squared_moments(noise: Noise) -> Conditional:
    """Of `squared`."""
    return lambda z, z_k: (z - z_k, (z - z_k) ** 2 + noise.variance, np.ones_like(z))


def logistic_moments() -> Conditional:
    """Of `logistic`."""

    def at(z: np.ndarray, z_k: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        p, q = special.expit(z), special.expit(z_k)
        return p - q, (p - q) ** 2 + q * special.expit(-z_k), p * special.expit(-z)

    return at


def poisson_moments() -> Conditional:
    """Of `poisson`."""

    def at(z: np.ndarray, z_k: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        m, rate = np.exp(z), np.exp(z_k)
        return m - rate, (m - rate) ** 2 + rate, m

    return at


def huber_moments(noise: Noise, threshold: float) -> Conditional:
    """Of `huber`: tails by the distribution function, the middle by Gauss and Legendre's rule."""

    def at(z: np.ndarray, z_k: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        gap = z - z_k
        above, below = noise.cdf(gap - threshold), noise.cdf(-gap - threshold)  # r > c, r < −c
        r = threshold * _LEGENDRE[0]
        density = noise.pdf(gap[..., None] - r) * (threshold * _LEGENDRE[1])
        first = threshold * (above - below) + density @ r
        return first, threshold**2 * (above + below) + density @ r**2, 1 - above - below

    return at


def quantile_moments(noise: Noise, level: float, bandwidth: float) -> Conditional:
    """Of `quantile`: σ(·/h) is the distribution function of a logistic variable, and σ² that of two's maximum."""
    step, reach = 0.2, 40.0
    v = np.arange(-reach, reach + step / 2, step)
    p, slope = special.expit(v), step * special.expit(v) * special.expit(-v)

    def at(z: np.ndarray, z_k: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        x = (z - z_k)[..., None] - bandwidth * v
        cdf = noise.cdf(x)
        one, two = cdf @ slope, cdf @ (2 * p * slope)
        return one - level, two - 2 * level * one + level**2, noise.pdf(x) @ slope

    return at
