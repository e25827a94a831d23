"""A check of the functional central limit theorem on simulated paths.

    φ_T(r) = (√t_T/T) Σ_{m ≤ h(r, T)} (x̄_{t_m} − x*)  ⇒  √ν G⁻¹S^{1/2} B(r)

with h(r, T) the number of rounds that fit into the share r of Σ 1/E_m. Multiplied by (ν̂ G⁻¹SG⁻ᵀ)^{−1/2}
its coordinates should be independent standard Brownian motions: normal, mean 0, covariance min(r, s).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import scipy.stats
from numpy.typing import NDArray

from jaxlsgd.core import checks
from jaxlsgd.core.problem import Array, Problem
from jaxlsgd.inference.random_scaling import random_scaling
from jaxlsgd.runs.simulate import simulate
from jaxlsgd.schedules import Plan

FloatArray = NDArray[np.float64]
GRID = tuple(np.round(np.arange(0.1, 1.01, 0.1), 10).tolist())


@dataclasses.dataclass(frozen=True)
class FcltCheck:
    """The standardised process on a grid, against Brownian motion.

    The standard errors are those of n = replications · d independent Brownian motions. Nothing is
    centred: a bias of the path shows in `mean` and adds to `covariance`.
    """

    grid: FloatArray  # (points,) r actually used, r_m of the rounds
    process: FloatArray  # (points, replications, d)
    mean: FloatArray  # (points, d) over replications; its standard error is √(r/replications)
    covariance: FloatArray  # (points, points) empirical, over replications and coordinates
    expected: FloatArray  # (points, points) min(r, s)
    standard_error: FloatArray  # (points, points) of `covariance` under the limit
    skewness: FloatArray  # (points,) of φ(r); its standard error is √(6/n)
    kurtosis: FloatArray  # (points,) less 3; its standard error is √(24/n)
    normality: FloatArray  # (points,) Kolmogorov-Smirnov p-values of φ(r)/√r against N(0, 1)
    diverged: int  # replications that were left out because they are not finite

    @property
    def largest_z(self) -> float:
        """Largest deviation of the covariance from min(r, s), in standard errors."""
        return float(np.max(np.abs(self.covariance - self.expected) / self.standard_error))

    @property
    def largest_mean(self) -> float:
        """Largest mean of φ(r)/√r: the bias, in standard deviations of the path."""
        return float(np.max(np.abs(self.mean) / np.sqrt(self.grid)[:, None]))

    def __str__(self) -> str:
        far = float(np.max(np.abs(self.covariance - self.expected)))
        lost = f"; {self.diverged} diverged and were left out" if self.diverged else ""
        return (
            f"Over {self.process.shape[1]:,} replications Cov(φ(r), φ(s)) is within {far:.3f} of "
            f"min(r, s), at most {self.largest_z:.1f} standard errors; the mean of φ(r)/√r is within "
            f"{self.largest_mean:.3f} of 0; the smallest of {self.grid.size} p-values for normality "
            f"is {self.normality.min():.2g}{lost}."
        )


def fclt_check(
    key: Array,
    problem: Problem,
    plan: Plan,
    replications: int,
    *,
    grid: Sequence[float] = GRID,
    dtype: str = "float32",
) -> FcltCheck:
    """Simulate φ_T on a grid of r and compare it with Brownian motion.

    The partial sums are Σ_{n ≤ m} x̄_{t_n} = m ȳ_m, so that the means at some rounds are enough.

    Args:
      key: typed root key.
      problem: one that declares its truth, G and S.
      plan: the plan to run.
      replications: how many paths, at least 2.
      grid: values of r in (0, 1]; each is moved down to the end of a round.
      dtype: "float32" or "float64".

    Returns:
      An `FcltCheck`; print it.

    Example::

        check = fclt_check(jax.random.key(0), problems.linear(3, 4), plan, 1000)
        print(check)

    Reference: Li, Liang, Chang, Zhang, Theorem 3.2.
    """
    if problem.truth is None or problem.G is None or problem.S is None:
        raise checks.refusal(
            "problem", "declare its truth, G and S", problem.name or "one without", code="missing"
        )
    checks.count("replications", replications, 2)
    whitening = _whitening(problem, plan)
    clock = np.cumsum(1 / plan.E)
    clock /= clock[-1]
    rounds = _rounds(clock, grid)
    method = random_scaling(mode="diagonal")
    cell = simulate(
        key,
        problem,
        plan,
        replications=replications,
        methods=(method,),
        save_at=tuple(rounds.tolist()),
        dtype=dtype,
    )
    chosen = np.isin(cell.save_at, rounds)
    estimate = cell.methods[method.name].estimate[chosen]
    ok = np.isfinite(estimate).all(axis=(0, 2))
    if ok.sum() < 2:
        text = "plan: nearly every replication diverged; try a smaller step size"
        raise checks.Refusal(text, "plan", "data")
    error = estimate[:, ok] - np.asarray(problem.true_vector)
    sums = error * rounds[:, None, None] * np.sqrt(plan.num_steps) / plan.num_rounds
    return _judge(clock[rounds - 1], sums @ whitening, int((~ok).sum()))


def _rounds(clock: FloatArray, grid: Sequence[float]) -> NDArray[np.int64]:
    """Return h(r, T) = max{n: r_n ≤ r}, at least 1."""
    points = np.asarray(grid, np.float64)
    if points.ndim != 1 or points.size == 0 or not np.all((points > 0) & (points <= 1)):
        raise checks.refusal("grid", "be values in (0, 1]", grid)
    return np.unique(np.searchsorted(clock, points * (1 + 1e-12), side="right").clip(1))


def _whitening(problem: Problem, plan: Plan) -> FloatArray:
    """Return (ν̂ G⁻¹SG⁻ᵀ)^{−1/2}, symmetric."""
    G, S = np.asarray(problem.G, np.float64), np.asarray(problem.S, np.float64)
    try:
        limit = plan.nu_hat * np.linalg.solve(G, np.linalg.solve(G, S).T)
    except np.linalg.LinAlgError as error:
        raise checks.refusal("problem.G", "be invertible", "a singular one") from error
    values, vectors = np.linalg.eigh((limit + limit.T) / 2)
    if not values[0] > 1e-12 * values[-1]:
        got = f"eigenvalues from {values[0]:.3g} to {values[-1]:.3g}"
        raise checks.refusal("problem", "have a positive definite G⁻¹SG⁻ᵀ", got)
    return (vectors / np.sqrt(values)) @ vectors.T


def _judge(grid: FloatArray, process: FloatArray, diverged: int) -> FcltCheck:
    unit = process.reshape(len(grid), -1) / np.sqrt(grid)[:, None]
    covariance = np.sqrt(np.outer(grid, grid)) * (unit @ unit.T) / unit.shape[1]
    expected = np.minimum(grid[:, None], grid[None, :])
    # Var of a Gaussian sample covariance: (σ_rr σ_ss + σ_rs²)/n
    error = np.sqrt((np.outer(grid, grid) + expected**2) / unit.shape[1])
    return FcltCheck(
        grid=grid,
        process=process,
        mean=process.mean(axis=1),
        covariance=covariance,
        expected=expected,
        standard_error=error,
        skewness=scipy.stats.skew(unit, axis=1),
        kurtosis=scipy.stats.kurtosis(unit, axis=1),
        normality=np.array([scipy.stats.kstest(row, "norm").pvalue for row in unit]),
        diverged=diverged,
    )
