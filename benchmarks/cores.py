"""One core against all cores, each in a process that may use no others."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

from benchmarks import cases, throughput
from benchmarks.timing import Finding, Spread, finding, interleaved, ratio, seconds, worker


def make(cores: tuple[int, ...], name: str, schedule: str, sizes: dict[str, int]) -> Callable:
    """A job on the given cores, one device each, compiled; in a process of its own."""
    os.sched_setaffinity(0, cores)
    cases.start()

    def job() -> float:
        return seconds(lambda: cases.simulate(name, schedule, **sizes))

    job()
    return job


def make_floor(cores: tuple[int, ...], name: str, sizes: dict[str, int]) -> Callable:
    """The same draws alone, which share nothing but the processor: what the machine itself allows."""
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
    """Both problems under both schedules, on 1 and on all cores."""
    all_cores = tuple(sorted(os.sched_getaffinity(0)))
    sizes = {"num_steps": 200, "replications": 64, "tile_size": 32}
    if not quick:
        sizes = {"num_steps": 2_000, "replications": cases.REPLICATIONS, "tile_size": cases.TILE}
    findings, raw = [], {}
    for name in cases.PROBLEMS:
        for schedule in cases.SCHEDULES:
            case = f"{name}, {schedule}"
            with contextlib.ExitStack() as stack:
                jobs = {
                    label: stack.enter_context(worker(make, cores, name, schedule, sizes))
                    for label, cores in (("one", all_cores[:1]), ("all", all_cores))
                }
                raw[case] = times = interleaved(jobs, 2 if quick else 7)
            gain = ratio(times["one"], times["all"])
            # 1.7 is asked of two cores; of more, the same loss at every doubling.
            asked = None if len(all_cores) == 1 else 0.85 * len(all_cores)
            what = f"all {len(all_cores)} cores over one"
            findings.append(finding(case, what, gain, at_least=asked))
            work = sizes["replications"] * sizes["num_steps"] * 10 / 1e6
            for label, each in times.items():
                rate = Spread.of([work / t for t in each])
                findings.append(
                    finding(case, f"{label} core(s)", rate, "million client-steps per second")
                )
    for name in cases.PROBLEMS:
        with contextlib.ExitStack() as stack:
            jobs = {
                label: stack.enter_context(worker(make_floor, cores, name, sizes))
                for label, cores in (("one", all_cores[:1]), ("all", all_cores))
            }
            times = interleaved(jobs, 2 if quick else 7)
        what = f"all {len(all_cores)} cores over one"
        findings.append(finding(f"{name}, drawing alone", what, ratio(times["one"], times["all"])))
    return findings, {"sizes": sizes, "cores": len(all_cores), "seconds": raw}
