"""Random scaling: intervals from the path alone, with no gradient and no Hessian.

`random_scaling` builds all variants; start reading there. Only its finite-horizon critical values need Hessians.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.estimator import Accumulator, Estimator, Horizon, Measurement, Sync
from jaxlsgd.core.problem import Array, Params, flatten
from jaxlsgd.core.registry import register
from jaxlsgd.inference.finite_horizon import horizon_factors, scaling_factors
from jaxlsgd.inference.laws import critical_values
from jaxlsgd.inference.laws.random_scaling import FINITE_HORIZON, Directions, limit_law
from jaxlsgd.inference.plug_in import curvature, eigenbasis, product
from jaxlsgd.inference.sums import Average, compensated_add, widened

Mode = Literal["full", "diagonal", "contrasts"]
Critical = Literal["asymptotic", "schedule", "paper", "finite"]
_LABELS: dict[Critical, str] = {
    "asymptotic": "random scaling",
    "schedule": "random scaling, schedule's q",
    "paper": "random scaling, paper's q",
    "finite": "random scaling, finite horizon",
}
_COSTS = {
    "full": "no gradients, no communication; memory d² + 3d",
    "diagonal": "no gradients, no communication; memory 4d",
    "contrasts": "no gradients, no communication; memory q² + 3q for q contrasts",
    "finite": "a gradient and a Hessian per client and round to the server; memory 3d² + 6d",
}


class RandomScalingState(NamedTuple):
    """The paper's four accumulators, centred at the running mean ȳ_m.

    A = Σ (n²/E_n)(ȳ_n − ȳ_m)(ȳ_n − ȳ_m)ᵀ, b = Σ (n²/E_n)(ȳ_n − ȳ_m), s = Σ 1/E_n, q = Σ n²/E_n. For the
    average over observations E_n t_n² takes the place of n²/E_n, and s = t_m.
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
    mode: Mode = "full",
    contrasts: tuple[tuple[float, ...], ...] = (),
    observations: bool = False,
) -> Accumulator:
    """Return the random-scaling accumulators as a streaming statistic of x̄_{t_m}.

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
            raise refusal("contrasts", f"have {vector.size} columns", matrix.shape, code="shape")
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
    critical: Critical = "asymptotic",
    *,
    mode: Mode = "full",
    contrasts: ArrayLike | None = None,
    beta: float | None = None,
    average: Average = "rounds",
    name: str | None = None,
) -> Estimator:
    """Random scaling: ȳ_j ± q √V̂_jj with V̂_m = A_m/(m² s_m).

    The distribution of (ȳ − x*)/√V̂ does not depend on the problem, only on how E_m grows, so that
    no gradient or Hessian is needed: q is a quantile of t*(β), see `critical_values`.

    Args:
      critical: where q comes from: "asymptotic" (t*(β) of the schedule's family, or the plan's own E_m
        if it has none), "schedule" (the plan's own E_m), "paper" (the paper's simulated Table 2),
        "finite" (the Gaussian process of the plan with the estimated G and S; needs Hessians,
        and an algorithm that the paper's theory covers).
      mode: "full" keeps V̂ as (d, d), which joint tests need; "diagonal" keeps its diagonal in O(d);
        "contrasts", which contrasts imply, keeps V̂ of Rx for the rows R given.
      contrasts: R, (number, d); intervals are then for Rx.
      beta: growth exponent of E_m for "asymptotic" and "paper"; taken from the plan if None.
      average: "rounds", the paper's ȳ = Σ x̄_m/T; or "observations", ȳ = Σ E_m x̄_m/t_T with
        V̂ = t_T⁻³ Σ E_n t_n² (ȳ_n − ȳ_T)(ȳ_n − ȳ_T)ᵀ, whose law is t*(0) under every schedule. This is
        a limit law too: 95 % intervals covered 90 % under P(1/2) at t_T = 4,000.
      name: name in tables; made from the arguments if None.

    Returns:
      An `Estimator`.

    Example::

        estimator = random_scaling(contrasts=[[1.0, -1.0]])
        state = estimator.init(jnp.zeros(2))
        for E, x in zip([1, 2, 4], jnp.eye(3, 2)):
            state = estimator.update(state, Sync(params=x, E=E, eta=0.1))
        estimator.interval(state, level=0.95)

    Reference: Li, Liang, Chang, Zhang, Section 4.2, Algorithm 2 and Corollary 4.2.
    """
    checks.choice("mode", mode, Mode)
    checks.choice("critical", critical, Critical)
    if contrasts is not None and mode == "full":
        mode = "contrasts"
    if (contrasts is not None) != (mode == "contrasts"):
        raise refusal(
            "mode", "be 'contrasts' if and only if contrasts are given", mode, code="conflict"
        )
    if beta is not None:
        critical_values.critical_value(0.5, beta=beta)
    checks.choice("average", average, Average)
    rows = checks.contrasts(contrasts) if contrasts is not None else ()
    observations, finite = average == "observations", critical == "finite"
    if observations and finite:
        rule = "be another with average='observations': its finite laws are known for rounds only"
        hint = "; one_step() is as efficient and allows for the horizon"
        raise refusal("critical", rule, critical, hint, code="conflict")
    if observations and beta is not None:
        rule = "be None with average='observations', whose law does not depend on how E_m grows"
        raise refusal("beta", rule, beta, code="unwanted")
    given, label = "" if critical == "asymptotic" else critical, _LABELS[critical]
    law = FINITE_HORIZON if finite else limit_law(critical, beta)
    if observations:
        given = "paper, observations" if critical == "paper" else "observations"
        label = f"random scaling, {given}"
        # In time counted in observations, every schedule has the law t*(0).
        law = limit_law("paper" if critical == "paper" else "asymptotic", 0.0)
    part = path_scale(mode, rows, observations)
    measure, matrix = _functions(observations)
    return Estimator(
        name=name or "random_scaling" + (f"[{given}]" if given else ""),
        accumulators=(part, curvature()) if finite else (part,),
        measure=_measure_directions(rows) if finite else measure,
        law=law,
        matrix=None if mode == "diagonal" else matrix,
        needs_plan=finite,
        contrasts=rows,
        label=label,
        cost=_COSTS["finite" if finite else mode],
        within_theory=finite,
        reads_tiles=finite,
    )


def scaling_matrix(state: RandomScalingState, observations: bool = False) -> Array:
    """Return V̂_m = A/(m² s), or A/t³ for `observations`: (d, d), or its diagonal (d,) in diagonal mode."""
    xp = state.A.__array_namespace__()
    s = xp.where(state.m > 0, state.s, 1)
    # One division at a time: m² s would leave the range of float32 at long horizons.
    if observations:
        return state.A / s / s / s
    m = xp.maximum(state.m, 1).astype(state.A.dtype)
    return state.A / m / m / s


@functools.cache
def _functions(observations: bool) -> tuple[Any, Any]:
    """Return `measure` and `matrix` of an estimator."""

    def measure(states: tuple[RandomScalingState, ...], horizon: Horizon | None) -> Measurement:
        return _measurement(states[0], matrix(states, horizon))

    def matrix(states: tuple[RandomScalingState, ...], horizon: Horizon | None) -> Array:
        del horizon
        return scaling_matrix(states[0], observations)

    return measure, matrix


def _measurement(state: RandomScalingState, V: Array) -> Measurement:
    xp = V.__array_namespace__()
    diagonal = xp.diagonal(V, axis1=-2, axis2=-1) if V.ndim > state.mean.ndim else V
    scale = xp.sqrt(xp.maximum(diagonal, 0))
    # On some back ends maximum() turns the NaN of a diverged path into 0.
    scale = xp.where(xp.isnan(diagonal), xp.nan, scale)
    # One round has no spread to estimate from.
    scale = xp.where(state.m < 2, xp.inf, scale)
    return Measurement(state.mean + state.lost, scale, xp.any(diagonal < 0, -1))


@functools.cache
def _measure_directions(rows: tuple[tuple[float, ...], ...]) -> Any:
    """Return the finite-horizon measure for contrasts, or for the coordinates if there are none."""

    def measure(states: tuple[Any, Any], horizon: Horizon | None) -> Measurement:
        assert horizon is not None
        found = _measurement(states[0], scaling_matrix(states[0]))
        basis = eigenbasis(states[1])
        factors = horizon_factors(basis.eigenvalues, horizon)
        scaling = scaling_factors(basis.eigenvalues, horizon)
        view = basis.vectors
        xp = view.__array_namespace__()
        move = states[1].start - states[1].mean
        if rows:
            matrix = xp.asarray(rows, view.dtype)
            view = product(matrix, view)
            move = xp.sum(matrix * move[..., None, :], axis=-1)
        inner = product(view, factors.pair * basis.S)
        variance = xp.sum(view * inner, axis=-1)
        # Far from x* the curvature is not Ĝ. The start is assumed to fade at Ĝ's fastest rate: an upper bound
        # for a linear problem, and the initial rate of logistic regression from x_0 = 0.
        bias = move * xp.maximum(factors.start[..., -1:], 0) / xp.sqrt(variance)
        pairs = [xp.diagonal(one, axis1=-2, axis2=-1) for one in (scaling, factors.pair)]
        ratio = pairs[0] / pairs[1]
        scaling = scaling * basis.S
        detail = Directions(basis.eigenvalues, view, variance, scaling, ratio, bias, basis.S)
        return found._replace(floored=found.floored | basis.floored, detail=detail)

    return measure
