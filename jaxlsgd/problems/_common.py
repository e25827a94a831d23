"""Covariates a ~ N(0, Σ) and the clients' true parameters, for the synthetic problems."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal

MAX_MATRIX_DIM = 2_000  # beyond it G and S are None: a (d, d) float64 array exceeds 32 MB
MOST_PARAMETERS = 10**8  # dim × num_clients


class Population(NamedTuple):
    """The checked and completed description of the clients."""

    weights: np.ndarray  # (K,)
    truths: np.ndarray  # (K, d), x*_k
    factor: np.ndarray | None  # (d, d), lower triangular L with Σ = LLᵀ; None for the identity
    init: np.ndarray  # (d,)

    def whiten(self, params: np.ndarray) -> np.ndarray:
        """Return Lᵀx for rows x: aᵀx = wᵀ(Lᵀx) with w ~ N(0, I)."""
        return params if self.factor is None else params @ self.factor

    def client_factors(self) -> np.ndarray:
        """Return L once per client, (K, d, d), as a view."""
        assert self.factor is not None
        return np.broadcast_to(self.factor, (len(self.weights), *self.factor.shape))


def population(
    dim: int,
    num_clients: int,
    *,
    heterogeneity: float,
    weights: ArrayLike | None,
    truth_seed: int,
    default_center: np.ndarray,
    init: ArrayLike | None,
    covariance: ArrayLike | None = None,
    client_truths: ArrayLike | None = None,
    center: ArrayLike | None = None,
) -> Population:
    """Check the arguments and draw x*_k = center + heterogeneity · N(0, I), once."""
    heterogeneity = checks.scale("heterogeneity", heterogeneity)
    truth_seed = checks.count("truth_seed", truth_seed, 0)
    if client_truths is not None:
        if center is not None:
            raise refusal("center", "be None when client_truths is given", center, code="conflict")
        truths = checks.array("client_truths", client_truths, (num_clients, dim))
    else:
        middle = default_center if center is None else checks.array("center", center, (dim,))
        unit = np.random.Generator(np.random.PCG64(truth_seed)).standard_normal((num_clients, dim))
        truths = middle + heterogeneity * unit
    return Population(
        weights=checks.weights(weights, num_clients),
        truths=truths,
        factor=_cholesky(covariance, dim),
        init=np.zeros(dim) if init is None else checks.array("init", init, (dim,)),
    )


def check_sizes(dim: Any, num_clients: Any) -> tuple[int, int]:
    """Refuse sizes that are not integers, or so large that one replication would exceed 400 MB."""
    d, K = checks.count("dim", dim, 1, 10**6), checks.count("num_clients", num_clients, 1, 10**7)
    if d * K > MOST_PARAMETERS:
        raise refusal("num_clients", f"keep dim × num_clients at most {MOST_PARAMETERS}", K)
    return d, K


def _cholesky(covariance: Any, dim: int) -> np.ndarray | None:
    """Return the Cholesky factor of Σ, or None for the identity."""
    if covariance is None:
        return None
    matrix = checks.array("covariance", covariance, (dim, dim))
    largest = np.abs(matrix).max()
    if np.abs(matrix - matrix.T).max() > 1e-10 * largest:
        raise refusal("covariance", "be symmetric", matrix.tolist())
    matrix = (matrix + matrix.T) / 2
    smallest = np.linalg.eigvalsh(matrix)[0]
    if smallest <= dim * np.finfo(np.float64).eps * largest:
        got = f"a smallest eigenvalue of {smallest:.6g}"
        raise refusal("covariance", "be positive definite", got)
    return None if np.array_equal(matrix, np.eye(dim)) else np.linalg.cholesky(matrix)
