"""A study small enough for tests, and the command line in a process of its own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import compiling
import numpy as np
import pytest

from jaxlsgd.core.rows import MethodRows
from jaxlsgd.study import Study
from jaxlsgd.study.cells import CellSpec
from jaxlsgd.study.store.writer import Writer

ROOT = Path(__file__).parents[1]
# One cache of compiled programs for all processes of all tests: compiling is most of their time.
CACHE = Path(tempfile.gettempdir()) / f"jaxlsgd-test-cache-{os.getuid()}"
# Seconds after which something hangs: a net, and nothing that a test says about speed.
LIMIT = 600

TOML = """\
schedules = ["C1", "P(1/2)"]
horizons = [40]
methods = ["plug_in", "random_scaling"]
replications = 80
tile_size = 16
warmup = 0.05
save_at = 4

[[problems]]
kind = "linear"
dim = 2
num_clients = 3
"""


def small(**changes: Any) -> Study:
    """The study of `TOML`, with changes."""
    table = {
        "problems": [{"kind": "linear", "dim": 2, "num_clients": 3}],
        "schedules": ["C1", "P(1/2)"],
        "horizons": [40],
        "methods": ["plug_in", "random_scaling"],
        "replications": 80,
        "tile_size": 16,
        "warmup": 0.05,
        "save_at": 4,
    }
    return Study.from_dict(table | changes)


def missing(writer: Writer) -> list[tuple[CellSpec, int]]:
    """The tiles that a run would compute."""
    firsts = writer.results.firsts()
    return [(cell, x) for cell in writer.study.cells for x in firsts if writer.lacks(cell, x)]


def fake_rows(cell: CellSpec, first: int) -> dict[str, MethodRows]:
    """Rows of the right shape, a function of the cell and the range, without any computing."""
    saves = len(cell.saved_rounds(cell.plan()))
    shape = (saves, cell.tile_size, cell.problem.fact("dim"))
    base = np.zeros(shape) + first + np.arange(cell.tile_size)[:, None]
    half = np.repeat(base[:, None], len(cell.levels), axis=1)
    floored = np.zeros(shape[:2], bool)
    return {method.name: MethodRows(base, base + 1, half + 2, floored) for method in cell.methods}


def environment() -> dict[str, str]:
    """The environment of a process that finds the package and the cache."""
    keep = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
    places = {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(CACHE)}
    return keep | places | compiling.inherited()


def start(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """Starts the command line; its output is text on pipes."""
    command = [sys.executable, "-m", "jaxlsgd.cli", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **(pipes | {"env": environment()} | options))


def call(*arguments: object, **options: Any) -> tuple[int, str, str]:
    """Runs the command line; returns exit code, stdout and stderr."""
    process = start(*arguments, **options)
    try:
        out, err = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


@contextlib.contextmanager
def stopped_by_permissions() -> Iterator[None]:
    """Lets the modes of files stop root as well, wherever the clone and the temporary directory lie.

    Root gives up the two capabilities by which modes do not apply to it. To become another user would not
    do: that user may not even enter a clone, or a temporary directory, that is private.
    """
    if os.geteuid() != 0:
        yield
        return
    libc, header = ctypes.CDLL(None, use_errno=True), (ctypes.c_uint32 * 2)(_CAPABILITIES_3, 0)
    if not hasattr(libc, "capset"):
        pytest.skip("root cannot be stopped by permissions here")
    sets = (
        ctypes.c_uint32 * 6
    )()  # effective, permitted, inheritable; the same of capabilities from 32 on
    if libc.capget(header, sets):
        raise OSError(ctypes.get_errno(), "capget")
    before = sets[0]
    sets[0] = before & ~_IGNORE_MODES
    if libc.capset(header, sets):
        raise OSError(ctypes.get_errno(), "capset")
    try:
        yield
    finally:
        sets[0] = before
        libc.capset(header, sets)


_CAPABILITIES_3 = 0x20080522  # version of the structures that capget(2) and capset(2) use
_IGNORE_MODES = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


def tiles(directory: Path) -> dict[str, bytes]:
    """The bytes of every tile by its path."""
    paths = sorted(directory.glob("cells/*/tile-*.npz"))
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


def count(directory: Path) -> int:
    """Tiles that are committed."""
    return len(list(directory.glob("cells/*/tile-*.npz")))


def wait_until(true: Callable[[], Any], process: subprocess.Popen[str]) -> None:
    """Waits for something to become true while a process lives."""
    deadline = time.monotonic() + LIMIT
    while not true():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def read_until(stream: IO[str] | None, words: str) -> str:
    """Reads lines up to the one with these words; returns them all."""
    assert stream is not None
    text = ""
    while words not in text:
        line = stream.readline()
        assert line, f"the end came before {words!r}: {text}"
        text += line
    return text


class Held:
    """A run in place: its processes wait, before each job, until a test lets them go on.

    Whatever a test then does to the run happens in its middle, however slow the machine is.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.let(0)

    @property
    def environment(self) -> dict[str, str]:
        """That of the processes to hold."""
        path = os.pathsep.join([str(ROOT / "tests" / "held"), str(ROOT)])
        return environment() | {"PYTHONPATH": path, "HELD": str(self.folder)} | _PATIENT

    def let(self, jobs: int) -> None:
        """Lets so many jobs go, counted from the first that ever began."""
        new = self.folder / "new"
        new.write_text(str(jobs))
        new.replace(self.folder / "let")

    @property
    def allowed(self) -> int:
        """Jobs that may go."""
        return int((self.folder / "let").read_text())

    def open(self) -> None:
        """Holds nothing any more."""
        self.let(10**9)

    @property
    def begun(self) -> int:
        """Jobs that have begun, whether they wait or not."""
        return len(list(self.folder.glob("ticket-*")))


# Dask's own limits, so that a busy machine does not look like one that is gone.
_PATIENT = {
    "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": f"{LIMIT}s",
    "DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP": f"{LIMIT}s",
}
