"""Forecast of what a study takes: tiles, programs, memory, time, precision.

`forecast` and `memory` count from its description alone; `measured` runs short trials on the devices here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxlsgd.core import checks
from jaxlsgd.core.checks import Dtype
from jaxlsgd.core.estimator import Horizon
from jaxlsgd.engine import cost, machine
from jaxlsgd.engine.layout import BLOCK_STEPS
from jaxlsgd.engine.program import loop_for
from jaxlsgd.inference.laws import tables
from jaxlsgd.runs.simulate import Device, on_devices
from jaxlsgd.study.cells import CellSpec
from jaxlsgd.study.errors import SpecError
from jaxlsgd.study.jobs import (
    Job,
    Tabulated,
    Tile,
    check,
    grouped,
    job_bytes,
    program_kind,
    run_job,
    stepping,
    work,
)
from jaxlsgd.study.parts import Extent, Part
from jaxlsgd.study.store import files
from jaxlsgd.study.study import Study

PROGRAM = 2.0  # seconds to compile one
# Bytes of host memory besides arrays, fitted to the peaks of 15 processes, 420 to 4,700 MB, that ran ten kinds of
# small studies on one or two CPU devices with nothing compiled before. The forecast was 0.81 to 1.23 times the peak.
# With two threads of one device it was 1.25 and 1.37 times (the study of `init`, and the paper's).
PROCESS_BYTES = 300_000_000  # the interpreter, JAX and its compiler
PROGRAM_BYTES = 50_000_000  # a block program, compiled for one device
METHOD_BYTES = 10_000_000  # a method's program that reads its intervals, compiled for one device
EQUATION_BYTES = 75_000  # besides, for each operation in it


class Forecast(NamedTuple):
    """Counts of a study."""

    cells: int
    tiles: int
    programs: int  # compiled block programs
    job_bytes: int  # of the largest job: tiles that share their draws
    work: float  # client-steps of all tiles, at full width
    idle_share: float  # of the work, for replications beyond those of the study

    def times(self, rate: float, devices: int) -> Times:
        """Return the times at a rate in client-steps per second per device; `measured` is more exact."""
        tiles = self.work / rate / min(devices, self.tiles)
        return Times(START, PROGRAM * self.programs, tiles, 0.0)


class Memory(NamedTuple):
    """Bytes that a study needs on one machine."""

    process: int  # the interpreter, JAX and its compiler
    programs: int  # compiled, for all devices
    arrays: int  # of the largest job, on each device that is busy
    reading: (
        int  # to read the intervals of a method, of one tile at a time on any number of devices
    )
    rows: int  # of the largest job, on the host, for each device that is busy
    writing: int  # of the tile that is encoded, and the first read back
    devices: int  # that are busy
    shared: bool  # whether the devices' memory is the host's, as it is on a CPU

    @property
    def host(self) -> int:
        """Memory of the host."""
        each = self.rows + (self.arrays if self.shared else 0)
        once = self.writing + (self.reading if self.shared else 0)
        return self.process + self.programs + once + self.devices * each

    @property
    def device(self) -> int:
        """Memory of each device that does not share the host's."""
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
    """Bytes that are available; None if unknown."""

    host: int | None
    device: int | None = None  # of each device with memory of its own

    @staticmethod
    def of(device: Device) -> Room:
        """Return the memory of this machine and of a device of it."""
        return Room(machine.memory(), machine.device_memory(device))

    def lacks(self, need: Memory, slack: float = 1.0) -> str:
        """Return in words what does not fit; "" if everything does, or nothing is known.

        Args:
          need: what is needed, by forecast.
          slack: how many times what is available the forecast may be.
        """
        if self.host is not None and need.host > slack * self.host:
            return f"needs about {_megabytes(need.host)}, this machine has {_megabytes(self.host)}"
        if self.device is not None and need.device > slack * self.device:
            each = f"needs about {_megabytes(need.device)} on each device"
            return f"{each}, which has {_megabytes(self.device)}"
        return ""


# A run is refused only if it cannot fit, even if the forecast is too high by this factor; `plan` warns before that.
FORECAST_ERROR = 1.25


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"


def forecast(study: Study) -> Forecast:
    """Count the work of a study without running it."""
    tiles = study.tiles_per_cell
    total = sum(float(tiles * work(cell)) for cell in study.cells)
    jobs = grouped((Tile(cell, 0) for cell in study.cells), workers=1)
    largest = max(job_bytes(job) for job in jobs)
    idle = 1 - study.replications / (tiles * study.tile_size)
    count = len(_programs(study))
    return Forecast(len(study.cells), tiles * len(study.cells), count, largest, total, idle)


def memory(study: Study, devices: int, platform: str = "cpu") -> Memory:
    """Return the memory that a study needs on some devices of one machine.

    Args:
      study: the study.
      devices: how many there are.
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
    # Rows are there twice: as saved, and joined; as joined, and encoded.
    rows = 2 * max(sum(tile.cell.tile_bytes for tile in job) for job in jobs)
    writing = 2 * max(cell.tile_bytes for cell in study.cells)
    read = {(program_kind(cell), method): cell for cell in study.cells for method in cell.methods}
    found = [_reading(method, cell) for (_, method), cell in read.items()]
    each = PROGRAM_BYTES * len(programs)
    each += sum(METHOD_BYTES + EQUATION_BYTES * reading.equations for reading in found)
    reading = max(_beyond_steps(cell, platform) for cell in read.values())
    compiled = each if platform == "cpu" else busy * each  # see `machine.chosen`
    return Memory(PROCESS_BYTES, compiled, arrays, reading, rows, writing, busy, platform == "cpu")


def _beyond_steps(cell: CellSpec, platform: str) -> int:
    """Return the bytes that reading the intervals needs beyond those of the steps, which are free by then."""
    found = [_reading(method, cell) for method in cell.methods]
    free = job_bytes((Tile(cell, 0),), platform) - cell.tile_size * sum(one.kept for one in found)
    return max(0, cell.tile_size * max(one.bytes for one in found) - max(0, free))


def _reading(method: Part, cell: CellSpec) -> cost.ReadingCost:
    return _reading_of(method, cell.problem.fact("dim"), cell.dtype)


@functools.lru_cache(maxsize=4096)
def _reading_of(method: Part, dim: int, dtype: Dtype) -> cost.ReadingCost:
    try:
        return cost.reading_cost(method.built().made, dim, dtype)
    except Exception:  # of a user's own method: its cell fails with this error in the run
        return cost.ReadingCost(0, 0, 0)


def _beyond(job: Job, dense: bool) -> int:
    """Return the bytes that one tile at a time may need beyond `job_bytes`; see `cost.beyond_bytes`."""
    cell = job[0].cell
    made = tuple(method.built().made for method in cell.methods)
    parts = cell.problem.built().made, made, cell.dtype
    how = {"algorithm": cell.algorithm.built().made, "dense": dense}
    return cell.tile_size * cost.beyond_bytes(*parts, **how)


def _constants(job: Job) -> int:
    """Return the bytes of a problem's constants on a device."""
    leaves = jax.tree.leaves(job[0].cell.problem.built().made.clients)
    return (
        sum(int(np.prod(np.shape(leaf))) for leaf in leaves) * np.dtype(job[0].cell.dtype).itemsize
    )


def refuse_too_large(study: Study, devices: Sequence[Device]) -> None:
    """Refuse a study that does not fit in the memory of this machine, with advice on what would fit."""
    room, platform = Room.of(devices[0]), devices[0].platform
    need = memory(study, len(devices), platform)
    if lack := room.lacks(need, slack=FORECAST_ERROR):
        advice = what_fits(study, room, len(devices), platform)
        text = f"the study does not fit in memory: it {lack} ({need}); {advice}"
        raise SpecError(text, "study", "memory")


def what_fits(study: Study, room: Room, devices: int, platform: str = "cpu") -> str:
    """Return in words what to change so that a study fits.

    Fewer devices give the same rows, and so are proposed first. Another tile size is another study.
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


def _programs(study: Study) -> set[tuple[Any, int]]:
    """Return the block programs that are compiled, as kind and room."""
    blocks: dict[Any, np.ndarray] = {}  # distinct numbers of rounds that end in a block, by path
    programs = set()
    for cell in study.cells:
        path = cell.schedule, cell.extent
        if path not in blocks:
            blocks[path] = np.unique(np.bincount(cell.plan().ends // BLOCK_STEPS))
        rooms = loop_for("cpu", cell.problem.built().made, cell.algorithm.built().made).rooms
        sizes = np.array([*rooms, BLOCK_STEPS])
        found = sizes[np.searchsorted(sizes, np.minimum(blocks[path], BLOCK_STEPS))]
        programs |= {(program_kind(cell), room) for room in found.tolist()}
    return programs


def standard_error(level: float, replications: int) -> float:
    """Return the Monte-Carlo standard error √(p(1 − p)/n) of a coverage near p."""
    return math.sqrt(level * (1 - level) / replications)


def replications_for(level: float, error: float) -> int:
    """Return the replications that bring the standard error of a coverage near `level` down to `error`."""
    checks.number("error", error, "be a number greater than 1e-9", 1e-9)
    return math.ceil(level * (1 - level) / error**2 - 1e-9)


START = 3.0  # seconds: the interpreter, JAX and the package, if they cannot be measured
_START = "import jax, jaxlsgd.cli, jaxlsgd.study.jobs; jax.local_devices()"
_COMMITS, _TILE = 5, bytes(50_000)
_STEPS = 128  # of the first trial
_MOST_WORK = 100_000_000  # client-steps of it: a few seconds on one core
_LONG = 1.0  # seconds that the longer one should take
_MOST_KINDS = 4  # that are tried; the others are taken to be like them
# Trials take no longer than this, nor than a share of what they forecast: the first program is compiled and run twice
# whatever it takes, as the study needs it anyway, and what is then left of the time is spent on the rest.
MOST_SECONDS, _MOST_SHARE = 10.0, 0.1
_LOADED = 0.1  # of the time to compile a program, to read it from the cache, if that is not tried


class Times(NamedTuple):
    """Seconds that a study takes here."""

    start: float
    programs: float  # compiled, or read from the cache
    tiles: float
    tables: float

    @property
    def total(self) -> float:
        """Seconds from start to end."""
        return sum(self)


class Trial(NamedTuple):
    """Seconds of one kind of program."""

    work: float  # per client-step on one device
    reading: float  # per cell and saved round, on one device
    programs: float  # before the first tile
    length: float  # per further length that a plan is padded to at a saved round
    table: float  # per plan and saved round, the first time
    first: float  # that the first run took


class _Allowance:
    """Seconds that trials may still take."""

    def __init__(self, most: float | None) -> None:
        self.left = math.inf if most is None else most

    def of_forecast(self, seconds: float) -> None:
        """Take no more than a share of a first forecast."""
        if self.left < math.inf:
            self.left = min(self.left, _MOST_SHARE * seconds)

    def run(self, job: Job, devices: Sequence[Device], used: tables.Rows) -> float:
        """Return the time of a job, and spend it."""
        passed = _run(job, devices, used)
        self.left -= passed
        return passed


def measured(
    study: Study, devices: Sequence[Device], count: int, most: float | None = MOST_SECONDS
) -> Times:
    """Estimate the times of a study on `count` devices like those here from short trials.

    Args:
      study: the study.
      devices: where to try.
      count: how many devices the study is to have.
      most: seconds that trials may take once the first program is compiled; they take no more than a tenth of what they
        forecast either. Kinds of programs that were not tried are taken to be like the others. None for no limit.
    """
    began = time.perf_counter()
    check(study)
    checked = time.perf_counter() - began
    kinds: dict[Any, list[Job]] = {}
    for job in grouped((Tile(cell, 0) for cell in study.cells), workers=1):
        kinds.setdefault(program_kind(job[0].cell), []).append(job)
    order = sorted(kinds.values(), key=lambda group: -sum(map(_work, group)))
    busy = min(count, len(study.cells) * study.tiles_per_cell)
    total = study.tiles_per_cell * sum(_work(job) for group in order for job in group)
    allowance, trials = _Allowance(most), []
    for group in order[:_MOST_KINDS]:
        if not trials or allowance.left > trials[0].first:
            trials.append(_trial(group[0], devices, allowance, None if trials else total / busy))
    typical = Trial(*(sum(column) / len(trials) for column in zip(*trials, strict=True)))
    trials += [typical] * (len(order) - len(trials))
    return Times(
        _start() + checked,
        sum(map(_program_seconds, trials, order)),
        _commit() * len(study.cells) * study.tiles_per_cell
        + study.tiles_per_cell * sum(map(_tile_seconds, trials, order)) / busy,
        sum(trial.table * _readings(group) for trial, group in zip(trials, order, strict=True)),
    )


def _start() -> float:
    """Return the seconds that a process takes to start, with JAX and the package."""
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", _START], capture_output=True, timeout=60)
    return time.perf_counter() - began if done.returncode == 0 else START


def _commit() -> float:
    """Return the seconds that it takes to write a tile to the disk."""
    with tempfile.TemporaryDirectory() as directory:
        began = time.perf_counter()
        for number in range(_COMMITS):
            files.write_whole(Path(directory) / str(number), _TILE)
        return (time.perf_counter() - began) / _COMMITS


def _tile_seconds(trial: Trial, group: list[Job]) -> float:
    """Return the seconds of one range of replications of all jobs, on one device."""
    return trial.work * sum(map(_work, group)) + trial.reading * _readings(group)


def _program_seconds(trial: Trial, group: list[Job]) -> float:
    return trial.programs + trial.length * (len(_all_lengths(group)) - 1)


def _all_lengths(group: list[Job]) -> set[int]:
    return {length for job in group for tile in job for length in _lengths(tile.cell)}


def _work(job: Iterable[Tile]) -> float:
    return float(sum(work(tile.cell) for tile in job))


def _readings(group: list[Job]) -> int:
    cells = [tile.cell for job in group for tile in job]
    return sum(len(cell.saved_rounds(cell.plan())) for cell in cells)


def _lengths(cell: CellSpec) -> set[int]:
    """Return the lengths that plans are padded to at the saved rounds of a cell: each is a program to compile."""
    plan = cell.plan()
    return {Horizon.of(plan.prefix(m)).E.size for m in cell.saved_rounds(plan)}


def _trial(
    job: Job, devices: Sequence[Device], allowance: _Allowance, total: float | None
) -> Trial:
    """Time a job shortened twice, to separate the time per step from that per tile; once, if there is no time left.

    Args:
      job: what to run.
      devices: where.
      allowance: the time.
      total: of the first trial, the work of the study per device, from which the time that trials may take is found.
    """
    cell = job[0].cell
    per_step = stepping(cell.problem, cell.algorithm) * cell.tile_size
    job = job[: max(1, _MOST_WORK // (_STEPS * per_step))]
    longest = max(tile.cell.num_steps - 1 for tile in job)
    short, used = _shortened(job, min(_STEPS, longest)), tables.Rows()
    first = (allowance.run if total is None else _run)(short, devices, used)
    again = _run(short, devices, {})
    rough = again / _work(short)
    if total is not None:
        allowance.of_forecast(rough * total)
    each, reading, overhead, fresh = rough, 0.0, 0.1 * (first - again), set[int]()
    steps = min(longest, int(_STEPS * min(16.0, max(2.0, _LONG / again))))
    if allowance.left > 3 * again * steps / _STEPS:
        long = _shortened(job, steps)
        first_long = allowance.run(long, devices, {})
        passed = min(allowance.run(long, devices, {}) for _ in range(2))
        more, whole = _work(long) - _work(short), _work(long)
        each = max((passed - again) / more, 0.2 * passed / whole) if more else passed / whole
        reading = max(0.0, passed - each * whole) / len(job)
        fresh = _all_lengths([long]) - _all_lengths([short])
        overhead = first_long - passed if fresh else overhead
    programs, table = _LOADED * max(0.0, first - again), 0.0
    if used and allowance.left > again:
        tables.forget(used)
        table = max(0.0, allowance.run(short, devices, {}) - again)
    if allowance.left > again + programs:
        jax.clear_caches()
        programs = max(
            0.0, allowance.run(short, devices, {}) - again
        )  # as another process has them
    # If no length is new, a further one is taken to need a tenth of the first run's overhead.
    length = max(0.0, overhead - table) / len(fresh) if fresh else max(0.0, overhead)
    plans = len({tile.cell.plan().digest for tile in short})
    return Trial(each, reading, programs, length, table / plans, first)


def _shortened(job: Job, steps: int) -> Job:
    def brief(tile: Tile) -> Tile:
        extent = Extent("num_steps", min(steps, tile.cell.num_steps - 1))
        return Tile(dataclasses.replace(tile.cell, extent=extent, save_at=()), tile.first)

    return tuple(map(brief, job))


def _run(job: Job, devices: Sequence[Device], used: tables.Rows) -> float:
    """Return the wall time of a job on all devices at once; collect the table rows that it used."""

    def run(device: Device) -> None:
        for event in run_job(job, device):
            if isinstance(event, Tabulated):
                used.update(event.rows)

    began = time.perf_counter()
    on_devices([run] * len(devices), devices)
    return time.perf_counter() - began
