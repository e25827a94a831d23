"""The one writer of a study's directory: lock, manifest, and tiles put in place whole."""

from __future__ import annotations

import dataclasses
import datetime
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from jaxlsgd.core.rows import CellRows, MethodRows
from jaxlsgd.study.grid import CellSpec
from jaxlsgd.study.parts import Part, changed
from jaxlsgd.study.spec import Study, differences
from jaxlsgd.study.store import codec
from jaxlsgd.study.store.codec import FORMAT, Damaged, StoreError
from jaxlsgd.study.store.reader import Results, about_to_json, study_of

_LOCK_SECONDS = 1.0  # a reader that asks who is running holds the lock for an instant


class Writer:
    """The one process that may add to a study's directory.

    Args:
      directory: created if it does not exist.
      study: what is to be there; refused if the directory holds another study.
      environment: versions, device kind and flags, recorded in the manifest.
      fresh: refuse a directory that already holds a study.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        study: Study,
        environment: dict[str, Any],
        *,
        fresh: bool = False,
    ) -> None:
        self.directory = Path(directory)
        self.warnings: list[str] = []
        _check_place(self.directory, fresh)
        self._lock = _lock(self.directory)
        try:
            codec.remove_unfinished(self.directory)
            # With the largest number of replications that was ever asked for.
            self.study = self._settle(study, environment)
            self.results = Results(self.directory)
        except BaseException:
            self._lock.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.close()

    def missing(self) -> Iterator[tuple[CellSpec, int]]:
        """The tiles to compute; damaged ones are set aside, with a warning."""
        for cell in self.study.cells:
            codec.remove_unfinished(self._folder(cell))
            for first in self.results.firsts():
                if not self._intact(cell, first):
                    yield cell, first

    def described(self, cell: CellSpec) -> bool:
        """Whether readers find what they need besides the rows."""
        try:
            self.results.about(cell.id)
        except StoreError:
            return False
        return True

    def describe(self, cell: CellSpec, about: CellRows) -> None:
        """Writes what readers need besides the rows, unless it is already there."""
        folder = self._folder(cell)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            codec.sync_directory(folder.parent)
            codec.sync_directory(self.directory)
        except OSError as error:
            raise codec.cannot("make", folder, error) from error
        if not self.described(cell):
            content = {"format": FORMAT, "digest": cell.digest, "cell": cell.plain()}
            codec.write_json(folder / "cell.json", content | {"rows": about_to_json(about)})

    def commit(self, cell: CellSpec, first: int, rows: dict[str, MethodRows]) -> None:
        """Puts one finished tile in place; a tile is there whole or not at all."""
        path = self.results.tile_path(cell.id, first)
        codec.write_whole(path, codec.encode_tile(cell, first, rows))

    def _folder(self, cell: CellSpec) -> Path:
        """The directory of a cell, which is truly within ours."""
        folder = self.directory / "cells" / cell.id
        codec.refuse_link(folder.parent)
        codec.refuse_link(folder)
        return folder

    def _intact(self, cell: CellSpec, first: int) -> bool:
        path = self.results.tile_path(cell.id, first)
        if not path.is_file():
            return False
        try:
            codec.read_tile(path, cell, first)
        except Damaged as error:
            aside = _unused(path.with_name(path.name + ".damaged"))
            try:
                os.replace(path, aside)
            except OSError as problem:
                raise codec.cannot("set aside", path, problem) from problem
            self.warnings.append(f"{error}; it is set aside as {aside.name} and computed again")
            return False
        return True

    def _settle(self, study: Study, environment: dict[str, Any]) -> Study:
        """Writes the manifest, or compares the study with the one that is there."""
        path = self.directory / "manifest.json"
        if not path.exists():
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            codec.write_json(path, _manifest(study, [environment], now))
            return study
        manifest = codec.read_json(path)
        old = study_of(manifest, path)
        if old.digest != study.digest:
            raise StoreError(_changed(self.directory, old, study))
        environments = _environments(manifest, path)
        if environment not in environments:
            changed = "; ".join(differences(environments[-1], environment))
            self.warnings.append(
                f"rows may differ in their last digits from earlier ones: {changed}"
            )
            environments.append(environment)
        if old.replications > study.replications:
            kept = (
                f"{self.directory} already asks for {old.replications} replications and keeps them"
            )
            self.warnings.append(kept)
            study = dataclasses.replace(study, replications=old.replications)
        content = _manifest(study, environments, str(manifest.get("created", "")))
        if content != manifest:
            codec.write_json(path, content)
        return study


def _environments(manifest: dict[str, Any], path: Path) -> list[dict[str, Any]]:
    found = manifest.get("environments")
    if not isinstance(found, list) or not found or not all(isinstance(x, dict) for x in found):
        raise Damaged(f"{path} is damaged: it does not say what made the rows")
    return list(found)


def _manifest(study: Study, environments: list[dict[str, Any]], created: str) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "digest": study.digest,
        "created": created,
        "study": study.plain(),
        "environments": environments,
    }


def _changed(directory: Path, old: Study, new: Study) -> str:
    for before, after in zip(_parts(old), _parts(new), strict=False):
        same = dataclasses.replace(before, identity=after.identity) == after
        if same and before.identity != after.identity:
            return f"{directory}: {changed(before, after)}"
    lines = differences(old.plain() | {"replications": 0}, new.plain() | {"replications": 0})
    shown = lines[:20] + ([f"and {len(lines) - 20} more"] if len(lines) > 20 else [])
    return f"{directory} holds another study; choose a new directory. What changed:\n  " + (
        "\n  ".join(shown)
    )


def _parts(study: Study) -> tuple[Part, ...]:
    return (*study.problems, *study.methods, *study.algorithms)


def _unused(path: Path) -> Path:
    number, candidate = 1, path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def _check_place(directory: Path, fresh: bool) -> None:
    """Refuses a place that is no directory or belongs to something else, before writing there."""
    # os.path and not Path: a place that we may not even look into is refused further down.
    if os.path.exists(directory / "manifest.json"):
        if fresh:
            other = _unused(directory.with_name(directory.name + "-2"))
            raise StoreError(
                f"{directory} already holds a study, which is never overwritten; "
                f"choose a new directory such as {other}"
            )
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        there = os.listdir(directory)
    except OSError as error:
        raise codec.cannot("make", directory, error) from error
    foreign = [name for name in there if name != "lock" and not codec.is_unfinished(name)]
    if foreign:
        raise StoreError(
            f"{directory} is not empty and holds no study (there is {foreign[0]!r}); "
            "choose a new directory"
        )


def _lock(directory: Path) -> Any:
    """Takes the writer's lock, which ends with the process whatever happens to it."""
    path = directory / "lock"
    codec.refuse_link(path)
    try:
        # A link that appears in the meantime is refused too: the file is emptied below.
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
        file = open(os.open(path, flags, 0o666), "a+")  # noqa: SIM115
    except OSError as error:
        raise codec.cannot("write", path, error) from error
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.close()
                raise StoreError(_taken(path)) from None
            time.sleep(0.05)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
    file.flush()
    return file


def _taken(path: Path) -> str:
    holder = path.read_text(errors="replace").strip()[:100] or "another process"
    return f"{path.parent} is being written by another run ({holder}); wait for it or stop it"
