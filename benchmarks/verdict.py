"""Count how often a verdict is wrong: false alarms and misses, inside and outside the range it was measured on.

A run is doubted if the mean chance of a method's intervals over coordinates is more than 5 points below the level
(`Verdict.doubted`). A *false alarm* is a run that is doubted although the method covers 90 % or more in its cell,
and a *miss* one that is trusted although the method covers less than 85 %. `verdict.csv` has a row per cell and
method, `verdict.md` the tables. Outside, `fit` withholds the verdict; here it is the one that would have been given.

  python -m benchmarks.verdict --out benchmarks/results        a minute and a half on one core
"""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks import stress_cases, writing
from benchmarks.writing import Row, percent, pipe_line, pipe_table
from jaxlsgd import (
    Plan,
    Problem,
    algorithms,
    one_step,
    plug_in,
    problems,
    random_scaling,
    schedules,
)
from jaxlsgd.analysis import verdict
from jaxlsgd.core.algorithm import Algorithm
from jaxlsgd.core.display import plural

LEVEL = 0.95
RIGHT, WRONG = LEVEL - verdict.DOUBT, 0.85
METHODS = (
    one_step(),
    plug_in("finite"),
    plug_in(),
    random_scaling(critical="schedule"),
)


class Case(NamedTuple):
    """A cell of this benchmark."""

    name: str
    problem: Problem
    plan: Plan
    algorithm: Algorithm = algorithms.local_sgd()

    @property
    def title(self) -> str:
        """The name in a table."""
        plan = self.plan
        return f"{self.name}, {plan.name}, {plan.num_steps:,}"


def _away(problem: Problem, far: float) -> Problem:
    return dataclasses.replace(problem, init=problem.true_vector + far)


def _plan(
    schedule: Any, gamma0: float, steps: int, alpha: float = 0.505, warmup: float = 0.05
) -> Plan:
    family = (
        schedules.paper(schedule) if isinstance(schedule, str) else schedules.constant(schedule)
    )
    warmed = family.with_warmup(warmup) if warmup else family
    return warmed.plan(schedules.power_decay(gamma0, alpha), num_steps=steps)


def cases() -> list[Case]:
    """Return cells inside the range that the verdict was measured on, then cells outside."""
    linear, logistic = problems.paper_linear(), problems.paper_logistic()
    few, small = problems.logistic(5, 1), problems.linear(5, 10)
    near, far = (stress_cases.unlike(apart, seed=3) for apart in (0.1, 0.3))
    slow = _away(problems.linear(5, 4), 3.0)
    wide = problems.linear(20, 10, covariance=stress_cases.conditioned(20, 20.0))
    unequal = stress_cases.unequal(5, 10, 3.0)
    return [
        Case("linear", linear, _plan("P(1/2)", 0.5, 5_000)),
        Case("logistic", logistic, _plan("C5", 2.0, 500)),
        Case("logistic", logistic, _plan("P(1/2)", 2.0, 5_000)),
        Case("logistic, no warm-up", logistic, _plan("C5", 2.0, 2_000, warmup=0)),
        Case("logistic, one client", few, _plan("C5", 2.0, 2_000)),
        Case("linear, fifty clients", problems.linear(5, 50), _plan("C5", 0.5, 2_000)),
        Case("logistic, start 3 away", _away(logistic, 3.0), _plan("C5", 2.0, 2_000)),
        Case("logistic, alpha 0.8", logistic, _plan("P(1/2)", 2.0, 2_000, 0.8)),
        Case("linear, gamma0 0.1", small, _plan("P(1/2)", 0.1, 2_000)),
        Case("unequal", unequal, _plan("P(1/2)", 0.5, 2_000)),
        Case("linear, d = 20", wide, _plan("C5", 0.3, 5_000)),
        Case("linear", linear, _plan(20, 0.5, 5_000)),
        Case("logistic", logistic, _plan(20, 2.0, 5_000)),
        Case("unlike clients, 0.1 apart", near, _plan(20, 0.13, 10_000, warmup=0)),
        Case("unlike clients, 0.3 apart", far, _plan(5, 0.5, 10_000, warmup=0)),
        Case("linear", linear, _plan("C5", 0.5, 20_000)),
        Case("logistic", logistic, _plan("P(1/3)", 2.0, 20_000)),
        Case("not arrived", slow, _plan(5, 0.03, 10_000, warmup=0)),
        # Outside.
        Case("unlike clients, 0.1 apart", near, _plan(50, 0.13, 10_000, warmup=0)),
        Case("unlike clients, 0.3 apart", far, _plan(50, 0.5, 10_000, warmup=0)),
        Case("not arrived", slow, _plan(50, 0.03, 10_000, warmup=0)),
        Case(
            "FedAdam, logistic",
            problems.logistic(5, 10),
            _plan(50, 2.0, 5_000, warmup=0),
            algorithms.server_adam(),
        ),
    ]


def cell_rows(case: Case, replications: int, seed: int) -> list[Row]:
    """Return a row per method."""
    import jax

    from jaxlsgd import simulate

    cell = simulate(
        jax.random.key(seed),
        case.problem,
        case.plan,
        replications=replications,
        methods=METHODS,
        algorithm=case.algorithm,
    )
    withheld = verdict.outside(case.algorithm, case.problem, case.plan, METHODS[0])
    # The verdict that would have been given.
    spoken = dataclasses.replace(cell, withheld={cell.judge: verdict.IS_JUDGE})
    found = []
    for name, rows in cell.methods.items():
        ok = rows.ok[-1]
        hits = np.abs(rows.estimate[-1] - cell.truth[name]) <= rows.half_width[-1, 0]
        chance = verdict.chances(spoken, name)[-1, 0]
        known = ~np.isnan(chance).any(-1)
        doubted = known & ~verdict.trusted(chance[None, None], (LEVEL,))[0, 0]
        found.append(
            {
                "cell": case.title,
                "method": name,
                "seed": seed,
                "replications": replications,
                "failed": int((~ok).sum()),
                "coverage": _mean(hits.mean(1), ok),
                "coverage_mcse": _error(hits.mean(1), ok),
                "judged": int(known.sum()),
                "doubted": int(doubted.sum()),
                "mean_chance": _mean(chance.mean(-1), known),
                "coverage_doubted": _mean(hits.mean(1), doubted),
                "coverage_trusted": _mean(hits.mean(1), known & ~doubted),
                "withheld": withheld,
            }
        )
    return found


def _mean(values: np.ndarray, chosen: np.ndarray) -> float:
    return float(values[chosen].mean()) if chosen.any() else math.nan


def _error(values: np.ndarray, chosen: np.ndarray) -> float:
    n = int(chosen.sum())
    return float(values[chosen].std(ddof=1) / math.sqrt(n)) if n > 1 else math.nan


def rates(rows: Sequence[Row]) -> dict[str, tuple[int, int, int]]:
    """Return false alarms and misses: pairs of cell and method, their runs, of how many."""
    judged = [row for row in rows if row["judged"]]
    right = [row for row in judged if row["coverage"] >= RIGHT]
    wrong = [row for row in judged if row["coverage"] < WRONG]
    return {
        "false alarms": (len(right), _sum(right, "doubted"), _sum(right, "judged")),
        "misses": (
            len(wrong),
            _sum(wrong, "judged") - _sum(wrong, "doubted"),
            _sum(wrong, "judged"),
        ),
    }


def _sum(rows: Sequence[Row], name: str) -> int:
    return sum(row[name] for row in rows)


def report(rows: Sequence[Row], seed: int, date: str) -> str:
    """Return the tables of the rows, as Markdown."""
    inside = [row for row in rows if not row["withheld"]]
    beyond = [row for row in rows if row["withheld"]]
    judge = {row["cell"]: row["coverage"] for row in inside if not row["judged"]}
    right = [row for row in inside if judge[row["cell"]] >= RIGHT]
    wrong = [row for row in inside if judge[row["cell"]] < RIGHT]
    lines = [
        "# How often a verdict is wrong",
        "",
        f"Made by `python -m benchmarks.verdict --seed {seed}`, {date}, {rows[0]['replications']:,} runs per cell, "
        "float32 on a CPU, 95 % intervals. A run is doubted if the mean chance of a method's intervals is below "
        "90 %. A false alarm is a run that is doubted although the method covers 90 % or more in its cell; a miss "
        "is a run that is trusted although the method covers less than 85 %. A false alarm need not be a mistake "
        "about that run: the coverage of the doubted runs is below that of the trusted.",
        "",
    ]
    groups = {
        "given, in cells in which the judge covers 90 % or more": right,
        "given, in cells in which the judge covers less": wrong,
        "withheld: what it would have said": beyond,
    }
    lines += pipe_table(["", *_RATES], [_rates(*group) for group in groups.items()])
    lines += ["", "By method, in cells in which the judge covers 90 % or more:", ""]
    methods = dict.fromkeys(row["method"] for row in right if row["judged"])
    by_method = {name: [row for row in right if row["method"] == name] for name in methods}
    by_method_lines = [_rates(f"`{name}`", group) for name, group in by_method.items()]
    lines += pipe_table(["method", *_RATES], by_method_lines)
    for title, part in (("Where the verdict is given", inside), ("Where it is withheld", beyond)):
        lines += ["", f"## {title}", "", *pipe_table(_HEADER, map(_cells, part), left=(0, 1))]
    reasons = dict.fromkeys((row["cell"], row["withheld"]) for row in beyond)
    lines += ["", *(f"- {cell}: {why}." for cell, why in reasons)]
    return "\n".join(lines) + "\n"


_RATES = ("false alarms", "misses")
_HEADER = (
    *("cell", "method", "coverage", "mean chance", "doubted"),
    *("coverage of the doubted", "of the trusted", "failed"),
)


def _rates(title: str, rows: Sequence[Row]) -> list[str]:
    return [title, *(_rate(*one) for one in rates(rows).values())]


def _rate(cells: int, runs: int, of: int) -> str:
    if not of:
        return "-"
    return f"{100 * runs / of:.1f} % of {of:,} runs ({plural(cells, 'pair')} of cell and method)"


def _cells(row: Row) -> list[str]:
    judged = row["judged"]
    doubted = f"{100 * row['doubted'] / judged:.1f}" if judged else "the judge"
    covered = f"{percent(row['coverage'])} ({percent(row['coverage_mcse'])})"
    parts = (percent(row[f"coverage_{kind}"]) for kind in ("doubted", "trusted"))
    start = [row["cell"], f"`{row['method']}`", covered, percent(row["mean_chance"])]
    return [*start, doubted, *parts, str(row["failed"])]


def main() -> None:
    """Run the benchmark."""
    parser = writing.parser("verdict", __doc__, replications=400, seed=11)
    parser.add_argument("--date", default=str(datetime.date.today()), help="default: today's")
    arguments = parser.parse_args()
    import jaxlsgd

    jaxlsgd.prepare()
    rows: list[Row] = []
    for case in cases():
        rows += cell_rows(case, arguments.replications, arguments.seed)
        lines = (pipe_line(_cells(row)) for row in rows[-len(METHODS) :])
        print(*lines, sep="\n", flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    writing.write_csv(arguments.out / "verdict.csv", rows)
    text = report(rows, arguments.seed, arguments.date)
    (arguments.out / "verdict.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
