"""Figures of a study: `save_all` draws what the rows have, `save_for_print` one figure for a journal.

Drawn by schedule, by horizon, along the communication rounds, and against the numbers that a client sends.
"""

from __future__ import annotations

import functools
import logging
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jaxlsgd.analysis import failures
from jaxlsgd.analysis import looks as looks_analysis
from jaxlsgd.analysis.measures import LOCAL_SGD, summarise
from jaxlsgd.analysis.moments import Row
from jaxlsgd.core import checks
from jaxlsgd.core.causes import FAILURES
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.display import plural, save_figure
from jaxlsgd.core.rows import CellRows, cells_of
from jaxlsgd.report import style
from jaxlsgd.report.tables import Selection

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from jaxlsgd.runs.fit import Fit


Setting = tuple[Any, ...]  # problem and algorithm
_TITLE_WIDTH = 46  # characters
_MOST_NAMES = 10  # along x
_BARS = {
    "coverage": "95 % Wilson intervals",
    "length": "standard deviations",
    "tradeoff": "1.96 Monte-Carlo standard errors",
}
MOST_FIGURES = 12
_LISTED = 8  # names of figures that are left out
_MOST_SETTINGS = 6  # problems and algorithms on a page
Warmup = Callable[[Row], int]  # rounds of warm-up of the cell that a row is from
PrintedFigure = Literal["coverage", "tradeoff"]
PrintFormat = Literal["pdf", "svg", "png"]
# In print: inches of a panel and of a legend's lines, entries and letters; panels side by side.
_PANEL_HEIGHT, _LEGEND_LINE, _HANDLE, _LETTER = 1.9, 0.17, 0.42, 0.05
_PER_ROW = {"column": 1, "page": 3}
_log = logging.getLogger("jaxlsgd.report")


def first_coordinate(cell: CellRows) -> list[Row]:
    """Return the measures of a cell's first coordinate, at all saved rounds."""
    return [row for row in summarise(cell) if _is_chosen(cell, row, None)]


def _grouped(rows: Iterable[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Group rows by the values of some columns."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


def _unique(rows: Iterable[Row], key: str) -> list[Any]:
    """Return the values of a column, each once."""
    return list(dict.fromkeys(row[key] for row in rows))


def _settings_of(rows: Sequence[Row]) -> dict[Setting, list[Row]]:
    """Group rows by problem and algorithm, each of which has panels of its own."""
    return _grouped(rows, "problem", "algorithm")


def method_labels(rows: Iterable[Row]) -> dict[str, str]:
    """Return the labels of methods, with the name added if two have the same label."""
    labels = {row["method"]: row["label"] for row in rows}
    shared = [label for label in labels.values() if list(labels.values()).count(label) > 1]
    return {
        name: f"{label} ({name})" if label in shared and label != name else label
        for name, label in labels.items()
    }


def plot(
    source: Any,
    measure: str = "coverage",
    *,
    level: float | None = None,
    coordinate: str | int | None = None,
) -> Figure:
    """Draw coverage or length at the last round of cells, as `by_schedule` does.

    Args:
      source: `CellRows`, a sequence of them, or the results of a study.
      measure: "coverage" or "length".
      level: one of the cells' levels, the first if None.
      coordinate: which of each method's coordinates, by name or number; the first if None.

    Example::

        results.plot("length").savefig("length.pdf")
    """
    checks.choice("measure", measure, ("coverage", "length"))
    cells = cells_of(source)
    if not cells:
        raise refusal("source", "have rows", "none", code="missing")
    level = cells[0].levels[0] if level is None else level
    rows = [
        row
        for cell in cells
        for row in summarise(cell, last_only=True)
        if row["level"] == level and _is_chosen(cell, row, coordinate)
    ]
    known = [row for row in rows if row[measure] is not None]
    if not known:
        why = f"a {measure} at level {level:g} of coordinate {coordinate or 0}"
        raise refusal("source", f"have {why}", "no row with one", code="missing")
    return by_schedule(known, measure, rows)


def _is_chosen(cell: CellRows, row: Row, coordinate: str | int | None) -> bool:
    """Return whether a row is of a coordinate, by name or number; of its method's first if None."""
    if isinstance(coordinate, str):
        return row["coordinate"] == coordinate
    place = coordinate or 0
    return row["coordinate"] in cell.coordinates[row["method"]][place : place + 1]


_MOST_INTERVALS = 40  # coordinates in a figure


@style.styled
def intervals(fit: Fit, level: float | None = None) -> Figure:
    """Draw the intervals of one run: coordinates along y, methods next to one another, and the truth if known.

    They are of one of the run's levels, the first if None. At most 40 coordinates are drawn, the first ones, and a note says so.
    """
    methods = [method for method in fit.cell.methods if method.name not in fit.failures]
    if not methods:
        raise refusal("fit", "have an interval to draw", "none", code="missing")
    names = list(dict.fromkeys(x for m in methods for x in m.coordinates(fit.cell.problem)))
    shown = {name: -i for i, name in enumerate(names[:_MOST_INTERVALS])}
    figure, axes = style.grid(1, 1, wide=1.3)
    figure.set_figheight(max(2.4, 1.2 + 0.16 * len(shown) * (1 + len(methods))))
    axis, looks = axes[0][0], style.method_looks(method.name for method in methods)
    for i, method in enumerate(methods):
        center, lower, upper = map(np.asarray, fit.interval(method.name, level))
        keep = [j for j, name in enumerate(method.coordinates(fit.cell.problem)) if name in shown]
        there = [method.coordinates(fit.cell.problem)[j] for j in keep]
        y = np.array([shown[name] for name in there]) - 0.6 * ((i + 0.5) / len(methods) - 0.5)
        error = np.stack([center - lower, upper - center])[:, keep]
        look = looks[method.name]
        axis.errorbar(
            center[keep],
            y,
            xerr=error,
            fmt=look.marker,
            color=look.color,
            markersize=4,
            label=method.label or method.name,
        )
        truth = fit.cell.with_rows(fit.rows).truth[method.name]
        if truth is not None:
            label = "truth" if i == 0 else None
            axis.plot(np.asarray(truth)[keep], y, "|", color="0.3", markersize=9, label=label)
    axis.set_yticks(list(shown.values()), list(shown))
    axis.set_ylim(min(shown.values()) - 0.6, 0.6)
    level = fit.cell.levels[0] if level is None else level
    axis.set_xlabel(f"{100 * level:g} % intervals")
    axis.set_title(_title(fit.cell.problem.name or "problem", fit.cell.plan.name, what="one run"))
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    if len(names) > len(shown):
        style.note(figure, f"The first {len(shown)} of {len(names)} coordinates.")
    return figure


@style.styled
def by_schedule(rows: Sequence[Row], measure: str, everyone: Sequence[Row] | None = None) -> Figure:
    """Draw coverage or length at the last round.

    With one horizon, there is a panel for each problem and algorithm, with the schedules along x and the
    methods next to one another. With several, horizons are along x, schedules next to one another, and
    each method has a column of panels. If runs failed, a hollow marker is the coverage that counts
    failures as misses, and a note has their number and causes.

    Args:
      rows: of `summarise`, last round, one level and one coordinate.
      measure: "coverage", with Wilson intervals, or "length", with standard deviations.
      everyone: rows to count failures in, with those that have nothing to draw; `rows` if None.
    """
    coverage, level = measure == "coverage", rows[0]["level"]
    one = len(_unique(rows, "num_steps")) == 1
    draw = _by_schedule if one else _by_horizon
    figure, axes, looks = draw(rows, measure)
    for line in axes:
        line[0].set_ylabel("Coverage (%)" if coverage else "Mean length")
        for axis in line if not coverage else ():
            axis.set_ylim(bottom=0)
    style.legend(figure, looks, lines=False, level=level if coverage else None)
    floor = _floor(rows) if coverage else 0.0
    marked = coverage and any(100 * row["coverage"] < floor for row in rows)
    problems = _unique(rows, "problem")
    of = problems[0] if not one and len(problems) == 1 else ""  # which no title has
    about = _about(rows, _BARS[measure], marked, of)
    style.note(figure, about, _failed(everyone or rows, hollow=coverage))
    return figure


def _by_schedule(rows: Sequence[Row], measure: str) -> tuple[Figure, Any, dict[str, style.Look]]:
    """Draw schedules along x, methods next to one another, a panel per problem and algorithm."""
    settings, labels = _settings_of(rows), method_labels(rows)
    algorithms, schedules = _algorithm_titles(rows), _unique(rows, "schedule")
    looks = style.method_looks(labels)
    wide = min(1.9, max(1.2, len(schedules) * max(3, len(labels)) / 13))
    columns = 1 if len(settings) <= 3 else 2
    lines = -(-len(settings) // columns)
    share = "all" if measure == "coverage" else False
    figure, axes = style.grid(lines, columns, wide, sharey=share)
    flat = [axis for line in axes for axis in line]
    floor = _floor(rows) if measure == "coverage" else None
    for axis, ((problem, algorithm), group) in zip(flat, settings.items(), strict=False):
        places = {name: i for i, name in enumerate(schedules)}
        _draw_points(axis, group, measure, ("schedule", places), ("method", looks), floor)
        axis.set_title(_title(problem, algorithms[algorithm], _steps(rows)))
        _named_ticks(axis, schedules)
        _separate(axis, len(schedules))
    for axis in flat[len(settings) :]:
        axis.set_visible(False)
    return figure, axes, {labels[name]: look for name, look in looks.items()}


def _by_horizon(rows: Sequence[Row], measure: str) -> tuple[Figure, Any, dict[str, style.Look]]:
    """Draw horizons along x, schedules next to one another, a panel per setting and method."""
    settings, labels = _settings_of(rows), method_labels(rows)
    algorithms, several = _algorithm_titles(rows), len(_unique(rows, "problem")) > 1
    horizons = sorted(_unique(rows, "num_steps"))
    looks = style.looks(_unique(rows, "schedule"))
    share = {"sharex": True, "sharey": "all" if measure == "coverage" else "row"}
    figure, axes = style.grid(len(settings), len(labels), **share)
    floor = _floor(rows) if measure == "coverage" else None
    places = {steps: i for i, steps in enumerate(horizons)}
    for line, ((problem, algorithm), group) in zip(axes, settings.items(), strict=True):
        for axis, (method, label) in zip(line, labels.items(), strict=True):
            chosen = [row for row in group if row["method"] == method]
            _draw_points(axis, chosen, measure, ("num_steps", places), ("schedule", looks), floor)
            axis.set_title(_title(problem if several else "", label, algorithms[algorithm]))
            _separate(axis, len(horizons))
    _named_ticks(axes[0][0], [f"{steps:,}" for steps in horizons])  # all panels share them
    for axis in axes[-1]:
        axis.set_xlabel("Observations per client")
    return figure, axes, looks


def _draw_points(
    axis: Axes,
    rows: Sequence[Row],
    measure: str,
    along: tuple[str, dict[Any, int]],
    beside: tuple[str, dict[Any, style.Look]],
    floor: float | None,
) -> None:
    """Draw points with bars: one column of the rows gives the place along x, another the look."""
    (place, places), (kind, looks) = along, beside
    if measure == "coverage" and rows:
        style.nominal(axis, rows[0]["level"])
    names = list(looks)
    # One call for each of the neighbours: Matplotlib takes as long for one point as for many.
    for (name,), group in _grouped(rows, kind).items():
        look, shift = looks[name], 0.76 * ((names.index(name) + 0.5) / len(names) - 0.5)
        points = [(places[row[place]] + shift, *_point(row, measure), row) for row in group]
        low = [point for point in points if floor is not None and point[1] < floor]
        for x, y, *_ in low:
            style.below(axis, x, floor or 0.0, y, look.color)
        if not (high := [point for point in points if point not in low]):
            continue
        x, y, below, above, _ = zip(*high, strict=True)
        down = [min(b, v - (floor or 0.0)) for b, v in zip(below, y, strict=True)]
        mark: dict[str, Any] = {"color": look.color, "marker": look.marker, "linestyle": "none"}
        axis.errorbar(x, y, yerr=[down, above], **style.BARS, **mark)
        for at, *_, row in high:
            if measure == "coverage" and row["n_failed"]:
                style.hollow(axis, at, max(floor or 0.0, 100 * row["coverage_all"]), look)
    if floor is not None and rows:
        tops = (100 * max(row["coverage_high"], row["level"] + 0.01) for row in rows)
        axis.set_ylim(floor - 0.6, max(axis.get_ylim()[1], min(100.6, max(tops) + 0.6)))


def _named_ticks(axis: Axes, names: Sequence[str]) -> None:
    """Write names along x; of many only some."""
    places = range(0, len(names), -(-len(names) // _MOST_NAMES))
    axis.set_xticks(places, [names[i] for i in places])
    axis.set_xlim(-0.5, len(names) - 0.5)


def _separate(axis: Axes, count: int) -> None:
    """Draw faint lines between so many places."""
    axis.tick_params(axis="x", length=0)
    between = [i - 0.5 for i in range(1, count)]
    across = axis.get_xaxis_transform()
    axis.vlines(between, 0, 1, transform=across, color="#EEEEEE", linewidth=0.6, zorder=0)


def _point(row: Row, measure: str) -> tuple[float, float, float]:
    """Return a value, and how far its bar reaches below and above."""
    if measure == "length":
        deviation = row["length_sd"] or 0.0
        return row["length"], min(deviation, row["length"]), deviation
    middle, low, high = (100 * row[f"coverage{suffix}"] for suffix in ("", "_low", "_high"))
    # Rounding can make a length negative, which Matplotlib refuses.
    return middle, max(0.0, middle - low), max(0.0, high - middle)


def _floor(rows: Iterable[Row]) -> float:
    """Return the bottom of the coverage axis; what is far lower is marked there with its number."""
    known = [row for row in rows if row["coverage"] is not None]
    nominal = 100 * known[0]["level"]
    lowest = min(100 * min(row["coverage_low"], row["coverage"]) for row in known)
    return max(0.0, min(nominal - 4, max(lowest - 0.6, nominal - style.DEEPEST)))


@style.styled
def along_rounds(rows: Sequence[Row], warmup: int | None = None) -> Figure:
    """Draw coverage (left) and length (right) against communication rounds, a row of panels per method.

    The grey band holds 95 % of the points of a method with exact coverage. What is below the axis is
    marked there, with the lowest coverage of the schedule.

    Args:
      rows: of `summarise`, one problem, algorithm, horizon, level and coordinate, all saved rounds.
      warmup: rounds of warm-up, to be marked.
    """
    labels, level, schedules = method_labels(rows), rows[0]["level"], _unique(rows, "schedule")
    (algorithm,) = _algorithm_titles(rows).values()
    figure, axes = style.grid(len(labels), 2, 1.15, sharex=True, sharey="col")
    known = [row for row in rows if row["coverage"] is not None]
    for (left, right), (method, label) in zip(axes, labels.items(), strict=True):
        chosen = [row for row in rows if row["method"] == method]
        _draw_lines(left, chosen, "coverage", schedules, warmup, factor=100)
        style.nominal(left, level, max(row["n_ok"] for row in chosen))
        _draw_lines(right, chosen, "length", schedules, warmup)
        left.set_title(_title(label, algorithm, what="coverage (%)"))
        right.set_title(_title(label, algorithm, what="length"))
    bottom = _floor(known) if known else 0.0
    if known:
        axes[0][0].set_ylim(bottom, 100.6)
        for (left, _), method in zip(axes, labels, strict=True):
            _mark_below(left, [row for row in known if row["method"] == method], schedules, bottom)
    style.plain_log(axes[0][1].yaxis)
    for axis in axes[-1]:
        axis.set_xlabel("Communication rounds")
    style.legend(figure, style.looks(schedules), level=level, band=True, warmup=bool(warmup))
    marked = any(100 * row["coverage"] < bottom for row in known)
    of = f"{rows[0]['problem']}, {_steps(rows)}"
    style.note(figure, _about(rows, marked=marked, of=of), _failed(rows))
    return figure


def _mark_below(axis: Axes, rows: Sequence[Row], schedules: Sequence[str], bottom: float) -> None:
    """Mark each line that leaves the axis, with its lowest number."""
    look, marked = style.looks(schedules), 0
    for (schedule,), group in _grouped(rows, "schedule").items():
        lowest = min(group, key=lambda row: row["coverage"])
        if 100 * lowest["coverage"] < bottom:
            x, y = lowest["save_round"], 100 * lowest["coverage"]
            style.below(axis, x, bottom, y, look[schedule].color, stacked=marked)
            marked += 1


@style.styled
def error_along_rounds(
    rows: Sequence[Row], warmup: Callable[[str], int | None] = lambda problem: None
) -> Figure:
    """Draw the L2 error against communication rounds on logarithmic axes, a panel per problem and algorithm.

    Bands are 1.96 Monte-Carlo standard errors to both sides.

    Args:
      rows: of `summarise`, all saved rounds; the longest horizon of each schedule is drawn.
      warmup: rounds of warm-up by problem, to be marked.
    """
    settings, algorithms = _settings_of(rows), _algorithm_titles(rows)
    schedules = _unique(rows, "schedule")
    figure, axes = style.grid(1, len(settings), 1.25)
    drawn = {setting: _longest(group) for setting, group in settings.items()}
    for axis, ((problem, algorithm), group) in zip(axes[0], drawn.items(), strict=True):
        _draw_lines(axis, group, "l2_error", schedules, warmup(problem), band=True)
        style.plain_log(axis.yaxis)
        axis.set_title(_title(problem, algorithms[algorithm]))
        axis.set_xlabel("Communication rounds")
    axes[0][0].set_ylabel("L2 error")
    marked = any(warmup(problem) for problem, _ in settings)
    style.legend(figure, style.looks(schedules), warmup=marked)
    label = method_labels(rows)[rows[0]["method"]]
    about = f"Error of all coordinates, estimate of {label}. {_replications(rows)}. "
    failed = _failed([row for group in drawn.values() for row in group])
    style.note(figure, about + "Bands: 1.96 Monte-Carlo standard errors.", failed)
    return figure


def _longest(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of each schedule's longest horizon, of one method and level."""
    steps = {
        name: max(r["num_steps"] for r in group)
        for (name,), group in _grouped(rows, "schedule").items()
    }
    once = (rows[0]["method"], rows[0]["level"])
    one = [row for row in rows if (row["method"], row["level"]) == once]
    return [row for row in one if row["num_steps"] == steps[row["schedule"]]]


def _draw_lines(
    axis: Axes,
    rows: Sequence[Row],
    measure: str,
    schedules: Sequence[str],
    warmup: int | None,
    factor: float = 1,
    band: bool = False,
) -> None:
    """Draw a line per schedule, which ends where its observations are used up."""
    look = style.looks(schedules)
    known = [row for row in rows if row[measure] is not None]
    for (schedule,), group in _grouped(known, "schedule").items():
        x, y = [r["save_round"] for r in group], [factor * r[measure] for r in group]
        order = list(schedules).index(schedule)
        style.line(axis, x, y, look[schedule], order, len(schedules))
        if band:
            half = [1.96 * factor * (r[f"{measure}_mcse"] or 0.0) for r in group]
            style.band(axis, x, y, half, look[schedule].color)
    if warmup:
        axis.axvline(warmup, color=style.GREY, linestyle=style.DOTS, linewidth=1, zorder=1)
    style.plain_log(axis.xaxis)


def _title(*parts: str, what: str = "") -> str:
    """Join the parts of a title, on as many lines as a panel's width needs."""
    whole = ", ".join(part for part in parts if part) + (f": {what}" if what else "")
    return textwrap.fill(whole[:1].upper() + whole[1:], _TITLE_WIDTH)


def _steps(rows: Sequence[Row]) -> str:
    return f"{rows[0]['num_steps']:,} observations per client"


def _algorithm_titles(rows: Iterable[Row]) -> dict[str, str]:
    """Return the names of algorithms for titles; Local SGD is left out if it is the only one."""
    names = _unique(rows, "algorithm")
    return {name: "" if names == [LOCAL_SGD] else name for name in names}


def _replications(rows: Sequence[Row]) -> str:
    return f"{_count(rows)} replications per cell"


def _count(rows: Sequence[Row]) -> str:
    runs = sorted(_unique(rows, "replications"))
    return f"{runs[0]:,}" if len(runs) == 1 else f"{runs[0]:,} to {runs[-1]:,}"


def _about(rows: Sequence[Row], bars: str = "", marked: bool = False, of: str = "") -> str:
    """Describe what is drawn: problem, coordinate, level, replications, and what bars are."""
    names = _unique(rows, "coordinate")
    where = names[0] if len(names) == 1 else "first coordinate of each method"
    text = f"{of}: {where}" if of else where
    text += f", {100 * rows[0]['level']:g} % intervals, {_replications(rows)}."
    text += f" Bars: {bars}." if bars else ""
    return text + (f" {style.BELOW}" if marked else "")


def _failed(rows: Sequence[Row], hollow: bool = False) -> str:
    """Describe how many runs failed, and why; "" if none did."""
    groups = _grouped(rows, "problem", "algorithm", "schedule", "num_steps", "save_round")
    worst = [max(group, key=lambda row: row["n_failed"]) for group in groups.values()]
    last = [row for row in worst if row["save_round"] == row["num_rounds"] and row["n_failed"]]
    if not last:
        return ""
    why = failures.why({cause: sum(row[cause.count] for row in last) for cause in FAILURES})
    of, failed = (sum(row[key] for row in last) for key in ("replications", "n_failed"))
    text = f"{failed:,} of {of:,} runs failed in {plural(len(last), 'cell')} ({why}). Drawn: the others"
    return text + ("; hollow: coverage with failures as misses." if hollow else ".")


def save_all(
    source: Any,
    directory: str | Path,
    most: int = MOST_FIGURES,
    warmup: Warmup = lambda row: 0,
    *,
    level: float | None = None,
    coordinate: str | None = None,
) -> list[Path]:
    """Draw what the rows have and save every figure as PNG (200 dpi) and PDF.

    The figures are `coverage` and `length` by schedule, horizon and method; and for cells with more than
    one saved round `rounds_<problem>_<steps>`, coverage and length along the communication rounds, and
    `l2_error`. Algorithms other than Local SGD have panels and files of their own, with their name.
    Each of several levels has its own files, unless one is chosen. One coordinate is drawn, as in the tables; what is
    unknown (coverage without a truth) is left out. Many problems are spread over several files
    (`coverage`, `coverage_2`, …); what is beyond `most` figures is left out, with a warning.

    Args:
      source: `CellRows`, a sequence of them, or the results of a study.
      directory: where to save; made if it is not there.
      most: how many figures to draw.
      warmup: rounds of warm-up, which are marked, of the cell that a row of `summarise` is from.
      level: the only one to draw; all if None.
      coordinate: name of a coordinate; the first of each method if None.

    Returns:
      The files.

    Example::

        save_all(cells, "figures")
    """
    cells = cells_of(source)
    Selection(levels=() if level is None else level, coordinate=coordinate).check(cells)
    rows = [
        row
        for cell in cells
        for row in summarise(cell)
        if level in (None, row["level"]) and _is_chosen(cell, row, coordinate)
    ]
    figures, paths = list(_figures(rows, warmup)), []
    if left := [name for name, _ in figures[most:]]:
        listed = ", ".join(left[:_LISTED]) + (
            f" and {len(left) - _LISTED} more" if len(left) > _LISTED else ""
        )
        drawn = f"the first {most} of {len(figures)} figures will be drawn"
        _log.warning("%s, not %s; plot fewer cells for those (--cell PART)", drawn, listed)
    for name, draw in figures[:most]:
        paths += style.save(draw(), Path(directory) / name)
    return paths


def _figures(
    rows: Sequence[Row], warmup: Warmup = lambda row: 0
) -> Iterable[tuple[str, Callable[[], Figure]]]:
    """Yield names and what draws them: figures that compare cells come first."""
    paths = _with_path(rows)
    known = [row for row in paths if row["l2_error"] is not None]
    errors = (
        (page, name, functools.partial(error_along_rounds, part, _by_problem(part, warmup)))
        for page, name, part in _pages("l2_error", known)
    )
    compared = sorted([*_schedule_figures(rows), *errors], key=lambda figure: figure[0])
    yield from ((name, draw) for _, name, draw in compared)
    levels = _unique(rows, "level")
    for level in levels:
        suffix = f"_{100 * level:g}" if len(levels) > 1 else ""
        here = [row for row in paths if row["level"] == level]
        for key, group in _grouped(here, "problem", "algorithm", "num_steps").items():
            draw = functools.partial(along_rounds, group, _shared(group, warmup))
            yield _rounds_name(*key) + suffix, draw


def _schedule_figures(rows: Sequence[Row]) -> Iterable[tuple[int, str, Callable[[], Figure]]]:
    last = [row for row in rows if row["save_round"] == row["num_rounds"]]
    levels = _unique(rows, "level")
    for level in levels:
        suffix = f"_{100 * level:g}" if len(levels) > 1 else ""
        here = [row for row in last if row["level"] == level]
        for measure in ("coverage", "length"):
            known = [row for row in here if row[measure] is not None]
            for page, name, part in _pages(measure + suffix, known):
                settings = _settings_of(part)
                everyone = [r for r in here if (r["problem"], r["algorithm"]) in settings]
                yield page, name, functools.partial(by_schedule, part, measure, everyone)


def _pages(name: str, rows: Sequence[Row]) -> Iterable[tuple[int, str, list[Row]]]:
    """Yield the rows of as many problems and algorithms at a time as fit on a page."""
    groups = list(_settings_of(rows).values())
    for page, first in enumerate(range(0, len(groups), _MOST_SETTINGS), start=1):
        part = [row for group in groups[first : first + _MOST_SETTINGS] for row in group]
        yield page, name if page == 1 else f"{name}_{page}", part


def _rounds_name(problem: str, algorithm: str, steps: int) -> str:
    parts = (problem,) if algorithm == LOCAL_SGD else (problem, algorithm)
    return "_".join(["rounds", *map(_safe, parts), str(steps)])


def _with_path(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of cells that have more than one saved round."""
    groups = _grouped(rows, "problem", "algorithm", "schedule", "num_steps").values()
    return [row for group in groups if len({r["save_round"] for r in group}) > 1 for row in group]


def _shared(rows: Iterable[Row], warmup: Warmup) -> int | None:
    """Return the rounds of warm-up that all cells have; None if they differ."""
    found = {warmup(group[0]) for group in _grouped(rows, "schedule").values()}
    return found.pop() if len(found) == 1 else None


def _by_problem(rows: Sequence[Row], warmup: Warmup) -> Callable[[str], int | None]:
    longest = {
        problem: [row for row in group if row["num_steps"] == max(_unique(group, "num_steps"))]
        for (problem,), group in _grouped(rows, "problem").items()
    }
    return lambda problem: _shared(longest[problem], warmup)


def _safe(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name)


def save_for_print(
    source: Any,
    directory: str | Path,
    figure: PrintedFigure,
    *,
    format: PrintFormat = "pdf",
    width: str = "column",
    level: float | None = None,
    coordinate: str | None = None,
) -> Path:
    """Save one figure in the width of a journal's column or page, in its font size.

    Methods differ in colour, marker and line, so that the figure is legible in grey and with any colour
    vision. A hollow mark is a coverage more than 2 standard errors from its level.

    Args:
      source: `CellRows`, a sequence of them, or the results of a study.
      directory: where to save; made if it is not there.
      figure: "coverage" by schedule, or "tradeoff", length against the numbers that a client sends.
      format: "pdf", "svg" or "png".
      width: "column" or "page".
      level: confidence level; the first if None.
      coordinate: name of a coordinate; the first of each method if None.

    Returns:
      The file, `<figure>_<width>.<format>`, with level and coordinate in its name if they are given.

    Example::

        save_for_print(cells, "figures", "tradeoff", width="page")
    """
    checks.choice("figure", figure, PrintedFigure)
    checks.choice("format", format, PrintFormat)
    checks.choice("width", width, tuple(style.WIDTHS))
    cells = cells_of(source)
    chosen = Selection(levels=() if level is None else (level,), coordinate=coordinate)
    chosen.check(cells)
    last = [
        row
        for cell in cells
        for row in summarise(cell, last_only=True)
        if chosen.keeps(row, cell.coordinates[row["method"]][0])
    ]
    needed = ("coverage",) if figure == "coverage" else ("length", "sent_over_c1")
    last = [row for row in last if row["level"] == last[0]["level"]]
    known = [row for row in last if all(row[name] is not None for name in needed)]
    if not known:
        raise checks.refusal("figure", "be one that the rows can draw", figure, code="unsupported")
    given = [] if level is None else [f"{100 * level:g}"]
    given += [] if coordinate is None else [_safe(coordinate)]
    path = Path(directory) / f"{'_'.join([figure, width, *given])}.{format}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with style.matplotlib().rc_context(style.PRINT):
        save_figure(_draw_for_print(known, figure, width, _failed(last)), path)
    return path


def _draw_for_print(rows: Sequence[Row], kind: str, width: str, failed: str = "") -> Figure:
    from matplotlib.figure import Figure

    groups = _grouped(rows, "problem", "algorithm", "num_steps")
    labels = method_labels(rows)
    looks = style.method_looks(labels)
    columns = min(len(groups), _PER_ROW[width])
    columns = 2 if columns == 3 and len(groups) == 4 else columns
    lines = math.ceil(len(groups) / columns)
    inches = style.WIDTHS[width]
    per_line = max(1, int(inches / (_HANDLE + _LETTER * max(map(len, labels.values())))))
    extra = _LEGEND_LINE * (math.ceil(len(labels) / per_line) + (4 if width == "column" else 2))
    figure = Figure((inches, _PANEL_HEIGHT * lines + extra), layout="constrained")
    # All panels share the axis whose measure is the same everywhere.
    share: dict[str, Any] = {"sharey": kind == "coverage", "sharex": kind == "tradeoff"}
    axes = figure.subplots(lines, columns, squeeze=False, **share).ravel().tolist()
    for axis, ((problem, algorithm, steps), group) in zip(axes, groups.items(), strict=False):
        other = [] if algorithm == LOCAL_SGD else [algorithm]
        axis.set_title(", ".join([problem, *other, f"{steps:,} steps"]))
        (_draw_coverage if kind == "coverage" else _draw_tradeoff)(axis, group, looks)
    for axis in axes[len(groups) :]:
        axis.set_visible(False)
    if kind == "tradeoff":  # with room at the sides, also if all schedules communicate alike
        shares = [row["sent_over_c1"] for row in rows]
        axes[0].set_xlim(min(shares) / 1.3, 1.3 * max(shares))
        style.plain_log(axes[0].xaxis)
    for i in range(0, len(groups), columns):
        axes[i].set_ylabel("Coverage (%)" if kind == "coverage" else "Mean length")
    figure.supxlabel(_print_note(rows, kind, width, failed), fontsize=6, x=0.01, ha="left")
    handles = [style.handle(look, kind == "tradeoff") for look in looks.values()]
    figure.legend(handles, labels.values(), loc="outside upper left", ncols=per_line)
    return figure


def _print_note(rows: Sequence[Row], kind: str, width: str, failed: str) -> str:
    text = (
        f"{rows[0]['coordinate']}, {100 * rows[0]['level']:g} % intervals, {_count(rows)} replications. "
        f"Bars: {_BARS[kind]}. Hollow: coverage more than 2 standard errors from its level."
    )
    if kind == "tradeoff":
        text += (
            " Numbers sent: per client, models and the gradients and Hessians that a method needs."
        )
    elif any(100 * row["coverage"] < _lowest(row["level"]) for row in rows):
        text += f" {style.BELOW}"
    return textwrap.fill(f"{text} {failed}".strip(), 74 if width == "column" else 160)


def _lowest(level: float) -> float:
    return max(0.0, 100 * level - style.DEEPEST)


def _mark(row: Row, look: style.Look) -> dict[str, Any]:
    """Return how to draw a row's point, hollow if its coverage is off its level."""
    coverage, level = row["coverage"], row["level"]
    error = math.sqrt(level * (1 - level) / row["n_ok"])
    off = coverage is not None and abs(coverage - level) > 2 * error
    face = "white" if off else look.color
    return {"color": look.color, "marker": look.marker, "markerfacecolor": face}


def _draw_coverage(axis: Axes, rows: Sequence[Row], looks: dict[str, style.Look]) -> None:
    """Draw schedules side by side, methods next to one another."""
    level, schedules = rows[0]["level"], _unique(rows, "schedule")
    floor = _lowest(level)
    style.nominal(axis, level, max(row["n_ok"] for row in rows))
    for row in rows:
        i, look = list(looks).index(row["method"]), looks[row["method"]]
        x = schedules.index(row["schedule"]) + 0.7 * ((i + 0.5) / len(looks) - 0.5)
        y, low, high = (100 * row[f"coverage{end}"] for end in ("", "_low", "_high"))
        if y < floor:
            style.below(axis, x, floor, y, look.color)
            continue
        bars = [[y - max(low, floor)], [high - y]]
        axis.errorbar([x], [y], yerr=bars, **style.PRINT_BARS, **_mark(row, look))
    axis.set_xticks(range(len(schedules)), schedules)
    axis.set_xlim(-0.5, len(schedules) - 0.5)
    axis.tick_params(axis="x", length=0)


def _draw_tradeoff(axis: Axes, rows: Sequence[Row], looks: dict[str, style.Look]) -> None:
    """Draw mean length against numbers sent over those of plain Local SGD under C1, a line per method."""
    for (method,), group in _grouped(rows, "method").items():
        look, line = looks[method], sorted(group, key=lambda row: row["sent_over_c1"])
        x, y = [row["sent_over_c1"] for row in line], [row["length"] for row in line]
        axis.plot(x, y, color=look.color, linestyle=look.dashes, zorder=2)
        for row in line:
            bars = 1.96 * (row["length_mcse"] or 0.0)
            at = ([row["sent_over_c1"]], [row["length"]])
            axis.errorbar(*at, yerr=bars, zorder=3, **style.PRINT_BARS, **_mark(row, look))
    axis.set(xscale="log")
    style.plain_log(axis.yaxis)
    axis.tick_params(labelbottom=True)
    axis.set_xlabel("Numbers sent / Local SGD's under C1")


@style.styled
def bands(
    cell: CellRows,
    methods: Sequence[str] = (),
    coordinate: str | int | None = None,
    run: int = 0,
    *,
    level: float | None = None,
) -> Figure:
    """Draw the estimate of one run at its looks in the bands of several methods.

    Args:
      cell: rows with several saved rounds.
      methods: whose bands to draw, all if empty; the first is the source of the estimate.
      coordinate: which of the first method's coordinates, by name or number; the first if None.
      run: which replication.
      level: one of the cell's, the first if None.
    """
    methods = [cell.method_named(name) for name in methods] or list(cell.methods)
    j = cell.level_place(level)
    place = cell.coordinate_place(methods[0], coordinate)
    figure, axes = style.grid(1, 1, wide=1.3)
    axis, steps = axes[0][0], cell.steps_at
    looks = style.method_looks(methods)
    for name in methods:
        rows = cell.methods[name]
        half = rows.half_width[:, j, run, place]
        center, seen = rows.estimate[:, run, place], np.isfinite(half)
        x = np.asarray(steps)[seen]
        for sign in (-1, 1):
            y = (center + sign * half)[seen]
            axis.plot(x, y, color=looks[name].color, linewidth=1.0)
        low, high = (center - half)[seen], (center + half)[seen]
        axis.fill_between(
            x, low, high, color=looks[name].color, alpha=0.15, linewidth=0, label=cell.labels[name]
        )
    first = cell.methods[methods[0]]
    shown = np.isfinite(first.half_width[:, j, run, place])
    estimate = first.estimate[shown, run, place]
    axis.plot(np.asarray(steps)[shown], estimate, color="0.2", linewidth=1.0, label="estimate")
    truth = cell.truth[methods[0]]
    if truth is not None:
        axis.axhline(float(truth[place]), color="0.5", linestyle=":", label="truth")
    axis.set_xscale("log")
    style.plain_log(axis.xaxis)
    axis.set_xlabel("Observations per client")
    axis.set_ylabel(cell.coordinates[methods[0]][place])
    axis.set_title(_title(cell.problem, cell.schedule, what="one run"))
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return figure


@style.styled
def wrong_so_far(
    cell: CellRows, methods: Sequence[str] = (), *, level: float | None = None
) -> Figure:
    """Draw the share of runs that were wrong at some look so far, mean over coordinates, with 1.96 standard errors.

    Of all methods if none are named, at one of the cell's levels, the first if None.
    """
    methods = list(methods) or list(cell.methods)
    figure, axes = style.grid(1, 1, wide=1.3)
    axis, looks = axes[0][0], style.method_looks(methods)
    for name in methods:
        share, error = looks_analysis.wrong_so_far(cell, name, level)
        x, color = np.asarray(cell.steps_at), looks[name].color
        axis.plot(x, 100 * share, color=color, label=cell.labels[name])
        axis.fill_between(
            x,
            100 * (share - 1.96 * error),
            100 * (share + 1.96 * error),
            color=color,
            alpha=0.2,
            linewidth=0,
        )
    axis.axhline(
        100 * (1 - cell.levels[cell.level_place(level)]), color="0.5", linestyle=":", linewidth=1
    )
    axis.set_xscale("log")
    style.plain_log(axis.xaxis)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("Observations per client")
    axis.set_ylabel("Runs wrong so far (%)")
    axis.set_title(_title(cell.problem, cell.schedule, what=f"{len(cell.steps_at)} looks"))
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return figure


def save_looks(
    cell: CellRows,
    directory: Path,
    methods: Sequence[str] = (),
    banded: Sequence[str] = (),
    *,
    level: float | None = None,
) -> list[Path]:
    """Draw one run in its bands and the share of runs that were wrong so far; return the files.

    Args:
      cell: rows with several saved rounds.
      directory: where to write `bands` and `wrong_so_far`.
      methods: which to draw; all of the cell if empty.
      banded: those whose bands to draw; the same if empty.
      level: one of the cell's, the first if None.
    """
    names = list(methods) or list(cell.methods)
    first = style.save(bands(cell, list(banded) or names, level=level), Path(directory) / "bands")
    return first + style.save(
        wrong_so_far(cell, names, level=level), Path(directory) / "wrong_so_far"
    )
