"""Figures in the width of a journal's column or page, in its font size, with a line that says what they show."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlsgd.analysis.measures import LOCAL_SGD
from jaxlsgd.analysis.moments import Row
from jaxlsgd.core import checks
from jaxlsgd.report import style as drawing
from jaxlsgd.report.figures import first_coordinate, method_labels
from jaxlsgd.report.tables import cells_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURES = ("coverage", "tradeoff")
FORMATS = ("pdf", "svg", "png")
WIDTHS = {"column": 3.35, "page": 6.9}  # inches
_PANEL_HEIGHT, _LEGEND_LINE = 1.9, 0.17
_HANDLE, _LETTER = 0.42, 0.05  # inches of a legend's entry
_PER_ROW = {"column": 1, "page": 3}
_STYLE = {
    "font.size": 7,
    "axes.titlesize": 7.5,
    "axes.labelsize": 7,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "legend.fontsize": 6.5,
    "lines.markersize": 3.6,
    "lines.linewidth": 0.9,
    "svg.fonttype": "none",
    "svg.hashsalt": "jaxlsgd",
}
_BARS: dict[str, Any] = {"elinewidth": 0.8, "capsize": 2.6, "capthick": 0.7}


def save(
    source: Any,
    directory: str | Path,
    figure: str,
    *,
    format: str = "pdf",
    width: str = "column",
) -> Path:
    """Saves one figure for print.

    Methods differ in colour, marker and line, so that grey print and any colour vision will do. A hollow
    mark is a coverage more than 2 standard errors from its level. The first level and coordinate are drawn.

    Args:
      source: `CellRows`, a sequence of them, or the results of a study.
      directory: where to save; made if it is not there.
      figure: "coverage" by schedule, or "tradeoff", length against the numbers that a client sends.
      format: "pdf", "svg" or "png".
      width: "column" or "page".

    Returns:
      The file, `<figure>_<width>.<format>`.

    Example::

        save(cells, "figures", "tradeoff", width="page")
    """
    checks.choice("figure", figure, FIGURES)
    checks.choice("format", format, FORMATS)
    checks.choice("width", width, tuple(WIDTHS))
    cells = cells_of(source)
    first = [row for cell in cells for row in first_coordinate(cell)]
    last = [row for row in first if row["save_round"] == row["num_rounds"]]
    rows = [row for row in last if row["level"] == last[0]["level"]]
    needed = ("coverage",) if figure == "coverage" else ("length", "sent_over_c1")
    known = [row for row in rows if all(row[name] is not None for name in needed)]
    if not known:
        raise checks.refusal("figure", "be one that the rows can draw", figure)
    path = Path(directory) / f"{figure}_{width}.{format}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with drawing.matplotlib().rc_context(drawing.STYLE | _STYLE):
        made = _draw(known, figure, width)
        # No dates, so that the same rows give the same bytes.
        dates = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {}}
        made.savefig(path, metadata=dates[format], dpi=600)
    return path


def _draw(rows: Sequence[Row], kind: str, width: str) -> Figure:
    from matplotlib.figure import Figure

    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        key = (row["problem"], row["algorithm"], row["num_steps"])
        groups.setdefault(key, []).append(row)
    labels = method_labels(rows)
    looks = dict(zip(labels, drawing.method_looks(len(labels)), strict=True))
    columns = min(len(groups), _PER_ROW[width])
    columns = 2 if columns == 3 and len(groups) == 4 else columns
    lines = math.ceil(len(groups) / columns)
    room = _HANDLE + _LETTER * max(map(len, labels.values()))
    per_line = max(1, int(WIDTHS[width] / room))
    extra = _LEGEND_LINE * (math.ceil(len(labels) / per_line) + (4 if width == "column" else 2))
    figure = Figure((WIDTHS[width], _PANEL_HEIGHT * lines + extra), layout="constrained")
    # One range for all panels where the measure is the same everywhere.
    share: dict[str, Any] = {"sharey": kind == "coverage", "sharex": kind == "tradeoff"}
    axes = figure.subplots(lines, columns, squeeze=False, **share).ravel().tolist()
    for axis, (key, group) in zip(axes, groups.items(), strict=False):
        axis.set_title(_title(*key))
        (_draw_coverage if kind == "coverage" else _draw_tradeoff)(axis, group, looks)
    for axis in axes[len(groups) :]:
        axis.set_visible(False)
    if kind == "tradeoff":  # with room at the sides, also where all schedules communicate alike
        shares = [row["sent_over_c1"] for row in rows]
        axes[0].set_xlim(min(shares) / 1.3, 1.3 * max(shares))
        drawing.plain_log(axes[0].xaxis)
    for i in range(0, len(groups), columns):
        axes[i].set_ylabel("Coverage (%)" if kind == "coverage" else "Mean length")
    figure.supxlabel(_note(rows, kind, width), fontsize=6, x=0.01, ha="left")
    handles = [_handle(look, kind == "tradeoff") for look in looks.values()]
    figure.legend(handles, labels.values(), loc="outside upper left", ncols=per_line)
    return figure


def _title(problem: str, algorithm: str, steps: int) -> str:
    other = [] if algorithm == LOCAL_SGD else [algorithm]
    return ", ".join([problem, *other, f"{steps:,} steps"])


def _note(rows: Sequence[Row], kind: str, width: str) -> str:
    runs = sorted({row["replications"] for row in rows})
    count = f"{runs[0]:,}" if len(runs) == 1 else f"{runs[0]:,} to {runs[-1]:,}"
    bars = "95 % Wilson intervals" if kind == "coverage" else "1.96 Monte-Carlo standard errors"
    text = (
        f"{rows[0]['coordinate']}, {100 * rows[0]['level']:g} % intervals, {count} replications. Bars: {bars}. "
        "Hollow: coverage more than 2 standard errors from its level."
    )
    if kind == "tradeoff":
        text += " Numbers sent: models, and the gradients and Hessians that a method needs."
    if kind == "coverage" and any(100 * row["coverage"] < _floor(row["level"]) for row in rows):
        text += f" {drawing.BELOW}"
    return textwrap.fill(text, 74 if width == "column" else 160)


def _handle(look: drawing.Look, line: bool) -> Any:
    from matplotlib.lines import Line2D

    style: dict[str, Any] = {"color": look.color, "marker": look.marker}
    return Line2D([], [], linestyle=look.dashes if line else "none", **style)


def _off(row: Row) -> bool:
    if row["coverage"] is None:
        return False
    level = row["level"]
    return abs(row["coverage"] - level) > 2 * math.sqrt(level * (1 - level) / row["n_ok"])


def _mark(row: Row, look: drawing.Look) -> dict[str, Any]:
    face = "white" if _off(row) else look.color
    return {"color": look.color, "marker": look.marker, "markerfacecolor": face}


def _unique(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def _floor(level: float) -> float:
    """What is lower is marked at the bottom, so that the others can be told apart."""
    return max(0.0, 100 * level - drawing.DEEPEST)


def _draw_coverage(axis: Axes, rows: Sequence[Row], looks: dict[str, drawing.Look]) -> None:
    """Schedules side by side, methods next to one another."""
    level = rows[0]["level"]
    schedules, floor = _unique(row["schedule"] for row in rows), _floor(level)
    drawing.nominal(axis, level, max(row["n_ok"] for row in rows))
    for row in rows:
        i, look = list(looks).index(row["method"]), looks[row["method"]]
        x = schedules.index(row["schedule"]) + 0.7 * ((i + 0.5) / len(looks) - 0.5)
        y, low, high = (100 * row[f"coverage{end}"] for end in ("", "_low", "_high"))
        if y < floor:
            drawing.below(axis, x, floor, y, look.color)
            continue
        bars = [[y - max(low, floor)], [high - y]]
        axis.errorbar([x], [y], yerr=bars, **_BARS, **_mark(row, look))
    axis.set_xticks(range(len(schedules)), schedules)
    axis.set_xlim(-0.5, len(schedules) - 0.5)
    axis.tick_params(axis="x", length=0)


def _draw_tradeoff(axis: Axes, rows: Sequence[Row], looks: dict[str, drawing.Look]) -> None:
    """Mean length against numbers sent over those of plain Local SGD under C1, a line per method."""
    for method in _unique(row["method"] for row in rows):
        look = looks[method]
        line = sorted((r for r in rows if r["method"] == method), key=lambda r: r["sent_over_c1"])
        x, y = [r["sent_over_c1"] for r in line], [r["length"] for r in line]
        axis.plot(x, y, color=look.color, linestyle=look.dashes, zorder=2)
        for row in line:
            bars = 1.96 * (row["length_mcse"] or 0.0)
            at = ([row["sent_over_c1"]], [row["length"]])
            axis.errorbar(*at, yerr=bars, zorder=3, **_BARS, **_mark(row, look))
    axis.set(xscale="log")
    drawing.plain_log(axis.yaxis)
    axis.tick_params(labelbottom=True)
    axis.set_xlabel("Numbers sent per client / Local SGD's under C1")
