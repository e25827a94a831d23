"""`plain_rounds`: the rounds of an algorithm, for people with a loop of their own."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import momenta
from refusals import Why, refused
from test_algorithms import ALGORITHMS, DIM, data, key, plan, problem

from jaxlsgd import random_scaling, simulate
from jaxlsgd.algorithms import fedprox, plain_rounds, scaffold


def loss(params: Any, observation: Any) -> jax.Array:
    a, b = observation
    return 0.5 * (jnp.sum(a * params["slope"]) + params["level"] - b) ** 2


def batch(steps: int, clients: int = 3, *leading: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(steps)
    shape = (*leading, steps, clients)
    return rng.normal(size=(*shape, DIM)).astype("f4"), rng.normal(size=shape).astype("f4")


PARAMS = {"slope": jnp.zeros(DIM), "level": jnp.zeros(())}
WEIGHTS = (0.5, 0.3, 0.2)


@pytest.mark.parametrize(
    "observations",
    [
        batch(4, 2),
        batch(4)[0],
        (batch(4)[0], batch(5)[1]),
        (batch(4)[0], np.zeros(4)),
        (batch(4)[0], np.zeros(())),
        (),
    ],
    ids=["clients", "clients last", "steps", "no clients", "a number", "nothing"],
)
def test_observations_without_steps_and_clients_are_refused(observations: Any):
    rounds = plain_rounds(loss, WEIGHTS)
    if isinstance(observations, np.ndarray):
        observations = np.swapaxes(observations, 0, 1)
    with refused("observations", "shape", "(E_m, 3, ...)"):
        rounds.round(rounds.init(PARAMS), observations, 0.1)


@pytest.mark.parametrize(
    ("weights", "why"),
    [([0.5, 0.6], ("weights", "value")), (1.0, ("weights", "shape")), ([], ("weights", "value"))],
)
def test_bad_weights_are_refused(weights: Any, why: Why):
    with refused(*why):
        plain_rounds(loss, weights)


def test_a_round_is_compiled_once_for_each_number_of_steps():
    chex.clear_trace_counter()
    rounds = plain_rounds(chex.assert_max_traces(loss, n=2), WEIGHTS, momenta())
    state = rounds.init(PARAMS)
    for steps, eta in [(3, 0.1), (5, 0.05), (3, 0.04), (5, 0.03), (3, 0.02)]:
        state, sync = rounds.round(state, batch(steps), eta)
        assert sync.E == steps
    chex.assert_tree_all_finite(state)
    with pytest.raises(AssertionError, match="traced"):
        rounds.round(state, batch(4), 0.1)


@pytest.mark.parametrize("name", ["local_sgd", "server_optimizer", "scaffold", "participation"])
def test_parameters_keep_their_structure(name: str):
    rounds = plain_rounds(loss, WEIGHTS, ALGORITHMS[name].ours())
    before, seen = rounds.init(PARAMS, key()), batch(4, ALGORITHMS[name].ours().stepping(3))
    after, sync = rounds.round(before, seen, 0.1)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, before)
    chex.assert_trees_all_equal(sync.params, after.params)
    # As a vector, in the order of the pytree's leaves: "level" and then "slope".
    flat = plain_rounds(
        lambda x, xi: loss({"level": x[0], "slope": x[1:]}, xi), WEIGHTS, ALGORITHMS[name].ours()
    )
    same, _ = flat.round(flat.init(jnp.zeros(1 + DIM), key()), seen, 0.1)
    joined = jnp.concatenate([after.params["level"][None], after.params["slope"]])
    chex.assert_trees_all_close(same.params, joined, rtol=1e-6)


def test_many_replications_by_vmap():
    rounds, observations = plain_rounds(loss, WEIGHTS, scaffold()), batch(4, 3, 5)
    state = rounds.init(PARAMS)
    many, _ = jax.vmap(rounds.round, (None, 0, None))(state, observations, 0.1)
    for r in range(5):
        one, _ = rounds.round(state, jax.tree.map(lambda x, r=r: x[r], observations), 0.1)
        chex.assert_trees_all_close(jax.tree.map(lambda x, r=r: x[r], many), one, rtol=1e-5)


def test_a_step_size_does_not_change_the_precision():
    with jax.enable_x64(True):
        rounds = plain_rounds(loss, WEIGHTS, scaffold())
        before = rounds.init(jax.tree.map(lambda x: x.astype(jnp.float32), PARAMS))
        after, _ = rounds.round(before, batch(4), np.float64(0.1))
    chex.assert_trees_all_equal_shapes_and_dtypes(after, before)


@pytest.mark.for_users
def test_an_estimator_in_a_loop_of_ones_own_finds_what_simulate_finds():
    estimator, seen = random_scaling(), data(0)
    rows = simulate(
        key(),
        problem(),
        plan(),
        replications=1,
        tile_size=1,
        methods=estimator,
        dtype="float64",
        algorithm=fedprox(0.3),
    ).methods["random_scaling"]
    with jax.enable_x64(True):
        rounds = plain_rounds(problem().loss, seen.weights, fedprox(0.3))
        state = rounds.init(jnp.asarray(seen.init))
        statistics = estimator.init(state.params)
        for t, steps, eta in seen.rounds():
            state, sync = rounds.round(state, (seen.a[t : t + steps], seen.b[t : t + steps]), eta)
            statistics = estimator.update(statistics, sync)
        interval = estimator.interval(statistics, 0.95, plan())
    np.testing.assert_allclose(interval.estimate, rows.estimate[-1, 0], rtol=1e-12)
    half = rows.half_width[-1, 0, 0]
    np.testing.assert_allclose(interval.upper - interval.estimate, half, rtol=1e-10)
