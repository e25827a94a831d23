"""The digest of an object: of its arrays, its constants and the code of its functions.

Rows of a study belong to the code that made them. A study file names what comes with this package; problems,
methods and algorithms of a user's own are identified by this digest, which is compared when a study resumes.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import hashlib
import inspect
import site
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

PYTHON = f"py{sys.version_info[0]}.{sys.version_info[1]}"
_PATHS = {sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")}
_LIBRARIES = tuple(
    str(Path(path).resolve())
    for path in {*_PATHS, *site.getsitepackages(), site.getusersitepackages()}
)
# Instructions that do nothing, or may differ between two compilations of the same source.
_IDLE = {"CACHE", "NOP", "RESUME", "EXTENDED_ARG"}
_STARS = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
_WRAPPED = (staticmethod, classmethod, property, functools.cached_property)

Seen = dict[
    int, tuple[int, Any]
]  # by id: a number, and the object, which is kept alive so that no other gets its id


def digest(value: Any) -> str:
    """Return 16 hexadecimal digits of a SHA-256 over an object's arrays, constants and code.

    A user's own functions and classes count by their bytecode, so that comments, formatting and docstrings
    do not matter, and by the variables, functions and modules that they use. Those of installed libraries
    and of this package count by their names and closures. Bytecode depends on the version of Python, which
    is then appended: "0123456789abcdef-py3.11".
    """
    walk = _Walk()
    total = hashlib.sha256()
    for part in walk.parts(value):
        total.update(part.encode() + b"\0")
    return total.hexdigest()[:16] + (f"-{PYTHON}" if walk.has_code else "")


def modules(value: Any) -> set[str]:
    """Return the modules of the user's own functions and classes in an object."""
    walk = _Walk()
    for _ in walk.parts(value):
        pass
    return walk.modules


class _Walk:
    """A traversal of everything that an object refers to."""

    def __init__(self) -> None:
        self.has_code = False
        self.modules: set[str] = set()
        self._seen: Seen = {}

    def parts(self, value: Any) -> Iterator[str]:
        """Yield the parts of a value as text, in an order that is the same in every process."""
        if isinstance(value, (str, bytes, int, float, complex, type(None), type(...), np.dtype)):
            yield f"{type(value).__name__} {value!r}"
        elif isinstance(value, (np.ndarray, np.generic)) or _is_jax_array(value):
            yield from self._array(value)
        elif id(value) in self._seen:
            yield f"again {self._seen[id(value)][0]}"
        else:
            self._seen[id(value)] = len(self._seen), value
            yield from self._compound(value)

    def _array(self, value: Any) -> Iterator[str]:
        array = _as_numpy(value)
        yield f"array {array.dtype.str} {array.shape}"
        if array.dtype.hasobject:
            yield from self._each(array.ravel().tolist())
        else:
            yield hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()

    def _compound(self, value: Any) -> Iterator[str]:
        if isinstance(value, types.FunctionType):
            yield from self._function(value)
        elif isinstance(value, types.MethodType):
            yield from self._each((value.__func__, value.__self__))
        elif isinstance(value, functools.partial):
            yield "partial"
            yield from self._each((value.func, value.args, value.keywords))
        elif isinstance(value, type):
            yield from self._class(value)
        elif isinstance(value, types.ModuleType):
            yield from self._module(value)
        elif isinstance(value, types.CodeType):
            yield from self._code(value)
        elif isinstance(value, (types.BuiltinFunctionType, np.ufunc)):
            yield f"name {_name(value)}"
        elif callable(value) and hasattr(value, "__wrapped__"):  # jitted, cached, ...
            yield f"wrapped {_name(type(value))}"
            yield from self.parts(getattr(value, "__wrapped__"))  # noqa: B009
        elif isinstance(value, (dict, types.MappingProxyType)):
            yield f"dict {len(value)}"
            for pair in value.items():
                yield from self._each(pair)
        elif isinstance(value, (list, tuple, set, frozenset)):
            items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
            yield f"{_name(type(value))} {len(value)}"
            yield from self._each(items)
        else:
            yield "object"
            yield from self.parts(type(value))
            yield from self.parts(_state(value))

    def _each(self, values: Any) -> Iterator[str]:
        for value in values:
            yield from self.parts(value)

    def _function(self, function: types.FunctionType) -> Iterator[str]:
        yield f"function {_name(function)}" if _is_library(function) else "function"
        if not _is_library(function):
            self.modules.add(function.__module__)
            yield from self._code(function.__code__)
            yield from self._each((function.__defaults__, function.__kwdefaults__))
            for name in sorted(_global_names(function.__code__)):
                if name in function.__globals__:
                    yield name
                    yield from self.parts(function.__globals__[name])
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            yield name
            yield from self._each(_contents(cell))

    def _code(self, code: types.CodeType) -> Iterator[str]:
        self.has_code = True
        counts = code.co_posonlyargcount, code.co_argcount, code.co_kwonlyargcount
        yield f"code {counts} {code.co_flags & _STARS} {code.co_varnames}"
        for step in dis.get_instructions(code):
            if step.opname not in _IDLE:
                yield step.opname
                yield from self.parts(step.argval)

    def _class(self, cls: type) -> Iterator[str]:
        yield f"class {_name(cls)}"
        if _is_library(cls):
            return
        self.modules.add(cls.__module__)
        yield from self._each(cls.__bases__)
        for name, value in sorted(vars(cls).items()):
            if isinstance(value, _WRAPPED):
                yield name
                inner = [getattr(value, x, None) for x in ("__func__", "func", "fget")]
                yield from self._each(x for x in inner if x is not None)
            elif isinstance(value, types.FunctionType) or not name.startswith("_"):
                yield name
                yield from self.parts(value)

    def _module(self, module: types.ModuleType) -> Iterator[str]:
        """Yield all functions, classes and constants of a module: any of them may be used."""
        yield f"module {module.__name__}"
        if _is_library(module):
            return
        self.modules.add(module.__name__)
        for name, value in sorted(vars(module).items()):
            if not name.startswith("__"):
                yield name
                yield from self.parts(value)


def _global_names(code: types.CodeType) -> set[str]:
    """Return the global variables that a function uses, also in functions and lambdas inside it."""
    loads = {"LOAD_GLOBAL", "LOAD_NAME"}
    names = {str(step.argval) for step in dis.get_instructions(code) if step.opname in loads}
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return names.union(*map(_global_names, inner))


def _contents(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # not assigned yet
        return []


def _state(value: Any) -> Any:
    """Return the attributes of an object."""
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    slots = [name for cls in type(value).__mro__ for name in _slots(cls)]
    held = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    held |= getattr(value, "__dict__", {})
    if held:
        return held
    try:
        return value.__reduce_ex__(2)[1:3]
    except Exception:  # a lock, a file, a device: identified by its type alone
        return None


def _slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _is_library(value: Any) -> bool:
    """Return whether a function, class or module comes with Python, a library or this package."""
    name = value.__name__ if isinstance(value, types.ModuleType) else value.__module__ or ""
    package = name.partition(".")[0]
    if package == "jaxlsgd":
        return True
    if isinstance(value, types.FunctionType):
        place: str | None = value.__code__.co_filename
    else:
        loaded = [sys.modules.get(name), sys.modules.get(package)]
        place = next((x.__file__ for x in loaded if x and getattr(x, "__file__", None)), None)
    if place is None:
        return package in sys.stdlib_module_names or package == "builtins"
    return place.startswith("<frozen") or str(Path(place).resolve()).startswith(_LIBRARIES)


def _is_jax_array(value: Any) -> bool:
    return type(value).__module__.startswith("jax") and hasattr(value, "__array__")


def _as_numpy(value: Any) -> np.ndarray:
    try:
        return np.asarray(value)
    except TypeError:  # a random key
        import jax

        return np.asarray(jax.random.key_data(value))


def _name(value: Any) -> str:
    owner = getattr(value, "__module__", None)
    return f"{owner}.{getattr(value, '__qualname__', getattr(value, '__name__', type(value)))}"
