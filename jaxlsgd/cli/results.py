"""Verbs that read the results of a study: status, table, looks, compare, failures, export, plot, report, replay."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlsgd.cli._common import (
    Verbs,
    add_import,
    add_several,
    add_verb,
    conflict,
    in_options,
    load_imports,
    positive,
    share,
)
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.display import write_csv
from jaxlsgd.core.storage import check_output

if TYPE_CHECKING:
    from jaxlsgd.core.rows import CellRows
    from jaxlsgd.study.cells import CellSpec
    from jaxlsgd.study.store.reader import Results

VERBS = ("status", "table", "looks", "compare", "failures", "export", "plot", "report", "replay")
_ENDINGS = {"parquet": "parquet", "netcdf": "nc", "csv": "csv"}
FIGURES = ("coverage", "tradeoff")
_OPTIONS = {name: f"--{name}s" for name in ("problem", "schedule", "method", "measure")} | {
    "coordinate": "--coordinate",
    "sort": "--sort",
}


def add_verbs(verbs: Verbs) -> None:
    """Declare the verbs."""
    parser = add_verb(
        verbs,
        "status",
        status,
        "show how much of a study is done, even while it runs",
        "jaxlsgd status results",
    )
    parser.add_argument("directory", metavar="DIR")
    _add_table(verbs)
    _add_looks(verbs)
    _add_compare(verbs)
    _add_failures(verbs)
    _add_export(verbs)
    _add_plot(verbs)
    _add_report(verbs)
    _add_replay(verbs)


def status(arguments: argparse.Namespace) -> int:
    """Print how much of each cell is done."""
    from jaxlsgd.study.store.reader import Results

    results = Results(arguments.directory)
    counts = results.counts()
    width = max(len(cell) for cell in counts)
    for cell, count in counts.items():
        print(f"{cell:<{width}}  {count.replications:>9,} / {count.wanted:,}")
    tiles = sum(count.tiles for count in counts.values())
    wanted = sum(count.tiles_wanted for count in counts.values())
    complete = sum(count.tiles == count.tiles_wanted for count in counts.values())
    if accepted := results.manifest.get("accepted"):
        print(
            f"rows of {len(accepted) + 1} versions of the code, as accepted with --allow-other-code"
        )
    now = "a run is writing" if results.running() else "no run is writing"
    print(f"cells {complete}/{len(counts)}, tiles {tiles}/{wanted} ({tiles / wanted:.0%}); {now}")
    return 0


def _add_looks(verbs: Verbs) -> None:
    text = (
        "print how often intervals hold at every saved round, and at the stop\n\n"
        "Every saved round is a look; `save_at` in the study file has which rounds are saved. With --until or\n"
        "--excludes, each run stops at the first look at which the intervals of all coordinates at the first\n"
        "level are short enough, or exclude a number; rows hold all looks, so that any rule can be tried on a\n"
        "study that has been run. Without them, the rule is that of the study, if it has one."
    )
    examples = "jaxlsgd looks results\njaxlsgd looks results --until 0.05\njaxlsgd looks results --excludes 0"
    parser = add_verb(verbs, "looks", looks, text, examples)
    parser.add_argument("directory", metavar="DIR")
    parser.add_argument("--until", type=float, metavar="WIDTH", help="stop at this half-width")
    parser.add_argument("--excludes", type=float, metavar="NULL", help="stop if this is excluded")
    parser.add_argument("--all", action="store_true", help="show all coordinates")
    parser.add_argument(
        "--format",
        choices=("text", "csv", "json"),
        default="text",
        help="CSV and JSON have all measures",
    )


def looks(arguments: argparse.Namespace) -> int:
    """Print a table of looks and stops."""
    from jaxlsgd.analysis.looks import Until, cautions, looks_table, summarise
    from jaxlsgd.study.store.reader import Results

    width, null = arguments.until, arguments.excludes
    with in_options({"half_width": "--until", "excludes": "--excludes"}):
        rule = None if width is None and null is None else Until(half_width=width, excludes=null)
    cells = [cell for cell in Results(arguments.directory).read_all() if cell is not None]
    if not cells:
        raise refusal(
            "directory", "have finished replications", arguments.directory, code="missing"
        )
    if arguments.format == "text":
        print(looks_table(cells, rule, all=arguments.all))
        return 0
    rows = summarise(cells, rule)
    sys.stderr.writelines(f"jaxlsgd: {caution}\n" for caution in cautions(rows))
    names = list(dict.fromkeys(name for row in rows for name in row))
    if arguments.format == "json":
        print(json.dumps([{name: row.get(name) for name in names} for row in rows], indent=1))
    else:
        write_csv(sys.stdout, names, ([row.get(name) for name in names] for row in rows))
    return 0


def _add_table(verbs: Verbs) -> None:
    text = (
        "print coverage and length with their standard errors, also of an unfinished study\n\n"
        "For people, the last round and the first coordinate, in 100 columns unless measures are named.\n"
        "CSV and JSON have every round, coordinate and measure. What is chosen by name may be repeated."
    )
    examples = (
        "jaxlsgd table results\n"
        "jaxlsgd table results --methods one_step plug_in --sort coverage\n"
        "jaxlsgd table results --coordinate all --measures coverage bias rmse\n"
        "jaxlsgd table results --differences --schedules C5\n"
        "jaxlsgd table results --format latex --across > table.tex"
    )
    parser = add_verb(verbs, "table", table, text, examples)
    parser.add_argument("directory", metavar="DIR")
    formats = ("text", "markdown", "csv", "latex", "json")
    parser.add_argument("--format", choices=formats, default="text", help="default: text")
    for name in ("problem", "schedule", "method"):
        add_several(parser, f"{name}s", metavar="NAME", help=f"only these {name}s")
    add_several(parser, "levels", type=share, metavar="LEVEL", help="only these levels")
    parser.add_argument("--coordinate", metavar="NAME", help='name of a coordinate, or "all"')
    words = "measures to show, in this order"
    add_several(parser, "measures", metavar="NAME", default=None, help=words)
    parser.add_argument(
        "--across",
        action="store_true",
        help="methods as columns, a table per measure (coverage, if none is named)",
    )
    parser.add_argument(
        "--differences",
        action="store_true",
        help="paired differences from the first schedule and method of each setting instead",
    )
    parser.add_argument("--sort", metavar="COLUMN", help="sort by a column, such as coverage")
    parser.add_argument("--descending", action="store_true", help="with --sort: largest first")


def table(arguments: argparse.Namespace) -> int:
    """Print a table of all cells, or of the chosen ones."""
    from jaxlsgd.report import tables
    from jaxlsgd.report.tables import Selection

    if arguments.differences and arguments.measures:
        raise conflict("--measures", "not be given with --differences")
    if arguments.across and (arguments.differences or arguments.format in ("csv", "json")):
        raise conflict("--across", "not be given with --differences, csv or json")
    if arguments.descending and arguments.sort is None:
        raise conflict("--descending", "be given with --sort")
    rows = read_rows(arguments.directory)
    how: dict[str, Any] = {
        "selection": Selection(
            problems=arguments.problems,
            schedules=arguments.schedules,
            methods=arguments.methods,
            levels=arguments.levels,
            coordinate=arguments.coordinate,
        ),
        "sort": arguments.sort,
        "descending": arguments.descending,
    }
    with in_options(_OPTIONS):
        if arguments.differences:
            text = tables.render_differences(rows, arguments.format, **how)
        else:
            text = tables.render(
                rows, arguments.format, measures=arguments.measures, across=arguments.across, **how
            )
    sys.stdout.write(text.rstrip("\n") + "\n")
    return 0


def _add_compare(verbs: Verbs) -> None:
    text = (
        "compare two studies cell by cell\n\n"
        "Coverage and length at the last round of the cells that both have, farthest apart first, with\n"
        "combined standard errors: those of paired differences if both have the same draws."
    )
    examples = "jaxlsgd compare new old\njaxlsgd compare new old --format csv > differences.csv"
    parser = add_verb(verbs, "compare", compare, text, examples)
    parser.add_argument("directory", metavar="DIR")
    parser.add_argument("other", metavar="OTHER")
    formats = ("text", "markdown", "csv")
    parser.add_argument("--format", choices=formats, default="text", help="default: text")


def compare(arguments: argparse.Namespace) -> int:
    """Print where two studies differ."""
    from jaxlsgd.report import comparison
    from jaxlsgd.study.store.reader import Results

    one, other = Results(arguments.directory), Results(arguments.other)
    found = comparison.compare(one, other, arguments.other)
    sys.stdout.write(comparison.render(found, arguments.format))
    return 0


def _add_failures(verbs: Verbs) -> None:
    text = (
        "list the replications that failed, with cause and number\n\n"
        "One line per cell, method and cause, at the last round. 'jaxlsgd replay' shows the path of a\n"
        "replication. A failed replication counts as an outcome: it is never drawn again."
    )
    examples = "jaxlsgd failures results\njaxlsgd failures results --cell linear-c5"
    parser = add_verb(verbs, "failures", failures, text, examples)
    parser.add_argument("directory", metavar="DIR")
    parser.add_argument("--cell", metavar="PART", help="only cells with this in their id")


def failures(arguments: argparse.Namespace) -> int:
    """List failed replications."""
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


def _add_export(verbs: Verbs) -> None:
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


def export(arguments: argparse.Namespace) -> int:
    """Write all rows to one file."""
    from jaxlsgd.report import export as report

    default = Path(arguments.directory) / f"rows.{_ENDINGS[arguments.format]}"
    out = Path(arguments.out or default)
    if arguments.out:
        check_output(out)  # before reading all rows
    rows = read_rows(arguments.directory, arguments.cell)
    print(report.write(rows, out, arguments.format, force=arguments.force))
    return 0


def read_rows(directory: str, part: str | None = None) -> list[CellRows]:
    """Return the rows of every cell with this part in its id; note on stderr if replications are missing."""
    from jaxlsgd.study.store.files import StoreError
    from jaxlsgd.study.store.reader import Results

    results = Results(directory)
    found = (results.read(cell) for cell in _chosen(results, part))
    rows = [cell for cell in found if cell is not None]
    if not rows:
        raise StoreError(f"{directory} has no finished tiles yet", directory, "missing")
    short = [count for count in results.counts().values() if count.replications < count.wanted]
    if short:
        fewest = min(count.replications for count in short)
        sys.stderr.write(
            f"jaxlsgd: partial: {len(short)} of {len(results.cells())} cells have fewer than "
            f"{short[0].wanted:,} replications (fewest: {fewest:,})\n"
        )
    return rows


def _chosen(results: Results, part: str | None) -> list[str]:
    """Return the ids of cells with this part in them."""
    chosen = [cell for cell in results.cells() if (part or "") in cell]
    if not chosen:
        cells = ", ".join(results.cells()[:10])
        raise refusal(
            "--cell", "be part of a cell's id", part, f"; the cells are {cells}", code="unknown"
        )
    return chosen


def _add_plot(verbs: Verbs) -> None:
    text = "plot coverage, length and error against rounds (needs the extra 'plots')"
    examples = (
        "jaxlsgd plot results --out figures\n"
        "jaxlsgd plot results --figure tradeoff --format pdf --width column\n"
        "jaxlsgd plot results --figure coverage --level 0.9 --coordinate 'x[2]'"
    )
    parser = add_verb(verbs, "plot", plot, text, examples)
    parser.add_argument("directory", metavar="DIR")
    parser.add_argument("--out", metavar="DIR", help="default: DIR/figures")
    parser.add_argument("--cell", metavar="PART", help="only cells with this in their id")
    parser.add_argument("--figure", choices=FIGURES, help="one figure for print, instead of all")
    parser.add_argument(
        "--format", choices=("pdf", "svg", "png"), help="of --figure (default: pdf)"
    )
    parser.add_argument(
        "--width",
        choices=("column", "page"),
        help="of --figure (default: column)",
    )
    parser.add_argument(
        "--level", type=share, help="only this one (default: all; with --figure the first)"
    )
    parser.add_argument("--coordinate", metavar="NAME", help="default: the first of each method")


def plot(arguments: argparse.Namespace) -> int:
    """Draw all cells."""
    for option in ("format", "width"):
        if getattr(arguments, option) and not arguments.figure:
            raise conflict(f"--{option}", "be given with --figure; all figures are PNG and PDF")
    rows = read_rows(arguments.directory, arguments.cell)
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'jaxlsgd[plots]'") from error
    from jaxlsgd.report import figures
    from jaxlsgd.study.store.files import refuse_link

    out = Path(arguments.out or Path(arguments.directory) / "figures")
    if not arguments.out:
        refuse_link(out)
    if out.exists() and not out.is_dir():
        raise refusal("--out", "be a directory", str(out), code="exists")
    if arguments.figure:
        names = ("format", "width", "level", "coordinate")
        look = {name: value for name in names if (value := getattr(arguments, name)) is not None}
        with in_options(_OPTIONS):
            print(figures.save_for_print(rows, out, arguments.figure, **look))
        return 0
    chosen = {"level": arguments.level, "coordinate": arguments.coordinate}
    with in_options(_OPTIONS):
        paths = figures.save_all(rows, out, warmup=_warmup(arguments.directory), **chosen)
    print("\n".join(map(str, paths)))
    return 0


def _warmup(directory: str) -> Callable[[dict[str, Any]], int]:
    """Return a function from a row to the warm-up rounds of its cell."""
    from jaxlsgd.study.store.reader import Results

    names = ("problem", "algorithm", "schedule")
    cells: dict[Any, list[CellSpec]] = {}
    for cell in Results(directory).study.cells:
        cells.setdefault(tuple(getattr(cell, name).name for name in names), []).append(cell)

    def rounds(row: dict[str, Any]) -> int:
        plans = [cell.plan() for cell in cells[tuple(row[name] for name in names)]]
        found = [plan for plan in plans if plan.num_steps == row["num_steps"]]
        return found[0].warmup_rounds

    return rounds


def _add_report(verbs: Verbs) -> None:
    text = (
        "write one HTML file with findings, figures and numbers\n\n"
        "It needs no network and nothing beside it, so that it can be sent or archived. It states whether\n"
        "the study is complete."
    )
    examples = "jaxlsgd report results\njaxlsgd report new old -o report.html\njaxlsgd report results --watch"
    parser = add_verb(verbs, "report", report, text, examples)
    parser.add_argument("directory", metavar="DIR")
    parser.add_argument("other", metavar="OTHER", nargs="?", help="compare with it, cell by cell")
    parser.add_argument("-o", "--out", metavar="FILE", help="default: DIR/report.html")
    parser.add_argument(
        "--level", type=share, help="shown first (default: the study's first); the page has all"
    )
    parser.add_argument(
        "--watch",
        type=positive,
        nargs="?",
        const=30,
        metavar="SECONDS",
        help="write it again, and let the browser load it again, while a run is writing (default: 30)",
    )


def report(arguments: argparse.Namespace) -> int:
    """Write the page of a study."""
    from jaxlsgd.report import page
    from jaxlsgd.study.store.reader import Results

    out = Path(arguments.out or Path(arguments.directory) / "report.html")
    other = Results(arguments.other) if arguments.other else None
    refresh, said = arguments.watch or 0, False
    while refresh and Results(arguments.directory).running():
        page.write(Results(arguments.directory), out, other, refresh, arguments.level)
        if not said:
            print(
                f"{out}: open it in a browser; it is written again every {refresh} s while the run writes"
            )
        said = True
        time.sleep(refresh)
    print(
        page.write(Results(arguments.directory), out, other, level=arguments.level)
    )  # the last one stays as it is
    return 0


def _add_replay(verbs: Verbs) -> None:
    text = (
        "run one replication again and show its path\n\nIts last round is compared with the stored "
        "row; the exit code is 1 if they disagree."
    )
    examples = (
        "jaxlsgd replay results --cell linear-c5-5000 --replication 17\n"
        "jaxlsgd replay results --cell log --replication 3 --coordinate 'x[2]'"
    )
    parser = add_verb(verbs, "replay", replay, text, examples)
    parser.add_argument("directory", metavar="DIR")
    parser.add_argument(
        "--cell", required=True, help="id of the cell, or a part that only its id has"
    )
    parser.add_argument(
        "--replication", required=True, type=int, help="number of the replication, from 0"
    )
    parser.add_argument(
        "--coordinate", metavar="NAME", help="by name, or by number from 0 (default: the first)"
    )
    parser.add_argument("--level", type=share, help="default: the first")
    parser.add_argument(
        "--rounds", type=int, default=20, help="how many rounds to show, roughly (default: 20)"
    )
    add_import(parser)


def replay(arguments: argparse.Namespace) -> int:
    """Run one replication again, and compare it with the stored row."""
    from jaxlsgd.study.store.reader import Results

    results = Results(arguments.directory)
    cell = _find(results, arguments.cell)
    from jaxlsgd.engine import machine

    machine.prepare(1)  # before anything can create an array
    load_imports(arguments)
    from jaxlsgd.study.replaying import replay as run_again

    found = run_again(results, cell, arguments.replication, max(2, arguments.rounds))
    _print_path(found.path, cell, arguments)
    if found.difference is None:
        print("the study has no row for this replication yet")
        return 0
    verdict = "agrees with" if found.agrees else "DISAGREES with"
    print(f"{verdict} the stored row (largest difference: {found.difference:.2g} half-widths)")
    return 0 if found.agrees else 1


def _find(results: Results, part: str) -> str:
    known = results.cells()
    matching = [cell for cell in known if part == cell] or [c for c in known if part in c]
    if len(matching) != 1:
        which = ", ".join((matching or known)[:10])
        many = "it matches" if matching else "the cells are"
        raise refusal("--cell", "match exactly one cell", part, f"; {many} {which}", code="unknown")
    return matching[0]


def _print_path(path: CellRows, cell: str, arguments: argparse.Namespace) -> None:
    given, at = arguments.coordinate, path.level_place(arguments.level)
    level = path.levels[at]
    for name, rows in path.methods.items():
        labels = path.coordinates[name]
        j = path.coordinate_place(name, int(given) if (given or "").isdecimal() else given)
        truth = path.truth[name]
        aim = "" if truth is None else f", truth {truth[j]:.6g}"
        if name in path.truth_error:
            aim += f" ± {path.truth_error[name][j]:.2g}"
        where = f"{cell}, replication {arguments.replication}, {labels[j]}{aim}"
        print(f"{name}, level {level:g}: {where}")
        print(f"{'round':>10}{'steps':>12}{'estimate':>14}{'lower':>14}{'upper':>14}")
        for i, (m, t) in enumerate(zip(path.save_at, path.steps_at, strict=True)):
            middle, half = rows.estimate[i, 0, j], rows.half_width[i, at, 0, j]
            print(f"{m:>10}{t:>12}{middle:>14.6g}{middle - half:>14.6g}{middle + half:>14.6g}")
        print()
