"""Linear regression on clients whose true parameters move on ellipses during the run."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from jaxlsgd.core import checks
from jaxlsgd.core.problem import Array, Draws, Moment, Problem
from jaxlsgd.core.registry import register
from jaxlsgd.core.tracing import dot
from jaxlsgd.problems._common import check_sizes, population
from jaxlsgd.problems.linear import squared_gradient, squared_hessian, squared_loss


class DriftingClient(NamedTuple):
    """What differs between clients and is constant: the centre and the axes of an ellipse."""

    truth: Any  # (d,) x*_k
    cosine: Any  # (d,) c_k
    sine: Any  # (d,) s_k
    noise: Any  # ()
    period: Any  # () uint32


def observe(draws: Draws, at: Moment) -> tuple[Array, Array]:
    """Return (a, aᵀx*_k(t) + noise·ε) of a `DriftingClient` at observation t, a ~ N(0, I)."""
    a, epsilon = draws.normal[:-1], draws.normal[-1]
    client, t = at
    # Take the remainder in integers: a float32 angle of a large t would have no digits left.
    share = (t % client.period).astype(a.dtype) / client.period.astype(a.dtype)
    angle = np.asarray(2 * np.pi, a.dtype) * share
    now = client.truth + jnp.cos(angle) * client.cosine + jnp.sin(angle) * client.sine
    return a, dot(a, now) + client.noise * epsilon


@register("problem")
def drifting(
    dim: int,
    num_clients: int,
    *,
    drift: float = 1.0,
    period: int = 1_000,
    heterogeneity: float = 1.0,
    noise: float = 1.0,
    weights: ArrayLike | None = None,
    truth_seed: int = 0,
    init: ArrayLike | None = None,
) -> Problem:
    """Least squares on clients whose optima move in time, around a fixed common optimum.

    Client k's observation t is (a, b) with a ~ N(0, I), b = aᵀx*_k(t) + noise·ε, ε ~ N(0, 1), and

        x*_k(t) = x*_k + cos(2πt/period) c_k + sin(2πt/period) s_k,     Σ_k p_k c_k = Σ_k p_k s_k = 0.

    At any time the clients' optima average to **x* = Σ_k p_k x*_k, which is the truth**: ∇f(x) = x − x* for every t.
    With only some of the clients, or other weights, the optimum would move. x*_k is drawn as in `linear`, c_k and
    s_k are drift·N(0, I) less their mean, once. With δ_k = x* − x*_k, G = I and, on average over a period,

        S = Σ_k p_k² [tr(D_k) I + D_k + noise² I],     D_k = δ_kδ_kᵀ + ½ (c_kc_kᵀ + s_ks_kᵀ),

    which applies to runs of many periods.

    Args:
      dim: d, at least 1.
      num_clients: K, at least 2.
      drift: scale of c_k and s_k, at least 0; 0 is `linear`.
      period: observations per period, at least 3.
      heterogeneity: scale of the x*_k, at least 0.
      noise: standard deviation of b given a, at least 0.
      weights: p_k, (K,); uniform if None.
      truth_seed: seed of x*_k, c_k and s_k, at least 0.
      init: x_0, (d,); zeros if None.

    Returns:
      A problem with x*, G and S.

    Example:
      >>> problem = drifting(2, 3, drift=2.0, period=100)
      >>> problem.drifts, problem.G.tolist()
      (True, [[1.0, 0.0], [0.0, 1.0]])
    """
    dim, num_clients = check_sizes(dim, num_clients)
    checks.count("num_clients", num_clients, 2)
    drift, noise = checks.scale("drift", drift), checks.scale("noise", noise)
    period = checks.count("period", period, 3, 10**9)
    people = population(
        dim,
        num_clients,
        heterogeneity=heterogeneity,
        weights=weights,
        truth_seed=truth_seed,
        default_center=np.zeros(dim),
        init=init,
    )
    p = people.weights
    axes = drift * np.random.default_rng([truth_seed, 1]).standard_normal((2, num_clients, dim))
    axes -= np.einsum("k,akd->ad", p, axes)[:, None]
    truth = p @ people.truths
    return Problem(
        init=people.init,
        loss=squared_loss,
        num_clients=num_clients,
        draws=Draws(normal=dim + 1),
        observe=observe,
        weights=p,
        truth=truth,
        clients=DriftingClient(
            people.truths,
            axes[0],
            axes[1],
            np.full(num_clients, noise),
            np.full(num_clients, period, np.uint32),
        ),
        gradient=squared_gradient,
        convex=True,
        hessian=squared_hessian,
        G=np.eye(dim),
        S=_noise_of_gradients(p, truth - people.truths, axes, noise),
        name="drifting",
        gamma0=0.5,
        drifts=True,
    )


def _noise_of_gradients(
    p: np.ndarray, away: np.ndarray, axes: np.ndarray, noise: float
) -> np.ndarray:
    """Return S by Isserlis: Cov(aaᵀδ) = (δᵀδ) I + δδᵀ, linear in δδᵀ, whose mean over a period is D."""
    D = np.einsum("k,ki,kj->ij", p**2, away, away)
    D += np.einsum("k,aki,akj->ij", p**2, axes, axes) / 2
    return (np.trace(D) + noise**2 * np.sum(p**2)) * np.eye(len(D)) + D
