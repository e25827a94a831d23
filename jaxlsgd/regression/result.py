"""The result of a regression on a table, and how it is made from a finished run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import scipy.special
from numpy.typing import NDArray

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.estimator import SIDES, Estimator, Interval
from jaxlsgd.inference import joint
from jaxlsgd.regression import figures, text
from jaxlsgd.regression.design import Design, extra
from jaxlsgd.regression.options import Options
from jaxlsgd.regression.pilot import Rule, Whitened
from jaxlsgd.schedules import Plan

FloatArray = NDArray[np.floating[Any]]


class MethodReading(NamedTuple):
    """An estimate, its matrix and its law, in the coordinates of the run."""

    method: Estimator
    estimate: FloatArray  # (d,)
    matrix: FloatArray  # (d, d)
    detail: Any
    plan: Plan
    floored: bool

    def multiplier(self, level: float, side: str = "both") -> float:
        """Return the critical value of a combination: the largest, if those of coordinates differ."""
        return float(np.max(self.method.law.half(level, side, self.plan, self.detail)))

    def tail(self, statistic: FloatArray) -> FloatArray:
        """Return two-sided p-values: the largest, if those of coordinates differ."""
        d = len(self.estimate)
        each = [
            np.max(self.method.law.tail(np.full(d, one), self.plan, self.detail))
            for one in np.ravel(statistic)
        ]
        return np.asarray(each, np.float64).reshape(np.shape(statistic))

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks of the method on the run."""
        found = () if self.method.notes is None else tuple(self.method.notes(self.detail))
        floor = ("a numerical floor acted: the interval is regularised",) if self.floored else ()
        return found + floor


def read(method: Estimator, states: Any, plan: Plan) -> MethodReading:
    """Measure a method's states in float64.

    Args:
      method: one with a matrix.
      states: what its `update` returned.
      plan: the rounds that were run.
    """
    found, matrix = joint.measure_in_float64(method, states, plan)
    matrix = np.asarray(matrix, np.float64)
    detail = jax.tree.map(np.asarray, found.detail)
    estimate = np.asarray(found.estimate, np.float64)
    return MethodReading(
        method, estimate, (matrix + matrix.T) / 2, detail, plan, bool(found.floored)
    )


class Along(NamedTuple):
    """The estimate of the first method during a run, on the scale of the table."""

    round: int
    estimate: FloatArray  # (d,)
    run_error: FloatArray  # (d,) the run's own standard error

    @classmethod
    def at(cls, space: Whitened, reading: MethodReading, round: int) -> Along:
        """Convert what was read after a round."""
        variance = np.diagonal(space.covariance(reading.matrix))
        error = np.sqrt(np.maximum(variance, 0))
        return cls(round, space.coefficients(reading.estimate), error)


class Finished(NamedTuple):
    """A run that has reached its end."""

    readings: list[MethodReading]  # by method
    samples: list[FloatArray]  # by method, the sample's covariance of the table's coefficients
    left: FloatArray  # (d,) Newton's step from the first estimate to the minimiser of the rows
    sizes: NDArray[np.int64]  # (K,) rows that were met
    along: list[Along]
    rounds: int
    passes: int
    rule: Rule
    share: float  # of the sample's variance that the run adds to it, largest, of the first method
    slower: float  # 1, or the factor by which the rule's steps were too long


@dataclasses.dataclass(frozen=True)
class Coefficients:
    """One method's estimate of the coefficients, on the scale of the table."""

    method: str
    estimate: FloatArray  # (d,)
    covariance: FloatArray  # (d, d), for intervals
    run_covariance: FloatArray  # (d, d) the part of it that is due to the run
    reading: MethodReading
    from_run: bool  # whether the law is the method's, or normal

    @property
    def std_error(self) -> FloatArray:
        """Roots of the variances, to be multiplied by `multiplier`; for random scaling no standard errors."""
        return np.sqrt(np.diagonal(self.covariance))

    @property
    def added(self) -> FloatArray:
        """The share by which the run has lengthened each standard error."""
        total = np.diagonal(self.covariance)
        rest = np.maximum(total - np.diagonal(self.run_covariance), 0)
        with np.errstate(divide="ignore"):
            return np.sqrt(total / rest) - 1

    def multiplier(self, level: float, side: str = "both") -> float:
        """Return the half-width of an interval in standard errors."""
        checks.level(level)
        checks.choice("side", side, SIDES)
        if self.from_run:
            return self.reading.multiplier(level, side)
        if side != "both" and level <= 0.5:
            raise refusal("level", "be above 0.5 for an interval with one bound", level)
        return float(scipy.special.ndtri((1 + level) / 2 if side == "both" else level))

    def p_values(self, statistic: FloatArray) -> FloatArray:
        """Return two-sided p-values."""
        if self.from_run:
            return self.reading.tail(statistic)
        return 2 * scipy.special.ndtr(-np.abs(statistic))


@dataclasses.dataclass(frozen=True)
class Communication:
    """Exchanges between clients and server."""

    rounds: int  # exchanges of d numbers
    local_steps: int  # E, between two of them
    passes: int  # over the rows
    eta: float  # η_1, in whitened coordinates
    bound: str  # which bound decided it
    pilot: int  # exchanges of d² numbers

    @property
    def acf(self) -> float:
        """Rounds over steps; 1 for one exchange per step."""
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
        """Return the coefficients by a method; by the first if None."""
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
        """Return intervals of all coefficients.

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
        estimate, covariance = (
            np.asarray(part, np.float64) for part in (one.estimate, one.covariance)
        )
        found = joint.Joint(estimate, covariance, one.multiplier, None, one_sided=one.multiplier)
        level = self.level if level is None else level
        named = lambda x: g(dict(zip(self.names, x, strict=True)))  # noqa: E731
        return joint.function(found, named, level, side)

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per method and coefficient, as in a printed table."""
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
        """Return a pandas table, indexed by method and coefficient."""
        return extra("pandas").DataFrame(self.rows()).set_index(["method", "coefficient"])

    def to_json(self) -> str:
        """Return everything but the path, as JSON."""
        return text.as_json(self)

    def to_csv(self) -> str:
        """Return the rows, as CSV."""
        return text.as_csv(self)

    def to_latex(self) -> str:
        """Return a table for a paper, with booktabs."""
        return text.as_latex(self)

    def plot(self, path: Any = None) -> Any:
        """Plot the coefficients by method (needs the extra "plots")."""
        return figures.forest(self, path)

    def plot_path(self, name: str, path: Any = None) -> Any:
        """Plot one coefficient along the rounds, with its band (needs the extra "plots")."""
        return figures.along(self, name, path)

    def __str__(self) -> str:
        return text.as_text(self)

    def _repr_html_(self) -> str:
        return text.as_html(self)


def assemble(
    plan: Design,
    options: Options,
    space: Whitened,
    found: Finished,
    dropped: int,
    remarks: list[str],
) -> TableFit:
    """Make the result of a run.

    Args:
      plan: what was read.
      options: of the fit.
      space: coordinates of the run.
      found: the run.
      dropped: rows left out.
      remarks: on the table, in words.
    """
    rows, rule = space.rows, found.rule
    methods = {
        one.method.name: _coefficients(space, options, one, sample)
        for one, sample in zip(found.readings, found.samples, strict=True)
    }
    first = next(iter(methods.values()))
    about = {
        "response": plan.response,
        "client": plan.client,
        "family": options.family.name,
        "loss": options.family.describe(space.objective.tuning, rows.coordinates.y_scale),
        "target": options.target,
        "rows": options.rows,
        "variance": options.variance,
        "weights": options.weights,
        "ridge": options.ridge,
        "share": options.share,
    }
    used = Communication(found.rounds, rule.E, found.passes, rule.eta, rule.bound, space.exchanges)
    warnings = (*_run_warnings(options, found, first), *remarks)
    along, sizes = tuple(found.along), dict(zip(rows.labels, found.sizes.tolist(), strict=True))
    return TableFit(
        plan.names, methods, about, sizes, dropped, options.level, used, warnings, along
    )


def _coefficients(
    space: Whitened, options: Options, reading: MethodReading, sample: FloatArray
) -> Coefficients:
    """Return estimate and covariance of the table's coefficients.

    For the population the run's own covariance and the sample's add up. If each row was met once, the chance in
    the sample is the run's, and for these rows alone there is no other.
    """
    ours = space.covariance(reading.matrix)
    from_run = options.fresh or options.target == "sample"
    total = ours if from_run else ours + sample
    estimate = space.coefficients(reading.estimate)
    return Coefficients(reading.method.name, estimate, total, ours, reading, from_run)


def _run_warnings(options: Options, found: Finished, first: Coefficients) -> list[str]:
    """Return what went wrong in a run, in words."""
    notes = []
    if not options.fresh and found.share > options.share:
        notes.append(
            f"the run's own variance is {100 * found.share:.2g} % of the sample's after "
            f"{found.passes} passes, more than {100 * options.share:g} %; raise max_passes"
        )
    if found.slower < 1:
        notes.append(
            f"the run diverged with the pilot's steps, and was begun again {1 / found.slower:g} times slower"
        )
    far = np.max(np.abs(found.left) / first.std_error)
    if far > (4.0 if options.target == "sample" else 1.0 if options.fresh else 0.25):
        notes.append(
            f"the estimate is up to {far:.2g} standard errors from the minimiser of these rows: "
            "the run has not settled; raise max_passes or lower local_steps"
        )
    for reading in found.readings:
        notes += [f"{reading.method.name}: {note}" for note in reading.notes]
    return notes
