"""What an object is made of, as a digest: its arrays and the source of its functions.

Rows of a study belong to the code that made them. A study file names what comes with this package; somebody's
own problem, method or algorithm is known by this digest, which resuming compares.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import inspect
import sysconfig
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

_LIBRARIES = tuple(
    str(Path(path).resolve())
    for key, path in sysconfig.get_paths().items()
    if key in ("stdlib", "platstdlib", "purelib", "platlib")
)


def digest(value: Any) -> str:
    """The first 16 hexadecimal digits of a SHA-256 over an object's arrays and sources.

    Functions count by their source without comments and formatting, their defaults, and the variables
    and functions that they use, as far as those are not part of an installed library. Libraries, and this
    package, count by name; their versions are recorded elsewhere.
    """
    total = hashlib.sha256()
    for part in _parts(value, set()):
        total.update(part.encode() + b"\0")
    return total.hexdigest()[:16]


def _parts(value: Any, seen: set[int]) -> Iterator[str]:
    if isinstance(value, (str, bytes, int, float, complex, bool, type(None))):
        yield f"{type(value).__name__} {value!r}"
    elif isinstance(value, (np.ndarray, np.generic)) or _is_jax_array(value):
        array = np.asarray(value)
        content = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
        yield f"array {array.dtype.str} {array.shape} {content}"
    elif id(value) in seen:
        yield "again"
    else:
        seen.add(id(value))
        yield from _compound(value, seen)


def _compound(value: Any, seen: set[int]) -> Iterator[str]:
    if isinstance(value, functools.partial):
        yield "partial"
        yield from _each((value.func, value.args, value.keywords), seen)
    elif isinstance(value, types.MethodType):
        yield from _each((value.__func__, value.__self__), seen)
    elif inspect.isfunction(inner := inspect.unwrap(value) if callable(value) else value):
        yield from _function(inner, seen)
    elif isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType, np.ufunc)):
        yield f"name {_name(value)}"
    elif isinstance(value, dict):
        yield f"dict {len(value)}"
        for key, item in value.items():
            yield repr(key)
            yield from _parts(item, seen)
    elif isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        yield f"{_name(type(value))} {len(value)}"
        yield from _each(items, seen)
    else:
        yield f"object {_name(type(value))}"
        yield from _parts(_fields(value), seen)


def _each(values: Any, seen: set[int]) -> Iterator[str]:
    for value in values:
        yield from _parts(value, seen)


def _fields(value: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return dict(getattr(value, "__dict__", {}))


def _function(function: Any, seen: set[int]) -> Iterator[str]:
    if _is_library(function):
        yield f"name {_name(function)}"
        return
    yield f"function {_source(function)}"
    yield from _each((function.__defaults__, function.__kwdefaults__), seen)
    found = inspect.getclosurevars(function)
    for used in (found.nonlocals, found.globals):
        for name in sorted(used):
            yield name
            yield from _parts(used[name], seen)


def _source(function: Any) -> str:
    """The source as a syntax tree, so that comments and formatting do not count; or the bytecode."""
    try:
        text = textwrap.dedent(inspect.getsource(function))
        return ast.dump(ast.parse(text))
    except (OSError, TypeError, SyntaxError, IndentationError):
        code = function.__code__
        return f"{code.co_code.hex()} {code.co_names} {[c for c in code.co_consts if not inspect.iscode(c)]}"


def _is_library(function: Any) -> bool:
    module = function.__module__ or ""
    if module.partition(".")[0] == "jaxlsgd":
        return True
    path = str(Path(function.__code__.co_filename).resolve())
    return path.startswith(_LIBRARIES)


def _is_jax_array(value: Any) -> bool:
    return type(value).__module__.startswith("jax") and hasattr(value, "__array__")


def _name(value: Any) -> str:
    owner = getattr(value, "__module__", None)
    return f"{owner}.{getattr(value, '__qualname__', getattr(value, '__name__', repr(value)))}"
