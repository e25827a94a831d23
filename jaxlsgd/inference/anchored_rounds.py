"""Sums of gradients at anchors: Le Cam's one-step estimator, with any federated optimiser as its pilot.

Besides its model the server broadcasts an anchor a, its own best estimate so far. A client evaluates the observation of
each local step also at a, and sends h_k = Σ_l ∇f_k(a; ξ_{k,l}) with its model. Given a, the sums h_m = Σ_k p_k h_k of
the rounds are independent and E[h_m] = E_m ∇F(a), whatever the optimiser does with the model in between, so that

    x̂ = a − G⁻¹ Σ_m h_m / Σ_m E_m

is off by the mean of independent gradients and by a term of order |a − x*|². The anchor changes a few times in a run,
whenever the number of observations has grown by half: rounds with one anchor are a bin. In a few rounds of every bin
clients send Hessians at its anchor, and on the same observations at the anchor before: their difference D_b is 0 for a
quadratic loss, carries the Hessians of early bins to the last anchor, and says how far a Newton step can be trusted.

This file streams the sums, and makes the next anchor with `anchored_step`, which reads them.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxlsgd.core.checks import refusal
from jaxlsgd.core.estimator import BLOCK_STEPS, Accumulator, Anchor, Rolling, Sync
from jaxlsgd.core.problem import Array, Params, flatten
from jaxlsgd.inference.anchored_step import Bins, Counts, next_anchor
from jaxlsgd.inference.sums import widened

BINS = 12  # that are kept; those before have less than a hundredth of the observations
LEAST_ROUNDS = 3  # of a bin
# Hessians of a bin: four rounds, or so many that 20 observations per parameter are seen; but among several clients
# they cost no more than about 0.4 of the models.
LEAST_HESSIANS, SEEN_PER_PARAMETER, SHARE = 4, 20.0, 0.4


class Clock(NamedTuple):
    """Where the stream is; a function of the schedule alone."""

    t: Array  # () int32, observations per client so far
    start: Array  # () int32, where the open bin begins: rounds that began before it have the anchor before
    edge: Array  # () int32, the block where it is to end, in observations
    bin: Array  # () int32, which bin is open; in the first, the anchor is x_0 and nothing is kept
    now: Counts
    past: Counts  # leading axis: bins, the last one last
    late: Array  # () E of the round that was under way when the bin began
    path: Array  # () ΣE of `AnchoredState.path`


class AnchoredState(NamedTuple):
    """The stream of rounds in bins."""

    clock: Clock
    now: Bins  # the open bin
    past: Bins  # leading axis: bins, the last one last
    late: Array  # (d,) h of the round that was under way when the bin began
    path: Array  # (d,) Σ E x̄ over the second half of the bin
    x: Array  # (d,) x̄ after the last round


@functools.cache
def anchored_rounds() -> Accumulator:
    """Return the sums above as a streaming statistic."""
    return Accumulator(
        _init,
        _update,
        shared=("clock",),
        rolling=Rolling(_add, _roll, roll_before, store=("past",)),
        anchor=Anchor(_places, first_edge, hessian_rounds, _add_hessians),
    )


def _init(params: Params) -> AnchoredState:
    x = widened(flatten(params))
    line, square, zero = (
        jnp.zeros_like(x),
        jnp.zeros((*x.shape, *x.shape), x.dtype),
        jnp.zeros((), x.dtype),
    )
    square = square * x[:, None]  # of the same batch as x, under vmap
    now = Bins(x, line, line, line, square, jnp.stack([square, square]), square)
    counts = Counts(zero, zero, zero, jnp.zeros(2, x.dtype))
    count = jnp.zeros((), jnp.int32)
    edge = jnp.asarray(first_edge(x.shape[0]), jnp.int32)
    clock = Clock(count, count, edge, count, counts, _repeated(counts), zero, zero)
    return AnchoredState(clock, now, _repeated(now), line, line, x)


def _repeated(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros((BINS, *leaf.shape), leaf.dtype), tree)


def first_edge(dim: int) -> int:
    """Return where the first anchor is made, in observations per client."""
    return _next_block(max(BLOCK_STEPS, 2 * dim) - 1)


def _next_block(t: Any) -> Any:
    return (t // BLOCK_STEPS + 1) * BLOCK_STEPS


def next_edge(edge: Any) -> Any:
    """Return where a bin that begins at `edge` is to end: half as far again, in whole blocks, and one block at least."""
    blocks = edge // BLOCK_STEPS
    return (blocks + blocks // 2 + (blocks < 2)) * BLOCK_STEPS


def _places(state: AnchoredState) -> Array:
    return jnp.stack([state.now.a, state.now.a - state.now.move])


def _update(state: AnchoredState, sync: Sync) -> AnchoredState:
    clock = state.clock
    crosses = clock.t + jnp.asarray(sync.E, jnp.int32) >= clock.edge
    due = crosses & (clock.now.n >= LEAST_ROUNDS)
    return _add(lax.cond(due, _roll, lambda same: same, state), sync)


def _add(state: AnchoredState, sync: Sync) -> AnchoredState:
    given, clock, now = sync.anchored, state.clock, state.now
    if given is None:
        raise refusal(
            "sync", "have the sum of the gradients at the anchor (anchored)", None, code="missing"
        )
    x, h = widened(flatten(sync.params)), widened(flatten(given.gradient_sum))
    E, steps = jnp.asarray(sync.E, x.dtype), jnp.asarray(sync.E, jnp.int32)
    late = clock.t < clock.start
    w = jnp.where(late, 0, 1).astype(x.dtype)
    middle = (clock.start + clock.edge) // 2
    half = jnp.where(clock.t >= middle, E, 0)
    # A round that began under the anchor before belongs to the bin before.
    kept = now._replace(
        h=now.h + w * h, Eh=now.Eh + (w * E) * h, hh=now.hh + (w * h)[:, None] * h[None, :]
    )
    counts = clock.now
    counts = counts._replace(n=counts.n + w, E=counts.E + w * E, EE=counts.EE + w * E * E)
    t = clock.t + steps
    clock = clock._replace(
        t=t,
        edge=jnp.where(t >= clock.edge, _next_block(t), clock.edge),
        now=counts,
        late=jnp.where(late, E, clock.late),
        path=clock.path + half,
    )
    state = AnchoredState(
        clock, kept, state.past, jnp.where(late, h, state.late), state.path + half * x, x
    )
    if given.hessian is None:
        return state
    both = [widened(jnp.asarray(H)) for H in (given.hessian, given.hessian_before)]
    seen = jnp.where(late, 0, jnp.asarray(given.observations, x.dtype))
    group = counts.seen[0] > counts.seen[1]
    weights = seen * jnp.where(group, jnp.array([0, 1]), jnp.array([1, 0])).astype(x.dtype)
    sums = weights[:, None, None] * both[0]
    return _add_hessians(state, sums, seen * (both[0] - both[1]), weights)


def _add_hessians(
    state: AnchoredState, sums: Array, difference: Array, counts: Array
) -> AnchoredState:
    clock, now = state.clock, state.now
    seen = clock.now.seen + counts
    clock = clock._replace(now=clock.now._replace(seen=seen))
    return state._replace(clock=clock, now=now._replace(H=now.H + sums, D=now.D + difference))


def closed(state: AnchoredState) -> tuple[Bins, Counts]:
    """Return all bins with the open one as the last, and the round that was under way in its own."""
    clock, xp = state.clock, state.x.__array_namespace__()
    late, E = state.late, clock.late
    last = jax.tree.map(lambda leaf: leaf[-1], state.past)
    counts = jax.tree.map(lambda leaf: leaf[-1], clock.past)
    keep = clock.bin > 1  # the first bin is not kept
    w = xp.where(keep, 1, 0).astype(late.dtype) * xp.where(E > 0, 1, 0)
    last = last._replace(
        h=last.h + w * late,
        Eh=last.Eh + (w * E) * late,
        hh=last.hh + (w * late)[:, None] * late[None, :],
    )
    counts = counts._replace(n=counts.n + w, E=counts.E + w * E, EE=counts.EE + w * E * E)

    def shifted(past: Array, last: Array, now: Array) -> Array:
        whole = xp.concatenate([past[:-1], last[None]])
        return xp.where(usable, xp.concatenate([whole[1:], now[None]]), whole)

    # An open bin without Hessians says nothing yet.
    usable = (clock.bin > 0) & (xp.sum(clock.now.seen) > 0) & (clock.now.n > 1)
    bins = jax.tree.map(shifted, state.past, last, state.now)
    return bins, jax.tree.map(shifted, clock.past, counts, clock.now)


def after_round(state: AnchoredState, x: Any, E: int) -> AnchoredState:
    """Return the state after a round of a server that keeps the sums of the open bin itself, in NumPy."""
    clock = state.clock
    half = E if clock.t >= (clock.start + clock.edge) // 2 else 0
    clock = clock._replace(t=clock.t + E, path=clock.path + half)
    return state._replace(clock=clock, path=state.path + half * x, x=x)


def after_bin(state: AnchoredState, ready: bool) -> AnchoredState:
    """Return the state of such a server with the next anchor, if the open bin has ended and is `ready`."""
    if ready and state.clock.t >= state.clock.edge:
        with np.errstate(all="ignore"):  # what is not finite is no anchor
            state = _roll(state)
    clock = state.clock
    edge = _next_block(clock.t) if clock.t >= clock.edge else clock.edge
    return state._replace(clock=clock._replace(edge=edge))


def _roll(state: AnchoredState) -> AnchoredState:
    """Close the open bin, and make the next anchor."""
    clock, now, xp = state.clock, state.now, state.x.__array_namespace__()
    bins, counts = closed(state)
    path = state.path / xp.maximum(clock.path, 1)
    path = xp.where(clock.path > 0, path, state.x)
    path = xp.where(xp.all(xp.isfinite(path)), path, now.a)
    first = clock.bin == 0
    a = xp.where(first, path, next_anchor(bins, counts, path))
    zeros = jax.tree.map(xp.zeros_like, now)
    clock = Clock(
        clock.t,
        clock.edge,
        next_edge(clock.edge),
        clock.bin + 1,
        jax.tree.map(xp.zeros_like, clock.now),
        counts,
        xp.zeros_like(clock.late),
        xp.zeros_like(clock.path),
    )
    fresh = zeros._replace(a=a, move=a - now.a)
    nothing = xp.zeros_like(state.late)
    return AnchoredState(clock, fresh, bins, nothing, nothing, state.x)


def _bins_of(E: np.ndarray, dim: int) -> list[tuple[int, int, int, int]]:
    """Return the bins of a plan as `_update` makes them: start, first round, round behind the last, planned end."""
    ends = np.cumsum(E)
    found, start, edge, first, n = [], 0, first_edge(dim), 0, 0
    for m, end in enumerate(ends.tolist()):
        begin = end - int(E[m])
        if begin < edge <= end and n >= LEAST_ROUNDS:
            found.append((start, first, m, edge))
            start, edge, first, n = edge, next_edge(edge), m + 1, 0
        n += begin >= start
        if end >= edge:
            edge = _next_block(end)
    return [*found, (start, first, len(ends), edge)]


def roll_before(E: np.ndarray, eta: np.ndarray, dim: int) -> np.ndarray:
    """Return the blocks before which a bin is closed."""
    del eta
    return np.asarray([bin[0] // BLOCK_STEPS for bin in _bins_of(E, dim)[1:]], np.int64)


def hessian_rounds(E: np.ndarray, num_clients: int, dim: int) -> np.ndarray:
    """Return which rounds of a plan send Hessians, 1 + their group; 0 for the others."""
    chosen = np.zeros(len(E), np.int64)
    begins = np.cumsum(E) - E
    for start, first, last, _ in _bins_of(E, dim)[1:]:
        if first >= last:
            continue
        length = next_edge(start) - start
        many = bin_hessians(float(E[first]), length, num_clients, dim)
        count = 0
        for m in range(first, last):
            if (begins[m] - start) * many >= count * length:
                chosen[m] = 1 + count % 2
                count += 1
    return chosen


def bin_hessians(E: float, length: int, num_clients: int, dim: int) -> int:
    """Return how many rounds of a bin send Hessians."""
    many = max(LEAST_HESSIANS, SEEN_PER_PARAMETER * dim / (num_clients * E))
    affordable = 1 + SHARE * length / (E * (dim + 1))
    return max(1, int(many if num_clients == 1 else min(many, affordable)))
