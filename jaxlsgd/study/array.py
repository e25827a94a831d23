"""Parts of a study for array jobs: which tiles each part runs. `store.collect` makes one study of all parts.

A part needs no communication with the others, so any scheduler can run them: `--part 3/20` with its array index.
"""

from __future__ import annotations

import dataclasses
import heapq
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Self

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal
from jaxlsgd.study.cells import CellSpec, draws_of

if TYPE_CHECKING:
    from jaxlsgd.study.study import Study

MOST_PARTS = 100_000
FOLDER = re.compile(r"part-(\d+)-of-(\d+)")  # of a part, in the directory of the study


@dataclasses.dataclass(frozen=True)
class ArrayPart:
    """One of several parts of a study.

    Args:
      number: which part, from 1.
      count: how many parts there are.
    """

    number: int
    count: int

    def __post_init__(self) -> None:
        checks.count("part", self.count, 1, MOST_PARTS)
        checks.count("part", self.number, 1, self.count)

    @classmethod
    def of(cls, value: Any) -> Self:
        """Return the part that "3/20" or (3, 20) names."""
        if isinstance(value, cls):
            return value
        rule = "be a part and the count of parts, such as 3/20"
        if isinstance(value, str):
            found = re.fullmatch(r"\s*(\d{1,9})\s*/\s*(\d{1,9})\s*", value)
            if found is None:
                raise refusal("part", rule, value)
            return cls(int(found[1]), int(found[2]))
        if not isinstance(value, tuple) or len(value) != 2:
            raise refusal("part", rule, value, code="type")
        return cls(*value)

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def folder(self) -> str:
        """Name of the directory of the part in that of the study."""
        width = max(2, len(str(self.count)))
        return f"part-{self.number:0{width}d}-of-{self.count:0{width}d}"

    def tiles(self, study: Study) -> dict[str, set[int]]:
        """Return the tiles of this part: the first replications, by cell."""
        mine: dict[str, set[int]] = {cell.id: set() for cell in study.cells}
        for number, cell, first in dealt(study, self.count):
            if number == self.number:
                mine[cell].add(first)
        return mine


def dealt(study: Study, count: int) -> Iterator[tuple[int, str, int]]:
    """Yield the part, cell and first replication of every tile.

    Cells with the same draws stay together if there are enough tiles for all parts. Each group of tiles goes to the part
    with the least work so far.
    """
    groups: dict[object, list[CellSpec]] = {}
    for cell in study.cells:
        groups.setdefault(draws_of(cell), []).append(cell)
    firsts = range(0, study.replications, study.tile_size)
    units = list(groups.values())
    if len(units) * len(firsts) < count:
        units = [[cell] for cell in study.cells]
    sizes = [sum(cell.num_steps * cell.problem.fact("num_clients") for cell in x) for x in units]
    load = [(0, number) for number in range(1, count + 1)]
    for first in firsts:
        for unit, work in zip(units, sizes, strict=True):
            done, number = load[0]
            heapq.heapreplace(load, (done + work, number))
            for cell in unit:
                yield number, cell.id, first
