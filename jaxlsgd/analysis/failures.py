"""Failed replications of a cell: how many, why, and which."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxlsgd.core.causes import FAILURES, Cause
from jaxlsgd.core.display import plural
from jaxlsgd.core.rows import CellRows, MethodRows

WARN_ABOVE = 0.01  # of a cell's replications
_NAMED = 10  # cells that a warning names


class Failure(NamedTuple):
    """Replications of a method that failed for the same cause, at the last saved round."""

    method: str
    cause: Cause
    replications: tuple[int, ...]


def failures(cell: CellRows) -> list[Failure]:
    """Return all failures of a cell at its last saved round, by method and cause."""
    found = []
    for name, rows in cell.methods.items():
        cause = failed_causes(rows, -1)
        for one in FAILURES:
            if which := np.flatnonzero(cause == one).tolist():
                found.append(Failure(name, one, tuple(which)))
    return found


def failed_causes(rows: MethodRows, save: int) -> np.ndarray:
    """Return the cause of each failure, (replications,), and `COMPLETED` for the others."""
    cause = np.where(rows.ok[save], Cause.COMPLETED, rows.cause[save])
    without = ~rows.ok[save] & (cause <= Cause.FLOORED)  # contradictory rows of a file
    return np.where(without, Cause.NON_FINITE, cause)


def counts(rows: MethodRows, save: int) -> dict[Cause, int]:
    """Count the failures by cause."""
    cause = failed_causes(rows, save)
    return {one: int((cause == one).sum()) for one in FAILURES}


def why(counts: Mapping[Cause, int]) -> str:
    """Return causes with their numbers: '12 exploded, 3 not finite'.

    Example:
      >>> why({Cause.EXPLODED: 12, Cause.NON_FINITE: 0})
      '12 exploded'
    """
    return ", ".join(f"{count:,} {cause.text}" for cause, count in counts.items() if count)


def summary(cell: CellRows) -> str:
    """Return 'plug_in: 12 of 64 failed (12 exploded); ...', or "" if none failed at the last round."""
    parts = []
    for name, rows in cell.methods.items():
        found = counts(rows, -1)
        if total := sum(found.values()):
            parts.append(f"{name}: {total:,} of {cell.replications:,} failed ({why(found)})")
    return "; ".join(parts)


def same_replications(cell: CellRows, save: int) -> bool:
    """Return whether all methods completed in the same replications."""
    first, *others = (rows.ok[save] for rows in cell.methods.values())
    return all(np.array_equal(first, other) for other in others)


def ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text, with ranges for consecutive ones.

    Example:
      >>> ranges([0, 1, 2, 7, 9, 10])
      '0-2, 7, 9, 10'
    """
    groups: list[list[int]] = []
    for number in numbers:
        if groups and number == groups[-1][-1] + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    texts = [f"{g[0]}-{g[-1]}" if len(g) > 2 else ", ".join(map(str, g)) for g in groups]
    return ", ".join(texts)


class Tally:
    """Counts the failed replications of many cells, tile by tile; one that fails under any method counts once."""

    def __init__(self) -> None:
        self.failed: dict[str, collections.Counter[Cause]] = {}  # by cell
        self.replications: collections.Counter[str] = collections.Counter()  # by cell

    def add(self, cell: str, rows: Mapping[str, MethodRows], keep: int) -> None:
        """Add the first `keep` replications of a tile, at their last saved round."""
        causes = np.max([failed_causes(one, -1) for one in rows.values()], axis=0)[:keep]
        count = self.failed.setdefault(cell, collections.Counter())
        count.update(Cause(cause) for cause in causes.tolist() if cause in FAILURES)
        self.replications[cell] += len(causes)

    def total(self) -> str:
        """Return '12 of 640 replications failed (12 exploded)', or "" if none did."""
        every = sum(self.failed.values(), collections.Counter())
        if not every:
            return ""
        of = plural(self.replications.total(), "replication")
        return f"{every.total():,} of {of} failed ({why(every)})"

    def warning(self, directory: str) -> str:
        """Return a warning with the cells in which more than 1 % failed, or "" if there is none."""
        named = [
            f"{cell} ({count.total():,} of {self.replications[cell]:,}: {why(count)})"
            for cell, count in self.failed.items()
            if count.total() > WARN_ABOVE * self.replications[cell]
        ]
        if not named:
            return ""
        more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
        return (
            f"warning: more than {100 * WARN_ABOVE:g} % of the replications failed in "
            f"{plural(len(named), 'cell')}: {', '.join(named[:_NAMED])}{more}; "
            f"see: jaxlsgd failures {directory}"
        )
