"""Partial participation: the server asks some of the clients in a round, and hears from no other."""

from __future__ import annotations

import functools

from jaxlsgd.core import checks
from jaxlsgd.core.algorithm import Algorithm, Participation
from jaxlsgd.core.registry import register

_CHOICES = ("uniform", "weight")


@register("algorithm")
@functools.cache
def participation(clients: int, choice: str = "uniform") -> Algorithm:
    """Local SGD in which n clients take part in a round, chosen anew each time.

    "uniform" asks n different clients, all sets equally likely, and weighs by the inverse probability:
    x̄ ← x̄ + (K/n) Σ_{k chosen} p_k (x_k − x̄). "weight" draws n times by p_k, with replacement, and averages:
    x̄ ← x̄ + (1/n) Σ_i (x_{k_i} − x̄). Both are right on average. A round costs what n clients cost, in time and
    in memory, however many there are; observation t of a client is the same one whoever takes part.

    Outside the paper's theory: the choice is noise of its own, once a round, and where clients differ it does not
    shrink with E_m. `one_step` and `random_scaling` see it as it is. `plug_in` has it in Ŝ, as the gradients of the
    chosen are all that it is given, but counts it as new at every step. In `linear(5, 10)` with 5 clients a round
    (512 runs, t_T = 5,000, warm-up) 95 % intervals of `one_step` covered 95.0 to 95.7 % under C1, C5 and P(1/2), and
    those of `plug_in("finite")` 93.6 to 95.7 %; under E = 50 without a warm-up (256 runs, t_T = 20,000) 94.8 and 66 %.

    Any algorithm whose clients keep nothing between rounds can be run so:
    `dataclasses.replace(server_momentum(), participation=Participation(n))`.

    Args:
      clients: n, at least 1 and at most K. All of them by "uniform" is Local SGD.
      choice: "uniform" or "weight".

    Example::

        simulate(key, problem, plan, replications=100, algorithm=participation(3))

    Reference: Li, Huang, Yang, Wang, Zhang (2020), On the convergence of FedAvg on non-IID data: its
    scheme II is "uniform", its scheme I "weight".
    """
    checks.count("clients", clients, 1)
    by_weight = checks.choice("choice", choice, _CHOICES) == "weight"
    return Algorithm("participation", participation=Participation(clients, by_weight))
