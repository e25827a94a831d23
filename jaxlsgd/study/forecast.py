"""What a study will cost, from its description alone: tiles, programs, memory, time, precision."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxlsgd.core import checks
from jaxlsgd.engine import cost, machine
from jaxlsgd.engine.layout import BLOCK_STEPS
from jaxlsgd.engine.program import loop_for
from jaxlsgd.schedules import Plan
from jaxlsgd.study.errors import SpecError
from jaxlsgd.study.grid import CellSpec
from jaxlsgd.study.jobs import Job, Tile, grouped, job_bytes, program_kind, work
from jaxlsgd.study.parts import Part
from jaxlsgd.study.spec import Study
from jaxlsgd.study.trial import START, Times

PROGRAM = 2.0  # seconds to compile one
# Bytes of host memory besides arrays, from the peaks of 15 processes that ran ten kinds of small studies on one or
# two CPU devices with nothing compiled before: 420 to 4,700 MB, of which the forecast was 0.81 to 1.23 times.
PROCESS_BYTES = 300_000_000  # the interpreter, JAX and its compiler
PROGRAM_BYTES = 50_000_000  # a block program, compiled for one device
METHOD_BYTES = 10_000_000  # a method's program that reads its intervals, compiled for one device
EQUATION_BYTES = 75_000  # besides, for each operation in it


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


class Memory(NamedTuple):
    """Bytes that a study needs on one machine."""

    process: int  # the interpreter, JAX and its compiler
    programs: int  # compiled, for all devices
    arrays: int  # of the largest job, on each device that is busy
    reading: int  # to read the intervals of a method: of one tile at a time, whatever the devices
    rows: int  # of the largest job, on the host, for each device that is busy
    writing: int  # of the tile that is encoded, and the first read back
    devices: int  # that are busy
    shared: bool  # whether the devices' memory is the host's, as it is on a CPU

    @property
    def host(self) -> int:
        """All that is needed of the host's memory."""
        each = self.rows + (self.arrays if self.shared else 0)
        once = self.writing + (self.reading if self.shared else 0)
        return self.process + self.programs + once + self.devices * each

    @property
    def device(self) -> int:
        """All that is needed on each device with memory of its own."""
        return 0 if self.shared else self.arrays + self.reading

    def __str__(self) -> str:
        parts = [
            f"process and compiler {_megabytes(self.process)}",
            f"compiled programs {_megabytes(self.programs)}",
        ]
        for name, each in (("arrays", self.arrays), ("rows", self.rows)):
            parts.append(f"{name} {self.devices} × {_megabytes(each)}")
        once = ("reading intervals", self.reading), ("writing tiles", self.writing)
        return ", ".join(parts + [f"{name} {_megabytes(each)}" for name, each in once])


class Room(NamedTuple):
    """Bytes that there are; None if that is not known."""

    host: int | None
    device: int | None = None  # of each device with memory of its own

    @staticmethod
    def of(device: Any) -> Room:
        """The room on this machine and on a device of it."""
        return Room(machine.memory(), machine.device_memory(device))

    def lacks(self, need: Memory, slack: float = 1.0) -> str:
        """Return in words what does not fit; "" if all does, or nothing is known.

        Args:
          need: what is needed, by forecast.
          slack: how many times what is there the forecast may be.
        """
        if self.host is not None and need.host > slack * self.host:
            return f"needs about {_megabytes(need.host)}, this machine has {_megabytes(self.host)}"
        if self.device is not None and need.device > slack * self.device:
            each = f"needs about {_megabytes(need.device)} on each device"
            return f"{each}, which has {_megabytes(self.device)}"
        return ""


# The forecasts of ten studies were 0.81 to 1.23 of the memory that they took, so that a run is refused only if it
# cannot fit; `plan` warns before that.
FORECAST_ERROR = 1.25


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"


def forecast(study: Study) -> Forecast:
    """Counts a study without running it."""
    tiles = study.tiles_per_cell
    total = sum(float(tiles * work(cell)) for cell in study.cells)
    jobs = grouped((Tile(cell, 0) for cell in study.cells), workers=1)
    largest = max(job_bytes(job) for job in jobs)
    idle = 1 - study.replications / (tiles * study.tile_size)
    count = len(_programs(study))
    return Forecast(len(study.cells), tiles * len(study.cells), count, largest, total, idle)


def memory(study: Study, devices: int, platform: str = "cpu") -> Memory:
    """Predict what a study needs in memory on so many devices of a machine.

    Args:
      study: the study.
      devices: how many; no more are busy than there are tiles.
      platform: of the devices.
    """
    busy = min(devices, len(study.cells) * study.tiles_per_cell)
    jobs = grouped((Tile(cell, 0) for cell in study.cells), workers=1)
    programs = _programs(study)
    dense = {kind for kind, room in programs if room == BLOCK_STEPS}
    arrays = max(
        job_bytes(job, platform)
        + _constants(job)
        + (_beyond(job, program_kind(job[0].cell) in dense) if platform == "cpu" else 0)
        for job in jobs
    )
    rows = max(2 * sum(map(_row_bytes, job)) for job in jobs)  # as they are saved, and put together
    writing = 2 * max(_row_bytes(tile) for job in jobs for tile in job)
    read = {(program_kind(cell), method): cell for cell in study.cells for method in cell.methods}
    found = [_reading(method, cell) for (_, method), cell in read.items()]
    each = PROGRAM_BYTES * len(programs)
    each += sum(METHOD_BYTES + EQUATION_BYTES * reading.equations for reading in found)
    reading = max(_beyond_steps(cell, platform) for cell in read.values())
    return Memory(
        PROCESS_BYTES, busy * each, arrays, reading, rows, writing, busy, platform == "cpu"
    )


def _beyond_steps(cell: CellSpec, platform: str) -> int:
    """Bytes that reading the intervals of a tile needs beyond those of its steps, which are free by then."""
    found = [_reading(method, cell) for method in cell.methods]
    free = job_bytes((Tile(cell, 0),), platform) - cell.tile_size * sum(one.kept for one in found)
    return max(0, cell.tile_size * max(one.bytes for one in found) - max(0, free))


def _reading(method: Part, cell: CellSpec) -> cost.Reading:
    return _reading_of(method, cell.problem.fact("dim"), cell.dtype)


@functools.lru_cache(maxsize=4096)
def _reading_of(method: Part, dim: int, dtype: str) -> cost.Reading:
    try:
        return cost.reading(method.built().made, dim, dtype)
    except (
        Exception
    ):  # somebody's own method: its cell fails alone, with this error, when it is run
        return cost.Reading(0, 0, 0)


def _beyond(job: Job, dense: bool) -> int:
    """Bytes that one tile at a time may need beyond `job_bytes`; see `cost.beyond_bytes`."""
    cell = job[0].cell
    made = tuple(method.built().made for method in cell.methods)
    parts = cell.problem.built().made, made, cell.dtype
    how = {"algorithm": cell.algorithm.built().made, "dense": dense}
    return cell.tile_size * cost.beyond_bytes(*parts, **how)


def _constants(job: Job) -> int:
    """Bytes of a problem's numbers on a device."""
    leaves = jax.tree.leaves(job[0].cell.problem.built().made.clients)
    return (
        sum(int(np.prod(np.shape(leaf))) for leaf in leaves) * np.dtype(job[0].cell.dtype).itemsize
    )


def _row_bytes(tile: Tile) -> int:
    """Bytes of a tile's rows; see `Cell.row_bytes`."""
    cell, dim = tile.cell, tile.cell.problem.fact("dim")
    numbers = 8 * (2 + len(cell.levels))
    each = sum(numbers * max(dim, method.fact("contrasts")) + 2 for method in cell.methods)
    return cell.tile_size * (len(cell.save_at) + 1) * each


def refuse_too_large(study: Study, devices: Sequence[Any]) -> None:
    """Refuse a study that does not fit in the memory here, with what would; nothing has begun then."""
    room, platform = Room.of(devices[0]), devices[0].platform
    need = memory(study, len(devices), platform)
    if lack := room.lacks(need, slack=FORECAST_ERROR):
        advice = what_fits(study, room, len(devices), platform)
        raise SpecError(f"the study does not fit in memory: it {lack} ({need}); {advice}")


def what_fits(study: Study, room: Room, devices: int, platform: str = "cpu") -> str:
    """What to change so that a study fits, in words.

    The number of devices changes no row, and so comes first. The size of a tile is part of what a study
    is, and is never changed without being asked for.
    """
    for fewer in range(devices - 1, 0, -1):
        if not room.lacks(need := memory(study, fewer, platform)):
            change = f"--devices {fewer} (from Python: devices={fewer})"
            return f"{change} would need {_megabytes(need.host)}, for the same rows"
    size = study.tile_size // 2
    while size:
        smaller = dataclasses.replace(study, tile_size=size)
        if not room.lacks(need := memory(smaller, 1, platform)):
            where = "" if devices == 1 else " and --devices 1"
            return (
                f"tile_size = {size}{where} would need {_megabytes(need.host)}; fewer clients or "
                "parameters need less, too"
            )
        size //= 2
    return "not even one replication at a time fits: take fewer clients, parameters or methods"


def _programs(study: Study) -> set[Any]:
    """The kinds of block programs that are compiled."""
    blocks: dict[Any, np.ndarray] = {}  # distinct numbers of rounds that end in a block, by path
    programs = set()
    for cell in study.cells:
        path = cell.schedule, cell.extent
        if path not in blocks:
            blocks[path] = _rounds_in_blocks(cell.plan())
        rooms = loop_for("cpu", cell.problem.built().made, cell.algorithm.built().made).rooms
        programs |= {(program_kind(cell), room) for room in _rooms(blocks[path], rooms)}
    return programs


def _rounds_in_blocks(plan: Plan) -> np.ndarray:
    """How many rounds end in a block of a plan, each number once."""
    return np.unique(np.bincount(plan.ends // BLOCK_STEPS))


def _rooms(ends: np.ndarray, rooms: tuple[int, ...]) -> set[int]:
    """The kinds of blocks that a plan needs, by how many rounds end in a block."""
    sizes = np.array([*rooms, BLOCK_STEPS])
    return set(sizes[np.searchsorted(sizes, np.minimum(ends, BLOCK_STEPS))].tolist())


def standard_error(level: float, replications: int) -> float:
    """Monte-Carlo standard error √(p(1 − p)/n) of a coverage near p."""
    return math.sqrt(level * (1 - level) / replications)


def replications_for(level: float, error: float) -> int:
    """Replications that bring the standard error of a coverage near `level` down to `error`."""
    checks.number("error", error, "be a number greater than 1e-9", 1e-9)
    return math.ceil(level * (1 - level) / error**2 - 1e-9)
