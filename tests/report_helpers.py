"""Small made-up cells for tests of tables and figures."""

from __future__ import annotations

import numpy as np

from jaxlsgd.core.rows import CellRows, MethodRows

METHODS = {"plug_in": "plug-in", "random_scaling[paper]": "random scaling, paper's q"}


def fake_cell(
    schedule="C1",
    *,
    problem="linear",
    algorithm="local_sgd",
    num_steps=1000,
    saves=1,
    replications=40,
    levels=(0.95,),
    truth=(0.0, 1.0),
    diverged=0,
    seed=0,
):
    """Normal estimates around the truth whose intervals cover about as they should."""
    rng = np.random.default_rng(seed)
    rounds = tuple(int(m) for m in np.geomspace(10, 100, saves)) if saves > 1 else (100,)
    error = 1 / np.sqrt(np.array(rounds))[:, None, None]
    estimate = np.array([0.0, 1.0]) + error * rng.normal(size=(saves, replications, 2))
    estimate[:, :diverged] = np.nan
    scale = error * np.exp(0.2 * rng.normal(size=estimate.shape))
    half = scale[:, None] * 2 * np.array(levels)[:, None, None]
    rows = MethodRows(estimate, scale, half, np.zeros((saves, replications), bool))
    return CellRows(
        problem=problem,
        algorithm=algorithm,
        schedule=schedule,
        num_steps=num_steps,
        num_rounds=100,
        save_at=rounds,
        steps_at=tuple(m * num_steps // 100 for m in rounds),
        levels=levels,
        coordinates=dict.fromkeys(METHODS, ("x[0]", "x[1]")),
        truth=dict.fromkeys(METHODS, None if truth is None else np.array(truth)),
        standard_error={name: name == "plug_in" for name in METHODS},
        labels=dict(METHODS),
        methods=dict.fromkeys(METHODS, rows),
        # Plug-in: a model of two numbers, a gradient and three entries of a Hessian; random scaling: models alone.
        numbers_sent={
            "plug_in": tuple(7 * m for m in rounds),
            "random_scaling[paper]": tuple(2 * m for m in rounds),
        },
        sent_under_c1=tuple(2 * (m * num_steps // 100) for m in rounds),
    )
