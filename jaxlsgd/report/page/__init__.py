"""A study as one HTML file: for a browser, an e-mail or an archive, with no network and no library.

`build` reads the rows cell by cell and puts the page together. What the page computes with is JSON in it;
the scripts of `assets` draw it. Vega-Lite, Plotly or Observable Plot would each add half a megabyte or more
for the seven kinds of figure that there are, and none of them is easy to use from the keyboard.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxlsgd.core.lazy import attach

_WHERE = {"build": "jaxlsgd.report.page.build:", "write": "jaxlsgd.report.page.build"}
__getattr__, __dir__ = attach(__name__, _WHERE)
__all__ = [*_WHERE]

if TYPE_CHECKING:
    from jaxlsgd.report.page import build
    from jaxlsgd.report.page.build import write
