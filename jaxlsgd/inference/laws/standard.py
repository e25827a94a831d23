"""Normal and Student laws, with chi-square and F for several contrasts at once."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.polynomial import Chebyshev
from scipy.special import chdtrc, chdtri, fdtrc, fdtri, ndtr, ndtri, stdtr, stdtrit

from jaxlsgd.core.checks import refusal
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

_LEAST_DF, _NODES = 3.0, 32


def student_quantiles(df: np.ndarray, p: Any) -> np.ndarray:
    """Return quantiles of Student's t; many with one p below ½ are a sixth of the work of as many single ones.

    ln(−t) is then taken for a polynomial of 1/df, which it is to 1e-12 for df ≥ 3 and p ≥ 1e-15.
    """
    df, p = np.broadcast_arrays(df, np.asarray(p, np.float64))
    if df.size < 4 * _NODES or not 1e-15 <= p.min() == p.max() < 0.49:
        return stdtrit(df, p)
    one, few = p.flat[0], df < _LEAST_DF

    # The Chebyshev nodes of s = 6/df − 1.
    s = np.cos(np.pi * (np.arange(_NODES) + 0.5) / _NODES)
    curve = Chebyshev.fit(s, np.log(-stdtrit(2 * _LEAST_DF / (s + 1), one)), _NODES - 1)
    found = -np.exp(curve(2 * _LEAST_DF / np.maximum(df, _LEAST_DF) - 1))
    found[few] = stdtrit(df[few], one)
    return found


@functools.cache
def student(freedom: int) -> Law:
    """Return the law of a normal estimate over its estimated standard error.

    Args:
      freedom: degrees of freedom ν of the estimated variance (or covariance, for several contrasts).
    """

    def multiplier(level: float, plan: Any, detail: Any) -> float:
        del plan, detail
        return float(stdtrit(freedom, (1 + level) / 2))

    def tail(statistic: Any, plan: Any, detail: Any) -> np.ndarray:
        del plan, detail
        return 2 * stdtr(freedom, -np.abs(np.asarray(statistic, np.float64)))

    def joint(plan: Any, detail: Any) -> JointLaw:
        del plan, detail
        return JointLaw(_quantile, _tail)

    # W (ν − q + 1)/(ν q) is F(q, ν − q + 1).
    def _left(q: int) -> int:
        if q > freedom:
            raise refusal(
                "contrasts", f"be at most {freedom}, the degrees of freedom", q, code="data"
            )
        return freedom - q + 1

    def _quantile(level: float, q: int) -> float:
        left = _left(q)
        return float(fdtri(q, left, level)) * freedom * q / left

    def _tail(statistic: float, q: int) -> tuple[float, float]:
        left = _left(q)
        return float(fdtrc(q, left, statistic * left / (freedom * q))), 0.0

    return Law(multiplier, tail, joint, from_plan=True)
