"""The rival: Local SGD with both interval methods in vectorised NumPy.

What a careful user would write instead: arrays over clients and replications, a Python loop over
steps, every operation into a buffer made beforehand, all in float32, one process per core. Replications
are last in memory, which is NumPy's fastest order too, and draws are made for a few steps at once, so
that they are still in the cache when they are used.

It has less to do than the engine: its streams are of one generator per process (SFC64, NumPy's fastest)
and not of one key per replication, and nothing is a compensated sum.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from scipy.stats import norm

from jaxlsgd.inference.laws.critical_values import critical_value

Array = Any
DRAW_STEPS = 4


class Model(NamedTuple):
    """A problem in plain arrays, so that worker processes need no JAX."""

    kind: str  # "linear" or "logistic"
    truths: Array  # (K, d)
    weights: Array  # (K,)

    @classmethod
    def of(cls, problem: Any) -> Model:
        """Read a problem of the package, with unit noise and covariates N(0, I)."""
        return cls(problem.name, np.asarray(problem.clients.truth), np.asarray(problem.weights))


class Path(NamedTuple):
    """A plan in plain arrays."""

    E: Array  # (T,)
    eta: Array  # (T,)
    beta: float

    @classmethod
    def of(cls, plan: Any) -> Path:
        """Read a plan of the package."""
        return cls(plan.E, plan.eta, plan.beta)


class Found(NamedTuple):
    """Estimates and half-widths of every replication, (replications, d)."""

    estimate: Array
    random_scaling: Array
    plug_in: Array


class Observations:
    """Draws a few steps at a time, and turns one step's into gradients."""

    def __init__(self, model: Model, replications: int, seed: int) -> None:
        K, d = model.truths.shape
        self.generator = np.random.Generator(np.random.SFC64(seed))
        self.linear = model.kind == "linear"
        self.truths = model.truths.astype(np.float32)[:, None, :]  # (K, 1, d)
        self.normals = np.empty((DRAW_STEPS, K, d, replications), np.float32)
        # The noise of a linear model, the uniforms behind the labels of a logistic one.
        self.others = np.empty((DRAW_STEPS, K, replications), np.float32)
        self.product = np.empty((K, d, replications), np.float32)
        self.score, self.target = (np.empty((K, 1, replications), np.float32) for _ in range(2))
        self.t = 0

    def gradient(self, clients: Array, gradient: Array) -> Array:
        """Write ∇f_k(x_k; ξ_k) of the next step into `gradient` and return the covariates."""
        i = self.t % DRAW_STEPS
        if i == 0:
            self.generator.standard_normal(dtype=np.float32, out=self.normals)
            draw = self.generator.standard_normal if self.linear else self.generator.random
            draw(dtype=np.float32, out=self.others)
        self.t += 1
        a, score, target = self.normals[i], self.score, self.target
        np.multiply(a, clients, out=self.product)
        np.add.reduce(self.product, axis=1, out=score[:, 0])
        np.matmul(self.truths, a, out=target)  # aᵀx*_k
        if self.linear:
            target[:, 0] += self.others[i]
        else:
            _sigmoid(score)
            _sigmoid(target)
            np.less(self.others[i], target[:, 0], out=target[:, 0])
        np.subtract(score, target, out=target)
        np.multiply(target, a, out=gradient)
        return a

    def hessian_weight(self) -> Array | None:
        """Return σ'(aᵀx) of the step's observations, (K, 1, replications); None if it is 1."""
        return None if self.linear else self.score * (1 - self.score)


def _sigmoid(z: Array) -> None:
    np.negative(z, out=z)
    np.exp(z, out=z)
    z += 1
    np.reciprocal(z, out=z)


def mean_over_clients(weights: Array, values: Array, out: Array) -> None:
    """Write Σ_k p_k v_k of contiguous (K, ...) into `out`."""
    np.dot(weights, values.reshape(len(weights), -1), out=out.reshape(-1))


class Statistics:
    """Random scaling's centred accumulators and the plug-in means, all (..., replications)."""

    def __init__(self, weights: Array, dim: int, replications: int) -> None:
        shape = (dim, replications)
        self.weights = weights.astype(np.float32)
        self.m, self.s, self.q = 0, 0.0, 0.0
        self.mean, self.b, self.delta, self.c = (np.zeros(shape, np.float32) for _ in range(4))
        square = (dim, *shape)
        self.A, self.G, self.S, self.work = (np.zeros(square, np.float32) for _ in range(4))
        K = len(weights)
        self.scaled = np.empty((K, dim, replications), np.float32)
        self.rows = [np.empty((K, dim - i, replications), np.float32) for i in range(dim)]
        self.sums = [np.empty((dim - i, replications), np.float32) for i in range(dim)]

    def update(self, x: Array, E: int, g: Array, a: Array, weight: Array | None) -> None:
        """Add a synchronisation: x̄, E_m, the mean gradient, covariates and Hessian weights."""
        self.m += 1
        self._path(x, E)
        np.multiply(g[:, None], g[None, :], out=self.work)
        self.S += self.work
        # Row i of Σ_k p_k w_k a aᵀ from its diagonal on; the rest is its mirror image.
        scaled = a if weight is None else np.multiply(a, weight, out=self.scaled)
        for i, (rows, total) in enumerate(zip(self.rows, self.sums, strict=True)):
            np.multiply(scaled[:, i : i + 1], a[:, i:], out=rows)
            mean_over_clients(self.weights, rows, total)
            self.G[i, i:] += total

    def _path(self, x: Array, E: int) -> None:
        delta, c = self.delta, self.c
        np.subtract(x, self.mean, out=delta)
        delta *= np.float32(1 / self.m)
        np.multiply(delta, np.float32(self.q / 2), out=c)
        np.subtract(self.b, c, out=c)
        np.multiply(c[:, None], delta[None, :], out=self.work)
        self.A -= self.work
        self.A -= self.work.transpose(1, 0, 2)
        np.multiply(delta, np.float32(self.q), out=c)
        self.b -= c
        self.mean += delta
        self.q += self.m**2 / E
        self.s += 1 / E

    def found(self, beta: float, level: float = 0.95) -> Found:
        """Return the intervals after the last round."""
        T, d = self.m, len(self.mean)
        i, j = np.tril_indices(d, -1)
        self.G[i, j] = self.G[j, i]
        inverse = np.linalg.inv((self.G.transpose(2, 0, 1) / T).astype(np.float64))
        middle = (self.S.transpose(2, 0, 1) / T).astype(np.float64)
        covariance = inverse @ middle @ inverse * (self.s / T**2)
        V = np.einsum("iir->ri", self.A) / (float(T) ** 2 * self.s)
        plug = norm.isf((1 - level) / 2) * np.sqrt(np.einsum("rii->ri", covariance))
        return Found(self.mean.T, critical_value(level, beta=beta) * np.sqrt(V), plug)


def run(model: Model, path: Path, replications: int, seed: int) -> Found:
    """Run all replications side by side in this process."""
    K, d = model.truths.shape
    weights = model.weights.astype(np.float32)
    source = Observations(model, replications, seed)
    statistics = Statistics(weights, d, replications)
    clients, gradient = (np.zeros((K, d, replications), np.float32) for _ in range(2))
    average, mean = (np.zeros((d, replications), np.float32) for _ in range(2))

    for m, (E, eta) in enumerate(zip(path.E.tolist(), path.eta.tolist(), strict=True)):
        for step in range(E):
            a = source.gradient(clients, gradient)
            if step == 0 and m > 0:  # the plug-in's gradient at x̄ is one that is made anyway
                mean_over_clients(weights, gradient, mean)
                statistics.update(average, int(path.E[m - 1]), mean, a, source.hessian_weight())
            gradient *= np.float32(eta)
            clients -= gradient
        mean_over_clients(weights, clients, average)
        clients[...] = average
    a = source.gradient(clients, gradient)
    mean_over_clients(weights, gradient, mean)
    statistics.update(average, int(path.E[-1]), mean, a, source.hessian_weight())
    return statistics.found(path.beta)


def run_path(
    model: Model, path: Path, replications: int, seed: int, rows: Array | None = None
) -> tuple[Array, Array]:
    """Run random scaling alone, of every parameter by itself or of a few contrasts; return estimates and V̂_jj."""
    K, d = model.truths.shape
    weights = model.weights.astype(np.float32)
    source = Observations(model, replications, seed)
    clients, gradient = (np.zeros((K, d, replications), np.float32) for _ in range(2))
    average = np.zeros((d, replications), np.float32)
    count = d if rows is None else len(rows)
    mean, A, b, work = (np.zeros((count, replications), np.float32) for _ in range(4))
    q, s = 0.0, 0.0
    for m, (E, eta) in enumerate(zip(path.E.tolist(), path.eta.tolist(), strict=True), 1):
        for _ in range(E):
            source.gradient(clients, gradient)
            gradient *= np.float32(eta)
            clients -= gradient
        mean_over_clients(weights, clients, average)
        clients[...] = average
        delta = np.subtract(average if rows is None else rows @ average, mean)
        delta *= np.float32(1 / m)
        # A ← A − 2 b δ + q δ²
        np.multiply(delta, np.float32(q), out=work)
        b *= 2
        work -= b
        b /= 2
        work *= delta
        A += work
        b -= delta * np.float32(q)
        mean += delta
        q += m**2 / E
        s += 1 / E
    return mean.T, A.T / (float(len(path.E)) ** 2 * s)
