"""The rows of a table by client, standardised, and what is said of them in words."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxlsgd.core.checks import refusal
from jaxlsgd.regression.coordinates import Coordinates, check_rank, coordinates
from jaxlsgd.regression.design import INTERCEPT, Block, Design
from jaxlsgd.regression.families import check_response
from jaxlsgd.regression.options import STEPS, Options

FloatArray = NDArray[np.floating[Any]]


class Rows(NamedTuple):
    """All rows, sorted by client."""

    X: FloatArray  # (n, d) standardised
    y: FloatArray  # (n,)
    client: NDArray[np.int64]  # (n,)
    labels: tuple[str, ...]
    sizes: NDArray[np.int64]  # (K,)
    p: FloatArray  # (K,)
    coordinates: Coordinates


def by_client(plan: Design, block: Block, asked: Options) -> Rows:
    """Sorts and standardises rows; refuses those that no fit can use."""
    if not len(block.y):
        raise refusal("frame", "have rows in which nothing is missing", "none")
    check_response(asked.family, plan.response, block.y)
    labels, client = np.unique(_comparable(block.client), return_inverse=True)
    # Of few bits, as sorting is then by counting.
    few = np.uint16 if len(labels) < 1 << 16 else np.int64
    order = np.argsort(client.astype(few), kind="stable")
    sizes = np.bincount(client)
    p = sizes / sizes.sum() if asked.weights == "size" else np.full(len(sizes), 1 / len(sizes))
    where = plan.names.index(INTERCEPT) if plan.intercept else None
    frame = coordinates(block.X, block.y, plan.names, where, asked.family.scaled)
    X = frame.features(block.X[order])
    if not asked.ridge:
        check_rank(X, plan.names)
    least = int(sizes.min())
    if asked.fresh and least < STEPS:
        rule = f"be reshuffled unless every client has {STEPS} rows"
        name = str(labels[sizes.argmin()])
        raise refusal("rows", rule, f"{asked.rows!r}, and {least} of client {name!r}")
    y = frame.response(block.y[order])
    return Rows(X, y, client[order], tuple(map(str, labels)), sizes, p, frame)


def _comparable(labels: NDArray[Any]) -> NDArray[Any]:
    """Labels that can be sorted: a mixture of text and numbers as text."""
    return labels.astype(str) if labels.dtype.kind == "O" else labels


def remarks(rows: Rows, asked: Options) -> list[str]:
    """What a person should know of the table."""
    notes = []
    n, d = rows.X.shape
    if len(rows.sizes) == 1:
        notes.append("there is one client: nothing needs to be communicated")
    alone = [rows.labels[k] for k in np.flatnonzero(rows.sizes == 1)]
    if alone and asked.target == "population":
        notes.append(
            f"one row only of {', '.join(alone[:3])}{' and others' if len(alone) > 3 else ''}: its "
            "spread is taken from its square, so that standard errors are a little too large"
        )
    if n < 10 * d:
        notes.append(f"{n:,} rows for {d} coefficients: normal intervals may be too short")
    if asked.family.separable and asked.family.most == 1:
        events = int(min(rows.y.sum(), n - rows.y.sum()))
        if events < 10 * d:
            notes.append(
                f"{events} rows have the rarer response, for {d} coefficients: normal intervals may be "
                "too short, and coefficients too large"
            )
    return notes
