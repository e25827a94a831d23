"""Functions of users, traced and made again with some of their operations replaced.

A user writes `a @ x` and `jax.random.normal(key, (3,))` for one observation. Over many clients and
replications the compiler makes slow programs of some of these, and the engine has better ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import primitives

# What takes an operation's place: of its parameters and its inputs makes its outputs, or declines by None.
Rule = Callable[..., Sequence[Any] | None]
Rules = Mapping[core.Primitive, Rule]
# Evaluates one operation: the equation, and its inputs.
Apply = Callable[[core.JaxprEqn, list[Any]], Sequence[Any]]

_UNROLLED = 32


@dataclasses.dataclass(frozen=True)
class Derived:
    """A function that nobody has written: a derivative. How it is laid out in memory is the engine's affair."""

    function: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)


def dot(a: Any, b: Any) -> Any:
    """Σ_i a_i b_i over the leading axis, as plain additions for few entries.

    Not `@`: under vmap a dot product would move replications out of the innermost place in memory.
    And not a sum over an axis, which XLA's CPU compiler does not vectorise along another one.
    """
    if a.shape[0] > _UNROLLED:
        return jnp.sum(a * b, axis=0)
    total = a[0] * b[0]
    for i in range(1, a.shape[0]):
        total = total + a[i] * b[i]
    return total


def replaced(function: Callable[..., Any], rules: Rules) -> Callable[..., Any]:
    """The function, with other operations in the place of those that there are rules for."""

    def run(*arguments: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
        found = evaluate(closed, jax.tree.leaves(arguments), rules)
        return jax.tree.unflatten(jax.tree.structure(shape), found)

    return run


def evaluate(closed: core.ClosedJaxpr, arguments: Sequence[Any], rules: Rules) -> list[Any]:
    """The results of a traced function; what it has jitted inside becomes a part of it."""
    apply = lambda equation, given: apply_one(equation, given, rules)  # noqa: E731
    return values(closed, arguments, apply)(closed.jaxpr.outvars)


def values(
    closed: core.ClosedJaxpr,
    arguments: Sequence[Any],
    apply: Apply,
    fixed: Mapping[core.Var, Any] | None = None,
) -> Callable[[Sequence[Any]], list[Any]]:
    """All variables of a traced function, to be looked up; `fixed` ones are what they are said to be."""
    jaxpr = closed.jaxpr
    known: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    known |= zip(jaxpr.invars, arguments, strict=True)

    def look_up(atoms: Sequence[Any]) -> list[Any]:
        return [atom.val if isinstance(atom, core.Literal) else known[atom] for atom in atoms]

    for equation in jaxpr.eqns:
        found = apply(equation, look_up(equation.invars))
        known |= zip(equation.outvars, found, strict=True)
        known |= {var: fixed[var] for var in equation.outvars if fixed and var in fixed}
    return look_up


def apply_one(equation: core.JaxprEqn, given: list[Any], rules: Rules) -> Sequence[Any]:
    """The results of one operation, or of what takes its place."""
    primitive = equation.primitive
    rule = rules.get(primitive)
    made = rule(equation.params, *given) if rule is not None else None
    if made is not None:
        return made
    if primitive is primitives.jit_p:
        return evaluate(equation.params["jaxpr"], given, rules)
    inside = {name: _below(value, rules) for name, value in equation.params.items()}
    found = primitive.bind(*given, **primitive.get_bind_params(inside))
    return found if primitive.multiple_results else [found]


def _below(value: Any, rules: Rules) -> Any:
    """A parameter of an operation; where it is a function (a loop's body, say), that one replaced."""
    if type(value) is tuple:
        return tuple(_below(each, rules) for each in value)
    if not isinstance(value, core.ClosedJaxpr):
        return value
    shapes = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
        for aval in value.in_avals
    ]
    made = jax.make_jaxpr(lambda *given: evaluate(value, given, rules))(*shapes)
    return made if made.out_avals == value.out_avals else value


def product(parameters: Mapping[str, Any], a: Any, b: Any) -> Sequence[Any] | None:
    """A product of vectors, or of a vector and a matrix, that keeps replications innermost."""
    (left, right), batch = parameters["dimension_numbers"]
    if any(batch) or max(a.ndim, b.ndim) > 2 or a.ndim + b.ndim > 3:
        return None
    dtype = parameters["preferred_element_type"] or jnp.result_type(a, b)
    a, b = a.astype(dtype), b.astype(dtype)
    if not left:
        return [jnp.expand_dims(a, tuple(range(a.ndim, a.ndim + b.ndim))) * b]
    a, b = jnp.moveaxis(a, left[0], 0), jnp.moveaxis(b, right[0], 0)
    return [dot(a[:, None] if b.ndim > a.ndim else a, b[:, None] if a.ndim > b.ndim else b)]


PRODUCTS: Rules = {primitives.dot_general_p: product}
