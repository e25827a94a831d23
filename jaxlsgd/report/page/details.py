"""One cell up close: its estimates against normal ones, lengths, intervals by rank, and failures."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxlsgd.core.causes import FAILURES
from jaxlsgd.core.rows import CellRows, MethodRows
from jaxlsgd.report.page.arrays import packed

MOST_NUMBERS = 300_000  # of the whole study
MOST_POINTS, MOST_INTERVALS = 41, 100
LISTED = 5  # failed replications


def sizes(views: int) -> tuple[int, int]:
    """Quantiles and intervals to keep of each method in each cell, so that the page stays small.

    Args:
      views: methods times cells.
    """
    room = MOST_NUMBERS // max(1, views)
    points = min(MOST_POINTS, max(9, room // 4))
    return points, min(MOST_INTERVALS, max(20, (room - 2 * points) // 2))


def detail(cell: CellRows, points: int, intervals: int) -> list[dict[str, Any]]:
    """What is shown of each method of a cell, at the last round, first level and coordinate."""
    return [_method(cell, name, points, intervals) for name in cell.methods]


def _method(cell: CellRows, name: str, points: int, intervals: int) -> dict[str, Any]:
    rows, truth = cell.methods[name], cell.truth[name]
    ok = rows.ok[-1]
    estimate, half = rows.estimate[-1, ok, 0], rows.half_width[-1, 0, ok, 0]
    found: dict[str, Any] = {
        "failed": _failures(rows),
        "list": np.flatnonzero(~ok)[:LISTED].tolist(),
    }
    if estimate.size < 2:
        return found
    share = (np.arange(points) + 0.5) / points
    centre = estimate.mean() if truth is None else truth[0]
    deviation = estimate.std(ddof=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        found["normal"] = packed(np.quantile((estimate - centre) / deviation, share))
    found["length"] = packed(np.quantile(2 * half, share))
    if truth is not None:
        found["zip"] = packed(_zip(estimate - centre, half, intervals))
    return found


def _failures(rows: MethodRows) -> dict[str, int]:
    """How many failed at the last round, by cause."""
    counts = {cause.text: int((rows.cause[-1] == cause).sum()) for cause in FAILURES}
    return {text: count for text, count in counts.items() if count}


def _zip(
    error: NDArray[np.float64], half: NDArray[np.float64], intervals: int
) -> NDArray[np.float64]:
    """Intervals less the truth, by how far they are from missing it; evenly spaced ranks of all."""
    with np.errstate(invalid="ignore", divide="ignore"):
        order = np.argsort(np.abs(error) / half, kind="stable")
    rank = (np.arange(min(intervals, order.size)) + 0.5) / min(intervals, order.size)
    chosen = order[(rank * order.size).astype(int)]
    return np.stack([error[chosen] - half[chosen], error[chosen] + half[chosen]], axis=1)
