"""Sums that make up for their rounding errors."""

from __future__ import annotations

import jax

Array = jax.Array


def compensated_add(total: Array, lost: Array, term: Array) -> tuple[Array, Array]:
    """Kahan's sum: `total + lost` is the sum to nearly twice the working precision."""
    term = term + lost
    new = total + term
    return new, term - (new - total)
