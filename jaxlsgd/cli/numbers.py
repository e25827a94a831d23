"""Verbs that answer with numbers: table, compare, failures, export."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from jaxlsgd.cli._common import add_verb, share
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.files import check_output

if TYPE_CHECKING:
    from jaxlsgd.core.rows import CellRows
    from jaxlsgd.study.store.reader import Results

VERBS = ("table", "compare", "failures", "export")
_ENDINGS = {"parquet": "parquet", "netcdf": "nc", "csv": "csv"}


def add_verbs(verbs: Any) -> None:
    """Declares the verbs."""
    _add_table(verbs)
    _add_compare(verbs)
    _add_failures(verbs)
    _add_export(verbs)


def _add_table(verbs: Any) -> None:
    text = (
        "print coverage and length with their standard errors, also of an unfinished study\n\n"
        "For people, the last round and the first coordinate, in 100 columns unless measures are named.\n"
        "CSV and JSON have every round, coordinate and measure. What is chosen by name may be repeated."
    )
    examples = (
        "jaxlsgd table results\n"
        "jaxlsgd table results --method one_step plug_in --sort coverage\n"
        "jaxlsgd table results --coordinate all --measure coverage bias rmse\n"
        "jaxlsgd table results --differences --schedule C5\n"
        "jaxlsgd table results --format latex > table.tex"
    )
    parser = add_verb(verbs, "table", table, text, examples)
    parser.add_argument("directory", metavar="DIR")
    formats = ("text", "markdown", "csv", "latex", "json")
    parser.add_argument("--format", choices=formats, default="text", help="default: text")
    for name in ("problem", "schedule", "method"):
        parser.add_argument(
            f"--{name}",
            metavar="NAME",
            nargs="+",
            action="extend",
            default=[],
            help=f"only this {name}",
        )
    parser.add_argument(
        "--level", type=share, nargs="+", action="extend", default=[], help="only this level"
    )
    parser.add_argument("--coordinate", metavar="NAME", help='name of a coordinate, or "all"')
    parser.add_argument(
        "--measure",
        metavar="NAME",
        nargs="+",
        action="extend",
        help="measures to show, in this order",
    )
    parser.add_argument(
        "--differences",
        action="store_true",
        help="paired differences from the first schedule and method of each setting instead",
    )
    parser.add_argument("--sort", metavar="COLUMN", help="sort by a column, such as coverage")
    parser.add_argument("--descending", action="store_true", help="with --sort: largest first")


def _add_compare(verbs: Any) -> None:
    text = (
        "compare two studies cell by cell\n\n"
        "Coverage and length at the last round of the cells that both have, farthest apart first, with\n"
        "combined standard errors: those of paired differences where both saw the same draws."
    )
    examples = "jaxlsgd compare new old\njaxlsgd compare new old --format csv > differences.csv"
    parser = add_verb(verbs, "compare", compare, text, examples)
    parser.add_argument("directory", metavar="DIR")
    parser.add_argument("other", metavar="OTHER")
    formats = ("text", "markdown", "csv")
    parser.add_argument("--format", choices=formats, default="text", help="default: text")


def _add_failures(verbs: Any) -> None:
    text = (
        "list the replications that failed, with cause and number\n\n"
        "One line per cell, method and cause, at the last round. 'jaxlsgd replay' shows the path of a\n"
        "replication. A failed replication counts as an outcome: it is never drawn again."
    )
    examples = "jaxlsgd failures results\njaxlsgd failures results --cell linear-c5"
    parser = add_verb(verbs, "failures", failures, text, examples)
    parser.add_argument("directory", metavar="DIR")
    parser.add_argument("--cell", metavar="PART", help="only cells with this in their id")


def _add_export(verbs: Any) -> None:
    text = (
        "write the rows of all replications for another program\n\n"
        "Parquet and CSV have one line per cell, method, saved round, level, coordinate and replication;\n"
        "netCDF has arrays with these dimensions. The file is written whole or not at all. Parquet and\n"
        "netCDF need the extra 'tables'."
    )
    examples = (
        "jaxlsgd export results --format parquet\n"
        "jaxlsgd export results --format netcdf -o rows.nc --force"
    )
    parser = add_verb(verbs, "export", export, text, examples)
    parser.add_argument("directory", metavar="DIR")
    parser.add_argument(
        "--format", choices=tuple(_ENDINGS), default="parquet", help="default: parquet"
    )
    parser.add_argument("-o", "--out", metavar="FILE", help="default: DIR/rows.FORMAT")
    parser.add_argument("--cell", metavar="PART", help="only cells with this in their id")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")


def table(arguments: argparse.Namespace) -> int:
    """Prints a table of all cells, or of those that are named."""
    from jaxlsgd.report import tables
    from jaxlsgd.report.selection import Selection

    if arguments.differences and arguments.measure:
        raise ValueError("--measure: must not be given with --differences")
    if arguments.descending and arguments.sort is None:
        raise ValueError("--descending: must be given with --sort")
    rows = read_rows(arguments.directory)
    how: dict[str, Any] = {
        "selection": Selection(
            problems=arguments.problem,
            schedules=arguments.schedule,
            methods=arguments.method,
            levels=arguments.level,
            coordinate=arguments.coordinate,
        ),
        "sort": arguments.sort,
        "descending": arguments.descending,
    }
    if arguments.differences:
        text = tables.render_differences(rows, arguments.format, **how)
    else:
        text = tables.render(rows, arguments.format, measures=arguments.measure, **how)
    sys.stdout.write(text.rstrip("\n") + "\n")
    return 0


def compare(arguments: argparse.Namespace) -> int:
    """Prints where two studies differ."""
    from jaxlsgd.report import comparison
    from jaxlsgd.study.store.reader import Results

    one, other = Results(arguments.directory), Results(arguments.other)
    found = comparison.compare(one, other, arguments.other)
    sys.stdout.write(comparison.render(found, arguments.format))
    return 0


def failures(arguments: argparse.Namespace) -> int:
    """Lists failed replications."""
    from jaxlsgd.analysis import failures as analysis
    from jaxlsgd.study.store.reader import Results

    results = Results(arguments.directory)
    lines = [
        f"{cell}  {one.method}  {one.cause.text}  "
        f"{len(one.replications):,} of {rows.replications:,}: {analysis.ranges(one.replications)}"
        for cell in _chosen(results, arguments.cell)
        if (rows := results.read(cell)) is not None
        for one in analysis.failures(rows)
    ]
    print("\n".join(lines or ["no replication failed"]))
    return 0


def export(arguments: argparse.Namespace) -> int:
    """Writes all rows to one file."""
    from pathlib import Path

    from jaxlsgd.report import export as report

    default = Path(arguments.directory) / f"rows.{_ENDINGS[arguments.format]}"
    out = Path(arguments.out or default)
    if arguments.out:
        check_output(out)  # before all rows are read
    rows = read_rows(arguments.directory, arguments.cell)
    print(report.write(rows, out, arguments.format, force=arguments.force))
    return 0


def read_rows(directory: str, part: str | None = None) -> list[CellRows]:
    """The rows of every cell with this in its id, with a note on stderr if some are missing."""
    from jaxlsgd.study.store.codec import StoreError
    from jaxlsgd.study.store.reader import Results

    results = Results(directory)
    found = (results.read(cell) for cell in _chosen(results, part))
    rows = [cell for cell in found if cell is not None]
    if not rows:
        raise StoreError(f"{directory} has no finished tiles yet")
    short = [count for count in results.counts().values() if count.replications < count.wanted]
    if short:
        fewest = min(count.replications for count in short)
        sys.stderr.write(
            f"jaxlsgd: partial: {len(short)} of {len(results.cells())} cells have fewer than "
            f"{short[0].wanted:,} replications (fewest: {fewest:,})\n"
        )
    return rows


def _chosen(results: Results, part: str | None) -> list[str]:
    """The ids of the cells that have this in them."""
    chosen = [cell for cell in results.cells() if (part or "") in cell]
    if not chosen:
        cells = ", ".join(results.cells()[:10])
        raise refusal("--cell", "be part of a cell's id", part, f"; the cells are {cells}")
    return chosen
