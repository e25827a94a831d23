"""Interval methods, one file each, with joint inference, diagnostics, and the laws behind them."""

from jaxlsgd.core.lazy import attach

_WHERE = {
    "NORMAL": "jaxlsgd.inference.laws.normal",
    "critical_values": "jaxlsgd.inference.laws.critical_values:",
    "diagnostics": "jaxlsgd.inference.diagnostics:",
    "finite_horizon": "jaxlsgd.inference.finite_horizon:",
    "joint": "jaxlsgd.inference.joint:",
    "laws": "jaxlsgd.inference.laws:",
    "plug_in": "jaxlsgd.inference.plug_in:",
    "random_scaling": "jaxlsgd.inference.random_scaling:",
}
__getattr__, __dir__ = attach(__name__, _WHERE)
__all__ = [*_WHERE]
