"""An optax transformation in the local step, restarted each round."""

from __future__ import annotations

import functools
from typing import Any

import optax

from jaxlsgd.core.algorithm import Algorithm, Client, Round
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.problem import Array


@functools.cache
def local_optimizer(
    transform: optax.GradientTransformation, name: str = "local_optimizer"
) -> Algorithm:
    """Clients follow an optax transformation of unit rate; the engine multiplies by η_m.

    Args:
      transform: such as `optax.sgd(1.0, momentum=0.9)`; begun anew in every round.
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
