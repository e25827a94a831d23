"""Figures of the functional central limit theorem."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import ndtri

from jaxlsgd.core.text import p_value, plural
from jaxlsgd.report import drawing
from jaxlsgd.runs.fclt import FcltCheck

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of the palette of `drawing`.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7")
_CURVES = 4  # values of s that are drawn
_POINTS = 200  # of the quantile plot


def save_fclt(check: FcltCheck, stem: str | Path) -> list[Path]:
    """Draws an `FcltCheck` as PNG and PDF; returns the files written."""
    return drawing.save(fclt_figure(check), Path(stem))


@drawing.styled
def fclt_figure(check: FcltCheck) -> Figure:
    """Left, Cov(φ(r), φ(s)) against r for some s, with min(r, s) in grey; right, quantiles of φ(1).

    The bars are two standard errors, as they would be for Brownian motion itself. The title on the
    right has the p-value of a Kolmogorov-Smirnov test of normality.

    Args:
      check: from `fclt_check`.

    Example::

        save_fclt(check, "fclt")
    """
    figure, ((left, right),) = drawing.grid(1, 2, 1.15)
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
    drawing.note(
        figure,
        f"{runs:,} replications of {plural(d, 'coordinate')}, at {plural(points, 'end')} of rounds. "
        "Bars: 2 standard errors, as Brownian motion would have them.",
    )
    return figure


def _draw_covariance(axis: Axes, check: FcltCheck, i: int, color: str) -> None:
    r = check.grid
    line = np.append(0.0, r)
    axis.plot(line, np.minimum(line, r[i]), color=drawing.GREY, linewidth=1, zorder=1)
    axis.errorbar(
        r,
        check.covariance[i],
        yerr=2 * check.standard_error[i],
        color=color,
        marker="o",
        linestyle="none",
        **drawing.BARS,
    )


def _draw_quantiles(axis: Axes, check: FcltCheck) -> None:
    """Quantiles of φ(r)/√r at the last r, all coordinates together, against normal ones."""
    values = np.sort(check.process[-1].ravel()) / np.sqrt(check.grid[-1])
    share = (np.arange(min(_POINTS, values.size)) + 0.5) / min(_POINTS, values.size)
    normal = ndtri(share)
    axis.plot(normal, normal, color=drawing.GREY, linewidth=1, zorder=1)
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
    entries["Brownian motion"] = Line2D([], [], color=drawing.GREY, linewidth=1)
    figure.legend(entries.values(), entries.keys(), loc="outside right upper", handlelength=1.8)
