"""The standard normal law, and chi-square for several contrasts at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.stats

from jaxlsgd.core.estimator import JointLaw, Law

if TYPE_CHECKING:
    from jaxlsgd.schedules import Plan


def _multiplier(level: float, plan: Plan | None, detail: Any) -> float:
    del plan, detail
    return float(scipy.stats.norm.isf((1 - level) / 2))


def _tail(statistic: Any, plan: Plan | None, detail: Any) -> np.ndarray:
    del plan, detail
    return 2 * scipy.stats.norm.sf(np.abs(np.asarray(statistic, np.float64)))


def _joint(plan: Plan | None, detail: Any) -> JointLaw:
    del plan, detail
    return JointLaw(
        quantile=lambda level, q: float(scipy.stats.chi2.ppf(level, q)),
        tail=lambda statistic, q: (float(scipy.stats.chi2.sf(statistic, q)), 0.0),
        normal=True,
    )


NORMAL = Law(_multiplier, _tail, _joint)
