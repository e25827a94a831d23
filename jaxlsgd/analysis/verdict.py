"""The chance that each interval of a run holds the truth, given that run, by the law of one method: the judge.

With the judge's estimate x̂ and standard error se, and the truth taken to be N(x̂, se²) given the run, an interval
[lo, hi] of another method holds it with probability

    Φ((hi − x̂)/se) − Φ((lo − x̂)/se).

This is a conditional probability and not the method's coverage: an interval with correct coverage has a
lower chance in some runs and a higher one in others. Their mean over runs is the coverage if the judge's law is right.
It is lower if the judge is not yet efficient, since its error is then correlated with its distance from the other
centre: in the paper's models under P(1/2) (1,000 runs) by −0.20 to −0.30 at 1,000 observations per client, −0.12 to −0.18 at
2,000 and −0.02 to −0.11 at 5,000, and mean chances were 4 to 5, 1 to 3 and 0 to 2 points below the coverage.

There is no verdict on the judge itself, nor on methods made of the same statistics. It is tested: if its interval is
withheld, or the bins of its rounds disagree (`Estimator.doubts`), so are all verdicts. Its coverage was measured in the
range `MEASURED` (`benchmarks.stress` and `benchmarks.verdict`), so verdicts are withheld elsewhere. How often a verdict is wrong is in benchmarks/results/verdict.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import scipy.special
from numpy.typing import NDArray

from jaxlsgd.core.display import plural
from jaxlsgd.core.rows import CellRows

if TYPE_CHECKING:
    from jaxlsgd.core.algorithm import Algorithm
    from jaxlsgd.core.estimator import Estimator
    from jaxlsgd.core.problem import Problem
    from jaxlsgd.schedules import Plan

FloatArray = NDArray[np.float64]
DOUBT = 0.05  # an interval whose chance is this much less than its level is doubted
_NOT_COVERAGE = "A chance is not coverage: intervals that cover at their level have less in some runs and more in others."
IS_JUDGE = "it is the judge, and is not judged by itself"


class Measured(NamedTuple):
    """The range in which verdicts were compared with coverage, both ends included."""

    local_steps: int  # most in a round, E_m
    clients: int  # most
    parameters: int  # most
    observations: tuple[int, int]  # per client, t_T
    alpha: tuple[float, float]  # of step sizes γ_m = γ_0 m^−α


# The range of the cells of `benchmarks.stress` and `benchmarks.verdict`; a test compares them.
MEASURED = Measured(50, 50, 20, (500, 20_000), (0.505, 0.8))


def outside(algorithm: Algorithm, problem: Problem, plan: Plan, judge: Estimator) -> str:
    """Return in words why a run is outside the range in which verdicts were measured; "" if it is inside.

    Args:
      algorithm: declares whether it is within the paper's theory.
      problem: declares its clients, its parameters, and whether it drifts.
      plan: up to the round that is read.
      judge: declares whether its theory holds for any optimiser.
    """
    if not (algorithm.within_theory or judge.any_optimiser):
        return f"{algorithm.name} is outside the theory of {judge.name}, which judges"
    if problem.drifts:
        return "the observations drift, and the verdict was measured on observations that do not"
    fewest, most = MEASURED.observations
    longest, steps, alpha = int(plan.E.max()), plan.num_steps, plan.step_size.alpha
    if longest > MEASURED.local_steps:
        return (
            f"rounds of {longest} local steps are longer than any that the verdict was measured on "
            f"(at most {MEASURED.local_steps})"
        )
    family = alpha is not None and MEASURED.alpha[0] <= alpha <= MEASURED.alpha[1]
    if not (family or judge.any_optimiser):
        low, high = MEASURED.alpha
        return (
            f"steps of {plan.step_size.name} are of another family than those that the verdict was "
            f"measured on (γ_0 m^−α with α from {low:g} to {high:g})"
        )
    if not fewest <= steps <= most:
        return (
            f"{plural(steps, 'observation')} per client are {'fewer' if steps < fewest else 'more'} "
            f"than the verdict was measured on ({fewest:,} to {most:,})"
        )
    if problem.num_clients > MEASURED.clients:
        return (
            f"{problem.num_clients:,} clients are more than the verdict was measured on "
            f"(at most {MEASURED.clients})"
        )
    if problem.dim > MEASURED.parameters:
        return (
            f"{problem.dim:,} parameters are more than the verdict was measured on "
            f"(at most {MEASURED.parameters})"
        )
    return ""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The chance of one method's interval in one run; `print(verdict)` shows it in a line."""

    method: str
    level: float
    chance: FloatArray  # (coordinates,) that the interval holds the truth, given this run
    offset: FloatArray  # (coordinates,) its centre's distance from the judge's, in standard errors
    width: FloatArray  # (coordinates,) its half-width over the judge's standard error times z
    coordinates: tuple[str, ...]
    judge: str
    notes: tuple[str, ...] = ()  # further remarks on the run

    @property
    def doubted(self) -> bool:
        """Whether the mean chance over coordinates is more than `DOUBT` below the level."""
        return bool(np.mean(self.chance) < self.level - DOUBT)

    def __str__(self) -> str:
        worst = int(np.argmin(self.chance))
        text = f"{self.method}: {100 * np.mean(self.chance):.0f} %"
        if len(self.chance) > 1 and self.chance[worst] < self.level - DOUBT:
            text += f" on average, {100 * self.chance[worst]:.0f} % for {self.coordinates[worst]}"
        reasons = [*self._reasons(worst), *self.notes]
        return text + (f": {'; '.join(reasons)}" if reasons else "")

    def _reasons(self, j: int) -> list[str]:
        if self.chance[j] >= self.level - DOUBT:
            return []
        # The chance of the same interval around the judge's estimate.
        centred = 2 * scipy.special.ndtr(self.width[j] * _z(self.level)) - 1
        reasons = []
        if centred < self.level - DOUBT:
            reasons.append(
                f"it is {100 * (1 - self.width[j]):.0f} % shorter than that of {self.judge}"
            )
        if self.chance[j] < centred - DOUBT:
            reasons.append(
                f"its centre is {abs(self.offset[j]):.1f} standard errors from that of {self.judge}"
            )
        return reasons


@dataclasses.dataclass(frozen=True)
class Verdicts:
    """The verdicts on a run, an iterable; `print(verdicts)` shows them, or why they are withheld."""

    given: tuple[Verdict, ...] = ()
    judge: str = ""  # the method by whose law they are; "" if none of the run judges
    level: float = 0.95
    withheld: str = ""  # why none is given, in words
    unjudged: Mapping[str, str] = dataclasses.field(default_factory=dict)  # by method, why not
    notes: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)  # by method

    def __iter__(self) -> Iterator[Verdict]:
        return iter(self.given)

    def __len__(self) -> int:
        return len(self.given)

    def __getitem__(self, method: str) -> Verdict:
        for one in self.given:
            if one.method == method:
                return one
        raise KeyError(method)

    def lines(self) -> list[str]:
        """Return a heading, and a line for each method with a verdict or a note."""
        rest = [
            f"{name}: {'; '.join(remarks)}"
            for name in dict.fromkeys([*self.unjudged, *self.notes])
            if (remarks := self._remarks(name))
        ]
        if not self.judge:
            return ["Notes on these intervals:", *rest] if rest else []
        if self.withheld:
            return [f"No verdict on these intervals, withheld: {self.withheld}.", *rest]
        if not self.given:
            return ["No verdict on these intervals:", *rest]
        heading = f"Chance that these {100 * self.level:g} % intervals hold the truth, given this run, if {self.judge} is right:"
        return [heading, *map(str, self.given), *rest, _NOT_COVERAGE]

    def _remarks(self, name: str) -> list[str]:
        if name in {one.method for one in self.given}:
            return []  # its own line has the notes
        why = "" if self.withheld else self.unjudged.get(name, "")
        return [*([why] if why else []), *self.notes.get(name, ())]

    def __str__(self) -> str:
        return "\n".join(self.lines())


def chances(cell: CellRows, name: str) -> FloatArray:
    """Return the probability that each interval of a method holds the truth, given its run.

    Args:
      cell: rows with a method that judges.
      name: the method to judge.

    Returns:
      (saves, levels, replications, coordinates); NaN without a judge of these coordinates, if the
      verdict is withheld (see `CellRows.withheld`), and at saved rounds with fewer observations than
      it was measured on.
    """
    rows = cell.methods[name]
    withheld = not cell.judge or name in cell.withheld
    if withheld or cell.coordinates[cell.judge] != cell.coordinates[name]:
        return np.full(rows.half_width.shape, np.nan)
    judge = cell.methods[cell.judge]
    center, error = judge.estimate[:, None], judge.scale[:, None]
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        gap = rows.estimate[:, None] - center
        upper, lower = (gap + rows.half_width) / error, (gap - rows.half_width) / error
        found = scipy.special.ndtr(upper) - scipy.special.ndtr(lower)
    known = rows.ok & judge.ok & (np.asarray(cell.steps_at) >= MEASURED.observations[0])[:, None]
    return np.where(known[:, None, :, None], found, np.nan)


def verdicts(
    cell: CellRows, notes: Mapping[str, tuple[str, ...]] | None = None, withheld: str = ""
) -> Verdicts:
    """Return the verdicts on the methods of a run, at its first level and last saved round.

    Args:
      cell: rows of one replication.
      notes: by method, further remarks.
      withheld: why none is given, from `outside`.
    """
    notes = {name: remarks for name, remarks in (notes or {}).items() if remarks}
    level, found, unjudged = cell.levels[0], [], dict(cell.withheld)
    if cell.judge and not withheld and not cell.methods[cell.judge].ok[-1, 0]:
        withheld = f"{cell.judge}, which judges, has no interval"
    for name, rows in cell.methods.items():
        chance = chances(cell, name)[-1, 0, 0]
        if cell.judge and cell.coordinates[name] != cell.coordinates[cell.judge]:
            unjudged.setdefault(
                name, f"it is for other coordinates than {cell.judge}, which judges"
            )
        if np.isnan(chance).any():
            continue
        judge = cell.methods[cell.judge]
        error = judge.scale[-1, 0]
        found.append(
            Verdict(
                name,
                level,
                chance,
                (rows.estimate[-1, 0] - judge.estimate[-1, 0]) / error,
                rows.half_width[-1, 0, 0] / error / _z(level),
                cell.coordinates[name],
                cell.judge,
                notes.get(name, ()),
            )
        )
    return Verdicts(tuple(found), cell.judge, level, withheld, unjudged, notes)


def trusted(chance: FloatArray, levels: Any) -> NDArray[np.bool_]:
    """Return the runs whose mean chance is at most `DOUBT` below the level, (saves, levels, replications)."""
    limit = np.asarray(levels, np.float64)[:, None] - DOUBT
    return np.sum(chance, axis=-1) / max(1, chance.shape[-1]) >= limit


def _z(level: float) -> float:
    return float(-scipy.special.ndtri((1 - level) / 2))


__all__ = [
    *("DOUBT", "IS_JUDGE", "MEASURED", "Measured", "Verdict", "Verdicts"),
    *("chances", "outside", "trusted", "verdicts"),
]
