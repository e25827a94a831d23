"""Hash the rows of fifteen cells, to show that a change of the engine keeps every bit.

Bits depend on the machine and the version of XLA, so hashes are compared on one machine only: take them before a change
and compare after it.

  python -m benchmarks.row_hashes --out /tmp/before.json
  python -m benchmarks.row_hashes --against /tmp/before.json     exits with 1 and names the cells that differ
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def cells() -> dict[str, Callable[[], Any]]:
    """Return the cells by name, each a call that gives its rows."""
    import jax

    from jaxlsgd import algorithms, problems, simulate
    from jaxlsgd.inference import one_step, plug_in, random_scaling
    from jaxlsgd.schedules import constant, logarithmic, power, power_decay

    linear, logistic = problems.linear(5, 10, heterogeneity=1.0), problems.logistic(5, 10)
    decay = power_decay(1.0, 0.505)
    three = [plug_in(), random_scaling(), one_step()]

    def rows(problem: Any, schedule: Any, steps: int = 700, **options: Any) -> Callable[[], Any]:
        plan = schedule.with_warmup(0.05).plan(decay, num_steps=steps)
        options = {"replications": 40, "methods": three, "tile_size": 32, **options}
        return lambda: simulate(jax.random.key(5), problem, plan, **options)

    five, root = constant(5), power(0.5)
    always = one_step(valid="always", best_at=500)
    finite = [plug_in("finite"), random_scaling("finite")]
    return {
        "linear C1": rows(linear, constant(1)),
        "linear P(1/2) float64": rows(linear, root, dtype="float64"),
        "logistic C5, saved three times": rows(logistic, five, save_at=(20, 60, 100)),
        "logistic Log, finite": rows(logistic, logarithmic(), methods=finite),
        "logistic P(1/2), always": rows(logistic, root, methods=[always]),
        "logistic, 4 of 10 clients": rows(
            logistic, five, algorithm=algorithms.participation(4), methods=three[1:]
        ),
        "linear, 4 of 10 clients, float64": rows(
            linear, root, algorithm=algorithms.participation(4), methods=three[1:], dtype="float64"
        ),
        "logistic, SCAFFOLD": rows(logistic, five, algorithm=algorithms.scaffold()),
        "linear, stragglers": rows(
            linear, root, algorithm=algorithms.stragglers(0.3), methods=three[1:]
        ),
        "linear, FedAdam": rows(linear, five, algorithm=algorithms.server_adam(0.05)),
        "linear, dropout": rows(
            linear, five, algorithm=algorithms.client_dropout(0.3), methods=three[1:]
        ),
        "logistic, local Adam": rows(logistic, five, algorithm=algorithms.local_adam()),
        "drifting": rows(problems.drifting(3, 4, heterogeneity=1.0, period=200), five),
        "twenty parameters, one client": rows(
            problems.linear(20, 1, heterogeneity=1.0), root, steps=400
        ),
        "Poisson": rows(problems.regression(3, 6, "poisson"), five),
    }


def digest(cell: Any) -> str:
    """Return a hash of all rows of a cell."""
    code = hashlib.sha256()
    for name, method in sorted(cell.methods.items()):
        code.update(name.encode())
        for array in (method.estimate, method.half_width, method.ok):
            code.update(np.ascontiguousarray(array).tobytes())
    return code.hexdigest()[:16]


def main() -> int:
    """Write the hashes, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file for the hashes")
    parser.add_argument("--against", type=Path, help="file to compare with")
    arguments = parser.parse_args()
    now: dict[str, str] = {}
    for name, run in cells().items():
        now[name] = digest(run())
        print(f"{now[name]}  {name}", flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(now, indent=1) + "\n")
    if arguments.against is None:
        return 0
    before = json.loads(arguments.against.read_text())
    changed = [name for name in before if now.get(name) != before[name]]
    print("all rows have the same bits" if not changed else f"changed: {'; '.join(changed)}")
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
