"""An interval from the true G and S: what plug-in would be if it had nothing to estimate but ȳ."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import ArrayLike

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.estimator import Estimator, Horizon, Measurement
from jaxlsgd.core.problem import Array, Problem
from jaxlsgd.core.registry import register
from jaxlsgd.inference.finite_horizon import horizon_factors
from jaxlsgd.inference.laws.standard import NORMAL
from jaxlsgd.inference.plug_in import Covariance
from jaxlsgd.inference.rivals.copies import RunState, run_means


@register("method")
def oracle(
    G: ArrayLike, S: ArrayLike, *, horizon: Covariance = "asymptotic", name: str | None = None
) -> Estimator:
    """Oracle: ȳ_j ± z √Cov(ȳ)_jj with the covariance from the true G and S.

    A reference for lengths, not a method for data. `of(problem)` takes G and S from a problem that declares them.

    Args:
      G: ∇²f(x*), (d, d), symmetric and positive definite.
      S: covariance of the averaged gradient at x*, (d, d).
      horizon: "asymptotic", Cov(ȳ) = (Σ1/E_m) G⁻¹SG⁻ᵀ/T²; or "finite", that of the linearised recursion under
        the plan, see `finite_horizon`.
      name: name in tables; made from the arguments if None.
    """
    checks.choice("horizon", horizon, Covariance)
    G, S = _symmetric("G", G), _symmetric("S", S)
    if G.shape != S.shape:
        raise refusal("S", f"have the shape {G.shape} of G", S.shape, code="shape")
    if not np.all(np.linalg.eigvalsh(G) > 0):
        raise refusal("G", "be positive definite", G.tolist())
    finite = horizon == "finite"
    matrix, measure = _functions(G.tobytes(), S.tobytes(), len(G), finite)
    return Estimator(
        name=name or "oracle" + ("[finite]" if finite else ""),
        accumulators=(run_means(1, len(G)),),
        measure=measure,
        law=NORMAL,
        matrix=matrix,
        standard_error=True,
        needs_plan=finite,
        label="oracle" + (", finite horizon" if finite else ""),
        cost="the truth",
    )


def of(problem: Problem, horizon: Covariance = "asymptotic", name: str | None = None) -> Estimator:
    """Return the oracle interval of a problem that declares G and S.

    Example::

        simulate(key, problem, plan, replications=99, methods=[plug_in(), oracle.of(problem)])
    """
    missing = [part for part in ("G", "S") if getattr(problem, part) is None]
    if missing:
        what = " and ".join(missing)
        rule = f"declare {what}, which an oracle interval is made of"
        raise refusal("problem", rule, problem.name or "one without", code="missing")
    return oracle(problem.G, problem.S, horizon=horizon, name=name)


def _symmetric(argument: str, value: Any) -> np.ndarray:
    found = checks.array(argument, value, (len(np.atleast_1d(value)),) * 2)
    if not np.allclose(found, found.T, rtol=1e-6, atol=1e-9 * np.abs(found).max()):
        raise refusal(argument, "be symmetric", found.tolist())
    return (found + found.T) / 2


# Cached by content, so that two oracles of one problem share a program.
@functools.lru_cache(maxsize=64)
def _functions(G: bytes, S: bytes, dim: int, finite: bool) -> tuple[Any, Any]:
    values, vectors = np.linalg.eigh(np.frombuffer(G).reshape(dim, dim))
    turned = vectors.T @ np.frombuffer(S).reshape(dim, dim) @ vectors
    limit = vectors @ (turned / np.outer(values, values)) @ vectors.T

    def matrix(states: tuple[RunState, ...], horizon: Horizon | None) -> Array:
        state = states[0]
        dtype = state.mean.dtype
        if not finite:
            rounds = jnp.maximum(state.m, 1).astype(dtype)
            return jnp.asarray(limit, dtype) * (state.s / rounds / rounds)
        assert horizon is not None
        factors = horizon_factors(jnp.asarray(values, dtype), horizon)
        basis = jnp.asarray(vectors, dtype)
        left = jnp.matmul(
            basis, factors.pair * jnp.asarray(turned, dtype), precision=lax.Precision.HIGHEST
        )
        return jnp.matmul(left, basis.T, precision=lax.Precision.HIGHEST)

    def measure(states: tuple[RunState, ...], horizon: Horizon | None) -> Measurement:
        state = states[0]
        scale = jnp.sqrt(jnp.diagonal(matrix(states, horizon)))
        return Measurement(state.mean + state.lost, jnp.where(state.m < 1, jnp.inf, scale))

    return matrix, measure
