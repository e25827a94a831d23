"""Optimum, Hessian and gradient noise of logistic regression with Gaussian covariates.

Everything is for w ~ N(0, I), the whitened covariates. σ(z) = ½ + s(z) with s odd, so terms odd in
w vanish, and with y the optimum, y_k the truth of client k and m(r) = E σ'(rz), z ~ N(0, 1),

    E w σ(wᵀy) = m(‖y‖) y,      μ_k = m(‖y‖) y − m(‖y_k‖) y_k,
    G = E σ'(wᵀy) wwᵀ,          S_k = ½I − G − 2 E s(wᵀy) s(wᵀy_k) wwᵀ − μ_kμ_kᵀ.
"""

from __future__ import annotations

import numpy as np

MAX_NORM = 100.0  # beyond it labels are all but deterministic, and the planar rule grows as norm²
_REACH = 9.0  # z²φ(z) < 1e-15 there


def gaussian_rule(scale: float, refine: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Returns nodes and weights of a trapezoidal rule for E h(z), z ~ N(0, 1).

    `h` may be as sharp as σ(scale·z). Its poles are π/scale off the real line, where the rule's
    error is about exp(π²/(2 scale²) − 2π²/(scale·step)), and exp(−2π²/step²) for entire `h`:
    below 1e-14 for these steps. Nodes grow as scale; those of Gauss-Hermite would as scale².
    """
    step = min(0.4, 0.5 / max(scale, 1.0)) / refine
    count = int(np.ceil(_REACH / step))
    z = np.arange(-count, count + 1) * step
    return z, step * np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi)


def curvature(r: float, refine: float = 1.0) -> tuple[float, float]:
    """Returns E σ'(rz) and E z²σ'(rz)."""
    z, weight = gaussian_rule(r, refine)
    slope = 0.25 / np.cosh(np.minimum(0.5 * r * np.abs(z), 350.0)) ** 2
    return float(weight @ slope), float(weight @ (z**2 * slope))


def optimum(truths: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Returns y with m(‖y‖) y = Σ_k p_k m(‖y_k‖) y_k: along that sum, r = ‖y‖ long."""
    if np.all(truths == truths[0]):
        return truths[0]
    target = (weights * [curvature(float(r))[0] for r in np.linalg.norm(truths, axis=1)]) @ truths
    length = float(np.linalg.norm(target))
    if length == 0.0:
        return np.zeros_like(target)
    # m(r) r has the derivative E z²σ'(rz), positive and decreasing, and is at most r/4: so Newton's
    # method from 4 · length rises to the root without passing it.
    r = 4.0 * length
    for _ in range(100):
        m, slope = curvature(r)
        step = (length - m * r) / slope
        r += step
        if step <= 1e-15 * r:
            break
    return (r / length) * target


def hessian(y: np.ndarray) -> np.ndarray:
    """Returns G = E σ'(wᵀy) wwᵀ."""
    r = float(np.linalg.norm(y))
    across, along = curvature(r)
    direction = y / r if r > 0 else y
    return across * np.eye(len(y)) + (along - across) * np.outer(direction, direction)


def gradient_covariance(y: np.ndarray, truths: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Returns S = Σ_k p_k² S_k."""
    G = hessian(y)
    if np.all(truths == y):
        return np.sum(weights**2) * G
    m = curvature(float(np.linalg.norm(y)))[0]
    total = np.sum(weights**2) * (0.5 * np.eye(len(y)) - G)
    for truth, p in zip(truths, weights, strict=True):
        mean = m * y - curvature(float(np.linalg.norm(truth)))[0] * truth
        total -= p**2 * (2.0 * cross_moment(y, truth) + np.outer(mean, mean))
    return total


def cross_moment(y: np.ndarray, other: np.ndarray, refine: float = 1.0) -> np.ndarray:
    """Returns E s(wᵀy) s(wᵀy') wwᵀ, from the plane of y and y' and its complement."""
    r = float(np.linalg.norm(y))
    first = y / r if r > 0 else y
    along = float(other @ first)
    rest = other - along * first
    across = float(np.linalg.norm(rest))
    second = rest / across if across > 0 else rest  # 0 if parallel: then the plane is a line
    common, uu, uv, vv = _planar_moments(r, along, across, refine)
    mixed = np.outer(first, second)
    return (
        common * np.eye(len(y))
        + (uu - common) * np.outer(first, first)
        + uv * (mixed + mixed.T)
        + (vv - common) * np.outer(second, second)
    )


def _planar_moments(r: float, along: float, across: float, refine: float) -> np.ndarray:
    """Returns E s(ru) s(along·u + across·v) (1, u², uv, v²) for independent u, v ~ N(0, 1)."""
    u, weight_u = gaussian_rule(max(r, abs(along)), refine)
    v, weight_v = gaussian_rule(across, refine)
    inner = 0.5 * np.tanh(0.5 * (along * u[:, None] + across * v[None, :]))
    one, first, second = (inner @ np.stack([weight_v, weight_v * v, weight_v * v**2], axis=1)).T
    outer = weight_u * 0.5 * np.tanh(0.5 * r * u)
    return np.array([outer @ one, outer @ (u**2 * one), outer @ (u * first), outer @ second])
