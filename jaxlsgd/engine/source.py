"""Where observations come from, two steps at a time: declared draws, or the problem's own `sample`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlsgd.core.problem import Array, Draws, FlatFunctions
from jaxlsgd.engine import draws as draws_lib
from jaxlsgd.engine import xla
from jaxlsgd.engine.layout import BLOCK_STEPS
from jaxlsgd.engine.program import ProblemData, Program


class Supply(NamedTuple):
    """What a block takes its draws from: the replications' keys, or draws that were made ahead."""

    keys: Array | None  # (R,) typed keys
    ahead: Draws | None  # leaves (B/2, K, count, R), complex


class Source(NamedTuple):
    """Observations of a block."""

    draw: Callable[[Array], Any]  # which pair of the block → what its observations are made of
    observe: Callable[[Any], tuple[Any, Any]]  # that → the two observations, (K, ..., R)


def supply(program: Program, data: ProblemData, keys: Array, first: int) -> Supply:
    """The draws of the block that starts at observation `first`.

    Cells that differ only in schedule, horizon or step size see the same data: one of these serves
    them all. Large problems draw within the block instead, and get their keys.
    """
    if not program.draws_ahead:
        return Supply(keys, None)
    return Supply(None, _draw_block(program, data, keys, np.uint32(first)))


@functools.partial(jax.jit, static_argnums=0)
def _draw_block(program: Program, data: ProblemData, keys: Array, first: Array) -> Draws:
    spec = program.structure.draws
    assert spec is not None
    pairs = first // np.uint32(2) + jnp.arange(BLOCK_STEPS // 2, dtype=jnp.uint32)
    words = draws_lib.stream_keys(keys)
    return draws_lib.draw_pair(words, pairs[:, None, None, None], data.client_index, spec)


def make_source(
    program: Program, functions: FlatFunctions, data: ProblemData, given: Supply, first: Array
) -> Source:
    """Observations from `first` on."""
    spec = program.structure.draws
    start = first // np.uint32(2)
    if functions.observe is None or spec is None:
        assert given.keys is not None
        sample = functools.partial(_sampled, functions, data, given.keys)

        def draw_both(i: Array) -> tuple[Any, Any]:
            t = np.uint32(2) * (start + i.astype(jnp.uint32))
            return sample(t), sample(t + np.uint32(1))

        return Source(draw_both, lambda both: both)
    observe = jax.vmap(xla.over_replications(functions.observe, in_axes=(-1, None)))

    def observe_one(one: Draws) -> Any:
        return observe(jax.tree.map(lambda x: x.astype(program.dtype), one), data.clients)

    def observe_both(pair: Draws) -> tuple[Any, Any]:
        even, odd = draws_lib.split_pair(pair)
        return observe_one(even), observe_one(odd)

    if given.ahead is not None:
        return Source(functools.partial(xla.element, given.ahead), observe_both)
    assert given.keys is not None
    words = draws_lib.stream_keys(given.keys)

    def draw(i: Array) -> Draws:
        return draws_lib.draw_pair(words, start + i.astype(jnp.uint32), data.client_index, spec)

    return Source(draw, observe_both)


def _sampled(functions: FlatFunctions, data: ProblemData, keys: Array, t: Array) -> Any:
    """Observations by the user's `sample`, under the key of replication → t → client."""

    def one(key: Array, index: Array, client: Any) -> Any:
        assert functions.sample is not None
        key = jax.random.fold_in(jax.random.fold_in(key, t), index)
        return functions.sample(key, client)

    over_r = jax.vmap(one, in_axes=(0, None, None), out_axes=-1)
    return jax.vmap(over_r, in_axes=(None, 0, 0))(keys, data.client_index, data.clients)
