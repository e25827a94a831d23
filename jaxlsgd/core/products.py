"""Products over many rows and few columns, that leave other cores alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.floating[Any]]
# Products over many rows and few columns are made in pieces of so many multiplications, which OpenBLAS makes in one
# thread. Its threads wait for one another by spinning: while compilers and readers of files use the cores as well,
# that takes longer than the product.
_ONE_THREAD = 1 << 18
_FEWEST = 256  # rows of a piece


def gram(A: FloatArray, B: FloatArray) -> FloatArray:
    """Return AᵀB for (n, d) and (n, e)."""
    found = np.zeros((A.shape[1], B.shape[1]))
    for part in _pieces(len(A), A.shape[1] * B.shape[1]):
        one = A[part]
        found += one.T @ (one if A is B else B[part])  # of one array, BLAS makes half of it
    return found


def times(X: FloatArray, W: FloatArray, out: FloatArray | None = None) -> FloatArray:
    """Return XW for (n, d) and (d, e)."""
    found = np.empty((len(X), W.shape[1]), np.result_type(X, W)) if out is None else out
    for part in _pieces(len(X), W.size):
        np.matmul(X[part], W, out=found[part])
    return found


def along(X: FloatArray, v: FloatArray) -> FloatArray:
    """Return Xv for (n, d) and (d,)."""
    return np.einsum("ij,j->i", X, v)


def across(X: FloatArray, v: FloatArray) -> FloatArray:
    """Return Xᵀv for (n, d) and (n,)."""
    return np.einsum("ij,i->j", X, v)


def _pieces(n: int, each: int) -> Iterator[slice]:
    # Pieces of few rows would be sums of outer products, 30 times slower than a product of matrices.
    size = max(_FEWEST, _ONE_THREAD // each)
    return (slice(begin, begin + size) for begin in range(0, n, size))
