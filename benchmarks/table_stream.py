"""A table of 10⁷ rows × 20 columns that is read once: rate, memory, and the rate once read.

`python -m benchmarks.table_stream --rows 10000000` writes files into a temporary directory, and results to
`results/table_stream.md`. Asked: at least half the rate of reading the file and doing nothing with it (through
the same reader, as pandas tables), memory that does not grow with rows, and more than 4.4 million rows per second and
core at d = 5 once read, which is what the C++ core of SGDinference does with one path and random scaling. A fit
needs no pandas, so that reading as Arrow's batches, which is all that it waits for, is timed as well.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
_PIECE = 500_000
_TURN = ("batches", "read", "fit")


def write(path: Path, rows: int, columns: int) -> None:
    """Write a logistic table of 10 clients, piece by piece."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    rng = np.random.default_rng(0)
    writer: Any = None
    for start in range(0, rows, _PIECE):
        n = min(_PIECE, rows - start)
        X = rng.standard_normal((n, columns)).round(4)
        z = X @ np.linspace(-0.5, 0.5, columns)
        data = {f"x{j}": X[:, j] for j in range(columns)}
        data |= {"y": (rng.uniform(size=n) < 1 / (1 + np.exp(-z))).astype(np.int8)}
        batch = pa.table(data | {"site": rng.integers(0, 10, n)})
        if writer is None:
            kind = pa.parquet.ParquetWriter if path.suffix == ".parquet" else pa.csv.CSVWriter
            writer = kind(str(path), batch.schema)
        writer.write_table(batch)
    writer.close()


def read_only(path: Path) -> dict[str, float]:
    """Read all blocks, as tables, and do nothing with them."""
    from jaxlsgd.regression import files

    begun = time.perf_counter()
    rows = sum(len(batch.to_pandas()) for batch in files.blocks(path))
    return {"rows": rows, "seconds": time.perf_counter() - begun, "memory": _memory()}


def read_batches(path: Path) -> dict[str, float]:
    """Read all blocks, as Arrow's batches."""
    from jaxlsgd.regression import files

    begun = time.perf_counter()
    rows = sum(batch.num_rows for batch in files.blocks(path))
    return {"rows": rows, "seconds": time.perf_counter() - begun, "memory": _memory()}


def fit(path: Path) -> dict[str, float]:
    """Fit, timed from the call to the result; imports are not counted, compiling is."""
    import jax

    from jaxlsgd import fit_table

    jax.block_until_ready(jax.numpy.zeros(1))
    begun = time.perf_counter()
    found = fit_table(path, response="y", client="site", family="logistic", stream=True)
    taken = time.perf_counter() - begun
    met = sum(found.sizes.values())
    truth = np.linspace(-0.5, 0.5, len(found.names) - 1)
    ours = found.coefficients()
    worst = np.max(np.abs(ours.estimate[1:] - truth) / ours.std_error[1:])
    return {"rows": met, "seconds": taken, "memory": _memory(), "worst": float(worst)}


def once_read(columns: int = 5, rows: int = 1 << 21) -> dict[str, float]:
    """Time the pass alone, orders of rows included, on numbers that are in memory; one core."""
    from jaxlsgd.inference.random_scaling import random_scaling
    from jaxlsgd.problems.losses import LOGISTIC
    from jaxlsgd.regression import local_sgd

    rng = np.random.default_rng(0)
    K, steps, E = 10, 60, 5
    size = (1 << 16) // K
    data = local_sgd.ClientRows(
        rng.standard_normal((K, local_sgd.padded(size), columns)).astype(np.float32),
        rng.integers(0, 2, (K, local_sgd.padded(size))).astype(np.float32),
    )
    numbers = (np.full(K, 0.1), np.zeros(1), np.zeros((columns, columns)))
    setting = local_sgd.Setting(*(np.asarray(one, np.float32) for one in numbers))
    methods = (random_scaling(),)
    carried = local_sgd.start(methods, np.zeros(columns))
    sizes, width = np.full(K, size), local_sgd.padded(-(-size // steps))
    eta = np.full(steps // E, 0.05, np.float32)
    data, setting = local_sgd.on_device((data, setting))
    best = np.inf
    for _ in range(4):  # the first compiles
        begun, met = time.perf_counter(), 0
        while met < rows:
            order = local_sgd.reshuffled(rng, sizes, steps, E, width)
            carried, _ = local_sgd.run_pass(LOGISTIC, methods, data, setting, order, eta, carried)
            met += K * size
        np.asarray(carried.x)
        best = min(best, (time.perf_counter() - begun) / met)
    return {"rows": 1.0, "seconds": best, "memory": _memory()}


def _memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # MB


def _alone(what: str, path: Path | None = None, cores: int | None = None) -> dict[str, float]:
    """Run in a process of its own, whose memory can be measured."""
    command = [sys.executable, "-m", "benchmarks.table_stream", "--inside", what]
    command += [str(path)] if path else []
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    bound = (lambda: os.sched_setaffinity(0, range(cores))) if cores else None
    out = subprocess.run(
        command, check=True, capture_output=True, text=True, env=environment, preexec_fn=bound
    )
    return json.loads(out.stdout.splitlines()[-1])


def main() -> int:
    """Write files, time them in turn, and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table_stream", description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--columns", type=int, default=20)
    parser.add_argument(
        "--keep", type=Path, help="directory for the files; a temporary one if not given"
    )
    parser.add_argument("--repeats", type=int, default=3, help="the best of so many is reported")
    parser.add_argument("--only", choices=("csv", "parquet"))
    parser.add_argument("--out", type=Path, default=HERE / "results" / "table_stream.md")
    parser.add_argument("--inside", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        what, *path = arguments.inside
        acts = {"read": read_only, "batches": read_batches, "fit": fit, "once": once_read}
        act: Any = acts[what]
        print(json.dumps(act(*map(Path, path))))
        return 0
    with tempfile.TemporaryDirectory() as directory:
        lines = _all(arguments, arguments.keep or Path(directory))
    page = f"# A table that is read once\n\n{(__doc__ or '').strip()}\n\n" + "\n".join(lines) + "\n"
    arguments.out.write_text(page, encoding="utf-8")
    return 0


def _all(arguments: argparse.Namespace, directory: Path) -> list[str]:
    lines = [
        "| file | rows | read as batches, s | read as tables, s | fit, s | rate of fit over reading tables | "
        "memory of fit, MB | largest error, in standard errors |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    print(lines[0])
    kinds = [arguments.only] if arguments.only else ["parquet", "csv"]
    for kind in kinds:
        for rows in (arguments.rows // 10, arguments.rows):
            path = directory / f"table{rows}.{kind}"
            if not path.exists():
                write(path, rows, arguments.columns)
            # In turn, and the best of each, because other load on the machine only slows a run.
            turns = [{what: _alone(what, path) for what in _TURN} for _ in range(arguments.repeats)]
            batches, tables, fits = (
                min((turn[what] for turn in turns), key=lambda one: one["seconds"])
                for what in _TURN
            )
            lines.append(
                f"| {kind} | {rows:,} | {batches['seconds']:.2f} | {tables['seconds']:.2f} | "
                f"{fits['seconds']:.2f} | {tables['seconds'] / fits['seconds']:.2f} | "
                f"{fits['memory']:.0f} | {fits['worst']:.1f} |"
            )
            print(lines[-1], flush=True)
    rate = 1 / _alone("once", cores=1)["seconds"] / 1e6
    lines += [
        "",
        f"Once read, d = 5, one core, random scaling: {rate:.1f} million rows per second.",
    ]
    load, cores = os.getloadavg()[2], len(os.sched_getaffinity(0))
    lines.append(f"Compiling is counted. Load of the machine: {load:.0f}, on {cores} cores.")
    print(*lines[-2:], sep="\n")
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
