"""Files: read with a limit, written whole or not at all, and arrays sealed by a checksum."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import io
import math
import os
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def read_regular(path: Path, most: int) -> bytes:
    """Return up to `most` bytes of a regular file, and one more if it is longer.

    Other kinds (a pipe, a terminal, a device) are refused, because reading them might never end.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "it is a directory")
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        with open(handle, "rb", closefd=False) as file:
            return file.read(most + 1)
    finally:
        os.close(handle)


# What helps if a file cannot be written.
HINTS = {
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS), "; choose a directory that you may write to"
    ),
    errno.ENOSPC: "; free some space and run the same command again",
    errno.EDQUOT: "; free some of your quota and run the same command again",
    errno.EFBIG: "; raise the limit on file sizes and run the same command again",
}
_KINDS = (
    (stat.S_ISDIR, errno.EISDIR, "a directory"),
    (stat.S_ISFIFO, errno.EEXIST, "a pipe"),
    (stat.S_ISSOCK, errno.EEXIST, "a socket"),
    (lambda mode: True, errno.EEXIST, "a device"),
)


def check_replaceable(path: Path, hint: str = "") -> None:
    """Refuse a path unless it is free or a regular file: directories, links, pipes and devices are never replaced."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISLNK(mode):
        text = f"it is a link to {os.readlink(path)}, which is not replaced{hint}"
        raise FileExistsError(errno.EEXIST, text, str(path))
    if not stat.S_ISREG(mode):
        number, kind = next((number, kind) for test, number, kind in _KINDS if test(mode))
        raise OSError(number, f"it is {kind}{hint}", str(path))


def check_output(path: Path) -> None:
    """Refuse a path that cannot be written: no directory is there, or something else than a regular file."""
    folder = path.parent
    if not folder.is_dir():
        words = "it is not a directory" if os.path.lexists(folder) else "there is no such directory"
        raise NotADirectoryError(
            errno.ENOTDIR, f"{words}; make it, or choose another place", str(folder)
        )
    check_replaceable(path, "; give the name of a file")


@contextlib.contextmanager
def replacing(path: Path, force: bool = False) -> Iterator[Path]:
    """Yield a temporary path, which replaces `path` once it is written; an existing file needs `force`.

    Errors of the operating system name `path`, and what helps.
    """
    check_output(path)
    if not force and os.path.lexists(path):
        raise FileExistsError(
            errno.EEXIST, "it exists already; another name, or --force", str(path)
        )
    folder = None
    try:
        # In a new directory, so that there cannot be a link.
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        temporary = folder / path.name
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.errno is None:
            raise
        text = f"{os.strerror(error.errno)}{HINTS.get(error.errno, '')}"
        raise OSError(error.errno, text, str(path)) from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


_SEAL = "sha256"


class Broken(ValueError):
    """A file whose content is not what was written."""


def seal(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return the content of a file with these arrays and their checksum, a function of the arrays alone."""
    return npz({**arrays, _SEAL: np.frombuffer(_checksum(arrays), np.uint8)})


def npz(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return what `numpy.savez` would write, byte for byte, for arrays of plain numbers with any names.

    `savez` itself takes names as keywords: it cannot store an array called `file`, and before
    NumPy 2.2 it stored `allow_pickle=False` as another array.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            # A member opened by its name gets a fixed date.
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)
    return buffer.getvalue()


def unseal(content: bytes, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the arrays of a file, which must have these names; raise `Broken` if anything was altered."""
    arrays = _arrays(content, (*names, _SEAL))
    if arrays.pop(_SEAL).tobytes() != _checksum(arrays):
        raise Broken("its checksum does not match")
    return arrays


def first_array(content: bytes, name: str) -> np.ndarray:
    """Return the first array of a file, unchecked; it may describe the others."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            member = archive.infolist()[0]
            if member.filename != f"{name}.npy" or member.file_size > len(content):
                raise Broken(f"it does not begin with {name}")
            return _array(archive.read(member))
    except (ValueError, EOFError, IndexError, zipfile.BadZipFile, NotImplementedError) as error:
        raise Broken(f"it is cut short or altered ({error})") from error


def _checksum(arrays: Mapping[str, np.ndarray]) -> bytes:
    total = hashlib.sha256()
    for name, array in arrays.items():
        total.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        total.update(array.tobytes())
    return total.digest()


def _arrays(content: bytes, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the arrays; none may be larger than the file."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = archive.infolist()
            if [member.filename for member in members] != [f"{name}.npy" for name in names]:
                raise Broken("it does not hold the arrays that it should")
            # Stored members that do not overlap cannot unpack to more than the file itself.
            if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                raise Broken("it is compressed, which we never do")
            if sum(member.file_size for member in members) > len(content):
                raise Broken("its parts are larger than the whole")
            return {name: _array(archive.read(f"{name}.npy")) for name in names}
    except Broken:
        raise
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile, NotImplementedError) as error:
        raise Broken(f"it is cut short or altered ({error})") from error


def _array(raw: bytes) -> np.ndarray:
    """Return one array of plain numbers; unlike `numpy.load`, allocate nothing that its header claims."""
    length = 10 + int.from_bytes(raw[8:10], "little")
    shape, by_column, dtype = _array_header(raw[:length])
    data = memoryview(raw)[length:]
    if by_column or dtype.hasobject or math.prod(shape) * dtype.itemsize != len(data):
        raise Broken("an array whose header does not fit its data")
    return np.frombuffer(data, dtype).reshape(shape)


@functools.lru_cache(maxsize=256)  # few are different, and NumPy parses them as Python code
def _array_header(raw: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    file = io.BytesIO(raw)
    if np.lib.format.read_magic(file) != (1, 0):
        raise Broken("an array in another format")
    return np.lib.format.read_array_header_1_0(file)
