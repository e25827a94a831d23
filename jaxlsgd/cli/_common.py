"""Declarations of verbs, and types of arguments, that the verbs share."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, Protocol

from jaxlsgd.core import checks

USAGE = 2  # exit code
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def command() -> str:
    """Return how this command line was called: `scripts/jaxlsgd` of a clone says so."""
    return os.environ.get("JAXLSGD_COMMAND", "jaxlsgd")


class Parser(argparse.ArgumentParser):
    """A parser whose error messages are one line, and whose options may be declared when it is used."""

    when_used: Callable[[argparse.ArgumentParser], None] | None = None  # adds the options

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        """Declare what is left to declare, and parse."""
        declare, self.when_used = self.when_used, None
        if declare is not None:
            declare(self)
        return super().parse_known_args(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and where to read more, and exit with code 2."""
        sys.stderr.write(f"jaxlsgd: error: {message} (see {self.prog} --help)\n")
        raise SystemExit(USAGE)


class Verbs(Protocol):
    """The subparsers of the command line."""

    def add_parser(self, name: str, **options: Any) -> Parser:
        """Add the parser of a verb."""
        ...


def add_verb(
    verbs: Verbs, name: str, function: Callable[[argparse.Namespace], int], text: str, examples: str
) -> Parser:
    """Declare a verb with its help and examples."""
    parser = verbs.add_parser(
        name,
        help=text.split("\n")[0],
        description=text,
        epilog="examples:\n" + "\n".join(f"  {line}" for line in examples.strip().split("\n")),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(function=function)
    return parser


def add_several(parser: argparse.ArgumentParser, name: str, **given: Any) -> None:
    """Add an option that takes one value or several, and may be repeated."""
    given = {"nargs": "+", "default": [], **given}
    parser.add_argument(f"--{name}", action="extend", **given)


def add_import(parser: argparse.ArgumentParser) -> None:
    """Add --import, the only way to run code of the user's: a study file alone runs none."""
    parser.add_argument(
        "--import",
        dest="imports",
        metavar="FILE",
        action="append",
        default=[],
        help="Python file that registers kinds of your own (@jaxlsgd.register); may be repeated",
    )


def add_other_code(parser: argparse.ArgumentParser) -> None:
    """Add --allow-other-code, to extend rows that another version of this package made."""
    parser.add_argument(
        "--allow-other-code",
        action="store_true",
        help="add to rows that another version or checkout of jaxlsgd made (a warning is recorded)",
    )


def load_imports(arguments: argparse.Namespace) -> None:
    """Run the files that `--import` names."""
    if arguments.imports:
        from jaxlsgd.study import imports

        for path in arguments.imports:
            imports.load(path)


def conflict(option: str, rule: str) -> checks.Refusal:
    """Return the error for an option that does not go with the others."""
    return checks.Refusal(f"{option}: must {rule}", option, "conflict")


@contextlib.contextmanager
def in_options(options: Mapping[str, str]) -> Iterator[None]:
    """Name options in refusals, in place of arguments of a Python function.

    Args:
      options: the option of each argument, as `{"half_width": "--until"}`.
    """
    given = re.compile(rf"\b({'|'.join(options)})=(['\"])(\S+?)\2")
    try:
        yield
    except ValueError as error:
        argument, colon, rest = str(error).partition(": ")
        rest = given.sub(lambda found: f"{options[found[1]]} {found[3]}", rest)
        name = options.get(argument, argument)
        raise checks.Refusal(
            name + colon + rest, name, checks.argument_and_code(error)[1]
        ) from error


def seconds(text: str) -> float:
    """Return the seconds of 90, 90s, 15m, 8h or 1h30m."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise argparse.ArgumentTypeError(f"must be a time such as 90, 15m or 1h30m, got {text!r}")
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def integer(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return the type of an argument that is an integer between two bounds."""
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
            raise argparse.ArgumentTypeError(f"must be an integer {bounds}, got {text!r}")
        return int(text)

    return read


positive = integer(1)


def share(text: str) -> float:
    """Return a number strictly between 0 and 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        hint = f"; did you mean {value / 100:g}?" if 1 < value < 100 else ""
        raise argparse.ArgumentTypeError(f"must be strictly between 0 and 1, got {text!r}{hint}")
    return value
