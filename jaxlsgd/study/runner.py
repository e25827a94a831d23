"""Runs what is missing of a study: jobs to devices, finished tiles to the one writer."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxlsgd.core.rows import MethodRows
from jaxlsgd.study import costs
from jaxlsgd.study.executors import threads as local
from jaxlsgd.study.grid import Cell
from jaxlsgd.study.jobs import Finished, Job, Tile, grouped
from jaxlsgd.study.progress import Silent, Totals
from jaxlsgd.study.spec import Study
from jaxlsgd.study.stop import Dropped, Stop
from jaxlsgd.study.store.writer import Writer

DONE, FAILED, PARTIAL = 0, 1, 3
_STOPPING = "stopping when the tiles in flight are finished (two signals drop them)"


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
      study: what to run. More replications than before extend what is there.
      directory: made if need be; refused if it holds another study.
      devices: JAX devices, all of the default backend's if None.
      client: a `dask.distributed.Client`, whose workers then run the tiles in place of devices here.
      distributed: whether this is one of several processes that JAX has joined, all of which make this
        call; the first of them alone looks at the directory. See `jaxlsgd.engine.distributed.start`.
      max_time: seconds after which no further tile begins.
      progress: told how it goes; nothing but warnings if None.
      stop: lets another thread or a signal end the run.
      fresh: refuse a directory that already holds a study.

    Returns:
      The outcome; an error in one cell is in it, and the other cells are run.

    Example::

        outcome = run(Study.from_toml("study.toml"), "results", max_time=3600)
        outcome = run(study, "results", client=dask.distributed.Client("tcp://scheduler:8786"))
    """
    from jaxlsgd.study import build

    began = time.monotonic()
    build.check(study)
    stop, progress = stop or Stop(max_time), progress or Silent()
    if distributed:
        if client is not None:
            raise ValueError("client: must be None where the run is distributed, got one")
        return _run_with_others(study, directory, devices, stop, progress, fresh)
    place = _here(devices) if client is None else _there(client, stop, progress)
    if place is None:
        return Outcome(0, len(study.cells) * study.tiles_per_cell, {}, time.monotonic() - began)
    return _run_at(place, study, directory, stop, progress, fresh)


def _run_at(
    place: _Place, study: Study, directory: Any, stop: Stop, progress: Silent, fresh: bool
) -> Outcome:
    began = time.monotonic()
    with Writer(directory, study, place.environment, fresh=fresh) as writer:
        todo = [Tile(*tile) for tile in writer.missing()]
        for warning in writer.warnings:
            progress.say(warning)
        run = _Run(writer, todo, stop, progress)
        run.describe_anew()
        run.all(place.stream(run, grouped(todo, place.size)))
    return Outcome(run.count, len(todo) - run.count, run.errors, time.monotonic() - began)


def _run_with_others(
    study: Study, directory: Any, devices: Any, stop: Stop, progress: Silent, fresh: bool
) -> Outcome:
    """Runs a study as one of several processes; only the leader's outcome tells of all of it."""
    import jax

    from jaxlsgd.engine import machine
    from jaxlsgd.study.executors import joined as processes

    began = time.monotonic()
    chosen = list(devices or jax.local_devices())
    counts = processes.meet(study, chosen)
    if jax.process_index() != processes.LEADER:
        return Outcome(processes.follow(study, chosen), 0, {}, time.monotonic() - began)

    def stream(run: _Run, jobs: list[Job]) -> Stream:
        theirs = lambda tile: run.advance(tile.cell, costs.steps(tile.cell))  # noqa: E731
        return processes.lead(run.wanted(jobs), counts, run.compute, chosen, stop, theirs)

    with processes.leading():
        place = _Place(machine.describe(chosen[0]), sum(counts), stream)
        return _run_at(place, study, directory, stop, progress, fresh)


Stream = Generator[Finished | None, None, None]


class _Place(NamedTuple):
    """Where jobs run."""

    environment: dict[str, Any]  # what may move digits there
    size: int  # jobs at once
    stream: Callable[[_Run, list[Job]], Stream]


def _here(devices: Sequence[Any] | None) -> _Place:
    import jax

    from jaxlsgd.engine import machine

    chosen = list(devices or jax.local_devices())

    def stream(run: _Run, jobs: list[Job]) -> Stream:
        return local.run_jobs(run.wanted(jobs), run.compute, chosen, run.stop)

    return _Place(machine.describe(chosen[0]), len(chosen), stream)


def _there(client: Any, stop: Stop, progress: Silent) -> _Place | None:
    """The workers of a cluster; None if the run is asked to end before there are any."""
    from jaxlsgd.study.executors import dask as cluster

    expected = cluster.environment(client, stop, progress.say)
    if expected is None:
        return None

    def stream(run: _Run, jobs: list[Job]) -> Stream:
        run.whole_tiles = True
        return cluster.run_jobs(run.wanted(jobs), client, expected, run.stop, progress.say)

    recorded = {key: value for key, value in expected.items() if key != "code"}
    return _Place(recorded, max(1, cluster.threads(client)), stream)


class _Run:
    """One run's bookkeeping."""

    def __init__(self, writer: Writer, todo: list[Tile], stop: Stop, progress: Silent) -> None:
        self.writer, self.stop, self.progress = writer, stop, progress
        self.todo = todo
        self.count = 0
        self.whole_tiles = False  # whether work is heard of only when a tile is finished
        self.errors: dict[str, str] = {}
        self._described: set[str] = set()
        self._left = {cell.id: 0 for cell in writer.study.cells}
        for tile in todo:
            self._left[tile.cell.id] += 1

    def all(self, stream: Stream) -> None:
        """Commits every tile as it finishes."""
        self.progress.start(self._totals())
        told = False
        try:
            # Closed at once when a commit fails, so that jobs in flight drop before the lock goes.
            with contextlib.closing(stream):
                for finished in stream:
                    self.progress.tick()
                    if self.stop.draining and not told:
                        told = True
                        self.progress.say(_STOPPING)
                    if finished is not None:
                        self._take(finished)
        finally:
            self.progress.close()

    def describe_anew(self) -> None:
        """Puts right the descriptions of complete cells; those of others come with their tiles."""
        from jaxlsgd.study import build

        for cell in self.writer.study.cells:
            if not self._left[cell.id] and not self.writer.described(cell):
                self.writer.describe(cell, build.about(cell))

    def wanted(self, jobs: Iterable[Job]) -> Iterator[Job]:
        """The jobs to do, without the tiles of a cell that has failed meanwhile."""
        for job in jobs:
            if left := tuple(tile for tile in job if tile.cell.id not in self.errors):
                yield left

    def compute(self, job: Job, device: Any, on_tile: local.OnTile) -> None:
        """Runs a job on a device of this process."""
        from jaxlsgd.study import build

        def on_call(index: int, steps: int) -> None:
            if self.stop.dropping:
                raise Dropped
            self.advance(job[index].cell, steps)

        def on_rows(index: int, rows: dict[str, MethodRows]) -> None:
            on_tile(job[index], rows)

        cells = [tile.cell for tile in job]
        build.compute_job(cells, job[0].first, device, on_call, on_rows)

    def advance(self, cell: Cell, steps: int) -> None:
        """So many steps more of a tile are made."""
        done = cell.tile_size * steps
        self.progress.advance(done / costs.steps(cell), done * cell.problem.num_clients)

    def _take(self, finished: Finished) -> None:
        from jaxlsgd.study import build

        cell = finished.tile.cell
        if isinstance(finished.error, Dropped):
            return
        if finished.rows is None:
            if cell.id not in self.errors:
                self.errors[cell.id] = f"{type(finished.error).__name__}: {finished.error}"
                brief = self.errors[cell.id].partition("\n")[0][:300]
                self.progress.say(f"cell {cell.id} failed and is left out: {brief}")
            return
        if cell.id not in self._described:
            self._described.add(cell.id)
            self.writer.describe(cell, build.about(cell))
        self.writer.commit(cell, finished.tile.first, finished.rows)
        if self.whole_tiles:
            self.advance(cell, costs.steps(cell))
        self.count += 1
        self._left[cell.id] -= 1
        if not self._left[cell.id]:
            self.progress.cell_done()

    def _totals(self) -> Totals:
        study = self.writer.study
        work = sum(costs.work(tile.cell) for tile in self.todo)
        done = sum(not left for left in self._left.values())
        return Totals(len(study.cells), done, len(self.todo) * study.tile_size, work)
