"""The price of each interval method and mode, over random scaling in its diagonal mode."""

from __future__ import annotations

import functools
from typing import Any

from benchmarks import cases
from benchmarks.timing import Finding, finding, interleaved, ratio

BASE, BOTH = "random scaling, diagonal", "random scaling and plug-in"


@functools.cache
def methods() -> dict[str, tuple[Any, ...]]:
    """Return what is compared, made once so that repeats compile nothing."""
    from jaxlsgd import one_step, plug_in, random_scaling

    contrasts = [[1.0, -1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, -1.0, 0.0]]
    return {
        BASE: (random_scaling(mode="diagonal"),),
        "random scaling, full": (random_scaling(mode="full"),),
        "random scaling, 2 contrasts": (random_scaling(contrasts=contrasts),),
        "plug-in": (plug_in(),),
        "plug-in, finite horizon": (plug_in("finite"),),
        BOTH: (random_scaling(), plug_in()),
        "one-step": (one_step(),),
        "random scaling, finite horizon": (random_scaling("finite"),),
    }


def run(quick: bool) -> tuple[list[Finding], dict[str, Any]]:
    """Run both problems under both schedules."""
    cases.start()
    steps, settings = 2_000, {}
    if quick:
        steps, settings = 100, {"replications": 64, "tile_size": 32}
    findings, raw = [], {}
    for name in cases.PROBLEMS:
        for schedule in cases.SCHEDULES:
            case = f"{name}, {schedule}"
            jobs = {
                label: functools.partial(
                    cases.simulate, name, schedule, steps, methods=chosen, **settings
                )
                for label, chosen in methods().items()
            }
            for job in jobs.values():
                job()
            raw[case] = times = interleaved(jobs, 2 if quick else 7)
            for label, each in times.items():
                # Only this one has a target.
                bound = 1.25 if label == "random scaling, full" else None
                price = ratio(each, times[BASE])
                if label == "one-step":
                    over_both = ratio(each, times[BOTH])
                    findings.append(finding(case, f"one-step, over {BOTH}", over_both, at_most=1.3))
                if label != BASE:
                    findings.append(finding(case, f"{label}, over diagonal", price, at_most=bound))
    return findings, {"num_steps": steps, "seconds": raw}
