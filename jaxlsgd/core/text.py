"""Numbers and columns as people read them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence


def with_error(value: float | None, error: float | None, decimals: int | None = None) -> str:
    """`value (error)` with the decimals that two digits of the error ask for; "-" for None.

    Example:
      >>> with_error(95.7, 0.641), with_error(None, None)
      ('95.70 (0.64)', '-')
    """
    if value is None:
        return "-"
    if error is None:
        return f"{value:.4g}" if decimals is None else f"{value:.{decimals}f}"
    places = error_decimals(error) if decimals is None else decimals
    if places > 9 or abs(value) >= 1e9:
        return f"{value:.4g} ({error:.2g})"
    return f"{value:.{places}f} ({error:.{places}f})"


def error_decimals(error: float) -> int:
    """Decimals that show two digits of an error; 4 for an error of 0."""
    return max(0, 1 - math.floor(math.log10(error))) if error > 0 else 4


def align(lines: Sequence[Sequence[str]], left: Collection[int] = ()) -> str:
    """Columns of equal width, a rule under the header; columns in `left` are left-aligned."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join([padded[0], "  ".join("-" * width for width in widths), *padded[1:]])
