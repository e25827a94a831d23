"""Checks of arguments from users. Every refusal reads `argument: must rule, got value`.

A refusal also carries its `argument` and a `code`, so that programs and tests need not read its words.
Nothing here imports jax, so that a study file with a mistake is refused at once.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import math
import numbers
import re
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

LARGEST_INTERVAL = 2**31 - 1  # an interval is an int32 on the device
MOST_REPLICATIONS = (
    10**8
)  # of a simulation or a cell; the error of a coverage is then at most 0.00005
LARGEST_COUNT = 2**53
MOST_ENTRIES = 100_000  # in a list of problems, schedules, horizons, methods or levels
_SHOWN = 80  # characters of a refused value in a message
Dtype = Literal["float32", "float64"]
T = TypeVar("T")
_DEEPEST = 8  # levels of nested lists in an argument; a covariance needs 2


Code = Literal[
    "value",  # a number, text or object that breaks the rule of its argument
    "type",  # of another kind than the argument takes
    "choice",  # none of the names that are known
    "unknown",  # a key, file or option that does not exist
    "shape",  # an array of another shape, or a list of another length
    "not_finite",  # NaN or an infinity
    "missing",  # must be given here
    "unwanted",  # must be left out here
    "duplicate",  # given twice
    "conflict",  # does not go with another argument
    "unsupported",  # what this method, problem or family cannot do
    "data",  # what these data do not allow
    "disclosure",  # would reveal single rows
    "untrusted",  # a message that does not answer what was asked, or cannot be right
    "exists",  # a file or folder in the way, or that would be replaced
    "damaged",  # a file that is not what it should be
    "memory",  # more than there is
    "busy",  # in use by another run
    "unavailable",  # what this machine, its disk or a cluster does not give
]


class Refusal(ValueError):
    """A value that breaks a rule.

    Attributes:
      argument: which argument, key or field was refused.
      code: what is wrong with it, one of `Code`. Words may change; this does not.
    """

    def __init__(self, message: str, argument: str = "", code: Code = "value") -> None:
        super().__init__(message)
        self.argument = argument
        self.code: Code = code


def refusal(
    argument: str, rule: str, value: object, hint: str = "", *, code: Code = "value"
) -> Refusal:
    """Return the error for a value that breaks a rule: `raise refusal("E", "be at least 1", 0)`."""
    return Refusal(f"{argument}: must {rule}, got {shown(value)}{hint}", argument, code)


def shown(value: object) -> str:
    """Return a value as text for a message, cut if it is long; never raises, even if its `repr` does."""
    try:
        text = str.__str__(value) if isinstance(value, str) else repr(value)
    except (RecursionError, ValueError):  # nested too deeply, or a number of too many digits
        text = f"({type(value).__name__} that is too large to show)"
    except Exception as error:  # raised by a user's `__repr__`
        text = f"({type(value).__name__} whose repr raises {type(error).__name__})"
    text = text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
    return repr(text) if isinstance(value, str) else text


def nearest(value: object, known: Iterable[str]) -> str:
    """Return "; did you mean …?" if a known name is similar, else ""."""
    folded = {name.casefold(): name for name in known}
    text = value[:_SHOWN].casefold() if isinstance(value, str) else ""
    index = re.compile(r"\[\d+\]$")  # x[7] is no misspelling of x[3]
    other = index.sub("", text) if index.search(text) else None
    known = [name for name in folded if name == text or index.sub("", name) != other]
    near = difflib.get_close_matches(text, known, n=1, cutoff=0.6)
    return f"; did you mean {folded[near[0]]!r}?" if near else ""


def number(
    argument: str, value: Any, rule: str = "be a finite number", above: float = -math.inf
) -> float:
    """Return a finite real number greater than `above`."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    try:
        found = float(value) if real else math.nan
    except OverflowError:  # an integer beyond all floats
        found = math.inf
    if not real:
        raise refusal(argument, rule, value, code="type")
    if not math.isfinite(found):
        raise refusal(argument, rule, value, code="not_finite")
    if not found > above:
        raise refusal(argument, rule, value)
    return found


def positive(argument: str, value: Any) -> float:
    """Return a finite number greater than 0."""
    return number(argument, value, "be a finite number greater than 0", 0.0)


def scale(argument: str, value: Any) -> float:
    """Return a finite number that is at least 0."""
    found = number(argument, value, rule := "be a finite number of at least 0")
    if found < 0:
        raise refusal(argument, rule, value)
    return found


def count(argument: str, value: Any, least: int = 1, most: int = LARGEST_COUNT) -> int:
    """Return an integer between two bounds."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or not least <= int(value) <= most:
        bounds = f"of at least {least}" if most == LARGEST_COUNT else f"from {least} to {most}"
        raise refusal(argument, f"be an integer {bounds}", value, code="value" if whole else "type")
    return int(value)


def level(value: Any, argument: str = "level") -> float:
    """Return a confidence level strictly between 0 and 1."""
    found = number(argument, value, rule := "be a number strictly between 0 and 1")
    if not 0 < found < 1:
        hint = f"; did you mean {found / 100:g}?" if 2 <= found < 100 else ""
        raise refusal(argument, rule, value, hint)
    return found


def fixed_time(valid: Any, method: str) -> None:
    """Refuse a method intervals that hold at several looks together."""
    if valid != "fixed":
        rule = (
            f'be "fixed" for {method}, whose intervals hold at one time that does not depend on the data: its error is '
            "no sum over the observations, as that of one_step is, so that no law bounds it at all looks together; "
            'one_step(valid="always", best_at=...) has such intervals'
        )
        raise refusal("valid", rule, valid, code="unsupported")


def choice(argument: str, value: T, known: Any) -> T:
    """Return one of the known names.

    Args:
      argument: which argument it is.
      value: what was given.
      known: the names, or a `Literal` of them.
    """
    known = get_args(known) or known
    if not isinstance(value, str) or value not in known:
        raise refusal(
            argument, f"be one of {', '.join(known)}", value, nearest(value, known), code="choice"
        )
    return value


def label(argument: str, value: Any) -> str:
    """Return a name that fits in a table: printable, not blank, at most 60 characters."""
    fits = isinstance(value, str) and re.fullmatch(r"\S(?:.{0,58}\S)?", value)
    if not fits or not value.isprintable():
        raise refusal(argument, "be a name of 1 to 60 printable characters", value)
    return value


def distinct(argument: str, names: Iterable[Any], named: bool = False) -> None:
    """Refuse what is given twice; what is `named` can be given another name."""
    seen = set()
    for i, name in enumerate(names):
        if name in seen:
            rule = "differ from the others" + ("; give it a name of its own" if named else "")
            raise refusal(f"{argument}[{i}]", rule, name, code="duplicate")
        seen.add(name)


def known_keys(
    argument: str, table: Mapping[str, Any], known: Collection[str], read: Collection[str] = ()
) -> None:
    """Refuse a table with an unknown key; some keys have been read before, and may have been meant."""
    for key in table:
        if key not in known:
            meant = sorted({*known, *read} - {key})
            hint = nearest(key, meant) or f"; known keys: {', '.join(meant)}"
            place = f"{argument}.{key}" if argument else str(key)
            raise Refusal(f"{shown(place)[1:-1]}: unknown key{hint}", place, "unknown")


def table(argument: str, value: Any, what: str) -> dict[str, Any]:
    """Return a table with string keys."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise refusal(argument, f"be {what}", value, code="type")
    return dict(value)


def sequence(argument: str, value: Any, what: str) -> list[Any]:
    """Return a list or tuple that has from 1 to `MOST_ENTRIES` entries."""
    if not isinstance(value, (list, tuple)) or not value:
        raise refusal(argument, f"be a list of at least one {what}", value, code="type")
    if len(value) > MOST_ENTRIES:
        raise refusal(argument, f"have at most {MOST_ENTRIES} entries", len(value))
    return list(value)


def numeric(argument: str, value: Any, depth: int = 0) -> Any:
    """Return a finite number, or nested lists of numbers as tuples."""
    if not isinstance(value, (list, tuple)):
        return value if type(value) is int else number(argument, value)
    if depth == _DEEPEST or not value:
        rule = "be a number, or lists of numbers that are not empty"
        raise refusal(argument, rule, value, code="type")
    return tuple(numeric(f"{argument}[{i}]", part, depth + 1) for i, part in enumerate(value))


def reals(argument: str, value: Any, rule: str = "hold real numbers") -> NDArray[np.float64]:
    """Return real numbers as a float64 copy."""
    try:
        return np.array(value, np.float64)
    except (TypeError, ValueError) as error:  # of another kind, or a ragged list
        raise refusal(argument, rule, value, code="type") from error


def array(argument: str, value: Any, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return finite numbers of the given shape, as a float64 copy."""
    found = reals(argument, value, f"hold real numbers of shape {shape}")
    if found.shape != shape:
        raise refusal(argument, f"have shape {shape}", found.shape, code="shape")
    finite(argument, found)
    return found


def finite(argument: str, value: Any) -> None:
    """Refuse an array with a NaN or an infinity; the error names the place of the first one."""
    found = reals(argument, value)
    bad = ~np.isfinite(found)
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        place = f"{argument}[{', '.join(map(str, at))}]" if at else argument
        raise refusal(place, "be finite", float(found[at]), code="not_finite")


def weights(value: Any, num_clients: int) -> NDArray[np.float64]:
    """Return a distribution over the clients; uniform if None."""
    if value is None:
        return np.full(num_clients, 1.0 / num_clients)
    found = array("weights", value, (num_clients,))
    if np.any(found < 0):
        first = int(np.argmax(found < 0))
        raise refusal(f"weights[{first}]", "not be negative", float(found[first]))
    if not math.isclose(found.sum(), 1.0, abs_tol=1e-6):
        raise refusal("weights", "sum to 1", float(found.sum()))
    return found / found.sum()


def positive_array(argument: str, values: ArrayLike) -> NDArray[Any]:
    """Return a non-empty vector of finite numbers greater than 0, of any dtype."""
    found = np.asarray(values)
    if found.ndim != 1 or found.size == 0:
        raise refusal(argument, "be a sequence that is not empty", values, code="shape")
    # NumPy reads [2, True] as [2, 1].
    has_bool = isinstance(values, (list, tuple)) and any(isinstance(v, bool) for v in values)
    if has_bool or found.dtype.kind not in "iuf":
        raise refusal(
            argument, "hold numbers only", "bool" if has_bool else str(found.dtype), code="type"
        )
    good = np.isfinite(found) & (found > 0)
    if not good.all():
        first = int(good.argmin())
        worst, code = found[first].item(), "value" if np.isfinite(found[first]) else "not_finite"
        raise refusal(f"{argument}[{first}]", "be finite and > 0", worst, code=code)
    return found


def interval_array(argument: str, values: ArrayLike) -> NDArray[np.int64]:
    """Return a non-empty vector of integers from 1 to `LARGEST_INTERVAL`."""
    found = positive_array(argument, values)
    good = found <= LARGEST_INTERVAL
    if found.dtype.kind == "f":
        good &= found == np.floor(found)
    if not good.all():
        first, rule = int(good.argmin()), f"be an integer from 1 to {LARGEST_INTERVAL}"
        raise refusal(f"{argument}[{first}]", rule, found[first].item())
    return found.astype(np.int64)


def contrasts(value: ArrayLike) -> tuple[tuple[float, ...], ...]:
    """Return a finite matrix of full row rank, (number, d), as rows."""
    matrix = reals("contrasts", value)
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise refusal("contrasts", "be a matrix (number, d)", matrix.shape, code="shape")
    finite("contrasts", matrix)
    rank = int(np.linalg.matrix_rank(matrix))
    if rank < matrix.shape[0]:
        got = f"{matrix.shape[0]} of rank {rank}"
        raise refusal("contrasts", "have linearly independent rows", got)
    return tuple(map(tuple, matrix.tolist()))


_NOTE_START = "in your "


@contextlib.contextmanager
def blaming(
    function: Callable[..., Any] | None, what: str, arguments: Collection[str] = ()
) -> Iterator[None]:
    """Add a note that names a user's function to an error raised in it; keep its type, text and traceback.

    Errors in functions of this package get no note. With nested functions, the innermost one is named.

    Args:
      function: the function that runs in this context.
      what: its description, such as "`loss` of problem 'x'".
      arguments: names of its arguments; an error that refuses one of them gets no note.
    """
    try:
        yield
    except Exception as error:
        if _is_users(function) and not user_code_note(error) and not refuses(error, arguments):
            error.add_note(f"{_NOTE_START}{what}{_place(error, function)}")
        raise


def _is_users(function: Any) -> bool:
    """Return whether a function comes from outside this package."""
    function = _unwrapped(function)
    module = getattr(function, "__module__", None) or type(function).__module__
    return function is not None and module.partition(".")[0] != __name__.partition(".")[0]


def refuses(error: BaseException, arguments: Collection[str]) -> bool:
    """Return whether an error refuses one of these arguments, or an entry of it."""
    refused = isinstance(error, (ValueError, OverflowError))
    return refused and argument_and_code(error)[0].partition("[")[0] in arguments


def argument_and_code(error: BaseException) -> tuple[str, Code]:
    """Return what an error refuses and why; an error of a user's function has them in its text alone."""
    if isinstance(error, Refusal):
        return error.argument, error.code
    named = re.match(r"(\w+(?:\[[^\]]*\])?): ", str(error))
    return (named[1] if named else ""), "value"


def user_code_note(error: BaseException) -> str:
    """Return the note by `blaming` that names the user's function in which an error was raised, or ""."""
    notes = getattr(error, "__notes__", ())
    return next((note for note in notes if str(note).startswith(_NOTE_START)), "")


def describe(error: BaseException) -> str:
    """Return an error's type and text, preceded by the user's function in which it was raised."""
    note = user_code_note(error)
    return f"{note}: {with_type(error)}" if note else with_type(error)


def with_type(error: BaseException) -> str:
    """Return an error's type and text; a refusal's text says all."""
    text = error.msg if isinstance(error, SyntaxError) else error
    return str(text) if isinstance(error, Refusal) else f"{type(error).__name__}: {text}"


def _unwrapped(function: Any) -> Any:
    """Return the function itself: without partial, cache, jit and self."""
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
    """Return file and line: the last frame in the function's file, or else where the function begins."""
    function = _unwrapped(function)
    code = getattr(function, "__code__", None)
    code = code or getattr(type(function).__call__, "__code__", None)
    if code is None:
        return ""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == code.co_filename]
    file = code.co_filename.removeprefix("<import ").removesuffix(">")  # see study.imports
    return f" ({Path(file).name}, line {lines[-1] if lines else code.co_firstlineno})"
