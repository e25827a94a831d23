"""Figures of the diagnostics: the horizon of one run, and the functional limit theorem."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import scipy.stats

from jaxlsgd.fclt import FcltCheck
from jaxlsgd.inference import diagnostics
from jaxlsgd.inference.plug_in import PlugInState
from jaxlsgd.report import drawing
from jaxlsgd.schedules import Plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#000000", "#56B4E9", "#7F7F7F")


def save_regime(
    state: PlugInState, plan: Plan, stem: str | Path, tolerance: float = 0.05
) -> list[Path]:
    """Draws what longer and shorter horizons would do to a run; returns the files written.

    Args:
      state: `fit.states["plug_in"][0]`.
      plan: the plan that was run.
      stem: path without suffix; PNG and PDF are written.
      tolerance: drawn as a line.
    """
    return drawing.save(regime_figure(state, plan, tolerance), Path(stem))


@drawing.styled
def regime_figure(state: PlugInState, plan: Plan, tolerance: float = 0.05) -> Figure:
    """Standard-error ratio and start bias by horizon, a line a coordinate; a mark where the run is."""
    horizons = _horizons(plan)
    plans = [plan.schedule.plan(plan.step_size, num_steps=n) for n in horizons]
    found = [diagnostics.figures(state, longer) for longer in plans]
    ratios = 100 * (np.array([inflation for inflation, _ in found]) - 1)
    biases = np.abs(np.array([bias for _, bias in found]))
    here = diagnostics.figures(state, plan)
    figure, axes = drawing.grid(1, 2)
    panels = zip(
        axes[0],
        (ratios, biases),
        (100 * (here[0] - 1), np.abs(here[1])),
        ("Finite-horizon over asymptotic SE, excess (%)", "Bias of the start, in SE"),
        (100 * tolerance, tolerance),
        strict=True,
    )
    for axis, lines, marks, title, limit in panels:
        for j in range(lines.shape[1]):
            colour = _COLOURS[j % len(_COLOURS)]
            axis.plot(horizons, lines[:, j], color=colour, label=f"x[{j}]")
            axis.plot([plan.num_steps], [marks[j]], "o", color=colour)
        axis.axhline(limit, color=drawing.GREY, linestyle=drawing.DASHES, linewidth=1)
        axis.set_xscale("log")
        drawing.plain_log(axis.xaxis)
        axis.set_title(title)
        axis.set_xlabel("Observations per client (dot: this run)")
    if ratios.shape[1] <= len(_COLOURS):
        axes[0][1].legend(loc="upper right")
    return figure


def _horizons(plan: Plan) -> list[int]:
    """A decade around the run's horizon, as far as its schedule reaches."""
    horizons = np.unique(np.geomspace(plan.num_steps / 4, plan.num_steps * 16, 13).astype(int))
    reached = []
    for n in horizons.tolist():
        try:
            plan.schedule.plan(plan.step_size, num_steps=n)
        except ValueError:  # a warm-up that does not fit, or a sequence that ends
            continue
        reached.append(n)
    return reached


def save_fclt(check: FcltCheck, stem: str | Path) -> list[Path]:
    """Draws an `FcltCheck`; returns the files written."""
    return drawing.save(fclt_figure(check), Path(stem))


@drawing.styled
def fclt_figure(check: FcltCheck) -> Figure:
    """Cov(φ(r), φ(s)) against min(r, s), and the quantiles of φ(1) against the normal."""
    figure, axes = drawing.grid(1, 2)
    covariance, quantiles = axes[0]
    for i, j in enumerate(_some(len(check.grid))):
        colour, s = _COLOURS[i], check.grid[j]
        covariance.plot(check.grid, check.expected[j], color=colour, linewidth=0.8, alpha=0.6)
        covariance.errorbar(
            check.grid, check.covariance[j], 2 * check.standard_error[j],
            color=colour, fmt="o", markersize=3, label=f"s = {s:.2f}",
        )  # fmt: skip
    covariance.set_title("Cov(φ(r), φ(s)): points; min(r, s): lines")
    covariance.set_xlabel("r")
    covariance.legend(loc="upper left")
    values = np.sort(check.process[-1].ravel() / np.sqrt(check.grid[-1]))
    normal = scipy.stats.norm.ppf((np.arange(values.size) + 0.5) / values.size)
    quantiles.plot(normal, normal, color=drawing.GREY, linestyle=drawing.DASHES, linewidth=1)
    quantiles.plot(normal, values, ".", markersize=2.5, color=_COLOURS[0])
    quantiles.set_title("Quantiles of φ(1), standardised")
    quantiles.set_xlabel("Standard normal quantile")
    return figure


def _some(points: int) -> Sequence[int]:
    return sorted({round(q * (points - 1)) for q in (0.2, 0.5, 1.0)})
