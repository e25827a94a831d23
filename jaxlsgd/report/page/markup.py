"""The page's markup. Every text that comes from a study is escaped, and only our own script may run."""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import json
import re
from typing import Any

from jaxlsgd.report.layout import Table

SCRIPTS = (
    "data",
    "marks",
    "axes",
    "panels",
    "figures",
    "rounds",
    "nested",
    "cell",
    "table",
    "main",
)
STATIC_LINES = 50  # of the table, for readers without a script; the script has them all


def render(content: dict[str, Any]) -> str:
    """The page of what `build.collect` has collected."""
    style, script = _asset("page.css"), _script()
    policy = (
        "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"style-src {_hash(style)}; script-src {_hash(script)}"
    )
    state = content["state"]
    parts = {
        "policy": policy,
        "style": style,
        "script": script,
        "data": embedded(content["data"]),
        "name": html.escape(content["name"]),
        "state": _state(state),
        "body": "empty" if state["empty"] else "full",
        "findings": _findings(content["findings"], state),
        "failures": _paragraphs(content["failures"]),
        "question": _definitions(content["question"]),
        "table": _table(content["table"], STATIC_LINES),
        "notes": _paragraphs(content["table"].notes),
        "comparison": _comparison(content.get("comparison")),
        "provenance": _facts(content["provenance"]),
        "study": html.escape(content["study"]),
    }
    # In one pass, so that nothing in a part is taken for a place.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _asset("page.html"))


def embedded(data: Any) -> str:
    """JSON that can stand in a script element, whatever texts are in it."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _asset(name: str) -> str:
    return (importlib.resources.files("jaxlsgd.report.page") / "assets" / name).read_text("utf-8")


def _script() -> str:
    parts = "\n".join(_asset(f"{name}.js") for name in SCRIPTS)
    return f'"use strict";\n(() => {{\n{parts}\n}})();\n'


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _state(state: dict[str, Any]) -> str:
    kind = "complete" if state["complete"] else "partial"
    text = state["text"] + (" A run is writing." if state["running"] else "")
    return f'<p class="state {kind}">{html.escape(text)}</p>'


def _findings(sentences: list[tuple[str, str]], state: dict[str, Any]) -> str:
    if not sentences:
        return (
            f"<p>{'There are no rows yet' if state['empty'] else 'No replication completed'}.</p>"
        )
    return "\n".join(
        f"<p><b>{html.escape(heading)}.</b> {html.escape(text)}</p>" for heading, text in sentences
    )


def _paragraphs(lines: Any) -> str:
    return "\n".join(f"<p>{html.escape(line)}</p>" for line in lines)


def _definitions(parts: list[tuple[str, list[str]]]) -> str:
    found = []
    for heading, lines in parts:
        found.append(f"<dt>{html.escape(heading)}</dt>")
        found += [f"<dd>{html.escape(line)}</dd>" for line in lines]
    return "\n".join(found)


def _facts(facts: list[tuple[str, str]]) -> str:
    return "\n".join(
        f"<dt>{html.escape(name)}</dt><dd><code>{html.escape(value)}</code></dd>"
        for name, value in facts
    )


def _comparison(found: tuple[str, list[str], Table] | None) -> str:
    if found is None:
        return ""
    name, told, table = found
    place = (
        '<div class="scroll" tabindex="0" role="region" aria-label="Table of differences">'
        f"{_table(table, len(table.lines))}</div>\n"
        '<p class="small">Differences are this study less the other one, over the same draws where seed '
        "and problem are the same.</p>"
    )
    heading = f'<section id="comparison"><h2>Compared with {html.escape(name)}</h2>'
    return f"{heading}\n{_paragraphs(told)}\n{place if table.lines else ''}</section>"


def _table(table: Table, most: int) -> str:
    if not table.lines:
        return ""
    left = set(table.left)

    def line(cells: list[str], kind: str) -> str:
        return "".join(
            f"<{kind}{' class=left' if i in left else ''}>{html.escape(cell)}</{kind}>"
            for i, cell in enumerate(cells)
        )

    head = f"<thead><tr>{line(table.header, 'th')}</tr></thead>"
    body = "\n".join(f"<tr>{line(cells, 'td')}</tr>" for cells in table.lines[:most])
    caption = f"<caption>{html.escape(table.title)}</caption>" if table.title else ""
    return f"<table>{caption}{head}<tbody>\n{body}\n</tbody></table>"
