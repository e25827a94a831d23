"""Measure how often intervals from tables cover, over 500 simulated tables per cell: `python -m benchmarks.tables`.

Ten clients of 200 to 5,000 rows with coefficients, means and spreads of their own; gaussian, logistic and
Poisson; for the population, by Newton's method, and for the minimiser of each table's own rows, by Local SGD. Writes
`results/tables.md`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.table_cases import DESIGN, NAMES, population
from benchmarks.writing import percent, pipe_table
from jaxlsgd.regression.design import Block
from jaxlsgd.regression.families import Family
from jaxlsgd.regression.fit_table import DEFAULTS
from jaxlsgd.regression.in_memory import fit_block
from jaxlsgd.regression.options import check_options
from jaxlsgd.regression.pilot import Objective, minimise

HERE = Path(__file__).resolve().parent
CELLS = [
    (family, target)
    for family in ("gaussian", "logistic", "poisson")
    for target in ("population", "sample")
]


class Outcome(NamedTuple):
    """The results of a cell."""

    family: str
    target: str
    method: str
    covered: NDArray[np.bool_]  # (tables, d)
    errors: NDArray[np.float64]  # (tables, d) (estimate − truth)/standard error
    added: float  # largest share that the run added to a standard error, mean over tables
    warned: int
    seconds: float


def run_cell(family: str, target: str, tables: int, seed: int = 1, most: int = 5000) -> Outcome:
    """Fit that many tables."""
    world = population(family, most=most)
    options = check_options({**DEFAULTS, "family": family, "target": target})
    covered, errors, added, warned, begun = [], [], [], 0, time.perf_counter()
    for r in range(tables):
        block = world.table(np.random.default_rng([seed, r]))
        fit = fit_block(DESIGN, block, options)
        found = fit.coefficients()
        truth = world.truth if target == "population" else minimiser(world.family, block)
        _, lower, upper = fit.interval()
        covered.append((lower <= truth) & (truth <= upper))
        errors.append((found.estimate - truth) / found.std_error)
        added.append(np.max(found.added) if not found.from_run else 0.0)
        warned += bool(fit.warnings)
    taken = time.perf_counter() - begun
    return Outcome(
        family,
        target,
        options.first,
        np.array(covered),
        np.array(errors),
        float(np.mean(added)),
        warned,
        taken,
    )


def minimiser(family: Family, block: Block) -> NDArray[np.float64]:
    """Return the minimiser over a table's own rows, all with the same weight, by Newton's method."""
    scale = np.abs(block.X).max(axis=0)
    objective = Objective(family, np.zeros(1), np.zeros(block.X.shape[1]))
    weights = np.full(len(block.y), 1 / len(block.y))
    return minimise(objective, block.X / scale, block.y, weights, NAMES)[0] / scale


def markdown(outcomes: list[Outcome]) -> str:
    """Return the table of all cells."""
    last = ("all", "sd of (estimate − truth)/SE", "run adds", "warned", "s per table")
    lines = []
    for one in outcomes:
        n = len(one.covered)
        cover = one.covered.mean(axis=0)
        cells = [f"{100 * c:.1f} ({100 * np.sqrt(max(c * (1 - c), 1e-9) / n):.1f})" for c in cover]
        spread = np.sqrt(np.mean(one.errors**2))
        found = (percent(one.covered.mean()), f"{spread:.3f}", f"{100 * one.added:.1f} %")
        where = (one.family, one.target, one.method)
        lines.append([*where, *cells, *found, one.warned, f"{one.seconds / n:.2f}"])
    header = ("family", "target", "method", *NAMES, *last)
    return "\n".join(pipe_table(header, lines, left=range(3)))


def main() -> int:
    """Run all cells."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__)
    parser.add_argument("--tables", type=int, default=500)
    parser.add_argument("--only", help="family, target")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "tables.md")
    arguments = parser.parse_args()
    outcomes = []
    for family, target in CELLS:
        if arguments.only and arguments.only not in (family, target):
            continue
        outcomes.append(run_cell(family, target, arguments.tables))
        print(markdown(outcomes[-1:]).splitlines()[-1], flush=True)
    arguments.out.write_text(_page(outcomes, arguments.tables), encoding="utf-8")
    return 0


def _page(outcomes: list[Outcome], tables: int) -> str:
    head = (
        f"# Intervals from tables\n\n{(__doc__ or '').strip()}\n\nCoverage of 95 % intervals in per cent "
        f"over {tables} tables, Monte-Carlo standard errors in parentheses.\n\n"
    )
    return head + markdown(outcomes) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
