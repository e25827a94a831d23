"""How cost and memory grow with replications, clients, dimension, horizon and local steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks import cases
from benchmarks.timing import (
    Finding,
    exponent,
    finding,
    forget_peak,
    interleaved,
    peak_bytes,
    ratio,
    worker,
)


class Axis(NamedTuple):
    """One size that is varied while all others stay."""

    label: str
    values: Sequence[int]
    setting: Callable[[int], dict[str, Any]]  # arguments of `cases.simulate`
    linear: bool = True  # whether the target is an exponent of 0.9 to 1.1
    schedule: str = "P(1/2)"


STEP = 0.1  # γ_0 that no size makes diverge


def axes(quick: bool) -> list[Axis]:
    """Return what is varied, and over which values."""
    R = (64, 128) if quick else (250, 500, 1_000, 2_000, 4_000)
    K = (5, 10) if quick else (5, 10, 20, 30)
    d = (2, 5) if quick else (2, 5, 10, 20)
    steps = (100, 200) if quick else (1_000, 2_000, 4_000, 8_000)
    return [
        Axis("replications R", R, lambda n: {"replications": n, "tile_size": None}),
        Axis("clients K", K, lambda n: {"num_clients": n}),
        # Under P(1/2) rounds are not in proportion to steps, so that the target of linear cost is for C5.
        Axis("steps t_T", steps, lambda n: {"num_steps": n}, schedule="C5"),
        Axis("steps t_T, P(1/2)", steps, lambda n: {"num_steps": n}, linear=False),
        Axis("dimension d", d, lambda n: {"dim": n}, linear=False),
    ]


def _job(quick: bool, schedule: str = "P(1/2)", **changes: Any) -> Callable[[], Any]:
    settings = {"num_steps": 1_000, "gamma0": STEP}
    if quick:
        settings |= {"num_steps": 100, "replications": 64, "tile_size": 32}
    settings |= changes
    return functools.partial(cases.simulate, "linear", schedule, **settings)


def _times(jobs: dict[str, Callable[[], Any]], quick: bool) -> dict[str, list[float]]:
    for job in jobs.values():
        job()
    return interleaved(jobs, 2 if quick else 5)


def _exponents(quick: bool) -> tuple[list[Finding], dict[str, Any]]:
    findings, raw = [], {}
    for axis in axes(quick):
        jobs = {str(n): _job(quick, axis.schedule, **axis.setting(n)) for n in axis.values}
        raw[axis.label] = times = _times(jobs, quick)
        target = {"at_least": 0.9, "at_most": 1.1} if axis.linear else {}
        slope = exponent(axis.values, list(times.values()))
        case = f"linear, {axis.schedule}, {axis.values[0]} to {axis.values[-1]:,}"
        findings.append(finding(case, f"time against {axis.label}", slope, "exponent", **target))
    return findings, raw


def _local_steps(quick: bool) -> tuple[list[Finding], dict[str, Any]]:
    """Run the same number of steps in rounds of E: what a synchronisation costs."""
    values = (1, 8) if quick else (1, 2, 4, 8, 16, 32, 64)
    jobs = {f"C{E}": _job(quick, f"C{E}") for E in values}
    times = _times(jobs, quick)
    last = f"C{values[-1]}"
    findings = [
        finding(f"linear, E = {name[1:]}", f"time over E = {last[1:]}", ratio(each, times[last]))
        for name, each in times.items()
        if name != last
    ]
    return findings, times


def memory_job(replications: int, tile: int, steps: int) -> Callable[[], int]:
    """Run once in a process of its own; the job returns how far its memory rose."""
    cases.start(1)
    cases.simulate("linear", "P(1/2)", steps, replications=16, tile_size=16)
    before = forget_peak()
    cases.simulate("linear", "P(1/2)", steps, replications=replications, tile_size=tile)
    return lambda: peak_bytes() - before


def _risen(replications: int, tile: int) -> int:
    # Twice: what the compiler needs would hide the rest, so that the second reads it from the cache.
    for _ in range(2):
        with worker(memory_job, replications, tile, 64) as peak:
            risen = peak()
    return risen


def _memory(quick: bool) -> tuple[list[Finding], dict[str, Any]]:
    """Measure peak memory beyond a small run, for wide tiles, and for many tiles of one width."""
    from jaxlsgd.engine.cost import tile_bytes

    # Differences of two sizes, because loading programs and starting threads take memory as well.
    few, many = (1_024, 4_096) if quick else (4_096, 16_384)
    problem, methods = cases.problem("linear"), cases.both_methods()
    risen = [_risen(n, n) for n in (few, many)]
    predicted = tile_bytes(problem, methods, many) - tile_bytes(problem, methods, few)
    tiles = [_risen(n, few) for n in (few, 16 * few)]
    findings = [
        finding(
            f"linear, tiles of {few:,} and {many:,}",
            f"memory between them over the prediction of {predicted / 2**20:.0f} MiB",
            (risen[1] - risen[0]) / predicted,
        ),
        # A library call keeps the rows of every replication, in float64; a study writes them away.
        finding(
            f"linear, 1 and 16 tiles of {few:,}",
            "memory of each replication in further tiles",
            (tiles[1] - tiles[0]) / (15 * few),
            "bytes",
        ),
    ]
    return findings, {"one tile": risen, "many tiles": tiles}


def masked_shares() -> list[Finding]:
    """Count the local steps that are computed and thrown away, under the paper's schedules."""
    from jaxlsgd.engine.layout import lay_out
    from jaxlsgd.schedules import PAPER_SCHEDULES

    found = []
    for name in PAPER_SCHEDULES:
        made = lay_out(cases.plan("linear", name, 40_000))
        share = 100 * (1 - made.steps / made.drawn)
        found.append(finding(f"{name}, t_T = 40,000", "masked steps", share, "%", at_most=12))
    return found


def run(quick: bool) -> tuple[list[Finding], dict[str, Any]]:
    """Measure exponents, the price of a round, memory, masked steps."""
    cases.start()
    findings, raw = _exponents(quick)
    rounds, raw["local steps E"] = _local_steps(quick)
    memory, raw["bytes"] = _memory(quick)
    return findings + rounds + memory + masked_shares(), raw
