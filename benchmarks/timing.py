"""Interleaved repeats, ratios with their spread, findings judged against a target, fresh processes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Spread(NamedTuple):
    """A median with the quartiles around it."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise repeats."""
        low, middle, high = np.quantile(np.asarray(values, np.float64), [0.25, 0.5, 0.75]).tolist()
        return cls(middle, low, high)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One number of a benchmark, with its target.

    Attributes:
      case: what was run.
      what: what the number is.
      value: median of the repeats, or a count.
      unit: of the value; "×" for a ratio.
      low, high: quartiles of the repeats, equal to the value if there is one measurement.
      target: the bound as text, or "".
      met: whether it was met; None without a target.
    """

    case: str
    what: str
    value: float
    unit: str = "×"
    low: float = float("nan")
    high: float = float("nan")
    target: str = ""
    met: bool | None = None


def finding(
    case: str,
    what: str,
    value: float | Spread,
    unit: str = "×",
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Finding:
    """Return a finding, judged by its median against the bounds that are given."""
    spread = value if isinstance(value, Spread) else Spread(*[float(value)] * 3)
    bounds = [("≥", at_least), ("≤", at_most)]
    target = " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)
    low = -np.inf if at_least is None else at_least
    high = np.inf if at_most is None else at_most
    met = bool(low <= spread.value <= high) if target else None
    return Finding(case, what, spread.value, unit, spread.low, spread.high, target, met)


def seconds(job: Callable[[], Any]) -> float:
    """Return the wall time of one call."""
    began = time.perf_counter()
    job()
    return time.perf_counter() - began


def interleaved(jobs: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Time every job once per repeat, in turn, so that other load on the machine affects all alike.

    The time of a job that returns a float (a worker that timed itself) is that number.
    """
    found: dict[str, list[float]] = {name: [] for name in jobs}
    names = list(jobs)
    for repeat in range(repeats):
        # There and back, so that no job always runs in the wake of the same other.
        for name in names if repeat % 2 == 0 else reversed(names):
            began = time.perf_counter()
            result = jobs[name]()
            took = time.perf_counter() - began
            found[name].append(result if isinstance(result, float) else took)
    return found


def ratio(above: Sequence[float], below: Sequence[float]) -> Spread:
    """Return median and quartiles of the ratios within each repeat."""
    return Spread.of([a / b for a, b in zip(above, below, strict=True)])


def exponent(sizes: Sequence[float], times: Sequence[Sequence[float]]) -> Spread:
    """Return the slope of log time in log size, fitted in every repeat."""
    slopes = [
        float(np.polyfit(np.log(sizes), np.log(each), 1)[0]) for each in zip(*times, strict=True)
    ]
    return Spread.of(slopes)


def rates(case: str, work: float, times: Mapping[str, Sequence[float]]) -> list[Finding]:
    """Return the rate of every job, for a work of so many million client-steps."""
    unit = "million client-steps per second"
    return [
        finding(case, name, Spread.of([work / took for took in each]), unit)
        for name, each in times.items()
    ]


def medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median of every job."""
    return {name: statistics.median(each) for name, each in times.items()}


@contextlib.contextmanager
def worker(make: Callable[..., Callable[[], Any]], *arguments: Any) -> Iterator[Callable[[], Any]]:
    """Start a process that calls `make(*arguments)` once, and then its result per call of what is yielded.

    For what is fixed when a process starts: its cores, its devices, its peak memory.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, make, arguments), daemon=True)
    process.start()
    there.close()

    def call(word: str = "run") -> Any:
        here.send(word)
        answer = here.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    try:
        call("ready")
        yield call
    finally:
        with contextlib.suppress(OSError):
            here.send("end")
        process.join(30)
        if process.is_alive():
            process.kill()


def _serve(pipe: Any, make: Callable[..., Callable[[], Any]], arguments: tuple[Any, ...]) -> None:
    try:
        job = make(*arguments)
        while (word := pipe.recv()) != "end":
            pipe.send(job() if word == "run" else None)
    except EOFError:
        return
    except Exception as error:
        pipe.recv()
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))


def fresh(module: str, function: str, cache: str, *arguments: str) -> Any:
    """Call a function of a benchmark in a fresh process with its compilation cache in a directory.

    The function's last argument is the time at which the process was started.
    """
    code = f"import json, sys\nfrom benchmarks import {module}\n"
    code += f"print(json.dumps({module}.{function}(*sys.argv[1:-1], float(sys.argv[-1]))))"
    root = Path(__file__).resolve().parents[1]
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": cache, "PYTHONPATH": path}
    # The package's own setting, which it does not make if the user has named a directory.
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    command = [sys.executable, "-c", code, *arguments, str(time.time())]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def forget_peak() -> int:
    """Reset the peak (Linux) and return the memory of this process now."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_bytes() -> int:
    """Return the peak resident memory of this process since the last `forget_peak`."""
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
