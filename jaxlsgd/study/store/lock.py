"""Inspect the directory that a run is to write in, and lock it. Start at `look` and `lock`."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from jaxlsgd.core.storage import read_regular
from jaxlsgd.study.array import FOLDER
from jaxlsgd.study.store import files, recovery
from jaxlsgd.study.store.files import Damaged, Missing, StoreError
from jaxlsgd.study.store.reader import read_manifest
from jaxlsgd.study.study import Study

LOG, LOG_HEAD = "run.log", "# What the runs in this directory did. jaxlsgd appends to it.\n"
_LOCK_SECONDS = 1.0  # `Results.running` holds the lock for an instant


class Found(NamedTuple):
    """What is in a directory; both are None if nothing is yet."""

    manifest: dict[str, Any] | None
    study: Study | None  # None if the manifest is lost
    lost: str = ""  # what is wrong with the manifest


def look(directory: Path, study: Study, fresh: bool, collecting: bool = False) -> Found:
    """Return what a directory has of a study, without writing; refuse a directory of anything else.

    Parts of array jobs may be there only when they are being collected.
    """
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return Found(None, None)
    except NotADirectoryError as error:
        raise files.cannot("make", directory, error) from error
    except OSError as error:
        raise files.cannot("open", directory, error) from error
    found = _manifest(directory / "manifest.json")
    if found.study is None:
        # Whatever lies beside parts is left alone.
        found = _without_manifest(directory, [] if collecting else names, study, found.lost)
    if fresh and found.manifest is not None:
        other = unused(directory.with_name(directory.name + "-2"))
        text = (
            f"{directory} already holds a study, which is never overwritten; "
            f"choose a new directory such as {other}"
        )
        raise StoreError(text, directory, "exists")
    return found


def _manifest(path: Path) -> Found:
    try:
        manifest, study = read_manifest(path)
        _check_environments(manifest, path)
        return Found(manifest, study)
    except Missing:
        return Found(None, None)
    except Damaged as error:
        return Found(None, None, str(error))


def _check_environments(manifest: dict[str, Any], path: Path) -> None:
    """Refuse a manifest without the environments that made the rows."""
    found = manifest.get("environments")
    if not isinstance(found, list) or not found or not all(isinstance(x, dict) for x in found):
        text = f"{path} is damaged: it has no record of the environments that made the rows"
        raise Damaged(text, path)


def _without_manifest(directory: Path, names: list[str], study: Study, lost: str) -> Found:
    """Return what the cells contain of a manifest; refuse a directory that holds anything else."""
    contents = recovery.identified(directory, study)
    if contents is not None:
        manifest = {"environments": recovery.environments(contents.values())}
        return Found(manifest, None, lost or f"{directory / 'manifest.json'} is missing")
    if lost:
        text = (
            f"{lost}, and there is no cell of this study to rebuild it from; choose a new directory, "
            "or move it away if it is yours to move"
        )
        raise Damaged(text, directory / "manifest.json")
    foreign = sorted(name for name in names if not _is_ours(directory / name))
    if any(map(FOLDER.fullmatch, foreign)):
        text = (
            f"{directory} holds parts of a study; make one study of them with "
            f"'jaxlsgd collect {directory}', or choose a new directory"
        )
        raise StoreError(text, directory, "exists")
    if foreign:
        text = (
            f"{directory} is not empty and holds no study (there is {foreign[0]!r}); "
            "choose a new directory"
        )
        raise StoreError(text, directory, "exists")
    return Found(None, None)


def _is_ours(path: Path) -> bool:
    """Whether a file is one that a run leaves before its first tile."""
    if files.is_unfinished(path.name):
        return True
    if path.name not in ("lock", LOG):
        return path.name == "cells" and path.is_dir() and not os.listdir(path)
    files.refuse_link(path)
    try:
        head = read_regular(path, 200).decode(errors="replace")
    except OSError:
        return False
    if path.name == LOG:
        return head.startswith(LOG_HEAD)
    return re.fullmatch(r"(process \d+ on \S+\n)?", head) is not None


def lock(directory: Path) -> TextIO:
    """Take the writer's lock, which ends with the process."""
    path = directory / "lock"
    files.refuse_link(path)
    try:
        # A link that appears in the meantime is refused too: the file is emptied below.
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
        file = open(os.open(path, flags, 0o666), "a+")  # noqa: SIM115
    except OSError as error:
        raise files.cannot("write", path, error) from error
    try:
        refuse_shared(path, file.fileno())
        _wait(path, file)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        file.flush()
    except OSError as error:
        file.close()
        raise files.cannot("lock", path, error) from error
    except BaseException:
        file.close()
        raise
    return file


def holds(directory: Path, file: TextIO) -> bool:
    """Whether the lock in a directory is still the file that `lock` has opened."""
    try:
        return os.path.samestat(os.lstat(directory / "lock"), os.fstat(file.fileno()))
    except OSError:
        return False


def refuse_shared(path: Path, handle: int) -> None:
    """Refuse to write to anything but a regular file with one name."""
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode):
        raise StoreError(f"{path} is not a regular file; remove it", path, "exists")
    if found.st_nlink > 1:
        text = (
            f"{path} has another name elsewhere (a hard link), which would be written to as well; "
            "remove it if no run is writing"
        )
        raise StoreError(text, path, "exists")


def _wait(path: Path, file: TextIO) -> None:
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise StoreError(_taken(path), path.parent, "busy") from None
            time.sleep(0.05)


def _taken(path: Path) -> str:
    holder = path.read_text(errors="replace").strip()[:100] or "another process"
    return f"{path.parent} is being written by another run ({holder}); wait for it or stop it"


def unused(path: Path) -> Path:
    """Return the path, or the first free one with a number appended."""
    number, candidate = 1, path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate
