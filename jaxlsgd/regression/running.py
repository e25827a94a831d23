"""Local SGD on the rows of clients, a compiled pass at a time, with statistics streamed along the path.

A step takes B_k ~ n_k/N rows of every client, so that all clients pass through their rows together, in N steps.
This is `algorithms.plain_rounds` with the mean loss of those rows as the loss of an observation; the gradient
is written out, because a loss of aᵀu has a closed one. Tests compare the two.
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

_HIGH = lax.Precision.HIGHEST
Derivatives = tuple[Callable[..., Any], Callable[..., Any]]


class ClientRows(NamedTuple):
    """Whitened rows by client, padded to one length."""

    A: Any  # (K, length, d)
    y: Any  # (K, length)


class Setting(NamedTuple):
    """Numbers that a pass needs besides rows."""

    weights: Any  # (K,) p_k
    tuning: Any  # of the family
    penalty: Any  # (d, d) the ridge's Hessian in whitened coordinates


class Order(NamedTuple):
    """Which rows each step takes: (rounds, E, K, B), with what weight; 0 is padding."""

    index: Any
    weight: Any


class Carried(NamedTuple):
    """Between passes."""

    x: Any  # (d,) x̄
    states: tuple[Any, ...]  # of the methods


def start(methods: Sequence[Estimator], x: Any) -> Carried:
    """Before the first pass."""
    first = jnp.asarray(x, jnp.float32)
    return Carried(first, tuple(method.init(first) for method in methods))


def on_device(tree: Any) -> Any:
    """Arrays that stay where they are between passes."""
    return jax.tree.map(jnp.asarray, tree)


@functools.partial(jax.jit, static_argnames=("derivatives", "methods"))
def run_pass(
    derivatives: Derivatives,
    methods: tuple[Estimator, ...],
    rows: ClientRows,
    setting: Setting,
    order: Order,
    eta: Any,
    carried: Carried,
) -> tuple[Carried, Any]:
    """Rounds over the rows of an order; returns what is carried on, and the averages (rounds, d)."""
    first, second = derivatives
    E = order.index.shape[1]
    p = setting.weights
    hessian = any(method.needs_hessian for method in methods)

    def batch(index: Any, weight: Any) -> tuple[Any, Any, Any]:
        who = jnp.arange(index.shape[0])[:, None]
        return rows.A[who, index], rows.y[who, index], weight

    def gradients(x: Any, taken: tuple[Any, Any, Any]) -> Any:
        A, y, weight = taken  # (K, B, d), (K, B), (K, B); x (K, d)
        z = jnp.sum(A * x[:, None, :], axis=-1)
        slope = weight * first(jnp, z, y, setting.tuning)
        penalty = jnp.matmul(x, setting.penalty, precision=_HIGH)
        return jnp.sum(slope[..., None] * A, axis=1) + penalty

    def curvature(x: Any, taken: tuple[Any, Any, Any]) -> Any:
        A, y, weight = taken
        z = jnp.sum(A * x, axis=-1)
        bend = p[:, None] * weight * second(jnp, z, y, setting.tuning)
        flat = A.reshape(-1, A.shape[-1])
        scaled = bend.reshape(-1, 1) * flat
        return jnp.matmul(scaled.T, flat, precision=_HIGH) + setting.penalty

    def local_step(x: Any, step: Any) -> tuple[Any, None]:
        taken, size = batch(*step[:2]), step[2]
        return x - size * gradients(x, taken), None

    def one_round(carried: Carried, this: Any) -> tuple[Carried, Any]:
        index, weight, size, ahead = this
        clients = jnp.broadcast_to(carried.x, (p.shape[0], carried.x.shape[0]))
        sizes = jnp.broadcast_to(size, (E,))
        clients, _ = lax.scan(local_step, clients, (index, weight, sizes))
        moved = jnp.matmul(p, clients - carried.x, precision=_HIGH)
        x = carried.x + moved
        fresh = batch(*ahead)
        gradient = None
        if any(method.needs_gradient for method in methods):
            every = jnp.broadcast_to(x, clients.shape)
            gradient = jnp.matmul(p, gradients(every, fresh), precision=_HIGH)
        bend = curvature(x, fresh) if hessian else None
        sync = Sync(x, E, size, gradient, bend, -moved / size)
        states = tuple(
            method.update(state, sync)
            for method, state in zip(methods, carried.states, strict=True)
        )
        return Carried(x, states), x

    # Curvature and noise at an average are measured on rows of the round to come.
    ahead = tuple(jnp.roll(part[:, 0], -1, axis=0) for part in order)
    return lax.scan(one_round, carried, (order.index, order.weight, eta, ahead))


def by_client(
    A: Any, y: Any, sizes: NDArray[np.int64], longest: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Rows that are sorted by client, (n, d) and (n,), as (K, length, d) and (K, length) with zeros."""
    shape = (len(sizes), padded(longest))
    rows, targets = np.zeros((*shape, A.shape[1]), np.float32), np.zeros(shape, np.float32)
    ends = np.cumsum(sizes)
    for k, (end, n) in enumerate(zip(ends.tolist(), sizes.tolist(), strict=True)):
        rows[k, :n], targets[k, :n] = A[end - n : end], y[end - n : end]
    return rows, targets


def reshuffled(
    rng: np.random.Generator, sizes: NDArray[np.int64], steps: int, E: int, width: int
) -> Order:
    """All rows once, in a fresh random order; clients with fewer rows than steps begin again."""
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


def with_replacement(
    rng: np.random.Generator, sizes: NDArray[np.int64], steps: int, E: int, width: int
) -> Order:
    """As many rows, each drawn from all of the client's."""
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
    """The next length of which there are few, so that tables share programs: eight to a doubling."""
    unit = 1 << max(3, (size - 1).bit_length() - 3)
    return -(-size // unit) * unit
