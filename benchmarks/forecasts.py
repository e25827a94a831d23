"""Compare forecasts of `jaxlsgd plan` with the time taken, on ten studies; time finite-horizon tables.

Each study is planned and then run, in processes of their own, as a person would, with a cache of programs that
is empty before. The forecast is of the run: what the plan has compiled is in the cache by then.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import cases
from benchmarks.timing import Finding, finding, ratio

_HEAD = """\
warmup = 0.05
replications = {replications}
tile_size = {tile_size}
horizons = {horizons}
schedules = {schedules}
methods = {methods}
save_at = {save_at}
dtype = "{dtype}"

[[problems]]
{problem}
"""
_USUAL: dict[str, Any] = {
    "replications": 512,
    "tile_size": 256,
    "horizons": [4_000],
    "schedules": ["C5", "P(1/2)"],
    "methods": ["plug_in", "random_scaling"],
    "save_at": [],
    "dtype": "float32",
    "problem": 'kind = "linear"\ndim = 5\nnum_clients = 10',
}
_FINITE, _SAVES = "random_scaling[finite]", 12
STUDIES: dict[str, dict[str, Any]] = {
    "linear, two schedules": {},
    "logistic, C1": {
        "schedules": ["C1"],
        "problem": 'kind = "logistic"\ndim = 5\nnum_clients = 10',
    },
    "a grid of 20 cells": {
        "schedules": ["C1", "C5", "Log", "P(1/3)", "P(1/2)"],
        "horizons": [250, 500, 1_000, 2_000],
    },
    "one client": {"problem": 'kind = "linear"\ndim = 5\nnum_clients = 1', "horizons": [20_000]},
    "100 clients": {"problem": 'kind = "linear"\ndim = 5\nnum_clients = 100', "horizons": [1_000]},
    "20 parameters": {"problem": 'kind = "linear"\ndim = 20\nnum_clients = 10'},
    "double precision": {"dtype": "float64", "horizons": [2_000]},
    "many small tiles": {"replications": 4_096, "tile_size": 64, "horizons": [300]},
    "finite horizons, 12 saved rounds": {
        "methods": ["plug_in[finite]", _FINITE],
        "save_at": _SAVES,
        "replications": 64,
        "tile_size": 64,
    },
    "one-step, 6 saved rounds": {"methods": ["one_step"], "save_at": 6, "schedules": ["C5"]},
}


def forecast(study: str) -> dict[str, float]:
    """Return the parts of a study's forecast, in seconds. In a process of its own."""
    from jaxlsgd.study.forecast import measured
    from jaxlsgd.study.study import Study

    devices = cases.start()
    return measured(Study.from_toml(study), devices, len(devices))._asdict()


def run(quick: bool) -> tuple[list[Finding], dict[str, Any]]:
    """Run all studies; in a quick run, two."""
    raw = {name: compared(name) for name in list(STUDIES)[: 2 if quick else None]}
    ratios = {name: one["forecast"] / one["seconds"] for name, one in raw.items()}
    findings = [
        finding(name, "forecast over time", value, at_least=1 / 1.5, at_most=1.5)
        for name, value in ratios.items()
    ]
    if not quick:
        price = raw["price of finite horizons"] = tables_price()
        over = ratio(price["with"], price["without"])
        case = f"{_SAVES} saved rounds, 64 replications"
        findings.append(finding(case, "with finite-horizon tables over without", over, at_most=1.5))
        resumed = price["tables made again"]
        findings.append(finding(case, "tables made again when resumed", resumed, "", at_most=0))
    return findings, raw


def compared(name: str) -> dict[str, Any]:
    """Return the forecast of a study and the time that it took, in seconds."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        study = _written(place, STUDIES[name])
        code = "import json, sys; from benchmarks.forecasts import forecast; "
        code += "print(json.dumps(forecast(sys.argv[1])))"
        done = subprocess.run(
            [sys.executable, "-c", code, str(study)],
            env=_environment(place),
            check=True,
            capture_output=True,
            text=True,
        )
        parts = json.loads(done.stdout.splitlines()[-1])
        seconds = _timed(place, study)
    return {"forecast": sum(parts.values()), "seconds": seconds, "parts": parts}


def tables_price(repeats: int = 3) -> dict[str, Any]:
    """Run a study with and without critical values for finite horizons, from a warm cache of programs."""
    found: dict[str, Any] = {"with": [], "without": []}
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        base = ["random_scaling[schedule]", "plug_in"]
        kinds = {"with": [*base, _FINITE], "without": base}
        settings = {"save_at": _SAVES, "replications": 64, "tile_size": 64}
        for repeat in range(-1, repeats):  # the first fills the cache
            for name, methods in kinds.items():
                study = _written(place, settings | {"methods": methods})
                seconds = _timed(place, study, f"{name}-{repeat}")
                if repeat >= 0:
                    found[name].append(seconds)
        more = settings | {"methods": kinds["with"], "replications": 128}
        found["rows of tables"] = len(_rows(place / "with-0"))
        found["resumed"] = _timed(place, _written(place, more), "with-0")
        rows = _rows(place / "with-0")
        found["tables made again"] = len(rows) - len(set(rows))
    return found


def _rows(out: Path) -> list[str]:
    """Return the keys of all tables in a study's directory, repeated ones too."""
    files = sorted((out / "tables").glob("*.json"))
    return [key for path in files for key in json.loads(path.read_text())["rows"]]


def _written(place: Path, changes: dict[str, Any]) -> Path:
    path = place / "study.toml"
    settings = _USUAL | changes
    lists = {key: json.dumps(value) for key, value in settings.items() if isinstance(value, list)}
    path.write_text(_HEAD.format(**(settings | lists)), encoding="utf-8")
    return path


def _timed(place: Path, study: Path, out: str = "out") -> float:
    command = [sys.executable, "-m", "jaxlsgd.cli", "run", str(study), "--out", str(place / out)]
    began = time.perf_counter()
    subprocess.run([*command, "--quiet"], env=_environment(place), check=True)
    return time.perf_counter() - began


def _environment(place: Path) -> dict[str, str]:
    """Return the environment of a user: a cache of its own, default threads of BLAS."""
    hidden = ("JAX_COMPILATION_CACHE_DIR", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
    kept = {key: value for key, value in os.environ.items() if key not in hidden}
    return kept | {"XDG_CACHE_HOME": str(place / "cache")}
