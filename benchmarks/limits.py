"""Where `one_step(gradients="increments")` is known to fail: cells outside what its interval is made for.

Clients whose Hessians and optima both differ, in rounds of several steps; optimisers and steps that it has no
theory for; a path that has not arrived; clients that go over the same few rows again and again. `limits.md` has
coverage of 95 % intervals, mean over coordinates, with that of `one_step()`, which is made for most of these, and
random scaling's beside it. Below it are cells at the limits of `one_step()` itself: few events, and clients that are
nearly separable.

  python -m benchmarks.limits --out benchmarks/results      400 runs per cell (200 tables of rows); about a minute
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks import writing
from benchmarks.writing import pipe_table

STEPS, SEED, DIM = 10_000, 7, 5


@functools.cache
def clipped(most: float) -> Any:
    """Return Local SGD whose clients shorten long gradients."""
    import jax.numpy as jnp

    from jaxlsgd import Algorithm

    def direction(gradient: Any, client: Any, round: Any) -> Any:
        return gradient * jnp.minimum(1, most / jnp.linalg.norm(gradient)), client.local

    return Algorithm("clipped", direction=direction)


def cells() -> Iterator[tuple[str, Any, Any, Any, Any]]:
    """Yield what is run: its title, problem, schedule, steps, algorithm."""
    import optax

    from benchmarks.stress_cases import unlike
    from jaxlsgd import algorithms, problems
    from jaxlsgd.schedules import constant, constant_step, paper, power_decay

    plain, decay = algorithms.local_sgd(), power_decay(0.5)
    one = unlike(1.0, seed=1, dim=DIM)
    yield "unlike clients, C1", one, constant(1), decay, plain
    yield "unlike clients, C5", one, constant(5), decay, plain
    yield "unlike clients, C5, warm-up 5 %", one, constant(5).with_warmup(0.05), decay, plain
    long = constant(50)
    yield (
        "unlike clients, P(1/2), warm-up 5 %",
        one,
        paper("P(1/2)").with_warmup(0.05),
        decay,
        plain,
    )
    yield "unlike clients, E = 50, warm-up 5 %", one, long.with_warmup(0.05), decay, plain
    yield "unlike clients, E = 50", one, long, decay, plain
    yield "unlike clients, E = 50, γ_0 = 0.25", one, long, power_decay(0.25), plain
    yield "unlike clients, E = 50, SCAFFOLD", one, long, decay, algorithms.scaffold()
    yield "unlike clients, C5, constant steps 0.05", one, constant(5), constant_step(0.05), plain
    yield "unlike clients, C5, clipped at 2", one, constant(5), decay, clipped(2.0)
    adam = algorithms.local_optimizer(optax.adam(1.0), "local Adam")
    yield "unlike clients, C5, local Adam", one, constant(5), decay, adam
    yield "unlike clients, C5, FedAdam", one, constant(5), decay, algorithms.server_adam()
    logistic, bold = problems.logistic(DIM, 10), power_decay(2.0)
    yield "logistic, C5, local Adam", logistic, constant(5), bold, adam
    yield "logistic, E = 50, constant steps 2", logistic, long, constant_step(2.0), plain
    far = problems.linear(DIM, 4, init=np.full(DIM, 3.0))
    yield "linear, E = 50, γ_0 = 0.03, start at 3", far, long, power_decay(0.03), plain


def lines(replications: int) -> Iterator[list[str]]:
    """Yield a line of the table per cell."""
    import jax

    from jaxlsgd import one_step, random_scaling, simulate

    for title, problem, schedule, step, algorithm in cells():
        cell = simulate(
            jax.random.key(SEED),
            problem,
            schedule.plan(step, num_steps=STEPS),
            replications=replications,
            methods=(one_step(gradients="increments"), one_step(), random_scaling()),
            algorithm=algorithm,
        )
        texts, failed = [], []
        for rows in cell.methods.values():
            ok = rows.ok[-1]
            hits = (np.abs(rows.estimate[-1] - problem.true_vector) <= rows.half_width[-1, 0])[ok]
            texts += (
                [coverage(hits), f"{100 * hits.mean(0).min():.1f}"] if len(hits) else ["none"] * 2
            )
            failed.append(str((~ok).sum()))
        yield [title, *texts, ", ".join(failed)]


def of_rows(tables: int) -> Iterator[str]:
    """Fit tables of 75 rows on each of 4 clients, drawn from a population whose x* is 1; one run each."""
    import jax

    from jaxlsgd import one_step, problems, simulate
    from jaxlsgd.schedules import constant, power_decay

    plan = constant(5).plan(power_decay(0.5), num_steps=STEPS)
    rng = np.random.default_rng(0)
    population, these = [], []
    for i in range(tables):
        a = rng.normal(size=(4, 75, DIM))
        b = a.sum(-1) + rng.normal(size=(4, 75))
        problem = problems.dataset(list(a), list(b), loss="squared")
        cell = simulate(jax.random.key(i), problem, plan, replications=1, methods=[one_step()])
        rows = cell.methods["one_step"]
        if not rows.ok[-1, 0]:
            continue
        x, half = rows.estimate[-1, 0], rows.half_width[-1, 0, 0]
        population.append(np.abs(x - 1) <= half)
        these.append(np.abs(x - problem.true_vector) <= half)
    yield (
        f"Clients that go over the same 75 rows again and again (4 clients, squared loss, C5, {tables} tables of one run "
        f"each, {len(these)} of which have an interval): `one_step` covers the minimiser of these rows in {coverage(np.array(these))} % and the population "
        f"that they were drawn from in {coverage(np.array(population))} %."
    )


def few(replications: int) -> Iterator[list[Any]]:
    """Yield a line of the second table per cell."""
    import jax

    from benchmarks.stress import oracle_length
    from benchmarks.stress_cases import beyond
    from jaxlsgd import one_step, simulate

    for case in beyond():
        cell = simulate(
            jax.random.key(SEED),
            case.problem,
            case.plan(),
            replications=replications,
            methods=[one_step()],
        )
        rows = cell.methods["one_step"]
        ok, half = rows.ok[-1], rows.half_width[-1, 0]
        hits = (np.abs(rows.estimate[-1] - case.problem.true_vector) <= half)[ok]
        longer = np.median(2 * half[ok], 0) / oracle_length(case.problem, case.num_steps)
        yield [
            f"{case.name}, t_T = {case.num_steps:,}",
            round(0.02 * 2 * case.num_steps) if "events" in case.name else "",
            coverage(hits),
            f"{100 * hits.mean(0).min():.1f}",
            f"{longer.mean():.2f}",
            f"{100 * (~ok).mean():.1f}",
        ]


def coverage(hits: np.ndarray) -> str:
    """Return per cent over runs and coordinates, (runs, d), with the Monte-Carlo standard error."""
    each = 100 * hits.mean(1)
    return f"{each.mean():.1f} ({each.std(ddof=1) / len(each) ** 0.5:.1f})"


def main() -> None:
    """Run the cells and write the table."""
    arguments = writing.parser("limits", __doc__, replications=400).parse_args()
    import jaxlsgd

    jaxlsgd.prepare()
    text = [
        "# Where one-step intervals are known to fail",
        "",
        f"Made by `python -m benchmarks.limits`, {arguments.replications} runs per cell, t_T = {STEPS:,}, d = {DIM}: coverage "
        "of 95 % intervals in per cent, mean over coordinates with its Monte-Carlo standard error, and of the worst "
        "coordinate. Unlike clients: 4, with covariances 1, 2, 4 and 8 times I and optima of their own. Steps are "
        "γ_m = 0.5 m^−0.505 (logistic 2), without a warm-up, unless the cell names others. Failed runs are those without an "
        "interval, which `one_step` withholds where it sees that its anchors have not arrived; coverage is of the others.",
        "",
        *pipe_table(
            (
                *("cell", "`one_step[increments]`", "worst", "`one_step`", "worst"),
                *("`random_scaling`", "worst", "failed runs of each"),
            ),
            lines(arguments.replications),
        ),
        "",
        *of_rows(arguments.replications // 2),
        "",
        "## Few events, and nearly separable clients",
        "",
        f"`one_step()`, logistic regression, C5, γ_0 = 2, started at 0, {10 * arguments.replications:,} runs per cell. Events: "
        "expected number among all observations of all clients. Longer: median length over that of an interval from the true G and S and "
        "all observations. No interval: share of the runs in per cent; coverage is of the others.",
        "",
        *pipe_table(
            ("cell", "events", "coverage", "worst coordinate", "longer", "no interval"),
            few(10 * arguments.replications),
        ),
    ]
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "limits.md").write_text("\n".join(text) + "\n", encoding="utf-8")
    print("\n".join(text))


if __name__ == "__main__":
    main()
