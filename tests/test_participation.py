"""Partial participation: who is chosen, what is fed to statistics, and that nothing is computed of the others.

`test_algorithms` compares the paths with plain loops.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import algorithm_loops as loops
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import NO_LAW, last_reading, numpy_draws
from refusals import refused

from jaxlsgd import Algorithm, Estimator, Measurement, Problem, problems, random_scaling
from jaxlsgd.algorithms import local_sgd, participation, plain_rounds, scaffold, server_momentum
from jaxlsgd.core import random
from jaxlsgd.core.algorithm import Participation
from jaxlsgd.core.estimator import Accumulator, Sync
from jaxlsgd.engine.block import run_block
from jaxlsgd.engine.cost import default_tile, lane_widths, tile_bytes
from jaxlsgd.engine.draws import Supply, replication_keys
from jaxlsgd.engine.program import make_data, make_program
from jaxlsgd.engine.tile import fresh_tile
from jaxlsgd.runs.cell import Cell
from jaxlsgd.schedules import Plan, custom, power_decay
from jaxlsgd.study import Study
from jaxlsgd.study.jobs import work

pytestmark = pytest.mark.for_users

K, DIM, REPLICATIONS = 4, 2, 2
E = [1, 1, 3, 2, 1, 70, 2]
WEIGHTS = np.array([0.4, 0.3, 0.2, 0.1])


def key() -> jax.Array:
    return jax.random.key(8)


# Who is chosen.


@pytest.mark.parametrize(
    ("n", "num_clients"), [(1, 1), (2, 3), (5, 5), (16, 40), (17, 17), (40, 47)]
)
def test_floyds_method(n: int, num_clients: int):
    """Both ways of it against its loop: by pairs up to 16, then by sorting."""
    words = np.random.default_rng(n).integers(0, 2**32, (50, n), dtype=np.uint32)
    found = np.asarray(jax.jit(jax.vmap(lambda w: random.floyd(w, num_clients)))(words))
    right = [loops.floyd([int(word) for word in row], num_clients) for row in words]
    np.testing.assert_array_equal(found, right)
    assert all(len(set(row)) == n for row in found.tolist())


def test_sorting_finds_what_pairs_find():
    """A small n by the way of a large one, as chains of replacements are longest where n is nearly K."""
    words = jnp.asarray(np.random.default_rng(3).integers(0, 2**32, (200, 9), dtype=np.uint32))
    last = np.arange(1, 10, dtype=np.uint32)
    drawn = random._scaled(words, last + np.uint32(1))
    sorted_ = jax.jit(jax.vmap(lambda d: random.taken_by_sorting(d, 10)))(drawn)
    pairs = jax.jit(jax.vmap(lambda d: random._taken_by_pairs(d, last)))(drawn)
    np.testing.assert_array_equal(sorted_, pairs)
    assert 0.1 < np.mean(pairs) < 0.9


@pytest.mark.parametrize("n", [2, 20])
def test_all_sets_are_equally_likely(n: int):
    """Pairs of neighbours among 23: shares within 4.5 standard errors, a false alarm in 6,000 runs."""
    runs, among = 4_000, 23
    words = jax.random.bits(key(), (runs, n), jnp.uint32)
    chosen = np.asarray(jax.jit(jax.vmap(lambda w: random.floyd(w, among)))(words))
    there = np.zeros((runs, among))
    np.put_along_axis(there, chosen.astype(int), 1, axis=1)
    both = (there * np.roll(there, 1, axis=1)).mean(0)
    share = n * (n - 1) / (among * (among - 1))
    assert (np.abs(both - share) < 4.5 * np.sqrt(share * (1 - share) / runs)).all()


def test_clients_are_drawn_by_their_weights():
    """Among them one of weight 0 at the end and one in between, which are never drawn."""
    p, draws = np.array([0.5, 0.0, 0.3, 0.2, 0.0]), 20_000
    how, bounds = Participation(draws, by_weight=True), random.weight_bounds(p)
    found = random.first_cohort(how, jnp.array([3, 7], jnp.uint32), jnp.asarray(p), bounds)
    shares = np.bincount(np.asarray(found.clients), minlength=5) / draws
    assert (np.abs(shares - p) <= 4.5 * np.sqrt(p * (1 - p) / draws)).all()
    np.testing.assert_allclose(found.weights, 1 / draws)
    assert bounds.tolist()[2:] == [int(0.8 * 2**32), 2**32 - 1, 2**32 - 1]


# What statistics are fed.


class Fed(NamedTuple):
    """All that the server knows of each round."""

    sync: Any  # leaves (T, ...)
    m: Any


@functools.cache
def recorder() -> Accumulator:
    def init(x: Any) -> Fed:
        zeros = lambda *shape: jnp.zeros((len(E), *shape), x.dtype)  # noqa: E731
        d = x.shape[0]
        return Fed((zeros(d), zeros(d), zeros(d, d), zeros(d)), jnp.zeros((), jnp.int32))

    def update(state: Fed, sync: Sync) -> Fed:
        now = sync.params, sync.gradient, sync.hessian, sync.gradient_sum
        put = lambda old, new: old.at[state.m].set(new)  # noqa: E731
        return Fed(jax.tree.map(put, state.sync, now), state.m + 1)

    asks = {"needs_gradient": True, "needs_hessian": True, "needs_gradient_sum": True}
    return Accumulator(init, update, shared=("m",), **asks)


def _measure(states: Any, horizon: Any) -> Measurement:
    del horizon
    ((sync, _),) = states
    return Measurement(sync[0][-1], sync[0][-1], jnp.zeros((), bool), sync)


FED = Estimator("fed", (recorder(),), _measure, NO_LAW)


@functools.cache
def problem() -> Problem:
    return problems.linear(DIM, K, heterogeneity=0.7, weights=WEIGHTS, init=np.array([1.0, -0.5]))


@functools.cache
def plan() -> Plan:
    return custom(E).plan(power_decay(0.3), num_rounds=len(E))


def observed() -> tuple[np.ndarray, np.ndarray]:
    """What the clients of replication 1 would see, (t, K, ...)."""
    case = problem()
    drawn = numpy_draws(key(), [1], plan().num_steps + 1, range(K), case.draws)
    normal = drawn.normal[..., 0].astype(np.float64)
    a = normal[..., :DIM]
    return a, (a * case.clients.truth).sum(-1) + case.clients.noise * normal[..., DIM]


def cohorts(how: Participation) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Numbers and weights of those who take part in replication 1, round after round."""
    words = jax.random.key_data(
        jax.random.fold_in(
            replication_keys(key(), jnp.ones(1, jnp.uint32))[0], np.uint32(2**32 - 1)
        )
    )
    bounds, p = random.weight_bounds(WEIGHTS), jnp.asarray(WEIGHTS)
    now = random.first_cohort(how, words, p, bounds)
    while True:
        yield np.asarray(now.clients), np.asarray(now.weights)
        now = random.next_cohort(how, now, p, bounds)


def by_hand(how: Participation) -> list[np.ndarray]:
    """x̄, the gradient and Hessian at it of those who come next, and h_m, in NumPy."""
    (a, b), x, t, total = observed(), problem().init, 0, np.zeros(DIM)
    chosen, found = cohorts(how), []
    for m, (steps, eta) in enumerate(zip([*E, 1], [*plan().eta, 0.0], strict=True)):
        who, p = next(chosen)
        at, sums = np.tile(x, (len(who), 1)), np.zeros(DIM)
        for i in range(t, t + steps):
            g = ((a[i, who] * at).sum(-1) - b[i, who])[:, None] * a[i, who]
            if i == t and m:
                H = np.einsum("i,ij,ik->jk", p, a[i, who], a[i, who])
                found.append((x, p @ g, H, total))
            at, sums = at - eta * g, sums + p @ g
        x, t, total = x + p @ (at - x), t + steps, sums
    return [np.array(part) for part in zip(*found, strict=True)]


@pytest.mark.parametrize("choice", ["uniform", "weight"])
def test_statistics_see_the_chosen_alone(choice: str):
    algorithm = participation(2, choice)
    cell = Cell(problem(), plan(), (FED,), save_at=(3, 6), dtype="float64", algorithm=algorithm)
    with jax.enable_x64(True):
        right = by_hand(algorithm.participation)
    found = last_reading(key(), cell, REPLICATIONS).found["fed"].detail
    for ours, hand in zip(found, right, strict=True):
        np.testing.assert_allclose(np.asarray(ours)[1], hand, rtol=1e-9, atol=1e-12)


def test_all_clients_are_local_sgd_to_the_bit():
    cells = [
        Cell(problem(), plan(), (FED,), algorithm=algorithm)
        for algorithm in (participation(K), local_sgd())
    ]
    all_, plain = (last_reading(key(), cell, REPLICATIONS).found["fed"].detail for cell in cells)
    chex.assert_trees_all_equal(all_, plain)


# Other algorithms, and problems that sample by themselves.


@functools.cache
def own() -> Problem:
    """Clients whose constants and samples differ."""

    def sample(key: jax.Array, client: Any) -> tuple[jax.Array, jax.Array]:
        a = jax.random.normal(key, (DIM,))
        return a, a @ client["slope"] + client["level"]

    clients = {"slope": np.arange(2.0 * K).reshape(K, 2) / 9, "level": np.arange(1.0, K + 1)}
    loss = lambda x, o: 0.5 * (o[0] @ x - o[1]) ** 2  # noqa: E731
    return Problem(np.zeros(DIM), loss, K, sample=sample, clients=clients, weights=WEIGHTS)


@functools.cache
def asked() -> Algorithm:
    """A server with a momentum that asks two clients."""
    how = Participation(2)
    return dataclasses.replace(server_momentum(0.5), name="asked", participation=how)


def test_a_server_with_a_memory_and_an_own_sample():
    """The block engine against the plain round, on samples made one by one."""
    cell = Cell(own(), plan(), (FED,), dtype="float64", algorithm=asked())
    found = last_reading(key(), cell, REPLICATIONS).found["fed"].detail[0][1]
    with jax.enable_x64(True), jax.debug_key_reuse(False):
        data = replication_keys(key(), jnp.ones(1, jnp.uint32))[0]
        sample = jax.jit(
            lambda t, k: own().sample(
                jax.random.fold_in(jax.random.fold_in(data, t), k),
                jax.tree.map(lambda leaf: jnp.asarray(leaf)[k], own().clients),
            )
        )
        rounds, t = plain_rounds(own().loss, WEIGHTS, asked()), 0
        state = rounds.init(jnp.zeros(DIM), data)
        for m, (steps, eta) in enumerate(zip(E[:3], plan().eta, strict=False)):
            seen = [
                [sample(np.uint32(i), k) for k in state.cohort.clients] for i in range(t, t + steps)
            ]
            stacked = [np.array([[one[j] for one in row] for row in seen]) for j in (0, 1)]
            state, _ = rounds.round(state, tuple(stacked), eta)
            t += steps
            # Normals of the engine's own polynomials are good to float32.
            np.testing.assert_allclose(found[m], state.params, rtol=2e-6, atol=2e-6)


# Size.


def _sizes(jaxpr: Any) -> Iterator[tuple[int, ...]]:
    for equation in jaxpr.eqns:
        yield from (v.aval.shape for v in equation.outvars if hasattr(v.aval, "shape"))
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(inner, "jaxpr") or hasattr(inner, "eqns"):
                    yield from _sizes(getattr(inner, "jaxpr", inner))


@pytest.mark.parametrize("choice", ["uniform", "weight"])
def test_a_block_makes_nothing_of_the_size_of_all_clients(choice: str):
    """As there are 10,007 of them, which is prime, any array made of them all would show."""
    many, algorithm = 10_007, participation(3, choice)
    case = problems.linear(DIM, many, heterogeneity=0.5)
    program = make_program(case, (FED,), algorithm)
    data = make_data(case, "float32", algorithm)
    keys = replication_keys(key(), jnp.arange(REPLICATIONS, dtype=jnp.uint32))
    state = jax.eval_shape(lambda d, k: fresh_tile(program, d, k), data, keys)
    cell = Cell(case, plan(), (FED,), algorithm=algorithm)
    call = cell.laid_out(program.rooms).groups[0][0]
    traced = jax.make_jaxpr(lambda *given: run_block(program, call.slots, *given))
    shapes = set(_sizes(traced(data, Supply(keys, None), state, call.block).jaxpr))
    assert (3, DIM, REPLICATIONS) in shapes
    assert not [shape for shape in shapes if any(size >= many for size in shape)]
    kept = jax.tree.leaves(state)
    assert max(leaf.size for leaf in kept) < 1_000


def test_memory_and_work_are_those_of_the_chosen():
    few, many = (problems.linear(5, k) for k in (10, 1_000))
    methods, ten = (random_scaling(),), participation(10)
    full = tile_bytes(few, methods, 512)
    assert full < tile_bytes(many, methods, 512, algorithm=ten) < 1.5 * full
    assert tile_bytes(many, methods, 512) > 50 * full
    assert default_tile(many, methods, algorithm=ten) >= 256
    assert lane_widths(few, methods, 512, algorithm=participation(3)) == ()
    assert lane_widths(few, methods, 512, algorithm=ten) == lane_widths(few, methods, 512)
    study = Study(
        problems=[{"kind": "linear", "dim": 5, "num_clients": 1_000, "gamma0": 0.5}],
        schedules=["C5"],
        horizons=[100],
        methods=["random_scaling"],
        algorithms=[{"kind": "participation", "clients": 10}],
        replications=16,
        tile_size=16,
    )
    assert work(study.cells[0]) == study.cells[0].num_steps * 10 * 16


# What is refused.


def test_what_is_refused():
    with refused("clients"):
        Participation(0)
    keeps = dataclasses.replace(scaffold(), participation=Participation(2))
    with refused("algorithm (scaffold).init_client", "unwanted"):
        Cell(problem(), plan(), algorithm=keeps)
    with refused("problem", "unsupported", "5 clients", "participation"):
        Cell(problem(), plan(), algorithm=participation(5))
