"""Check the paper's functional central limit theorem on simulated paths.

    φ_T(r) = (√t_T/T) Σ_{m ≤ h(r, T)} (x̄_{t_m} − x*)  ⇒  √ν G⁻¹S^{1/2} B(r)

Here h(r, T) is the number of rounds that fit into the share r of Σ 1/E_m. Multiplied by (ν̂ G⁻¹SG⁻ᵀ)^{−1/2}, the
coordinates of φ_T should be independent Brownian motions: normal, with mean 0 and covariance min(r, s).

  python -m benchmarks.functional_limit --out benchmarks/results
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.stats
from numpy.typing import NDArray

from benchmarks import cases, writing
from benchmarks.figures import new_figure, save
from jaxlsgd.report.style import styled

Vector = NDArray[np.float64]
GRID = np.round(np.arange(0.1, 1.01, 0.1), 10)
SCHEDULES = ("C1", "C5", "P(1/2)")


class Process(NamedTuple):
    """The standardised process of many runs on a grid of r."""

    grid: Vector  # (points,) the share of Σ 1/E_m at the ends of the rounds used
    values: Vector  # (points, replications, d)

    @property
    def covariance(self) -> Vector:
        """Covariance over replications and coordinates, (points, points), without centring."""
        flat = self.values.reshape(len(self.grid), -1)
        return flat @ flat.T / flat.shape[1]

    @property
    def largest_gap(self) -> float:
        """Largest distance of the covariance from min(r, s)."""
        return float(np.max(np.abs(self.covariance - np.minimum.outer(self.grid, self.grid))))

    @property
    def largest_z(self) -> float:
        """The same in standard errors of a Gaussian sample covariance, √((rs + min(r, s)²)/n)."""
        least = np.minimum.outer(self.grid, self.grid)
        count = self.values[0].size
        error = np.sqrt((np.outer(self.grid, self.grid) + least**2) / count)
        return float(np.max(np.abs(self.covariance - least) / error))

    @property
    def largest_bias(self) -> float:
        """Largest mean of φ(r)/√r over replications, in standard deviations of the path."""
        return float(np.max(np.abs(self.values.mean(1)) / np.sqrt(self.grid)[:, None]))

    @property
    def normality(self) -> float:
        """Kolmogorov-Smirnov p-value of φ(1) against N(0, 1), all coordinates together."""
        return float(scipy.stats.kstest(self.values[-1].ravel(), "norm").pvalue)


def simulate_process(key: Any, problem: Any, plan: Any, replications: int) -> Process:
    """Simulate φ_T, standardised by the problem's G and S.

    The partial sums are Σ_{n ≤ m} x̄_{t_n} = m ȳ_m, so that averages at some rounds are enough.
    """
    from jaxlsgd import random_scaling, simulate

    clock = np.cumsum(1 / plan.E)
    clock /= clock[-1]
    rounds = np.unique(np.searchsorted(clock, GRID * (1 + 1e-12), side="right").clip(1))
    cell = simulate(
        key,
        problem,
        plan,
        replications=replications,
        methods=random_scaling(mode="diagonal"),
        save_at=rounds.tolist(),
    )
    estimate = cell.methods["random_scaling"].estimate[np.isin(cell.save_at, rounds)]
    sums = (estimate - problem.true_vector) * rounds[:, None, None]
    sums *= np.sqrt(plan.num_steps) / plan.num_rounds
    return Process(clock[rounds - 1], sums @ _whitening(problem, plan))


def _whitening(problem: Any, plan: Any) -> Vector:
    """Return (ν̂ G⁻¹SG⁻ᵀ)^{−1/2}, symmetric."""
    G, S = np.asarray(problem.G, np.float64), np.asarray(problem.S, np.float64)
    limit = plan.nu_hat * np.linalg.solve(G, np.linalg.solve(G, S).T)
    values, vectors = np.linalg.eigh((limit + limit.T) / 2)
    return (vectors / np.sqrt(values)) @ vectors.T


@styled
def draw(processes: dict[str, Process], path: Path) -> None:
    """Draw the variance of every process beside that of Brownian motion."""
    figure, axis = new_figure(5.2, 3.2)
    axis.plot([0, 1], [0, 1], color="black", linewidth=1, label="Brownian motion")
    for name, process in processes.items():
        axis.plot(process.grid, np.diagonal(process.covariance), "o-", markersize=3, label=name)
    axis.set_xlabel("r, share of Σ 1/E_m")
    axis.set_ylabel("variance of the standardised process")
    axis.legend(fontsize=8)
    save(figure, path)


def main() -> None:
    """Write the table and the figure."""
    options = writing.parser("functional_limit", __doc__, 2_000, seed=11)
    options.add_argument("--num-steps", type=int, default=40_000)
    arguments = options.parse_args()
    cases.start()
    import jax

    found: dict[str, Process] = {}
    key = jax.random.key(arguments.seed)
    for model in cases.PROBLEMS:
        problem = cases.problem(model)
        for schedule in SCHEDULES:
            plan = cases.plan(model, schedule, arguments.num_steps)
            name = f"{model}, {schedule}"
            found[name] = simulate_process(key, problem, plan, arguments.replications)
            print(name, found[name].largest_gap, flush=True)
    lines = [
        (
            name,
            f"{x.largest_gap:.3f}",
            f"{x.largest_z:.1f}",
            f"{x.largest_bias:.3f}",
            f"{x.covariance[-1, -1]:.3f}",
            f"{x.normality:.2g}",
        )
        for name, x in found.items()
    ]
    header = ("cell", "largest gap", "in standard errors", "bias", "variance at 1", "p, normality")
    text = [
        "# The functional central limit theorem",
        "",
        f"Made by `python -m benchmarks.functional_limit`, {arguments.replications:,} runs per cell of t_T = "
        f"{arguments.num_steps:,}. The gap is between the covariance of the standardised process and min(r, s) on a grid "
        "of ten points. A standard error is that of a Gaussian sample covariance. The bias is the largest mean of "
        "φ(r)/√r, in standard deviations of the path. The last column tests φ(1) against N(0, 1).",
        "",
        *writing.pipe_table(header, lines),
        "",
        "![Variance along the path](functional_limit.png)",
    ]
    (arguments.out / "functional_limit.md").write_text("\n".join(text) + "\n", encoding="utf-8")
    draw(found, arguments.out / "functional_limit.png")


if __name__ == "__main__":
    main()
