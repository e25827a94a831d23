"""Stragglers: clients that do not get through all local steps of a round."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxlsgd.algorithms import _luck
from jaxlsgd.core.algorithm import Algorithm, Client, Round
from jaxlsgd.core.problem import Array
from jaxlsgd.core.registry import register


class _Work(NamedTuple):
    """A client's way through a round."""

    made: Any  # () steps so far
    most: Any  # () steps that it will make


@register("algorithm")
@functools.cache
def stragglers(probability: float) -> Algorithm:
    """Local SGD in which slow clients make 1 to E_m steps, each number equally likely.

    In every round every client is slow with the given probability, by itself. What it sends after
    fewer steps is averaged like the rest. All are slow equally often, so that x* stays where it is to first
    order in η; the server moves (1 − probability · (1 − 1/E_m)/2) times as far. The engine computes the steps
    that a slow client leaves out, and drops them.

    Outside the paper's theory, where all clients make E_m steps. `plug_in` counts steps that were not made, and
    `one_step` uses their gradients.

    Args:
      probability: of being slow, in [0, 1); 0 is Local SGD.

    Reference: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith (2020), Federated optimization in
    heterogeneous networks, whose experiments have such clients.
    """
    probability = _luck.probability("probability", probability)

    def begin(memory: Any, round: Round) -> _Work:
        # One number decides both: below the probability it is uniform there, and says how far.
        u = _luck.client_uniform(round.server, memory).astype(round.params.dtype)
        slow = u < probability
        share = u / (probability if probability else 1.0)
        some = jnp.minimum(jnp.floor(share * round.E) + 1, round.E)
        return _Work(jnp.zeros_like(u), jnp.where(slow, some, round.E))

    def direction(gradient: Array, client: Client, round: Round) -> tuple[Array, Any]:
        del round
        made, most = client.local
        return jnp.where(made < most, gradient, 0), _Work(made + 1, most)

    def receive(moved: Array, message: Any, round: Round) -> tuple[Array, Any]:
        del message
        return round.params + moved, _luck.after_round(round.server)

    return Algorithm(
        "stragglers",
        _luck.init_luck,
        _luck.init_number,
        begin=begin,
        direction=direction,
        receive=receive,
        random=True,
    )
