"""Loaded by every process of a run that a test holds in place: jobs wait until they are let go.

The directory HELD has a file `let` with the number of jobs that may run. A job takes a ticket when it
begins, `ticket-0`, `ticket-1`, …, and waits until its number is below that. See `study_helpers.Held`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

LONGEST = 900  # seconds: a net, below which nothing is asserted


def hold_jobs(jobs: Any) -> None:
    """Has every job of this process wait for its turn."""
    honest = jobs.run_job

    def run_job(job: Any, device: Any = None) -> Any:
        wait(take_ticket(Path(os.environ["HELD"])))
        yield from honest(job, device)

    jobs.run_job = run_job


def take_ticket(folder: Path) -> tuple[Path, int]:
    """A number that no other job of any process has."""
    for number in range(100_000):
        try:
            os.close(os.open(folder / f"ticket-{number}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        return folder, number
    raise RuntimeError("no ticket is left")


def wait(ticket: tuple[Path, int]) -> None:
    """Until the number is called."""
    folder, number = ticket
    deadline = time.monotonic() + LONGEST
    while number >= int((folder / "let").read_text()):
        if time.monotonic() > deadline:
            raise TimeoutError("nobody let this job go")
        time.sleep(0.01)


def be_patient(dask: Any) -> None:
    """A busy machine must not look like a scheduler that is gone."""
    dask.CONNECT = dask.RECONNECT = dask._FETCH = float(LONGEST)


CHANGES = {"jaxlsgd.study.jobs": hold_jobs, "jaxlsgd.study.executors.dask": be_patient}


class Finder:
    """Changes modules as they are loaded."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The module's own loader, with the change behind it."""
        if name not in CHANGES:
            return None
        change = CHANGES.pop(name)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        honest = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            honest(module)
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "HELD" in os.environ:
    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
