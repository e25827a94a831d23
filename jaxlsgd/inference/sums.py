"""Sums that make up for their rounding errors, and parameters in enough digits to be summed."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array


def compensated_add(total: Array, lost: Array, term: Array) -> tuple[Array, Array]:
    """Kahan's sum: `total + lost` is the sum to nearly twice the working precision."""
    term = term + lost
    new = total + term
    return new, term - (new - total)


def widened(x: Array) -> Array:
    """In float32 at least: sums over thousands of rounds have no digits left in bfloat16."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
