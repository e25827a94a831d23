"""Vectors and matrices of a special form, which the engine stores by their factors."""

from __future__ import annotations

from typing import Any, NamedTuple


class Scaled(NamedTuple):
    """The vector scale · vector: the gradient of a generalised linear model's loss.

    The engine then keeps one number per client between its passes instead of d.
    """

    scale: Any  # ()
    vector: Any  # (d,), not a function of the parameters


class OuterProduct(NamedTuple):
    """The matrix weight · vector vectorᵀ: the Hessian of a generalised linear model's loss."""

    vector: Any  # (d,)
    weight: Any = None  # (), or None for 1


def dense(value: Any) -> Any:
    """Return a form as a vector or matrix, and any other value unchanged."""
    if isinstance(value, Scaled):
        return value.scale * value.vector
    if isinstance(value, OuterProduct):
        square = value.vector[:, None] * value.vector[None, :]
        return square if value.weight is None else value.weight * square
    return value
