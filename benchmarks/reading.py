"""Where the seconds of a study go, by method: the paper's own study in CPU-seconds, part by part.

Every set of methods runs the study of `jaxlsgd init --paper` once in a process of its own, with programs from the cache,
on one device, so that the CPU time of the process between two points is that of the part between them. Other work on the
machine then matters little. `python -m benchmarks.reading --out FILE` writes the table.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.timing import Finding, Spread, finding

CHEAP = ("plug_in", "random_scaling[paper]")
DEFAULT = (
    "plug_in",
    "plug_in[finite]",
    "random_scaling[paper]",
    "random_scaling[finite]",
    "one_step",
)
SETS = {
    "the cheap two": CHEAP,
    "and plug_in[finite]": (*CHEAP, "plug_in[finite]"),
    "and random_scaling[finite]": (*CHEAP, "random_scaling[finite]"),
    "and one_step": (*CHEAP, "one_step"),
    "one_step alone": ("one_step",),
    "all five": DEFAULT,
}
MOST = {"all five": 1.8, "one_step alone": 1.2}  # times the cheap two
PARTS = ("start", "programs", "steps", "reading", "loss", "tables", "commit", "other")


class _Clock:
    """CPU-seconds of this process by part; a part inside another counts for itself alone."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._inside: list[str] = ["other"]
        self._last = time.process_time()

    def switch(self) -> None:
        now = time.process_time()
        self.seconds[self._inside[-1]] += now - self._last
        self._last = now

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose time counts for a part."""

        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            self.switch()
            self._inside.append(part)
            try:
                return function(*arguments, **options)
            finally:
                self.switch()
                self._inside.pop()

        return call


def profile(methods: list[str], replications: int, steps: int) -> dict[str, float]:
    """Return the CPU-seconds of a study by part. In a process of its own.

    The study runs twice: what the second run does not need is programs, read from the cache and started.
    """
    from benchmarks import cases

    device = cases.start(1)[0]
    from jaxlsgd.study import runner
    from jaxlsgd.study.study import Study

    start = time.process_time()
    paper = tomllib.loads(Path(runner.__file__).with_name("paper.toml").read_text())
    changed = {"replications": replications, "methods": methods, "horizons": [steps]}
    study, runs = Study.from_dict(paper | changed), []
    clock = _watched()
    for _ in range(2):
        clock.seconds.clear()
        with tempfile.TemporaryDirectory() as directory:
            clock.timed("other", runner.run)(study, Path(directory) / "rows", devices=[device])
        runs.append(dict(clock.seconds))
    first, second = runs
    found = second | {"start": start, "tables": first.get("tables", 0.0)}
    found["programs"] = sum(first.values()) - sum(second.values()) - found["tables"]
    return {part: max(0.0, found.get(part, 0.0)) for part in PARTS}


def _watched() -> _Clock:
    """Return a clock that the functions of a run switch from part to part."""
    from jaxlsgd.engine import probe, statistics
    from jaxlsgd.inference.laws import tables
    from jaxlsgd.runs import simulate
    from jaxlsgd.study.executors import threads
    from jaxlsgd.study.store.writer import Writer

    clock = _Clock()
    watched: Any = [
        ("reading", statistics, "measure"),
        ("loss", probe, "growth"),
        ("reading", simulate, "method_rows"),
        ("tables", tables, "table_rows"),
        ("commit", Writer, "commit"),
    ]
    for part, place, name in watched:
        setattr(place, name, clock.timed(part, getattr(place, name)))
    run_job: Any = threads.run_job

    def stepping(job: Any, device: Any) -> Any:
        # In the thread of the device, which is the only one that works meanwhile.
        events = run_job(job, device)
        while (event := clock.timed("steps", next)(events, None)) is not None:
            yield event

    threads.run_job = stepping
    return clock


def run(quick: bool, repeats: int = 3) -> tuple[list[Finding], dict[str, Any]]:
    """Profile all sets of methods, several times in turn."""
    sizes = (64, 300) if quick else (1_000, 5_000)
    sets = dict(list(SETS.items())[:2]) if quick else SETS
    raw: dict[str, list[dict[str, float]]] = {name: [] for name in sets}
    for repeat in range(0 if quick else -1, 1 if quick else repeats):
        for name, methods in sets.items():
            found = _in_process(methods, *sizes)
            if repeat >= 0:  # the one before fills the cache
                raw[name].append(found)
    return findings_of(raw), {"replications": sizes[0], "num_steps": sizes[1], "seconds": raw}


def findings_of(raw: dict[str, list[dict[str, float]]]) -> list[Finding]:
    """Return the table of parts, and each set over the cheap two."""
    found = []
    for name, repeats in raw.items():
        for part in PARTS:
            spread = Spread.of([one[part] for one in repeats])
            found.append(finding(name, part, spread, "CPU-s"))
        totals = [sum(one.values()) for one in repeats]
        found.append(finding(name, "all", Spread.of(totals), "CPU-s"))
        if name != "the cheap two":
            base = [sum(one.values()) for one in raw["the cheap two"]]
            over = Spread.of([a / b for a, b in zip(totals, base, strict=True)])
            found.append(finding(name, "over the cheap two", over, at_most=MOST.get(name)))
    return found


def _in_process(methods: tuple[str, ...], replications: int, steps: int) -> dict[str, float]:
    given = json.dumps([methods, replications, steps])
    command = [sys.executable, "-m", "benchmarks.reading", "--inside", given]
    one = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, env=os.environ | one, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def markdown(raw: dict[str, list[dict[str, float]]]) -> str:
    """Return a table with a row per set of methods and a column per part."""
    lines = [
        "# Where the seconds of a study go",
        "",
        "The study of `jaxlsgd init --paper`: both models, five schedules, t_T = 5,000, 1,000 replications. CPU-seconds of",
        f"the process, medians of {len(raw['the cheap two'])}, one device, programs from the cache.",
        "Made by `python -m benchmarks.reading`.",
        "",
        "| methods | " + " | ".join(PARTS) + " | all | over the cheap two |",
        "|---|" + "--:|" * (len(PARTS) + 2),
    ]
    findings = findings_of(raw)
    for name in raw:
        row = {one.what: one for one in findings if one.case == name}
        cells = [f"{row[part].value:.2f}" for part in (*PARTS, "all")]
        over = row.get("over the cheap two")
        word = {True: ", met", False: ", **not met**", None: ""}
        last = "1" if over is None else f"{over.value:.2f}"
        if over is not None and over.target:
            last += f" ({over.target}{word[over.met]})"
        lines.append(f"| {name} | " + " | ".join([*cells, last]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reading", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="file for the table")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        print(json.dumps(profile(*json.loads(arguments.inside))))
        return
    text = markdown(run(arguments.quick, arguments.repeats)[1]["seconds"])
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
