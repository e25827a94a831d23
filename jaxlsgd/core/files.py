"""Files that come from people."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path


def read_regular(path: Path, most: int) -> bytes:
    """Up to `most` bytes of a regular file, and one more if it has more.

    Anything else could keep a reader waiting for ever: a pipe, a terminal, a device.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        return file.read(most + 1)


@contextlib.contextmanager
def replacing(path: Path, force: bool = False) -> Iterator[Path]:
    """A place to write a file to, which takes its name when all is written; else nothing changes.

    Args:
      path: the file.
      force: whether to replace what has this name.
    """
    if not force and os.path.lexists(path):
        raise FileExistsError(
            errno.EEXIST, "it exists already; another name, or --force", str(path)
        )
    # In a directory of its own: nobody can have put a link there.
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        temporary = folder / path.name
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
