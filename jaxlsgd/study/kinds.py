"""Every kind that a study file may name: those of this package, and what `--import` brings in."""

from __future__ import annotations

import linecache
import sys
import traceback
import types
from pathlib import Path
from typing import Any

import jaxlsgd.algorithms
import jaxlsgd.inference.one_step
import jaxlsgd.inference.plug_in
import jaxlsgd.inference.random_scaling
import jaxlsgd.problems
import jaxlsgd.schedules  # noqa: F401
from jaxlsgd.core import checks, registry
from jaxlsgd.core.registry import Kind
from jaxlsgd.study.errors import SpecError, refusing

_MOST_BYTES = 1_000_000  # of an imported file
_loaded: dict[str, str] = {}  # source by file name, for workers


def known(role: str, name: str) -> bool:
    """Whether there is a kind of this name."""
    return name in registry.kinds(role)


def find(role: str, name: Any, where: str) -> Kind:
    """The kind of this name; refuses one that is not known."""
    there = registry.kinds(role)
    if not isinstance(name, str) or name not in there:
        hint = checks.nearest(name, there) + "; kinds of your own come from --import FILE"
        raise checks.refusal(where, f"be one of {', '.join(there)}", name, hint)
    return there[name]


def make(kind: Kind, arguments: dict[str, Any], where: str) -> Any:
    """Calls a kind's builder; what it refuses is told with its place."""
    checks.known_keys(where, arguments, tuple(kind.parameters))
    for name in kind.required:
        if name not in arguments:
            raise SpecError(
                f"{where}.{name}: is missing; {kind.name} needs {', '.join(kind.required)}"
            )
    with refusing(where, kind.parameters):
        return kind.build(**arguments)


def load(path: str | Path) -> None:
    """Runs a Python file that registers kinds; see `jaxlsgd.register`."""
    path = Path(path)
    try:
        source = path.read_bytes()[: _MOST_BYTES + 1].decode()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"--import {path}: cannot be read: {error}") from error
    if len(source) > _MOST_BYTES:
        raise SpecError(f"--import {path}: must have at most {_MOST_BYTES} bytes")
    load_source(path.name, source)


def load_source(name: str, source: str) -> None:
    """Runs the source of such a file, once; also on workers, which do not have the file."""
    if _loaded.get(name) == source:
        return
    # Not the file's own path: a digest of its functions must not depend on where it lies.
    place = f"<import {name}>"
    module = types.ModuleType(f"jaxlsgd_import_{Path(name).stem}")
    module.__file__ = place
    linecache.cache[place] = (len(source), None, source.splitlines(keepends=True), place)
    sys.modules[module.__name__] = module
    try:
        exec(compile(source, place, "exec"), module.__dict__)
    except Exception as error:
        line = next(
            (
                f.lineno
                for f in reversed(traceback.extract_tb(error.__traceback__))
                if f.filename == place
            ),
            getattr(error, "lineno", None),
        )
        at = f", line {line}" if line else ""
        raise SpecError(f"--import {name}{at}: {type(error).__name__}: {error}") from error
    except SystemExit as error:
        raise SpecError(f"--import {name}: must not exit, got SystemExit({error.code})") from error
    _loaded[name] = source


def loaded() -> dict[str, str]:
    """The sources that were imported so far, by file name."""
    return dict(_loaded)
