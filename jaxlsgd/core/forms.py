"""Vectors and matrices of a special form, which the engine need not write out."""

from __future__ import annotations

from typing import Any, NamedTuple


class Scaled(NamedTuple):
    """The vector scale · vector: the gradient of a generalised linear model's loss.

    In this form the engine keeps one number per client between its passes instead of d.
    """

    scale: Any  # ()
    vector: Any  # (d,), not a function of the parameters


class OuterProduct(NamedTuple):
    """The matrix weight · vector vectorᵀ: the Hessian of a generalised linear model's loss."""

    vector: Any  # (d,)
    weight: Any = None  # (), or None for 1


def dense(value: Any) -> Any:
    """The vector or matrix itself; anything else is returned as it is."""
    if isinstance(value, Scaled):
        return value.scale * value.vector
    if isinstance(value, OuterProduct):
        square = value.vector[:, None] * value.vector[None, :]
        return square if value.weight is None else value.weight * square
    return value
