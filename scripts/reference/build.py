"""Builds the API reference with pdoc; `scripts/docs` calls it.

The guides of scripts/guides come first. The other pages are the library as users see it: `jaxlsgd`, the modules among its public names, the modules among
theirs, and the few in which results are declared. Signatures stand as they are written in the source, and
the comment beside a field is its description.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import io
import re
import shutil
import sys
import textwrap
import tokenize
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pdoc
import pdoc.doc
import pdoc.doc_ast
import pdoc.doc_types
import pdoc.render
import pdoc.render_helpers
from jinja2 import pass_context

HERE = Path(__file__).parent
GUIDES = HERE.parent / "guides"
# What public functions take and return, declared in modules that are not public names themselves.
DECLARED_IN = (
    "jaxlsgd.core.algorithm",
    "jaxlsgd.core.estimator",
    "jaxlsgd.engine.cost",
    "jaxlsgd.runs.cell",
    "jaxlsgd.runs.fclt",
    "jaxlsgd.runs.fit",
    "jaxlsgd.schedules.assumptions",
    "jaxlsgd.schedules.plan",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "directory", type=Path, help="where the pages go; must be new or the last reference"
    )
    parser.add_argument("modules", nargs="*", help="these alone (default: all that are public)")
    arguments = parser.parse_args()
    guides = [] if arguments.modules else sorted(GUIDES.glob("*.md"))
    build(arguments.directory, arguments.modules or public_modules(), guides)
    print(arguments.directory / "index.html")
    return 0


def build(directory: Path, names: list[str], guides: list[Path]) -> None:
    """Writes one page per module and guide, an index, and the index of the search."""
    make_room(directory)
    loaded = [load(name) for name in names]
    package = load("jaxlsgd")
    pdoc.render.configure(
        docformat="google", template_directory=HERE, footer_text=f"jaxlsgd {package.__version__}"
    )
    pdoc.render.env.filters |= {"to_markdown": to_markdown, "linkify": linkify}
    pdoc.render.env.globals["aliases"] = {
        value.__name__: f"jaxlsgd.{name}"
        for name, value in vars(package).items()
        if isinstance(value, types.ModuleType) and value.__name__ != f"jaxlsgd.{name}"
    }
    pdoc.render.env.globals["guides"] = {
        f"guides/{path.stem}.html": path.read_text("utf-8").partition("\n")[0].removeprefix("# ")
        for path in guides
    }
    pdoc.render.env.tests["below"] = lambda name, package: name.startswith(f"{package}.")
    found = pdoc.doc_ast.walk_tree
    pdoc.doc_ast.walk_tree = lambda obj: with_comments(obj, found(obj))
    pages = {module.__name__: pdoc.doc.Module(module) for module in loaded}
    known = public_classes(pages.values())
    for page in pages.values():
        for member in members(page):
            as_written(member, known)
    for name, page in pages.items():
        path = directory.joinpath(*name.split(".")).with_suffix(".html")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(pdoc.render.html_module(page, pages), encoding="utf-8")
    for path in guides:
        write_guide(path, directory / "guides" / f"{path.stem}.html")
    (directory / "index.html").write_text(pdoc.render.html_index(pages), encoding="utf-8")
    (directory / "search.js").write_text(pdoc.render.search_index(pages), encoding="utf-8")


def write_guide(source: Path, path: Path) -> None:
    """A guide as a page; its links to files of the repository become plain text."""
    text = source.read_text("utf-8")
    text = re.sub(r"\]\((\w+)\.md\)", r"](\1.html)", text)
    text = re.sub(r"\[([^]]+)\]\(\.\./[^)]*\)", r"\1", text)
    title = text.partition("\n")[0].removeprefix("# ")
    body = pdoc.render_helpers.to_html(text)
    style = (HERE / "guide.css").read_text("utf-8") + pdoc.render_helpers.formatter.get_style_defs()
    head = f'<meta charset="utf-8"><title>{title} - jaxlsgd</title><style>{style}</style>'
    view = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    back = '<p><a href="../jaxlsgd.html">API reference</a></p>'
    path.parent.mkdir(parents=True, exist_ok=True)
    page = f'<!doctype html>\n<html lang="en"><head>{head}{view}</head>\n<body>{back}\n{body}</body></html>\n'
    path.write_text(page, encoding="utf-8")


def make_room(directory: Path) -> None:
    """Removes the pages of the last time; refuses a directory that holds anything else."""
    if directory.is_dir() and any(directory.iterdir()):
        if not (directory / "index.html").is_file() or not (directory / "search.js").is_file():
            sys.exit(f"{directory} holds something else; give a directory that is new")
        shutil.rmtree(directory)


def load(name: str) -> types.ModuleType:
    """A module with all its public names, also those that are loaded on first use."""
    module = importlib.import_module(name)
    for public in getattr(module, "__all__", ()):
        getattr(module, public)
    return module


def public_modules() -> list[str]:
    """The names of all pages."""
    found = ["jaxlsgd"]
    for name in found:
        module = load(name)
        for public in getattr(module, "__all__", ()):
            value = getattr(module, public)
            if isinstance(value, types.ModuleType) and value.__name__ not in found:
                found.append(value.__name__)
    return sorted({*found, *DECLARED_IN})


def members(namespace: Any) -> Iterator[Any]:
    """Everything below a module or a class that pdoc has found."""
    for member in namespace.members.values():
        yield member
        if isinstance(member, pdoc.doc.Class):
            yield from members(member)


def public_classes(pages: Iterable[Any]) -> dict[str, str]:
    """Where each class is to be looked up, by its bare name."""
    found: dict[str, str] = {}
    for page in pages:
        for member in page.members.values():
            if isinstance(member, pdoc.doc.Class):
                found.setdefault(member.name, member.fullname)
    return found


class Written:
    """An annotation or a default as it stands in the source."""

    def __init__(self, node: ast.AST, known: dict[str, str]) -> None:
        text = ast.unparse(node).removeprefix("dataclasses.InitVar[")
        text = text.removesuffix("]") if text.count("]") > text.count("[") else text
        self._text = re.sub(
            r"(?<![\w.'])(?:[a-z]\w*\.)*([A-Z]\w+)\b(?!')", lambda m: known.get(m[1], m[0]), text
        )

    def __repr__(self) -> str:
        return self._text


def as_written(member: Any, known: dict[str, str]) -> None:
    """Puts the source's own words into a signature or an annotation."""
    if isinstance(member, pdoc.doc.Class):
        for node in pdoc.doc_ast.parse(member.obj).body:
            found = member.members.get(getattr(node, "name", ""))
            if isinstance(node, ast.FunctionDef) and isinstance(found, pdoc.doc.Variable):
                found.annotation = Written(node.returns or ast.Name("Any"), known)  # a property
        fields = fields_of(member.obj)
        constructor = member.members.get("__init__")
        if constructor is not None and _is_record(member.obj):
            plain_constructor(member.obj, constructor, fields, known)
        for name, node in fields.items():
            field = member.members.get(name)
            if isinstance(field, pdoc.doc.Variable):
                field.annotation = Written(node.annotation, known)  # type: ignore[assignment]
                if node.value is not None:
                    field.default_value = Written(node.value, known)
                if field.docstring.startswith("Alias for field number"):
                    field.docstring = ""
    elif isinstance(member, pdoc.doc.Variable) and "<function" in member.default_value_str:
        member.default_value = pdoc.doc_types.empty
        del member.default_value_str  # it is cached
    elif isinstance(member, pdoc.doc.Function) and member.name != "__init__":
        node = pdoc.doc_ast.parse(inspect.unwrap(member.obj))
        if isinstance(node, ast.FunctionDef) and node.name == member.obj.__name__:
            member.signature = signature_of(node, known)


def _is_record(cls: type) -> bool:
    return dataclasses.is_dataclass(cls) or (issubclass(cls, tuple) and hasattr(cls, "_fields"))


def fields_of(cls: type) -> dict[str, ast.AnnAssign]:
    """The fields that a class declares."""
    return {
        node.target.id: node
        for node in pdoc.doc_ast.parse(cls).body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def plain_constructor(cls: type, constructor: Any, fields: Any, known: dict[str, str]) -> None:
    """The constructor of a NamedTuple or a dataclass, whose parameters are its fields."""
    taken = set(inspect.signature(cls).parameters)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter("self", kind)]
    for name, node in fields.items():
        if name in taken:
            default = inspect.Parameter.empty if node.value is None else Written(node.value, known)
            annotation = Written(node.annotation, known)
            parameters.append(inspect.Parameter(name, kind, default=default, annotation=annotation))
    if len(parameters) == len(taken) + 1:
        constructor.signature = inspect.Signature(parameters)
    constructor.docstring = ""


def signature_of(node: ast.FunctionDef, known: dict[str, str]) -> inspect.Signature:
    """A function's signature, of its syntax tree."""
    empty, given = inspect.Parameter.empty, node.args
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + list(given.defaults)
    kinds = [inspect.Parameter.POSITIONAL_ONLY] * len(given.posonlyargs)
    kinds += [inspect.Parameter.POSITIONAL_OR_KEYWORD] * len(given.args)
    rows = list(zip(plain, defaults, kinds, strict=True))
    if given.vararg:
        rows.append((given.vararg, None, inspect.Parameter.VAR_POSITIONAL))
    rows += [
        (argument, default, inspect.Parameter.KEYWORD_ONLY)
        for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    if given.kwarg:
        rows.append((given.kwarg, None, inspect.Parameter.VAR_KEYWORD))

    def written(part: ast.AST | None) -> Any:
        return empty if part is None else Written(part, known)

    parameters = [
        inspect.Parameter(
            argument.arg, kind, default=written(default), annotation=written(argument.annotation)
        )
        for argument, default, kind in rows
    ]
    return inspect.Signature(parameters, return_annotation=written(node.returns))


def with_comments(obj: Any, info: Any) -> Any:
    """Add the comments beside a class's fields to pdoc's documentation of it."""
    if not isinstance(obj, type) or not obj.__module__.startswith("jaxlsgd"):
        return info
    source = textwrap.dedent(pdoc.doc_ast.get_source(obj))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {t.start[0]: t.string for t in tokens if t.type == tokenize.COMMENT}
    docstrings = dict(info.var_docstrings)
    for name, node in fields_of(obj).items():
        # The syntax tree may be of a source that was dedented, but its lines are the same.
        comment = comments.get(node.end_lineno or 0, "").removeprefix("#").strip()
        if comment not in ("", "()") and not comment.startswith(("type:", "noqa")):
            docstrings.setdefault(name, comment)
    return pdoc.doc_ast.AstInfo(docstrings, info.func_docstrings, info.annotations)


@pass_context
def to_markdown(context: Any, docstring: str) -> str:
    """Our docstrings as Markdown."""
    return pdoc.render.to_markdown_with_context(context, to_google(docstring))


@pass_context
def linkify(context: Any, code: str, namespace: str = "", shorten: bool = True) -> Any:
    """Links names, but no method of a result: pdoc would take `f(x).plan` for a relative module."""
    code = re.sub(
        r"""(?<=[)\]"']</span>)<span class="o">\.</span>""", '<span class="o">&#46;</span>', code
    )
    code = re.sub(r"(?<=[)\]])\.(?=\w)", "&#46;", code)
    return pdoc.render.linkify(context, code, namespace, shorten)


def to_google(docstring: str) -> str:
    """Code after "::" is Python, and a star that is part of a formula is not an emphasis.

    Example:
      >>> to_google("of t* and x*, *never* y")
      'of t\\\\* and x\\\\*, *never* y'
    """
    lines, blocks = docstring.split("\n"), []
    i = 0
    while i < len(lines):
        line = lines[i]
        if not line.endswith("::"):
            blocks.append(line if line.startswith("    ") else _without_emphasis(line))
            i += 1
            continue
        end = i + 1
        while end < len(lines) and (not lines[end].strip() or lines[end].startswith("  ")):
            end += 1
        code = textwrap.dedent("\n".join(lines[i + 1 : end])).strip("\n")
        head = _without_emphasis(line[:-1])
        head = f"###### {head}" if head == "Example:" else head
        blocks += [head, "", "```python", code, "```", ""]
        i = end
    return "\n".join(blocks)


def _without_emphasis(line: str) -> str:
    """Escapes stars outside of `code`, unless they are around *words*."""
    parts = re.split(r"(`[^`]*`|(?<![\w*])\*\w[^*]*\w\*(?![\w*]))", line)
    return "".join(part if k % 2 else part.replace("*", "\\*") for k, part in enumerate(parts))


if __name__ == "__main__":
    sys.exit(main())
