"""Figures of a study as files: coverage and length by schedule, and along the communication rounds."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlsgd.analysis.measures import LOCAL_SGD
from jaxlsgd.analysis.moments import Row
from jaxlsgd.report import drawing
from jaxlsgd.report.panels import (
    along_rounds,
    by_schedule,
    error_along_rounds,
    first_coordinate,
    grouped,
    settings_of,
    unique,
)
from jaxlsgd.report.tables import cells_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
        paths += drawing.save(draw(), Path(directory) / name)
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
    compared = sorted([*_by_schedule(rows), *errors], key=lambda figure: figure[0])
    yield from ((name, draw) for _, name, draw in compared)
    levels = unique(rows, "level")
    for level in levels:
        suffix = f"_{100 * level:g}" if len(levels) > 1 else ""
        here = [row for row in paths if row["level"] == level]
        for key, group in grouped(here, "problem", "algorithm", "num_steps").items():
            draw = functools.partial(along_rounds, group, _shared(group, warmup))
            yield _rounds_name(*key) + suffix, draw


def _by_schedule(rows: Sequence[Row]) -> Iterable[tuple[int, str, Callable[[], Figure]]]:
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
