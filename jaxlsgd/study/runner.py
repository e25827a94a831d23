"""Runs what is missing of a study: tiles to devices, finished tiles to the one writer."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jaxlsgd.rows import MethodRows
from jaxlsgd.study.grid import Cell
from jaxlsgd.study.local import Dropped, Finished, Stop, Tile, run_tiles
from jaxlsgd.study.progress import Silent, Totals
from jaxlsgd.study.spec import Study
from jaxlsgd.study.writer import Writer

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
      max_time: seconds after which no further tile begins.
      progress: told how it goes; nothing but warnings if None.
      stop: lets another thread or a signal end the run.
      fresh: refuse a directory that already holds a study.

    Returns:
      The outcome; an error in one cell is in it, and the other cells are run.

    Example::

        outcome = run(Study.from_toml("study.toml"), "results", max_time=3600)
    """
    import jax

    from jaxlsgd.study import build, machine

    began = time.monotonic()
    build.check(study)
    chosen = list(devices or jax.local_devices())
    stop, progress = stop or Stop(max_time), progress or Silent()
    with Writer(directory, study, machine.describe(chosen[0]), fresh=fresh) as writer:
        todo = in_order(Tile(*tile) for tile in writer.missing())
        run = _Run(writer, todo, stop, progress)
        for warning in writer.warnings:
            progress.say(warning)
        run.all(chosen)
    return Outcome(run.count, len(todo) - run.count, run.errors, time.monotonic() - began)


def in_order(tiles: Iterable[Tile]) -> list[Tile]:
    """Tiles in the order of the study, but those that share programs behind one another."""
    kinds: dict[Any, list[Tile]] = {}
    for tile in tiles:
        kinds.setdefault(program_kind(tile.cell), []).append(tile)
    return [tile for group in kinds.values() for tile in group]


def program_kind(cell: Cell) -> tuple[Any, ...]:
    """What decides the compiled programs of a cell: not its schedule, horizon or step size."""
    problem = cell.problem
    kind = problem.kind.removeprefix("paper-"), "covariance" in dict(problem.arguments)
    return (*kind, problem.dim, problem.num_clients, cell.methods, cell.dtype, cell.tile_size)


class _Run:
    """One run's bookkeeping."""

    def __init__(self, writer: Writer, todo: list[Tile], stop: Stop, progress: Silent) -> None:
        self.writer, self.stop, self.progress = writer, stop, progress
        self.todo = todo
        self.count = 0
        self.errors: dict[str, str] = {}
        self._left = {cell.id: 0 for cell in writer.study.cells}
        for tile in todo:
            self._left[tile.cell.id] += 1

    def all(self, devices: Sequence[Any]) -> None:
        """Runs all tiles and commits each as it finishes."""
        self.progress.start(self._totals())
        told = False
        try:
            stream = run_tiles(self._wanted(), self._compute, devices, self.stop)
            # Closed at once when a commit fails, so that tiles in flight drop before the lock goes.
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

    def _wanted(self) -> Iterator[Tile]:
        """The tiles to do, without those of a cell that has failed meanwhile."""
        return (tile for tile in self.todo if tile.cell.id not in self.errors)

    def _compute(self, tile: Tile, device: Any) -> dict[str, MethodRows]:
        from jaxlsgd.study import build

        steps = build.task(tile.cell).plan.num_steps + 1
        clients = tile.cell.problem.num_clients

        def on_call(done: int) -> None:
            if self.stop.dropping:
                raise Dropped
            replications = tile.cell.tile_size
            self.progress.advance(replications * done / steps, replications * done * clients)

        return build.compute(tile.cell, tile.first, device, on_call)

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
        self.writer.describe(cell, build.about(cell))
        self.writer.commit(cell, finished.tile.first, finished.rows)
        self.count += 1
        self._left[cell.id] -= 1
        if not self._left[cell.id]:
            self.progress.cell_done()

    def _totals(self) -> Totals:
        study = self.writer.study
        lengths = {tile.cell: 0 for tile in self.todo}
        for cell in lengths:
            lengths[cell] = (cell.plan().num_steps + 1) * cell.problem.num_clients
        work = sum(lengths[tile.cell] * study.tile_size for tile in self.todo)
        done = sum(not left for left in self._left.values())
        return Totals(len(study.cells), done, len(self.todo) * study.tile_size, work)
