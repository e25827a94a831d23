"""Federated algorithms, one file each; `local_sgd` is the paper's Algorithm 1. Start there.

The contract is in `core.algorithm`, and the fast version of the rounds in `engine`.
"""

from jaxlsgd.algorithms.fedprox import fedprox
from jaxlsgd.algorithms.local_optimizer import clipping, local_adam, local_momentum, local_optimizer
from jaxlsgd.algorithms.local_sgd import Rounds, RoundState, local_sgd, plain_rounds
from jaxlsgd.algorithms.participation import client_dropout, participation, stragglers
from jaxlsgd.algorithms.scaffold import scaffold
from jaxlsgd.algorithms.server_optimizer import server_adam, server_momentum, server_optimizer

__all__ = [
    "RoundState",
    "Rounds",
    "client_dropout",
    "clipping",
    "fedprox",
    "local_adam",
    "local_momentum",
    "local_optimizer",
    "local_sgd",
    "participation",
    "plain_rounds",
    "scaffold",
    "server_adam",
    "server_momentum",
    "server_optimizer",
    "stragglers",
]
