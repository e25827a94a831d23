"""Evaluate the loss at estimates, on a few observations that are the same for all replications.

This is done when intervals are read, outside the loop over steps: the engine itself computes only gradients, and
those may be zero even if the loss is NaN.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from jaxlsgd.core.checks import Dtype
from jaxlsgd.core.problem import Array, Draws, FlatFunctions, Problem, Structure, at_time
from jaxlsgd.engine.program import cast_floats, make_data

OBSERVATIONS = 32


def growth(problem: Problem, dtype: Dtype, x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the growth of the loss from x_0 to parameters, in units of the mean absolute loss at x_0.

    Observations whose loss at x_0 is not finite are left out. If the loss at x_0 is 0 in all of the others, or there
    are none, the growth is 0.

    Args:
      problem: whose loss it is.
      dtype: of the run.
      x: (R, d).

    Returns:
      (R,); NaN if a loss is NaN, infinite if it overflows.
    """
    data = make_data(problem, dtype)
    # A client has a share of the observations in proportion to its weight.
    at = (np.arange(OBSERVATIONS) + 0.5) / OBSERVATIONS
    chosen = np.searchsorted(np.cumsum(problem.weights), at).clip(max=problem.num_clients - 1)
    clients = jax.tree.map(lambda leaf: leaf[chosen], data.clients)
    with np.errstate(over="ignore"):  # beyond float32, to infinity
        points = np.concatenate([data.init[None], x.astype(dtype)])
    found = np.asarray(_losses(problem.structure(), dtype, clients, points), np.float64)
    return _growth(found[:, :1], found[:, 1:])


def _growth(start: NDArray[np.float64], now: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the growth from losses (observations, 1) at x_0 and (observations, R) at parameters."""
    use = np.isfinite(start[:, 0])
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        scale = np.abs(start[use]).sum()
        worse = (now[use] - start[use]).sum(0) / scale if scale > 0 else np.zeros(now.shape[1])
    return np.where(np.isnan(now).any(0), np.nan, worse)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _losses(structure: Structure, dtype: Dtype, clients: Any, points: Array) -> Array:
    """Return the loss of each observation at each point, (observations, points)."""
    functions = structure.flat_functions()

    def at(given: tuple[Array, Any]) -> Array:
        seen = _observation(structure, functions, dtype, *given)
        return jax.vmap(lambda x: functions.loss(x, seen))(points)

    return lax.map(at, (jnp.arange(OBSERVATIONS), clients))


def _observation(
    structure: Structure, functions: FlatFunctions, dtype: Dtype, i: Array, client: Any
) -> Any:
    key = jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), i)
    if functions.observe is None or structure.draws is None:
        assert functions.sample is not None
        return at_time(functions.sample, structure.drifts, i.astype(jnp.uint32))(key, client)
    one, two = jax.random.split(key)
    normal = jax.random.normal(one, (structure.draws.normal,), jnp.float32)
    uniform = jax.random.uniform(
        two, (structure.draws.uniform,), jnp.float32, minval=jnp.finfo(jnp.float32).tiny
    )
    observe = at_time(functions.observe, structure.drifts, i.astype(jnp.uint32))
    return observe(cast_floats(Draws(normal, uniform), dtype), client)
