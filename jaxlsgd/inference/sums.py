"""Compensated sums, and the path's running mean."""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import jax.numpy as jnp

from jaxlsgd.core.estimator import Accumulator, Sync
from jaxlsgd.core.problem import Array, Params, flatten

Average = Literal["rounds", "observations"]  # what the path's average weighs alike


def compensated_add(total: Array, lost: Array, term: Array) -> tuple[Array, Array]:
    """Add by Kahan's method: `total + lost` is the sum to nearly twice the working precision."""
    term = term + lost
    new = total + term
    return new, term - (new - total)


def widened(x: Array) -> Array:
    """Return x in float32 at least: sums over thousands of rounds lose all digits in bfloat16."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


class MeanState(NamedTuple):
    """The running average."""

    mean: Array  # (d,)
    lost: Array  # (d,) its rounding error so far
    t: Array  # () int32, what has been counted so far


@functools.cache
def path_mean(observations: bool = False) -> Accumulator:
    """Return Σ x̄_n/m as a streaming statistic, or with `observations` Σ E_n x̄_n/t_m."""

    def init(params: Params) -> MeanState:
        y = jnp.zeros_like(widened(flatten(params)))
        return MeanState(y, y, jnp.zeros((), jnp.int32))

    def update(state: MeanState, sync: Sync) -> MeanState:
        x = widened(flatten(sync.params))
        count = jnp.asarray(sync.E if observations else 1, jnp.int32)
        t = state.t + count
        share = count.astype(x.dtype) / t.astype(x.dtype)
        move = ((x - state.mean) - state.lost) * share
        return MeanState(*compensated_add(state.mean, state.lost, move), t)

    return Accumulator(init, update, shared=("t",))
