"""The truth of a problem of one's own, by Newton's method on a large fixed sample, with its error."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.forms import dense
from jaxlsgd.core.problem import Array, Draws, Problem

_CHUNK = 500  # observations of each client at a time
_MOST_STEPS = 60


class Solution(NamedTuple):
    """A problem whose truth is known numerically, and how well."""

    problem: Problem  # with truth, and G and S where it had none
    standard_error: np.ndarray  # (d,) Monte-Carlo standard error of the truth
    residual: float  # largest |gradient| of the sample there, over its own standard error


class _Moments(NamedTuple):
    """Means over a sample, client by client."""

    gradient: Any  # (K, d)
    square: Any  # (K, d, d) of g gᵀ
    hessian: Any  # (K, d, d)


def solve(problem: Problem, observations: int = 100_000, seed: int = 0) -> Solution:
    """Finds x* with Σ_k p_k E ∇f_k(x*) = 0, for coverage studies of a problem of your own.

    The expectation is a mean over a fixed sample, in float64; x* is where Newton's method with halved steps
    ends, and is refused unless the mean gradient vanishes there and the mean Hessian is positive definite.
    Its error is that of the sample, √diag(G⁻¹SG⁻ᵀ/n): take n much larger than a run's t_T, or the coverage
    that you measure is that of another truth.

    Args:
      problem: the problem; what it says of its own truth is not used.
      observations: n, of each client.
      seed: of the sample.

    Returns:
      A `Solution`: the problem with `truth`, and with `G` and `S` where it had none; the standard errors of
      that truth.

    Example::

        found = jaxlsgd.problems.solve(problem)
        jaxlsgd.simulate(jax.random.key(0), found.problem, plan)
    """
    if problem.drifts:
        raise refusal("problem", "not drift, as a sample has no time", problem.name)
    count = checks.count("observations", observations, 2)
    checks.count("seed", seed, 0)
    with jax.enable_x64(True):
        moments = _sampled(problem, -(-count // _CHUNK), seed)
        start = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(problem.init)])
        x, gradient, G, S = _newton(moments, start.astype(np.float64), problem.weights)
    n = -(-count // _CHUNK) * _CHUNK
    noise = np.sqrt(np.diagonal(S) / n)
    residual = float(np.max(np.abs(gradient) / np.where(noise > 0, noise, 1.0)))
    if not residual < 1e-3:
        rule = "have a mean gradient that vanishes where Newton's method ends"
        raise refusal("problem", rule, f"one of {residual:.3g} standard errors")
    _check_definite(G)
    inverse = np.linalg.inv(G)
    error = np.sqrt(np.diagonal(inverse @ S @ inverse.T) / n)
    known = {key: M for key, M in (("G", G), ("S", S)) if getattr(problem, key) is None}
    return Solution(
        dataclasses.replace(problem, truth=_like(problem.init, x), **known), error, residual
    )


def _check_definite(G: np.ndarray) -> None:
    values = np.linalg.eigvalsh(G)
    if not values[0] > 1e-10 * values[-1]:
        rule = "have a positive definite mean Hessian at its solution"
        raise refusal("problem", rule, f"a smallest eigenvalue of {values[0]:.3g}")


def _like(init: Any, vector: np.ndarray) -> Any:
    leaves, treedef = jax.tree.flatten(init)
    parts = np.split(vector, np.cumsum([np.size(leaf) for leaf in leaves])[:-1])
    return treedef.unflatten(
        [part.reshape(np.shape(leaf)) for part, leaf in zip(parts, leaves, strict=True)]
    )


def _newton(
    moments: Callable[[Any], _Moments], x: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, ...]:
    """The last x with its mean gradient, G and S."""
    gradient, G, S = _reduced(moments(x), weights)
    for _ in range(_MOST_STEPS):
        step, share = np.linalg.lstsq(G, gradient)[0], 1.0
        while True:
            new = x - share * step
            found = _reduced(moments(new), weights)
            if np.linalg.norm(found[0]) < np.linalg.norm(gradient) or share < 1e-4:
                break
            share /= 2
        closer = np.linalg.norm(found[0]) < np.linalg.norm(gradient)
        if not closer:
            break
        x, (gradient, G, S) = new, found
        if np.linalg.norm(share * step) < 1e-12 * (1 + np.linalg.norm(x)):
            break
    return x, gradient, G, S


def _reduced(found: _Moments, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean gradient and Hessian over clients, and the covariance of the averaged gradient."""
    g, square, H = (np.asarray(leaf, np.float64) for leaf in found)
    own = square - g[:, :, None] * g[:, None, :]
    G = np.einsum("k,kij->ij", weights, H)
    return weights @ g, (G + G.T) / 2, np.einsum("k,kij->ij", weights**2, own)


def _sampled(problem: Problem, chunks: int, seed: int) -> Callable[[Any], _Moments]:
    """The moments of the fixed sample as a function of x."""
    functions = problem.structure().flat_functions()
    clients = jax.tree.map(jnp.asarray, problem.clients)
    keys = jax.random.split(jax.random.key(seed), problem.num_clients)

    def one(x: Array, key: Array, client: Any) -> _Moments:
        seen = _observation(problem, key, client)
        g, H = dense(functions.gradient(x, seen)), dense(functions.hessian(x, seen))
        return _Moments(g, g[:, None] * g[None, :], H)

    def of_client(x: Array, key: Array, client: Any) -> _Moments:
        many = jax.random.split(key, _CHUNK)
        found = jax.vmap(lambda each: one(x, each, client))(many)
        return jax.tree.map(lambda leaf: leaf.mean(0), found)

    @jax.jit
    def moments(x: Array) -> _Moments:
        def add(total: _Moments, i: Array) -> tuple[_Moments, None]:
            here = jax.vmap(lambda key: jax.random.fold_in(key, i))(keys)
            found = jax.vmap(of_client, (None, 0, 0))(x, here, clients)
            return jax.tree.map(lambda a, b: a + b / chunks, total, found), None

        shape = jax.eval_shape(jax.vmap(of_client, (None, 0, 0)), x, keys, clients)
        empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shape)
        return jax.lax.scan(add, empty, jnp.arange(chunks))[0]

    return functools.partial(_in_float64, moments)


def _in_float64(moments: Callable[[Any], _Moments], x: Any) -> _Moments:
    return moments(jnp.asarray(x, jnp.float64))


def _observation(problem: Problem, key: Array, client: Any) -> Any:
    if problem.sample is not None:
        return problem.sample(key, client)
    assert problem.observe is not None and problem.draws is not None
    normal, uniform = jax.random.split(key)
    return problem.observe(
        Draws(
            jax.random.normal(normal, (problem.draws.normal,)),
            jax.random.uniform(uniform, (problem.draws.uniform,)),
        ),
        client,
    )
