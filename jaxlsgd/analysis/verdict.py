"""What coverage to expect of each interval of a run, judged by the method that says it can.

Given the run, the truth is about N(x̂, se²) with the judge's estimate and standard error, so an interval
[lo, hi] of another method holds it with probability

    Φ((hi − x̂)/se) − Φ((lo − x̂)/se).

Averaged over the runs of a cell that is the coverage; tests and `benchmarks.stress` compare the two. One run
tells 50 % from 95 %, but not 92 % from 95 %: the truth may lie anywhere within a standard error or two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import scipy.special
from numpy.typing import NDArray

from jaxlsgd.core.rows import CellRows

FloatArray = NDArray[np.float64]
DOUBT = 0.05  # an interval that is expected to cover this much less than its level is doubted


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What to expect of one method's interval in one run; `print(verdict)` says it in a line."""

    method: str
    level: float
    expected: FloatArray  # (coordinates,) probability that the interval holds the truth
    offset: FloatArray  # (coordinates,) its centre's distance from the judge's, in standard errors
    width: FloatArray  # (coordinates,) its half-width over the judge's standard error times z
    coordinates: tuple[str, ...]
    notes: tuple[str, ...] = ()  # what else there is to say of the run

    @property
    def doubted(self) -> bool:
        """Whether the mean over coordinates is expected to miss the level by more than `DOUBT`."""
        return bool(np.mean(self.expected) < self.level - DOUBT)

    def __str__(self) -> str:
        worst = int(np.argmin(self.expected))
        text = f"{self.method}: expect {100 * np.mean(self.expected):.0f} %"
        if len(self.expected) > 1 and self.expected[worst] < self.level - DOUBT:
            text += f" (least {100 * self.expected[worst]:.0f} %, {self.coordinates[worst]})"
        reasons = [*self._reasons(worst), *self.notes]
        return text + (f": {'; '.join(reasons)}" if reasons else "")

    def _reasons(self, j: int) -> list[str]:
        if self.expected[j] >= self.level - DOUBT:
            return []
        # What the same interval would do around the judge's estimate.
        centred = 2 * scipy.special.ndtr(self.width[j] * _z(self.level)) - 1
        reasons = []
        if centred < self.level - DOUBT:
            reasons.append(
                f"it is {100 * (1 - self.width[j]):.0f} % shorter than the noise asks for"
            )
        if self.expected[j] < centred - DOUBT:
            reasons.append(
                f"its centre is {abs(self.offset[j]):.1f} standard errors from the one-step estimate"
            )
        return reasons


def expected_coverage(cell: CellRows, name: str) -> FloatArray:
    """Probability that each interval of a method holds the truth, given its run.

    Args:
      cell: rows with a method that judges.
      name: the method to judge.

    Returns:
      (saves, levels, replications, coordinates); NaN where there is no judge of these coordinates.
    """
    rows = cell.methods[name]
    if not cell.judge or cell.coordinates[cell.judge] != cell.coordinates[name]:
        return np.full(rows.half_width.shape, np.nan)
    judge = cell.methods[cell.judge]
    center, error = judge.estimate[:, None], judge.scale[:, None]
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        gap = rows.estimate[:, None] - center
        upper, lower = (gap + rows.half_width) / error, (gap - rows.half_width) / error
        found = scipy.special.ndtr(upper) - scipy.special.ndtr(lower)
    return np.where(rows.ok[:, None, :, None] & judge.ok[:, None, :, None], found, np.nan)


def verdicts(cell: CellRows, notes: Mapping[str, tuple[str, ...]] | None = None) -> list[Verdict]:
    """A verdict on every method of a run, at its first level and last saved round.

    Args:
      cell: rows of one replication with a method that judges.
      notes: by method, what else there is to say.

    Returns:
      A `Verdict` for every method that the judge can judge; none where there is no judge.
    """
    found = []
    for name, rows in cell.methods.items():
        expected = expected_coverage(cell, name)[-1, 0, 0]
        if np.isnan(expected).any():
            continue
        judge, level = cell.methods[cell.judge], cell.levels[0]
        error = judge.scale[-1, 0]
        found.append(
            Verdict(
                name,
                level,
                expected,
                (rows.estimate[-1, 0] - judge.estimate[-1, 0]) / error,
                rows.half_width[-1, 0, 0] / error / _z(level),
                cell.coordinates[name],
                (notes or {}).get(name, ()),
            )
        )
    return found


def trusted(expected: FloatArray, levels: Any) -> NDArray[np.bool_]:
    """(saves, levels, replications): runs whose interval is expected to miss its level by little."""
    limit = np.asarray(levels, np.float64)[:, None] - DOUBT
    return np.sum(expected, axis=-1) / max(1, expected.shape[-1]) >= limit


def _z(level: float) -> float:
    return float(-scipy.special.ndtri((1 - level) / 2))


__all__ = ["DOUBT", "Verdict", "expected_coverage", "trusted", "verdicts"]
