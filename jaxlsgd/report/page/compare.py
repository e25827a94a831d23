"""Two studies, cell by cell: what they have in common, and where their numbers differ."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from jaxlsgd.analysis.measures import summarise
from jaxlsgd.analysis.pairs import paired_difference
from jaxlsgd.core.rows import CellRows
from jaxlsgd.core.text import with_error
from jaxlsgd.report import layout
from jaxlsgd.report.page.provenance import shown_path
from jaxlsgd.study.grid import CellSpec
from jaxlsgd.study.store.reader import Results

MOST_LINES = 200
_SIZE = 0.05  # chance that studies of the same thing are said to differ


class Line(NamedTuple):
    """One method at one level in a cell that both studies have, at the first coordinate."""

    cell: CellSpec
    method: str
    level: float
    coverage: tuple[float | None, float | None]
    difference: tuple[float | None, float | None]  # of coverage, with its error
    ratio: tuple[float | None, float | None]  # of lengths, with its error

    @property
    def score(self) -> float:
        """How many standard errors the two are apart, in coverage or in length."""
        gaps = (_score(self.difference, 0.0), _score(self.ratio, 1.0))
        return max(gaps)


def compare(one: Results, other: Results) -> tuple[list[str], layout.Table]:
    """What there is to say of two studies, and a table with the largest differences first.

    Args:
      one: the study that the page is of.
      other: the study to compare it with.
    """
    ours, theirs = ({cell.coordinates: cell for cell in x.study.cells} for x in (one, other))
    shared = [key for key in ours if key in theirs]
    lines: list[Line] = []
    same = read = 0
    paired = one.study.seed == other.study.seed
    for key in shared:
        a, b = one.read(ours[key].id), other.read(theirs[key].id)
        if a is None or b is None:
            continue
        read += 1
        same += _identical(a, b)
        alike = paired and ours[key].problem.content == theirs[key].problem.content
        lines += _lines(ours[key], a, b, alike)
    name = shown_path(other.directory)
    counts = f"Cells in both: {len(shared):,}, of which {read:,} have rows in both. "
    counts += (
        f"Only here: {len(ours) - len(shared):,}. Only in {name}: {len(theirs) - len(shared):,}."
    )
    told = [counts]
    if read:
        told.append(f"The rows are the same to the last bit in {same:,} of {read:,} cells.")
        told += _largest(lines)
    apart = sorted((line for line in lines if line.score > 0), key=lambda line: -line.score)
    return told, _table(apart[:MOST_LINES], len(apart))


def _lines(cell: CellSpec, a: CellRows, b: CellRows, paired: bool) -> Iterator[Line]:
    coverage = [_coverages(rows) for rows in (a, b)]
    for method in (name for name in a.methods if name in b.methods):
        if a.coordinates[method][0] != b.coordinates[method][0]:
            continue
        for level in (level for level in a.levels if level in b.levels):
            rows = [found[method, level] for found in coverage]
            shares = rows[0]["coverage"], rows[1]["coverage"]
            if paired:
                found = paired_difference(a, method, b, method, level=level)
                gap = found["coverage_difference"], found["coverage_difference_mcse"]
                ratio = found["length_ratio"], found["length_ratio_mcse"]
            else:
                gap, ratio = _difference(*rows), _ratio(*rows)
            yield Line(cell, method, level, shares, gap, ratio)


def _coverages(rows: CellRows) -> dict[tuple[str, float], dict[str, Any]]:
    return {
        (row["method"], row["level"]): row
        for row in summarise(rows, last_only=True)
        if row["coordinate"] == rows.coordinates[row["method"]][0]
    }


def _difference(a: dict[str, Any], b: dict[str, Any]) -> tuple[float | None, float | None]:
    if a["coverage"] is None or b["coverage"] is None:
        return None, None
    error = math.hypot(a["coverage_mcse"], b["coverage_mcse"])
    return a["coverage"] - b["coverage"], error


def _ratio(a: dict[str, Any], b: dict[str, Any]) -> tuple[float | None, float | None]:
    errors = a["length_mcse"], b["length_mcse"]
    if None in (a["length"], b["length"], *errors) or not a["length"] > 0 < b["length"]:
        return None, None
    ratio = a["length"] / b["length"]
    return ratio, ratio * math.hypot(errors[0] / a["length"], errors[1] / b["length"])


def _score(found: tuple[float | None, float | None], equal: float) -> float:
    value, error = found
    if value is None or value == equal:
        return 0.0
    return abs(value - equal) / error if error else math.inf


def _identical(a: CellRows, b: CellRows) -> bool:
    fields = ("estimate", "scale", "half_width")
    return a.methods.keys() == b.methods.keys() and all(
        np.array_equal(getattr(rows, field), getattr(b.methods[name], field), equal_nan=True)
        for name, rows in a.methods.items()
        for field in fields
    )


def _largest(lines: list[Line]) -> list[str]:
    if not lines:
        return []
    limit = NormalDist().inv_cdf(1 - _SIZE / (4 * len(lines)))
    beyond = sum(line.score > limit for line in lines)
    return [
        f"{beyond:,} of {len(lines):,} pairs differ in coverage or length by more than {limit:.1f} "
        "standard errors, the most that chance explains."
    ]


def _times(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _table(lines: list[Line], count: int) -> layout.Table:
    header = ["problem", "schedule", "steps", "method", "level", "coverage % here", "there"]
    header += ["difference %", "length ratio", "standard errors apart"]
    texts = [
        [
            line.cell.problem.name,
            line.cell.schedule.name,
            str(line.cell.extent),
            line.method,
            f"{line.level:g}",
            *("-" if share is None else f"{100 * share:.1f}" for share in line.coverage),
            with_error(_times(line.difference[0]), _times(line.difference[1])),
            with_error(*line.ratio),
            f"{line.score:.1f}",
        ]
        for line in lines
    ]
    title = f"The {len(lines):,} largest of {count:,} differences" if count > len(lines) else ""
    return layout.Table(title, header, texts, left=(0, 1, 3))
