"""Critical values and p-values of random scaling: exact ones, the paper's, and a table for joint tests.

The statistic's limit is t* = B(1)/sqrt(int_0^1 (B(r) - g(r) B(1))^2 dr). Its g comes from a family,
g(r) = r^{1/(1-beta)}, or from the schedule that was run (the functions that take a plan). With the paper's
warm-up the two differ a lot: 6.747 for constant E, 5.555 for E = 5 after a warm-up.
"""

import csv
import functools
import math
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal
from jaxlsgd.inference.laws import pivot_law
from jaxlsgd.inference.laws.pivot_law import FloatArray

# Table 2 of the paper: rows beta, columns two-sided level (its one-sided 90, 95, 97.5 and 99 % points).
_PAPER_LEVELS = (0.8, 0.9, 0.95, 0.98)
_PAPER_TABLE = {
    0.0: (3.877, 5.324, 6.753, 8.634),
    1 / 3: (3.712, 5.048, 6.339, 8.0945),
    1 / 2: (3.446, 4.621, 5.851, 7.386),
    2 / 3: (3.027, 4.012, 4.993, 6.292),
}
PAPER_GRID = tuple((beta, level) for beta in _PAPER_TABLE for level in _PAPER_LEVELS)


class HasSchedule(Protocol):
    """Anything with the local steps per round as an integer array `E` of shape (T,)."""

    @property
    def E(self) -> ArrayLike:
        """Local steps per round, integers >= 1, shape (T,)."""
        ...


def tail_probability(c: ArrayLike, *, beta: float = 0.0) -> float | FloatArray:
    """Two-sided tail P(|t*(beta)| > c) of the limit of the random scaling statistic.

    t*(beta) = B(1)/sqrt(int (B(r) - g(r) B(1))^2 dr) with g(r) = r^{1/(1-beta)}.

    Args:
      c: thresholds, at least 0; a number or an array of any shape.
      beta: growth of the communication interval, E_m ~ m^beta, in [0, 1).

    Returns:
      The probability, of the shape of `c` (a float for a number).

    Example:
      >>> from jaxlsgd.inference import critical_values
      >>> round(critical_values.tail_probability(6.7473), 4)
      0.05

    Reference: the paper's Section 4.2 for t*(beta); `pivot_law` for the integral.
    """
    spectrum = pivot_law.beta_spectrum(_check_beta(beta))
    return _tail(_check_thresholds("c", c), spectrum)


def p_value(statistic: ArrayLike, *, beta: float = 0.0) -> float | FloatArray:
    """Two-sided p-value P(|t*(beta)| > |statistic|).

    Args:
      statistic: (estimate - hypothesis)/sqrt(V_jj), a number or an array of any shape; infinities give 0.
      beta: growth of the communication interval, E_m ~ m^beta, in [0, 1).

    Returns:
      The p-value, of the shape of `statistic` (a float for a number).

    Example:
      >>> from jaxlsgd.inference import critical_values
      >>> critical_values.p_value([0.0, -6.7473]).round(4).tolist()
      [1.0, 0.05]

    Reference: Corollary 4.3 of the paper, read as a test.
    """
    spectrum = pivot_law.beta_spectrum(_check_beta(beta))
    return _tail(np.abs(_check_array("statistic", statistic)), spectrum)


def critical_value(level: float, *, beta: float = 0.0) -> float:
    """The c with P(|t*(beta)| <= c) = level: the half-width of an interval in units of sqrt(V_jj).

    Args:
      level: two-sided coverage in (0, 1); 0.95 gives the 97.5 % point of t*(beta).
      beta: growth of the communication interval, E_m ~ m^beta, in [0, 1).

    Returns:
      The critical value.

    Example:
      >>> from jaxlsgd.inference import critical_values
      >>> [round(critical_values.critical_value(0.95, beta=b), 4) for b in (0, 1/3, 1/2, 2/3)]
      [6.7473, 6.3616, 5.8069, 4.9711]

    Reference: Table 2 of the paper, whose simulated numbers are up to 0.8 % off (see `paper_value`).
    """
    return _beta_quantile(checks.level(level), _check_beta(beta))


def tail_probability_for_plan(plan: HasSchedule, c: ArrayLike) -> float | FloatArray:
    """P(|t*| > c) under the time change of an actual schedule, with its warm-up and rounding.

    g is the piecewise linear map with g(r_m) = m/T, r_m = sum_{n<=m} 1/E_n / sum_{n<=T} 1/E_n.

    Args:
      plan: anything with an integer array `E` of shape (T,), T at least 2.
      c: thresholds, at least 0; a number or an array of any shape.

    Returns:
      The probability, of the shape of `c` (a float for a number).

    Example:
      >>> import types
      >>> from jaxlsgd.inference import critical_values
      >>> plan = types.SimpleNamespace(E=[1] * 250 + [5] * 950)
      >>> round(critical_values.tail_probability_for_plan(plan, 5.555), 4)
      0.05

    Reference: Corollary 4.2 of the paper, with its g taken from the schedule and not from the family.
    """
    return _tail(_check_thresholds("c", c), pivot_law.plan_spectrum(check_plan(plan)))


def p_value_for_plan(plan: HasSchedule, statistic: ArrayLike) -> float | FloatArray:
    """Two-sided p-value P(|t*| > |statistic|) under the time change of an actual schedule.

    Args:
      plan: anything with an integer array `E` of shape (T,), T at least 2.
      statistic: (estimate - hypothesis)/sqrt(V_jj), a number or an array of any shape; infinities give 0.

    Returns:
      The p-value, of the shape of `statistic` (a float for a number).

    Example:
      >>> import types
      >>> from jaxlsgd.inference import critical_values
      >>> critical_values.p_value_for_plan(types.SimpleNamespace(E=[1, 2, 2, 3]), 0.0)
      1.0

    Reference: Corollary 4.2 of the paper; `tail_probability_for_plan` for g.
    """
    return _tail(
        np.abs(_check_array("statistic", statistic)), pivot_law.plan_spectrum(check_plan(plan))
    )


def for_plan(plan: HasSchedule, level: float) -> float:
    """The critical value under the time change of an actual schedule.

    Args:
      plan: anything with an integer array `E` of shape (T,), T at least 2.
      level: two-sided coverage in (0, 1).

    Returns:
      The c with P(|t*| <= c) = level, for g(r_m) = m/T.

    Example:
      >>> import types
      >>> from jaxlsgd.inference import critical_values
      >>> round(critical_values.for_plan(types.SimpleNamespace(E=[1] * 250 + [5] * 950), 0.95), 3)
      5.555

    Reference: Corollary 4.2 of the paper; `tail_probability_for_plan` for g.
    """
    return _plan_quantile(checks.level(level), check_plan(plan))


def paper_value(beta: float, level: float) -> float:
    """The critical value printed in the paper, for reproducing its tables.

    Args:
      beta: 0, 1/3, 1/2 or 2/3.
      level: two-sided coverage, 0.8, 0.9, 0.95 or 0.98.

    Returns:
      The printed number: 50,000 simulated paths of 1,000 steps, smoothed.

    Example:
      >>> from jaxlsgd.inference import critical_values
      >>> critical_values.paper_value(0, 0.95)
      6.753

    Reference: Table 2 of the paper.
    """
    beta, level = _check_beta(beta), checks.level(level)
    for row, values in _PAPER_TABLE.items():
        for column, value in zip(_PAPER_LEVELS, values, strict=True):
            if math.isclose(beta, row, abs_tol=1e-6) and math.isclose(level, column, abs_tol=1e-9):
                return value
    raise ValueError(
        "beta, level: must be in the paper's Table 2, beta in {0, 1/3, 1/2, 2/3} and level in "
        f"{{0.8, 0.9, 0.95, 0.98}}, got beta={beta!r}, level={level!r}; critical_value takes any"
    )


def paper_p_value(statistic: ArrayLike, *, beta: float) -> float | FloatArray:
    """Two-sided p-value that agrees with the paper's critical values.

    The exact law with its scale stretched so that the printed values are its quantiles, linearly between
    them, and beyond the first and last as there. Stretches are below 1 %.

    Args:
      statistic: (estimate - hypothesis)/sqrt(V_jj), a number or an array of any shape.
      beta: 0, 1/3, 1/2 or 2/3.

    Returns:
      The p-value, of the shape of `statistic`.

    Example:
      >>> from jaxlsgd.inference import critical_values
      >>> round(critical_values.paper_p_value(6.753, beta=0), 6)
      0.05

    Reference: Table 2 of the paper.
    """
    size = np.abs(_check_array("statistic", statistic))
    printed = [paper_value(beta, level) for level in _PAPER_LEVELS]
    exact = [critical_value(level, beta=beta) for level in _PAPER_LEVELS]
    return p_value(size * np.interp(size, printed, np.divide(exact, printed)), beta=beta)


def wald_critical_value(dim: int, level: float) -> float:
    """Critical value of the joint statistic for `dim` parameters at once (beta = 0).

    W = B_q(1)' [int (B_q(r) - r B_q(1)) (B_q(r) - r B_q(1))' dr]^{-1} B_q(1), q = `dim`; W for q = 1 is t*(0)^2.

    Args:
      dim: number of parameters tested jointly, 1 to 20.
      level: 0.8, 0.9, 0.95, 0.975, 0.98 or 0.99.

    Returns:
      The w with P(W <= w) = level, simulated; `wald_critical_values.csv` beside this file has its error.

    Example:
      >>> from jaxlsgd.inference import critical_values
      >>> 100 < critical_values.wald_critical_value(2, 0.95) < 105
      True

    Reference: Corollary 4.2 of the paper; Lobato (2001) for the statistic U_q and an older table.
    """
    level, values = checks.level(level), _wald_table()[checks.count("dim", dim, 1, 20)]
    for column, value in values.items():
        if math.isclose(level, column, abs_tol=1e-9):
            return value
    raise refusal("level", f"be one that was simulated ({', '.join(map(str, values))})", level)


def wald_has_level(level: float) -> bool:
    """Whether `wald_critical_value` was simulated at a level."""
    return any(math.isclose(level, column, abs_tol=1e-9) for column in _wald_table()[1])


@functools.cache
def _wald_table() -> dict[int, dict[float, float]]:
    table: dict[int, dict[float, float]] = {}
    with Path(__file__).with_name("wald_critical_values.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            table.setdefault(int(row["dim"]), {})[float(row["level"])] = float(row["value"])
    return table


def _tail(c: FloatArray, spectrum: pivot_law.Spectrum) -> float | FloatArray:
    tail = pivot_law.tail(c, spectrum)
    return tail if tail.ndim else float(tail)


@functools.lru_cache(maxsize=1024)
def _beta_quantile(level: float, beta: float) -> float:
    return pivot_law.quantile(level, pivot_law.beta_spectrum(beta))


@functools.lru_cache(maxsize=64)
def _plan_quantile(level: float, E: bytes) -> float:
    return pivot_law.quantile(level, pivot_law.plan_spectrum(E))


def _check_array(name: str, value: ArrayLike) -> FloatArray:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):  # a ragged list
        array = np.array(None)
    if array.dtype.kind not in "iuf" or np.isnan(array).any():
        raise refusal(name, "be real numbers without NaN", value)
    return array.astype(np.float64)


def _check_thresholds(name: str, value: ArrayLike) -> FloatArray:
    array = _check_array(name, value)
    if (array < 0).any():
        raise refusal(name, "be at least 0", value)
    return array


def _check_beta(beta: float) -> float:
    number = checks.number("beta", beta, rule := "be a number of at least 0 and below 1")
    if not 0 <= number < 1:
        raise refusal("beta", rule, beta)
    return number


def check_plan(plan: HasSchedule) -> bytes:
    """The E_m of a plan as bytes, by which its law is cached; refuses anything but integers >= 1."""
    E = np.asarray(getattr(plan, "E", None))
    steps = E.astype(np.int64) if E.dtype.kind in "iu" else np.zeros(1)
    if steps.ndim != 1 or (steps < 1).any():
        raise refusal("plan.E", "be a one-dimensional array of integers >= 1", E)
    if steps.size < 2:
        raise refusal("plan.E", "have at least 2 rounds", steps.size)
    return steps.tobytes()
