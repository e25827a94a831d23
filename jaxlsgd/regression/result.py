"""The result of a regression on a table, and how it is made from a finished run."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import scipy.special
from numpy.typing import NDArray

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.display import standard_errors
from jaxlsgd.core.estimator import Estimator, Interval, Side
from jaxlsgd.core.products import times
from jaxlsgd.federation import FederationFit
from jaxlsgd.inference import joint
from jaxlsgd.inference.joint import JointTest
from jaxlsgd.regression import dependence, figures, postestimation, text
from jaxlsgd.regression.design import Design, extra
from jaxlsgd.regression.families import Family
from jaxlsgd.regression.options import NEWTON, Options, no_interval
from jaxlsgd.regression.pilot import Rule, Whitened
from jaxlsgd.regression.postestimation import Details, Named
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

    def multiplier(self, level: float, side: Side = "both") -> float:
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

    readings: list[MethodReading]  # by method; none if Newton's steps alone were made
    finished: list[
        FederationFit
    ]  # of the final messages at each estimate, standardised; none of a stream
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
    reading: MethodReading | None  # None if Newton's steps alone were made
    from_run: bool  # whether the law is the method's, or Student's
    freedom: int = 10**9  # degrees of freedom of Student's law

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

    def multiplier(self, level: float, side: Side = "both") -> float:
        """Return the half-width of an interval in standard errors."""
        checks.level(level)
        checks.choice("side", side, Side)
        if self.from_run and self.reading is not None:
            return self.reading.multiplier(level, side)
        if side != "both" and level <= 0.5:
            raise refusal("level", "be above 0.5 for an interval with one bound", level)
        below = (1 + level) / 2 if side == "both" else level
        return float(scipy.special.stdtrit(self.freedom, below))

    def p_values(self, statistic: FloatArray) -> FloatArray:
        """Return two-sided p-values."""
        if self.from_run and self.reading is not None:
            return self.reading.tail(statistic)
        return 2 * scipy.special.stdtr(self.freedom, -np.abs(statistic))


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
    plan: Design  # which columns were read, for new rows
    family: Family
    details: Details

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
        self, method: str | None = None, level: float | None = None, side: Side = "both"
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
        side: Side = "both",
    ) -> Interval:
        """Return the interval of a function of the coefficients, by the delta method.

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
        named = lambda x: Named(zip(self.names, x, strict=True))  # noqa: E731
        return joint.function(found, g, level, side, named)

    def ratios(self, method: str | None = None, level: float | None = None) -> Any:
        """Return odds ratios (logistic) or rate ratios (poisson, negative_binomial) as a pandas table.

        They are exp of the coefficients; the ends of their intervals are exp of the ends.

        Args:
          method: its name; the first if None.
          level: that of the fit if None.
        """
        return postestimation.ratios(self, method, level)

    def predict(
        self,
        rows: Any,
        method: str | None = None,
        level: float | None = None,
        scale: str = "response",
        interval: str = "mean",
    ) -> Any:
        """Return the mean of new rows with its standard error and interval, in a table of the kind of `rows`.

        Intervals are made for the linear predictor, and their ends transformed, so that those of shares stay
        between 0 and 1. A row in which something is missing has NaN.

        Args:
          rows: a table with the columns that explain, and those of offset and exposure; no response is needed.
          method: its name; the first if None.
          level: that of the fit if None.
          scale: "response", or "linear" for the linear predictor.
          interval: for the "mean" of such rows, or (gaussian) for one new "row", with the residuals' variance
            added.

        Example::

            result.predict({"age": [40, 60], "dose": [1.0, 1.0]})
        """
        return postestimation.predict(self, rows, method, level, scale, interval)

    def margins(self, method: str | None = None, level: float | None = None) -> Any:
        """Return average marginal effects as a pandas table, by the delta method.

        The effect of a column is the mean over the fitted rows of ∂ mean/∂ column. For a column of 0 and 1 it is the
        mean change from 0 to 1, and for a level of a factor that from the reference level. All other columns of the
        design are held: a square or an interaction in a formula counts as a column of its own. In a stream the rows
        are the first ones of the file.

        Args:
          method: its name; the first if None.
          level: that of the fit if None.
        """
        return postestimation.margins(self, method, level)

    def test(
        self,
        hypotheses: Any,
        null: Any = 0.0,
        method: str | None = None,
        level: float | None = None,
    ) -> JointTest:
        """Test by Wald that several coefficients, or combinations of them, have given values at once.

        Args:
          hypotheses: names of coefficients, terms of a formula such as "C(ward)", and combinations such as
            {"age": 1, "dose": -1}; one of them or a list.
          null: the values; one number for all, or one for each.
          method: its name; the first if None.
          level: 1 − the size of the test; that of the fit if None.

        Returns:
          A `JointTest` with the statistic W, about χ² of as many degrees of freedom as there are hypotheses, and
          its p-value (by Hotelling's law, with the degrees of freedom of the variance).
        """
        return postestimation.wald_test(self, hypotheses, null, method, level)

    # The names of statsmodels, for the first method.

    def _series(self, values: Any) -> Any:
        return extra("pandas").Series(values, index=list(self.names))

    @property
    def params(self) -> Any:
        """Coefficients, as a pandas series."""
        return self._series(self.coefficients().estimate)

    @property
    def bse(self) -> Any:
        """Standard errors, as a pandas series."""
        return self._series(self.coefficients().std_error)

    @property
    def tvalues(self) -> Any:
        """Coefficients over standard errors, as a pandas series."""
        return self.params / self.bse

    @property
    def pvalues(self) -> Any:
        """Two-sided p-values, as a pandas series."""
        one = self.coefficients()
        return self._series(one.p_values(one.estimate / one.std_error))

    @property
    def nobs(self) -> int:
        """Rows that were fitted."""
        return sum(self.sizes.values())

    @property
    def deviance(self) -> float:
        """Deviance of the fitted rows; of the first ones in a stream."""
        return self.details.deviance

    @property
    def null_deviance(self) -> float:
        """Deviance of the intercept alone."""
        return self.details.null_deviance

    @property
    def pseudo_r2(self) -> float:
        """1 − log-likelihood over that of the intercept alone (McFadden); 1 − a ratio of deviances without one."""
        return self.details.pseudo_r2

    def cov_params(self) -> Any:
        """Return the covariance matrix of the coefficients as a pandas table."""
        names = list(self.names)
        return extra("pandas").DataFrame(self.coefficients().covariance, names, names)

    def conf_int(self, alpha: float | None = None) -> Any:
        """Return the intervals as a pandas table with columns 0 and 1, at level 1 − alpha."""
        level = None if alpha is None else 1 - checks.level(alpha, "alpha")
        _, lower, upper = self.interval(level=level)
        return extra("pandas").DataFrame({0: lower, 1: upper}, index=list(self.names))

    def summary(self) -> str:
        """Return what `print` shows."""
        return str(self)

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

    def to_frame(self, kind: str = "pandas") -> Any:
        """Return a table by method and coefficient: of "pandas" (as its index), "polars" or "arrow"."""
        rows = self.rows()
        columns = {key: [row[key] for row in rows] for key in rows[0]}
        found = postestimation.as_kind(columns, kind)
        return found.set_index(["method", "coefficient"]) if kind == "pandas" else found

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
    part: bool = False,
) -> TableFit:
    """Make the result of a run.

    Args:
      plan: what was read.
      options: of the fit.
      space: coordinates of the run.
      found: the run.
      dropped: rows left out.
      remarks: on the table, in words.
      part: whether `space` has the first rows of a stream, and not all.
    """
    rows, rule = space.rows, found.rule
    if found.readings:
        pairs = itertools.zip_longest(found.readings, found.finished)
        methods = {
            one.method.name: _coefficients(space, options, one, sample, found.sizes)
            for one, sample in pairs
        }
        theta, left = space.W @ found.readings[0].estimate, np.zeros(len(plan.names))
        if found.finished:
            left = rows.coordinates.back @ (found.finished[0].estimate - theta)
    else:
        (alone,) = found.finished
        theta, left = np.asarray(alone.estimate), np.zeros(len(plan.names))
        V = _on_table(space, alone.covariance)
        given = (rows.coordinates.coefficients(theta), V, np.zeros_like(V), None, False)
        methods = {NEWTON: Coefficients(NEWTON, *given, int(alone.df))}
    first = next(iter(methods.values()))
    _check_run(options, methods, left, part)
    if options.clients == "sampled":
        remarks = [*remarks, *found.finished[0].notes]
    about_rows = postestimation.details(plan, options, space, theta, part)
    if not part and options.target == "population":
        influence = _influence(space, theta)
        remarks = [*remarks, *dependence.remarks(space, influence, first, plan.names, options)]
    about = {
        "response": plan.response,
        "client": plan.client,
        "family": options.family.name,
        "loss": options.family.describe(space.objective.tuning, rows.coordinates.y_scale),
        "target": options.target,
        "rows": options.rows,
        "variance": options.variance,
        "clients": options.clients,
        "freedom": first.freedom,
        "weights": options.weights,
        "row_weights": plan.row_weights,
        "offset": plan.offset,
        "exposure": plan.exposure,
        "ridge": options.ridge,
        "share": options.share,
    }
    used = Communication(found.rounds, rule.E, found.passes, rule.eta, rule.bound, space.exchanges)
    warnings = (*_run_warnings(options, found, first, left), *remarks)
    along, sizes = tuple(found.along), dict(zip(rows.labels, found.sizes.tolist(), strict=True))
    return TableFit(
        plan.names,
        methods,
        about,
        sizes,
        dropped,
        options.level,
        used,
        warnings,
        along,
        plan,
        options.family,
        about_rows,
    )


def _influence(space: Whitened, theta: FloatArray) -> FloatArray:
    """Return (n, d) how much each row moves each coefficient, on the scale of the table, up to its sign."""
    rows = space.rows
    share = (rows.p / rows.sizes)[rows.client]
    scores = share[:, None] * space.derivatives(theta).scores()
    return times(scores, np.linalg.solve(space.G, rows.coordinates.back.T))


def _on_table(space: Whitened, covariance: FloatArray) -> FloatArray:
    """Return a covariance of standardised coefficients on the scale of the table."""
    back = space.rows.coordinates.back
    return back @ covariance @ back.T


def _coefficients(
    space: Whitened,
    options: Options,
    reading: MethodReading,
    sample: FederationFit | None,
    sizes: NDArray[np.int64],
) -> Coefficients:
    """Return estimate and covariance of the table's coefficients.

    For the population the run's own covariance and the sample's add up. If each row was met once, the chance in
    the sample is the run's, and for these rows alone there is no other.
    """
    ours = space.covariance(reading.matrix)
    from_run = options.fresh or options.target == "sample"
    total, freedom = ours, max(int(sizes.sum()) - len(ours), 1)
    if sample is not None and not from_run:
        total, freedom = ours + _on_table(space, sample.covariance), int(sample.df)
    estimate = space.coefficients(reading.estimate)
    return Coefficients(reading.method.name, estimate, total, ours, reading, from_run, freedom)


def _check_run(
    options: Options, methods: dict[str, Coefficients], left: FloatArray, stream: bool
) -> None:
    """Refuse a run without intervals, or whose estimate is so far from the minimiser that its intervals are wrong."""
    for name, one in methods.items():
        if not (np.isfinite(one.std_error).all() and np.isfinite(one.estimate).all()):
            notes = one.reading.notes if one.reading is not None else ()
            reason = notes[0].removeprefix("withheld: ") if notes else "its variance is not finite"
            raise no_interval(name, reason, options, stream)
    first = next(iter(methods.values()))
    far = float(np.max(np.abs(left) / first.std_error))
    if far > (4.0 if options.target == "sample" else 2.0 if options.fresh else 1.0):
        reason = f"its estimate is {standard_errors(far)} from the minimiser of these rows"
        raise no_interval(first.method, reason, options, stream)


def _run_warnings(
    options: Options, found: Finished, first: Coefficients, left: FloatArray
) -> list[str]:
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
    far = float(np.max(np.abs(left) / first.std_error))
    if options.target == "population" and far > (1.0 if options.fresh else 0.25):
        notes.append(
            f"the estimate is up to {standard_errors(far)} from the minimiser of these rows: "
            "the run has not settled; raise max_passes or lower local_steps"
        )
    for reading in found.readings:
        notes += [f"{reading.method.name}: {note}" for note in reading.notes]
    return notes
