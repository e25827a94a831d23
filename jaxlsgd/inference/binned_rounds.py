"""Sums over bins of rounds, for full efficiency at any schedule from what the server has anyway.

Round m moves the server by −η_m h_m with h_m = Σ_l Σ_k p_k g_{k,l}, the sum of all its E_m mean gradients.
Near x* these are E_m G (x̄_{m−1} − x*) plus the noise of all E_m observations. If G were known and steps were short,
one Newton step from the path with all of them,

    x̂ = Σ_m E_m x̄_{m−1}/t − G⁻¹ Σ_m h_m/t,     t = Σ_m E_m,

would have variance G⁻¹SG⁻ᵀ/t under every schedule: the ν of the paper is the price of weighting rounds equally, not
that of fewer rounds. (G is sent, though, which costs d (d + 1)/2 numbers. Clients that drift apart within a round, as
those whose Hessians and optima both differ do, add a bias of order η_m (E_m − 1) that is not taken out.) The residuals r_m = h_m − E_m K (x̄_{m−1} − x̂) give a sandwich that contains
multiplicative and local noise.

Rounds are put into bins, a new one when m, E_m or η_m has changed by a factor of two. Bins begin with a block of
the engine (`BLOCK_STEPS`), so that closing one costs its loop nothing. Within a bin b, with
s = x̄_{m−1} − c_b for its first average c_b, the statistic keeps

    Σh, ΣEh, ΣEs, ΣE²s, ΣEHs   (d each)      Σhhᵀ, ΣEhsᵀ, ΣE²ssᵀ, ΣEH   (d × d each),

ΣEs over the rounds whose Hessian is known as well,

so that an early part that is still far away, or has exploded, can be left out at the end. `one_step` makes
an interval of them; this file streams them.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxlsgd.core.checks import refusal
from jaxlsgd.core.estimator import BLOCK_STEPS, Accumulator, OnHost, Rolling, Sync
from jaxlsgd.core.problem import Array, Params, flatten
from jaxlsgd.inference.sums import times, widened

BINS = 14  # at most; with a factor of two they last for half a million rounds
FACTOR = 2.0
# Where λ ↦ Σ_m [1 − (1 − η_mλ)^{E_m}]/η_m is kept: eigenvalues are known at the end only.
GRID = np.geomspace(1e-4, 1e4, 97)


class Sums(NamedTuple):
    """Sums over the rounds of a bin; of closed bins with a leading axis."""

    c: Array  # (d,) x̄ where the bin began
    h: Array  # (d,) Σ h
    Eh: Array  # (d,) Σ E h
    Es: Array  # (d,) Σ E s
    EEs: Array  # (d,) Σ E² s
    EHs: Array  # (d,) Σ E H s
    known_Es: Array  # (d,) Σ E s over rounds whose Hessian is known
    hh: Array  # (d, d) Σ h hᵀ
    Ehs: Array  # (d, d) Σ E h sᵀ
    EEss: Array  # (d, d) Σ E² s sᵀ
    EH: Array  # (d, d) Σ E H


class Counts(NamedTuple):
    """What a bin's rounds have in common for all replications."""

    n: Array  # () rounds
    E: Array  # () Σ E
    EE: Array  # () Σ E²
    known: Array  # () Σ E over rounds whose Hessian is known
    pull: Array  # (grid,) Σ [1 − (1 − ηλ)^E]/η at λ of the grid


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
    now: Counts
    past: Counts  # leading axis: bins


class OneStepState(NamedTuple):
    """The stream of rounds in bins."""

    clock: Clock
    now: Sums
    past: Sums  # leading axis: bins
    x: Array  # (d,) x̄ before the round to come
    H: Array  # (d, d) mean Hessian there


@functools.cache
def binned_rounds(hessian_every: int = 1) -> Accumulator:
    """The sums above as a streaming statistic, with the Hessian of every s-th synchronisation."""

    def add(state: OneStepState, sync: Sync) -> OneStepState:
        return _add(state, sync, hessian_every)

    def update(state: OneStepState, sync: Sync) -> OneStepState:
        E = jnp.asarray(sync.E, jnp.int32)
        clock = state.clock
        next_block = (clock.t + E) // BLOCK_STEPS > clock.t // BLOCK_STEPS
        due = next_block & _changed(clock, jnp)
        return add(lax.cond(due, roll, lambda same: same, state), sync)

    def update_on_host(state: OneStepState, sync: Sync) -> OneStepState:
        clock = state.clock
        next_block = (clock.t + sync.E) // BLOCK_STEPS > clock.t // BLOCK_STEPS
        if next_block and _changed(clock, np):
            state = roll(state, np)
        with np.errstate(over="ignore", invalid="ignore"):
            return _add(state, sync, hessian_every, np)

    return Accumulator(
        _init,
        update,
        needs_hessian=True,
        needs_gradient_sum=True,
        hessian_every=hessian_every,
        shared=("clock",),
        rolling=Rolling(add, roll, roll_before, store=("past",)),
        on_host=OnHost(lambda x: _begin(np.asarray(x, np.float64), np), update_on_host),
    )


def _init(params: Params) -> OneStepState:
    return _begin(widened(flatten(params)), jnp)


def _begin(x: Any, xp: Any) -> OneStepState:
    line, square = xp.zeros_like(x), x[:, None] * xp.zeros_like(x)[None, :]
    zero, count = xp.zeros((), x.dtype), xp.zeros((), xp.int32)
    sums = Sums(x, *[line] * 6, *[square] * 4)
    counts = Counts(zero, zero, zero, zero, xp.zeros(len(GRID), x.dtype))
    clock = Clock(count, count, zero, zero, count, zero, zero, count, counts, _bins(counts, xp))
    return OneStepState(clock, sums, _bins(sums, xp), x, square)


def _bins(tree: Any, xp: Any) -> Any:
    return jax.tree.map(lambda leaf: xp.zeros((BINS, *leaf.shape), leaf.dtype), tree)


def _add(state: OneStepState, sync: Sync, every: int, xp: Any = jnp) -> OneStepState:
    if sync.hessian is None and every == 1:
        raise refusal("sync", "have hessian at the average, which one_step needs", None)
    # One that is due and missing must show.
    missing = xp.full_like(state.H, xp.nan)
    hessian = missing if sync.hessian is None else widened(xp.asarray(sync.hessian))
    vector: Any = flatten if xp is jnp else np.asarray
    after = widened(vector(sync.params))
    dtype = after.dtype
    E, eta = xp.asarray(sync.E, dtype), xp.asarray(sync.eta, dtype)
    # Without the sum of the gradients, what the server moved by tells it for Local SGD.
    total = sync.gradient_sum
    h = (state.x - after) / eta if total is None else widened(vector(total))
    old, empty = state.now, state.clock.now.n == 0
    c = xp.where(empty, state.x, old.c)
    s = state.x - c
    Es, EEs = E * s, (E * E) * s
    # The Hessian at x_0 is not among what statistics are fed.
    known = (state.clock.m > 0) & (state.clock.m % every == 0)
    H = state.H if every == 1 else xp.where(known, state.H, 0)
    now = Sums(
        c,
        old.h + h,
        old.Eh + E * h,
        old.Es + Es,
        old.EEs + EEs,
        old.EHs + E * times(H, s),
        old.known_Es + xp.where(known, Es, 0),
        old.hh + h[:, None] * h[None, :],
        old.Ehs + h[:, None] * Es[None, :],
        old.EEss + s[:, None] * EEs[None, :],
        old.EH + E * H,
    )
    clock = _tick(state.clock, E, eta, xp.asarray(sync.E, xp.int32), empty, known, xp)
    return OneStepState(clock, now, state.past, after, hessian)


def _tick(
    clock: Clock, E: Array, eta: Array, steps: Array, empty: Array, hessian_known: Array, xp: Any
) -> Clock:
    m, now = clock.m + 1, clock.now
    known = now.known + xp.where(hessian_known, E, 0)
    pull = one_minus_power(eta * xp.asarray(GRID, E.dtype), E, xp) / eta
    counts = Counts(now.n + 1, now.E + E, now.EE + E * E, known, now.pull + pull)
    return Clock(
        m,
        clock.t + steps,
        E,
        eta,
        xp.where(empty, m, clock.first_m),
        xp.where(empty, E, clock.first_E),
        xp.where(empty, eta, clock.first_eta),
        clock.bin,
        counts,
        clock.past,
    )


def mean_place(state: OneStepState) -> Array:
    """(d,) Σ E_m x̄_{m−1}/t over all rounds, those included that an interval leaves out."""
    xp = state.x.__array_namespace__()
    now, past, clock = state.now, state.past, state.clock
    total = xp.sum(clock.past.E[:, None] * past.c + past.Es, 0) + clock.now.E * now.c + now.Es
    return total / xp.maximum(xp.sum(clock.past.E) + clock.now.E, 1)


def one_minus_power(step: Array, E: Array, xp: Any = jnp) -> Array:
    """1 − (1 − ηλ)^E, without cancellation for small ηλ; bounded where a step is too long (ηλ > 2)."""
    rate = xp.maximum(1 - step, -1.0)
    size = xp.exp(E * xp.log(xp.maximum(xp.abs(rate), xp.finfo(step.dtype).tiny)))
    power = xp.where((rate < 0) & (E % 2 == 1), -size, size)
    return xp.where(step < 0.5, -xp.expm1(E * xp.log1p(-xp.minimum(step, 0.5))), 1 - power)


def roll(state: OneStepState, xp: Any = jnp) -> OneStepState:
    """Closes the open bin."""
    clock, b = state.clock, state.clock.bin

    def put(all_: Any, one: Any) -> Any:
        if xp is jnp:
            return lax.dynamic_update_index_in_dim(all_, one, b, 0)
        return xp.concatenate([all_[:b], one[None], all_[b + 1 :]])

    past, counts = (
        jax.tree.map(put, state.past, state.now),
        jax.tree.map(put, clock.past, clock.now),
    )
    fresh = jax.tree.map(xp.zeros_like, (state.now, clock.now))
    clock = clock._replace(bin=b + 1, now=fresh[1], past=counts)
    return state._replace(clock=clock, now=fresh[0], past=past)


def _changed(clock: Any, xp: Any) -> Any:
    """Whether the open bin has seen m, E or η change by the factor, and there is room for another."""
    m = clock.m + 1 >= FACTOR * clock.first_m
    E = (clock.E >= FACTOR * clock.first_E) | (FACTOR * clock.E <= clock.first_E)
    # A hair more than the factor: η of a constant E falls by it just where m has risen by it squared.
    eta = clock.eta * FACTOR**1.01 <= clock.first_eta
    return (clock.now.n > 0) & (clock.bin < BINS - 1) & (m | E | eta)


def roll_before(E: np.ndarray, eta: np.ndarray, dim: int = 0) -> np.ndarray:
    """The blocks, counted from 0, before which a bin is closed: what `update` does, for a whole plan."""
    del dim
    ends = np.cumsum(E)
    blocks = ends // BLOCK_STEPS  # where the average of each round is met
    found, first, bin_ = [], 0, 0
    for m in np.flatnonzero(np.diff(blocks) > 0):
        change = (
            (m + 2 >= FACTOR * (first + 1))
            | (E[m] >= FACTOR * E[first])
            | (FACTOR * E[m] <= E[first])
            | (eta[m] * FACTOR**1.01 <= eta[first])
        )
        if change and bin_ < BINS - 1:
            found.append(blocks[m] + 1)
            first, bin_ = m + 1, bin_ + 1
    return np.asarray(found, np.int64)
