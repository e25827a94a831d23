"""The predicted memory of a tile against what the compiler plans."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import jaxlsgd
from jaxlsgd import tile
from jaxlsgd.blocks import lay_out
from jaxlsgd.draws import replication_keys
from jaxlsgd.memory import largest_tile, tile_bytes

METHODS = (jaxlsgd.random_scaling(), jaxlsgd.plug_in())


@pytest.mark.parametrize(("dim", "clients", "name"), [(5, 10, "C1"), (3, 4, "P(1/2)")])
def test_prediction_is_near_what_is_compiled(dim: int, clients: int, name: str) -> None:
    problem = jaxlsgd.problems.linear(dim, clients)
    program = tile.make_program(problem, METHODS)
    data = jax.tree.map(jnp.asarray, tile.make_data(problem, "float32"))
    keys = replication_keys(jax.random.key(0), jnp.arange(256))
    plan = jaxlsgd.schedules.paper(name).plan(jaxlsgd.schedules.power_decay(0.5), num_steps=2000)
    call = lay_out(plan).groups[0][-2]
    state = tile.start_tile(program, data, 256)
    compiled = tile.run_block.lower(program, call.slots, data, keys, state, call.block).compile()
    found = compiled.memory_analysis()
    planned = found.argument_size_in_bytes + found.temp_size_in_bytes
    predicted = tile_bytes(problem, METHODS, 256)
    assert 0.7 * planned < predicted < 1.5 * planned


def test_the_largest_tile_fits_and_a_larger_one_does_not() -> None:
    problem = jaxlsgd.problems.linear(5, 10)
    budget = 20_000_000
    size = largest_tile(problem, METHODS, budget)
    assert tile_bytes(problem, METHODS, size) <= budget
    assert tile_bytes(problem, METHODS, 2 * size) > budget
