"""Runs what is missing of a study: jobs to devices, finished tiles to the one writer."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jaxlsgd.study import compute
from jaxlsgd.study.compute import Done, Worked
from jaxlsgd.study.executors.base import Event, Events, Executor, Failed
from jaxlsgd.study.executors.threads import Threads
from jaxlsgd.study.jobs import Job, Tile, grouped, work
from jaxlsgd.study.progress import Silent, Totals
from jaxlsgd.study.spec import Study
from jaxlsgd.study.stop import Dropped, Stop
from jaxlsgd.study.store.writer import Writer

DONE, FAILED, PARTIAL = 0, 1, 3
_STOPPING = "stopping once the tiles in flight are finished (a second signal drops them)"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    tiles_run: int
    tiles_left: int
    errors: dict[str, str]  # by cell id
    seconds: float

    @property
    def exit_code(self) -> int:
        """0 when all rows are there, 1 when a cell failed, 3 when some are still to come."""
        return FAILED if self.errors else PARTIAL if self.tiles_left else DONE


def run(
    study: Study,
    directory: str | os.PathLike[str],
    *,
    devices: Sequence[Any] | None = None,
    client: Any = None,
    distributed: bool = False,
    max_time: float | None = None,
    progress: Silent | None = None,
    stop: Stop | None = None,
    fresh: bool = False,
) -> Outcome:
    """Runs a study in a directory, or what is missing of it there.

    Every tile is a pure function of its cell and its range, always run at full width, so that the
    rows are the same on one device or many, in any order, fresh or resumed.

    Args:
      study: what to run; more replications than before extend the study.
      directory: created if needed; refused if it holds another study.
      devices: JAX devices, all of the default backend's if None.
      client: a `dask.distributed.Client`, whose workers then run the tiles instead of the devices here.
      distributed: whether this is one of several processes that JAX has joined, all of which make this
        call; the first of them alone looks at the directory. See `jaxlsgd.engine.distributed.start`.
      max_time: seconds after which no further tile is started.
      progress: shows the progress; only warnings are logged if None.
      stop: lets another thread, or a signal, end the run.
      fresh: refuse a directory that already holds a study.

    Returns:
      The outcome. If a cell fails, its error is recorded there, and the other cells still run.

    Example::

        outcome = run(Study.from_toml("study.toml"), "results", max_time=3600)
        outcome = run(study, "results", client=dask.distributed.Client("tcp://scheduler:8786"))
    """
    began = time.monotonic()
    compute.check(study)
    stop, progress = stop or Stop(max_time), progress or Silent()
    if distributed:
        if client is not None:
            raise ValueError("client: must be None where the run is distributed, got one")
        return _run_with_others(study, directory, devices, stop, progress, fresh)
    executor = _here(devices) if client is None else _there(client, stop, progress)
    if executor is None:
        return Outcome(0, len(study.cells) * study.tiles_per_cell, {}, time.monotonic() - began)
    return _run_on(executor, study, directory, stop, progress, fresh)


def _run_on(
    executor: Executor, study: Study, directory: Any, stop: Stop, progress: Silent, fresh: bool
) -> Outcome:
    began = time.monotonic()
    with Writer(directory, study, executor.environment, fresh=fresh) as writer:
        todo = [Tile(*tile) for tile in writer.missing()]
        for warning in writer.warnings:
            progress.say(warning)
        run = _Run(writer, todo, stop, progress)
        run.describe_anew()
        run.all(executor.run(run.wanted(grouped(todo, executor.size)), stop))
    return Outcome(run.count, len(todo) - run.count, run.errors, time.monotonic() - began)


def _run_with_others(
    study: Study, directory: Any, devices: Any, stop: Stop, progress: Silent, fresh: bool
) -> Outcome:
    """Runs a study as one of several processes; only the leader's outcome tells of all of it."""
    import jax

    from jaxlsgd.study.executors import joined

    began = time.monotonic()
    chosen = list(devices or jax.local_devices())
    counts = joined.meet(study, chosen)
    if jax.process_index() != joined.LEADER:
        return Outcome(joined.follow(study, chosen), 0, {}, time.monotonic() - began)
    with joined.leading():
        leader = joined.Leader(chosen, counts)
        return _run_on(leader, study, directory, stop, progress, fresh)


def _here(devices: Sequence[Any] | None) -> Executor:
    import jax

    return Threads(list(devices or jax.local_devices()))


def _there(client: Any, stop: Stop, progress: Silent) -> Executor | None:
    """The workers of a cluster; None if the run is asked to end before there are any."""
    from jaxlsgd.study.executors import dask

    expected = dask.environment(client, stop, progress.say)
    return None if expected is None else dask.Dask(client, expected, progress.say)


class _Run:
    """One run's bookkeeping."""

    def __init__(self, writer: Writer, todo: list[Tile], stop: Stop, progress: Silent) -> None:
        self.writer, self.stop, self.progress = writer, stop, progress
        self.todo = todo
        self.count = 0
        self.errors: dict[str, str] = {}
        self._described: set[str] = set()
        self._left = {cell.id: 0 for cell in writer.study.cells}
        for tile in todo:
            self._left[tile.cell.id] += 1

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

    def describe_anew(self) -> None:
        """Repairs the descriptions of complete cells; those of others come with their tiles."""
        for cell in self.writer.study.cells:
            if not self._left[cell.id] and not self.writer.described(cell):
                self.writer.describe(cell, compute.about(cell))

    def wanted(self, jobs: Iterable[Job]) -> Iterator[Job]:
        """The jobs to do, without the tiles of cells that have failed in the meantime."""
        for job in jobs:
            if left := tuple(tile for tile in job if tile.cell.id not in self.errors):
                yield left

    def _take(self, event: Event) -> None:
        if isinstance(event, Worked):
            cell, done = event.tile.cell, event.tile.cell.tile_size * event.steps
            clients = cell.problem.fact("num_clients")
            self.progress.advance(done / cell.num_steps, done * clients)
        elif isinstance(event, Failed):
            self._fail(event)
        elif isinstance(event, Done):
            self._commit(event)

    def _fail(self, event: Failed) -> None:
        cell = event.tile.cell
        if isinstance(event.error, Dropped) or cell.id in self.errors:
            return
        self.errors[cell.id] = f"{type(event.error).__name__}: {event.error}"
        brief = self.errors[cell.id].partition("\n")[0][:300]
        self.progress.say(f"cell {cell.id} failed and is left out: {brief}")

    def _commit(self, event: Done) -> None:
        cell = event.tile.cell
        if cell.id not in self._described:
            self._described.add(cell.id)
            self.writer.describe(cell, compute.about(cell))
        self.writer.commit(cell, event.tile.first, event.rows)
        self.count += 1
        self._left[cell.id] -= 1
        if not self._left[cell.id]:
            self.progress.cell_done()

    def _totals(self) -> Totals:
        study = self.writer.study
        total = sum(work(tile.cell) for tile in self.todo)
        done = sum(not left for left in self._left.values())
        return Totals(len(study.cells), done, len(self.todo) * study.tile_size, total)
