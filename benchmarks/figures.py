"""Figures of the results, in the house style."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxlsgd.report.style import matplotlib, plain_log, styled

INK, RIVAL, FLOOR, GREY = "#0072B2", "#E69F00", "#009E73", "#808080"
JOBS = {"NumPy": RIVAL, "engine": INK, "drawing": FLOOR}
LABELS = {"NumPy": "NumPy", "engine": "engine", "drawing": "drawing the same numbers alone"}

Times = Mapping[str, Mapping[str, Sequence[float]]]  # by case and job


@styled
def throughput(raw: Mapping[str, Any], path: Path) -> None:
    """Draw rates of NumPy, the engine and its floor, with the engine's lead over NumPy."""
    figure, axis = new_figure(6.4, 3.0)
    sizes, times = raw["sizes"], raw["seconds"]
    work = sizes["replications"] * sizes["num_steps"] * 10 / 1e6
    for i, (job, color) in enumerate(JOBS.items()):
        heights = [work / statistics.median(each[job]) for each in times.values()]
        places = np.arange(len(times)) + (i - 1) * 0.27
        axis.bar(places, heights, 0.25, color=color, label=LABELS[job])
        if job == "engine":
            gains = [_paired(each["NumPy"], each["engine"]) for each in times.values()]
            for x, height, gain in zip(places, heights, gains, strict=True):
                axis.annotate(f"{gain:.1f}×", (x, height), ha="center", va="bottom", fontsize=8)
    axis.set_xticks(range(len(times)), list(times))
    axis.set_ylabel("million client-steps per second")
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3)
    save(figure, path)


@styled
def scaling(raw: Mapping[str, Any], path: Path) -> None:
    """Draw time against every size on logarithmic axes, beside a line of slope 1."""
    axes_of = {name: each for name, each in raw.items() if name != "bytes"}
    lines = -(-len(axes_of) // 3)
    figure, axes = new_figure(7.5, 2.4 * lines, min(3, len(axes_of)), lines)
    flat = np.ravel(axes)
    for axis, (name, times) in zip(flat, axes_of.items(), strict=False):
        sizes = np.array([int(size.lstrip("C")) for size in times], float)
        values = np.array([statistics.median(each) for each in times.values()])
        axis.loglog(sizes, values, "o-", color=INK)
        if name != "local steps E":
            axis.loglog(sizes, values[-1] * sizes / sizes[-1], color=GREY, linewidth=0.8)
        axis.set_xlabel(name)
        plain_log(axis.yaxis)
        axis.set_xticks(sizes, [f"{size:,g}" for size in sizes], minor=False)
        axis.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    for axis in flat[len(axes_of) :]:
        axis.set_visible(False)
    for axis in flat[::3]:
        axis.set_ylabel("seconds")
    save(figure, path)


@styled
def methods(raw: Mapping[str, Any], path: Path) -> None:
    """Draw the price of every method over random scaling's diagonal mode."""
    times: Times = raw["seconds"]
    names = list(next(iter(times.values())))
    figure, axis = new_figure(6.4, 0.42 * len(names) + 1.1)
    colours = (INK, FLOOR, RIVAL, GREY)
    for i, (case, each) in enumerate(times.items()):
        prices = [_paired(each[name], each[names[0]]) for name in names]
        places = np.arange(len(names)) + (i - 1.5) * 0.2
        axis.barh(places, prices, 0.18, color=colours[i % len(colours)], label=case)
    axis.axvline(1.0, color=GREY, linewidth=0.8)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.grid(visible=False)
    axis.set_xlabel("time over random scaling, diagonal")
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(figure, path)


DRAWN = {"throughput": throughput, "scaling": scaling, "methods": methods}


def draw(results: Mapping[str, Any], directory: Path) -> list[Path]:
    """Draw what the results hold, and return the files."""
    found = []
    for name, function in DRAWN.items():
        if name in results:
            path = directory / f"{name}.png"
            function(results[name]["raw"], path)
            found.append(path)
    return found


def _paired(above: Sequence[float], below: Sequence[float]) -> float:
    return statistics.median(np.divide(above, below).tolist())


def new_figure(width: float, height: float, columns: int = 1, lines: int = 1) -> tuple[Any, Any]:
    matplotlib().use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(lines, columns, figsize=(width, height), layout="constrained")


def save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    # No date or version in the file, so that equal results make equal files.
    figure.savefig(path, metadata={"Software": None})
    plt.close(figure)
