"""Paired differences of every cell and method from the first of its setting."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxlsgd.analysis.moments import Row
from jaxlsgd.analysis.pairs import paired_difference
from jaxlsgd.core.rows import CellRows, MethodRows
from jaxlsgd.report.page.arrays import packed

_COLUMNS = ("coverage_difference", "coverage_difference_mcse", "length_ratio", "length_ratio_mcse")


class Pairs:
    """Differences within a problem, algorithm and horizon, at the first level and coordinate.

    Only the reference of each setting is held in memory, and of it the last round.
    """

    def __init__(self) -> None:
        self._references: dict[tuple[str, str, int], tuple[CellRows, int]] = {}
        self._rows: list[Row] = []
        self._places: list[tuple[int, int, int]] = []

    def add(self, index: int, cell: CellRows, methods: list[str]) -> None:
        """Takes in the cell with this index; the first of a setting is the reference of the others."""
        key = (cell.problem, cell.algorithm, cell.num_steps)
        if key not in self._references:
            self._references[key] = _slim(cell), index
        reference, first = self._references[key]
        (base,) = reference.methods
        for name in cell.methods:
            shared = cell.coordinates[name][0] in reference.coordinates[base]
            if shared and (index, name) != (first, base):
                self._rows.append(paired_difference(cell, name, reference, base))
                self._places.append((index, methods.index(name), first))

    def plain(self) -> dict[str, Any]:
        """The differences as JSON data, with the cell and method that each belongs to."""
        found = {name: packed([row[name] for row in self._rows]) for name in _COLUMNS}
        places = zip(*self._places, strict=True) if self._places else ((), (), ())
        for name, values in zip(("cell", "method", "reference"), places, strict=True):
            found[name] = packed(list(values), "<i4")
        return found


def _slim(cell: CellRows) -> CellRows:
    name, rows = next(iter(cell.methods.items()))
    # Copies: a view would hold all saved rounds.
    arrays = {
        field.name: getattr(rows, field.name)[-1:].copy() for field in dataclasses.fields(rows)
    }
    return dataclasses.replace(cell, methods={name: MethodRows(**arrays)})
