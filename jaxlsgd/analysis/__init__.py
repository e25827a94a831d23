"""Measures of a simulation study with their Monte-Carlo errors, and the chance of single intervals, from rows alone.

Start reading at `measures.summarise`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxlsgd.core.lazy import attach

_WHERE = {
    "chance": "jaxlsgd.analysis.chance:",
    "failures": "jaxlsgd.analysis.failures:",
    "looks": "jaxlsgd.analysis.looks:",
    "measures": "jaxlsgd.analysis.measures:",
    "moments": "jaxlsgd.analysis.moments:",
    "pairs": "jaxlsgd.analysis.pairs:",
}
__getattr__, __dir__ = attach(__name__, _WHERE)
__all__ = [*_WHERE]

if TYPE_CHECKING:
    from jaxlsgd.analysis import chance, failures, looks, measures, moments, pairs
