"""Runs the benchmarks and writes JSON, a Markdown table and figures: `python -m benchmarks`."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.timing import Finding

HERE = Path(__file__).resolve().parent
# In the order of the table, with the module of each.
MODULES = {
    "throughput": "throughput",
    "sizes": "sizes",
    "own": "own_problems",
    "grid": "grid",
    "cores": "cores",
    "compile": "compile_time",
    "scaling": "scaling",
    "methods": "methods",
    "model": "cost_model",
    "forecasts": "forecasts",
}


def main() -> int:
    """Run each benchmark in a process of its own, so that none inherits another's programs."""
    arguments = _arguments()
    if arguments.inside:
        return _inside(arguments.inside, arguments.quick, arguments.out)
    arguments.out.mkdir(parents=True, exist_ok=True)
    store = arguments.out / "results.json"
    # What is not run again stays as it was, with the date and machine of its own run.
    results = json.loads(store.read_text()) if store.exists() else {}
    for name in arguments.only:
        print(f"{name} ...", flush=True)
        results[name] = _run(name, arguments.quick)
        _write(results, arguments.out)
    print(markdown(results))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only", type=_names, default=list(MODULES), help=f"some of {','.join(MODULES)}"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes, nothing is judged")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="directory")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    return parser.parse_args()


def _names(text: str) -> list[str]:
    names = text.split(",")
    unknown = sorted(set(names) - set(MODULES))
    if unknown:
        raise argparse.ArgumentTypeError(f"must be among {', '.join(MODULES)}, got {unknown}")
    return names


def _run(name: str, quick: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        answer = Path(directory) / "answer.json"
        environment = {
            **os.environ,
            # Fresh, so that a first call compiles; filled, so that workers of one run share it.
            "JAX_COMPILATION_CACHE_DIR": str(Path(directory) / "programs"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
        }
        environment.setdefault("JAX_PLATFORMS", "cpu")
        # NumPy runs one process per core, so that each gets one thread.
        environment |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "benchmarks", "--inside", name, "--out", str(answer)]
        command += ["--quick"] if quick else []
        subprocess.run(command, env=environment, check=True, cwd=HERE.parent)
        return json.loads(answer.read_text())


def _inside(name: str, quick: bool, answer: Path) -> int:
    findings, raw = importlib.import_module(f"benchmarks.{MODULES[name]}").run(quick)
    if quick:
        findings = [dataclasses.replace(found, met=None) for found in findings]
    part = {
        "when": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "quick": quick,
        "machine": _machine(),
        "findings": [dataclasses.asdict(found) for found in findings],
        "raw": raw,
    }
    answer.write_text(json.dumps(part))
    return 0


def _machine() -> dict[str, Any]:
    import jax
    import numpy

    model = platform.processor() or platform.machine()
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = {"python": platform.python_version(), "numpy": numpy.__version__}
    load = round(os.getloadavg()[0], 1)
    return {"processor": model, "cores": cores, "load": load, "jax": jax.__version__, **versions}


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _write(results: dict[str, Any], directory: Path) -> None:
    from benchmarks import cost_model, figures

    (directory / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (directory / "results.md").write_text(markdown(results))
    (directory / "cost_model.md").write_text(cost_model.markdown())
    figures.draw(results, directory)


def markdown(results: dict[str, Any]) -> str:
    """Return the table of all findings, with the machine that each part was run on."""
    lines = ["# Results", ""]
    for name in (name for name in MODULES if name in results):
        part = results[name]
        machine = ", ".join(f"{key} {value}" for key, value in part["machine"].items())
        quick = " **Quick sizes: nothing is judged.**" if part["quick"] else ""
        lines += [f"## {name}", "", f"{part['when']}; {machine}.{quick}", ""]
        lines += ["| case | figure | median | quartiles | target | |", "|---|---|---:|---|---|---|"]
        lines += [_row(Finding(**found)) for found in part["findings"]]
        lines.append("")
    return "\n".join(lines)


def _row(found: Finding) -> str:
    verdict = {True: "met", False: "**not met**", None: ""}[found.met]
    spread = "" if found.low == found.high else f"{_short(found.low)} – {_short(found.high)}"
    value = f"{_short(found.value)} {found.unit}".strip()
    return f"| {found.case} | {found.what} | {value} | {spread} | {found.target} | {verdict} |"


def _short(value: float) -> str:
    if not math.isfinite(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


if __name__ == "__main__":
    sys.exit(main())
