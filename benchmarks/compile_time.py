"""Count the programs that the grid of the paper's Table 4 compiles, and the seconds, cold and cached.

Everything that its 20 cells compile is called once, on every device: the start of a tile, each kind
of block that they need as lanes, both measurements. No cell is run to its end.
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

from benchmarks import cases
from benchmarks.timing import Finding, Spread, finding, fresh


def prepare_grid(began: float) -> dict[str, Any]:
    """Compile, or read from the cache, what the grid needs, and count it. In a process of its own."""
    devices = cases.start()
    import jax

    from jaxlsgd.engine.lanes import run_lanes
    from jaxlsgd.report.paper.printed import HORIZONS
    from jaxlsgd.runs.simulate import on_devices
    from jaxlsgd.schedules import PAPER_SCHEDULES

    compiled: list[float] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, took, **_: compiled.append(took) if event.endswith(_COMPILED) else None
    )
    loaded: list[str] = []
    jax.monitoring.register_event_listener(
        lambda event, **_: loaded.append(event) if event.endswith("cache_hits") else None
    )
    imported = time.time() - began
    cells = [(name, steps) for name in PAPER_SCHEDULES for steps in HORIZONS]
    on_devices([lambda device: _touch(cells, device) for _ in devices], devices)
    return {
        "import_seconds": imported,
        "ready_seconds": time.time() - began,
        "programs": len(compiled) - len(loaded),
        "read_from_cache": len(loaded),
        "block_programs": run_lanes._cache_size(),  # pyright: ignore[reportFunctionMemberAccess]
        "compile_seconds": sum(compiled),
        "devices": len(devices),
    }


_COMPILED = "backend_compile_duration"


def _touch(cells: list[tuple[str, int]], device: Any) -> None:
    """Call once, on a device, every program that the cells need."""
    import jax
    import numpy as np

    from jaxlsgd.algorithms import local_sgd
    from jaxlsgd.engine import lanes, statistics
    from jaxlsgd.engine.block import start_tile
    from jaxlsgd.engine.cost import lane_widths
    from jaxlsgd.engine.draws import replication_keys, supply
    from jaxlsgd.engine.layout import lay_out_whole
    from jaxlsgd.engine.program import make_data, make_program

    problem, methods = cases.problem("logistic"), cases.both_methods()
    with jax.default_device(device):
        program = make_program(problem, methods, local_sgd(), shared_draws=True)
        data = jax.device_put(make_data(problem, "float32"), device)
        keys = jax.jit(lambda key: replication_keys(key, jax.numpy.arange(cases.TILE)))(
            jax.device_put(jax.random.key(1), device)
        )
        start, drawn = start_tile(program, data, cases.TILE), supply(program, data, keys, 0)
        plans = [cases.plan("logistic", schedule, steps) for schedule, steps in cells]
        layouts = [lay_out_whole(plan, (plan.num_rounds,)) for plan in plans]
        calls = {call.slots: call for layout in layouts for call in layout.calls}
        found = start.statistics
        widths = lane_widths(problem, methods, cases.TILE)
        for slots, width in sorted(lanes.kinds(program, layouts, widths)):
            state = lanes.stack_lanes((start,) * width)
            block = lanes.stack_blocks([calls[slots].block] * width)
            state = lanes.run_lanes(program, slots, data, drawn, state, block)
            found = lanes.lane_of(state.statistics, np.int32(0))
        for plan in plans:
            for method in methods:
                statistics.measure(program, data, found, method, plan)
        jax.block_until_ready(found)


def run(quick: bool) -> tuple[list[Finding], dict[str, Any]]:
    """Measure cold and cached in turn, each time in a fresh process with a fresh cache."""
    cold, warm = [], []
    for _ in range(1 if quick else 3):
        with tempfile.TemporaryDirectory() as cache:
            cold.append(fresh("compile_time", "prepare_grid", cache))
            warm.append(fresh("compile_time", "prepare_grid", cache))
    case = "Table 4: 5 schedules, 4 horizons"

    def spread(runs: list[dict[str, Any]], name: str) -> Spread:
        return Spread.of([one[name] for one in runs])

    kinds = max(one["block_programs"] for one in cold) / cold[0]["devices"]
    findings = [
        finding(case, "programs", cold[0]["programs"] / cold[0]["devices"], "", at_most=20),
        finding(case, "programs compiled, each for every device", cold[0]["programs"], ""),
        finding(case, "kinds of block programs", kinds, ""),
        finding(case, "cold: ready after", spread(cold, "ready_seconds"), "s", at_most=40),
        finding(case, "of which compiling", spread(cold, "compile_seconds"), "s"),
        finding(case, "from the cache: ready after", spread(warm, "ready_seconds"), "s", at_most=5),
        finding(case, "of which importing", spread(warm, "import_seconds"), "s"),
        finding(case, "programs compiled again", warm[0]["programs"], "", at_most=0),
    ]
    return findings, {"cold": cold, "cached": warm}
