"""How often `fit_table` warns of rows that depend on one another: `python -m benchmarks.dependence --out DIR`.

Tables of an intercept and three columns, fitted by `methods=()`. Where rows are independent, every warning is a false
alarm, also if the table is sorted by a column, if the spread of rows grows with a column, or if it has heavy tails.
Where they depend on one another, tables without a warning are misses. "Needed" is by how much the standard error of the
first column is too small: the spread of its estimate over tables, over its mean standard error. The same tables
with 10 clients at random count warnings that clients differ, all of which are false.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.writing import parser, percent, pipe_table, write_csv
from jaxlsgd import fit_table

Maker = Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]


def _columns(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.normal(size=(n, 3))


def _plain(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    return _columns(rng, n), rng.normal(size=n)


def _sorted(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    X = _columns(rng, n)
    return X[np.argsort(X[:, 0])], rng.normal(size=n)


def _uneven(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    X = _columns(rng, n)
    X = X[np.argsort(X[:, 0])]
    return X, rng.standard_t(4, n) * np.exp(X[:, 0])


def _series(rho: float) -> Maker:
    def make(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
        noise = rng.normal(size=(n + 50, 4))
        for t in range(1, len(noise)):
            noise[t] += rho * noise[t - 1]
        return noise[50:, :3], noise[50:, 3]

    return make


def _people(each: int, own: float) -> Maker:
    """Rows of a person together; half of each column is the person's."""

    def make(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
        who = np.arange(n) // each
        X = (rng.normal(size=(n, 3)) + rng.normal(size=(n, 3))[who]) / np.sqrt(2)
        return X, rng.normal(size=n) + own * rng.normal(size=n)[who]

    return make


# By name: how rows are made, and whether they depend on one another.
CASES: dict[str, tuple[Maker, bool]] = {
    "independent": (_plain, False),
    "independent, sorted by a column": (_sorted, False),
    "independent, sorted, uneven, heavy tails": (_uneven, False),
    "series, correlation 0.3": (_series(0.3), True),
    "series, correlation 0.5": (_series(0.5), True),
    "series, correlation 0.9": (_series(0.9), True),
    "5 rows of each person": (_people(5, 1.0), True),
}


def cell(name: str, n: int, tables: int, seed: int, family: str = "gaussian") -> dict[str, Any]:
    """Fit tables of a case, and count warnings."""
    make, dependent = CASES[name]
    rng = np.random.default_rng([seed, n, list(CASES).index(name), len(family)])
    neighbours, clients, estimates, errors = 0, 0, [], []
    for _ in range(tables):
        X, y = make(rng, n)
        if family == "logistic":
            y = (y > 0).astype(float)
        frame = {**dict(zip("abc", X.T, strict=True)), "y": y, "k": rng.integers(0, 10, n)}
        one, many = (
            fit_table(
                frame, response="y", family=family, features=list("abc"), client=client, methods=()
            )
            for client in (None, "k")
        )
        neighbours += any("follow one another" in said for said in one.warnings)
        clients += any("clients differ" in said for said in many.warnings)
        estimates.append(one.coefficients().estimate[1])
        errors.append(one.coefficients().std_error[1])
    share, between = neighbours / tables, clients / tables
    return {
        "rows": name,
        "family": family,
        "n": n,
        "tables": tables,
        "dependent": dependent,
        "warned": share,
        "error": np.sqrt(share * (1 - share) / tables),
        "clients_warned": between,
        "needed": float(np.std(estimates) / np.mean(errors)),
    }


def main() -> int:
    """Write dependence.csv and dependence.md."""
    made = parser("dependence", __doc__, replications=1000, seed=7311)
    arguments = made.parse_args()
    rows = [
        cell(name, n, arguments.replications, arguments.seed, family)
        for family in ("gaussian", "logistic")
        for name in CASES
        for n in (100, 400, 2000)
        if family == "gaussian" or n == 400
    ]
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_csv(arguments.out / "dependence.csv", rows)
    header = (
        "rows",
        "family",
        "n",
        "warned, %",
        "± ",
        "false or missed, %",
        "needed",
        "clients warned, %",
    )
    lines = [
        (
            row["rows"],
            row["family"],
            f"{row['n']:,}",
            percent(row["warned"]),
            percent(row["error"]),
            f"{'missed' if row['dependent'] else 'false'} "
            + percent(1 - row["warned"] if row["dependent"] else row["warned"]),
            f"{row['needed']:.2f}",
            percent(row["clients_warned"]),
        )
        for row in rows
    ]
    page = ["# Warnings of rows that depend on one another", "", (__doc__ or "").strip(), ""]
    page += [f"{arguments.replications:,} tables per line, seed {arguments.seed}.", ""]
    page += pipe_table(header, lines, left=(0, 1))
    (arguments.out / "dependence.md").write_text("\n".join([*page, ""]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
