"""The drawings of a study's figures: by schedule, by horizon, and along the communication rounds."""

from __future__ import annotations

import functools
import logging
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import ndtri

from jaxlsgd.analysis import failures
from jaxlsgd.analysis.measures import LOCAL_SGD, summarise
from jaxlsgd.analysis.moments import Row
from jaxlsgd.core.causes import FAILURES
from jaxlsgd.core.display import p_value, plural
from jaxlsgd.core.rows import CellRows
from jaxlsgd.report import style
from jaxlsgd.report import style as drawing
from jaxlsgd.report.tables import cells_of
from jaxlsgd.runs.fclt import FcltCheck

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Setting = tuple[Any, ...]  # problem and algorithm
_TITLE_WIDTH = 46  # characters
_MOST_NAMES = 10  # along x
_BARS = {"coverage": "95 % Wilson intervals", "length": "standard deviations"}


def first_coordinate(cell: CellRows) -> list[Row]:
    """The measures of a cell's first coordinate, at all saved rounds."""
    rows = summarise(cell)
    return [row for row in rows if row["coordinate"] == cell.coordinates[row["method"]][0]]


def grouped(rows: Iterable[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by the values of some columns."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


def unique(rows: Iterable[Row], key: str) -> list[Any]:
    """The values of a column, each once."""
    return list(dict.fromkeys(row[key] for row in rows))


def settings_of(rows: Sequence[Row]) -> dict[Setting, list[Row]]:
    """Rows by problem and algorithm, each of which has panels of its own."""
    return grouped(rows, "problem", "algorithm")


def method_labels(rows: Iterable[Row]) -> dict[str, str]:
    """Methods as people write them, with the name added where two have the same label."""
    labels = {row["method"]: row["label"] for row in rows}
    shared = [label for label in labels.values() if list(labels.values()).count(label) > 1]
    return {
        name: f"{label} ({name})" if label in shared and label != name else label
        for name, label in labels.items()
    }


@drawing.styled
def by_schedule(rows: Sequence[Row], measure: str, everyone: Sequence[Row] | None = None) -> Figure:
    """Coverage or length at the last round.

    With one horizon, there is a panel for each problem and algorithm, with the schedules along x and the
    methods next to one another. With several, horizons are along x, schedules next to one another, and
    each method has a column of panels. Where runs failed, a hollow marker is the coverage with failures
    as misses, and a note says how many, and why.

    Args:
      rows: of `summarise`, last round, one level and one coordinate.
      measure: "coverage", with Wilson intervals, or "length", with standard deviations.
      everyone: rows to count failures in, where some have nothing to draw; `rows` if None.
    """
    coverage, level = measure == "coverage", rows[0]["level"]
    one = len(unique(rows, "num_steps")) == 1
    draw = _by_schedule if one else _by_horizon
    figure, axes, looks = draw(rows, measure)
    for line in axes:
        line[0].set_ylabel("Coverage (%)" if coverage else "Mean length")
        for axis in line if not coverage else ():
            axis.set_ylim(bottom=0)
    drawing.legend(figure, looks, lines=False, level=level if coverage else None)
    floor = _floor(rows) if coverage else 0.0
    marked = coverage and any(100 * row["coverage"] < floor for row in rows)
    about = _about(rows, _BARS[measure], marked)
    drawing.note(figure, about, _failed(everyone or rows, hollow=coverage))
    return figure


def _by_schedule(rows: Sequence[Row], measure: str) -> tuple[Figure, Any, dict[str, drawing.Look]]:
    """Schedules along x, methods next to one another, a panel per problem and algorithm."""
    settings, labels = settings_of(rows), method_labels(rows)
    algorithms, schedules = _algorithm_titles(rows), unique(rows, "schedule")
    looks = dict(zip(labels, drawing.method_looks(len(labels)), strict=True))
    wide = min(1.9, max(1.2, len(schedules) * max(3, len(labels)) / 13))
    columns = 1 if len(settings) <= 3 else 2
    lines = -(-len(settings) // columns)
    share = "all" if measure == "coverage" else False
    figure, axes = drawing.grid(lines, columns, wide, sharey=share)
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


def _by_horizon(rows: Sequence[Row], measure: str) -> tuple[Figure, Any, dict[str, drawing.Look]]:
    """Horizons along x, schedules next to one another, a panel per setting and method."""
    settings, labels = settings_of(rows), method_labels(rows)
    algorithms, several = _algorithm_titles(rows), len(unique(rows, "problem")) > 1
    horizons = sorted(unique(rows, "num_steps"))
    looks = {
        name: drawing.looks(unique(rows, "schedule"))[name] for name in unique(rows, "schedule")
    }
    share = {"sharex": True, "sharey": "all" if measure == "coverage" else "row"}
    figure, axes = drawing.grid(len(settings), len(labels), **share)
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
    beside: tuple[str, dict[Any, drawing.Look]],
    floor: float | None,
) -> None:
    """Points with bars: one column of the rows says where along x, another which of the neighbours."""
    (place, places), (kind, looks) = along, beside
    if measure == "coverage" and rows:
        drawing.nominal(axis, rows[0]["level"])
    names = list(looks)
    # One call for each of the neighbours: Matplotlib takes as long for one point as for many.
    for (name,), group in grouped(rows, kind).items():
        look, shift = looks[name], 0.76 * ((names.index(name) + 0.5) / len(names) - 0.5)
        points = [(places[row[place]] + shift, *_point(row, measure), row) for row in group]
        low = [point for point in points if floor is not None and point[1] < floor]
        for x, y, *_ in low:
            drawing.below(axis, x, floor or 0.0, y, look.color)
        if not (high := [point for point in points if point not in low]):
            continue
        x, y, below, above, _ = zip(*high, strict=True)
        down = [min(b, v - (floor or 0.0)) for b, v in zip(below, y, strict=True)]
        style: dict[str, Any] = {"color": look.color, "marker": look.marker, "linestyle": "none"}
        axis.errorbar(x, y, yerr=[down, above], **drawing.BARS, **style)
        for at, *_, row in high:
            if measure == "coverage" and row["n_failed"]:
                drawing.hollow(axis, at, max(floor or 0.0, 100 * row["coverage_all"]), look)
    if floor is not None and rows:
        tops = (100 * max(row["coverage_high"], row["level"] + 0.01) for row in rows)
        axis.set_ylim(floor - 0.6, max(axis.get_ylim()[1], min(100.6, max(tops) + 0.6)))


def _named_ticks(axis: Axes, names: Sequence[str]) -> None:
    """Names along x, of many only some."""
    places = range(0, len(names), -(-len(names) // _MOST_NAMES))
    axis.set_xticks(places, [names[i] for i in places])
    axis.set_xlim(-0.5, len(names) - 0.5)


def _separate(axis: Axes, count: int) -> None:
    """Faint lines between so many places."""
    axis.tick_params(axis="x", length=0)
    between = [i - 0.5 for i in range(1, count)]
    across = axis.get_xaxis_transform()
    axis.vlines(between, 0, 1, transform=across, color="#EEEEEE", linewidth=0.6, zorder=0)


def _point(row: Row, measure: str) -> tuple[float, float, float]:
    """A value, and how far its bar reaches below and above."""
    if measure == "length":
        deviation = row["length_sd"] or 0.0
        return row["length"], min(deviation, row["length"]), deviation
    middle, low, high = (100 * row[f"coverage{suffix}"] for suffix in ("", "_low", "_high"))
    # Rounding must not turn a bar around: Matplotlib would refuse it.
    return middle, max(0.0, middle - low), max(0.0, high - middle)


def _floor(rows: Iterable[Row]) -> float:
    """The bottom of the coverage axis; a few that are far lower are marked there with their number."""
    known = [row for row in rows if row["coverage"] is not None]
    nominal = 100 * known[0]["level"]
    lowest = min(100 * min(row["coverage_low"], row["coverage"]) for row in known)
    return max(0.0, min(nominal - 4, max(lowest - 0.6, nominal - drawing.DEEPEST)))


@drawing.styled
def along_rounds(rows: Sequence[Row], warmup: int | None = None) -> Figure:
    """Coverage (left) and length (right) against communication rounds, a row of panels per method.

    The grey band is where 95 % of the points of a method with exact coverage would be. What is below
    the axis is marked there, with the lowest coverage of the schedule.

    Args:
      rows: of `summarise`, one problem, algorithm, horizon, level and coordinate, all saved rounds.
      warmup: rounds of warm-up, to be marked.
    """
    labels, level, schedules = method_labels(rows), rows[0]["level"], unique(rows, "schedule")
    (algorithm,) = _algorithm_titles(rows).values()
    figure, axes = drawing.grid(len(labels), 2, 1.15, sharex=True, sharey="col")
    known = [row for row in rows if row["coverage"] is not None]
    for (left, right), (method, label) in zip(axes, labels.items(), strict=True):
        chosen = [row for row in rows if row["method"] == method]
        _draw_lines(left, chosen, "coverage", schedules, warmup, factor=100)
        drawing.nominal(left, level, max(row["n_ok"] for row in chosen))
        _draw_lines(right, chosen, "length", schedules, warmup)
        left.set_title(_title(label, algorithm, what="coverage (%)"))
        right.set_title(_title(label, algorithm, what="length"))
    bottom = _floor(known) if known else 0.0
    if known:
        axes[0][0].set_ylim(bottom, 100.6)
        for (left, _), method in zip(axes, labels, strict=True):
            _mark_below(left, [row for row in known if row["method"] == method], schedules, bottom)
    drawing.plain_log(axes[0][1].yaxis)
    for axis in axes[-1]:
        axis.set_xlabel("Communication rounds")
    looks = {name: drawing.looks(schedules)[name] for name in schedules}
    drawing.legend(figure, looks, level=level, band=True, warmup=bool(warmup))
    marked = any(100 * row["coverage"] < bottom for row in known)
    drawing.note(figure, _about(rows, marked=marked), _failed(rows))
    return figure


def _mark_below(axis: Axes, rows: Sequence[Row], schedules: Sequence[str], bottom: float) -> None:
    """A mark and the lowest number for each line that leaves the axis."""
    look, marked = drawing.looks(schedules), 0
    for (schedule,), group in grouped(rows, "schedule").items():
        lowest = min(group, key=lambda row: row["coverage"])
        if 100 * lowest["coverage"] < bottom:
            x, y = lowest["save_round"], 100 * lowest["coverage"]
            drawing.below(axis, x, bottom, y, look[schedule].color, stacked=marked)
            marked += 1


@drawing.styled
def error_along_rounds(
    rows: Sequence[Row], warmup: Callable[[str], int | None] = lambda problem: None
) -> Figure:
    """L2 error against communication rounds on logarithmic axes, a panel per problem and algorithm.

    Bands are 1.96 Monte-Carlo standard errors to both sides.

    Args:
      rows: of `summarise`, all saved rounds; the longest horizon of each schedule is drawn.
      warmup: rounds of warm-up by problem, to be marked.
    """
    settings, algorithms = settings_of(rows), _algorithm_titles(rows)
    schedules = unique(rows, "schedule")
    figure, axes = drawing.grid(1, len(settings), 1.25)
    for axis, ((problem, algorithm), group) in zip(axes[0], settings.items(), strict=True):
        _draw_lines(axis, _longest(group), "l2_error", schedules, warmup(problem), band=True)
        drawing.plain_log(axis.yaxis)
        axis.set_title(_title(problem, algorithms[algorithm]))
        axis.set_xlabel("Communication rounds")
    axes[0][0].set_ylabel("L2 error")
    marked = any(warmup(problem) for problem, _ in settings)
    looks = {name: drawing.looks(schedules)[name] for name in schedules}
    drawing.legend(figure, looks, warmup=marked)
    label = method_labels(rows)[rows[0]["method"]]
    about = f"Error of all coordinates, estimate of {label}. {_replications(rows)}. "
    drawing.note(figure, about + "Bands: 1.96 Monte-Carlo standard errors.", _failed(rows))
    return figure


def _longest(rows: Sequence[Row]) -> list[Row]:
    """The longest horizon of each schedule, of one method and level."""
    steps = {
        name: max(r["num_steps"] for r in group)
        for (name,), group in grouped(rows, "schedule").items()
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
    """A line per schedule, which ends where its observations are used up."""
    look = drawing.looks(schedules)
    known = [row for row in rows if row[measure] is not None]
    for (schedule,), group in grouped(known, "schedule").items():
        x, y = [r["save_round"] for r in group], [factor * r[measure] for r in group]
        order = list(schedules).index(schedule)
        drawing.line(axis, x, y, look[schedule], order, len(schedules))
        if band:
            half = [1.96 * factor * (r[f"{measure}_mcse"] or 0.0) for r in group]
            drawing.band(axis, x, y, half, look[schedule].color)
    if warmup:
        axis.axvline(warmup, color=drawing.GREY, linestyle=drawing.DOTS, linewidth=1, zorder=1)
    drawing.plain_log(axis.xaxis)


def _title(*parts: str, what: str = "") -> str:
    """Parts of a title, on as many lines as a panel's width needs."""
    whole = ", ".join(part for part in parts if part) + (f": {what}" if what else "")
    return textwrap.fill(whole[:1].upper() + whole[1:], _TITLE_WIDTH)


def _steps(rows: Sequence[Row]) -> str:
    return f"{rows[0]['num_steps']:,} observations per client"


def _algorithm_titles(rows: Iterable[Row]) -> dict[str, str]:
    """How titles name the algorithms; Local SGD alone goes without saying."""
    names = unique(rows, "algorithm")
    return {name: "" if names == [LOCAL_SGD] else name for name in names}


def _replications(rows: Sequence[Row]) -> str:
    runs = sorted(unique(rows, "replications"))
    count = f"{runs[0]:,}" if len(runs) == 1 else f"{runs[0]:,} to {runs[-1]:,}"
    return f"{count} replications per cell"


def _about(rows: Sequence[Row], bars: str = "", marked: bool = False) -> str:
    """What is drawn: coordinate, level, replications, and what bars are."""
    names = unique(rows, "coordinate")
    where = names[0] if len(names) == 1 else "first coordinate of each method"
    text = f"{where}, {100 * rows[0]['level']:g} % intervals, {_replications(rows)}."
    text += f" Bars: {bars}." if bars else ""
    return text + (f" {drawing.BELOW}" if marked else "")


def _failed(rows: Sequence[Row], hollow: bool = False) -> str:
    """How many runs failed, and why; "" where none did."""
    groups = grouped(rows, "problem", "algorithm", "schedule", "num_steps", "save_round")
    worst = [max(group, key=lambda row: row["n_failed"]) for group in groups.values()]
    last = [row for row in worst if row["save_round"] == row["num_rounds"] and row["n_failed"]]
    if not last:
        return ""
    why = failures.why({cause: sum(row[cause.count] for row in last) for cause in FAILURES})
    of, failed = (sum(row[key] for row in last) for key in ("replications", "n_failed"))
    text = f"{failed:,} of {of:,} runs failed in {plural(len(last), 'cell')} ({why}). Drawn: the others"
    return text + ("; hollow: coverage with failures as misses." if hollow else ".")


MOST_FIGURES = 12
_MOST_SETTINGS = 6  # problems and algorithms on a page
_log = logging.getLogger("jaxlsgd.report")
Warmup = Callable[[Row], int]  # rounds of warm-up of the cell that a row is from


def save_all(
    source: Any,
    directory: str | Path,
    most: int = MOST_FIGURES,
    warmup: Warmup = lambda row: 0,
) -> list[Path]:
    """Draws what the rows have and saves every figure as PNG (200 dpi) and PDF.

    `coverage` and `length` by schedule, horizon and method; and for cells with more than one saved
    round `rounds_<problem>_<steps>`, coverage and length along the communication rounds, and
    `l2_error`. Algorithms other than Local SGD have panels and files of their own, with their name.
    Each of several levels has its own files. The first coordinate is drawn, as in the tables; what is
    not known (coverage without a truth) is left out. Many problems are spread over several files
    (`coverage`, `coverage_2`, …); what is beyond `most` figures is left out, with a warning.

    Args:
      source: `CellRows`, a sequence of them, or the results of a study.
      directory: where to save; made if it is not there.
      most: how many figures to draw.
      warmup: rounds of warm-up of the cell that a row of `summarise` is from, which are marked.

    Returns:
      The files.

    Example::

        save_all(cells, "figures")
    """
    rows = [row for cell in cells_of(source) for row in first_coordinate(cell)]
    figures, paths = list(_figures(rows, warmup)), []
    for name, draw in figures[:most]:
        paths += style.save(draw(), Path(directory) / name)
    if len(figures) > most:
        left = f"the first {most} of {len(figures)} figures are drawn"
        _log.warning("%s; plot fewer cells for the others (--cell PART)", left)
    return paths


def _figures(
    rows: Sequence[Row], warmup: Warmup = lambda row: 0
) -> Iterable[tuple[str, Callable[[], Figure]]]:
    """Names, and what draws them: those that compare first, so that they are among the first."""
    paths = _with_path(rows)
    known = [row for row in paths if row["l2_error"] is not None]
    errors = (
        (page, name, functools.partial(error_along_rounds, part, _by_problem(part, warmup)))
        for page, name, part in _pages("l2_error", known)
    )
    compared = sorted([*_schedule_figures(rows), *errors], key=lambda figure: figure[0])
    yield from ((name, draw) for _, name, draw in compared)
    levels = unique(rows, "level")
    for level in levels:
        suffix = f"_{100 * level:g}" if len(levels) > 1 else ""
        here = [row for row in paths if row["level"] == level]
        for key, group in grouped(here, "problem", "algorithm", "num_steps").items():
            draw = functools.partial(along_rounds, group, _shared(group, warmup))
            yield _rounds_name(*key) + suffix, draw


def _schedule_figures(rows: Sequence[Row]) -> Iterable[tuple[int, str, Callable[[], Figure]]]:
    last = [row for row in rows if row["save_round"] == row["num_rounds"]]
    levels = unique(rows, "level")
    for level in levels:
        suffix = f"_{100 * level:g}" if len(levels) > 1 else ""
        here = [row for row in last if row["level"] == level]
        for measure in ("coverage", "length"):
            known = [row for row in here if row[measure] is not None]
            for page, name, part in _pages(measure + suffix, known):
                settings = settings_of(part)
                everyone = [r for r in here if (r["problem"], r["algorithm"]) in settings]
                yield page, name, functools.partial(by_schedule, part, measure, everyone)


def _pages(name: str, rows: Sequence[Row]) -> Iterable[tuple[int, str, list[Row]]]:
    """Rows of a few problems and algorithms at a time, which is what fits on a page."""
    groups = list(settings_of(rows).values())
    for page, first in enumerate(range(0, len(groups), _MOST_SETTINGS), start=1):
        part = [row for group in groups[first : first + _MOST_SETTINGS] for row in group]
        yield page, name if page == 1 else f"{name}_{page}", part


def _rounds_name(problem: str, algorithm: str, steps: int) -> str:
    parts = (problem,) if algorithm == LOCAL_SGD else (problem, algorithm)
    return "_".join(["rounds", *map(_safe, parts), str(steps)])


def _with_path(rows: Sequence[Row]) -> list[Row]:
    """Rows of cells that were read at more than one round."""
    groups = grouped(rows, "problem", "algorithm", "schedule", "num_steps").values()
    return [row for group in groups if len({r["save_round"] for r in group}) > 1 for row in group]


def _shared(rows: Iterable[Row], warmup: Warmup) -> int | None:
    """The rounds of warm-up that all cells have; None where they differ."""
    found = {warmup(group[0]) for group in grouped(rows, "schedule").values()}
    return found.pop() if len(found) == 1 else None


def _by_problem(rows: Sequence[Row], warmup: Warmup) -> Callable[[str], int | None]:
    longest = {
        problem: [row for row in group if row["num_steps"] == max(unique(group, "num_steps"))]
        for (problem,), group in grouped(rows, "problem").items()
    }
    return lambda problem: _shared(longest[problem], warmup)


def _safe(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name)


# Of the palette of `drawing`.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7")
_CURVES = 4  # values of s that are drawn
_POINTS = 200  # of the quantile plot


def save_fclt(check: FcltCheck, stem: str | Path) -> list[Path]:
    """Draws an `FcltCheck` as PNG and PDF; returns the files written."""
    return style.save(fclt_figure(check), Path(stem))


@style.styled
def fclt_figure(check: FcltCheck) -> Figure:
    """Left, Cov(φ(r), φ(s)) against r for some s, with min(r, s) in grey; right, quantiles of φ(1).

    The bars are two standard errors, as they would be for Brownian motion itself. The title on the
    right has the p-value of a Kolmogorov-Smirnov test of normality.

    Args:
      check: from `fclt_check`.

    Example::

        save_fclt(check, "fclt")
    """
    figure, ((left, right),) = style.grid(1, 2, 1.15)
    chosen = np.unique(np.linspace(0, len(check.grid) - 1, _CURVES).round().astype(int))
    for i, color in zip(chosen, _COLOURS, strict=False):
        _draw_covariance(left, check, int(i), color)
    left.set_title("Covariance of φ(r) and φ(s)")
    left.set_xlabel("Share r of the run, by Σ 1/E")
    left.set_ylabel("Cov(φ(r), φ(s))")
    left.set_ylim(bottom=0)
    _draw_quantiles(right, check)
    _fclt_legend(figure, [f"s = {check.grid[i]:.2f}" for i in chosen])
    points, runs, d = check.process.shape
    style.note(
        figure,
        f"{runs:,} replications of {plural(d, 'coordinate')}, at {plural(points, 'end')} of rounds. "
        "Bars: 2 standard errors, as Brownian motion would have them.",
    )
    return figure


def _draw_covariance(axis: Axes, check: FcltCheck, i: int, color: str) -> None:
    r = check.grid
    line = np.append(0.0, r)
    axis.plot(line, np.minimum(line, r[i]), color=style.GREY, linewidth=1, zorder=1)
    axis.errorbar(
        r,
        check.covariance[i],
        yerr=2 * check.standard_error[i],
        color=color,
        marker="o",
        linestyle="none",
        **style.BARS,
    )


def _draw_quantiles(axis: Axes, check: FcltCheck) -> None:
    """Quantiles of φ(r)/√r at the last r, all coordinates together, against normal ones."""
    values = np.sort(check.process[-1].ravel()) / np.sqrt(check.grid[-1])
    share = (np.arange(min(_POINTS, values.size)) + 0.5) / min(_POINTS, values.size)
    normal = ndtri(share)
    axis.plot(normal, normal, color=style.GREY, linewidth=1, zorder=1)
    observed = np.quantile(values, share)
    axis.plot(normal, observed, "o", color=_COLOURS[0], markersize=2.5)
    last = f"φ({check.grid[-1]:.2g})"
    p = p_value(float(check.normality[-1]))
    axis.set_title(f"{last} against normal: Kolmogorov-Smirnov p = {p}".replace("p = <", "p < "))
    axis.set_xlabel("Standard normal quantile")
    axis.set_ylabel(f"Quantile of {last}")


def _fclt_legend(figure: Figure, names: list[str]) -> None:
    from matplotlib.lines import Line2D

    entries = {
        name: Line2D([], [], linestyle="none", marker="o", color=color)
        for name, color in zip(names, _COLOURS, strict=False)
    }
    entries["Brownian motion"] = Line2D([], [], color=style.GREY, linewidth=1)
    figure.legend(entries.values(), entries.keys(), loc="outside right upper", handlelength=1.8)
