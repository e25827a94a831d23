"""How many replications failed, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from jaxlsgd.core.causes import FAILURES
from jaxlsgd.core.rows import CellRows


class Failures:
    """Counts the replications of all cells that failed at the last round, by cause and method."""

    def __init__(self) -> None:
        self._runs = self._failed = self._cells = 0
        self._causes: dict[str, Counter[str]] = {}

    def add(self, cell: CellRows) -> None:
        """Takes a cell in."""
        lost = np.zeros(cell.replications, bool)
        for name, rows in cell.methods.items():
            lost |= ~rows.ok[-1]
            counts = {cause.text: int((rows.cause[-1] == cause).sum()) for cause in FAILURES}
            self._causes.setdefault(name, Counter()).update(counts)
        self._runs += lost.size
        self._failed += int(lost.sum())
        self._cells += bool(lost.any())

    def sentences(self, labels: Mapping[str, str]) -> list[str]:
        """In how many runs a method failed, then each method that did, by its label."""
        if not self._runs:
            return []
        if not self._failed:
            return [f"None of {self._runs:,} runs failed."]
        cells = f"{self._cells:,} cell" + ("s" if self._cells > 1 else "")
        lines = [f"In {self._failed:,} of {self._runs:,} runs, in {cells}, a method failed."]
        for name, causes in self._causes.items():
            told = [f"{count:,} {text}" for text, count in causes.items() if count]
            if told:
                lines.append(f"{labels[name]}: {', '.join(told)}")
        return lines
