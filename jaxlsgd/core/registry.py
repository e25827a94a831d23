"""Kinds by name, so that a study file can ask for them: problems, methods, algorithms, schedules.

What a kind accepts is the signature of its builder, and nothing else says it again.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal

ROLES = ("problem", "method", "algorithm", "schedule")
_KINDS: dict[str, dict[str, Kind]] = {role: {} for role in ROLES}
Builder = TypeVar("Builder", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Kind:
    """A builder under a name."""

    role: str
    name: str
    build: Callable[..., Any]
    brief: str  # the argument that brackets stand for, as in "plug_in[finite]"; "" for none

    @property
    def own(self) -> bool:
        """Whether it was brought in from outside this package."""
        return self.build.__module__.partition(".")[0] != "jaxlsgd"

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """What it accepts; a name is given beside the arguments."""
        found = inspect.signature(self.build).parameters
        return {name: parameter for name, parameter in found.items() if name != "name"}

    @property
    def required(self) -> list[str]:
        """What it cannot do without."""
        given = self.parameters.items()
        return [name for name, parameter in given if parameter.default is parameter.empty]

    @property
    def summary(self) -> str:
        """The first line of the builder's docstring."""
        return (inspect.getdoc(self.build) or "").partition("\n")[0]

    def signature(self) -> str:
        """The arguments as a person would write them: `dim, num_clients, noise = 1.0`."""
        return ", ".join(
            name if p.default is p.empty else f"{name} = {p.default!r}"
            for name, p in self.parameters.items()
        )


def register(
    role: str, name: str | None = None, *, brief: str = ""
) -> Callable[[Builder], Builder]:
    """Makes a builder known to study files under a name.

    Args:
      role: "problem", "method", "algorithm" or "schedule": what the builder returns.
      name: as it stands in a study file; the function's own name if None.
      brief: the argument that a name in brackets stands for.

    Example::

        @jaxlsgd.register("problem")
        def poisson(dim: int, num_clients: int = 10) -> jaxlsgd.Problem:
            ...

        # study.toml:  problems = [{kind = "poisson", dim = 3}]
        # jaxlsgd run study.toml --out results --import poisson.py
    """
    checks.choice("role", role, ROLES)

    def add(build: Builder) -> Builder:
        kind = Kind(role, checks.label("name", name or build.__name__), build, brief)
        if brief and brief not in kind.parameters:
            raise refusal("brief", f"be an argument of {kind.name}", brief)
        known = _KINDS[role].get(kind.name)
        # From the same module, it is that module loaded anew.
        if known is not None and (not kind.own or known.build.__module__ != build.__module__):
            there = f"which is a {role} of {known.build.__module__}"
            raise ValueError(f"name: must be new, got {kind.name!r}, {there}")
        _KINDS[role][kind.name] = kind
        return build

    return add


def kinds(role: str) -> dict[str, Kind]:
    """The kinds of a role by name, those of this package first."""
    return dict(_KINDS[role])


def forget(module: str) -> None:
    """Drops the kinds that a module has registered."""
    for known in _KINDS.values():
        for name in [name for name, kind in known.items() if kind.build.__module__ == module]:
            del known[name]
