"""Interleaved repeats, ratios with their spread, and findings that are judged against a target."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import statistics
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
        """Summarises repeats."""
        low, middle, high = np.quantile(np.asarray(values, np.float64), [0.25, 0.5, 0.75]).tolist()
        return cls(middle, low, high)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One number of a benchmark, with what was asked of it.

    Attributes:
      case: what was run.
      what: what the number is.
      value: median of the repeats, or a count.
      unit: of the value; "×" for a ratio.
      low, high: quartiles of the repeats, equal to the value where there is one measurement only.
      target: what was asked, as text; "" where nothing was.
      met: whether it was met; None where nothing was asked.
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
    """A finding, judged by its median against the bounds that are given."""
    spread = value if isinstance(value, Spread) else Spread(*[float(value)] * 3)
    bounds = [("≥", at_least), ("≤", at_most)]
    target = " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)
    low = -np.inf if at_least is None else at_least
    high = np.inf if at_most is None else at_most
    met = bool(low <= spread.value <= high) if target else None
    return Finding(case, what, spread.value, unit, spread.low, spread.high, target, met)


def seconds(job: Callable[[], Any]) -> float:
    """Wall time of one call."""
    began = time.perf_counter()
    job()
    return time.perf_counter() - began


def interleaved(jobs: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Times every job once a repeat, in turn, so that what the machine does meets all alike.

    A job that returns a number (a worker that took its own time) is taken at its word.
    """
    found: dict[str, list[float]] = {name: [] for name in jobs}
    names = list(jobs)
    for repeat in range(repeats):
        # There and back, so that no job always runs in the wake of the same other.
        for name in names if repeat % 2 == 0 else reversed(names):
            began = time.perf_counter()
            told = jobs[name]()
            took = time.perf_counter() - began
            found[name].append(told if isinstance(told, float) else took)
    return found


def ratio(above: Sequence[float], below: Sequence[float]) -> Spread:
    """Median and quartiles of the ratios within each repeat."""
    return Spread.of([a / b for a, b in zip(above, below, strict=True)])


def exponent(sizes: Sequence[float], times: Sequence[Sequence[float]]) -> Spread:
    """Slope of log time in log size, fitted in every repeat."""
    slopes = [
        float(np.polyfit(np.log(sizes), np.log(each), 1)[0]) for each in zip(*times, strict=True)
    ]
    return Spread.of(slopes)


def medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Median of every job."""
    return {name: statistics.median(each) for name, each in times.items()}


@contextlib.contextmanager
def worker(make: Callable[..., Callable[[], Any]], *arguments: Any) -> Iterator[Callable[[], Any]]:
    """A fresh process that calls `make(*arguments)` once, and then its result whenever asked.

    For what is fixed when a process starts: its cores, its devices, its peak memory.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, make, arguments), daemon=True)
    process.start()
    there.close()

    def ask(word: str = "run") -> Any:
        here.send(word)
        answer = here.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    try:
        ask("ready")
        yield ask
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


def forget_peak() -> int:
    """Lets the peak start anew (Linux); returns the memory of this process now."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_bytes() -> int:
    """Peak resident memory of this process since the last `forget_peak`."""
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
