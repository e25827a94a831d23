"""One run of a federated algorithm with its intervals and tests. Start reading at `fit`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray

from jaxlsgd.analysis.chance import Compared, chances, distances
from jaxlsgd.core import checks
from jaxlsgd.core.algorithm import Algorithm
from jaxlsgd.core.causes import DIVERGED, FAILURES, Cause
from jaxlsgd.core.checks import Dtype, refusal
from jaxlsgd.core.display import Table, p_value, paragraph, plural
from jaxlsgd.core.estimator import Estimator, Interval, Side
from jaxlsgd.core.lazy import later
from jaxlsgd.core.problem import Array, Params, Problem, check_finite, unravel
from jaxlsgd.core.progress import Progress, shown
from jaxlsgd.core.random import check_key
from jaxlsgd.core.rows import MethodRows, Until
from jaxlsgd.inference import joint
from jaxlsgd.runs.cell import LOCAL_SGD, METHODS, Cell, as_tuple, saved_rounds
from jaxlsgd.runs.simulate import SavedRound, only, read_cells
from jaxlsgd.schedules import Plan


@dataclasses.dataclass(frozen=True)
class Test:
    """Tests of x_j = null_j, coordinate by coordinate."""

    __test__ = False  # not a test case for pytest

    null: NDArray[np.float64]
    statistic: NDArray[np.float64]  # (estimate − null)/scale
    p_value: NDArray[np.float64]  # two-sided


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Fit:
    """The result of one run; `print(fit)` shows it as a table."""

    cell: Cell
    rows: dict[str, MethodRows]
    details: dict[str, Any]  # by method, `Measurement.detail` after the last round
    states: dict[str, Any]  # by method, of its statistics after the last round
    until: Until | None = None  # the rule for stopping, if there was one
    budget: Plan | None = None  # the plan that the run could have used, if it had one

    @property
    def stopped(self) -> bool:
        """Return whether the run was sure enough before the end of its plan, or there."""
        if self.until is None:
            return False
        name = self.until.chosen(self.cell.methods, self.cell.levels).name
        _, lower, upper = self.interval(name, self.until.level)
        estimate = self.rows[name].estimate[-1, 0]
        names = self._method(name).coordinates(self.cell.problem)
        return bool(self.until.met(estimate, (upper - lower) / 2, names))

    @property
    def save_at(self) -> tuple[int, ...]:
        """Rounds at which intervals were read."""
        return self.cell.layout.save_at

    @property
    def failures(self) -> dict[str, Cause]:
        """By method, why there is no interval after the last round; empty if all completed."""
        causes = {name: Cause(int(rows.cause[-1, 0])) for name, rows in self.rows.items()}
        return {name: cause for name, cause in causes.items() if cause in FAILURES}

    @property
    def diverged(self) -> bool:
        """Whether the run itself diverged, by some method's estimate; `failures` has other reasons too.

        A run with too few rounds for an interval has not diverged, nor has one of which only a method's
        correction failed.
        """
        return any(cause in DIVERGED for cause in self.failures.values())

    @property
    def estimate(self) -> Params:
        """The centre of the first method's intervals, in the shape of the problem's parameters.

        Of the first method without contrasts: x̂ for `one_step`, which is first unless methods are given. The
        paper's average ȳ_T is the centre of `plug_in`, `random_scaling` and `one_step(center="average")`:
        `estimate_of("plug_in[finite]")`.
        """
        for method in self.cell.methods:
            if not method.contrasts:
                return self.estimate_of(method.name)
        rule = "have one without contrasts for an estimate"
        raise refusal("methods", rule, "only contrasts", code="missing")

    def estimate_of(self, method: str | None = None) -> Params:
        """Return the centre of a method's intervals after the last round, in the shape of the parameters.

        Args:
          method: its name; one for the parameters and not for contrasts; the first of the run if None.
        """
        name = self._known(method)
        if self._method(name).contrasts:
            raise refusal(
                "method", "be for the parameters and not for contrasts", name, code="unsupported"
            )
        return unravel(self.rows[name].estimate[-1, 0], self.cell.problem.init)

    def interval(
        self,
        method: str | None = None,
        level: float | None = None,
        save: int = -1,
        side: Side = "both",
    ) -> Interval:
        """Return the interval of a method at a saved round.

        Args:
          method: its name; the first of the run if None.
          level: one of the run's, the first if None; with one bound any, after the last round.
          save: which saved round.
          side: "both", or the only bound that is finite: "lower" or "upper".
        """
        name, level = self._known(method), self._level(level)
        rows = self.rows[name]
        center = rows.estimate[save, 0]
        if side != "both":
            return Interval.around(center, self._one_sided(name, level, save, side), side)
        if level not in self.cell.levels:
            raise refusal("level", f"be one of {self.cell.levels}", level, code="choice")
        return Interval.around(center, rows.half_width[save, self.cell.levels.index(level), 0])

    def _one_sided(self, method: str, level: float, save: int, side: Side) -> Any:
        if save not in (-1, len(self.save_at) - 1):
            raise refusal(
                "save", "be the last for an interval with one bound", save, code="unsupported"
            )
        half = self._method(method).law.half(level, side, self.cell.plan, self.details[method])
        return half * self.rows[method].scale[-1, 0]

    def function(
        self,
        g: Callable[[Params], Any],
        method: str | None = None,
        level: float | None = None,
        side: Side = "both",
    ) -> Interval:
        """Return an interval for a function of the parameters after the last round, by the delta method.

        Args:
          g: `params → number or vector`, differentiable by JAX.
          method: one with a matrix; the first of the run if None.
          level: of each component by itself; the first of the run if None.
          side: "both", or the only bound that is finite: "lower" or "upper".

        Example::

            result.function(lambda x: x[0] / x[1])
        """
        chosen, level = self._known(method), self._level(level)
        if self._method(chosen).contrasts:
            raise refusal(
                "method", "be for the parameters and not for contrasts", chosen, code="unsupported"
            )
        like = self.cell.problem.init

        return joint.function(self.joint(chosen), g, level, side, lambda x: unravel(x, like))

    def test(self, method: str | None = None, null: Params = 0.0) -> Test:
        """Test x_j = null_j, two-sided, after the last round; a number is the null of all coordinates."""
        estimator = self._method(method)
        rows = self.rows[estimator.name]
        check_finite("null", null)
        # NumPy keeps float64.
        flat = np.concatenate([(), *(np.ravel(leaf) for leaf in jax.tree.leaves(null))])
        (q,) = rows.scale[-1, 0].shape
        if flat.size not in (1, q):
            raise refusal("null", f"be a number or have {q}", flat.size, code="shape")
        null = np.broadcast_to(flat, q)
        gap, scale = rows.estimate[-1, 0] - null, rows.scale[-1, 0]
        # At scale 0 any gap is infinitely many scales, and no gap is none.
        certain = np.where(gap == 0, 0.0, np.copysign(np.inf, gap))
        statistic = np.where(scale == 0, certain, gap / np.where(scale == 0, 1.0, scale))
        p = estimator.law.tail(statistic, self.cell.plan, self.details[estimator.name])
        return Test(np.asarray(null, np.float64), statistic, np.asarray(p, np.float64))

    def joint(self, method: str | None = None) -> joint.Joint:
        """Return average and matrix for `ellipsoid` and `simultaneous` of `inference.joint`."""
        estimator = self._method(method)
        name = estimator.name
        if name in self.failures:
            why = self.failures[name].text
            raise refusal(
                "method", "have an interval to test", name, f" without ({why})", code="data"
            )
        return joint.joint(estimator, self.states[name], self.cell.plan)

    def joint_test(
        self,
        method: str | None = None,
        contrasts: ArrayLike | None = None,
        null: ArrayLike = 0.0,
        level: float | None = None,
    ) -> joint.JointTest:
        """Test Rx* = r after the last round; all coordinates at once without contrasts R.

        The method is the first of the run if None, and so is the level, of which 1 less is the size of the test.
        """
        return joint.joint_test(self.joint(method), contrasts, null, self._level(level))

    def compare(self) -> dict[str, Compared]:
        """Return for each other method how its intervals compare with those of the reference, after the last round.

        The reference is the first method with standard errors and an interval whose theory holds for any optimiser,
        such as `one_step`; without one there is no comparison. Methods without an interval, and those for other
        coordinates, are left out. Chances are of intervals of the first level; None if observations drift, or if the reference's rounds disagree.
        """
        own = _reference(self)
        if own is None:
            return {}
        reference, problem, found = self.rows[own.name], self.cell.problem, {}
        believed = not _why_no_chance(self, own)
        for method in _completed(self):
            alike = method.coordinates(problem) == own.coordinates(problem)
            if alike and method is not own:
                rows = self.rows[method.name]
                chance = chances(rows, reference)[-1, 0, 0] if believed else None
                distance = distances(rows, reference)[-1, 0]
                found[method.name] = Compared(own.name, distance, chance)
        return found

    def _method(self, name: str | None) -> Estimator:
        known = self._known(name)
        return self.cell.with_looks(next(m for m in self.cell.methods if m.name == known))

    def _known(self, method: str | None) -> str:
        """Return the name of a method of the run; of the first if None."""
        name = self.cell.methods[0].name if method is None else method
        if not isinstance(name, str) or name not in self.rows:
            raise refusal("method", f"be one of {', '.join(self.rows)}", name, code="choice")
        return name

    def _level(self, level: float | None) -> float:
        return self.cell.levels[0] if level is None else level

    def __str__(self) -> str:
        return _table(self)

    def __repr__(self) -> str:
        cell = self.cell
        names = [method.name for method in cell.methods]
        return f"Fit({cell.problem!r}, {cell.plan!r}, methods={names})"

    def plot(self, level: float | None = None) -> Any:
        """Return a Matplotlib figure of all intervals by coordinate and method; see `report.figures.intervals`."""
        return later("report.figures", "intervals")(self, level)

    def to_frame(self) -> Any:
        """Return a `pandas.DataFrame` of the last round: estimate, bounds and p-value (of x_j = 0) by method,
        level and coordinate; methods without an interval are left out."""
        lines = [
            (method.name, level, name, *(float(part[j]) for part in interval), float(p[j]))
            for method in _completed(self)
            for p in [self.test(method.name).p_value]
            for level in self.cell.levels
            for interval in [self.interval(method.name, level)]
            for j, name in enumerate(method.coordinates(self.cell.problem))
        ]
        header = ("method", "level", "coordinate", "estimate", "lower", "upper", "p_value")
        return Table("", header, lines).to_frame()

    def _repr_html_(self) -> str:
        return _html(self)


def fit(
    key: Array,
    problem: Problem,
    plan: Plan,
    *,
    methods: Sequence[Estimator] = METHODS,
    levels: float | Sequence[float] = (0.95,),
    save_at: Sequence[int] | None = None,
    dtype: Dtype = "float32",
    algorithm: Algorithm = LOCAL_SGD,
    replication: int = 0,
    until: float | Until | None = None,
    progress: Progress = None,
) -> Fit:
    """Run Local SGD, or another algorithm, once; return the estimate with its intervals and tests.

    Args:
      key: typed root key, as for `simulate`.
      problem: what is estimated.
      plan: how many rounds, of how many steps, of what size.
      methods: interval methods, fed along the path; `one_step()` and `plug_in("finite")` unless given.
      levels: confidence levels, one or several.
      save_at: rounds at which to read the intervals; the last is always read.
      dtype: "float32" or "float64".
      algorithm: from `jaxlsgd.algorithms`; another than Local SGD is outside the theory.
      replication: which replication of `simulate` under the same key this is.
      until: a half-width, or an `Until`: the run ends at the first look at which the intervals are sure enough. The
        plan is then a budget. Looks are at `save_at`; if that is None, 50 from 2 % of the observations on.
      progress: as for `simulate`.

    Returns:
      A `Fit`: `fit.estimate` (the centre of the first method's intervals), `fit.interval("one_step")`, `fit.test("one_step")`, `print(fit)`.

    Example::

        import jax, jaxlsgd

        problem = jaxlsgd.problems.linear(3, 4)
        schedule = jaxlsgd.schedules.power(0.5).with_warmup(0.05)
        plan = schedule.plan(jaxlsgd.schedules.power_decay(0.5), num_steps=2000)
        print(jaxlsgd.fit(jax.random.key(0), problem, plan))
    """
    key = check_key(key)
    checks.count("replication", replication, 0)
    save = saved_rounds(plan, save_at, until)
    cell = Cell(problem, plan, as_tuple(methods), as_tuple(levels), save, dtype, algorithm)
    cell.check_plan()
    rule = cell.check_until(until)
    events = read_cells(key, [cell], replication, 1, shared_draws=False, in_numpy=True)
    readings, saved, done = [], [], 0
    with shown(progress, f"{problem.name or 'problem'}, {plan.name}") as show:
        for event in events:
            if isinstance(event, SavedRound):
                readings.append(event)
                saved.append(event.rows(cell))
                if rule is not None and _is_sure(rule, cell, saved[-1]):
                    break
            elif show is not None:
                done += event.steps
                show(min(1.0, done / cell.layout.steps))
    rows = {name: MethodRows.stacked([one[name] for one in saved]) for name in saved[0]}
    details = {
        name: jax.tree.map(lambda leaf: leaf[0], measured.detail)
        for name, measured in readings[-1].found.items()
    }
    init, last = np.zeros(problem.dim, dtype), readings[-1].states
    states = {m.name: only(m, init, last[m.name]) for m in cell.methods}
    if rule is None:
        return Fit(cell, rows, details, states)
    rounds = cell.layout.save_at[: len(readings)]
    ran = dataclasses.replace(cell, plan=plan.prefix(rounds[-1]), save_at=rounds, looks=cell.clocks)
    return Fit(ran, rows, details, states, rule, plan)


def _is_sure(rule: Until, cell: Cell, rows: dict[str, MethodRows]) -> bool:
    """Return whether the only replication is sure enough at a look."""
    method = rule.chosen(cell.methods, cell.levels)
    found = rows[method.name]
    j = 0 if rule.level is None else cell.levels.index(rule.level)
    names = method.coordinates(cell.problem)
    return bool(rule.met(found.estimate[0], found.half_width[j, 0], names))


def _table(result: Fit) -> str:
    """Return estimate and intervals of every method as text, one row per coordinate."""
    lines = _head(result)
    for method in _completed(result):
        lines += ["", *_method_table(result, method)]
    for part in (_compared(result), _notes(result)):
        lines += ["", part[0], *(f"  {line}" for line in part[1:])] if part else []
    return "\n".join(lines)


def _head(result: Fit) -> list[str]:
    cell = result.cell
    plan = cell.plan
    lines = [
        f"{cell.algorithm.name} on {_problem_name(cell.problem)}: "
        f"{plural(cell.problem.num_clients, 'client')}, schedule "
        f"{plan.name}, T = {plural(plan.num_rounds, 'round')}, "
        f"{plural(plan.num_steps, 'observation')} per client",
    ]
    if result.budget is not None:
        of = f"of {plural(result.budget.num_steps, 'observation')} per client"
        lines.append(
            f"Stopped when it was sure enough, {of}."
            if result.stopped
            else f"Not sure enough at the end {of}."
        )
    if cell.problem.about:
        lines.append(f"Intervals are {cell.problem.about}.")
    if not cell.problem.convex:
        lines.append(
            "Intervals are about the minimum near the estimate: the loss is not known to be convex, so there may be others."
        )
    beyond = [method.name for method in cell.methods if not method.any_optimiser]
    if beyond and not cell.algorithm.within_theory:
        names = " and ".join(beyond)
        lines.append(f"{cell.algorithm.name} is outside the theory of the intervals of {names}.")
    return lines + _failure_lines(result)


def _problem_name(problem: Problem) -> str:
    return problem.name or f"a problem of {plural(problem.dim, 'parameter')}"


def _completed(result: Fit) -> list[Estimator]:
    return [method for method in result.cell.methods if method.name not in result.failures]


def _reference(result: Fit) -> Estimator | None:
    """Return the method with which the others are compared, if there is one."""
    for method in _completed(result):
        scale = result.rows[method.name].scale[-1, 0]
        if method.any_optimiser and method.standard_error and np.all(scale > 0):
            return method
    return None


def _why_no_chance(result: Fit, reference: Estimator) -> str:
    """Return what in a run speaks against its reference; "" if nothing does."""
    if result.cell.problem.drifts:
        return "the observations drift"
    if getattr(result.details[reference.name], "disagrees", False):
        return f"the last rounds of {reference.name} disagree with those before"
    return ""


def _compared(result: Fit) -> list[str]:
    """Return a heading, a line for each method that is compared, and what a chance is; empty if none is compared."""
    own, found = _reference(result), result.compare()
    if own is None or not found:
        return []
    why, names = _why_no_chance(result, own), own.coordinates(result.cell.problem)
    level = 100 * result.cell.levels[0]
    kind = "" if len(names) == 1 else " (means over coordinates, the worst in parentheses)"
    last = (
        f"No chance is given: {why}."
        if why
        else f"A chance is for this run: that the {level:g} % interval contains the true value, if {own.name} is right. "
        "It is not the method's coverage."
    )
    lines = [f"{name}: {_comparison(one, names)}" for name, one in found.items()]
    return [f"Compared with {own.name}{kind}:", *lines, last]


def _comparison(one: Compared, names: Sequence[str]) -> str:
    """Return the numbers of a method, with those of its worst coordinate if there are several."""

    def told(values: NDArray[np.float64], worst: Any, form: str) -> str:
        rest = f" ({names[worst]}: {form.format(values[worst])})" if len(names) > 1 else ""
        return form.format(np.mean(values)) + rest

    far = np.abs(one.distance)
    text = f"centre {told(far, np.argmax(far), '{:.1f}')} standard errors away"
    if one.chance is None:
        return text
    return f"{text}, chance {told(100 * one.chance, np.argmin(one.chance), '{:.0f} %')}"


def _notes(result: Fit) -> list[str]:
    """Return what methods say of their intervals, under a heading; empty if they say nothing."""
    told = {
        method.name: "; ".join(method.notes(result.details[method.name]))
        for method in _completed(result)
        if method.notes is not None
    }
    lines = [f"{name}: {text}" for name, text in told.items() if text]
    return ["Notes on these intervals:", *lines] if lines else []


def _failure_lines(result: Fit) -> list[str]:
    """Return what failed, what may help, and a warning about the methods that did not fail."""
    failures = result.failures

    def why(*causes: Cause) -> str:
        return _reasons(result, {name: c for name, c in failures.items() if c in causes})

    lines = []
    if failed := why(*DIVERGED):
        lines.append(f"The run diverged ({failed}). Try a smaller step size.")
    if failed := why(Cause.CORRECTION):
        lines.append(
            f"A method failed although the path did not explode ({failed}). The path has probably not converged: "
            "try a longer run or a larger step size."
        )
    if failed := why(Cause.UNDEFINED):
        lines.append(f"There is no interval ({failed}).")
    if lines and (rest := [method.name for method in _completed(result)]):
        lines.append(
            f"That {' and '.join(rest)} did not fail does not show that its intervals hold."
        )
    return lines


def _reasons(result: Fit, failures: Mapping[str, Cause]) -> str:
    """Return why methods failed: in their own words if they have no interval, and have words for it."""
    methods = {method.name: method for method in result.cell.methods}

    def why(name: str, cause: Cause) -> str:
        notes = methods[name].notes if cause == Cause.UNDEFINED else None
        return (notes and "; ".join(notes(result.details[name]))) or cause.text

    return "; ".join(f"{name}: {why(name, cause)}" for name, cause in failures.items())


def _method_table(result: Fit, method: Estimator) -> list[str]:
    title, header, *body = _method_lines(result, method)
    width = max(10, *(len(line[0]) for line in body))
    lines = (
        f"{name:{width}} {estimate:>12} {interval:>26} {p:>11}"
        for name, estimate, interval, p in (header, *body)
    )
    return [title[0], *lines]


def _method_lines(result: Fit, method: Estimator) -> list[list[str]]:
    """Return the title, the header, and a line of texts for each coordinate."""
    level = result.cell.levels[0]
    center, lower, upper = map(np.asarray, result.interval(method.name))
    p = result.test(method.name).p_value
    names = method.coordinates(result.cell.problem)
    acted = result.rows[method.name].floored[-1, 0]
    floored = " (a numerical floor acted: the interval is regularised)" if acted else ""
    shown = [p_value(one, method.law.least_p) for one in p]
    body = [
        [name, f"{center[i]:.6g}", f"[{lower[i]:.6g}, {upper[i]:.6g}]", shown[i]]
        for i, name in enumerate(names)
    ]
    header = ["", "estimate", f"{level:.4g} interval", "p (x = 0)"]
    return [[f"{method.name}{floored}"], header, *body]


def _html(result: Fit) -> str:
    """Return the same as HTML, for notebooks."""
    parts = [paragraph(line) for line in _head(result)]
    for method in _completed(result):
        (title,), header, *body = _method_lines(result, method)
        parts.append(Table(title, header, body, (0,)).html())
    return "".join([*parts, *map(paragraph, [*_compared(result), *_notes(result)])])
