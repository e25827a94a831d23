"""What the benchmarks of intervals share: their options, rows as CSV, and tables in Markdown."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxlsgd.core.display import Table

Row = dict[str, Any]


def parser(
    name: str, description: str | None, replications: int, seed: int | None = None
) -> argparse.ArgumentParser:
    """Return the options of a benchmark that writes to a directory."""
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--out", type=Path, required=True, metavar="DIR")
    made.add_argument("--replications", type=int, default=replications, metavar="N")
    if seed is not None:
        made.add_argument("--seed", type=int, default=seed, help=f"default: {seed}")
    return made


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write all columns of rows."""
    path.write_text(Table.of(rows, list(rows[0])).csv(), encoding="utf-8")


def pipe_table(
    header: Sequence[str], lines: Iterable[Sequence[Any]], left: Collection[int] = (0,)
) -> list[str]:
    """Return the lines of a Markdown table; cells are Markdown, columns in `left` left-aligned."""
    rule = "|".join("---" if i in left else "--:" for i in range(len(header)))
    return [pipe_line(header), f"|{rule}|", *map(pipe_line, lines)]


def pipe_line(cells: Sequence[Any]) -> str:
    """Return a line of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def unique(rows: Iterable[Row], key: str) -> list[Any]:
    """Return the values of a column, each once."""
    return list(dict.fromkeys(row[key] for row in rows))


def percent(value: float) -> str:
    """Return a share in per cent; "-" for NaN."""
    return "-" if value != value else f"{100 * value:.1f}"
