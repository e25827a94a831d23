"""Figures of the diagnostics: the horizon of one run, and the functional limit theorem."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from jaxlsgd.inference.diagnostics import Regime
from jaxlsgd.report import drawing
from jaxlsgd.runs.fclt import FcltCheck

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of the palette of `drawing`.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7")
_BAND = "#EFEFEF"
_FEW = 12  # coordinates that can have their names on the axis
_CURVES = 4  # values of s that are drawn
_POINTS = 200  # of the quantile plot


def save_regime(regime: Regime, stem: str | Path) -> list[Path]:
    """Draws a `Regime` as PNG and PDF; returns the files written."""
    return drawing.save(regime_figure(regime), Path(stem))


def save_fclt(check: FcltCheck, stem: str | Path) -> list[Path]:
    """Draws an `FcltCheck` as PNG and PDF; returns the files written."""
    return drawing.save(fclt_figure(check), Path(stem))


@drawing.styled
def regime_figure(regime: Regime) -> Figure:
    """Standard error and bias at a finite horizon, by coordinate and by horizon.

    Above, how far the finite-horizon standard error is from the asymptotic one, in %; below, the bias
    that the start leaves, in standard errors. Left, each coordinate of this run; right, the worst and
    the median coordinate at other horizons, with this run and the horizon needed marked. The band is
    the tolerance.

    Args:
      regime: from `fit.regime()` or `inference.diagnostics.regime`.

    Example::

        save_regime(fit.regime(), "regime")
    """
    figure, axes = drawing.grid(2, 2, sharex="col")
    excess = 100 * (regime.inflation - 1), 100 * (regime.inflation_at - 1)
    _draw_line(axes[0], regime, *excess, 100 * regime.tolerance)
    _draw_line(axes[1], regime, regime.bias, regime.bias_at, regime.tolerance)
    axes[0][0].set_ylabel("Finite / asymptotic SE − 1 (%)")
    axes[1][0].set_ylabel("Bias / standard error")
    axes[0][0].set_title(f"By coordinate, {regime.num_steps:,} observations per client")
    axes[0][1].set_title("By horizon")
    axes[1][0].set_xlabel("Coordinate")
    axes[1][1].set_xlabel("Observations per client")
    _name_coordinates(axes[1][0], regime.names)
    _regime_legend(figure, regime)
    return figure


def _draw_line(
    axes: list[Axes],
    regime: Regime,
    here: NDArray[np.float64],
    at: NDArray[np.float64],
    tolerance: float,
) -> None:
    left, right = axes
    left.axhspan(-tolerance, tolerance, color=_BAND, zorder=0, linewidth=0)
    left.axhline(0, color="black", linewidth=0.8, zorder=1)
    left.plot(range(len(here)), here, linestyle="none", marker="o", color=_COLOURS[0])
    sizes = np.abs(at)
    right.axhspan(0, tolerance, color=_BAND, zorder=0, linewidth=0)
    for values, color, marker in (
        (sizes.max(axis=1), _COLOURS[1], "v"),
        (np.median(sizes, axis=1), _COLOURS[2], "^"),
    ):
        right.plot(regime.steps, values, color=color, marker=marker, markersize=3)
    right.axvline(regime.num_steps, color=drawing.GREY, linestyle=drawing.DASHES, linewidth=1)
    if regime.needed is not None and not regime.reached:
        right.axvline(regime.needed, color=drawing.GREY, linestyle=drawing.DOTS, linewidth=1)
    right.set_ylim(bottom=0)
    if len(regime.steps) > 1:
        from matplotlib.ticker import EngFormatter

        drawing.plain_log(right.xaxis)
        right.xaxis.set_major_formatter(EngFormatter(sep=""))


def _name_coordinates(axis: Axes, names: tuple[str, ...]) -> None:
    if len(names) <= _FEW:
        axis.set_xticks(range(len(names)), names)
    axis.set_xlim(-0.5, len(names) - 0.5)


def _regime_legend(figure: Figure, regime: Regime) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries = {
        "each coordinate": Line2D([], [], linestyle="none", marker="o", color=_COLOURS[0]),
        "worst": Line2D([], [], marker="v", color=_COLOURS[1]),
        "median": Line2D([], [], marker="^", color=_COLOURS[2]),
        "this run": Line2D([], [], color=drawing.GREY, linestyle=drawing.DASHES, linewidth=1),
        f"tolerance {regime.tolerance:g}": Patch(color=_BAND),
    }
    if regime.needed is not None and not regime.reached:
        needed = Line2D([], [], color=drawing.GREY, linestyle=drawing.DOTS, linewidth=1)
        entries[f"needed: {regime.needed:,}"] = needed
    figure.legend(entries.values(), entries.keys(), loc="outside right upper", handlelength=1.8)


@drawing.styled
def fclt_figure(check: FcltCheck) -> Figure:
    """Left, Cov(φ(r), φ(s)) against r for some s, with min(r, s) in grey; right, quantiles of φ(1).

    The bars are two standard errors, as they would be for Brownian motion itself.

    Args:
      check: from `fclt_check`.

    Example::

        save_fclt(check, "fclt")
    """
    figure, ((left, right),) = drawing.grid(1, 2)
    chosen = np.unique(np.linspace(0, len(check.grid) - 1, _CURVES).round().astype(int))
    for i, color in zip(chosen, _COLOURS, strict=False):
        _draw_covariance(left, check, int(i), color)
    left.set_title("Covariance of φ(r) and φ(s)")
    left.set_xlabel("r")
    left.set_ylim(bottom=0)
    _draw_quantiles(right, check)
    entries = {f"s = {check.grid[i]:.2g}": i for i in chosen}
    _fclt_legend(figure, list(entries))
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
        elinewidth=1.1,
    )


def _draw_quantiles(axis: Axes, check: FcltCheck) -> None:
    """Quantiles of φ(r)/√r at the last r, all coordinates together, against normal ones."""
    values = np.sort(check.process[-1].ravel()) / np.sqrt(check.grid[-1])
    share = (np.arange(min(_POINTS, values.size)) + 0.5) / min(_POINTS, values.size)
    normal = ndtri(share)
    axis.plot(normal, normal, color=drawing.GREY, linewidth=1, zorder=1)
    observed = np.quantile(values, share)
    axis.plot(normal, observed, "o", color=_COLOURS[0], markersize=2.5)
    axis.set_title(f"Quantiles of φ({check.grid[-1]:.2g}), p = {check.normality[-1]:.2g}")
    axis.set_xlabel("Standard normal")


def _fclt_legend(figure: Figure, names: list[str]) -> None:
    from matplotlib.lines import Line2D

    entries = {
        name: Line2D([], [], linestyle="none", marker="o", color=color)
        for name, color in zip(names, _COLOURS, strict=False)
    }
    entries["Brownian motion"] = Line2D([], [], color=drawing.GREY, linewidth=1)
    figure.legend(entries.values(), entries.keys(), loc="outside right upper", handlelength=1.8)
