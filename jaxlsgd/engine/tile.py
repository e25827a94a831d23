"""A tile: many replications of a cell, or of cells that share their draws, on one device.

The host runs one block after another and yields events.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from jaxlsgd.core.estimator import Accumulator
from jaxlsgd.core.problem import Array
from jaxlsgd.engine import federation
from jaxlsgd.engine.block import TileState, run_block, run_hessians, start_tile
from jaxlsgd.engine.draws import Supply, supply
from jaxlsgd.engine.layout import BLOCK_STEPS, Block, Call, Layout
from jaxlsgd.engine.program import ProblemData, Program
from jaxlsgd.engine.statistics import Statistics, hessian_pairs, roll
from jaxlsgd.schedules import Plan

# Calls queued before the host waits: enough to hide the launch, few enough to stop soon.
WAIT_EVERY = 8


class Advanced(NamedTuple):
    """A cell has made so many more steps."""

    cell: int
    steps: int


class Saved(NamedTuple):
    """A cell has reached a saved round; read its statistics before taking the next event."""

    cell: int
    save: int
    statistics: Statistics


def run_tile(
    program: Program, data: ProblemData, keys: Array, layouts: Sequence[Layout]
) -> Iterator[Advanced | Saved]:
    """Runs cells that share everything but their plans from x_0 to their ends, block by block.

    Each block's draws are made once. Cells with a short plan are done first.

    Args:
      program: what is compiled.
      data: the problem's numbers.
      keys: of the replications.
      layouts: of the cells.

    Yields:
      `Advanced` now and then, which is the place for progress and early stops, and `Saved` at each
      saved round of each cell, the last one at its end.
    """
    cells = [
        _Cell(i, program, data, fresh_tile(program, data, keys), layout)
        for i, layout in enumerate(layouts)
    ]
    for first in itertools.count(0, BLOCK_STEPS):
        cells = [cell for cell in cells if cell.calls]
        if not cells:
            return
        given = supply(program, data, keys, first)
        for cell in cells:
            yield from cell.run(program, data, given, first)


def fresh_tile(program: Program, data: ProblemData, keys: Array) -> TileState:
    """All replications at x_0, with what their algorithm draws from."""
    state, algorithm = start_tile(program, data, keys.shape[0]), program.algorithm
    words, begun = jax.random.key_data(keys), state.federation
    if algorithm.random:
        begun = federation.dealt(algorithm, begun, words, data.weights, data.client_index)
    if algorithm.participation is not None:
        begun = begun._replace(members=federation.first_members(algorithm, data, words))
    return state._replace(federation=begun)


class _Cell:
    """A cell on its way."""

    def __init__(
        self, index: int, program: Program, data: ProblemData, state: TileState, layout: Layout
    ) -> None:
        self.index, self.state = index, state
        dim, clients = data.init.shape[0], data.weights.shape[0]
        self.calls: collections.deque[tuple[Call, int | None]] = collections.deque(
            (call, save if call is group[-1] else None)
            for save, group in enumerate(layout.groups)
            for call in group
        )
        self._steps = self._queued = 0
        self._rolls = {
            i: {block * BLOCK_STEPS for block in blocks}
            for i, blocks in rolls_of(program, layout.plan, dim).items()
        }
        self._hessians = hessian_steps(program, layout.plan, dim, clients)

    def run(
        self, program: Program, data: ProblemData, given: Supply, first: int
    ) -> Iterator[Advanced | Saved]:
        """All calls that start at observation `first`: several where a round in it is saved."""
        for i, starts in self._rolls.items():
            if first in starts:
                self._roll(program.accumulators[i], i, data)
        while self.calls and int(self.calls[0][0].block.first) == first:
            call, save = self.calls.popleft()
            block = self._add_hessians(program, data, given, call.block)
            self.state = run_block(program, call.slots, data, given, self.state, block)
            self._steps += call.steps
            self._queued += 1
            if self._queued == WAIT_EVERY or save is not None:
                jax.block_until_ready(self.state.federation.params)
                yield Advanced(self.index, self._steps)
                self._steps = self._queued = 0
            if save is not None:
                yield Saved(self.index, save, self.state.statistics)

    def _roll(self, part: Accumulator, i: int, data: ProblemData) -> None:
        self._put(i, roll(part, data.init, self.state.statistics[i]))

    def _put(self, i: int, new: Any) -> None:
        states = list(self.state.statistics)
        states[i] = new
        self.state = self.state._replace(statistics=tuple(states))

    def _add_hessians(
        self, program: Program, data: ProblemData, given: Supply, block: Block
    ) -> Block:
        """Add the Hessians that are sent in a block; if only some clients take part, its loop does so."""
        if program.algorithm.participation is not None:
            weights = (in_block(each, block) for each in self._hessians.values())
            return block._replace(hessians=tuple(weights))
        for i, each in self._hessians.items():
            pairs = hessian_pairs(program.loop, in_block(each, block))
            if pairs is not None:
                old = self.state.statistics[i]
                self._put(i, run_hessians(program, i, data, given, old, block.first, pairs))
        return block


def rolls_of(program: Program, plan: Plan, dim: int) -> dict[int, list[int]]:
    """Return, by statistic that rolls, before which blocks it does."""
    return {
        i: part.rolling.roll_before(plan.E, plan.eta, dim).tolist()
        for i, part in enumerate(program.accumulators)
        if part.rolling is not None
    }


def hessian_steps(
    program: Program, plan: Plan, dim: int, clients: int
) -> dict[int, NDArray[np.float64]]:
    """Return, by statistic with an anchor, the observations whose Hessians are sent: steps by groups."""
    found = {}
    count = program.algorithm.stepping(clients)
    for i in program.anchored:
        anchor = program.accumulators[i].anchor
        assert anchor is not None
        groups = anchor.hessian_rounds(plan.E, count, dim)
        chosen = np.arange(1, anchor.groups + 1) == groups[:, None]
        found[i] = count * np.repeat(chosen, plan.E, axis=0).astype(np.float64)
    return found


def in_block(weights: NDArray[np.float64], block: Block) -> NDArray[np.float64]:
    """Return the rows of the steps that a block makes, 0 for the others."""
    found = np.zeros((BLOCK_STEPS, weights.shape[1]))
    part = weights[int(block.first) : int(block.first) + BLOCK_STEPS]
    found[: len(part)] = part
    return found * block.active[:, None]
