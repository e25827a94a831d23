"""Averages over cells that saw the same data, with standard errors that know it.

Replication r has the same draws in every cell, so cells are no independent witnesses, but replications are.
An average is therefore kept as its value and the share that each replication has in it: sums and
differences add the shares, and the standard error is the root of the sum of their squares.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Average:
    """A number, and what each replication adds to its deviation from the truth."""

    value: float
    shares: FloatArray  # (replications,), to be squared and summed

    @property
    def error(self) -> float:
        """Monte-Carlo standard error."""
        return float(np.sqrt(np.sum(self.shares**2)))

    def __sub__(self, other: Average) -> Average:
        shares = np.zeros(max(self.shares.size, other.shares.size))
        shares[: self.shares.size] += self.shares
        shares[: other.shares.size] -= other.shares
        return Average(self.value - other.value, shares)


def share(hits: NDArray[np.bool_], ok: NDArray[np.bool_]) -> Average | None:
    """The share of one cell's completed replications, with error √(p(1 − p)/n); None if there are none."""
    n = int(ok.sum())
    if not n:
        return None
    p = float(hits[ok].mean())
    return Average(p, np.where(ok, hits - p, 0.0) / n)


def log_mean(x: FloatArray, ok: NDArray[np.bool_]) -> Average | None:
    """The logarithm of a positive mean, by the delta method."""
    n = int(ok.sum())
    middle = float(x[ok].mean()) if n else 0.0
    if n < 2 or not 0 < middle < math.inf:
        return None
    bessel = math.sqrt(n / (n - 1))
    return Average(math.log(middle), np.where(ok, x / middle - 1, 0.0) * (bessel / n))


def over(parts: Sequence[Average]) -> Average:
    """The average of averages, each with the same weight."""
    shares = np.zeros(max(part.shares.size for part in parts))
    for part in parts:
        shares[: part.shares.size] += part.shares / len(parts)
    return Average(float(np.mean([part.value for part in parts])), shares)
