"""A table of strings, and how it is laid out as text, Markdown and LaTeX."""

from __future__ import annotations

import re
import textwrap
from typing import NamedTuple

from jaxlsgd.core.text import WIDTH, align

_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
}


class Table(NamedTuple):
    """Cells of text, ready to be laid out."""

    title: str
    header: list[str]
    lines: list[list[str]]
    left: tuple[int, ...] = ()  # columns aligned to the left
    notes: tuple[str, ...] = ()


def width(table: Table) -> int:
    """Characters of the lines of a table as text."""
    columns = zip(table.header, *table.lines, strict=True)
    return sum(max(map(len, column)) for column in columns) + 2 * (len(table.header) - 1)


def text(table: Table) -> str:
    """Aligned columns under a title, with the notes below."""
    body = align([table.header, *table.lines], table.left)
    title, *notes = (
        textwrap.fill(part, WIDTH, subsequent_indent="  ") for part in (table.title, *table.notes)
    )
    parts = ([title, ""] if title else []) + [body]
    return "\n".join(parts + (["", *notes] if notes else [])) + "\n"


def markdown(table: Table) -> str:
    """A pipe table, padded so that the source reads well too."""
    lines = [[_escape_markdown(cell) for cell in line] for line in [table.header, *table.lines]]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    rule = [
        "-" * width if i in table.left else "-" * (width - 1) + ":"
        for i, width in enumerate(widths)
    ]
    padded = [_pipe_line(line, widths, table.left) for line in [lines[0], rule, *lines[1:]]]
    title = [f"**{_escape_markdown(table.title)}**", ""] if table.title else []
    notes = [line for note in table.notes for line in ("", _escape_markdown(note))]
    return "\n".join(title + padded + notes) + "\n"


def _pipe_line(line: list[str], widths: list[int], left: tuple[int, ...]) -> str:
    cells = [
        cell.ljust(width) if i in left else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(line, widths, strict=True))
    ]
    return f"| {' | '.join(cells)} |"


def _escape_markdown(cell: str) -> str:
    # Names come from files, and a page that is made of Markdown would take them for HTML.
    safe = cell.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([|*])", r"\\\1", safe)


def latex(table: Table) -> str:
    """A booktabs table; it needs `\\usepackage{booktabs}` and nothing else."""
    columns = "".join("l" if i in table.left else "r" for i in range(len(table.header)))
    lines = [" & ".join(map(escape_latex, line)) + r" \\" for line in [table.header, *table.lines]]
    parts = [part.rstrip(".") + "." for part in (table.title, *table.notes) if part]
    caption = " ".join(map(escape_latex, parts))
    return "\n".join(
        [
            r"% needs \usepackage{booktabs}",
            r"\begin{table}[t]",
            r"\centering",
            rf"\caption{{{caption}}}",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            lines[0],
            r"\midrule",
            *lines[1:],
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def escape_latex(cell: str) -> str:
    """Text that LaTeX prints as it is; a leading minus becomes a real one.

    Example:
      >>> escape_latex("plug_in at 95 %")
      'plug\\\\_in at 95 \\\\%'
    """
    escaped = "".join(_LATEX.get(character, character) for character in cell)
    # A row that begins with "[" would be read as an optional argument of \\.
    escaped = "{[}" + escaped[1:] if escaped.startswith("[") else escaped
    return re.sub(r"^-(?=[\d.])", "$-$", escaped)
