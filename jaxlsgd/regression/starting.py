"""Where a run starts: the minimiser of some rows, and the numbers of a loss that come from the data."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxlsgd.regression import pilot as pilots
from jaxlsgd.regression.design import Design
from jaxlsgd.regression.families import Family
from jaxlsgd.regression.options import Options, check_methods
from jaxlsgd.regression.rows import Rows

FloatArray = NDArray[np.floating[Any]]
PILOT = 20_000  # rows


def start_from(plan: Design, rows: Rows, asked: Options) -> tuple[pilots.Loss, FloatArray, int]:
    """The loss with its numbers, the pilot's minimiser, and the exchanges that found it."""
    check_methods(asked.methods, len(plan.names))
    ridge = asked.ridge * rows.coordinates.slopes
    rng = np.random.default_rng([asked.seed, 1])
    size = PILOT
    while True:
        chosen = _some(rng, len(rows.y), size)
        X, y, client = rows.X[chosen], rows.y[chosen], rows.client[chosen]
        weights = (rows.p / np.maximum(np.bincount(client, minlength=len(rows.p)), 1))[client]
        loss = _tuned(asked.family, X, y, weights, ridge, rows)
        try:
            theta, count = pilots.minimise(loss, X, y, weights, plan.names)
            return loss, theta, count
        except ValueError:
            # What separates some rows need not separate all.
            if len(y) == len(rows.y):
                raise
            size *= 4


def _some(rng: np.random.Generator, n: int, size: int) -> Any:
    if n <= size:
        return slice(None)
    return np.sort(rng.choice(n, size, replace=False))


def _tuned(
    family: Family,
    X: FloatArray,
    y: FloatArray,
    weights: FloatArray,
    ridge: FloatArray,
    rows: Rows,
) -> pilots.Loss:
    if family.tune is None:
        return pilots.Loss(family, np.zeros(1), ridge)
    root = np.sqrt(weights)
    theta = np.linalg.lstsq(root[:, None] * X, root * y, rcond=None)[0]
    scale = rows.coordinates.y_scale
    found = family.tune(scale * (y - X @ theta), len(rows.y), X.shape[1])
    return pilots.Loss(family, np.asarray(found) / family.units(scale), ridge)
