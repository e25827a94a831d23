"""What a study will cost, from its description alone: tiles, programs, memory, time, precision."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from jaxlsgd.blocks import AHEAD_BYTES, BLOCK_STEPS, SLOTS
from jaxlsgd.schedules import Plan
from jaxlsgd.study.grid import Cell
from jaxlsgd.study.runner import program_kind
from jaxlsgd.study.spec import Study

RATE = 60e6  # client-steps a second a core, small problems, one recent x86 core


class Forecast(NamedTuple):
    """What to expect of a study."""

    cells: int
    tiles: int
    programs: int  # compiled block programs
    tile_bytes: int  # of the largest tile
    work: float  # client-steps of all tiles, at full width
    idle_share: float  # of the work beyond the replications asked for

    def seconds(self, rate: float, devices: int) -> float:
        """Time without compiling, at a rate in client-steps a second a device."""
        return self.work / rate / min(devices, self.tiles)


def forecast(study: Study) -> Forecast:
    """Counts a study without running it or importing jax."""
    tiles, work, programs = study.tiles_per_cell, 0.0, set()
    for cell in study.cells:
        plan = cell.plan()
        work += tiles * study.tile_size * (plan.num_steps + 1) * cell.problem.num_clients
        programs |= {(program_kind(cell), room) for room in _rooms(plan)}
    largest = max(tile_bytes(cell) for cell in study.cells)
    idle = 1 - study.replications / (tiles * study.tile_size)
    return Forecast(len(study.cells), tiles * len(study.cells), len(programs), largest, work, idle)


def _rooms(plan: Plan) -> set[int]:
    """The kinds of blocks that a plan needs, by how many rounds end in a block."""
    ends = np.bincount(plan.ends // BLOCK_STEPS)
    rooms = np.array([*SLOTS, BLOCK_STEPS])
    return set(rooms[np.searchsorted(rooms, np.minimum(ends, BLOCK_STEPS))].tolist())


def tile_bytes(cell: Cell) -> int:
    """Memory of one tile on its device: draws, the clients, and the statistics."""
    problem, item = cell.problem, 8 if cell.dtype == "float64" else 4
    d, K = problem.dim, problem.num_clients
    step = K * (d + 1) * 4  # the draws of a step, float32 in both precisions
    # Those of two steps: as they are used, made and handed on. Those of a block, where they are few.
    draws = 6 * step + (BLOCK_STEPS * step if BLOCK_STEPS * step <= AHEAD_BYTES else 0)
    clients = 2 * K * d * item  # parameters and gradients
    kinds = {method.kind for method in cell.methods}
    matrices = 3 * ("plug_in" in kinds) + ("random_scaling" in kinds)
    statistics = 2 * (matrices * d * d + 8 * d) * item  # old and new; plug-in: G, S, Hessian
    return (draws + clients + statistics) * cell.tile_size


def standard_error(level: float, replications: int) -> float:
    """Monte-Carlo standard error √(p(1 − p)/n) of a coverage near p."""
    return math.sqrt(level * (1 - level) / replications)


def replications_for(level: float, error: float) -> int:
    """Replications that bring the standard error of a coverage near `level` down to `error`."""
    return math.ceil(level * (1 - level) / error**2 - 1e-9)


def measure_rate(study: Study) -> float:
    """Client-steps a second of one tile of the first cell on one device, once it is compiled."""
    import dataclasses
    import time

    from jaxlsgd.study import build
    from jaxlsgd.study.parts import Extent

    cell = study.cells[0]
    steps = min(cell.plan().num_steps, 2_000)
    brief = dataclasses.replace(cell, extent=Extent("num_steps", steps), save_at=())
    build.compute(brief, 0)
    began = time.perf_counter()
    build.compute(brief, 0)
    work = (steps + 1) * cell.problem.num_clients * cell.tile_size
    return work / (time.perf_counter() - began)
