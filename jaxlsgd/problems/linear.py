"""Linear regression with Gaussian covariates and one true parameter per client."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from jaxlsgd.core import checks
from jaxlsgd.core.forms import OuterProduct, Scaled
from jaxlsgd.core.problem import Array, Draws, Problem
from jaxlsgd.core.registry import register
from jaxlsgd.core.tracing import dot
from jaxlsgd.problems._common import MAX_MATRIX_DIM, Population, check_sizes, population
from jaxlsgd.problems.losses import SQUARED

# Functions of the module and not closures: JAX compares functions by identity, and all problems share these.


class LinearClient(NamedTuple):
    """What differs between clients whose covariates are N(0, I)."""

    truth: Any  # (d,) x*_k
    noise: Any  # ()


class CorrelatedLinearClient(NamedTuple):
    """What differs between clients whose covariates are N(0, LLᵀ)."""

    truth: Any  # (d,) x*_k
    noise: Any  # ()
    factor: Any  # (d, d) L


def observe(draws: Draws, client: Any) -> tuple[Array, Array]:
    """Return (a, aᵀx*_k + noise·ε) of a `LinearClient`, a ~ N(0, I)."""
    a, epsilon = draws.normal[:-1], draws.normal[-1]
    return a, dot(a, client.truth) + client.noise * epsilon


def observe_correlated(draws: Draws, client: Any) -> tuple[Array, Array]:
    """Return (a, aᵀx*_k + noise·ε) of a `CorrelatedLinearClient`, a = Lw, w ~ N(0, I)."""
    w, epsilon = draws.normal[:-1], draws.normal[-1]
    a = jnp.sum(client.factor * w[None, :], axis=1)
    return a, dot(a, client.truth) + client.noise * epsilon


def squared_loss(params: Any, observation: Any) -> Array:
    """Return ½(aᵀx − b)² for params x, (d,), and observation (a, b), (d,) and ()."""
    a, b = observation
    return SQUARED.value(jnp, dot(a, params), b)


def squared_gradient(params: Any, observation: Any) -> Scaled:
    """Return (aᵀx − b) a."""
    a, b = observation
    return Scaled(dot(a, params) - b, a)


def squared_hessian(params: Any, observation: Any) -> OuterProduct:
    """Return aaᵀ."""
    del params
    a, _ = observation
    return OuterProduct(a)


@register("problem")
def linear(
    dim: int,
    num_clients: int,
    *,
    heterogeneity: float = 1.0,
    noise: float = 1.0,
    weights: ArrayLike | None = None,
    covariance: ArrayLike | None = None,
    truth_seed: int = 0,
    client_truths: ArrayLike | None = None,
    center: ArrayLike | None = None,
    init: ArrayLike | None = None,
) -> Problem:
    """Least squares on clients with one linear model each.

    Client k observes (a, b) with a ~ N(0, Σ), b = aᵀx*_k + noise·ε, ε ~ N(0, 1), and its loss is
    ½(aᵀx − b)². The x*_k = center + heterogeneity·N(0, I) are drawn once, by NumPy's PCG64 from
    `truth_seed`, and are the same in every replication. With δ_k = x* − x*_k,

        x* = Σ_k p_k x*_k,   G = Σ,   S = Σ_k p_k² [(δ_kᵀΣδ_k + noise²) Σ + Σδ_kδ_kᵀΣ].

    Args:
      dim: d, at least 1.
      num_clients: K, at least 1.
      heterogeneity: scale of the x*_k around the center, at least 0; unused with `client_truths`.
      noise: standard deviation of b given a, at least 0. With 0 and equal x*_k, S is 0.
      weights: p_k, (K,); uniform if None.
      covariance: Σ, (d, d), positive definite; the identity if None, which is the fastest.
      truth_seed: seed of the x*_k, at least 0.
      client_truths: the x*_k themselves, (K, d), instead of drawing them.
      center: (d,); zeros if None.
      init: x_0, (d,); zeros if None.

    Returns:
      A problem with x*, and with G and S up to d = 2,000.

    Example:
      >>> problem = linear(5, 10, heterogeneity=0.5)
      >>> problem.dim, problem.num_clients
      (5, 10)
      >>> float(linear(1, 4, heterogeneity=0.0).S[0, 0])
      0.25

    Reference:
      "Statistical Estimation and Inference via Local SGD in Federated Learning", section on
      numerical simulations.
    """
    dim, num_clients = check_sizes(dim, num_clients)
    noise = checks.scale("noise", noise)
    people = population(
        dim,
        num_clients,
        heterogeneity=heterogeneity,
        weights=weights,
        covariance=covariance,
        truth_seed=truth_seed,
        client_truths=client_truths,
        center=center,
        default_center=np.zeros(dim),
        init=init,
    )
    truth = people.weights @ people.truths
    G, S = _moments(people, truth, noise) if dim <= MAX_MATRIX_DIM else (None, None)
    noises = np.full(num_clients, noise)
    if people.factor is None:
        source, clients = observe, LinearClient(people.truths, noises)
    else:
        source = observe_correlated
        clients = CorrelatedLinearClient(people.truths, noises, people.client_factors())
    return Problem(
        init=people.init,
        loss=squared_loss,
        num_clients=num_clients,
        draws=Draws(normal=dim + 1),
        observe=source,
        weights=people.weights,
        truth=truth,
        clients=clients,
        gradient=squared_gradient,
        hessian=squared_hessian,
        G=G,
        S=S,
        convex=True,
        name="linear",
        gamma0=0.5,
    )


def _moments(people: Population, truth: np.ndarray, noise: float) -> tuple[np.ndarray, np.ndarray]:
    """Return G and S; Isserlis: E (aᵀδ)² aaᵀ = (δᵀΣδ) Σ + 2 Σδδᵀ Σ, less the mean's Σδδᵀ Σ."""
    L = np.eye(len(truth)) if people.factor is None else people.factor
    deviations = people.weights[:, None] * people.whiten(truth - people.truths)  # p_k Lᵀδ_k
    level = np.sum(deviations**2) + noise**2 * np.sum(people.weights**2)
    inner = level * np.eye(len(truth)) + deviations.T @ deviations
    return L @ L.T, L @ inner @ L.T
