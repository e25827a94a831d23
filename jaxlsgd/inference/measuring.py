"""What a method says of one run, in float64."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from jaxlsgd.core.estimator import Estimator, Horizon, Measurement
from jaxlsgd.schedules import Plan


def in_float64(method: Estimator, states: Any, plan: Plan | None) -> tuple[Measurement, Any]:
    """A method's measurement and matrix.

    Args:
      method: one with a matrix.
      states: what its `update` returned.
      plan: the rounds that were run, where it is known.
    """
    wide = jax.tree.map(_as_float64, states)
    given = plan if method.needs_plan else None
    horizon = None if given is None else Horizon.of(given, np.float64)
    if method.reads_numpy:
        return _measure(method.measure, method.matrix, wide, horizon)
    with jax.enable_x64(True):
        return _compiled(method.measure, method.matrix, wide, horizon)


def _measure(measure: Any, matrix: Any, states: Any, horizon: Horizon | None) -> tuple[Any, Any]:
    return measure(states, horizon), matrix(states, horizon)


_compiled = functools.partial(jax.jit, static_argnums=(0, 1))(_measure)


def _as_float64(leaf: Any) -> Any:
    leaf = np.asarray(leaf)
    return leaf.astype(np.float64) if np.issubdtype(leaf.dtype, np.floating) else leaf
