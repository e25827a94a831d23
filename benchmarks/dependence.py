"""How often `fit_table` warns of rows that depend on one another: `python -m benchmarks.dependence --out DIR`.

Tables of an intercept and three columns. Where rows are independent, every warning is a false alarm, also if the table is
sorted, by a column of the model or another, or by the response; if the spread of rows grows with a column; if it has
heavy tails; and if clients have means and slopes of their own. Where rows depend on one another, tables without a warning
are misses. "Needed" is by how much the standard error of the
first column is too small: the spread of its estimate over tables, over its mean standard error. The same tables
with 10 clients at random count warnings that clients differ, all of which are false; lines with clients of their own, who
differ from table to table, have neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.writing import parser, percent, pipe_table, write_csv
from jaxlsgd import fit_table

# Columns, response and, where they are not at random, clients.
Maker = Callable[[np.random.Generator, int], tuple[np.ndarray, ...]]


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


def _in_order(order: np.ndarray, *parts: np.ndarray) -> tuple[np.ndarray, ...]:
    return tuple(part[order] for part in parts)


def _by_response(rng: np.random.Generator, n: int) -> tuple[np.ndarray, ...]:
    X = _columns(rng, n)
    y = 0.5 * X[:, 0] + rng.normal(size=n)
    return _in_order(np.argsort(y), X, y)


def _bent(rng: np.random.Generator, n: int) -> tuple[np.ndarray, ...]:
    X = _columns(rng, n)
    y = 0.5 * X[:, 0] ** 2 + rng.normal(size=n)
    return _in_order(np.argsort(X[:, 0]), X, y)


def _by_hidden(rng: np.random.Generator, n: int) -> tuple[np.ndarray, ...]:
    X, hidden = _columns(rng, n), rng.normal(size=n)
    return _in_order(np.argsort(hidden), X, X[:, 0] + hidden + rng.normal(size=n))


def _unlike(by: str) -> Maker:
    """Clients of 40 rows or a tenth of the table with means and slopes of their own, each sorted."""

    def make(rng: np.random.Generator, n: int) -> tuple[np.ndarray, ...]:
        K = max(10, n // 40)
        k = rng.integers(0, K, n)
        X = _columns(rng, n) + rng.normal(size=(K, 3))[k]
        y = rng.normal(size=K)[k] + np.sum(X * rng.normal(size=(K, 3))[k], 1) + rng.normal(size=n)
        return _in_order(np.lexsort((y if by == "response" else X[:, 0], k)), X, y, k)

    return make


def _growth(rng: np.random.Generator, n: int) -> tuple[np.ndarray, ...]:
    """Five visits of each person, who grows from one to the next."""
    who, visit = np.arange(n) // 5, np.arange(n) % 5
    X = np.column_stack([visit, rng.normal(size=(n, 2))])
    return X, visit + 0.5 * rng.normal(size=n) + rng.normal(size=n)[who]


def _own_series(rng: np.random.Generator, n: int) -> tuple[np.ndarray, ...]:
    """Clients are persons: a series of 20 rows each."""
    X, y = _series(0.7)(rng, n)
    return X, y, np.arange(n) // 20


def _series(rho: float) -> Maker:
    def make(rng: np.random.Generator, n: int) -> tuple[np.ndarray, ...]:
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
    "independent, sorted by the response": (_by_response, False),
    "independent, sorted by a column, curved": (_bent, False),
    "independent, sorted by a column that is left out": (_by_hidden, False),
    "independent, clients differ, each sorted by the response": (_unlike("response"), False),
    "independent, clients differ, each sorted by a column": (_unlike("column"), False),
    "series, correlation 0.3": (_series(0.3), True),
    "series, correlation 0.5": (_series(0.5), True),
    "series, correlation 0.9": (_series(0.9), True),
    "5 rows of each person": (_people(5, 1.0), True),
    "5 visits of each person, who grows": (_growth, True),
    "clients are persons, a series of each": (_own_series, True),
}


def cell(name: str, n: int, tables: int, seed: int, family: str = "gaussian") -> dict[str, Any]:
    """Fit tables of a case, and count warnings."""
    make, dependent = CASES[name]
    rng = np.random.default_rng([seed, n, list(CASES).index(name), len(family)])
    neighbours, clients, alone, estimates, errors = 0, 0, False, [], []
    for _ in range(tables):
        X, y, *own = make(rng, n)
        if family == "logistic":
            y = (y > 0).astype(float)
        frame = {**dict(zip("abc", X.T, strict=True)), "y": y}
        frame["k"] = own[0] if own else rng.integers(0, 10, n)
        one, *many = (
            fit_table(frame, response="y", family=family, features=list("abc"), client=client)
            for client in (("k",) if own else (None, "k"))
        )
        neighbours += any("follow one another" in said for said in one.warnings)
        clients += any("clients differ" in said for fit in many for said in fit.warnings)
        alone |= bool(own)
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
        "clients_warned": None if alone else between,
        "needed": None if alone else float(np.std(estimates) / np.mean(errors)),
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
            "-" if row["needed"] is None else f"{row['needed']:.2f}",
            "-" if row["clients_warned"] is None else percent(row["clients_warned"]),
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
