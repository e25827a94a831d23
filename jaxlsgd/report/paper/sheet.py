"""One of the paper's tables, and how it is written: as text, as Markdown and as CSV."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxlsgd.analysis.moments import Row
from jaxlsgd.report import layout
from jaxlsgd.report.layout import Table
from jaxlsgd.report.tables import to_csv
from jaxlsgd.study.store.codec import write_whole


class Sheet(NamedTuple):
    """A table for people, for programs, and the verdict in a line or two."""

    name: str
    tables: list[Table]
    columns: tuple[str, ...]
    rows: list[Row]
    verdict: tuple[str, ...]


def write(sheet: Sheet, directory: Path) -> tuple[str, str]:
    """Writes a sheet as text and CSV; returns it as Markdown, and the verdict."""
    text = "\n".join(layout.text(table) for table in sheet.tables)
    verdict = "\n".join(sheet.verdict)
    write_whole(directory / f"{sheet.name}.txt", f"{text}\n{verdict}\n".encode())
    write_csv(directory / f"{sheet.name}.csv", sheet.rows, sheet.columns)
    body = "\n".join(layout.markdown(table) for table in sheet.tables)
    listed = "\n".join(f"- {line}" for line in sheet.verdict)
    return f"{body}\n{listed}\n", verdict


def write_csv(path: Path, rows: Sequence[Row], columns: Sequence[str]) -> None:
    """Writes chosen columns of rows."""
    records = [{name: row[name] for name in columns} for row in rows]
    write_whole(path, to_csv(records, columns).encode())


def judged(rows: Sequence[tuple[Any, float | None]]) -> tuple[int, int, Any, float]:
    """How many z are at most 4, how many there are, and the largest with its label."""
    known = [(label, z) for label, z in rows if z is not None]
    label, z = max(known, key=lambda pair: abs(pair[1]), default=(None, 0.0))
    return sum(abs(z) <= 4 for _, z in known), len(known), label, z
