"""Interval methods, one file each, with joint inference and the laws behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxlsgd.core.lazy import attach

_WHERE = {
    "NORMAL": "jaxlsgd.inference.laws.normal",
    "critical_values": "jaxlsgd.inference.laws.critical_values:",
    "finite_horizon": "jaxlsgd.inference.finite_horizon:",
    "joint": "jaxlsgd.inference.joint:",
    "laws": "jaxlsgd.inference.laws:",
    "one_step": "jaxlsgd.inference.one_step:",
    "plug_in": "jaxlsgd.inference.plug_in:",
    "random_scaling": "jaxlsgd.inference.random_scaling:",
}
__getattr__, __dir__ = attach(__name__, _WHERE)
__all__ = [*_WHERE]

if TYPE_CHECKING:
    from jaxlsgd.inference import (
        finite_horizon,
        joint,
        laws,
        plug_in,
        random_scaling,
    )
    from jaxlsgd.inference.laws import critical_values
    from jaxlsgd.inference.laws.normal import NORMAL
