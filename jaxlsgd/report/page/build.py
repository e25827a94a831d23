"""The page: what it shows is collected, then written as HTML with every text of a study escaped."""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxlsgd.analysis import looks
from jaxlsgd.analysis.measures import truth_notes, warns_of_truth
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.display import Table, colour_numbers
from jaxlsgd.core.rows import CellRows
from jaxlsgd.core.storage import check_output
from jaxlsgd.report import comparison, tables
from jaxlsgd.report.page.data import Columns, Failures, Pairs, detail, sizes
from jaxlsgd.report.page.provenance import Digest, imports, provenance, shown_path, study_file
from jaxlsgd.report.page.text import MOST_CELLS, Entry, Headline, headline, question, unambiguous
from jaxlsgd.study.store import files
from jaxlsgd.study.store.reader import Results

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
    "headline",
    "download",
    "main",
)
STATIC_LINES = 50  # of the table, for readers without a script; the script shows all
_MOST_DIFFERENCES = 200


def render(content: dict[str, Any]) -> str:
    """Return the page of what `collect` returns."""
    style, script = _asset("page.css"), _script()
    policy = (
        "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"style-src {_hash(style)}; script-src {_hash(script)}"
    )
    state, table = content["state"], content["table"]
    parts = {
        "policy": policy,
        "style": style,
        "script": script,
        "data": _embedded(content["data"]),
        "name": html.escape(content["name"]),
        "state": _state_markup(state),
        "body": "empty" if state["empty"] else "full",
        "headline": _headline(content["headline"], state),
        "warnings": _paragraphs(content["warnings"]),
        "failures": _paragraphs(content["failures"]),
        "question": _definitions(content["question"]),
        "table": _table(table._replace(lines=table.lines[:STATIC_LINES])),
        "notes": _paragraphs(table.notes),
        "looks": _looks(content["looks"]),
        "comparison": _comparison(content.get("comparison")),
        "provenance": _facts(content["provenance"]),
        "study": html.escape(content["study"]),
    }
    # In one pass, so that text in a part that looks like a placeholder stays.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _asset("page.html"))


def _embedded(data: Any) -> str:
    """Return JSON that is safe in a script element, whatever texts are in it."""
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


def _state_markup(state: dict[str, Any]) -> str:
    kind = "complete" if state["complete"] else "partial"
    text = state["text"] + (" A run is writing." if state["running"] else "")
    return f'<p class="state {kind}">{html.escape(text)}</p>'


def _headline(found: Headline, state: dict[str, Any]) -> str:
    """Return what came out as tables; the script draws them again for what the reader chooses."""
    if state["empty"]:
        return "<p>There are no rows yet.</p>"
    heads = found.algorithms
    heads = heads if len(heads) > 1 else [_KEPT] * len(heads)
    lines = [[name, *line] for name, line in zip(found.methods, found.summary, strict=True)]
    summary = _table(Table("", ["method", *heads], lines, (0,)))
    parts = [
        f'<p class="scope">{html.escape(found.scope)}</p>',
        '<div class="tables">',
        _scroll("summary", "Cells in which methods keep their level", summary),
        _scroll("matrix", "Coverage of every cell and method", _matrix(found)),
        "</div>",
        _RULE.format(f"{found.limit:.1f}"),
    ]
    return "\n".join(parts)


_KEPT = "Cells that keep their level: lowest to highest coverage"
_RULE = (
    '<p class="small">A cell is a problem, algorithm, horizon and schedule: none are averaged. Coverage in '
    "per cent, with its Monte-Carlo standard error in parentheses; × is the mean length over that of the "
    "shortest method that does not fall short in the same cell. ▼ and ▲ are below and above the level by "
    'more than <span class="limit">{}</span> of the standard errors that exact intervals would have, which '
    "happens to such a method in any of the cells shown with a chance of 5 %; in the others it keeps its "
    "level.</p>"
)


def _matrix(found: Headline) -> str:
    lines, shown, wide = [], 0, 1 + len(found.methods)
    for name, group in found.cells:
        if shown >= MOST_CELLS:
            break
        head = f"<th class=left scope=rowgroup colspan={wide}>{html.escape(name)}</th>"
        lines.append(f"<tr class=group>{head}</tr>")
        for schedule, line in group[: MOST_CELLS - shown]:
            entries = "".join(map(_entry, line))
            lines.append(f"<tr><th class=left scope=row>{html.escape(schedule)}</th>{entries}</tr>")
            shown += 1
    head = "".join(f"<th scope=col>{html.escape(name)}</th>" for name in found.methods)
    head = f"<thead><tr><th class=left>schedule</th>{head}</tr></thead>"
    return f"<table>{head}<tbody>{''.join(lines)}</tbody></table>"


def _entry(entry: Entry | None) -> str:
    if entry is None:
        return "<td></td>"
    flag = {"a": "▲ ", "b": "▼ "}.get(entry.shade[:1], "")
    length = f" <small>{html.escape(entry.length)}</small>" if entry.length else ""
    return f'<td class="{entry.shade}">{flag}{html.escape(entry.coverage)}{length}</td>'


def _scroll(name: str, label: str, table: str) -> str:
    return (
        f'<div class="scroll {name}" tabindex="0" role="region" aria-label="{label}">{table}</div>'
    )


def _paragraphs(lines: Iterable[str]) -> str:
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
    name, findings, table = found
    place = (
        '<div class="scroll" tabindex="0" role="region" aria-label="Table of differences">'
        f"{_table(table)}</div>\n"
        '<p class="small">Differences are this study less the other one, over the same draws if seed '
        "and problem are the same.</p>"
    )
    heading = f'<section id="comparison"><h2>Compared with {html.escape(name)}</h2>'
    return f"{heading}\n{_paragraphs(findings)}\n{place if table.lines else ''}</section>"


def _looks(table: Table) -> str:
    if not table.lines:
        return ""
    left_out = len(table.lines) - STATIC_LINES
    notes = [*table.notes, *([f"{left_out:,} more: jaxlsgd looks"] if left_out > 0 else [])]
    return (
        '<section id="looks"><h2>Looking at every saved round</h2>\n'
        '<div class="scroll" tabindex="0" role="region" aria-label="Table of looks">'
        f"{_table(table._replace(lines=table.lines[:STATIC_LINES]))}</div>\n{_paragraphs(notes)}</section>"
    )


def _table(table: Table) -> str:
    # The page's policy forbids style attributes.
    return table._replace(notes=()).html(" class=left", "") if table.lines else ""


def write(
    results: Results,
    path: str | Path,
    other: Results | None = None,
    refresh: int = 0,
    level: float | None = None,
) -> Path:
    """Write a study as one HTML file that needs nothing else.

    A study that has no rows yet, or not all of them, makes a page with a note on what is missing.

    Args:
      results: of a study, also one that is running.
      path: the file; replaced at once if it is there.
      other: a study to compare it with, cell by cell.
      refresh: seconds after which a browser loads the page again; 0 for never.
      level: that the page shows until the reader chooses another; the first of the study if None.

    Returns:
      The path.

    Example::

        write(Results("results"), "report.html")
    """
    path = Path(path)
    check_output(path)  # before the page is made, which may take a minute
    files.write_whole(path, page(results, other, refresh, level).encode())
    return path


def page(
    results: Results,
    other: Results | None = None,
    refresh: int = 0,
    level: float | None = None,
) -> str:
    """Return the page as text."""
    content = collect(results, level)
    content["data"]["refresh"] = refresh
    if other is not None:
        name = shown_path(other.directory)
        found = comparison.compare(results, other, name)
        content["comparison"] = (name, found.findings, found.table(_MOST_DIFFERENCES))
    return render(content)


def collect(results: Results, level: float | None = None) -> dict[str, Any]:
    """Return what the page shows: the parts of its text, and under `data` what its script draws."""
    if level not in (None, *results.study.levels):
        raise refusal(
            "level", f"be one of {', '.join(map(str, results.study.levels))}", level, code="choice"
        )
    study, ids = results.study, results.cells()
    methods = [part.name for part in study.methods]
    labels = {name: name for name in methods}
    views = sum(len(cell.methods) for cell in study.cells)
    dim = max(part.fact("dim") for part in study.problems)
    place = 0 if level is None else study.levels.index(level)
    columns, digest = Columns(views, len(study.levels), dim, place), Digest()
    pairs, failures = Pairs(columns.most_coordinates), Failures()
    cells, details, names, known, looked = _Cells(results, methods), [], {}, {}, []
    for cell_id in ids:
        cell = results.read(cell_id)
        if cell is None:
            continue
        index = cells.add(cell_id, cell, columns.add(cell), names)
        labels |= cell.labels
        pairs.add(index, cell, methods)
        details.append(detail(cell, *sizes(views, dim, len(study.levels))))
        failures.add(cell)
        digest.add(cell_id, cell)
        truths = cell.truth.values()
        if any(truth is not None for truth in truths):
            known[cell.problem] = bool(cell.truth_error)
        if len(cell.save_at) > 1 and all(truth is not None for truth in truths):
            looked += looks.summarise(cell)
    table = tables.with_costs(tables.for_people(columns.rows), columns.rows)
    labels = unambiguous(labels)
    state, truths = _state(results), truth_notes(columns.truths)
    if exact := [name for name, error in known.items() if not error]:
        truths.append(f"{', '.join(exact)}: the truth has no error of its own.")
    shown = [labels[name] for name in methods]
    by_index = [{methods.index(name): view for name, view in x.items()} for x in columns.views]
    return {
        "name": shown_path(results.directory),
        "state": state,
        "headline": headline(cells.rows, by_index, shown, study.levels[place]),
        "warnings": _warnings(columns),
        "failures": failures.sentences(labels),
        "question": question(study, labels, next(iter(names), ()), truths),
        "provenance": provenance(results, digest.hex()),
        "study": study_file(study),
        "table": table,
        "looks": looks.plain_table(looked),
        "data": {
            "partial": "" if state["complete"] else state["text"],
            "methods": shown,
            "methodNames": methods,
            "colours": colour_numbers(methods),
            "schedules": [part.name for part in study.schedules],
            "problems": [part.name for part in study.problems],
            "algorithms": [part.name for part in study.algorithms],
            "levels": list(study.levels),
            "level": place,
            "names": [list(name) for name in names],
            "kept": columns.most_coordinates,
            "cells": cells.rows,
            "table": {
                "header": table.header,
                "lines": table.lines,
                "left": list(table.left),
                "listed": columns.listed,
            },
            "pairs": pairs.plain(),
            "details": details,
            "replay": f"jaxlsgd replay {shown_path(results.directory)}{imports(study)}",
            **columns.plain(),
        },
    }


def _warnings(columns: Columns) -> list[str]:
    """Return notes on problems whose truth has too large an error for their intervals, in any coordinate."""
    doubtful = {row["problem"] for row in columns.truths if warns_of_truth(row)}
    return truth_notes(row for row in columns.truths if row["problem"] in doubtful)


class _Cells:
    """What the script gets of each cell besides its numbers."""

    def __init__(self, results: Results, methods: list[str]) -> None:
        self.rows: list[dict[str, Any]] = []
        self._results, self._methods = results, methods

    def add(
        self,
        cell_id: str,
        cell: CellRows,
        more: dict[str, Any],
        names: dict[tuple[str, ...], int],
    ) -> int:
        """Add a cell and return its index."""
        part = self._results.cell(cell_id)
        self.rows.append(
            {
                "id": cell_id,
                "problem": part.problem.name,
                "algorithm": part.algorithm.name,
                "schedule": part.schedule.name,
                "steps": cell.num_steps,
                "rounds": cell.num_rounds,
                "n": cell.replications,
                "methods": [self._methods.index(name) for name in cell.methods],
                "names": [
                    names.setdefault(labels, len(names)) for labels in cell.coordinates.values()
                ],
                **more,
            }
        )
        return len(self.rows) - 1


def _state(results: Results) -> dict[str, Any]:
    """Describe whether all replications are there."""
    counts = list(results.counts().values())
    full = sum(count.replications == count.wanted for count in counts)
    wanted, running = results.study.replications, results.running()
    complete = full == len(counts)
    if complete:
        where = f"each of {len(counts):,} cells" if len(counts) > 1 else "one cell"
        text = f"Complete: {wanted:,} replications of {where}."
    else:
        least = min(count.replications for count in counts)
        text = (
            f"Partial: {full:,} of {len(counts):,} cells have all {wanted:,} replications; "
            f"the least has {least:,}."
        )
    return {
        "complete": complete,
        "running": running and not complete,
        "text": text,
        "empty": not any(count.replications for count in counts),
    }
