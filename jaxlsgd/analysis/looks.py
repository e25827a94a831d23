"""What happens to people who look at every saved round, and to those who stop: measures from rows alone.

A look is a saved round. A look without an interval (an infinite one: too early, or withheld because the path has not
arrived) says nothing, so that it cannot be wrong, whatever the estimate is; a run that diverged is wrong at every other
look. Start reading at `summarise_looks` and `summarise_stops`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxlsgd.analysis.moments import Row, share
from jaxlsgd.core import checks
from jaxlsgd.core.causes import DIVERGED
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.display import Shown, Table, percent
from jaxlsgd.core.rows import CellRows, Until, cells_of

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
_END = ("", "_mcse", "_low", "_high")


def wrong(cell: CellRows, method: str | None = None) -> BoolArray:
    """Return which intervals of a method miss the truth, (saves, levels, replications, coordinates).

    The method is the first if None.
    """
    method = cell.method_named(method)
    rows, truth = cell.methods[method], _truth(cell, method)
    with np.errstate(invalid="ignore"):
        missed = np.abs(rows.estimate[:, None] - truth) > rows.half_width
    lost = np.isin(rows.cause, DIVERGED)
    return missed | (lost[:, None, :, None] & ~np.isinf(rows.half_width))


def _truth(cell: CellRows, method: str) -> FloatArray:
    truth = cell.truth[method]
    if truth is None:
        raise refusal(
            "cell", "have a known truth", f"{cell.problem}, which declares none", code="missing"
        )
    return np.asarray(truth)


def wrong_so_far(
    cell: CellRows, method: str | None = None, level: float | None = None
) -> tuple[Any, Any]:
    """Return the share of runs that were wrong at some look up to each, and its standard error, (saves,) each.

    Of the first method and level if they are None. Shares are means over coordinates, whose errors within a run are not independent.
    """
    j = cell.level_place(level)
    so_far = np.maximum.accumulate(wrong(cell, method)[:, j], 0).mean(-1)
    return so_far.mean(1), so_far.std(1, ddof=1) / np.sqrt(so_far.shape[1])


def summarise_looks(cell: CellRows) -> list[Row]:
    """Return how often intervals hold at all looks, one row per method, level and coordinate.

    - `held`, the share of runs whose intervals hold the truth at every look, with its Monte-Carlo standard error
      `held_mcse` and Wilson limits; and `coverage_last`, the usual coverage at the last look, all runs counted;
    - `first_wrong`, the median number of observations at the first wrong look, of the runs that were wrong;
    - `first_look`, the median number of observations at the first look with an interval, and `no_interval`, the share
      of runs without one at the last look, with the same ends;
    - `looks` and `replications`; `valid`, when the intervals hold: "fixed", at one time, or at "looks", or "always".
    """
    steps = np.asarray(cell.steps_at)
    found = []
    for name in cell.methods:
        bad = wrong(cell, name)
        n = bad.shape[2]
        finite = np.asarray(np.isfinite(cell.methods[name].half_width).all((1, 3)))
        begun = steps[np.argmax(finite, 0)][finite.any(0)]
        for j, level in enumerate(cell.levels):
            for k, coordinate in enumerate(cell.coordinates[name]):
                own = bad[:, j, :, k]
                ever, first = own.any(0), steps[np.argmax(own, 0)]
                row = _where(cell, name, level) | {"coordinate": coordinate, "looks": len(steps)}
                row |= _share("held", n - ever.sum(), n)
                row |= _share("coverage_last", n - own[-1].sum(), n)
                row["first_wrong"] = float(np.median(first[ever])) if ever.any() else None
                row |= _share("no_interval", n - finite[-1].sum(), n)
                row["first_look"] = float(np.median(begun)) if len(begun) else None
                found.append(row | {"replications": n})
    return found


def _where(cell: CellRows, method: str, level: float) -> Row:
    where = ("problem", "algorithm", "schedule", "num_steps")
    found = {key: getattr(cell, key) for key in where} | {"method": method, "level": level}
    return found | {"valid": cell.valid.get(method, "fixed")}


def _share(name: str, hits: Any, n: int) -> Row:
    columns = share(name, np.asarray(hits, float), np.asarray(n))
    return {key: None if np.isnan(x) else float(x) for key, x in columns.items()}


def stops(
    cell: CellRows, method: str | None = None, until: float | Until | None = None
) -> tuple[NDArray[np.int64], BoolArray]:
    """Return at which look each run stops, and whether it does; one that does not is read at its last look.

    By the first method and the rule of the simulation if they are None.
    """
    rule, method = _rule(cell, until), cell.method_named(method)
    rows = cell.methods[method]
    half = rows.half_width[:, cell.level_place(rule.level)]
    sure = rule.met(rows.estimate, half, cell.coordinates[method])
    sure &= ~np.isin(rows.cause, DIVERGED)
    stopped = sure.any(0)
    return np.where(stopped, np.argmax(sure, 0), len(sure) - 1), stopped


def _rule(cell: CellRows, until: float | Until | None) -> Until:
    given = cell.until if until is None else until
    if given is None:
        raise refusal(
            "until", "be given for rows of a simulation without a rule", until, code="unwanted"
        )
    return Until.of(given)


def summarise_stops(cell: CellRows, until: float | Until | None = None) -> list[Row]:
    """Return what stopping does, one row per method and coordinate: each method by its own intervals.

    - `coverage_stop`, how often the interval at the stop holds the truth, with `_mcse`, `_low` and `_high`; runs that
      do not stop within the plan are read at its end, and those without an interval there count as misses;
    - `stopped`, the share of runs that do stop, with the same ends;
    - `stop_mean` with `stop_mean_mcse`, `stop_25`, `stop_50` and `stop_75`: observations per client at the stop;
    - `observations_saved` and `sent_saved`, shares of those of the whole plan, on average;
    - the rule, `until_half_width` and `until_excludes`, and `valid` as in `summarise_looks`: see `cautions`.

    Rows hold every look, so that any rule can be tried on them afterwards; a simulation computes all looks.

    Args:
      cell: the rows of a cell.
      until: the rule, or a half-width; that of the simulation if None.
    """
    rule = _rule(cell, until)
    steps, found = np.asarray(cell.steps_at, np.float64), []
    if rule.method is not None:
        checks.choice("until.method", rule.method, list(cell.methods))
    names = [name for name in cell.methods if rule.method in (None, name)]
    for name in names:
        at, stopped = stops(cell, name, rule)
        n, runs = len(at), np.arange(len(at))
        rows, j = cell.methods[name], cell.level_place(rule.level)
        missed = wrong(cell, name)[at, j, runs] | ~np.isfinite(rows.half_width[at, j, runs])
        when = steps[at]
        quarters = np.quantile(when, (0.25, 0.5, 0.75))
        row = _where(cell, name, cell.levels[j]) | _share("stopped", stopped.sum(), n)
        row |= {"until_half_width": rule.half_width, "until_excludes": rule.excludes}
        row |= {"stop_mean": float(when.mean())}
        row["stop_mean_mcse"] = float(when.std(ddof=1) / np.sqrt(n)) if n > 1 else None
        row |= dict(zip(("stop_25", "stop_50", "stop_75"), map(float, quarters), strict=True))
        row["observations_saved"] = float(1 - when.mean() / steps[-1])
        sent = np.asarray(cell.numbers_sent.get(name, ()), np.float64)
        row["sent_saved"] = float(1 - sent[at].mean() / sent[-1]) if len(sent) else None
        for k, coordinate in enumerate(cell.coordinates[name]):
            own = _share("coverage_stop", n - missed[:, k].sum(), n)
            found.append(row | {"coordinate": coordinate, "replications": n} | own)
    return found


def cautions(rows: Sequence[Row]) -> list[str]:
    """Return in sentences which methods of `summarise_stops` are stopped though their intervals hold at one time only."""
    fixed = [row for row in rows if "stopped" in row and row["valid"] == "fixed"]
    by_null = [row["method"] for row in fixed if row["until_excludes"] is not None]
    by_width = [row["method"] for row in fixed if row["until_excludes"] is None]
    found = []
    if by_null:
        found.append(
            f"Not valid for {_names(by_null)}: intervals that hold at one time only exclude the truth if they are looked "
            'at often enough; one_step(valid="always", best_at=...) may be looked at.'
        )
    if by_width:
        found.append(
            f"Intervals of {_names(by_width)} hold at one time only: stopping by their width is valid only in the limit "
            "of short intervals."
        )
    return found


def _names(methods: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(methods))


def summarise(
    cells: CellRows | Sequence[CellRows], until: float | Until | None = None
) -> list[Row]:
    """Return the rows of `summarise_looks` with those of `summarise_stops` if there is a rule.

    Args:
      cells: one cell, or several.
      until: a rule, or a half-width; that of the simulation or study if None, if it has one.
    """
    found, key = [], ("method", "level", "coordinate")
    for cell in cells_of(cells):
        rule = cell.until if until is None else until
        stopped = [] if rule is None else summarise_stops(cell, rule)
        by_place = {tuple(row[name] for name in key): row for row in stopped}
        for row in summarise_looks(cell):
            found.append(by_place.get(tuple(row[name] for name in key), {}) | row)
    return found


def looks_table(
    cells: CellRows | Sequence[CellRows], until: float | Until | None = None, *, all: bool = False
) -> Shown:
    """Return a table of how often intervals hold at every look and, with a rule, at the stop.

    Args:
      cells: one cell, or several.
      until: a rule, or a half-width; that of the simulation or study if None, if it has one.
      all: whether to show all coordinates, not only the first of each method.
    """
    return Shown.of(plain_table(summarise(cells, until), all=all))


def plain_table(rows: Sequence[Row], *, all: bool = False) -> Table:
    """Return rows of `summarise` as a table; without `all`, of the first coordinate of each method only."""
    where = ("problem", "schedule", "num_steps", "method", "level", "coordinate")
    rows = rows if all else _first_coordinates(rows)
    differ = {key for key in where if len({row[key] for row in rows}) > 1}
    own = [key for key in where if key in differ | {"num_steps", "method"}]
    title = ", ".join(f"{key} {rows[0][key]}" for key in where if rows and key not in own)
    header = ["steps" if key == "num_steps" else key for key in own] + ["looks"]
    header += ["held at every look %", "at the last %", "first wrong at", "no interval at last %"]
    stopping = any("stopped" in row for row in rows)
    header += ["stopped %", "stop at (quartiles)", "coverage at the stop %", "saved %"] * stopping
    lines = []
    for row in rows:
        line = [f"{row[key]:,}" if key == "num_steps" else str(row[key]) for key in own]
        line.append(str(row["looks"]))
        line += [percent(*(row[kind + end] for end in _END)) for kind in ("held", "coverage_last")]
        line.append("-" if row["first_wrong"] is None else f"{row['first_wrong']:,.0f}")
        line.append(percent(*(row["no_interval" + end] for end in _END)))
        lines.append(line + (_stop_texts(row) if stopping else []))
    notes = [
        "Monte-Carlo standard errors in parentheses. A look without an interval is not wrong; one of a run that has "
        "diverged is."
    ]
    if {row["looks"] for row in rows} == {1}:
        notes.append(
            "There is one look, the end of the run: save_at in a study file saves more rounds."
        )
    if stopping:
        notes.append(
            "Runs that do not stop are read at the end of the plan, which is their budget. All looks were computed."
        )
        judged = dict.fromkeys(f"{row['level']:g}" for row in rows if "stopped" in row)
        if len({row["level"] for row in rows}) > 1:
            notes.append(f"Runs stop by the intervals of level {', '.join(judged)}.")
        notes += cautions(rows)
    left = [
        i for i, key in enumerate(own) if key in ("problem", "schedule", "method", "coordinate")
    ]
    return Table(title, header, lines, left, notes)


def _first_coordinates(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the first coordinate of each method."""
    keys = ("problem", "algorithm", "schedule", "num_steps", "method", "level")
    first: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        first.setdefault(tuple(row[key] for key in keys), row)
    return list(first.values())


def _stop_texts(row: Row) -> list[str]:
    if "stopped" not in row:
        return ["-"] * 4
    quarters = " / ".join(f"{row[key]:,.0f}" for key in ("stop_25", "stop_50", "stop_75"))
    shares = [percent(*(row[kind + end] for end in _END)) for kind in ("stopped", "coverage_stop")]
    return [shares[0], quarters, shares[1], f"{100 * row['observations_saved']:.0f}"]
