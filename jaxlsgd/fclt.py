"""A check of the functional central limit theorem on simulated paths.

    φ_T(r) = (√t_T/T) Σ_{m ≤ h(r, T)} (x̄_{t_m} − x*)  ⇒  √ν G⁻¹S^{1/2} B(r)

Standardised by √ν̂ (G⁻¹SG⁻ᵀ)^{1/2}, its coordinates should be independent Brownian motions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import scipy.stats
from numpy.typing import NDArray

from jaxlsgd.base import Array, Problem
from jaxlsgd.inference.random_scaling import random_scaling
from jaxlsgd.schedules import Plan
from jaxlsgd.simulation import simulate

FloatArray = NDArray[np.float64]
GRID = tuple(np.round(np.arange(0.1, 1.01, 0.1), 10).tolist())


@dataclasses.dataclass(frozen=True)
class FcltCheck:
    """The standardised process on a grid, against Brownian motion."""

    grid: FloatArray  # (points,) r actually used, r_m of the rounds
    process: FloatArray  # (points, replications, d)
    covariance: FloatArray  # (points, points) empirical, over replications and coordinates
    expected: FloatArray  # (points, points) min(r, s)
    standard_error: FloatArray  # (points, points) of `covariance` under the limit
    normality: FloatArray  # (points,) Kolmogorov-Smirnov p-values of φ(r)/√r against N(0, 1)

    @property
    def largest_z(self) -> float:
        """Largest deviation of the covariance from min(r, s), in standard errors."""
        return float(np.max(np.abs(self.covariance - self.expected) / self.standard_error))

    def __str__(self) -> str:
        return (
            f"Cov(φ(r), φ(s)) deviates from min(r, s) by up to {self.largest_z:.1f} standard errors "
            f"({100 * np.max(np.abs(self.covariance - self.expected)):.1f} % of Var B(1)); smallest "
            f"normality p-value {self.normality.min():.2g} over {self.grid.size} points, "
            f"{self.process.shape[1]:,} replications."
        )


def fclt_check(
    key: Array,
    problem: Problem,
    plan: Plan,
    *,
    replications: int,
    grid: Sequence[float] = GRID,
) -> FcltCheck:
    """Simulates φ_T on a grid of r and compares it with Brownian motion.

    Args:
      key: typed root key.
      problem: one that knows its truth, G and S.
      plan: the plan to run.
      replications: how many paths.
      grid: values of r in (0, 1].

    Returns:
      An `FcltCheck`; print it, or draw it with `report.fclt_figure`.
    """
    if problem.truth is None or problem.G is None or problem.S is None:
        raise ValueError(f"problem: must know its truth, G and S; {problem.name} does not")
    points = np.asarray(grid, np.float64)
    if points.ndim != 1 or points.size == 0 or not np.all((points > 0) & (points <= 1)):
        raise ValueError(f"grid: must be values in (0, 1], got {grid!r}")
    clock = np.cumsum(1 / plan.E)
    clock /= clock[-1]
    # h(r, T) = max{n: r ≥ r_n}, at least one round
    rounds = np.unique(np.searchsorted(clock, points * (1 + 1e-12), side="right").clip(1))
    method = random_scaling("diagonal")
    save_at = tuple(int(m) for m in rounds)
    cell = simulate(
        key, problem, plan, replications=replications, methods=(method,), save_at=save_at
    )
    chosen = np.isin(cell.save_at, rounds)
    rows = cell.methods[method.name]
    ok = rows.ok.all(axis=0)
    if not ok.any():
        raise ValueError("plan: every replication diverged; try a smaller step size")
    means = rows.estimate[chosen][:, ok] - cell.truth[method.name]
    sums = means * rounds[:, None, None] * np.sqrt(plan.num_steps) / plan.num_rounds
    return _judge(clock[rounds - 1], sums @ _whitening(problem, plan))


def _whitening(problem: Problem, plan: Plan) -> FloatArray:
    """(ν̂ G⁻¹SG⁻ᵀ)^{−1/2}, symmetric."""
    half = np.linalg.solve(np.asarray(problem.G), np.asarray(problem.S))
    limit = plan.nu_hat * np.linalg.solve(np.asarray(problem.G), half.T)
    values, vectors = np.linalg.eigh((limit + limit.T) / 2)
    if values[0] <= 0:
        raise ValueError("problem: G⁻¹SG⁻ᵀ must be positive definite")
    return (vectors / np.sqrt(values)) @ vectors.T


def _judge(grid: FloatArray, process: FloatArray) -> FcltCheck:
    flat = process.reshape(len(grid), -1)
    flat = flat - flat.mean(axis=1, keepdims=True)
    count = flat.shape[1]
    covariance = flat @ flat.T / (count - 1)
    expected = np.minimum(grid[:, None], grid[None, :])
    # Var of a Gaussian sample covariance: (σ_rr σ_ss + σ_rs²)/n
    error = np.sqrt((np.outer(grid, grid) + expected**2) / count)
    p = [
        scipy.stats.kstest(row / np.sqrt(r), "norm").pvalue
        for row, r in zip(flat, grid, strict=True)
    ]
    return FcltCheck(grid, process, covariance, expected, error, np.asarray(p))
