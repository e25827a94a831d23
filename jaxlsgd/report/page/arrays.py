"""Columns of numbers as the page's script reads them: base64 of little-endian floats."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np


def packed(values: Any, kind: str = "<f4") -> dict[str, str]:
    """Numbers with None as NaN; `kind` is "<f4", "<f8" or "<i4"."""
    if kind != "<i4":
        values = [np.nan if value is None else value for value in np.ravel(values).tolist()]
    with np.errstate(over="ignore"):
        content = np.asarray(values, kind).tobytes()
    return {kind[1:]: base64.b64encode(content).decode("ascii")}
