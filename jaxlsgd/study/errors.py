"""Refusals of a study, with the place of the value in it."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Collection, Iterator

from jaxlsgd.core import checks


class SpecError(checks.Refusal):
    """A study that cannot be run as it is written."""


class OwnError(SpecError):
    """An error inside a user's own function: the study itself may be right."""


@contextlib.contextmanager
def refusing(
    where: str = "", arguments: Collection[str] = (), *, own: bool = False
) -> Iterator[None]:
    """Turn a refusal inside into a `SpecError` that names the place of the value in the study.

    Args:
      where: the place in the study, such as "problems[0]".
      arguments: names that are keys there, so that a refusal of `noise` is one of "problems[0].noise".
      own: whether the user's own code runs inside; any error then becomes a refusal.
    """
    try:
        yield
    except SpecError:
        raise
    except Exception as error:
        if checks.user_code_note(error):
            brief = checks.describe(error).strip().partition("\n")[0]
            text = f"{brief}; it was called for {where}" if where else brief
            raise OwnError(text, where) from error
        refused = isinstance(error, (ValueError, OverflowError))
        if own and not refused:
            brief = str(error).strip().partition("\n")[0]
            text = f"{type(error).__name__}: {brief}{_place(error)}"
        elif refused or isinstance(error, TypeError):
            text = str(error)
        else:
            raise
        inside, code = checks.argument_and_code(error)
        named = inside.partition("[")[0] in arguments
        text = f"{where}{'.' if named else ': '}{text}" if where else text
        argument = ".".join(part for part in (where, inside if named or not where else "") if part)
        raise SpecError(text, argument, code) from error


def _place(error: BaseException) -> str:
    """Return in words the line of an imported file that raised an error; "" if none did."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    found = next((f for f in frames if f.filename.startswith("<import ")), None)
    return f" ({found.filename[8:-1]}, line {found.lineno})" if found else ""


def line_of(error: BaseException, place: str) -> int | None:
    """Return the line of a source that raised an error, or has wrong syntax."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    found = next((frame.lineno for frame in frames if frame.filename == place), None)
    return found or getattr(error, "lineno", None)
