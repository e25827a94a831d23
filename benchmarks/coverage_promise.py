#!/usr/bin/env python3
"""Measure whether the intervals cover as often as they promise, at the shortest horizon of the paper.

Part (a): t_T = 5,000, K = 10, d = 5, both models of the paper, its five schedules with 5 % warm-up, all five
coordinates, levels 80, 90, 95 and 99 %. Part (b): a harder logistic problem, d = 20, K = 50, non-uniform
weights, heterogeneous clients, covariates whose covariance has condition number 20.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

Row = dict[str, Any]

LEVELS = (0.8, 0.9, 0.95, 0.99)
NUM_STEPS = 5_000
COLUMNS = (
    "case",
    "schedule",
    "num_rounds",
    "method",
    "level",
    "coordinate",
    "replications",
    "n_diverged",
    "n_floored",
    "coverage_all",
    "mcse",
    "bias_over_se",
    "model_se_error",
    "length",
)
EPILOG = """
Every method sees the same runs. MCSE is sqrt(p (1 - p)/n) at the nominal p; a diverged run counts as a miss.
bias_over_se is the mean error of the estimate over its standard deviation; model_se_error is the plug-in standard
error over the standard deviation of the estimates, less 1.

Examples:
  benchmarks/coverage_promise.py --out benchmarks/results            the whole grid
  benchmarks/coverage_promise.py --part a --replications 200 --out /tmp/look
"""


class Case(NamedTuple):
    """A problem with the first effective step that goes with it."""

    name: str
    problem: Any
    first_step: float
    finite_scaling: bool  # whether random scaling is measured too


def paper_cases() -> list[Case]:
    """Return the two models of the paper."""
    from jaxlsgd import problems

    both = [problems.paper_linear(), problems.paper_logistic()]
    return [Case(problem.name, problem, problem.gamma0, True) for problem in both]


def hard_cases() -> list[Case]:
    """Return logistic regression with d = 20, K = 50 and clients that disagree."""
    import numpy as np

    from jaxlsgd import problems

    rotation = np.linalg.qr(np.random.default_rng(0).normal(size=(20, 20)))[0]
    values = np.geomspace(1.0, 20.0, 20)
    covariance = rotation * (values / values.mean()) @ rotation.T
    weights = np.linspace(1.0, 5.0, 50)
    problem = problems.logistic(
        20,
        50,
        center=np.linspace(0, 0.5, 20),
        heterogeneity=0.3,
        weights=weights / weights.sum(),
        covariance=(covariance + covariance.T) / 2,
    )
    return [Case("hard", problem, 5.0, False)]


def measure(case: Case, schedule: str, replications: int, seed: int) -> list[Row]:
    """Return the coverage of every method, level and coordinate of a case under a schedule."""
    import jax

    from jaxlsgd import plug_in, random_scaling, schedules, simulate
    from jaxlsgd.analysis import measures

    warmed = schedules.paper(schedule).with_warmup(0.05)
    plan = warmed.plan(schedules.power_decay(case.first_step), num_steps=NUM_STEPS)
    methods = [plug_in(), plug_in("finite")]
    if case.finite_scaling:
        methods += [random_scaling(critical=name) for name in ("schedule", "finite")]
    cell = simulate(
        jax.random.key(seed),
        case.problem,
        plan,
        replications=replications,
        methods=methods,
        levels=LEVELS,
        tile_size=512 if case.problem.dim < 10 else 128,
    )
    return [_row(case.name, row) for row in measures.summarise(cell, last_only=True)]


def _row(case: str, row: Row) -> Row:
    level = row["level"]
    error = math.sqrt(level * (1 - level) / row["replications"])
    ratio = row["bias"] / row["empirical_se"]
    found = row | {"case": case, "mcse": error, "bias_over_se": ratio}
    found["n_diverged"] = row["n_failed"]  # as the results of 0.1.0 have it
    return {column: found[column] for column in COLUMNS}


def run(cases: Iterable[Case], replications: int, seed: int, file: Path) -> list[Row]:
    """Measure case by case; the file has every cell as soon as it is finished."""
    from jaxlsgd.schedules import PAPER_SCHEDULES

    rows: list[Row] = []
    for case in cases:
        for schedule in PAPER_SCHEDULES:
            began = time.time()
            rows += measure(case, schedule, replications, seed)
            write_csv(rows, file)
            print(f"{case.name}, {schedule}: {time.time() - began:.0f} s", flush=True)
    return rows


def write_csv(rows: Sequence[Row], file: Path) -> None:
    """Write numbers with six digits, more than their errors warrant."""
    lines = [[f"{v:.6g}" if isinstance(v, float) else v for v in row.values()] for row in rows]
    with file.open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream).writerows([COLUMNS, *lines])


def read_csv(file: Path) -> list[Row]:
    """Return the rows of an earlier run."""
    text = {"case", "schedule", "method", "coordinate"}
    with file.open(newline="") as stream:
        return [
            {k: v if k in text else float(v) if v else None for k, v in row.items()}
            for row in csv.DictReader(stream)
        ]


def markdown(rows: Sequence[Row], heading: str) -> str:
    """Return counts of coordinates that keep the promise, the bias that is left, and every coverage."""
    n = int(rows[0]["replications"])
    parts = [f"## {heading}\n\n{n:,} replications, t_T = {NUM_STEPS:,}."]
    for case in _unique(rows, "case"):
        here = [row for row in rows if row["case"] == case]
        parts += [f"### {case}: how many coordinates keep the promise", _counts(here)]
        parts += [f"### {case}: plug-in at 95 %, asymptotic and finite", _nearer(here)]
    for level in LEVELS:
        error = 100 * math.sqrt(level * (1 - level) / n)
        title = f"### Coverage in % at nominal {100 * level:g} % (MCSE {error:.2f})"
        parts += [title, _coverages([row for row in rows if row["level"] == level])]
    return "\n\n".join(parts) + "\n"


def _nearer(rows: Sequence[Row]) -> str:
    """Compare asymptotic and finite coverage: lowest, mean, highest, which is nearer, and the bias left."""
    head = "schedule | asymptotic | finite | finite at least as near | largest bias/SE | SE error"
    lines = [head + ", mean (%)", "---|--:|--:|--:|--:|--:"]
    for schedule in _unique(rows, "schedule"):
        here = [row for row in rows if (row["schedule"], row["level"]) == (schedule, 0.95)]
        old, new = (
            [row for row in here if row["method"] == name]
            for name in ("plug_in", "plug_in[finite]")
        )
        near = sum(_off(a) >= _off(b) for a, b in zip(old, new, strict=True))
        bias = max(abs(row["bias_over_se"]) for row in new)
        error = 100 * sum(row["model_se_error"] for row in new) / len(new)
        ends = " | ".join(_ends(group) for group in (old, new))
        lines.append(f"{schedule} | {ends} | {near} of {len(new)} | {bias:.2f} | {error:+.1f}")
    return "\n".join(lines)


def _off(row: Row) -> float:
    return round(abs(row["coverage_all"] - row["level"]), 9)


def _ends(rows: Sequence[Row]) -> str:
    covered = [100 * row["coverage_all"] for row in rows]
    return f"{min(covered):.1f}, {sum(covered) / len(covered):.1f}, {max(covered):.1f}"


def _counts(rows: Sequence[Row]) -> str:
    lines = ["method | level | coordinates | within 3 MCSE | within 1.5 points | lowest | highest"]
    lines.append("---|--:|--:|--:|--:|--:|--:")
    for method in _unique(rows, "method"):
        for level in LEVELS:
            here = [row for row in rows if (row["method"], row["level"]) == (method, level)]
            far = [abs(row["coverage_all"] - level) for row in here]
            near = sum(d <= 3 * row["mcse"] for d, row in zip(far, here, strict=True))
            close = sum(d <= 0.015 for d in far)
            covered = [100 * row["coverage_all"] for row in here]
            ends = f"{min(covered):.2f} | {max(covered):.2f}"
            lines.append(f"{method} | {level:g} | {len(here)} | {near} | {close} | {ends}")
    return "\n".join(lines)


def _coverages(rows: Sequence[Row]) -> str:
    names = list(dict.fromkeys(row["coordinate"] for row in rows))
    lines = ["case | schedule | method | " + " | ".join(names), "---|---|---" + "|--:" * len(names)]
    for (case, schedule, method), group in _groups(rows, "case", "schedule", "method"):
        values = " | ".join(f"{100 * row['coverage_all']:.1f}" for row in group)
        lines.append(f"{case} | {schedule} | {method} | {values}")
    return "\n".join(lines)


def _unique(rows: Iterable[Row], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))


def _groups(rows: Iterable[Row], *keys: str) -> Iterator[tuple[tuple[Any, ...], list[Row]]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    yield from groups.items()


PARTS = {
    "a": ("(a) The paper's models: d = 5, K = 10", paper_cases),
    "b": ("(b) Logistic, d = 20, K = 50, condition number 20", hard_cases),
}


def main() -> int:
    """Run the chosen parts and write `coverage_promise.md` and a CSV per part."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replications", type=int, default=4000, help="of part a (default: 4000)")
    parser.add_argument("--hard", type=int, default=1000, help="of part b (default: 1000)")
    parser.add_argument("--part", choices=[*PARTS, "both"], default="both", help="default: both")
    parser.add_argument("--seed", type=int, default=0, help="of the root key (default: 0)")
    parser.add_argument("--devices", type=int, default=2, help="CPU devices (default: 2)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIRECTORY")
    arguments = parser.parse_args()
    if min(arguments.replications, arguments.hard) < 2:
        parser.error("--replications and --hard must be at least 2")
    import jax

    jax.config.update("jax_num_cpu_devices", arguments.devices)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for part in PARTS if arguments.part == "both" else arguments.part:
        count = arguments.replications if part == "a" else arguments.hard
        run(PARTS[part][1](), count, arguments.seed, arguments.out / f"coverage_promise_{part}.csv")
    files = {part: arguments.out / f"coverage_promise_{part}.csv" for part in PARTS}
    text = [markdown(read_csv(f), PARTS[part][0]) for part, f in files.items() if f.exists()]
    (arguments.out / "coverage_promise.md").write_text("# Coverage\n\n" + "\n".join(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
