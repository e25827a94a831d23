"""From measurements to rows: half-widths, and what became of each replication."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxlsgd.core.blame import blaming
from jaxlsgd.core.causes import Cause, causes
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.estimator import Estimator, Measurement
from jaxlsgd.core.problem import Problem, flatten
from jaxlsgd.core.rows import MethodRows
from jaxlsgd.engine import probe
from jaxlsgd.schedules import Plan


def method_rows(
    method: Estimator,
    found: Measurement,
    plan: Plan,
    levels: tuple[float, ...],
    growth: np.ndarray,
) -> MethodRows:
    """The rows of one method at a saved round; half-widths are multiplier times scale.

    Args:
      method: the method.
      found: its measurement, NumPy float64, replications first.
      plan: up to the saved round.
      levels: confidence levels.
      growth: of the loss at its estimates, see `growths`.
    """
    estimate, scale = np.asarray(found.estimate), np.asarray(found.scale)
    half = np.stack([_multiplier(method, level, plan, found) * scale for level in levels])
    floored = np.asarray(found.floored).astype(bool)
    cause = causes(estimate, half, floored, growth)
    if plan.num_rounds == 1:  # of one round, some methods have no estimate either
        cause[cause == Cause.NON_FINITE] = Cause.UNDEFINED
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
) -> dict[str, np.ndarray]:
    """By method, how much worse the loss is at its estimates than at x_0; see `engine.probe`."""
    known: dict[bytes, np.ndarray] = {}  # most methods share one estimate
    growth = {}
    for method in methods:
        x = _parameters(problem, method, np.asarray(found[method.name].estimate, np.float64))
        key = x.tobytes()
        if key not in known:
            known[key] = probe.growth(problem, dtype, x)
        growth[method.name] = known[key]
    return growth


def _parameters(problem: Problem, method: Estimator, estimate: np.ndarray) -> np.ndarray:
    """(R, d): the estimates; of contrasts, the parameters nearest to x_0 that have them."""
    if not method.contrasts:
        return estimate
    R, start = np.asarray(method.contrasts), np.asarray(flatten(problem.init), np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        return start + (estimate - R @ start) @ np.linalg.pinv(R).T
