"""Local SGD and its two interval methods as the paper writes them, in slow float64 NumPy.

Nothing here is taken from the engine: clients move one by one and step by step, the average is
formed from them when a round ends, and Algorithm 2 keeps its raw sums. Only the draws are given.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

FloatArray = np.ndarray


class Model(NamedTuple):
    """An observation (a, b) from its standard draws, and the loss's derivatives at one."""

    observe: Callable[[FloatArray, FloatArray, FloatArray], tuple[FloatArray, float]]
    gradient: Callable[[FloatArray, FloatArray, float], FloatArray]
    hessian: Callable[[FloatArray, FloatArray, float], FloatArray]


def _sigmoid(z: float) -> float:
    return 1.0 / (1.0 + math.exp(-z))


def _linear_observation(normal: FloatArray, uniform: FloatArray, truth: FloatArray):
    a = normal[: len(truth)]
    return a, float(a @ truth + normal[len(truth)])


def _logistic_observation(normal: FloatArray, uniform: FloatArray, truth: FloatArray):
    return normal, float(uniform[0] < _sigmoid(normal @ truth))


MODELS = {
    "linear": Model(
        _linear_observation,
        lambda x, a, b: (a @ x - b) * a,
        lambda x, a, b: np.outer(a, a),
    ),
    "logistic": Model(
        _logistic_observation,
        lambda x, a, b: (_sigmoid(a @ x) - b) * a,
        lambda x, a, b: _sigmoid(a @ x) * (1 - _sigmoid(a @ x)) * np.outer(a, a),
    ),
}


class Draws(NamedTuple):
    """What observation t of client k of one replication is made of."""

    normal: FloatArray  # (t_T + 1, K, normals)
    uniform: FloatArray  # (t_T + 1, K, uniforms)


class Run(NamedTuple):
    """A path of Local SGD and the plug-in method's means along it."""

    averages: FloatArray  # (T, d) x̄_{t_1}, …, x̄_{t_T}
    G: FloatArray  # (d, d)
    S: FloatArray  # (d, d)


def local_sgd(
    model: Model,
    draws: Draws,
    truths: FloatArray,
    weights: FloatArray,
    init: FloatArray,
    E: FloatArray,
    eta: FloatArray,
) -> Run:
    """Algorithm 1, with Ĝ and Ŝ at x̄_{t_m} from the samples ξ_{t_m} that round m + 1 starts with."""
    clients = range(len(weights))

    def sample(k: int, t: int):
        return model.observe(
            draws.normal[t, k].astype(np.float64), draws.uniform[t, k].astype(np.float64), truths[k]
        )

    average, t = np.asarray(init, np.float64), 0
    averages, hessians, squares = [], [], []
    for steps, step_size in zip(E, eta, strict=True):
        x = [average.copy() for _ in clients]
        for _ in range(steps):
            for k in clients:
                x[k] = x[k] - step_size * model.gradient(x[k], *sample(k, t))
            t += 1
        average = sum(weights[k] * x[k] for k in clients)
        averages.append(average)
        g = sum(weights[k] * model.gradient(average, *sample(k, t)) for k in clients)
        hessians.append(sum(weights[k] * model.hessian(average, *sample(k, t)) for k in clients))
        squares.append(np.outer(g, g))
    return Run(np.array(averages), np.mean(hessians, axis=0), np.mean(squares, axis=0))


def plug_in_variance(run: Run, E: FloatArray) -> FloatArray:
    """ν̂ (Ĝ⁻¹ŜĜ⁻ᵀ)_jj / t_T, Section 4.1."""
    T, steps = len(E), np.sum(E)
    nu = np.sum(E) * np.sum(1.0 / E) / T**2
    inverse = np.linalg.inv(run.G)
    return nu * np.diag(inverse @ run.S @ inverse.T) / steps


def random_scaling(averages: FloatArray, E: FloatArray) -> tuple[FloatArray, FloatArray]:
    """ȳ_T and V̂_T by Algorithm 2, with its raw sums A, b, s, q."""
    dim = averages.shape[1]
    y, A, b, s, q = np.zeros(dim), np.zeros((dim, dim)), np.zeros(dim), 0.0, 0.0
    for m, (x, steps) in enumerate(zip(averages, E, strict=True), start=1):
        y = (m - 1) / m * y + x / m
        A = A + m**2 / steps * np.outer(y, y)
        b = b + m**2 / steps * y
        s = s + 1 / steps
        q = q + m**2 / steps
    m = len(E)
    V = (A - np.outer(y, b) - np.outer(b, y) + q * np.outer(y, y)) / (m**2 * s)
    return y, V


def scaling_by_definition(averages: FloatArray, E: FloatArray) -> FloatArray:
    """V̂_T as a sum over the whole path, (..., T, d) → (..., d, d): for paths too long for raw sums."""
    m = np.arange(1, len(E) + 1)[:, None]
    mean = np.cumsum(averages, axis=-2, dtype=np.float64) / m
    away = (mean - mean[..., -1:, :]) * m / np.sqrt(E)[:, None]
    square = np.einsum("...ti,...tj->...ij", away, away)
    return square / (len(E) ** 2 * np.sum(1.0 / E))
