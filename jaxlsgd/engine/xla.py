"""What XLA asks for to be fast, in one place. The mathematics next door reads as if there were no compiler.

Found by reading the compiled programs and by timing them (CPU, one core, K = 10, d = 5):

- `once`: the CPU compiler repeats cheap work inside every pass that uses it (a residual once for each of
  d coordinates, a generator's rounds once for each of its two words), but never a division: what comes
  before one is computed once and written down. It ignores `lax.optimization_barrier`.
- `sum_clients`: its reduction over a leading axis is not vectorised along the last one, and a product that
  is sliced afterwards is written out whole first; a sum of products of slices is one pass (with 1,000
  clients 42 million client-steps per second instead of 29).
- `apart`: nor is an integer ever divided, so what a generator makes keys of is a branch of its own.
- `where_flagged`: a conditional beats a selection by 2.5 to 3.6 times for algorithms with memory on a CPU;
  on an accelerator it might read its flag on the host at every step.
- Replications are the last axis in memory, `over_replications`; a batched `dot_general` would move them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxlsgd.core.forms import Scaled
from jaxlsgd.core.problem import Array
from jaxlsgd.core.traced import Derived
from jaxlsgd.engine.innermost import innermost

# Sums over so many clients are one pass; more are first added up in so many shares, none of them small: with 100
# clients under C1, shares make the engine 1.9 (d = 5), 1.7 (d = 20) and 2.0 times (d = 50) as fast as one pass.
UNROLLED_CLIENTS = 64
SHARES, LEAST_SHARE = 32, 16


def once(x: Array, unit: Array) -> Array:
    """x, divided by a 1 that the compiler does not know."""
    return x / unit


def apart(make: Callable[[], Any], unit: Array) -> Any:
    """What `make` makes, written down, for integers: a branch that the compiler must not look into."""

    def branch(unit: Array) -> Any:
        empty = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(make))  # noqa: E731
        return lax.cond(unit > 0, make, empty)

    return lax.platform_dependent(unit, cpu=branch, default=lambda _: make())


def weighted_sum(weights: Array, values: Array | Scaled) -> Array:
    """Σ_k w_k v_k over the leading axis, keeping the replications innermost."""
    if isinstance(values, Scaled):
        return sum_clients(lambda w, s, v: (w * s) * v, weights, values.scale, values.vector)
    return sum_clients(lambda w, v: w * v, weights, values)


def sum_clients(term: Callable[..., Array], *values: Array) -> Array:
    """Σ_k term(values of client k): plain additions of clients, or of equal shares of many clients."""
    count = values[0].shape[0]
    at = lambda place: term(*(value[place] for value in values))  # noqa: E731
    if count <= UNROLLED_CLIENTS:
        return functools.reduce(operator.add, map(at, range(count)))
    size = max(count // SHARES, LEAST_SHARE)
    whole = count - count % size
    parts = [
        jax.vmap(term)(*(value[first : first + size] for value in values))
        for first in range(0, whole, size)
    ]
    total = sum_clients(lambda part: part, functools.reduce(operator.add, parts))
    return functools.reduce(operator.add, map(at, range(whole, count)), total)


def over_replications(function: Any, in_axes: Any = -1, out_axes: Any = -1) -> Any:
    """Vmaps over replications, which are the last axis in memory."""
    if isinstance(function, Derived):
        return innermost(function)
    return jax.vmap(function, in_axes=in_axes, out_axes=out_axes)


def where_flagged(flag: Array, change: Callable[[Any], Any], state: Any) -> Any:
    """`change(state)` where the flag is up (a round ends, say), else the state as it is."""

    def select(flag: Array, state: Any) -> Any:
        return jax.tree.map(lambda new, old: jnp.where(flag, new, old), change(state), state)

    def branch(flag: Array, state: Any) -> Any:
        return lax.cond(flag, change, lambda same: same, state)

    return lax.platform_dependent(flag, state, cpu=branch, default=select)


def element(tree: Any, i: Array) -> Any:
    """Element i of every leaf's leading axis."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, 0, keepdims=False), tree)
