"""Measure how often intervals for quantiles cover, beside statsmodels' QuantReg: `python -m benchmarks.table_quantiles`.

y = 1 + 2x + s(x) e with x uniform on (0, 2) and normal e, whose spread s is 1, or 0.3 + x: then the slope of a quantile
is 2 + z. Newton alone (`methods=()`), d = 2. Writes `results/table_quantiles.md`.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import scipy.special

from benchmarks import writing
from benchmarks.writing import percent, pipe_table

SPREADS = {"even": (1.0, 0.0), "growing": (0.3, 1.0)}
TAUS = (0.25, 0.5, 0.9)


def run(replications: int, seed: int) -> list[list[str]]:
    """Return a line per cell: coverage of the slope and mean standard error, ours and statsmodels'."""
    from statsmodels.regression.quantile_regression import QuantReg

    from jaxlsgd import fit_table

    lines = []
    for (spread, (base, growth)), n, tau in (
        (item, n, tau) for item in SPREADS.items() for n in (200, 1_000) for tau in TAUS
    ):
        rng, z = np.random.default_rng(seed), scipy.special.ndtri(tau)
        hits, errors = np.zeros((replications, 2)), np.zeros((replications, 2))
        for i in range(replications):
            x = rng.uniform(0, 2, n)
            y = 1 + 2 * x + (base + growth * x) * rng.normal(size=n)
            frame, truth = pd.DataFrame({"y": y, "x": x}), 2 + growth * z
            ours = fit_table(frame, response="y", family="quantile", tau=tau, methods=())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                theirs = QuantReg(y, np.column_stack([np.ones(n), x])).fit(q=tau)
            low, high = ours.conf_int().loc["x"]
            hits[i] = (
                low <= truth <= high,
                theirs.conf_int()[1, 0] <= truth <= theirs.conf_int()[1, 1],
            )
            errors[i] = ours.bse["x"], theirs.bse[1]
        share, mean = hits.mean(0), errors.mean(0)
        mcse = np.sqrt(share * (1 - share) / replications)
        shown = [f"{percent(s)} ({percent(e)})" for s, e in zip(share, mcse, strict=True)]
        lines.append([spread, f"{n:,}", str(tau), *shown, f"{mean[0] / mean[1]:.2f}"])
        print(*lines[-1], flush=True)
    return lines


def main() -> None:
    """Run and write the table."""
    parser = writing.parser("table_quantiles", __doc__, replications=1_000, seed=411)
    arguments = parser.parse_args()
    lines = run(arguments.replications, arguments.seed)
    header = [
        "spread",
        "rows",
        "τ",
        "`fit_table` %",
        "`QuantReg` %",
        "mean standard error, ours / theirs",
    ]
    text = (
        f"# Coverage of 95 % intervals for the slope of a quantile\n\nMade by `python -m benchmarks.table_quantiles --seed "
        f"{arguments.seed}`, {arguments.replications} tables per cell, Monte-Carlo standard errors in parentheses. "
        "y = 1 + 2x + s(x) e, x uniform on (0, 2), e normal, s = 1 (even) or 0.3 + x (growing).\n\n"
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    Path(arguments.out / "table_quantiles.md").write_text(
        text + "\n".join(pipe_table(header, lines)) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
