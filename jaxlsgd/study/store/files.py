"""The files of a study's directory: written whole or not at all, checked when they are read."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from jaxlsgd.core import storage
from jaxlsgd.core.cell_file import ARRAYS, fits
from jaxlsgd.core.rows import MethodRows
from jaxlsgd.core.storage import read_regular
from jaxlsgd.study.cells import CellSpec, canonical, digest_of

FORMAT = 3
MOST_JSON = 64_000_000  # bytes
_TEMPORARY = ".writing"


class StoreError(RuntimeError):
    """A directory of results that cannot be used or written as it is."""


class Damaged(StoreError):
    """A file whose content is not what was written."""


class Missing(StoreError):
    """A file that is not there."""


def write_whole(path: Path, content: bytes) -> None:
    """Puts a file in place at once: temporary file, fsync, rename, fsync of the directory.

    A user's own path is to be checked with `core.files.check_output` first: here a directory that is not
    there was moved or deleted during a run.
    """
    temporary = path.with_name(f".{path.name}{_TEMPORARY}")
    try:
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:  # never through a link that somebody put there
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_directory(path.parent)
    except OSError as error:
        _forget(temporary)
        raise cannot("write", path, error) from error


def _forget(path: Path) -> None:
    with contextlib.suppress(OSError):  # the first error is the one to tell
        path.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    """Makes the names in a directory last through a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_unfinished(directory: Path) -> None:
    """Removes what a killed writer left half-written; only for the holder of the lock."""
    for path in directory.glob(f".*{_TEMPORARY}"):
        if is_unfinished(path.name):
            path.unlink(missing_ok=True)


def is_unfinished(name: str) -> bool:
    """Whether a file name is that of a file of ours that is half-written."""
    ours = r"manifest\.json|cell\.json|tile-\d{9}\.npz|[0-9a-f]{32}\.json"
    return re.fullmatch(rf"\.({ours}){re.escape(_TEMPORARY)}", name) is not None


_DENIED = (errno.EACCES, errno.EPERM)
NOT_A_FILE = (errno.EISDIR, errno.EINVAL)  # what `read_regular` refuses
_IN_THE_WAY = (
    "; something else is in the way: move it, or choose another place, and run the command again"
)
_HINTS = {
    errno.ENOSPC: "; free some space and run the same command again",
    errno.EDQUOT: "; free some of your quota and run the same command again",
    errno.EFBIG: "; raise the limit on file sizes and run the same command again",
    errno.EACCES: "; choose a directory that you may write to",
    errno.EPERM: "; choose a directory that you may write to",
    errno.EROFS: "; choose a directory that you may write to",
    errno.EISDIR: _IN_THE_WAY,
    errno.ENOTDIR: _IN_THE_WAY,
    errno.EEXIST: _IN_THE_WAY,
    errno.ENOTEMPTY: _IN_THE_WAY,
    errno.ENOENT: "; it was moved or deleted during the run: put it back, or run the same command again",
}


def cannot(verb: str, path: Path, error: OSError) -> StoreError:
    """The plain message for an operating-system error."""
    reading = verb in ("read", "open")
    hint = "" if reading else _HINTS.get(error.errno or 0, "")
    if reading and error.errno in _DENIED:
        hint = "; ask its owner for the permission to read it"
    kind = Missing if reading and error.errno in (errno.ENOENT, errno.ENOTDIR) else StoreError
    return kind(f"cannot {verb} {path}: {error.strerror or error}{hint}")


def refuse_link(path: Path) -> None:
    """Refuses to write below a link, which may lead out of the directory."""
    if path.is_symlink():
        raise StoreError(f"{path} is a symbolic link; put a directory in its place, or remove it")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes JSON with a checksum of its content inside."""
    sealed = {"sha256": digest_of(content), **content}
    write_whole(path, json.dumps(sealed, indent=1, allow_nan=False).encode() + b"\n")


def read_json(path: Path) -> dict[str, Any]:
    """Reads what `write_json` wrote; refuses it if it was altered."""
    try:
        raw = read_regular(path, MOST_JSON)
    except OSError as error:
        if error.errno in NOT_A_FILE:
            raise Damaged(f"{path} is damaged: {error.strerror}") from error
        raise cannot("read", path, error) from error
    if len(raw) > MOST_JSON:
        raise Damaged(f"{path} is damaged: it has more than {MOST_JSON} bytes")
    try:
        content = json.loads(raw)
        claimed = content.pop("sha256")
        intact = claimed == digest_of(content)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise Damaged(f"{path} is damaged: it is not what was written") from error
    if not intact:
        raise Damaged(f"{path} is damaged: its checksum does not match")
    if content.get("format") != FORMAT:
        raise StoreError(
            f"{path} has format {content.get('format')!r}, and this version reads {FORMAT}; use the "
            "version that wrote it, or choose a new directory"
        )
    return content


def encode_tile(cell: CellSpec, first: int, rows: dict[str, MethodRows]) -> bytes:
    """One tile as a sealed file: a header, and each method's arrays."""
    arrays: dict[str, Any] = {"header": np.frombuffer(_header(cell, first), np.uint8)}
    for i, method in enumerate(cell.methods):
        for name, kind in ARRAYS.items():
            arrays[f"{i}.{name}"] = np.ascontiguousarray(getattr(rows[method.name], name), kind)
    return storage.seal(arrays)


def _header(cell: CellSpec, first: int) -> bytes:
    names = [method.name for method in cell.methods]
    return canonical({"format": FORMAT, "cell": cell.digest, "first": first, "methods": names})


def read_tile(path: Path, cell: CellSpec, first: int) -> dict[str, MethodRows]:
    """Reads a tile of a cell; raises `Damaged` unless it is exactly what was written."""
    most = _most_bytes(cell)
    try:
        content = read_regular(path, most)
    except (FileNotFoundError, PermissionError) as error:
        raise cannot("read", path, error) from error
    except OSError as error:
        raise Damaged(f"{path} is damaged: it cannot be read ({error.strerror})") from error
    try:
        if len(content) > most:
            raise Damaged(f"it has more than {most} bytes, which no tile of this cell has")
        return decode_tile(content, cell, first)
    except Damaged as error:
        raise Damaged(f"{path} is damaged: {error}") from error


def check_written(path: Path, cell: CellSpec, first: int, rows: dict[str, MethodRows]) -> None:
    """Read a tile back that was just written; raise `Damaged` unless it holds these rows, bit by bit."""
    _forget_cached(path)
    found = read_tile(path, cell, first)
    for name, kept in found.items():
        for field, kind in ARRAYS.items():
            want = np.ascontiguousarray(getattr(rows[name], field), kind)
            if want.tobytes() != getattr(kept, field).tobytes():
                raise Damaged(f"{path} is damaged: its {field} of {name} is not what was written")


def _forget_cached(path: Path) -> None:
    """Ask the system to drop its copy of a file in memory, so that the disk itself is read."""
    with contextlib.suppress(OSError, AttributeError):  # not every system has it
        handle = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def _most_bytes(cell: CellSpec) -> int:
    """More than any tile of a cell takes."""
    coordinates, saves = cell.problem.fact("dim"), len(cell.save_at) + 1
    for method in cell.methods:
        coordinates = max(coordinates, method.fact("contrasts"))
    row = coordinates * 8 * (2 + len(cell.levels)) + 2
    return len(cell.methods) * saves * cell.tile_size * row + 1_000_000


def decode_tile(content: bytes, cell: CellSpec, first: int) -> dict[str, MethodRows]:
    """Rows from what `encode_tile` made; raises `Damaged` unless it is exactly that."""
    names = [f"{i}.{name}" for i in range(len(cell.methods)) for name in ARRAYS]
    try:
        arrays = storage.unseal(content, ("header", *names))
    except storage.Broken as error:
        raise Damaged(str(error)) from error
    if arrays.pop("header").tobytes() != _header(cell, first):
        raise Damaged("it is a tile of another cell, range or format")
    rows = {}
    for i, method in enumerate(cell.methods):
        parts: list[Any] = [arrays[f"{i}.{name}"] for name in ARRAYS]
        shape = parts[0].shape if parts[0].ndim == 3 else (0, 0, 0)
        if not fits(parts, shape[0], len(cell.levels), cell.tile_size, shape[2]):
            raise Damaged("its arrays are not those of the cell")
        rows[method.name] = MethodRows(*parts)
    return rows
