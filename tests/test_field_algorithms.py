"""Federated algorithms by themselves: where they end, how often chance strikes, what they refuse.

`test_algorithms` compares them with plain loops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import Why, refused

from jaxlsgd.algorithms import (
    client_dropout,
    clipping,
    fedprox,
    local_adam,
    local_momentum,
    local_optimizer,
    local_sgd,
    participation,
    plain_rounds,
    scaffold,
    server_adam,
    server_momentum,
    server_optimizer,
    stragglers,
)
from jaxlsgd.core.algorithm import Client, Round

P = (0.5, 0.3, 0.2)


def loss(x: jax.Array, observation: Any) -> jax.Array:
    """½ Σ_j h_j (x_j − c_j)²."""
    h, c = observation
    return 0.5 * jnp.sum(h * (x - c) ** 2)


def test_scaffold_ends_at_the_optimum_where_local_sgd_drifts():
    """Without noise: client k's loss is ½ Σ_j h_kj (x_j − c_kj)², and 50 steps a round are many."""
    rng = np.random.default_rng(2)
    h, c, p, eta, steps = rng.uniform(0.2, 1.8, (3, 2)), rng.normal(size=(3, 2)), P, 0.02, 50
    seen = tuple(np.broadcast_to(x, (steps, 3, 2)) for x in (h, c))
    left = (1 - eta * h) ** steps  # of a client's distance to its own optimum
    ends = {
        local_sgd(): (p @ ((1 - left) * c)) / (p @ (1 - left)),
        scaffold(): (p @ (h * c)) / (p @ h),
    }
    assert np.abs(np.subtract(*ends.values())).max() > 0.03
    with jax.enable_x64(True):
        for algorithm, end in ends.items():
            rounds = plain_rounds(loss, p, algorithm)
            state = rounds.init(jnp.zeros(2))
            for _ in range(150):
                state, _ = rounds.round(state, seen, eta)
            np.testing.assert_allclose(state.params, end, atol=1e-8)


# Mean and variance of what client k counts for in a round, and of the steps that it makes of five.
COUNTS = {
    "dropout": (lambda: client_dropout(0.25), np.full(3, 0.75), np.full(3, 0.75 * 0.25)),
    "stragglers": (lambda: stragglers(0.5), np.full(3, 4.0), np.full(3, 2.0)),
}


@pytest.mark.parametrize("case", COUNTS)
def test_how_often_clients_count(case: str):
    """Means over rounds within 4.5 standard errors: 6 of them, a false alarm in 24,000 runs."""
    build, mean, variance = COUNTS[case]
    algorithm, rounds, one = build(), 2_000, jnp.ones(1)
    clients = jnp.arange(3, dtype=jnp.uint32)

    def count(client: Any, round: Round) -> Any:
        if algorithm.begin is not None:
            return algorithm.begin(client, round).most
        message = algorithm.send(Client(round.params + 1, None, client), round)[0]
        return jax.tree.leaves(message)[0][0]

    def turn(server: Any, _: Any) -> Any:
        round = Round(0 * one, server, 5.0, 0.1)
        found = jax.vmap(count, (0, None))(clients, round)
        message = (0 * one, jnp.ones(())) if case == "dropout" else 0 * one
        return algorithm.receive(0 * one, message, round)[1], found

    start = algorithm.init_server(one, jnp.array([3, 7], jnp.uint32), jnp.array(P))
    found = np.asarray(jax.lax.scan(turn, start, length=rounds)[1])
    assert (np.abs(found.mean(0) - mean) < 4.5 * np.sqrt(variance / rounds)).all()
    # A sample's variance within a quarter: ten standard errors.
    np.testing.assert_allclose(found.var(0), variance, rtol=0.25)


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda: fedprox(-0.1), ("mu", "value")),
        (lambda: fedprox(float("nan")), ("mu", "not_finite")),
        (lambda: scaffold(0.0), ("rate", "value")),
        (lambda: server_adam(beta2=1.0), ("beta2", "value")),
        (lambda: local_momentum(1.0), ("momentum", "value")),
        (lambda: local_adam(beta1=1.0), ("beta1", "value")),
        (lambda: local_adam(0.0), ("rate", "value")),
        (lambda: clipping(-1.0), ("norm", "value")),
        (lambda: stragglers(1.0), ("probability", "value")),
        (lambda: client_dropout(-0.1), ("probability", "value")),
        (lambda: participation(0), ("clients", "value")),
        (lambda: participation(1, "all"), ("choice", "choice")),
        (
            lambda: plain_rounds(loss, [0.5, 0.5], participation(3)).init(jnp.zeros(2)),
            ("problem", "unsupported", "3 clients"),
        ),
        (
            lambda: plain_rounds(loss, [0.5, 0.5], participation(2)).init(jnp.zeros(2)),
            ("key", "type"),
        ),
        (lambda: server_momentum(1.0), ("momentum", "value")),
        (lambda: server_momentum(-0.5), ("momentum", "value")),
        (lambda: server_momentum(0.9, 0.0), ("rate", "value")),
        (lambda: server_optimizer(0.1), ("optimizer", "type")),
        (lambda: local_optimizer("adam"), ("transform", "type")),
    ],
)
def test_bad_arguments_of_builders(build: Callable[[], Any], why: Why):
    with refused(*why):
        build()
