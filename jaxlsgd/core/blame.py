"""Errors inside functions of users: a note says whose function it was, and in which file and line."""

from __future__ import annotations

import contextlib
import functools
import re
import traceback
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

_BEGINS = "in your "


@contextlib.contextmanager
def blaming(
    function: Callable[..., Any] | None, what: str, arguments: Collection[str] = ()
) -> Iterator[None]:
    """Adds a note to an error inside a user's function; its type, text and traceback stay.

    Nothing is added for functions of this package, nor to an error that has such a note already: that of the
    innermost function is the one to read.

    Args:
      function: that runs inside.
      what: it is, such as "`loss` of problem 'x'".
      arguments: names of its arguments, a refusal of one of which is no error of the function.
    """
    try:
        yield
    except Exception as error:
        if is_yours(function) and not note_of(error) and not refuses(error, arguments):
            error.add_note(f"{_BEGINS}{what}{_place(error, function)}")
        raise


def is_yours(function: Any) -> bool:
    """Returns whether a function comes from outside this package."""
    function = _plain(function)
    module = getattr(function, "__module__", None) or type(function).__module__
    return function is not None and module.partition(".")[0] != __name__.partition(".")[0]


def refuses(error: BaseException, arguments: Collection[str]) -> bool:
    """Returns whether an error is a refusal of one of some arguments, as in `noise: must ..., got ...`."""
    first = re.split(r"[:\[]", str(error), maxsplit=1)[0]
    return isinstance(error, (ValueError, OverflowError)) and first in arguments


def note_of(error: BaseException) -> str:
    """Returns the note that names the user's function in which an error was raised, or ""."""
    notes = getattr(error, "__notes__", ())
    return next((note for note in notes if str(note).startswith(_BEGINS)), "")


def told(error: BaseException) -> str:
    """Returns an error in words: its type and text, behind the user's function if it was raised in one."""
    text, note = f"{type(error).__name__}: {error}", note_of(error)
    return f"{note}: {text}" if note else text


def _plain(function: Any) -> Any:
    """Returns what was written: without partial, cache, jit and self."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif hasattr(function, "__func__"):
            function = function.__func__
        else:
            return function


def _place(error: BaseException, function: Any) -> str:
    """Returns the file and line: the last in the function's file on the way to the error, or where it begins."""
    plain = _plain(function)
    code = getattr(plain, "__code__", None) or getattr(type(plain).__call__, "__code__", None)
    if code is None:
        return ""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == code.co_filename]
    file = code.co_filename.removeprefix("<import ").removesuffix(">")  # see study.kinds
    return f" ({Path(file).name}, line {lines[-1] if lines else code.co_firstlineno})"
