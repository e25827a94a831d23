"""Batch means with growing batches: the spread of sums of x̄_m over spans of the path.

Near x* the sum Σ_{k∈batch} (x̄_k − x*) has covariance V·Σ_{k∈batch} 1/E_k with V = G⁻¹SG⁻ᵀ: it moves like a Brownian
motion whose time is s_m = Σ_{n≤m} 1/E_n, the information time. (Round k moves the server by −γ_k h_k/E_k, where h_k
is the sum of its E_k mean gradients; their mean h_k/E_k is G(x̄_{k−1} − x*) plus noise of covariance S/E_k. Divided by
γ_k and added up over a long batch, the moves vanish and leave that.) So a batch has the length τ = Σ 1/E_k, not its
number n of rounds. What decides where batches may end is how fast x̄ forgets: over m^α rounds, as γ_m = γ_0 m^(−α),
whatever E_m is. So batches begin at rounds a_k = ⌊C k^{2/(1−α)}⌋, as on one machine.

With t_i the first round of the batch that round i is in, B_i = Σ_{k=t_i..i} (x̄_k − ȳ_T), τ_i = Σ_{k=t_i..i} 1/E_k,

    overlapping       V̂ = Σ_i (1/E_i) B_i B_iᵀ / Σ_i τ_i/E_i             all rounds i
    non-overlapping   V̂ = Σ_i B_i B_iᵀ / Σ_i τ_i                         last rounds i of batches, and T

and Cov(ȳ_T) ≈ V̂ s_T/T². Rounds i are weighted by 1/E_i because that is the time they last. E_m = 1 is the
published method.
"""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.estimator import Accumulator, Estimator, Horizon, Measurement, Sync
from jaxlsgd.core.problem import Array, Params, flatten
from jaxlsgd.core.registry import register
from jaxlsgd.inference.laws.standard import NORMAL
from jaxlsgd.inference.sums import compensated_add, widened

Batches = Literal["overlapping", "nonoverlapping"]
Mode = Literal["full", "diagonal"]
_LAST = np.iinfo(np.int32).max


class BatchState(NamedTuple):
    """Sums over batches, centred at the running mean ȳ_m; ω is 1/E_i, or 1 for whole batches."""

    A: Array  # (d, d) Σ ω B_i B_iᵀ, or (d,) in diagonal mode
    b: Array  # (d,) Σ ω n_i B_i
    B: Array  # (d,) of the open batch
    mean: Array  # (d,) ȳ_m
    lost: Array  # (d,) rounding error of ȳ_m so far
    q: Array  # () Σ ω n_i²
    q_lost: Array  # ()
    length: Array  # () Σ ω τ_i
    length_lost: Array  # ()
    s: Array  # () Σ 1/E_n
    s_lost: Array  # ()
    tau: Array  # () Σ 1/E_n over the open batch
    n: Array  # () int32, rounds of the open batch
    k: Array  # () int32, batches begun
    m: Array  # () int32


@functools.cache
def batch_sums(kind: Batches, mode: Mode, alpha: float, C: float) -> Accumulator:
    """Return the sums above as a streaming statistic.

    With δ = ȳ_m − ȳ_{m−1} each round does

        A ← A − bδᵀ − δbᵀ + qδδᵀ;   b ← b − qδ;   B ← B − nδ
        if a batch begins: B, n, τ ← 0 (after A += BBᵀ, b += nB, q += n² if batches do not overlap)
        B ← B + x̄_m − ȳ_m;   n ← n + 1;   τ ← τ + 1/E_m
        if they do: A += BBᵀ/E_m;   b += nB/E_m;   q += n²/E_m;   length += τ/E_m
    """
    starts = np.append(batch_starts(alpha, C), _LAST).astype(np.int32)
    overlapping = kind == "overlapping"

    def outer(u: Array, v: Array) -> Array:
        return u * v if mode == "diagonal" else u[:, None] * v[None, :]

    def init(params: Params) -> BatchState:
        y = jnp.zeros_like(widened(flatten(params)))
        zero, count = jnp.zeros((), y.dtype), jnp.zeros((), jnp.int32)
        return BatchState(outer(y, y), y, y, y, y, *[zero] * 7, *[count] * 3)

    def update(state: BatchState, sync: Sync) -> BatchState:
        x = widened(flatten(sync.params))
        rate = 1 / jnp.asarray(sync.E, x.dtype)
        m = state.m + 1
        delta = ((x - state.mean) - state.lost) / m.astype(x.dtype)
        mean, lost = compensated_add(state.mean, state.lost, delta)
        c = state.b - (state.q / 2) * delta
        A = state.A - outer(c, delta) - outer(delta, c)
        b = state.b - state.q * delta
        B, n = state.B - state.n.astype(x.dtype) * delta, state.n
        begins = m >= jnp.asarray(starts)[state.k]
        rounds = n.astype(x.dtype)
        add_to_q = jnp.zeros_like(rate)
        if not overlapping:
            A = A + jnp.where(begins, outer(B, B), 0)
            b = b + jnp.where(begins, rounds * B, 0)
            add_to_q = jnp.where(begins, rounds * rounds, 0)
        B = jnp.where(begins, 0, B) + ((x - mean) - lost)
        n = jnp.where(begins, 0, n) + 1
        tau = jnp.where(begins, 0, state.tau) + rate
        length, length_lost = state.length, state.length_lost
        if overlapping:
            rounds = n.astype(x.dtype)
            A = A + rate * outer(B, B)
            b = b + (rate * rounds) * B
            add_to_q = rate * rounds * rounds
            length, length_lost = compensated_add(length, length_lost, rate * tau)
        q, q_lost = compensated_add(state.q, state.q_lost, add_to_q)
        s, s_lost = compensated_add(state.s, state.s_lost, rate)
        k = state.k + begins.astype(jnp.int32)
        numbers = (q, q_lost, length, length_lost, s, s_lost, tau)
        return BatchState(A, b, B, mean, lost, *numbers, n, k, m)

    shared = BatchState._fields[5:]
    return Accumulator(init, update, shared=shared)


def batch_starts(alpha: float, C: float) -> np.ndarray:
    """Return the first rounds a_k = ⌊C k^{2/(1−α)}⌋ of batches, from round 1 to the largest int32."""
    power = 2 / (1 - alpha)
    last = int((_LAST / C) ** (1 / power)) + 1
    found = np.floor(C * np.arange(1.0, last + 1) ** power)
    return np.unique(np.maximum(found[found < _LAST], 1)).astype(np.int64)


@register("method", brief="batches")
def growing_batches(
    batches: Batches = "overlapping",
    *,
    mode: Mode = "full",
    alpha: float = 0.505,
    C: float = 1.0,
    name: str | None = None,
) -> Estimator:
    """Batch means over growing batches: ȳ_j ± z √(V̂_jj s_T)/T with V̂ the spread of batches' sums.

    At finite horizons intervals are too short: batches not much longer than the memory of x̄ have too small a
    spread, and there are few of them.

    Args:
      batches: "overlapping", or "nonoverlapping".
      mode: "full" keeps V̂ as (d, d), which joint tests need; "diagonal" keeps its diagonal in O(d).
      alpha: α of the step size γ_m = γ_0 m^(−α), in [1/2, 1); it decides where batches begin.
      C: of a_k = ⌊C k^{2/(1−α)}⌋, the first round of batch k.
      name: name in tables; made from the arguments if None.

    Returns:
      An `Estimator`. It needs neither gradient nor Hessian, and no communication; it keeps d² + 4d numbers.

    Reference: Zhu, Chen, Wu (2023), Online covariance matrix estimation in stochastic gradient descent, JASA 118.
    """
    checks.choice("batches", batches, Batches)
    checks.choice("mode", mode, Mode)
    step_exponent(alpha)
    checks.positive("C", C)
    return Estimator(
        name=name or f"growing_batches[{batches}]",
        accumulators=(batch_sums(batches, mode, float(alpha), float(C)),),
        measure=_measure_overlapping if batches == "overlapping" else _measure_apart,
        law=NORMAL,
        matrix=None if mode == "diagonal" else _MATRICES[batches],
        standard_error=True,
        label="batch means, overlapping" if batches == "overlapping" else "batch means",
        cost="no gradients, no communication; memory d² + 4d (5d if diagonal)",
    )


def step_exponent(alpha: float) -> float:
    """Return α; refuse one outside [1/2, 1)."""
    if not 0.5 <= checks.number("alpha", alpha) < 1:
        raise refusal("alpha", "be in [1/2, 1)", alpha)
    return float(alpha)


def _covariance(state: BatchState, A: Array, length: Array) -> Array:
    """Return V̂ s_T/T²."""
    rounds = jnp.maximum(state.m, 1).astype(A.dtype)
    return A / jnp.where(length > 0, length, 1) * (state.s / rounds / rounds)


def _overlapping(states: tuple[BatchState, ...], horizon: Horizon | None) -> Array:
    del horizon
    return _covariance(states[0], states[0].A, states[0].length)


def _apart(states: tuple[BatchState, ...], horizon: Horizon | None) -> Array:
    """Return the covariance with the open batch included."""
    del horizon
    state = states[0]
    B = state.B
    A = state.A + (B * B if state.A.ndim == 1 else B[:, None] * B[None, :])
    return _covariance(state, A, state.s)


def _measure_overlapping(states: tuple[BatchState, ...], horizon: Horizon | None) -> Measurement:
    return _measurement(states[0], _overlapping(states, horizon), states[0].m < 2)


def _measure_apart(states: tuple[BatchState, ...], horizon: Horizon | None) -> Measurement:
    # A single batch is the whole path, whose sum around its mean is 0.
    return _measurement(states[0], _apart(states, horizon), states[0].k < 2)


def _measurement(state: BatchState, covariance: Array, empty: Array) -> Measurement:
    variance = jnp.diagonal(covariance) if covariance.ndim == 2 else covariance
    # Negative values are rounding errors: they are floored and reported.
    scale = jnp.sqrt(jnp.where(variance < 0, 0, variance))
    scale = jnp.where(empty, jnp.inf, scale)
    return Measurement(state.mean + state.lost, scale, jnp.any(variance < 0))


_MATRICES = {"overlapping": _overlapping, "nonoverlapping": _apart}
