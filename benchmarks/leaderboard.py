"""Which interval to use when: methods x schedules x problems x algorithms as one ordinary study.

Four problems (the paper's logistic regression; Huber's loss under heavy tails; clients with Hessians of their own, which
pull long rounds aside; clients whose optima move) under seven algorithms and at constant steps, and clients that are all alike for methods that need copies of a run or
federations that split. Every cell has the same draws. A number is the mean over coordinates: coverage of 95 %
intervals, and length over that of an efficient interval from the true G and S with all clients' observations.
`leaderboard.csv` has a row per cell and method, `leaderboard.md` two tables, `leaderboard.png` all of it at a glance.
What a method costs is given in words, and in numbers that a client sends over those of plain Local SGD under C1.

  python -m benchmarks.leaderboard quick --out look       100 runs of t_T = 1,000, C5 and P(1/2): does it work?
  python -m benchmarks.leaderboard full --out results     400 runs of t_T = 5,000 and 20,000, also C1 and E = 50
  python -m benchmarks.leaderboard full --out results --only one_step   one method that has changed: its rows replace
                                                          those of `leaderboard.csv` there; the draws are the same
"""

from __future__ import annotations

import argparse
import csv
import datetime
import math
import os
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.writing import Row, pipe_table, unique, write_csv

LEVEL, DIM, ALIKE, COPIES, RUNS = 0.95, 5, 12, 30, 6
SIZES = {
    "quick": (100, (1_000,), ("C5", "P(1/2)")),
    "full": (400, (5_000, 20_000), ("C1", "C5", "P(1/2)", "E = 50")),
}
METHODS: tuple[Any, ...] = (
    "one_step",
    "plug_in[finite]",
    "random_scaling",
    {"kind": "growing_batches", "name": "batch_means"},
    {"kind": "equal_batches", "name": "equal_batches"},
)
PATH = tuple(x if isinstance(x, str) else x["name"] for x in METHODS)
ALGORITHMS: tuple[Any, ...] = (
    "local_sgd",
    {"kind": "participation", "clients": 5, "name": "5 of 10 clients"},
    {"kind": "client_dropout", "probability": 0.2, "name": "dropout"},
    "scaffold",
    {"kind": "server_adam", "name": "FedAdam"},
    {"kind": "local_adam", "name": "local Adam"},
    {"kind": "clipping", "norm": 0.5, "name": "clipping"},
)
CONSTANT = "constant steps"  # of Local SGD: a column of its own
# A method keeps its level in a cell whose coverage is so near, in points, up to three standard errors.
NEAR = 1.5


def problems() -> list[dict[str, Any]]:
    """Return the problems of the grid."""
    huber = {"kind": "regression", "family": "huber", "degrees": 2.5, "name": "heavy tails"}
    own = {"kind": "regression", "spread": 0.9, "heterogeneity": 3, "name": "own Hessians"}
    moving = {"kind": "drifting", "gamma0": 0.5, "name": "drifting"}
    sizes = {"dim": DIM, "num_clients": 10}
    return [
        {"kind": "paper-logistic", "name": "logistic"},
        *(x | sizes for x in (huber, own, moving)),
    ]


def constant_steps() -> list[dict[str, Any]]:
    """Return the problems of the grid at constant steps."""
    steps = {"gamma0": 0.2, "alpha": 0.0}
    return [x | steps | {"name": f"{x['name']}, {CONSTANT}"} for x in problems()]


class Apart(NamedTuple):
    """What is not crossed: a problem, an algorithm, and methods that need just these."""

    problem: dict[str, Any]
    algorithm: Any
    methods: tuple[Any, ...]


def apart(schedule: str, steps: int) -> list[Apart]:
    """Return cells of clients that are alike: methods of one path, of copies, of parallel runs and of a tree."""
    plain = {"kind": "linear", "dim": DIM, "num_clients": ALIKE, "heterogeneity": 0.0}
    rounds = _schedule(schedule).plan(_decay(), num_steps=steps).num_rounds
    tree = {"dim": DIM, "branches": [2, 2], "splits": [rounds // 3, 2 * (rounds // 3)]}

    def wrapped(kind: str, **more: Any) -> dict[str, Any]:
        return {"kind": kind, "problem": plain, "gamma0": 0.5, **more}

    return [
        Apart(plain | {"name": "alike", "gamma0": 0.5}, "local_sgd", METHODS),
        Apart(
            wrapped("perturbed", copies=COPIES, name="alike, copies"),
            "local_sgd",
            ({"kind": "bootstrap", "copies": COPIES, "dim": DIM, "name": "bootstrap"},),
        ),
        Apart(
            wrapped("split_clients", leaves=RUNS, name="alike, six"),
            {
                "kind": "federation_tree",
                "dim": DIM,
                "branches": [RUNS],
                "splits": [0],
                "name": "six",
            },
            tuple({"kind": kind, "runs": RUNS, "dim": DIM} for kind in ("parallel_runs", "hulc")),
        ),
        Apart(
            wrapped("split_clients", leaves=4, name="alike, tree"),
            {"kind": "federation_tree", **tree, "name": f"tree {schedule} {steps}"},
            ({"kind": "higrad", **tree, "name": f"higrad {schedule} {steps}"},),
        ),
    ]


def study(size: str, only: str | None = None) -> Any:
    """Return the study of a size, of all methods or of one."""
    from jaxlsgd.study import Study

    replications, horizons, names = SIZES[size]
    grid = [
        {"problem": problem["name"], "algorithm": _name(algorithm), "methods": list(PATH)}
        for problem in problems()
        for algorithm in ALGORITHMS
    ]
    grid += [
        {"problem": problem["name"], "algorithm": "local_sgd", "methods": list(PATH)}
        for problem in constant_steps()
    ]
    # Copies cost as much as all else together, so that these run for the shorter horizon alone.
    alone = [part for name in names for part in apart(name, horizons[0])]
    extra = [
        {**cell, "schedule": name, "num_steps": steps}
        for cell in grid
        for name in names
        for steps in horizons
    ]
    for name in names:
        extra += [
            {
                "problem": part.problem["name"],
                "algorithm": _name(part.algorithm),
                "methods": [_name(method) for method in part.methods],
                "schedule": name,
                "num_steps": horizons[0],
            }
            for part in apart(name, horizons[0])
        ]
    if only is not None:
        extra = [cell | {"methods": [only]} for cell in extra if only in cell["methods"]]

    def used(kind: str, values: Iterable[Any]) -> list[Any]:
        names = {name for cell in extra for name in np.atleast_1d(cell[kind]).tolist()}
        return [value for value in _distinct(values) if _name(value) in names]

    apart_problems = (part.problem for part in alone)
    return Study(
        problems=used("problem", [*problems(), *constant_steps(), *apart_problems]),
        algorithms=used("algorithm", [*ALGORITHMS, *(part.algorithm for part in alone)]),
        methods=used("methods", [*METHODS, *(method for part in alone for method in part.methods)]),
        schedules=[{"family": "constant", "E": 50, "name": n} if "=" in n else n for n in names],
        warmup=0.05,
        levels=[LEVEL],
        replications=replications,
        tile_size=min(200, replications),
        cross=False,
        extra=extra,
    )


def _name(value: Any) -> str:
    return value if isinstance(value, str) else value.get("name", value["kind"])


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list({_name(value): value for value in values}.values())


def _schedule(name: str) -> Any:
    from jaxlsgd import schedules

    plain = schedules.constant(50) if "=" in name else schedules.paper(name)
    return plain.with_warmup(0.05)


def _decay() -> Any:
    from jaxlsgd.schedules import power_decay

    return power_decay(0.5)


def rows_of(study: Any, cells: Iterable[Any]) -> list[Row]:
    """Return coverage, length over the efficient one, and cost, of every cell and method."""
    made = {part.name: part.built().made for part in study.problems}
    found = []
    for cell in cells:
        base = made[cell.problem.partition(",")[0]]
        inverse = np.linalg.inv(base.G)
        variance = np.diagonal(inverse @ base.S @ inverse.T) / cell.num_steps
        efficient = 2 * 1.959964 * np.sqrt(variance)
        for name, rows in cell.methods.items():
            plain = cell.problem.removesuffix(f", {CONSTANT}")
            constant = plain != cell.problem
            where = {
                "problem": plain,
                "algorithm": CONSTANT if constant else cell.algorithm,
                "schedule": cell.schedule,
            }
            numbers = _numbers(rows, cell.truth[name], efficient)
            shown = "higrad" if name.startswith("higrad ") else name
            found.append(
                {
                    **where,
                    "num_steps": cell.num_steps,
                    "method": shown,
                    **numbers,
                    "cost": cell.costs.get(name, ""),
                    "numbers_sent": cell.numbers_sent[name][-1],
                    "sent_over_c1": cell.numbers_sent[name][-1] / cell.sent_under_c1[-1],
                }
            )
    return found


def _cost(rows: Sequence[Row]) -> str:
    """Return a method's cost in words, and what a client sends, from the rarest schedule to C1."""
    shares = [row["sent_over_c1"] for row in rows]
    ends = dict.fromkeys(f"{share:.2g}" for share in (min(shares), max(shares)))
    return f"{rows[0]['cost']}; sends {' to '.join(ends)} ×"


def _numbers(rows: Any, truth: np.ndarray, efficient: np.ndarray) -> Row:
    ok, half = rows.ok[-1], rows.half_width[-1, 0]
    if not ok.any():
        nothing = dict.fromkeys(("coverage", "mcse", "over_efficient"), math.nan)
        return {"n_ok": 0, "n_failed": int((~ok).sum()), **nothing}
    each = (np.abs(rows.estimate[-1] - truth) <= half)[ok].mean(1)
    return {
        "n_ok": int(ok.sum()),
        "n_failed": int((~ok).sum()),
        "coverage": 100 * float(each.mean()),
        "mcse": 100 * float(each.std(ddof=1)) / math.sqrt(len(each)),
        "over_efficient": float((2 * half[ok] / efficient).mean()),
    }


def keeps(row: Row) -> bool:
    """Return whether a method's coverage in a cell is near its level."""
    return abs(row["coverage"] - 100 * LEVEL) <= NEAR + 3 * row["mcse"]


def report(rows: Sequence[Row], size: str) -> str:
    """Return the tables as Markdown."""
    horizons = ", ".join(f"{t:,}" for t in sorted({row["num_steps"] for row in rows}))
    runs = max(row["n_ok"] + row["n_failed"] for row in rows)
    lines = [
        "# Which interval to use when",
        "",
        f"Made by `scripts/leaderboard {size}` on {datetime.date.today()}: {runs:,} runs of each cell, t_T = {horizons}, "
        f"schedules {', '.join(unique(rows, 'schedule'))}. Means over coordinates; × is length over that of an efficient "
        "interval from the true G and S with all clients' observations. A method keeps its level in a cell whose coverage "
        f"is within {NEAR} points of 95 %, up to three Monte-Carlo standard errors. Sends: numbers that a client sends, models, "
        "gradients and Hessians together, over those of plain Local SGD under C1, by schedule and algorithm.",
        "",
        "## At a glance",
        "",
        "Cells in which a method keeps its level, its lowest coverage, and its median length, by algorithm. The last line "
        "is what it costs.",
        "",
    ]
    algorithms = columns()
    shown = [f"`{method}`" for method in PATH]
    lines += pipe_table(["algorithm", *shown], _glance(rows, algorithms), left=range(9))
    lines += ["", "## The shortest that keeps its level", ""]
    names = [x["name"] for x in problems()]
    lines += pipe_table(["algorithm", *names], _shortest(rows, algorithms), left=range(9))
    lines += ["", "## Clients that are alike", ""]
    lines += pipe_table(["method", *unique(rows, "schedule"), "cost"], _alike(rows), left=range(9))
    return "\n".join(lines) + "\n"


def columns() -> list[str]:
    """Return the algorithms of the grid, constant steps among them."""
    return [*map(_name, ALGORITHMS), CONSTANT]


def _glance(rows: Sequence[Row], algorithms: Sequence[str]) -> Iterable[list[str]]:
    grid = [row for row in rows if "alike" not in row["problem"]]
    by = {method: [row for row in grid if row["method"] == method] for method in PATH}
    for name in algorithms:
        yield [name, *(_kept([r for r in by[m] if r["algorithm"] == name]) for m in PATH)]
    yield ["cost", *(_cost(by[method]) for method in PATH)]


def _kept(cells: Sequence[Row]) -> str:
    lowest = min(row["coverage"] for row in cells)
    median = np.median([row["over_efficient"] for row in cells])
    return f"{sum(map(keeps, cells))} of {len(cells)}, ≥ {lowest:.1f} %, {median:.2f} ×"


def _shortest(rows: Sequence[Row], algorithms: Sequence[str]) -> Iterable[list[str]]:
    for algorithm in algorithms:
        line = [algorithm]
        for problem in (x["name"] for x in problems()):
            here = [r for r in rows if (r["problem"], r["algorithm"]) == (problem, algorithm)]
            right = {
                method: np.median([r["over_efficient"] for r in here if r["method"] == method])
                for method in PATH
                if all(keeps(r) for r in here if r["method"] == method)
            }
            best = min(right, key=right.__getitem__, default="")
            line.append(f"`{best}` {right[best]:.2f} ×" if best else "none")
        yield line


def _alike(rows: Sequence[Row]) -> Iterable[list[str]]:
    own = [row for row in rows if "alike" in row["problem"]]
    for method in unique(own, "method"):
        mine = [row for row in own if row["method"] == method]
        yield [
            f"`{method}`",
            *(f"{r['coverage']:.1f} ({r['mcse']:.1f}), {r['over_efficient']:.2f} ×" for r in mine),
            _cost(mine),
        ]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw a square per method, problem and algorithm: lowest coverage as colour and number, and length."""
    from matplotlib.figure import Figure

    algorithms = columns()
    figure = Figure(
        figsize=(9.6, 9.4), layout="constrained"
    )  # three panels side by side, to be read in a page
    axes = figure.subplots(3, 3, sharey=True).ravel()
    images = [_panel(axis, rows, name) for axis, name in zip(axes, algorithms, strict=False)]
    axes[-1].set_axis_off()
    place = axes[-1].inset_axes((0.2, 0.1, 0.07, 0.8))
    figure.colorbar(images[-1], cax=place, label="lowest coverage, %")
    horizons = " and ".join(f"{t:,}" for t in sorted({row["num_steps"] for row in rows}))
    text = (
        f"95 % intervals: lowest coverage over {', '.join(unique(rows, 'schedule'))} at t_T = {horizons}, and median "
        f"length over an efficient one's. Bold: within {NEAR} points of 95 % everywhere, up to three standard errors."
    )
    figure.suptitle(textwrap.fill(text, 105), x=0.01, ha="left", fontsize=10.5)
    figure.savefig(path, dpi=170)


def _panel(axis: Any, rows: Sequence[Row], algorithm: str) -> Any:
    names = [x["name"] for x in problems()]
    lowest = np.full((len(PATH), len(names)), np.nan)
    for i, j in np.ndindex(*lowest.shape):
        at = (PATH[i], names[j], algorithm)
        here = [row for row in rows if (row["method"], row["problem"], row["algorithm"]) == at]
        lowest[i, j] = min(row["coverage"] for row in here)
        length = np.median([row["over_efficient"] for row in here])
        kind = {"ha": "center", "va": "center", "fontsize": 9.5}
        kind |= {"color": "white" if lowest[i, j] < 75 else "black"}
        kind |= {"fontweight": "bold" if all(map(keeps, here)) else "normal"}
        axis.text(j, i, f"{lowest[i, j]:.0f} %\n{length:.2f} ×", **kind)
    image = axis.imshow(lowest, cmap="cividis", vmin=50, vmax=95, aspect="auto")
    axis.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axis.set_yticks(range(len(PATH)), PATH)
    axis.set_title(algorithm, loc="left")
    axis.tick_params(length=0)
    return image


def _place(row: Row) -> tuple[Any, ...]:
    names = ("problem", "algorithm", "schedule", "num_steps", "method")
    return tuple(row[name] for name in names)


def read(path: Path) -> list[Row]:
    """Return the rows of an earlier run."""
    words = {"problem", "algorithm", "schedule", "method", "cost"}

    def held(key: str, text: str) -> Any:
        return text if key in words else int(text) if text.isdigit() else float(text)

    with path.open(newline="", encoding="utf-8") as stream:
        return [{key: held(key, row[key]) for key in row} for row in csv.DictReader(stream)]


def main() -> None:
    """Run what is missing of the study, and write table and figure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--out", type=Path, default=Path("leaderboard-results"))
    parser.add_argument("--only", metavar="METHOD", help="run this method alone")
    arguments = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from jaxlsgd.study import Results

    chosen, out, only = study(arguments.size, arguments.only), arguments.out, arguments.only
    folder = out / (f"{arguments.size}-{only}" if only else arguments.size)
    outcome = chosen.run(folder)
    if outcome.exit_code:
        raise SystemExit(outcome.exit_code)
    rows = rows_of(chosen, Results(folder).read_all())
    if only:
        new = {_place(row): row for row in rows}
        rows = [new.get(_place(row), row) for row in read(out / "leaderboard.csv")]
    write_csv(out / "leaderboard.csv", rows)
    (out / "leaderboard.md").write_text(report(rows, arguments.size), encoding="utf-8")
    draw(rows, out / "leaderboard.png")
    print(report(rows, arguments.size))


if __name__ == "__main__":
    main()
