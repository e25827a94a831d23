"""Chance in an algorithm: draws by counter, the same for any tile, device or order.

Round m of a replication has a key of its own, which everybody knows; a client draws under its number.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlsgd.core.checks import number, refusal
from jaxlsgd.core.problem import Array


class Luck(NamedTuple):
    """What a server keeps of chance."""

    words: Any  # (2,) uint32, of the replication
    round: Any  # () uint32, rounds that are over


def init_luck(x: Array, words: Array, weights: Array) -> Luck:
    """Before the first round; an `Algorithm.init_server`."""
    del x, weights
    return Luck(words, jnp.zeros((), jnp.uint32))


def init_number(x: Array, client: Array) -> Array:
    """A client's number; an `Algorithm.init_client`."""
    del x
    return client


def after_round(luck: Luck) -> Luck:
    """One round later."""
    return luck._replace(round=luck.round + np.uint32(1))


def round_key(luck: Luck) -> Array:
    """The key of the round that runs."""
    return jax.random.fold_in(jax.random.wrap_key_data(luck.words, impl="threefry2x32"), luck.round)


def client_uniform(luck: Luck, client: Array) -> Array:
    """The client's own number of the round, uniform on [0, 1); float32 whatever the run's precision."""
    return jax.random.uniform(jax.random.fold_in(round_key(luck), client), (), jnp.float32)


def probability(argument: str, value: Any) -> float:
    """A probability that is not 1."""
    if not 0 <= number(argument, value) < 1:
        raise refusal(argument, "be in [0, 1)", value)
    return float(value)
