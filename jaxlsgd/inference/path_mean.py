"""The average along the path, over rounds as in the paper or over observations."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp

from jaxlsgd.core.estimator import Accumulator, Sync
from jaxlsgd.core.problem import Array, Params, flatten
from jaxlsgd.inference.sums import compensated_add, widened


class MeanState(NamedTuple):
    """The running average."""

    mean: Array  # (d,)
    lost: Array  # (d,) its rounding error so far
    t: Array  # () int32, what has been counted so far


@functools.cache
def path_mean(observations: bool = False) -> Accumulator:
    """Σ x̄_n/m as a streaming statistic, or Σ E_n x̄_n/t_m where a round counts E_n times."""

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
