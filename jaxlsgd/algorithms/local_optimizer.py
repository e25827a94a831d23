"""An optax transformation in the local step, restarted each round."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import optax

from jaxlsgd.core import checks
from jaxlsgd.core.algorithm import Algorithm, Client, Round
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.problem import Array
from jaxlsgd.core.registry import register


@functools.cache
def local_optimizer(
    transform: optax.GradientTransformation, name: str = "local_optimizer"
) -> Algorithm:
    """Clients follow an optax transformation of unit rate; the engine multiplies by η_m.

    Args:
      transform: such as `optax.sgd(1.0, momentum=0.9)`; its state is reset in every round.
      name: for tables.

    Example::

        momentum = local_optimizer(optax.sgd(1.0, momentum=0.9))
        simulate(key, problem, plan, replications=100, algorithm=momentum)
    """

    if not isinstance(transform, optax.GradientTransformation):
        raise refusal("transform", "be an optax transformation such as optax.sgd(1.0)", transform)

    def begin(memory: Any, round: Round) -> Any:
        del memory
        return transform.init(round.params)

    def direction(gradient: Array, client: Client, round: Round) -> tuple[Any, Any]:
        del round
        updates, local = transform.update(gradient, client.local, client.x)
        return -updates, local  # type: ignore[operator]

    return Algorithm(name, begin=begin, direction=direction)


@register("algorithm")
@functools.cache
def local_momentum(momentum: float = 0.9) -> Algorithm:
    """Heavy-ball steps: v_k ← momentum · v_k + g_k, d_k = v_k, and a client keeps its v_k.

    Steps become 1/(1 − momentum) times as long: choose γ_0 smaller by that factor. `local_optimizer(optax.sgd(1.0,
    momentum=...))` resets v_k at the end of a round; Yu, Jin and Yang average it.

    Outside the paper's theory.

    Args:
      momentum: in [0, 1); 0 is Local SGD.

    Reference: Yu, Jin, Yang (2019), On the linear speedup analysis of communication efficient momentum
    SGD for distributed non-convex optimization.
    """
    if not 0 <= checks.number("momentum", momentum) < 1:
        raise refusal("momentum", "be in [0, 1)", momentum)

    def begin(memory: Any, round: Round) -> Any:
        del round
        return memory

    def direction(gradient: Array, client: Client, round: Round) -> tuple[Array, Any]:
        del round
        velocity = momentum * client.local + gradient
        return velocity, velocity

    def send(client: Client, round: Round) -> tuple[Any, Any]:
        del round
        return None, client.local

    return Algorithm(
        "local_momentum", init_client=jnp.zeros_like, begin=begin, direction=direction, send=send
    )
