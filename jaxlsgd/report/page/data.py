"""Numbers of the page, over all coordinates and by coordinate, as its script reads them (base64, little-endian)."""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxlsgd.analysis.measures import summarise
from jaxlsgd.analysis.moments import Row, mean, mean_measure
from jaxlsgd.core.causes import FAILURES
from jaxlsgd.core.display import plural
from jaxlsgd.core.rows import CellRows, MethodRows


def packed(values: Any, kind: str = "<f4") -> dict[str, str]:
    """Pack numbers; `kind` is "<f4" or "<i4"."""
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
MOST_LAST = 60_000  # numbers of a kind at the last round, of the whole study
MOST_PATH = 60_000  # and along the rounds
MOST_LINES = 20_000  # of the table; beyond it the first coordinate alone is listed
_LAST = ("coverage", "coverage_mcse", "length", "length_mcse")
_COLUMNS = ("coverage_difference", "coverage_difference_mcse", "length_ratio", "length_ratio_mcse")


class View(NamedTuple):
    """A method in a cell at the last round and shown level, mean over all coordinates."""

    coverage: float
    error: float
    length: float
    length_error: float
    n: int
    coordinates: int

    @property
    def known(self) -> bool:
        """Whether there is a coverage."""
        return math.isfinite(self.coverage)


def measures(rows: MethodRows, truth: FloatArray | None, most: int) -> dict[str, FloatArray]:
    """Return coverage and length with their errors, (saves, levels, 1 + coordinates).

    The first of the last axis is the mean over all coordinates, whose error is that of a mean over
    replications of their own means, as coordinates of one replication are dependent.

    Args:
      rows: of a method.
      truth: of its coordinates; coverage is NaN if it is None.
      most: how many single coordinates are kept.
    """
    ok = rows.ok[:, None, :, None]
    hits, length = (_with_mean(x, most) for x in _outcomes(rows, truth, slice(None)))
    n = np.maximum(ok.sum(-2), 1)
    coverage = mean(hits, ok)
    spread = mean((hits - coverage[..., None, :]) ** 2, ok)
    spread = np.where(spread < 1e-12, 0.0, spread)  # the same in every replication, up to rounding
    return {
        "coverage": coverage,
        "coverage_mcse": np.where(n > 1, np.sqrt(spread / n), np.nan),
        **mean_measure("length", length, ok),
    }


def _outcomes(rows: MethodRows, truth: Any, saves: slice) -> tuple[FloatArray, FloatArray]:
    """Return hits (NaN without a truth) and lengths, (saves, levels, replications, coordinates)."""
    ok = rows.ok[saves, None, :, None]
    half = np.where(ok, rows.half_width[saves], np.nan)
    target = np.full(half.shape[-1], np.nan) if truth is None else np.asarray(truth)
    error = np.abs(np.where(ok, rows.estimate[saves, None], np.nan) - target)
    return np.where(np.isnan(error), np.nan, error <= half), 2 * half


def _with_mean(x: FloatArray, most: int) -> FloatArray:
    """Put the mean over all coordinates before the first of them."""
    return np.concatenate([x.mean(-1, keepdims=True), x[..., :most]], axis=-1)


class Columns:
    """What the script reads of every method in every cell, one after the other.

    `last` is by level and coordinate, `path` by level, coordinate and saved round, `rounds` by saved
    round, `runs` one number each. The coordinate before the first is the mean over all of them.

    Args:
      views: methods times cells.
      levels: how many there are.
      dim: coordinates that a method has, at most.
      shown: place of the level that is shown first.
    """

    def __init__(self, views: int, levels: int, dim: int, shown: int = 0) -> None:
        self._shown = shown
        self.most_coordinates = max(1, MOST_LAST // max(1, views * levels) - 1)
        lines = views * levels * (1 + min(dim, self.most_coordinates))
        self.most_saves = max(2, MOST_PATH // max(1, lines))
        self._found: dict[str, dict[str, list[Any]]] = {}
        self.rows: list[Row] = []
        self.truths: list[Row] = []  # rows whose truth has an error
        self.views: list[dict[str, View]] = []
        self.listed = dim if views * levels * dim <= MOST_LINES else 1

    def add(self, cell: CellRows) -> dict[str, Any]:
        """Add a cell and return its saved rounds as the script gets them."""
        saves = _thinned(cell.save_at, self.most_saves)
        at = [cell.save_at.index(save) for save in saves] if len(saves) > 1 else []
        rows = summarise(cell, last_only=True)
        self.rows += [
            row
            for row in rows
            if row["coordinate"] in cell.coordinates[row["method"]][: self.listed]
        ]
        self.truths += [
            r for r in rows if r.get("truth_error") and r["level"] == cell.levels[self._shown]
        ]
        self.views.append({})
        for name, rows in cell.methods.items():
            found = measures(rows, cell.truth[name], self.most_coordinates)
            # As the script has them, so that it writes the same digits.
            p, error, length, spread = (
                float(np.float32(found[x][-1, self._shown, 0])) for x in _LAST
            )
            count, n = len(cell.coordinates[name]), int(rows.ok[-1].sum())
            self.views[-1][name] = View(p, error, length, spread, n, count)
            self._put("last", {key: found[key][-1] for key in _LAST})
            order = {key: np.moveaxis(found[key][at], 0, -1) for key in ("coverage", "length")}
            self._put("path", order)
            ok = rows.ok
            self._put("rounds", {"n_ok": ok[at].sum(-1), "l2_error": _distance(cell, name)[at]})
            counted = name in cell.numbers_sent
            sent = cell.numbers_sent[name][-1] if counted else math.nan
            share = sent / cell.sent_under_c1[-1] if counted else math.nan
            runs = {"n_ok": ok[-1].sum(), "numbers_sent": sent, "sent_over_c1": share}
            self._put("runs", runs)
        return {"saves": saves if len(saves) > 1 else []}

    def _put(self, kind: str, arrays: Mapping[str, Any]) -> None:
        columns = self._found.setdefault(kind, {name: [] for name in arrays})
        for name, array in arrays.items():
            columns[name].append(np.ravel(array))

    def plain(self) -> dict[str, Any]:
        """Return the columns as JSON data."""
        empty = {"last": _LAST, "path": (), "rounds": (), "runs": ("n_ok",)}
        return {
            kind: {name: packed(np.concatenate(x)) for name, x in self._found[kind].items()}
            if kind in self._found
            else {name: packed([]) for name in names}
            for kind, names in empty.items()
        }


def _distance(cell: CellRows, name: str) -> FloatArray:
    """Return the mean of ‖estimate − truth‖ at every saved round; NaN without a truth."""
    rows, truth = cell.methods[name], cell.truth[name]
    if truth is None:
        return np.full(len(cell.save_at), np.nan)
    ok = rows.ok[..., None]
    apart = np.where(ok, rows.estimate, np.nan) - truth
    return mean(np.sqrt(np.sum(apart**2, axis=-1, keepdims=True)), ok)[:, 0]


class Pairs:
    """Differences from the first schedule and method of each problem, algorithm and horizon.

    By level and coordinate, as `Columns` has them. Only the reference of each setting is held in memory,
    and of it the last round.

    Args:
      most: how many single coordinates are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._references: dict[tuple[str, str, int], tuple[Any, ...]] = {}
        self._found: dict[str, list[FloatArray]] = {name: [] for name in _COLUMNS}
        self._places: list[tuple[int, int, int]] = []

    def add(self, index: int, cell: CellRows, methods: list[str]) -> None:
        """Add the cell with this index; the first of a setting is the reference of the others."""
        key = (cell.problem, cell.algorithm, cell.num_steps)
        for name, rows in cell.methods.items():
            side = _last(rows, cell.truth[name], self._most)
            if key not in self._references:
                self._references[key] = cell.coordinates[name], side, index
                continue
            names, reference, first = self._references[key]
            if cell.coordinates[name] == names:
                for column, values in zip(_COLUMNS, differences(side, reference), strict=True):
                    self._found[column].append(values.ravel())
                self._places.append((index, methods.index(name), first))

    def plain(self) -> dict[str, Any]:
        """Return the differences as JSON data, with the cell and method that each belongs to."""
        none = [np.zeros(0)]
        found = {name: packed(np.concatenate(x or none)) for name, x in self._found.items()}
        places = zip(*self._places, strict=True) if self._places else ((), (), ())
        for name, values in zip(("cell", "method", "reference"), places, strict=True):
            found[name] = packed(list(values), "<i4")
        return found


Side = tuple[NDArray[np.bool_], FloatArray, FloatArray]  # completed, hits and lengths


def _last(rows: MethodRows, truth: Any, most: int) -> Side:
    """Return the last round, hits and lengths as (levels, replications, 1 + coordinates)."""
    hits, length = (_with_mean(x, most)[0] for x in _outcomes(rows, truth, slice(-1, None)))
    return rows.ok[-1], hits, length


def differences(side: Side, reference: Side) -> tuple[FloatArray, ...]:
    """Return the columns of `analysis.pairs.paired_difference`, (levels, 1 + coordinates)."""
    n = min(side[0].size, reference[0].size)
    both = side[0][:n] & reference[0][:n]
    (hits, other_hits), (length, other) = (
        [x[:, :n][:, both] for x in (side[i], reference[i])] for i in (1, 2)
    )
    if both.sum() < 2:
        return (np.full((hits.shape[0], hits.shape[-1]), np.nan),) * 4
    root = math.sqrt(both.sum())
    with np.errstate(invalid="ignore", divide="ignore"):
        gap, base = hits - other_hits, other.mean(1)
        ratio = length.mean(1) / base
        errors = gap.std(1, ddof=1), (length - ratio[:, None] * other).std(1, ddof=1) / base
    return gap.mean(1), errors[0] / root, ratio, errors[1] / root


def _thinned(saves: Sequence[int], most: int) -> list[int]:
    """Return at most so many of the saved rounds, spread evenly, with the last."""
    if len(saves) <= most:
        return list(saves)
    chosen = np.unique(np.linspace(0, len(saves) - 1, most).round().astype(int))
    return [saves[i] for i in chosen]


MOST_NUMBERS = 300_000  # of the whole study
MOST_POINTS, MOST_INTERVALS = 41, 100
LISTED = 5  # failed replications


def sizes(views: int, dim: int, levels: int = 1) -> tuple[int, int, int]:
    """Return how many coordinates, quantiles and intervals of each method and cell to keep.

    Args:
      views: methods times cells.
      dim: coordinates that a method has, at most.
      levels: how many there are, each with quantiles of lengths and intervals of its own.
    """
    coordinates = min(dim, max(1, MOST_NUMBERS // (150 * max(1, views * levels))))
    room = MOST_NUMBERS // max(1, views * coordinates)
    points = min(MOST_POINTS, max(9, room // (2 + 2 * levels)))
    left = (room - (1 + levels) * points) // (2 * levels)
    return coordinates, points, min(MOST_INTERVALS, max(20, left))


def detail(cell: CellRows, most: int, points: int, intervals: int) -> list[dict[str, Any]]:
    """Return what is shown of each method of a cell, at the last round."""
    return [_method(cell, name, most, points, intervals) for name in cell.methods]


def _method(cell: CellRows, name: str, most: int, points: int, intervals: int) -> dict[str, Any]:
    rows, count = cell.methods[name], len(cell.coordinates[name])
    return {
        "failed": _failures(rows),
        "list": np.flatnonzero(~rows.ok[-1])[:LISTED].tolist(),
        "of": [_one(cell, name, j, points, intervals) for j in range(min(most, count))],
    }


def _one(cell: CellRows, name: str, j: int, points: int, intervals: int) -> dict[str, Any]:
    """Return quantiles of one coordinate, and by level those of its lengths, and its intervals."""
    rows, truth = cell.methods[name], cell.truth[name]
    ok, found = rows.ok[-1], {}
    estimate, halves = rows.estimate[-1, ok, j], rows.half_width[-1][:, ok, j]
    if estimate.size < 2:
        return found
    share = (np.arange(points) + 0.5) / points
    centre = estimate.mean() if truth is None else truth[j]
    deviation = estimate.std(ddof=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        found["normal"] = packed(np.quantile((estimate - centre) / deviation, share))
    found["length"] = [packed(np.quantile(2 * half, share)) for half in halves]
    if truth is not None:
        found["zip"] = [packed(_zip(estimate - centre, half, intervals)) for half in halves]
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
