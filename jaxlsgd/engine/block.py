"""One block of steps of a tile, compiled. This file owns the loop over steps.

In memory the replications are innermost: parameters (d, R), clients (K, d, R), draws (K, n, R).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxlsgd.core.problem import Array, FlatFunctions
from jaxlsgd.engine import federation, statistics, xla
from jaxlsgd.engine.draws import Source, Supply, make_source
from jaxlsgd.engine.federation import Federation, Step
from jaxlsgd.engine.layout import BLOCK_STEPS, Block, Syncs
from jaxlsgd.engine.program import Loop, ProblemData, Program, cast_floats
from jaxlsgd.engine.statistics import HessianPairs, Met, Statistics


class TileState(NamedTuple):
    """The carry: the federation and the statistics."""

    federation: Federation
    statistics: Statistics


@functools.partial(jax.jit, static_argnums=(0, 2))
def start_tile(program: Program, data: ProblemData, replications: int) -> TileState:
    """All replications at x_0, all statistics empty."""
    clients = program.algorithm.stepping(data.weights.shape[0])
    begun = federation.start(
        data.init,
        clients,
        replications,
        program.algorithm,
        program.needs_gradient_sum,
        len(program.anchored),
    )
    return TileState(begun, statistics.start(program, begun.params, data.init))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(4,))
def run_block(
    program: Program, slots: int, data: ProblemData, given: Supply, state: TileState, block: Block
) -> TileState:
    """Runs one block of steps.

    Args:
      program: what is compiled.
      slots: room for synchronisations in a block; `BLOCK_STEPS` means at every step.
      data: the problem's numbers.
      given: what the draws are taken from.
      state: the carry; its buffers are reused.
      block: the block's data.
    """
    functions = program.structure.flat_functions()
    block = cast_floats(block, program.dtype)

    def source(state: TileState) -> Source:
        here = federation.taking_part(state.federation, data)
        return make_source(program, functions, here, given, block.first)

    if program.algorithm.participation is not None:
        return _run_dense(program, functions, data, state, block, source)
    run = _run_dense if slots == BLOCK_STEPS else _run_sparse
    made = source(state)
    return run(program, functions, data, state, block, lambda _: made)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(4,))
def run_hessians(
    program: Program,
    i: int,
    data: ProblemData,
    given: Supply,
    state: Any,
    first: Any,
    pairs: HessianPairs,
) -> Any:
    """Add the Hessians that clients send in a block, at the anchors of statistic i: they do not depend on the path."""
    functions = program.structure.flat_functions()
    pairs = cast_floats(pairs, program.dtype)
    source = make_source(program, functions, data, given, first)
    part = program.accumulators[i]
    places = statistics.places_of(part, data.init, state)

    def add(sums: tuple[Array, Array], drawn: Any, weight: Array) -> tuple[Array, Array]:
        for half, seen in enumerate(source.observe(drawn)):
            found = statistics.hessians_at(functions, data, places, seen, weight[half])
            sums = jax.tree.map(jnp.add, sums, found)
        return sums

    def prepare(i: Array) -> tuple[Any, Array]:
        at, weight = xla.element((pairs.at, pairs.weight), i)
        return source.draw(at), weight

    def body(i: Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        # Draws reach an iteration through the carry: see `over_steps`.
        sums, prepared = carry
        return add(sums, *prepared), prepare(i + 1)

    def body_alone(sums: Any, i: Array) -> tuple[Any, None]:
        return add(sums, *prepare(i)), None

    (room, _, groups), (_, d, R) = pairs.weight.shape, places.shape
    empty = jnp.zeros((groups, d, d, R), places.dtype), jnp.zeros((d, d, R), places.dtype)
    low = jnp.asarray(0, jnp.int32)
    if program.loop.prepares:
        high = pairs.count if program.loop.partial else room
        sums = lax.fori_loop(low, high, body, (empty, prepare(low)))[0]
    else:
        sums = lax.scan(body_alone, empty, jnp.arange(room, dtype=jnp.int32))[0]
    per_group, squares = sums
    return statistics.with_hessians(
        part, data, state, per_group, squares, jnp.sum(pairs.weight, (0, 1))
    )


class _Row(NamedTuple):
    """What the loop looks up for a step."""

    step: Step
    slot: Any
    sync: Any  # Syncs, or None
    hessians: Any = ()  # see `Block.hessians`


def _run_dense(
    program: Program,
    functions: FlatFunctions,
    data: ProblemData,
    state: TileState,
    block: Block,
    source: Callable[[TileState], Source],
) -> TileState:
    """Steps and statistics in one loop: for blocks where many steps begin a round, and if not all clients take part."""
    anchors = statistics.anchors_of(program, data, state.statistics)
    algorithm = program.algorithm
    some = algorithm.participation is not None

    def step(state: TileState, seen: Any, at: _Row) -> TileState:
        before = state.federation
        here = federation.taking_part(before, data)
        after, gradient = federation.local_step(
            before, seen, at.step, here, functions, algorithm, anchors=anchors
        )

        def fed(old: Statistics) -> Statistics:
            # Where a round begins all clients are at x̄, and the step has made most of the Hessian there.
            hessian = statistics.mean_hessian(program, functions, here, before.clients, seen)
            met = Met(before.params, gradient, before.total, before.anchored)
            return statistics.feed(program, data, old, met, hessian, at.sync)

        if not some:
            return TileState(after, fed(state.statistics))
        after = federation.others_take_part(algorithm, data, after, at.step)
        kept = xla.where_flagged(at.sync.valid, fed, state.statistics)
        return TileState(after, _with_hessians(program, functions, data, here, kept, seen, at))

    rows = rows_of(program, block, block.syncs)
    pairs = None if some else block.pairs
    return over_steps(step, state, rows, source, program.loop, pairs, changing=some)


def _with_hessians(
    program: Program,
    functions: FlatFunctions,
    data: ProblemData,
    here: ProblemData,
    kept: Statistics,
    seen: Any,
    at: _Row,
) -> Statistics:
    """Add the Hessians at anchors that those who take part send in a step, if it is one of theirs."""
    for place, i in enumerate(program.anchored):
        weight = at.hessians[place]

        def sent(old: Any, i: int = i, weight: Array = weight) -> Any:
            part = program.accumulators[i]
            places = statistics.places_of(part, data.init, old)
            found = statistics.hessians_at(functions, here, places, seen, weight)
            return statistics.with_hessians(part, data, old, *found, weight)

        changed = xla.where_flagged(jnp.any(weight > 0), sent, kept[i])
        kept = (*kept[:i], changed, *kept[i + 1 :])
    return kept


def _run_sparse(
    program: Program,
    functions: FlatFunctions,
    data: ProblemData,
    state: TileState,
    block: Block,
    source_of: Callable[[Any], Source],
) -> TileState:
    """Steps in one loop, statistics in a second, short one, which makes its observations again."""
    slots = block.syncs.at.shape[0]
    source = source_of(state)
    anchors = statistics.anchors_of(program, data, state.statistics)

    def step(carry: tuple[Federation, Met], seen: Any, at: _Row) -> tuple[Federation, Met]:
        before, met = carry
        after, gradient = federation.local_step(
            before, seen, at.step, data, functions, program.algorithm, anchors=anchors
        )
        now = Met(before.params, gradient, before.total, before.anchored)
        # Steps that meet no synchronised average write to a place of their own.
        met = jax.tree.map(
            lambda all_, x: lax.dynamic_update_index_in_dim(all_, x, at.slot, 0), met, now
        )
        return after, met

    average = state.federation.params
    empty = jnp.zeros((slots + 1, *average.shape), average.dtype)
    total = empty if program.needs_gradient_sum else None
    sums = (empty,) * len(anchors) if anchors else None
    carry = (state.federation, Met(empty, empty, total, sums))
    rows = rows_of(program, block, None)
    after, met = over_steps(step, carry, rows, source_of, program.loop, block.pairs)

    def prepare(i: Array) -> tuple[Any, ...]:
        sync = xla.element(block.syncs, i)
        return source.draw(sync.at // 2), sync.at % 2 != 0, sync, xla.element(met, i)

    def update(carry: tuple[Any, ...], i: Array) -> tuple[Any, None]:
        old, (pair, odd, sync, met_now) = carry
        seen = jax.tree.map(lambda a, b: jnp.where(odd, b, a), *source.observe(pair))
        average = jnp.broadcast_to(met_now.average, state.federation.clients.shape)
        hessian = statistics.mean_hessian(program, functions, data, average, seen)
        fed = statistics.feed(program, data, old, met_now, hessian, sync)
        return (fed, prepare(i + 1)), None

    first = (state.statistics, prepare(jnp.asarray(0, jnp.int32)))
    fed = lax.scan(update, first, jnp.arange(slots, dtype=jnp.int32))[0][0]
    return TileState(after, fed)


def rows_of(program: Program, block: Block, syncs: Syncs | None) -> _Row:
    """Return a block's numbers step by step, with those for other algorithms than Local SGD if they are needed."""
    if federation.folded(program.algorithm) and not (
        program.needs_gradient_sum or program.anchored
    ):
        step = Step(block.eta, block.ends)
    else:
        step = Step(block.eta, block.ends, block.E, block.opens, block.active)
    return _Row(step, block.slot, syncs, block.hessians)


def over_steps(
    step: Callable[[Any, Any, _Row], Any],
    carry: Any,
    rows: _Row,
    source: Callable[[Any], Source],
    loop: Loop,
    some: tuple[Any, Any] | None = None,
    changing: bool = False,
) -> Any:
    """Runs `step` over a block, two steps per iteration, as draws come in pairs; `source` depends on the carry if `changing`.

    Where the loop `prepares`, what an iteration uses comes from the one before, through the loop's carry: its
    draws, because they would be made again in every pass that uses them; its numbers, because XLA's CPU
    compiler does not vectorise a pass that looks one up by the loop's counter. Such a loop may run over `some` of
    the pairs only; the others would change nothing.
    """
    pairs = rows.step.eta.shape[0] // 2
    rows = jax.tree.map(lambda x: x.reshape(pairs, 2, *x.shape[1:]), rows)

    def prepare(inner: Any, i: Array) -> tuple[Any, Any]:
        return source(inner).draw(i), xla.element(rows, i)

    def both(inner: Any, prepared: tuple[Any, Any], i: Array) -> Any:
        drawn, row = prepared
        halves = [jax.tree.map(lambda x, half=half: x[half], row) for half in (0, 1)]
        if not changing:
            for seen, at in zip(source(inner).observe(drawn), halves, strict=True):
                inner = step(inner, seen, at)
            return inner
        inner = step(inner, source(inner).observe(drawn)[0], halves[0])
        # Other clients draw for the second step if the first one ends a round.
        ends = halves[0].step.ends
        drawn = xla.where_flagged(ends, lambda _: source(inner).draw(i), drawn)
        return step(inner, source(inner).observe(drawn)[1], halves[1])

    def body(carry: tuple[Any, Any], i: Array) -> tuple[Any, None]:
        inner = both(*carry, i)
        return (inner, prepare(inner, i + 1)), None

    def body_alone(carry: Any, i: Array) -> tuple[Any, None]:
        return both(carry, prepare(carry, i), i), None

    indices = jnp.arange(pairs, dtype=jnp.int32)
    if not loop.prepares:
        return lax.scan(body_alone, carry, indices, unroll=min(loop.unroll, pairs))[0]
    low, high = jnp.asarray(0, jnp.int32), pairs
    if loop.partial and some is not None:
        low, high = some
    return lax.fori_loop(low, high, lambda i, now: body(now, i)[0], (carry, prepare(carry, low)))[0]
