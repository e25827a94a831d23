"""Kinds that a study file can name: problems, methods, algorithms, schedules.

The arguments of a kind are declared once, by the signature of its builder.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast, get_args

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal

Role = Literal["problem", "method", "algorithm", "schedule"]
_KINDS: dict[str, dict[str, Kind]] = {role: {} for role in get_args(Role)}
Builder = TypeVar("Builder", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Kind:
    """A builder under a name."""

    role: Role
    name: str
    build: Callable[..., Any]
    brief: str  # the argument given in brackets, as in "plug_in[finite]"; "" for none

    @property
    def own(self) -> bool:
        """Return whether it comes from outside this package."""
        return self.build.__module__.partition(".")[0] != "jaxlsgd"

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """Return its parameters, except `name`, which a study file gives beside them."""
        found = inspect.signature(self.build).parameters
        return {name: parameter for name, parameter in found.items() if name != "name"}

    @property
    def required(self) -> list[str]:
        """Return the parameters without a default."""
        return [name for name, p in self.parameters.items() if p.default is p.empty]

    @property
    def fixed_time(self) -> bool:
        """Return whether it is a method of this package whose intervals hold at one time only; `valid` is refused."""
        return self.role == "method" and not self.own and "valid" not in self.parameters

    @property
    def summary(self) -> str:
        """Return the first line of the builder's docstring."""
        return (inspect.getdoc(self.build) or "").partition("\n")[0]

    def signature(self) -> str:
        """Return the arguments as text: `dim, num_clients, noise = 1.0`."""
        return ", ".join(
            name if p.default is p.empty else f"{name} = {p.default!r}"
            for name, p in self.parameters.items()
        )


def register(
    role: Role, name: str | None = None, *, brief: str = ""
) -> Callable[[Builder], Builder]:
    """Register a builder, so that study files can name it.

    Args:
      role: "problem", "method", "algorithm" or "schedule": what the builder returns.
      name: its name in a study file; the function's own name if None.
      brief: the argument that may be given in brackets after the name: the first of the builder, so that
        `kind[x]` in a study file is `kind("x")` in Python.

    Example::

        @jaxlsgd.register("problem")
        def poisson(dim: int, num_clients: int = 10) -> jaxlsgd.Problem:
            ...

        # study.toml:  problems = [{kind = "poisson", dim = 3}]
        # jaxlsgd run study.toml --out results --import poisson.py
    """
    checks.choice("role", role, Role)

    def add(build: Builder) -> Builder:
        kind = Kind(role, checks.label("name", name or build.__name__), build, brief)
        if brief and brief not in kind.parameters:
            raise refusal("brief", f"be an argument of {kind.name}", brief, code="unknown")
        if brief and brief != next(iter(kind.parameters)):
            raise refusal("brief", f"be the first argument of {kind.name}", brief)
        known = _KINDS[role].get(kind.name)
        # The same module may be loaded again.
        if known is not None and (not kind.own or known.build.__module__ != build.__module__):
            there = f", which is a {role} of {known.build.__module__}"
            raise refusal("name", "be new", kind.name, there, code="duplicate")
        if kind.fixed_time:
            kind = dataclasses.replace(kind, build=_at_fixed_time(build, kind.name))
        _KINDS[role][kind.name] = kind
        return cast("Builder", kind.build)

    return add


def _at_fixed_time(build: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a method's builder that says why it refuses `valid`, instead of not knowing it."""

    @functools.wraps(build)
    def checked(*given: Any, valid: str = "fixed", **named: Any) -> Any:
        checks.fixed_time(valid, name)
        return build(*given, **named)

    return checked


def kinds(role: Role) -> dict[str, Kind]:
    """Return the kinds of a role by name, those of this package first."""
    return dict(_KINDS[role])


def forget(module: str) -> None:
    """Drop the kinds that a module has registered."""
    for known in _KINDS.values():
        for name in [name for name, kind in known.items() if kind.build.__module__ == module]:
            del known[name]
