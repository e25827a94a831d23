"""A vmap that keeps its axis last in memory in every operation (`innermost`), and sums over clients.

`jax.vmap` fixes the position of the axis in the results only, and puts it first in most intermediate arrays. On
a CPU the replications are then strided, and nothing is vectorised. XLA's CPU compiler also repeats an operation in
every operation that uses its result, except a division. A long computation with many small arrays, such as the next
anchor of `one_step`, grows many times over by that, unless some of its results are divided by 1 (`once`); `innermost`
finds out which. Both together take making an anchor for 512 replications from 5.8 to 0.9 ms, and reading them from 8.0
to 1.5 ms (d = 5, one core).
"""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxlsgd.core import tracing
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.forms import Scaled
from jaxlsgd.core.problem import Array
from jaxlsgd.core.tracing import Derived, core, p


class Varying(NamedTuple):
    """A value that differs between replications, (..., R)."""

    array: Any
    cost: int = 0  # operations per element that are repeated in whatever uses it


class VaryingKeys(NamedTuple):
    """Keys that differ between replications, as two arrays of words (..., R).

    In an array of keys the words are the last axis, and replications would be strided.
    """

    high: Any
    low: Any

    @property
    def array(self) -> Any:
        """The keys themselves, (..., R)."""
        return jax.random.wrap_key_data(jnp.stack([self.high, self.low], axis=-1), impl=KEY_KIND)


KEY_KIND = "threefry2x32"
# Operations that only move keys.
_MOVES = {p.slice_p, p.squeeze_p, p.reshape_p, p.broadcast_in_dim_p, p.transpose_p, p.copy_p}
_ELEMENTWISE = {
    *(p.add_p, p.sub_p, p.mul_p, p.div_p, p.max_p, p.min_p, p.neg_p, p.abs_p, p.sign_p, p.sqrt_p),
    *(p.exp_p, p.log_p, p.log1p_p, p.integer_pow_p, p.select_n_p, p.convert_element_type_p),
    *(p.eq_p, p.ne_p, p.lt_p, p.le_p, p.gt_p, p.ge_p, p.and_p, p.or_p, p.xor_p, p.not_p),
    *(p.shift_left_p, p.shift_right_logical_p, p.is_finite_p),
}
_SUMS = {
    p.reduce_sum_p: operator.add,
    p.reduce_max_p: jnp.maximum,
    p.reduce_min_p: jnp.minimum,
    p.reduce_and_p: operator.and_,
    p.reduce_or_p: operator.or_,
}
# So many terms are added in one pass: XLA's CPU compiler does not vectorise a sum over one axis along another.
_TERMS = 32
_DEAR = 6  # operations per element that are not to be repeated


def innermost(
    function: Callable[..., Any],
    in_axes: Sequence[Any] = (-1, -1),
    rules: tracing.Rules = tracing.PRODUCTS,
    varying_rules: tracing.Rules | None = None,
    unit: Array | None = None,
    out_axes: Any = -1,
) -> Callable[..., Any]:
    """Return `jax.vmap(function, in_axes, out_axes)`, applied operation by operation.

    Args:
      function: of one replication.
      in_axes: −1 for each argument, or None for one that all replications share, or a tree of both.
      rules: operations to replace, written for one replication.
      varying_rules: operations to replace, written for `Varying`.
      unit: a 1 that the compiler does not know; if given, what is dear and used more than once is computed `once`.
      out_axes: −1, or a tree of −1 and None.
    """

    def run(*arguments: Any) -> Any:
        leaves: list[Any] = []
        for argument, axes in zip(arguments, in_axes, strict=True):
            leaves += _leaves(_by_axis(_as_varying, axes, argument, _varies))
        count = next(_shape(x)[-1] for x in leaves if _varies(x))
        structure = jax.tree.structure(arguments, is_leaf=_varies)
        examples = structure.unflatten([_one(x) for x in leaves])
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*examples)
        found = _evaluate(closed, leaves, rules, varying_rules or {}, unit)
        made = jax.tree.unflatten(jax.tree.structure(shape), found)
        spread = _by_axis(lambda x: _spread(x, count), out_axes, made, _varies)
        if any(map(_varies, _leaves(spread))):
            raise refusal("out_axes", "be -1 for what differs between replications", None)
        return spread

    return run


def unit_of(vector: Array) -> Array:
    """Return a 1 that the compiler does not know to be one, from a vector without NaN, such as x_0."""
    return jnp.where(jnp.isnan(vector[0]), 2, 1).astype(vector.dtype)


def _by_axis(
    on: Callable[[Any], Any], axes: Any, tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """Apply a function to the leaves of a tree, except where the axes, a prefix of it, are None."""

    def each(axis: int | None, part: Any) -> Any:
        return part if axis is None else jax.tree.map(on, part, is_leaf=is_leaf)

    return jax.tree.map(each, axes, tree, is_leaf=lambda axis: axis is None)


def _varies(value: Any) -> bool:
    return isinstance(value, (Varying, VaryingKeys))


def _leaves(argument: Any) -> list[Any]:
    return jax.tree.leaves(argument, is_leaf=_varies)


def _as_varying(value: Any) -> Any:
    return value if _varies(value) else Varying(value)


def _shape(value: Any) -> tuple[int, ...]:
    return value.high.shape if isinstance(value, VaryingKeys) else value.array.shape


def _one(value: Any) -> Any:
    """Return the shape of the value of one replication."""
    if not _varies(value):
        return value
    if isinstance(value, VaryingKeys):
        return jax.eval_shape(lambda: value.array[..., 0])
    return jax.ShapeDtypeStruct(value.array.shape[:-1], value.array.dtype)


def _spread(value: Any, count: int) -> Any:
    if _varies(value):
        return value.array
    return jnp.broadcast_to(jnp.asarray(value)[..., None], (*np.shape(value), count))


class _Kept:
    """What is computed only once: what is dear, and used more than once."""

    def __init__(self, jaxpr: core.Jaxpr, unit: Array) -> None:
        self._unit, self._uses = unit, _uses(jaxpr)

    def of(self, variable: core.Var, value: Any) -> Any:
        """Return the value of a variable, computed once if that is worth while."""
        if not isinstance(value, Varying) or value.cost < _DEAR or self._uses[variable] <= 1:
            return value
        return self.once(value)

    def once(self, value: Varying) -> Varying:
        """Return a value, computed once."""
        x = value.array
        if jnp.issubdtype(x.dtype, jnp.floating):
            return Varying(once(x, self._unit.astype(x.dtype)))
        if x.dtype == jnp.bool_:  # a conversion instead of `where` would be seen through
            return Varying(once(jnp.where(x, 1.0, 0.0).astype(self._unit.dtype), self._unit) > 0)
        return value


def _uses(jaxpr: core.Jaxpr) -> Counter[Any]:
    """Return how often each value is used; by way of a copy of some of it, or of several, as often as those are."""
    uses = Counter(atom for equation in jaxpr.eqns for atom in equation.invars if _named(atom))
    uses.update(filter(_named, jaxpr.outvars))
    for equation in reversed(jaxpr.eqns):
        if equation.primitive is p.jit_p:
            within = equation.params["jaxpr"].jaxpr
            inner = _uses(within)
            for atom, variable in zip(equation.invars, within.invars, strict=True):
                if _named(atom):
                    uses[atom] += inner[variable] - 1
            continue
        if equation.primitive in _MOVES and _named(source := equation.invars[0]):
            (made,) = equation.outvars
            copies = max(1, math.prod(_shape_of(made)) // max(1, math.prod(_shape_of(source))))
            uses[source] += uses[made] * copies - 1
    return uses


def _named(atom: Any) -> bool:
    return isinstance(atom, core.Var)


def _shape_of(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def _evaluate(
    closed: core.ClosedJaxpr,
    arguments: Sequence[Any],
    rules: tracing.Rules,
    varying_rules: tracing.Rules,
    unit: Array | None = None,
) -> list[Any]:
    kept = None if unit is None else _Kept(closed.jaxpr, unit)

    def made(equation: core.JaxprEqn, given: list[Any]) -> Sequence[Any]:
        if equation.primitive is p.jit_p:
            return _evaluate(equation.params["jaxpr"], given, rules, varying_rules, unit)
        if not any(map(_varies, given)):
            return tracing.apply_one(equation, given, rules)
        rule = varying_rules.get(equation.primitive)
        found = rule(equation.params, *given) if rule is not None else None
        if found is not None:
            return found
        return (
            _each(equation, given, rules) if kept is None else _whole(equation, given, rules, kept)
        )

    def apply(equation: core.JaxprEqn, given: list[Any]) -> Sequence[Any]:
        found = made(equation, given)
        if kept is None:
            return found
        return [kept.of(variable, x) for variable, x in zip(equation.outvars, found, strict=True)]

    return tracing.values(closed, arguments, apply)(closed.jaxpr.outvars)


def _each(equation: core.JaxprEqn, given: list[Any], rules: tracing.Rules) -> Sequence[Any]:
    """Apply one operation to all replications."""
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
    one = lambda *each: list(tracing.apply_one(equation, list(each), rules))  # noqa: E731
    return [Varying(x) for x in jax.vmap(one, axes, -1)(*arrays)]


def _whole(
    equation: core.JaxprEqn, given: list[Any], rules: tracing.Rules, kept: _Kept
) -> Sequence[Any]:
    """Apply one operation to all replications, with the axis last in its inputs, too."""
    primitive, parameters = equation.primitive, equation.params
    cost = sum(x.cost for x in given if isinstance(x, Varying))
    if primitive in _ELEMENTWISE:
        shape = _shape_of(equation.outvars[0])
        full = [_full(x, shape, given) for x in given]
        return [Varying(primitive.bind(*full, **parameters), cost + 1)]
    if primitive is p.concatenate_p:
        shapes = map(_shape_of, equation.invars)
        full = [_full(x, each, given) for x, each in zip(given, shapes, strict=True)]
        return [Varying(lax.concatenate(full, parameters["dimension"]), cost)]
    if primitive in _STRUCTURAL:
        return [Varying(_STRUCTURAL[primitive](given[0].array, parameters), cost)]
    if primitive in _SUMS:
        terms = math.prod(_shape(given[0])[axis] for axis in parameters["axes"])
        if 0 < terms <= _TERMS:
            first = kept.once(given[0]) if given[0].cost > 2 else given[0]
            added = _added(_SUMS[primitive], first.array, parameters["axes"])
            return [Varying(added, terms * (1 + first.cost))]
        return [Varying(primitive.bind(given[0].array, **parameters))]
    return _each(equation, given, rules)


def _full(value: Any, shape: tuple[int, ...], beside: Sequence[Any]) -> Any:
    """Return an input of an operation in the shape of its result."""
    count = next(x.array.shape[-1] for x in beside if _varies(x))
    x = value.array if _varies(value) else jnp.asarray(value)[..., None]
    if x.ndim == 1:
        x = x.reshape(*[1] * len(shape), *x.shape)
    return jnp.broadcast_to(x, (*shape, count))


def _added(add: Callable[[Any, Any], Any], x: Any, axes: Sequence[int]) -> Any:
    for axis in sorted(axes, reverse=True):
        parts = [lax.index_in_dim(x, i, axis, keepdims=False) for i in range(x.shape[axis])]
        x = functools.reduce(add, parts)
    return x


# Operations on one array that have the same meaning with one more axis behind the others.
_STRUCTURAL: dict[Any, Callable[[Any, Any], Any]] = {
    p.broadcast_in_dim_p: lambda x, q: lax.broadcast_in_dim(
        x, (*q["shape"], x.shape[-1]), (*q["broadcast_dimensions"], len(q["shape"]))
    ),
    p.slice_p: lambda x, q: lax.slice(
        x,
        (*q["start_indices"], 0),
        (*q["limit_indices"], x.shape[-1]),
        None if q["strides"] is None else (*q["strides"], 1),
    ),
    p.squeeze_p: lambda x, q: lax.squeeze(x, q["dimensions"]),
    p.reshape_p: lambda x, q: lax.reshape(
        x,
        (*q["new_sizes"], x.shape[-1]),
        None if q["dimensions"] is None else (*q["dimensions"], x.ndim - 1),
    ),
    p.transpose_p: lambda x, q: lax.transpose(x, (*q["permutation"], x.ndim - 1)),
    p.rev_p: lambda x, q: lax.rev(x, q["dimensions"]),
    p.cumsum_p: lambda x, q: lax.cumsum(x, q["axis"], q["reverse"]),
}


# Up to so many clients are added in one pass; more are first added up in so many shares of a least size: with 100
# clients under C1, shares make the engine 1.9 (d = 5), 1.7 (d = 20) and 2.0 times (d = 50) as fast as one pass.
UNROLLED_CLIENTS = 64
SHARES, LEAST_SHARE = 32, 16


def once(x: Array, unit: Array) -> Array:
    """Return x divided by 1 in a way that the compiler cannot simplify, so that x is computed only once."""
    return x / unit


def apart(make: Callable[[], Any], unit: Array) -> Any:
    """Return the integers that `make` makes, computed only once: in a branch, which XLA's CPU compiler does not fuse."""

    def branch(unit: Array) -> Any:
        empty = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(make))  # noqa: E731
        return lax.cond(unit > 0, make, empty)

    return lax.platform_dependent(unit, cpu=branch, default=lambda _: make())


def weighted_sum(weights: Array, values: Array | Scaled) -> Array:
    """Return Σ_k w_k v_k over the leading axis, with the replications innermost."""
    if isinstance(values, Scaled):
        return sum_clients(lambda w, s, v: (w * s) * v, weights, values.scale, values.vector)
    return sum_clients(lambda w, v: w * v, weights, values)


def sum_clients(term: Callable[..., Array], *values: Array) -> Array:
    """Return Σ_k term(values of client k), by plain additions of clients, or of equal shares of many clients."""
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
    """Vmap a function over replications, which are the last axis in memory."""
    if isinstance(function, Derived):
        return innermost(function)
    return jax.vmap(function, in_axes=in_axes, out_axes=out_axes)


def where_flagged(flag: Array, change: Callable[[Any], Any], state: Any) -> Any:
    """Return `change(state)` if the flag is set (for example, if a round ends), or else the state unchanged."""

    def select(flag: Array, state: Any) -> Any:
        return jax.tree.map(lambda new, old: jnp.where(flag, new, old), change(state), state)

    def branch(flag: Array, state: Any) -> Any:
        return lax.cond(flag, change, lambda same: same, state)

    return lax.platform_dependent(flag, state, cpu=branch, default=select)


def element(tree: Any, i: Array) -> Any:
    """Return element i of the leading axis of every leaf."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, 0, keepdims=False), tree)
