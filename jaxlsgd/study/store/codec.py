"""The files of a study's directory: written whole or not at all, checked when they are read."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import io
import json
import math
import os
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from jaxlsgd.core.causes import Cause
from jaxlsgd.core.files import read_regular
from jaxlsgd.core.rows import MethodRows
from jaxlsgd.study.grid import CellSpec, canonical, digest_of

FORMAT = 3
MOST_JSON = 64_000_000  # bytes
_TEMPORARY = ".writing"
_ARRAYS = {
    "estimate": "<f8",
    "scale": "<f8",
    "half_width": "<f8",
    "floored": "|b1",
    "cause": "|u1",
}


class StoreError(RuntimeError):
    """A directory of results that cannot be used or written as it is."""


class Damaged(StoreError):
    """A file whose content is not what was written."""


class Missing(StoreError):
    """A file that is not there."""


def write_whole(path: Path, content: bytes) -> None:
    """Puts a file in place at once: temporary file, fsync, rename, fsync of the directory."""
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
    ours = r"manifest\.json|cell\.json|tile-\d{9}\.npz"
    return re.fullmatch(rf"\.({ours}){re.escape(_TEMPORARY)}", name) is not None


_DENIED = (errno.EACCES, errno.EPERM)
_HINTS = {
    errno.ENOSPC: "; free some space and run the same command again",
    errno.EDQUOT: "; free some of your quota and run the same command again",
    errno.EFBIG: "; raise the limit on file sizes and run the same command again",
    errno.EACCES: "; choose a directory that you may write to",
    errno.EPERM: "; choose a directory that you may write to",
    errno.EROFS: "; choose a directory that you may write to",
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
    """One tile as an npz file: a header, each method's arrays, and a checksum of them all.

    The bytes are a function of the arguments alone: `numpy.savez` writes no times.
    """
    arrays: dict[str, Any] = {"header": np.frombuffer(_header(cell, first), np.uint8)}
    for i, method in enumerate(cell.methods):
        for name, kind in _ARRAYS.items():
            arrays[f"{i}.{name}"] = np.ascontiguousarray(getattr(rows[method.name], name), kind)
    arrays["sha256"] = np.frombuffer(_checksum(arrays), np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def _header(cell: CellSpec, first: int) -> bytes:
    names = [method.name for method in cell.methods]
    return canonical({"format": FORMAT, "cell": cell.digest, "first": first, "methods": names})


def _checksum(arrays: dict[str, np.ndarray]) -> bytes:
    total = hashlib.sha256()
    for name, array in arrays.items():
        total.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        total.update(array.tobytes())
    return total.digest()


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


def _most_bytes(cell: CellSpec) -> int:
    """More than any tile of a cell takes."""
    coordinates, saves = cell.problem.fact("dim"), len(cell.save_at) + 1
    for method in cell.methods:
        coordinates = max(coordinates, method.fact("contrasts"))
    row = coordinates * 8 * (2 + len(cell.levels)) + 2
    return len(cell.methods) * saves * cell.tile_size * row + 1_000_000


def decode_tile(content: bytes, cell: CellSpec, first: int) -> dict[str, MethodRows]:
    """Rows from what `encode_tile` made; raises `Damaged` unless it is exactly that."""
    arrays = _arrays(content, len(cell.methods))
    claimed = arrays.pop("sha256")
    if claimed.tobytes() != _checksum(arrays):
        raise Damaged("its checksum does not match")
    if arrays.pop("header").tobytes() != _header(cell, first):
        raise Damaged("it is a tile of another cell, range or format")
    rows = {}
    for i, method in enumerate(cell.methods):
        parts: list[Any] = [arrays[f"{i}.{name}"] for name in _ARRAYS]
        if not _fits(parts, cell):
            raise Damaged("its arrays do not have the shape of the cell")
        if parts[-1].max(initial=0) > max(Cause):
            raise Damaged("it has a cause of failure that is none")
        rows[method.name] = MethodRows(*parts)
    return rows


def _fits(parts: list[Any], cell: CellSpec) -> bool:
    if parts[0].ndim != 3:
        return False
    saves, count, coordinates = parts[0].shape
    half = (saves, len(cell.levels), count, coordinates)
    shapes = [(saves, count, coordinates)] * 2 + [half] + [(saves, count)] * 2
    kinds = list(_ARRAYS.values())
    found = [part.shape for part in parts], [part.dtype.str for part in parts]
    return count == cell.tile_size and found == (shapes, kinds)


def _arrays(content: bytes, methods: int) -> dict[str, np.ndarray]:
    """The arrays of a tile, none larger than the bytes that it was read from."""
    names = ["header", *(f"{i}.{name}" for i in range(methods) for name in _ARRAYS), "sha256"]
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = archive.infolist()
            if [member.filename for member in members] != [f"{name}.npy" for name in names]:
                raise Damaged("it does not hold the arrays of a tile of this cell")
            # Stored members that do not overlap cannot unpack to more than the file itself.
            if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                raise Damaged("it is compressed, which no tile is")
            if sum(member.file_size for member in members) > len(content):
                raise Damaged("its parts are larger than the whole")
            return {name: _array(archive.read(f"{name}.npy")) for name in names}
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile, NotImplementedError) as error:
        raise Damaged(f"it is cut short or altered ({error})") from error


def _array(raw: bytes) -> np.ndarray:
    """One array of plain numbers; unlike `numpy.load`, nothing is made room for on its say-so."""
    length = 10 + int.from_bytes(raw[8:10], "little")
    shape, by_column, dtype = _array_header(raw[:length])
    data = memoryview(raw)[length:]
    if by_column or dtype.hasobject or math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError("an array that is not what it says")
    return np.frombuffer(data, dtype).reshape(shape)


@functools.lru_cache(maxsize=256)  # few differ, and NumPy parses them as Python
def _array_header(raw: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    file = io.BytesIO(raw)
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("an array in another format")
    return np.lib.format.read_array_header_1_0(file)
