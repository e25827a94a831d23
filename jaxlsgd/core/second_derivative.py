"""Whether a loss has a second derivative to speak of, told from its program, before anything runs."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxlsgd.core.forms import OuterProduct, dense
from jaxlsgd.core.problem import Problem, Structure, abstract_source


def has_curvature(problem: Problem) -> bool:
    """Whether the Hessian of the loss is anything but 0 at all parameters and observations.

    It is not for absolute and quantile losses, whose kinks no derivative sees. What is asked is whether JAX's
    program for the Hessian ends in zeros that no argument enters; a loss that is refused is surely flat,
    whatever its parameters, and Huber's, which is curved somewhere, is not.
    """
    source, argument = abstract_source(problem)
    client = jax.eval_shape(lambda: jax.tree.map(lambda leaf: leaf[0], problem.clients))
    leaves, treedef = jax.tree.flatten(jax.eval_shape(source, argument, client))
    shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    return _has_curvature(problem.structure(), problem.dim, treedef, shapes)


@functools.lru_cache(maxsize=256)
def _has_curvature(structure: Structure, dim: int, treedef: Any, shapes: Any) -> bool:
    hessian = structure.flat_functions().hessian

    def curvature(x: Any, seen: Any) -> Any:
        found = hessian(x, seen)
        if isinstance(found, OuterProduct):
            return jnp.ones(()) if found.weight is None else found.weight
        return dense(found)

    abstract: Any = jax.ShapeDtypeStruct
    seen = treedef.unflatten([abstract(*shape) for shape in shapes])
    closed = jax.make_jaxpr(curvature)(abstract((dim,), jnp.float32), seen)
    if _depends(closed.jaxpr):
        return True
    zeros = [np.zeros(var.aval.shape, var.aval.dtype) for var in closed.jaxpr.invars]
    return bool(np.any([np.any(x) for x in core.jaxpr_as_fun(closed)(*zeros)]))


def _depends(jaxpr: Any) -> bool:
    """Whether an argument enters a result."""
    reached = {id(var) for var in jaxpr.invars}
    for equation in jaxpr.eqns:
        if any(id(var) in reached for var in equation.invars):
            reached |= {id(var) for var in equation.outvars}
    return any(id(var) in reached for var in jaxpr.outvars)
