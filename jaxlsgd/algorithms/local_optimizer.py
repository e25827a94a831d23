"""Local steps that are not along the plain gradient: optax transformations, momentum, Adam, clipping."""

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
        raise refusal(
            "transform", "be an optax transformation such as optax.sgd(1.0)", transform, code="type"
        )

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


@register("algorithm")
@functools.cache
def local_adam(
    rate: float = 0.1, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8
) -> Algorithm:
    """Adam's steps, whose moments begin anew in every round.

    A coordinate moves by about rate · η_m per step whatever its gradient is, so the average settles beside x*
    unless clients are alike. Outside the paper's theory; `one_step` needs no more than that it comes near.

    Args:
      rate: > 0, times η_m.
      beta1: in [0, 1), of the mean of the gradients.
      beta2: in [0, 1), of the mean of their squares.
      epsilon: > 0, added to the root of that mean.

    Reference: Kingma, Ba (2015), Adam: a method for stochastic optimization.
    """
    rate, epsilon = checks.positive("rate", rate), checks.positive("epsilon", epsilon)
    for name, value in (("beta1", beta1), ("beta2", beta2)):
        if not 0 <= checks.number(name, value) < 1:
            raise refusal(name, "be in [0, 1)", value)
    return local_optimizer(optax.adam(rate, beta1, beta2, epsilon), "local_adam")


@register("algorithm")
@functools.cache
def clipping(norm: float) -> Algorithm:
    """Clients shorten gradients that are longer than `norm` to that length, as private training does.

    The mean of shortened gradients is not 0 at x*, so the average settles beside it. Outside the paper's theory;
    `one_step` needs no more than that it comes near.

    Args:
      norm: > 0, the longest gradient of an observation.

    Reference: Abadi et al. (2016), Deep learning with differential privacy.
    """
    norm = checks.positive("norm", norm)

    def direction(gradient: Array, client: Client, round: Round) -> tuple[Array, Any]:
        del round
        length = jnp.sqrt(jnp.sum(gradient**2))
        return gradient * jnp.minimum(1, norm / jnp.maximum(length, norm)), client.local

    return Algorithm("clipping", direction=direction)
