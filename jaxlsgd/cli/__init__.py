"""The command line: verbs, no mathematics; `studies` makes and runs studies, `results` reads them.

`main` is the entry point. It starts without importing jax, which only some verbs need.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jaxlsgd
from jaxlsgd.cli import critical_value, fit, results, studies
from jaxlsgd.cli._common import USAGE, Parser
from jaxlsgd.core.checks import describe, nearest, refusal, user_code_note
from jaxlsgd.core.display import printable

_GROUPS = (studies, results, fit, critical_value)
_EPILOG = """\
a first study:
  jaxlsgd init study.toml               write a commented study file to edit
  jaxlsgd plan study.toml               estimate its cost before it runs
  jaxlsgd run study.toml --out results  run it; the same command resumes it
  jaxlsgd status results                show its progress, even while it runs
  jaxlsgd table results                 print coverage and length with their errors

the paper:
  jaxlsgd reproduce all --out paper     its tables and figures next to ours

exit codes: 0 done, 1 failed, 2 refused (usage, study file), 3 partial (stopped early, what was in
flight is kept), 130 interrupted (by Ctrl-C; in 'run', by a second one).
'jaxlsgd VERB --help' explains each verb. JAXLSGD_DEBUG=1 shows tracebacks.
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all verbs."""
    parser = Parser(
        prog="jaxlsgd",
        description="How sure can we be of parameters learnt by Local SGD? Studies of confidence intervals.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    version = f"jaxlsgd {jaxlsgd.__version__}"
    parser.add_argument("--version", action="version", version=version)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for group in _GROUPS:
        group.add_verbs(verbs)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb, and return the exit code.

    Args:
      argv: arguments, those of the process if None.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with _warnings_on_stderr():
            return _run(arguments)
    except (ValueError, TypeError) as error:
        return _report(error, USAGE)
    except (RuntimeError, ImportError, MemoryError) as error:
        return _report(error, 1)
    except BrokenPipeError:
        # The reader of our output has gone; Python must not flush what is left for it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _report(error, 1)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if not user_code_note(error):
            raise
        return _report(error, USAGE)


def _run(arguments: list[str]) -> int:
    parser = make_parser()
    _check_verb(parser, arguments)
    if any("\0" in word for word in arguments):
        parser.error("arguments must have no null characters")
    parsed = parser.parse_args(arguments)
    if getattr(parsed, "out", None) == "":
        raise refusal("--out", "be the name of a file or directory", "")
    return parsed.function(parsed)


def _check_verb(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    """Refuse an unknown verb, and suggest the nearest known one."""
    known = [verb for group in _GROUPS for verb in group.VERBS]
    if not arguments:
        parser.error("a verb is needed")
    verb = arguments[0]
    if not verb.startswith("-") and verb not in known:
        parser.error(f"unknown verb {verb!r}{nearest(verb, known)}")


def _report(error: BaseException, code: int) -> int:
    if os.environ.get("JAXLSGD_DEBUG") == "1":
        raise error
    sys.stderr.write(f"jaxlsgd: error: {printable(_message(error))}\n")
    return code


def _message(error: BaseException) -> str:
    """Return the message of an error, with the path if it comes from the operating system."""
    if isinstance(error, MemoryError):
        return f"out of memory: {error}" if str(error) else "out of memory"
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    if user_code_note(error):
        return describe(error).strip().partition("\n")[0]
    return str(error) or type(error).__name__


class _OnStderr(logging.Handler):
    """Write warnings, such as that a manifest was rebuilt, to stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"jaxlsgd: {printable(record.getMessage())}\n")


@contextlib.contextmanager
def _warnings_on_stderr() -> Iterator[None]:
    logger, handler = logging.getLogger("jaxlsgd"), _OnStderr(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
