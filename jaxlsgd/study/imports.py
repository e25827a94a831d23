"""The kinds that a study file can name: those of this package, and those from `--import` files."""

from __future__ import annotations

import linecache
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

import jaxlsgd.algorithms
import jaxlsgd.inference.one_step
import jaxlsgd.inference.oracle
import jaxlsgd.inference.plug_in
import jaxlsgd.inference.random_scaling
import jaxlsgd.inference.rivals.bootstrap
import jaxlsgd.inference.rivals.equal_batches
import jaxlsgd.inference.rivals.growing_batches
import jaxlsgd.inference.rivals.higrad
import jaxlsgd.inference.rivals.hulc
import jaxlsgd.inference.rivals.parallel_runs
import jaxlsgd.problems
import jaxlsgd.schedules  # noqa: F401
from jaxlsgd.core import checks, registry
from jaxlsgd.core.checks import blaming
from jaxlsgd.core.registry import Kind, Role
from jaxlsgd.core.storage import read_regular
from jaxlsgd.study.errors import SpecError, line_of, refusing

_MOST_BYTES = 1_000_000  # of an imported file
_sources: dict[str, str] = {}  # by file name, for workers
_places: dict[str, Path] = {}  # by file name


def known(role: Role, name: str) -> bool:
    """Whether there is a kind of this name."""
    return name in registry.kinds(role)


def imported(role: Role, name: str) -> bool:
    """Whether a kind comes from an imported file."""
    kind = registry.kinds(role).get(name)
    return kind is not None and kind.build.__module__ in map(_module, _sources)


def find(role: Role, name: Any, where: str) -> Kind:
    """Return the kind of this name; refuse an unknown one."""
    found = registry.kinds(role)
    if not isinstance(name, str) or name not in found:
        hint = checks.nearest(name, found) + "; kinds of your own come from --import FILE"
        raise checks.refusal(where, f"be one of {', '.join(found)}", name, hint, code="choice")
    return found[name]


def make(kind: Kind, arguments: dict[str, Any], where: str) -> Any:
    """Call a kind's builder; its refusals name the place in the study."""
    if kind.fixed_time:
        with refusing(where, ("valid",)):
            checks.fixed_time(arguments.pop("valid", "fixed"), kind.name)
    read = ("kind", "name", "gamma0", "alpha") if kind.role == "problem" else ("kind", "name")
    checks.known_keys(where, arguments, tuple(kind.parameters), read)
    for name in kind.required:
        if name not in arguments:
            text = f"{where}.{name}: is missing; {kind.name} needs {', '.join(kind.required)}"
            raise SpecError(text, f"{where}.{name}", "missing")
    blamed = blaming(kind.build, f"builder of {kind.role} {kind.name!r}", kind.parameters)
    with refusing(where, kind.parameters, own=kind.own), blamed:
        return kind.build(**arguments)


def load(path: str | os.PathLike[str]) -> None:
    """Run a Python file that registers kinds; see `jaxlsgd.register`."""
    path = Path(path)
    try:
        source = read_regular(path, _MOST_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or error
        text = f"--import {path}: cannot be read: {cause}"
        raise SpecError(text, f"--import {path}", "unavailable") from error
    if len(source) > _MOST_BYTES:
        text = f"--import {path}: must have at most {_MOST_BYTES} bytes"
        raise SpecError(text, f"--import {path}")
    if _places.setdefault(path.name, path.resolve()) != path.resolve():
        other = _places[path.name]
        text = f"--import {path}: must have another name than {other}, got {path.name}"
        raise SpecError(text, f"--import {path}", "duplicate")
    load_source(path.name, source)


def load_source(name: str, source: str) -> None:
    """Run the source of such a file, once; Dask workers have the source and not the file."""
    if _sources.get(name) == source:
        return
    # Not the path: it differs on workers, and messages name the file alone.
    place = f"<import {name}>"
    module = types.ModuleType(_module(name))
    module.__file__ = place
    linecache.cache[place] = (len(source), None, source.splitlines(keepends=True), place)
    _forget(name)
    sys.modules[module.__name__] = module
    try:
        exec(compile(source, place, "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        _forget(name)
        line = line_of(error, place)
        at = f", line {line}" if line else ""
        text = f"--import {name}{at}: {checks.with_type(error)}"
        raise SpecError(text, f"--import {name}", "damaged") from error
    _sources[name] = source


def load_only(sources: dict[str, str]) -> None:
    """Run these sources and forget all others, which a worker has run for another study."""
    for name in [name for name in _sources if name not in sources]:
        _forget(name)
    for name, source in sources.items():
        load_source(name, source)


def loaded() -> dict[str, str]:
    """Return the sources that were imported so far, by file name."""
    return dict(_sources)


def _forget(name: str) -> None:
    registry.forget(_module(name))
    sys.modules.pop(_module(name), None)
    _sources.pop(name, None)


def _module(name: str) -> str:
    return "jaxlsgd_import_" + re.sub(r"\W", "_", name)
