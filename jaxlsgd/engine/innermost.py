"""A vmap that keeps its axis last in memory, whatever a user's function does in between.

`jax.vmap` promises where the axis is in the results, and puts it first in most of what leads up to them. On
a CPU the replications are then strided, and nothing is vectorised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.extend.core import primitives as p

from jaxlsgd.core import traced


class Varying(NamedTuple):
    """A value that differs between replications, (..., R)."""

    array: Any


class VaryingKeys(NamedTuple):
    """Keys that differ between replications, as two arrays of words (..., R).

    An array of keys has its words last, and replications would be strided.
    """

    high: Any
    low: Any

    @property
    def array(self) -> Any:
        """The keys themselves, (..., R)."""
        return jax.random.wrap_key_data(jnp.stack([self.high, self.low], axis=-1), impl=KEY_KIND)


KEY_KIND = "threefry2x32"
# Operations that may move keys about.
_MOVES = {p.slice_p, p.squeeze_p, p.reshape_p, p.broadcast_in_dim_p, p.transpose_p, p.copy_p}
_ELEMENTWISE = {
    *(p.add_p, p.sub_p, p.mul_p, p.div_p, p.max_p, p.min_p, p.neg_p, p.abs_p, p.sign_p, p.sqrt_p),
    *(p.exp_p, p.log_p, p.log1p_p, p.integer_pow_p, p.select_n_p, p.convert_element_type_p),
    *(p.eq_p, p.ne_p, p.lt_p, p.le_p, p.gt_p, p.ge_p, p.and_p, p.or_p, p.xor_p, p.not_p),
    *(p.shift_left_p, p.shift_right_logical_p),
}


def innermost(
    function: Callable[..., Any],
    in_axes: Sequence[int | None] = (-1, -1),
    rules: traced.Rules = traced.PRODUCTS,
    varying_rules: traced.Rules | None = None,
) -> Callable[..., Any]:
    """`jax.vmap(function, in_axes, -1)`, operation by operation.

    Args:
      function: of one replication.
      in_axes: for each argument −1, or None where all replications have the same.
      rules: operations to replace, written for one replication.
      varying_rules: operations to replace, written for `Varying`.
    """

    def run(*arguments: Any) -> Any:
        leaves: list[Any] = []
        for argument, axis in zip(arguments, in_axes, strict=True):
            leaves += [x if axis is None else _as_varying(x) for x in _leaves(argument)]
        count = next(_shape(x)[-1] for x in leaves if _varies(x))
        structure = jax.tree.structure(arguments, is_leaf=_varies)
        examples = structure.unflatten([_one(x) for x in leaves])
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*examples)
        found = _evaluate(closed, leaves, rules, varying_rules or {})
        spread = [_spread(x, count) for x in found]
        return jax.tree.unflatten(jax.tree.structure(shape), spread)

    return run


def _varies(value: Any) -> bool:
    return isinstance(value, (Varying, VaryingKeys))


def _leaves(argument: Any) -> list[Any]:
    return jax.tree.leaves(argument, is_leaf=_varies)


def _as_varying(value: Any) -> Any:
    return value if _varies(value) else Varying(value)


def _shape(value: Any) -> tuple[int, ...]:
    return value.high.shape if isinstance(value, VaryingKeys) else value.array.shape


def _one(value: Any) -> Any:
    """The shape of one replication's."""
    if not _varies(value):
        return value
    if isinstance(value, VaryingKeys):
        return jax.eval_shape(lambda: value.array[..., 0])
    return jax.ShapeDtypeStruct(value.array.shape[:-1], value.array.dtype)


def _spread(value: Any, count: int) -> Any:
    if _varies(value):
        return value.array
    return jnp.broadcast_to(jnp.asarray(value)[..., None], (*np.shape(value), count))


def _evaluate(
    closed: core.ClosedJaxpr,
    arguments: Sequence[Any],
    rules: traced.Rules,
    varying_rules: traced.Rules,
) -> list[Any]:
    def apply(equation: core.JaxprEqn, given: list[Any]) -> Sequence[Any]:
        if equation.primitive is p.jit_p:
            return _evaluate(equation.params["jaxpr"], given, rules, varying_rules)
        if not any(map(_varies, given)):
            return traced.apply_one(equation, given, rules)
        rule = varying_rules.get(equation.primitive)
        made = rule(equation.params, *given) if rule is not None else None
        if made is not None:
            return made
        return _each(equation, given, rules)

    return traced.values(closed, arguments, apply)(closed.jaxpr.outvars)


def _each(equation: core.JaxprEqn, given: list[Any], rules: traced.Rules) -> Sequence[Any]:
    """One operation over all replications."""
    primitive = equation.primitive
    if primitive in _MOVES and isinstance(given[0], VaryingKeys):
        move = lambda words: _each(equation, [Varying(words)], rules)[0].array  # noqa: E731
        return [VaryingKeys(*map(move, given[0]))]
    arrays = [x.array if _varies(x) else x for x in given]
    if (
        primitive in _ELEMENTWISE
        and all(map(_varies, given))
        and len(set(map(np.shape, arrays))) == 1
    ):
        return [Varying(primitive.bind(*arrays, **equation.params))]
    axes = [-1 if _varies(x) else None for x in given]
    one = lambda *each: list(traced.apply_one(equation, list(each), rules))  # noqa: E731
    return [Varying(x) for x in jax.vmap(one, axes, -1)(*arrays)]
