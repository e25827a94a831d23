"""Losses of a linear predictor z = aᵀβ and a response y: what a regression minimises.

Each is written once, for NumPy and JAX alike: `xp` is either module. `tuning` holds the numbers of the
loss that may differ from table to table, so that tables share compiled programs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal

FloatArray = NDArray[np.floating[Any]]
HUBER = 1.345  # 95 % efficient for normal noise
_MAD = 1.4826  # median absolute deviation to standard deviation


class Family(NamedTuple):
    """A loss f(z, y) with its first two derivatives in z."""

    name: str
    loss: Callable[..., Any]  # (xp, z, y, tuning) → f
    first: Callable[..., Any]  # → f'
    second: Callable[..., Any]  # → f''
    scaled: bool  # whether the response may be shifted and scaled, β with it
    # (residuals of a least-squares pilot, n, d) → tuning, on the scale of the response
    tune: Callable[[FloatArray, int, int], tuple[float, ...]] | None = None
    in_units: tuple[bool, ...] = (False,)  # which numbers of `tuning` are in units of the response
    words: str = ""  # what `tuning` means, for the printed table
    least: float = -np.inf  # of the response
    most: float = np.inf
    rule: str = ""  # what a response must be
    separable: bool = False  # whether there is no minimum where a plane separates the responses

    def told(self, tuning: FloatArray, scale: float) -> str:
        """The numbers of the loss in words, on the scale of the response."""
        return self.words.format(*tuning * self.units(scale)) if self.words else ""

    def units(self, scale: float) -> FloatArray:
        """What each number of `tuning` is multiplied by for a response in units of 1/scale."""
        return np.where(self.in_units, scale, 1.0)

    @property
    def derivatives(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """f' and f'': functions of this module, so that programs are compiled once."""
        return self.first, self.second


def _squared(xp: Any, z: Any, y: Any, tuning: Any) -> Any:
    return 0.5 * (z - y) ** 2


def _squared_first(xp: Any, z: Any, y: Any, tuning: Any) -> Any:
    return z - y


def _one(xp: Any, z: Any, y: Any, tuning: Any) -> Any:
    return xp.ones_like(z)


def _sigmoid(xp: Any, z: Any) -> Any:
    return 0.5 * (1 + xp.tanh(0.5 * z))  # no overflow at either end


def _logistic(xp: Any, z: Any, y: Any, tuning: Any) -> Any:
    return xp.logaddexp(0.0, z) - y * z


def _logistic_first(xp: Any, z: Any, y: Any, tuning: Any) -> Any:
    return _sigmoid(xp, z) - y


def _logistic_second(xp: Any, z: Any, y: Any, tuning: Any) -> Any:
    return _sigmoid(xp, z) * _sigmoid(xp, -z)


def _poisson(xp: Any, z: Any, y: Any, tuning: Any) -> Any:
    return xp.exp(z) - y * z


def _poisson_first(xp: Any, z: Any, y: Any, tuning: Any) -> Any:
    return xp.exp(z) - y


def _poisson_second(xp: Any, z: Any, y: Any, tuning: Any) -> Any:
    return xp.exp(z)


def _huber(xp: Any, z: Any, y: Any, tuning: Any) -> Any:
    gap, delta = xp.abs(z - y), tuning[0]
    return xp.where(gap < delta, 0.5 * gap**2, delta * (gap - 0.5 * delta))


def _huber_first(xp: Any, z: Any, y: Any, tuning: Any) -> Any:
    return xp.clip(z - y, -tuning[0], tuning[0])


def _huber_second(xp: Any, z: Any, y: Any, tuning: Any) -> Any:
    return xp.where(xp.abs(z - y) < tuning[0], 1.0, 0.0).astype(z.dtype)


def _quantile(xp: Any, z: Any, y: Any, tuning: Any) -> Any:
    tau, h = tuning[0], tuning[1]
    return tau * (y - z) + h * xp.logaddexp(0.0, (z - y) / h)


def _quantile_first(xp: Any, z: Any, y: Any, tuning: Any) -> Any:
    return _sigmoid(xp, (z - y) / tuning[1]) - tuning[0]


def _quantile_second(xp: Any, z: Any, y: Any, tuning: Any) -> Any:
    u = (z - y) / tuning[1]
    return _sigmoid(xp, u) * _sigmoid(xp, -u) / tuning[1]


def _spread(residuals: FloatArray) -> float:
    """Robust standard deviation; the plain one where half of the residuals are equal."""
    found = _MAD * float(np.median(np.abs(residuals - np.median(residuals))))
    return found if found > 0 else max(float(residuals.std()), 1e-12)


GAUSSIAN = Family("gaussian", _squared, _squared_first, _one, scaled=True)
LOGISTIC = Family(
    "logistic",
    _logistic,
    _logistic_first,
    _logistic_second,
    scaled=False,
    least=0.0,
    most=1.0,
    rule="be 0 or 1, or a share between",
    separable=True,
)
POISSON = Family(
    "poisson",
    _poisson,
    _poisson_first,
    _poisson_second,
    scaled=False,
    least=0.0,
    rule="be a count of at least 0",
    separable=True,
)
FAMILIES = ("gaussian", "logistic", "poisson", "huber", "quantile")


def _huber_family(delta: float | None) -> Family:
    def tune(residuals: FloatArray, n: int, d: int) -> tuple[float, ...]:
        return (HUBER * _spread(residuals) if delta is None else delta,)

    words = "Huber's loss, quadratic up to residuals of {0:.4g}"
    return Family("huber", _huber, _huber_first, _huber_second, True, tune, (True,), words)


def _quantile_family(tau: float, bandwidth: float | None) -> Family:
    def tune(residuals: FloatArray, n: int, d: int) -> tuple[float, ...]:
        # He, Pan, Tan and Zhou (2023), for convolution-type smoothing.
        h = _spread(residuals) * max(0.05, ((d + np.log(n)) / n) ** 0.4)
        return (tau, float(h) if bandwidth is None else bandwidth)

    words = "quantile {0:g}, smoothed over a bandwidth of {1:.4g}"
    parts = (_quantile, _quantile_first, _quantile_second)
    return Family("quantile", *parts, True, tune, (False, True), words)


def family_of(
    name: str, *, tau: float = 0.5, delta: float | None = None, bandwidth: float | None = None
) -> Family:
    """The family of a name.

    Args:
      name: "gaussian", "logistic" (responses 0 and 1, or shares between), "poisson", "huber" or
        "quantile" (smoothed by the logistic kernel).
      tau: which quantile.
      delta: where Huber's loss becomes linear, on the scale of the response; 1.345 robust standard
        deviations of the pilot's residuals if None.
      bandwidth: of the smoothing, on the scale of the response; from the pilot if None.
    """
    checks.choice("family", name, FAMILIES)
    if delta is not None:
        checks.positive("delta", delta)
    if bandwidth is not None:
        checks.positive("bandwidth", bandwidth)
    if name == "huber":
        return _huber_family(delta)
    if name == "quantile":
        return _quantile_family(checks.level(tau, "tau"), bandwidth)
    return {"gaussian": GAUSSIAN, "logistic": LOGISTIC, "poisson": POISSON}[name]


def check_range(family: Family, name: str, y: FloatArray) -> None:
    """Refuses responses that the family has no use for."""
    outside = (y < family.least) | (y > family.most)
    if outside.any():
        raise refusal(f"response {name!r}", family.rule, float(y[outside][0]))


def check_response(family: Family, name: str, y: FloatArray) -> None:
    """Refuses the responses of a whole table that the family has no use for."""
    check_range(family, name, y)
    if y.min() == y.max():
        raise refusal(f"response {name!r}", "vary", f"{y[0]:g} in all {len(y):,} rows")
