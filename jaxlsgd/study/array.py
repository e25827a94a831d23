"""Parts of a study for array jobs: which tiles each part runs. `store.collect` makes one study of all parts.

A part needs no communication with the others, so any scheduler can run them: `--part 3/20` with its array index.
"""

from __future__ import annotations

import dataclasses
import heapq
import re
from typing import TYPE_CHECKING, Self

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
        if not 1 <= self.number <= self.count <= MOST_PARTS:
            rule = f"be a number from 1 to the count of parts, at most {MOST_PARTS}"
            raise refusal("part", rule, str(self))

    @classmethod
    def read(cls, text: str) -> Self:
        """Return the part that "3/20" names."""
        found = re.fullmatch(r"\s*(\d{1,9})\s*/\s*(\d{1,9})\s*", text)
        if found is None:
            raise refusal("part", "be a part and the count of parts, such as 3/20", text)
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def folder(self) -> str:
        """Name of the directory of the part in that of the study."""
        width = max(2, len(str(self.count)))
        return f"part-{self.number:0{width}d}-of-{self.count:0{width}d}"

    def tiles(self, study: Study) -> dict[str, set[int]]:
        """Return the tiles of this part: the first replications, by cell.

        Cells with the same draws stay together if there are enough tiles for all parts. Each group of tiles goes to the
        part with the least work so far.
        """
        groups: dict[object, list[CellSpec]] = {}
        for cell in study.cells:
            groups.setdefault(draws_of(cell), []).append(cell)
        firsts = range(0, study.replications, study.tile_size)
        units = list(groups.values())
        if len(units) * len(firsts) < self.count:
            units = [[cell] for cell in study.cells]
        load = [(0, number) for number in range(1, self.count + 1)]
        mine: dict[str, set[int]] = {cell.id: set() for cell in study.cells}
        for first in firsts:
            for unit in units:
                done, number = load[0]
                work = sum(cell.num_steps * cell.problem.fact("num_clients") for cell in unit)
                heapq.heapreplace(load, (done + work, number))
                if number == self.number:
                    for cell in unit:
                        mine[cell.id].add(first)
        return mine
