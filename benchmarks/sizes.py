"""The engine against NumPy on one core, for few and many clients and parameters.

`python -m benchmarks.sizes --clients 10,33` runs some of the table, for those who cannot keep a machine quiet for
all of it; it prints what it finds.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Sequence
from typing import Any

from benchmarks import cases, numpy_baseline
from benchmarks.timing import Finding, finding, interleaved, rates, ratio

CLIENTS, DIMENSIONS, SCHEDULES = (1, 10, 33, 100, 1_000), (2, 5, 20, 50), ("C1", "C5", "P(1/2)")
# Numbers of multiplications of a run: about half a second of NumPy's.
WORK = 3e8


def _steps(clients: int, dim: int, replications: int, quick: bool) -> int:
    """Return steps that make runs of all sizes about as long."""
    if quick:
        return 20
    each = clients * replications * (8 * dim + dim**2)
    return max(20, min(4_000, int(WORK / each)))


def _case(
    clients: int, dim: int, schedule: str, quick: bool
) -> tuple[list[Finding], dict[str, Any]]:
    import jax

    from jaxlsgd.engine.cost import default_tile
    from jaxlsgd.runs.simulate import simulate

    problem, methods = cases.problem("linear", dim, clients), cases.both_methods()
    tile = default_tile(problem, methods)
    steps = _steps(clients, dim, tile, quick)
    # Steps that suit 50 parameters, too: E|a|² = d.
    plan = cases.plan("linear", schedule, steps, gamma0=min(0.5, 1.0 / dim))
    model, path = numpy_baseline.Model.of(problem), numpy_baseline.Path.of(plan)
    settings = {"replications": tile, "tile_size": tile, "methods": methods}
    engine = functools.partial(simulate, jax.random.key(1), problem, plan, **settings)
    engine()
    rival = functools.partial(numpy_baseline.run, model, path, tile, 1)
    times = interleaved({"engine": engine, "NumPy": rival}, 2 if quick else 5)
    case = f"K = {clients:,}, d = {dim}, {schedule}"
    work = tile * steps * clients / 1e6
    gain = ratio(times["NumPy"], times["engine"])
    findings = [finding(case, "engine over NumPy", gain, at_least=2.0)]
    findings += rates(case, work, {"engine": times["engine"]})
    return findings, {"steps": steps, "tile": tile, "seconds": times}


def table(
    clients: Sequence[int], dimensions: Sequence[int], schedules: Sequence[str], quick: bool
) -> tuple[list[Finding], dict[str, Any]]:
    """Run some of the sizes, on one core."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    cases.start(1)
    findings, raw = [], {}
    for K in clients:
        for dim in dimensions:
            for schedule in schedules:
                found, raw[f"K = {K}, d = {dim}, {schedule}"] = _case(K, dim, schedule, quick)
                findings += found
    return findings, raw


def run(quick: bool) -> tuple[list[Finding], dict[str, Any]]:
    """Run all sizes."""
    if quick:
        return table((1, 33), (2,), ("C5",), quick)
    return table(CLIENTS, DIMENSIONS, SCHEDULES, quick)


def main() -> None:
    """Print a part of the table."""
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sizes", description=__doc__)
    parser.add_argument("--clients", type=numbers, default=list(CLIENTS))
    parser.add_argument("--dimensions", type=numbers, default=list(DIMENSIONS))
    arguments = parser.parse_args()
    for found in table(arguments.clients, arguments.dimensions, SCHEDULES, quick=False)[0]:
        print(f"{found.case}: {found.what} {found.value:.3g} {found.unit}", flush=True)


if __name__ == "__main__":
    main()
