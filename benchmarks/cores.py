"""One core against all cores, each in a process that may use no others."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable
from typing import Any

from benchmarks import cases, throughput
from benchmarks.timing import Finding, finding, interleaved, rates, ratio, seconds, worker


def make(cores: tuple[int, ...], name: str, schedule: str, sizes: dict[str, int]) -> Callable:
    """Return a compiled job on the given cores, one device each; in a process of its own."""
    os.sched_setaffinity(0, cores)
    cases.start()

    def job() -> float:
        return seconds(lambda: cases.simulate(name, schedule, **sizes))

    job()
    return job


def make_floor(cores: tuple[int, ...], name: str, sizes: dict[str, int]) -> Callable:
    """Return a job that makes the same draws alone, which share nothing but the processor."""
    os.sched_setaffinity(0, cores)
    devices = cases.start()
    shape = throughput.Sizes(
        sizes["num_steps"], sizes["replications"], sizes["tile_size"], repeats=1
    )
    blocks = -(-sizes["num_steps"] // throughput.block_steps())

    def job() -> float:
        return seconds(lambda: throughput.floor(cases.problem(name), blocks, shape, devices))

    job()
    return job


def run(quick: bool) -> tuple[list[Finding], dict[str, Any]]:
    """Run both problems under both schedules, on 1 and on all cores, and their draws alone."""
    all_cores = tuple(sorted(os.sched_getaffinity(0)))
    sizes = {"num_steps": 200, "replications": 64, "tile_size": 32}
    if not quick:
        sizes = {"num_steps": 2_000, "replications": cases.REPLICATIONS, "tile_size": cases.TILE}
    work = sizes["replications"] * sizes["num_steps"] * 10 / 1e6
    what = f"all {len(all_cores)} cores over one"
    # The target is 1.7 for two cores; for more, the same loss at every doubling.
    target = None if len(all_cores) == 1 else 0.85 * len(all_cores)

    def times_of(make: Callable, *arguments: Any) -> dict[str, list[float]]:
        with contextlib.ExitStack() as stack:
            jobs = {
                label: stack.enter_context(worker(make, cores, *arguments, sizes))
                for label, cores in (("one", all_cores[:1]), ("all", all_cores))
            }
            return interleaved(jobs, 2 if quick else 7)

    findings, raw = [], {}
    for name, schedule in itertools.product(cases.PROBLEMS, cases.SCHEDULES):
        case = f"{name}, {schedule}"
        raw[case] = times = times_of(make, name, schedule)
        findings.append(finding(case, what, ratio(times["one"], times["all"]), at_least=target))
        findings += rates(case, work, {f"{label} core(s)": each for label, each in times.items()})
    for name in cases.PROBLEMS:
        times = times_of(make_floor, name)
        findings.append(finding(f"{name}, drawing alone", what, ratio(times["one"], times["all"])))
    return findings, {"sizes": sizes, "cores": len(all_cores), "seconds": raw}
