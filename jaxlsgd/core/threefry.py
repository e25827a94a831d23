"""Random words by counter: elementwise over keys and counters, so that it vectorises along any axis."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxlsgd.core.problem import Array

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


class StreamKeys(NamedTuple):
    """The two words of a key, or of every replication's key."""

    high: Array  # () or (replications,) uint32
    low: Array  # () or (replications,) uint32


def threefry2x32(keys: StreamKeys, high: Array, low: Array) -> tuple[Array, Array]:
    """Threefry-2x32 with 20 rounds, unrolled, elementwise over keys and counters.

    Reference: Salmon, Moraes, Dror, Shaw (2011), Parallel random numbers: as easy as 1, 2, 3.
    """
    schedule = (keys.high, keys.low, keys.high ^ keys.low ^ _PARITY)
    x0, x1 = high + schedule[0], low + schedule[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = (x1 << np.uint32(rotation)) | (x1 >> np.uint32(32 - rotation))
            x1 = x0 ^ x1
        x0 = x0 + schedule[(group + 1) % 3]
        x1 = x1 + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1
