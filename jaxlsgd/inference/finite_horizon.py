"""Moments of Local SGD at a finite horizon: the covariance of ȳ_T itself, not its limit as T → ∞.

Close to x* Local SGD is the linear recursion s_m = (I − η_m G)^{E_m} s_{m−1} + noise. With Ĝ = QΛQᵀ,
S̃ = QᵀŜQ, ρ_m(λ) = (1 − η_mλ)^{E_m}, W_T = 1, W_m = 1 + ρ_{m+1}W_{m+1} and
n_m(λ, λ') = η_m² Σ_{l<E_m} ((1 − η_mλ)(1 − η_mλ'))^l, the average ȳ_T of its path has

    Cov(ȳ_T) = Q [ (1/T²) Σ_m W_m(λ_i) W_m(λ_j) n_m(λ_i, λ_j) S̃_ij ] Qᵀ   (→ ν G⁻¹SG⁻ᵀ/t_T as T → ∞)

and, from its start at x_0, the bias Q [ ρ_1(λ) W_1(λ) ] Qᵀ (x_0 − x*)/T. For the average over observations,
Σ E_m x̄_m/t_T, replace W_m by W_T = E_T, W_m = E_m + ρ_{m+1}W_{m+1}, and T by t_T. `plug_in` and `random_scaling`
use these moments.

The factors of one run are computed by these recursions in JAX. Those of many runs under one plan are functions of two
eigenvalues: given a `Plan` and NumPy arrays, they are tabulated once and interpolated, see `_table`.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxlsgd.core.estimator import Horizon, NotTabulated
from jaxlsgd.core.problem import Array
from jaxlsgd.inference.laws.finite_horizon import lost_share, pair_noise
from jaxlsgd.schedules import Plan

_ZERO = 1e-6  # of 1 − (1 − ηλ)(1 − ηλ'), in float32


class HorizonFactors(NamedTuple):
    """Factors of the covariance, per pair of eigenvalues, and of the bias from the start, under a plan."""

    pair: Array  # (d, d) (1/T²) Σ W_m W_m n_m
    start: Array  # (d,) ρ_1 W_1/T


def horizon_factors(
    eigenvalues: Array, horizon: Horizon | Plan, observations: bool = False
) -> HorizonFactors:
    """Compute both factors by the recursion from the last round to the first, in O(T d²); of a plan, interpolate them.

    With `observations`, they are those of the average over observations: W_m = E_m + ρ_{m+1}W_{m+1}, and t_T
    instead of T.
    """
    if isinstance(horizon, Plan):
        places = _placed(horizon, eigenvalues)
        table = _table(horizon, places, observations)
        return HorizonFactors(_between(table.pair, places), _along(table.start, places))
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


def scaling_factors(eigenvalues: Array, horizon: Horizon | Plan) -> Array:
    """Compute the factors of S̃_ik in E V̂_ik under the plan, (d, d), by a recursion as above in O(T d²), or interpolate.

    With w_n = (1/E_n)/Σ1/E, A_nm(λ) = Σ_{m≤l≤n} ρ_{m+1}…ρ_l and D_m = Σ_{n≥m} w_n A_nm(λ)A_nm(λ'),
    B_m = Σ_{n≥m} w_n (n/T) A_nm, the factor is (1/T²) Σ_m n_m (D_m − B_mW'_m − W_mB'_m + W_mW'_m Σ w_n n²/T²).
    """
    if isinstance(horizon, Plan):
        places = _placed(horizon, eigenvalues)
        return _between(_table(horizon, places).scaling, places)
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


# The factors are tabulated at eigenvalues exp(i · step), times both of them, and interpolated by polynomials through
# so many knots. Compared with the recursions in float64, for the paper's schedules and C50, 40 to 5,000 rounds and
# eigenvalues a factor 30 apart, they are off by at most 1e-6. Half-widths differ from those of the recursions in float32
# by up to 1.4e-6 (both models, C1, C5 and P(1/2), t_T = 1,000).
_STEP, _POINTS = 0.25 * np.log(2.0), 8
_MOST_KNOTS = 100
# Factors under a plan whose first steps overshoot by more than e^this together, at the largest knot, are too steep.
_MOST_GROWTH = 5.0
_CHUNK = 128  # rounds whose pairs are computed together
_making = threading.Lock()


class _Table(NamedTuple):
    """Factors at the knots `first`, `first` + 1, …, each times the eigenvalues it belongs to."""

    first: int
    pair: np.ndarray  # (knots, knots)
    start: np.ndarray  # (knots,)
    scaling: np.ndarray  # (knots, knots)


class _Places(NamedTuple):
    """Eigenvalues (..., d) among the knots."""

    values: np.ndarray
    knot: np.ndarray  # (..., d) int, the first of those around
    weights: np.ndarray  # (points, ..., d)
    low: int  # the first knot of all
    high: int  # the last


def _placed(plan: Plan, eigenvalues: Any) -> _Places:
    """Find eigenvalues among the knots; raise NotTabulated if they are too far apart or too large for the plan."""
    values = np.where(eigenvalues > 0, eigenvalues, np.nan)
    good = np.isfinite(values)
    place = np.log(np.where(good, values, 1.0)) / _STEP
    below = np.floor(place)
    knot = below.astype(np.int64) - (_POINTS // 2 - 1)
    if not good.any():
        raise NotTabulated
    low, high = int(knot[good].min()), int(knot[good].max()) + _POINTS - 1
    rate = np.abs(1 - plan.eta * np.exp(high * _STEP))
    growth = np.sum(plan.E * np.log(np.maximum(rate, 1.0)))
    if high - low >= _MOST_KNOTS or growth > _MOST_GROWTH:
        raise NotTabulated
    offsets, x = np.arange(_POINTS) - (_POINTS // 2 - 1), place - below
    weights = np.stack([_lagrange(x, offsets, a) for a in range(_POINTS)])
    return _Places(values, np.where(good, knot, low), weights, low, high)


def _lagrange(x: np.ndarray, offsets: np.ndarray, a: int) -> np.ndarray:
    others = np.delete(offsets, a)
    return functools.reduce(np.multiply, [(x - b) / (offsets[a] - b) for b in others])


def _along(table: np.ndarray, at: _Places) -> Any:
    """Interpolate (knots,) to (..., d)."""
    found = sum(w * table[at.knot - at.low + a] for a, w in enumerate(at.weights))
    return found / at.values


def _between(table: np.ndarray, at: _Places) -> Any:
    """Interpolate (knots, knots) to (..., d, d)."""
    one, other = (at.knot - at.low)[..., :, None], (at.knot - at.low)[..., None, :]
    # Added in this order whatever the other eigenvalues are, so that a run's numbers do not depend on its company.
    found = sum(
        v[..., :, None]
        * sum(w[..., None, :] * table[one + a, other + b] for b, w in enumerate(at.weights))
        for a, v in enumerate(at.weights)
    )
    return found / at.values[..., :, None] / at.values[..., None, :]


def _table(plan: Plan, at: _Places, observations: bool = False) -> _Table:
    """Return the factors at knots from `at.low` to `at.high`; they are kept, and tabulated again for further knots."""
    kept = _tables_of(plan, observations)
    with _making:
        if not kept or kept[-1].first > at.low or kept[-1].first + len(kept[-1].start) <= at.high:
            ends = [at.low, at.high]
            if kept:
                ends += [kept[-1].first, kept[-1].first + len(kept[-1].start) - 1]
            kept[:] = [_tabulated(plan, min(ends), max(ends), observations)]
        found = kept[-1]
    chosen = slice(at.low - found.first, at.high - found.first + 1)
    square = chosen, chosen
    return _Table(at.low, found.pair[square], found.start[chosen], found.scaling[square])


@functools.lru_cache(maxsize=64)
def _tables_of(plan: Plan, observations: bool) -> list[_Table]:
    return []


def _tabulated(plan: Plan, first: int, last: int, observations: bool) -> _Table:
    """Compute the recursions of `horizon_factors` and `scaling_factors` at all pairs of knots, in float64."""
    values = np.exp(np.arange(first, last + 1) * _STEP)
    E, eta, T = plan.E.astype(np.float64), np.asarray(plan.eta, np.float64), plan.num_rounds
    weight = 1 / E / np.sum(1 / E)
    share = np.arange(1, T + 1) / T
    squares = np.sum(weight * share * share)
    count = E.sum() if observations else T
    ahead, F, B = (np.zeros(len(values)) for _ in range(3))
    D, pair, scaling = (np.zeros((len(values), len(values))) for _ in range(3))
    after = after_share = 0.0
    for end in range(T, 0, -_CHUNK):
        rounds = range(end - 1, max(0, end - _CHUNK) - 1, -1)
        at = np.array(rounds)
        lost = lost_share(eta[at, None] * values, E[at, None])
        Ws, Bs = np.empty((2, len(at), len(values)))
        Ds = np.empty((len(at), *D.shape))
        for i, m in enumerate(rounds):
            rho = 1 - lost[i]
            after, after_share = after + weight[m], after_share + weight[m] * share[m]
            Ws[i] = (E[m] if observations else 1) + ahead
            Bs[i] = after_share + B
            Ds[i] = after + F[:, None] + F + D
            ahead, F, B = rho * Ws[i], rho * (after + F), rho * Bs[i]
            D = rho[:, None] * rho * Ds[i]
        noise = pair_noise(values, lost, eta[at, None, None], E[at, None, None], 1e-14)
        W2, cross = Ws[:, :, None] * Ws[:, None, :], Bs[:, :, None] * Ws[:, None, :]
        pair += np.add.reduce(W2 * noise, 0)
        scaling += np.add.reduce((Ds - cross - cross.mT + squares * W2) * noise, 0)
    both = values[:, None] * values
    return _Table(
        first, pair * both / count / count, ahead * values / count, scaling * both / T / T
    )
