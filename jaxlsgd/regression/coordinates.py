"""The coordinates in which a regression runs, and the way back to those of the table.

The design is standardised, x_s = (x − m)/s, and whitened, a = Wᵀx_s with WᵀĜW = I for the pilot's Hessian Ĝ.
Both are linear maps of the coefficients, so minimiser, estimate and covariance go back exactly:

    θ = W u,    β = y_s Z θ + y_c e_0,    Cov(β) = (y_s Z W) Cov(u) (y_s Z W)ᵀ,

with y = y_c + y_s y′ the scaled response (for losses that allow it) and Z the map of slopes on x_s to slopes
on x, which takes Σ_j m_j β_j off the intercept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxlsgd.core.checks import refusal
from jaxlsgd.regression.products import gram

FloatArray = NDArray[np.floating[Any]]
_CONSTANT = 1e-10  # standard deviation over largest size of a column that says nothing
_COLLINEAR = 1e-11  # eigenvalue of the correlations


class Coordinates(NamedTuple):
    """Standardised columns and response."""

    center: FloatArray  # (d,) m; 0 for the intercept and without one
    scale: FloatArray  # (d,) s; 1 for the intercept
    y_center: float
    y_scale: float
    slopes: NDArray[np.bool_]  # (d,) False for the intercept

    def features(self, X: FloatArray) -> FloatArray:
        """x_s."""
        found = X - self.center
        found /= self.scale
        return found

    def response(self, y: FloatArray) -> FloatArray:
        """y′."""
        return (y - self.y_center) / self.y_scale

    @property
    def back(self) -> FloatArray:
        """y_s Z: coefficients of x_s to those of x."""
        Z = np.diag(1 / self.scale)
        if not self.slopes.all():
            Z[~self.slopes] -= (self.center / self.scale)[None, :]
        return self.y_scale * Z

    def coefficients(self, theta: FloatArray) -> FloatArray:
        """β of θ."""
        return self.back @ theta + self.y_center * ~self.slopes


def coordinates(
    X: FloatArray, y: FloatArray, names: tuple[str, ...], intercept: int | None, scaled: bool
) -> Coordinates:
    """Means and standard deviations; refuses columns that are constant.

    Args:
      X: (n, d).
      y: (n,).
      names: of the columns.
      intercept: which column is the intercept's.
      scaled: whether the loss allows to scale the response.
    """
    slopes = np.ones(X.shape[1], bool)
    if intercept is not None:
        slopes[intercept] = False
    center = np.where(slopes & (intercept is not None), X.mean(axis=0), 0.0)
    gaps = X - center
    spread = np.sqrt(np.einsum("ij,ij->j", gaps, gaps) / len(X))
    largest = np.maximum(X.max(axis=0), -X.min(axis=0))
    for j in np.flatnonzero(slopes & (spread <= _CONSTANT * largest)):
        hint = "; the intercept does that already" if intercept is not None else ""
        raise refusal(f"column {names[j]!r}", "vary", f"{X[0, j]:g} in every row", hint)
    scale = np.where(slopes, spread, 1.0)
    y_center = float(y.mean()) if scaled and intercept is not None else 0.0
    y_scale = float(np.sqrt(np.mean((y - y_center) ** 2))) if scaled else 1.0
    return Coordinates(center, scale, y_center, y_scale or 1.0, slopes)


def check_rank(X_s: FloatArray, names: tuple[str, ...]) -> None:
    """Refuses columns that are combinations of one another, and names them."""
    if len(X_s) < X_s.shape[1]:
        what = f"{len(X_s):,} rows for {X_s.shape[1]} coefficients"
        raise refusal("frame", "have more rows than coefficients", what)
    products = gram(X_s, X_s) / len(X_s)
    root = np.sqrt(np.diagonal(products))
    values, vectors = np.linalg.eigh(products / np.outer(root, root))
    if values[0] > _COLLINEAR * values[-1]:
        return
    share = np.abs(vectors[:, 0])
    involved = [names[j] for j in np.flatnonzero(share > 1e-3 * share.max())]
    hint = "; leave one of them out, or give a ridge"
    raise refusal("columns", "not determine one another", " and ".join(involved), hint)
