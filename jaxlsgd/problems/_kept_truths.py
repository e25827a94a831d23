"""Truths that were solved for, kept beside JAX's compiled programs and named by what they were computed from.

They are kept where, and only if, JAX keeps its programs: `jaxlsgd.prepare()` says where, and whoever switches that
off (`JAX_ENABLE_COMPILATION_CACHE=false`) switches this off. A lost or damaged file does no harm: the truth is
computed again.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import stat
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxlsgd.core import storage
from jaxlsgd.core.identity import digest

FOLDER = "truths"
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_LIBRARIES = ("jax", "jaxlib", "numpy")


class Root(NamedTuple):
    """Where a mean gradient vanishes, and what the sample says there."""

    x: np.ndarray  # (d,)
    G: np.ndarray  # (d, d)
    S: np.ndarray  # (d, d)
    covariance: np.ndarray  # (d, d) of the error of x
    residual: np.ndarray  # () largest |gradient| over its standard error


def folder() -> Path | None:
    """Make and return the directory of kept truths; None if nothing is kept.

    It belongs to this user alone: what others could write there would be taken for a truth.
    """
    names = ("jax_compilation_cache_dir", "jax_enable_compilation_cache")
    programs, enabled = (getattr(jax.config, name) for name in names)
    if not programs or not enabled or "://" in programs:  # in a cloud's storage
        return None
    path = Path(programs) / FOLDER
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        return path if _is_private(path.lstat()) else None
    except OSError:
        return None


def _is_private(found: os.stat_result) -> bool:
    """Return whether what was found is a directory, and no link to one, that only this user can write to."""
    if not stat.S_ISDIR(found.st_mode):
        return False
    return not hasattr(os, "getuid") or (
        found.st_uid == os.getuid() and not found.st_mode & _OTHERS
    )


def name(*parts: Any) -> str:
    """Return the name of the file for a truth that is computed from these parts on this machine."""
    versions = [importlib.metadata.version(library) for library in _LIBRARIES]
    device = jax.local_devices()[0]
    flags = os.environ.get("XLA_FLAGS", "")
    where = [device.platform, device.device_kind, platform.machine(), flags]
    return f"{digest((*versions, *where, *parts))}.npz"


def read(path: Path, dim: int) -> Root | None:
    """Return the truth in a file; None if there is none, or one that is not what was written."""
    shapes = [(dim,), *3 * [(dim, dim)], ()]
    most = 8 * (dim + 3 * dim**2 + 1) + 100_000
    try:
        content = storage.read_regular(path, most)
        arrays = storage.unseal(content, (*Root._fields, path.name))
    except (OSError, storage.Broken):
        return None
    # What is read cannot be written to.
    root = Root(*(arrays[field].copy() for field in Root._fields))
    fits = [(part.shape, part.dtype) for part in root] == [(shape, np.float64) for shape in shapes]
    return root if fits else None


def write(path: Path, root: Root) -> None:
    """Keep a truth, if the disk has room for it."""
    # With the file's own name in it, so that a file under another name is not taken for that one.
    content = storage.seal({**root._asdict(), path.name: np.zeros(0)})
    with contextlib.suppress(OSError), storage.replacing(path, force=True) as temporary:
        temporary.write_bytes(content)
