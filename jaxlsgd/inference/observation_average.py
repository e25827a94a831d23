"""The average over observations, ȳ = Σ E_m x̄_m/t_T, with its plug-in covariances.

A round of E_m steps counts E_m times. As T → ∞ this average has covariance G⁻¹SG⁻ᵀ/t_T under every schedule,
the paper's without its ν ≥ 1. At a finite horizon the recursion of `finite_horizon` has weights w_m = E_m/t_T:
W_T = w_T, W_m = w_m + ρ_{m+1}W_{m+1} and Cov(ȳ) = Q [Σ_m W_m(λ_i) W_m(λ_j) n_m(λ_i, λ_j) S̃_ij] Qᵀ.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jaxlsgd.core.estimator import Estimator, Horizon, Measurement
from jaxlsgd.core.problem import Array
from jaxlsgd.inference import finite_horizon
from jaxlsgd.inference import plug_in as plug_in_lib
from jaxlsgd.inference.laws.standard import NORMAL
from jaxlsgd.inference.sums import path_mean


def plug_in_estimator(name: str, finite: bool) -> Estimator:
    """Plug-in for the average over observations; see `plug_in(average="observations")`."""
    return Estimator(
        name=name,
        accumulators=(plug_in_lib.curvature(), path_mean(observations=True)),
        measure=_measure_finite if finite else _measure_by_observations,
        law=NORMAL,
        matrix=_matrix_finite if finite else _matrix_by_observations,
        standard_error=True,
        needs_plan=finite,
        label="plug-in, observations" + (", finite horizon" if finite else ""),
        cost=plug_in_lib.COST,
    )


def _measure_by_observations(states: tuple[Any, ...], horizon: Horizon | None) -> Measurement:
    spec = plug_in_lib.spectrum(states[0])
    return _measurement(states, _matrix_by_observations(states, horizon), spec.floored)


def _matrix_by_observations(states: tuple[Any, ...], horizon: Horizon | None) -> Array:
    """Ĝ⁻¹ŜĜ⁻ᵀ/t_T."""
    del horizon
    spec = plug_in_lib.spectrum(states[0])
    t = jnp.maximum(states[1].t, 1).astype(spec.S.dtype)
    return plug_in_lib.rotate_back(spec, plug_in_lib.sandwich(spec)) / t


def _measure_finite(states: tuple[Any, ...], horizon: Horizon | None) -> Measurement:
    """As in the limit, with the plan's covariance; `detail` is a `FiniteDetail`."""
    assert horizon is not None
    middle, spec, factors = _finite(states, horizon)
    found = _measurement(states, plug_in_lib.rotate_back(spec, middle), spec.floored)
    inflation = found.scale / jnp.sqrt(jnp.diagonal(_matrix_by_observations(states, horizon)))
    start = states[0].start - found.estimate
    transient = finite_horizon.start_bias(spec, factors, start)
    return found._replace(detail=finite_horizon.FiniteDetail(inflation, transient))


def _matrix_finite(states: tuple[Any, ...], horizon: Horizon | None) -> Array:
    assert horizon is not None
    middle, spec, _ = _finite(states, horizon)
    return plug_in_lib.rotate_back(spec, middle)


def _finite(states: tuple[Any, ...], horizon: Horizon) -> tuple[Array, Any, Any]:
    spec = plug_in_lib.spectrum(states[0])
    factors = finite_horizon.horizon_factors(spec.eigenvalues, horizon, observations=True)
    return factors.pair * spec.S, spec, factors


def _measurement(states: tuple[Any, ...], covariance: Array, floored: Array) -> Measurement:
    found = plug_in_lib.measurement(states[0], covariance, floored)
    return found._replace(estimate=states[1].mean + states[1].lost)
