"""Optimum, Hessian and gradient noise of regressions on finite data: sums, not integrals.

The objective is Σ_k p_k (1/n_k) Σ_i f(x; ξ_ki), and an observation is a row drawn uniformly, with
replacement, from the client's own n_k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from scipy.special import expit

Rows = Sequence[np.ndarray]
Factors = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]

_SEPARABLE = (
    "targets: logistic loss has no minimum, since a hyperplane separates the labels of the rows "
    "with positive weight"
)


def solve_squared(features: Rows, targets: Rows, weights: np.ndarray) -> np.ndarray:
    """Returns the minimiser of Σ_k p_k (1/n_k) Σ_i ½(a_kiᵀx − b_ki)²."""
    A, b, row_weights = _stack(features, targets, weights)
    root = np.sqrt(row_weights)
    return np.linalg.lstsq(root[:, None] * A, root * b, rcond=None)[0]


def solve_logistic(features: Rows, targets: Rows, weights: np.ndarray) -> np.ndarray:
    """Returns the minimiser of Σ_k p_k (1/n_k) Σ_i softplus(z_ki) − b_ki z_ki, z = a_kiᵀx.

    Newton's method with halving. It has converged when no logit moves by 1e-12; on separable data
    some logit moves by about 1 for ever, however small the gradient becomes.
    """
    A, b, row_weights = _stack(features, targets, weights)
    signs = 2.0 * b - 1.0
    x, z, loss = np.zeros(A.shape[1]), np.zeros(len(b)), np.log(2.0)
    previous = np.inf
    for _ in range(100):
        # Not σ(z) − b, which is 0 from |z| = 37 on: separable data would seem to converge.
        gradient = -A.T @ (row_weights * signs * expit(-signs * z))
        H = A.T @ ((row_weights * expit(z) * expit(-z))[:, None] * A)
        try:
            step = np.linalg.solve(H, gradient)
        except np.linalg.LinAlgError as error:
            raise ValueError(f"{_SEPARABLE}; got a singular Hessian") from error
        moved = float(np.abs(A @ step).max())
        # Convergence is quadratic, so a small move that stops shrinking is rounding.
        if moved <= 1e-12 * (1.0 + np.abs(z).max()) or 0.5 * previous < moved < 1e-7:
            return x - step
        previous = moved
        x, z, loss = _descend(A, signs, row_weights, x, step, loss)
        if np.all(signs * z > 0):
            raise ValueError(f"{_SEPARABLE}; got all {len(b)} labels right at x = {x}")
    raise ValueError(f"{_SEPARABLE} or leaves some undecided; got ‖x‖ = {np.linalg.norm(x):.6g}")


def _descend(
    A: np.ndarray,
    signs: np.ndarray,
    row_weights: np.ndarray,
    x: np.ndarray,
    step: np.ndarray,
    loss: float,
) -> tuple[np.ndarray, np.ndarray, float]:
    """Returns x − step/2^j, its logits and its loss, for the first j that does not raise it."""
    for halving in range(60):
        shorter = x - step / 2**halving
        z = A @ shorter
        new = float(row_weights @ np.logaddexp(0.0, -signs * z))
        if new <= loss + 1e-14:
            return shorter, z, new
    return x, A @ x, loss


def _stack(
    features: Rows, targets: Rows, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns all rows of clients with p_k > 0, their targets, and p_k/n_k a row."""
    chosen = [k for k, p in enumerate(weights) if p > 0]
    A = np.concatenate([features[k] for k in chosen])
    b = np.concatenate([targets[k] for k in chosen])
    row_weights = np.concatenate(
        [np.full(len(targets[k]), weights[k] / len(targets[k])) for k in chosen]
    )
    rank = int(np.linalg.matrix_rank(A))
    if rank < A.shape[1]:
        raise ValueError(
            f"features: the {A.shape[1]} columns must be linearly independent over the "
            f"{len(A)} rows with positive weight, got rank {rank}"
        )
    return A, b, row_weights


def squared_factors(z: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns f' and f'' of ½(z − b)² in z."""
    return z - b, np.ones_like(z)


def logistic_factors(z: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns f' and f'' of softplus(z) − bz in z."""
    return expit(z) - b, expit(z) * expit(-z)


def moments(
    features: Rows, targets: Rows, weights: np.ndarray, truth: np.ndarray, factors: Factors
) -> tuple[np.ndarray, np.ndarray]:
    """Returns G = Σ_k p_k ∇²f_k(x*) and S = Σ_k p_k² Cov(∇f(x*; ξ_k))."""
    G = np.zeros((len(truth), len(truth)))
    S = np.zeros_like(G)
    for A, b, p in zip(features, targets, weights, strict=True):
        first, second = factors(A @ truth, b)
        gradients = first[:, None] * A
        centred = gradients - gradients.mean(axis=0)
        G += p / len(b) * (A.T @ (second[:, None] * A))
        S += p**2 / len(b) * (centred.T @ centred)
    return G, S
