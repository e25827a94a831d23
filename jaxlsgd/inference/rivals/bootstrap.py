"""Online bootstrap: copies of the run on the same observations with random weights.

Beside the run itself, B copies make its steps with perturbed gradients,

    x_k^b ← x_k^b − η_m W_{t,k}^b ∇f_k(x_k^b; ξ_{t,k}),     W independent, mean 1, variance 1,

and are averaged by the server as it is. Near x* the averages differ by ȳ^b − ȳ ≈ G⁻¹ Σ (weighted as in ȳ) of
Σ_k p_k (W − 1) ∇f_k(x*; ξ), whose covariance given the data estimates that of ȳ: rounds, local steps and the ν of the
schedule are in it, and no weights by E_m are needed. If clients have optima of their own, so that
∇f_k(x*) has a mean μ_k, independent weights count Σ_k p_k² μ_kμ_kᵀ with S: intervals are then too long.

In the engine the copies are one problem with parameters (B + 1, d), made by `perturbed`; the first row is the
run itself. The weights are a hash of an observation's draws (or of its key), without further draws, so that
the first row is the same run as without copies.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.estimator import Estimator, Horizon, Law, Measurement
from jaxlsgd.core.forms import dense
from jaxlsgd.core.problem import Array, Draws, Problem
from jaxlsgd.core.registry import register
from jaxlsgd.inference.laws.standard import NORMAL
from jaxlsgd.inference.rivals.copies import (
    RunState,
    averages,
    contrasts_of,
    given_dim,
    run_means,
    stacked_problem,
)

IntervalKind = Literal["sd", "percentile"]
Weights = Literal["exponential", "double"]
_GOLDEN = np.uint32(0x9E3779B9)


@functools.lru_cache(maxsize=64)
@register("problem")
def perturbed(problem: Problem, copies: int = 200, weights: Weights = "exponential") -> Problem:
    """Return a problem with B further copies of its parameters, whose gradients have random weights.

    Args:
      problem: what is estimated.
      copies: B.
      weights: the law of W: "exponential", or "double" (0 or 2).

    Returns:
      A problem whose parameters are (B + 1, d), flattened parameters in rows.

    Example::

        many = perturbed(problem, copies=100)
        simulate(key, many, plan, replications=500, methods=[bootstrap(100)])
    """
    checks.count("copies", copies, 2)
    checks.choice("weights", weights, Weights)
    functions = problem.structure().flat_functions()
    numbers = np.arange(1, copies + 1, dtype=np.uint32)

    def with_weights(words: Array, seen: Any) -> tuple[Any, Array]:
        bits = _mixed(_hashed(words) + numbers * _GOLDEN)
        if weights == "double":
            drawn = (bits >> np.uint32(31)).astype(jnp.float32) * 2
        else:
            middle = (bits >> np.uint32(9)).astype(jnp.int32).astype(jnp.float32) + 0.5
            drawn = -jnp.log(middle * np.float32(2.0**-23))
        return seen, jnp.concatenate([jnp.ones(1, drawn.dtype), drawn])

    def observe(draws: Draws, client: Any) -> Any:
        assert functions.observe is not None
        each = [lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) for x in draws]
        return with_weights(jnp.concatenate(each), functions.observe(draws, client))

    def sample(key: Array, client: Any) -> Any:
        assert functions.sample is not None
        words = jax.random.key_data(key).ravel()
        return with_weights(words, functions.sample(key, client))

    def loss(x: Array, observation: Any) -> Array:
        seen, w = observation
        return jnp.sum(w.astype(x.dtype) * jax.vmap(lambda row: functions.loss(row, seen))(x))

    def gradient(x: Array, observation: Any) -> Array:
        seen, w = observation
        each = jax.vmap(lambda row: dense(functions.gradient(row, seen)))(x)
        return w.astype(x.dtype)[:, None] * each

    source: dict[str, Any] = {"draws": problem.draws, "observe": observe}
    if problem.sample is not None:
        source = {"sample": sample}
    return stacked_problem(problem, copies + 1, loss, gradient, **source)


def _hashed(words: Array) -> Array:
    """Hash many words to one: a sum with odd multipliers, mixed."""
    odd = 2 * _mixed(jnp.arange(1, words.shape[0] + 1, dtype=jnp.uint32)) + np.uint32(1)
    return _mixed(jnp.sum(words * odd, dtype=jnp.uint32))


def _mixed(bits: Array) -> Array:
    """Apply the finaliser of MurmurHash3: every bit of the result depends on every bit of the argument."""
    bits = (bits ^ (bits >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return bits ^ (bits >> np.uint32(16))


class Spread(NamedTuple):
    """Distances of the copies from the run."""

    away: Any  # (B, d) |ȳ^b − ȳ| over the scale, smallest first


@register("method")
def bootstrap(
    copies: int, dim: int | None = None, *, interval: IntervalKind = "sd", name: str | None = None
) -> Estimator:
    """Online bootstrap: ȳ_j ± z times the standard deviation of B perturbed copies, or their percentiles.

    For a problem made by `perturbed`, whose first d parameters are the run and the others its copies.

    Args:
      copies: B, at least 2.
      dim: d of one copy; that of the problem if None, and checked if given.
      interval: "sd", or "percentile": the quantile of |ȳ^b − ȳ| over the copies, so that the interval is
        symmetric around ȳ.
      name: name in tables; made from the arguments if None.

    Returns:
      An `Estimator`. It costs B further gradients per observation, B times the communication and the memory
      of clients and server.

    Reference: Fang, Xu, Yang (2018), Online bootstrap confidence intervals for the stochastic gradient descent
    estimator, JMLR 19.
    """
    checks.count("copies", copies, 2)
    given = given_dim(dim)
    checks.choice("interval", interval, IntervalKind)
    return Estimator(
        name=name or f"bootstrap[{interval}]",
        accumulators=(run_means(copies + 1, given),),
        measure=_measure_copies(copies, given),
        law=NORMAL if interval == "sd" else _percentiles(copies),
        standard_error=True,
        **contrasts_of(copies + 1, given, first_only=True),
        label="bootstrap" + (", percentiles" if interval == "percentile" else ""),
        cost=f"{copies} × gradients, communication and memory",
    )


@functools.cache
def _measure_copies(copies: int, dim: int | None) -> Any:
    def measure(states: tuple[RunState, ...], horizon: Horizon | None) -> Measurement:
        del horizon
        state = states[0]
        means = averages(state, copies + 1, dim)
        others = means[1:]
        around = others - jnp.mean(others, axis=0)
        scale = jnp.sqrt(jnp.sum(around * around, axis=0) / (copies - 1))
        away = jnp.sort(jnp.abs(others - means[:1]), axis=0) / jnp.where(scale > 0, scale, 1)
        scale = jnp.where(state.m < 1, jnp.inf, scale)
        return Measurement(means[0], scale, detail=Spread(away))

    return measure


@functools.cache
def _percentiles(copies: int) -> Law:
    """Return the empirical law of |ȳ^b − ȳ| over its scale."""

    def multiplier(level: float, plan: Any, detail: Spread) -> Any:
        del plan
        rank = int(np.ceil(level * (copies + 1) - 1e-9))
        if rank > copies:
            rule = f"be at most {copies / (copies + 1):.4g} for percentiles of {copies} copies"
            raise refusal("level", rule, level, code="unsupported")
        return np.asarray(detail.away, np.float64)[..., rank - 1, :]

    def tail(statistic: Any, plan: Any, detail: Spread) -> np.ndarray:
        del plan
        away = np.asarray(detail.away, np.float64)
        beyond = np.sum(away >= np.abs(np.asarray(statistic, np.float64))[..., None, :], axis=-2)
        return (1 + beyond) / (copies + 1)

    return Law(multiplier, tail, least_p=1 / (copies + 1))
