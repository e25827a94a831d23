"""How well the path alone tells an interval: `one_step(gradients="increments", hessians=0)` against random scaling.

Neither asks anything of clients. Beside them one-step from increments with its default of 30 Hessians in a run, and the
anchored `one_step()`. The paper's two models, C1, C5, Log, P(1/3), P(1/2) and rounds of 50 steps with a warm-up of 5 %, and paths that
have not arrived. `path_only.md` has coverage of 95 % intervals, mean over coordinates, with its Monte-Carlo standard error, length over
that of an interval from the true covariances, how many runs have no interval, and the largest error in standard errors.

  python -m benchmarks.path_only --out benchmarks/results      400 runs per cell; about two minutes
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks import writing
from benchmarks.limits import coverage
from benchmarks.writing import pipe_table

SEED = 90210
SCHEDULES = ("C1", "C5", "Log", "P(1/3)", "P(1/2)", "C50")
HORIZONS = (500, 2_000, 5_000)


def cells() -> Iterator[tuple[str, Any, Any]]:
    """Yield what is run: its title, problem and plan."""
    from jaxlsgd import problems
    from jaxlsgd.schedules import constant, paper, power_decay

    for model in ("linear", "logistic"):
        problem = problems.paper_problem(model)
        for num_steps in HORIZONS:
            for name in SCHEDULES:
                family = constant(50) if name == "C50" else paper(name)
                step = power_decay(problem.gamma0 or 1.0)
                plan = family.with_warmup(0.05).plan(step, num_steps=num_steps)
                yield f"{model}, {name}, {num_steps:,}", problem, plan
    slow = power_decay(0.03)
    for clients in (4, 10):
        problem = problems.linear(5, clients, init=np.full(5, 3.0))
        plan = constant(50).plan(slow, num_steps=10_000)
        yield (
            f"not arrived: linear, K = {clients}, C50, γ_0 = 0.03, start at 3, 10,000",
            problem,
            plan,
        )
    problem = problems.linear(5, 10, init=np.full(5, 3.0))
    plan = constant(5).plan(power_decay(0.02), num_steps=2_000)
    yield "not arrived: linear, C5, γ_0 = 0.02, start at 3, 2,000", problem, plan
    problem = problems.linear(5, 10, init=np.full(5, 1.0))
    plan = paper("P(1/2)").plan(slow, num_steps=5_000)
    yield "not arrived: linear, P(1/2), γ_0 = 0.03, start at 1, 5,000", problem, plan


def lines(replications: int) -> Iterator[list[str]]:
    """Yield a line of the table per cell."""
    import jax

    from benchmarks.stress import oracle_length
    from jaxlsgd import one_step, random_scaling, simulate

    methods = (
        one_step(gradients="increments", hessians=0),
        random_scaling(critical="schedule"),
        one_step(gradients="increments"),
        one_step(),
    )
    for title, problem, plan in cells():
        cell = simulate(
            jax.random.key(SEED), problem, plan, replications=replications, methods=methods
        )
        texts = []
        for rows in cell.methods.values():
            half = rows.half_width[-1, 0]
            ok = rows.ok[-1] & np.isfinite(half).all(-1)
            if ok.sum() < 2:
                texts += ["", "", f"{(~ok).sum()}", ""]
                continue
            error = np.abs(rows.estimate[-1] - problem.true_vector)[ok]
            length = np.mean(2 * half[ok] / oracle_length(problem, plan.num_steps))
            most = f"{np.max(1.96 * error / half[ok]):.1f}"
            texts += [coverage(error <= half[ok]), f"{length:.2f}", f"{(~ok).sum()}", most]
        yield [title, *texts]
        print(title, *texts, flush=True)


def main() -> None:
    """Run the cells and write the table."""
    arguments = writing.parser("path_only", __doc__, replications=400).parse_args()
    import jaxlsgd

    jaxlsgd.prepare()
    each = ("covers", "length", "none", "most")
    names = ("path only", "random scaling", "30 Hessians", "anchored")
    text = [
        "# Intervals from the path alone",
        "",
        f"Made by `python -m benchmarks.path_only`, {arguments.replications} runs per cell, d = 5, seed {SEED}, which was not used before. "
        'Path only is `one_step(gradients="increments", hessians=0)`, 30 Hessians `one_step(gradients="increments")`, anchored `one_step()`, '
        'random scaling `random_scaling(critical="schedule")`. *Covers*: 95 % intervals, in per cent, mean over coordinates with its Monte-Carlo '
        "standard error, of the runs that have an interval; *length*: mean, over that of an interval from the true covariances; *none*: runs "
        "without an interval; *most*: the largest error in standard errors (half-widths over 1.96).",
        "",
        *pipe_table(
            ("cell", *(f"{name}: {one}" for name in names for one in each)),
            lines(arguments.replications),
        ),
    ]
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "path_only.md").write_text("\n".join(text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
