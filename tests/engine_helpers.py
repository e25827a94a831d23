"""What several of the engine's tests use: a method that shows its inside, and draws as NumPy."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlsgd.core.estimator import Accumulator, Estimator, Measurement, Sync
from jaxlsgd.core.problem import Draws, Problem
from jaxlsgd.engine.draws import draw_block, replication_keys, stream_keys
from jaxlsgd.inference.plug_in import curvature
from jaxlsgd.inference.random_scaling import path_scale, scaling_matrix
from jaxlsgd.runs.simulation import Task, run_replications
from jaxlsgd.schedules import Plan, paper, power_decay

ROUNDS = 200


class Recorded(NamedTuple):
    """A buffer of all averages; scalar leaves are shared by all replications."""

    path: Any  # (rounds, d)
    m: Any  # ()


@functools.cache
def recorder(rounds: int = ROUNDS) -> Accumulator:
    """A streaming statistic that does keep the whole path."""

    def init(params: Any) -> Recorded:
        return Recorded(jnp.zeros((rounds, *params.shape), params.dtype), jnp.zeros((), jnp.int32))

    def update(state: Recorded, sync: Sync) -> Recorded:
        return Recorded(state.path.at[state.m].set(sync.params), state.m + 1)

    return Accumulator(init, update)


class Inside(NamedTuple):
    """What a run has accumulated."""

    path: Any  # (rounds, d)
    V: Any  # (d, d)
    G: Any  # (d, d)
    S: Any  # (d, d)


def _measure_inside(states: Any, horizon: Any) -> Measurement:
    del horizon
    scale, plug, record = states
    estimate = scale.mean + scale.lost
    detail = Inside(record.path, scaling_matrix(scale), plug.G, plug.S)
    return Measurement(estimate, jnp.zeros_like(estimate), jnp.zeros((), bool), detail)


INSIDE = Estimator(
    "inside",
    (path_scale(), curvature(), recorder()),
    _measure_inside,
    lambda level, plan, detail: 1.0,
    lambda statistic, plan, detail: 1.0,
)


def paper_plan(name: str, gamma0: float = 0.5, **horizon: int) -> Plan:
    """A schedule of the paper with its warm-up and step size."""
    return (
        paper(name).with_warmup(0.05).plan(power_decay(gamma0), **(horizon or {"num_rounds": 200}))
    )


def run_inside(
    key: jax.Array, problem: Problem, plan: Plan, count: int, dtype: str = "float32"
) -> Inside:
    """Runs replications 0, …, count − 1 and returns everything of each."""
    found: list[dict[str, Measurement]] = []
    task = Task(problem, plan, (INSIDE,), dtype=dtype)
    run_replications(key, task, 0, count, on_measure=found.append)
    return found[-1]["inside"].detail


def numpy_draws(
    key: jax.Array, replications: Any, num_steps: int, clients: Any, spec: Draws
) -> Draws:
    """The draws of observations 0 ≤ t < num_steps as arrays (t, K, count, replications)."""
    keys = stream_keys(replication_keys(key, jnp.asarray(replications, jnp.uint32)))
    index = jnp.asarray(clients, jnp.uint32)
    drawn = _draw(
        keys, num_steps + num_steps % 2, index, Draws(int(spec.normal), int(spec.uniform))
    )
    return Draws(*(np.asarray(x)[:num_steps] for x in drawn))


@functools.partial(jax.jit, static_argnums=(1, 3))
def _draw(keys: Any, num_steps: int, index: jax.Array, spec: Draws) -> Draws:
    return draw_block(keys, jnp.uint32(0), num_steps, index, spec)


@contextlib.contextmanager
def counted_compilations() -> Iterator[list[str]]:
    """A list that grows by one with each program that XLA is asked to compile."""
    seen: list[str] = []

    def listen(event: str, seconds: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
