"""Local SGD on given rows: compiled rounds, orders of rows, and methods updated on the host.

A step takes B_k ~ n_k/N rows of every client, so that all clients pass through their rows together, in N steps.

Why not the engine: it draws observations from counter-based random numbers, one per client and step, for many
replications of a length that is known beforehand. Here one path meets given rows in batches of unequal size, in
an order that the host makes while a file is read, until its variance is small enough. What is shared are the
contracts (`Estimator`, `Sync`), the losses and the round itself: a test compares it with
`algorithms.plain_rounds`, with the mean loss of a batch as the loss of an observation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from jaxlsgd.core.estimator import Estimator, Sync
from jaxlsgd.core.problem import Array
from jaxlsgd.problems.losses import Loss
from jaxlsgd.regression.pilot import ALPHA, Rule, Whitened
from jaxlsgd.schedules import Plan

_HIGH = lax.Precision.HIGHEST
# A (K, B, d), y (K, B), weights (K, B) or (K, 1), offsets (K, B) or 0
_Batch = tuple[Array, Array, Array, Any]


class ClientRows(NamedTuple):
    """Whitened rows by client, padded to one length."""

    A: Any  # (K, length, d)
    y: Any  # (K, length)
    weight: Any = None  # (K, length), with mean 1 in every client
    offset: Any = None  # (K, length)


class Setting(NamedTuple):
    """Numbers of a pass besides its rows."""

    weights: Any  # (K,) p_k
    tuning: Any  # of the family
    penalty: Any  # (d, d) the ridge's Hessian in whitened coordinates


class Order(NamedTuple):
    """Which rows each step takes: (rounds, E, K, B), with what weight; 0 is padding."""

    index: Any
    weight: Any


class Batches(NamedTuple):
    """Whitened rows in the order in which they are met; rows of zeros are padding."""

    A: Any  # (steps, K, B, d)
    y: Any  # (steps, K, B)
    weight: Any  # (K,) of each row in the mean of its step
    row_weight: Any = None  # (steps, K, B), with mean 1 in every client
    offset: Any = None  # (steps, K, B)


class Carried(NamedTuple):
    """State between passes."""

    x: Any  # (d,) x̄
    states: tuple[Any, ...]  # of the methods


def setting(space: Whitened) -> Setting:
    """Return the numbers of a pass in whitened coordinates."""
    numbers = (space.rows.p, space.objective.tuning, space.penalty)
    return Setting(*(np.asarray(one, np.float32) for one in numbers))


def plan_of(rule: Rule, rounds: int) -> Plan:
    """Return the plan of the rounds that were run."""
    eta = rule.eta * np.arange(1, rounds + 1.0) ** -ALPHA
    return Plan.from_arrays(np.full(rounds, rule.E), eta)


def etas(rule: Rule, before: int, rounds: int) -> NDArray[np.float32]:
    """Return η_m of some rounds, after those before."""
    m = np.arange(before, before + rounds) + 1.0
    return (rule.eta * m**-ALPHA).astype(np.float32)


def start(methods: Sequence[Estimator], x: Any) -> Carried:
    """Return the state before the first pass."""
    first = jnp.asarray(x, jnp.float32)
    return Carried(first, init(tuple(methods), first))


# Compiled as one program: run eagerly, each operation would be compiled by itself.
@functools.partial(jax.jit, static_argnums=0)
def init(methods: tuple[Estimator, ...], x: Any) -> tuple[Any, ...]:
    """Return the states of the methods before the first round."""
    return tuple(method.init(x) for method in methods)


def on_device(tree: Any) -> Any:
    """Move arrays to the device, where they stay between passes."""
    return jax.tree.map(jnp.asarray, tree)


@functools.partial(jax.jit, static_argnames=("loss", "methods"))
def run_pass(
    loss: Loss,
    methods: tuple[Estimator, ...],
    rows: ClientRows,
    setting: Setting,
    order: Order,
    eta: Any,
    carried: Carried,
) -> tuple[Carried, Any]:
    """Run rounds over the rows of an order; return the state and the averages (rounds, d)."""

    def take(step: Any) -> _Batch:
        index, weight = step
        who = jnp.arange(index.shape[0])[:, None]
        if rows.weight is not None:
            weight = weight * rows.weight[who, index]
        offset = 0.0 if rows.offset is None else rows.offset[who, index]
        return rows.A[who, index], rows.y[who, index], weight, offset

    return _rounds(loss, methods, setting, take, tuple(order), eta, carried)


@functools.partial(jax.jit, static_argnames=("loss", "methods", "outside"))
def run_batches(
    loss: Loss,
    methods: tuple[Estimator, ...],
    batches: Batches,
    setting: Setting,
    eta: Any,
    carried: Carried,
    outside: bool = False,
) -> tuple[Carried, Any]:
    """Run rounds over rows that lie in the order of the steps.

    With `outside` the states of the methods stay as they are. Averages, gradients, Hessians and sums of gradients
    of each round are returned instead, for `Hosted`; None stands for what no method needs.
    """
    A, y, weight, row_weight, offset = batches
    rounds = eta.shape[0]

    def take(step: Any) -> _Batch:
        (i,) = step
        each = weight[:, None] if row_weight is None else weight[:, None] * row_weight[i]
        return A[i], y[i], each, 0.0 if offset is None else offset[i]

    steps = jnp.arange(A.shape[0]).reshape(rounds, -1)
    return _rounds(loss, methods, setting, take, (steps,), eta, carried, outside)


def _rounds(
    loss: Loss,
    methods: tuple[Estimator, ...],
    setting: Setting,
    take: Callable[[Any], _Batch],
    steps: tuple[Any, ...],
    eta: Any,
    carried: Carried,
    outside: bool = False,
) -> tuple[Carried, Any]:
    """Run rounds over steps, (rounds, E, …), whose rows `take` gives."""
    E = steps[0].shape[1]
    p = setting.weights
    hessian = any(method.needs_hessian for method in methods)

    def predictors(x: Any, A: Any) -> Any:
        return jnp.einsum("kbd,kd->kb", A, x, precision=_HIGH)

    def gradients(x: Any, batch: _Batch) -> Any:
        A, y, weight, offset = batch  # x (K, d)
        slope = weight * loss.first(jnp, predictors(x, A) + offset, y, setting.tuning)
        penalty = jnp.matmul(x, setting.penalty, precision=_HIGH)
        return jnp.einsum("kb,kbd->kd", slope, A, precision=_HIGH) + penalty

    def curvature(x: Any, batch: _Batch) -> Any:
        A, y, weight, offset = batch
        bend = loss.second(jnp, predictors(x, A) + offset, y, setting.tuning)
        bend = p[:, None] * weight * bend
        flat = A.reshape(-1, A.shape[-1])
        scaled = bend.reshape(-1, 1) * flat
        return jnp.matmul(scaled.T, flat, precision=_HIGH) + setting.penalty

    def one_round(carried: Carried, this: Any) -> tuple[Carried, Any]:
        inside, size, ahead = this
        every = (p.shape[0], carried.x.shape[0])

        def local_step(x: Any, step: Any) -> tuple[Any, None]:
            return x - size * gradients(x, take(step)), None

        clients, _ = lax.scan(local_step, jnp.broadcast_to(carried.x, every), inside)
        moved = jnp.matmul(p, clients - carried.x, precision=_HIGH)
        x = carried.x + moved
        fresh, spread = take(ahead), jnp.broadcast_to(x, every)
        gradient = None
        if any(method.needs_gradient for method in methods):
            gradient = jnp.matmul(p, gradients(spread, fresh), precision=_HIGH)
        bend = curvature(spread, fresh) if hessian else None
        sync = Sync(x, E, size, gradient, bend, -moved / size)
        if outside:
            return Carried(x, carried.states), (x, gradient, bend, sync.gradient_sum)
        states = tuple(
            method.update(state, sync)
            for method, state in zip(methods, carried.states, strict=True)
        )
        return Carried(x, states), x

    # Curvature and noise at an average are measured on the first rows of the next round.
    ahead = tuple(jnp.roll(part[:, 0], -1, axis=0) for part in steps)
    return lax.scan(one_round, carried, (steps, eta, ahead))


def pad(values: Any, sizes: NDArray[np.int64], longest: int) -> NDArray[np.float32]:
    """Pad what is sorted by client, (n, …), to (K, length, …) with zeros."""
    found = np.zeros((len(sizes), padded(longest), *values.shape[1:]), np.float32)
    ends = np.cumsum(sizes)
    for k, (end, n) in enumerate(zip(ends.tolist(), sizes.tolist(), strict=True)):
        found[k, :n] = values[end - n : end]
    return found


def reshuffled(
    rng: np.random.Generator, sizes: NDArray[np.int64], steps: int, E: int, width: int
) -> Order:
    """Order all rows at random, each once; clients with fewer rows than steps begin again."""
    index = np.zeros((steps, len(sizes), width), np.int32)
    weight = np.zeros((steps, len(sizes), width), np.float32)
    for k, n in enumerate(sizes.tolist()):
        if n == 0:  # stays where it is
            continue
        if n < steps:
            times = -(-steps // n)
            index[:, k, 0] = np.concatenate([rng.permutation(n) for _ in range(times)])[:steps]
            weight[:, k, 0] = 1.0
            continue
        ends = np.arange(steps + 1) * n // steps
        counts = np.diff(ends)
        taken = np.arange(width)[None, :] < counts[:, None]
        place = np.minimum(ends[:-1, None] + np.arange(width)[None, :], n - 1)
        index[:, k] = np.where(taken, rng.permutation(n).astype(np.int32)[place], 0)
        weight[:, k] = np.where(taken, steps / n, 0)
    return _in_rounds(index, weight, E)


def dealt(
    rng: np.random.Generator,
    by_client: NDArray[np.intp],
    sizes: NDArray[np.int64],
    steps: int,
    width: int,
) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
    """Return which row each step takes, each once, for rows that are not sorted by client.

    Clients with fewer rows than steps stand still in the others.

    Args:
      rng: of the orders.
      by_client: (n,) the rows of the first client, of the second, and so on.
      sizes: (K,) of clients.
      steps: in which all rows are met once.
      width: room for rows of a client in a step.

    Returns:
      Numbers of rows, (steps, K, width), with n for padding, and the weight of each, (K,).
    """
    index = np.full((steps, len(sizes), width), len(by_client))
    weight = np.zeros(len(sizes), np.float32)
    ends = np.cumsum(sizes)
    for k, (end, n) in enumerate(zip(ends.tolist(), sizes.tolist(), strict=True)):
        own = by_client[end - n : end]
        if n == 0:
            continue
        if (
            n < steps
        ):  # each row once all the same, so that the spread of rounds is that of the sample
            index[rng.choice(steps, n, replace=False), k, 0] = own
            weight[k] = steps / n
            continue
        each = n // steps
        mixed = rng.permutation(own)
        index[:, k, :each] = mixed[: each * steps].reshape(steps, each)
        more = np.flatnonzero(np.diff(np.arange(steps + 1) * n // steps) > each)
        index[more, k, each] = mixed[each * steps :]
        weight[k] = steps / n
    return index, weight


def with_replacement(
    rng: np.random.Generator, sizes: NDArray[np.int64], steps: int, E: int, width: int
) -> Order:
    """Draw about as many rows, each from all of the client's."""
    counts = np.maximum(1, sizes // steps)
    taken = np.arange(width)[None, :] < counts[:, None]
    index = np.zeros((steps, len(sizes), width), np.int32)
    for k, (n, count) in enumerate(zip(sizes.tolist(), counts.tolist(), strict=True)):
        index[:, k, :count] = rng.integers(0, n, (steps, count))
    weight = np.where(taken, 1 / counts[:, None], 0).astype(np.float32)
    return _in_rounds(index, np.broadcast_to(weight, index.shape), E)


def _in_rounds(index: NDArray[Any], weight: NDArray[Any], E: int) -> Order:
    shape = (len(index) // E, E, *index.shape[1:])
    return Order(index.reshape(shape), weight.reshape(shape))


def padded(size: int) -> int:
    """Round a length up to one of eight per doubling, so that tables share programs."""
    unit = 1 << max(3, (size - 1).bit_length() - 3)
    return -(-size // unit) * unit


def on_host(methods: tuple[Estimator, ...]) -> bool:
    """Return whether all methods can be updated by NumPy, outside a program."""
    return all(part.on_host is not None for method in methods for part in method.accumulators)


class Hosted:
    """States of methods that NumPy updates, one per accumulator of each method."""

    def __init__(self, methods: tuple[Estimator, ...], x: Any) -> None:
        self.parts = [
            [part.on_host for part in method.accumulators if part.on_host is not None]
            for method in methods
        ]
        self.states = tuple(tuple(part.init(x) for part in parts) for parts in self.parts)

    def update(self, E: int, eta: Any, rounds: tuple[Array | None, ...]) -> None:
        """Update the states by the rounds that `run_batches` returned."""
        wide = [None if one is None else np.asarray(one, np.float64) for one in rounds]
        for m, size in enumerate(np.asarray(eta, np.float64)):
            x, gradient, hessian, total = (None if one is None else one[m] for one in wide)
            sync = Sync(x, E, size, gradient, hessian, total)
            self.states = tuple(
                tuple(part.update(state, sync) for part, state in zip(parts, states, strict=True))
                for parts, states in zip(self.parts, self.states, strict=True)
            )
