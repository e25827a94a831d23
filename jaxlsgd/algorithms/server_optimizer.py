"""Server optimisers (FedAvgM, FedAdam, …): the server uses −Σ_k p_k (x_k − x̄) as a gradient."""

from __future__ import annotations

import functools
from typing import Any

import optax

from jaxlsgd.core import checks
from jaxlsgd.core.algorithm import Algorithm, Round
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.problem import Array
from jaxlsgd.core.registry import register


@functools.cache
def server_optimizer(
    optimizer: optax.GradientTransformation, name: str = "server_optimizer"
) -> Algorithm:
    """Return Local SGD whose server applies an optax update to the clients' mean movement.

    Args:
      optimizer: an optax optimiser with its learning rate; `optax.sgd(1.0)` is Local SGD.
      name: for tables.

    Example::

        simulate(key, problem, plan, replications=100, algorithm=server_optimizer(optax.adam(0.01)))

    Reference: Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan (2021), Adaptive
    federated optimization.
    """

    if not isinstance(optimizer, optax.GradientTransformation):
        raise refusal(
            "optimizer", "be an optax optimiser such as optax.adam(0.01)", optimizer, code="type"
        )

    def receive(moved: Array, message: Any, round: Round) -> tuple[Any, Any]:
        del message
        updates, server = optimizer.update(-moved, round.server, round.params)
        return optax.apply_updates(round.params, updates), server

    return Algorithm(name, init_server=optimizer.init, receive=receive)


@register("algorithm")
@functools.cache
def server_momentum(momentum: float = 0.9, rate: float = 1.0) -> Algorithm:
    """FedAvgM: v ← momentum · v − Σ_k p_k (x_k − x̄);  x̄ ← x̄ − rate · v.

    Args:
      momentum: in [0, 1); 0 with rate 1 is Local SGD.
      rate: the server's learning rate, greater than 0.

    Reference: Hsu, Qi, Brown (2019), Measuring the effects of non-identical data distribution for
    federated visual classification.
    """
    if not 0 <= checks.number("momentum", momentum) < 1:
        raise refusal("momentum", "be in [0, 1)", momentum)
    checks.positive("rate", rate)
    return server_optimizer(optax.sgd(rate, momentum=momentum), "server_momentum")


@register("algorithm")
@functools.cache
def server_adam(
    rate: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, epsilon: float = 1e-3
) -> Algorithm:
    """FedAdam: the server makes Adam's step along the clients' mean movement.

    Outside the paper's theory. Adam divides the shrinking movement by its own size, so that x̄ does not converge:
    it stays about `rate` away from x*, however small the clients' steps become.

    Args:
      rate: the server's learning rate, greater than 0.
      beta1: decay of the mean movement, in [0, 1).
      beta2: decay of its square, in [0, 1).
      epsilon: added to the root of that square, greater than 0.

    Reference: Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan (2021), Adaptive
    federated optimization.
    """
    for name, beta in (("beta1", beta1), ("beta2", beta2)):
        if not 0 <= checks.number(name, beta) < 1:
            raise refusal(name, "be in [0, 1)", beta)
    checks.positive("rate", rate)
    checks.positive("epsilon", epsilon)
    return server_optimizer(optax.adam(rate, beta1, beta2, epsilon), "server_adam")
