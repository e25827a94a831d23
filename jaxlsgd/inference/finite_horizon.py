"""Intervals that allow for the horizon: the covariance of ȳ_T as it is, not as T → ∞.

Close to x* Local SGD is the linear recursion s_m = (I − η_m G)^{E_m} s_{m−1} + noise. With Ĝ = QΛQᵀ,
S̃ = QᵀŜQ, ρ_m(λ) = (1 − η_mλ)^{E_m}, W_T = 1, W_m = 1 + ρ_{m+1}W_{m+1} and
n_m(λ, λ') = η_m² Σ_{l<E_m} ((1 − η_mλ)(1 − η_mλ'))^l, the average ȳ_T of its path has

    Cov(ȳ_T) = Q [ (1/T²) Σ_m W_m(λ_i) W_m(λ_j) n_m(λ_i, λ_j) S̃_ij ] Qᵀ   (→ ν G⁻¹SG⁻ᵀ/t_T as T → ∞)

and the bias Q [ ρ_1(λ) W_1(λ) ] Qᵀ (x_0 − x*)/T left by its start.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxlsgd.base import Accumulator, Array, Estimator, Horizon, Measurement
from jaxlsgd.inference import finite_law
from jaxlsgd.inference import plug_in as plug_in_lib
from jaxlsgd.inference import random_scaling as random_scaling_lib

if TYPE_CHECKING:
    from jaxlsgd.schedules import Plan


class HorizonFactors(NamedTuple):
    """What the plan makes of each pair of eigenvalues, and of the start."""

    pair: Array  # (d, d) (1/T²) Σ W_m W_m n_m
    start: Array  # (d,) ρ_1 W_1/T


def horizon_factors(eigenvalues: Array, horizon: Horizon) -> HorizonFactors:
    """The two factors above, by the recursion from the last round back, in O(T d²)."""
    dtype = eigenvalues.dtype
    E, eta = horizon.E.astype(dtype), horizon.eta.astype(dtype)
    dim = eigenvalues.shape[0]

    def back(carry: tuple[Array, Array], inputs: tuple[Array, Array]) -> tuple[Any, None]:
        ahead, total = carry  # ρ_{m+1} W_{m+1}, and the sum
        E_m, eta_m = inputs
        lost = _one_minus_power(eta_m * eigenvalues, E_m)
        W = jnp.where(E_m > 0, 1 + ahead, 0)
        noise = _geometric(eigenvalues, lost, eta_m, E_m)
        total = total + W[:, None] * W[None, :] * noise
        return ((1 - lost) * W, total), None

    empty = (jnp.zeros(dim, dtype), jnp.zeros((dim, dim), dtype))
    (start, total), _ = lax.scan(back, empty, (E, eta), reverse=True)
    rounds = horizon.num_rounds.astype(dtype)
    return HorizonFactors(total / rounds / rounds, start / rounds)


def _one_minus_power(step: Array, E: Array) -> Array:
    """1 − (1 − ηλ)^E, without cancellation for small ηλ and with the right sign for ηλ > 1."""
    rate = 1 - step
    size = jnp.exp(E * jnp.log(jnp.maximum(jnp.abs(rate), jnp.finfo(step.dtype).tiny)))
    power = jnp.where((rate < 0) & (E % 2 == 1), -size, size)
    return jnp.where(step < 0.5, -jnp.expm1(E * jnp.log1p(-jnp.minimum(step, 0.5))), 1 - power)


def _geometric(values: Array, lost: Array, eta: Array, E: Array) -> Array:
    """η² Σ_{l<E} (r_i r_j)^l = η (1 − ρ_iρ_j)/(λ_i + λ_j − ηλ_iλ_j), where r = 1 − ηλ."""
    top = lost[:, None] + lost[None, :] - lost[:, None] * lost[None, :]
    bottom = values[:, None] + values[None, :] - eta * values[:, None] * values[None, :]
    flat = jnp.abs(eta * bottom) < 1e-6  # r_i r_j = 1: all E terms are one
    return jnp.where(flat, eta * eta * E, eta * top / jnp.where(flat, 1, bottom))


class FiniteDetail(NamedTuple):
    """What a run says about its own horizon, coordinate by coordinate."""

    inflation: Array  # (d,) finite over asymptotic standard error
    transient: Array  # (d,) bias left by the start, estimated


def finite_covariance(
    state: plug_in_lib.PlugInState, horizon: Horizon
) -> tuple[Array, plug_in_lib.Spectrum, HorizonFactors]:
    """Cov(ȳ_T) of the linearised recursion in the eigenbasis of Ĝ, with that basis."""
    spec = plug_in_lib.spectrum(state)
    factors = horizon_factors(spec.eigenvalues, horizon)
    return factors.pair * spec.S, spec, factors


def plug_in_estimator(name: str, part: Accumulator) -> Estimator:
    """Finite-horizon plug-in; see `plug_in(horizon="finite")`."""
    return Estimator(
        name,
        (part,),
        measure_plug_in,
        plug_in_lib.normal_multiplier,
        plug_in_lib.normal_tail,
        needs_plan=True,
    )


def measure_plug_in(
    states: tuple[plug_in_lib.PlugInState, ...], horizon: Horizon | None
) -> Measurement:
    """ȳ with its finite-horizon standard errors; `detail` is a `FiniteDetail`."""
    assert horizon is not None
    state = states[0]
    middle, spec, factors = finite_covariance(state, horizon)
    found = plug_in_lib.measurement(state, plug_in_lib.rotate_back(spec, middle), spec.floored)
    asymptotic, _ = plug_in_lib.asymptotic_covariance(state)
    inflation = found.scale / jnp.sqrt(jnp.diagonal(asymptotic))
    move = jnp.sum(spec.vectors * (state.start - found.estimate)[:, None], axis=0)
    transient = jnp.sum(spec.vectors * (factors.start * move)[None, :], axis=1)
    return found._replace(detail=FiniteDetail(inflation, transient))


class DirectionShares(NamedTuple):
    """Eigenvalues, and the share of each eigendirection in a coordinate's variance."""

    eigenvalues: Array  # (d,)
    shares: Array  # (coordinates, d)
    bias: Array  # (d,) what the start leaves in ȳ_T, over its standard deviation


def random_scaling_estimator(
    name: str, part: Accumulator, rows: tuple[tuple[float, ...], ...], curvature: Accumulator
) -> Estimator:
    """Random scaling with finite-horizon critical values."""
    return Estimator(
        name,
        (part, curvature),
        _measure_contrasts(rows),
        direction_multiplier,
        _direction_tail,
        needs_plan=True,
        contrasts=rows,
    )


@functools.cache
def _measure_contrasts(rows: tuple[tuple[float, ...], ...]) -> Any:
    """The measure of random scaling for contrasts (or for the coordinates, if there are none)."""

    def measure(states: tuple[Any, Any], horizon: Horizon | None) -> Measurement:
        assert horizon is not None
        found = random_scaling_lib.measure(states[:1], horizon)
        middle, spec, factors = finite_covariance(states[1], horizon)
        view = spec.vectors
        if rows:
            matrix = jnp.asarray(rows, view.dtype)
            view = jnp.matmul(matrix, view, precision=lax.Precision.HIGHEST)
        # Var_j = Σ_i view_ji (Σ_k middle_ik view_jk): the inner sums are the directions' shares.
        parts = view * jnp.matmul(view, middle, precision=lax.Precision.HIGHEST)
        shares = parts / jnp.sum(parts, axis=1, keepdims=True)
        # Far from x* the curvature is not Ĝ. The start is taken to fade at Ĝ's fastest rate: never too
        # slow for a linear problem, and what logistic regression does at first from x_0 = 0.
        move = jnp.sum(spec.vectors * (states[1].start - states[1].mean)[:, None], axis=0)
        fading = jnp.maximum(factors.start[-1], 0)
        bias = move * fading / jnp.sqrt(jnp.diagonal(middle))
        detail = DirectionShares(spec.eigenvalues, shares, bias)
        return found._replace(floored=found.floored | spec.floored, detail=detail)

    return measure


def direction_multiplier(level: float, plan: Plan | None, detail: DirectionShares) -> np.ndarray:
    """Critical values (..., coordinates): q⁻² = Σ_i share_i q(λ_i)⁻².

    Var ȳ_j is the sum of its directions' variances and E V̂_j is too, so that their ratio, which q²
    measures, adds up in this way. Exact where the λ_i are equal.
    """
    if plan is None:
        raise ValueError("plan: critical='finite_horizon' needs the plan that was run, got None")
    each = finite_law.interpolated(
        plan, np.asarray(detail.eigenvalues), np.asarray(detail.bias), level
    )
    return np.sum(np.asarray(detail.shares, np.float64) / each[..., None, :] ** 2, axis=-1) ** -0.5


def _direction_tail(statistic: Any, plan: Plan | None, detail: DirectionShares) -> np.ndarray:
    """p-values by inverting the critical values over a grid of levels."""
    levels = 1 - np.logspace(-0.01, -6, 61)
    table = np.stack([direction_multiplier(float(q), plan, detail) for q in levels])
    flat = np.abs(np.broadcast_to(np.asarray(statistic, np.float64), table.shape[1:]))
    result = np.empty(flat.shape)
    for index in np.ndindex(flat.shape):
        column = table[(slice(None), *index)]
        result[index] = np.exp(np.interp(flat[index], column, np.log(1 - levels)))
    return result
