"""Batch means with equal batches, at all sizes 2^j at once, so that the size can be chosen when it is read.

A batch is a span of information time Σ 1/E_k, see `growing_batches`: it ends with the round that brings its length τ
to 2^j, and the next round begins another. With B_i = Σ_{k∈batch i} (x̄_k − ȳ_T) over whole batches of one size,

    V̂_j = Σ_i B_i B_iᵀ / Σ_i τ_i,     Cov(ȳ_T) ≈ V̂_j s_T/T²,     s_T = Σ 1/E_k.

The size that is read is the least 2^j ≥ s_T/a with a = c T^{(1−α)/2} batches; on one machine (E_m = 1, s_T = T) that
is the published b ≥ T^{(1+α)/2}/c. Neighbouring batches are correlated, because x̄ has a memory, which makes V̂_j too small
by a share in proportion to 2^(−j). The lugsail 2V̂_j − V̂_{j−1} takes that out to first order.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxlsgd.core import checks
from jaxlsgd.core.estimator import Accumulator, Estimator, Horizon, Measurement, Sync
from jaxlsgd.core.problem import Array, Params, flatten
from jaxlsgd.core.registry import register
from jaxlsgd.inference.laws.standard import NORMAL
from jaxlsgd.inference.rivals.growing_batches import step_exponent
from jaxlsgd.inference.sums import compensated_add, widened

# In information time. With c = 1, E_m = 1 and α near 1/2 the largest is that of seven million rounds.
SIZES = 2.0 ** np.arange(-4, 18)
_NEARLY = 1 - 1e-6  # 5 times 1/5 may be a little less than 1


class EqualState(NamedTuple):
    """Sums over whole batches of each size, centred at the running mean ȳ_m."""

    A: Array  # (sizes, d) Σ B_i², coordinate by coordinate
    b: Array  # (sizes, d) Σ n_i B_i
    B: Array  # (sizes, d) of the open batch
    mean: Array  # (d,) ȳ_m
    lost: Array  # (d,) rounding error of ȳ_m so far
    q: Array  # (sizes,) Σ n_i², n_i the rounds of batch i
    length: Array  # (sizes,) Σ τ_i
    tau: Array  # (sizes,) of the open batch
    n: Array  # (sizes,) int32, rounds of the open batch
    whole: Array  # (sizes,) int32, whole batches
    s: Array  # () Σ 1/E_n
    s_lost: Array  # ()
    m: Array  # () int32


@functools.cache
def equal_sums() -> Accumulator:
    """Return the sums above as a streaming statistic; a round costs 3d operations per size."""

    def init(params: Params) -> EqualState:
        y = jnp.zeros_like(widened(flatten(params)))
        rows = jnp.zeros((len(SIZES), *y.shape), y.dtype)
        line, count = jnp.zeros(len(SIZES), y.dtype), jnp.zeros(len(SIZES), jnp.int32)
        zero = jnp.zeros((), y.dtype)
        none = jnp.zeros((), jnp.int32)
        return EqualState(rows, rows, rows, y, y, line, line, line, count, count, zero, zero, none)

    def update(state: EqualState, sync: Sync) -> EqualState:
        x = widened(flatten(sync.params))
        rate = 1 / jnp.asarray(sync.E, x.dtype)
        m = state.m + 1
        delta = ((x - state.mean) - state.lost) / m.astype(x.dtype)
        mean, lost = compensated_add(state.mean, state.lost, delta)
        column, row = state.q[:, None], delta[None, :]
        A = state.A - (2 * state.b - column * row) * row
        b = state.b - column * row
        B = state.B - state.n.astype(x.dtype)[:, None] * row + ((x - mean) - lost)[None, :]
        n, tau = state.n + 1, state.tau + rate
        rounds = n.astype(x.dtype)
        ends = tau >= jnp.asarray(SIZES * _NEARLY, x.dtype)
        closed = ends[:, None]
        s, s_lost = compensated_add(state.s, state.s_lost, rate)
        return EqualState(
            A + jnp.where(closed, B * B, 0),
            b + jnp.where(closed, rounds[:, None] * B, 0),
            jnp.where(closed, 0, B),
            mean,
            lost,
            state.q + jnp.where(ends, rounds * rounds, 0),
            state.length + jnp.where(ends, tau, 0),
            jnp.where(ends, 0, tau),
            jnp.where(ends, 0, n),
            state.whole + ends.astype(jnp.int32),
            s,
            s_lost,
            m,
        )

    return Accumulator(init, update, shared=EqualState._fields[5:])


@register("method")
def equal_batches(
    *, lugsail: bool = True, alpha: float = 0.505, c: float = 1.0, name: str | None = None
) -> Estimator:
    """Batch means over equal batches of information time, with a lugsail correction of their bias.

    The correction is left out if it would make an interval shorter, which is due to chance.

    Args:
      lugsail: whether to use 2V̂_j − V̂_{j−1} rather than V̂_j.
      alpha: α of the step size γ_m = γ_0 m^(−α), in [1/2, 1).
      c: how many batches there are is c T^{(1−α)/2}, up to a factor of two; at least two.
      name: name in tables; made from the arguments if None.

    Returns:
      An `Estimator`. It needs neither gradient nor Hessian, and no communication; it keeps 68d numbers.

    Reference: Singh, Shukla, Vats (2025), On the utility of equal batch sizes for inference in stochastic
    gradient descent, JMLR 26; Vats, Flegal (2022), Lugsail lag windows for estimating time-average
    covariance matrices, Biometrika 109.
    """
    step_exponent(alpha)
    checks.positive("c", c)
    return Estimator(
        name=name or "equal_batches" + ("[lugsail]" if lugsail else ""),
        accumulators=(equal_sums(),),
        measure=_measure_with(bool(lugsail), float(alpha), float(c)),
        law=NORMAL,
        standard_error=True,
        label="equal batches" + (", lugsail" if lugsail else ""),
        cost="no gradients, no communication; memory 68d",
    )


@functools.cache
def _measure_with(lugsail: bool, alpha: float, c: float) -> Any:
    def measure(states: tuple[EqualState, ...], horizon: Horizon | None) -> Measurement:
        del horizon
        state = states[0]
        dtype = state.A.dtype
        rounds = jnp.maximum(state.m, 1).astype(dtype)
        size = state.s / (c * rounds ** ((1 - alpha) / 2))
        chosen = jnp.sum(jnp.asarray(SIZES, dtype) < size * _NEARLY)
        largest = jnp.sum(state.whole >= 2) - 1
        chosen = jnp.clip(chosen, 1, jnp.maximum(largest, 1))

        def spread(j: Array) -> Array:
            return state.A[j] / jnp.where(state.length[j] > 0, state.length[j], 1)

        V = spread(chosen)
        if lugsail:
            V = jnp.maximum(V, 2 * V - spread(chosen - 1))
        variance = V * (state.s / rounds / rounds)
        scale = jnp.sqrt(jnp.where(variance < 0, 0, variance))
        scale = jnp.where(state.whole[chosen] < 2, jnp.inf, scale)
        return Measurement(state.mean + state.lost, scale, jnp.any(variance < 0))

    return measure
