"""Write a study's directory: the lock, the manifest, and tiles. Start at `Writer`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from jaxlsgd.core.cell_file import about_to_json
from jaxlsgd.core.rows import CellRows, MethodRows
from jaxlsgd.inference.laws.tables import Rows
from jaxlsgd.study.array import ArrayPart
from jaxlsgd.study.cells import CellSpec
from jaxlsgd.study.parts import Part, changed
from jaxlsgd.study.store import files, law_tables, provenance, recovery
from jaxlsgd.study.store.files import FORMAT, Damaged, Missing, StoreError
from jaxlsgd.study.store.lock import Found, holds, lock, look, unused
from jaxlsgd.study.store.reader import Results
from jaxlsgd.study.study import Study, differences


class Writer:
    """The only process that may add to a study's directory.

    Args:
      directory: created if it does not exist.
      study: what is to be there; refused if the directory holds another study.
      environment: versions, code, device kind and flags, recorded in the manifest.
      fresh: refuse a directory that already holds a study.
      allow_other_code: accept rows that other code of this package made, with a warning.
      part: write the tiles of this part of an array job only.
      collecting: the directory may hold parts of array jobs, which are being made one study.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        study: Study,
        environment: dict[str, Any],
        *,
        fresh: bool = False,
        allow_other_code: bool = False,
        part: ArrayPart | None = None,
        collecting: bool = False,
    ) -> None:
        self.directory, self.environment, self._part = Path(directory), environment, part
        self.warnings: list[str] = []
        self._allowed = allow_other_code
        self._check(look(self.directory, study, fresh, collecting), study)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise files.cannot("make", self.directory, error) from error
        self._lock = lock(self.directory)
        try:
            # Again, now that no other process writes.
            found = look(self.directory, study, fresh, collecting)
            self._check(found, study)
            files.remove_unfinished(self.directory)
            # With the largest number of replications of all runs.
            self.study, manifest = self._settle(study, found)
            self.results = Results.of(self.directory, self.study, manifest)
            self._inode = self.directory.stat().st_ino
        except BaseException:
            self._lock.close()
            raise
        self._places = {cell.id: i for i, cell in enumerate(self.study.cells)}
        self._wanted = None if part is None else part.tiles(self.study)
        self._kept: dict[str, set[int]] | None = None
        self._tabulated: set[str] = set()
        self._read_back = False  # whether the first tile of this run was read again

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.close()

    def verify(self) -> Iterator[tuple[str, int, dict[str, MethodRows]] | None]:
        """Read the tiles that are there, one by one, and set damaged ones aside.

        Yields:
          Cell, first replication and rows of a tile that is intact; None after other tiles and cells.
        """
        kept: dict[str, set[int]] = {}
        for cell in self.study.cells:
            files.remove_unfinished(self._folder(cell))
            self._clear_tiles(cell)
            there = sorted(self.results.listed(cell.id))
            kept[cell.id] = set()
            for first in there:
                rows = self._read(cell, first)
                if rows is not None:
                    kept[cell.id].add(first)
                yield None if rows is None else (cell.id, first, rows)
            yield None
        self._kept = kept

    def wanted(self, cell: CellSpec) -> int:
        """Return how many tiles of a cell there are to be."""
        return len(self.results.firsts() if self._wanted is None else self._wanted[cell.id])

    def left(self, cell: CellSpec) -> int:
        """Return how many tiles of a cell are to be computed."""
        there = self._verified()[cell.id]
        if self._wanted is None:
            return len(self.results.firsts()) - len(there)
        return len(self._wanted[cell.id] - there)

    def lacks(self, cell: CellSpec, first: int) -> bool:
        """Whether a tile is to be computed."""
        mine = self._wanted is None or first in self._wanted[cell.id]
        return mine and first not in self._verified()[cell.id]

    def record(self, environments: list[dict[str, Any]]) -> None:
        """Write to the manifest that these environments made the rows."""
        self.results.manifest["environments"] = environments
        with self._in_place():
            files.write_json(self.directory / "manifest.json", self.results.manifest)

    def described(self, cell: CellSpec) -> bool:
        """Whether the description of a cell is there; warn if it is damaged."""
        try:
            self.results.stored_about(cell.id)
        except Missing:
            return False
        except Damaged as error:
            path = self.results.folder(cell.id) / "cell.json"
            aside = f" set aside as {self._set_aside(path)} and" if path.is_dir() else ""
            self.warnings.append(f"{error.args[0].partition(';')[0]}; it is{aside} rewritten")
            return False
        return True

    def describe(self, cell: CellSpec, about: CellRows) -> None:
        """Write the description of a cell, which readers need besides the rows, unless it is there."""
        folder = self._folder(cell)
        with self._in_place():
            self._make_folders(folder)
        if self.described(cell):
            return
        note = recovery.Note(
            self._places[cell.id], len(self._places), self.study.replications, self.environment
        )
        content = {"format": FORMAT, "digest": cell.digest, "cell": cell.plain()}
        content |= {"manifest": note._asdict(), "rows": about_to_json(about)}
        with self._in_place():
            files.write_json(folder / "cell.json", content)

    def commit(self, cell: CellSpec, first: int, rows: dict[str, MethodRows]) -> None:
        """Put a finished tile in place, whole or not at all.

        The first tile of a run is read back and compared, so that a disk that fails is found in seconds.
        """
        path = self.results.tile_path(cell.id, first)
        with self._in_place():
            files.write_whole(path, files.encode_tile(cell, first, rows))
        if not self._read_back:
            self._check_written(path, cell, first, rows)
            self._read_back = True
        self._verified()[cell.id].add(first)

    def lost(self) -> list[str]:
        """Return the tiles, as paths in the directory, that were there or committed and are gone."""
        self._refuse_moved()
        return [
            str(self.results.tile_path(cell.id, first).relative_to(self.directory))
            for cell in self.study.cells
            for first in sorted(self._verified()[cell.id] - self.results.listed(cell.id))
        ]

    def _check_written(
        self, path: Path, cell: CellSpec, first: int, rows: dict[str, MethodRows]
    ) -> None:
        try:
            files.check_written(path, cell, first, rows)
        except StoreError as error:
            found = f" (set aside as {self._set_aside(path)})" if path.exists() else ""
            versions = f"NumPy {np.__version__}, jaxlsgd {self.environment.get('jaxlsgd')}"
            text = (
                f"the first tile of this run was written and cannot be read back: {error}{found}; the run "
                f"ends before more is computed: check the disk and the installed versions ({versions}), "
                "and run the same command again"
            )
            raise StoreError(text, path, "damaged") from error

    def _clear_tiles(self, cell: CellSpec) -> None:
        """Set directories aside that have the names of tiles."""
        try:
            with os.scandir(self._folder(cell)) as entries:
                folders = [x.name for x in entries if x.is_dir(follow_symlinks=False)]
        except OSError:  # nothing is there yet, or `listed` raises the error
            return
        for name in sorted(filter(re.compile(r"tile-\d{9}\.npz").fullmatch, folders)):
            path = self._folder(cell) / name
            aside = self._set_aside(path)
            self.warnings.append(f"{path} is a directory; it is set aside as {aside}")

    def tables(self) -> Rows:
        """Return the law tables that tiles of earlier runs have used."""
        rows, warnings = law_tables.read(self.directory, self._code)
        self._tabulated |= rows.keys()
        self.warnings += warnings
        return rows

    def keep(self, rows: Rows) -> None:
        """Write the law tables that a tile has used and that are not there yet."""
        new = {key: row for key, row in rows.items() if key not in self._tabulated}
        if new:
            with self._in_place():
                law_tables.write(self.directory, new, self._code)
            self._tabulated |= new.keys()

    @property
    def _code(self) -> str:
        return str(self.environment.get("code", ""))

    def _make_folders(self, folder: Path) -> None:
        """Make a cell's directory, but not the study's, which must have been moved if it is gone."""
        if folder.is_dir():
            return
        try:
            folder.parent.mkdir(exist_ok=True)
            folder.mkdir(exist_ok=True)
            files.sync_directory(folder.parent)
            files.sync_directory(self.directory)
        except OSError as error:
            raise files.cannot("make", folder, error) from error

    @contextlib.contextmanager
    def _in_place(self) -> Iterator[None]:
        """Refuse to write if the directory was moved or deleted, before and after an error."""
        self._refuse_moved()
        try:
            yield
        except StoreError:
            self._refuse_moved()
            raise

    def _refuse_moved(self) -> None:
        """Refuse to go on if the directory or its lock was replaced during this run."""
        try:
            here = os.stat(self.directory).st_ino == self._inode
        except OSError:
            here = False
        if not here:
            text = (
                f"{self.directory} was moved or deleted while this run wrote there; tiles that were "
                "committed are where it is now: put it back, or give its new place to --out, and run "
                "the same command again"
            )
            raise StoreError(text, self.directory, "missing")
        if not holds(self.directory, self._lock):
            text = (
                f"{self.directory / 'lock'} was deleted or replaced while this run held it: another run "
                f"may have written to {self.directory} at the same time; see that no other is running "
                "there, and run the same command again, which checks every tile and computes what is "
                "missing"
            )
            raise StoreError(text, self.directory / "lock", "busy")

    def _folder(self, cell: CellSpec) -> Path:
        """Return the directory of a cell; refuse links out of the study's."""
        folder = self.directory / "cells" / cell.id
        files.refuse_link(folder.parent)
        files.refuse_link(folder)
        return folder

    def _verified(self) -> dict[str, set[int]]:
        if self._kept is None:
            for _ in self.verify():
                pass
        assert self._kept is not None
        return self._kept

    def _read(self, cell: CellSpec, first: int) -> dict[str, MethodRows] | None:
        path = self.results.tile_path(cell.id, first)
        try:
            return files.read_tile(path, cell, first)
        except Missing:
            return None
        except Damaged as error:
            aside = self._set_aside(path)
            self.warnings.append(f"{error}; it is set aside as {aside} and computed again")
            return None

    def _set_aside(self, path: Path) -> str:
        aside = unused(path.with_name(path.name + ".damaged"))
        try:
            os.replace(path, aside)
        except OSError as error:
            raise files.cannot("set aside", path, error) from error
        return aside.name

    def _check(self, found: Found, study: Study) -> None:
        """Refuse another study, and rows of other code, before anything is written."""
        if found.study is not None and found.study.digest != study.digest:
            text = _changed(self.directory, found.study, study)
            raise StoreError(text, self.directory, "conflict")
        part = (found.manifest or {}).get("part")
        if found.study is not None and part != (self._part and str(self._part)):
            whole = "a whole study" if part is None else f"part {part} of a study"
            text = f"{self.directory} holds {whole}; choose a new directory"
            raise StoreError(text, self.directory, "conflict")
        if found.manifest is not None and not self._allowed:
            old = provenance.other_code(self.directory, found.manifest, self.environment)
            if old:
                text = provenance.refusal(self.directory, old, self.environment)
                raise StoreError(text, self.directory, "conflict")

    def _settle(self, study: Study, found: Found) -> tuple[Study, dict[str, Any]]:
        """Write the manifest unless it is there; return the study and the manifest as they are there."""
        path = self.directory / "manifest.json"
        manifest = found.manifest or {}
        known = provenance.settled(self.directory, manifest, self.environment, self.warnings)
        asked = found.study.replications if found.study else study.replications
        if found.lost:
            asked = self._recovered(path, study, found.lost)
        if asked > study.replications:
            self.warnings.append(
                f"{self.directory} already has a study of {asked} replications, which are all kept"
            )
            study = dataclasses.replace(study, replications=asked)
        created = str(manifest.get("created", "")) or provenance.now()
        content = {"format": FORMAT, "digest": study.digest, "created": created}
        content |= {"study": study.plain()} | known
        content |= {} if self._part is None else {"part": str(self._part)}
        if content != found.manifest:
            files.write_json(path, content)
        return study, content

    def _recovered(self, path: Path, study: Study, lost: str) -> int:
        """Set a damaged manifest aside; return the replications that were asked for."""
        aside = f" (set aside as {self._set_aside(path)})" if path.exists() else ""
        contents = recovery.identified(self.directory, study) or {}
        self.warnings.append(f"{lost}{aside}; rebuilt from the study and {len(contents)} cells")
        notes = filter(None, map(recovery.note_of, contents.values()))
        asked = max([note.replications for note in notes] + [study.replications])
        return max(asked, recovery.most_replications(self.directory, study.cells, asked))


def _changed(directory: Path, old: Study, new: Study) -> str:
    for before, after in zip(_parts(old), _parts(new), strict=False):
        same = dataclasses.replace(before, identity=after.identity) == after
        if same and before.identity != after.identity:
            return f"{directory}: {changed(before, after)}"
    lines = differences(old.plain() | {"replications": 0}, new.plain() | {"replications": 0})
    lines = [re.sub(r"\.identity: .*", ": its code or data", line) for line in lines]
    shown = lines[:20] + ([f"and {len(lines) - 20} more"] if len(lines) > 20 else [])
    return f"{directory} holds another study; choose a new directory. What changed:\n  " + (
        "\n  ".join(shown)
    )


def _parts(study: Study) -> tuple[Part, ...]:
    return (*study.problems, *study.methods, *study.algorithms)
