"""A study tried for a few seconds, to tell what all of it will take: programs, tiles, tables, and the start.

Of each kind of program the first job is run with fewer steps, on all devices at once as in the study: twice,
for the second run compiles nothing; longer, for what a step takes and what is the same for every job; and with
its tables forgotten. What a trial compiles is kept for the study.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxlsgd.core import tables
from jaxlsgd.core.estimator import Horizon
from jaxlsgd.study import compute, jobs
from jaxlsgd.study.compute import Tabulated
from jaxlsgd.study.grid import CellSpec
from jaxlsgd.study.jobs import Job, Tile, stepping
from jaxlsgd.study.parts import Extent
from jaxlsgd.study.spec import Study
from jaxlsgd.study.store import codec

START = 3.0  # seconds: the interpreter, JAX and the package, where they cannot be measured
_START = "import jax, jaxlsgd.cli, jaxlsgd.study.compute; jax.local_devices()"
_COMMITS, _TILE = 5, bytes(50_000)
_STEPS = 128  # of the first trial
_MOST_WORK = 100_000_000  # client-steps of it: a few seconds on one core
_LONG = 1.0  # seconds that the longer one should take
_MOST_KINDS = 4  # that are tried; the rest are taken to be like them


class Times(NamedTuple):
    """Seconds that a study takes here."""

    start: float
    programs: float  # compiled, or read from the cache
    tiles: float
    tables: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)


class Trial(NamedTuple):
    """Seconds of one kind of program."""

    work: float  # per client-step on one device
    reading: float  # per cell and saved round, on one device
    programs: float  # before the first tile
    length: float  # per further length that a plan is padded to at a saved round
    table: float  # per plan and saved round, the first time


def measured(study: Study, devices: Sequence[Any], count: int) -> Times:
    """What a study will take on `count` devices like those here, by trial."""
    began = time.perf_counter()
    compute.check(study)
    checked = time.perf_counter() - began
    ranges = jobs.grouped((Tile(cell, 0) for cell in study.cells), workers=1)
    kinds: dict[Any, list[Job]] = {}
    for job in ranges:
        kinds.setdefault(jobs.program_kind(job[0].cell), []).append(job)
    order = sorted(kinds.values(), key=lambda group: -sum(map(_work, group)))
    trials = [_trial(group[0], devices) for group in order[:_MOST_KINDS]]
    typical = Trial(*(sum(column) / len(trials) for column in zip(*trials, strict=True)))
    trials += [typical] * (len(order) - len(trials))
    busy = min(count, len(study.cells) * study.tiles_per_cell)
    return Times(
        _start() + checked,
        sum(map(_programs, trials, order)),
        _commit() * len(study.cells) * study.tiles_per_cell
        + study.tiles_per_cell * sum(map(_seconds, trials, order)) / busy,
        sum(trial.table * _readings(group) for trial, group in zip(trials, order, strict=True)),
    )


def _start() -> float:
    """What the interpreter, JAX and the package take to start, in a process that does nothing else."""
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", _START], capture_output=True, timeout=60)
    return time.perf_counter() - began if done.returncode == 0 else START


def _commit() -> float:
    """What it takes to put a tile on a disk."""
    with tempfile.TemporaryDirectory() as directory:
        began = time.perf_counter()
        for number in range(_COMMITS):
            codec.write_whole(Path(directory) / str(number), _TILE)
        return (time.perf_counter() - began) / _COMMITS


def _seconds(trial: Trial, group: list[Job]) -> float:
    """One range of replications of all jobs, on one device."""
    return trial.work * sum(map(_work, group)) + trial.reading * _readings(group)


def _programs(trial: Trial, group: list[Job]) -> float:
    return trial.programs + trial.length * (len(_all_lengths(group)) - 1)


def _all_lengths(group: list[Job]) -> set[int]:
    return {length for job in group for tile in job for length in _lengths(tile.cell)}


def _work(job: Iterable[Tile]) -> float:
    return float(sum(jobs.work(tile.cell) for tile in job))


def _readings(group: list[Job]) -> int:
    return sum(len(_saves(tile.cell)) for job in group for tile in job)


def _saves(cell: CellSpec) -> tuple[int, ...]:
    return cell.saved_rounds(cell.plan().num_rounds)


def _lengths(cell: CellSpec) -> set[int]:
    """What a cell's plans are padded to at its saved rounds: each is a program for what is measured."""
    plan = cell.plan()
    return {Horizon.of(plan.prefix(m)).E.size for m in _saves(cell)}


def _trial(job: Job, devices: Sequence[Any]) -> Trial:
    cell = job[0].cell
    per_step = stepping(cell.problem, cell.algorithm) * cell.tile_size
    job = job[: max(1, _MOST_WORK // (_STEPS * per_step))]
    longest = max(tile.cell.num_steps - 1 for tile in job)
    short, used = _shortened(job, min(_STEPS, longest)), tables.Rows()
    first, again = _run(short, devices, used), _run(short, devices, {})
    programs = _from_cache(short, devices, again)
    tables.forget(used)
    table = max(0.0, _run(short, devices, {}) - again) if used else 0.0
    long = _shortened(job, min(longest, int(_STEPS * min(16.0, max(2.0, _LONG / again)))))
    first_long = _run(long, devices, {})
    passed = min(_run(long, devices, {}) for _ in range(2))
    more, work = _work(long) - _work(short), _work(long)
    each = max((passed - again) / more, 0.2 * passed / work) if more else passed / work
    fresh = _all_lengths([long]) - _all_lengths([short])
    # Where no length is new, one takes about as much as the trial's measurements did.
    length = max(0.0, first_long - passed - table) / len(fresh) if fresh else 0.1 * (first - again)
    reading = max(0.0, passed - each * work) / len(job)
    plans = len({tile.cell.plan().digest for tile in short})
    return Trial(each, reading, programs, max(0.0, length), table / plans)


def _from_cache(job: Job, devices: Sequence[Any], again: float) -> float:
    """What the programs of a job take that another process has compiled."""
    import jax

    jax.clear_caches()
    return max(0.0, _run(job, devices, {}) - again)


def _shortened(job: Job, steps: int) -> Job:
    def brief(tile: Tile) -> Tile:
        extent = Extent("num_steps", min(steps, tile.cell.num_steps - 1))
        return Tile(dataclasses.replace(tile.cell, extent=extent, save_at=()), tile.first)

    return tuple(map(brief, job))


def _run(job: Job, devices: Sequence[Any], used: tables.Rows) -> float:
    """Wall time of a job on all devices at once."""
    from jaxlsgd.runs.simulation import on_devices

    def run(device: Any) -> None:
        for event in compute.run_job(job, device):
            if isinstance(event, Tabulated):
                used.update(event.rows)

    began = time.perf_counter()
    on_devices([run] * len(devices), devices)
    return time.perf_counter() - began
