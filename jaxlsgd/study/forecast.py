"""What a study will cost, from its description alone: tiles, programs, memory, time, precision."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from jaxlsgd.core import checks
from jaxlsgd.engine.layout import BLOCK_STEPS
from jaxlsgd.engine.program import loop_for
from jaxlsgd.schedules import Plan
from jaxlsgd.study.jobs import Tile, grouped, job_bytes, program_kind, work
from jaxlsgd.study.spec import Study
from jaxlsgd.study.trial import START, Times

PROGRAM = 2.0  # seconds to compile one


class Forecast(NamedTuple):
    """What to expect of a study."""

    cells: int
    tiles: int
    programs: int  # compiled block programs
    job_bytes: int  # of the largest job: tiles that share their draws
    work: float  # client-steps of all tiles, at full width
    idle_share: float  # of the work beyond the replications asked for

    def times(self, rate: float, devices: int) -> Times:
        """What it takes at a rate in client-steps per second per device; `trial.measured` tells better."""
        tiles = self.work / rate / min(devices, self.tiles)
        return Times(START, PROGRAM * self.programs, tiles, 0.0)


def forecast(study: Study) -> Forecast:
    """Counts a study without running it."""
    tiles, total, programs = study.tiles_per_cell, 0.0, set()
    for cell in study.cells:
        plan = cell.plan()
        total += tiles * work(cell)
        kind = program_kind(cell)
        rooms = loop_for("cpu", cell.problem.built().made, cell.algorithm.built().made).rooms
        programs |= {(kind, room) for room in _rooms(plan, rooms)}
    jobs = grouped((Tile(cell, 0) for cell in study.cells), workers=1)
    largest = max(job_bytes(job) for job in jobs)
    idle = 1 - study.replications / (tiles * study.tile_size)
    return Forecast(len(study.cells), tiles * len(study.cells), len(programs), largest, total, idle)


def _rooms(plan: Plan, rooms: tuple[int, ...]) -> set[int]:
    """The kinds of blocks that a plan needs, by how many rounds end in a block."""
    ends = np.bincount(plan.ends // BLOCK_STEPS)
    sizes = np.array([*rooms, BLOCK_STEPS])
    return set(sizes[np.searchsorted(sizes, np.minimum(ends, BLOCK_STEPS))].tolist())


def standard_error(level: float, replications: int) -> float:
    """Monte-Carlo standard error √(p(1 − p)/n) of a coverage near p."""
    return math.sqrt(level * (1 - level) / replications)


def replications_for(level: float, error: float) -> int:
    """Replications that bring the standard error of a coverage near `level` down to `error`."""
    checks.number("error", error, "be a number greater than 1e-9", 1e-9)
    return math.ceil(level * (1 - level) / error**2 - 1e-9)
