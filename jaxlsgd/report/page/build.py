"""Puts the page together: reads the rows cell by cell, and fills the template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxlsgd.analysis.measures import truth_notes, warns_of_truth
from jaxlsgd.core.files import check_output
from jaxlsgd.core.rows import CellRows
from jaxlsgd.report import comparison, tables
from jaxlsgd.report.page import markup
from jaxlsgd.report.page.columns import Columns
from jaxlsgd.report.page.details import detail, sizes
from jaxlsgd.report.page.failures import Failures
from jaxlsgd.report.page.findings import Findings, unambiguous
from jaxlsgd.report.page.pairs import Pairs
from jaxlsgd.report.page.provenance import Digest, imports, provenance, shown_path
from jaxlsgd.report.page.question import question
from jaxlsgd.report.page.study_file import study_file
from jaxlsgd.study.store import codec
from jaxlsgd.study.store.reader import Results

_MOST_DIFFERENCES = 200


def write(results: Results, path: str | Path, other: Results | None = None) -> Path:
    """Writes a study as one HTML file that needs nothing else.

    A study without rows, or with some of them, makes a page that says so.

    Args:
      results: of a study, also one that is running.
      path: the file; replaced at once if it is there.
      other: a study to compare it with, cell by cell.

    Returns:
      The path.

    Example::

        write(Results("results"), "report.html")
    """
    path = Path(path)
    check_output(path)  # before the page is made, which may take a minute
    codec.write_whole(path, page(results, other).encode())
    return path


def page(results: Results, other: Results | None = None) -> str:
    """The page as text."""
    content = collect(results)
    if other is not None:
        name = shown_path(other.directory)
        found = comparison.compare(results, other, name)
        content["comparison"] = (name, found.told, found.table(_MOST_DIFFERENCES))
    return markup.render(content)


def collect(results: Results) -> dict[str, Any]:
    """All that the page shows: what is written into it, and under `data` what its script draws."""
    study, ids = results.study, results.cells()
    methods = [part.name for part in study.methods]
    labels = {name: name for name in methods}
    views = sum(len(cell.methods) for cell in study.cells)
    columns, pairs, digest = Columns(views * len(study.levels)), Pairs(), Digest()
    findings, failures = Findings(study.levels[0]), Failures()
    cells, details, names = _Cells(results, methods), [], {}
    for cell_id in ids:
        cell = results.read(cell_id)
        if cell is None:
            continue
        index = cells.add(cell_id, cell, columns.add(cell), names)
        labels |= cell.labels
        pairs.add(index, cell, methods)
        details.append(detail(cell, *sizes(views)))
        for collector in (findings, failures):
            collector.add(cell)
        digest.add(cell_id, cell)
    table, labels = (
        tables.with_costs(tables.for_people(columns.rows), columns.rows),
        unambiguous(labels),
    )
    state, known = _state(results), truth_notes(columns.each)
    return {
        "name": shown_path(results.directory),
        "state": state,
        "findings": [*findings.sentences(), *(("Truth", note) for note in _warnings(columns))],
        "failures": failures.sentences(labels),
        "question": question(study, labels, next(iter(names), ()), known),
        "provenance": provenance(results, digest.hex()),
        "study": study_file(study),
        "table": table,
        "data": {
            "partial": "" if state["complete"] else state["text"],
            "methods": [labels[name] for name in methods],
            "methodNames": methods,
            "schedules": [part.name for part in study.schedules],
            "problems": [part.name for part in study.problems],
            "algorithms": [part.name for part in study.algorithms],
            "levels": list(study.levels),
            "names": [list(name) for name in names],
            "cells": cells.rows,
            "table": {"header": table.header, "lines": table.lines, "left": list(table.left)},
            "pairs": pairs.plain(),
            "details": details,
            "replay": f"jaxlsgd replay {shown_path(results.directory)}{imports(study)}",
            **columns.plain(),
        },
    }


def _warnings(columns: Columns) -> list[str]:
    """Of problems whose truth is not known well enough for their intervals, in any coordinate."""
    doubtful = {row["problem"] for row in columns.each if warns_of_truth(row)}
    return truth_notes(row for row in columns.each if row["problem"] in doubtful)


class _Cells:
    """What the script must know of each cell besides its numbers."""

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
        """Takes a cell in; returns its index."""
        spec = self._results.cell(cell_id)
        self.rows.append(
            {
                "id": cell_id,
                "problem": spec.problem.name,
                "algorithm": spec.algorithm.name,
                "schedule": spec.schedule.name,
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
    """Whether all replications are in."""
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
