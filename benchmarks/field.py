"""Compare rival interval methods in cells whose results are published, and under local rounds.

Linear regression, d = 5, x* = (0, 1/4, ..., 1), x_0 = 0, a ~ N(0, I), noise 1, γ_m = 0.5 m^(−0.505), n = 10,000 observations in all. Methods of
one path run on the same draws, and so does the bootstrap, whose copies share them. Methods that split the clients have as
many observations in all: six federations of one client (HulC, parallel runs), a tree of four clients (HiGrad).
Under C1 that is one machine; under C5 and P(1/2) batches, trees and runs have local rounds.
`field.csv` has a row per schedule and method, `field.md` tables with what is published.

  python -m benchmarks.field --out benchmarks/results         500 runs
  python -m benchmarks.field --out look --replications 20 --observations 600
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks import writing
from benchmarks.writing import Row, pipe_table, unique

LEVEL, DIM, ALPHA, GAMMA0, COPIES, RUNS = 0.95, 5, 0.505, 0.5, 200, 6
SCHEDULES = ("C1", "C5", "P(1/2)")
# Coverage in percent and length over that of the oracle, as published for this setting.
PUBLISHED = {
    "plug_in": (95, 1.02),
    "random_scaling": (94.5, 1.35),
    "growing_batches[overlapping]": (86, 0.84),
    "bootstrap[sd]": (97, 1.23),
    "hulc": (97, 1.76),
}


def run(
    schedule: str, replications: int, observations: int, copies: int, seed: int
) -> Iterator[Row]:
    """Yield the rows under a schedule, method by method."""
    import jax

    from jaxlsgd import algorithms, simulate

    for case in _cases(schedule, observations, copies):
        cell = simulate(
            jax.random.key(seed),
            case.problem,
            case.plan,
            replications=replications,
            methods=case.methods,
            levels=(LEVEL,),
            algorithm=case.algorithm or algorithms.local_sgd(),
        )
        for method in case.methods:
            rows, truth = cell.methods[method.name], cell.truth[method.name]
            found = _row(method.name, rows, truth, observations)
            yield {"schedule": schedule, **found, "cost": method.cost}


class Case(NamedTuple):
    """A cell, and the methods that run in it."""

    problem: Any
    plan: Any
    methods: tuple[Any, ...]
    algorithm: Any = None  # Local SGD if None


def _cases(schedule: str, observations: int, copies: int) -> Iterator[Case]:
    from jaxlsgd import plug_in, random_scaling
    from jaxlsgd.inference.oracle import of
    from jaxlsgd.inference.rivals.bootstrap import bootstrap, perturbed
    from jaxlsgd.inference.rivals.equal_batches import equal_batches
    from jaxlsgd.inference.rivals.growing_batches import growing_batches
    from jaxlsgd.inference.rivals.higrad import grow
    from jaxlsgd.inference.rivals.hulc import hulc
    from jaxlsgd.inference.rivals.parallel_runs import parallel_runs, split

    one = _problem(1)
    path = (
        of(one),
        plug_in(),
        random_scaling(),
        growing_batches(alpha=ALPHA),
        growing_batches("nonoverlapping", alpha=ALPHA),
        equal_batches(lugsail=False, alpha=ALPHA),
        equal_batches(alpha=ALPHA),
    )
    plan = _plan(schedule, observations)
    yield Case(one, plan, path)
    both = (bootstrap(copies), bootstrap(copies, interval="percentile"))
    yield Case(perturbed(one, copies), plan, both)
    apart = split(_problem(RUNS), RUNS)
    methods = (hulc(RUNS), parallel_runs(RUNS))
    yield Case(apart.problem, _plan(schedule, observations // RUNS), methods, apart.algorithm)
    plan = _plan(schedule, observations // 4)
    plan = plan.prefix(plan.num_rounds // 3 * 3)
    tree = grow(_problem(4), plan, (2, 2))
    yield Case(tree.problem, plan, (tree.method,), tree.algorithm)


def _plan(schedule: str, steps: int) -> Any:
    from jaxlsgd import schedules

    return schedules.paper(schedule).plan(schedules.power_decay(GAMMA0, ALPHA), num_steps=steps)


def _problem(clients: int) -> Any:
    from jaxlsgd import problems

    return problems.linear(DIM, clients, heterogeneity=0.0, center=np.linspace(0, 1, DIM))


def _row(name: str, rows: Any, truth: Any, observations: int) -> Row:
    half, ok = rows.half_width[-1, 0], rows.ok[-1]
    each = (np.abs(rows.estimate[-1] - truth) <= half)[ok].mean(1)
    # G = S = I: the standard error of n observations is 1/√n.
    oracle = 1.959964 / math.sqrt(observations)
    return {
        "method": name,
        "replications": len(ok),
        "n_failed": int((~ok).sum()),
        "coverage": each.mean(),
        "mcse": each.std(ddof=1) / math.sqrt(len(each)),
        "length_over_oracle": half[ok].mean() / oracle,
        "length_sd": half[ok].std() / half[ok].mean(),
    }


def report(rows: Sequence[Row], command: str) -> str:
    """Return the rows as Markdown."""
    lines = [
        "# Rival interval methods",
        "",
        f"Made by `{command}` on {datetime.date.today()}, {rows[0]['replications']:,} runs: coverage of 95 % intervals, mean "
        "over coordinates, with its Monte-Carlo standard error; mean length over that of an efficient interval from the "
        "true G and S with all observations; the spread of lengths; what is published for one machine; cost beyond "
        "the run, if a method declares it.",
    ]
    header = ("method", "coverage", "over oracle", "spread", "published", "cost")
    for schedule in unique(rows, "schedule"):
        cells = [_cells(row) for row in rows if row["schedule"] == schedule]
        lines += ["", f"## {schedule}", "", *pipe_table(header, cells, left=(0, 5))]
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> list[str]:
    known = PUBLISHED.get(row["method"]) if row["schedule"] == "C1" else None
    return [
        f"`{row['method']}`",
        f"{100 * row['coverage']:.1f} ({100 * row['mcse']:.1f})",
        f"{row['length_over_oracle']:.2f}",
        f"{100 * row['length_sd']:.0f} %",
        f"{known[0]} %, {known[1]:.2f}" if known else "",
        row["cost"],
    ]


def main() -> None:
    """Run the comparison."""
    parser = writing.parser("field", __doc__, replications=500, seed=2026)
    parser.add_argument("--observations", type=int, default=10_000, metavar="N")
    parser.add_argument("--copies", type=int, default=COPIES, metavar="B", help="of the bootstrap")
    given = parser.parse_args()
    rows = []
    for schedule in SCHEDULES:
        sizes = (given.replications, given.observations, given.copies, given.seed)
        for row in run(schedule, *sizes):
            found = f"{100 * row['coverage']:.1f} % at {row['length_over_oracle']:.2f}"
            print(f"{schedule}, {row['method']}: {found}", flush=True)
            rows.append(row)
    given.out.mkdir(parents=True, exist_ok=True)
    writing.write_csv(given.out / "field.csv", rows)
    command = f"python -m benchmarks.field --replications {given.replications}"
    command += f" --observations {given.observations} --copies {given.copies} --seed {given.seed}"
    text = report(rows, command)
    (given.out / "field.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
