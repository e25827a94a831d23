"""A tile: many replications of a cell, or of cells that share their draws, on one device.

This file owns the loops, the vmapping and the masking. In memory the replications are innermost:
parameters (d, R), clients (K, d, R), draws (K, n, R).
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Sequence
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
    Problem,
    Structure,
    Sync,
    flatten,
)
from jaxlsgd.blocks import AHEAD_BYTES, BLOCK_STEPS, Block, Layout, Syncs
from jaxlsgd.forms import OuterProduct

# Calls queued before the host waits: enough to hide the launch, few enough to stop soon.
_WAIT_EVERY = 8


class Program(NamedTuple):
    """What decides the compiled code, apart from shapes; hashable."""

    structure: Structure
    accumulators: tuple[Accumulator, ...]
    transform: optax.GradientTransformation
    dtype: str

    draws_ahead: bool = False  # a block's draws are made before it, for all who share them

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
    unit: Any  # () 1, see `local_sgd.once`


class TileState(NamedTuple):
    """The carry: Local SGD and the statistics."""

    local: local_sgd.LocalState
    statistics: tuple[Any, ...]  # array leaves (..., R), scalar leaves ()


def make_program(
    problem: Problem,
    methods: tuple[Estimator, ...],
    transform: optax.GradientTransformation = local_sgd.SGD,
    dtype: str = "float32",
    shared_draws: bool = False,
) -> Program:
    """Collects the statistics of all methods, each once.

    With `shared_draws` the draws of a block are made ahead, unless they are so many that it costs
    more than it saves.
    """
    parts = dict.fromkeys(part for method in methods for part in method.accumulators)
    few = problem.draws is not None and block_draws_bytes(problem) <= AHEAD_BYTES
    return Program(problem.structure(), tuple(parts), transform, dtype, shared_draws and few)


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
        np.ones((), dtype),
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


def block_draws_bytes(problem: Problem) -> int:
    """Bytes a replication of a block's draws, for a problem that is made of draws."""
    assert problem.draws is not None
    return 4 * BLOCK_STEPS * problem.num_clients * sum(map(int, problem.draws))


def draw_ahead(program: Program, data: ProblemData, keys: Array, first: int) -> Any:
    """What `run_block` takes its draws from, for a block that starts at observation `first`.

    Cells that differ only in schedule, horizon or step size see the same data: one of these serves
    them all. Large problems draw within the block instead, and get their keys.
    """
    return _draw_block(program, data, keys, np.uint32(first)) if program.draws_ahead else keys


@functools.partial(jax.jit, static_argnums=0)
def _draw_block(program: Program, data: ProblemData, keys: Array, first: Array) -> Draws:
    spec = program.structure.draws
    assert spec is not None
    pairs = first // np.uint32(2) + jnp.arange(BLOCK_STEPS // 2, dtype=jnp.uint32)
    words = draws_lib.stream_keys(keys)
    return draws_lib.draw_pair(words, pairs[:, None, None, None], data.client_index, spec)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(4,))
def run_block(
    program: Program, slots: int, data: ProblemData, drawn: Any, state: TileState, block: Block
) -> TileState:
    """Runs one block of steps.

    Args:
      program: what is compiled.
      slots: room for synchronisations in a block; `BLOCK_STEPS` means at every step.
      data: the problem's numbers.
      drawn: of `draw_ahead`.
      state: the carry; its buffers are reused.
      block: the block's data.
    """
    functions = program.structure.flat_functions()
    block = cast_floats(block, program.dtype)
    source = make_source(program, functions, data, drawn, block.first)
    run = _run_dense if slots == BLOCK_STEPS else _run_sparse
    return run(program, functions, data, state, block, source)


def cast_floats(tree: Any, dtype: str) -> Any:
    """Casts floating leaves to the dtype of the run."""
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


class _Source(NamedTuple):
    """Where observations come from, two steps at a time."""

    draw: Callable[[Array], Any]  # which pair of the block → what its observations are made of
    observe: Callable[[Any], tuple[Any, Any]]  # that → the two observations, (K, ..., R)


def make_source(
    program: Program, functions: FlatFunctions, data: ProblemData, drawn: Any, first: Array
) -> _Source:
    """Observations from `first` on, of declared draws or of the problem's own `sample`."""
    spec = program.structure.draws
    start = first // np.uint32(2)
    if functions.observe is None or spec is None:
        sample = functools.partial(_sampled, functions, data, drawn)

        def draw_both(i: Array) -> tuple[Any, Any]:
            t = np.uint32(2) * (start + i.astype(jnp.uint32))
            return sample(t), sample(t + np.uint32(1))

        return _Source(draw_both, lambda both: both)
    observe = jax.vmap(local_sgd.over_replications(functions.observe, in_axes=(-1, None)))

    def observe_one(one: Draws) -> Any:
        return observe(jax.tree.map(lambda x: x.astype(program.dtype), one), data.clients)

    def observe_both(pair: Draws) -> tuple[Any, Any]:
        even, odd = draws_lib.split_pair(pair)
        return observe_one(even), observe_one(odd)

    if program.draws_ahead:
        return _Source(functools.partial(_at, drawn), observe_both)
    words = draws_lib.stream_keys(drawn)

    def draw(i: Array) -> Draws:
        return draws_lib.draw_pair(words, start + i.astype(jnp.uint32), data.client_index, spec)

    return _Source(draw, observe_both)


def _sampled(functions: FlatFunctions, data: ProblemData, keys: Array, t: Array) -> Any:
    """Observations by the user's `sample`, under the key of replication → t → client."""

    def one(key: Array, index: Array, client: Any) -> Any:
        assert functions.sample is not None
        key = jax.random.fold_in(jax.random.fold_in(key, t), index)
        return functions.sample(key, client)

    over_r = jax.vmap(one, in_axes=(0, None, None), out_axes=-1)
    return jax.vmap(over_r, in_axes=(None, 0, 0))(keys, data.client_index, data.clients)


def _run_dense(
    program: Program,
    functions: FlatFunctions,
    data: ProblemData,
    state: TileState,
    block: Block,
    source: _Source,
) -> TileState:
    """Steps and statistics in one loop: for blocks where many steps begin a round."""

    def step(state: TileState, seen: Any, at: _AtStep) -> tuple[TileState, None]:
        before = state.local
        after, gradient = _local_step(program, functions, data, before, seen, at)
        # Where a round begins all clients are at the average; at them, most of it is computed already.
        hessian = mean_hessian(program, functions, data, before.clients, seen)
        met = Met(before.average, gradient)
        statistics = feed(program, data, state.statistics, met, hessian, at.sync)
        return TileState(after, statistics), None

    return over_steps(step, state, block, block.syncs, source)[0]


def _run_sparse(
    program: Program,
    functions: FlatFunctions,
    data: ProblemData,
    state: TileState,
    block: Block,
    source: _Source,
) -> TileState:
    """Steps in one loop, statistics in a second, short one, which makes its observations again."""
    slots = block.syncs.at.shape[0]

    def step(carry: tuple[Any, Met], seen: Any, at: _AtStep) -> tuple[Any, None]:
        local, met = carry
        after, gradient = _local_step(program, functions, data, local, seen, at)
        now = Met(local.average, gradient)
        # Steps that meet no synchronised average write to a place of their own.
        met = jax.tree.map(
            lambda all_, x: lax.dynamic_update_index_in_dim(all_, x, at.slot, 0), met, now
        )
        return (after, met), None

    average = state.local.average
    empty = jnp.zeros((slots + 1, *average.shape), average.dtype)
    (local, met), _ = over_steps(step, (state.local, Met(empty, empty)), block, None, source)

    def prepare(i: Array) -> tuple[Any, ...]:
        sync = _at(block.syncs, i)
        return source.draw(sync.at // 2), sync.at % 2 != 0, sync, _at(met, i)

    def update(carry: tuple[Any, ...], i: Array) -> tuple[Any, None]:
        statistics, (pair, odd, sync, met_now) = carry
        seen = jax.tree.map(lambda a, b: jnp.where(odd, b, a), *source.observe(pair))
        average = jnp.broadcast_to(met_now.average, state.local.clients.shape)
        hessian = mean_hessian(program, functions, data, average, seen)
        statistics = feed(program, data, statistics, met_now, hessian, sync)
        return (statistics, prepare(i + 1)), None

    start = jnp.asarray(0, jnp.int32)
    carry = (state.statistics, prepare(start))
    statistics = lax.scan(update, carry, jnp.arange(slots, dtype=jnp.int32))[0][0]
    return TileState(local, statistics)


class Met(NamedTuple):
    """What a step met before it moved; at the first step of a round, the synchronised state."""

    average: Array  # (d, R)
    gradient: Array | None  # (d, R) mean gradient; a statistic may do without


class _AtStep(NamedTuple):
    """A step's numbers."""

    eta: Any
    ends: Any
    slot: Any
    sync: Any  # Syncs, or None


def over_steps(
    step: Callable[[Any, Any, _AtStep], tuple[Any, None]],
    carry: Any,
    block: Block,
    syncs: Syncs | None,
    source: _Source,
) -> tuple[Any, None]:
    """Runs `step` over a block, two steps an iteration, as draws come in pairs.

    What an iteration uses was prepared by the one before and comes through the loop's carry: its draws,
    because they would be made again in every pass that uses them; its numbers, because XLA's CPU
    compiler does not vectorise a pass that looks one up by the loop's counter.
    """
    pairs = block.eta.shape[0] // 2
    rows = jax.tree.map(
        lambda x: x.reshape(pairs, 2), _AtStep(block.eta, block.ends, block.slot, syncs)
    )

    def prepare(i: Array) -> tuple[Any, Any]:
        return source.draw(i), _at(rows, i)

    def body(carry: tuple[Any, Any], i: Array) -> tuple[Any, None]:
        inner, (drawn, row) = carry
        for half, seen in enumerate(source.observe(drawn)):
            inner, _ = step(inner, seen, jax.tree.map(lambda x, half=half: x[half], row))
        return (inner, prepare(i + 1)), None

    first = (carry, prepare(jnp.asarray(0, jnp.int32)))
    (carry, _), _ = lax.scan(body, first, jnp.arange(pairs, dtype=jnp.int32))
    return carry, None


def _local_step(
    program: Program,
    functions: FlatFunctions,
    data: ProblemData,
    local: local_sgd.LocalState,
    seen: Any,
    at: _AtStep,
) -> tuple[local_sgd.LocalState, Array]:
    return local_sgd.local_step(
        local, seen, at.eta, at.ends, data.weights, data.unit, functions, program.transform
    )


def _at(tree: Any, i: Array) -> Any:
    """Element i of every leaf's leading axis."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, 0, keepdims=False), tree)


def feed(
    program: Program,
    data: ProblemData,
    statistics: tuple[Any, ...],
    met: Met,
    hessian: Array | None,
    at: Syncs,
) -> tuple[Any, ...]:
    """Feeds one synchronisation to every statistic, where there is one."""
    gradient = met.gradient if program.needs_gradient else None
    sync = Sync(met.average, at.E, at.eta, gradient, hessian)
    axes_of_sync: Any = Sync(
        -1, None, None, None if gradient is None else -1, None if hessian is None else -1
    )
    fed = []
    for part, old in zip(program.accumulators, statistics, strict=True):
        axes = _axes(part, data.init)
        with jax.named_scope("statistics"):
            new = jax.vmap(part.update, in_axes=(axes, axes_of_sync), out_axes=axes)(old, sync)
            fed.append(jax.tree.map(lambda a, b: jnp.where(at.valid, a, b), new, old))
    return tuple(fed)


def mean_hessian(
    program: Program, functions: FlatFunctions, data: ProblemData, clients: Array, seen: Any
) -> Array | None:
    """Σ_k p_k ∇²f_k(x_k; ξ^k), (d, d, R), if a statistic asks for it."""
    if not program.needs_hessian:
        return None
    found = jax.vmap(local_sgd.over_replications(functions.hessian))(clients, seen)
    if not isinstance(found, OuterProduct):
        return local_sgd.weighted_sum(data.weights, found)
    vector, scale = found.vector, data.weights[:, None]
    if found.weight is not None:
        scale = local_sgd.once(scale * found.weight, data.unit)
    outer = lambda k: (scale[k] * vector[k])[:, None, :] * vector[k][None, :, :]  # noqa: E731
    return local_sgd.sum_clients(outer, data.weights.shape[0])


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


class Run(NamedTuple):
    """One of the cells that a tile runs, and who is told of it."""

    layout: Layout
    on_save: Callable[[int, TileState], None]  # which saved round, and the state there
    on_call: Callable[[int], None] = lambda steps: None  # how many steps were made since last time


def run_tile(program: Program, data: ProblemData, keys: Array, runs: Sequence[Run]) -> None:
    """Runs cells that share everything but their plans from x_0 to their ends, block by block.

    Each block's draws are made once. A cell is told of its saved rounds as they come, so that those
    with a short plan are done first; `on_call` is the place for progress and early stops.
    """
    cells = [_Advance(program, data, keys.shape[0], run) for run in runs]
    for first in itertools.count(0, BLOCK_STEPS):
        cells = [cell for cell in cells if not cell.done]
        if not cells:
            return
        drawn = draw_ahead(program, data, keys, first)
        for cell in cells:
            cell.block(drawn, first)


class _Advance:
    """A cell on its way."""

    def __init__(self, program: Program, data: ProblemData, replications: int, run: Run) -> None:
        self._program, self._data, self._run = program, data, run
        self._state = start_tile(program, data, replications)
        calls = [
            (call, save if call is group[-1] else None)
            for save, group in enumerate(run.layout.groups)
            for call in group
        ]
        self._calls = collections.deque(calls)
        self._pending, self._queued = 0, 0

    @property
    def done(self) -> bool:
        return not self._calls

    def block(self, drawn: Any, first: int) -> None:
        """All calls that start at observation `first`: several where a round in it is saved."""
        while self._calls and int(self._calls[0][0].block.first) == first:
            call, save = self._calls.popleft()
            self._state = run_block(
                self._program, call.slots, self._data, drawn, self._state, call.block
            )
            self._pending += call.steps
            self._queued += 1
            if self._queued == _WAIT_EVERY or save is not None:
                jax.block_until_ready(self._state.local.average)
                self._run.on_call(self._pending)
                self._pending, self._queued = 0, 0
            if save is not None:
                self._run.on_save(save, self._state)
