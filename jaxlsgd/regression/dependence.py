"""Warnings about rows that depend on one another, for which standard errors of independent rows are too small.

ψ_i is how much row i moves a coefficient, less a parabola over the rows of its client. If rows are independent,
ψ_i (ψ_{i+1} − a_i) has mean 0, with a_i the mean of ψ at 10 to 19 rows from i, to both sides, in the same client.
The statistic Σ ψ_i (ψ_{i+1} − a_i) over the root of its sum of squares is then about normal, also if rows differ in spread.
Neighbours in a series or a panel are alike, and rows farther off are less so. In a file that is sorted by a column,
inside or outside the model, rows farther off are as alike as neighbours, so that the difference has mean 0 again.
If each client's rows are sorted by the response itself, their order says nothing about dependence, and nothing is said.
`benchmarks/dependence.py` measures false alarms and misses.
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
_FAR = 10  # rows from which on others are compared with neighbours; an eighth of a smaller client
_FEWEST_FOR_TREND = 20  # rows of a client
_EXCEPTIONS = 0.02  # of the steps up and down, in a sorted file
_COLUMNS_AT_ONCE = 16  # of which there are half a dozen copies
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
        *([] if is_sorted(space.rows.y, client) else _neighbours(influence, client, names)),
        *_between_clients(influence, client, first, names),
    ]


def neighbours(influence: FloatArray, client: NDArray[np.int64]) -> tuple[FloatArray, FloatArray]:
    """Return, by coefficient, the statistic of neighbouring rows and the factor by which its error is too small.

    Args:
      influence: ψ, (n, d), rows sorted by client and in the order of the table in each.
      client: (n,).
    """
    columns = range(0, influence.shape[1], _COLUMNS_AT_ONCE)
    parts = [_neighbours_of(influence[:, j : j + _COLUMNS_AT_ONCE], client) for j in columns]
    return np.concatenate([z for z, _ in parts]), np.concatenate([factor for _, factor in parts])


def _neighbours_of(
    influence: FloatArray, client: NDArray[np.int64]
) -> tuple[FloatArray, FloatArray]:
    """Return the same for some of the coefficients."""
    sizes = np.bincount(client)
    centred = influence - (_sums(influence, client) / np.maximum(sizes, 1)[:, None])[client]
    straight = _without_trend(centred, client, sizes)
    together = client[1:] == client[:-1]
    neighbour = straight[1:] - _far_away(straight, client, sizes)[:-1]
    products = (straight[:-1] * neighbour)[together]
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


def _sums(values: FloatArray, client: NDArray[np.int64]) -> FloatArray:
    """Return the sums of columns by client, (K, d)."""
    columns = [np.bincount(client, weights=column) for column in values.T]
    return np.stack(columns, axis=1).astype(np.float64)


def is_sorted(y: FloatArray, client: NDArray[np.int64]) -> bool:
    """Return whether the rows of clients are in the order of y, up or down, with few exceptions."""
    steps = np.diff(y)[client[1:] == client[:-1]]
    up, down = np.sum(steps > 0), np.sum(steps < 0)
    return bool(min(up, down) <= _EXCEPTIONS * (up + down))


def _without_trend(
    influence: FloatArray, client: NDArray[np.int64], sizes: NDArray[np.int64]
) -> FloatArray:
    """Return ψ less each client's parabola over its rows; only less its mean, if it has few."""
    place = np.arange(len(client)) - (np.cumsum(sizes) - sizes)[client]
    t = (2 * place + 1) / sizes[client] - 1
    powers = np.stack([t**0, t, t**2], axis=1)
    powers[sizes[client] < _FEWEST_FOR_TREND, 1:] = 0

    products = np.stack([_sums(powers[:, [j]] * powers, client) for j in range(3)], axis=1)
    moments = np.stack([_sums(powers[:, [j]] * influence, client) for j in range(3)], axis=1)
    fitted = np.linalg.pinv(products, hermitian=True) @ moments
    return influence - np.einsum("ij,ijk->ik", powers, fitted[client])


def _far_away(
    centred: FloatArray, client: NDArray[np.int64], sizes: NDArray[np.int64]
) -> FloatArray:
    """Return a_i, (n, d); 0 in clients without rows so far away."""
    end = np.cumsum(sizes)[client]
    begin, row = end - sizes[client], np.arange(len(client))
    far = np.clip(sizes // 8, 2, _FAR)[client]
    until = np.concatenate([np.zeros((1, centred.shape[1])), np.cumsum(centred, axis=0)])
    total, count = np.zeros_like(centred), np.zeros(len(client))
    for first in (row + far, row - 2 * far + 1):
        low = np.clip(first, begin, end)
        high = np.clip(first + far, low, end)
        total += until[high] - until[low]
        count += high - low
    return total / np.maximum(count, 1)[:, None]


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
    if not factor[j] >= _BETWEEN:
        return []
    return [
        f"clients differ: intervals about others like them, by clients='sampled', would be up to {factor[j]:.2g} "
        f"times as long ({names[j]}); these are about the clients of the table"
    ]
