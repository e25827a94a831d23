"""Moments of Local SGD at a finite horizon: the covariance of ȳ_T itself, not its limit as T → ∞.

Close to x* Local SGD is the linear recursion s_m = (I − η_m G)^{E_m} s_{m−1} + noise. With Ĝ = QΛQᵀ,
S̃ = QᵀŜQ, ρ_m(λ) = (1 − η_mλ)^{E_m}, W_T = 1, W_m = 1 + ρ_{m+1}W_{m+1} and
n_m(λ, λ') = η_m² Σ_{l<E_m} ((1 − η_mλ)(1 − η_mλ'))^l, the average ȳ_T of its path has

    Cov(ȳ_T) = Q [ (1/T²) Σ_m W_m(λ_i) W_m(λ_j) n_m(λ_i, λ_j) S̃_ij ] Qᵀ   (→ ν G⁻¹SG⁻ᵀ/t_T as T → ∞)

and, from its start at x_0, the bias Q [ ρ_1(λ) W_1(λ) ] Qᵀ (x_0 − x*)/T. For the average over observations,
Σ E_m x̄_m/t_T, replace W_m by W_T = E_T, W_m = E_m + ρ_{m+1}W_{m+1}, and T by t_T. `plug_in` and `random_scaling`
use these moments.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxlsgd.core.estimator import Horizon
from jaxlsgd.core.problem import Array
from jaxlsgd.inference.laws.finite_horizon import lost_share, pair_noise

_ZERO = 1e-6  # of 1 − (1 − ηλ)(1 − ηλ'), in float32


class HorizonFactors(NamedTuple):
    """Factors of the covariance, per pair of eigenvalues, and of the bias from the start, under a plan."""

    pair: Array  # (d, d) (1/T²) Σ W_m W_m n_m
    start: Array  # (d,) ρ_1 W_1/T


def horizon_factors(
    eigenvalues: Array, horizon: Horizon, observations: bool = False
) -> HorizonFactors:
    """Compute both factors by the recursion from the last round to the first, in O(T d²).

    With `observations`, they are those of the average over observations: W_m = E_m + ρ_{m+1}W_{m+1}, and t_T
    instead of T.
    """
    dtype = eigenvalues.dtype
    E, eta = horizon.E.astype(dtype), horizon.eta.astype(dtype)
    dim = eigenvalues.shape[0]

    def back(carry: tuple[Array, Array], inputs: tuple[Array, Array]) -> tuple[Any, None]:
        ahead, total = carry  # ρ_{m+1} W_{m+1}, and the sum
        E_m, eta_m = inputs
        lost = lost_share(eta_m * eigenvalues, E_m)
        W = jnp.where(E_m > 0, (E_m if observations else 1) + ahead, 0)
        noise = pair_noise(eigenvalues, lost, eta_m, E_m, _ZERO)
        total = total + W[:, None] * W[None, :] * noise
        return ((1 - lost) * W, total), None

    empty = (jnp.zeros(dim, dtype), jnp.zeros((dim, dim), dtype))
    (start, total), _ = lax.scan(back, empty, (E, eta), reverse=True)
    count = jnp.sum(E) if observations else horizon.num_rounds.astype(dtype)
    return HorizonFactors(total / count / count, start / count)


def scaling_factors(eigenvalues: Array, horizon: Horizon) -> Array:
    """Compute the factors of S̃_ik in E V̂_ik under the plan, (d, d), by a recursion as above in O(T d²).

    With w_n = (1/E_n)/Σ1/E, A_nm(λ) = Σ_{m≤l≤n} ρ_{m+1}…ρ_l and D_m = Σ_{n≥m} w_n A_nm(λ)A_nm(λ'),
    B_m = Σ_{n≥m} w_n (n/T) A_nm, the factor is (1/T²) Σ_m n_m (D_m − B_mW'_m − W_mB'_m + W_mW'_m Σ w_n n²/T²).
    """
    dtype = eigenvalues.dtype
    E, eta = horizon.E.astype(dtype), horizon.eta.astype(dtype)
    dim, rounds = eigenvalues.shape[0], horizon.num_rounds.astype(dtype)
    weight = jnp.where(E > 0, 1 / jnp.where(E > 0, E, 1), 0)
    weight = weight / jnp.sum(weight)
    share = jnp.arange(1, E.shape[0] + 1, dtype=dtype) / rounds
    squares = jnp.sum(weight * share * share)

    def back(carry: Any, inputs: tuple[Array, ...]) -> tuple[Any, None]:
        W, F, B, D, after, after_share, total = (
            carry  # all but the sums are multiplied by ρ_{m+1} already
        )
        E_m, eta_m, weight_m, share_m = inputs
        after, after_share = after + weight_m, after_share + weight_m * share_m
        W, B = jnp.where(E_m > 0, 1 + W, 0), after_share + B
        D = after + F[:, None] + F[None, :] + D
        F = after + F
        cross = B[:, None] * W[None, :]
        middle = D - cross - cross.T + squares * W[:, None] * W[None, :]
        lost = lost_share(eta_m * eigenvalues, E_m)
        total = total + middle * pair_noise(eigenvalues, lost, eta_m, E_m, _ZERO)
        rho = 1 - lost
        D = rho[:, None] * rho[None, :] * D
        return (rho * W, rho * F, rho * B, D, after, after_share, total), None

    line, square, zero = jnp.zeros(dim, dtype), jnp.zeros((dim, dim), dtype), jnp.zeros((), dtype)
    empty = (line, line, line, square, zero, zero, square)
    carry, _ = lax.scan(back, empty, (E, eta, weight, share), reverse=True)
    return carry[-1] / rounds / rounds
