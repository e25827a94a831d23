"""The house style of the figures: palette, panels, legend, axes."""

from __future__ import annotations

import functools
import math
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

from jaxlsgd.schedules import PAPER_SCHEDULES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import XAxis, YAxis
    from matplotlib.figure import Figure

P = ParamSpec("P")
R = TypeVar("R")

# Okabe and Ito's palette, which people with any colour vision can tell apart; no yellow on white.
COLOURS = ("#000000", "#0072B2", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#56B4E9", "#7F7F7F")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h")
GREY, _BAND = "#808080", "#EFEFEF"
DASHES, DOTS = (0, (4, 3)), (0, (1, 2))
_PANEL, _LEGEND = (3.3, 2.5), 1.1  # inches
# Ticks of a decade, by the ratio of an axis's ends that they are for.
_LOG_TICKS = (
    (7, (1.0, 2.0, 3.0, 4.0, 6.0, 8.0)),
    (50, (1.0, 2.0, 5.0)),
    (1000, (1.0, 3.0)),
    (math.inf, (1.0,)),
)
STYLE = {
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


class Look(NamedTuple):
    """How a schedule is drawn, everywhere the same."""

    color: str
    marker: str


def matplotlib() -> Any:
    """Matplotlib, which is an extra."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'jaxlsgd[plots]'") from error
    return matplotlib


def styled(draw: Callable[P, R]) -> Callable[P, R]:
    """Makes a function draw in the house style."""

    @functools.wraps(draw)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        with matplotlib().rc_context(STYLE):
            return draw(*args, **kwargs)

    return wrapper


def looks(schedules: Iterable[str]) -> dict[str, Look]:
    """Colour and marker by schedule: the paper's five have fixed ones, others take the rest."""
    others = [name for name in dict.fromkeys(schedules) if name not in PAPER_SCHEDULES]
    place = {name: i for i, name in enumerate((*PAPER_SCHEDULES, *others))}
    n = len(COLOURS)
    return {name: Look(COLOURS[i % n], MARKERS[(i + i // n) % n]) for name, i in place.items()}


def grid(rows: int, columns: int, **share: Any) -> tuple[Figure, list[list[Axes]]]:
    """An empty figure of equal panels, with room for a legend on the right."""
    from matplotlib.figure import Figure

    size = (_PANEL[0] * columns + _LEGEND, _PANEL[1] * rows)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **share)
    return figure, [list(line) for line in axes]


def nominal(axis: Axes, level: float, replications: int | None = None) -> None:
    """A dashed line at the nominal level, and a band for Monte-Carlo error where coverage is exact."""
    from matplotlib.ticker import MaxNLocator

    axis.axhline(100 * level, color="black", linestyle=DASHES, linewidth=0.8, zorder=1)
    axis.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=True))
    if replications:
        half = 100 * 1.96 * math.sqrt(level * (1 - level) / replications)
        axis.axhspan(100 * level - half, 100 * level + half, color=_BAND, zorder=0, linewidth=0)


def plain_log(axis: XAxis | YAxis) -> None:
    """A logarithmic axis with few ticks, written as plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    low, high = axis.get_view_interval()
    ticks = next(ticks for widest, ticks in _LOG_TICKS if high / low < widest)
    axis.set_major_locator(LogLocator(base=10, subs=ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: _plain_number(value)))


def _plain_number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.6g}"


def legend(
    figure: Figure,
    schedules: Iterable[str],
    *,
    lines: bool = True,
    level: float | None = None,
    band: bool = False,
    warmup: bool = False,
) -> None:
    """One legend for all panels, to the right of them."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    names = list(schedules)
    look, style = looks(names), "-" if lines else "none"
    entries: dict[str, Any] = {}
    for name in names:
        entries[name] = Line2D([], [], linestyle=style, **look[name]._asdict())
    if level is not None:
        dashes = Line2D([], [], color="black", linestyle=DASHES, linewidth=0.8)
        entries[f"nominal {100 * level:g} %"] = dashes
    if band:
        entries["95 % Monte-Carlo band"] = Patch(color=_BAND)
    if warmup:
        entries["end of warm-up"] = Line2D([], [], color=GREY, linestyle=DOTS, linewidth=1)
    figure.legend(entries.values(), entries.keys(), loc="outside right upper", handlelength=1.8)


def hollow(axis: Axes, x: float, y: float, color: str, marker: str) -> None:
    """A hollow marker: a second value of a point."""
    axis.plot([x], [y], linestyle="none", marker=marker, color=color, markerfacecolor="none")


def note(figure: Figure, text: str) -> None:
    """A line below all panels, if there is something to say."""
    if text:
        width = int(figure.get_figwidth() * 16)  # characters, at this size
        figure.supxlabel(textwrap.fill(text, width), x=0.01, ha="left", fontsize=7.5)


def save(figure: Figure, stem: Path) -> list[Path]:
    """Saves a figure as PNG and PDF; the same figure gives the same bytes."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "pdf")]
    with matplotlib().rc_context(STYLE):
        figure.savefig(paths[0])
        figure.set_layout_engine("none")  # laid out once, which takes as long as drawing
        figure.savefig(paths[1], metadata={"CreationDate": None})
    return paths
