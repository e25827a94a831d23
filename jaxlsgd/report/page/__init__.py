"""A study as one HTML file, for a browser, an e-mail or an archive: start reading at `build.write`.

It needs no network and no library: the numbers are JSON in the page, and the scripts of `assets` draw them.
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
