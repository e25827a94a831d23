"""Numbers that are dear to compute and few to keep: known to the process, noted while a tile runs.

A law that tabulates its critical values looks here first. A study keeps what its tiles have used beside
their rows, and hands it to whoever runs tiles later.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

Rows = dict[
    str, NDArray[np.float64]
]  # by what they are a function of; finite or infinite, never NaN

_MOST = 100_000
_known: Rows = {}
_lock = threading.Lock()
_here = threading.local()


def known(key: str) -> NDArray[np.float64] | None:
    """What was computed for a key before, if it was."""
    with _lock:
        found = _known.get(key)
    if found is not None:
        _note(key, found)
    return found


def learn(rows: Mapping[str, NDArray[np.float64]]) -> None:
    """Makes rows known; beyond 100,000 of them the oldest are forgotten."""
    with _lock:
        _known.update(rows)
        for key in list(_known)[: max(0, len(_known) - _MOST)]:
            del _known[key]
    for key, values in rows.items():
        _note(key, values)


def forget(keys: Iterable[str]) -> None:
    """Makes rows unknown again."""
    with _lock:
        for key in keys:
            _known.pop(key, None)


@contextlib.contextmanager
def noting(used: Rows) -> Iterator[None]:
    """Adds to `used` what this thread looks up or learns meanwhile."""
    before = getattr(_here, "used", None)
    _here.used = used
    try:
        yield
    finally:
        _here.used = before


def _note(key: str, values: NDArray[np.float64]) -> None:
    used: Rows | None = getattr(_here, "used", None)
    if used is not None:
        used[key] = values
