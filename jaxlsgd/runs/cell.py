"""A cell: problem, plan, methods and algorithm, checked; and the way from its measurements to rows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlsgd.algorithms import local_sgd
from jaxlsgd.core import checks
from jaxlsgd.core.algorithm import (
    Algorithm,
    an_algorithm,
    check_algorithm,
    check_measure,
    check_same,
)
from jaxlsgd.core.causes import MOST_GROWTH, Cause, causes
from jaxlsgd.core.checks import Dtype, blaming, refusal
from jaxlsgd.core.estimator import Accumulator, Anchored, Estimator, Measurement, Sync
from jaxlsgd.core.problem import Problem, flatten, has_curvature
from jaxlsgd.core.rows import CellRows, MethodRows, Until
from jaxlsgd.engine import probe
from jaxlsgd.engine.cost import numbers_sent, sent_under_c1
from jaxlsgd.engine.layout import Layout, Whole, lay_out, lay_out_whole
from jaxlsgd.engine.program import loop_for
from jaxlsgd.engine.statistics import start_all, update_all
from jaxlsgd.inference.one_step import one_step
from jaxlsgd.inference.plug_in import plug_in
from jaxlsgd.schedules import Plan
from jaxlsgd.schedules.plan import LOOKS


class Growth(NamedTuple):
    """Growth of the loss relative to x_0; see `engine.probe`."""

    estimate: np.ndarray  # (R,) at a method's estimates
    path: np.ndarray | float = (
        np.nan
    )  # (R,) at the path's averages that they correct, if some failed


def method_rows(
    method: Estimator,
    found: Measurement,
    plan: Plan,
    levels: tuple[float, ...],
    growth: Growth,
) -> MethodRows:
    """Return the rows of one method at a saved round; half-widths are multiplier times scale.

    Args:
      method: the method.
      found: its measurement, NumPy float64, replications first.
      plan: up to the saved round.
      levels: confidence levels.
      growth: of the loss, see `growths`.
    """
    estimate, scale = np.asarray(found.estimate), np.asarray(found.scale)
    half = np.stack([_multiplier(method, level, plan, found) * scale for level in levels])
    floored = np.asarray(found.floored).astype(bool)
    if plan.num_rounds == 1:  # too few for an estimate of some methods
        cause = causes(estimate, half, floored, growth.estimate)
        cause[cause == Cause.NON_FINITE] = Cause.UNDEFINED
    else:
        cause = causes(estimate, half, floored, growth.estimate, growth.path)
    return MethodRows(estimate, scale, half, floored, cause)


def _multiplier(method: Estimator, level: float, plan: Plan, found: Measurement) -> np.ndarray:
    """Return the critical value of a level; refuse one that does not fit the scale."""
    multiplier, scale = method.law.multiplier, np.shape(found.scale)
    with blaming(multiplier, f"`law.multiplier` of method {method.name!r}"):
        value = multiplier(level, plan, found.detail)
    where = f"methods ({method.name}).law.multiplier"
    try:
        made = np.asarray(value, np.float64)
    except (TypeError, ValueError) as error:
        raise refusal(where, "return numbers", value, code="type") from error
    if made.ndim > len(scale) or any(
        a not in (1, b) for a, b in zip(made.shape[::-1], scale[::-1], strict=False)
    ):
        rule = (
            f"return a number, or numbers that broadcast to (replications, coordinates) = {scale}"
        )
        raise refusal(where, rule, made.shape, code="shape")
    return made


def growths(
    problem: Problem, dtype: Dtype, methods: Sequence[Estimator], found: dict[str, Measurement]
) -> dict[str, Growth]:
    """Return by method the growth of the loss at its estimates."""
    known: dict[bytes, np.ndarray] = {}  # most methods share one estimate

    def at(x: np.ndarray) -> np.ndarray:
        key = x.tobytes()
        if key not in known:
            known[key] = probe.growth(problem, dtype, x)
        return known[key]

    def of(method: Estimator) -> Growth:
        one = found[method.name]
        estimate = np.asarray(one.estimate, np.float64)
        growth = Growth(at(_parameters(problem, method, estimate)))
        numbers = np.isfinite(estimate).all(-1) & ~np.isnan(one.scale).any(-1)
        sound = numbers & (growth.estimate <= MOST_GROWTH)
        if one.path is None or sound.all():
            return growth
        path = np.asarray(one.path, np.float64)
        # A path that is not finite has failed, whatever its loss.
        return growth._replace(path=np.where(np.isfinite(path).all(-1), at(path), np.nan))

    return {method.name: of(method) for method in methods}


def _parameters(problem: Problem, method: Estimator, estimate: np.ndarray) -> np.ndarray:
    """Return the estimates, (R, d); for contrasts, the parameters nearest to x_0 that have these."""
    if not method.contrasts:
        return estimate
    R, start = np.asarray(method.contrasts), np.asarray(flatten(problem.init), np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        return start + (estimate - R @ start) @ np.linalg.pinv(R).T


LOCAL_SGD = local_sgd()
# The shortest that keeps its level, with which the others are compared, and the best one around ȳ.
METHODS = (one_step(), plug_in("finite"))


@dataclasses.dataclass(frozen=True, eq=False)
class Cell:
    """Everything that determines a cell's rows except the replications.

    Args:
      problem: the problem.
      plan: the plan to run.
      methods: interval methods with distinct names.
      levels: confidence levels in (0, 1).
      save_at: rounds at which to read the intervals; the last is always read.
      dtype: "float32" or "float64".
      algorithm: the federated algorithm. Anything but Local SGD is outside the theory: intervals are
        then measured, not promised.
      looks: observations per client at the looks of a method that is valid at known looks; those of the saved
        rounds if None.
    """

    problem: Problem
    plan: Plan
    methods: tuple[Estimator, ...] = METHODS
    levels: tuple[float, ...] = (0.95,)
    save_at: tuple[int, ...] | None = None
    dtype: Dtype = "float32"
    algorithm: Algorithm = LOCAL_SGD
    looks: tuple[int, ...] | None = None
    layout: Layout = dataclasses.field(init=False)
    _whole: dict[tuple[int, ...], Whole] = dataclasses.field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.problem, Problem):
            raise refusal("problem", "be a jaxlsgd.Problem", self.problem, code="type")
        if not isinstance(self.plan, Plan):
            raise refusal("plan", "be made by schedule.plan(...)", self.plan, code="type")
        checks.choice("dtype", self.dtype, Dtype)
        facts = self.problem.dim, self.problem.num_clients, self.dtype
        _check_functions(an_algorithm(self.algorithm), *facts)
        if self.problem.copies % self.algorithm.copies:
            rule = f"hold {self.algorithm.copies} copies for {self.algorithm.name}, as split_clients makes them"
            raise refusal("problem", rule, self.problem.copies, code="unsupported")
        object.__setattr__(self, "methods", check_methods(self.methods, self.problem, self.dtype))
        for method in self.methods:
            if method.within_theory and not self.algorithm.within_theory:
                rule = (
                    f"be within the paper's theory for {method.name}, whose law follows Local SGD"
                )
                raise refusal("algorithm", rule, self.algorithm.name, code="unsupported")
        levels = as_tuple(self.levels)
        if not levels:
            raise refusal("levels", "have at least one level in (0, 1)", levels, code="missing")
        object.__setattr__(self, "levels", tuple(checks.level(level) for level in levels))
        object.__setattr__(self, "layout", lay_out(self.plan, self.save_at, self._rooms))
        object.__setattr__(self, "save_at", self.layout.save_at)

    @property
    def _rooms(self) -> tuple[int, ...]:
        return loop_for("cpu", self.problem, self.algorithm).rooms

    @property
    def clocks(self) -> tuple[int, ...]:
        """Observations per client at the looks."""
        return self.looks or tuple(int(self.plan.ends[m - 1]) for m in self.layout.save_at)

    @functools.cached_property
    def _with_looks(self) -> dict[str, Estimator]:
        return {method.name: method.at_looks(self.clocks) for method in self.methods}

    def with_looks(self, method: Estimator) -> Estimator:
        """Return a method of the cell with the law of the cell's looks."""
        return self._with_looks[method.name]

    def check_until(self, until: float | Until | None) -> Until | None:
        """Return the rule for stopping; refuse one that does not suit the methods."""
        if until is None:
            return None
        rule = Until.of(until)
        rule.places(rule.chosen(self.methods, self.levels).coordinates(self.problem))
        return rule

    def check_plan(self) -> None:
        """Refuse a plan that does not suit a method, or its law at a level."""
        for method in self._with_looks.values():
            method.check_plan(self.plan, self.levels)

    def laid_out(self, rooms: tuple[int, ...]) -> Layout:
        """Return the plan as calls of programs with these rooms."""
        return self.layout if rooms == self._rooms else lay_out(self.plan, self.save_at, rooms)

    def laid_out_whole(self, rooms: tuple[int, ...]) -> Whole:
        """Return the plan as calls of a lane, cached for all tiles of the cell."""
        if rooms not in self._whole:
            self._whole[rooms] = lay_out_whole(self.plan, self.layout.save_at, rooms)
        return self._whole[rooms]

    @property
    def shared(self) -> tuple[Problem, tuple[Estimator, ...], Algorithm, Dtype]:
        """What cells that run together must have in common; they may differ in plan, levels and saves."""
        return self.problem, self.methods, self.algorithm, self.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of the rows of one replication: of all methods, saved rounds, levels and coordinates."""
        numbers = 8 * (2 + len(self.levels))  # estimate, scale and half-widths
        counts = [len(method.coordinates(self.problem)) for method in self.methods]
        return len(self.layout.save_at) * sum(numbers * count + 2 for count in counts)

    def with_rows(self, rows: dict[str, MethodRows]) -> CellRows:
        """Return rows together with the cell's truth, plan and costs."""
        saves = self.layout.save_at
        steps = tuple(int(self.plan.ends[m - 1]) for m in saves)
        what = self.problem, self.plan
        errors = {method.name: method.truth_error(self.problem) for method in self.methods}
        return CellRows(
            problem=self.problem.name or "problem",
            algorithm=self.algorithm.name,
            schedule=self.plan.name,
            num_steps=self.plan.num_steps,
            num_rounds=self.plan.num_rounds,
            save_at=saves,
            steps_at=steps,
            levels=self.levels,
            coordinates={method.name: method.coordinates(self.problem) for method in self.methods},
            truth={method.name: method.truth(self.problem) for method in self.methods},
            standard_error={method.name: method.standard_error for method in self.methods},
            labels={method.name: method.label or method.name for method in self.methods},
            methods=rows,
            costs={method.name: method.cost for method in self.methods if method.cost},
            numbers_sent={
                method.name: tuple(
                    numbers_sent(*what, method, self.algorithm, rounds=m) for m in saves
                )
                for method in self.methods
            },
            sent_under_c1=tuple(sent_under_c1(self.problem, t) for t in steps),
            truth_error={name: error for name, error in errors.items() if error is not None},
            valid={method.name: method.valid for method in self.methods if method.valid != "fixed"},
        )


def saved_rounds(plan: Plan, save_at: Any, until: Any) -> tuple[int, ...] | None:
    """Return the rounds to read; with a rule for stopping, unless they are given, those of `LOOKS`."""
    if save_at is not None:
        return as_tuple(save_at)
    if until is None or not isinstance(plan, Plan):
        return None
    return tuple(np.unique(plan.rounds_at(LOOKS)).tolist())


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return a sequence as a tuple, and a single value as a tuple of one."""
    return tuple(value) if isinstance(value, Iterable) else (value,)


def check_methods(methods: Any, problem: Problem, dtype: Dtype) -> tuple[Estimator, ...]:
    """Refuse anything but estimators with distinct names that suit the problem."""
    methods = (methods,) if isinstance(methods, Estimator) else tuple(methods)
    if not methods or not all(isinstance(method, Estimator) for method in methods):
        raise refusal("methods", "be estimators such as plug_in()", methods, code="type")
    methods = tuple(method.for_problem(problem) for method in methods)
    names = [method.name for method in methods]
    if len(set(names)) < len(names):
        raise refusal(
            "methods", "have distinct names", names, "; give one a name=...", code="duplicate"
        )
    for method in methods:
        if (method.needs_hessian or method.anchor) and not has_curvature(problem):
            rule = "need no second derivative, which this loss does not have (random_scaling() needs none)"
            raise refusal("methods", rule, method.name, code="unsupported")
        for part in method.accumulators:
            needs = method.needs_gradient, method.needs_hessian, method.needs_gradient_sum
            _check_statistic(method.name, part, problem.dim, dtype, *needs)
        check_measure(method, problem.dim, dtype)
    return methods


# A grid has many cells, of few methods and algorithms.
@functools.lru_cache(maxsize=256)
def _check_functions(algorithm: Algorithm, dim: int, num_clients: int, dtype: Dtype) -> None:
    with jax.enable_x64(dtype == "float64"):
        check_algorithm(algorithm, dim, dtype, num_clients)


@functools.lru_cache(maxsize=1024)
def _check_statistic(
    method: str,
    part: Accumulator,
    dim: int,
    dtype: Dtype,
    gradient: bool,
    hessian: bool,
    gradient_sum: bool,
) -> None:
    """Refuse contrasts that do not fit, and an update that changes the shapes or dtypes of the state."""

    def abstract(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    def sync(*replications: int) -> Sync:
        x, number = abstract(dim, *replications), abstract()
        square = abstract(dim, dim, *replications)
        asked = (gradient, x), (hessian, square), (gradient_sum, x)
        anchored = None if part.anchor is None else Anchored(x, observations=None)
        found: list[Any] = [given if wanted else None for wanted, given in asked]
        return Sync(x, number, number, *found, anchored=anchored)

    where = f"methods ({method})"
    with jax.enable_x64(dtype == "float64"):
        with blaming(part.init, f"`init` of method {method!r}"):
            state = jax.eval_shape(part.init, abstract(dim))
        with blaming(part.update, f"`update` of method {method!r}"):
            after = jax.eval_shape(part.update, state, sync())
        check_same(f"{where}.update", "the state in its shapes and dtypes", state, after)
        _check_shared(f"{where}.shared", part, state, abstract(dim), sync(2))


def _check_shared(where: str, part: Accumulator, state: Any, x: Any, sync: Sync) -> None:
    """Refuse `shared` names that are no fields of the state, or not the same in all replications."""
    fields = getattr(state, "_fields", ())
    if unknown := [name for name in part.shared if name not in fields]:
        rule = "name fields of the state, which must be a NamedTuple"
        raise refusal(where, rule, unknown[0], code="unknown")

    def run(sync: Sync) -> Any:
        return update_all(part, x, start_all(part, x, sync.params), sync)

    try:
        if part.shared:
            jax.eval_shape(run, sync)
    except ValueError as error:  # one result per replication instead of one for all
        rule = "name fields that are the same in all replications"
        raise refusal(where, rule, part.shared) from error
