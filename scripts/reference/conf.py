"""Settings of Sphinx for the documentation; `scripts/docs` builds it.

The sources are the whole repository, so that links between README, guides, notebooks and results are the same here and in it.
"""

import inspect
import pydoc
import re
from typing import Any

import docutils.nodes
import latex2mathml.converter

import jaxlsgd

project = author = "jaxlsgd"
release = version = jaxlsgd.__version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_nb"]
root_doc = "scripts/reference/index"
include_patterns = [
    "*.md",
    "benchmarks/README.md",
    "benchmarks/results/*.md",
    "scripts/guides/*.md",
    "scripts/notebooks/*.ipynb",
    "scripts/reference/**.md",
]

html_theme = "furo"
html_title = f"jaxlsgd {release}"
html_extra_path = ["index.html"]  # leads from the top of the pages to their start
html_static_path = html_css_files = ["pages.css"]
html_show_copyright = False
html_math_renderer = "mathml"
html_copy_source = False

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "force"  # outputs are those of this version
nb_execution_raise_on_error = True
nb_execution_in_temp = True
nb_execution_timeout = 600  # seconds per cell, for busy machines
nb_output_stderr = "remove"

default_role = "py:obj"  # `name` in a docstring is a link, if there is such a name
autodoc_default_options = {"members": True, "undoc-members": True, "member-order": "bysource"}
autodoc_preserve_defaults = True
autodoc_type_aliases = {name: name for name in ("ArrayLike", "NDArray", "Params")}
napoleon_use_ivar = True
python_maximum_signature_line_length = 88


def as_mathml(translator: Any, node: Any) -> None:
    """Write a formula as MathML, for which a browser needs neither a script nor a network."""
    display = "block" if isinstance(node, docutils.nodes.math_block) else "inline"
    translator.body.append(latex2mathml.converter.convert(node.astext(), display=display))
    raise docutils.nodes.SkipNode


def complete(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Read a docstring as the package writes it: indented formulas stay as they are, and a field has a comment beside it."""
    if what == "attribute":
        owner, _, field = name.rpartition(".")
        found = re.search(
            rf"^    {field}: .*?  # (.+)$", inspect.getsource(pydoc.locate(owner)), re.M
        )
        lines[:] = [found[1], ""] if found else [x for x in lines if "Alias for field" not in x]
    lines[:] = [re.sub(r"\|(\S[^|]*)\|", r"∣\1∣", line) for line in lines]  # |x| is no substitution
    for i in range(len(lines) - 1, 1, -1):
        if (
            lines[i].startswith("    ")
            and not lines[i - 1]
            and re.match(r"\S.*(?<!::)$", lines[i - 2])
        ):
            lines.insert(i - 1, "")
            lines.insert(i, "::")


def shorten(app: Any, what: str, name: str, obj: Any, options: Any, *written: str | None) -> Any:
    """Write aliases of types by their names also in unions, which Sphinx 9.0 does not."""
    return [
        re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", part) if part else part for part in written
    ]


def setup(app: Any) -> None:
    """Connect these to Sphinx; `complete` comes before docstrings are parsed."""
    app.add_html_math_renderer("mathml", (as_mathml, None), (as_mathml, None))
    app.connect("autodoc-process-signature", shorten)
    app.connect("autodoc-process-docstring", complete, priority=400)
