"""Figures of a study: coverage and length by schedule, and along the communication rounds."""

from __future__ import annotations

import functools
import logging
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlsgd.analysis import failures
from jaxlsgd.analysis.measures import LOCAL_SGD, summarise
from jaxlsgd.analysis.moments import Row
from jaxlsgd.core.causes import FAILURES
from jaxlsgd.core.rows import CellRows
from jaxlsgd.core.text import plural
from jaxlsgd.report import drawing
from jaxlsgd.report.tables import cells_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Setting = tuple[Any, ...]  # problem and algorithm
_TITLE_WIDTH = 46  # characters
MOST_FIGURES = 12
_MOST_SETTINGS = 6  # problems and algorithms on a page
_log = logging.getLogger("jaxlsgd.report")


def save_all(source: Any, directory: str | Path, most: int = MOST_FIGURES) -> list[Path]:
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

    Returns:
      The files.

    Example::

        save_all(cells, "figures")
    """
    rows = [row for cell in cells_of(source) for row in first_coordinate(cell)]
    figures, paths = list(_figures(rows)), []
    for name, draw in figures[:most]:
        paths += drawing.save(draw(), Path(directory) / name)
    if len(figures) > most:
        left = f"the first {most} of {len(figures)} figures are drawn"
        _log.warning("%s; plot fewer cells for the others (--cell PART)", left)
    return paths


def first_coordinate(cell: CellRows) -> list[Row]:
    """The measures of a cell's first coordinate, at all saved rounds."""
    rows = summarise(cell)
    return [row for row in rows if row["coordinate"] == cell.coordinates[row["method"]][0]]


def _figures(rows: Sequence[Row]) -> Iterable[tuple[str, Callable[[], Figure]]]:
    """Names, and what draws them: those that compare first, so that they are among the first."""
    paths = _with_path(rows)
    known = [row for row in paths if row["l2_error"] is not None]
    errors = (
        (page, name, functools.partial(error_along_rounds, part))
        for page, name, part in _pages("l2_error", known)
    )
    compared = sorted([*_by_schedule(rows), *errors], key=lambda figure: figure[0])
    yield from ((name, draw) for _, name, draw in compared)
    levels = _unique(rows, "level")
    for level in levels:
        suffix = f"_{100 * level:g}" if len(levels) > 1 else ""
        here = [row for row in paths if row["level"] == level]
        for key, group in _grouped(here, "problem", "algorithm", "num_steps").items():
            yield _rounds_name(*key) + suffix, functools.partial(along_rounds, group)


def _by_schedule(rows: Sequence[Row]) -> Iterable[tuple[int, str, Callable[[], Figure]]]:
    last = [row for row in rows if row["save_round"] == row["num_rounds"]]
    levels = _unique(rows, "level")
    for level in levels:
        suffix = f"_{100 * level:g}" if len(levels) > 1 else ""
        here = [row for row in last if row["level"] == level]
        for measure in ("coverage", "length"):
            known = [row for row in here if row[measure] is not None]
            for page, name, part in _pages(measure + suffix, known):
                settings = _settings(part)
                everyone = [r for r in here if (r["problem"], r["algorithm"]) in settings]
                yield page, name, functools.partial(by_schedule, part, measure, everyone)


def _pages(name: str, rows: Sequence[Row]) -> Iterable[tuple[int, str, list[Row]]]:
    """Rows of a few problems and algorithms at a time, which is what fits on a page."""
    groups = list(_settings(rows).values())
    for page, first in enumerate(range(0, len(groups), _MOST_SETTINGS), start=1):
        part = [row for group in groups[first : first + _MOST_SETTINGS] for row in group]
        yield page, name if page == 1 else f"{name}_{page}", part


def _rounds_name(problem: str, algorithm: str, steps: int) -> str:
    parts = (problem,) if algorithm == LOCAL_SGD else (problem, algorithm)
    return "_".join(["rounds", *map(_safe, parts), str(steps)])


def _with_path(rows: Sequence[Row]) -> list[Row]:
    """Rows of cells that were read at more than one round."""
    groups = _grouped(rows, "problem", "algorithm", "schedule", "num_steps").values()
    return [row for group in groups if len({r["save_round"] for r in group}) > 1 for row in group]


def _grouped(rows: Iterable[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


def _unique(rows: Iterable[Row], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))


def _safe(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name)


def _title(*parts: str, what: str = "") -> str:
    """Parts of a title, on as many lines as a panel's width needs."""
    whole = ", ".join(part for part in parts if part) + (f": {what}" if what else "")
    return textwrap.fill(whole[:1].upper() + whole[1:], _TITLE_WIDTH)


def _settings(rows: Sequence[Row]) -> dict[Setting, list[Row]]:
    """Rows by problem and algorithm, each of which has panels of its own."""
    return _grouped(rows, "problem", "algorithm")


def _algorithm_titles(rows: Iterable[Row]) -> dict[str, str]:
    """How titles name the algorithms; Local SGD alone goes without saying."""
    names = _unique(rows, "algorithm")
    return {name: "" if names == [LOCAL_SGD] else name for name in names}


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
    """Coverage or length at the last round, horizons side by side.

    There is a panel for each problem and algorithm (rows of panels) and method (columns). Where runs
    failed, a hollow marker is the coverage with failures as misses, and a note says how many, and why.

    Args:
      rows: of `summarise`, last round, one level and one coordinate.
      measure: "coverage", with Wilson intervals, or "length", with standard deviations.
      everyone: rows to count failures in, where some have nothing to draw; `rows` if None.
    """
    settings, labels, schedules = _settings(rows), method_labels(rows), _unique(rows, "schedule")
    algorithms, several = _algorithm_titles(rows), len(_unique(rows, "problem")) > 1
    coverage = measure == "coverage"
    share = {"sharex": True, "sharey": "all" if coverage else "row"}
    figure, axes = drawing.grid(len(settings), len(labels), **share)
    for line, ((problem, algorithm), group) in zip(axes, settings.items(), strict=True):
        for axis, (method, label) in zip(line, labels.items(), strict=True):
            chosen = [row for row in group if row["method"] == method]
            _draw_points(axis, chosen, measure, _unique(rows, "num_steps"), schedules)
            axis.set_title(_title(problem if several else "", label, algorithms[algorithm]))
            if coverage:
                drawing.nominal(axis, rows[0]["level"])
        line[0].set_ylabel("Coverage (%)" if coverage else "Length, mean and SD")
        if not coverage:
            line[0].set_ylim(bottom=0)
    for axis in axes[-1]:
        axis.set_xlabel("Observations per client")
    level = rows[0]["level"] if coverage else None
    drawing.legend(figure, schedules, lines=False, level=level)
    drawing.note(figure, _failed(everyone or rows, hollow=coverage))
    return figure


def _failed(rows: Sequence[Row], hollow: bool = False) -> str:
    """How many runs failed, and why; "" where none did."""
    groups = _grouped(rows, "problem", "algorithm", "schedule", "num_steps", "save_round")
    worst = [max(group, key=lambda row: row["n_failed"]) for group in groups.values()]
    last = [row for row in worst if row["save_round"] == row["num_rounds"] and row["n_failed"]]
    if not last:
        return ""
    why = failures.why({cause: sum(row[cause.count] for row in last) for cause in FAILURES})
    of, failed = (sum(row[key] for row in last) for key in ("replications", "n_failed"))
    text = f"{failed:,} of {of:,} runs failed in {plural(len(last), 'cell')} ({why}). Drawn: the others"
    return text + ("; hollow: coverage with failures as misses." if hollow else ".")


def _draw_points(
    axis: Axes,
    rows: Sequence[Row],
    measure: str,
    horizons: Sequence[int],
    schedules: Sequence[str],
) -> None:
    horizons = sorted(horizons)
    look, width = drawing.looks(schedules), 0.7 / len(schedules)
    for (schedule,), group in _grouped(rows, "schedule").items():
        shift = (schedules.index(schedule) - (len(schedules) - 1) / 2) * width
        style = look[schedule]._asdict()
        y, *bars = zip(*(_point(row, measure) for row in group), strict=True)
        x = [horizons.index(row["num_steps"]) + shift for row in group]
        axis.errorbar(x, y, yerr=bars, linestyle="none", elinewidth=1.1, **style)
        for at, row in zip(x, group, strict=True):
            if measure == "coverage" and row["n_failed"]:
                drawing.hollow(axis, at, 100 * row["coverage_all"], **style)
    axis.set_xticks(range(len(horizons)), [f"{steps:,}" for steps in horizons])
    axis.set_xlim(-0.5, len(horizons) - 0.5)
    axis.tick_params(axis="x", length=0)


def _point(row: Row, measure: str) -> tuple[float, float, float]:
    """A value, and how far its bar reaches below and above."""
    if measure == "length":
        deviation = row["length_sd"] or 0.0
        return row["length"], min(deviation, row["length"]), deviation
    middle, low, high = (100 * row[f"coverage{suffix}"] for suffix in ("", "_low", "_high"))
    # Rounding must not turn a bar around: Matplotlib would refuse it.
    return middle, max(0.0, middle - low), max(0.0, high - middle)


@drawing.styled
def along_rounds(rows: Sequence[Row], warmup: int | None = None) -> Figure:
    """Coverage (left) and length (right) against communication rounds, a row of panels per method.

    The grey band is where 95 % of the points of a method with exact coverage would be.

    Args:
      rows: of `summarise`, one problem, algorithm, horizon, level and coordinate, all saved rounds.
      warmup: rounds of warm-up, to be marked.
    """
    labels, level, schedules = method_labels(rows), rows[0]["level"], _unique(rows, "schedule")
    (algorithm,) = _algorithm_titles(rows).values()
    figure, axes = drawing.grid(len(labels), 2, sharex=True)
    for (left, right), (method, label) in zip(axes, labels.items(), strict=True):
        chosen = [row for row in rows if row["method"] == method]
        _draw_lines(left, chosen, "coverage", schedules, warmup, factor=100)
        drawing.nominal(left, level, max(row["n_ok"] for row in chosen))
        _limit_coverage(left, chosen)
        _draw_lines(right, chosen, "length", schedules, warmup)
        drawing.plain_log(right.yaxis)
        left.set_title(_title(label, algorithm, what="coverage (%)"))
        right.set_title(_title(label, algorithm, what="length"))
    for axis in axes[-1]:
        axis.set_xlabel("Communication rounds")
    drawing.legend(figure, schedules, level=level, band=True, warmup=bool(warmup))
    drawing.note(figure, _failed(rows))
    return figure


@drawing.styled
def error_along_rounds(
    rows: Sequence[Row], warmup: Callable[[str], int | None] = lambda problem: None
) -> Figure:
    """L2 error against communication rounds on logarithmic axes, a panel per problem and algorithm.

    Args:
      rows: of `summarise`, all saved rounds; the longest horizon of each schedule is drawn.
      warmup: rounds of warm-up by problem, to be marked.
    """
    settings, algorithms = _settings(rows), _algorithm_titles(rows)
    schedules = _unique(rows, "schedule")
    figure, axes = drawing.grid(1, len(settings))
    for axis, ((problem, algorithm), group) in zip(axes[0], settings.items(), strict=True):
        _draw_lines(axis, _longest(group), "l2_error", schedules, warmup(problem))
        drawing.plain_log(axis.yaxis)
        axis.set_title(_title(problem, algorithms[algorithm]))
        axis.set_xlabel("Communication rounds")
    axes[0][0].set_ylabel("L2 error of the average")
    marked = any(warmup(problem) for problem, _ in settings)
    drawing.legend(figure, schedules, warmup=marked)
    drawing.note(figure, _failed(rows))
    return figure


def _longest(rows: Sequence[Row]) -> list[Row]:
    """The longest horizon of each schedule, once: all methods and levels share the average."""
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
) -> None:
    look = drawing.looks(schedules)
    known = [row for row in rows if row[measure] is not None]
    for (schedule,), group in _grouped(known, "schedule").items():
        x, y = [r["save_round"] for r in group], [factor * r[measure] for r in group]
        color, marker = look[schedule]
        axis.plot(x, y, color=color)
        # A line ends where its observations are used up; the marker tells it from the others.
        axis.plot(x[-1:], y[-1:], color=color, marker=marker, markersize=5)
    if warmup:
        axis.axvline(warmup, color=drawing.GREY, linestyle=drawing.DOTS, linewidth=1, zorder=1)
    drawing.plain_log(axis.xaxis)


def _limit_coverage(axis: Axes, rows: Sequence[Row]) -> None:
    """Cuts the start off, where an interval from a few rounds may cover anything."""
    known = [row for row in rows if row["coverage"] is not None]
    values = sorted(100 * row["coverage"] for row in known)
    if values:
        nominal = 100 * rows[0]["level"]
        late = [100 * row["coverage"] for row in known if 2 * row["save_steps"] > row["num_steps"]]
        low = min([values[len(values) // 20], nominal - 4, *late]) - 1
        axis.set_ylim(max(0.0, low), min(100.3, max(values[-1] + 1, nominal + 2)))
