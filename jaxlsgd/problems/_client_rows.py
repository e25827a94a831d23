"""Rows that clients hold: read as pytrees of arrays, checked, and padded to one length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxlsgd.core.checks import refusal
from jaxlsgd.core.problem import check_finite

MAX_ROWS = 2**23  # a float32 uniform has 23 random bits


def read_rows(name: str, clients: Any) -> list[Any]:
    """Returns the clients' rows as pytrees of arrays; a list within a client is an array."""
    if not isinstance(clients, (list, tuple, np.ndarray, jax.Array)) or len(clients) == 0:
        raise refusal(name, "be a sequence with one entry per client", clients)
    found = [jax.tree.map(_as_rows, c, is_leaf=lambda x: isinstance(x, list)) for c in clients]
    for k, client in enumerate(found):
        shapes = [leaf.shape for leaf in jax.tree.leaves(client)]
        if not shapes or any(shape[:1] != shapes[0][:1] or not shape for shape in shapes):
            raise ValueError(f"{name}: client {k} must have arrays of n_k rows, got {shapes}")
        kinds = [str(leaf.dtype) for leaf in jax.tree.leaves(client)]
        if any(leaf.dtype.kind not in "fiub" for leaf in jax.tree.leaves(client)):
            raise ValueError(f"{name}: client {k} must hold real numbers, got {kinds}")
        if _row_shape(client) != _row_shape(found[0]):
            raise ValueError(
                f"{name}: a row of client {k} must have the shape of client 0's, "
                f"{_row_shape(found[0])}, got {_row_shape(client)}"
            )
    return found


def _as_rows(leaf: Any) -> np.ndarray:
    try:
        return np.asarray(leaf)
    except ValueError:  # ragged
        return np.asarray(leaf, object)


def _row_shape(client: Any) -> Any:
    return jax.tree.structure(client), [leaf.shape[1:] for leaf in jax.tree.leaves(client)]


def check_sizes(features: list[Any], targets: list[Any]) -> np.ndarray:
    """Returns the n_k; refuses clients that are empty or too long, and data that is not finite."""
    if len(features) != len(targets):
        raise ValueError(
            f"targets: must have one entry for each of the {len(features)} clients, "
            f"got {len(targets)}"
        )
    counts = [len(jax.tree.leaves(client)[0]) for client in features]
    for k, n in enumerate(counts):
        other = len(jax.tree.leaves(targets[k])[0])
        if n != other:
            raise ValueError(f"targets: client {k} must have {n} rows as in features, got {other}")
        if not 1 <= n <= MAX_ROWS:
            raise ValueError(f"features: client {k} must have 1 to {MAX_ROWS} rows, got {n}")
    check_finite("features", features)
    check_finite("targets", targets)
    return np.array(counts, np.int32)


def pad(clients: Sequence[Any], length: int) -> Any:
    """Stacks the clients' rows to (K, length, ...), with zeros after the n_k."""

    def stack(*leaves: np.ndarray) -> np.ndarray:
        padded = np.zeros((len(leaves), length, *leaves[0].shape[1:]), np.result_type(*leaves))
        for row, leaf in zip(padded, leaves, strict=True):
            row[: len(leaf)] = leaf
        return padded

    return jax.tree.map(stack, *clients)
