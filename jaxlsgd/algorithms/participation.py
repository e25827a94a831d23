"""Partial participation: in a round, some clients take part, drop out, or make fewer steps."""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from jaxlsgd.core import checks, random
from jaxlsgd.core.algorithm import Algorithm, Client, Participation, Round
from jaxlsgd.core.problem import Array
from jaxlsgd.core.registry import register

Choice = Literal["uniform", "weight"]


@register("algorithm")
@functools.cache
def participation(clients: int, choice: Choice = "uniform") -> Algorithm:
    """Local SGD in which n clients take part in a round, chosen anew each time.

    "uniform" chooses n different clients, all sets equally likely, and weights by the inverse probability:
    x̄ ← x̄ + (K/n) Σ_{k chosen} p_k (x_k − x̄). "weight" draws n times by p_k, with replacement, and averages:
    x̄ ← x̄ + (1/n) Σ_i (x_{k_i} − x̄). Both are unbiased. The time and memory of a round are those of n clients,
    however many there are; observation t of a client does not depend on who takes part.

    Outside the paper's theory: the choice adds noise once per round, which does not shrink with E_m if clients
    differ. `one_step` and `random_scaling` account for it. `plug_in` has it in Ŝ, through the gradients of the
    chosen clients, but treats it as independent at every step. In `linear(5, 10)` with 5 clients per round
    (512 runs, t_T = 5,000, warm-up) 95 % intervals of `one_step` covered 95.0 to 95.7 % under C1, C5 and P(1/2), and
    those of `plug_in("finite")` 93.6 to 95.7 %; under E = 50 without a warm-up (256 runs, t_T = 20,000) 94.8 and 66 %.

    Any algorithm whose clients keep nothing between rounds can be run this way:
    `dataclasses.replace(server_momentum(), participation=Participation(n))`.

    Args:
      clients: n, at least 1 and at most K. n = K by "uniform" is Local SGD.
      choice: "uniform" or "weight".

    Example::

        simulate(key, problem, plan, replications=100, algorithm=participation(3))

    Reference: Li, Huang, Yang, Wang, Zhang (2020), On the convergence of FedAvg on non-IID data: its
    scheme II is "uniform", its scheme I "weight".
    """
    checks.count("clients", clients, 1)
    by_weight = checks.choice("choice", choice, Choice) == "weight"
    return Algorithm("participation", participation=Participation(clients, by_weight))


@register("algorithm")
@functools.cache
def client_dropout(probability: float) -> Algorithm:
    """Local SGD in which a client drops out of a round with a probability; the others share its weight.

    Clients drop out independently in every round, and x̄ moves by Σ_k p_k (x_k − x̄)/Σ_k p_k over those that
    remain, or not at all if none does. The steps of the others are still computed.

    Outside the paper's theory: dropout adds noise once per round, which does not shrink with E_m if clients
    differ. `plug_in` ignores it, and `one_step` uses the gradients that were lost.

    Args:
      probability: of dropping out, in [0, 1); 0 is Local SGD.
    """
    probability = random.probability("probability", probability)

    def send(client: Client, round: Round) -> tuple[Any, Any]:
        there = random.client_uniform(round.server, client.memory) >= probability
        there = there.astype(client.x.dtype)
        return (there * (client.x - round.params), there), client.memory

    def reaches(client: Client, round: Round) -> Array:
        there = random.client_uniform(round.server, client.memory) >= probability
        return there.astype(client.x.dtype) / (1 - probability)

    def receive(moved: Array, message: Any, round: Round) -> tuple[Array, Any]:
        del moved
        total, weight = message
        mean = total / jnp.where(weight > 0, weight, 1)
        return round.params + mean, random.after_round(round.server)

    return Algorithm(
        "client_dropout",
        random.init_luck,
        random.init_number,
        send=send,
        receive=receive,
        random=True,
        # The message replaces the model, and counts as sent even if it is lost.
        sends=lambda dim: dim,
        moves_by_gradients=False,
        reaches=reaches,
    )


class _Work(NamedTuple):
    """A client's steps in a round."""

    made: Any  # () steps so far
    most: Any  # () steps that it will make in all


@register("algorithm")
@functools.cache
def stragglers(probability: float) -> Algorithm:
    """Local SGD in which slow clients make 1 to E_m steps, each number equally likely.

    In every round clients are slow independently, with the given probability. What they send after
    fewer steps is averaged like the rest. All are slow equally often, so that x* does not change to first
    order in η; the server moves (1 − probability · (1 − 1/E_m)/2) times as far. The engine computes the steps
    that a slow client omits, and discards them.

    Outside the paper's theory, in which all clients make E_m steps. `plug_in` counts steps that were not made,
    and `one_step` uses their gradients.

    Args:
      probability: of being slow, in [0, 1); 0 is Local SGD.

    Reference: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith (2020), Federated optimization in
    heterogeneous networks, in whose experiments there are such clients.
    """
    probability = random.probability("probability", probability)

    def begin(memory: Any, round: Round) -> _Work:
        # One number decides both: given that it is below the probability, it is uniform there.
        u = random.client_uniform(round.server, memory).astype(round.params.dtype)
        slow = u < probability
        share = u / (probability if probability else 1.0)
        some = jnp.minimum(jnp.floor(share * round.E) + 1, round.E)
        return _Work(jnp.zeros_like(u), jnp.where(slow, some, round.E))

    def direction(gradient: Array, client: Client, round: Round) -> tuple[Array, Any]:
        del round
        made, most = client.local
        return jnp.where(made < most, gradient, 0), _Work(made + 1, most)

    def reaches(client: Client, round: Round) -> Array:
        made, most = client.local
        return jnp.where(made < most, round.E / most, 0)

    def receive(moved: Array, message: Any, round: Round) -> tuple[Array, Any]:
        del message
        return round.params + moved, random.after_round(round.server)

    return Algorithm(
        "stragglers",
        random.init_luck,
        random.init_number,
        begin=begin,
        direction=direction,
        receive=receive,
        random=True,
        reaches=reaches,
    )
