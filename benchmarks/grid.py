"""The paper's Table 4 as a grid of cells: together on shared draws, one by one, and in NumPy.

All 20 cells (5 schedules, 4 horizons) see the same data. The horizons are an eighth of the paper's, so that
NumPy is done in time; shares of the work do not change with that.
"""

from __future__ import annotations

import functools
from typing import Any

from benchmarks import cases, numpy_baseline
from benchmarks.throughput import Processes
from benchmarks.timing import Finding, Spread, finding, interleaved, ratio

SHARE = 8


def plans(name: str, quick: bool) -> list[Any]:
    """The plans of the 20 cells, or of two."""
    from jaxlsgd.report.paper.numbers import HORIZONS
    from jaxlsgd.schedules import PAPER_SCHEDULES

    if quick:
        return [cases.plan(name, "C1", 100), cases.plan(name, "P(1/2)", 200)]
    return [cases.plan(name, s, steps // SHARE) for s in PAPER_SCHEDULES for steps in HORIZONS]


def engine(name: str, quick: bool, devices: list[Any], together: bool) -> None:
    """Runs the grid; tiles go to whichever device is free."""
    import jax

    from jaxlsgd.runs.cell import Cell
    from jaxlsgd.runs.simulation import on_devices, run_cells

    cells = [Cell(cases.problem(name), plan, cases.both_methods()) for plan in plans(name, quick)]
    key = jax.random.key(1)
    size = 32 if quick else cases.TILE
    firsts = range(0, 64 if quick else cases.REPLICATIONS, size)

    def job(device: Any, first: int, chosen: list[Any]) -> None:
        for _ in run_cells(key, chosen, first, size, device, shared_draws=together):
            pass

    groups = [cells] if together else [[cell] for cell in cells]
    jobs = [functools.partial(job, first=f, chosen=group) for group in groups for f in firsts]
    on_devices(jobs, devices)


def rival(name: str, quick: bool, numpy: Processes) -> None:
    """The grid in NumPy, all cores at each cell."""
    model = numpy_baseline.Model.of(cases.problem(name))
    for plan in plans(name, quick):
        count = 64 if quick else cases.REPLICATIONS
        numpy.run(model, numpy_baseline.Path.of(plan), count, 1)


def run(quick: bool) -> tuple[list[Finding], dict[str, Any]]:
    """Both problems."""
    devices = cases.start()
    numpy = Processes(len(devices))
    findings, raw = [], {}
    try:
        for name in cases.PROBLEMS:
            case = f"{name}, Table 4's grid"
            jobs = {
                "together": functools.partial(engine, name, quick, devices, together=True),
                "one by one": functools.partial(engine, name, quick, devices, together=False),
                "NumPy": functools.partial(rival, name, quick, numpy),
            }
            for label in ("together", "one by one"):
                jobs[label]()
            raw[case] = times = interleaved(jobs, 2 if quick else 3)
            steps = sum(plan.num_steps for plan in plans(name, quick))
            work = steps * 10 * (64 if quick else cases.REPLICATIONS) / 1e6
            for label, each in times.items():
                rate = Spread.of([work / t for t in each])
                findings.append(finding(case, label, rate, "million client-steps per second"))
            gain = ratio(times["NumPy"], times["together"])
            findings += [
                finding(case, "together over NumPy, both on all cores", gain, at_least=4.0),
                finding(
                    case, "together over one by one", ratio(times["one by one"], times["together"])
                ),
            ]
    finally:
        numpy.close()
    return findings, {"seconds": raw}
