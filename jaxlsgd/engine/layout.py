"""A plan cut into blocks of steps: the static shapes that the compiled programs run on.

Whatever the schedule, a program runs blocks of `BLOCK_STEPS` consecutive local steps, with flags
for the steps at which rounds begin and end. Schedules, horizons and step sizes are then data, not shapes, no
local step is wasted on padding a round, and every loop has a static length. Programs differ only in
how many synchronisations a block has room for, its slots.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxlsgd.core.checks import refusal
from jaxlsgd.core.estimator import BLOCK_STEPS
from jaxlsgd.schedules import Plan

# A block's draws are made ahead for all cells if they take at most so many bytes per replication: with 512
# replications 16 MB, which fits in a processor's last-level cache.
AHEAD_BYTES = 32 * 1024
# Slots for synchronisations in a block. If a block has more of them than the last number, the statistics are
# updated in the step loop itself, which costs less per update but makes one at every step.
SLOTS = (4, 16)


class Block(NamedTuple):
    """The data of one block of steps."""

    first: Any  # () uint32, observation index of the first step, a multiple of B
    eta: NDArray[np.float64]  # (B,) η of the step's round; 0 if the step only evaluates
    E: NDArray[np.float64]  # (B,) E of the step's round
    opens: NDArray[np.bool_]  # (B,) the step is the first of its round
    ends: NDArray[np.bool_]  # (B,) the step is the last of its round
    active: NDArray[
        np.bool_
    ]  # (B,) the step moves; if not, it only evaluates, or belongs to another call
    slot: NDArray[
        np.int32
    ]  # (B,) index in `syncs` of the average that it starts from, or their number if none
    syncs: Syncs
    # (B, groups) per statistic with an anchor: observations whose Hessians clients send, if some clients take part
    hessians: tuple[NDArray[np.float64], ...] = ()
    # () int32: pairs of steps before the first that is made, and up to the last; all pairs if None
    pairs: tuple[Any, Any] | None = None


class Syncs(NamedTuple):
    """The steps of a block that start from a synchronised average, and the rounds that ended with it."""

    at: Any  # (slots,) int32, step within the block
    valid: NDArray[np.bool_]  # (slots,)
    E: NDArray[np.float64]  # (slots,) E_m of the round that ended
    eta: NDArray[np.float64]  # (slots,) η_m
    share: NDArray[np.float64]  # (slots,) t_m/t_T


class Call(NamedTuple):
    """One call of a compiled program: a block, and its static numbers."""

    block: Block
    slots: int  # for synchronisations; BLOCK_STEPS means one at every step
    steps: int  # active steps, for progress


class Layout(NamedTuple):
    """A plan as calls, grouped by the saved round that each group leads up to."""

    save_at: tuple[int, ...]  # rounds, ascending, the last one T
    groups: tuple[tuple[Call, ...], ...]
    steps: int  # t_T + 1: one evaluation after the last round
    drawn: int  # steps including masked ones
    plan: Plan


def lay_out(
    plan: Plan, save_at: tuple[int, ...] | None = None, rooms: tuple[int, ...] = SLOTS
) -> Layout:
    """Cut a plan into calls, such that the statistics can be read at the rounds `save_at`.

    Step t = t_m, the first of round m + 1, starts from the average x̄_{t_m}, so the group of a saved round m
    ends after that step; the last group ends with a pure evaluation at t = t_T.
    """
    save_at = check_save_at(save_at, plan.num_rounds)
    per_step = _PerStep.of(plan)
    starts = np.concatenate([[0], plan.ends[np.asarray(save_at) - 1] + 1])
    groups = [
        tuple(_group(per_step, int(first), int(last), rooms))
        for first, last in itertools.pairwise(starts)
    ]
    drawn = BLOCK_STEPS * sum(map(len, groups))
    return Layout(save_at, tuple(groups), plan.num_steps + 1, drawn, plan)


def check_save_at(save_at: tuple[int, ...] | None, num_rounds: int) -> tuple[int, ...]:
    """Return the saved rounds in order, with T; refuse rounds outside 1..T."""
    rounds = np.atleast_1d(np.asarray(() if save_at is None else save_at))
    if rounds.size == 0:
        return (num_rounds,)
    whole = np.issubdtype(rounds.dtype, np.integer) and rounds.ndim == 1
    if not whole or rounds.min() < 1 or rounds.max() > num_rounds:
        raise refusal("save_at", f"be integers in 1..{num_rounds}", save_at)
    return tuple(sorted({*rounds.tolist(), num_rounds}))


class Whole(NamedTuple):
    """A plan as blocks that no saved round splits, for a cell that runs as a lane beside others.

    A saved round inside a block is read by a second call, which runs the block's steps only up to that round.
    """

    calls: tuple[Call, ...]  # block i starts at observation i·B
    reads: dict[int, list[tuple[int, Call]]]  # block → saves in it, each with the steps up to it
    save_at: tuple[int, ...]  # the last of them is read at the end
    plan: Plan


# Blocks after which a lane's program may change; cells are then grouped anew.
LANE_WINDOW = 16


def lay_out_whole(plan: Plan, save_at: tuple[int, ...], rooms: tuple[int, ...] = SLOTS) -> Whole:
    """Cut a plan into whole blocks, with the same number of slots in all blocks of a window."""
    steps = _PerStep.of(plan)
    total = len(steps.eta)
    starts = range(0, total, BLOCK_STEPS)
    rooms_of = _window_rooms(steps.begins, rooms)
    calls = [_call(steps, start, 0, total, rooms_of[start // BLOCK_STEPS]) for start in starts]
    reads: dict[int, list[tuple[int, Call]]] = {}
    for save, m in enumerate(save_at[:-1]):
        last = int(plan.ends[m - 1]) + 1
        i = (last - 1) // BLOCK_STEPS
        call = _call(steps, i * BLOCK_STEPS, 0, last, rooms_of[i])
        reads.setdefault(i, []).append((save, call))
    return Whole(tuple(calls), reads, save_at, plan)


def _window_rooms(begins: NDArray[np.bool_], rooms: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the slots of every block: enough for the fullest block of its window."""
    width = LANE_WINDOW * BLOCK_STEPS
    windows = -(-len(begins) // width)
    padded = np.zeros(windows * width, np.int64)
    padded[: len(begins)] = begins
    most = padded.reshape(windows, LANE_WINDOW, BLOCK_STEPS).sum(2).max(1)
    return [(_room(int(count), rooms),) for count in most for _ in range(LANE_WINDOW)]


def _room(count: int, rooms: tuple[int, ...]) -> int:
    return next((room for room in rooms if count <= room), BLOCK_STEPS)


class _PerStep(NamedTuple):
    eta: NDArray[np.float64]  # (t_T + 1,)
    E: NDArray[np.float64]
    ends: NDArray[np.bool_]
    begins: NDArray[np.bool_]  # the step starts from the average of the round before
    closed: NDArray[np.int64]  # index of that round in the plan
    plan: Plan

    @classmethod
    def of(cls, plan: Plan) -> _PerStep:
        total = plan.num_steps + 1
        eta = np.append(np.repeat(plan.eta, plan.E), 0.0)
        E = np.append(np.repeat(plan.E, plan.E), 1).astype(np.float64)
        ends, begins = np.zeros(total, bool), np.zeros(total, bool)
        ends[plan.ends - 1] = True
        begins[plan.ends] = True
        closed = np.append(np.repeat(np.arange(plan.num_rounds), plan.E), plan.num_rounds) - 1
        return cls(eta, E, ends, begins, closed, plan)


def _group(steps: _PerStep, first: int, last: int, rooms: tuple[int, ...]) -> list[Call]:
    """Return calls for the steps first ≤ t < last. Blocks start at the same t in all plans, and share draws."""
    starts = range(first - first % BLOCK_STEPS, last, BLOCK_STEPS)
    return [_call(steps, start, first, last, rooms) for start in starts]


def _call(steps: _PerStep, start: int, first: int, last: int, rooms: tuple[int, ...]) -> Call:
    t = start + np.arange(BLOCK_STEPS)
    active = (t >= first) & (t < last)
    t = np.minimum(t, len(steps.eta) - 1)
    begins = steps.begins[t] & active
    slots = _room(int(begins.sum()), rooms)
    syncs = _syncs(steps, t, begins, slots)
    slot = np.full(BLOCK_STEPS, slots, np.int32)
    slot[syncs.at[syncs.valid]] = np.flatnonzero(syncs.valid)
    block = Block(
        first=np.uint32(start),
        eta=np.where(active, steps.eta[t], 0.0),
        E=steps.E[t],
        opens=(steps.begins[t] | (t == 0)) & active,
        ends=steps.ends[t] & active,
        active=active & (steps.eta[t] > 0),
        slot=slot,
        syncs=syncs,
        # A block that a saved round cuts is run in parts, each of which makes its own steps only.
        pairs=(
            np.int32((max(first, start) - start) // 2),
            np.int32(-(-(min(last, start + BLOCK_STEPS) - start) // 2)),
        ),
    )
    return Call(block, slots, int(active.sum()))


def _syncs(steps: _PerStep, t: NDArray[np.int64], begins: NDArray[np.bool_], slots: int) -> Syncs:
    # A stable sort brings the steps that start from an average to the front, in order.
    dense = slots == BLOCK_STEPS
    at = np.arange(slots) if dense else np.argsort(~begins, kind="stable")[:slots]
    valid = begins[at]
    closed = np.where(valid, steps.closed[t[at]], 0)
    plan = steps.plan
    E, share = plan.E[closed].astype(np.float64), plan.ends[closed] / plan.num_steps
    return Syncs(at.astype(np.int32), valid, E, plan.eta[closed], share)
