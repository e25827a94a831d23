"""What a message may hold: real, finite numbers of the right shape, whole counts, and the place that it answers for.

Clients may be faulty or hostile. Each check returns the value that the server uses, or raises a `Refusal`, which becomes
"client NAME is left out: reason".
"""

from __future__ import annotations

import hashlib
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxlsgd.core.checks import LARGEST_COUNT, Refusal, refusal
from jaxlsgd.core.display import printable

FloatArray = NDArray[np.floating[Any]]
LARGEST = 1e100  # in a message; products of three such numbers are still finite
ROUNDING = 1e-5  # relative; matrices that were computed in float32 differ from their transposes by up to 1e-6 or so
_NAME = 60  # characters of a client's name in a note


def real(field: str, value: Any, shape: tuple[int, ...]) -> FloatArray:
    """Return finite real numbers of this shape as float64; refuse text, times, bools, complex numbers and objects."""
    try:
        found = np.asarray(value)
        numeric = found.dtype.kind in "iu" or jnp.issubdtype(found.dtype, jnp.floating)
    except Exception:  # whatever a client's object raises when it is read as an array
        raise refusal(field, "hold real numbers", value, code="type") from None
    if not numeric:
        raise refusal(field, "hold real numbers", found.dtype.name, code="type")
    if found.shape != shape:
        raise refusal(field, f"have shape {shape}", found.shape, code="shape")
    with np.errstate(over="ignore"):
        found = found.astype(np.float64)
    if not np.isfinite(found).all():
        raise refusal(field, "be finite", "NaN or infinity", code="not_finite")
    if np.max(np.abs(found), initial=0.0) > LARGEST:
        raise refusal(field, f"be at most {LARGEST:g} in size", "more", code="untrusted")
    return found


def whole(field: str, value: Any, least: int = 1) -> int:
    """Return a whole number from `least` to 2**53; it may come as a float, or as an array of one number."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > LARGEST_COUNT:
        found = np.inf  # 10**400 is no float
    else:
        found = float(real(field, value, ()))
    if not (found.is_integer() and least <= found < LARGEST_COUNT):
        rule = f"be a whole number of at least {least} and below 2**53"
        raise refusal(field, rule, value, code="untrusted")
    return int(found)


def symmetric(field: str, matrix: FloatArray) -> FloatArray:
    """Return the symmetric part of a square matrix; refuse one that differs from its transpose by more than rounding.

    What passes has no effect, since only the symmetric part is used.
    """
    size = np.sqrt(np.max(np.abs(matrix), axis=1, initial=0.0))
    if np.any(np.abs(matrix - matrix.T) > ROUNDING * np.outer(size, size)):
        gap = float(np.max(np.abs(matrix - matrix.T)))
        got = f"a matrix that differs from its transpose by {gap:.2g}"
        raise refusal(field, "be symmetric", got, code="untrusted")
    return (matrix + matrix.T) / 2


def positive(field: str, matrix: FloatArray) -> FloatArray:
    """Return a symmetric matrix without negative eigenvalues, up to rounding; refuse any other."""
    matrix = symmetric(field, matrix)
    # Each coordinate on its own scale, so that units do not matter.
    floor = max(1e-30 * float(np.max(np.abs(matrix), initial=0.0)), np.finfo(float).tiny)
    scale = np.sqrt(np.maximum(np.abs(np.diagonal(matrix)), floor))
    least = float(np.min(np.linalg.eigvalsh(matrix / np.outer(scale, scale)), initial=0.0))
    if least < -ROUNDING * len(matrix):
        got = f"a relative eigenvalue of {least:.2g}"
        raise refusal(field, "be positive semi-definite, as covariances are", got, code="untrusted")
    return matrix


def digest(*arrays: Any, number: int = 0) -> int:
    """Return a whole number below 2**53 that tells arrays apart, such as the parameters of a place, and a round.

    Arrays are rounded to float32, so that a framework that sends float32 answers for the same place. Not a secret.
    """
    code = hashlib.sha256(str(number).encode())
    with np.errstate(over="ignore"):
        for one in arrays:
            code.update((np.asarray(one, np.float64).astype("<f4") + np.float32(0.0)).tobytes())
    return int.from_bytes(code.digest()[:7], "big") >> 3


def answers(field: str, value: Any, asked: int, what: str) -> None:
    """Refuse a message whose digest is not that of what was asked."""
    if whole(field, value, 0) != asked:
        raise refusal(
            field, f"be that of {what}", "another, as in an old message", code="untrusted"
        )


def shown_name(name: Any) -> str:
    """Return a client's name on one line, without control characters."""
    text = printable(str(name)).replace("\n", "\\n")
    return text if len(text) <= _NAME else text[: _NAME - 1] + "…"


def left_out(name: Any, reason: Refusal | str) -> str:
    """Return the note about a client that is left out."""
    text = printable(str(reason)).replace("\n", "\\n")
    return f"client {shown_name(name)} is left out: {text}"
