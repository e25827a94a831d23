"""Statistical estimation and inference with Local SGD in federated learning, in JAX.

The names below are the library. They are loaded on first use, so that `jaxlsgd --help` and the
reading of results do not wait for JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "Draws": "jaxlsgd.base",
    "Estimator": "jaxlsgd.base",
    "Interval": "jaxlsgd.base",
    "Problem": "jaxlsgd.base",
    "Sync": "jaxlsgd.base",
    "OuterProduct": "jaxlsgd.forms",
    "Scaled": "jaxlsgd.forms",
    "Fit": "jaxlsgd.fitting",
    "fit": "jaxlsgd.fitting",
    "fclt_check": "jaxlsgd.fclt",
    "CellRows": "jaxlsgd.rows",
    "MethodRows": "jaxlsgd.rows",
    "Plan": "jaxlsgd.schedules",
    "Study": "jaxlsgd.study",
    "plug_in": "jaxlsgd.inference.plug_in",
    "random_scaling": "jaxlsgd.inference.random_scaling",
    "simulate": "jaxlsgd.simulation",
}
_MODULES = (
    "distributed",
    "inference",
    "local_sgd",
    "measures",
    "problems",
    "report",
    "schedules",
    "study",
)

__all__ = ["__version__", *_WHERE, *_MODULES]

if TYPE_CHECKING:
    from jaxlsgd import (
        distributed,
        inference,
        local_sgd,
        measures,
        problems,
        report,
        schedules,
        study,
    )
    from jaxlsgd.base import Draws, Estimator, Interval, Problem, Sync
    from jaxlsgd.fclt import fclt_check
    from jaxlsgd.fitting import Fit, fit
    from jaxlsgd.forms import OuterProduct, Scaled
    from jaxlsgd.inference.plug_in import plug_in
    from jaxlsgd.inference.random_scaling import random_scaling
    from jaxlsgd.rows import CellRows, MethodRows
    from jaxlsgd.schedules import Plan
    from jaxlsgd.simulation import simulate
    from jaxlsgd.study import Study


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(importlib.import_module(_WHERE[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"jaxlsgd.{name}")
    else:
        raise AttributeError(f"module 'jaxlsgd' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
