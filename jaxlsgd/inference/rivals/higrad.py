"""HiGrad: a t interval from the leaves of a tree of federations that split.

Level j of the tree (see `federation_tree`) lasts m_j rounds with information time s_j = Σ 1/E_m and has C_j
federations, each with a C_j-th of the clients. The average θ̄_j of a federation's path over its level has covariance

    C_j (s_j/m_j²) V,     V = G⁻¹SG⁻ᵀ of all clients,

as for ȳ_T in the paper, with C_j S in the place of S. It is nearly independent of other levels'. A leaf ℓ takes
μ_ℓ = Σ_j w_j θ̄_j along the way to it. Two leaves whose ways part after level i have covariance V Σ_{j≤i} a_j with
a_j = w_j² C_j s_j/m_j². The mean of all leaves has V Σ_j a_j/C_j = V Σ_j w_j² s_j/m_j², least for w_j ∝ m_j²/s_j; for
constant E_m that is w_j ∝ m_j, the plain average. With Σ the (L, L) matrix of these sums, coordinate by coordinate,

    V̂ = (μ − μ̄1)ᵀ Σ⁻¹ (μ − μ̄1)/(L − 1),     μ̄ ± t_{L−1} √(V̂ 1ᵀΣ1)/L.

Σ needs no inverse: μ − μ̄1 is a sum over levels j ≥ 1 of how node means differ from those of the nodes above, which
are orthogonal eigenvectors of Σ with eigenvalues λ_j = Σ_{i≥j} a_i L/C_i; and 1ᵀΣ1 = L λ_0. E_m = 1 is the published
method with n_j = m_j/C_j observations of all clients for a node of level j.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxlsgd.core.algorithm import Algorithm
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.estimator import Accumulator, Estimator, Horizon, Measurement, Sync
from jaxlsgd.core.problem import Array, Params, Problem, flatten
from jaxlsgd.core.registry import register
from jaxlsgd.inference.laws.standard import student
from jaxlsgd.inference.rivals.copies import contrasts_of, given_dim, stacked
from jaxlsgd.inference.rivals.federation_tree import (
    check_tree,
    federation_tree,
    split_clients,
    within_nodes,
)
from jaxlsgd.inference.sums import compensated_add, widened
from jaxlsgd.schedules.plan import Plan


class LevelState(NamedTuple):
    """Averages of the path over each level."""

    means: Array  # (levels, L d) θ̄_j of every leaf's way
    lost: Array  # (levels, L d) their rounding errors so far
    s: Array  # (levels,) Σ 1/E
    m: Array  # (levels,) int32, rounds
    so_far: Array  # () int32, rounds of all levels


@functools.cache
def level_means(dim: int | None, branches: tuple[int, ...], splits: tuple[int, ...]) -> Accumulator:
    """Return the averages above as a streaming statistic: θ̄_j ← θ̄_j + (x̄ − θ̄_j)/m_j for the level of the round."""
    leaves, levels = math.prod(branches), len(branches) + 1

    def init(params: Params) -> LevelState:
        x = stacked(params, leaves, dim)
        means = jnp.zeros((levels, *x.shape), x.dtype)
        counts = jnp.zeros(levels, jnp.int32)
        return LevelState(means, means, jnp.zeros(levels, x.dtype), counts, counts[0])

    def update(state: LevelState, sync: Sync) -> LevelState:
        x = widened(flatten(sync.params))
        here = sum((state.so_far >= split).astype(jnp.int32) for split in splits)
        now = jnp.arange(levels) == here
        m = state.m + now.astype(jnp.int32)
        share = jnp.where(now, 1 / jnp.maximum(m, 1).astype(x.dtype), 0)
        move = share[:, None] * ((x[None, :] - state.means) - state.lost)
        means, lost = compensated_add(state.means, state.lost, move)
        s = state.s + jnp.where(now, 1 / jnp.asarray(sync.E, x.dtype), 0)
        return LevelState(means, lost, s, m, state.so_far + 1)

    return Accumulator(init, update, shared=("s", "m", "so_far"))


@register("method")
def higrad(
    branches: Sequence[int] = (2, 2),
    splits: Sequence[int] = (100, 200),
    *,
    dim: int | None = None,
    name: str | None = None,
) -> Estimator:
    """HiGrad: Student's t from the leaves of a tree of federations that split.

    For a run of `federation_tree` on a problem made by `split_clients`; `grow` makes all three for a plan.

    Args:
      branches: how many federations one splits into, at each split.
      splits: the rounds after which they split, increasing; a plan must have more rounds than the last.
      dim: d of one federation; that of the problem if None, and checked if given.
      name: name in tables; made from the arguments if None.

    Returns:
      An `Estimator`. It costs no further gradients and no communication; memory of the server (and, in the
      engine, of clients) is L times d, and that of the statistic 2Ld for each level.

    Reference: Su, Zhu (2023), HiGrad: uncertainty quantification for online learning and stochastic
    approximation, JMLR 24.
    """
    given = given_dim(dim)
    branches, splits = check_tree(branches, splits)
    leaves = math.prod(branches)
    return Estimator(
        name=name or f"higrad[{'x'.join(map(str, branches))}]",
        accumulators=(level_means(given, branches, splits),),
        measure=_measure_tree(branches),
        law=student(leaves - 1),
        matrix=_tree_matrix(branches),
        standard_error=True,
        **contrasts_of(leaves, given),
        label="HiGrad",
        cost=f"no gradients, no communication; {leaves} × the server's memory",
        least_rounds=splits[-1] + 1,
    )


class Grown(NamedTuple):
    """Arguments of `simulate` for a tree."""

    problem: Problem
    algorithm: Algorithm
    method: Estimator


def grow(problem: Problem, plan: Plan, branches: Sequence[int] = (2, 2)) -> Grown:
    """Return a tree whose levels have equally many rounds of a plan.

    Args:
      problem: what is estimated; its clients are split.
      plan: its rounds are divided among the tree's levels.
      branches: how many federations one splits into, at each split.

    Example::

        tree = grow(problems.linear(5, 4, heterogeneity=0.0), plan)
        simulate(key, tree.problem, plan, replications=99, algorithm=tree.algorithm, methods=tree.method)
    """
    branches, _ = check_tree(branches, tuple(range(len(branches))))
    levels = len(branches) + 1
    if plan.num_rounds % levels:
        rule = f"have a number of rounds that the tree's {levels} levels divide"
        raise refusal("plan", rule, plan.num_rounds)
    splits = tuple(plan.num_rounds // levels * j for j in range(1, levels))
    many = split_clients(problem, math.prod(branches))
    dim = problem.dim
    return Grown(
        many, federation_tree(branches, splits, dim=dim), higrad(branches, splits, dim=dim)
    )


@functools.cache
def _measure_tree(branches: tuple[int, ...]) -> Any:
    matrix, leaves = _tree_matrix(branches), math.prod(branches)

    def measure(states: tuple[LevelState, ...], horizon: Horizon | None) -> Measurement:
        state = states[0]
        variance = jnp.diagonal(matrix(states, horizon))
        scale = jnp.where(state.m[-1] < 1, jnp.inf, jnp.sqrt(variance))
        return Measurement(jnp.mean(_leaf_values(state, leaves), axis=0), scale)

    return measure


def _weights(state: LevelState) -> Array:
    """Return w_j ∝ m_j²/s_j; 0 for a level without rounds."""
    m = state.m.astype(state.s.dtype)
    amount = jnp.where(state.m > 0, m * m / jnp.where(state.m > 0, state.s, 1), 0)
    return amount / jnp.maximum(jnp.sum(amount), jnp.finfo(amount.dtype).tiny)


def _leaf_values(state: LevelState, leaves: int) -> Array:
    """Return μ, (L, d)."""
    means = state.means + state.lost
    return jnp.sum(_weights(state)[:, None] * means, axis=0).reshape(leaves, -1)


@functools.cache
def _tree_matrix(branches: tuple[int, ...]) -> Any:
    """Return the function (states, horizon) → V̂ 1ᵀΣ1/L², (d, d)."""
    leaves = math.prod(branches)
    nodes = [math.prod(branches[:j]) for j in range(len(branches) + 1)]

    def matrix(states: tuple[LevelState, ...], horizon: Horizon | None) -> Array:
        del horizon
        state = states[0]
        w, m = _weights(state), jnp.maximum(state.m, 1).astype(state.s.dtype)
        # a_j L/C_j, whose sums from j on are the eigenvalues
        parts = w * w * state.s / m / m * leaves
        eigenvalues = jnp.cumsum(parts[::-1])[::-1]
        values = _leaf_values(state, leaves)
        dim = values.shape[1]
        above, total = within_nodes(values, 1), jnp.zeros((dim, dim), values.dtype)
        for j, count in enumerate(nodes[1:], start=1):
            here = within_nodes(values, count)
            away, above = here - above, here
            square = jnp.sum(away[:, :, None] * away[:, None, :], axis=0)
            total = total + square / jnp.where(eigenvalues[j] > 0, eigenvalues[j], 1)
        return total * eigenvalues[0] / (leaves * (leaves - 1))

    return matrix
