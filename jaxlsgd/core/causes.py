"""The outcome of a replication: it completed, or it failed for a cause.

Failures are outcomes: they are kept, counted and listed, and never drawn again.
"""

from __future__ import annotations

import enum

import numpy as np
from numpy.typing import ArrayLike, NDArray

# A sound run ends below the loss that it began with, up to noise, however far off it starts.
MOST_GROWTH = 100.0


class Cause(enum.IntEnum):
    """The outcome of a replication under one method.

    `EXPLODED` needs neither the truth nor a scale of the parameters: the loss at the estimate exceeds that at
    x_0 by more than `MOST_GROWTH` times the mean absolute loss at x_0, both on 32 fixed observations of the
    problem (see `engine.probe`). A method that discards the wild part of a path, as one-step from increments does, is
    judged by its own estimate, and may complete when others have exploded.

    `CORRECTION` is a failure of the method and not of the run: the estimate is not finite or has exploded,
    but the path's average, which it corrects (`Measurement.path`), has not. Usually the path has not converged.
    """

    COMPLETED = 0
    FLOORED = 1  # completed, but a numerical floor acted, so that the scale is regularised
    NON_FINITE = 2  # the estimate is not finite, or a half-width is not a number
    EXPLODED = 3
    LOSS = 4  # the loss at the estimate is not a number, whatever its gradient is
    UNDEFINED = 5  # an infinite half-width: too few rounds, or withheld
    CORRECTION = 6  # the method's correction of a sound path failed

    @property
    def text(self) -> str:
        """Return the cause in words."""
        return _TEXTS[self]

    @property
    def count(self) -> str:
        """Return the name of the column that counts it."""
        return f"n_{self.name.lower()}"


_TEXTS = {
    Cause.COMPLETED: "completed",
    Cause.FLOORED: "regularised",
    Cause.NON_FINITE: "not finite",
    Cause.EXPLODED: "exploded",
    Cause.LOSS: "loss not a number",
    Cause.UNDEFINED: "no interval yet",
    Cause.CORRECTION: "correction failed",
}
DIVERGED = (Cause.NON_FINITE, Cause.EXPLODED, Cause.LOSS)  # failures of the run itself
FAILURES = (*DIVERGED, Cause.UNDEFINED, Cause.CORRECTION)


def causes(
    estimate: NDArray[np.float64],
    half_width: NDArray[np.float64],
    floored: NDArray[np.bool_],
    growth: ArrayLike = 0.0,
    path_growth: ArrayLike = np.nan,
) -> NDArray[np.uint8]:
    """Return the `Cause` of every replication.

    Args:
      estimate: (..., replications, coordinates).
      half_width: (..., levels, replications, coordinates).
      floored: (..., replications).
      growth: (..., replications), increase of the loss since x_0, in units of the loss there; NaN if the loss
        is not a number.
      path_growth: (..., replications), the same at the path's average, for a method whose estimate is a
        correction of it; NaN for others.
    """
    growth = np.broadcast_to(np.asarray(growth, np.float64), floored.shape)
    rules = {
        Cause.EXPLODED: growth > MOST_GROWTH,
        Cause.LOSS: np.isnan(growth),
        Cause.NON_FINITE: np.isnan(half_width).any((-3, -1)),
        Cause.UNDEFINED: np.isinf(half_width).any((-3, -1)),
        Cause.FLOORED: floored,
    }
    found = np.select(list(rules.values()), list(rules), Cause.COMPLETED)
    lost = ~np.isfinite(estimate).all(-1)
    found = np.where(lost, Cause.NON_FINITE, found)
    sound = np.asarray(path_growth, np.float64) <= MOST_GROWTH
    return np.where(np.isin(found, DIVERGED) & sound, Cause.CORRECTION, found).astype(np.uint8)
