"""Numbers of the page: averages over cells, and columns as its script reads them (base64, little-endian)."""

from __future__ import annotations

import base64
import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxlsgd.analysis.measures import summarise
from jaxlsgd.analysis.moments import Row
from jaxlsgd.analysis.pairs import paired_difference
from jaxlsgd.core.causes import FAILURES
from jaxlsgd.core.display import plural
from jaxlsgd.core.rows import CellRows, MethodRows


def packed(values: Any, kind: str = "<f4") -> dict[str, str]:
    """Pack numbers, None as NaN; `kind` is "<f4", "<f8" or "<i4"."""
    if kind != "<i4":
        values = [np.nan if value is None else value for value in np.ravel(values).tolist()]
    with np.errstate(over="ignore"):
        content = np.asarray(values, kind).tobytes()
    return {kind[1:]: base64.b64encode(content).decode("ascii")}


class Failures:
    """Counts the replications of all cells that failed at the last round, by cause and method."""

    def __init__(self) -> None:
        self._runs = self._failed = self._cells = 0
        self._causes: dict[str, Counter[str]] = {}

    def add(self, cell: CellRows) -> None:
        """Add a cell."""
        lost = np.zeros(cell.replications, bool)
        for name, rows in cell.methods.items():
            lost |= ~rows.ok[-1]
            self._causes.setdefault(name, Counter()).update(_failures(rows))
        self._runs += lost.size
        self._failed += int(lost.sum())
        self._cells += bool(lost.any())

    def sentences(self, labels: Mapping[str, str]) -> list[str]:
        """Return in how many runs a method failed, then the causes of each method, by its label."""
        if not self._runs:
            return []
        if not self._failed:
            return [f"None of {self._runs:,} runs failed."]
        cells = plural(self._cells, "cell")
        lines = [f"In {self._failed:,} of {self._runs:,} runs, in {cells}, a method failed."]
        for name, causes in self._causes.items():
            if counts := [f"{count:,} {text}" for text, count in causes.items() if count]:
                lines.append(f"{labels[name]}: {', '.join(counts)}")
        return lines


FloatArray = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Average:
    """A number, and what each replication adds to its deviation from the truth."""

    value: float
    shares: FloatArray  # (replications,), to be squared and summed

    @property
    def error(self) -> float:
        """Monte-Carlo standard error."""
        return float(np.sqrt(np.sum(self.shares**2)))

    def __sub__(self, other: Average) -> Average:
        shares = np.zeros(max(self.shares.size, other.shares.size))
        shares[: self.shares.size] += self.shares
        shares[: other.shares.size] -= other.shares
        return Average(self.value - other.value, shares)


def share(hits: NDArray[np.bool_], ok: NDArray[np.bool_]) -> Average | None:
    """Return the share of a cell's completed replications, with error √(p(1 − p)/n); None without any."""
    n = int(ok.sum())
    if not n:
        return None
    p = float(hits[ok].mean())
    return Average(p, np.where(ok, hits - p, 0.0) / n)


def log_mean(x: FloatArray, ok: NDArray[np.bool_]) -> Average | None:
    """Return the logarithm of a positive mean, with its error by the delta method."""
    n = int(ok.sum())
    middle = float(x[ok].mean()) if n else 0.0
    if n < 2 or not 0 < middle < math.inf:
        return None
    bessel = math.sqrt(n / (n - 1))
    return Average(math.log(middle), np.where(ok, x / middle - 1, 0.0) * (bessel / n))


def over(parts: Sequence[Average]) -> Average:
    """Return the average of averages, each with the same weight."""
    shares = np.zeros(max(part.shares.size for part in parts))
    for part in parts:
        shares[: part.shares.size] += part.shares / len(parts)
    return Average(float(np.mean([part.value for part in parts])), shares)


_COLUMNS = ("coverage_difference", "coverage_difference_mcse", "length_ratio", "length_ratio_mcse")


class Pairs:
    """Differences within a problem, algorithm and horizon, at the first level and coordinate.

    Only the reference of each setting is held in memory, and of it the last round.
    """

    def __init__(self) -> None:
        self._references: dict[tuple[str, str, int], tuple[CellRows, int]] = {}
        self._rows: list[Row] = []
        self._places: list[tuple[int, int, int]] = []

    def add(self, index: int, cell: CellRows, methods: list[str]) -> None:
        """Add the cell with this index; the first of a setting is the reference of the others."""
        key = (cell.problem, cell.algorithm, cell.num_steps)
        if key not in self._references:
            self._references[key] = _slim(cell), index
        reference, first = self._references[key]
        (base,) = reference.methods
        for name in cell.methods:
            shared = cell.coordinates[name][0] in reference.coordinates[base]
            if shared and (index, name) != (first, base):
                self._rows.append(paired_difference(cell, name, reference, base))
                self._places.append((index, methods.index(name), first))

    def plain(self) -> dict[str, Any]:
        """Return the differences as JSON data, with the cell and method that each belongs to."""
        found = {name: packed([row[name] for row in self._rows]) for name in _COLUMNS}
        places = zip(*self._places, strict=True) if self._places else ((), (), ())
        for name, values in zip(("cell", "method", "reference"), places, strict=True):
            found[name] = packed(list(values), "<i4")
        return found


def _slim(cell: CellRows) -> CellRows:
    name, rows = next(iter(cell.methods.items()))
    # Copies: a view would hold all saved rounds.
    arrays = {
        field.name: getattr(rows, field.name)[-1:].copy() for field in dataclasses.fields(rows)
    }
    return dataclasses.replace(cell, methods={name: MethodRows(**arrays)})


_LAST = ("coverage", "n_ok", "length", "length_mcse", "numbers_sent", "sent_over_c1")
_PATH = ("coverage", "length", "l2_error", "n_ok")
_EACH = ("coverage", "length", "n_ok")
MOST_PATH = 60_000  # numbers of a kind along the rounds, of the whole study


class Columns:
    """Measures of the first coordinate, as in the tables, one line per cell, method and level.

    Args:
      lines: how many there will be, which decides how many of the saved rounds are drawn.
    """

    def __init__(self, lines: int) -> None:
        self.most_saves = max(2, MOST_PATH // max(1, lines) // 5)
        self.rows: list[Row] = []
        self.path: list[Row] = []
        self.each: list[Row] = []

    def add(self, cell: CellRows) -> dict[str, Any]:
        """Add a cell and return its saved rounds as the script gets them."""
        rows = summarise(cell)
        names = {name: labels[0] for name, labels in cell.coordinates.items()}
        first = [row for row in rows if row["coordinate"] == names[row["method"]]]
        last = cell.save_at[-1]
        saves = _thinned(cell.save_at, self.most_saves)
        self.rows += [row for row in first if row["save_round"] == last]
        level = cell.levels[0]
        self.each += [r for r in rows if r["save_round"] == last and r["level"] == level]
        order = _ordered(cell, first)
        self.path += [row for row in order if len(saves) > 1 and row["save_round"] in saves]
        return {"saves": saves if len(saves) > 1 else []}

    def plain(self) -> dict[str, Any]:
        """Return the columns as JSON data."""
        return {
            "last": {name: _column(self.rows, name, "<f8") for name in _LAST},
            "path": {name: _column(self.path, name) for name in _PATH},
            "each": {name: _column(self.each, name) for name in _EACH},
        }


def _column(rows: Sequence[Row], name: str, kind: str = "<f4") -> dict[str, str]:
    return packed(np.array([row[name] for row in rows], object), kind)


def _ordered(cell: CellRows, rows: Sequence[Row]) -> list[Row]:
    """Sort by method, level and round, so that the numbers of a line are consecutive."""
    methods = list(cell.methods)
    return sorted(
        rows,
        key=lambda row: (
            methods.index(row["method"]),
            cell.levels.index(row["level"]),
            row["save_round"],
        ),
    )


def _thinned(saves: Sequence[int], most: int) -> list[int]:
    """Return at most so many of the saved rounds, spread evenly, with the last."""
    if len(saves) <= most:
        return list(saves)
    chosen = np.unique(np.linspace(0, len(saves) - 1, most).round().astype(int))
    return [saves[i] for i in chosen]


MOST_NUMBERS = 300_000  # of the whole study
MOST_POINTS, MOST_INTERVALS = 41, 100
LISTED = 5  # failed replications


def sizes(views: int) -> tuple[int, int]:
    """Return how many quantiles and intervals of each method and cell to keep, so that the page stays small.

    Args:
      views: methods times cells.
    """
    room = MOST_NUMBERS // max(1, views)
    points = min(MOST_POINTS, max(9, room // 4))
    return points, min(MOST_INTERVALS, max(20, (room - 2 * points) // 2))


def detail(cell: CellRows, points: int, intervals: int) -> list[dict[str, Any]]:
    """Return what is shown of each method of a cell, at the last round, first level and coordinate."""
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
    """Count the failures of the last round by cause."""
    counts = {cause.text: int((rows.cause[-1] == cause).sum()) for cause in FAILURES}
    return {text: count for text, count in counts.items() if count}


def _zip(error: FloatArray, half: FloatArray, intervals: int) -> FloatArray:
    """Return intervals less the truth at evenly spaced ranks of |error|/half-width."""
    with np.errstate(invalid="ignore", divide="ignore"):
        order = np.argsort(np.abs(error) / half, kind="stable")
    rank = (np.arange(min(intervals, order.size)) + 0.5) / min(intervals, order.size)
    chosen = order[(rank * order.size).astype(int)]
    return np.stack([error[chosen] - half[chosen], error[chosen] + half[chosen]], axis=1)
