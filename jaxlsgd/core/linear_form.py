"""Losses that see the parameters through one number, ℓ(aᵀx + c, ξ): those of generalised linear models.

Their gradients are ℓ'·a and their Hessians ℓ''·aaᵀ, which the engine need not write out for each client
and replication. A loss of a user is traced, and its operations tell whether it is one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import primitives as p

from jaxlsgd.core import traced
from jaxlsgd.core.forms import OuterProduct, Scaled

# Linear in all that depends on x.
_LINEAR = {
    *(p.neg_p, p.add_p, p.sub_p, p.copy_p, p.reduce_sum_p),
    *(p.reshape_p, p.squeeze_p, p.slice_p, p.broadcast_in_dim_p, p.transpose_p, p.concatenate_p),
}
_BILINEAR = {p.mul_p, p.dot_general_p}  # linear if one factor depends on x


class LinearForm(NamedTuple):
    """A loss ℓ(z, ξ) of z = aᵀx + c, where a and c are made of ξ alone."""

    loss: core.ClosedJaxpr  # (x, *leaves of ξ) → ℓ
    score: tuple[core.Var, ...]  # z, and whatever is the same again

    def gradient(self, x: Any, observation: Any) -> Scaled:
        """ℓ'(z)·a."""
        slope = jax.grad(self._outer(observation))
        return Scaled(slope(self._score(x, observation)), self._vector(x, observation))

    def hessian(self, x: Any, observation: Any) -> OuterProduct:
        """ℓ''(z)·aaᵀ."""
        curvature = jax.grad(jax.grad(self._outer(observation)))
        return OuterProduct(self._vector(x, observation), curvature(self._score(x, observation)))

    def _score(self, x: Any, observation: Any, rules: traced.Rules = traced.PRODUCTS) -> Any:
        arguments = [x, *jax.tree.leaves(observation)]
        return traced.values(self.loss, arguments, _by(rules))(self.score[:1])[0]

    def _vector(self, x: Any, observation: Any) -> Any:
        """a = ∇z, wherever it is taken."""
        form = jax.grad(lambda x: self._score(x, observation, {}))
        return traced.replaced(form, traced.PRODUCTS)(jnp.zeros_like(x))

    def _outer(self, observation: Any) -> Callable[[Any], Any]:
        arguments = [jnp.zeros_like(self.loss.in_avals[0]), *jax.tree.leaves(observation)]

        def loss(z: Any) -> Any:
            fixed = dict.fromkeys(self.score, z)
            found = traced.values(self.loss, arguments, _by(traced.PRODUCTS), fixed)
            return found(self.loss.jaxpr.outvars)[0]

        return loss


def _by(rules: traced.Rules) -> traced.Apply:
    return lambda equation, given: traced.apply_one(equation, given, rules)


def linear_form(loss: Callable[[Any, Any], Any], x: Any, observation: Any) -> LinearForm | None:
    """The loss as a function of one linear form of the parameters; None if it is not seen to be one.

    Args:
      loss: `(x, observation) → scalar` of a flat vector x.
      x: a vector.
      observation: an observation.
    """
    closed = jax.make_jaxpr(traced.replaced(loss, {}))(x, observation)  # as one function
    score = _score(closed.jaxpr)
    return None if score is None else LinearForm(closed, score)


def _score(jaxpr: core.Jaxpr) -> tuple[core.Var, ...] | None:
    """The first number, linear in x, that all of the loss sees of x."""
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
        if _hides(jaxpr, set(group)):
            return group
    return None


def _is_linear(equation: core.JaxprEqn, moving: list[core.Var]) -> bool:
    """Whether an operation is linear in those of its inputs that depend on x."""
    primitive = equation.primitive
    if primitive is p.convert_element_type_p:
        return jnp.issubdtype(equation.params["new_dtype"], jnp.floating)
    if primitive is p.div_p:
        return moving == equation.invars[:1]
    return primitive in _LINEAR or (primitive in _BILINEAR and len(moving) == 1)


def _hides(jaxpr: core.Jaxpr, group: set[core.Var]) -> bool:
    """Whether the results depend on x only through some variables."""
    depends = {jaxpr.invars[0]}
    for equation in jaxpr.eqns:
        if any(isinstance(v, core.Var) and v in depends for v in equation.invars):
            depends.update(v for v in equation.outvars if v not in group)
    return not any(v in depends for v in jaxpr.outvars if isinstance(v, core.Var))


def _equal_variables(jaxpr: core.Jaxpr) -> dict[core.Var, core.Var]:
    """Each variable's first namesake: two that are made by the same operation of the same things are one."""
    first: dict[Any, core.Var] = {}
    same: dict[core.Var, core.Var] = {v: v for v in [*jaxpr.invars, *jaxpr.constvars]}
    for equation in jaxpr.eqns:
        given = [repr(v) if isinstance(v, core.Literal) else id(same[v]) for v in equation.invars]
        for variable in equation.outvars:
            key = (equation.primitive, str(equation.params), *given)
            plain = (
                equation.primitive in _LINEAR | _BILINEAR
            )  # with parameters that are numbers alone
            same[variable] = first.setdefault(key, variable) if plain else variable
    return same
