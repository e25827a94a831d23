"""Studies of made-up rows, written through the store as a run would write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from study_helpers import missing, small

from jaxlsgd.core.rows import CellRows, MethodRows
from jaxlsgd.study import Study
from jaxlsgd.study.cells import CellSpec
from jaxlsgd.study.store.reader import Results
from jaxlsgd.study.store.writer import Writer

ENVIRONMENT = {"jax": "0", "platform": "cpu", "device_kind": "cpu", "xla_flags": ""}
TRUTH = np.array([0.1, 1 / 3])


def about(cell: CellSpec, truth: bool = True, truth_error: Any = None) -> CellRows:
    """What the engine would say of a cell."""
    plan = cell.plan()
    saves = cell.saved_rounds(plan)
    names = [method.name for method in cell.methods]
    steps = tuple(int(plan.ends[m - 1]) for m in saves)
    each = {name: 2 if name == "random_scaling" else 7 for name in names}
    return CellRows(
        problem=cell.problem.name,
        algorithm=cell.algorithm.name,
        schedule=cell.schedule.name,
        num_steps=plan.num_steps,
        num_rounds=plan.num_rounds,
        save_at=saves,
        steps_at=steps,
        levels=cell.levels,
        coordinates=dict.fromkeys(names, ("x[0]", "x[1]")),
        truth=dict.fromkeys(names, TRUTH if truth else None),
        standard_error={name: name == "plug_in" for name in names},
        labels={name: name.replace("_", "-") for name in names},
        methods={},
        numbers_sent={name: tuple(each[name] * m for m in saves) for name in names},
        sent_under_c1=tuple(2 * t for t in steps),
        truth_error={} if truth_error is None else dict.fromkeys(names, np.array(truth_error)),
    )


def rows(
    cell: CellSpec, first: int, failed: float = 0.0, scale: float = 1.0
) -> dict[str, MethodRows]:
    """Normal estimates; the first method's intervals are exact, each further one's a tenth shorter."""
    plan = cell.plan()
    saves = np.array(cell.saved_rounds(plan))
    rng = np.random.default_rng([first, plan.num_rounds, len(cell.schedule.name)])
    shape = (len(saves), cell.tile_size, 2)
    error = (1 / np.sqrt(saves))[:, None, None]
    estimate = TRUTH + error * rng.normal(size=shape)
    estimate[:, rng.random(cell.tile_size) < failed] = np.nan
    spread = scale * error * np.exp(0.05 * rng.normal(size=shape))
    critical = np.array([1.96 if level == 0.95 else 1.2816 for level in cell.levels])
    floored = np.zeros(shape[:2], bool)
    return {
        method.name: MethodRows(
            estimate,
            spread,
            0.9**i * spread[:, None] * critical[:, None, None],
            floored,
        )
        for i, method in enumerate(cell.methods)
    }


def write(
    directory: Path,
    study: Study | None = None,
    most: int = 10**9,
    truth: bool = True,
    truth_error: Any = None,
    **more: Any,
) -> Results:
    """Fills a study, up to so many tiles."""
    with Writer(directory, study or small(), ENVIRONMENT) as writer:
        for cell, first in missing(writer)[:most]:
            writer.describe(cell, about(cell, truth, truth_error))
            writer.commit(cell, first, rows(cell, first, **more))
    return Results(directory)


def large(cells: int, saves: int) -> Study:
    """A study of so many cells, 40 replications each, read at so many rounds."""
    problems = [
        {"kind": "linear", "dim": 2, "num_clients": 3, "name": f"linear-{i}"}
        for i in range(cells // 100)
    ]
    return small(
        problems=problems,
        schedules=["C1", "C5", "Log", "P(1/3)", "P(1/2)"],
        horizons=[40 + 10 * i for i in range(20)],
        methods=["plug_in", "random_scaling", "plug_in[finite]", "one_step"],
        replications=40,
        tile_size=40,
        save_at=saves,
    )
