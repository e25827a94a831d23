"""Comparison of two studies, cell by cell: start reading at `compare`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np

from jaxlsgd.analysis.measures import columns_for_people, summarise
from jaxlsgd.analysis.moments import Row
from jaxlsgd.analysis.pairs import paired_difference
from jaxlsgd.core import checks
from jaxlsgd.core.display import Table
from jaxlsgd.core.rows import CellRows
from jaxlsgd.report import tables
from jaxlsgd.study.store.reader import Results

Format = Literal["text", "markdown", "csv"]
_SIZE = 0.05  # chance that two studies of the same cells are reported to differ
_WHERE = ("problem", "algorithm", "schedule", "num_steps", "method", "level", "coordinate")
_SHARES = ("coverage", "coverage_other")
_PAIRED = ("coverage_difference", "length_ratio")
_NOTE = (
    "Differences are here less there, ratios of lengths here over there, with the Monte-Carlo standard "
    "errors of both studies combined in parentheses."
)
COLUMNS = (
    *_WHERE,
    *_SHARES,
    *(name + end for name in _PAIRED for end in ("", "_mcse")),
    *("score", "n_ok", "n_ok_other"),
)


class Comparison(NamedTuple):
    """Findings in sentences, and a row per cell, method and level, largest difference first.

    A row has the coverage here and there, their difference, the ratio of the mean lengths, each with
    its combined standard error, and `score`, the difference in standard errors.
    """

    findings: list[str]
    rows: list[Row]

    def table(self, most: int | None = None) -> Table:
        """Return the rows that differ as a table, at most so many."""
        apart = [row for row in self.rows if row["score"] > 0]
        shown = apart[:most]
        table = tables.tabulate([_texts(row) for row in shown], *_columns(shown))
        cut = f"The {len(shown):,} largest of {len(apart):,} differences"
        parts = [*([cut] if len(apart) > len(shown) else []), *([table.title] if shown else [])]
        return table._replace(title=": ".join(parts), notes=(_NOTE,))


def _columns(rows: list[Row]) -> tuple[tuple[str, ...], ...]:
    known = columns_for_people(rows)
    where = tuple(name for name in _WHERE if name in known)
    return where, _PAIRED, ("apart", "here", "there")


def _texts(row: Row) -> Row:
    shares = ("-" if row[name] is None else f"{100 * row[name]:.1f}" for name in _SHARES)
    return (
        row | dict(zip(("here", "there"), shares, strict=True)) | {"apart": f"{row['score']:.1f}"}
    )


def compare(one: Results, other: Results, name: str) -> Comparison:
    """Compare two studies at the first coordinate and the last round of the cells that both have.

    If the seed and the problem are the same, replication r has the same data in both, and the errors
    are those of paired differences.

    Args:
      one: a study.
      other: the study to compare it with.
      name: what to call the other.

    Example::

        print("\\n".join(compare(Results("new"), Results("old"), "old").findings))
    """
    ours, theirs = ({cell.coordinates: cell for cell in x.study.cells} for x in (one, other))
    shared = [key for key in ours if key in theirs]
    rows: list[Row] = []
    same = read = unequal = 0
    for key in shared:
        a, b = one.read(ours[key].id), other.read(theirs[key].id)
        if a is None or b is None:
            continue
        read += 1
        same += _identical(a, b)
        unequal += a.replications != b.replications
        alike = ours[key].problem.content == theirs[key].problem.content
        rows += _rows(a, b, paired=alike and one.study.seed == other.study.seed)
    here, there = len(ours) - len(shared), len(theirs) - len(shared)
    findings = [
        f"Cells in both: {len(shared):,}, of which {read:,} have rows in both. "
        f"Only here: {here:,}. Only in {name}: {there:,}."
    ]
    if read:
        common = " in the replications that both have" if unequal else ""
        findings.append(
            f"The rows are the same to the last bit in {same:,} of {read:,} cells{common}."
        )
        findings += _largest(rows)
    return Comparison(findings, sorted(rows, key=lambda row: -row["score"]))


def render(found: Comparison, format: Format = "text") -> str:
    """Return a comparison as text or Markdown, findings first, or every row of it as CSV.

    Args:
      found: from `compare`.
      format: "text", "markdown" or "csv".
    """
    checks.choice("format", format, Format)
    if format == "csv":
        return Table.of(found.rows, COLUMNS).csv()
    table = found.table()
    body, between = (table.text, "\n") if format == "text" else (table.markdown, "\n\n")
    return between.join(found.findings) + ("\n\n" + body() if table.lines else "\n")


def _rows(a: CellRows, b: CellRows, paired: bool) -> Iterator[Row]:
    firsts = [_first_coordinate(rows) for rows in (a, b)]
    for key in (key for key in firsts[0] if key in firsts[1]):
        here, there = firsts[0][key], firsts[1][key]
        if here["coordinate"] != there["coordinate"]:
            continue
        if paired:
            method, level = key
            found = paired_difference(a, method, b, method, level=level)
            gap = {name: found[name] for pair in _PAIRED for name in (pair, f"{pair}_mcse")}
        else:
            gap = _difference(here, there) | _ratio(here, there)
        row = {name: here[name] for name in (*_WHERE, "coverage", "n_ok", "n_failed")}
        row |= {"coverage_other": there["coverage"], "n_ok_other": there["n_ok"]} | gap
        yield row | {"score": _score(row)}


def _first_coordinate(rows: CellRows) -> dict[tuple[str, float], Row]:
    return {
        (row["method"], row["level"]): row
        for row in summarise(rows, last_only=True)
        if row["coordinate"] == rows.coordinates[row["method"]][0]
    }


def _difference(a: Row, b: Row) -> Row:
    value = error = None
    if a["coverage"] is not None and b["coverage"] is not None:
        value = a["coverage"] - b["coverage"]
        error = math.hypot(a["coverage_mcse"] or 0, b["coverage_mcse"] or 0)
    return {"coverage_difference": value, "coverage_difference_mcse": error}


def _ratio(a: Row, b: Row) -> Row:
    value = error = None
    errors = a["length_mcse"], b["length_mcse"]
    if None not in (a["length"], b["length"], *errors) and a["length"] > 0 < b["length"]:
        value = a["length"] / b["length"]
        error = value * math.hypot(errors[0] / a["length"], errors[1] / b["length"])
    return {"length_ratio": value, "length_ratio_mcse": error}


def _score(row: Row) -> float:
    """Return the larger of the differences in coverage and in length, in standard errors."""
    return max(_apart(row, "coverage_difference", 0.0), _apart(row, "length_ratio", 1.0))


def _apart(row: Row, name: str, equal: float) -> float:
    value, error = row[name], row[f"{name}_mcse"]
    if value is None or value == equal:
        return 0.0
    return abs(value - equal) / error if error else math.inf


def _identical(a: CellRows, b: CellRows) -> bool:
    """Return whether the replications that both have are the same to the last bit."""
    fields, n = ("estimate", "scale", "half_width"), min(a.replications, b.replications)
    return a.methods.keys() == b.methods.keys() and all(
        np.array_equal(
            getattr(rows, field)[..., :n, :],
            getattr(b.methods[name], field)[..., :n, :],
            equal_nan=True,
        )
        for name, rows in a.methods.items()
        for field in fields
    )


def _largest(rows: list[Row]) -> list[str]:
    if not rows:
        return []
    limit = NormalDist().inv_cdf(1 - _SIZE / (4 * len(rows)))
    beyond = sum(row["score"] > limit for row in rows)
    return [
        f"{beyond:,} of {len(rows):,} pairs differ in coverage or length by more than {limit:.1f} "
        "standard errors, the most that chance explains."
    ]
