"""Refusals of a study's values: where, what was given, the rule, and the nearest right name."""

from __future__ import annotations

import difflib
import math
import numbers
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

_SHOWN = 80  # characters of a refused value that a message repeats
MOST_PARTS = 100_000  # of a list of problems, schedules, horizons, methods or levels
_DEEPEST = 8  # nesting of lists in an argument; a covariance needs 2


class SpecError(ValueError):
    """A study that cannot be run as it is written."""


def must(where: str, value: object, rule: str, hint: str = "") -> SpecError:
    """The error for a value that breaks a rule."""
    return SpecError(f"{where} = {shown(value)}: must {rule}{hint}")


def shown(value: object) -> str:
    """A value for a message, cut where it is long."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except (RecursionError, ValueError):  # nested too deeply, or a number of too many digits
        text = f"({type(value).__name__} that is too large to show)"
    text = text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
    return repr(text) if isinstance(value, str) else text


def nearest(value: object, known: Iterable[str]) -> str:
    """'; did you mean …?' where a known name is near, or ''."""
    folded = {name.casefold(): name for name in known}
    text = value[:_SHOWN].casefold() if isinstance(value, str) else ""
    near = difflib.get_close_matches(text, folded, n=1, cutoff=0.5)
    return f"; did you mean {folded[near[0]]!r}?" if near else ""


def choice(where: str, value: Any, known: Collection[str]) -> str:
    """One of the known names."""
    if not isinstance(value, str) or value not in known:
        raise must(where, value, f"be one of {', '.join(known)}", nearest(value, known))
    return value


def known_keys(where: str, table: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuses a table with a key that nothing reads."""
    for key, value in table.items():
        if key not in known:
            place = f"{where}.{key}" if where else str(key)
            hint = nearest(key, known) or f"; known keys: {', '.join(sorted(known))}"
            raise SpecError(f"{place} = {shown(value)}: unknown key{hint}")


def table(where: str, value: Any, what: str) -> dict[str, Any]:
    """A table with string keys."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise must(where, value, f"be {what}")
    return dict(value)


def sequence(where: str, value: Any, what: str) -> list[Any]:
    """A list or tuple that is neither empty nor absurdly long."""
    if not isinstance(value, (list, tuple)) or not value:
        raise must(where, value, f"be a list of at least one {what}")
    if len(value) > MOST_PARTS:
        raise must(where, value, f"have at most {MOST_PARTS} entries, not {len(value)}")
    return list(value)


def integer(where: str, value: Any, least: int, most: int) -> int:
    """An integer between two bounds."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or not least <= int(value) <= most:
        raise must(where, value, f"be an integer from {least} to {most}")
    return int(value)


def number(where: str, value: Any) -> float:
    """A finite real number."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    try:
        found = float(value) if real else math.nan
    except OverflowError:  # an integer beyond all floats
        found = math.inf
    if not math.isfinite(found):
        raise must(where, value, "be a finite number")
    return found


def level(where: str, value: Any) -> float:
    """A confidence level strictly between 0 and 1."""
    found = number(where, value)
    if not 0 < found < 1:
        hint = f"; did you mean {found / 100:g}?" if 1 < found < 100 else ""
        raise must(where, value, "be strictly between 0 and 1", hint)
    return found


def label(where: str, value: Any) -> str:
    """A name that fits in a table: printable, not blank, at most 60 characters."""
    fits = isinstance(value, str) and re.fullmatch(r"\S(?:.{0,58}\S)?", value)
    if not fits or not value.isprintable():
        raise must(where, value, "be a name of 1 to 60 printable characters")
    return value


def numeric(where: str, value: Any, depth: int = 0) -> Any:
    """A finite number, or nested lists of them as tuples."""
    if not isinstance(value, (list, tuple)):
        return number(where, value)
    if depth == _DEEPEST or not value:
        raise must(where, value, "be a number, or lists of numbers that are not empty")
    return tuple(numeric(f"{where}[{i}]", part, depth + 1) for i, part in enumerate(value))


def distinct(where: str, names: Iterable[Any]) -> None:
    """Refuses a name that is given twice."""
    seen = set()
    for i, name in enumerate(names):
        if name in seen:
            raise must(f"{where}[{i}]", name, "differ from the others; give it a name of its own")
        seen.add(name)


def told(where: str, make: Callable[[], Any]) -> Any:
    """The result of `make`, whose refusals then say where the value stands."""
    try:
        return make()
    except SpecError:
        raise
    except (ValueError, TypeError, OverflowError) as error:
        raise SpecError(f"{where}: {error}") from error
