"""Format numbers, tables and text for people, in a terminal, a notebook, Markdown or LaTeX; colours of methods."""

from __future__ import annotations

import csv
import html
import io
import itertools
import math
import re
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from jaxlsgd.core.storage import replacing

WIDTH = 100  # of a table as text
LATEX_LINES = 40  # that fit on a page below a caption
# Okabe and Ito's palette, distinct with any colour vision; without yellow, which is faint on white.
COLOURS = ("#000000", "#0072B2", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#56B4E9", "#7F7F7F")
# The colour of a method by its place above, in every figure and on the page; a variant that is not named
# has its family's if that is free, and other methods take what is left, in the order of `_FREE`.
METHOD_COLOURS = {
    "one_step": 1,
    "plug_in": 4,
    "plug_in[finite]": 3,
    "random_scaling": 2,
    "random_scaling[finite]": 6,
    "growing_batches": 5,
    "equal_batches": 7,
    "oracle": 0,
}
_FREE = (1, 4, 2, 3, 5, 6, 7, 0)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h")


def fraction(value: Any) -> Any:
    """Return 1/3 for "1/3", which TOML cannot write, and any other value unchanged.

    Both numbers have at most nine digits: `fractions.Fraction("1e999999999")` would write out a billion.
    """
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,9}/\d{1,9}", value):
        top, _, bottom = value.partition("/")
        return value if int(bottom) == 0 else int(top) / int(bottom)
    return value


def printable(text: str, breaks: str = "\n") -> str:
    """Return text from a file or another machine with control characters escaped, except those in `breaks`.

    Example:
      >>> printable("red: \\x1b[31m"), printable("two\\nlines", breaks="")
      ('red: \\\\x1b[31m', 'two\\\\nlines')
    """
    return "".join(c if c.isprintable() or c in breaks else repr(c)[1:-1] for c in text)


def plural(count: int, noun: str) -> str:
    """Return a number and a regular noun: '1 tile', '1,200 tiles'."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def standard_errors(count: float) -> str:
    """Return a distance in words: '1 standard error', '2.4 standard errors'."""
    shown = f"{count:.2g}"
    return f"{shown} standard error" + ("" if shown == "1" else "s")


def with_error(value: float | None, error: float | None, decimals: int | None = None) -> str:
    """Return `value (error)`, with two significant digits of the error; "-" for None.

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
    """Return how many decimals show two digits of an error; 4 for an error of 0."""
    return max(0, 1 - math.floor(math.log10(error))) if error > 0 else 4


def percent(
    value: float | None,
    error: float | None,
    low: float | None,
    high: float | None,
    decimals: int | None = None,
) -> str:
    """Return a proportion in per cent with its standard error, or with its interval if that error is 0.

    At 0 % and 100 % the formula of the standard error gives 0, which is no measure of precision.

    Example:
      >>> percent(1.0, 0.0, 0.963, 1.0), percent(0.95, 0.01, 0.92, 0.97), percent(1.0, None, 0.2, 1.0)
      ('100.0 [96.3, 100.0]', '95.0 (1.0)', '100')
    """
    scaled = [None if x is None else 100 * x for x in (value, error, low, high)]
    if scaled[1] != 0 or scaled[2] is None or scaled[3] is None:
        return with_error(scaled[0], scaled[1], decimals)
    return f"{scaled[0]:.1f} [{scaled[2]:.1f}, {scaled[3]:.1f}]"


def p_value(p: float, least: float = 1e-15) -> str:
    """Return a p-value with three digits; below `least`, or 1e-15, as a bound.

    Example:
      >>> p_value(0.0), p_value(0.01234), p_value(1e-14)
      ('<1e-15', '0.0123', '1e-14')
    """
    least = max(least, 1e-15)
    return f"<{least:g}" if p <= least * (1 + 1e-9) else f"{p:.3g}"  # found by bisection of ln p


def colour_numbers(methods: Sequence[str]) -> list[int]:
    """Return the place of each method in `COLOURS`; from 8 on colours come again, with other markers.

    >>> colour_numbers(["mine", "plug_in", "random_scaling[paper]", "one_step"])
    [3, 4, 2, 1]
    """
    found = {name: METHOD_COLOURS[name] for name in methods if name in METHOD_COLOURS}
    for name in methods:
        number = METHOD_COLOURS.get(name.partition("[")[0])
        if name not in found and number is not None and number not in found.values():
            found[name] = number
    for name in methods:
        order = (8 * turn + i for turn in range(len(methods)) for i in _FREE)
        found.setdefault(name, next(i for i in order if i not in found.values()))
    return [found[name] for name in methods]


def align(lines: Sequence[Sequence[str]], left: Collection[int] = ()) -> str:
    """Return lines as aligned columns, with a rule under the header; those in `left` are left-aligned.

    Control characters in cells are escaped.
    """
    lines = [[printable(cell, breaks="") for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ["  ".join(_padded(line, widths, left)).rstrip() for line in lines]
    return "\n".join([padded[0], "  ".join("-" * width for width in widths), *padded[1:]])


def _padded(line: Sequence[str], widths: Sequence[int], left: Collection[int]) -> list[str]:
    columns = enumerate(zip(line, widths, strict=True))
    return [cell.ljust(n) if i in left else cell.rjust(n) for i, (cell, n) in columns]


def paragraph(text: str) -> str:
    """Return plain text as an HTML paragraph."""
    return f"<p>{html.escape(text)}</p>"


class Table(NamedTuple):
    """A table, as text, HTML, Markdown, LaTeX or CSV.

    Cells are text; in a table that is written as CSV alone they may be numbers, or None for an empty field.

    Example:
      >>> "a &lt; b" in Table("", ["x"], [["a < b"]]).html()
      True
    """

    title: str
    header: Sequence[str]
    lines: Sequence[Sequence[Any]]
    left: Collection[int] = ()  # columns aligned to the left
    notes: Sequence[str] = ()

    @classmethod
    def of(cls, records: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> Table:
        """Return a table of the chosen columns of records, for `csv`."""
        return cls("", columns, [[record[name] for name in columns] for record in records])

    @property
    def width(self) -> int:
        """Width of the table as text, in characters."""
        columns = zip(self.header, *self.lines, strict=True)
        return sum(max(map(len, column)) for column in columns) + 2 * (len(self.header) - 1)

    def text(self) -> str:
        """Return aligned columns under the title, with the notes below."""
        title, *notes = (
            textwrap.fill(printable(part), WIDTH, subsequent_indent="  ")
            for part in (self.title, *self.notes)
        )
        parts = ([title, ""] if title else []) + [align([self.header, *self.lines], self.left)]
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
        """Return a pipe table, padded so that its source can be read too."""
        lines = [[escape_markdown(cell) for cell in line] for line in [self.header, *self.lines]]
        widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
        rule = ["-" * n if i in self.left else "-" * (n - 1) + ":" for i, n in enumerate(widths)]
        padded = [_padded(line, widths, self.left) for line in [lines[0], rule, *lines[1:]]]
        title = [f"**{escape_markdown(self.title)}**", ""] if self.title else []
        notes = [line for note in self.notes for line in ("", escape_markdown(note))]
        return "\n".join([*title, *(f"| {' | '.join(x)} |" for x in padded), *notes]) + "\n"

    def latex(self) -> str:
        """Return a booktabs table; one that is longer than a page is a longtable, which breaks."""
        columns = "".join("l" if i in self.left else "r" for i in range(len(self.header)))
        head = " & ".join(map(_latex_heading, self.header)) + r" \\"
        rows = [" & ".join(map(escape_latex, line)) + r" \\" for line in self.lines]
        parts = [part.rstrip(".") + "." for part in (self.title, *self.notes) if part]
        caption = rf"\caption{{{' '.join(map(escape_latex, parts))}}}"
        narrow = self.width <= 76  # characters of this size between the margins of an article
        size = r"\footnotesize\setlength{\tabcolsep}{3.5pt}" if narrow else _SCRIPT
        if len(rows) <= LATEX_LINES:
            begin = [
                r"% needs \usepackage{booktabs}",
                r"\begin{table}[t]",
                rf"\centering{size}",
            ]
            begin += [caption, rf"\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule"]
            end = [r"\bottomrule", r"\end{tabular}", r"\end{table}", ""]
            return "\n".join([*begin, *rows, *end])
        wide = rf"\multicolumn{{{len(columns)}}}{{r}}{{continued}} \\"
        begin = [
            r"% needs \usepackage{booktabs, longtable}",
            rf"\begingroup{size}",
        ]
        begin += [rf"\begin{{longtable}}{{{columns}}}", rf"{caption} \\", r"\toprule", head]
        begin += [r"\midrule", r"\endfirsthead", r"\toprule", head, r"\midrule", r"\endhead"]
        begin += [r"\midrule", wide, r"\endfoot", r"\bottomrule", r"\endlastfoot"]
        return "\n".join([*begin, *rows, r"\end{longtable}", r"\endgroup", ""])

    def csv(self) -> str:
        """Return header and lines as CSV; floats keep every digit, None is an empty field."""
        stream = io.StringIO()
        write_csv(stream, self.header, self.lines)
        return stream.getvalue()

    def to_frame(self) -> Any:
        """Return header and lines as a `pandas.DataFrame`."""
        return frame(zip(self.header, zip(*self.lines, strict=True), strict=True))


class Shown(str):
    """A table as text, which is also shown as text where it is not printed, and as a table in a notebook.

    Its `table` is there as Markdown, LaTeX, CSV or a frame: `coverage_table(cells).table.latex()`.
    """

    __slots__ = ("table",)
    table: Table

    @classmethod
    def of(cls, table: Table) -> Shown:
        """Return the text of a table."""
        shown = cls(table.text().rstrip("\n"))
        shown.table = table
        return shown

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return self.table.html()


class Tabular:
    """An object that prints as a table, and is one in a notebook."""

    def table(self) -> Table:
        """Return the table that is shown."""
        raise NotImplementedError

    def __str__(self) -> str:
        return self.table().text().rstrip("\n")

    def _repr_html_(self) -> str:
        return self.table().html()


def facts(kind: str, name: str, lines: Iterable[tuple[str, Any]]) -> Table:
    """Return what is to be known of one object as a table of two columns; empty values are left out."""
    known = [(what, str(value)) for what, value in lines if value not in ("", None)]
    return Table("", (kind, name), known, (0, 1))


def frame(columns: Iterable[tuple[str, Any]]) -> Any:
    """Return a `pandas.DataFrame` of named columns."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError("frames need pandas: pip install 'jaxlsgd[tables]'") from error
    return pandas.DataFrame(dict(columns))


def save_figure(figure: Any, path: Path, **options: Any) -> None:
    """Write a Matplotlib figure whole or not at all, without dates: the same figure gives the same bytes.

    It is drawn before the file is opened, as Matplotlib does not tell of a disk that is full.
    """
    kind, stream = path.suffix.removeprefix(".") or "png", io.BytesIO()
    dates = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
    figure.savefig(stream, format=kind, metadata=dates.get(kind), **options)
    with replacing(path, force=True) as temporary:
        temporary.write_bytes(stream.getvalue())


def self_shown(figure: Any) -> Any:
    """Return a Matplotlib figure that a notebook shows though pyplot, which registers figures, is not used."""

    def png() -> bytes:
        stream = io.BytesIO()
        figure.savefig(stream, format="png", dpi=110)
        return stream.getvalue()

    figure._repr_png_ = png
    return figure


def write_csv(file: TextIO, header: Sequence[str], lines: Iterable[Iterable[Any]]) -> None:
    """Write CSV to an open file; put a quote before text that a spreadsheet would run as a formula.

    Control characters but line breaks are escaped: some end a line, and others tell a terminal what to do.
    """
    writer = csv.writer(file, lineterminator="\n")
    writer.writerows([_inert(value) for value in line] for line in itertools.chain([header], lines))


_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


def _inert(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    safe = _CONTROL.sub(lambda found: repr(found[0])[1:-1], value)
    return f"'{safe}" if value[:1] in tuple("=+-@\t\r\n") else safe


def escape_markdown(text: str) -> str:
    """Return text that Markdown, which may contain HTML, prints unchanged; line breaks and such are escaped."""
    safe = (
        printable(text, breaks="").replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    )
    return re.sub(r"([|*])", r"\\\1", safe)


def _latex_heading(text: str) -> str:
    """Return a heading, on two lines if it is long and has brackets, as methods with options have."""
    first, bracket, rest = text.partition("[")
    if len(text) <= 20 or not first or not bracket:
        return escape_latex(text)
    lines = rf"{escape_latex(first)}\\{escape_latex('[' + rest)}"
    return rf"\begin{{tabular}}[b]{{@{{}}r@{{}}}}{lines}\end{{tabular}}"


_SCRIPT = r"\scriptsize\setlength{\tabcolsep}{2.5pt}"
_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
} | {character: f"\\{character}" for character in "&%$#_{}"}


def escape_latex(text: str) -> str:
    """Return text that LaTeX prints unchanged; a leading minus becomes a mathematical one.

    Line breaks and control characters are escaped, so that text stays in its cell or comment.

    Example:
      >>> escape_latex("plug_in at 95 %")
      'plug\\\\_in at 95 \\\\%'
    """
    safe = printable(text, breaks="")
    escaped = "".join(_LATEX.get(character, character) for character in safe)
    # A row that begins with "[" would be read as an optional argument of \\.
    escaped = "{[}" + escaped[1:] if escaped.startswith("[") else escaped
    return re.sub(r"^-(?=[\d.])", "$-$", escaped)
