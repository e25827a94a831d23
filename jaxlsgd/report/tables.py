"""Which rows of a study to show, by the names that people know them by."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import statistics
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from jaxlsgd.analysis import failures
from jaxlsgd.analysis import measures as measures_lib
from jaxlsgd.analysis.measures import (
    COUNTS,
    DIFFERENT,
    EXACT,
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
from jaxlsgd.core.display import WIDTH, Table, error_decimals, percent, with_error
from jaxlsgd.core.rows import CellRows

ALL = "all"
_NAMED = {
    "problems": "problem",
    "schedules": "schedule",
    "methods": "method",
    "levels": "level",
}  # fields and the columns they choose by


@dataclasses.dataclass(frozen=True)
class Selection:
    """Names to keep; an empty field keeps everything.

    Args:
      problems: names of problems.
      schedules: names of schedules.
      methods: names of methods.
      levels: confidence levels.
      coordinate: name of a coordinate, "all", or None for the first of each method.
    """

    problems: Sequence[str] = ()
    schedules: Sequence[str] = ()
    methods: Sequence[str] = ()
    levels: Sequence[float] = ()
    coordinate: str | None = None

    def check(self, cells: Sequence[CellRows]) -> None:
        """Refuses a name that no cell has, and offers the nearest."""
        if not cells:
            return
        known = {
            "problem": _unique(cell.problem for cell in cells),
            "schedule": _unique(cell.schedule for cell in cells),
            "method": _unique(name for cell in cells for name in cell.methods),
        }
        for field, column in _NAMED.items():
            for value in getattr(self, field):
                if column in known:
                    checks.choice(column, value, known[column])
        levels = _unique(level for cell in cells for level in cell.levels)
        for level in self.levels:
            if level not in levels:
                raise refusal("level", f"be one of {', '.join(map(str, levels))}", level)
        if self.coordinate not in (None, ALL):
            names = (name for cell in cells for c in cell.coordinates.values() for name in c)
            checks.choice("coordinate", self.coordinate, _unique(names))

    def cells(self, cells: Iterable[CellRows]) -> list[CellRows]:
        """The cells of the problems."""
        return [cell for cell in cells if not self.problems or cell.problem in self.problems]

    def keeps(self, row: Row, first: str) -> bool:
        """Whether a row is shown, where `first` is the first coordinate of its method."""
        wanted = self.coordinate or first
        return wanted in (ALL, row["coordinate"]) and all(
            not getattr(self, field) or row[column] in getattr(self, field)
            for field, column in _NAMED.items()
        )


def sort_rows(rows: Sequence[Row], column: str | None, descending: bool = False) -> list[Row]:
    """Rows by a column, what is not known last; as they are where there is no column.

    Args:
      rows: rows with the same columns.
      column: the column to sort by.
      descending: whether the largest is first.
    """
    if column is None or not rows:
        return list(rows)
    checks.choice(
        "sort", column, [name for name in rows[0] if not name.endswith(("_low", "_high"))]
    )
    known = [row for row in rows if row[column] is not None]
    unknown = [row for row in rows if row[column] is None]
    return sorted(known, key=lambda row: row[column], reverse=descending) + unknown


def _unique(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


FORMATS = ("text", "markdown", "csv", "latex", "json")
SHOWN = ("coverage", "length", "bias", "rmse", "model_se_error")
EVERYTHING = Selection()
# What a text does without so as to be narrow, in this order, and what it is cut into parts by.
_SPARED = ("rmse", "bias", "model_se_error", "num_rounds", "why", "n_floored")
_PARTED = ("problem", "algorithm", "level", "num_steps", "schedule")
_LAYOUTS = {"text": Table.text, "markdown": Table.markdown, "latex": Table.latex}
_SHARES = (
    "coverage",
    "coverage_all",
    "coverage_bias_eliminated",
    "coverage_trusted",
    "coverage_doubted",
)
_JUDGED = ("chance", "coverage_trusted", "coverage_doubted")
_PERCENT = (*_SHARES, "chance", "model_se_error")
_HEADINGS = {
    "num_steps": "steps",
    "num_rounds": "rounds",
    "bias": "bias",
    "save_round": "at round",
    "save_steps": "at step",
    "empirical_se": "empirical SE",
    "model_se": "model SE",
    "model_se_error": "SE bias %",
    "rmse": "RMSE",
    "coverage": "coverage %",
    "coverage_all": "all runs %",
    "coverage_bias_eliminated": "bias-eliminated coverage %",
    "chance": "mean chance %",
    "coverage_trusted": "coverage if trusted %",
    "coverage_doubted": "coverage if doubted %",
    "length_sd": "length SD",
    "l2_error": "L2 error",
    "acf": "rounds per step",
    "numbers_sent": "numbers sent",
    "sent_over_c1": "sent / C1",
    "n_ok": "completed",
    "n_failed": "failed",
    "n_floored": "regularised",
    "coverage_difference": "coverage difference %",
    "length_difference": "length difference",
    "length_ratio": "length ratio",
    "reference_schedule": "reference schedule",
    "reference_method": "reference method",
    "n_pairs": "pairs",
    "here": "here %",
    "there": "there %",
    "apart": "SEs apart",
}
_COMPARED = ("coverage_difference", "length_difference", "length_ratio")
_COMPARED_WHERE = ("problem", "algorithm", "num_steps", "level", "coordinate", "schedule", "method")
_NOTES = {
    "": "Monte-Carlo standard errors in parentheses.",
    "model_se_error": "SE bias: the mean standard error of a method over the standard deviation of "
    "its estimates, less 1.",
    "coverage_all": "Coverage of all runs counts those that failed as misses; the rest is of those "
    "that completed.",
    "numbers_sent": "Numbers sent: per client, its models and the gradients and Hessians that the method needs.",
    "sent_over_c1": "Sent / C1: the same, over those of plain Local SGD that communicates after every step.",
    "chance": "Mean chance: that an interval holds the truth given its run, by the law of the method that "
    "judges, on average over runs.",
    "coverage_trusted": "Trusted: runs whose mean chance over coordinates is at most 5 points below the level; "
    "the others are doubted.",
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
    selection: Selection = EVERYTHING,
    measures: Sequence[str] | None = None,
    sort: str | None = None,
    descending: bool = False,
) -> str:
    """A study's measures as a table.

    Text, Markdown and LaTeX are for people: the last saved round, the first coordinate, the usual
    measures as `value (standard error)`, and counts. The algorithm is named where it is not Local
    SGD. Where runs failed, coverage with failures as misses is added, and why they failed. A coverage
    whose standard error is 0 has its 95 % Wilson interval in brackets instead. A note says how well a truth
    is known that was estimated, and warns if its error is above a tenth of an interval's. Text leaves measures out
    until it fits 100 columns, and says which, unless they are asked for, and comes in parts where that is
    not enough. CSV and JSON are for
    programs: every saved round, coordinate and measure in plain columns, a missing number as an empty
    field or null.

    Args:
      source: `CellRows`, a sequence of them, or the results of a study.
      format: "text", "markdown", "latex", "csv" or "json".
      selection: problems, schedules, methods, levels and coordinate to show.
      measures: names out of `jaxlsgd.analysis.measures.MEASURES`; None as above.
      sort: column to sort by; the order of the study if None.
      descending: whether the largest is first.

    Returns:
      The table.

    Example::

        print(render(cells, selection=Selection(methods=["one_step"]), sort="coverage"))
        pandas.read_csv(io.StringIO(render(cells, "csv")))
    """
    checks.choice("format", format, FORMATS)
    for name in measures or ():
        checks.choice("measure", name, MEASURES)
    people = format in _LAYOUTS
    cells = cells_of(source)
    selection.check(cells)
    chosen = _for_format(selection, people)
    rows = [
        row
        for cell in chosen.cells(cells)
        for row in measures_lib.summarise(cell, last_only=people)
        if chosen.keeps(row, cell.coordinates[row["method"]][0])
    ]
    rows = sort_rows(rows, sort, descending)
    if not people:
        return _machine(rows, _plain_columns(measures), format)
    if format == "text" and measures is None:
        *parts, last = _narrow(rows)
        return "\n".join(map(Table.text, (*parts, _with_notes(last, rows))))
    return _LAYOUTS[format](_with_notes(for_people(rows, measures), rows))


def _for_format(selection: Selection, people: bool) -> Selection:
    """People get the first coordinate, programs all of them, unless one is named."""
    if people or selection.coordinate is not None:
        return selection
    return dataclasses.replace(selection, coordinate=ALL)


def render_differences(
    source: Any,
    format: str = "text",
    *,
    reference: tuple[str, str] | None = None,
    selection: Selection = EVERYTHING,
    sort: str | None = None,
    descending: bool = False,
) -> str:
    """Paired differences of every schedule and method from a reference, as a table.

    Args:
      source: `CellRows`, a sequence of them, or the results of a study.
      format: "text", "markdown", "latex", "csv" or "json".
      reference: schedule and method to compare with; the first of each problem, algorithm and horizon
        if None.
      selection: problems, schedules, methods, levels and coordinate to show; for people the first
        coordinate if none is named.
      sort: column to sort by; the order of the study if None.
      descending: whether the largest is first.

    Returns:
      The table.

    Example::

        print(render_differences(cells, reference=("C1", "plug_in")))
    """
    checks.choice("format", format, FORMATS)
    cells = cells_of(source)
    selection.check(cells)
    people = format in _LAYOUTS
    chosen = _for_format(selection, people)
    rows = measures_lib.differences(chosen.cells(cells), reference)
    first = rows[0]["coordinate"] if rows else ""
    rows = sort_rows([row for row in rows if chosen.keeps(row, first)], sort, descending)
    where = (*_COMPARED_WHERE, "reference_schedule", "reference_method")
    if not people:
        columns = [c for name in _COMPARED for c in (name, f"{name}_mcse")]
        return _machine(rows, [*where, "n_pairs", *columns], format)
    hidden = set(IDENTITY) - set(measures_lib.columns_for_people(rows))
    where = tuple(name for name in where if name not in hidden)
    return _LAYOUTS[format](tabulate(rows, where, _COMPARED, ("n_pairs",)))


def _plain_columns(measures: Sequence[str] | None) -> list[str]:
    names = [*IDENTITY, *COUNTS]
    for name in measures or MEASURES:
        suffixes = ["", "_mcse"] if name not in EXACT else [""]
        suffixes += ["_low", "_high"] if name.startswith("coverage") else []
        names += [name + suffix for suffix in suffixes]
    judged = set(measures or MEASURES) & set(_JUDGED)
    return [*names, *measures_lib.TRUTH, "cost", *(["withheld"] if judged else [])]


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
    writer.writerows({key: inert(value) for key, value in row.items()} for row in records)
    return stream.getvalue()


def inert(value: Any) -> Any:
    """Text that a spreadsheet would run as a formula, quoted as spreadsheets do."""
    return f"'{value}" if isinstance(value, str) and value[:1] in tuple("=+-@\t\r") else value


def for_people(
    rows: Sequence[Row],
    measures: Sequence[str] | None = None,
    without: Collection[str] = (),
) -> Table:
    """Rows of the last round as the table that `render` lays out, without some of the columns."""
    failed = any(row["n_failed"] for row in rows)
    floored = ("n_floored",) if any(row["n_floored"] for row in rows) else ()
    shown = tuple(measures or SHOWN)
    if measures is None and failed:
        shown = ("coverage", "coverage_all", *SHOWN[1:])
    why = ("why",) if failed else ()
    told = [row | {"why": _why(row)} for row in rows]
    columns = measures_lib.columns_for_people(rows), shown, ("n_ok", "n_failed", *why, *floored)
    where, shown, counts = (tuple(x for x in part if x not in without) for part in columns)
    table = tabulate(told, where, shown, counts)
    why = measures_lib.withheld_notes(rows) if set(shown) & set(_JUDGED) else []
    return table._replace(notes=(*table.notes, *why))


def with_costs(table: Table, rows: Sequence[Row]) -> Table:
    """A table with what its methods cost below it."""
    return table._replace(notes=(*table.notes, *measures_lib.cost_notes(rows)))


def _with_notes(table: Table, rows: Sequence[Row]) -> Table:
    """A table with how well its truths are known, and what its methods cost, below it."""
    notes = (*table.notes, *measures_lib.truth_notes(rows))
    return with_costs(table._replace(notes=notes), rows)


def _narrow(rows: Sequence[Row]) -> list[Table]:
    """The table without as many measures as make it fit, and in parts where that is not enough."""
    table, without = for_people(rows), []
    for name in _SPARED:
        if table.width() <= WIDTH:
            break
        if _HEADINGS.get(name, name) in table.header:
            without.append(name)
            table = for_people(rows, without=without)
    if left := [_HEADINGS[name].removesuffix(" %") for name in without if name in SHOWN]:
        more = (
            f"Left out, to be narrow: {', '.join(left)}. Ask for measures to see them (--measure)."
        )
        table = table._replace(notes=(*table.notes, more))
    if "why" in without:
        table = table._replace(notes=(*table.notes, "Why runs failed: see jaxlsgd failures."))
    several = [name for name in _PARTED if len({row[name] for row in rows}) > 1]
    if table.width() <= WIDTH or not several:
        return [table]
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[several[0]], []).append(row)
    parts = [part for group in groups.values() for part in _narrow(group)]
    notes = dict.fromkeys(note for part in parts for note in part.notes)
    return [part._replace(notes=()) for part in parts[:-1]] + [
        parts[-1]._replace(notes=tuple(notes))
    ]


def _why(row: Row) -> str:
    return failures.why({cause: row[cause.count] for cause in FAILURES}) or "-"


def tabulate(
    rows: Sequence[Row], where: Sequence[str], shown: Sequence[str], counts: Sequence[str]
) -> Table:
    """Rows as a table: what is the same in every row goes to the title, the rest into columns.

    Args:
      rows: what to show.
      where: columns that tell rows apart.
      shown: measures, each with its `_mcse`.
      counts: columns to show as they are.
    """
    same = [name for name in where if rows and len({row[name] for row in rows}) == 1]
    keys = [name for name in where if name not in same]
    columns = [[_plain(row[name]) for row in rows] for name in keys]
    columns += [_number_column(rows, name) for name in shown]
    columns += [[_plain(row[name]) for row in rows] for name in counts]
    title = ", ".join(f"{_HEADINGS.get(name, name)} {_plain(rows[0][name])}" for name in same)
    notes = [note for name, note in _NOTES.items() if name in ("", *shown, *counts)]
    notes += _special_notes(rows, shown)
    return Table(
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
    if name == "numbers_sent":  # counts, which have all their digits
        return ["-" if (x := row[name]) is None else f"{x:,.0f}" for row in rows]
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
