"""The style of all figures, on a screen and in print: palette, panels, legend, axes."""

from __future__ import annotations

import functools
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

from jaxlsgd.core.display import COLOURS, MARKERS, colour_numbers, save_figure, self_shown
from jaxlsgd.schedules import PAPER_SCHEDULES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import XAxis, YAxis
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

P = ParamSpec("P")
R = TypeVar("R")

GREY, _BAND = "#808080", "#EFEFEF"
DASHES, DOTS = (0, (4, 3)), (0, (1, 2))
_PANEL, _LEGEND, _NOTE = (3.3, 2.5), 1.4, 0.25  # inches
# Ticks of a decade, by the ratio of an axis's ends that they are for.
_LOG_TICKS = (
    (12, (1.0, 2.0, 3.0, 4.0, 6.0, 8.0)),
    (50, (1.0, 2.0, 5.0)),
    (1000, (1.0, 3.0)),
    (math.inf, (1.0,)),
)
SCREEN = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "legend.fontsize": 8.5,
    "legend.title_fontsize": 8.5,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "pdf.fonttype": 42,
    "savefig.dpi": 200,
}
PRINT = SCREEN | {
    "font.size": 7,
    "axes.titlesize": 7.5,
    "axes.labelsize": 7,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "legend.fontsize": 6.5,
    "lines.markersize": 3.6,
    "lines.linewidth": 0.9,
    "savefig.dpi": 600,
    "svg.fonttype": "none",
    "svg.hashsalt": "jaxlsgd",
}
WIDTHS = {"column": 3.35, "page": 6.9}  # inches, in print
DEEPEST = 20.0  # points below the level at which an axis of coverages ends; what is lower is marked
BELOW = "Triangles: below the axis, with the (lowest) coverage."
# Caps are wider than markers, so that a short bar shows as well.
BARS: dict[str, Any] = {"elinewidth": 1.1, "capsize": 4.0, "capthick": 1.0, "markersize": 4.5}
PRINT_BARS: dict[str, Any] = {"elinewidth": 0.8, "capsize": 2.6, "capthick": 0.7}
_DASHES = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (6, 1.5, 1.5, 1.5)), (0, (9, 2)), (0, (1, 1)))


class Look(NamedTuple):
    """How a schedule or a method is drawn, in every figure."""

    color: str
    marker: str
    dashes: Any = "-"


def matplotlib() -> Any:
    """Return Matplotlib, which is an extra."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'jaxlsgd[plots]'") from error
    return matplotlib


def styled(draw: Callable[P, R]) -> Callable[P, R]:
    """Make a function draw in the style for a screen."""

    @functools.wraps(draw)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        with matplotlib().rc_context(SCREEN):
            return draw(*args, **kwargs)

    return wrapper


def looks(schedules: Iterable[str]) -> dict[str, Look]:
    """Return looks by schedule: the paper's five have fixed ones, others take the rest."""
    names = list(dict.fromkeys(schedules))
    order = list(dict.fromkeys((*PAPER_SCHEDULES, *names)))
    return {name: _look(order.index(name)) for name in names}


def method_looks(methods: Iterable[str]) -> dict[str, Look]:
    """Return looks by method, the same in every figure (`colour_numbers`)."""
    names = list(methods)
    return {name: _look(i) for name, i in zip(names, colour_numbers(names), strict=True)}


def _look(i: int) -> Look:
    n = len(COLOURS)
    return Look(COLOURS[i % n], MARKERS[(i + i // n) % n], _DASHES[i % len(_DASHES)])


def grid(
    rows: int, columns: int, wide: float = 1.0, **share: Any
) -> tuple[Figure, list[list[Axes]]]:
    """Return an empty figure of equal panels, `wide` times the usual width, with room for a legend."""
    from matplotlib.figure import Figure

    size = (wide * _PANEL[0] * columns + _LEGEND, _PANEL[1] * rows + _NOTE)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **share)
    self_shown(figure)
    return figure, [list(line) for line in axes]


def nominal(axis: Axes, level: float, replications: int | None = None) -> None:
    """Draw a dashed line at the level, and the band of Monte-Carlo errors that exact coverage would have."""
    from matplotlib.ticker import MaxNLocator

    axis.axhline(100 * level, color="black", linestyle=DASHES, linewidth=0.8, zorder=1)
    axis.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=True))
    if replications:
        half = 100 * 1.96 * math.sqrt(level * (1 - level) / replications)
        axis.axhspan(100 * level - half, 100 * level + half, color=_BAND, zorder=0, linewidth=0)


def plain_log(axis: XAxis | YAxis) -> None:
    """Make an axis logarithmic, with few ticks, written as plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    low, high = axis.get_view_interval()
    ticks = next(ticks for widest, ticks in _LOG_TICKS if high / low < widest)
    axis.set_major_locator(LogLocator(base=10, subs=ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: _plain_number(value)))


def _plain_number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.6g}"


def line(
    axis: Axes, x: Sequence[float], y: Sequence[float], look: Look, order: int, count: int
) -> None:
    """Draw one of several lines: later ones are thinner and have gaps, so that coincident ones show.

    Args:
      axis: where to draw.
      x: rounds.
      y: values.
      look: colour, marker and dashes.
      order: which of the lines it is.
      count: how many lines there are.
    """
    width = 2.6 - 1.4 * order / max(1, count - 1)
    axis.plot(x, y, color=look.color, linestyle=look.dashes, linewidth=width)
    # Markers of different lines are at different places; the last is where the line ends.
    every = sorted({*range(order, len(x), max(1, count)), len(x) - 1})
    size = 6.5 - 2.5 * order / max(1, count - 1)
    marks: dict[str, Any] = {"marker": look.marker, "color": look.color, "linestyle": "none"}
    edge: dict[str, Any] = {"markeredgecolor": "white", "markeredgewidth": 0.5}
    axis.plot([x[i] for i in every], [y[i] for i in every], markersize=size, **marks, **edge)


def band(
    axis: Axes, x: Sequence[float], y: Sequence[float], half: Sequence[float], color: str
) -> None:
    """Draw a band around a line."""
    low, high = ([a + sign * b for a, b in zip(y, half, strict=True)] for sign in (-1, 1))
    axis.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0, zorder=1)


def below(axis: Axes, x: float, floor: float, value: float, color: str, stacked: int = 0) -> None:
    """Mark a value below the bottom `floor` of an axis there, with its number above `stacked` others."""
    axis.plot([x], [floor], color=color, marker="v", markersize=5, clip_on=False, zorder=4)
    place: dict[str, Any] = {"xytext": (0, 5 + 8 * stacked), "textcoords": "offset points"}
    axis.annotate(f"{value:.0f}", (x, floor), ha="center", fontsize=7, color=color, **place)


def legend(
    figure: Figure,
    looks: dict[str, Look],
    *,
    lines: bool = True,
    level: float | None = None,
    band: bool = False,
    warmup: bool = False,
) -> None:
    """Add one legend for all panels, to the right of them."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries: dict[str, Any] = {}
    for name, look in looks.items():
        entries[textwrap.fill(name, 22, break_long_words=False)] = handle(look, lines, 4.5)
    if level is not None:
        dashes = Line2D([], [], color="black", linestyle=DASHES, linewidth=0.8)
        entries[f"nominal {100 * level:g} %"] = dashes
    if band:
        entries["95 % Monte-Carlo band"] = Patch(color=_BAND)
    if warmup:
        entries["end of warm-up"] = Line2D([], [], color=GREY, linestyle=DOTS, linewidth=1)
    figure.legend(entries.values(), entries.keys(), loc="outside right upper", handlelength=2.6)


def handle(look: Look, line: bool, size: float | None = None) -> Line2D:
    """Return a legend's entry: the marker, on a piece of the line if there is one."""
    from matplotlib.lines import Line2D

    dashes = look.dashes if line else "none"
    return Line2D([], [], color=look.color, marker=look.marker, markersize=size, linestyle=dashes)


def hollow(axis: Axes, x: float, y: float, look: Look) -> None:
    """Draw a hollow marker: a second value of a point."""
    style: dict[str, Any] = {"marker": look.marker, "color": look.color}
    axis.plot([x], [y], linestyle="none", markerfacecolor="none", **style)


def note(figure: Figure, *parts: str) -> None:
    """Write lines below all panels, leaving empty ones out."""
    width = int(figure.get_figwidth() * 16)  # characters, at this size
    if lines := [textwrap.fill(part, width) for part in parts if part]:
        figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=7.5)


def save(figure: Figure, stem: Path) -> list[Path]:
    """Save a figure as PNG and PDF; the same figure gives the same bytes."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "pdf")]
    with matplotlib().rc_context(SCREEN):
        save_figure(figure, paths[0])
        figure.set_layout_engine("none")  # places are kept: finding them takes as long as drawing
        save_figure(figure, paths[1])
    return paths
