"""What several of the engine's tests use: a method that shows its inside, and draws as NumPy."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxlsgd import Algorithm, algorithms, problems
from jaxlsgd.core.estimator import Accumulator, Estimator, Law, Measurement, Sync
from jaxlsgd.core.problem import Draws, Problem
from jaxlsgd.core.rows import MethodRows
from jaxlsgd.engine.draws import StreamKeys, draw_pair, replication_keys, split_pair, stream_keys
from jaxlsgd.inference.plug_in import curvature
from jaxlsgd.inference.random_scaling import path_scale, scaling_matrix
from jaxlsgd.runs.cell import Cell
from jaxlsgd.runs.simulate import Finished, SavedRound, read_cells, run_cells
from jaxlsgd.schedules import Plan, paper, power_decay

ROUNDS = 200


class Recorded(NamedTuple):
    """A buffer of all averages."""

    path: Any  # (rounds, d)
    m: Any  # (), the same in all replications


@functools.cache
def recorder(rounds: int = ROUNDS) -> Accumulator:
    """A streaming statistic that does keep the whole path."""

    def init(params: Any) -> Recorded:
        return Recorded(jnp.zeros((rounds, *params.shape), params.dtype), jnp.zeros((), jnp.int32))

    def update(state: Recorded, sync: Sync) -> Recorded:
        return Recorded(state.path.at[state.m].set(sync.params), state.m + 1)

    return Accumulator(init, update, shared=("m",))


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


# Of a method whose measurement is all that a test looks at.
NO_LAW = Law(lambda level, plan, detail: 1.0, lambda statistic, plan, detail: 1.0)
INSIDE = Estimator("inside", (path_scale(), curvature(), recorder()), _measure_inside, NO_LAW)
PAPER_PROBLEMS = {"linear": problems.paper_linear, "logistic": problems.paper_logistic}
PAPER_STEPS = {"linear": 0.5, "logistic": 2.0}


@functools.cache
def momenta() -> Algorithm:
    """Momentum at the clients and at the server: an algorithm with `begin`, `direction` and `receive`."""
    server = algorithms.server_momentum(0.5)
    local = algorithms.local_optimizer(optax.sgd(1.0, momentum=0.9))
    parts = {"init_server": server.init_server, "receive": server.receive}
    return dataclasses.replace(local, name="momenta", **parts)


def paper_plan(name: str, gamma0: float = 0.5, **horizon: int) -> Plan:
    """A schedule of the paper with its warm-up and step size."""
    return (
        paper(name).with_warmup(0.05).plan(power_decay(gamma0), **(horizon or {"num_rounds": 200}))
    )


def run_inside(
    key: jax.Array, problem: Problem, plan: Plan, count: int, dtype: str = "float32"
) -> Inside:
    """Runs replications 0, …, count − 1 and returns everything of each."""
    cell = Cell(problem, plan, (INSIDE,), dtype=dtype)
    return last_reading(key, cell, count).found["inside"].detail


def last_reading(key: jax.Array, cell: Cell, count: int) -> SavedRound:
    """What replications 0, …, count − 1 of a cell say after the last round."""
    events = read_cells(key, [cell], 0, count, shared_draws=False)
    return [event for event in events if isinstance(event, SavedRound)][-1]


def rows_of(
    key: jax.Array, cells: list[Cell], first: int, count: int, shared_draws: bool = True
) -> dict[int, dict[str, MethodRows]]:
    """The rows of each cell, by its index, in the order in which the cells were finished."""
    events = run_cells(key, cells, first, count, shared_draws=shared_draws)
    return {event.cell: event.rows for event in events if isinstance(event, Finished)}


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


def draw_block(
    keys: StreamKeys, first: jax.Array, num_steps: int, client_index: jax.Array, spec: Draws
) -> Draws:
    """The draws of observations first ≤ t < first + num_steps, both even, of all clients."""
    pairs = first // np.uint32(2) + jnp.arange(num_steps // 2, dtype=jnp.uint32)
    drawn = jax.lax.map(lambda pair: draw_pair(keys, pair, client_index, spec), pairs)

    def in_order(even: jax.Array, odd: jax.Array) -> jax.Array:
        return jnp.stack([even, odd], axis=1).reshape(num_steps, *even.shape[1:])

    return Draws(*map(in_order, *split_pair(drawn)))


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
