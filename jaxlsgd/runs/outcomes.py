"""From measurements to rows: half-widths, and what became of each replication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxlsgd.core.blame import blaming
from jaxlsgd.core.causes import MOST_GROWTH, Cause, causes
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.estimator import Estimator, Measurement
from jaxlsgd.core.problem import Problem, flatten
from jaxlsgd.core.rows import MethodRows
from jaxlsgd.engine import probe
from jaxlsgd.schedules import Plan


class Growth(NamedTuple):
    """How much worse the loss is than at x_0; see `engine.probe`."""

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
    """The rows of one method at a saved round; half-widths are multiplier times scale.

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
    if plan.num_rounds == 1:  # of one round, some methods have no estimate either
        cause = causes(estimate, half, floored, growth.estimate)
        cause[cause == Cause.NON_FINITE] = Cause.UNDEFINED
    else:
        cause = causes(estimate, half, floored, growth.estimate, growth.path)
    return MethodRows(estimate, scale, half, floored, cause)


def _multiplier(method: Estimator, level: float, plan: Plan, found: Measurement) -> np.ndarray:
    """Returns the critical value of a level; refuses one that does not fit the scale."""
    multiplier, scale = method.law.multiplier, np.shape(found.scale)
    with blaming(multiplier, f"`law.multiplier` of method {method.name!r}"):
        value = multiplier(level, plan, found.detail)
    where = f"methods ({method.name}).law.multiplier"
    try:
        made = np.asarray(value, np.float64)
    except (TypeError, ValueError) as error:
        raise refusal(where, "return numbers", value) from error
    if made.ndim > len(scale) or any(
        a not in (1, b) for a, b in zip(made.shape[::-1], scale[::-1], strict=False)
    ):
        rule = (
            f"return a number, or numbers that broadcast to (replications, coordinates) = {scale}"
        )
        raise refusal(where, rule, made.shape)
    return made


def growths(
    problem: Problem, dtype: str, methods: Sequence[Estimator], found: dict[str, Measurement]
) -> dict[str, Growth]:
    """By method, how much worse the loss is at its estimates than at x_0."""
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
        # A path that is not finite is not sound, whatever its loss.
        return growth._replace(path=np.where(np.isfinite(path).all(-1), at(path), np.nan))

    return {method.name: of(method) for method in methods}


def _parameters(problem: Problem, method: Estimator, estimate: np.ndarray) -> np.ndarray:
    """(R, d): the estimates; of contrasts, the parameters nearest to x_0 that have them."""
    if not method.contrasts:
        return estimate
    R, start = np.asarray(method.contrasts), np.asarray(flatten(problem.init), np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        return start + (estimate - R @ start) @ np.linalg.pinv(R).T
