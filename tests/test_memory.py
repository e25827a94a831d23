"""The predicted memory of a tile against what the compiler plans."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusals import refused

import jaxlsgd
from jaxlsgd.core.problem import Draws
from jaxlsgd.engine import machine
from jaxlsgd.engine.block import run_block, start_tile
from jaxlsgd.engine.cost import CACHE_BYTES, default_tile, largest_tile, tile_bytes
from jaxlsgd.engine.draws import Supply, replication_keys
from jaxlsgd.engine.layout import BLOCK_STEPS, SLOTS, lay_out
from jaxlsgd.engine.program import make_data, make_program
from jaxlsgd.engine.statistics import roll
from jaxlsgd.runs.cell import LOCAL_SGD

pytestmark = pytest.mark.for_users

METHODS = (jaxlsgd.random_scaling(), jaxlsgd.plug_in())


@pytest.mark.parametrize(("dim", "clients", "name"), [(5, 10, "C1"), (3, 4, "P(1/2)")])
def test_prediction_is_near_what_is_compiled(dim: int, clients: int, name: str) -> None:
    problem = jaxlsgd.problems.linear(dim, clients)
    program = make_program(problem, METHODS, LOCAL_SGD)
    data = jax.tree.map(jnp.asarray, make_data(problem, "float32"))
    keys = replication_keys(jax.random.key(0), jnp.arange(256))
    plan = jaxlsgd.schedules.paper(name).plan(jaxlsgd.schedules.power_decay(0.5), num_steps=2000)
    call = lay_out(plan).groups[0][-2]
    state = start_tile(program, data, 256)
    given = Supply(keys, None)
    compiled = run_block.lower(program, call.slots, data, given, state, call.block).compile()
    found = compiled.memory_analysis()
    planned = found.argument_size_in_bytes + found.temp_size_in_bytes
    predicted = tile_bytes(problem, METHODS, 256)
    assert 0.7 * planned < predicted < 1.5 * planned


@pytest.mark.parametrize("dim", [2, 5, 12, 50])
def test_prediction_is_near_what_making_an_anchor_needs(dim: int) -> None:
    problem, methods, R = jaxlsgd.problems.linear(dim, 10), (jaxlsgd.one_step(),), 64
    program = make_program(problem, methods, LOCAL_SGD)
    data = make_data(problem, "float32")
    state = jax.eval_shape(lambda d: start_tile(program, d, R), data)
    (i,) = program.anchored
    compiled = roll.lower(program.accumulators[i], data.init, state.statistics[i]).compile()
    found = compiled.memory_analysis()
    planned = found.argument_size_in_bytes + found.temp_size_in_bytes
    planned += found.output_size_in_bytes - found.alias_size_in_bytes
    assert 0.7 * planned < tile_bytes(problem, methods, R) < 1.5 * planned


def test_the_largest_tile_fits_and_a_larger_one_does_not() -> None:
    problem = jaxlsgd.problems.linear(5, 10)
    budget = 20_000_000
    size = largest_tile(problem, METHODS, budget)
    assert tile_bytes(problem, METHODS, size) <= budget
    assert tile_bytes(problem, METHODS, 2 * size) > budget


RANDOM_SCALING = (jaxlsgd.random_scaling(),)
DIAGONAL = (jaxlsgd.random_scaling(mode="diagonal"),)


def planned_bytes(
    problem: jaxlsgd.Problem,
    methods: tuple,
    slots: int,
    R: int,
    algorithm: jaxlsgd.Algorithm = LOCAL_SGD,
) -> int:
    """What the compiler plans for a block, from shapes alone."""
    program = make_program(problem, methods, algorithm)
    data = make_data(problem, "float32")
    plan = jaxlsgd.schedules.constant(1).plan(jaxlsgd.schedules.power_decay(0.5), num_steps=64)
    block = lay_out(plan).groups[0][0].block
    syncs = jax.tree.map(lambda leaf: np.resize(leaf, slots), block.syncs)
    state = jax.eval_shape(lambda d: start_tile(program, d, R), data)
    keys = jax.eval_shape(lambda: replication_keys(jax.random.key(0), jnp.arange(R)))
    block = block._replace(syncs=syncs)
    given = Supply(keys, None)
    found = run_block.lower(program, slots, data, given, state, block).compile()
    analysis = found.memory_analysis()
    return analysis.argument_size_in_bytes + analysis.temp_size_in_bytes


@pytest.mark.parametrize(
    ("problem", "methods"),
    [
        (jaxlsgd.problems.linear(40, 2), RANDOM_SCALING),
        (jaxlsgd.problems.logistic(12, 20), DIAGONAL),
        (jaxlsgd.problems.linear(20, 200), DIAGONAL),
    ],
    ids=["matrices", "many clients", "more clients than are unrolled"],
)
@pytest.mark.parametrize("slots", [SLOTS[0], BLOCK_STEPS], ids=["sparse", "dense"])
def test_prediction_covers_other_shapes(
    problem: jaxlsgd.Problem, methods: tuple, slots: int
) -> None:
    planned = planned_bytes(problem, methods, slots, 32)
    assert 0.9 * planned < tile_bytes(problem, methods, 32) < 1.5 * planned


@pytest.mark.parametrize("slots", [SLOTS[0], BLOCK_STEPS], ids=["sparse", "dense"])
@pytest.mark.parametrize("name", ["fedprox", "adam everywhere"])
def test_prediction_counts_what_an_algorithm_keeps(name: str, slots: int) -> None:
    algorithm = ALGORITHMS[name]()
    problem = jaxlsgd.problems.linear(12, 20)
    planned = planned_bytes(problem, DIAGONAL, slots, 32, algorithm)
    predicted = tile_bytes(problem, DIAGONAL, 32, algorithm=algorithm)
    assert 0.95 * planned < predicted < 1.5 * planned
    if name != "fedprox":
        assert tile_bytes(problem, DIAGONAL, 32) < 0.9 * planned  # what is kept is seen


def _adam_everywhere() -> jaxlsgd.Algorithm:
    """Two vectors per client and two at the server."""
    adam = optax.scale_by_adam()
    clients = jaxlsgd.algorithms.local_optimizer(optax.chain(adam, optax.scale(-1.0)))
    server = jaxlsgd.algorithms.server_optimizer(optax.chain(adam, optax.scale(-0.1)))
    parts = {"init_server": server.init_server, "receive": server.receive}
    return dataclasses.replace(clients, **parts)


ALGORITHMS = {
    "fedprox": lambda: jaxlsgd.algorithms.fedprox(0.1),
    "adam everywhere": functools.cache(_adam_everywhere),
}


def test_ten_thousand_parameters_in_diagonal_mode() -> None:
    problem = jaxlsgd.problems.linear(10_000, 2)
    assert largest_tile(problem, DIAGONAL, 2**30) >= 128
    plan = jaxlsgd.schedules.constant(2).plan(jaxlsgd.schedules.power_decay(1e-4), num_steps=4)
    found = jaxlsgd.simulate(
        jax.random.key(0), problem, plan, replications=2, tile_size=2, methods=DIAGONAL
    )
    rows = found.methods["random_scaling"]
    assert rows.half_width.shape == (1, 1, 2, 10_000)
    assert np.isfinite(rows.half_width).all()


def test_ten_contrasts_of_a_hundred_thousand_parameters() -> None:
    def observe(draws, client):
        return draws.normal[:-1].reshape(100, 999), draws.normal[-1] + client

    def loss(params, observation):
        features, target = observation
        score = jnp.sum(features * params["matrix"]) / 300 + params["vector"][0]
        return 0.5 * (score - target) ** 2

    init = {"matrix": np.zeros((100, 999), np.float32), "vector": np.zeros(100, np.float32)}
    problem = jaxlsgd.Problem(
        init=init, loss=loss, num_clients=2, draws=Draws(normal=99_901), observe=observe
    )
    contrasts = np.zeros((10, 100_000))
    contrasts[np.arange(10), 7 * np.arange(10)] = 1.0
    contrasts[:, -1] = -1.0
    methods = (jaxlsgd.random_scaling(contrasts=contrasts),)
    # Neither a matrix of the parameters nor anything of the order of one is kept.
    assert tile_bytes(problem, methods, 1) < 4 * 120 * 2 * 100_000
    plan = jaxlsgd.schedules.constant(2).plan(jaxlsgd.schedules.power_decay(0.1), num_steps=4)
    found = jaxlsgd.simulate(
        jax.random.key(0), problem, plan, replications=1, tile_size=1, methods=methods
    )
    rows = found.methods["random_scaling"]
    assert rows.half_width.shape == (1, 1, 1, 10)
    assert np.isfinite(rows.half_width).all()


def test_tiles_are_whole_vectors_or_what_there_is() -> None:
    problem = jaxlsgd.problems.linear(5, 10)
    each = tile_bytes(problem, METHODS, 1)
    assert largest_tile(problem, METHODS, 100 * each) == 96
    assert largest_tile(problem, METHODS, 5 * each) == 5
    assert largest_tile(problem, METHODS, 10**15) == 4096
    assert largest_tile(problem, METHODS, 10**15, widest=10**6) == 10**6
    with refused("budget_bytes", "memory"):
        largest_tile(problem, METHODS, each - 1)


def test_padding_and_precision_cost_memory() -> None:
    problem = jaxlsgd.problems.linear(5, 10)
    plain = tile_bytes(problem, METHODS, 1)
    assert plain < tile_bytes(problem, METHODS, 1, sublanes=8) < 8 / 5 * plain
    assert plain < tile_bytes(problem, METHODS, 1, dtype="float64") < 2 * plain


def test_default_tiles_stay_in_a_cache_where_there_is_one() -> None:
    small, large = jaxlsgd.problems.linear(5, 10), jaxlsgd.problems.linear(5, 60)
    assert default_tile(small, METHODS) == 512
    narrower = default_tile(large, METHODS)
    assert 16 <= narrower < 512
    assert tile_bytes(large, METHODS, narrower) <= CACHE_BYTES
    assert default_tile(small, METHODS, platform="gpu") == 4096
    # What fits no cache is run by sixteen, and what fits no budget one by one.
    assert default_tile(jaxlsgd.problems.linear(10_000, 2), DIAGONAL) == 16
    assert default_tile(jaxlsgd.problems.linear(3_000, 5_000), DIAGONAL) == 1


@pytest.mark.parametrize(("used", "released"), [(40, True), (10, False)])
def test_programs_are_forgotten_before_maps_run_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used: int, released: bool
) -> None:
    forgotten: list[int] = []
    monkeypatch.setattr("jax.clear_caches", lambda: forgotten.append(1))
    (tmp_path / "proc/sys/vm").mkdir(parents=True)
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/sys/vm/max_map_count").write_text("64\n")
    (tmp_path / "proc/self/maps").write_text("7f00-7f01 r-xp\n" * used)
    assert machine.release_programs(tmp_path) is released
    assert bool(forgotten) is released
    assert not machine.release_programs(tmp_path / "not Linux")
