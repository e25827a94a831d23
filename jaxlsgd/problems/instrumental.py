"""Instrumental variables: the root of a moment equation that is not the gradient of a loss."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.forms import Scaled
from jaxlsgd.core.problem import Array, Draws, Problem
from jaxlsgd.core.registry import register
from jaxlsgd.problems._common import check_sizes, population


class InstrumentalClient(NamedTuple):
    """What differs between clients."""

    truth: Any  # (d,) x*_k
    strength: Any  # ()
    noise: Any  # () scale of the part of ε that is independent of v
    shared: Any  # () scale of the part of ε that is shared with v


def observe(draws: Draws, client: Any) -> tuple[Array, Array, Array]:
    """Return (a, â, b): covariates, their projection on the instruments, and the response."""
    d = (draws.normal.shape[0] - 1) // 2
    fitted, v = client.strength * draws.normal[:d], draws.normal[d : 2 * d]
    a = fitted + v
    noise = client.noise * draws.normal[2 * d] + client.shared * jnp.sum(v)
    return a, fitted, a @ client.truth + noise


def squared_residual(params: Any, observation: Any) -> Array:
    """Return ½(aᵀx − b)², which only monitors a run: its minimum is least squares, not x*."""
    a, _, b = observation
    return 0.5 * (a @ params - b) ** 2


def moment(params: Any, observation: Any) -> Scaled:
    """Return (aᵀx − b) â."""
    a, fitted, b = observation
    return Scaled(a @ params - b, fitted)


def jacobian(params: Any, observation: Any) -> Array:
    """Return the symmetric part of âaᵀ, which has the mean of âaᵀ and less noise."""
    del params
    a, fitted, _ = observation
    outer = fitted[:, None] * a[None, :]
    return 0.5 * (outer + outer.T)


@register("problem")
def instrumental(
    dim: int,
    num_clients: int,
    *,
    endogeneity: float = 0.5,
    strength: float = 1.0,
    noise: float = 1.0,
    heterogeneity: float = 0.0,
    weights: ArrayLike | None = None,
    truth_seed: int = 0,
    center: ArrayLike | None = None,
    init: ArrayLike | None = None,
) -> Problem:
    """Two-stage least squares: endogenous covariates, and instruments that are independent of the noise.

    Client k observes instruments w, covariates a = strength · w + v and b = aᵀx*_k + ε, where w, v ~ N(0, I) are
    independent and ε ~ N(0, noise²) has correlation `endogeneity` with Σ_j v_j: least squares of b on a is
    biased. The first stage is known, â = strength · w, and x solves E â(aᵀx − b) = 0. Steps follow that moment,
    (aᵀx − b)â, which is not the gradient of a loss; the problem's `loss` is the squared residual, which only
    monitors a run. With s = strength, δ_k = x* − x*_k and τ_k² the variance of vᵀδ_k − ε,

        x* = Σ_k p_k x*_k,   G = s² I,   S = Σ_k p_k² s² [(s²‖δ_k‖² + τ_k²) I + s² δ_kδ_kᵀ].

    The paper's theory is about minima, but its proofs use only the field's mean and noise, and G is symmetric here.

    Args:
      dim: d.
      num_clients: K.
      endogeneity: in (−1, 1); with 0, least squares is consistent too.
      strength: of the instruments, greater than 0.
      noise: standard deviation of ε, greater than 0.
      heterogeneity: scale of the x*_k around the center, at least 0.
      weights: p_k, (K,); uniform if None.
      truth_seed: seed of the x*_k, at least 0.
      center: (d,); if None, d equally spaced points from 0 to 1.
      init: x_0, (d,); zeros if None.

    Example:
      >>> float(instrumental(2, 4, strength=2.0).G[0, 0])
      4.0
    """
    dim, num_clients = check_sizes(dim, num_clients)
    s, noise = checks.positive("strength", strength), checks.positive("noise", noise)
    if not -1 < checks.number("endogeneity", endogeneity) < 1:
        raise refusal("endogeneity", "be in (-1, 1)", endogeneity)
    people = population(
        dim,
        num_clients,
        heterogeneity=heterogeneity,
        weights=weights,
        truth_seed=truth_seed,
        center=center,
        default_center=np.linspace(0.0, 1.0, dim),
        init=init,
    )
    truth, p = people.weights @ people.truths, people.weights
    gaps = truth - people.truths
    shared = noise * endogeneity / np.sqrt(dim)
    lengths = np.sum(gaps**2, axis=1)
    residual = lengths + noise**2 - 2 * shared * gaps.sum(axis=1)
    across = s**2 * np.sum(p**2 * (s**2 * lengths + residual))
    along = s**4 * (gaps.T * p**2) @ gaps

    def each(value: float) -> np.ndarray:
        return np.full(num_clients, value)

    own = noise * np.sqrt(1 - endogeneity**2)
    return Problem(
        init=people.init,
        loss=squared_residual,
        num_clients=num_clients,
        draws=Draws(normal=2 * dim + 1),
        observe=observe,
        weights=p,
        truth=truth,
        clients=InstrumentalClient(people.truths, each(s), each(own), each(shared)),
        gradient=moment,
        hessian=jacobian,
        G=s**2 * np.eye(dim),
        S=across * np.eye(dim) + along,
        name="instrumental",
        convex=True,
        gamma0=0.5,
    )
