"""Families of regressions: a loss, the responses that it is for, and how its numbers follow from the data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal
from jaxlsgd.problems import losses
from jaxlsgd.problems.losses import Loss

FloatArray = NDArray[np.floating[Any]]
_HUBER = 1.345  # 95 % efficient for normal noise
_MAD = 1.4826  # median absolute deviation to standard deviation


class Family(NamedTuple):
    """A loss of z = aᵀβ and the response, with what it needs of the data."""

    name: str  # of `losses.FAMILIES`
    scaled: bool = False  # whether the response may be shifted and scaled, β with it
    # (residuals of a least-squares pilot, n, d) → tuning, on the scale of the response
    tune: Callable[[FloatArray, int, int], tuple[float, ...]] | None = None
    in_units: tuple[bool, ...] = (False,)  # which numbers of `tuning` are in units of the response
    words: str = ""  # what `tuning` means, for the printed table
    least: float = -np.inf  # of the response
    most: float = np.inf
    rule: str = ""  # what a response must be
    separable: bool = False  # whether there is no minimum if a plane separates the responses
    link: str = "identity"  # of the mean, or of the quantile: "identity", "logit" or "log"
    # (fitted means of a Poisson regression, y, weights) → tuning
    dispersion: Callable[[FloatArray, FloatArray, FloatArray], tuple[float, ...]] | None = None

    @property
    def loss(self) -> Loss:
        """The loss with its derivatives."""
        return losses.FAMILIES[self.name]

    def describe(self, tuning: FloatArray, scale: float) -> str:
        """Return the numbers of the loss in words, on the scale of the response."""
        return self.words.format(*tuning * self.units(scale)) if self.words else ""

    def units(self, scale: float) -> FloatArray:
        """Return what each number of `tuning` is multiplied by for a response in units of 1/scale."""
        return np.where(self.in_units, scale, 1.0)

    def check_range(self, name: str, y: FloatArray) -> None:
        """Refuse responses outside the range of the family."""
        outside = (y < self.least) | (y > self.most)
        if outside.any():
            raise refusal(f"response {name!r}", self.rule, float(y[outside][0]), code="data")


_PLAIN = {
    "gaussian": Family("gaussian", scaled=True),
    "logistic": Family(
        "logistic",
        least=0.0,
        most=1.0,
        rule="be 0 or 1, or a share between",
        separable=True,
        link="logit",
    ),
    "poisson": Family(
        "poisson",
        least=0.0,
        rule="be a count of at least 0",
        separable=True,
        link="log",
    ),
}
FAMILIES = tuple(losses.FAMILIES)


def family_of(
    name: str,
    *,
    tau: float = 0.5,
    delta: float | None = None,
    bandwidth: float | None = None,
    dispersion: float | None = None,
) -> Family:
    """Return the family of a name; see `fit_table` for the arguments."""
    checks.choice("family", name, FAMILIES)
    if delta is not None:
        checks.positive("delta", delta)
    if bandwidth is not None:
        checks.positive("bandwidth", bandwidth)
    if dispersion is not None:
        checks.positive("dispersion", dispersion)
    if name == "huber":
        return _huber(delta)
    if name == "negative_binomial":
        return _negative_binomial(dispersion)
    if name == "quantile":
        return _quantile(checks.level(tau, "tau"), bandwidth)
    return _PLAIN[name]


def _huber(delta: float | None) -> Family:
    def tune(residuals: FloatArray, n: int, d: int) -> tuple[float, ...]:
        return (_HUBER * _spread(residuals) if delta is None else delta,)

    words = "Huber's loss, quadratic up to residuals of {0:.4g}"
    return Family("huber", True, tune, (True,), words)


def _quantile(tau: float, bandwidth: float | None) -> Family:
    def tune(residuals: FloatArray, n: int, d: int) -> tuple[float, ...]:
        h = _spread(residuals) * max(_smoothing(tau, n), 0.5 * (d / n) ** 0.4)
        return (tau, float(h) if bandwidth is None else bandwidth)

    words = "quantile {0:g}, smoothed over a bandwidth of {1:.4g}"
    return Family("quantile", True, tune, (False, True), words)


def _smoothing(tau: float, n: int) -> float:
    """Return the bandwidth of Hall and Sheather (1988) for the density at a quantile of normal residuals.

    It is that of a uniform kernel on the scale of probabilities; a logistic kernel of the same spread as
    Epanechnikov's, which statsmodels takes, is √(1/5)/(π/√3) times as wide.
    """
    x = special.ndtri(tau)
    height = np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)
    width = n ** (-1 / 3) * special.ndtri(0.975) ** (2 / 3)
    width *= (1.5 * height**2 / (2 * x**2 + 1)) ** (1 / 3)
    low, high = max(tau - width, tau / 10), min(tau + width, 1 - (1 - tau) / 10)
    return 0.2466 * float(special.ndtri(high) - special.ndtri(low))


def _negative_binomial(dispersion: float | None) -> Family:
    def find(mean: FloatArray, y: FloatArray, weights: FloatArray) -> tuple[float, ...]:
        return (_dispersion(mean, y, weights) if dispersion is None else dispersion,)

    return Family(
        "negative_binomial",
        words="counts of variance mean + {0:.4g} mean²",
        least=0.0,
        rule="be a count of at least 0",
        separable=True,
        link="log",
        dispersion=find,
    )


def _dispersion(mean: FloatArray, y: FloatArray, weights: FloatArray) -> float:
    """Return the likeliest α of counts with these means and variances mean + α mean²."""

    def loss(log_alpha: float) -> float:
        r = np.exp(-log_alpha)
        each = special.gammaln(y + r) - special.gammaln(r)
        each += r * np.log(r / (r + mean)) + y * np.log(mean / (r + mean))
        return -float(weights @ each)

    found: Any = optimize.minimize_scalar(loss, bounds=(-14.0, 5.0), method="bounded")
    return float(np.exp(found.x))


def mean_of(link: str, z: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the mean at a linear predictor, and its first two derivatives."""
    if link == "logit":
        mean = special.expit(z)
        slope = mean * special.expit(-z)
        return mean, slope, slope * (1 - 2 * mean)
    if link == "log":
        mean = np.exp(z)
        return mean, mean, mean
    return z, np.ones_like(z), np.zeros_like(z)


def log_likelihood(family: Family, mean: FloatArray, y: FloatArray) -> FloatArray | None:
    """Return that of rows for the families that have one without a scale, else None."""
    if family.name == "logistic":
        return special.xlogy(y, mean) + special.xlog1py(1 - y, -mean)
    if family.name == "poisson":
        return special.xlogy(y, mean) - mean - special.gammaln(y + 1)
    return None


def deviance(family: Family, mean: FloatArray, y: FloatArray, tuning: FloatArray) -> FloatArray:
    """Return that of rows: twice the loss above its least for a response; for Huber and quantiles, twice the loss."""
    if family.name == "gaussian":
        return (y - mean) ** 2
    if family.name == "logistic":
        part = special.xlogy(y, mean) + special.xlog1py(1 - y, -mean)
        return 2 * (special.xlogy(y, y) + special.xlog1py(1 - y, -y) - part)
    if family.name == "poisson":
        return 2 * (special.xlogy(y, y / mean) - y + mean)
    if family.name == "negative_binomial":
        alpha = tuning[0]
        joint = (y + 1 / alpha) * np.log((1 + alpha * y) / (1 + alpha * mean))
        return 2 * (special.xlogy(y, y / mean) - joint)
    return 2 * family.loss.value(np, mean, y, tuning)


def _spread(residuals: FloatArray) -> float:
    """Return a robust standard deviation; the plain one if half of the residuals are equal."""
    found = _MAD * float(np.median(np.abs(residuals - np.median(residuals))))
    return found if found > 0 else max(float(residuals.std()), 1e-12)
