"""Figures of a fit: coefficients by method, and one of them along the rounds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.display import COLOURS, MARKERS, colour_numbers, save_figure, self_shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from jaxlsgd.regression.result import TableFit

_GREY = "#808080"


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'jaxlsgd[plots]'") from error
    return self_shown(Figure((width, height), layout="constrained"))


def _saved(figure: Figure, path: Any) -> Figure:
    if path is not None:
        save_figure(figure, Path(path), dpi=200)
    return figure


def _about(fit: TableFit) -> str:
    of_rows = fit.about["target"] == "sample"
    return "minimiser of these rows" if of_rows else "population"


def forest(fit: TableFit, path: Any = None) -> Figure:
    """Plot every coefficient over its standard error with its interval, by method, without the intercept.

    Coefficients of columns in different units share an axis only in standard errors. The values themselves
    stand at the right.

    Args:
      fit: what is drawn.
      path: where to save it, by its ending; not saved if None.
    """
    shown = [j for j, name in enumerate(fit.names) if name != "Intercept"] or [0]
    figure = _figure(6.4, 1.1 + 0.34 * len(shown))
    axes = figure.subplots()
    unit = fit.coefficients().std_error
    places = np.arange(len(shown))[::-1]
    looks = colour_numbers(list(fit.methods))
    for i, name in enumerate(fit.methods):
        estimate, lower, upper = (np.asarray(part)[shown] for part in fit.interval(name))
        size = unit[shown]
        shift = 0.16 * ((len(fit.methods) - 1) / 2 - i)
        axes.errorbar(
            estimate / size,
            places + shift,
            xerr=[(estimate - lower) / size, (upper - estimate) / size],
            fmt=MARKERS[looks[i] % len(MARKERS)],
            color=COLOURS[looks[i] % len(COLOURS)],
            markersize=4.5,
            linewidth=1.4,
            capsize=2,
            label=name,
        )
    axes.axvline(0, color=_GREY, linewidth=0.8)
    axes.set_yticks(places, [fit.names[j] for j in shown])
    axes.set_ylim(-0.6, len(shown) - 0.4)
    axes.set_xlabel(
        f"coefficient in standard errors, {100 * fit.level:g} % intervals ({_about(fit)})"
    )
    _values_at_the_right(axes, fit, shown, places)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="#E6E6E6", linewidth=0.6)
    axes.set_axisbelow(True)
    if len(fit.methods) > 1:
        figure.legend(loc="outside lower center", ncols=len(fit.methods), frameon=False)
    return _saved(figure, path)


def _values_at_the_right(axes: Any, fit: TableFit, shown: list[int], places: Any) -> None:
    estimate, lower, upper = fit.interval()
    texts = [f"{estimate[j]:.3g} [{lower[j]:.3g}, {upper[j]:.3g}]" for j in shown]
    texts = [text.replace("-", "−") for text in texts]  # as along the axes
    right = axes.secondary_yaxis("right")
    right.set_yticks(places, texts)
    right.tick_params(length=0, labelsize=8)
    right.spines["right"].set_visible(False)


def along(fit: TableFit, name: str, path: Any = None) -> Figure:
    """Plot the first method's estimate of a coefficient during the run, with its band.

    Args:
      fit: what is drawn.
      name: of the coefficient.
      path: where to save it, by its ending; not saved if None.
    """
    checks.choice("name", name, fit.names)
    if not fit.along:
        raise refusal("methods", "have one for a path along rounds", (), code="missing")
    j, found = fit.names.index(name), fit.coefficients()
    rounds = np.array([one.round for one in fit.along])
    estimate = np.array([one.estimate[j] for one in fit.along])
    run = np.array([one.run_error[j] for one in fit.along])
    rest = max(float(found.covariance[j, j] - found.run_covariance[j, j]), 0.0)
    q = found.multiplier(fit.level)
    figure = _figure(5.2, 3.0)
    axes = figure.subplots()
    bands = [(np.sqrt(run**2 + rest), "#56B4E9", f"{100 * fit.level:g} % interval ({_about(fit)})")]
    if rest:
        bands.append((run, "#0072B2", "the run's own part"))
    for half, colour, label in bands:
        low, high = estimate - q * half, estimate + q * half
        axes.fill_between(rounds, low, high, color=colour, alpha=0.3, linewidth=0, label=label)
    axes.plot(rounds, estimate, color="#000000", marker="o", markersize=3, linewidth=1.2)
    axes.set_xlabel("round")
    axes.set_ylabel(name)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper left", ncols=2, frameon=False, fontsize=8.5)
    return _saved(figure, path)
