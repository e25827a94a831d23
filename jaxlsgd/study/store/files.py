"""Write the files of a study's directory whole or not at all, and check them when they are read."""

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
from jaxlsgd.core.checks import Code, Refusal
from jaxlsgd.core.rows import MethodRows
from jaxlsgd.core.storage import read_regular
from jaxlsgd.study.cells import CellSpec, canonical, digest_of

FORMAT = 5
_MOST_JSON = 64_000_000  # bytes
_MOST_HEADERS = 1_000_000  # bytes of a tile besides its rows
_TEMPORARY = ".writing"


class StoreError(RuntimeError):
    """A directory of results that cannot be used or written as it is.

    Attributes:
      argument: the file or directory.
      code: what is wrong with it, one of `checks.Code`.
    """

    def __init__(self, message: str, argument: str | Path = "", code: Code = "unavailable") -> None:
        super().__init__(message)
        self.argument = str(argument)
        self.code: Code = code


class Damaged(StoreError):
    """A file whose content is not what was written."""

    def __init__(self, message: str, argument: str | Path = "", code: Code = "damaged") -> None:
        super().__init__(message, argument, code)


class Missing(StoreError):
    """A file that is not there."""

    def __init__(self, message: str, argument: str | Path = "", code: Code = "missing") -> None:
        super().__init__(message, argument, code)


def unread(error: Exception) -> str:
    """Return why the content of a file describes no study, without Python's own words."""
    if isinstance(error, Refusal) and error.argument:
        return str(error)
    return f"{error} is missing" if isinstance(error, KeyError) else "a value is of another kind"


def write_whole(path: Path, content: bytes) -> None:
    """Put a file in place at once: temporary file, fsync, rename, fsync of the directory.

    Check a path that a user gives with `core.storage.check_output` first: the error here for a directory
    that does not exist is about one that was moved or deleted during a run.
    """
    temporary = path.with_name(f".{path.name}{_TEMPORARY}")
    try:
        storage.check_replaceable(path)
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:  # never through a link
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):  # the first error is the one to report
            temporary.unlink(missing_ok=True)
        raise cannot("write", path, error) from error


def sync_directory(path: Path) -> None:
    """Flush the names in a directory to the disk, so that they survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_unfinished(directory: Path) -> None:
    """Remove half-written files of a killed writer; only the holder of the lock may."""
    for path in directory.glob(f".*{_TEMPORARY}"):
        if is_unfinished(path.name):
            path.unlink(missing_ok=True)


def is_unfinished(name: str) -> bool:
    """Whether a name is that of a half-written file of a study."""
    ours = r"manifest\.json|cell\.json|tile-\d{9}\.npz|[0-9a-f]{32}\.json"
    return re.fullmatch(rf"\.({ours}){re.escape(_TEMPORARY)}", name) is not None


_DENIED = (errno.EACCES, errno.EPERM)
_NOT_A_FILE = (errno.EISDIR, errno.EINVAL)  # what `read_regular` refuses
_IN_THE_WAY = (
    "; something else is in the way: move it, or choose another place, and run the command again"
)
_HINTS = {
    **storage.HINTS,
    **dict.fromkeys((errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY), _IN_THE_WAY),
    errno.ENOENT: "; it was moved or deleted during the run: put it back, or run the same command again",
}


def cannot(verb: str, path: Path, error: OSError) -> StoreError:
    """Return the error of the store for one of the operating system."""
    reading = verb in ("read", "open")
    hint = "" if reading else _HINTS.get(error.errno or 0, "")
    if reading and error.errno in _DENIED:
        hint = "; ask its owner for permission to read it"
    kind = Missing if reading and error.errno in (errno.ENOENT, errno.ENOTDIR) else StoreError
    return kind(f"cannot {verb} {path}: {error.strerror or error}{hint}", path)


def refuse_link(path: Path) -> None:
    """Refuse to write through a link, which may lead out of the directory."""
    if path.is_symlink():
        text = f"{path} is a symbolic link; put a directory in its place, or remove it"
        raise StoreError(text, path, "exists")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON with a checksum of its content inside."""
    sealed = {"sha256": digest_of(content), **content}
    write_whole(path, json.dumps(sealed, indent=1, allow_nan=False).encode() + b"\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read what `write_json` wrote; raise `Damaged` if it was altered."""
    try:
        raw = read_regular(path, _MOST_JSON)
    except OSError as error:
        if error.errno in _NOT_A_FILE:
            raise Damaged(f"{path} is damaged: {error.strerror}", path) from error
        raise cannot("read", path, error) from error
    if len(raw) > _MOST_JSON:
        raise Damaged(f"{path} is damaged: it has more than {_MOST_JSON} bytes", path)
    try:
        content = json.loads(raw)
        claimed = content.pop("sha256")
        intact = claimed == digest_of(content)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise Damaged(f"{path} is damaged: it is not what was written", path) from error
    if not intact:
        raise Damaged(f"{path} is damaged: its checksum does not match", path)
    if content.get("format") != FORMAT:
        text = (
            f"{path} has format {content.get('format')!r}, and this version reads {FORMAT}; use the "
            "version that wrote it, or choose a new directory"
        )
        raise StoreError(text, path, "unsupported")
    return content


def encode_tile(cell: CellSpec, first: int, rows: dict[str, MethodRows]) -> bytes:
    """Return a tile as a sealed file: a header, and each method's arrays."""
    arrays: dict[str, Any] = {"header": np.frombuffer(_header(cell, first), np.uint8)}
    for i, method in enumerate(cell.methods):
        for name, kind in ARRAYS.items():
            arrays[f"{i}.{name}"] = np.ascontiguousarray(getattr(rows[method.name], name), kind)
    return storage.seal(arrays)


def _header(cell: CellSpec, first: int) -> bytes:
    names = [method.name for method in cell.methods]
    return canonical({"format": FORMAT, "cell": cell.digest, "first": first, "methods": names})


def read_tile(path: Path, cell: CellSpec, first: int) -> dict[str, MethodRows]:
    """Read a tile of a cell; raise `Damaged` unless it is exactly what was written."""
    most = cell.tile_bytes + _MOST_HEADERS
    try:
        content = read_regular(path, most)
    except (FileNotFoundError, PermissionError) as error:
        raise cannot("read", path, error) from error
    except OSError as error:
        raise Damaged(f"{path} is damaged: it cannot be read ({error.strerror})", path) from error
    try:
        if len(content) > most:
            raise Damaged(f"it has more than {most} bytes, which no tile of this cell has")
        return decode_tile(content, cell, first)
    except Damaged as error:
        raise Damaged(f"{path} is damaged: {error}", path) from error


def check_written(path: Path, cell: CellSpec, first: int, rows: dict[str, MethodRows]) -> None:
    """Read back a tile that was just written; raise `Damaged` unless it holds these rows, bit by bit."""
    _forget_cached(path)
    found = read_tile(path, cell, first)
    for name, kept in found.items():
        for field, kind in ARRAYS.items():
            expected = np.ascontiguousarray(getattr(rows[name], field), kind)
            if expected.tobytes() != getattr(kept, field).tobytes():
                text = f"{path} is damaged: its {field} of {name} is not what was written"
                raise Damaged(text, path)


def _forget_cached(path: Path) -> None:
    """Drop the system's copy of a file in memory, so that the disk itself is read."""
    with contextlib.suppress(OSError, AttributeError):  # not every system has it
        handle = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def decode_tile(content: bytes, cell: CellSpec, first: int) -> dict[str, MethodRows]:
    """Return the rows that `encode_tile` has encoded; raise `Damaged` for any other content."""
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
