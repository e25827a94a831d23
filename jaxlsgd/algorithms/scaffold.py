"""SCAFFOLD: control variates correct a client's steps for the difference of its gradients from the mean."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp

from jaxlsgd.core import checks
from jaxlsgd.core.algorithm import Algorithm, Client, Round
from jaxlsgd.core.problem import Array
from jaxlsgd.core.registry import register


@register("algorithm")
@functools.cache
def scaffold(rate: float = 1.0) -> Algorithm:
    """SCAFFOLD: d_k = g_k − c_k + c, with controls c_k that the clients keep and their mean c.

    After a round, c_k ← c_k − c + (x̄ − x_k)/(E_m η_m), the mean of the client's gradients on its way
    (option II), c ← Σ_k p_k c_k and x̄ ← x̄ + rate · Σ_k p_k (x_k − x̄). All clients take part. In the first
    round, with controls of 0, this is Local SGD, and in all rounds if E_m = 1, as Σ_k p_k (c − c_k) = 0.

    Outside the paper's theory: a step reuses the noise of the round before.

    Args:
      rate: the server's learning rate, greater than 0.

    Example::

        simulate(key, problem, plan, replications=100, algorithm=scaffold())

    Reference: Karimireddy, Kale, Mohri, Reddi, Stich, Suresh (2020), SCAFFOLD: Stochastic controlled
    averaging for federated learning.
    """
    rate = checks.positive("rate", rate)

    def direction(gradient: Array, client: Client, round: Round) -> tuple[Array, Any]:
        return gradient + round.server - client.memory, client.local

    def send(client: Client, round: Round) -> tuple[Any, Any]:
        new = client.memory - round.server + (round.params - client.x) / (round.E * round.eta)
        return new - client.memory, new

    def receive(moved: Array, message: Any, round: Round) -> tuple[Array, Any]:
        return round.params + rate * moved, round.server + message

    zeros = jnp.zeros_like
    return Algorithm(
        "scaffold",
        zeros,
        zeros,
        direction=direction,
        send=send,
        receive=receive,
        moves_by_gradients=True,  # Σ_k p_k (c − c_k) = 0
    )
