"""A tile: many replications of one cell on one device, in compiled calls.

This file owns the loops, the vmapping and the masking. In memory the replications are innermost:
parameters (d, R), clients (K, d, R), draws (B, K, n, R).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxlsgd import draws as draws_lib
from jaxlsgd import local_sgd
from jaxlsgd.base import (
    Accumulator,
    Array,
    Draws,
    Estimator,
    FlatFunctions,
    Horizon,
    Measurement,
    OuterProduct,
    Problem,
    Structure,
    Sync,
    flatten,
)
from jaxlsgd.blocks import BLOCK_STEPS, Block, Layout, Syncs

# Calls queued before the host waits: enough to hide the launch, few enough to stop soon.
_WAIT_EVERY = 8


class Program(NamedTuple):
    """What decides the compiled code, apart from shapes; hashable."""

    structure: Structure
    accumulators: tuple[Accumulator, ...]
    transform: optax.GradientTransformation
    dtype: str

    @property
    def needs_gradient(self) -> bool:
        """Whether a statistic asks for the mean gradient."""
        return any(part.needs_gradient for part in self.accumulators)

    @property
    def needs_hessian(self) -> bool:
        """Whether a statistic asks for the mean Hessian."""
        return any(part.needs_hessian for part in self.accumulators)


class ProblemData(NamedTuple):
    """A problem's numbers, in the dtype of the run."""

    init: Any  # (d,)
    weights: Any  # (K,)
    clients: Any  # leaves (K, ...)
    client_index: Any  # (K,) uint32


class TileState(NamedTuple):
    """The carry: Local SGD and the statistics."""

    local: local_sgd.LocalState
    statistics: tuple[Any, ...]  # array leaves (..., R), scalar leaves ()


def make_program(
    problem: Problem,
    methods: tuple[Estimator, ...],
    transform: optax.GradientTransformation = local_sgd.SGD,
    dtype: str = "float32",
) -> Program:
    """Collects the statistics of all methods, each once."""
    parts = dict.fromkeys(part for method in methods for part in method.accumulators)
    return Program(problem.structure(), tuple(parts), transform, dtype)


def make_data(problem: Problem, dtype: str) -> ProblemData:
    """Casts a problem's numbers to the dtype of the run."""

    def cast(leaf: Any) -> np.ndarray:
        leaf = np.asarray(leaf)
        return leaf.astype(dtype) if np.issubdtype(leaf.dtype, np.floating) else leaf

    return ProblemData(
        cast(np.asarray(flatten(jax.tree.map(cast, problem.init)))),
        cast(problem.weights),
        jax.tree.map(cast, problem.clients),
        np.arange(problem.num_clients, dtype=np.uint32),
    )


def start_tile(program: Program, data: ProblemData, replications: int) -> TileState:
    """All replications at x_0, all statistics empty."""
    return _start(program, data, replications)


@functools.partial(jax.jit, static_argnums=(0, 2))
def _start(program: Program, data: ProblemData, replications: int) -> TileState:
    clients = data.weights.shape[0]
    local = local_sgd.start(data.init, clients, replications, program.transform)
    make = [
        jax.vmap(part.init, in_axes=-1, out_axes=_axes(part, data.init))
        for part in program.accumulators
    ]
    return TileState(local, tuple(init(local.average) for init in make))


def _axes(part: Accumulator, vector: Array, axis: int = -1) -> Any:
    """Vmap axes of a statistic's state: scalars are shared by all replications."""
    state = jax.eval_shape(part.init, jax.ShapeDtypeStruct(vector.shape, vector.dtype))
    return jax.tree.map(lambda leaf: axis if leaf.ndim else None, state)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(4,))
def run_block(
    program: Program, slots: int, data: ProblemData, keys: Array, state: TileState, block: Block
) -> TileState:
    """Runs one block of steps.

    Args:
      program: what is compiled.
      slots: room for synchronisations in a block; `BLOCK_STEPS` means at every step.
      data: the problem's numbers.
      keys: typed data keys, (R,).
      state: the carry; its buffers are reused.
      block: the block's data.
    """
    functions = program.structure.flat_functions()
    block = jax.tree.map(
        lambda x: x.astype(program.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, block
    )
    source = _source(program, functions, data, keys, block.first)
    run = _run_dense if slots == BLOCK_STEPS else _run_sparse
    return run(program, functions, data, state, block, source)


class _Source(NamedTuple):
    """Materialised draws (or sampled observations) of a block, and how to observe one step."""

    buffer: Any  # leaves (B, K, ..., R)
    observe: Callable[[Any], Any]  # one step of the buffer → observations (K, ..., R)


def _source(
    program: Program,
    functions: FlatFunctions,
    data: ProblemData,
    keys: Array,
    first: Array,
) -> _Source:
    if functions.observe is None:
        return _Source(_sampled(functions, data, keys, first), lambda step: step)
    spec = program.structure.draws
    assert spec is not None
    words = draws_lib.stream_keys(keys)
    buffer = draws_lib.draw_block(words, first, BLOCK_STEPS, data.client_index, spec)
    observe = jax.vmap(local_sgd.over_replications(functions.observe, in_axes=(-1, None)))

    def observe_step(step: Draws) -> Any:
        return observe(jax.tree.map(lambda x: x.astype(program.dtype), step), data.clients)

    return _Source(buffer, observe_step)


def _sampled(functions: FlatFunctions, data: ProblemData, keys: Array, first: Array) -> Any:
    """Observations by the user's `sample`, under the key of replication → t → client."""

    def one(key: Array, t: Array, index: Array, client: Any) -> Any:
        assert functions.sample is not None
        key = jax.random.fold_in(jax.random.fold_in(key, t), index)
        return functions.sample(key, client)

    over_r = jax.vmap(one, in_axes=(0, None, None, None), out_axes=-1)
    over_k = jax.vmap(over_r, in_axes=(None, None, 0, 0))

    def body(_: None, i: Array) -> tuple[None, Any]:
        return None, over_k(keys, first + i, data.client_index, data.clients)

    return lax.scan(body, None, jnp.arange(BLOCK_STEPS, dtype=jnp.uint32))[1]


class _Met(NamedTuple):
    """What a step met before it moved; at the first step of a round, the synchronised state.

    Passed on through a loop's carry or output, and used one loop iteration later: XLA would otherwise
    fuse its computation into every entry of the d × d statistics and repeat it there.
    """

    average: Array  # (d, R)
    gradient: Array  # (d, R) mean gradient


def _step(
    program: Program,
    functions: FlatFunctions,
    data: ProblemData,
    local: local_sgd.LocalState,
    seen: Any,
    eta: Array,
    ends: Array,
) -> tuple[local_sgd.LocalState, _Met]:
    after, gradient = local_sgd.local_step(
        local, seen, eta, ends, data.weights, functions, program.transform
    )
    return after, _Met(local.average, gradient)


def _weights(program: Program, functions: FlatFunctions, met: _Met, seen: Any) -> Array | None:
    """The weights (K, R) of Hessians that are outer products; None where they are not, or are 1."""
    if not program.needs_hessian:
        return None
    each = jax.vmap(local_sgd.over_replications(functions.hessian), in_axes=(None, 0))
    found = each(met.average, seen)
    return found.weight if isinstance(found, OuterProduct) else None


def _run_dense(
    program: Program,
    functions: FlatFunctions,
    data: ProblemData,
    state: TileState,
    block: Block,
    source: _Source,
) -> TileState:
    """Steps and statistics in one loop: for blocks where nearly every step ends a round."""

    def step(local: Any, i: Array) -> tuple[Any, tuple[Any, Any]]:
        seen = source.observe(_at(source.buffer, i))
        after, met = _step(program, functions, data, local, seen, block.eta[i], block.ends[i])
        return after, (met, _weights(program, functions, met, seen))

    def feed(statistics: tuple[Any, ...], found: tuple[Any, Any], i: Array) -> tuple[Any, ...]:
        seen = source.observe(_at(source.buffer, i))
        return _feed(program, functions, data, statistics, *found, seen, _at(block.syncs, i))

    def body(carry: tuple[Any, Any, Any], i: Array) -> tuple[Any, None]:
        local, statistics, found = carry
        statistics = feed(statistics, found, i - 1)
        local, found = step(local, i)
        return (local, statistics, found), None

    local, found = step(state.local, jnp.asarray(0))
    carry = (local, state.statistics, found)
    (local, statistics, found), _ = lax.scan(body, carry, jnp.arange(1, BLOCK_STEPS))
    return TileState(local, feed(statistics, found, jnp.asarray(BLOCK_STEPS - 1)))


def _run_sparse(
    program: Program,
    functions: FlatFunctions,
    data: ProblemData,
    state: TileState,
    block: Block,
    source: _Source,
) -> TileState:
    """Steps in one loop, statistics in a second, short one over the synchronisations."""

    def step(carry: local_sgd.LocalState, inputs: tuple[Any, ...]) -> tuple[Any, Any]:
        drawn, eta, ends = inputs
        return _step(program, functions, data, carry, source.observe(drawn), eta, ends)

    def weigh(_: None, i: Array) -> tuple[None, Any]:
        seen = source.observe(_at(source.buffer, i))
        return None, _weights(program, functions, _at(path, i), seen)

    def update(statistics: tuple[Any, ...], inputs: tuple[Syncs, Any]) -> tuple[Any, None]:
        sync, weight = inputs
        seen = source.observe(_at(source.buffer, sync.at))
        met = _at(path, sync.at)
        return _feed(program, functions, data, statistics, met, weight, seen, sync), None

    local, path = lax.scan(step, state.local, (source.buffer, block.eta, block.ends))
    weights = lax.scan(weigh, None, block.syncs.at)[1]
    statistics = lax.scan(update, state.statistics, (block.syncs, weights))[0]
    return TileState(local, statistics)


def _at(tree: Any, i: Array) -> Any:
    """Element i of every leaf's leading axis."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, 0, keepdims=False), tree)


def _feed(
    program: Program,
    functions: FlatFunctions,
    data: ProblemData,
    statistics: tuple[Any, ...],
    met: _Met,
    weight: Array | None,
    seen: Any,
    at: Syncs,
) -> tuple[Any, ...]:
    """Feeds one synchronisation to every statistic, where there is one."""
    hessian = None
    if program.needs_hessian:
        hessian = _mean_hessian(functions, data.weights, met.average, weight, seen)
    gradient = met.gradient if program.needs_gradient else None
    sync = Sync(met.average, at.E, at.eta, gradient, hessian)
    axes_of_sync: Any = Sync(
        -1, None, None, None if gradient is None else -1, None if hessian is None else -1
    )
    fed = []
    for part, old in zip(program.accumulators, statistics, strict=True):
        axes = _axes(part, data.init)
        new = jax.vmap(part.update, in_axes=(axes, axes_of_sync), out_axes=axes)(old, sync)
        fed.append(jax.tree.map(lambda a, b: jnp.where(at.valid, a, b), new, old))
    return tuple(fed)


def _mean_hessian(
    functions: FlatFunctions, weights: Array, average: Array, weight: Array | None, seen: Any
) -> Array:
    """Σ_k p_k ∇²f_k(x̄; ξ^k), (d, d, R)."""
    each = jax.vmap(local_sgd.over_replications(functions.hessian), in_axes=(None, 0))
    found = each(average, seen)
    if not isinstance(found, OuterProduct):
        return local_sgd.weighted_sum(weights, found)
    vector = found.vector
    scaled = weights[:, None, None] * vector
    if weight is not None:
        scaled = scaled * weight[:, None, :]
    outer = lambda k: scaled[k][:, None, :] * vector[k][None, :, :]  # noqa: E731
    return local_sgd.sum_clients(outer, weights.shape[0])


def measure_tile(
    program: Program, data: ProblemData, state: TileState, method: Estimator, horizon: Horizon
) -> Measurement:
    """One method's measurement of every replication, replications first."""
    states = method_states(program, state, method)
    # A method that can do without the plan is not compiled again for plans of another length.
    given = horizon if method.needs_plan else None
    return _measure(method.measure, method.accumulators, data.init, states, given)


def method_states(program: Program, state: TileState, method: Estimator) -> tuple[Any, ...]:
    """The states of a method's statistics; array leaves (..., R), scalar leaves ()."""
    where = (program.accumulators.index(part) for part in method.accumulators)
    return tuple(state.statistics[i] for i in where)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _measure(
    measure: Any,
    parts: tuple[Accumulator, ...],
    vector: Array,
    states: Any,
    horizon: Horizon | None,
) -> Measurement:
    axes = tuple(_axes(part, vector) for part in parts)
    return jax.vmap(measure, in_axes=(axes, None))(states, horizon)


def run_tile(
    program: Program,
    data: ProblemData,
    keys: Array,
    layout: Layout,
    on_save: Callable[[int, TileState], None],
    on_call: Callable[[int], None] = lambda steps: None,
) -> None:
    """Runs a tile from x_0 to the end; `on_save(i, state)` sees it at each saved round.

    `on_call` hears after each call how many steps it made: the place for progress and early stops.
    """
    state = start_tile(program, data, keys.shape[0])
    pending = 0
    for i, group in enumerate(layout.groups):
        for n, call in enumerate(group):
            state = run_block(program, call.slots, data, keys, state, call.block)
            pending += call.steps
            if n % _WAIT_EVERY == _WAIT_EVERY - 1 or n == len(group) - 1:
                jax.block_until_ready(state.local.average)
                on_call(pending)
                pending = 0
        on_save(i, state)
