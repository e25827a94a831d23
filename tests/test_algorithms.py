"""Federated algorithms: the definition, the block engine and spread clients against plain loops.

All on the same draws and in float64, so that a path of x̄ agrees to rounding.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import algorithm_loops as loops
import chex
import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from engine_helpers import NO_LAW, last_reading, momenta, numpy_draws, recorder
from refusals import refused

from jaxlsgd import (
    Algorithm,
    Estimator,
    Measurement,
    Problem,
    problems,
    random_scaling,
    simulate,
)
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
from jaxlsgd.engine import federation
from jaxlsgd.engine.draws import replication_keys
from jaxlsgd.engine.layout import BLOCK_STEPS, SLOTS, lay_out
from jaxlsgd.engine.program import make_data
from jaxlsgd.runs.cell import Cell
from jaxlsgd.runs.simulate import read_cells
from jaxlsgd.schedules import Plan, custom, power_decay

pytestmark = pytest.mark.for_users

DIM, REPLICATIONS = 2, 2
DRAWN = 2  # clients that take part, by weight
# Rounds of one step, of a few, and longer than a block: all kinds of block programs.
E = [1] * 70 + [3, 5, 4] * 12 + [20] * 6 + [140, 1, 2]
# Found are 1.3e-14 and less.
CLOSE = 1e-12


def key() -> jax.Array:
    return jax.random.key(31)


class Pair(NamedTuple):
    """An algorithm of the package and its loop in NumPy."""

    ours: Callable[[], Algorithm]
    loop: Callable[[loops.Data], np.ndarray]


ALGORITHMS = {
    "local_sgd": Pair(local_sgd, loops.local_sgd),
    "fedprox": Pair(lambda: fedprox(0.3), lambda data: loops.fedprox(data, 0.3)),
    "server_momentum": Pair(
        lambda: server_momentum(0.6, 0.5), lambda data: loops.server_momentum(data, 0.6, 0.5)
    ),
    "server_optimizer": Pair(
        functools.cache(lambda: server_optimizer(optax.adam(0.05))),
        lambda data: loops.server_adam(data, 0.05),
    ),
    "local_optimizer": Pair(
        functools.cache(lambda: local_optimizer(optax.sgd(1.0, momentum=0.7))),
        lambda data: loops.local_momentum(data, 0.7),
    ),
    "scaffold": Pair(lambda: scaffold(0.8), lambda data: loops.scaffold(data, 0.8)),
    "server_adam": Pair(
        lambda: server_adam(0.02), lambda data: loops.server_adam(data, 0.02, 0.9, 0.99, 1e-3)
    ),
    "local_momentum": Pair(
        lambda: local_momentum(0.7), lambda data: loops.kept_momentum(data, 0.7)
    ),
    "local_adam": Pair(lambda: local_adam(0.2), lambda data: loops.local_adam(data, 0.2)),
    "clipping": Pair(lambda: clipping(0.4), lambda data: loops.clipping(data, 0.4)),
    "stragglers": Pair(lambda: stragglers(0.6), lambda data: loops.stragglers(data, 0.6)),
    "client_dropout": Pair(
        lambda: client_dropout(0.4), lambda data: loops.client_dropout(data, 0.4)
    ),
    "participation": Pair(lambda: participation(2), lambda data: loops.participation(data, 2)),
    "participation by weight": Pair(
        lambda: participation(DRAWN, "weight"), loops.participation_by_weight
    ),
}
every_algorithm = pytest.mark.parametrize("name", ALGORITHMS)


@functools.cache
def problem(num_clients: int = 3) -> Problem:
    """Clients that differ, of unequal weights, that do not start at the truth."""
    weights = np.arange(1, num_clients + 1) / (num_clients * (num_clients + 1) / 2)
    return problems.linear(
        DIM, num_clients, heterogeneity=0.7, weights=weights, init=np.array([1.0, -0.5])
    )


@functools.cache
def plan() -> Plan:
    return custom(E).plan(power_decay(0.3), num_rounds=len(E))


@functools.cache
def data(replication: int, num_clients: int = 3) -> loops.Data:
    """What a replication sees, in NumPy."""
    case = problem(num_clients)
    drawn = numpy_draws(key(), [replication], plan().num_steps, range(num_clients), case.draws)
    normal = drawn.normal[..., 0].astype(np.float64)
    a = normal[..., :DIM]
    b = (a * case.clients.truth).sum(axis=-1) + case.clients.noise * normal[..., DIM]
    luck = round_luck(replication, num_clients)
    return loops.Data(a, b, case.weights, case.init, plan().E, plan().eta, *luck)


def round_luck(replication: int, num_clients: int) -> list[np.ndarray]:
    """What an algorithm draws, by its definition: root → replication → data → algorithm → round."""
    own = key()
    for number in (replication, 0, np.uint32(2**32 - 1)):
        own = jax.random.fold_in(own, number)

    def one(m: jax.Array) -> Any:
        now = jax.random.fold_in(own, m)
        each = jax.vmap(lambda k: jax.random.uniform(jax.random.fold_in(now, k), (), jnp.float32))
        # Who takes part is drawn by counters (m, i), m from 1 on.
        counters = jnp.concatenate([jnp.full(DRAWN, m + 1), jnp.arange(DRAWN, dtype=jnp.uint32)])
        words = jax.extend.random.threefry_2x32(jax.random.key_data(own), counters)[:DRAWN]
        return each(jnp.arange(num_clients, dtype=jnp.uint32)), words

    with jax.debug_key_reuse(False):
        found = jax.jit(jax.vmap(one))(jnp.arange(len(E), dtype=jnp.uint32))
    return [np.asarray(x) if x.dtype == jnp.uint32 else np.asarray(x, np.float64) for x in found]


@functools.cache
def expected(name: str, replication: int, num_clients: int = 3) -> np.ndarray:
    return ALGORITHMS[name].loop(data(replication, num_clients))


def _measure_path(states: Any, horizon: Any) -> Measurement:
    del horizon
    (record,) = states
    return Measurement(record.path[-1], record.path[-1], jnp.zeros((), bool), record.path)


PATH = Estimator("path", (recorder(len(E)),), _measure_path, NO_LAW)


def engine_path(algorithm: Algorithm, saves: tuple[int, ...] = ()) -> np.ndarray:
    """x̄ of every replication after every round, (R, T, d), by the block engine."""
    cell = Cell(problem(), plan(), (PATH,), save_at=saves, dtype="float64", algorithm=algorithm)
    return last_reading(key(), cell, REPLICATIONS).found["path"].detail


def assert_path(found: np.ndarray, path: np.ndarray) -> None:
    """By the length of each x̄, as a coordinate may pass through 0."""
    chex.assert_equal_shape([found, path])
    far = np.linalg.norm(found - path, axis=-1) / np.linalg.norm(path, axis=-1)
    assert far.max() < CLOSE, far.max()


def test_the_plan_uses_every_kind_of_block():
    used = {call.slots for group in lay_out(plan()).groups for call in group}
    assert used == {*SLOTS, BLOCK_STEPS}


@every_algorithm
def test_the_definition(name: str):
    assert_path(plain_path(ALGORITHMS[name].ours()), expected(name, 0)[:76])


def plain_path(algorithm: Algorithm) -> np.ndarray:
    """x̄ after the first rounds, (76, d), by the plain round."""
    seen = data(0)
    with jax.enable_x64(True):
        rounds = plain_rounds(problem().loss, seen.weights, algorithm)
        state, path = rounds.init(jnp.asarray(seen.init), replication_keys(key(), ZERO)[0]), []
        for t, steps, eta in itertools.islice(seen.rounds(), 76):  # compiled for each E
            who = slice(None) if state.cohort is None else np.asarray(state.cohort.clients)
            now = seen.a[t : t + steps, who], seen.b[t : t + steps, who]
            state, sync = rounds.round(state, now, eta)
            path.append(np.asarray(sync.params))
    return np.array(path)


@every_algorithm
def test_the_block_engine(name: str):
    found = engine_path(ALGORITHMS[name].ours())
    for replication in range(REPLICATIONS):
        assert_path(found[replication], expected(name, replication))


def test_the_loops_differ():
    """So that agreement says something."""
    paths = [expected(name, 0) for name in ALGORITHMS]
    for i, one in enumerate(paths):
        for other in paths[:i]:
            assert np.abs(one[-1] - other[-1]).max() > 1e-4


# What an algorithm comes down to.

ZERO = jnp.zeros(1, jnp.uint32)
SAME = {
    "local_momentum": lambda: local_momentum(0.0),
    "clipping": lambda: clipping(1e6),
    "stragglers": lambda: stragglers(0.0),
    "client_dropout": lambda: client_dropout(0.0),
    "participation": lambda: participation(3),
    "fedprox": lambda: fedprox(0.0),
    "server_momentum": lambda: server_momentum(0.0, 1.0),
    "server_optimizer": functools.cache(lambda: server_optimizer(optax.sgd(1.0))),
    "local_optimizer": functools.cache(lambda: local_optimizer(optax.sgd(1.0))),
}


@pytest.mark.parametrize("name", SAME)
def test_local_sgd_is_a_special_case(name: str):
    assert_path(plain_path(SAME[name]()), expected("local_sgd", 0)[:76])


def test_builders_are_cached():
    assert fedprox(0.3) is fedprox(0.3)
    assert server_momentum(0.6, 0.5) == server_momentum(0.6, 0.5)
    adam = optax.adam(0.1)
    assert server_optimizer(adam) is server_optimizer(adam)
    assert local_optimizer(adam) is local_optimizer(adam)
    assert participation(2) is participation(2)
    assert [name for name, pair in ALGORITHMS.items() if pair.ours().within_theory] == ["local_sgd"]


def test_scaffold_begins_as_local_sgd_and_stays_so_for_single_steps():
    """Controls are 0 in the first round, and cancel on average where a client makes one step."""
    ours, plain = engine_path(scaffold()), engine_path(local_sgd())
    assert_path(ours[:, :70], plain[:, :70])
    assert np.abs(ours[:, 75] - plain[:, 75]).max() > 1e-6


def test_chance_is_a_matter_of_replication_round_and_client():
    """Tiles do not matter, and replications differ."""
    algorithm = ALGORITHMS["participation"].ours()
    cell = Cell(problem(), plan(), (PATH,), dtype="float64", algorithm=algorithm)
    alone = list(read_cells(key(), [cell], 1, 1, shared_draws=False))[-1].found["path"].detail
    assert_path(alone[0], engine_path(algorithm)[1])
    luck = np.concatenate([round_luck(r, 3)[0] for r in range(2)])
    assert len(np.unique(luck)) > 0.99 * luck.size


# States: where they change, and where they do not.

STATEFUL = {
    "momenta": momenta,
    "scaffold": lambda: scaffold(0.8),
    "participation": lambda: participation(2),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_reading_on_the_way_changes_nothing(name: str):
    """A saved round cuts a block in two, in the middle of a round or at its end."""
    saves = (1, 33, 70, 85, 112)
    whole, cut = engine_path(STATEFUL[name]()), engine_path(STATEFUL[name](), saves)
    assert_path(cut, whole)


def test_saved_rounds_are_means_of_the_path():
    """Through `simulate`."""
    saves = (5, 60, 70)
    rows = simulate(
        key(),
        problem(),
        plan().prefix(70),
        replications=REPLICATIONS,
        tile_size=REPLICATIONS,
        methods=random_scaling(mode="diagonal"),
        save_at=saves,
        dtype="float64",
        algorithm=scaffold(0.8),
    )
    assert (rows.algorithm, rows.save_at) == ("scaffold", saves)
    found = rows.methods["random_scaling"].estimate
    for replication in range(REPLICATIONS):
        path = expected("scaffold", replication)
        means = [path[:m].mean(axis=0) for m in saves]
        np.testing.assert_allclose(found[:, replication], means, rtol=1e-11)


@pytest.mark.parametrize("name", STATEFUL)
def test_an_evaluation_leaves_everything_as_it_is(name: str):
    """A momentum must not age in a step that only looks, nor a round begin or end there."""
    algorithm, functions = STATEFUL[name](), problem().structure().flat_functions()
    data = jax.tree.map(jnp.asarray, make_data(problem(), "float32"))
    start = federation.start(data.init, 3, REPLICATIONS, algorithm)
    shape = (3, DIM, REPLICATIONS)
    seen = (jnp.arange(12.0).reshape(shape) / 12, jnp.ones((3, REPLICATIONS)))

    @jax.jit
    def step(state: Any, eta: Any, opens: Any, ends: Any, active: Any) -> Any:
        at = federation.Step(eta, ends, jnp.float32(2), opens, active)
        return federation.local_step(state, seen, at, data, functions, algorithm)[0]

    moved = step(start, 0.1, True, False, True)
    with pytest.raises(AssertionError):
        chex.assert_trees_all_equal(moved, start)
    # As the last evaluation of a run is flagged: it opens a round that there is not.
    chex.assert_trees_all_equal(step(moved, 0.0, True, False, False), moved)
    ended = step(moved, 0.1, False, True, True)
    chex.assert_trees_all_equal(step(ended, 0.0, False, False, False), ended)
    chex.assert_tree_all_finite(ended)


@functools.cache
def counting() -> Algorithm:
    """x̄ becomes the number of rounds, which the clients alone remember."""

    def send(client, round):
        del round
        return client.memory + 1.0, client.memory + 1

    def receive(moved, message, round):
        return jnp.full_like(moved, message), round.server

    return Algorithm(
        "counting", init_client=lambda x: jnp.zeros((), jnp.int32), send=send, receive=receive
    )


def test_a_clients_memory_lasts():
    rounds = np.broadcast_to(np.arange(1.0, len(E) + 1)[:, None], (len(E), DIM))
    for path in engine_path(counting()):
        np.testing.assert_allclose(path, rounds, rtol=1e-14)


# What is refused.


def altered(**parts: Any) -> Algorithm:
    return dataclasses.replace(scaffold(), name="altered", **parts)


WRONG = {
    "a direction of another shape": (
        lambda: altered(direction=lambda g, client, round: (g[:1], client.local)),
        ("algorithm (altered).direction", "shape", "float32[1]"),
    ),
    "a direction of another dtype": (
        lambda: altered(direction=lambda g, c, r: (g.astype(jnp.float16), c.local)),
        ("algorithm (altered).direction", "shape", "float16[2]"),
    ),
    "a direction alone": (
        lambda: altered(direction=lambda g, client, round: g),
        ("algorithm (altered).direction", "type"),
    ),
    "a local state that appears": (
        lambda: altered(direction=lambda g, client, round: (g, g)),
        ("algorithm (altered).direction", "shape", "`local`"),
    ),
    "a memory that shrinks": (
        lambda: altered(send=lambda client, round: (client.x, client.memory[0])),
        ("algorithm (altered).send", "shape", "`memory`"),
    ),
    "an average of another shape": (
        lambda: altered(receive=lambda moved, message, round: (moved[:, None], round.server)),
        ("algorithm (altered).receive", "shape", "float32[2, 1]"),
    ),
    "a server that changes its dtype": (
        lambda: altered(
            init_server=lambda x: {"count": jnp.zeros((), jnp.int32)},
            direction=None,
            send=None,
            receive=lambda moved, message, round: (moved, {"count": round.eta}),
        ),
        ("algorithm (altered).receive", "shape", "`server`", "['count']"),
    ),
    "a name": (lambda: "fedprox", ("algorithm", "type", "'fedprox'")),
    "an optimiser": (lambda: optax.sgd(1.0), ("algorithm", "type")),
    "a builder": (lambda: fedprox, ("algorithm", "type")),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused_before_it_runs(case: str):
    make, why = WRONG[case]
    with refused(*why):
        simulate(key(), problem(), plan(), replications=1, algorithm=make())
    with refused(*why):
        plain_rounds(problem().loss, [1.0], make()).init(jnp.zeros(2))
