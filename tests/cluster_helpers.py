"""A Dask cluster of real processes for tests, each with a time limit after which it is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from study_helpers import LIMIT, environment, wait_until


def limited(command: list[str], **options: Any) -> subprocess.Popen[str]:
    """Starts a process in a group of its own, which ends with SIGKILL whatever happens to us."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    settings = {"env": environment(), "start_new_session": True} | pipes | options
    return subprocess.Popen(["timeout", "-s", "KILL", str(LIMIT), *command], **settings)


def kill(process: subprocess.Popen[str], number: int = signal.SIGKILL) -> None:
    """Sends a signal to a process and all that it started."""
    if process.poll() is None:
        os.killpg(process.pid, number)


def cli(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """The command line."""
    return limited([sys.executable, "-m", "jaxlsgd.cli", *map(str, arguments)], **options)


def script(text: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    """A program of Python."""
    return limited([sys.executable, "-c", text, *map(str, arguments)], **options)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Waits for the end; returns exit code, stdout and stderr."""
    try:
        out, err = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        kill(process)
        pytest.fail(f"no end within {LIMIT} s: {process.communicate()}")
    return process.returncode, out, err


class Cluster:
    """A scheduler at a fixed address, and workers."""

    def __init__(self, env: dict[str, str]) -> None:
        self.env = env
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.address = f"tcp://127.0.0.1:{self.port}"
        self.processes: list[subprocess.Popen[str]] = []

    def scheduler(self) -> subprocess.Popen[str]:
        """Starts a scheduler and waits until it listens."""
        where = ["--host", "127.0.0.1", "--port", str(self.port)]
        process = self._start("scheduler", *where, "--no-dashboard", "--no-show")
        wait_until(self._listens, process)
        return process

    def worker(self, *options: str, **settings: Any) -> subprocess.Popen[str]:
        """Starts a worker of one thread; its nanny starts it anew when it dies."""
        return self._start(
            "worker", self.address, "--nthreads", "1", "--no-dashboard", *options, **settings
        )

    def _start(self, what: str, *options: str, **settings: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "dask", what, *options]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": self.env}
        process = limited(command, **(quiet | settings))
        self.processes.append(process)
        return process

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


@contextmanager
def cluster(workers: int = 0, env: dict[str, str] | None = None) -> Iterator[Cluster]:
    """A cluster that is gone at the end; all of its processes have the environment `env`."""
    made = Cluster(env or environment())
    try:
        made.scheduler()
        for _ in range(workers):
            made.worker()
        yield made
    finally:
        for process in made.processes:
            kill(process)
            process.wait()
