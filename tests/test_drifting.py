"""Clients that drift: when an observation is made, in every way of making one; a truth that stays."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import INSIDE, last_reading, numpy_draws
from refusals import Why, refused

from jaxlsgd import Problem, problems, random_scaling, simulate
from jaxlsgd.algorithms import participation
from jaxlsgd.core.problem import Moment
from jaxlsgd.inference.rivals.bootstrap import perturbed
from jaxlsgd.inference.rivals.federation_tree import split_clients
from jaxlsgd.problems import minibatch, solve
from jaxlsgd.runs.cell import Cell
from jaxlsgd.runs.simulate import Finished, run_cells
from jaxlsgd.schedules import Plan, custom, power_decay

pytestmark = pytest.mark.for_users

K, DIM, PERIOD = 3, 2, 5
E = [1, 2, 3, 1, 4] * 4


def key() -> jax.Array:
    return jax.random.key(5)


@functools.cache
def problem() -> Problem:
    return problems.drifting(DIM, K, drift=2.0, period=PERIOD, weights=[0.5, 0.3, 0.2])


@functools.cache
def plan() -> Plan:
    return custom(E).plan(power_decay(0.3), num_rounds=len(E))


def by_hand() -> np.ndarray:
    """x̄ after every round of replication 0, (T, d), in NumPy."""
    case, t = problem(), 0
    drawn = numpy_draws(key(), [0], plan().num_steps, range(K), case.draws).normal[..., 0]
    of, x, path = case.clients, case.init, []
    for steps, eta in zip(E, plan().eta, strict=True):
        at = np.tile(x, (K, 1))
        for _ in range(steps):
            angle = 2 * np.pi * (t % PERIOD) / PERIOD
            now = of.truth + np.cos(angle) * of.cosine + np.sin(angle) * of.sine
            a = drawn[t, :, :DIM].astype(np.float64)
            b = (a * now).sum(-1) + of.noise * drawn[t, :, DIM]
            at = at - eta * ((a * at).sum(-1) - b)[:, None] * a
            t += 1
        x = case.weights @ at
        path.append(x)
    return np.array(path)


def test_the_engine_knows_the_time():
    """Blocks of few and of many rounds, in one loop and in two, against a loop in NumPy."""
    cell = Cell(problem(), plan(), (INSIDE,), dtype="float64")
    found = last_reading(key(), cell, 1).found["inside"].detail.path[0, : len(E)]
    np.testing.assert_allclose(found, by_hand(), rtol=1e-9)


@functools.cache
def sampled() -> Problem:
    """The same by `sample`."""

    def sample(key: jax.Array, at: Moment) -> Any:
        a = jax.random.normal(key, (DIM,))
        return a, a @ at.client["slope"] + at.t.astype(a.dtype)

    clients = {"slope": np.arange(2.0 * K).reshape(K, 2)}
    own = {"observe": None, "draws": None, "gradient": None, "hessian": None}
    return dataclasses.replace(problem(), sample=sample, clients=clients, **own)


@pytest.mark.parametrize("made", [problem, sampled], ids=["draws", "samples"])
def test_every_way_of_running_makes_the_same_rows(made: Any):
    """Draws made ahead or not."""
    cell = Cell(made(), plan(), (random_scaling(mode="diagonal"),))
    events = list(run_cells(key(), [cell], 0, 4, shared_draws=True))
    ahead = next(event.rows for event in events if isinstance(event, Finished))
    rows = simulate(key(), made(), plan(), replications=4, tile_size=4, methods=cell.methods)
    got, right = (x["random_scaling"].estimate for x in (rows.methods, ahead))
    np.testing.assert_allclose(got, right, rtol=2e-5, atol=1e-5)


def test_the_truth_stays():
    """At any time, and with those who take part weighed by the inverse probability."""
    of, p = problem().clients, problem().weights
    for t in range(PERIOD):
        angle = 2 * np.pi * t / PERIOD
        now = of.truth + np.cos(angle) * of.cosine + np.sin(angle) * of.sine
        np.testing.assert_allclose(p @ now, problem().true_vector, atol=1e-12)
    assert np.abs(of.cosine).max() > 0.5
    algorithm = participation(2)
    rows = simulate(
        key(), problem(), plan(), replications=4, methods=random_scaling(), algorithm=algorithm
    )
    assert np.isfinite(rows.methods["random_scaling"].estimate).all()


def test_problems_made_of_it_know_the_time():
    """An observation of theirs, made at two times, differs as that of the problem does."""
    draws = jax.tree.map(lambda n: jnp.ones(n) / 2, problem().draws)
    client = jax.tree.map(lambda leaf: jnp.asarray(leaf)[1], problem().clients)

    def b(at: int) -> Any:
        return problem().observe(draws, Moment(client, jnp.uint32(at)))[1]

    copies, halves = perturbed(problem(), 2), split_clients(problems.drifting(DIM, 4), 2)
    assert copies.drifts and halves.drifts and minibatch(problem(), 2).drifts
    (_, found), _ = copies.observe(draws, Moment(client, jnp.uint32(3)))
    assert found == b(3) != b(1)
    inner, group = jax.tree.map(lambda leaf: jnp.asarray(leaf)[3], halves.clients)
    (_, found), leaf = halves.observe(draws, Moment((inner, group), jnp.uint32(3)))
    own = problems.drifting(DIM, 4).observe(draws, Moment(inner, jnp.uint32(3)))[1]
    assert (found, leaf) == (own, 1)


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda: problems.drifting(2, 1), ("num_clients", "value")),
        (lambda: problems.drifting(2, 3, period=2), ("period", "value")),
        (lambda: problems.drifting(2, 3, drift=-1.0), ("drift", "value")),
        (lambda: solve(problem()), ("problem", "unsupported")),
    ],
)
def test_what_is_refused(build: Any, why: Why):
    with refused(*why):
        build()
