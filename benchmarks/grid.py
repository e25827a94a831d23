"""The paper's Table 4 as a grid of cells: as lanes, in turn on shared draws, one by one, and in NumPy.

All 20 cells (5 schedules, 4 horizons) see the same data. The horizons are an eighth of the paper's, so that
NumPy is done in time; shares of the work do not change with that.
"""

from __future__ import annotations

import functools
from typing import Any

from benchmarks import cases, numpy_baseline
from benchmarks.throughput import Processes
from benchmarks.timing import Finding, finding, interleaved, rates, ratio

SHARE = 8
# How cells are run: whether their draws are shared, and whether they go side by side.
WAYS = {
    "as lanes": {"shared_draws": True},
    "in turn, drawing once": {"shared_draws": True, "lanes": ()},
    "one by one": {"shared_draws": False},
}
OVER_ONE_BY_ONE = {"linear": 1.25, "logistic": 1.5}


def plans(name: str, quick: bool) -> list[Any]:
    """Return the plans of the 20 cells, or of two."""
    from jaxlsgd.report.paper.printed import HORIZONS
    from jaxlsgd.schedules import PAPER_SCHEDULES

    if quick:
        return [cases.plan(name, "C1", 100), cases.plan(name, "P(1/2)", 200)]
    return [cases.plan(name, s, steps // SHARE) for s in PAPER_SCHEDULES for steps in HORIZONS]


def engine(name: str, quick: bool, devices: list[Any], way: str) -> None:
    """Run the grid as a study does, or in another way; tiles go to whichever device is free."""
    import jax

    from jaxlsgd.runs.cell import Cell
    from jaxlsgd.runs.simulate import on_devices, run_cells

    cells = [Cell(cases.problem(name), plan, cases.both_methods()) for plan in plans(name, quick)]
    key = jax.random.key(1)
    size = 32 if quick else cases.TILE
    firsts = range(0, 64 if quick else cases.REPLICATIONS, size)

    def job(device: Any, first: int, chosen: list[Any]) -> None:
        how: Any = WAYS[way]
        for _ in run_cells(key, chosen, first, size, device, **how):
            pass

    groups = [cells] if WAYS[way]["shared_draws"] else [[cell] for cell in cells]
    jobs = [functools.partial(job, first=f, chosen=group) for group in groups for f in firsts]
    on_devices(jobs, devices)


def rival(name: str, quick: bool, numpy: Processes) -> None:
    """Run the grid in NumPy, all cores at each cell."""
    model = numpy_baseline.Model.of(cases.problem(name))
    for plan in plans(name, quick):
        count = 64 if quick else cases.REPLICATIONS
        numpy.run(model, numpy_baseline.Path.of(plan), count, 1)


def run(quick: bool) -> tuple[list[Finding], dict[str, Any]]:
    """Run both problems."""
    devices = cases.start()
    numpy = Processes(len(devices))
    findings, raw = [], {}
    try:
        for name in cases.PROBLEMS:
            case = f"{name}, Table 4's grid"
            jobs = {way: functools.partial(engine, name, quick, devices, way) for way in WAYS}
            for job in jobs.values():
                job()
            jobs["NumPy"] = functools.partial(rival, name, quick, numpy)
            raw[case] = times = interleaved(jobs, 2 if quick else 3)
            steps = sum(plan.num_steps for plan in plans(name, quick))
            work = steps * 10 * (64 if quick else cases.REPLICATIONS) / 1e6
            findings += rates(case, work, times)
            least = {"NumPy": 6.0, "one by one": OVER_ONE_BY_ONE[name]}
            for label in (label for label in times if label != "as lanes"):
                gain = ratio(times[label], times["as lanes"])
                what = f"as lanes over {label}" + (", both on all cores" * (label == "NumPy"))
                findings.append(finding(case, what, gain, at_least=least.get(label)))
    finally:
        numpy.close()
    return findings, {"seconds": raw}
