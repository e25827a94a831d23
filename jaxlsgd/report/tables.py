"""Tables of a study: for people as text, Markdown and LaTeX, for programs as CSV and JSON."""

from __future__ import annotations

import csv
import importlib
import io
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxlsgd.analysis import failures
from jaxlsgd.analysis import measures as measures_lib
from jaxlsgd.analysis.measures import (
    COUNTS,
    DIFFERENT,
    IDENTITY,
    MEASURES,
    NO_TRUTH,
    NUMBERS,
    SHARE,
)
from jaxlsgd.analysis.moments import Row
from jaxlsgd.core import checks
from jaxlsgd.core.causes import FAILURES
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.rows import CellRows
from jaxlsgd.core.text import error_decimals, percent, with_error
from jaxlsgd.report import layout

FORMATS = ("text", "markdown", "csv", "latex", "json")
SHOWN = ("coverage", "length", "bias", "rmse", "model_se_error")
_LAYOUTS = {"text": layout.text, "markdown": layout.markdown, "latex": layout.latex}
_SHARES = (
    "coverage",
    "coverage_all",
    "coverage_bias_eliminated",
    "coverage_trusted",
    "coverage_doubted",
)
_PERCENT = (*_SHARES, "expected_coverage", "model_se_error")
_HEADINGS = {
    "num_steps": "steps",
    "num_rounds": "rounds",
    "save_round": "at round",
    "save_steps": "at step",
    "empirical_se": "empirical SE",
    "model_se": "model SE",
    "model_se_error": "SE bias %",
    "rmse": "RMSE",
    "coverage": "coverage %",
    "coverage_all": "coverage, all runs %",
    "coverage_bias_eliminated": "bias-eliminated coverage %",
    "length_sd": "length SD",
    "l2_error": "L2 error",
    "acf": "rounds per step",
    "n_ok": "completed",
    "n_failed": "failed",
    "n_floored": "regularised",
    "coverage_difference": "coverage difference %",
    "length_difference": "length difference",
    "length_ratio": "length ratio",
    "reference_schedule": "reference schedule",
    "reference_method": "reference method",
    "n_pairs": "pairs",
}
_COMPARED = ("coverage_difference", "length_difference", "length_ratio")
_COMPARED_WHERE = ("problem", "algorithm", "num_steps", "level", "coordinate", "schedule", "method")
_NOTES = {
    "": "Monte-Carlo standard errors in parentheses.",
    "model_se_error": "SE bias: the mean standard error of a method over the standard deviation of "
    "its estimates, less 1.",
    "coverage_all": "Coverage of all runs counts those that failed as misses; the rest is of those "
    "that completed.",
    "n_floored": "Regularised: completed, but a numerical floor acted on the scale.",
    "coverage_difference": "Differences and ratios are those of a row from its reference, over "
    "replications that completed in both.",
}


def cells_of(source: Any) -> list[CellRows]:
    """The cells of what a user has: rows, a sequence of them, or the results of a study."""
    if isinstance(source, CellRows):
        return [source]
    if hasattr(source, "read_all"):
        source = source.read_all()
    elif hasattr(source, "cells") and hasattr(source, "read"):
        source = [source.read(cell) for cell in source.cells()]
    cells = [cell for cell in source if cell is not None]
    if not all(isinstance(cell, CellRows) for cell in cells):
        raise refusal("cells", "be CellRows or the results of a study", source)
    return cells


def render(
    source: Any,
    format: str = "text",
    *,
    coordinate: str | None = None,
    measures: Sequence[str] | None = None,
) -> str:
    """A study's measures as a table.

    Text, Markdown and LaTeX are for people: the last saved round, the first coordinate, the usual
    measures as `value (standard error)`, and counts. The algorithm is named where it is not Local
    SGD. Where runs failed, coverage with failures as misses is added, and why they failed. A coverage
    whose standard error is 0 has its 95 % Wilson interval in brackets instead. CSV and JSON are for
    programs: every saved round, coordinate and measure in plain columns, a missing number as an empty
    field or null.

    Args:
      source: `CellRows`, a sequence of them, or the results of a study.
      format: "text", "markdown", "latex", "csv" or "json".
      coordinate: name of the coordinate, or "all"; None as above.
      measures: names out of `jaxlsgd.analysis.measures.MEASURES`; None as above.

    Returns:
      The table.

    Example::

        print(render(cells))
        pandas.read_csv(io.StringIO(render(cells, "csv")))
    """
    checks.choice("format", format, FORMATS)
    for name in measures or ():
        checks.choice("measures", name, MEASURES)
    people = format in _LAYOUTS
    cells = cells_of(source)
    chosen = coordinate or (None if people else "all")
    rows = [row for cell in cells for row in _selected(cell, chosen, people)]
    if coordinate not in (None, "all") and cells and not rows:
        checks.choice("coordinate", coordinate, _coordinates(cells))
    if not people:
        return _machine(rows, _plain_columns(measures), format)
    return _LAYOUTS[format](for_people(rows, measures))


def render_differences(
    source: Any,
    format: str = "text",
    *,
    reference: tuple[str, str] | None = None,
    coordinate: str | None = None,
) -> str:
    """Paired differences of every schedule and method from a reference, as a table.

    Args:
      source: `CellRows`, a sequence of them, or the results of a study.
      format: "text", "markdown", "latex", "csv" or "json".
      reference: schedule and method to compare with; the first of each problem, algorithm and horizon
        if None.
      coordinate: name of the coordinate, or "all"; for people the first one if None.

    Returns:
      The table.

    Example::

        print(render_differences(cells, reference=("C1", "plug_in")))
    """
    checks.choice("format", format, FORMATS)
    rows = measures_lib.differences(cells_of(source), reference)
    people = format in _LAYOUTS
    wanted = coordinate or (rows[0]["coordinate"] if people and rows else "all")
    rows = [row for row in rows if wanted in ("all", row["coordinate"])]
    where = (*_COMPARED_WHERE, "reference_schedule", "reference_method")
    if not people:
        columns = [c for name in _COMPARED for c in (name, f"{name}_mcse")]
        return _machine(rows, [*where, "n_pairs", *columns], format)
    hidden = set(IDENTITY) - set(measures_lib.columns_for_people(rows))
    where = tuple(name for name in where if name not in hidden)
    return _LAYOUTS[format](_table(rows, where, _COMPARED, ("n_pairs",)))


def _selected(cell: CellRows, coordinate: str | None, last_only: bool) -> Iterable[Row]:
    for row in measures_lib.summarise(cell, last_only=last_only):
        wanted = coordinate or cell.coordinates[row["method"]][0]
        if wanted in ("all", row["coordinate"]):
            yield row


def _coordinates(cells: Sequence[CellRows]) -> list[str]:
    names = (name for cell in cells for c in cell.coordinates.values() for name in c)
    return list(dict.fromkeys(names))


def _plain_columns(measures: Sequence[str] | None) -> list[str]:
    names = [*IDENTITY, *COUNTS]
    for name in measures or MEASURES:
        suffixes = ["", "_mcse"] if name != "acf" else [""]
        suffixes += ["_low", "_high"] if name.startswith("coverage") else []
        names += [name + suffix for suffix in suffixes]
    return names


def _machine(rows: Iterable[Row], columns: Sequence[str], format: str) -> str:
    records = [{name: row[name] for name in columns} for row in rows]
    if format == "json":
        return json.dumps(records, indent=1, allow_nan=False) + "\n"
    return to_csv(records, columns)


def to_csv(records: Iterable[Row], columns: Sequence[str]) -> str:
    """Records as CSV with the given columns; None is an empty field, floats keep every digit."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _inert(value) for key, value in row.items()} for row in records)
    return stream.getvalue()


def _inert(value: Any) -> Any:
    """Text that a spreadsheet would run as a formula, quoted as spreadsheets do."""
    return f"'{value}" if isinstance(value, str) and value[:1] in tuple("=+-@\t\r") else value


def for_people(rows: Sequence[Row], measures: Sequence[str] | None = None) -> layout.Table:
    """Rows of the last round as the table that `render` lays out as text."""
    failed = any(row["n_failed"] for row in rows)
    floored = ("n_floored",) if any(row["n_floored"] for row in rows) else ()
    shown = tuple(measures or SHOWN)
    if measures is None and failed:
        shown = ("coverage", "coverage_all", *SHOWN[1:])
    where = measures_lib.columns_for_people(rows)
    why = ("why",) if failed else ()
    told = [row | {"why": _why(row)} for row in rows]
    return _table(told, where, shown, ("n_ok", "n_failed", *why, *floored))


def _why(row: Row) -> str:
    return failures.why({cause: row[cause.count] for cause in FAILURES}) or "-"


def _table(
    rows: Sequence[Row], where: Sequence[str], shown: Sequence[str], counts: Sequence[str]
) -> layout.Table:
    """What is the same in every row goes to the title, the rest into columns."""
    same = [name for name in where if rows and len({row[name] for row in rows}) == 1]
    keys = [name for name in where if name not in same]
    columns = [[_plain(row[name]) for row in rows] for name in keys]
    columns += [_number_column(rows, name) for name in shown]
    columns += [[_plain(row[name]) for row in rows] for name in counts]
    title = ", ".join(f"{_HEADINGS.get(name, name)} {_plain(rows[0][name])}" for name in same)
    notes = [note for name, note in _NOTES.items() if name in ("", *shown, *counts)]
    notes += _special_notes(rows, shown)
    return layout.Table(
        title=title,
        header=[_HEADINGS.get(name, name) for name in (*keys, *shown, *counts)],
        lines=[list(line) for line in zip(*columns, strict=True)],
        left=tuple(i for i, name in enumerate(keys) if name not in NUMBERS),
        notes=tuple(notes) if rows else ("No rows yet.",),
    )


def _special_notes(rows: Sequence[Row], shown: Sequence[str]) -> list[str]:
    """Notes on what some rows alone have."""
    shares = [name for name in shown if name in _SHARES]
    certain = any(row[f"{name}_mcse"] == 0 for row in rows for name in shares)
    notes = [measures_lib.BRACKETS] if certain else []
    if not all(row.get("same_replications", True) for row in rows):
        notes.append(DIFFERENT)
    if "coverage" in shown and measures_lib.no_truth(rows):
        notes.append(NO_TRUTH)
    return notes


def _plain(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _number_column(rows: Sequence[Row], name: str) -> list[str]:
    factor = 100 if name in _PERCENT or name == "coverage_difference" else 1
    pairs = [(_times(row[name], factor), _times(row.get(f"{name}_mcse"), factor)) for row in rows]
    places = _decimals([error for _, error in pairs if error])
    if name in _SHARES:
        return [percent(*(row[name + end] for end in SHARE), decimals=places) for row in rows]
    return [with_error(value, error, places) for value, error in pairs]


def _decimals(errors: Sequence[float]) -> int | None:
    """One number of decimals per column, so that the decimal points line up."""
    if not errors:
        return None
    usual = error_decimals(statistics.median(errors))
    return min(9, usual + 2, max(usual, error_decimals(min(errors)) - 1))


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else factor * value


def to_parquet(source: Any, path: str | Path) -> Path:
    """Writes every measure, as in CSV, to a Parquet file.

    Args:
      source: `CellRows`, a sequence of them, or the results of a study.
      path: the file to write.

    Returns:
      The path.
    """
    arrow = _extra("pyarrow")
    parquet = _extra("pyarrow.parquet")
    rows = [row for cell in cells_of(source) for row in measures_lib.summarise(cell)]
    names = _plain_columns(None)
    columns = {name: [row[name] for row in rows] for name in names}
    empty = [name for name, column in columns.items() if all(value is None for value in column)]
    # A column of nothing would have no type of its own.
    typed = {name: arrow.array(columns[name], arrow.float64()) for name in empty}
    parquet.write_table(arrow.table(columns | typed), path)
    return Path(path)


def to_xarray(cell: CellRows) -> Any:
    """One cell's replications, not their measures, as an `xarray.Dataset`.

    Args:
      cell: the rows of a cell.

    Returns:
      Variables estimate, scale, half_width, floored, cause (of `Cause`) and truth over method,
      save_round, level, replication and coordinate; coordinates that a method does not have are NaN.
    """
    xarray = _extra("xarray")
    parts = [_dataset(xarray.Dataset, cell, name) for name in cell.methods]
    whole = xarray.concat(parts, dim="method", join="outer", data_vars="all", coords="minimal")
    facts = ("problem", "algorithm", "schedule", "num_steps", "num_rounds")
    return whole.assign_attrs({name: getattr(cell, name) for name in facts})


def _dataset(make: Callable[..., Any], cell: CellRows, name: str) -> Any:
    rows, truth = cell.methods[name], cell.truth[name]
    place = ("save_round", "replication", "coordinate")
    unknown = [float("nan")] * len(cell.coordinates[name])
    return make(
        {
            "estimate": (place, rows.estimate),
            "scale": (place, rows.scale),
            "half_width": (("save_round", "level", *place[1:]), rows.half_width),
            "floored": (place[:2], rows.floored),
            "cause": (place[:2], rows.cause),
            "truth": (("coordinate",), unknown if truth is None else truth),
        },
        {
            "method": name,
            "save_round": list(cell.save_at),
            "level": list(cell.levels),
            "replication": list(range(cell.replications)),
            "coordinate": list(cell.coordinates[name]),
        },
    )


def _extra(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.split(".")[0]
        message = f"this format needs {name}: pip install 'jaxlsgd[tables]'"
        raise ImportError(message) from error
