"""An interval method of somebody's own: batch means."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import scipy.stats

import jaxlsgd


class Batches(NamedTuple):
    mean: Any  # (2,) of all rounds
    batch: Any  # (2,) sum of the open batch
    center: Any  # (2,) mean of the closed batches
    square: Any  # (2,) their sum of squares around it
    m: Any  # ()


@jaxlsgd.register("method", brief="length")
def batch_means(length: int = 4) -> jaxlsgd.Estimator:
    """Student's t of the means of batches of so many rounds."""

    def multiplier(level, plan, detail):
        return scipy.stats.t.isf((1 - level) / 2, plan.num_rounds // length - 1)

    def tail(statistic, plan, detail):
        return 2 * scipy.stats.t.sf(abs(statistic), plan.num_rounds // length - 1)

    return jaxlsgd.Estimator(
        "batch_means",
        (batches(length),),
        functools.partial(measure, length),
        jaxlsgd.Law(multiplier, tail, from_plan=True),
        standard_error=True,
        needs_plan=True,
        label="batch means",
    )


@functools.cache
def batches(length):
    def init(params):
        zero = jnp.zeros_like(params)
        return Batches(zero, zero, zero, zero, jnp.zeros((), params.dtype))

    def update(state, sync):
        m, batch = state.m + 1, state.batch + sync.params
        ends, n = m % length == 0, m // length
        gap = batch / length - state.center
        center = jnp.where(ends, state.center + gap / jnp.maximum(n, 1), state.center)
        square = jnp.where(ends, state.square + gap * (batch / length - center), state.square)
        mean = state.mean + (sync.params - state.mean) / m
        return Batches(mean, jnp.where(ends, 0.0, batch), center, square, m)

    return jaxlsgd.Accumulator(init, update)


def measure(length, states, horizon):
    n = states[0].m // length
    scale = jnp.sqrt(states[0].square / jnp.maximum(n * (n - 1), 1))
    return jaxlsgd.Measurement(states[0].mean, jnp.where(n > 1, scale, jnp.inf))
