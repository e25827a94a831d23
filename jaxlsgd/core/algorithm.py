"""The contract of a federated algorithm, written for one client and one replication.

Local SGD is the algorithm that adds nothing. In round m, from the server's x̄ on, client k repeats

    x_k ← x_k − η_m d_k,     d_k = direction(g_k, ...),     g_k = ∇f_k(x_k; ξ_k)

and the server makes the next x̄ of how far the clients moved on average, Σ_k p_k (x_k − x̄), and of what
else they send. As steps add up, Σ_k p_k x_k can be carried along with one sum over clients per step: that
holds for every algorithm of this form, and no algorithm has to say so.

Where an algorithm declares a `Participation`, only n clients take part in a round, chosen anew each time, with
weights that make every Σ right on average. The others do nothing, and nothing is computed for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxlsgd.core import checks
from jaxlsgd.core.identity import COUNTS_IF_SET
from jaxlsgd.core.problem import Array


@dataclasses.dataclass(frozen=True)
class Participation:
    """How many clients take part in a round, and how they are chosen.

    Attributes:
      clients: n. The chosen ones are `core.cohort.Cohort`.
      by_weight: if so, n are drawn by p_k, with replacement, and each counts for 1/n. If not, n different
        ones, all sets equally likely, and client k counts for p_k K/n.
    """

    clients: int
    by_weight: bool = False

    def __post_init__(self) -> None:
        checks.count("clients", self.clients, 1)


class Round(NamedTuple):
    """What everybody knows in round m."""

    params: Any  # (d,) x̄ where the round began
    server: Any  # what the server keeps
    E: Any  # () E_m
    eta: Any  # () η_m


class Client(NamedTuple):
    """What client k knows."""

    x: Array  # (d,) x_k
    local: Any  # made anew when a round begins
    memory: Any  # lasts from round to round; changes only where a round ends


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """A federated algorithm as pure functions on flat parameter vectors (d,).

    A part that is None does what Local SGD does, and costs nothing. Builders are cached
    (`functools.cache`), because two objects with equal functions would be compiled twice.

    Example, FedProx, whose clients minimise f_k(x) + μ/2 ‖x − x̄‖²::

        @functools.cache
        def fedprox(mu: float) -> Algorithm:
            def direction(gradient, client, round):
                return gradient + mu * (client.x - round.params), client.local

            return Algorithm("fedprox", direction=direction)

    Attributes:
      name: short, for tables and studies.
      init_server: `x_0 → server`, what the server keeps; nothing if None.
      init_client: `x_0 → memory`, what a client keeps from round to round; nothing if None.
      begin: `(memory, round) → local`, what a client makes when a round begins; nothing if None.
      direction: `(gradient, client, round) → (d_k, local)`, one local step; the gradient if None.
      send: `(client, round) → (message, memory)`, what a client sends when a round ends; the server
        receives Σ_k p_k message. Nothing if None.
      receive: `(moved, message, round) → (x̄, server)`, how the server takes in the mean movement
        Σ_k p_k (x_k − x̄) and the mean message; x̄ + moved if None.
      within_theory: whether the paper's theory covers it. Where it does not, intervals are measured,
        not promised.
      random: whether it draws. `init_server` is then called as `(x_0, key, weights)`, with the two words of a
        threefry2x32 key of the replication's own, (2,) uint32, and with p_k, (K,); `init_client` as
        `(x_0, k)`, with the client's number, () uint32. `algorithms.client_dropout` is an example.
      least_clients: how many clients a problem must have.
      participation: who takes part in a round; all clients if None. Clients that are asked now and then
        keep nothing between rounds: there is no `init_client` then.
      sends: `d → numbers` that a client sends when a round ends, its model included. If None, d and the size of
        its message.
      moves_by_gradients: whether Σ_k p_k (x_k − x̄) is −η_m times the sum of the round's mean gradients, so that
        the server has that sum without being sent it. If None, whether there is no `direction`.
    """

    name: str
    init_server: Callable[..., Any] | None = None
    init_client: Callable[..., Any] | None = None
    begin: Callable[[Any, Round], Any] | None = None
    direction: Callable[[Array, Client, Round], tuple[Array, Any]] | None = None
    send: Callable[[Client, Round], tuple[Any, Any]] | None = None
    receive: Callable[[Array, Any, Round], tuple[Array, Any]] | None = None
    within_theory: bool = False
    random: bool = False
    least_clients: int = 1
    participation: Participation | None = None
    sends: Callable[[int], int] | None = dataclasses.field(default=None, metadata=COUNTS_IF_SET)
    moves_by_gradients: bool | None = dataclasses.field(default=None, metadata=COUNTS_IF_SET)

    @property
    def gradient_sum_known(self) -> bool:
        """Whether the server can compute the sum of a round's mean gradients from how the clients moved."""
        declared = self.moves_by_gradients
        return self.direction is None if declared is None else declared

    @property
    def averages(self) -> bool:
        """Whether a round ends as in Local SGD: every client goes to Σ_k p_k x_k, and that is all."""
        return self.send is None and self.receive is None

    def among(self, num_clients: int) -> Algorithm:
        """The algorithm for K clients: to ask K different ones is to ask all of them, in their order."""
        how = self.participation
        everybody = how is not None and how.clients == num_clients and not how.by_weight
        return dataclasses.replace(self, participation=None) if everybody else self

    def stepping(self, num_clients: int) -> int:
        """How many of K clients step in a round."""
        how = self.participation
        return num_clients if how is None else how.clients
