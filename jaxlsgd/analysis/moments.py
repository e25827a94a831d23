"""Means, variances and proportions over the completed replications, with their standard errors.

x is (..., replications, coordinates); `ok` marks the completed ones and broadcasts to it. The
replications are summed out. The result is NaN, without a warning, if there are too few replications.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
Row = dict[str, Any]

WILSON_LEVEL = 0.95


def normal_quantile(level: float) -> float:
    """Return the z with P(|Z| ≤ z) = level."""
    return NormalDist().inv_cdf((1 + level) / 2)


def mean(x: FloatArray, ok: BoolArray) -> FloatArray:
    """Return the mean of the completed; NaN if there is none."""
    n = ok.sum(-2)
    return np.where(n > 0, np.where(ok, x, 0.0).sum(-2) / np.maximum(n, 1), np.nan)


def variance(x: FloatArray, ok: BoolArray) -> FloatArray:
    """Return the variance of the completed, over n − 1; NaN if there are fewer than two."""
    n = ok.sum(-2)
    squares = np.where(ok, (x - mean(x, ok)[..., None, :]) ** 2, 0.0).sum(-2)
    return np.where(n > 1, squares / np.maximum(n - 1, 1), np.nan)


def mean_error(x: FloatArray, ok: BoolArray) -> FloatArray:
    """Return the standard error of the mean."""
    return np.sqrt(variance(x, ok) / np.maximum(ok.sum(-2), 1))


def mean_measure(name: str, x: FloatArray, ok: BoolArray) -> dict[str, FloatArray]:
    """Return the mean and its standard error, as columns."""
    return {name: mean(x, ok), f"{name}_mcse": mean_error(x, ok)}


def share(name: str, hits: FloatArray, n: NDArray[np.integer]) -> dict[str, FloatArray]:
    """Return a proportion, its standard error and its Wilson interval, as columns."""
    p = hits / n
    low, high = wilson(hits, n)
    error = np.where(n > 1, np.sqrt(p * (1 - p) / n), np.nan)  # one replication has none
    return {name: p, f"{name}_mcse": error, f"{name}_low": low, f"{name}_high": high}


def wilson(hits: ArrayLike, n: ArrayLike, level: float = WILSON_LEVEL) -> tuple[Any, Any]:
    """Return Wilson's score interval for a proportion, (p̂ + z²/2n ± z √(p̂(1−p̂)/n + z²/4n²)) / (1 + z²/n).

    Args:
      hits: successes, a number or an array.
      n: trials, at least 1 for an interval; 0 gives NaN.
      level: confidence level.

    Returns:
      The lower and the upper limit.

    Example:
      >>> [round(float(limit), 4) for limit in wilson(8, 10)]
      [0.4902, 0.9433]

    Reference: Wilson (1927), JASA 22.
    """
    hits, n, z = np.asarray(hits, float), np.asarray(n, float), normal_quantile(level)
    n = np.where(n > 0, n, np.nan)
    p = hits / n
    half = z * np.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    low, high = ((p + z**2 / (2 * n) + sign * half) / (1 + z**2 / n) for sign in (-1, 1))
    # At the ends the formula gives p itself, up to rounding that would put p outside its interval.
    low, high = np.where(p <= 0, p, np.clip(low, 0, p)), np.where(p >= 1, p, np.clip(high, p, 1))
    return low[()], high[()]
