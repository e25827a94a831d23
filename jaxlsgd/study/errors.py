"""Refusals of a study as a whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class SpecError(ValueError):
    """A study that cannot be run as it is written."""


@contextlib.contextmanager
def refusing(where: str = "") -> Iterator[None]:
    """Turns what is refused inside into a `SpecError` that says where the value stands."""
    try:
        yield
    except SpecError:
        raise
    except (ValueError, TypeError, OverflowError) as error:
        raise SpecError(f"{where}: {error}" if where else str(error)) from error
