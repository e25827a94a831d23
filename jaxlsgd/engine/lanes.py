"""Cells as lanes: cells that differ in numbers alone, side by side in one program, on draws made once.

A launch then serves many cells. What a lane computes does not depend on its neighbours: they are
elements of another index of the same operations.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlsgd.core.problem import Array
from jaxlsgd.engine import statistics
from jaxlsgd.engine.block import TileState, run_block, run_hessians
from jaxlsgd.engine.draws import Supply, supply
from jaxlsgd.engine.layout import BLOCK_STEPS, Block, Whole
from jaxlsgd.engine.program import ProblemData, Program
from jaxlsgd.engine.tile import (
    WAIT_EVERY,
    Advanced,
    Saved,
    fresh_tile,
    hessian_steps,
    in_block,
    rolls_of,
)

# Lanes that stay empty: a group is wider than its cells only where at least this share of it is used.
FULL = 0.75
_AXES: Any = [0] * len(Block._fields)
# A block's start is the same for all lanes, and so are the pairs of steps that are made.
_NUMBERS = Block(*_AXES)._replace(first=None, pairs=None)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(4,))
def run_lanes(
    program: Program, slots: int, data: ProblemData, given: Supply, state: TileState, block: Block
) -> TileState:
    """`run_block` of several cells; leaves of `state` and `block` have the lanes first."""
    one = functools.partial(run_block, program, slots)
    return jax.vmap(one, in_axes=(None, None, 0, _NUMBERS))(data, given, state, block)


@jax.jit
def lane_of(tree: Any, i: Array) -> Any:
    """One lane."""
    return jax.tree.map(lambda x: x[i], tree)


@jax.jit
def _take(state: TileState, which: Array) -> TileState:
    return jax.tree.map(lambda x: x[which], state)


@jax.jit
def stack_lanes(states: tuple[TileState, ...]) -> TileState:
    """States of cells, lanes first."""
    return jax.tree.map(lambda *x: jnp.stack(x), *states)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _roll(part: Any, vector: Array, state: Any, due: Array) -> Any:
    """Rolls a statistic in the lanes where it is due."""
    rolled = jax.vmap(lambda one: statistics.roll(part, vector, one))(state)

    def choose(new: Array, old: Array) -> Array:
        return jnp.where(due.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return jax.tree.map(choose, rolled, state)


def widths_for(count: int, widths: Sequence[int]) -> list[int]:
    """Widths of the groups that hold so many lanes: wide ones first, few lanes empty."""
    chosen = []
    while count > 0:
        fits = [width for width in widths if count >= FULL * width]
        chosen.append(max(fits) if fits else min(widths))
        count -= chosen[-1]
    return chosen


def run_side_by_side(
    program: Program,
    data: ProblemData,
    keys: Array,
    layouts: Sequence[Whole],
    widths: Sequence[int],
) -> Iterator[Advanced | Saved]:
    """Runs cells that share everything but their plans, as lanes; see `tile.run_tile`.

    Args:
      program: what is compiled.
      data: the problem's numbers.
      keys: of the replications.
      layouts: of the cells.
      widths: how many lanes a program may have. Where cells are fewer, the rest are copies of one.
    """
    fresh = fresh_tile(program, data, keys)
    lanes = [_Lane(i, program, layout, data) for i, layout in enumerate(layouts)]
    groups: list[_Group] = []
    for number in itertools.count():
        lanes = [lane for lane in lanes if number < len(lane.layout.calls)]
        if not lanes:
            return
        groups = _arranged(groups, _shares(lanes, number, widths), fresh)
        given = supply(program, data, keys, number * BLOCK_STEPS)
        for group in groups:
            yield from group.read(program, data, given, number, widths)
            group.run(program, data, given, number)
            yield from group.ended(number)
        if number % WAIT_EVERY == WAIT_EVERY - 1:
            jax.block_until_ready([group.state.federation.params for group in groups])
            yield from (lane.advanced(number) for lane in lanes if not lane.ends_in(number))


class _Lane:
    """A cell on its way."""

    def __init__(
        self, index: int, program: Program, layout: Whole, data: ProblemData | None = None
    ) -> None:
        self.index, self.layout = index, layout
        self._told = 0  # steps that were reported
        self.rolls, self.hessians = {}, {}
        if data is not None:
            dim, clients = data.init.shape[0], data.weights.shape[0]
            self.rolls = rolls_of(program, layout.plan, dim)
            self.hessians = hessian_steps(program, layout.plan, dim, clients)

    def ends_in(self, number: int) -> bool:
        """Whether a block is the last."""
        return number + 1 == len(self.layout.calls)

    def advanced(self, number: int) -> Advanced:
        """The steps up to the end of a block that were not reported before."""
        done = min((number + 1) * BLOCK_STEPS, self.layout.plan.num_steps + 1)
        steps, self._told = done - self._told, done
        return Advanced(self.index, steps)


class _Group:
    """Lanes that run in one program; behind the last of them, copies of the first."""

    def __init__(self, slots: int, lanes: Sequence[_Lane], parts: Sequence[TileState]) -> None:
        self.slots, self.lanes, self.width = slots, lanes, len(parts)
        self.state = stack_lanes(tuple(parts))

    @property
    def key(self) -> tuple[int, int, list[int]]:
        """What a group is made of."""
        return self.slots, self.width, [lane.index for lane in self.lanes]

    def read(
        self, program: Program, data: ProblemData, given: Supply, number: int, widths: Sequence[int]
    ) -> Iterator[Saved]:
        """Saved rounds inside a block, from copies of the lanes that have them."""
        self._roll(program, data, number)
        reads = [
            (i, save, call.block)
            for i, lane in enumerate(self.lanes)
            for save, call in lane.layout.reads.get(number, ())
        ]
        for width in widths_for(len(reads), widths):
            some, reads = reads[:width], reads[width:]
            which = _padded([i for i, _, _ in some], width)
            block = stack_blocks(_padded([block for _, _, block in some], width))
            state = _take(self.state, np.asarray(which, np.int32))
            sent = [(self.lanes[i], block) for i, _, block in some]
            state = _with_hessians(program, data, given, state, sent)
            found = run_lanes(program, self.slots, data, given, state, block)
            for place, (i, save, _) in enumerate(some):
                yield Saved(self.lanes[i].index, save, lane_of(found.statistics, np.int32(place)))

    def run(self, program: Program, data: ProblemData, given: Supply, number: int) -> None:
        """One block of all lanes."""
        blocks = [lane.layout.calls[number].block for lane in self.lanes]
        sent = list(zip(self.lanes, blocks, strict=True))
        self.state = _with_hessians(program, data, given, self.state, sent)
        blocks = _padded(blocks, self.width)
        self.state = run_lanes(program, self.slots, data, given, self.state, stack_blocks(blocks))

    def ended(self, number: int) -> Iterator[Advanced | Saved]:
        """The last round of the lanes that end with a block."""
        for i, lane in enumerate(self.lanes):
            if lane.ends_in(number):
                found = jax.block_until_ready(lane_of(self.state.statistics, np.int32(i)))
                yield lane.advanced(number)
                yield Saved(lane.index, len(lane.layout.save_at) - 1, found)

    def _roll(self, program: Program, data: ProblemData, number: int) -> None:
        states = list(self.state.statistics)
        for i, part in enumerate(program.accumulators):
            due = [number in lane.rolls.get(i, ()) for lane in self.lanes]
            if any(due):
                flags = np.asarray(_padded(due, self.width))
                states[i] = _roll(part, data.init, states[i], flags)
        self.state = self.state._replace(statistics=tuple(states))


def _with_hessians(
    program: Program,
    data: ProblemData,
    given: Supply,
    state: TileState,
    sent: Sequence[tuple[_Lane, Block]],
) -> TileState:
    """Return the state with the Hessians that are sent in a block, by lane."""
    states = list(state.statistics)
    width = jax.tree.leaves(states)[0].shape[0]
    for i in program.anchored:
        weights = _padded([in_block(lane.hessians[i], block) for lane, block in sent], width)
        pairs = statistics.hessian_pairs(program.loop, *weights)
        if pairs is not None:
            pairs = pairs._replace(weight=pairs.weight.reshape(width, *pairs.weight.shape[-3:]))
            states[i] = _run_hessians(program, i, data, given, states[i], sent[0][1].first, pairs)
    return state._replace(statistics=tuple(states))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(4,))
def _run_hessians(
    program: Program,
    i: int,
    data: ProblemData,
    given: Supply,
    state: Any,
    first: Any,
    pairs: statistics.HessianPairs,
) -> Any:
    one = functools.partial(run_hessians, program, i, data, given)
    axes: Any = statistics.HessianPairs(None, 0, None)
    return jax.vmap(one, in_axes=(0, None, axes))(state, first, pairs)


class _Share(NamedTuple):
    """What a group is to be."""

    slots: int
    width: int
    lanes: list[_Lane]

    @property
    def key(self) -> tuple[int, int, list[int]]:
        """As that of a group."""
        return self.slots, self.width, [lane.index for lane in self.lanes]


def _shares(lanes: Sequence[_Lane], number: int, widths: Sequence[int]) -> list[_Share]:
    """Lanes by the room that they need in a block, the longest first."""
    by_room: dict[int, list[_Lane]] = {}
    for lane in sorted(lanes, key=lambda lane: -len(lane.layout.calls)):
        by_room.setdefault(lane.layout.calls[number].slots, []).append(lane)
    found = []
    for slots, members in sorted(by_room.items()):
        for width in widths_for(len(members), widths):
            found.append(_Share(slots, width, members[:width]))
            members = members[width:]
    return found


def kinds(
    program: Program, layouts: Sequence[Whole], widths: Sequence[int]
) -> set[tuple[int, int]]:
    """The programs that cells need on their way: slots and width of each."""
    lanes = [_Lane(i, program, layout) for i, layout in enumerate(layouts)]
    found = set()
    for number in range(max(len(lane.layout.calls) for lane in lanes)):
        lanes = [lane for lane in lanes if number < len(lane.layout.calls)]
        found |= {(slots, width) for slots, width, _ in _shares(lanes, number, widths)}
    return found


def _arranged(groups: list[_Group], wanted: list[_Share], fresh: TileState) -> list[_Group]:
    """Groups as they are wanted; the same ones where nothing has changed."""
    if [share.key for share in wanted] == [group.key for group in groups]:
        return groups
    states = {
        lane.index: lane_of(group.state, np.int32(i))
        for group in groups
        for i, lane in enumerate(group.lanes)
    }
    return [
        _Group(slots, lanes, _padded([states.get(lane.index, fresh) for lane in lanes], width))
        for slots, width, lanes in wanted
    ]


def _padded(items: list[Any], width: int) -> list[Any]:
    """So many items, the first one again where they are fewer."""
    return items + items[:1] * (width - len(items))


def stack_blocks(blocks: Sequence[Block]) -> Block:
    """Blocks that start at the same observation, lanes first."""
    low, high = zip(*(block.pairs or (0, BLOCK_STEPS // 2) for block in blocks), strict=True)
    return jax.tree.map(lambda *x: np.stack(x), *blocks)._replace(
        first=blocks[0].first, pairs=(min(low), max(high))
    )
