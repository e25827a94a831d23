"""Federated algorithms, one file each. `local_sgd` is the paper's Algorithm 1."""

from jaxlsgd.algorithms.fedprox import fedprox
from jaxlsgd.algorithms.local_optimizer import local_optimizer
from jaxlsgd.algorithms.local_sgd import Rounds, RoundState, local_sgd, plain_rounds
from jaxlsgd.algorithms.server_optimizer import server_momentum, server_optimizer

__all__ = [
    "RoundState",
    "Rounds",
    "fedprox",
    "local_optimizer",
    "local_sgd",
    "plain_rounds",
    "server_momentum",
    "server_optimizer",
]
