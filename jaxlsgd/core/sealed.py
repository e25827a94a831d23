"""Arrays in one file with a checksum, read back without trusting it.

The file is an npz: named arrays of plain numbers, stored as they are, the last one the SHA-256 of the others.
Nothing is unpickled, and nothing is made room for on the file's say-so.
"""

from __future__ import annotations

import functools
import hashlib
import io
import math
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_SEAL = "sha256"


class Broken(ValueError):
    """A file whose content is not what was written."""


def seal(arrays: Mapping[str, np.ndarray]) -> bytes:
    """The file, a function of the arrays alone: `numpy.savez` writes no times."""
    whole = {**arrays, _SEAL: np.frombuffer(_checksum(arrays), np.uint8)}
    buffer = io.BytesIO()
    # Without `allow_pickle`, which NumPy 2.0 takes for an array; there are plain numbers only.
    np.savez(buffer, **whole)
    return buffer.getvalue()


def unseal(content: bytes, names: Sequence[str]) -> dict[str, np.ndarray]:
    """The arrays of a file, which must have these names; raises `Broken` unless all is as written."""
    arrays = _arrays(content, (*names, _SEAL))
    if arrays.pop(_SEAL).tobytes() != _checksum(arrays):
        raise Broken("its checksum does not match")
    return arrays


def first_array(content: bytes, name: str) -> np.ndarray:
    """The first array of a file, not checked; it may say what the others are."""
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
    """The arrays, none larger than the bytes that it was read from."""
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
