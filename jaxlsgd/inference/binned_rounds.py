"""Sums over bins of rounds, for full efficiency at any schedule from what the server has anyway.

Round m moves the server by −η_m h_m with h_m = Σ_l Σ_k p_k g_{k,l}, the sum of all its E_m mean gradients.
Near x* these are E_m G (x̄_{m−1} − x*) plus the noise of all E_m observations. If G were known and steps were short,
one Newton step from the path with all of them,

    x̂ = Σ_m E_m x̄_{m−1}/t − G⁻¹ Σ_m h_m/t,     t = Σ_m E_m,

would have variance G⁻¹SG⁻ᵀ/t under every schedule: the ν of the paper is the price of weighting rounds equally, not
that of fewer rounds. G is told by the path itself, as h is regressed on E x̄, and by a few Hessians if clients send them.
(Clients that drift apart within a round, as those whose Hessians and optima both differ do, add a bias of order
η_m (E_m − 1) that is not taken out.)

Rounds are put into bins, a new one when m, E_m or η_m has changed by a factor of two. Bins begin with a block of
the engine (`BLOCK_STEPS`), so that closing one costs its loop nothing. Within a bin b, with
s = x̄_{m−1} − c_b for its first average c_b, the statistic keeps

    Σh, ΣEs   (d each)      Σhsᵀ, ΣEssᵀ, Σhhᵀ/E, ΣH in two groups   (d × d each),

so that an early part that is still far away, or has exploded, can be left out at the end. The first `SKIPPED`
observations are not counted at all. `newton_step` makes an estimate of them; this file streams them.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxlsgd.core.estimator import BLOCK_STEPS, Accumulator, OnHost, Rolling, Sync, hessians_due
from jaxlsgd.core.problem import Array, Params, flatten
from jaxlsgd.inference.sums import widened

BINS = 14  # at most; with a factor of two they last for half a million rounds
FACTOR = 2.0
SKIPPED = 8  # observations per client


class Sums(NamedTuple):
    """Sums over the rounds of a bin; of closed bins with a leading axis."""

    c: Array  # (d,) x̄ where the bin began
    h: Array  # (d,) Σ h
    Es: Array  # (d,) Σ E s
    hs: Array  # (d, d) Σ h sᵀ
    Ess: Array  # (d, d) Σ E s sᵀ
    hh: Array  # (d, d) Σ h hᵀ/E
    H: Array  # (2, d, d) Σ H, every other one


class Counts(NamedTuple):
    """What a bin's rounds have in common for all replications."""

    n: Array  # () rounds
    E: Array  # () Σ E
    gamma: Array  # () Σ E η
    seen: Array  # (2,) Hessians in `Sums.H`


class Clock(NamedTuple):
    """Where the stream is; a function of the schedule alone."""

    m: Array  # () int32, rounds so far
    t: Array  # () int32, observations so far
    E: Array  # () of the last round
    eta: Array  # ()
    first_m: Array  # () int32, of the first round of the bin
    first_E: Array  # ()
    first_eta: Array  # ()
    bin: Array  # () int32, which bin is open
    due: Array  # () Hessians that were due so far
    now: Counts
    past: Counts  # leading axis: bins


class OneStepState(NamedTuple):
    """The stream of rounds in bins."""

    clock: Clock
    now: Sums
    past: Sums  # leading axis: bins
    x: Array  # (d,) x̄ before the round to come


@functools.cache
def binned_rounds(hessians: int = 30) -> Accumulator:
    """Return the sums above as a streaming statistic, with so many Hessians if the plan is known, else with all given."""

    def add(state: OneStepState, sync: Sync) -> OneStepState:
        return _add(state, sync, hessians)

    def update(state: OneStepState, sync: Sync) -> OneStepState:
        E = jnp.asarray(sync.E, jnp.int32)
        clock = state.clock
        next_block = (clock.t + E) // BLOCK_STEPS > clock.t // BLOCK_STEPS
        due = next_block & _changed(clock)
        return add(lax.cond(due, roll, lambda same: same, state), sync)

    def update_on_host(state: OneStepState, sync: Sync) -> OneStepState:
        clock = state.clock
        next_block = (clock.t + sync.E) // BLOCK_STEPS > clock.t // BLOCK_STEPS
        if next_block and _changed(clock):
            state = roll(state, np)
        with np.errstate(over="ignore", invalid="ignore"):
            return _add(state, sync, hessians, np)

    return Accumulator(
        _init,
        update,
        needs_hessian=hessians > 0,
        needs_gradient_sum=True,
        hessians=hessians,
        shared=("clock",),
        rolling=Rolling(add, roll, roll_before, store=("past",)),
        on_host=OnHost(lambda x: _begin(np.asarray(x, np.float64), np), update_on_host),
    )


def _init(params: Params) -> OneStepState:
    return _begin(widened(flatten(params)), jnp)


def _begin(x: Any, xp: Any) -> OneStepState:
    line, square = xp.zeros_like(x), x[:, None] * xp.zeros_like(x)[None, :]
    zero, count = xp.zeros((), x.dtype), xp.zeros((), xp.int32)
    sums = Sums(x, line, line, square, square, square, xp.stack([square, square]))
    counts = Counts(zero, zero, zero, xp.zeros(2, x.dtype))
    clock = Clock(
        count, count, zero, zero, count, zero, zero, count, zero, counts, _bins(counts, xp)
    )
    return OneStepState(clock, sums, _bins(sums, xp), x)


def _bins(tree: Any, xp: Any) -> Any:
    return jax.tree.map(lambda leaf: xp.zeros((BINS, *leaf.shape), leaf.dtype), tree)


def _add(state: OneStepState, sync: Sync, hessians: int, xp: Any = jnp) -> OneStepState:
    vector: Any = flatten if xp is jnp else np.asarray
    after, old, clock = widened(vector(sync.params)), state.now, state.clock
    dtype = after.dtype
    E, eta = xp.asarray(sync.E, dtype), xp.asarray(sync.eta, dtype)
    # Without the sum of the gradients, what the server moved by tells it for Local SGD.
    total = sync.gradient_sum
    h = (state.x - after) / eta if total is None else widened(vector(total))
    m, t, empty = clock.m + 1, clock.t + xp.asarray(sync.E, xp.int32), clock.now.n == 0
    # Not by a factor of 0: the first steps may have exploded.
    counted = t > SKIPPED
    h, w = xp.where(counted, h, 0), xp.where(counted, E, 0)
    c = xp.where(empty, state.x, old.c)
    s = xp.where(counted, state.x - c, 0)
    Es = w * s
    due, H, seen = clock.due, old.H, clock.now.seen
    if sync.hessian is not None and hessians:
        if sync.share is None:
            due = due + 1
        else:
            due = xp.asarray(hessians_due(hessians, sync.share, xp), dtype)
        # Those of rounds that are not due are computed all the same, and not used.
        turn = xp.arange(2)
        group = xp.where((due > clock.due) & ((seen[0] > seen[1]) == turn), 1.0, 0.0).astype(dtype)
        given = widened(xp.asarray(sync.hessian))
        H = H + xp.where(group[:, None, None] > 0, given, 0)
        seen = seen + group
    now = Sums(
        c,
        old.h + h,
        old.Es + Es,
        old.hs + h[:, None] * s[None, :],
        old.Ess + s[:, None] * Es[None, :],
        old.hh + h[:, None] * (h / E)[None, :],
        H,
    )
    counts = clock.now
    counts = Counts(counts.n + xp.where(counted, 1, 0), counts.E + w, counts.gamma + w * eta, seen)
    first: list[Any] = [
        xp.where(empty, new, kept)
        for new, kept in ((m, clock.first_m), (E, clock.first_E), (eta, clock.first_eta))
    ]
    clock = Clock(m, t, E, eta, first[0], first[1], first[2], clock.bin, due, counts, clock.past)
    return OneStepState(clock, now, state.past, after)


def mean_place(state: OneStepState) -> Array:
    """Return Σ E_m x̄_{m−1}/t over all rounds that count, those included that an interval leaves out, (d,)."""
    xp = state.x.__array_namespace__()
    now, past, clock = state.now, state.past, state.clock
    total = xp.sum(clock.past.E[:, None] * past.c + past.Es, 0) + clock.now.E * now.c + now.Es
    return total / xp.maximum(xp.sum(clock.past.E) + clock.now.E, 1)


def all_bins(state: OneStepState, xp: Any) -> tuple[Sums, Counts]:
    """Return the closed bins and the open one."""
    both = _rolled(state, xp)
    return both.past, both.clock.past


def roll(state: OneStepState, xp: Any = jnp) -> OneStepState:
    """Close the open bin."""
    both = _rolled(state, xp)
    fresh = jax.tree.map(xp.zeros_like, (state.now, state.clock.now))
    clock = both.clock._replace(bin=state.clock.bin + 1, now=fresh[1])
    return both._replace(clock=clock, now=fresh[0])


def _rolled(state: OneStepState, xp: Any) -> OneStepState:
    """Return the state with the open bin among the closed ones."""
    clock, b = state.clock, state.clock.bin

    def put(all_: Any, one: Any) -> Any:
        if xp is jnp:
            return lax.dynamic_update_index_in_dim(all_, one, b, 0)
        return xp.concatenate([all_[:b], one[None], all_[b + 1 :]])

    past = jax.tree.map(put, state.past, state.now)
    counts = jax.tree.map(put, clock.past, clock.now)
    return state._replace(clock=clock._replace(past=counts), past=past)


def _changed(clock: Any) -> Any:
    """Whether the open bin has seen m, E or η change by the factor, and there is room for another."""
    m = clock.m + 1 >= FACTOR * clock.first_m
    E = (clock.E >= FACTOR * clock.first_E) | (FACTOR * clock.E <= clock.first_E)
    # A hair more than the factor: η of a constant E falls by it just where m has risen by it squared.
    eta = clock.eta * FACTOR**1.01 <= clock.first_eta
    return (clock.now.n > 0) & (clock.bin < BINS - 1) & (m | E | eta)


def roll_before(E: np.ndarray, eta: np.ndarray, dim: int = 0) -> np.ndarray:
    """Return the blocks, counted from 0, before which a bin is closed: what `update` does, for a whole plan."""
    del dim
    ends = np.cumsum(E)
    blocks = ends // BLOCK_STEPS  # where the average of each round is met
    found, bin_ = [], 0
    first = int(np.searchsorted(ends, SKIPPED, side="right"))
    for m in np.flatnonzero(np.diff(blocks) > 0):
        change = m >= first and (
            (m + 2 >= FACTOR * (first + 1))
            | (E[m] >= FACTOR * E[first])
            | (FACTOR * E[m] <= E[first])
            | (eta[m] * FACTOR**1.01 <= eta[first])
        )
        if change and bin_ < BINS - 1:
            found.append(blocks[m] + 1)
            first, bin_ = m + 1, bin_ + 1
    return np.asarray(found, np.int64)
