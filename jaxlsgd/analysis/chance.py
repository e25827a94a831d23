"""The chance that an interval contains the true value, given its run, by the estimate of another method, the reference.

With the reference's estimate x̂ and standard error se, and the true value taken to be N(x̂, se²) given the run, an
interval [lo, hi] of another method contains it with probability

    Φ((hi − x̂)/se) − Φ((lo − x̂)/se).

This is a conditional probability and not the method's coverage: an interval with correct coverage has a
lower chance in some runs and a higher one in others. Their mean over runs is the coverage if the reference is right and
efficient. While it is not yet efficient, its error is correlated with its distance from the other centre, and the mean is
lower: `benchmarks.stress` has it beside the coverage.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import scipy.special
from numpy.typing import NDArray

from jaxlsgd.core.rows import MethodRows

FloatArray = NDArray[np.float64]


class Compared(NamedTuple):
    """The intervals of a method in one run, beside those of a reference."""

    reference: str  # a method with standard errors, whose theory holds for any optimiser
    distance: FloatArray  # (coordinates,) of its centre from the reference's, in standard errors of the reference
    # (coordinates,) that its interval contains the true value, given this run; None if the run speaks against the reference
    chance: FloatArray | None


def distances(rows: MethodRows, reference: MethodRows) -> FloatArray:
    """Return (estimate − reference)/se, (saves, replications, coordinates)."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        return (rows.estimate - reference.estimate) / reference.scale


def chances(rows: MethodRows, reference: MethodRows) -> FloatArray:
    """Return the probability that each interval of a method contains the true value, given its run.

    Args:
      rows: of the method.
      reference: rows of the same runs and coordinates, whose scale is a standard error.

    Returns:
      (saves, levels, replications, coordinates); NaN where one of them has no interval.
    """
    center = distances(rows, reference)[:, None]
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        half = rows.half_width / reference.scale[:, None]
        found = scipy.special.ndtr(center + half) - scipy.special.ndtr(center - half)
    return np.where((rows.ok & reference.ok)[:, None, :, None], found, np.nan)


__all__ = ["Compared", "chances", "distances"]
