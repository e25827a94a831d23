"""Read a study's directory, also while it is written. Start at `Results`.

DIR/manifest.json                     the study, its hash, versions, devices and flags
DIR/lock                              held by the one writer
DIR/run.log                           what the runs did, in words
DIR/tables/DIGEST.json                law tables that tiles have used
DIR/cells/CELL/cell.json              what a reader needs besides the rows
DIR/cells/CELL/tile-000000512.npz     replications 512, …, 512 + tile_size − 1
"""

from __future__ import annotations

import dataclasses
import fcntl
import itertools
import logging
import os
import re
from pathlib import Path
from typing import Any, NamedTuple, Self

from jaxlsgd.analysis.measures import coverage_table
from jaxlsgd.core.cell_file import Unfit, about_from_json
from jaxlsgd.core.display import Table, Tabular, facts, plural
from jaxlsgd.core.lazy import later
from jaxlsgd.core.rows import CellRows, MethodRows
from jaxlsgd.study.array import FOLDER
from jaxlsgd.study.cells import CellSpec
from jaxlsgd.study.store import files
from jaxlsgd.study.store.files import Damaged, Missing, StoreError
from jaxlsgd.study.study import Study

_log = logging.getLogger("jaxlsgd.study")
_MOST_SHOWN = 20  # cells in a table of results


class Count(NamedTuple):
    """How much of a cell there is."""

    replications: int  # before the first gap, which `Results.read` returns
    wanted: int
    tiles: int
    tiles_wanted: int


class Results(Tabular):
    """What a study's directory holds, also while it is being written.

    Files are read when they are needed, without JAX and without the lock. A manifest or a description of a
    cell that is missing or damaged is rebuilt in memory if possible, with a text in `warnings`.

    Args:
      directory: that a study was run in.

    Example::

        results = Results("results")
        for cell in results.cells():
            rows = results.read(cell)
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        place = Path(directory)
        manifest, study, warning = _read_or_rebuild(place)
        self._settle(place, study, manifest)
        if warning:
            self._warn(warning)

    @classmethod
    def of(cls, directory: Path, study: Study, manifest: dict[str, Any]) -> Self:
        """Return the results of a study whose manifest was read already."""
        results = cls.__new__(cls)
        results._settle(directory, study, manifest)
        return results

    def _settle(self, directory: Path, study: Study, manifest: dict[str, Any]) -> None:
        self.directory, self.study, self.manifest = directory, study, manifest
        self.warnings: list[str] = []
        self._cells = {cell.id: cell for cell in study.cells}

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)
            _log.warning("%s", text)

    def __repr__(self) -> str:
        return f"Results({str(self.directory)!r}, cells={len(self._cells)})"

    def table(self) -> Table:
        """Return coverage and length of the first cells with rows, as `print(results)` and a notebook show them."""
        found = list(itertools.islice(filter(None, map(self.read, self.cells())), _MOST_SHOWN))
        wanted, there = self.study.replications, self.counts().values()
        done = sum(count.replications == wanted for count in there)
        title = f"{self.directory}: {done} of {plural(len(self._cells), 'cell')} complete"
        if not found:
            return facts("results", title, [("rows", "none yet")])
        made = coverage_table(found).table
        more = f"The first {_MOST_SHOWN} cells; of all: jaxlsgd table {self.directory}."
        notes = (*made.notes, *([more] if len(self._cells) > len(found) == _MOST_SHOWN else []))
        return made._replace(title=title, notes=notes)

    def plot(self, measure: str = "coverage", **options: Any) -> Any:
        """Return a Matplotlib figure of coverage or length by schedule; see `report.figures.plot`."""
        return later("report.figures", "plot")(self, measure, **options)

    def to_frame(self, rows: bool = False) -> Any:
        """Return a `pandas.DataFrame` of measures, or of the rows themselves; see `report.export.to_frame`."""
        return later("report.export", "to_frame")(self, rows)

    def cells(self) -> list[str]:
        """Return the ids of all cells of the study, with or without rows."""
        return list(self._cells)

    def cell(self, cell_id: str) -> CellSpec:
        """Return the description of a cell."""
        if cell_id not in self._cells:
            raise StoreError(f"{self.directory} has no cell {cell_id!r}", self.directory, "unknown")
        return self._cells[cell_id]

    def tile_path(self, cell_id: str, first: int) -> Path:
        """Return the path of the tile that starts with replication `first`."""
        return self.folder(cell_id) / f"tile-{first:09d}.npz"

    def firsts(self) -> range:
        """Return the first replication of every tile of a cell."""
        return range(0, self.study.replications, self.study.tile_size)

    def read(self, cell_id: str) -> CellRows | None:
        """Return the rows of a cell, row r being replication r; None if there are none yet.

        Tiles after a gap are left out until it is filled, so that the rows of two cells are paired.
        """
        firsts = self._before_gap(self.listed(cell_id))
        if not firsts:
            return None
        about, parts = self.about(cell_id), [self.read_tile(cell_id, first) for first in firsts]
        keep = min(self.study.replications, len(firsts) * self.study.tile_size)
        names = [method.name for method in self.cell(cell_id).methods]
        rows = {name: MethodRows.joined([part[name] for part in parts], keep) for name in names}
        for name, found in rows.items():
            if found.estimate.shape[::2] != (len(about.save_at), len(about.coordinates[name])):
                folder = self.folder(cell_id)
                raise Damaged(f"{folder} is damaged: its tiles do not fit its cell.json", folder)
        return dataclasses.replace(about, methods=rows, until=self.study.until)

    def read_all(self) -> list[CellRows]:
        """Return the rows of every cell that has any, in the order of the study."""
        return [rows for cell in self.cells() if (rows := self.read(cell)) is not None]

    def read_tile(self, cell_id: str, first: int) -> dict[str, MethodRows]:
        """Return the rows of one tile, at full width, checked."""
        path = self.tile_path(cell_id, first)
        try:
            return files.read_tile(path, self.cell(cell_id), first)
        except Damaged as error:
            text = f"{error}; run the study again to set it aside and recompute it"
            raise Damaged(text, path) from error

    def counts(self) -> dict[str, Count]:
        """Return how much of each cell there is, by the names of the files alone."""
        counts = {}
        for cell in self.cells():
            listed, wanted = self.listed(cell), self.study.replications
            rows = len(self._before_gap(listed)) * self.study.tile_size
            counts[cell] = Count(min(rows, wanted), wanted, len(listed), len(self.firsts()))
        return counts

    def running(self) -> bool:
        """Whether a writer holds the lock at this moment."""
        try:
            handle = os.open(self.directory / "lock", os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            pass
        finally:
            os.close(handle)
        return False

    def folder(self, cell_id: str) -> Path:
        """Return the directory of a cell."""
        return self.directory / "cells" / self.cell(cell_id).id

    def _before_gap(self, listed: set[int]) -> list[int]:
        return list(itertools.takewhile(listed.__contains__, self.firsts()))

    def listed(self, cell_id: str) -> set[int]:
        """Return the tiles that a cell has, by listing its directory: a study may have 10⁸."""
        folder = self.folder(cell_id)
        try:
            with os.scandir(folder) as entries:
                names = [re.fullmatch(r"tile-(\d{9})\.npz", e.name) for e in entries if e.is_file()]
        except PermissionError as error:
            raise files.cannot("read", folder, error) from error
        except OSError:
            return set()
        firsts = self.firsts()
        return {first for name in names if name and (first := int(name[1])) in firsts}

    def about(self, cell_id: str) -> CellRows:
        """Return a cell's plan, coordinates and truth, without rows; rebuild them if damaged or missing."""
        try:
            return self.stored_about(cell_id)
        except (Damaged, Missing) as error:
            from jaxlsgd.study import jobs  # JAX, which an intact directory does not need

            try:
                made = jobs.about(self.cell(cell_id).built())
            except ValueError:  # parts that were given as objects, or come from an imported file
                raise error from None
            self._warn(f"{error}; rebuilt in memory for now")
            return made

    def stored_about(self, cell_id: str) -> CellRows:
        """Return what `cell.json` holds of a cell."""
        path = self.folder(cell_id) / "cell.json"
        cell = self.cell(cell_id)
        try:
            content = files.read_json(path)
            if content.get("digest") != cell.digest:
                raise Damaged(f"{path} is damaged: it describes another cell", path)
            return _from_json(content.get("rows"), cell)
        except Unfit as error:
            raise Damaged(f"{path} is damaged: {error}; run the study again", path) from error
        except (Damaged, Missing) as error:
            raise type(error)(f"{error}; run the study again to rewrite it", path) from error


def _read_or_rebuild(directory: Path) -> tuple[dict[str, Any], Study, str]:
    """Return the manifest and its study, rebuilt from the cells with a warning if need be."""
    from jaxlsgd.study.store import recovery

    path = directory / "manifest.json"
    try:
        return *read_manifest(path), ""
    except Missing:
        lost = f"{path} is missing"
        text = f"{directory} holds no study: there is no {path}"
        if any(map(FOLDER.fullmatch, _names(directory))):
            text = f"{directory} holds parts of a study: make one of them with 'jaxlsgd collect {directory}'"
        problem = Missing(text, path)
    except Damaged as error:
        lost, problem = str(error), Damaged(f"{error}; run the study again to rebuild it", path)
    found = recovery.manifest(directory)
    if found is None:
        raise problem
    manifest, study, extent = found
    warning = (
        f"{lost}; rebuilt in memory from the cells ({extent}); run the study again to restore it"
    )
    return manifest, study, warning


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def read_manifest(path: Path) -> tuple[dict[str, Any], Study]:
    """Read a manifest; return its content and the study in it."""
    manifest = files.read_json(path)
    try:
        return manifest, Study.read(manifest["study"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        text = f"{path} is damaged: it holds no study ({files.unread(error)})"
        raise Damaged(text, path) from error


def _from_json(content: Any, cell: CellSpec) -> CellRows:
    """Return the description that `about_to_json` has encoded; refuse that of another cell."""
    about = about_from_json(content, [method.name for method in cell.methods])
    names = (cell.problem.name, cell.algorithm.name, cell.schedule.name, cell.levels)
    if names != (about.problem, about.algorithm, about.schedule, about.levels):
        raise Unfit("its names or levels are not those of the cell")
    return about
