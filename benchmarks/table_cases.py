"""Simulated tables with a population that is known exactly, for `benchmarks.tables` and the tests.

Client k draws its covariates from a set of its own of 200 points, so that population means are sums, and
the responses around its own coefficients β_k. The population's minimiser Σ_k p_k E_k f is then found by
Newton's method to machine precision, without any Monte-Carlo error.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxlsgd.regression.design import Block, Design
from jaxlsgd.regression.families import Family, family_of
from jaxlsgd.regression.pilot import Objective, minimise

FloatArray = NDArray[np.float64]
POINTS = 200
NAMES = ("Intercept", "a", "b", "c")
DESIGN = Design("y", "site", NAMES, ("y", "site", "a", "b", "c"), "refuse")


class Population(NamedTuple):
    """Clients with what they draw from."""

    family: Family
    points: FloatArray  # (K, POINTS, d)
    means: FloatArray  # (K, POINTS) of the response at each point
    sizes: NDArray[np.int64]  # (K,)
    truth: FloatArray  # (d,)

    def table(self, rng: np.random.Generator) -> Block:
        """Return fresh rows of all clients, shuffled."""
        client = np.repeat(np.arange(len(self.sizes)), self.sizes)
        place = rng.integers(0, POINTS, len(client))
        mean = self.means[client, place]
        y = _DRAW[self.family.name](rng, mean)
        order = rng.permutation(len(client))
        return Block(self.points[client, place][order], y[order], client[order], 0)


def _gaussian(rng: np.random.Generator, mean: FloatArray) -> FloatArray:
    # Heteroskedastic, with heavy tails.
    return mean + (0.5 + 0.5 * np.abs(mean)) * rng.standard_t(6, len(mean))


def _logistic(rng: np.random.Generator, mean: FloatArray) -> FloatArray:
    return (rng.uniform(size=len(mean)) < mean).astype(np.float64)


def _poisson(rng: np.random.Generator, mean: FloatArray) -> FloatArray:
    # Overdispersed: a gamma mixture.
    return rng.poisson(mean * rng.gamma(2.0, 0.5, len(mean))).astype(np.float64)


_DRAW = {"gaussian": _gaussian, "logistic": _logistic, "poisson": _poisson}
_MEAN = {
    "gaussian": lambda z: z,
    "logistic": lambda z: 0.5 * (1 + np.tanh(z / 2)),
    "poisson": np.exp,
}


def population(
    name: str, seed: int = 0, clients: int = 10, least: int = 200, most: int = 5000
) -> Population:
    """Return heterogeneous clients of very unequal size; columns of unequal scale, correlated."""
    rng = np.random.default_rng(seed)
    sizes = np.geomspace(least, most, clients).astype(np.int64)
    mix = np.array([[1.0, 0.6, 0.0], [0.0, 0.8, 0.3], [0.0, 0.0, 1.0]])
    shift = 0.5 * rng.standard_normal((clients, 1, 3))
    spread = np.exp(0.3 * rng.standard_normal((clients, 1, 3)))
    x = (shift + spread * rng.standard_normal((clients, POINTS, 3))) @ mix
    beta = np.array([-1.0, 0.5, -0.4, 0.3]) + 0.2 * rng.standard_normal((clients, 4))
    points = np.concatenate([np.ones((clients, POINTS, 1)), x], axis=2)
    means = _MEAN[name](np.einsum("kpd,kd->kp", points, beta))
    points = points * np.array([1.0, 1e-3, 1.0, 1e4])
    family = family_of(name)
    weights = np.repeat(sizes / sizes.sum() / POINTS, POINTS)
    scale = np.array([1.0, 1e-3, 1.0, 1e4])
    objective = Objective(family, np.zeros(1), np.zeros(4))
    flat = (points / scale).reshape(-1, 4)
    theta, _ = minimise(objective, flat, means.reshape(-1), weights, NAMES)
    return Population(family, points, means, sizes, theta / scale)
