"""Where observations come from, two steps at a time: declared draws, or the problem's own `sample`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxlsgd.core.problem import Array, Draws, FlatFunctions, at_time
from jaxlsgd.engine import draws as draws_lib
from jaxlsgd.engine import sampling, xla
from jaxlsgd.engine.innermost import KEY_KIND, VaryingKeys
from jaxlsgd.engine.layout import AHEAD_BYTES, BLOCK_STEPS
from jaxlsgd.engine.program import ProblemData, Program


class Supply(NamedTuple):
    """What a block takes its draws from: the replications' keys, or draws that were made ahead."""

    keys: Array | None  # (R,) typed keys
    ahead: Any  # None, leaves (B/2, K, count, R), complex, or of samples (B/2, 2, K, ..., R)


class Source(NamedTuple):
    """Observations of a block."""

    draw: Callable[[Array], Any]  # which pair of the block → what its observations are made of
    observe: Callable[[Any], tuple[Any, Any]]  # that → the two observations, (K, ..., R)


def supply(program: Program, data: ProblemData, keys: Array, first: int) -> Supply:
    """The draws of the block that starts at observation `first`.

    Cells that differ only in schedule, horizon or step size see the same data: one of these serves
    them all. Large problems draw within the block instead, and get their keys.
    """
    if not program.draws_ahead and not _samples_ahead(program, data):
        return Supply(keys, None)
    return Supply(None, _draw_block(program, data, keys, np.uint32(first)))


def _samples_ahead(program: Program, data: ProblemData) -> bool:
    """Whether a problem's own samples are made before the block: if few, as `sample` is then compiled once."""
    sample = program.structure.functions[1]
    if sample is None or program.algorithm.participation is not None:
        return False
    leaves, treedef = jax.tree.flatten(data.clients)
    shapes = tuple(jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in leaves)
    each = _sample_bytes(sample, program.structure.drifts, treedef, shapes)
    return BLOCK_STEPS * data.client_index.shape[0] * each <= AHEAD_BYTES


@functools.cache
def _sample_bytes(sample: Any, drifts: bool, treedef: Any, shapes: tuple[Any, ...]) -> int:
    key = jax.eval_shape(lambda: jax.random.key(0, impl=KEY_KIND))
    sample = at_time(sample, drifts, np.uint32(0))
    leaves = jax.tree.leaves(jax.eval_shape(sample, key, treedef.unflatten(shapes)))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


@functools.partial(jax.jit, static_argnums=0)
def _draw_block(program: Program, data: ProblemData, keys: Array, first: Array) -> Any:
    pairs = first // np.uint32(2) + jnp.arange(BLOCK_STEPS // 2, dtype=jnp.uint32)
    spec = program.structure.draws
    if spec is None:
        return lax.map(lambda pair: _sampled_pair(program, data, keys, pair), pairs)
    words = draws_lib.stream_keys(keys)
    return draws_lib.draw_pair(words, pairs[:, None, None, None], data.client_index, spec)


def make_source(
    program: Program, functions: FlatFunctions, data: ProblemData, given: Supply, first: Array
) -> Source:
    """Observations from `first` on."""
    spec = program.structure.draws
    start = first // np.uint32(2)
    if functions.observe is None or spec is None:
        return _sampled_source(program, data, given, start)
    axes, drifts = (-1, -1 if data.each else None), program.structure.drifts
    observe_at = functools.partial(at_time, functions.observe, drifts)

    def observe_one(one: Draws, t: Any) -> Any:
        observe = jax.vmap(xla.over_replications(observe_at(t), in_axes=axes))
        return observe(jax.tree.map(lambda x: x.astype(program.dtype), one), data.clients)

    def observe_both(pair: Any) -> tuple[Any, Any]:
        pair, t = pair if drifts else (pair, np.uint32(0))
        even, odd = draws_lib.split_pair(pair)
        return observe_one(even, t), observe_one(odd, t + np.uint32(1))

    def timed(draw: Callable[[Array], Draws]) -> Callable[[Array], Any]:
        """With the time of the first of the two, where that matters."""
        times = lambda i: np.uint32(2) * (start + i.astype(jnp.uint32))  # noqa: E731
        return (lambda i: (draw(i), times(i))) if drifts else draw

    if given.ahead is not None:
        return Source(timed(functools.partial(xla.element, given.ahead)), observe_both)
    assert given.keys is not None
    words = draws_lib.stream_keys(given.keys)

    def draw(i: Array) -> Draws:
        return draws_lib.draw_pair(words, start + i.astype(jnp.uint32), data.client_index, spec)

    return Source(timed(draw), observe_both)


def _sampled_source(program: Program, data: ProblemData, given: Supply, start: Array) -> Source:
    def split(pair: Any) -> tuple[Any, Any]:
        return tuple(jax.tree.map(lambda x, half=half: x[half], pair) for half in (0, 1))

    if given.ahead is not None:
        return Source(functools.partial(xla.element, given.ahead), split)
    assert given.keys is not None
    keys = given.keys
    return Source(lambda i: _sampled_pair(program, data, keys, start + i.astype(jnp.uint32)), split)


def _sampled_pair(program: Program, data: ProblemData, keys: Array, pair: Array) -> Any:
    """Two observations of every client by the user's `sample`, (2, K, ..., R).

    The key of an observation is that of replication → t → client.
    """
    own, drifts = program.structure.flat_functions().sample, program.structure.drifts
    assert own is not None
    words = VaryingKeys(*draws_lib.stream_keys(keys))
    axes = (-1, -1 if data.each else None)

    def one(t: Array) -> Any:
        sample = sampling.over_replications(at_time(own, drifts, t), data.unit, axes)
        at_t = sampling.fold_in(words, t, data.unit)

        def of(index: Array, client: Any) -> Any:
            return sample(sampling.fold_in(at_t, index, data.unit), client)

        return jax.vmap(of)(data.client_index, data.clients)

    return jax.vmap(one)(np.uint32(2) * pair + jnp.arange(2, dtype=jnp.uint32))
