"""Who takes part in a round: n of K clients, from random words by counter, in memory that depends on n alone.

The i-th choice of round m = 1, 2, … takes its word from threefry2x32 under the algorithm's key of the
replication, at the counter (m, i). Nothing else enters, so that it is the same for any tile, device or order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxlsgd.core.algorithm import Participation
from jaxlsgd.core.problem import Array
from jaxlsgd.core.threefry import StreamKeys, threefry2x32

# Up to so many clients are compared one by one, which vectorises over replications; of more, the words are sorted.
FEW = 16
_MOST = 2**32 - 1


class Cohort(NamedTuple):
    """Those who take part in a round, of one replication."""

    words: Array  # (2,) uint32, the algorithm's key
    round: Array  # () uint32, m from 1 on
    clients: Array  # (n,) uint32, their numbers; by weight, one may come twice
    weights: Array  # (n,) what takes the place of p_k: Σ_i weights_i v_i is Σ_k p_k v_k on average


def first_cohort(how: Participation, words: Array, weights: Array, bounds: Any) -> Cohort:
    """Those who take part in the first round.

    Args:
      how: how many they are, and how they are chosen.
      words: the algorithm's key of the replication, (2,) uint32.
      weights: p_k, (K,).
      bounds: `weight_bounds` where clients are drawn by weight.
    """
    return _chosen(how, words, jnp.ones((), jnp.uint32), weights, bounds)


def next_cohort(how: Participation, cohort: Cohort, weights: Array, bounds: Any) -> Cohort:
    """Those who take part in the round after."""
    return _chosen(how, cohort.words, cohort.round + np.uint32(1), weights, bounds)


def _chosen(how: Participation, key: Array, round: Array, weights: Array, bounds: Any) -> Cohort:
    n, K = how.clients, weights.shape[0]
    words, _ = threefry2x32(StreamKeys(key[0], key[1]), round, jnp.arange(n, dtype=jnp.uint32))
    if how.by_weight:
        # Below the largest word, so that nobody is drawn behind the last client of positive weight.
        drawn = jnp.searchsorted(bounds, jnp.minimum(words, np.uint32(_MOST - 1)), side="right")
        return Cohort(key, round, drawn.astype(jnp.uint32), jnp.full(n, 1 / n, weights.dtype))
    index = floyd(words, K)
    return Cohort(key, round, index, weights[index] * jnp.asarray(K / n, weights.dtype))


def weight_bounds(weights: NDArray[np.float64]) -> NDArray[np.uint32]:
    """Client k is drawn by words from bound k − 1 to below bound k: Σ_{j≤k} p_j in units of 2⁻³²."""
    bounds = np.minimum(np.floor(np.cumsum(weights) * 2.0**32), _MOST).astype(np.uint32)
    bounds[np.flatnonzero(weights)[-1] :] = _MOST
    return bounds


def floyd(words: Array, num_clients: int) -> Array:
    """n different clients of K, all sets equally likely (up to K/2³²), from n words, (n,) uint32.

    For j = K − n, …, K − 1 a number is drawn from 0, …, j, and j taken instead if it is there already.

    Reference: Bentley, Floyd (1987), Programming pearls: a sample of brilliance.
    """
    n = words.shape[0]
    last = np.arange(num_clients - n, num_clients, dtype=np.uint32)
    drawn = _scaled(words, last + np.uint32(1))
    taken = _taken_by_pairs(drawn, last) if n <= FEW else taken_by_sorting(drawn, num_clients)
    return jnp.where(taken, last, drawn)


def _taken_by_pairs(drawn: Array, last: NDArray[np.uint32]) -> Array:
    found, chosen = [], []
    for i in range(drawn.shape[0]):
        there = [one == drawn[i] for one in chosen]
        found.append(jnp.any(jnp.stack(there), axis=0) if there else jnp.zeros((), bool))
        chosen.append(jnp.where(found[-1], last[i], drawn[i]))
    return jnp.stack(found)


def taken_by_sorting(drawn: Array, num_clients: int) -> Array:
    """Whether a number is there already, with no loop over clients, (n,) bool.

    It is if it was drawn before, or if it is some j that was taken instead of another: which is so if that
    other was there already. So one looks along a chain of earlier draws, in steps that double.
    """
    n = drawn.shape[0]
    order = jnp.argsort(drawn, stable=True)
    ascending = drawn[order]
    again = jnp.concatenate([jnp.zeros(1, bool), ascending[1:] == ascending[:-1]])
    taken = jnp.zeros(n, bool).at[order].set(again)
    own = np.arange(n, dtype=np.int32)
    of = drawn.astype(jnp.int32) - np.int32(num_clients - n)
    before = jnp.where((of >= 0) & (of < own), of, own)
    for _ in range((n - 1).bit_length()):
        taken, before = taken | taken[before], before[before]
    return taken


def _scaled(words: Array, count: NDArray[np.uint32]) -> Array:
    """⌊words · count / 2³²⌋ by halves, as there may be no integers of 64 bits."""
    half, low = np.uint32(16), np.uint32(0xFFFF)
    a, b, c, d = words >> half, words & low, count >> half, count & low
    middle = (a * d & low) + (b * c & low) + (b * d >> half)
    return a * c + (a * d >> half) + (b * c >> half) + (middle >> half)
