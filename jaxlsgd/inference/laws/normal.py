"""The standard normal law, and chi-square for several contrasts at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import chdtrc, chdtri, ndtr, ndtri

from jaxlsgd.core.estimator import JointLaw, Law

if TYPE_CHECKING:
    from jaxlsgd.schedules import Plan


def _multiplier(level: float, plan: Plan | None, detail: Any) -> float:
    del plan, detail
    return float(-ndtri((1 - level) / 2))


def _tail(statistic: Any, plan: Plan | None, detail: Any) -> np.ndarray:
    del plan, detail
    return 2 * ndtr(-np.abs(np.asarray(statistic, np.float64)))


def _joint(plan: Plan | None, detail: Any) -> JointLaw:
    del plan, detail
    return JointLaw(
        quantile=lambda level, q: float(chdtri(q, 1 - level)),
        tail=lambda statistic, q: (float(chdtrc(q, statistic)), 0.0),
        normal=True,
    )


NORMAL = Law(_multiplier, _tail, _joint)
