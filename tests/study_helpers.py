"""A study small enough for tests, and the command line in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from jaxlsgd.core.rows import MethodRows
from jaxlsgd.study import Study
from jaxlsgd.study.grid import Cell

ROOT = Path(__file__).parents[1]
# One cache of compiled programs for all processes of all tests: compiling is most of their time.
CACHE = Path(tempfile.gettempdir()) / f"jaxlsgd-test-cache-{os.getuid()}"

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


def fake_rows(cell: Cell, first: int) -> dict[str, MethodRows]:
    """Rows of the right shape, a function of the cell and the range, without any computing."""
    saves = len(cell.saved_rounds(cell.plan().num_rounds))
    shape = (saves, cell.tile_size, cell.problem.dim)
    base = np.zeros(shape) + first + np.arange(cell.tile_size)[:, None]
    half = np.repeat(base[:, None], len(cell.levels), axis=1)
    floored = np.zeros(shape[:2], bool)
    return {method.name: MethodRows(base, base + 1, half + 2, floored) for method in cell.methods}


def environment() -> dict[str, str]:
    """The environment of a process that finds the package and the cache."""
    keep = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
    return keep | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(CACHE)}


def start(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """Starts the command line; its output is text on pipes."""
    command = [sys.executable, "-m", "jaxlsgd.cli", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **(pipes | {"env": environment()} | options))


def call(*arguments: object, **options: Any) -> tuple[int, str, str]:
    """Runs the command line; returns exit code, stdout and stderr."""
    process = start(*arguments, **options)
    try:
        out, err = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


def tiles(directory: Path) -> dict[str, bytes]:
    """The bytes of every tile by its path."""
    paths = sorted(directory.glob("cells/*/tile-*.npz"))
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}
