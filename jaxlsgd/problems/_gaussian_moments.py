"""Optimum, Hessian and gradient noise of a regression whose covariates are normal, by quadrature.

With a = (1, Lw) or Lw, w ~ N(0, I), the predictors z = aᵀx and z_k = aᵀx*_k are normal in the plane of Lᵀx and
Lᵀx*_k. Given both, a loss f(z, b) is known by three functions of them:

    e₁ = E f'(z, b),   e₂ = E f'(z, b)²,   e₃ = E f''(z, b),

and  E ∇f_k = E e₁ a,   E ∇²f_k = E e₃ aaᵀ,   Cov(∇f_k) = E e₂ aaᵀ − E e₁ a (E e₁ a)ᵀ  are planar integrals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxlsgd.core.checks import refusal
from jaxlsgd.problems._logistic_moments import gaussian_rule

# (z, z_k) → e₁, e₂, e₃
Conditional = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]
_MOST_STEPS = 100
_VANISHES = 1e-11  # of the mean gradient, against the largest gradient's standard deviation


class Design(NamedTuple):
    """Where a regression's observations come from."""

    truths: np.ndarray  # (K, d), x*_k; the intercept is first, if there is one
    factors: np.ndarray  # (K, d', d') L_k; d' = d − 1 with an intercept
    weights: np.ndarray  # (K,)
    intercept: bool
    conditional: Conditional
    width: float  # on what scale of z the conditional moments vary
    location: bool  # whether they are functions of z − z_k alone
    ridge: float  # λ of + λ/2 ‖x‖²


class Optimum(NamedTuple):
    """What is known at the optimum."""

    x: np.ndarray  # (d,)
    G: np.ndarray  # (d, d)
    S: np.ndarray  # (d, d)


def optimum(design: Design) -> Optimum:
    """Solves Σ_k p_k E ∇f_k(x) + λx = 0 by Newton's method with halved steps."""
    x = design.weights @ design.truths
    gradient, G, S = _totals(design, x)
    for _ in range(_MOST_STEPS):
        step, share = np.linalg.solve(G, gradient), 1.0
        if np.linalg.norm(step) <= 1e-14 * (1 + np.linalg.norm(x)):
            break
        while share > 1e-6:
            found = _totals(design, x - share * step)
            if np.linalg.norm(found[0]) < np.linalg.norm(gradient):
                break
            share /= 2
        else:
            break
        x, (gradient, G, S) = x - share * step, found
    noise = np.sqrt(max(np.diagonal(S).max(), np.finfo(float).tiny))
    if not np.linalg.norm(gradient) <= _VANISHES * max(noise, 1.0):
        rule = "leave a problem whose mean gradient vanishes where Newton's method ends"
        raise refusal("heterogeneity", rule, f"one of {np.linalg.norm(gradient):.3g}")
    return Optimum(x, G, S)


def _totals(design: Design, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean gradient, G and S at x."""
    d = len(x)
    gradient, G, S = design.ridge * x, design.ridge * np.eye(d), np.zeros((d, d))
    for truth, L, p in zip(design.truths, design.factors, design.weights, strict=True):
        # Of z − z_k alone, a line will do.
        pair = (x - truth, 0 * truth) if design.location else (x, truth)
        mean, square, slope = client_moments(design, *pair, L)
        gradient, G = gradient + p * mean, G + p * slope
        S = S + p**2 * (square - np.outer(mean, mean))
    return gradient, G, S


def client_moments(
    design: Design, x: np.ndarray, truth: np.ndarray, L: np.ndarray, refine: float = 1.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """E f'a, E f'² aaᵀ and E f'' aaᵀ of a client."""
    first = int(design.intercept)
    y, other = L.T @ x[first:], L.T @ truth[first:]
    r = float(np.linalg.norm(y))
    along_y = y / r if r > 0 else y
    along = float(other @ along_y)
    rest = other - along * along_y
    across = float(np.linalg.norm(rest))
    # Parallel but for rounding: the plane is a line, and its second direction plays no part.
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
    """E e·a and E e·aaᵀ, from weights e on a grid of coordinates uv, (2, ..), in a plane's basis, (d', 2)."""
    total = e.sum()
    linear = L @ (basis @ np.einsum("iuv,uv->i", uv, e))
    square = np.einsum("iuv,juv,uv->ij", uv, uv, e)
    inner = total * np.eye(len(L)) + basis @ (square - total * np.eye(2)) @ basis.T
    quadratic = L @ inner @ L.T
    if not intercept:
        return linear, quadratic
    vector = np.concatenate([[total], linear])
    return vector, np.block([[vector[:1, None], linear[None]], [linear[:, None], quadratic]])
