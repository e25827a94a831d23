"""The result of a regression on a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.special
from numpy.typing import NDArray

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.estimator import SIDES, Interval
from jaxlsgd.inference import joint
from jaxlsgd.regression.design import Design
from jaxlsgd.regression.in_memory import Along, Finished, Reading, Whitened
from jaxlsgd.regression.options import Options

FloatArray = NDArray[np.floating[Any]]


@dataclasses.dataclass(frozen=True)
class Coefficients:
    """What one method says of the coefficients, on the scale of the table."""

    method: str
    estimate: FloatArray  # (d,)
    covariance: FloatArray  # (d, d) that intervals are made of
    run_covariance: FloatArray  # (d, d) what the run has to do with it
    reading: Reading
    from_run: bool  # whether the law is the method's, or normal

    @property
    def std_error(self) -> FloatArray:
        """What the law's multiple is taken of; for random scaling this is no standard error."""
        return np.sqrt(np.diagonal(self.covariance))

    @property
    def added(self) -> FloatArray:
        """By how much of itself the run has lengthened each standard error."""
        total = np.diagonal(self.covariance)
        rest = np.maximum(total - np.diagonal(self.run_covariance), 0)
        with np.errstate(divide="ignore"):
            return np.sqrt(total / rest) - 1

    def multiplier(self, level: float, side: str = "both") -> float:
        """How many standard errors an interval reaches."""
        checks.level(level)
        checks.choice("side", side, SIDES)
        if self.from_run:
            return self.reading.multiplier(level, side)
        if side != "both" and level <= 0.5:
            raise refusal("level", "be above 0.5 for an interval with one bound", level)
        return float(scipy.special.ndtri((1 + level) / 2 if side == "both" else level))

    def p_values(self, statistic: FloatArray) -> FloatArray:
        """Two-sided."""
        if self.from_run:
            return self.reading.tail(statistic)
        return 2 * scipy.special.ndtr(-np.abs(statistic))


@dataclasses.dataclass(frozen=True)
class Communication:
    """What clients and server exchanged."""

    rounds: int  # exchanges of d numbers
    local_steps: int  # E, between two of them
    passes: int  # over the rows
    eta: float  # η_1, in whitened coordinates
    bound: str  # what decided it
    pilot: int  # exchanges of d² numbers

    @property
    def acf(self) -> float:
        """Rounds over steps; 1 for an exchange a step."""
        return 1 / self.local_steps


@dataclasses.dataclass(frozen=True, eq=False)
class TableFit:
    """Named coefficients with intervals; `print` shows them."""

    names: tuple[str, ...]
    methods: dict[str, Coefficients]
    about: dict[str, Any]  # response, client, family, target, variance, weights, ridge, loss
    sizes: dict[str, int]  # rows by client
    dropped: int
    level: float
    communication: Communication
    warnings: tuple[str, ...]
    along: tuple[Along, ...]

    def coefficients(self, method: str | None = None) -> Coefficients:
        """What a method says; the first if None."""
        name = next(iter(self.methods)) if method is None else method
        checks.choice("method", name, tuple(self.methods))
        return self.methods[name]

    @property
    def estimate(self) -> dict[str, float]:
        """Coefficients by name, of the first method."""
        return dict(zip(self.names, self.coefficients().estimate.tolist(), strict=True))

    def interval(
        self, method: str | None = None, level: float | None = None, side: str = "both"
    ) -> Interval:
        """Intervals of all coefficients.

        Args:
          method: its name; the first if None.
          level: that of the fit if None.
          side: "both", or the only bound that is finite: "lower" or "upper".
        """
        found = self.coefficients(method)
        half = found.multiplier(self.level if level is None else level, side) * found.std_error
        return Interval.around(found.estimate, half, side)

    def function(
        self,
        g: Callable[[dict[str, Any]], Any],
        method: str | None = None,
        level: float | None = None,
        side: str = "both",
    ) -> Interval:
        """Interval for a function of the coefficients, by the delta method.

        Args:
          g: `{name: coefficient} → number or vector`, differentiable by JAX.
          method: its name; the first if None.
          level: that of the fit if None.
          side: "both", or the only bound that is finite.

        Example::

            result.function(lambda b: b["age"] / b["dose"])
        """
        one = self.coefficients(method)
        numbers = (np.asarray(part, np.float64) for part in (one.estimate, one.covariance))
        found = joint.Joint(*numbers, one.multiplier, None, one_sided=one.multiplier)
        level = self.level if level is None else level
        named = lambda x: g(dict(zip(self.names, x, strict=True)))  # noqa: E731
        return joint.function(found, named, level, side)

    def rows(self) -> list[dict[str, Any]]:
        """One row per method and coefficient, as in a printed table."""
        found = []
        for name, one in self.methods.items():
            _, lower, upper = self.interval(name)
            statistic = one.estimate / one.std_error
            run = np.sqrt(np.maximum(np.diagonal(one.run_covariance), 0))
            columns = (
                one.estimate,
                one.std_error,
                statistic,
                one.p_values(statistic),
                lower,
                upper,
            )
            for j, (coefficient, *values) in enumerate(zip(self.names, *columns, strict=True)):
                keys = ("estimate", "std_error", "statistic", "p_value", "lower", "upper")
                numbers = dict(zip(keys, map(float, values), strict=True))
                row = {"method": name, "coefficient": coefficient, **numbers}
                found.append({**row, "level": self.level, "run_error": float(run[j])})
        return found

    def to_frame(self) -> Any:
        """A pandas table, indexed by method and coefficient."""
        from jaxlsgd.regression.design import extra

        return extra("pandas").DataFrame(self.rows()).set_index(["method", "coefficient"])

    def to_json(self) -> str:
        """Everything but the path, as JSON."""
        from jaxlsgd.regression import text

        return text.as_json(self)

    def to_csv(self) -> str:
        """The rows, as CSV."""
        from jaxlsgd.regression import text

        return text.as_csv(self)

    def to_latex(self) -> str:
        """A table for a paper, with booktabs."""
        from jaxlsgd.regression import text

        return text.as_latex(self)

    def plot(self, path: Any = None) -> Any:
        """A forest plot of the coefficients by method (needs the extra "plots")."""
        from jaxlsgd.regression import figures

        return figures.forest(self, path)

    def plot_path(self, name: str, path: Any = None) -> Any:
        """One coefficient along the rounds, with its band (needs the extra "plots")."""
        from jaxlsgd.regression import figures

        return figures.along(self, name, path)

    def __str__(self) -> str:
        from jaxlsgd.regression import text

        return text.as_text(self)

    def _repr_html_(self) -> str:
        from jaxlsgd.regression import text

        return text.as_html(self)


_FAR = 0.25  # of a standard error


def assemble(
    plan: Design,
    asked: Options,
    space: Whitened,
    found: Finished,
    exchanges: int,
    dropped: int,
    remarks: list[str],
) -> TableFit:
    """The result of a run.

    Args:
      plan: what was read.
      asked: what was asked for.
      space: coordinates of the run.
      found: the run.
      exchanges: of d² numbers, that the pilot took.
      dropped: rows left out.
      remarks: on the table, in words.
    """
    rows = space.rows
    methods = {
        one.method.name: _coefficients(space, asked, one, sample)
        for one, sample in zip(found.readings, found.samples, strict=True)
    }
    first = next(iter(methods.values()))
    about = {
        "response": plan.response,
        "client": plan.client,
        "family": asked.family.name,
        "loss": asked.family.told(space.loss.tuning, rows.coordinates.y_scale),
        "target": asked.target,
        "rows": asked.rows,
        "variance": asked.variance,
        "weights": asked.weights,
        "ridge": asked.ridge,
        "share": asked.share,
    }
    used = Communication(
        found.plan.num_rounds,
        found.rule.E,
        found.passes,
        found.rule.eta,
        found.rule.bound,
        exchanges,
    )
    told = (*_run_warnings(asked, found, first), *remarks)
    along, sizes = tuple(found.along), dict(zip(rows.labels, found.sizes.tolist(), strict=True))
    return TableFit(plan.names, methods, about, sizes, dropped, asked.level, used, told, along)


def _coefficients(
    space: Whitened, asked: Options, reading: Reading, sample: FloatArray
) -> Coefficients:
    """Estimate and covariance of the table's coefficients.

    For the population the run's own covariance and the sample's add up. Where each row was met once, the
    chance in the sample is the run's, and for these rows alone there is no other.
    """
    ours = space.covariance(reading)
    from_run = asked.fresh or asked.target == "sample"
    total = ours if from_run else ours + sample
    return Coefficients(reading.method.name, space.table(reading), total, ours, reading, from_run)


def _run_warnings(asked: Options, found: Finished, first: Coefficients) -> list[str]:
    """What went otherwise than it should, in words."""
    told = []
    if not asked.fresh and found.share > asked.share:
        told.append(
            f"the run's own variance is {100 * found.share:.2g} % of the sample's after "
            f"{found.passes} passes, where {100 * asked.share:g} % were asked for; raise max_passes"
        )
    if found.slower < 1:
        told.append(
            f"the run diverged with the pilot's steps, and was begun again {1 / found.slower:g} times slower"
        )
    far = np.max(np.abs(found.left) / first.std_error)
    if far > (4.0 if asked.target == "sample" else 1.0 if asked.fresh else _FAR):
        told.append(
            f"the estimate is up to {far:.2g} standard errors from the minimiser of these rows: "
            "the run has not settled; raise max_passes or lower local_steps"
        )
    for reading in found.readings:
        told += [f"{reading.method.name}: {note}" for note in reading.notes]
    return told
