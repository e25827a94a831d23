"""Run what is missing of a study: jobs go to an executor, finished tiles to the one writer.

Start at `run`; `_Run` takes the events of the executor one by one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxlsgd.analysis.failures import Tally
from jaxlsgd.core.checks import describe
from jaxlsgd.core.display import Table, Tabular, facts, plural
from jaxlsgd.core.progress import Progress, duration
from jaxlsgd.core.rows import MethodRows
from jaxlsgd.engine import machine
from jaxlsgd.inference.laws.tables import Rows
from jaxlsgd.runs.simulate import Device
from jaxlsgd.study import forecast, jobs
from jaxlsgd.study.array import ArrayPart
from jaxlsgd.study.cells import CellSpec
from jaxlsgd.study.executors.base import Event, Events, Executor, TileFailed
from jaxlsgd.study.executors.threads import Threads
from jaxlsgd.study.jobs import (
    Job,
    Tabulated,
    Tile,
    TileAdvanced,
    TileFinished,
    planned,
    program_kind,
    stepping,
    work,
)
from jaxlsgd.study.progress import Dropped, RunLog, SilentProgress, Stop, Totals, progress_of
from jaxlsgd.study.store.writer import Writer
from jaxlsgd.study.study import Study

DONE, FAILED, PARTIAL = 0, 1, 3


@dataclasses.dataclass(frozen=True)
class Outcome(Tabular):
    """How a run ended."""

    tiles_run: int
    tiles_left: int
    errors: dict[str, str]  # by cell id
    seconds: float
    tally: Tally = dataclasses.field(default_factory=Tally)  # of replications that failed
    lost: tuple[str, ...] = ()  # tiles that were there or committed, and are missing at the end
    signal: int = 0  # that dropped the tiles in flight; 0 if they were finished

    @property
    def exit_code(self) -> int:
        """0 if all rows are there, 1 if a cell failed or tiles are gone; if some are to come, 3, or 128 and
        the number of the signal that dropped those in flight (130 after two Ctrl-C)."""
        if self.errors or self.lost:
            return FAILED
        if not self.tiles_left:
            return DONE
        return 128 + self.signal if self.signal else PARTIAL

    def table(self) -> Table:
        """Return how the run ended, as a table; `print(outcome)` and a notebook show it."""
        failed = self.errors.items()
        lines = [
            ("tiles computed", f"{self.tiles_run:,}"),
            ("tiles to come", f"{self.tiles_left:,}"),
            ("tiles lost", f"{len(self.lost):,}" if self.lost else ""),
            ("runs that failed", self.tally.total()),
            ("time", duration(self.seconds)),
            *(
                (f"cell {cell} failed", why.strip().partition("\n")[0][:200])
                for cell, why in failed
            ),
        ]
        return facts("outcome", _word(self), lines)


def _word(outcome: Outcome) -> str:
    words = {DONE: "done", FAILED: "failed", PARTIAL: "partial"}
    return words.get(outcome.exit_code, f"partial, dropped by signal {outcome.signal}")


def run(
    study: Study,
    directory: str | os.PathLike[str],
    *,
    devices: int | Sequence[Device] | None = None,
    client: Any = None,
    part: ArrayPart | tuple[int, int] | str | None = None,
    max_time: float | None = None,
    progress: Progress | SilentProgress = None,
    stop: Stop | None = None,
    fresh: bool = False,
    allow_other_code: bool = False,
) -> Outcome:
    """Run a study in a directory, or what is missing of it there.

    Every tile is a pure function of its cell and its range, always run at full width, so that the
    rows are the same on one device or many, in any order, fresh or resumed.

    Args:
      study: what to run; more replications than before extend the study.
      directory: created if needed; refused if it holds another study.
      devices: how many of the default backend's devices to use, or a list of JAX devices; all if None.
      client: a `dask.distributed.Client`, whose workers then run the tiles instead of the devices here.
      part: which part of how many to run, such as (3, 20), in a directory of its own within `directory`. Array jobs run
        all parts without communication, and `collect` makes one study of them.
      max_time: seconds after which no further tile is started.
      progress: as for `simulate`: None shows it in a terminal or notebook, True everywhere, False nowhere, with
        warnings in Python's log; a function is called with the share that is done.
      stop: lets another thread, or a signal, end the run.
      fresh: refuse a directory that already holds a study.
      allow_other_code: accept rows that other code of this package made, and record that.

    A study that does not fit in the memory of this machine is refused before anything is written, with
    what it needs, what there is, and what to change.

    Returns:
      The outcome. If a cell fails, its error is recorded there, and the other cells still run.

    Example::

        outcome = run(Study.from_toml("study.toml"), "results", max_time=3600)
        outcome = run(study, "results", client=dask.distributed.Client("tcp://scheduler:8786"))
    """
    began = time.monotonic()
    if part is not None:
        part = ArrayPart.of(part)
        directory = Path(directory) / part.folder
    jobs.check(study)
    stop, log = stop or Stop(max_time), RunLog(progress_of(progress))
    write = functools.partial(
        Writer, directory, study, fresh=fresh, allow_other_code=allow_other_code, part=part
    )
    if client is None:
        return _run_on(_threads(study, devices), write, stop, log)
    executor = _dask(client, stop, log)
    if executor is None:
        tiles = len(study.cells) * study.tiles_per_cell
        if part is not None:
            tiles = sum(map(len, part.tiles(study).values()))
        return Outcome(0, tiles, {}, time.monotonic() - began)
    return _run_on(executor, write, stop, log)


def _run_on(
    executor: Executor, write: Callable[[dict[str, Any]], Writer], stop: Stop, log: RunLog
) -> Outcome:
    began = time.monotonic()
    with write(executor.environment) as writer, _logged(writer, log):
        run = _Run(writer, stop, log, executor.size)
        if run.prepare():
            executor.remember(run.tables)
            todo = planned(run.cells, writer.results.firsts(), writer.lacks, executor.size)
            run.commit_all(executor.run(run.wanted(todo), stop))
        run.warn_of_failures()
        seconds = time.monotonic() - began
        lost = tuple(writer.lost()) if run.prepared else ()
        left = run.tiles_left + len(lost)
        signal = stop.signal if stop.dropping else 0
        outcome = Outcome(run.count, left, run.errors, seconds, run.tally, lost, signal)
        log.note(_end(outcome))
    return outcome


@contextlib.contextmanager
def _logged(writer: Writer, log: RunLog) -> Iterator[None]:
    """Keep the log of a directory open while it is written to."""
    study = writer.study
    versions = ", ".join(f"{key} {value}" for key, value in writer.environment.items() if value)
    with contextlib.closing(log):
        heading = f"start: process {os.getpid()} on {os.uname().nodename}; {versions}"
        log.open(writer.directory, heading)
        log.note(
            f"study {study.digest[:12]}: cells {len(study.cells)}, replications "
            f"{study.replications}, tiles {len(study.cells) * study.tiles_per_cell}"
        )
        try:
            yield
        except BaseException as error:
            log.note(f"end: {type(error).__name__}: {error}")
            raise


def _end(outcome: Outcome) -> str:
    made = f"tiles run {outcome.tiles_run}, to come {outcome.tiles_left}"
    gone = f", gone {len(outcome.lost)} ({outcome.lost[0]}, …)" if outcome.lost else ""
    failed = f"cells failed {len(outcome.errors)}"
    return f"end: {_word(outcome)}; {made}{gone}, {failed}, {outcome.seconds:.0f} s"


def _threads(study: Study, devices: int | Sequence[Device] | None) -> Threads:
    chosen = machine.chosen(devices)
    forecast.refuse_too_large(study, chosen)
    return Threads(chosen)


def _dask(client: Any, stop: Stop, log: RunLog) -> Executor | None:
    """Return the workers of a cluster; None if the run is asked to stop before there are any."""
    from jaxlsgd.study.executors import dask

    expected = dask.environment(client, stop, log.warn)
    return None if expected is None else dask.Dask(client, expected, log.warn)


def _work(tile: Tile, steps: int) -> int:
    """Return the client-steps of some steps of a tile."""
    cell = tile.cell
    return cell.tile_size * steps * stepping(cell.problem, cell.algorithm)


class _Run:
    """The state of one run."""

    def __init__(self, writer: Writer, stop: Stop, log: RunLog, workers: int) -> None:
        self.writer, self.stop, self.log, self.progress = writer, stop, log, log.progress
        self._workers = workers
        self._flying: dict[Tile, dict[Tile, int]] = {}  # its job: steps left of all tiles of that
        self.count = 0
        self.prepared = False  # whether all tiles that were there have been read
        self.errors: dict[str, str] = {}
        self.tally = Tally()
        self.cells: list[CellSpec] = []  # that are not complete
        self.tables: Rows = {}  # of earlier runs
        self._described: set[str] = set()
        self._kinds: set[tuple[Any, ...]] = set()  # of programs that have begun to work
        self._left = {cell.id: writer.wanted(cell) for cell in writer.study.cells}
        self._total = sum(self._left.values())

    @property
    def tiles_left(self) -> int:
        """Number of tiles that are to come."""
        return self._total - self.count

    def prepare(self) -> bool:
        """Read the tiles that are there and repair descriptions; return False if asked to stop first."""
        for tile in self.writer.verify():
            if tile is not None:
                self._tally(*tile)
            if self.stop.draining:
                self._pass_on_warnings()
                return False
        cells = self.writer.study.cells
        self._left = {cell.id: self.writer.left(cell) for cell in cells}
        self._total = sum(self._left.values())
        self.cells = [cell for cell in cells if self._left[cell.id]]
        if self.cells and (warning := jobs.without_truth(self.writer.study)):
            self.log.warn(f"warning: {warning}")
        self.tables = self.writer.tables() if self.cells else {}
        for cell in cells:
            if not self._left[cell.id] and not self.writer.described(cell):
                self.writer.describe(cell, jobs.about(cell))
        self._pass_on_warnings()
        self.prepared = True
        return True

    def _pass_on_warnings(self) -> None:
        while self.writer.warnings:
            self.log.warn(self.writer.warnings.pop(0))

    def commit_all(self, events: Events) -> None:
        """Commit every tile as it finishes."""
        self.progress.start(self._totals())
        warned = False
        try:
            # Closed at once if a commit fails, so that jobs in flight are dropped before the lock is.
            with contextlib.closing(events):
                for event in events:
                    self.progress.tick()
                    if self.stop.draining and not warned:
                        warned = True
                        self.log.warn(self._stopping())
                    self._take(event)
        finally:
            self.progress.close()

    def _stopping(self) -> str:
        """Return that the run stops, and how long what is in flight takes."""
        flying = dict(self._flying)  # threads that compute may add to it
        jobs = {id(steps): steps for steps in flying.values()}.values()
        longest = max((sum(_work(*each) for each in job.items()) for job in jobs), default=0)
        each = self.progress.time_left.seconds_per_work(time.monotonic())
        when = (
            "in a time that is not known before programs are compiled and have run for some seconds"
        )
        if each is not None or not longest:
            when = f"in about {duration(longest * self._workers * (each or 0.0))}"
        tiles = plural(len(flying), "tile")
        again = "a second Ctrl-C or signal drops them and stops at once"
        return f"stopping once the {tiles} in flight are finished, {when} ({again})"

    def warn_of_failures(self) -> None:
        """Warn of cells in which many replications failed, now or before."""
        if warning := self.tally.warning(str(self.writer.directory)):
            self.log.warn(warning)

    def _tally(self, cell: str, first: int, rows: dict[str, MethodRows]) -> None:
        self.tally.add(cell, rows, self.writer.study.replications - first)

    def wanted(self, todo: Iterable[Job]) -> Iterator[Job]:
        """Yield the jobs without the tiles of cells that have failed in the meantime."""
        for job in todo:
            if left := tuple(tile for tile in job if tile.cell.id not in self.errors):
                steps = {tile: tile.cell.num_steps for tile in left}
                self._flying |= dict.fromkeys(left, steps)
                yield left

    def _take(self, event: Event) -> None:
        if isinstance(event, TileFinished | TileFailed):
            self._flying.pop(event.tile, None)
        if isinstance(event, TileAdvanced):
            cell, job = event.tile.cell, self._flying.get(event.tile, {})
            job[event.tile] = max(0, job.get(event.tile, 0) - event.steps)
            if (kind := program_kind(cell)) not in self._kinds:
                self._kinds.add(kind)
                self.progress.begin()
            done = cell.tile_size * event.steps / cell.num_steps
            self.progress.advance(done, _work(event.tile, event.steps))
        elif isinstance(event, Tabulated):
            self.writer.keep(event.rows)
        elif isinstance(event, TileFailed):
            self._fail(event)
        elif isinstance(event, TileFinished):
            self._commit(event)

    def _fail(self, event: TileFailed) -> None:
        cell = event.tile.cell
        if isinstance(event.error, Dropped) or cell.id in self.errors:
            return
        self.errors[cell.id] = describe(event.error)
        brief = self.errors[cell.id].partition("\n")[0][:300]
        self.log.warn(f"cell {cell.id} failed and is left out: {brief}")

    def _commit(self, event: TileFinished) -> None:
        cell = event.tile.cell
        if cell.id not in self._described:
            self._described.add(cell.id)
            self.writer.describe(cell, jobs.about(cell))
            self._pass_on_warnings()
        self.writer.commit(cell, event.tile.first, event.rows)
        self._tally(cell.id, event.tile.first, event.rows)
        self.count += 1
        self._left[cell.id] -= 1
        if not self._left[cell.id]:
            self.progress.cell_done()
            self.log.note(f"cell {cell.id} is complete")

    def _totals(self) -> Totals:
        study = self.writer.study
        total = sum(self._left[cell.id] * work(cell) for cell in self.cells)
        done = len(study.cells) - len(self.cells)
        kinds = len({program_kind(cell) for cell in self.cells})
        return Totals(len(study.cells), done, self._total * study.tile_size, total, kinds)
