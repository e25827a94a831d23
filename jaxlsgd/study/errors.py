"""Refusals of a study as a whole."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator


class SpecError(ValueError):
    """A study that cannot be run as it is written."""


@contextlib.contextmanager
def refusing(where: str = "", arguments: Collection[str] = ()) -> Iterator[None]:
    """Turns what is refused inside into a `SpecError` that says where the value stands.

    Args:
      where: the place in the study, such as "problems[0]".
      arguments: names that are keys there, so that a refusal of `noise` is one of "problems[0].noise".
    """
    try:
        yield
    except SpecError:
        raise
    except (ValueError, TypeError, OverflowError) as error:
        text = str(error)
        between = "." if re.split(r"[:\[]", text, maxsplit=1)[0] in arguments else ": "
        raise SpecError(f"{where}{between}{text}" if where else text) from error
