"""Processes that cannot outlive their time: at its end they are killed, with all they have started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import compiling

TESTS = Path(__file__).parent
CACHE = Path(tempfile.gettempdir()) / f"jaxlsgd-test-cache-{os.getuid()}" / "meshes"


class Ended(NamedTuple):
    """How a process ended."""

    code: int | None  # None where it had to be killed
    output: str
    seconds: float


def environment(devices: int, **more: str) -> dict[str, str]:
    """The environment of a process with so many CPU devices, which finds the package."""
    keep = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
    settings = {
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", str(CACHE)),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    flags = f"{compiling.inherited()['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    return keep | settings | {"XLA_FLAGS": flags.strip()} | more


def start(arguments: Sequence[object], env: dict[str, str]) -> subprocess.Popen[str]:
    """Starts a Python process in a group of its own, with all output in one pipe."""
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str], limit: float) -> Ended:
    """Waits for a process, and kills it with SIGKILL when its time is over."""
    began = time.monotonic()
    try:
        output, code = process.communicate(timeout=limit)[0], process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, code = process.communicate()[0], None
    return Ended(code, output, time.monotonic() - began)


def run(arguments: Sequence[object], env: dict[str, str], limit: float) -> Ended:
    """Runs a Python process for at most `limit` seconds."""
    return end(start(arguments, env), limit)


def run_together(
    arguments: Sequence[object], count: int, devices: int, limit: float
) -> list[Ended]:
    """Runs one script as several processes that meet on loopback."""
    all_ = [start(arguments, environment(devices, **meeting)) for meeting in meetings(count)]
    deadline = time.monotonic() + limit
    return [end(process, max(0.1, deadline - time.monotonic())) for process in all_]


def meetings(count: int) -> list[dict[str, str]]:
    """Settings by which so many processes find one another."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    common = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count)}
    return [common | {"JAX_PROCESS_ID": str(number)} for number in range(count)]
