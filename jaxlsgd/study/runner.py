"""Runs what is missing of a study: jobs to devices, finished tiles to the one writer."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jaxlsgd.analysis.failures import Tally
from jaxlsgd.core.checks import describe
from jaxlsgd.core.rows import MethodRows
from jaxlsgd.engine import machine
from jaxlsgd.inference.laws.tables import Rows
from jaxlsgd.study import forecast
from jaxlsgd.study import jobs as compute
from jaxlsgd.study.cells import CellSpec
from jaxlsgd.study.executors.base import Event, Events, Executor, Failed
from jaxlsgd.study.executors.threads import Threads
from jaxlsgd.study.jobs import Done, Job, Tabulated, Worked, planned, program_kind, stepping, work
from jaxlsgd.study.progress import Dropped, Journal, Noted, Silent, Stop, Totals, started
from jaxlsgd.study.store.writer import Writer
from jaxlsgd.study.study import Study

DONE, FAILED, PARTIAL = 0, 1, 3
_STOPPING = "stopping once the tiles in flight are finished (a second signal drops them)"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    tiles_run: int
    tiles_left: int
    errors: dict[str, str]  # by cell id
    seconds: float
    tally: Tally = dataclasses.field(default_factory=Tally)  # of replications that failed
    lost: tuple[str, ...] = ()  # tiles that were there or committed, and are missing at the end

    @property
    def exit_code(self) -> int:
        """0 when all rows are there, 1 when a cell failed or tiles are gone, 3 when some are to come."""
        return FAILED if self.errors or self.lost else PARTIAL if self.tiles_left else DONE


def run(
    study: Study,
    directory: str | os.PathLike[str],
    *,
    devices: int | Sequence[Any] | None = None,
    client: Any = None,
    distributed: bool = False,
    max_time: float | None = None,
    progress: Silent | None = None,
    stop: Stop | None = None,
    fresh: bool = False,
    allow_other_code: bool = False,
) -> Outcome:
    """Runs a study in a directory, or what is missing of it there.

    Every tile is a pure function of its cell and its range, always run at full width, so that the
    rows are the same on one device or many, in any order, fresh or resumed.

    Args:
      study: what to run; more replications than before extend the study.
      directory: created if needed; refused if it holds another study.
      devices: how many of the default backend's devices to use, or a list of JAX devices; all if None.
      client: a `dask.distributed.Client`, whose workers then run the tiles instead of the devices here.
      distributed: whether this is one of several processes that JAX has joined, all of which make this
        call; the first of them alone looks at the directory. See `jaxlsgd.engine.distributed.start`.
      max_time: seconds after which no further tile is started.
      progress: shows the progress; only warnings are logged if None.
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
    compute.check(study)
    stop, told = stop or Stop(max_time), Noted(progress or Silent())
    how = {"fresh": fresh, "allow_other_code": allow_other_code}
    if distributed:
        if client is not None:
            raise ValueError("client: must be None where the run is distributed, got one")
        return _run_with_others(study, directory, devices, stop, told, how)
    executor = _here(study, devices) if client is None else _there(client, stop, told)
    if executor is None:
        return Outcome(0, len(study.cells) * study.tiles_per_cell, {}, time.monotonic() - began)
    return _run_on(executor, study, directory, stop, told, how)


def _run_on(
    executor: Executor,
    study: Study,
    directory: Any,
    stop: Stop,
    progress: Noted,
    how: dict[str, bool],
) -> Outcome:
    began = time.monotonic()
    with (
        Writer(directory, study, executor.environment, **how) as writer,
        _noted(writer, progress),
    ):
        run = _Run(writer, stop, progress)
        if run.prepare():
            executor.learn(run.tables)
            jobs = planned(run.cells, writer.results.firsts(), writer.lacks, executor.size)
            run.all(executor.run(run.wanted(jobs), stop))
        run.warn_of_failures()
        seconds = time.monotonic() - began
        lost = tuple(writer.lost()) if run.prepared else ()
        left = run.tiles_left + len(lost)
        outcome = Outcome(run.count, left, run.errors, seconds, run.tally, lost)
        progress.note(_end(outcome))
    return outcome


@contextlib.contextmanager
def _noted(writer: Writer, progress: Noted) -> Iterator[None]:
    """Keeps the log of the directory for as long as it is written to."""
    with contextlib.closing(Journal(writer.directory)) as journal:
        study = writer.study
        journal.note(started(writer.environment))
        progress.attach(journal)
        progress.note(
            f"study {study.digest[:12]}: cells {len(study.cells)}, replications "
            f"{study.replications}, tiles {len(study.cells) * study.tiles_per_cell}"
        )
        try:
            yield
        except BaseException as error:
            journal.note(f"end: {type(error).__name__}: {error}")
            raise


def _end(outcome: Outcome) -> str:
    word = {DONE: "done", FAILED: "failed", PARTIAL: "partial"}[outcome.exit_code]
    made = f"tiles run {outcome.tiles_run}, to come {outcome.tiles_left}"
    gone = f", gone {len(outcome.lost)} ({outcome.lost[0]}, …)" if outcome.lost else ""
    failed = f"cells failed {len(outcome.errors)}"
    return f"end: {word}; {made}{gone}, {failed}, {outcome.seconds:.0f} s"


def _run_with_others(
    study: Study, directory: Any, devices: Any, stop: Stop, progress: Noted, how: dict[str, bool]
) -> Outcome:
    """Runs a study as one of several processes; only the leader's outcome tells of all of it."""
    import jax

    from jaxlsgd.study.executors import joined

    began = time.monotonic()
    chosen = machine.chosen(devices)
    forecast.refuse_too_large(study, chosen)
    counts = joined.meet(study, chosen)
    if jax.process_index() != joined.LEADER:
        return Outcome(joined.follow(study, chosen), 0, {}, time.monotonic() - began)
    with joined.leading():
        leader = joined.Leader(chosen, counts)
        return _run_on(leader, study, directory, stop, progress, how)


def _here(study: Study, devices: int | Sequence[Any] | None) -> Executor:
    places = machine.chosen(devices)
    forecast.refuse_too_large(study, places)
    return Threads(places)


def _there(client: Any, stop: Stop, progress: Silent) -> Executor | None:
    """The workers of a cluster; None if the run is asked to end before there are any."""
    from jaxlsgd.study.executors import dask

    expected = dask.environment(client, stop, progress.say)
    return None if expected is None else dask.Dask(client, expected, progress.say)


class _Run:
    """One run's bookkeeping."""

    def __init__(self, writer: Writer, stop: Stop, progress: Noted) -> None:
        self.writer, self.stop, self.progress = writer, stop, progress
        self.count = 0
        self.prepared = False  # whether all that was there has been looked through
        self.errors: dict[str, str] = {}
        self.tally = Tally()
        self.cells: list[CellSpec] = []  # that are not complete
        self.tables: Rows = {}  # of earlier runs
        self._described: set[str] = set()
        self._kinds: set[Any] = set()  # of programs that have come to work
        self._left = {cell.id: writer.study.tiles_per_cell for cell in writer.study.cells}
        self._total = sum(self._left.values())

    @property
    def tiles_left(self) -> int:
        """Tiles that are not there."""
        return self._total - self.count

    def prepare(self) -> bool:
        """Looks through what is there and repairs descriptions; False if asked to end before."""
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
        self.tables = self.writer.tables() if self.cells else {}
        for cell in cells:
            if not self._left[cell.id] and not self.writer.described(cell):
                self.writer.describe(cell, compute.about(cell))
        self._pass_on_warnings()
        self.prepared = True
        return True

    def _pass_on_warnings(self) -> None:
        while self.writer.warnings:
            self.progress.say(self.writer.warnings.pop(0))

    def all(self, events: Events) -> None:
        """Commits every tile as it finishes."""
        self.progress.start(self._totals())
        said = False
        try:
            # Closed at once if a commit fails, so that jobs in flight are dropped before the lock is.
            with contextlib.closing(events):
                for event in events:
                    self.progress.tick()
                    if self.stop.draining and not said:
                        said = True
                        self.progress.say(_STOPPING)
                    self._take(event)
        finally:
            self.progress.close()

    def warn_of_failures(self) -> None:
        """Says where many replications failed, now or before."""
        if warning := self.tally.warning(str(self.writer.directory)):
            self.progress.say(warning)

    def _tally(self, cell: str, first: int, rows: dict[str, MethodRows]) -> None:
        self.tally.add(cell, rows, self.writer.study.replications - first)

    def wanted(self, jobs: Iterable[Job]) -> Iterator[Job]:
        """The jobs to do, without the tiles of cells that have failed in the meantime."""
        for job in jobs:
            if left := tuple(tile for tile in job if tile.cell.id not in self.errors):
                yield left

    def _take(self, event: Event) -> None:
        if isinstance(event, Worked):
            cell, done = event.tile.cell, event.tile.cell.tile_size * event.steps
            clients = stepping(cell.problem, cell.algorithm)
            if (kind := program_kind(cell)) not in self._kinds:
                self._kinds.add(kind)
                self.progress.begin()
            self.progress.advance(done / cell.num_steps, done * clients)
        elif isinstance(event, Tabulated):
            self.writer.keep(event.rows)
        elif isinstance(event, Failed):
            self._fail(event)
        elif isinstance(event, Done):
            self._commit(event)

    def _fail(self, event: Failed) -> None:
        cell = event.tile.cell
        if isinstance(event.error, Dropped) or cell.id in self.errors:
            return
        self.errors[cell.id] = describe(event.error)
        brief = self.errors[cell.id].partition("\n")[0][:300]
        self.progress.say(f"cell {cell.id} failed and is left out: {brief}")

    def _commit(self, event: Done) -> None:
        cell = event.tile.cell
        if cell.id not in self._described:
            self._described.add(cell.id)
            self.writer.describe(cell, compute.about(cell))
            self._pass_on_warnings()
        self.writer.commit(cell, event.tile.first, event.rows)
        self._tally(cell.id, event.tile.first, event.rows)
        self.count += 1
        self._left[cell.id] -= 1
        if not self._left[cell.id]:
            self.progress.cell_done()
            self.progress.note(f"cell {cell.id} is complete")

    def _totals(self) -> Totals:
        study = self.writer.study
        total = sum(self._left[cell.id] * work(cell) for cell in self.cells)
        done = len(study.cells) - len(self.cells)
        kinds = len({program_kind(cell) for cell in self.cells})
        return Totals(len(study.cells), done, self._total * study.tile_size, total, kinds)
