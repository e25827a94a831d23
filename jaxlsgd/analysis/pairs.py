"""Differences between cells with the same data, each with its Monte-Carlo standard error."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from jaxlsgd.analysis.moments import BoolArray, FloatArray, Row, mean_measure
from jaxlsgd.core import checks
from jaxlsgd.core.rows import CellRows


def paired_difference(
    cell_a: CellRows,
    method_a: str | None,
    cell_b: CellRows,
    method_b: str | None = None,
    *,
    level: float | None = None,
    coordinate: str | None = None,
) -> Row:
    """Compare a method in one cell with a method in another, at their last rounds.

    Replication i has the same data in both cells (common random numbers), so the standard error is
    that of the mean of the differences d_i = a_i − b_i: much smaller than for two separate studies.

    Args:
      cell_a: rows of the cell to judge, from the same root key as `cell_b`.
      method_a: its method; the first if None.
      cell_b: rows of the cell to compare with; it may be the same one.
      method_b: its method; the first if None.
      level: confidence level, the first of `cell_a` if None.
      coordinate: name of the coordinate, the first of `method_a` if None.

    Returns:
      What was compared, `n_pairs` (completed in both), and the differences of coverage and mean
      length with `_mcse`, and the ratio of the mean lengths with `_mcse` (delta method).

    Example::

        paired_difference(c5, "plug_in", c1, "plug_in")["length_ratio"]
    """
    method_a, method_b = cell_a.method_named(method_a), cell_b.method_named(method_b)
    level = cell_a.levels[0] if level is None else level
    coordinate = cell_a.coordinates[method_a][0] if coordinate is None else coordinate
    sides = [
        _last(cell, method, level, coordinate)
        for cell, method in [(cell_a, method_a), (cell_b, method_b)]
    ]
    n = min(len(ok) for ok, _, _ in sides)
    both = sides[0][0][:n] & sides[1][0][:n]
    covered = [hit[:n][both] for _, hit, _ in sides]
    length = [width[:n][both] for _, _, width in sides]
    return {
        "problem": cell_a.problem,
        "algorithm": cell_a.algorithm,
        "num_steps": cell_a.num_steps,
        "level": level,
        "coordinate": coordinate,
        "schedule": cell_a.schedule,
        "method": method_a,
        "reference_algorithm": cell_b.algorithm,
        "reference_schedule": cell_b.schedule,
        "reference_method": method_b,
        "n_pairs": int(both.sum()),
        **_mean_row("coverage_difference", covered[0] - covered[1]),
        **_mean_row("length_difference", length[0] - length[1]),
        **_ratio_row("length_ratio", *length),
    }


def _last(
    cell: CellRows, method: str, level: float, coordinate: str
) -> tuple[BoolArray, FloatArray, FloatArray]:
    """Return completed, covered (NaN if the truth is unknown) and length of every replication."""
    names, truth, rows = cell.coordinates[method], cell.truth[method], cell.methods[method]
    checks.choice("coordinate", coordinate, names)
    j, ok = names.index(coordinate), rows.ok[-1]
    half = np.where(ok, rows.half_width[-1, cell.level_place(level), :, j], np.nan)
    target = np.nan if truth is None else truth[j]
    error = np.abs(np.where(ok, rows.estimate[-1, :, j], np.nan) - target)
    return ok, np.where(np.isnan(error), np.nan, error <= half), 2 * half


def _mean_row(name: str, x: FloatArray) -> Row:
    found = mean_measure(name, x[:, None], np.ones((x.size, 1), bool))
    return {key: _number(value.item()) for key, value in found.items()}


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _ratio_row(name: str, a: FloatArray, b: FloatArray) -> Row:
    if b.size < 2 or not b.mean() > 0:
        return {name: None, f"{name}_mcse": None}
    ratio = a.mean() / b.mean()
    error = np.std(a - ratio * b, ddof=1) / math.sqrt(b.size) / b.mean()
    return {name: _number(ratio), f"{name}_mcse": _number(error)}


def differences(cells: Sequence[CellRows], reference: tuple[str, str] | None = None) -> list[Row]:
    """Return paired differences of every schedule and method from one of them.

    Cells are compared within their problem, algorithm and horizon.

    Args:
      cells: cells of one study, so of one root key.
      reference: schedule and method to compare with; the first of each problem, algorithm and horizon
        if None.

    Returns:
      One row of `paired_difference` for each level and each coordinate that both methods have; none
      for a problem, algorithm and horizon without the reference.

    Example::

        differences(cells, reference=("C1", "plug_in"))
    """
    groups: dict[tuple[str, str, int], list[CellRows]] = {}
    for cell in cells:
        groups.setdefault((cell.problem, cell.algorithm, cell.num_steps), []).append(cell)
    return [row for group in groups.values() for row in _group_differences(group, reference)]


def _group_differences(
    group: Sequence[CellRows], reference: tuple[str, str] | None
) -> Iterator[Row]:
    entries = [(cell, method) for cell in group for method in cell.methods]
    named = {(cell.schedule, method): (cell, method) for cell, method in entries}
    base = entries[0] if reference is None else named.get(reference)
    if base is None:
        return
    cell_b, method_b = base
    for cell, method in entries:
        if cell is cell_b and method == method_b:
            continue
        shared = [c for c in cell.coordinates[method] if c in cell_b.coordinates[method_b]]
        for level in (q for q in cell.levels if q in cell_b.levels):
            for name in shared:
                at = {"level": level, "coordinate": name}
                yield paired_difference(cell, method, cell_b, method_b, **at)
