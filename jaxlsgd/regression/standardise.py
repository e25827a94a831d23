"""Rows sorted by client with standardised columns, and the way back to the scale of the table.

Start with `by_client`. With x_s = (x − m)/s and y′ = (y − y_c)/y_s, a coefficient θ of x_s is y_s θ/s of x.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxlsgd.core.checks import refusal
from jaxlsgd.core.products import along, gram
from jaxlsgd.regression.design import INTERCEPT, Block, Design
from jaxlsgd.regression.options import STEPS, Options

FloatArray = NDArray[np.floating[Any]]
_CONSTANT = 1e-10  # standard deviation over largest size of a column that is refused as constant
_SIZES = (1e-50, 1e50)  # of columns; beyond, squares of squares overflow
_LARGEST_OFFSET = 50.0  # of families whose mean is no line: exp of it multiplies means or odds
_COLLINEAR = 1e-10  # eigenvalue of the correlations
_NEARLY = 1e-6  # the same of columns that are mentioned
_SMALL = "; variance='HC3' is made for small tables"


class Coordinates(NamedTuple):
    """Standardised columns and response."""

    center: FloatArray  # (d,) m; 0 for the intercept and without one
    scale: FloatArray  # (d,) s; 1 for the intercept
    y_center: float
    y_scale: float
    slopes: NDArray[np.bool_]  # (d,) False for the intercept

    def features(self, X: FloatArray) -> FloatArray:
        """Return x_s."""
        found = X - self.center
        found /= self.scale
        return found

    def response(self, y: FloatArray) -> FloatArray:
        """Return y′."""
        return (y - self.y_center) / self.y_scale

    @property
    def back(self) -> FloatArray:
        """The matrix that takes coefficients of x_s to those of x."""
        Z = np.diag(1 / self.scale)
        if not self.slopes.all():
            Z[~self.slopes] -= (self.center / self.scale)[None, :]
        return self.y_scale * Z

    def coefficients(self, theta: FloatArray) -> FloatArray:
        """Return β, on the scale of the table, of θ."""
        return self.back @ theta + self.y_center * ~self.slopes


def coordinates(
    X: FloatArray, y: FloatArray, names: tuple[str, ...], intercept: int | None, scaled: bool
) -> Coordinates:
    """Return means and standard deviations; refuse columns that are constant.

    Args:
      X: (n, d).
      y: (n,).
      names: of the columns.
      intercept: which column is the intercept's, if there is one.
      scaled: whether the response may be scaled.
    """
    slopes = np.ones(X.shape[1], bool)
    if intercept is not None:
        slopes[intercept] = False
    center = np.where(slopes & (intercept is not None), X.mean(axis=0), 0.0)
    gaps = X - center
    spread = np.sqrt(np.einsum("ij,ij->j", gaps, gaps) / len(X))
    largest = np.maximum(X.max(axis=0), -X.min(axis=0))
    for j in np.flatnonzero(slopes):
        _check_size(f"column {names[j]!r}", largest[j])
    for j in np.flatnonzero(slopes & (spread <= _CONSTANT * largest)):
        hint = "; the intercept does that already" if intercept is not None else ""
        raise refusal(
            f"column {names[j]!r}", "vary", f"{X[0, j]:g} in every row", hint, code="data"
        )
    scale = np.where(slopes, spread, 1.0)
    y_center = float(y.mean()) if scaled and intercept is not None else 0.0
    y_scale = float(np.sqrt(np.mean((y - y_center) ** 2))) if scaled else 1.0
    return Coordinates(center, scale, y_center, y_scale or 1.0, slopes)


def _check_rank(X_s: FloatArray, names: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse columns that are combinations of one another, and name them; return remarks on those that almost are."""
    if len(X_s) <= X_s.shape[1]:
        what = f"{len(X_s):,} rows for {X_s.shape[1]} coefficients"
        raise refusal("frame", "have more rows than coefficients", what, code="data")
    share, involved = _least_eigenvalue(X_s, names)
    if share > _NEARLY:
        return ()
    if share > _COLLINEAR:
        told = (
            f"{' and '.join(involved)} almost determine one another (1 − r about {share:.1g}): their coefficients "
            "are known far less well than combinations of them; leave one out"
        )
        return (told,)
    hint = "; leave one of them out, or give a ridge"
    raise refusal("columns", "not determine one another", " and ".join(involved), hint, code="data")


def _least_eigenvalue(X_s: FloatArray, names: tuple[str, ...]) -> tuple[float, list[str]]:
    """Return the least eigenvalue of the correlations over the largest, and the columns that are in its vector."""
    products = gram(X_s, X_s) / len(X_s)
    root = np.sqrt(np.diagonal(products))
    products /= np.outer(root, root)
    values = np.linalg.eigvalsh(products)
    if values[0] > _NEARLY * values[-1]:
        return float(values[0] / values[-1]), []
    values, vectors = np.linalg.eigh(products)
    share = np.abs(vectors[:, 0])
    involved = [names[j] for j in np.flatnonzero(share > 1e-3 * share.max())]
    return max(float(values[0] / values[-1]), 0.0), involved


class Rows(NamedTuple):
    """All rows, sorted by client."""

    X: FloatArray  # (n, d) standardised
    y: FloatArray  # (n,)
    client: NDArray[np.int64]  # (n,)
    labels: tuple[str, ...]
    sizes: NDArray[np.int64]  # (K,)
    p: FloatArray  # (K,)
    coordinates: Coordinates
    weight: FloatArray | None = None  # (n,) with mean 1 in every client
    offset: FloatArray | None = None  # (n,) of the linear predictor
    notes: tuple[str, ...] = ()  # on columns that almost determine one another
    total: float = 0.0  # sum of the weights of all rows, as they were given

    def predictors(self, theta: FloatArray) -> FloatArray:
        """Return Xθ plus the offset."""
        z = along(self.X, theta)
        return z if self.offset is None else z + self.offset

    @property
    def shares(self) -> FloatArray:
        """Weights of rows in the mean over all clients; they sum to 1."""
        each = (self.p / self.sizes)[self.client]
        return each if self.weight is None else each * self.weight


def by_client(plan: Design, block: Block, options: Options) -> Rows:
    """Sort and standardise rows; refuse those that cannot be fitted."""
    if not len(block.y):
        raise refusal("frame", "have rows in which nothing is missing", "none", code="data")
    options.family.check_range(plan.response, block.y)
    block = _weighted(block, plan)
    if options.family.scaled and block.offset is not None:
        # These losses depend on the difference of response and predictor alone.
        block = block._replace(y=block.y - block.offset, offset=None)
    if block.y.min() == block.y.max():
        what = f"{block.y[0]:g} in all {len(block.y):,} rows"
        raise refusal(f"response {plan.response!r}", "vary", what, code="data")
    labels, client = np.unique(comparable(block.client), return_inverse=True)
    # Sorting integers of 16 bits is by counting.
    few = np.uint16 if len(labels) < 1 << 16 else np.int64
    order = np.argsort(client.astype(few), kind="stable")
    sizes = np.bincount(client)
    sums = sizes if block.weight is None else np.bincount(client, block.weight)
    p = sums / sums.sum() if options.weights == "size" else np.full(len(sizes), 1 / len(sizes))
    if options.clients == "sampled" and len(sizes) < 2:
        raise refusal(
            "client", "have two values or more with clients='sampled'", labels[0], code="data"
        )
    _check_size(f"response {plan.response!r}", np.max(np.abs(block.y)))
    _check_offset(plan, block.offset)
    where = plan.names.index(INTERCEPT) if plan.intercept else None
    frame = coordinates(block.X, block.y, plan.names, where, options.family.scaled)
    X = frame.features(block.X[order])
    notes = () if options.ridge else _check_rank(X, plan.names)
    y = frame.response(block.y[order])
    weight = None if block.weight is None else (block.weight * (sizes / sums)[client])[order]
    offset = None if block.offset is None else block.offset[order]
    total = float(sums.sum())
    return Rows(
        X,
        y,
        client[order],
        tuple(map(str, labels)),
        sizes,
        p,
        frame,
        weight=weight,
        offset=offset,
        total=total,
        notes=notes,
    )


def _check_size(what: str, largest: FloatArray) -> None:
    """Refuse numbers so large or small that their squares overflow; 0 is refused as constant."""
    least, most = _SIZES
    if largest and not least <= largest <= most:
        rule = f"have numbers between {least:g} and {most:g} in size"
        raise refusal(what, rule, float(largest), "; give it in other units", code="data")


def _check_offset(plan: Design, offset: FloatArray | None) -> None:
    """Refuse an offset whose exponential overflows, such as a number of people in place of its logarithm."""
    if offset is None or np.max(np.abs(offset)) <= _LARGEST_OFFSET:
        return
    worst = float(offset[np.argmax(np.abs(offset))])
    if plan.offset is None:
        hint = "; give it in other units"
        raise refusal(
            f"exposure {plan.exposure!r}",
            f"have logarithms up to {_LARGEST_OFFSET:g} in size",
            worst,
            hint,
            code="data",
        )
    hint = "; a number of people or a time is an exposure, whose logarithm is taken"
    raise refusal(
        f"offset {plan.offset!r}",
        f"be from −{_LARGEST_OFFSET:g} to {_LARGEST_OFFSET:g}",
        worst,
        hint,
        code="data",
    )


def _weighted(block: Block, plan: Design) -> Block:
    """Leave out rows of weight 0."""
    if block.weight is None or block.weight.all():
        return block
    kept = block.weight > 0
    if not kept.any():
        raise refusal(f"row_weights {plan.row_weights!r}", "not all be 0", 0.0, code="data")
    offset = None if block.offset is None else block.offset[kept]
    return block._replace(
        X=block.X[kept],
        y=block.y[kept],
        client=block.client[kept],
        weight=block.weight[kept],
        offset=offset,
    )


def check_one_pass(rows: Rows, options: Options) -> None:
    """Refuse one pass over a table in memory with clients of too few rows."""
    least = int(rows.sizes.min())
    if options.fresh and least < STEPS:
        rule = f"be reused unless every client has {STEPS} rows"
        name = rows.labels[int(rows.sizes.argmin())]
        raise refusal(
            "rows", rule, f"{options.rows!r}, and {least} of client {name!r}", code="data"
        )


def comparable(labels: NDArray[Any]) -> NDArray[Any]:
    """Return labels that can be sorted: a mixture of text and numbers as text."""
    return labels.astype(str) if labels.dtype.kind == "O" else labels


def remarks(rows: Rows, options: Options) -> list[str]:
    """Return remarks on the table that bear on the intervals."""
    notes = []
    n, d = rows.X.shape
    if len(rows.sizes) == 1:
        notes.append("there is one client: nothing needs to be communicated")
    alone = [rows.labels[k] for k in np.flatnonzero(rows.sizes == 1)]
    if alone and options.target == "population":
        notes.append(
            f"one row only of {', '.join(alone[:3])}{' and others' if len(alone) > 3 else ''}: its "
            "spread is taken from its square, so that standard errors are a little too large"
        )
    if n < 10 * d:
        more = "" if options.variance == "HC3" or options.clients == "sampled" else _SMALL
        notes.append(f"{n:,} rows for {d} coefficients: intervals may be too short{more}")
    notes += rows.notes
    if options.family.separable and options.family.most == 1:
        events = int(min(rows.y.sum(), n - rows.y.sum()))
        if events < 10 * d:
            notes.append(
                f"{events} rows have the rarer response, for {d} coefficients: intervals may be too short, "
                "and coefficients too large"
            )
    return notes
