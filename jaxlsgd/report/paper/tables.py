"""Tables 1 and 2 of the paper, the theory: our numbers beside the printed ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxlsgd import schedules
from jaxlsgd.analysis.moments import Row
from jaxlsgd.report.layout import Table
from jaxlsgd.report.paper.numbers import PATHS
from jaxlsgd.report.paper.sheet import Sheet
from jaxlsgd.schedules import Schedule, power_decay

_ROUNDS = (100, 10_000, 1_000_000)


class _Case(NamedTuple):
    """A row of Table 1 with the limits that it states."""

    case: str
    E_m: str
    eta_m: str
    schedule: Callable[[int], Schedule]
    nu: float
    acf: Callable[[int], float] | None  # None: only bounds are stated


def _cases() -> list[_Case]:
    def power(name: str, beta: float) -> _Case:
        steps = f"gamma m^-(alpha+{name})"
        rate = _power_acf(beta)
        return _Case("5", f"m^({name})", steps, lambda T: schedules.power(beta), _nu(beta), rate)

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


def _nu(beta: float) -> float:
    return 1 / (1 - beta**2)


def _power_acf(beta: float) -> Callable[[int], float]:
    return lambda T: (1 + beta) * T**-beta


def _settling(T: int) -> Schedule:
    return schedules.custom([1] * min(T, 10) + [5] * max(0, T - 10))


def _cycling(T: int) -> Schedule:
    return schedules.custom([1 + m % 5 for m in range(T)])


def table1() -> Sheet:
    """Table 1: nu and the communication frequency, stated as limits, after T rounds."""
    rows = [_case_row(case, T) for case in _cases() for T in _ROUNDS]
    header = ["Case", "E_m", "eta_m", "nu, paper"]
    header += [f"nu_hat, T=1e{round(math.log10(T))}" for T in _ROUNDS]
    header += ["ACF, paper, T=1e6", "ACF, T=1e6", "ratio"]
    lines = []
    for i in range(0, len(rows), len(_ROUNDS)):
        group = rows[i : i + len(_ROUNDS)]
        lines.append(_case_line(group))
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
    """Table 2: critical values as printed, exact, and simulated again as the paper did.

    Args:
      replications: of the coverage studies; 50 paths are simulated for each, as in the paper.
      seed: of the simulation.
    """
    from jaxlsgd.inference.laws import table2 as simulation

    paths = max(100, round(replications * PATHS / 1_000))
    rows = [_quantile_row(row) for row in simulation.table2(replications=paths, seed=seed)]
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


def _quantile_row(row: dict[str, float]) -> Row:
    error = row["standard_error"]
    paper_error = error * math.sqrt(row["replications"] / PATHS)
    return {
        "beta": row["beta"],
        "point": round((1 + row["level"]) / 2, 6),
        "level": row["level"],
        "exact": row["exact"],
        "paper": row["paper"],
        "simulated": row["simulated"],
        "simulated_mcse": error,
        "z": (row["simulated"] - row["paper"]) / math.hypot(error, paper_error),
    }


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
