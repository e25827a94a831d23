"""Numbers and columns as people read them."""

from __future__ import annotations

import csv
import html
import io
import math
import re
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TextIO

WIDTH = 100  # of a table as text


def fraction(value: Any) -> Any:
    """1/3 from "1/3", which TOML does not have; anything else as it is.

    A few digits only: `fractions.Fraction("1e999999999")` would write out a billion of them.
    """
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,9}/\d{1,9}", value):
        top, _, bottom = value.partition("/")
        return value if int(bottom) == 0 else int(top) / int(bottom)
    return value


def printable(text: str, keep: str = "\n") -> str:
    """Text from a file as a terminal may show it: what would steer the terminal is spelt out."""
    if text.isprintable():
        return text
    spelt = (repr(c)[1:-1] if not (c.isprintable() or c in keep) else c for c in text)
    return "".join(spelt)


def with_error(value: float | None, error: float | None, decimals: int | None = None) -> str:
    """`value (error)` with the decimals that two digits of the error ask for; "-" for None.

    Example:
      >>> with_error(95.7, 0.641), with_error(None, None)
      ('95.70 (0.64)', '-')
    """
    if value is None:
        return "-"
    if error is None:
        return f"{value:.4g}" if decimals is None else f"{value:.{decimals}f}"
    places = error_decimals(error) if decimals is None else decimals
    if places > 9 or abs(value) >= 1e9:
        return f"{value:.4g} ({error:.2g})"
    return f"{value:.{places}f} ({error:.{places}f})"


def error_decimals(error: float) -> int:
    """Decimals that show two digits of an error; 4 for an error of 0."""
    return max(0, 1 - math.floor(math.log10(error))) if error > 0 else 4


def percent(
    value: float | None,
    error: float | None,
    low: float | None,
    high: float | None,
    decimals: int | None = None,
) -> str:
    """A proportion in per cent with its standard error, or its interval where that error is 0.

    At 0 % and 100 % the standard error is 0 by its formula, and says nothing.

    Example:
      >>> percent(1.0, 0.0, 0.963, 1.0), percent(0.95, 0.01, 0.92, 0.97), percent(1.0, None, 0.2, 1.0)
      ('100.0 [96.3, 100.0]', '95.0 (1.0)', '100')
    """
    scaled = [None if x is None else 100 * x for x in (value, error, low, high)]
    if scaled[1] != 0 or scaled[2] is None or scaled[3] is None:
        return with_error(scaled[0], scaled[1], decimals)
    return f"{scaled[0]:.1f} [{scaled[2]:.1f}, {scaled[3]:.1f}]"


def p_value(p: float, least: float = 1e-15) -> str:
    """A p-value; laws are not known, nor of use, beyond 15 digits.

    Example:
      >>> p_value(0.0), p_value(0.01234), p_value(1e-14)
      ('<1e-15', '0.0123', '1e-14')
    """
    least = max(least, 1e-15)
    return f"<{least:g}" if p <= least else f"{p:.3g}"


def plural(count: int, noun: str) -> str:
    """A number and a regular noun: '1 tile', '1,200 tiles'."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def align(lines: Sequence[Sequence[str]], left: Collection[int] = ()) -> str:
    """Columns of equal width, a rule under the header; columns in `left` are left-aligned."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join([padded[0], "  ".join("-" * width for width in widths), *padded[1:]])


class Shown(str):
    """Text that a notebook shows as HTML; elsewhere it is the text."""

    __slots__ = ("html",)
    html: str

    @classmethod
    def of(cls, text: str, html: str) -> Shown:
        """The text, with how a notebook shows it."""
        shown = cls(text)
        shown.html = html
        return shown

    def _repr_html_(self) -> str:
        return self.html


def table(
    header: Sequence[str],
    lines: Iterable[Sequence[str]],
    left: Collection[int] = (0,),
    title: str = "",
    notes: Iterable[str] = (),
) -> str:
    """Return a table as HTML; columns in `left` are aligned to the left, the others to the right.

    Example:
      >>> "a &lt; b" in table(["x"], [["a < b"]])
      True
    """
    return Table(title, header, list(lines), left, tuple(notes)).html()


def paragraph(text: str) -> str:
    """A paragraph of plain text."""
    return f"<p>{html.escape(text)}</p>"


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
    """A table, as text, HTML, Markdown, LaTeX or CSV.

    Cells are text; in a table that is written as CSV alone they may be numbers, or None for an empty field.
    """

    title: str
    header: Sequence[str]
    lines: Sequence[Sequence[Any]]
    left: Collection[int] = ()  # columns aligned to the left
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, records: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> Table:
        """Return chosen columns of records, for `csv`."""
        return cls("", columns, [[record[name] for name in columns] for record in records])

    @property
    def width(self) -> int:
        """Characters per line as text."""
        columns = zip(self.header, *self.lines, strict=True)
        return sum(max(map(len, column)) for column in columns) + 2 * (len(self.header) - 1)

    def text(self) -> str:
        """Return aligned columns under the title, with the notes below."""
        body = align([self.header, *self.lines], self.left)
        title, *notes = (
            textwrap.fill(part, WIDTH, subsequent_indent="  ") for part in (self.title, *self.notes)
        )
        parts = ([title, ""] if title else []) + [body]
        return "\n".join(parts + (["", *notes] if notes else [])) + "\n"

    def html(
        self,
        left: str = ' style="text-align:left"',
        right: str = ' style="text-align:right"',
    ) -> str:
        """Return a table element with the notes as paragraphs below.

        Args:
          left: attributes of cells, and of the caption, that are aligned to the left.
          right: attributes of the other cells.
        """

        def row(cells: Sequence[str], kind: str) -> str:
            made = (
                f"<{kind}{left if i in self.left else right}>{html.escape(cell)}</{kind}>"
                for i, cell in enumerate(cells)
            )
            return f"<tr>{''.join(made)}</tr>"

        caption = f"<caption{left}>{html.escape(self.title)}</caption>" if self.title else ""
        head, body = row(self.header, "th"), "".join(row(line, "td") for line in self.lines)
        made = f"<table>{caption}<thead>{head}</thead><tbody>{body}</tbody></table>"
        return made + "".join(map(paragraph, self.notes))

    def markdown(self) -> str:
        """Return a pipe table, padded so that the source reads well too."""
        lines = [[_escape_markdown(cell) for cell in line] for line in [self.header, *self.lines]]
        widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
        rule = [
            "-" * width if i in self.left else "-" * (width - 1) + ":"
            for i, width in enumerate(widths)
        ]
        padded = [_pipe_line(line, widths, self.left) for line in [lines[0], rule, *lines[1:]]]
        title = [f"**{_escape_markdown(self.title)}**", ""] if self.title else []
        notes = [line for note in self.notes for line in ("", _escape_markdown(note))]
        return "\n".join(title + padded + notes) + "\n"

    def latex(self) -> str:
        """Return a booktabs table; it needs `\\usepackage{booktabs}` and nothing else."""
        columns = "".join("l" if i in self.left else "r" for i in range(len(self.header)))
        lines = [
            " & ".join(map(escape_latex, line)) + r" \\" for line in [self.header, *self.lines]
        ]
        parts = [part.rstrip(".") + "." for part in (self.title, *self.notes) if part]
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

    def csv(self) -> str:
        """Return header and lines as CSV; floats keep every digit, None is an empty field."""
        stream = io.StringIO()
        write_csv(stream, self.header, self.lines)
        return stream.getvalue()


def write_csv(file: TextIO, header: Sequence[str], lines: Iterable[Sequence[Any]]) -> None:
    """Write CSV to an open file, with text that a spreadsheet would run as a formula quoted."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([_inert(value) for value in line] for line in lines)


def _inert(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value[:1] in tuple("=+-@\t\r") else value


def _pipe_line(line: Sequence[str], widths: Sequence[int], left: Collection[int]) -> str:
    cells = [
        cell.ljust(width) if i in left else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(line, widths, strict=True))
    ]
    return f"| {' | '.join(cells)} |"


def _escape_markdown(cell: str) -> str:
    # Names come from files, and a page that is made of Markdown would take them for HTML.
    safe = cell.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([|*])", r"\\\1", safe)


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
