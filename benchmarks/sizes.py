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

CLIENTS, DIMENSIONS, SCHEDULES = (1, 2, 10, 33, 100, 1_000), (2, 5, 20, 50), ("C1", "C5", "P(1/2)")
LARGE, FEW = (1_000, 10_000), 10  # parameters of models that keep no matrices, and clients
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


def _one_core() -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    cases.start(1)


def _large_case(dim: int, kind: str, quick: bool) -> tuple[list[Finding], dict[str, Any]]:
    """Random scaling without matrices: of every parameter by itself, or of two contrasts."""
    import jax
    import numpy as np

    from jaxlsgd import random_scaling
    from jaxlsgd.engine.cost import default_tile, tile_bytes
    from jaxlsgd.runs.simulate import simulate

    problem = cases.problem("linear", dim, FEW)
    rows = np.ones((2, dim), np.float32) * np.array([[1], [-1]]) ** np.arange(dim) / dim
    rows = None if kind == "diagonal" else rows.astype(np.float32)
    method = random_scaling(mode="diagonal") if rows is None else random_scaling(contrasts=rows)
    tile = default_tile(problem, (method,))
    steps = 20 if quick else max(100, int(WORK / (8 * FEW * dim * tile)))
    plan = cases.plan("linear", "C5", steps, gamma0=1.0 / dim)
    model, path = numpy_baseline.Model.of(problem), numpy_baseline.Path.of(plan)
    settings = {"replications": tile, "tile_size": tile, "methods": (method,)}
    engine = functools.partial(simulate, jax.random.key(1), problem, plan, **settings)
    engine()
    rival = functools.partial(numpy_baseline.run_path, model, path, tile, 1, rows)
    times = interleaved({"engine": engine, "NumPy": rival}, 2 if quick else 5)
    case = f"K = {FEW}, d = {dim:,}, C5, random scaling, {kind}"
    findings = [finding(case, "engine over NumPy", ratio(times["NumPy"], times["engine"]))]
    findings += rates(case, tile * steps * FEW / 1e6, {"engine": times["engine"]})
    predicted, planned = tile_bytes(problem, (method,), tile), _planned(problem, method, tile)
    findings.append(finding(case, "memory of a tile", planned / 1e6, "MB"))
    findings.append(finding(case, "predicted over it", predicted / planned, at_most=1.5))
    return findings, {"steps": steps, "tile": tile, "seconds": times, "bytes": planned}


def _planned(problem: Any, method: Any, tile: int) -> int:
    """Return the bytes that the compiler plans for a block of steps."""
    import jax

    from jaxlsgd.engine.block import run_block, start_tile
    from jaxlsgd.engine.draws import Supply, replication_keys
    from jaxlsgd.engine.layout import lay_out
    from jaxlsgd.engine.program import make_data, make_program
    from jaxlsgd.runs.cell import LOCAL_SGD

    program = make_program(problem, (method,), LOCAL_SGD)
    data, plan = make_data(problem, "float32"), cases.plan("linear", "C5", 200, gamma0=0.1)
    call = lay_out(plan, None, program.rooms).groups[0][1]
    state = jax.eval_shape(lambda d: start_tile(program, d, tile), data)
    keys = jax.eval_shape(lambda: replication_keys(jax.random.key(0), jax.numpy.arange(tile)))
    lowered = run_block.lower(program, call.slots, data, Supply(keys, None), state, call.block)
    found = lowered.compile().memory_analysis()
    return found.argument_size_in_bytes + found.temp_size_in_bytes


def table(
    clients: Sequence[int], dimensions: Sequence[int], schedules: Sequence[str], quick: bool
) -> tuple[list[Finding], dict[str, Any]]:
    """Run some of the sizes, on one core."""
    _one_core()
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
        findings, raw = table((1, 33), (2,), ("C5",), quick)
    else:
        findings, raw = table(CLIENTS, DIMENSIONS, SCHEDULES, quick)
    more, large = large_table(LARGE[:1] if quick else LARGE, quick)
    return findings + more, raw | large


def large_table(dimensions: Sequence[int], quick: bool) -> tuple[list[Finding], dict[str, Any]]:
    """Run models with many parameters, on one core."""
    findings, raw = [], {}
    for dim in dimensions:
        for kind in ("diagonal", "contrasts"):
            found, raw[f"K = {FEW}, d = {dim}, {kind}"] = _large_case(dim, kind, quick)
            findings += found
    return findings, raw


def main() -> None:
    """Print a part of the table."""
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sizes", description=__doc__)
    parser.add_argument("--clients", type=numbers, default=list(CLIENTS))
    parser.add_argument("--dimensions", type=numbers, default=list(DIMENSIONS))
    parser.add_argument("--large", type=numbers, help="many parameters instead, without matrices")
    arguments = parser.parse_args()
    if arguments.large:
        _one_core()
        made = large_table(arguments.large, quick=False)
    else:
        made = table(arguments.clients, arguments.dimensions, SCHEDULES, quick=False)
    for found in made[0]:
        print(f"{found.case}: {found.what} {found.value:.3g} {found.unit}", flush=True)


if __name__ == "__main__":
    main()
