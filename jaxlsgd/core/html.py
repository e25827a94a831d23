"""Tables as a notebook shows them: plain HTML, names as text."""

from __future__ import annotations

import html
from collections.abc import Collection, Iterable, Sequence


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
    """A table; columns in `left` are aligned to the left, the others to the right.

    Example:
      >>> "a &lt; b" in table(["x"], [["a < b"]])
      True
    """

    def row(cells: Sequence[str], kind: str) -> str:
        sides = ("left" if i in left else "right" for i in range(len(cells)))
        made = (
            f'<{kind} style="text-align:{side}">{html.escape(cell)}</{kind}>'
            for side, cell in zip(sides, cells, strict=True)
        )
        return f"<tr>{''.join(made)}</tr>"

    caption = f'<caption style="text-align:left">{html.escape(title)}</caption>' if title else ""
    body = "".join(row(line, "td") for line in lines)
    made = f"<table>{caption}<thead>{row(header, 'th')}</thead><tbody>{body}</tbody></table>"
    return made + "".join(map(paragraph, notes))


def paragraph(text: str) -> str:
    """A paragraph of plain text."""
    return f"<p>{html.escape(text)}</p>"
