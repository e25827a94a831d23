"""Client dropout: what a client has computed in a round may be lost."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp

from jaxlsgd.algorithms import _luck
from jaxlsgd.core.algorithm import Algorithm, Client, Round
from jaxlsgd.core.problem import Array
from jaxlsgd.core.registry import register


@register("algorithm")
@functools.cache
def client_dropout(probability: float) -> Algorithm:
    """Local SGD in which a client's round is lost with a probability; the others share its weight.

    In every round every client is lost by itself, and x̄ moves by Σ_k p_k (x_k − x̄)/Σ_k p_k over those that
    are left, or not at all if nobody is. Its steps are computed all the same.

    Outside the paper's theory: which clients are left is noise of its own, once a round, and where clients
    differ it does not shrink with E_m. `plug_in` does not see it, and `one_step` uses the gradients that were lost.

    Args:
      probability: of being lost, in [0, 1); 0 is Local SGD.
    """
    probability = _luck.probability("probability", probability)

    def send(client: Client, round: Round) -> tuple[Any, Any]:
        there = _luck.client_uniform(round.server, client.memory) >= probability
        there = there.astype(client.x.dtype)
        return (there * (client.x - round.params), there), client.memory

    def receive(moved: Array, message: Any, round: Round) -> tuple[Array, Any]:
        del moved
        total, weight = message
        mean = total / jnp.where(weight > 0, weight, 1)
        return round.params + mean, _luck.after_round(round.server)

    return Algorithm(
        "client_dropout",
        _luck.init_luck,
        _luck.init_number,
        send=send,
        receive=receive,
        random=True,
        # Its message takes the place of its model; whether it arrives is no affair of what was sent.
        sends=lambda dim: dim,
        moves_by_gradients=False,
    )
