"""Warnings about rows that depend on one another, for which standard errors of independent rows are too small.

ψ_i is how much row i moves a coefficient. If rows are independent, products ψ_i ψ_{i+1} of neighbours in a client
have mean 0, in whatever order the table is: a table that is sorted by a column gives no alarm. The statistic
Σ ψ_i ψ_{i+1} / √Σ ψ_i² ψ_{i+1}² is then about normal, also if rows differ in spread. `benchmarks/dependence.py`
measures false alarms and misses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.special
from numpy.typing import NDArray

from jaxlsgd.regression.options import Options
from jaxlsgd.regression.pilot import Whitened

if TYPE_CHECKING:
    from jaxlsgd.regression.result import Coefficients

FloatArray = NDArray[np.floating[Any]]
_ALARM = 1e-3  # false alarms per table
_LENGTHENED = 1.1  # a standard error must be that much too small
_MOST_LAGS = 100
_FEWEST_CLIENTS = 10
_BETWEEN = 2.0  # between clients to within, in standard errors


def remarks(
    space: Whitened,
    influence: FloatArray,
    first: Coefficients,
    names: tuple[str, ...],
    options: Options,
) -> list[str]:
    """Return what the order of rows, and clients, say about the standard errors."""
    if options.clients == "sampled" or options.ridge:
        return []
    client = space.rows.client
    return [
        *_neighbours(influence, client, names),
        *_between_clients(influence, client, first, names),
    ]


def neighbours(influence: FloatArray, client: NDArray[np.int64]) -> tuple[FloatArray, FloatArray]:
    """Return, by coefficient, the statistic of neighbouring rows and the factor by which its error is too small.

    Args:
      influence: ψ, (n, d), rows sorted by client and in the order of the table in each.
      client: (n,).
    """
    sizes = np.bincount(client)
    means = np.stack([np.bincount(client, column) for column in influence.T], axis=1)
    centred = influence - (means / np.maximum(sizes, 1)[:, None])[client]
    together = client[1:] == client[:-1]
    products = centred[1:][together] * centred[:-1][together]
    with np.errstate(divide="ignore", invalid="ignore"):
        z = np.nan_to_num(products.sum(axis=0) / np.sqrt((products**2).sum(axis=0)))
        squares = (centred**2).sum(axis=0)
        total = squares.copy()
        seen = z > 2  # of the others no more is said
        centred = centred[:, seen]
        # Newey and West's sum, of rows of one client.
        lags = int(min(_MOST_LAGS, 1.3 * np.sqrt(len(client)), sizes.max() - 1))
        for lag in range(1, lags + 1) if np.any(seen) else ():
            same = client[lag:] == client[:-lag]
            cross = (centred[lag:] * centred[:-lag])[same].sum(axis=0)
            total[seen] += 2 * (1 - lag / (lags + 1)) * cross
        factor = np.sqrt(np.maximum(np.nan_to_num(total / squares, nan=1.0), 0))
    return z, factor


def _neighbours(
    influence: FloatArray, client: NDArray[np.int64], names: tuple[str, ...]
) -> list[str]:
    if len(client) < 20:
        return []
    z, factor = neighbours(influence, client)
    least = float(-scipy.special.ndtri(_ALARM / len(names)))
    alarmed = np.flatnonzero((z > least) & (factor > _LENGTHENED))
    if not len(alarmed):
        return []
    j = int(alarmed[np.argmax(factor[alarmed])])
    return [
        "rows that follow one another are alike, as in a series or with several rows of one person: the standard "
        f"error of {names[j]} should be about {factor[j]:.2g} times as large; give the persons or periods as client "
        "with clients='sampled', or use a model of the series"
    ]


def _between_clients(
    influence: FloatArray, client: NDArray[np.int64], first: Coefficients, names: tuple[str, ...]
) -> list[str]:
    """Say so if clients as a sample of others would have far larger errors."""
    K = int(client.max()) + 1
    if K < _FEWEST_CLIENTS:
        return []
    sums = np.stack([np.bincount(client, column, minlength=K) for column in influence.T])
    sampled = np.sqrt((sums**2).sum(axis=1) * K / (K - 1))
    factor = sampled / first.std_error
    j = int(np.argmax(factor))
    if factor[j] < _BETWEEN:
        return []
    return [
        f"clients differ: intervals about others like them, by clients='sampled', would be up to {factor[j]:.2g} "
        f"times as long ({names[j]}); these are about the clients of the table"
    ]
