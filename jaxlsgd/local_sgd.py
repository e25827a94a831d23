"""Local SGD itself: all clients make a step at once, and a flag says where a round ends.

    x_k ← x_k + η u_k;   x̄ ← x̄ + η Σ_k p_k u_k;   where a round ends, x_k ← x̄

with u_k = −∇f_k(x_k; ξ_k) for plain SGD. The average is carried along: at the start of a round
every x_k equals x̄, so the second recursion *is* Σ_k p_k x_k, and one sum over clients a step serves
both the average and the mean gradient that the plug-in method needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxlsgd.base import Array, FlatFunctions, Observation
from jaxlsgd.forms import Scaled

# The engine multiplies by η_m, so the transformation itself has unit rate.
SGD = optax.sgd(1.0)
UNROLLED_CLIENTS = 32


class LocalState(NamedTuple):
    """Clients, their average, and the local transformation's state (None for plain SGD)."""

    clients: Array  # (K, d, replications)
    average: Array  # (d, replications)
    transform: Any = None  # leaves (K, ..., replications)


def once(x: Array, unit: Array) -> Array:
    """x, divided by a 1 that the compiler does not know.

    XLA's CPU compiler repeats cheap work inside every pass that uses it (a residual once for each of d
    coordinates, a generator's rounds once for each of its two words), but never a division: what comes
    before one is computed once and written down. It ignores `lax.optimization_barrier`.
    """
    return x / unit


def weighted_sum(weights: Array, values: Array | Scaled) -> Array:
    """Σ_k w_k v_k over the leading axis, keeping the replications innermost."""
    count = weights.shape[0]
    if isinstance(values, Scaled):
        return sum_clients(lambda k: (weights[k] * values.scale[k]) * values.vector[k], count)
    return sum_clients(lambda k: weights[k] * values[k], count)


def sum_clients(term: Callable[[Any], Array], num_clients: int) -> Array:
    """Σ_k term(k), as plain additions for few clients.

    XLA's CPU reduction over a leading axis is not vectorised along the last, and a product that is
    sliced afterwards is written out whole first; a sum of products of slices is one pass.
    """
    if num_clients > UNROLLED_CLIENTS:
        return jnp.sum(jax.vmap(term)(jnp.arange(num_clients)), axis=0)
    total = term(0)
    for k in range(1, num_clients):
        total = total + term(k)
    return total


def over_replications(function: Any, in_axes: Any = -1, out_axes: Any = -1) -> Any:
    """Vmaps over replications, which are the last axis in memory."""
    return jax.vmap(function, in_axes=in_axes, out_axes=out_axes)


def start(
    vector: Array, num_clients: int, num_replications: int, transform: optax.GradientTransformation
) -> LocalState:
    """All clients of all replications at x_0."""
    average = jnp.broadcast_to(vector[:, None], (vector.shape[0], num_replications))
    clients = jnp.broadcast_to(average, (num_clients, *average.shape))
    return LocalState(clients, average, _fresh(transform, clients))


def local_step(
    state: LocalState,
    observations: Observation,
    eta: Array,
    ends: Array,
    weights: Array,
    unit: Array,
    functions: FlatFunctions,
    transform: optax.GradientTransformation = SGD,
) -> tuple[LocalState, Array]:
    """One local step of every client in every replication.

    Args:
      state: where the clients are.
      observations: leaves (K, ..., replications).
      eta: step size η_m, (); 0 makes the step a pure evaluation.
      ends: whether the round ends with this step, () bool.
      weights: p_k, (K,).
      unit: 1, see `once`.
      functions: the problem's functions.
      transform: optax transformation of unit learning rate, restarted each round.

    Returns:
      The state after the step, and Σ_k p_k ∇f_k(x_k; ξ_k) before it, (d, replications).
    """
    gradients = jax.vmap(over_replications(functions.gradient))(state.clients, observations)
    if isinstance(gradients, Scaled):
        gradients = Scaled(once(gradients.scale, unit), gradients.vector)
        full = gradients.scale[:, None, :] * gradients.vector
    else:
        gradients = full = once(gradients, unit)
    mean = once(weighted_sum(weights, gradients), unit)
    if transform is SGD:
        average = state.average - eta * mean
        moved = state.clients - eta * full
        return LocalState(jnp.where(ends, average, moved), average), mean
    updates, inner = _transformed(transform, full, state)
    average = state.average + eta * weighted_sum(weights, updates)
    clients = jnp.where(ends, average, state.clients + eta * updates)
    fresh = _fresh(transform, clients)
    # An evaluation (η = 0) must not age a momentum.
    keep = jax.tree.map(lambda new, old: jnp.where(eta == 0, old, new), inner, state.transform)
    inner = jax.tree.map(lambda new, old: jnp.where(ends, new, old), fresh, keep)
    return LocalState(clients, average, inner), mean


def _fresh(transform: optax.GradientTransformation, clients: Array) -> Any:
    if transform is SGD:
        return None
    return jax.vmap(jax.vmap(transform.init, in_axes=-1, out_axes=-1))(clients)


def _transformed(
    transform: optax.GradientTransformation, gradients: Array, state: LocalState
) -> tuple[Array, Any]:
    update = jax.vmap(over_replications(transform.update))
    return update(gradients, state.transform, state.clients)
