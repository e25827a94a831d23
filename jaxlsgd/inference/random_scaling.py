"""Random scaling: intervals from the path alone, with no gradient and no Hessian."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.estimator import Accumulator, Estimator, Horizon, Measurement, Sync
from jaxlsgd.core.problem import Array, Params, flatten
from jaxlsgd.core.registry import register
from jaxlsgd.inference.laws import critical_values
from jaxlsgd.inference.laws.random_scaling import limit_law
from jaxlsgd.inference.sums import compensated_add, widened

MODES = ("full", "diagonal", "contrasts")
AVERAGES = ("rounds", "observations")
LABELS = {
    "asymptotic": "random scaling",
    "schedule": "random scaling, schedule's q",
    "paper": "random scaling, paper's q",
    "finite_horizon": "random scaling, finite horizon",
}


_COSTS = {
    "full": "no gradients, no communication; memory d² + 3d",
    "diagonal": "no gradients, no communication; memory 4d",
    "contrasts": "no gradients, no communication; memory q² + 3q for q contrasts",
}


class RandomScalingState(NamedTuple):
    """The paper's four accumulators, centred at the running mean ȳ_m.

    A = Σ (n²/E_n)(ȳ_n − ȳ_m)(ȳ_n − ȳ_m)ᵀ, b = Σ (n²/E_n)(ȳ_n − ȳ_m), s = Σ 1/E_n, q = Σ n²/E_n. For the
    average over observations E_n t_n² stands in the place of n²/E_n, and s = t_m.
    """

    A: Array  # (d, d), or (d,) in diagonal mode
    b: Array  # (d,)
    mean: Array  # (d,) ȳ_m
    lost: Array  # (d,) rounding error of ȳ_m so far
    s: Array  # ()
    q: Array  # ()
    s_lost: Array  # ()
    q_lost: Array  # ()
    m: Array  # () int32: a float32 counter would stop at 2²⁴


@functools.cache
def path_scale(
    mode: str = "full",
    contrasts: tuple[tuple[float, ...], ...] = (),
    observations: bool = False,
) -> Accumulator:
    """The random-scaling accumulators as a streaming statistic of x̄_{t_m}.

    With δ = (x̄_m − ȳ_{m−1})/m each round does, at the cost of the paper's Algorithm 2,

        A ← A − b δᵀ − δ bᵀ + q δδᵀ;   b ← b − q δ;   ȳ ← ȳ + δ;   q ← q + m²/E_m;   s ← s + 1/E_m

    Algorithm 2 keeps raw sums and subtracts at the end, which cancels in float32: V̂ would lose all
    its digits in a long run. ȳ, s and q are compensated sums (Kahan), because δ falls below the last
    bit of ȳ once m is large or ȳ is far from the origin.

    With `observations` ȳ_m = Σ E_n x̄_n/t_m. Its sums t_m (ȳ_m − x*) move like a Brownian motion at time t_m, so that
    V̂ = t_T⁻³ Σ E_n t_n² (ȳ_n − ȳ_T)(ȳ_n − ȳ_T)ᵀ makes (ȳ_T − x*)/√V̂ a t*(0) under every schedule. The recursion
    is the same with δ = (x̄_m − ȳ_{m−1}) E_m/t_m and weights E_m t_m².
    """
    matrix = np.asarray(contrasts, np.float64)

    def view(params: Params) -> Array:
        vector = widened(flatten(params))
        if mode != "contrasts":
            return vector
        if matrix.shape[1:] != vector.shape:
            raise refusal("contrasts", f"have {vector.size} columns", matrix.shape)
        rows = jnp.asarray(matrix, vector.dtype)
        return jnp.sum(rows * vector[None, :], axis=1)

    def init(params: Params) -> RandomScalingState:
        y = jnp.zeros_like(view(params))
        zero = jnp.zeros((), y.dtype)
        A = y if mode == "diagonal" else y[:, None] * y[None, :]
        return RandomScalingState(A, y, y, y, zero, zero, zero, zero, jnp.zeros((), jnp.int32))

    def update(state: RandomScalingState, sync: Sync) -> RandomScalingState:
        x = view(sync.params)
        m = state.m + 1
        weight = m.astype(x.dtype)
        rate = jnp.asarray(1, x.dtype) / jnp.asarray(sync.E, x.dtype)
        delta = ((x - state.mean) - state.lost) / weight
        if observations:
            rate = jnp.asarray(sync.E, x.dtype)
            weight = (state.s + rate) + state.s_lost
            delta = ((x - state.mean) - state.lost) * (rate / weight)
        # b δᵀ + δ bᵀ − q δδᵀ = c δᵀ + δ cᵀ with c = b − q δ/2
        c = state.b - (state.q / 2) * delta
        cross = (
            2 * c * delta
            if mode == "diagonal"
            else c[:, None] * delta[None, :] + delta[:, None] * c[None, :]
        )
        mean, lost = compensated_add(state.mean, state.lost, delta)
        s, s_lost = compensated_add(state.s, state.s_lost, rate)
        q, q_lost = compensated_add(state.q, state.q_lost, weight * weight * rate)
        b = state.b - state.q * delta
        return RandomScalingState(state.A - cross, b, mean, lost, s, q, s_lost, q_lost, m)

    shared = ("s", "q", "s_lost", "q_lost", "m")
    return Accumulator(init, update, shared=shared, any_width=True)


@register("method", brief="critical")
def random_scaling(
    mode: str = "full",
    *,
    contrasts: ArrayLike | None = None,
    critical: str = "asymptotic",
    beta: float | None = None,
    average: str = "rounds",
    name: str | None = None,
) -> Estimator:
    """Random scaling: ȳ_j ± q √V̂_jj with V̂_m = A_m/(m² s_m).

    The distribution of (ȳ − x*)/√V̂ does not depend on the problem, only on how E_m grows, so that
    no gradient or Hessian is needed: q is a quantile of t*(β), see `critical_values`.

    Args:
      mode: "full" keeps V̂ as (d, d), which joint tests need; "diagonal" keeps its diagonal in O(d);
        "contrasts" keeps V̂ of Rx for the rows R given.
      contrasts: R, (number, d); only with (and then required by) mode "contrasts".
      critical: where q comes from: "asymptotic" (t*(β) of the schedule's family, or the plan's own E_m
        where it has none), "schedule" (the plan's own E_m), "paper" (the paper's simulated Table 2),
        "finite_horizon" (the Gaussian process of the plan with the estimated G and S; needs Hessians,
        and an algorithm that the paper's theory covers).
      beta: growth exponent of E_m for "asymptotic" and "paper"; taken from the plan if None.
      average: "rounds", the paper's ȳ = Σ x̄_m/T; or "observations", ȳ = Σ E_m x̄_m/t_T with
        V̂ = t_T⁻³ Σ E_n t_n² (ȳ_n − ȳ_T)(ȳ_n − ȳ_T)ᵀ, whose law is t*(0) under every schedule. A limit
        law still: 95 % intervals covered 90 % under P(1/2) at t_T = 4,000.
      name: name in tables; made from the arguments if None.

    Returns:
      An `Estimator`.

    Example::

        estimator = random_scaling("contrasts", contrasts=[[1.0, -1.0]])
        state = estimator.init(jnp.zeros(2))
        for E, x in zip([1, 2, 4], jnp.eye(3, 2)):
            state = estimator.update(state, Sync(params=x, E=E, eta=0.1))
        estimator.interval(state, level=0.95)

    Reference: Li, Liang, Chang, Zhang, Section 4.2, Algorithm 2 and Corollary 4.2.
    """
    checks.choice("mode", mode, MODES)
    checks.choice("critical", critical, tuple(LABELS))
    if (contrasts is not None) != (mode == "contrasts"):
        raise refusal("mode", "be 'contrasts' where contrasts are given, and only there", mode)
    if beta is not None:
        critical_values.critical_value(0.5, beta=beta)
    checks.choice("average", average, AVERAGES)
    rows = checks.contrasts(contrasts) if contrasts is not None else ()
    build = _by_observations if average == "observations" else _by_rounds
    return build(mode, rows, critical, beta, name)


def _by_rounds(
    mode: str,
    rows: tuple[tuple[float, ...], ...],
    critical: str,
    beta: float | None,
    name: str | None,
) -> Estimator:
    part = path_scale(mode, rows)
    name = name or "random_scaling" + ("" if critical == "asymptotic" else f"[{critical}]")
    if critical == "finite_horizon":
        # Built on this module, so it cannot be imported by it at the top.
        from jaxlsgd.inference import finite_horizon
        from jaxlsgd.inference.plug_in import curvature

        full = None if mode == "diagonal" else matrix
        return finite_horizon.random_scaling_estimator(name, part, rows, curvature(), full)
    return Estimator(
        name=name,
        accumulators=(part,),
        measure=measure,
        law=limit_law(critical, beta),
        matrix=None if mode == "diagonal" else matrix,
        contrasts=rows,
        label=LABELS[critical],
        cost=_COSTS[mode],
    )


def _by_observations(
    mode: str,
    rows: tuple[tuple[float, ...], ...],
    critical: str,
    beta: float | None,
    name: str | None,
) -> Estimator:
    if critical == "finite_horizon":
        rule = "be another with average='observations': its finite laws are known for rounds only"
        hint = "; one_step() is as efficient and allows for the horizon"
        raise refusal("critical", rule, critical, hint)
    if beta is not None:
        rule = "be None with average='observations', whose law does not depend on how E_m grows"
        raise refusal("beta", rule, beta)
    given = "paper, observations" if critical == "paper" else "observations"
    return Estimator(
        name=name or f"random_scaling[{given}]",
        accumulators=(path_scale(mode, rows, True),),
        measure=measure_observations,
        # The plan's own clock is that of t*(0): observations.
        law=limit_law("paper" if critical == "paper" else "asymptotic", 0.0),
        matrix=None if mode == "diagonal" else observation_matrix,
        contrasts=rows,
        label=f"random scaling, {given}",
        cost=_COSTS[mode],
    )


def scaling_matrix(state: RandomScalingState) -> Array:
    """V̂_m = A/(m² s): (d, d), or its diagonal (d,) in diagonal mode."""
    m = jnp.maximum(state.m, 1).astype(state.A.dtype)
    # Two divisions: m² overflows nothing here, but m²·s would leave float32 at long horizons.
    return state.A / m / m / jnp.where(state.m > 0, state.s, 1)


def measure(states: tuple[RandomScalingState, ...], horizon: Horizon | None) -> Measurement:
    """ȳ with √V̂_jj as its scale."""
    del horizon
    return _measurement(states[0], scaling_matrix(states[0]))


def _measurement(state: RandomScalingState, V: Array) -> Measurement:
    diagonal = jnp.diagonal(V) if V.ndim == 2 else V
    scale = jnp.sqrt(jnp.maximum(diagonal, 0))
    # maximum() would turn a NaN of a diverged path into 0 on some back ends.
    scale = jnp.where(jnp.isnan(diagonal), jnp.nan, scale)
    # One round has no spread to estimate from.
    scale = jnp.where(state.m < 2, jnp.inf, scale)
    return Measurement(state.mean + state.lost, scale, jnp.any(diagonal < 0))


def matrix(states: tuple[RandomScalingState, ...], horizon: Horizon | None) -> Array:
    """V̂ for joint inference."""
    del horizon
    return scaling_matrix(states[0])


def measure_observations(
    states: tuple[RandomScalingState, ...], horizon: Horizon | None
) -> Measurement:
    """The average over observations with √V̂_jj as its scale."""
    return _measurement(states[0], observation_matrix(states, horizon))


def observation_matrix(states: tuple[RandomScalingState, ...], horizon: Horizon | None) -> Array:
    """V̂ = A/t³."""
    del horizon
    t = jnp.where(states[0].m > 0, states[0].s, 1)
    return states[0].A / t / t / t
