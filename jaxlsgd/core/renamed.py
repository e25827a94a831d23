"""Names that arguments, values and methods had before, for code, study files and results that still have them.

Code and study files with an old name work for one version, with a warning that names the new one. Results keep the
name that a thing had first, where they identify it: digests are made of first names (`first`), so that a renaming
leaves them as they are, and what is read gets today's (`current`).
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jaxlsgd.core.checks import refusal

# By role and kind, as other roles may have kinds of users that are called the same: arguments, old → new, and the
# values of an argument.
ARGUMENTS = {
    ("method", "growing_batches"): {"kind": "batches"},
    ("problem", "regression"): {"level": "tau", "threshold": "delta"},
}
VALUES = {
    ("method", "random_scaling"): {"critical": {"finite_horizon": "finite"}},
    ("problem", "regression"): {"family": {"squared": "gaussian"}},
    ("function", "fit_table"): {"rows": {"reshuffled": "reused", "one pass": "fresh"}},
}
METHODS = {"random_scaling[finite_horizon]": "random_scaling[finite]"}
# By kind: values that were given first without a name, and the argument that they belong to now.
_WERE_FIRST = {"random_scaling": ("mode", ("full", "diagonal", "contrasts"))}

Builder = TypeVar("Builder", bound=Callable[..., Any])


class OldName(DeprecationWarning):
    """Something was called by the name that it had before."""


def warn(old: str, new: str, stacklevel: int = 2) -> None:
    """Warn that an old name was given; `stacklevel` is 1 for the caller of this function, 2 for its caller."""
    text = f"{old}: has a new name and works for one more version; use {new}"
    warnings.warn(text, OldName, stacklevel=stacklevel + 1)


def method(name: Any) -> Any:
    """Return a method's name as it is today, with a warning if it is an old one; anything else as it is."""
    if not isinstance(name, str) or name not in METHODS:
        return name
    warn(name, METHODS[name], 3)
    return METHODS[name]


def arguments(
    role: str, kind: str, given: Mapping[str, Any], stacklevel: int = 2
) -> dict[str, Any]:
    """Return a builder's arguments under today's names, with warnings of old ones."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        new = ARGUMENTS.get((role, kind), {}).get(name, name)
        if new != name:
            warn(f"{kind}({name}=...)", f"{new}=...", stacklevel + 1)
            _check_single(name, new, given)
        found[new] = value_of(role, kind, new, value, stacklevel + 1)
    return found


def value_of(role: str, kind: str, argument: str, value: Any, stacklevel: int = 2) -> Any:
    """Return a value of an argument as it is spelt today, with a warning if it is an old one."""
    known = VALUES.get((role, kind), {}).get(argument, {})
    if not isinstance(value, str) or value not in known:
        return value
    warn(f"{kind}({argument}={value!r})", repr(known[value]), stacklevel + 1)
    return known[value]


def _check_single(old: str, new: str, given: Mapping[str, Any]) -> None:
    if new in given:
        raise refusal(
            old,
            f"be left out if {new} is given, which is its new name",
            given[old],
            code="duplicate",
        )


def accepts_old_names(role: str) -> Callable[[Builder], Builder]:
    """Let a builder be called with old names too."""

    def decorate(build: Builder) -> Builder:
        kind, parameters = build.__name__, tuple(inspect.signature(build).parameters)
        moved, values = _WERE_FIRST.get(kind, ("", ()))

        @functools.wraps(build)
        def call(*args: Any, **given: Any) -> Any:
            if args and isinstance(args[0], str) and args[0] in values:
                warn(f"{kind}({args[0]!r})", f"{kind}({moved}={args[0]!r})")
                _check_single(args[0], moved, {args[0]: args[0], **given})
                args, given = args[1:], {moved: args[0], **given}
            placed = arguments(role, kind, dict(zip(parameters, args, strict=False))).values()
            return build(*placed, *args[len(parameters) :], **arguments(role, kind, given))

        return call  # type: ignore[return-value]

    return decorate


def current(content: Any) -> Any:
    """Return JSON data of results with today's names in place of old ones."""
    return _spelt(content, METHODS, ARGUMENTS, VALUES)


def first(content: Any) -> Any:
    """Return JSON data with the names that things had first, which digests are made of."""
    return _spelt(content, *_FIRST)


def first_name(name: str) -> str:
    """Return the name that a method had first."""
    return _FIRST[0].get(name, name)


_ROLES = ("problem", "method", "algorithm", "schedule")
_ROLE_OF = {key: role for role in _ROLES for key in (role, f"{role}s")}  # of what is under a key


def _spelt(content: Any, methods: Any, names: Any, values: Any) -> Any:
    def spelt(value: Any, role: str = "") -> Any:
        if isinstance(value, list):
            return [spelt(part, role) for part in value]
        if not isinstance(value, dict):
            return methods.get(value, value) if isinstance(value, str) else value
        made = {
            methods.get(key, key): spelt(part, _ROLE_OF.get(key, "")) for key, part in value.items()
        }
        kind, inner = made.get("kind"), made.get("arguments")
        if not isinstance(kind, str):
            return made
        if isinstance(inner, dict):
            return made | {"arguments": of_kind(role, kind, inner)}
        # A problem among the arguments of another.
        return of_kind(role, kind, made) | {"kind": kind}

    def of_kind(role: str, kind: str, table: dict[str, Any]) -> dict[str, Any]:
        new, known = names.get((role, kind), {}), values.get((role, kind), {})
        return {
            new.get(key, key): known[key].get(part, part)
            if key in known and isinstance(part, str)
            else part
            for key, part in table.items()
        }

    return spelt(content)


def _turned(table: Mapping[str, str]) -> dict[str, str]:
    return {new: old for old, new in table.items()}


_FIRST = (
    _turned(METHODS),
    {kind: _turned(table) for kind, table in ARGUMENTS.items()},
    {
        kind: {name: _turned(known) for name, known in table.items()}
        for kind, table in VALUES.items()
    },
)
