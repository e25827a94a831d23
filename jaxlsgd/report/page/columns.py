"""What the figures draw: a cell's measures at its last round and along its rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxlsgd.analysis.measures import summarise
from jaxlsgd.analysis.moments import Row
from jaxlsgd.core.rows import CellRows
from jaxlsgd.report.page.arrays import packed

_LAST = ("coverage", "n_ok", "length", "length_mcse", "numbers_sent", "sent_over_c1")
_PATH = ("coverage", "length", "l2_error", "n_ok")
_EACH = ("coverage", "length", "n_ok")
MOST_PATH = 60_000  # numbers of a kind along the rounds, of the whole study


class Columns:
    """Measures of the first coordinate, as in the tables, one line per cell, method and level.

    Args:
      cells: how many there will be, which decides how many of the saved rounds are drawn.
    """

    def __init__(self, cells: int) -> None:
        self.most_saves = max(2, MOST_PATH // max(1, cells) // 5)
        self.rows: list[Row] = []
        self.path: list[Row] = []
        self.each: list[Row] = []

    def add(self, cell: CellRows) -> dict[str, Any]:
        """Takes a cell in; returns what the page must know of its saved rounds."""
        rows = summarise(cell)
        names = {name: labels[0] for name, labels in cell.coordinates.items()}
        first = [row for row in rows if row["coordinate"] == names[row["method"]]]
        last = cell.save_at[-1]
        saves = _thinned(cell.save_at, self.most_saves)
        self.rows += [row for row in first if row["save_round"] == last]
        self.each += [row for row in rows if row["save_round"] == last and _judged(row, cell)]
        order = _ordered(cell, first)
        self.path += [row for row in order if len(saves) > 1 and row["save_round"] in saves]
        return {"saves": saves if len(saves) > 1 else []}

    def plain(self) -> dict[str, Any]:
        """The columns as JSON data."""
        return {
            "last": {name: _column(self.rows, name, "<f8") for name in _LAST},
            "path": {name: _column(self.path, name) for name in _PATH},
            "each": {name: _column(self.each, name) for name in _EACH},
        }


def _column(rows: Sequence[Row], name: str, kind: str = "<f4") -> dict[str, str]:
    return packed(np.array([row[name] for row in rows], object), kind)


def _judged(row: Row, cell: CellRows) -> bool:
    return row["level"] == cell.levels[0]


def _ordered(cell: CellRows, rows: Sequence[Row]) -> list[Row]:
    """Methods, then levels, then rounds, so that a line is a run of numbers."""
    methods = list(cell.methods)
    return sorted(
        rows,
        key=lambda row: (
            methods.index(row["method"]),
            cell.levels.index(row["level"]),
            row["save_round"],
        ),
    )


def _thinned(saves: Sequence[int], most: int) -> list[int]:
    """At most so many of the saved rounds, spread evenly, the last among them."""
    if len(saves) <= most:
        return list(saves)
    chosen = np.unique(np.linspace(0, len(saves) - 1, most).round().astype(int))
    return [saves[i] for i in chosen]
