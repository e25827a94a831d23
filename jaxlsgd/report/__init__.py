"""Reports: rows of a study as tables and figures, and the paper's own reproduced."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxlsgd.core.lazy import attach

_WHERE = {
    "comparison": "jaxlsgd.report.comparison:",
    "diagnostics": "jaxlsgd.report.figures:",
    "drawing": "jaxlsgd.report.style:",
    "export": "jaxlsgd.report.export:",
    "figures": "jaxlsgd.report.figures:",
    "layout": "jaxlsgd.core.display:",
    "page": "jaxlsgd.report.page:",
    "panels": "jaxlsgd.report.figures:",
    "paper": "jaxlsgd.report.paper:",
    "publication": "jaxlsgd.report.publication:",
    "selection": "jaxlsgd.report.tables:",
    "tables": "jaxlsgd.report.tables:",
}
__getattr__, __dir__ = attach(__name__, _WHERE)
__all__ = [*_WHERE]

if TYPE_CHECKING:
    from jaxlsgd.core import display
    from jaxlsgd.report import comparison, export, figures, page, paper, publication, style, tables
