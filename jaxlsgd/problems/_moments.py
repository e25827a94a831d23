"""Exact optimum, Hessian and gradient noise: by quadrature for normal covariates, by sums for data.

With a = (1, Lw) or Lw, w ~ N(0, I), the predictors z = aᵀx and z_k = aᵀx*_k are normal in the plane of Lᵀx and
Lᵀx*_k. Given both, a loss f(z, b) enters by three functions of them:

    e₁ = E f'(z, b),   e₂ = E f'(z, b)²,   e₃ = E f''(z, b),

and  E ∇f_k = E e₁ a,   E ∇²f_k = E e₃ aaᵀ,   Cov(∇f_k) = E e₂ aaᵀ − E e₁ a (E e₁ a)ᵀ  are planar integrals.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import expit

from jaxlsgd.core.checks import Refusal, refusal
from jaxlsgd.problems.losses import LOGISTIC, Conditional, Loss
from jaxlsgd.problems.solution import newton

_MOST_STEPS = 100
_VANISHES = 1e-11  # the mean gradient, relative to the largest standard deviation of a gradient


class Design(NamedTuple):
    """The population of a regression, client by client."""

    truths: np.ndarray  # (K, d), x*_k; the intercept is first, if there is one
    factors: np.ndarray  # (K, d', d') L_k; d' = d − 1 with an intercept
    weights: np.ndarray  # (K,)
    intercept: bool
    conditional: Conditional
    width: float  # scale of z on which the conditional moments vary
    location: bool  # whether they depend on z − z_k alone
    ridge: float  # λ of + λ/2 ‖x‖²


class Optimum(NamedTuple):
    """The optimum, with Hessian and gradient noise there."""

    x: np.ndarray  # (d,)
    G: np.ndarray  # (d, d)
    S: np.ndarray  # (d, d)


def gaussian_optimum(design: Design) -> Optimum:
    """Solves Σ_k p_k E ∇f_k(x) + λx = 0 by Newton's method with halved steps."""
    points = newton(
        functools.partial(_totals, design),
        design.weights @ design.truths,
        step=lambda found: np.linalg.solve(found[1], found[0]),
        better=lambda new, old: np.linalg.norm(new[0]) < np.linalg.norm(old[0]),
        halvings=20,
    )
    points = itertools.islice(points, _MOST_STEPS + 1)
    x, found, step = next(points)
    while np.linalg.norm(step) > 1e-14 * (1 + np.linalg.norm(x)):
        x, found, step = next(points, (x, found, 0 * step))
    gradient, G, S = found
    noise = np.sqrt(max(np.diagonal(S).max(), np.finfo(float).tiny))
    if not np.linalg.norm(gradient) <= _VANISHES * max(noise, 1.0):
        rule = "leave a problem whose mean gradient vanishes where Newton's method ends"
        raise refusal("heterogeneity", rule, f"one of {np.linalg.norm(gradient):.3g}")
    return Optimum(x, G, S)


def _totals(design: Design, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the mean gradient, G and S at x."""
    d = len(x)
    gradient, G, S = design.ridge * x, design.ridge * np.eye(d), np.zeros((d, d))
    for truth, L, p in zip(design.truths, design.factors, design.weights, strict=True):
        # Functions of z − z_k need only a line.
        pair = (x - truth, 0 * truth) if design.location else (x, truth)
        mean, square, slope = client_moments(design, *pair, L)
        gradient, G = gradient + p * mean, G + p * slope
        S = S + p**2 * (square - np.outer(mean, mean))
    return gradient, G, S


def client_moments(
    design: Design, x: np.ndarray, truth: np.ndarray, L: np.ndarray, refine: float = 1.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return E f'a, E f'² aaᵀ and E f'' aaᵀ of a client."""
    first = int(design.intercept)
    y, other = L.T @ x[first:], L.T @ truth[first:]
    r = float(np.linalg.norm(y))
    along_y = y / r if r > 0 else y
    along = float(other @ along_y)
    rest = other - along * along_y
    across = float(np.linalg.norm(rest))
    # Parallel up to rounding: the plane is a line.
    flat = across <= 1e-12 * (1 + abs(along))
    across, across_y = (0.0, 0.0 * rest) if flat else (across, rest / across)
    scale = max(r, abs(along), abs(r - along))
    u, weight_u = gaussian_rule(scale / design.width, refine)
    v, weight_v = (0 * u[:1], np.ones(1)) if flat else gaussian_rule(across / design.width, refine)
    z, z_k = r * u[:, None], along * u[:, None] + across * v[None, :]
    shifts = (x[0], truth[0]) if design.intercept else (0.0, 0.0)
    e = design.conditional(z + shifts[0] + 0 * z_k, z_k + shifts[1])
    weights = weight_u[:, None] * weight_v[None, :]
    basis = np.stack([along_y, across_y], axis=1)
    uv = np.stack(np.broadcast_arrays(u[:, None], v[None, :]))
    whole = [_second_moments(weights * one, uv, basis, L, design.intercept) for one in e]
    return whole[0][0], whole[1][1], whole[2][1]


def _second_moments(
    e: np.ndarray, uv: np.ndarray, basis: np.ndarray, L: np.ndarray, intercept: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return E e·a and E e·aaᵀ, from weights e on a grid of coordinates uv, (2, ..), in a plane's basis, (d', 2)."""
    total = e.sum()
    linear = L @ (basis @ np.einsum("iuv,uv->i", uv, e))
    square = np.einsum("iuv,juv,uv->ij", uv, uv, e)
    inner = total * np.eye(len(L)) + basis @ (square - total * np.eye(2)) @ basis.T
    quadratic = L @ inner @ L.T
    if not intercept:
        return linear, quadratic
    vector = np.concatenate([[total], linear])
    return vector, np.block([[vector[:1, None], linear[None]], [linear[:, None], quadratic]])


MAX_NORM = 100.0  # beyond it labels are almost deterministic, and the planar rule grows as norm²
_REACH = 9.0  # z²φ(z) < 1e-15 there


def gaussian_rule(scale: float, refine: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Return nodes and weights of a trapezoidal rule for E h(z), z ~ N(0, 1).

    `h` may be as sharp as σ(scale·z). Its poles are π/scale off the real line, where the rule's
    error is about exp(π²/(2 scale²) − 2π²/(scale·step)), and exp(−2π²/step²) for entire `h`:
    below 1e-14 for these steps. Nodes grow as scale; those of Gauss-Hermite would as scale².
    """
    step = min(0.4, 0.5 / max(scale, 1.0)) / refine
    count = int(np.ceil(_REACH / step))
    z = np.arange(-count, count + 1) * step
    return z, step * np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi)


def curvature(r: float, refine: float = 1.0) -> tuple[float, float]:
    """Return E σ'(rz) and E z²σ'(rz)."""
    z, weight = gaussian_rule(r, refine)
    slope = 0.25 / np.cosh(np.minimum(0.5 * r * np.abs(z), 350.0)) ** 2
    return float(weight @ slope), float(weight @ (z**2 * slope))


def logistic_optimum(truths: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return y with m(‖y‖) y = Σ_k p_k m(‖y_k‖) y_k: along that sum, r = ‖y‖ long."""
    if np.all(truths == truths[0]):
        return truths[0]
    target = (weights * [curvature(float(r))[0] for r in np.linalg.norm(truths, axis=1)]) @ truths
    length = float(np.linalg.norm(target))
    if length == 0.0:
        return np.zeros_like(target)
    # m(r) r has the derivative E z²σ'(rz), positive and decreasing, and is at most r/4: so Newton's
    # method from 4 · length increases to the root without passing it.
    r = 4.0 * length
    for _ in range(100):
        m, slope = curvature(r)
        step = (length - m * r) / slope
        r += step
        if step <= 1e-15 * r:
            break
    return (r / length) * target


def hessian(y: np.ndarray) -> np.ndarray:
    """Return G = E σ'(wᵀy) wwᵀ."""
    r = float(np.linalg.norm(y))
    across, along = curvature(r)
    direction = y / r if r > 0 else y
    return across * np.eye(len(y)) + (along - across) * np.outer(direction, direction)


def gradient_covariance(y: np.ndarray, truths: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return S = Σ_k p_k² S_k."""
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
    """Return E s(wᵀy) s(wᵀy') wwᵀ, from the plane of y and y' and its complement."""
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
    """Return E s(ru) s(along·u + across·v) (1, u², uv, v²) for independent u, v ~ N(0, 1)."""
    u, weight_u = gaussian_rule(max(r, abs(along)), refine)
    v, weight_v = gaussian_rule(across, refine)
    inner = 0.5 * np.tanh(0.5 * (along * u[:, None] + across * v[None, :]))
    one, first, second = (inner @ np.stack([weight_v, weight_v * v, weight_v * v**2], axis=1)).T
    outer = weight_u * 0.5 * np.tanh(0.5 * r * u)
    return np.array([outer @ one, outer @ (u**2 * one), outer @ (u * first), outer @ second])


Rows = Sequence[np.ndarray]

_SEPARABLE = (
    "targets: logistic loss has no minimum, since a hyperplane separates the labels of the rows "
    "with positive weight"
)


def solve_squared(features: Rows, targets: Rows, weights: np.ndarray) -> np.ndarray:
    """Return the minimiser of Σ_k p_k (1/n_k) Σ_i ½(a_kiᵀx − b_ki)²."""
    A, b, row_weights = _stack(features, targets, weights)
    root = np.sqrt(row_weights)
    return np.linalg.lstsq(root[:, None] * A, root * b, rcond=None)[0]


def solve_logistic(features: Rows, targets: Rows, weights: np.ndarray) -> np.ndarray:
    """Return the minimiser of Σ_k p_k (1/n_k) Σ_i softplus(z_ki) − b_ki z_ki, z = a_kiᵀx.

    Newton's method with halving. It has converged when no logit moves by 1e-12; on separable data
    some logit keeps moving by about 1, however small the gradient becomes.
    """
    A, b, row_weights = _stack(features, targets, weights)
    signs = 2.0 * b - 1.0

    def at(x: np.ndarray) -> tuple[np.ndarray, float]:
        z = A @ x
        return z, float(row_weights @ np.logaddexp(0.0, -signs * z))

    def step_from(found: tuple[np.ndarray, float]) -> np.ndarray:
        z, _ = found
        if np.all(signs * z > 0):
            raise Refusal(f"{_SEPARABLE}; got all {len(b)} labels right", "targets", "data")
        # Not σ(z) − b, which is 0 from |z| = 37 on: separable data would seem to converge.
        gradient = -A.T @ (row_weights * signs * expit(-signs * z))
        H = A.T @ ((row_weights * LOGISTIC.second(np, z, b))[:, None] * A)
        try:
            return np.linalg.solve(H, gradient)
        except np.linalg.LinAlgError as error:
            raise Refusal(f"{_SEPARABLE}; got a singular Hessian", "targets", "data") from error

    def better(new: tuple[np.ndarray, float], old: tuple[np.ndarray, float]) -> bool:
        return new[1] <= old[1] + 1e-14

    x, previous = np.zeros(A.shape[1]), np.inf
    points = newton(at, x, step_from, better, halvings=60)
    for x, (z, _), step in itertools.islice(points, 100):
        moved = float(np.abs(A @ step).max())
        # Convergence is quadratic, so a small move that stops shrinking is rounding.
        if moved <= 1e-12 * (1.0 + np.abs(z).max()) or 0.5 * previous < moved < 1e-7:
            return x - step
        previous = moved
    text = f"{_SEPARABLE} or leaves some undecided; got ‖x‖ = {np.linalg.norm(x):.6g}"
    raise Refusal(text, "targets", "data")


def _stack(
    features: Rows, targets: Rows, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return all rows of clients with p_k > 0, their targets, and the weight p_k/n_k of each row."""
    chosen = [k for k, p in enumerate(weights) if p > 0]
    A = np.concatenate([features[k] for k in chosen])
    b = np.concatenate([targets[k] for k in chosen])
    row_weights = np.concatenate(
        [np.full(len(targets[k]), weights[k] / len(targets[k])) for k in chosen]
    )
    rank = int(np.linalg.matrix_rank(A))
    if rank < A.shape[1]:
        rule = f"have {A.shape[1]} columns that are linearly independent over the {len(A)} rows with positive weight"
        raise refusal("features", rule, f"rank {rank}", code="data")
    return A, b, row_weights


def moments(
    features: Rows, targets: Rows, weights: np.ndarray, truth: np.ndarray, loss: Loss
) -> tuple[np.ndarray, np.ndarray]:
    """Return G = Σ_k p_k ∇²f_k(x*) and S = Σ_k p_k² Cov(∇f(x*; ξ_k))."""
    G = np.zeros((len(truth), len(truth)))
    S = np.zeros_like(G)
    for A, b, p in zip(features, targets, weights, strict=True):
        z = A @ truth
        first, second = loss.first(np, z, b), loss.second(np, z, b)
        gradients = first[:, None] * A
        centred = gradients - gradients.mean(axis=0)
        G += p / len(b) * (A.T @ (second[:, None] * A))
        S += p**2 / len(b) * (centred.T @ centred)
    return G, S
