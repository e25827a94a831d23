"""Reports: rows of a study as tables (`tables`), figures, files for other programs and one HTML page.

Start reading at `tables.render`; `paper` reproduces the tables and figures of the paper.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxlsgd.core.lazy import attach

_WHERE = {
    name: f"jaxlsgd.report.{name}:"
    for name in ("comparison", "export", "figures", "page", "paper", "style", "tables")
}
__getattr__, __dir__ = attach(__name__, _WHERE)
__all__ = [*_WHERE]

if TYPE_CHECKING:
    from jaxlsgd.report import comparison, export, figures, page, paper, style, tables
