"""Random words by counter, the choice of clients that take part in a round, and keys of random algorithms.

Words are computed elementwise over keys and counters, so that they vectorise along any axis.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxlsgd.core.algorithm import Participation
from jaxlsgd.core.checks import number, refusal
from jaxlsgd.core.problem import Array

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


class StreamKeys(NamedTuple):
    """The two words of a key, or of every replication's key."""

    high: Array  # () or (replications,) uint32
    low: Array  # () or (replications,) uint32


def threefry2x32(keys: StreamKeys, high: Array, low: Array) -> tuple[Array, Array]:
    """Return two words by Threefry-2x32 with 20 rounds, unrolled, elementwise over keys and counters.

    Reference: Salmon, Moraes, Dror, Shaw (2011), Parallel random numbers: as easy as 1, 2, 3.
    """
    schedule = (keys.high, keys.low, keys.high ^ keys.low ^ _PARITY)
    x0, x1 = high + schedule[0], low + schedule[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = (x1 << np.uint32(rotation)) | (x1 >> np.uint32(32 - rotation))
            x1 = x0 ^ x1
        x0 = x0 + schedule[(group + 1) % 3]
        x1 = x1 + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1


def check_key(key: Any) -> jax.Array:
    """Refuse anything but one typed threefry2x32 key."""
    if not isinstance(key, jax.Array) or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise refusal("key", "be a typed key such as jax.random.key(0)", key, code="type")
    if key.shape != ():
        raise refusal("key", "be one key", f"an array of keys of shape {key.shape}", code="shape")
    if str(jax.random.key_impl(key)) != "threefry2x32":
        rule = (
            "be of the threefry2x32 implementation, whose streams do not depend on tiles or devices"
        )
        raise refusal("key", rule, str(jax.random.key_impl(key)), code="type")
    return key


def algorithm_words(words: jax.Array) -> jax.Array:
    """Return the key words of a replication's algorithm, (2,), from those of its data.

    The counter is one that no observation reaches, so that the two streams never overlap.
    """
    key = jax.random.wrap_key_data(words, impl="threefry2x32")
    return jax.random.key_data(jax.random.fold_in(key, np.uint32(2**32 - 1)))


# Up to so many clients are compared pair by pair, which vectorises over replications; more are sorted.
FEW = 16
_MOST = 2**32 - 1


class Cohort(NamedTuple):
    """The clients that take part in a round of one replication."""

    words: Array  # (2,) uint32, the algorithm's key
    round: Array  # () uint32, m from 1
    clients: Array  # (n,) uint32, their numbers; if drawn by weight, a client may come twice
    weights: Array  # (n,) instead of p_k: Σ_i weights_i v_i is Σ_k p_k v_k on average


def first_cohort(how: Participation, words: Array, weights: Array, bounds: Any) -> Cohort:
    """Choose the clients of the first round.

    Args:
      how: how many clients, and how they are chosen.
      words: the algorithm's key of the replication, (2,) uint32.
      weights: p_k, (K,).
      bounds: `weight_bounds`, used if clients are drawn by weight.
    """
    return _chosen(how, words, jnp.ones((), jnp.uint32), weights, bounds)


def next_cohort(how: Participation, cohort: Cohort, weights: Array, bounds: Any) -> Cohort:
    """Choose the clients of the next round."""
    return _chosen(how, cohort.words, cohort.round + np.uint32(1), weights, bounds)


def _chosen(how: Participation, key: Array, round: Array, weights: Array, bounds: Any) -> Cohort:
    n, K = how.clients, weights.shape[0]
    words, _ = threefry2x32(StreamKeys(key[0], key[1]), round, jnp.arange(n, dtype=jnp.uint32))
    if how.by_weight:
        # Below the largest word, so that no client after the last one of positive weight is drawn.
        drawn = jnp.searchsorted(bounds, jnp.minimum(words, np.uint32(_MOST - 1)), side="right")
        return Cohort(key, round, drawn.astype(jnp.uint32), jnp.full(n, 1 / n, weights.dtype))
    index = floyd(words, K)
    return Cohort(key, round, index, weights[index] * jnp.asarray(K / n, weights.dtype))


def weight_bounds(weights: NDArray[np.float64]) -> NDArray[np.uint32]:
    """Return bounds Σ_{j≤k} p_j in units of 2⁻³²: words from bound k − 1 to below bound k draw client k."""
    bounds = np.minimum(np.floor(np.cumsum(weights) * 2.0**32), _MOST).astype(np.uint32)
    bounds[np.flatnonzero(weights)[-1] :] = _MOST
    return bounds


def floyd(words: Array, num_clients: int) -> Array:
    """Return n different clients of K, all sets equally likely (up to K/2³²), from n words, (n,) uint32.

    For j = K − n, …, K − 1 a number is drawn from 0, …, j, and replaced by j if it is taken already.

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
    """Return whether each number is taken already, without a loop over clients, (n,) bool.

    A number is taken if it was drawn before, or if it is a j that replaced an earlier draw, because that draw
    was taken in turn. Following this chain of earlier draws takes log₂ n steps of doubling length.
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
    """Return ⌊words · count / 2³²⌋ by 16-bit halves, because 64-bit integers may be disabled."""
    half, low = np.uint32(16), np.uint32(0xFFFF)
    a, b, c, d = words >> half, words & low, count >> half, count & low
    middle = (a * d & low) + (b * c & low) + (b * d >> half)
    return a * c + (a * d >> half) + (b * c >> half) + (middle >> half)


class Luck(NamedTuple):
    """The random state that a server keeps."""

    words: Any  # (2,) uint32, of the replication
    round: Any  # () uint32, completed rounds


def init_luck(x: Array, words: Array, weights: Array) -> Luck:
    """Return the state before the first round; an `Algorithm.init_server`."""
    del x, weights
    return Luck(words, jnp.zeros((), jnp.uint32))


def init_number(x: Array, client: Array) -> Array:
    """Return a client's number; an `Algorithm.init_client`."""
    del x
    return client


def after_round(luck: Luck) -> Luck:
    """Return the state one round later."""
    return luck._replace(round=luck.round + np.uint32(1))


def client_uniform(luck: Luck, client: Array) -> Array:
    """Return a client's uniform number on [0, 1) of the round; float32 in every precision."""
    key = jax.random.wrap_key_data(luck.words, impl="threefry2x32")
    key = jax.random.fold_in(jax.random.fold_in(key, luck.round), client)
    return jax.random.uniform(key, (), jnp.float32)


def probability(argument: str, value: Any) -> float:
    """Return a probability below 1."""
    if not 0 <= number(argument, value) < 1:
        raise refusal(argument, "be in [0, 1)", value)
    return float(value)
