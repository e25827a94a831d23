"""Functions of users, traced and evaluated with some of their operations replaced.

A user writes `a @ x` and `jax.random.normal(key, (3,))` for one observation. XLA compiles some of these to
slow programs when there are many clients and replications, and the engine has faster ones. This is the
only module that imports `jax.extend`; others take `core` and `p` from here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.extend.core import primitives as p

from jaxlsgd.core.forms import OuterProduct, Scaled

# Replaces an operation: (parameters, *inputs) → outputs, or None to keep the operation.
Rule = Callable[..., Sequence[Any] | None]
Rules = Mapping[core.Primitive, Rule]
# Evaluates one operation: (equation, inputs) → outputs.
Apply = Callable[[core.JaxprEqn, list[Any]], Sequence[Any]]

_UNROLLED = 32


@dataclasses.dataclass(frozen=True)
class Derived:
    """A derivative made by JAX and not written by a user, whose memory layout the engine may choose."""

    function: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)


def dot(a: Any, b: Any) -> Any:
    """Return Σ_i a_i b_i over the leading axis, as plain additions for few entries.

    Under vmap, `@` would move replications out of the innermost place in memory, and XLA's CPU compiler does
    not vectorise a sum over one axis along another.
    """
    if a.shape[0] > _UNROLLED:
        return jnp.sum(a * b, axis=0)
    total = a[0] * b[0]
    for i in range(1, a.shape[0]):
        total = total + a[i] * b[i]
    return total


def replaced(function: Callable[..., Any], rules: Rules) -> Callable[..., Any]:
    """Return the function with the operations replaced for which there are rules."""

    def run(*arguments: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
        found = evaluate(closed, jax.tree.leaves(arguments), rules)
        return jax.tree.unflatten(jax.tree.structure(shape), found)

    return run


def evaluate(closed: core.ClosedJaxpr, arguments: Sequence[Any], rules: Rules) -> list[Any]:
    """Return the results of a traced function; jitted functions inside it are inlined."""
    return values(closed, arguments, _by(rules))(closed.jaxpr.outvars)


def values(
    closed: core.ClosedJaxpr,
    arguments: Sequence[Any],
    apply: Apply,
    fixed: Mapping[core.Var, Any] | None = None,
) -> Callable[[Sequence[Any]], list[Any]]:
    """Evaluate a traced function and return a look-up of its variables; `fixed` replaces values of some."""
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
    """Return the results of one operation, or of its replacement."""
    primitive = equation.primitive
    rule = rules.get(primitive)
    made = rule(equation.params, *given) if rule is not None else None
    if made is not None:
        return made
    if primitive is p.jit_p:
        return evaluate(equation.params["jaxpr"], given, rules)
    inside = {name: _below(value, rules) for name, value in equation.params.items()}
    found = primitive.bind(*given, **primitive.get_bind_params(inside))
    return found if primitive.multiple_results else [found]


def _below(value: Any, rules: Rules) -> Any:
    """Return a parameter of an operation; if it is a function, such as a loop's body, with its operations replaced."""
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
    """Return a product of vectors, or of a vector and a matrix, that keeps replications innermost."""
    (left, right), batch = parameters["dimension_numbers"]
    if any(batch) or max(a.ndim, b.ndim) > 2 or a.ndim + b.ndim > 3:
        return None
    dtype = parameters["preferred_element_type"] or jnp.result_type(a, b)
    a, b = a.astype(dtype), b.astype(dtype)
    if not left:
        return [jnp.expand_dims(a, tuple(range(a.ndim, a.ndim + b.ndim))) * b]
    a, b = jnp.moveaxis(a, left[0], 0), jnp.moveaxis(b, right[0], 0)
    return [dot(a[:, None] if b.ndim > a.ndim else a, b[:, None] if a.ndim > b.ndim else b)]


PRODUCTS: Rules = {p.dot_general_p: product}


# Linear in all inputs that depend on x.
_LINEAR = {
    *(p.neg_p, p.add_p, p.sub_p, p.copy_p, p.reduce_sum_p),
    *(p.reshape_p, p.squeeze_p, p.slice_p, p.broadcast_in_dim_p, p.transpose_p, p.concatenate_p),
}
_BILINEAR = {p.mul_p, p.dot_general_p}  # linear if one factor depends on x


class LinearForm(NamedTuple):
    """A loss ℓ(z, ξ) of z = aᵀx + c, where a and c depend on ξ alone."""

    loss: core.ClosedJaxpr  # (x, *leaves of ξ) → ℓ
    score: tuple[core.Var, ...]  # z, and all variables equal to it

    def gradient(self, x: Any, observation: Any) -> Scaled:
        """Return ℓ'(z)·a."""
        slope = jax.grad(self._outer(observation))
        return Scaled(slope(self._score(x, observation)), self._vector(x, observation))

    def hessian(self, x: Any, observation: Any) -> OuterProduct:
        """Return ℓ''(z)·aaᵀ."""
        curvature = jax.grad(jax.grad(self._outer(observation)))
        return OuterProduct(self._vector(x, observation), curvature(self._score(x, observation)))

    def _score(self, x: Any, observation: Any, rules: Rules = PRODUCTS) -> Any:
        arguments = [x, *jax.tree.leaves(observation)]
        return values(self.loss, arguments, _by(rules))(self.score[:1])[0]

    def _vector(self, x: Any, observation: Any) -> Any:
        """Return a = ∇z, the same at every x."""
        form = jax.grad(lambda x: self._score(x, observation, {}))
        return replaced(form, PRODUCTS)(jnp.zeros_like(x))

    def _outer(self, observation: Any) -> Callable[[Any], Any]:
        arguments = [jnp.zeros_like(self.loss.in_avals[0]), *jax.tree.leaves(observation)]

        def loss(z: Any) -> Any:
            fixed = dict.fromkeys(self.score, z)
            found = values(self.loss, arguments, _by(PRODUCTS), fixed)
            return found(self.loss.jaxpr.outvars)[0]

        return loss


def _by(rules: Rules) -> Apply:
    return lambda equation, given: apply_one(equation, given, rules)


def linear_form(loss: Callable[[Any, Any], Any], x: Any, observation: Any) -> LinearForm | None:
    """Return the loss as a function of one linear form of the parameters; None if no such form is found.

    Args:
      loss: `(x, observation) → scalar` of a flat vector x.
      x: a vector.
      observation: an observation.
    """
    closed = jax.make_jaxpr(replaced(loss, {}))(x, observation)  # with jitted functions inlined
    score = _score(closed.jaxpr)
    return None if score is None else LinearForm(closed, score)


def _score(jaxpr: core.Jaxpr) -> tuple[core.Var, ...] | None:
    """Return the first scalar, linear in x, through which alone the loss depends on x."""
    same = _equal_variables(jaxpr)
    linear, depends = {jaxpr.invars[0]}, {jaxpr.invars[0]}
    candidates = []
    for equation in jaxpr.eqns:
        moving = [v for v in equation.invars if isinstance(v, core.Var) and v in depends]
        if not moving:
            continue
        depends.update(equation.outvars)
        if linear.issuperset(moving) and _is_linear(equation, moving):
            linear.update(equation.outvars)
            shape: Any = equation.outvars[0].aval
            if shape.shape == ():
                candidates.append(same[equation.outvars[0]])
    for z in dict.fromkeys(candidates):
        group = tuple(v for v, first in same.items() if first is z)
        if not _depends(jaxpr, jaxpr.invars[:1], group):
            return group
    return None


def _is_linear(equation: core.JaxprEqn, moving: list[core.Var]) -> bool:
    """Return whether an operation is linear in those of its inputs that depend on x."""
    primitive = equation.primitive
    if primitive is p.convert_element_type_p:
        return jnp.issubdtype(equation.params["new_dtype"], jnp.floating)
    if primitive is p.div_p:
        return moving == equation.invars[:1]
    return primitive in _LINEAR or (primitive in _BILINEAR and len(moving) == 1)


def _depends(
    jaxpr: core.Jaxpr, inputs: Sequence[core.Var], except_through: Sequence[core.Var] = ()
) -> bool:
    """Return whether the results depend on some inputs, other than through certain variables."""
    depends = set(inputs)
    for equation in jaxpr.eqns:
        if any(isinstance(v, core.Var) and v in depends for v in equation.invars):
            depends.update(v for v in equation.outvars if v not in except_through)
    return any(isinstance(v, core.Var) and v in depends for v in jaxpr.outvars)


def is_zero(function: Callable[..., Any], *shapes: Any) -> bool:
    """Return whether a function returns zeros that depend on none of its arguments, given as shapes."""
    closed = jax.make_jaxpr(function)(*shapes)
    if _depends(closed.jaxpr, closed.jaxpr.invars):
        return False
    zeros = [np.zeros(aval.shape, aval.dtype) for aval in closed.in_avals]
    return not any(np.any(found) for found in core.jaxpr_as_fun(closed)(*zeros))


def _equal_variables(jaxpr: core.Jaxpr) -> dict[core.Var, core.Var]:
    """Return for each variable the first one with the same value: the same operation on the same inputs."""
    first: dict[Any, core.Var] = {}
    same: dict[core.Var, core.Var] = {v: v for v in [*jaxpr.invars, *jaxpr.constvars]}
    for equation in jaxpr.eqns:
        given = [repr(v) if isinstance(v, core.Literal) else id(same[v]) for v in equation.invars]
        for variable in equation.outvars:
            key = (equation.primitive, str(equation.params), *given)
            plain = equation.primitive in _LINEAR | _BILINEAR  # whose parameters are only numbers
            same[variable] = first.setdefault(key, variable) if plain else variable
    return same
