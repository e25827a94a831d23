"""Numbers and columns as people read them."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from typing import Any

WIDTH = 100  # of a table as text


def fraction(value: Any) -> Any:
    """1/3 from "1/3", which TOML does not have; anything else as it is.

    A few digits only: `fractions.Fraction("1e999999999")` would write out a billion of them.
    """
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,9}/\d{1,9}", value):
        top, _, bottom = value.partition("/")
        return value if int(bottom) == 0 else int(top) / int(bottom)
    return value


def printable(text: str, keep: str = "\n") -> str:
    """Text from a file as a terminal may show it: what would steer the terminal is spelt out."""
    if text.isprintable():
        return text
    spelt = (repr(c)[1:-1] if not (c.isprintable() or c in keep) else c for c in text)
    return "".join(spelt)


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


def percent(
    value: float | None,
    error: float | None,
    low: float | None,
    high: float | None,
    decimals: int | None = None,
) -> str:
    """A proportion in per cent with its standard error, or its interval where that error is 0.

    At 0 % and 100 % the standard error is 0 by its formula, and says nothing.

    Example:
      >>> percent(1.0, 0.0, 0.963, 1.0), percent(0.95, 0.01, 0.92, 0.97), percent(1.0, None, 0.2, 1.0)
      ('100.0 [96.3, 100.0]', '95.0 (1.0)', '100')
    """
    scaled = [None if x is None else 100 * x for x in (value, error, low, high)]
    if scaled[1] != 0 or scaled[2] is None or scaled[3] is None:
        return with_error(scaled[0], scaled[1], decimals)
    return f"{scaled[0]:.1f} [{scaled[2]:.1f}, {scaled[3]:.1f}]"


def p_value(p: float, least: float = 1e-15) -> str:
    """A p-value; laws are not known, nor of use, beyond 15 digits.

    Example:
      >>> p_value(0.0), p_value(0.01234), p_value(1e-14)
      ('<1e-15', '0.0123', '1e-14')
    """
    least = max(least, 1e-15)
    return f"<{least:g}" if p <= least else f"{p:.3g}"


def plural(count: int, noun: str) -> str:
    """A number and a regular noun: '1 tile', '1,200 tiles'."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


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
