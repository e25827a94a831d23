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


def check_output(path: Path) -> None:
    """Refuse a file that cannot be written because of its place, before anything is computed for it.

    Args:
      path: the file to write; its directory must be there, and it must not be a directory itself.
    """
    folder = path.parent
    if not folder.is_dir():
        words = "it is not a directory" if os.path.lexists(folder) else "there is no such directory"
        raise NotADirectoryError(
            errno.ENOTDIR, f"{words}; make it, or choose another place", str(folder)
        )
    if path.is_dir():
        raise IsADirectoryError(
            errno.EISDIR, "it is a directory; give the name of a file", str(path)
        )


@contextlib.contextmanager
def replacing(path: Path, force: bool = False) -> Iterator[Path]:
    """A place to write a file to, which takes its name when all is written; else nothing changes.

    Args:
      path: the file.
      force: whether to replace what has this name.
    """
    check_output(path)
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
