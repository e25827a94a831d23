"""Which rows of a study to show, by the names that people know them by."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from jaxlsgd.analysis.moments import Row
from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.rows import CellRows

ALL = "all"
_NAMED = {
    "problems": "problem",
    "schedules": "schedule",
    "methods": "method",
    "levels": "level",
}  # fields and the columns they choose by


@dataclasses.dataclass(frozen=True)
class Selection:
    """Names to keep; an empty field keeps everything.

    Args:
      problems: names of problems.
      schedules: names of schedules.
      methods: names of methods.
      levels: confidence levels.
      coordinate: name of a coordinate, "all", or None for the first of each method.
    """

    problems: Sequence[str] = ()
    schedules: Sequence[str] = ()
    methods: Sequence[str] = ()
    levels: Sequence[float] = ()
    coordinate: str | None = None

    def check(self, cells: Sequence[CellRows]) -> None:
        """Refuses a name that no cell has, and offers the nearest."""
        if not cells:
            return
        known = {
            "problem": _unique(cell.problem for cell in cells),
            "schedule": _unique(cell.schedule for cell in cells),
            "method": _unique(name for cell in cells for name in cell.methods),
        }
        for field, column in _NAMED.items():
            for value in getattr(self, field):
                if column in known:
                    checks.choice(column, value, known[column])
        levels = _unique(level for cell in cells for level in cell.levels)
        for level in self.levels:
            if level not in levels:
                raise refusal("level", f"be one of {', '.join(map(str, levels))}", level)
        if self.coordinate not in (None, ALL):
            names = (name for cell in cells for c in cell.coordinates.values() for name in c)
            checks.choice("coordinate", self.coordinate, _unique(names))

    def cells(self, cells: Iterable[CellRows]) -> list[CellRows]:
        """The cells of the problems."""
        return [cell for cell in cells if not self.problems or cell.problem in self.problems]

    def keeps(self, row: Row, first: str) -> bool:
        """Whether a row is shown, where `first` is the first coordinate of its method."""
        wanted = self.coordinate or first
        return wanted in (ALL, row["coordinate"]) and all(
            not getattr(self, field) or row[column] in getattr(self, field)
            for field, column in _NAMED.items()
        )


def sort_rows(rows: Sequence[Row], column: str | None, descending: bool = False) -> list[Row]:
    """Rows by a column, what is not known last; as they are where there is no column.

    Args:
      rows: rows with the same columns.
      column: the column to sort by.
      descending: whether the largest is first.
    """
    if column is None or not rows:
        return list(rows)
    checks.choice(
        "sort", column, [name for name in rows[0] if not name.endswith(("_low", "_high"))]
    )
    known = [row for row in rows if row[column] is not None]
    unknown = [row for row in rows if row[column] is None]
    return sorted(known, key=lambda row: row[column], reverse=descending) + unknown


def _unique(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))
