"""Statistics of all replications: fed at synchronisations, measured when they are read."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlsgd.core.checks import Dtype
from jaxlsgd.core.estimator import (
    Accumulator,
    Anchored,
    Estimator,
    Horizon,
    Measurement,
    NotTabulated,
    Sync,
)
from jaxlsgd.core.forms import OuterProduct
from jaxlsgd.core.problem import Array, FlatFunctions
from jaxlsgd.engine import xla
from jaxlsgd.engine.layout import BLOCK_STEPS, Syncs
from jaxlsgd.engine.program import Loop, ProblemData, Program
from jaxlsgd.schedules import Plan

Statistics = tuple[Any, ...]  # a state per statistic; leaves (..., R), shared ones (...)


class Met(NamedTuple):
    """What a step met before it moved; at the first step of a round, the synchronised state."""

    average: Array  # (d, R)
    gradient: Array | None  # (d, R) mean gradient; a statistic may do without
    total: Array | None = (
        None  # (d, R) mean gradients of the round that ended added up, if asked for
    )
    anchored: tuple[Array, ...] | None = None  # the same at the anchors, per statistic with one


def axes_of(part: Accumulator, vector: Any) -> Any:
    """Where a state's leaves have the replications: last, or nowhere if all replications share them."""
    state = jax.eval_shape(part.init, jax.ShapeDtypeStruct(vector.shape, vector.dtype))
    if not part.shared:
        return jax.tree.map(lambda leaf: -1, state)
    fields = {
        name: jax.tree.map(lambda leaf, name=name: None if name in part.shared else -1, value)
        for name, value in state._asdict().items()
    }
    return type(state)(**fields)


def start(program: Program, average: Array, vector: Array) -> Statistics:
    """All statistics empty."""
    return tuple(start_all(part, vector, average) for part in program.accumulators)


def start_all(part: Accumulator, vector: Array, average: Array) -> Any:
    """One statistic of all replications, empty."""
    return jax.vmap(part.init, in_axes=-1, out_axes=axes_of(part, vector))(average)


def update_all(
    part: Accumulator, vector: Array, state: Any, sync: Sync, rolled: bool = False
) -> Any:
    """One statistic of all replications, a round further; `rolled` where the caller rolls it."""
    axes = axes_of(part, vector)
    axis: list[Any] = [None if leaf is None else -1 for leaf in sync[3:-1]]
    given: Any = Sync(-1, None, None, *axis)
    update = part.rolling.add if part.rolling and rolled else part.update
    return jax.vmap(update, in_axes=(axes, given), out_axes=axes)(state, sync)


def feed(
    program: Program,
    data: ProblemData,
    statistics: Statistics,
    met: Met,
    hessian: Array | None,
    at: Syncs,
    rolled: bool = True,
) -> Statistics:
    """Feeds one synchronisation to every statistic, where there is one.

    With `rolled`, the caller rolls those that ask for it by itself, see `roll`.
    """
    gradient = met.gradient if program.needs_gradient else None
    sync = Sync(met.average, at.E, at.eta, gradient, hessian, met.total, share=at.share)
    fed = []
    sums = iter(met.anchored or ())
    for part, old in zip(program.accumulators, statistics, strict=True):
        given = (
            sync._replace(anchored=Anchored(next(sums), observations=None)) if part.anchor else sync
        )
        with jax.named_scope("statistics"):
            new = update_all(part, data.init, old, given, rolled)
            fed.append(jax.tree.map(lambda a, b: jnp.where(at.valid, a, b), new, old))
    return tuple(fed)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def roll(part: Accumulator, vector: Array, state: Any) -> Any:
    """Rolls a statistic of all replications."""
    assert part.rolling is not None
    axes = axes_of(part, vector)
    unit = xla.unit_of(vector)
    return xla.innermost(part.rolling.roll, (axes,), unit=unit, out_axes=axes)(state)


def anchors_of(program: Program, data: ProblemData, statistics: Statistics) -> tuple[Array, ...]:
    """Return the anchors of the statistics that have one, (d, R) each."""
    return tuple(
        places_of(program.accumulators[i], data.init, statistics[i])[0] for i in program.anchored
    )


def places_of(part: Accumulator, vector: Array, state: Any) -> Array:
    """Return the anchor of a statistic and the one before, (2, d, R)."""
    assert part.anchor is not None
    places = jax.vmap(part.anchor.places, in_axes=(axes_of(part, vector),), out_axes=-1)
    return places(state).astype(vector.dtype)


class HessianPairs(NamedTuple):
    """Pairs of steps of a block whose Hessians clients send."""

    at: Any  # (P,) int32, which pairs of the block
    weight: Any  # (P, 2, groups) observations of each step, by group
    count: Any  # () int32, how many pairs there are; those behind them have no weight


# Room for pairs of steps, where the loop over them has a known length.
HESSIAN_ROOMS = (1, 4, 16, BLOCK_STEPS // 2)


def hessian_pairs(loop: Loop, *weights: np.ndarray) -> HessianPairs | None:
    """Return the pairs of a block, or None if it has none.

    Args:
      loop: the form of the loop over pairs.
      weights: observations by step of the block and group, (B, groups); of several lanes, which get an axis.
    """
    by_pair = np.stack([each.reshape(BLOCK_STEPS // 2, 2, -1) for each in weights])
    at = np.flatnonzero(by_pair.any((0, 2, 3)))
    if not len(at):
        return None
    rooms = HESSIAN_ROOMS[-1:] if loop.partial else HESSIAN_ROOMS
    room = next(room for room in rooms if len(at) <= room)
    places = np.zeros(room, np.int32)
    places[: len(at)] = at
    kept = by_pair[:, places]
    kept[:, len(at) :] = 0.0
    return HessianPairs(places, kept if len(weights) > 1 else kept[0], np.int32(len(at)))


def hessians_at(
    functions: FlatFunctions, data: ProblemData, places: Array, seen: Any, weight: Array
) -> tuple[Array, Array]:
    """Return the Hessians of one step at an anchor by group, and their difference from those at the one before.

    Args:
      functions: the problem's functions.
      data: the problem's numbers.
      places: the two anchors, (2, d, R).
      seen: the observations of the step.
      weight: how many they are, by group.
    """
    clients = data.weights.shape[0]
    here, before = (
        hessian_of(functions, data, jnp.broadcast_to(place, (clients, *place.shape)), seen)
        for place in places
    )
    here, before = xla.once(here, data.unit), xla.once(before, data.unit)
    return weight[:, None, None, None] * here, jnp.sum(weight) * (here - before)


def with_hessians(
    part: Accumulator, data: ProblemData, state: Any, sums: Array, difference: Array, counts: Array
) -> Any:
    """Return a statistic with these Hessians in it."""
    assert part.anchor is not None
    axes = axes_of(part, data.init)
    add = jax.vmap(part.anchor.add_hessians, in_axes=(axes, -1, -1, None), out_axes=axes)
    return add(state, sums, difference, counts)


def mean_hessian(
    program: Program, functions: FlatFunctions, data: ProblemData, clients: Array, seen: Any
) -> Array | None:
    """Return Σ_k p_k ∇²f_k(x_k; ξ^k), (d, d, R), if a statistic needs it."""
    return hessian_of(functions, data, clients, seen) if program.needs_hessian else None


def hessian_of(functions: FlatFunctions, data: ProblemData, clients: Array, seen: Any) -> Array:
    """Return Σ_k p_k ∇²f_k(x_k; ξ^k), (d, d, R)."""
    found = jax.vmap(xla.over_replications(functions.hessian))(clients, seen)
    if not isinstance(found, OuterProduct):
        return xla.weighted_sum(data.weights, found)
    vector, scale = found.vector, data.weights if data.each else data.weights[:, None]
    if found.weight is not None:
        scale = xla.once(scale * found.weight, data.unit)
    outer = lambda s, v: (s * v)[:, None, :] * v[None, :, :]  # noqa: E731
    return xla.sum_clients(outer, scale, vector)


def measure(
    program: Program, data: ProblemData, statistics: Statistics, method: Estimator, plan: Plan
) -> Measurement:
    """One method's measurement of every replication, replications first."""
    states = states_of(program, statistics, method)
    return measure_states(method, data.init, states, plan, program.dtype)


# jaxlib's `eigh` waits, in a thread of XLA's pool on the CPU, for work that it hands to that same pool. Two
# programs that are in it at once can take all threads and wait for ever (seen with jaxlib 0.10.2, two cores).
_alone = threading.Lock()


def measure_states(
    method: Estimator, vector: Array, states: tuple[Any, ...], plan: Any, dtype: Dtype
) -> Measurement:
    """One method's measurement of states (..., R): in NumPy if it can be, or compiled, while no other is made.

    Runs in float64 are for those who want all digits: nothing is interpolated for them.
    """
    if method.reads_tiles and dtype == "float32":
        with contextlib.suppress(NotTabulated), np.errstate(all="ignore"):  # as JAX does
            return method.measure(_on_host(method, vector, states), plan)
    # A method that can do without the plan is not compiled again for plans of another length.
    given = Horizon.of(plan, dtype) if method.needs_plan else None
    with _alone:
        found = measure_compiled(method.measure, method.accumulators, vector, states, given)
        return jax.block_until_ready(found)


def _on_host(method: Estimator, vector: Array, states: tuple[Any, ...]) -> tuple[Any, ...]:
    """States as NumPy arrays, replications first."""

    def moved(leaf: Any, axis: int | None) -> np.ndarray:
        return np.asarray(leaf) if axis is None else np.moveaxis(np.asarray(leaf), axis, 0)

    axes = (axes_of(part, vector) for part in method.accumulators)
    return tuple(jax.tree.map(moved, state, axis) for state, axis in zip(states, axes, strict=True))


def states_of(program: Program, statistics: Statistics, method: Estimator) -> tuple[Any, ...]:
    """The states of a method's statistics; leaves (..., R), shared ones (...)."""
    return tuple(statistics[program.accumulators.index(part)] for part in method.accumulators)


@functools.partial(jax.jit, static_argnums=(0, 1))
def measure_compiled(
    measure: Any,
    parts: tuple[Accumulator, ...],
    vector: Array,
    states: Any,
    horizon: Horizon | None,
) -> Measurement:
    """The measurement of states (..., R), as one program."""
    axes = tuple(axes_of(part, vector) for part in parts)
    if not any(part.anchor for part in parts):  # short, or somebody's own
        return jax.vmap(measure, in_axes=(axes, None))(states, horizon)
    found = xla.innermost(measure, (axes, None), unit=xla.unit_of(vector))(states, horizon)
    return jax.tree.map(lambda x: jnp.moveaxis(x, -1, 0), found)
