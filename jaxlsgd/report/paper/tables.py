"""Tables 1 and 2 of the paper, and the `Sheet` that all of its tables are written from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import root_scalar
from scipy.special import ndtr

from jaxlsgd import schedules
from jaxlsgd.analysis.moments import Row
from jaxlsgd.core.display import Table
from jaxlsgd.inference.laws.critical_values import (
    PAPER_GRID,
    FloatArray,
    critical_value,
    paper_value,
)
from jaxlsgd.report.paper.printed import PATHS, RUNS
from jaxlsgd.schedules import Schedule, power_decay
from jaxlsgd.study.store.files import write_whole


class Sheet(NamedTuple):
    """A table for people and for programs, with the verdict in a line or two."""

    name: str
    tables: list[Table]
    columns: tuple[str, ...]
    rows: list[Row]
    verdict: tuple[str, ...]


def write(sheet: Sheet, directory: Path) -> tuple[str, str]:
    """Write a sheet as text and CSV; return it as Markdown, and the verdict."""
    text = "\n".join(table.text() for table in sheet.tables)
    verdict = "\n".join(sheet.verdict)
    write_whole(directory / f"{sheet.name}.txt", f"{text}\n{verdict}\n".encode())
    write_csv(directory / f"{sheet.name}.csv", sheet.rows, sheet.columns)
    body = "\n".join(table.markdown() for table in sheet.tables)
    listed = "\n".join(f"- {line}" for line in sheet.verdict)
    return f"{body}\n{listed}\n", verdict


def write_csv(path: Path, rows: Sequence[Row], columns: Sequence[str]) -> None:
    """Write chosen columns of rows."""
    write_whole(path, Table.of(rows, columns).csv().encode())


def judged(rows: Sequence[tuple[Any, float | None]]) -> tuple[int, int, Any, float]:
    """Return how many |z| are at most 4, how many there are, and the largest z with its label."""
    known = [(label, z) for label, z in rows if z is not None]
    label, z = max(known, key=lambda pair: abs(pair[1]), default=(None, 0.0))
    return sum(abs(z) <= 4 for _, z in known), len(known), label, z


# 1,000 paths of 1,000 float32 steps are 4 MB: small on any device, and enough work to fill one.
_CHUNK = 1_000


def critical_values(paths: int, seed: int, steps: int = 1_000) -> list[Row]:
    """Return every cell of Table 2: exact, as the paper prints it, and simulated as the paper did.

    A path is B(i/steps) = sum of i normals / √steps, and t* = B(1)/√(mean_i (B(r_i) − g(r_i) B(1))²).
    The law is symmetric, so the quantile is that of a Gaussian kernel estimate (Scott's rule) on t* and −t*.
    All four beta share their paths, so that their errors are correlated.

    Args:
      paths: how many are simulated.
      seed: of `jax.random.key`.
      steps: steps per path.

    Returns:
      Rows with beta, point (one-sided), level (two-sided), exact, paper, simulated, simulated_mcse, and z of
      simulated − paper.
    """
    betas = tuple(dict.fromkeys(beta for beta, _ in PAPER_GRID))
    draws = dict(zip(betas, _simulate(betas, paths, steps, seed), strict=True))
    rows = []
    for beta, level in PAPER_GRID:
        printed = paper_value(beta, level)
        simulated, error = _smoothed_quantile(draws[beta], level)
        rows.append(
            {
                "beta": beta,
                "point": round((1 + level) / 2, 6),
                "level": level,
                "exact": critical_value(level, beta=beta),
                "paper": printed,
                "simulated": simulated,
                "simulated_mcse": error,
                "z": (simulated - printed) / math.hypot(error, error * math.sqrt(paths / PATHS)),
            }
        )
    return rows


def _simulate(betas: tuple[float, ...], paths: int, steps: int, seed: int) -> FloatArray:
    """Draw t*(beta), shape (betas, paths), one chunk on the device at a time."""
    import jax
    import jax.numpy as jnp

    r = np.arange(1, steps + 1) / steps
    g = jnp.asarray([r ** (1 / (1 - beta)) for beta in betas], jnp.float32)

    def statistic(normals: jax.Array) -> jax.Array:
        path = jnp.cumsum(normals) / math.sqrt(steps)
        return path[-1] / jnp.sqrt(jnp.mean((path - g * path[-1]) ** 2, axis=1))

    @jax.jit
    def chunk(key: jax.Array) -> jax.Array:
        return jax.vmap(statistic)(jax.random.normal(key, (_CHUNK, steps), jnp.float32))

    key = jax.random.key(seed)
    parts = [
        np.asarray(chunk(jax.random.fold_in(key, i))) for i in range(math.ceil(paths / _CHUNK))
    ]
    return np.concatenate(parts).T[:, :paths].astype(np.float64)


def _smoothed_quantile(draws: FloatArray, level: float) -> tuple[float, float]:
    """Return the (1 + level)/2 quantile of the symmetrised kernel estimate, and its Monte-Carlo error."""
    width = draws.std(ddof=1) * draws.size ** (-1 / 5)

    def below(x: float) -> FloatArray:
        return (ndtr((x - draws) / width) + ndtr((x + draws) / width)) / 2

    top = float(np.abs(draws).max() + 10 * width)
    x = root_scalar(lambda x: float(below(x).mean()) - (1 + level) / 2, bracket=(0.0, top)).root
    slope = (below(x + width / 4).mean() - below(x - width / 4).mean()) / (width / 2)
    error = below(x).std(ddof=1) / math.sqrt(draws.size) / slope
    return x, float(error)


_ROUNDS = (100, 10_000, 1_000_000)


class _Case(NamedTuple):
    """A row of Table 1 with the limits that it states."""

    case: str
    E_m: str
    eta_m: str
    schedule: Callable[[int], Schedule]
    nu: float
    acf: Callable[[int], float] | None  # None if only bounds are stated


def _cases() -> list[_Case]:
    def power(name: str, beta: float) -> _Case:
        def acf(T: int) -> float:
            return (1 + beta) * T**-beta

        steps, nu = f"gamma m^-(alpha+{name})", 1 / (1 - beta**2)
        return _Case("5", f"m^({name})", steps, lambda T: schedules.power(beta), nu, acf)

    return [
        _Case("Base", "1", "gamma m^-alpha", lambda T: schedules.constant(1), 1, lambda T: 1.0),
        _Case("1", "5", "gamma m^-alpha/5", lambda T: schedules.constant(5), 1, lambda T: 0.2),
        _Case("2", "<= 5, settles", "gamma m^-alpha/E_m", _settling, 1, None),
        _Case("2", "<= 5, 1 to 5 in turn", "gamma m^-alpha/E_m", _cycling, 1, None),
        _Case(
            "3",
            "5 ln m",
            "gamma m^-alpha/(5 ln m)",
            lambda T: schedules.logarithmic(5.0, 1.0, math.e),
            1,
            lambda T: 1 / (5 * math.log(T)),
        ),
        _Case(
            "4",
            "5 ln ln m",
            "gamma m^-alpha/(5 ln ln m)",
            lambda T: schedules.iterated_logarithmic(5.0, 1.0),
            1,
            lambda T: 1 / (5 * math.log(math.log(T))),
        ),
        *(power(name, beta) for name, beta in [("1/3", 1 / 3), ("1/2", 1 / 2), ("2/3", 2 / 3)]),
    ]


def _settling(T: int) -> Schedule:
    return schedules.custom([1] * min(T, 10) + [5] * max(0, T - 10))


def _cycling(T: int) -> Schedule:
    return schedules.custom([1 + m % 5 for m in range(T)])


def table1() -> Sheet:
    """Make Table 1: nu and the communication frequency after T rounds, beside the limits that are stated."""
    rows = [_case_row(case, T) for case in _cases() for T in _ROUNDS]
    header = ["Case", "E_m", "eta_m", "nu, paper"]
    header += [f"nu_hat, T=1e{round(math.log10(T))}" for T in _ROUNDS]
    header += ["ACF, paper, T=1e6", "ACF, T=1e6", "ratio"]
    starts = range(0, len(rows), len(_ROUNDS))
    lines = [_case_line(rows[i : i + len(_ROUNDS)]) for i in starts]
    notes = (
        "gamma_m = gamma m^-alpha with alpha in (1/2, 1) in every row.",
        "Nothing here is random, so there is no z-score: the paper states limits, and nu_hat and"
        " ACF are exact values of the schedule after T rounds (no warm-up).",
        "Row 2 needs more than E_m <= E: a bounded E_m that settles has nu = 1, one that keeps"
        " varying has nu = mean(E) mean(1/E) > 1.",
    )
    title = "Table 1: statistical efficiency (nu) and communication (ACF) of schedules"
    columns = ("case", "E_m", "eta_m", "num_rounds", "paper_nu", "nu_hat", "paper_acf", "acf")
    powers = [row for row in rows if row["case"] == "5" and row["num_rounds"] == _ROUNDS[-1]]
    worst = max(abs(row["nu_hat"] / row["paper_nu"] - 1) for row in powers)
    verdict = f"Table 1: for E_m = m^beta and T = 1e6, nu_hat is within {100 * worst:.1f} % of nu."
    return Sheet(
        "table1", [Table(title, header, lines, (0, 1, 2), notes)], columns, rows, (verdict,)
    )


def _case_row(case: _Case, T: int) -> Row:
    plan = case.schedule(T).plan(power_decay(0.5), num_rounds=T)
    stated = None if case.acf is None else case.acf(T)
    numbers = {"paper_nu": case.nu, "nu_hat": plan.nu_hat, "paper_acf": stated, "acf": plan.acf}
    return {"case": case.case, "E_m": case.E_m, "eta_m": case.eta_m, "num_rounds": T, **numbers}


def _case_line(group: Sequence[Row]) -> list[str]:
    last = group[-1]
    stated, acf = last["paper_acf"], last["acf"]
    ratio = "-" if stated is None else f"{acf / stated:.3f}"
    shown = "[0.2, 1]" if stated is None else f"{stated:.4g}"
    found = [f"{row['nu_hat']:.4f}" for row in group]
    start = [last["case"], last["E_m"], last["eta_m"], f"{last['paper_nu']:.4f}"]
    return [*start, *found, shown, f"{acf:.4g}", ratio]


def table2(replications: int, seed: int) -> Sheet:
    """Make Table 2: critical values, exact, as printed, and simulated as the paper did.

    Args:
      replications: of the coverage studies; 50 paths are simulated for each, as in the paper.
      seed: of the simulation.
    """
    paths = max(100, round(replications * PATHS / RUNS))
    rows = critical_values(paths, seed)
    points = list(dict.fromkeys(row["point"] for row in rows))
    header = ["beta"] + [h for p in points for h in (f"{100 * p:g} %", "paper", "simulated", "z")]
    betas = dict.fromkeys(row["beta"] for row in rows)
    lines = [_quantile_line([row for row in rows if row["beta"] == beta]) for beta in betas]
    notes = (
        "First the exact value, no simulation in it; then the paper's; then the paper's simulation"
        f" done again ({paths:,} paths of 1,000 steps, seed {seed}, smoothed in its way; standard error"
        " in parentheses); z is of simulated - paper.",
        "The law is symmetric: the 1, 2.5, 5 and 10 % points are these with a minus, the 50 % point"
        " is 0.",
    )
    columns = ("beta", "point", "level", "exact", "paper", "simulated", "simulated_mcse", "z")
    table = Table("Table 2: critical values of t*(beta)", header, lines, (0,), notes)
    return Sheet("table2", [table], columns, rows, _quantile_verdict(rows))


def _quantile_line(group: Sequence[Row]) -> list[str]:
    names = {0: "0", 1 / 3: "1/3", 1 / 2: "1/2", 2 / 3: "2/3"}
    line = [names[group[0]["beta"]]]
    for row in group:
        simulated = f"{row['simulated']:.3f}({row['simulated_mcse']:.3f})"
        line += [f"{row['exact']:.4f}", f"{row['paper']:g}", simulated, f"{row['z']:+.1f}"]
    return line


def _quantile_verdict(rows: Sequence[Row]) -> tuple[str, ...]:
    worst = max(rows, key=lambda row: abs(row["paper"] / row["exact"] - 1))
    share = 100 * (worst["paper"] / worst["exact"] - 1)
    where = f"beta = {worst['beta']:.3g}, {100 * worst['point']:g} % point"
    within = sum(abs(row["z"]) <= 4 for row in rows)
    largest = max(abs(row["z"]) for row in rows)
    return (
        f"Table 2: the printed values are off the exact ones by up to {share:+.2f} % ({where});"
        f" simulated again, {within} of {len(rows)} are within 4 combined standard errors,"
        f" largest |z| {largest:.1f}.",
    )
