"""Measures of a simulation study, each with its Monte-Carlo standard error.

Everything here is NumPy on rows that are already there: no jax, so that a table of a running study
is made in an instant. The formulas are those of Morris, White and Crowther, "Using simulation
studies to evaluate statistical methods", Statistics in Medicine 38 (2019), Table 6; the error of a
root mean square follows from that of the mean square by the delta method.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxlsgd.analysis.moments import (
    BoolArray,
    FloatArray,
    mean,
    mean_error,
    mean_measure,
    normal_quantile,
    share,
    variance,
    wilson,
)
from jaxlsgd.core.rows import CellRows, MethodRows
from jaxlsgd.core.text import align, with_error

__all__ = ["coverage_table", "differences", "paired_difference", "summarise", "wilson"]

Row = dict[str, Any]

IDENTITY = (
    "problem",
    "schedule",
    "num_steps",
    "num_rounds",
    "save_round",
    "save_steps",
    "method",
    "level",
    "coordinate",
)
COUNTS = ("replications", "n_ok", "n_diverged", "n_floored")
MEASURES = (
    "bias",
    "empirical_se",
    "model_se",
    "model_se_error",
    "rmse",
    "coverage",
    "coverage_all",
    "coverage_bias_eliminated",
    "length",
    "length_sd",
    "l2_error",
    "acf",
)


def summarise(cell: CellRows, *, last_only: bool = False) -> list[Row]:
    """Every measure of a cell, one row a method, saved round, level and coordinate.

    With n completed replications, estimates θ̂_i, half-widths w_i and truth θ, a row has

    - `bias`, mean(θ̂) − θ; `empirical_se`, the standard deviation of θ̂; `rmse`;
    - `model_se`, √mean(se_i²) with se_i = w_i/z(level), and its relative error `model_se_error`,
      model_se/empirical_se − 1. Only for methods whose name starts with `plug_in`: the scale of random scaling does not
      estimate a standard error, its critical value is wider to make up for that;
    - `coverage` over the completed; `coverage_all` with failures counted as misses; and
      `coverage_bias_eliminated`, of mean(θ̂) in place of θ. Each with the limits `_low` and `_high`
      of its 95 % Wilson interval, which also works at 0 and 1;
    - `length`, the mean of 2 w_i, and `length_sd`, their standard deviation;
    - `l2_error`, the mean of ‖θ̂ − θ‖ over all coordinates of the method;
    - `acf`, communication rounds an observation, which is exact;
    - `<measure>_mcse`, the Monte-Carlo standard error; the count behind it is `n_ok`, and
      `replications` for `coverage_all`. `n_floored` counts completed ones where a floor acted.

    What cannot be known is None: bias and coverage without a truth, anything with no completed
    replication, a standard deviation of one.

    Args:
      cell: the rows of a cell.
      last_only: only the last saved round, not all.

    Returns:
      Rows of plain Python numbers with the keys `IDENTITY`, `COUNTS` and the measures.

    Example::

        rows = summarise(simulate(key, problem, plan, replications=1000))
        [(row["method"], row["coverage"], row["coverage_mcse"]) for row in rows]

    Reference: Morris, White and Crowther (2019), Table 6.
    """
    saves = range(len(cell.save_at))[-1 if last_only else 0 :]
    return [row for name in cell.methods for row in _method_rows(cell, name, saves)]


def _method_rows(cell: CellRows, name: str, saves: range) -> Iterator[Row]:
    rows = cell.methods[name]
    arrays = _columns(rows, cell.truth[name], cell.levels, saves, name.startswith("plug_in"))
    columns = {key: _plain(array) for key, array in arrays.items()}
    for i, save in enumerate(saves):
        at, steps = cell.save_at[save], cell.steps_at[save]
        counts = _counts(rows, save)
        for j, level in enumerate(cell.levels):
            for k, coordinate in enumerate(cell.coordinates[name]):
                place = (cell.problem, cell.schedule, cell.num_steps, cell.num_rounds, at, steps)
                row = dict(zip(IDENTITY, (*place, name, level, coordinate), strict=True))
                found = {key: column[i][j][k] for key, column in columns.items()}
                yield row | counts | found | {"acf": at / steps}


def _counts(rows: MethodRows, save: int) -> Row:
    ok = rows.ok[save]
    counts = (ok.size, ok.sum(), ok.size - ok.sum(), (rows.floored[save] & ok).sum())
    return dict(zip(COUNTS, map(int, counts), strict=True))


def _plain(array: FloatArray) -> Any:
    """Nested lists of Python numbers, None for what is not finite."""
    values = array.astype(object)
    values[~np.isfinite(array)] = None
    return values.tolist()


def _number(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


def _columns(
    rows: MethodRows, truth: Any, levels: Sequence[float], saves: range, normal: bool
) -> dict[str, FloatArray]:
    """All measures as arrays (saves, levels, coordinates), NaN where there is none."""
    keep = slice(saves.start, saves.stop)
    ok = rows.ok[keep, None, :, None]
    # A diverged row may hold infinities, whose differences would warn.
    estimate = np.where(ok, rows.estimate[keep, None], np.nan)
    half = np.where(ok, rows.half_width[keep], np.nan)
    target = np.full(estimate.shape[-1], np.nan) if truth is None else np.asarray(truth)
    z = np.array([normal_quantile(level) for level in levels])[:, None, None]
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        found = _accuracy(estimate, target, ok)
        found |= _model_error(half / z if normal else half * np.nan, found["empirical_se"], ok)
        found |= _coverages(estimate, half, target, ok) | _lengths(2 * half, ok)
        distance = np.sqrt(np.sum((estimate - target) ** 2, axis=-1, keepdims=True))
        found |= mean_measure("l2_error", distance, ok)
    shape = (*half.shape[:2], half.shape[3])
    return {name: np.broadcast_to(column, shape) for name, column in found.items()}


def _accuracy(estimate: FloatArray, truth: FloatArray, ok: BoolArray) -> dict[str, FloatArray]:
    error = estimate - truth
    rmse = np.sqrt(mean(error**2, ok))
    deviation = np.sqrt(variance(estimate, ok))
    return {
        **mean_measure("bias", error, ok),
        "empirical_se": deviation,
        "empirical_se_mcse": deviation / np.sqrt(2 * (ok.sum(-2) - 1)),
        "rmse": rmse,
        "rmse_mcse": mean_error(error**2, ok) / (2 * rmse),
    }


def _model_error(se: FloatArray, empirical: FloatArray, ok: BoolArray) -> dict[str, FloatArray]:
    n = ok.sum(-2)
    model = np.sqrt(mean(se**2, ok))
    model_mcse = mean_error(se**2, ok) / (2 * model)
    ratio = model / empirical
    return {
        "model_se": model,
        "model_se_mcse": model_mcse,
        "model_se_error": ratio - 1,
        "model_se_error_mcse": ratio * np.sqrt((model_mcse / model) ** 2 + 1 / (2 * (n - 1))),
    }


def _coverages(
    estimate: FloatArray, half: FloatArray, truth: FloatArray, ok: BoolArray
) -> dict[str, FloatArray]:
    n, everyone = ok.sum(-2), np.full(ok.sum(-2).shape, ok.shape[-2])
    hits = np.where(ok, np.abs(estimate - truth) <= half, False).sum(-2)
    known = np.where(np.isnan(truth), np.nan, hits)
    centre = mean(estimate, ok)[..., None, :]
    centred = np.where(ok, np.abs(estimate - centre) <= half, False).sum(-2)
    return {
        **share("coverage", known, n),
        **share("coverage_all", known, everyone),
        **share("coverage_bias_eliminated", centred, n),
    }


def _lengths(length: FloatArray, ok: BoolArray) -> dict[str, FloatArray]:
    square = variance(length, ok)
    fourth = mean((length - mean(length, ok)[..., None, :]) ** 4, ok)
    # Not sd/√(2(n − 1)), which is for normal lengths: those of random scaling are skewed.
    spread = np.sqrt(np.maximum(fourth - square**2, 0) / ok.sum(-2))
    deviation = np.sqrt(square)
    sd = {"length_sd": deviation, "length_sd_mcse": spread / (2 * deviation)}
    return mean_measure("length", length, ok) | sd


def paired_difference(
    cell_a: CellRows,
    method_a: str,
    cell_b: CellRows,
    method_b: str,
    *,
    level: float | None = None,
    coordinate: str | None = None,
) -> Row:
    """How much a method in one cell differs from a method in another, at their last rounds.

    Replication i saw the same data in both cells (common random numbers), so the standard error is
    that of the mean of the differences d_i = a_i − b_i: much smaller than for two separate studies.

    Args:
      cell_a: rows of the cell to judge, from the same root key as `cell_b`.
      method_a: its method.
      cell_b: rows of the cell to compare with; it may be the same one.
      method_b: its method.
      level: confidence level, the first of `cell_a` if None.
      coordinate: name of the coordinate, the first of `method_a` if None.

    Returns:
      What was compared, `n_pairs` (completed in both), and the differences of coverage and mean
      length with `_mcse`, and the ratio of the mean lengths with `_mcse` (delta method).

    Example::

        paired_difference(c5, "plug_in", c1, "plug_in")["length_ratio"]
    """
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
    names = ("problem", "num_steps", "level", "coordinate", "schedule", "method")
    here = (cell_a.problem, cell_a.num_steps, level, coordinate, cell_a.schedule, method_a)
    return {
        **dict(zip(names, here, strict=True)),
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
    """Completed, covered (NaN if the truth is unknown) and length of every replication."""
    names, truth, rows = cell.coordinates[method], cell.truth[method], cell.methods[method]
    if coordinate not in names:
        raise ValueError(f"coordinate: {method} has {', '.join(names)}, got {coordinate!r}")
    if level not in cell.levels:
        raise ValueError(f"level: must be one of {cell.levels}, got {level!r}")
    j, ok = names.index(coordinate), rows.ok[-1]
    half = np.where(ok, rows.half_width[-1, cell.levels.index(level), :, j], np.nan)
    target = np.nan if truth is None else truth[j]
    error = np.abs(np.where(ok, rows.estimate[-1, :, j], np.nan) - target)
    return ok, np.where(np.isnan(error), np.nan, error <= half), 2 * half


def _mean_row(name: str, x: FloatArray) -> Row:
    found = mean_measure(name, x[:, None], np.ones((x.size, 1), bool))
    return {key: _number(value.item()) for key, value in found.items()}


def _ratio_row(name: str, a: FloatArray, b: FloatArray) -> Row:
    if b.size < 2 or not b.mean() > 0:
        return {name: None, f"{name}_mcse": None}
    ratio = a.mean() / b.mean()
    error = np.std(a - ratio * b, ddof=1) / math.sqrt(b.size) / b.mean()
    return {name: _number(ratio), f"{name}_mcse": _number(error)}


def differences(cells: Sequence[CellRows], reference: tuple[str, str] | None = None) -> list[Row]:
    """Paired differences of every schedule and method from one of them, problem by problem.

    Args:
      cells: cells of one study, so of one root key.
      reference: schedule and method to compare with; the first of each problem and horizon if None.

    Returns:
      One row of `paired_difference` for each level and each coordinate that both methods have; a
      problem and horizon without the reference has none.

    Example::

        differences(cells, reference=("C1", "plug_in"))
    """
    groups: dict[tuple[str, int], list[CellRows]] = {}
    for cell in cells:
        groups.setdefault((cell.problem, cell.num_steps), []).append(cell)
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
        if (cell is cell_b) and method == method_b:
            continue
        shared = [c for c in cell.coordinates[method] if c in cell_b.coordinates[method_b]]
        for level in (q for q in cell.levels if q in cell_b.levels):
            for name in shared:
                at = {"level": level, "coordinate": name}
                yield paired_difference(cell, method, cell_b, method_b, **at)


def coverage_table(cells: CellRows | Sequence[CellRows]) -> str:
    """Coverage and length of every method at the last round, as a short table to print.

    Args:
      cells: one cell, or several.

    Returns:
      Text: coverage in per cent with its Monte-Carlo standard error, mean length with its own, and
      how many replications completed.

    Example::

        print(coverage_table(simulate(key, problem, plan, replications=100)))
    """
    cells = [cells] if isinstance(cells, CellRows) else list(cells)
    rows = [row for cell in cells for row in summarise(cell, last_only=True)]
    shown = ("problem", "schedule", "num_steps", "num_rounds", "method", "level", "coordinate")
    lines = [[*shown, "coverage %", "length", "n_ok"]]
    for row in rows:
        coverage = (row["coverage"], row["coverage_mcse"])
        percent = (None if value is None else 100 * value for value in coverage)
        numbers = [with_error(*percent), with_error(row["length"], row["length_mcse"])]
        lines.append([str(row[key]) for key in shown] + numbers + [_share_text(row)])
    return align(lines, left={0, 1, 4, 6})


def _share_text(row: Row) -> str:
    return f"{row['n_ok']}/{row['replications']}"
