"""Compensated sums, the path's running mean, and products of small matrices."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxlsgd.core.estimator import Accumulator, Sync
from jaxlsgd.core.problem import Array, Params, flatten

# Products of matrices with few columns are plain additions. Under vmap a sum over an axis is not vectorised on a
# CPU, and a `dot_general` of 5 × 5 matrices, for 14 bins and 512 runs, takes 4 ms instead of 0.15.
_FEW, _FEW_SQUARE = 32, 8


def compensated_add(total: Array, lost: Array, term: Array) -> tuple[Array, Array]:
    """Add by Kahan's method: `total + lost` is the sum to nearly twice the working precision."""
    term = term + lost
    new = total + term
    return new, term - (new - total)


def widened(x: Array) -> Array:
    """Return x in float32 at least: sums over thousands of rounds lose all digits in bfloat16."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def times(M: Array, v: Array) -> Array:
    """Return M v, (..., n, d) by (..., d)."""
    d = v.shape[-1]
    if d > _FEW and isinstance(v, np.ndarray):
        return (M @ v[..., None])[..., 0]
    if d > _FEW or isinstance(v, np.ndarray):
        return (M * v[..., None, :]).sum(-1)
    return sum((M[..., j] * v[..., None, j] for j in range(1, d)), M[..., 0] * v[..., None, 0])


def product(A: Array, B: Array, unit: Array) -> Array:
    """Return A B, (..., n, d) by (..., d, k).

    Args:
      A: a matrix.
      B: another.
      unit: a 1 that is not a constant to the compiler. XLA on a CPU stores the result of a division by it, instead of
        computing the product again in every pass that uses it; see `engine.xla.once`.
    """
    d = B.shape[-2]
    if isinstance(B, np.ndarray):
        return A @ B
    if d > _FEW_SQUARE:
        return jnp.matmul(A, B, precision=lax.Precision.HIGHEST)
    term = lambda j: A[..., :, j, None] * B[..., None, j, :]  # noqa: E731
    return sum((term(j) for j in range(1, d)), term(0)) / unit


def symmetric_product(A: Array, B: Array, unit: Array) -> Array:
    """Return A Bᵀ + B Aᵀ of square matrices; see `product`."""
    d = B.shape[-1]
    if d > _FEW_SQUARE or isinstance(B, np.ndarray):
        half = product(A, B.mT, unit)
        return half + half.mT
    A, outer = A / unit, lambda u, v: u[..., :, None] * v[..., None, :]
    term = lambda j: outer(A[..., j], B[..., j]) + outer(B[..., j], A[..., j])  # noqa: E731
    return sum((term(j) for j in range(1, d)), term(0)) / unit


class MeanState(NamedTuple):
    """The running average."""

    mean: Array  # (d,)
    lost: Array  # (d,) its rounding error so far
    t: Array  # () int32, what has been counted so far


@functools.cache
def path_mean(observations: bool = False) -> Accumulator:
    """Return Σ x̄_n/m as a streaming statistic, or with `observations` Σ E_n x̄_n/t_m."""

    def init(params: Params) -> MeanState:
        y = jnp.zeros_like(widened(flatten(params)))
        return MeanState(y, y, jnp.zeros((), jnp.int32))

    def update(state: MeanState, sync: Sync) -> MeanState:
        x = widened(flatten(sync.params))
        count = jnp.asarray(sync.E if observations else 1, jnp.int32)
        t = state.t + count
        share = count.astype(x.dtype) / t.astype(x.dtype)
        move = ((x - state.mean) - state.lost) * share
        return MeanState(*compensated_add(state.mean, state.lost, move), t)

    return Accumulator(init, update, shared=("t",))
