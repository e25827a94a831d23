"""Simulations on meshes, for a process that has the devices: `mesh_cases.py OUT CASE...`.

Each case is run on one device without a mesh, and on its mesh; rows and what else a test looks at go to
`OUT-<process>.npz`. With JAX_NUM_PROCESSES set the processes meet first.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxlsgd import Problem, plug_in, problems, random_scaling, schedules, simulate
from jaxlsgd.core.estimator import Estimator
from jaxlsgd.core.rows import CellRows
from jaxlsgd.engine import distributed

ROUNDS, REPLICATIONS, TILE = 40, 7, 2
SAVE_AT = (1, 9, ROUNDS)
FIELDS = ("estimate", "scale", "half_width", "floored", "cause")


class Case(NamedTuple):
    """A problem, a schedule and a mesh."""

    model: str
    schedule: str
    num_clients: int
    mesh: dict[str, int]
    dtype: str = "float32"
    methods: tuple[Estimator, ...] = (random_scaling(), plug_in())


SPREAD = {"clients": 4}
CLIENT_CASES = {
    "every step": Case("linear", "C1", 7, SPREAD),
    "every fifth step": Case("linear", "C5", 7, SPREAD),
    "longer and longer": Case("linear", "P(1/2)", 7, SPREAD),
    "both axes": Case("logistic", "C5", 8, {"clients": 2, "replications": 2}),
    "own sample": Case("sampled", "C1", 5, {"replications": 2, "clients": 2}),
    "float64": Case("linear", "C5", 7, SPREAD, "float64"),
}
# One program a device is compiled for these, so they are of the cheapest kind.
CHEAP = (random_scaling(mode="diagonal"),)
REPLICATION_CASES = {
    "four devices": Case("linear", "C1", 3, {"replications": 4}, methods=CHEAP),
    "two devices": Case("linear", "C1", 3, {"replications": 2, "clients": 1}, methods=CHEAP),
}
# For two processes of one device each, whose programs are compiled anew each time.
JOINED_CASES = {
    "joined, replications": Case("linear", "C1", 3, {"replications": 2}, methods=CHEAP),
    "joined, clients": Case("linear", "C5", 3, {"clients": 2}, methods=(plug_in(),)),
}
CASES = CLIENT_CASES | REPLICATION_CASES | JOINED_CASES


def _sample(key: jax.Array, client: Any) -> Any:
    a = jax.random.normal(key, (3,))
    return a, jnp.sum(a) + 0.1 * client


def problem(case: Case) -> Problem:
    """Clients that differ, of unequal weights, that do not start at the truth."""
    K = case.num_clients
    weights = np.arange(1, K + 1) / (K * (K + 1) / 2)
    if case.model == "sampled":
        loss = problems.linear(3, K).loss
        return Problem(np.zeros(3), loss, K, sample=_sample, weights=weights)
    make = {"linear": problems.linear, "logistic": problems.logistic}[case.model]
    return make(3, K, heterogeneity=0.7, weights=weights, init=np.array([1.0, -1.0, 0.5]))


def plan(case: Case) -> schedules.Plan:
    """A schedule of the paper with its warm-up."""
    step = schedules.power_decay(2.0 if case.model == "logistic" else 0.5)
    return schedules.paper(case.schedule).with_warmup(0.05).plan(step, num_rounds=ROUNDS)


def mesh(shape: dict[str, int]) -> Mesh:
    """A mesh of the first devices there are."""
    count = int(np.prod(list(shape.values())))
    return Mesh(np.asarray(jax.devices()[:count]).reshape(*shape.values()), tuple(shape))


def rows(case: Case, **where: Any) -> tuple[CellRows, list[float]]:
    """A case's rows, and the shares that the progress callback was called with."""
    shares: list[float] = []
    found = simulate(
        jax.random.key(20),
        problem(case),
        plan(case),
        replications=REPLICATIONS,
        tile_size=TILE,
        methods=case.methods,
        save_at=SAVE_AT,
        dtype=case.dtype,
        progress=shares.append,
        **where,
    )
    return found, shares


def arrays(name: str, found: CellRows) -> dict[str, np.ndarray]:
    """Rows by `name/method/field`."""
    return {
        f"{name}/{method}/{field}": getattr(part, field)
        for method, part in found.methods.items()
        for field in FIELDS
    }


def main(out: str, names: list[str]) -> None:
    if "JAX_NUM_PROCESSES" in os.environ:
        distributed.start(timeout=30, heartbeat=10)
    results: dict[str, np.ndarray] = {}
    for name in names:
        if jax.process_index() == 0:
            alone = rows(CASES[name], devices=jax.local_devices()[:1])[0]
            results |= arrays(f"{name}/alone", alone)
        found, shares = rows(CASES[name], mesh=mesh(CASES[name].mesh))
        results |= arrays(f"{name}/mesh", found)
        results[f"{name}/progress"] = np.asarray(shares)
    np.savez(f"{out}-{jax.process_index()}.npz", **results)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
