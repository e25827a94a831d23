"""Names that are imported on first use, so that `jaxlsgd --help` and readers of results need not import JAX."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any


def attach(
    package: str, where: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's `__getattr__` and `__dir__`.

    Args:
      package: its `__name__`.
      where: the module of each name. A path that ends in ":" gives the module itself, as in
        {"joint": "jaxlsgd.inference.joint:"}. A name that is also that of its module, as in
        {"one_step": "jaxlsgd.inference.one_step"}, is the function, also after the module was imported.
    """

    class Package(types.ModuleType):
        """A package of which imports of its modules do not hide functions of the same names."""

        def __setattr__(self, name: str, value: Any) -> None:
            if isinstance(value, types.ModuleType) and not where.get(name, ":").endswith(":"):
                value = getattr(value, name)
            super().__setattr__(name, value)

        def __reduce__(
            self,
        ) -> tuple[Any, ...]:  # for cloudpickle, which pickles plain modules alone
            return importlib.import_module, (package,)

    sys.modules[package].__class__ = Package

    def load(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        path, colon, _ = where[name].partition(":")
        module = importlib.import_module(path)
        value = module if colon else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted({*where, *vars(sys.modules[package])})


def later(module: str, name: str) -> Any:
    """Return a function of a later room, for the methods that lead there, such as `cell.plot()`.

    Args:
      module: within the package, such as "report.figures".
      name: of the function, which is imported when this is called.
    """
    return getattr(importlib.import_module(f"jaxlsgd.{module}"), name)
