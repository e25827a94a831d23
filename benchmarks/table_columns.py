"""Time a fit of many columns beside statsmodels: `python -m benchmarks.table_columns --out benchmarks/results`.

Rows of normal columns and ten clients, all arguments left at their defaults. Seconds are of the processor, for one call after all imports, with its compiling; statsmodels' is of
`GLM(...).fit(cov_type="HC0")` on the pooled rows, with standard errors. Both with one thread of BLAS (OMP_NUM_THREADS=1).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from benchmarks.writing import pipe_table

SIZES = ((5_000, 20), (5_000, 100), (5_000, 500), (20_000, 2_000))
FAMILIES = ("gaussian", "logistic")


def one(family: str, n: int, d: int, seed: int) -> list[str]:
    """Return a row of the table."""
    import pandas as pd
    import statsmodels.api as sm

    from jaxlsgd import fit_table

    rng = np.random.default_rng([seed, d])
    X = rng.normal(size=(n, d - 1))
    z = X @ rng.normal(size=d - 1) / np.sqrt(d)
    y = z + rng.normal(size=n)
    if family == "logistic":
        y = (rng.uniform(size=n) < 1 / (1 + np.exp(-z))).astype(float)
    frame = pd.DataFrame(X, columns=[f"x{j}" for j in range(d - 1)])
    frame = frame.assign(y=y, client=rng.integers(0, 10, n))
    begun = time.process_time()
    ours = fit_table(frame, response="y", client="client", family=family, variance="HC0")
    middle = time.process_time()
    kind = sm.families.Gaussian() if family == "gaussian" else sm.families.Binomial()
    theirs = sm.GLM(y, sm.add_constant(X), family=kind).fit(cov_type="HC0")
    errors = np.asarray(theirs.bse)
    end = time.process_time()
    gap = np.max(np.abs(np.asarray(ours.params) - theirs.params) / errors)
    ratio = np.asarray(ours.bse) / errors
    return [
        family,
        f"{n:,}",
        f"{d:,}",
        next(iter(ours.methods)),
        f"{middle - begun:.2f}",
        f"{end - middle:.2f}",
        f"{gap:.1e}",
        f"{ratio.min():.3f}–{ratio.max():.3f}",
    ]


def main() -> int:
    """Print the table and write it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table_columns", description=__doc__)
    parser.add_argument("--seed", type=int, default=2612)
    parser.add_argument("--most", type=int, default=2_000, help="columns")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    lines = []
    for n, d in SIZES:
        for family in FAMILIES:
            if d <= arguments.most:
                lines.append(one(family, n, d, arguments.seed))
                print(lines[-1], flush=True)
    head = ("family", "rows", "columns", "method", "fit_table, s", "statsmodels, s")
    head += ("largest gap, in standard errors", "standard errors over statsmodels'")
    page = f"# Many columns\n\n{(__doc__ or '').strip()}\n\n" + "\n".join(
        pipe_table(head, lines, left=(0, 3))
    )
    if arguments.out is not None:
        (arguments.out / "table_columns.md").write_text(page + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
