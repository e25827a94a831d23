"""Minibatches: any problem with several observations per step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.forms import dense
from jaxlsgd.core.problem import Array, Draws, Problem, Structure, flatten
from jaxlsgd.core.registry import register


@register("problem")
def minibatch(problem: Problem, size: int) -> Problem:
    """The same problem with `size` observations per step: means of their losses and derivatives.

    x* and G stay and S is divided by the size, so that the paper's theory covers it if it covers the problem.
    t_T then counts minibatches.

    Args:
      problem: any.
      size: observations per step, at least 1.

    Example::

        simulate(key, minibatch(problems.logistic(5, 10), 8), plan, replications=100)
        # study.toml:  problems = [{kind = "minibatch", problem = "paper-logistic", size = 8}]
    """
    if not isinstance(problem, Problem):
        raise refusal("problem", "be a jaxlsgd.Problem", problem, code="type")
    size = checks.count("size", size, 1, 10**6)
    functions = _functions(problem.structure(), size)
    draws = problem.draws and Draws(size * problem.draws.normal, size * problem.draws.uniform)
    return dataclasses.replace(
        problem,
        **functions,
        draws=draws,
        S=None if problem.S is None else np.asarray(problem.S) / size,
        name=f"{problem.name or 'problem'}-{size}",
    )


@functools.lru_cache(maxsize=256)
def _functions(structure: Structure, size: int) -> dict[str, Callable[..., Any] | None]:
    """Return the functions of a minibatch, cached so that equal problems share a program."""
    one = structure.flat_functions()
    spec = structure.draws

    def observe(draws: Draws, client: Any) -> Any:
        def parts(numbers: Array, count: int) -> Array:
            return numbers.reshape(size, count)

        assert spec is not None and one.observe is not None
        each = Draws(parts(draws.normal, spec.normal), parts(draws.uniform, spec.uniform))
        return jax.vmap(one.observe, (0, None))(each, client)

    def sample(key: Array, client: Any) -> Any:
        assert one.sample is not None
        return jax.vmap(one.sample, (0, None))(jax.random.split(key, size), client)

    def mean(function: Callable[..., Any]) -> Callable[..., Any]:
        def of_batch(params: Any, observations: Any) -> Any:
            x = flatten(params)
            found = jax.vmap(lambda seen: dense(function(x, seen)))(observations)
            return jnp.mean(found, axis=0)

        return of_batch

    gradient = mean(one.gradient)
    return {
        "observe": observe if one.observe is not None else None,
        "sample": sample if one.sample is not None else None,
        "loss": mean(one.loss),
        "gradient": lambda params, seen: one.unravel(gradient(params, seen)),
        "hessian": mean(one.hessian),
    }
