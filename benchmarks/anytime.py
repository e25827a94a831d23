"""Looking at every round, and stopping: how often intervals hold at all of 100 looks, and at stops that data choose.

Cells are the paper's two models under five schedules at t_T = 5,000, and cells of `benchmarks.stress`, four of them with rare outcomes. Looks are
spaced evenly in the logarithm from 5 % of the observations on, or from 256 per client, before which there is no
interval for several looks; where many observations do not count there is none at the first looks either. All methods
read the same runs of the anchored one-step.

Stops, each by the method's own intervals: until every interval is as short as a run's is, on average, at 40 % of the
observations; and, coordinate by coordinate, until 0 is excluded. Runs that do not stop are read at the end.

Cells that `anytime.csv` has already, of the same seed and replications, are not run again.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import writing
from benchmarks.stress_cases import Case, cases
from benchmarks.writing import percent, pipe_table
from jaxlsgd import looks, schedules, simulate
from jaxlsgd.core.rows import CellRows
from jaxlsgd.inference.one_step import first_look, one_step
from jaxlsgd.schedules import Plan

Row = dict[str, Any]
LOOKS = 100
HARD = (
    ("K=1", "linear", "C5"),
    ("K=1", "logistic", "P(1/2)"),
    ("K=2", "logistic", "C5"),
    ("d=1", "linear", "P(1/2)"),
    ("", "poisson", "C5"),
    ("K=1", "poisson", "P(1/2)"),
    ("", "huber", "C5"),
    ("heterogeneity 3", "unequal", "C5"),
    ("start 3 away", "logistic", "P(1/2)"),
    ("gamma0 small", "linear", "C5"),
)
RARE = ("2 % events", "2 % events, K=2", "1 % events, K=4", "intercept -3.5")  # at 2,000


def chosen() -> list[Case]:
    """Return the cells."""
    known = cases()
    paper = [case for case in known if case.paper and case.num_steps == 5_000]
    hard = [
        next(c for c in known if not c.paper and (c.name, c.problem.name, c.schedule) == wanted)
        for wanted in HARD
    ]
    rare = [case for case in known if case.name in RARE and case.num_steps == 2_000]
    return paper + hard + rare


def methods(num_steps: int) -> list[Any]:
    """Return fixed, always valid and known looks of both shapes."""
    form: dict[str, Any] = {"gradients": "anchor"}
    return [
        one_step(**form, name="fixed"),
        one_step(**form, valid="always", best_at=num_steps / 2, name="always"),
        one_step(**form, valid="looks", name="looks"),
        one_step(**form, valid="looks", shape="obrien_fleming", name="looks, late"),
    ]


def plan_of(case: Case) -> Plan:
    """Return the plan of a cell."""
    if case.rare:
        return case.plan()
    step_size = schedules.power_decay(case.gamma0, case.alpha)
    schedule = schedules.paper(case.schedule).with_warmup(0.05)
    return schedule.plan(step_size, num_steps=case.num_steps)


def look_rounds(plan: Plan, dim: int) -> list[int]:
    """Return the rounds of 100 looks."""
    first = max(0.05 * plan.num_steps, first_look(dim))
    steps = np.geomspace(first, plan.num_steps, LOOKS)
    rounds = np.searchsorted(plan.ends, steps - 1e-9) + 1
    return np.unique(np.minimum(rounds, plan.num_rounds)).tolist()


def run(case: Case, replications: int, seed: int) -> tuple[list[Row], CellRows]:
    """Return the measures of a cell, one row per method, and its rows."""
    plan, name = plan_of(case), name_of(case)
    began = time.perf_counter()
    cell = simulate(
        jax.random.key(seed),
        case.problem,
        plan,
        replications=replications,
        methods=methods(case.num_steps),
        save_at=look_rounds(plan, case.problem.dim),
        devices=1,
        progress=False,
    )
    seconds = time.perf_counter() - began
    where = {"cell": name, "num_steps": case.num_steps, "looks": len(cell.save_at)}
    where |= {"replications": replications, "seed": seed, "seconds": round(seconds, 1)}
    return [where | {"method": method} | measures(cell, method) for method in cell.methods], cell


def name_of(case: Case) -> str:
    """Return the name of a cell."""
    return " ".join(x for x in (case.problem.name, case.name, case.schedule) if x != "paper")


def measures(cell: CellRows, method: str) -> Row:
    """Return means over coordinates, with Monte-Carlo errors from the spread over runs."""
    bad = looks.wrong(cell, method)[:, 0]  # (saves, runs, coordinates)
    rows = cell.methods[method]
    half = rows.half_width[:, 0]
    begun = np.isfinite(half).all(-1)
    row = _mean("held", ~bad.any(0)) | {"held_worst": float((~bad.any(0)).mean(0).min())}
    since = np.maximum.accumulate(begun, 0)
    row["gaps"] = float((since & ~begun).any(0).mean())
    first = np.asarray(cell.steps_at)[np.argmax(begun, 0)][begun.any(0)]
    row["begins"] = float(np.median(first)) if len(first) else float("nan")
    ended = begun[-1]
    row |= _mean("last", ~bad[-1][ended]) | {"no_interval": int((~ended).sum())}
    near = int(np.argmin(np.abs(np.asarray(cell.steps_at) - 0.4 * cell.num_steps)))
    there = half[near][np.isfinite(half[near]).all(-1)]
    width = float(there.mean(0).max()) if len(there) else 1.0
    row |= _at_stop("width", cell, method, looks.Until(half_width=width), bad)
    names = cell.coordinates[method]
    parts = [
        _stopped(cell, method, looks.Until(excludes=0.0, coordinates=(name,)), bad)
        for name in names
    ]
    held = np.stack([ok[:, k] for k, (ok, _, _) in enumerate(parts)], 1)
    row |= _mean("null", held)
    row["null_stopped"] = float(np.mean([part[1].mean() for part in parts]))
    row["null_steps"] = float(np.mean([part[2].mean() for part in parts]))
    return row


def _stopped(cell: CellRows, method: str, rule: looks.Until, bad: Any) -> tuple[Any, Any, Any]:
    at, stopped = looks.stops(cell, method, rule)
    runs = np.arange(len(at))
    finite = np.isfinite(cell.methods[method].half_width[at, 0, runs])
    return ~bad[at, runs] & finite, stopped, np.asarray(cell.steps_at)[at]


def _at_stop(name: str, cell: CellRows, method: str, rule: looks.Until, bad: Any) -> Row:
    ok, stopped, steps = _stopped(cell, method, rule, bad)
    found = _mean(name, ok) | {f"{name}_stopped": float(stopped.mean())}
    return found | {f"{name}_steps": float(steps.mean())}


def _mean(name: str, ok: Any) -> Row:
    """Return a share over runs and coordinates, and its standard error over runs."""
    each = ok.mean(-1)
    error = each.std(ddof=1) / np.sqrt(len(each)) if len(each) > 1 else np.nan
    return {name: float(each.mean()), f"{name}_mcse": float(error)}


def report(rows: Sequence[Row]) -> str:
    """Return the tables, as Markdown."""
    first = rows[0]
    lines = [
        "# Intervals at every look, and at the stop",
        "",
        f"Made by `python -m benchmarks.anytime --seed {first['seed']}`, {first['replications']:,} runs per cell, 95 %. "
        "Shares are means over coordinates in per cent, with Monte-Carlo standard errors in parentheses. Held: at all "
        "looks that have an interval; from: the median first look that has one; gaps: runs without one at some look after "
        "that; worst: the least of the coordinates; last: at "
        "the last look, of the runs with an interval there; stop: on average, in observations per client; "
        "width: at the stop when all intervals are as short as they are on average at 40 % of the observations; null: "
        "at the stop when 0 is excluded, coordinate by coordinate. Both count runs without an interval as misses.",
        "",
        *_summary(rows),
    ]
    header = ["cell", "looks", "from", "gaps", "held", "worst", "last"]
    header += ["width", "stop", "null", "stop"]
    for method in writing.unique(rows, "method"):
        mine = [row for row in rows if row["method"] == method]
        lines += ["", f"## {method}", "", *pipe_table(header, [_cells(row) for row in mine])]
    missing = {row["cell"]: row["no_interval"] for row in rows if row["no_interval"]}
    if missing:
        told = "; ".join(f"{name} ({count})" for name, count in missing.items())
        lines += ["", f"Cells with runs that have no interval at the last look: {told}."]
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> list[str]:
    def share(name: str) -> str:
        return f"{percent(row[name])} ({percent(row[f'{name}_mcse'])})"

    stops = [f"{row[f'{name}_steps']:,.0f} of {row['num_steps']:,}" for name in ("width", "null")]
    begun = [f"{row['begins']:.0f}", percent(row["gaps"])]
    held = [*begun, share("held"), percent(row["held_worst"]), share("last")]
    return [row["cell"], row["looks"], *held, share("width"), stops[0], share("null"), stops[1]]


def _summary(rows: Sequence[Row]) -> list[str]:
    lines = []
    for method in writing.unique(rows, "method"):
        mine = [row for row in rows if row["method"] == method]
        spans = []
        for name in ("held", "width", "null"):
            values = np.array([row[name] for row in mine])
            spans.append(f"{percent(values.min())}–{percent(values.max())}")
        held = np.array([row["held"] for row in mine])
        lines.append(
            [
                f"`{method}`",
                len(mine),
                *spans,
                int((held >= 0.945).sum()),
                int((np.abs(held - 0.95) <= 0.015).sum()),
            ]
        )
    ends = ("held at all looks", "at width", "at null", "held ≥ 94.5 %", "held within 1.5 points")
    return pipe_table(("method", "cells", *ends), lines)


def draw(cell: CellRows, out: Path) -> None:
    """Draw one run in its bands, and the share of runs that were wrong so far."""
    from jaxlsgd.report import figures

    for path in figures.save_looks(cell, out, banded=("fixed", "always")):
        path.replace(out / f"anytime_{path.name}") if path.suffix == ".png" else path.unlink()


def cost(seed: int) -> str:
    """Return what looks cost as Markdown: CPU-seconds of 512 runs with and without, the least of three."""
    lines = []
    for case in chosen()[:10]:
        if case.schedule not in ("C5", "P(1/2)"):
            continue
        plan = plan_of(case)
        rounds = look_rounds(plan, case.problem.dim)
        seconds = []
        for save_at in (None, rounds):
            each = []
            for _ in range(4):  # the first compiles
                began = time.process_time()
                simulate(
                    jax.random.key(seed),
                    case.problem,
                    plan,
                    replications=512,
                    methods=[one_step(valid="always", best_at=case.num_steps / 2)],
                    save_at=save_at,
                    devices=1,
                    progress=False,
                )
                each.append(time.process_time() - began)
            seconds.append(min(each[1:]))
        few, many = seconds
        name = f"{case.problem.name} {case.schedule}"
        lines.append([name, len(rounds), f"{few:.2f}", f"{many:.2f}", f"{many / few:.1f}"])
    head = ("cell", "looks", "seconds without", "with", "ratio")
    text = 'CPU-seconds of 512 runs of 5,000 observations per client, `one_step(valid="always")`, one device.'
    return "\n".join(["# What looks cost", "", text, "", *pipe_table(head, lines)]) + "\n"


def read(path: Path, replications: int, seed: int) -> list[Row]:
    """Return the rows of an earlier run with the same seed and replications; else none."""
    if not path.exists():
        return []
    whole = {"num_steps", "looks", "replications", "seed", "no_interval"}
    with path.open(newline="") as stream:
        rows = [
            {
                key: value if key in {"cell", "method"} else (int if key in whole else float)(value)
                for key, value in row.items()
            }
            for row in csv.DictReader(stream)
        ]
    same = all((row["seed"], row["replications"]) == (seed, replications) for row in rows)
    return rows if same else []


def main() -> None:
    """Run the benchmark."""
    parser = writing.parser("anytime", __doc__, replications=2_000, seed=90210)
    parser.add_argument("--cost", action="store_true", help="measure only what looks cost")
    parser.add_argument("--rare", action="store_true", help="run only cells with rare outcomes")
    arguments = parser.parse_args()
    import jaxlsgd

    jaxlsgd.prepare()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.cost:
        (arguments.out / "anytime_cost.md").write_text(cost(arguments.seed), encoding="utf-8")
        return
    rows = read(arguments.out / "anytime.csv", arguments.replications, arguments.seed)
    done = {row["cell"] for row in rows}
    order = [name_of(case) for case in chosen()]
    for i, case in enumerate(chosen()):
        if name_of(case) in done or (arguments.rare and not case.rare):
            continue
        found, cell = run(case, arguments.replications, arguments.seed)
        rows = sorted(rows + found, key=lambda row: order.index(row["cell"]))
        print(
            found[0]["cell"],
            found[0]["seconds"],
            [percent(row["held"]) for row in found],
            flush=True,
        )
        writing.write_csv(arguments.out / "anytime.csv", rows)
        (arguments.out / "anytime.md").write_text(report(rows), encoding="utf-8")
        if i == 1:
            draw(cell, arguments.out)


if __name__ == "__main__":
    main()
