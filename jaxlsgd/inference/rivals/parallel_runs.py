"""Parallel federations: Student's t from the averages of groups of clients that never meet.

The clients are split into B groups of equal weight, each a federation of its own (`federation_tree` with a split after
round 0). Their averages ȳ^b are independent, and, as all have the same schedule, of one covariance
B s_T/T² · G⁻¹SG⁻ᵀ: neither weights by E_m nor ν, G or S are needed. So

    ȳ ± t_{B−1} √(Σ_b (ȳ^b − ȳ)²/(B (B − 1))),     ȳ = Σ_b ȳ^b/B.

This needs groups with one optimum (see `federation_tree`), and federations long enough for ȳ^b to be normal around
it: a bias, from the start or from curvature with fewer clients, is common to all and does not average out.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxlsgd.core import checks
from jaxlsgd.core.algorithm import Algorithm
from jaxlsgd.core.estimator import Estimator, Horizon, Measurement
from jaxlsgd.core.problem import Array, Problem
from jaxlsgd.core.registry import register
from jaxlsgd.inference.laws.standard import student
from jaxlsgd.inference.rivals.copies import RunState, averages, contrasts_of, given_dim, run_means
from jaxlsgd.inference.rivals.federation_tree import federation_tree, split_clients


@register("method")
def parallel_runs(runs: int, dim: int | None = None, name: str | None = None) -> Estimator:
    """Parallel federations: Student's t from the averages of groups of clients that never meet.

    For a run of `federation_tree` on a problem made by `split_clients`; `split` makes both.

    Args:
      runs: B, at least 2.
      dim: d of one federation; that of the problem if None, and checked if given.
      name: name in tables; "parallel_runs" if None.

    Returns:
      An `Estimator`. It costs no further gradients and no communication; memory of the server (and, in the
      engine, of clients) is B times d.

    Reference: Zhu, Lou, Wei, Wu (2024), High confidence level inference is almost free using parallel
    stochastic optimization; Ibragimov, Müller (2010), t-statistic based correlation and heterogeneity
    robust inference, JBES 28.
    """
    checks.count("runs", runs, 2)
    given = given_dim(dim)
    return Estimator(
        name=name or "parallel_runs",
        accumulators=(run_means(runs, given),),
        measure=_measure_runs(runs, given),
        law=student(runs - 1),
        matrix=_runs_matrix(runs, given),
        standard_error=True,
        **contrasts_of(runs, given),
        label="parallel runs",
        cost=f"no gradients, no communication; {runs} × the server's memory",
    )


class Parallel(NamedTuple):
    """Arguments of `simulate` for parallel federations, besides methods."""

    problem: Problem
    algorithm: Algorithm


def split(problem: Problem, runs: int) -> Parallel:
    """Return a problem whose clients are `runs` federations from the start, with its algorithm.

    Example::

        apart = split(problems.linear(5, 12, heterogeneity=0.0), runs=6)
        methods = [parallel_runs(6), hulc(6)]
        simulate(key, apart.problem, plan, replications=99, algorithm=apart.algorithm, methods=methods)
    """
    checks.count("runs", runs, 2)
    return Parallel(split_clients(problem, runs), federation_tree((runs,), (0,), dim=problem.dim))


@functools.cache
def _runs_matrix(runs: int, dim: int | None) -> Any:
    def matrix(states: tuple[RunState, ...], horizon: Horizon | None) -> Array:
        del horizon
        each = averages(states[0], runs, dim)
        away = each - jnp.mean(each, axis=0)
        return jnp.sum(away[:, :, None] * away[:, None, :], axis=0) / (runs * (runs - 1))

    return matrix


@functools.cache
def _measure_runs(runs: int, dim: int | None) -> Any:
    matrix = _runs_matrix(runs, dim)

    def measure(states: tuple[RunState, ...], horizon: Horizon | None) -> Measurement:
        scale = jnp.sqrt(jnp.diagonal(matrix(states, horizon)))
        scale = jnp.where(states[0].m < 1, jnp.inf, scale)
        return Measurement(jnp.mean(averages(states[0], runs, dim), axis=0), scale)

    return measure
