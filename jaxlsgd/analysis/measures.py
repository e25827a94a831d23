"""Measures of a simulation study, each with its Monte-Carlo standard error.

Everything here is NumPy on finished rows, without jax, so that a table of a running study is quick. The formulas are those of Morris, White and Crowther, "Using simulation studies to evaluate
statistical methods", Statistics in Medicine 38 (2019), Table 6; the standard error of a root mean
square follows from that of the mean square by the delta method.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import scipy.special

from jaxlsgd.analysis import failures
from jaxlsgd.analysis.moments import (
    BoolArray,
    FloatArray,
    Row,
    mean,
    mean_error,
    mean_measure,
    share,
    variance,
    wilson,
)
from jaxlsgd.analysis.pairs import differences, paired_difference
from jaxlsgd.core.causes import FAILURES
from jaxlsgd.core.display import Shown, Table, percent, with_error
from jaxlsgd.core.rows import CellRows, MethodRows, cells_of

__all__ = ["coverage_table", "differences", "paired_difference", "summarise", "wilson"]

IDENTITY = (
    "problem",
    "algorithm",
    "schedule",
    "num_steps",
    "num_rounds",
    "save_round",
    "save_steps",
    "method",
    "level",
    "coordinate",
)
NUMBERS = ("num_steps", "num_rounds", "save_round", "save_steps", "level")
LOCAL_SGD = "local_sgd"  # assumed by readers if no algorithm is named
CAUSES = tuple(cause.count for cause in FAILURES)
COUNTS = ("replications", "n_ok", "n_failed", *CAUSES, "n_floored")
SHARE = ("", "_mcse", "_low", "_high")  # suffixes of the name of a proportion
DIFFERENT = "Methods of a cell failed in different replications, so they report on different ones."
BRACKETS = "In brackets: 95 % Wilson intervals, where the standard error is 0 by its formula."
TRUTH = ("truth_error", "truth_error_share", "coverage_truth_error")
NOTABLE = 0.1  # a truth's standard error over an interval's, from which on tables warn
NO_TRUTH = "A coverage of - is unknown: the problem declares no truth (jaxlsgd.problems.solve estimates one)."
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
    "numbers_sent",
    "sent_over_c1",
)
EXACT = ("acf", "numbers_sent", "sent_over_c1")  # measures without a Monte-Carlo error


def summarise(cell: CellRows, *, last_only: bool = False) -> list[Row]:
    """Return every measure of a cell, one row per method, saved round, level and coordinate.

    With n completed replications, estimates θ̂_i, scales s_i, half-widths w_i and truth θ, a row has

    - `bias`, mean(θ̂) − θ; `empirical_se`, the standard deviation of θ̂; `rmse`;
    - `model_se`, √mean(s_i²), and its relative error `model_se_error`, model_se/empirical_se − 1, for
      methods whose scale estimates a standard error (`Estimator.standard_error`);
    - `coverage` over the completed; `coverage_all` with failures counted as misses; and
      `coverage_bias_eliminated`, of mean(θ̂) in place of θ. Each with the limits `_low` and `_high`
      of its 95 % Wilson interval, which also works at 0 and 1;
    - `length`, the mean of 2 w_i, and `length_sd`, their standard deviation;
    - `l2_error`, the mean of ‖θ̂ − θ‖ over all coordinates of the method;
    - `acf`, communication rounds per observation; `numbers_sent`, how many numbers a client has sent, with the
      gradients and Hessians that the method needs; and `sent_over_c1`, that over what it sends for plain Local SGD
      that communicates after every step. These are exact;
    - `<measure>_mcse`, the Monte-Carlo standard error; the count behind it is `n_ok`, and
      `replications` for `coverage_all`. `n_floored` counts completed ones where a floor acted;
    - `truth_error`, the standard error of θ if that was estimated, as `problems.solve` does, and 0 if it
      is exact; `truth_error_share`, the same over the interval's standard error s = mean(w_i)/z, z being the
      normal quantile of the level; `coverage_truth_error`, how far `coverage` may be off for that reason: with
      C(b) = Φ(z − b) − Φ(−z − b), the coverage of a normal interval with a bias of b standard errors, the larger
      of |C(b) − C(b ± δ)| at b = bias/s and δ = 1.96 `truth_error_share`, which holds for 19 of 20 truths;
    - `n_failed`, and of those `n_non_finite`, `n_exploded`, `n_loss`, `n_undefined` and `n_correction`, by
      `Cause`;
      `same_replications`, whether all methods of the cell completed in the same ones;
    - `label`, the method's name as people write it, and `cost`, what it costs beyond the run, in words.

    What is unknown is None: bias and coverage without a truth, anything with no completed
    replication, a standard deviation or a standard error of one.

    Args:
      cell: the rows of a cell.
      last_only: only the last saved round, not all.

    Returns:
      Rows of plain Python numbers with the keys `IDENTITY`, `COUNTS`, the measures, `label` and `cost`.

    Example::

        rows = summarise(simulate(key, problem, plan, replications=1000))
        [(row["method"], row["coverage"], row["coverage_mcse"]) for row in rows]

    Reference: Morris, White and Crowther (2019), Table 6.
    """
    saves = range(len(cell.save_at))[-1 if last_only else 0 :]
    return [row for name in cell.methods for row in _method_rows(cell, name, saves)]


def _method_rows(cell: CellRows, name: str, saves: range) -> Iterator[Row]:
    rows = cell.methods[name]
    arrays = _columns(rows, cell.truth[name], saves, cell.standard_error[name])
    arrays |= _truth_columns(arrays, cell.truth_error.get(name), cell.levels)
    columns = {key: _plain(array) for key, array in arrays.items()}
    where = (cell.problem, cell.algorithm, cell.schedule, cell.num_steps, cell.num_rounds)
    for i, save in enumerate(saves):
        at, steps = cell.save_at[save], cell.steps_at[save]
        facts = {"acf": at / steps, "label": cell.labels[name], **_counts(rows, save)}
        facts |= _sent(cell, name, save)
        facts["cost"] = cell.costs.get(name, "")
        facts["same_replications"] = failures.same_replications(cell, save)
        for j, level in enumerate(cell.levels):
            for k, coordinate in enumerate(cell.coordinates[name]):
                place = (*where, at, steps, name, level, coordinate)
                found = {key: column[i][j][k] for key, column in columns.items()}
                yield dict(zip(IDENTITY, place, strict=True)) | facts | found


def _counts(rows: MethodRows, save: int) -> Row:
    ok = rows.ok[save]
    why = failures.counts(rows, save).values()
    counts = (ok.size, ok.sum(), sum(why), *why, (rows.floored[save] & ok).sum())
    return dict(zip(COUNTS, map(int, counts), strict=True))


def _plain(array: FloatArray) -> Any:
    """Return nested lists of Python numbers, None for what is not finite."""
    values = array.astype(object)
    values[~np.isfinite(array)] = None
    return values.tolist()


def _columns(
    rows: MethodRows, truth: Any, saves: range, standard_error: bool
) -> dict[str, FloatArray]:
    """Return all measures as arrays (saves, levels, coordinates), NaN for missing ones."""
    keep = slice(saves.start, saves.stop)
    ok = rows.ok[keep, None, :, None]
    # A failed row may hold infinities, whose differences would warn.
    estimate = np.where(ok, rows.estimate[keep, None], np.nan)
    half = np.where(ok, rows.half_width[keep], np.nan)
    target = np.full(estimate.shape[-1], np.nan) if truth is None else np.asarray(truth)
    se = np.where(ok & standard_error, rows.scale[keep, None], np.nan)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        found = _accuracy(estimate, target, ok)
        found |= _model_error(se, found["empirical_se"], ok)
        found |= _coverages(estimate, half, target, ok) | _lengths(2 * half, ok)
        distance = np.sqrt(np.sum((estimate - target) ** 2, axis=-1, keepdims=True))
        found |= mean_measure("l2_error", distance, ok)
    shape = (*half.shape[:2], half.shape[3])
    return {
        name: column if column.shape == shape else np.broadcast_to(column, shape)
        for name, column in found.items()
    }


def _truth_columns(
    arrays: dict[str, FloatArray], error: Any, levels: Sequence[float]
) -> dict[str, FloatArray]:
    """Return the truth's own error, relative to the interval's, and its effect on coverage."""
    z = scipy.special.ndtri((1 + np.array(levels)) / 2)[:, None]
    bias = arrays["bias"]
    off = np.where(np.isnan(bias), np.nan, 0.0 if error is None else np.asarray(error))

    def coverage(b: FloatArray) -> FloatArray:
        return scipy.special.ndtr(z - b) - scipy.special.ndtr(-z - b)

    with np.errstate(invalid="ignore", divide="ignore"):
        scale = arrays["length"] / (2 * z)
        share, b = off / scale, bias / scale
        moved = [np.abs(coverage(b) - coverage(b + sign * 1.96 * share)) for sign in (-1, 1)]
    return dict(zip(TRUTH, (off, share, np.maximum(*moved)), strict=True))


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
    # Not sd/√(2(n − 1)), which assumes normal lengths: those of random scaling are skewed.
    spread = np.sqrt(np.maximum(fourth - square**2, 0) / ok.sum(-2))
    deviation = np.sqrt(square)
    sd = {"length_sd": deviation, "length_sd_mcse": spread / (2 * deviation)}
    return mean_measure("length", length, ok) | sd


def coverage_table(cells: CellRows | Sequence[CellRows]) -> Shown:
    """Return coverage and length of every method at the last round, as a short table to print.

    Args:
      cells: one cell, or several.

    Returns:
      Text: coverage in per cent and mean length, each with its Monte-Carlo standard error in
      parentheses (the 95 % Wilson interval in brackets if that is 0), and how many replications
      completed. The algorithm is shown if it is not Local SGD. If replications failed, coverage
      is also given with failures as misses, and lines below count the failures by cause. The last
      lines have the cost of the methods. A notebook shows it as a table.

    Example::

        print(coverage_table(simulate(key, problem, plan, replications=100)))
    """
    cells = cells_of(cells)
    rows = [row for cell in cells for row in summarise(cell, last_only=True)]
    shown = columns_for_people(rows)
    kinds = ["coverage", *(["coverage_all"] if any(row["n_failed"] for row in rows) else [])]
    heads = ["coverage %", "all runs %"][: len(kinds)]
    lines = []
    for row in rows:
        shares = [percent(*(row[kind + end] for end in SHARE)) for kind in kinds]
        length = with_error(row["length"], row["length_mcse"])
        lines.append([*(str(row[key]) for key in shown), *shares, length, _share_text(row)])
    left = [i for i, key in enumerate(shown) if key not in NUMBERS]
    header = [*shown, *heads, "length", "n_ok"]
    return Shown.of(Table("", header, lines, left, list(_table_notes(cells, rows))))


def _table_notes(cells: Sequence[CellRows], rows: Sequence[Row]) -> Iterator[str]:
    for cell in cells:
        if failed := failures.summary(cell):
            yield f"{cell.problem}, {cell.schedule}, {cell.num_steps:,} steps: {failed}"
    if any(row["n_failed"] for row in rows):
        yield "Coverage of all runs counts failures as misses; the rest is of those that completed."
    if not all(row["same_replications"] for row in rows):
        yield DIFFERENT
    if any(row["coverage_mcse"] == 0 for row in rows):
        yield BRACKETS
    if no_truth(rows):
        yield NO_TRUTH
    yield from truth_notes(rows)
    yield from cost_notes(rows)


def _sent(cell: CellRows, name: str, save: int) -> Row:
    """Return what a client has sent by a saved round; None if the cell does not have it."""
    if name not in cell.numbers_sent:
        return {"numbers_sent": None, "sent_over_c1": None}
    sent = cell.numbers_sent[name][save]
    return {"numbers_sent": sent, "sent_over_c1": sent / cell.sent_under_c1[save]}


def truth_notes(rows: Iterable[Row]) -> list[str]:
    """Return the errors of estimated truths, a line per problem, with a warning if they matter."""
    problems: dict[str, list[Row]] = {}
    for row in rows:
        if row.get("truth_error"):
            problems.setdefault(row["problem"], []).append(row)
    return [_truth_note(name, group) for name, group in problems.items()]


def warns_of_truth(row: Row) -> bool:
    """Return whether the truth's standard error is above a tenth of the interval's."""
    return (row.get("truth_error_share") or 0.0) > NOTABLE


def _truth_note(problem: str, rows: Sequence[Row]) -> str:
    """Describe the row whose truth has the largest error relative to its interval."""
    row = max(rows, key=lambda row: row["truth_error_share"] or 0.0)
    share = row["truth_error_share"]
    start = f"the truth of {row['coordinate']} is known to ±{row['truth_error']:.2g}"
    if share is None:
        return f"{problem}: {start} (its standard error)."
    if not warns_of_truth(row):
        return f"{problem}: {start}, at most {share:.2g} of an interval's standard error."
    count = sum(map(warns_of_truth, rows))
    of_all = (
        f" In {count:,} of {len(rows):,} rows it is above {NOTABLE:g}." if len(rows) > 1 else ""
    )
    return (
        f"Careful with {problem}: {start}, {share:.2g} of the interval's standard error "
        f"({row['method']}, {row['schedule']}, {row['num_steps']:,} steps): coverage may be off by up to "
        f"about {100 * row['coverage_truth_error']:.2g} points.{of_all} "
        f"problems.solve(problem, num_steps={row['num_steps']}) finds a truth that is good enough."
    )


def cost_notes(rows: Iterable[Row]) -> list[str]:
    """Return the cost of methods beyond the run itself, a line per cost."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if cost := row.get("cost"):
            groups.setdefault(cost, []).append(row)
    return [
        f"Cost of {', '.join(dict.fromkeys(row['method'] for row in group))}: {cost}{_sent_note(group)}."
        for cost, group in groups.items()
    ]


def _sent_note(rows: Iterable[Row]) -> str:
    shares = sorted(x for row in rows if (x := row.get("sent_over_c1")) is not None)
    if not shares:
        return ""
    ends = dict.fromkeys(f"{share:.3g}" for share in (shares[0], shares[-1]))
    return f"; a client sends {' to '.join(ends)} × the numbers of Local SGD under C1"


def no_truth(rows: Iterable[Row]) -> bool:
    """Return whether a coverage is missing though runs completed."""
    return any(row["coverage"] is None and row["n_ok"] for row in rows)


def columns_for_people(rows: Iterable[Row]) -> tuple[str, ...]:
    """Return the columns that identify a row at the last round; the algorithm if it is not Local SGD."""
    plain = all(row["algorithm"] == LOCAL_SGD for row in rows)
    hidden = {"save_round", "save_steps", *(["algorithm"] if plain else [])}
    return tuple(name for name in IDENTITY if name not in hidden)


def _share_text(row: Row) -> str:
    return f"{row['n_ok']}/{row['replications']}"
