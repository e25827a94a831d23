"""What a method says of a run, in float64, for every linear combination of its coordinates at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from jaxlsgd.core.estimator import Estimator
from jaxlsgd.inference.measuring import in_float64
from jaxlsgd.schedules import Plan

FloatArray = NDArray[np.floating[Any]]


class Reading(NamedTuple):
    """An estimate, its matrix and its law, in the coordinates of the run."""

    method: Estimator
    estimate: FloatArray  # (d,)
    matrix: FloatArray  # (d, d)
    detail: Any
    plan: Plan
    floored: bool

    def multiplier(self, level: float, side: str = "both") -> float:
        """The critical value of a combination: where those of coordinates differ, the largest."""
        return float(np.max(self.method.law.half(level, side, self.plan, self.detail)))

    def tail(self, statistic: FloatArray) -> FloatArray:
        """Two-sided p-values; where those of coordinates differ, the largest."""
        d = len(self.estimate)
        each = [
            np.max(self.method.law.tail(np.full(d, one), self.plan, self.detail))
            for one in np.ravel(statistic)
        ]
        return np.asarray(each, np.float64).reshape(np.shape(statistic))

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know of the run."""
        found = () if self.method.notes is None else tuple(self.method.notes(self.detail))
        floor = ("a numerical floor acted: the interval is regularised",) if self.floored else ()
        return found + floor


def read(method: Estimator, states: Any, plan: Plan) -> Reading:
    """Reads a method's states.

    Args:
      method: one with a matrix.
      states: what its `update` returned.
      plan: the rounds that were run.
    """
    found, matrix = in_float64(method, states, plan)
    matrix = np.asarray(matrix, np.float64)
    detail = jax.tree.map(np.asarray, found.detail)
    estimate = np.asarray(found.estimate, np.float64)
    return Reading(method, estimate, (matrix + matrix.T) / 2, detail, plan, bool(found.floored))
