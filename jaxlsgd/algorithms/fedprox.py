"""FedProx: a client minimises f_k(x) + μ/2 ‖x − x̄‖², one gradient step at a time."""

from __future__ import annotations

import functools
from typing import Any

from jaxlsgd.core import checks
from jaxlsgd.core.algorithm import Algorithm, Client, Round
from jaxlsgd.core.problem import Array
from jaxlsgd.core.registry import register


@register("algorithm")
@functools.cache
def fedprox(mu: float) -> Algorithm:
    """Local SGD with a pull towards the average: d_k = g_k + μ (x_k − x̄).

    Args:
      mu: μ, at least 0; 0 is Local SGD.

    Example::

        simulate(key, problem, plan, replications=100, algorithm=fedprox(mu=0.1))

    Reference: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith (2020), Federated optimization in
    heterogeneous networks.
    """
    mu = checks.scale("mu", mu)

    def direction(gradient: Array, client: Client, round: Round) -> tuple[Array, Any]:
        return gradient + mu * (client.x - round.params), client.local

    return Algorithm("fedprox", direction=direction)
