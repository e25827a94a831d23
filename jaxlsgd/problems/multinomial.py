"""Multinomial logistic regression: one of several classes, by a softmax of linear predictors."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from jaxlsgd.core import checks
from jaxlsgd.core.problem import Array, Draws, Problem
from jaxlsgd.core.registry import register


def observe(draws: Draws, client: Any) -> tuple[Array, Array]:
    """Return (a, y): a ~ N(0, I), and the class as a one-hot vector, all 0 for the reference."""
    a = draws.normal
    p = jnp.exp(_log_probabilities(client, a))
    below = jnp.cumsum(p)
    u = draws.uniform[0]
    return a, ((u < below) & (u >= below - p)).astype(a.dtype)[:-1]


def _log_probabilities(params: Any, a: Array) -> Array:
    """Return the log-probabilities of the classes, the reference last."""
    z = jnp.sum(params * a[None, :], axis=1)
    return jax.nn.log_softmax(jnp.concatenate([z, jnp.zeros_like(z[:1])]))


def loss(params: Any, observation: Any) -> Array:
    """Return −log P(y | a)."""
    a, y = observation
    log_p = _log_probabilities(params, a)
    return -jnp.sum(y * log_p[:-1]) - (1 - jnp.sum(y)) * log_p[-1]


def gradient(params: Any, observation: Any) -> Array:
    """Return (p − y) aᵀ."""
    a, y = observation
    return (jnp.exp(_log_probabilities(params, a))[:-1] - y)[:, None] * a[None, :]


def hessian(params: Any, observation: Any) -> Array:
    """Return (diag p − ppᵀ) ⊗ aaᵀ."""
    a, _ = observation
    p = jnp.exp(_log_probabilities(params, a))[:-1]
    inner = p[:, None] * (jnp.eye(p.shape[0], dtype=p.dtype) - p[None, :])
    both = inner[:, None, :, None] * (a[:, None] * a[None, :])[None, :, None, :]
    return both.reshape(params.size, params.size)


@register("problem")
def multinomial(
    dim: int,
    num_clients: int,
    classes: int = 3,
    *,
    weights: ArrayLike | None = None,
    truth_seed: int = 0,
    init: ArrayLike | None = None,
) -> Problem:
    """Multinomial logistic regression: a softmax over classes, whose last one is the reference.

    An observation is (a, y) with a ~ N(0, I), d covariates, and P(y = c) ∝ e^(aᵀx*_c), x*_C = 0. The parameters
    are a matrix (C − 1, d); x* = N(0, I)/√d is drawn once from `truth_seed`, the same for all clients, and is
    the optimum of each. G and S = Σ_k p_k² G are integrals over C − 1 dimensions and not
    given; `problems.solve` estimates them, and `dataclasses.replace(problem, G=found.problem.G, S=found.problem.S)` keeps
    the exact x*.

    Args:
      dim: d, the number of covariates; (C − 1) d parameters.
      num_clients: K.
      classes: C, at least 2; 2 is logistic regression.
      weights: p_k, (K,); uniform if None.
      truth_seed: seed of x*, at least 0.
      init: x_0, (C − 1, d); zeros if None.

    Example:
      >>> multinomial(2, 4, classes=3).dim
      4
    """
    d, K = checks.count("dim", dim, 1, 1_000), checks.count("num_clients", num_clients, 1, 10**5)
    shape = checks.count("classes", classes, 2, 1_000) - 1, d
    rng = np.random.Generator(np.random.PCG64(checks.count("truth_seed", truth_seed, 0)))
    truth = rng.standard_normal(shape) / np.sqrt(d)
    return Problem(
        init=np.zeros(shape) if init is None else checks.array("init", init, shape),
        loss=loss,
        num_clients=K,
        draws=Draws(normal=d, uniform=1),
        observe=observe,
        weights=weights,
        truth=truth,
        clients=np.broadcast_to(truth, (K, *shape)),
        gradient=gradient,
        hessian=hessian,
        name="multinomial",
        convex=True,
        gamma0=2.0,
    )
