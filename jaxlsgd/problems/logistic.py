"""Logistic regression with Gaussian covariates, with or without heterogeneity between clients."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from jaxlsgd.core.checks import refusal
from jaxlsgd.core.forms import OuterProduct, Scaled
from jaxlsgd.core.problem import Array, Draws, Problem
from jaxlsgd.core.registry import register
from jaxlsgd.core.tracing import dot
from jaxlsgd.problems import _moments
from jaxlsgd.problems._common import MAX_MATRIX_DIM, Population, check_sizes, population
from jaxlsgd.problems.losses import LOGISTIC

# Functions of the module and not closures, as in linear.py.


class LogisticClient(NamedTuple):
    """What differs between clients whose covariates are N(0, I)."""

    truth: Any  # (d,) x*_k


class CorrelatedLogisticClient(NamedTuple):
    """What differs between clients whose covariates are N(0, LLᵀ)."""

    truth: Any  # (d,) x*_k
    factor: Any  # (d, d) L


def observe(draws: Draws, client: Any) -> tuple[Array, Array]:
    """Return (a, 1[u < σ(aᵀx*_k)]) of a `LogisticClient`, a ~ N(0, I)."""
    return _labelled(draws.normal, draws.uniform[0], client.truth)


def observe_correlated(draws: Draws, client: Any) -> tuple[Array, Array]:
    """Return (a, 1[u < σ(aᵀx*_k)]) of a `CorrelatedLogisticClient`, a = Lw, w ~ N(0, I)."""
    a = jnp.sum(client.factor * draws.normal[None, :], axis=1)
    return _labelled(a, draws.uniform[0], client.truth)


def _labelled(a: Array, u: Array, truth: Array) -> tuple[Array, Array]:
    return a, (u < _sigmoid(dot(a, truth))[0]).astype(a.dtype)


def logistic_loss(params: Any, observation: Any) -> Array:
    """Return log(1 + eᶻ) − bz, z = aᵀx, for params x, (d,), and observation (a, b)."""
    a, b = observation
    return LOGISTIC.value(jnp, dot(a, params), b)


def logistic_gradient(params: Any, observation: Any) -> Scaled:
    """Return (σ(aᵀx) − b) a."""
    a, b = observation
    return Scaled(_sigmoid(dot(a, params))[0] - b, a)


def logistic_hessian(params: Any, observation: Any) -> OuterProduct:
    """Return σ'(aᵀx) aaᵀ."""
    a, _ = observation
    return OuterProduct(a, _sigmoid(dot(a, params))[1])


def _sigmoid(z: Array) -> tuple[Array, Array]:
    """Return σ(z) and σ'(z) by one exponential; σ(1 − σ) would round to 0 from z = 17."""
    e = jnp.exp(-jnp.abs(z))
    inverse = 1 / (1 + e)
    return jnp.where(z < 0, e, jnp.ones_like(e)) * inverse, e * inverse * inverse


@register("problem")
def logistic(
    dim: int,
    num_clients: int,
    *,
    heterogeneity: float = 0.0,
    weights: ArrayLike | None = None,
    covariance: ArrayLike | None = None,
    truth_seed: int = 0,
    client_truths: ArrayLike | None = None,
    center: ArrayLike | None = None,
    init: ArrayLike | None = None,
) -> Problem:
    """Logistic regression, whose optimum is known exactly even for heterogeneous clients.

    Client k observes (a, b) with a ~ N(0, Σ), b ∈ {0, 1}, P(b = 1 | a) = σ(aᵀx*_k), and its loss is
    log(1 + eᶻ) − bz, z = aᵀx. The x*_k = center + heterogeneity·N(0, I) are drawn once, by NumPy's
    PCG64 from `truth_seed`. With Σ = LLᵀ, y = Lᵀx and m(r) = E σ'(rz), z ~ N(0, 1), Stein's lemma
    makes the optimum the solution of

        m(‖y*‖) y* = Σ_k p_k m(‖y*_k‖) y*_k,

    a direction and one scalar root. G = E σ'(aᵀx*) aaᵀ and S = Σ_k p_k² Cov(a(σ(aᵀx*) − b_k)) are
    one- and two-dimensional Gaussian integrals, computed to about 1e-13.

    Args:
      dim: d, at least 1.
      num_clients: K, at least 1.
      heterogeneity: scale of the x*_k around the center, at least 0; unused with `client_truths`.
      weights: p_k, (K,); uniform if None.
      covariance: Σ, (d, d), positive definite; the identity if None, which is the fastest.
      truth_seed: seed of the x*_k, at least 0.
      client_truths: the x*_k themselves, (K, d), instead of drawing them.
      center: (d,); if None, d equally spaced points from 0 to 1, and ½ for d = 1.
      init: x_0, (d,); zeros if None.

    Returns:
      A problem with x*, and with G and S up to d = 2,000. The logits aᵀx*_k may have a standard
      deviation of at most 100.

    Example:
      >>> logistic(5, 10).truth.tolist()
      [0.0, 0.25, 0.5, 0.75, 1.0]

    Reference:
      "Statistical Estimation and Inference via Local SGD in Federated Learning", section on
      numerical simulations, which omits heterogeneity because x* was not available.
    """
    dim, num_clients = check_sizes(dim, num_clients)
    people = population(
        dim,
        num_clients,
        heterogeneity=heterogeneity,
        weights=weights,
        covariance=covariance,
        truth_seed=truth_seed,
        client_truths=client_truths,
        center=center,
        # One equally spaced point would be 0, at which labels do not depend on the covariates.
        default_center=np.linspace(0.0, 1.0, dim) if dim > 1 else np.array([0.5]),
        init=init,
    )
    truth, G, S = _optimum(people)
    if people.factor is None:
        source, clients = observe, LogisticClient(people.truths)
    else:
        source = observe_correlated
        clients = CorrelatedLogisticClient(people.truths, people.client_factors())
    return Problem(
        init=people.init,
        loss=logistic_loss,
        num_clients=num_clients,
        draws=Draws(normal=dim, uniform=1),
        observe=source,
        weights=people.weights,
        truth=truth,
        clients=clients,
        gradient=logistic_gradient,
        hessian=logistic_hessian,
        G=G,
        S=S,
        convex=True,
        name="logistic",
        gamma0=2.0,
    )


def _optimum(people: Population) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Return x*, G and S, computed for whitened covariates."""
    truths, L = people.whiten(people.truths), people.factor
    largest = float(np.linalg.norm(truths, axis=1).max())
    if largest > _moments.MAX_NORM:
        rule = f"make logits aᵀx*_k of a standard deviation of at most {_moments.MAX_NORM:g}"
        hint = "; lower heterogeneity, center or covariance"
        raise refusal("client_truths", rule, float(f"{largest:.6g}"), hint)
    same = np.all(people.truths == people.truths[0])
    y = _moments.logistic_optimum(truths, people.weights)
    truth = people.truths[0] if same else y if L is None else np.linalg.solve(L.T, y)
    if len(y) > MAX_MATRIX_DIM:
        return truth, None, None
    G, S = _moments.hessian(y), _moments.gradient_covariance(y, truths, people.weights)
    return (truth, G, S) if L is None else (truth, L @ G @ L.T, L @ S @ L.T)
