"""Tables of a study's measures, for people and for programs: start reading at `render`.

`Selection` chooses rows by the names of problems, schedules, methods, levels and coordinates.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal

from jaxlsgd.analysis import failures
from jaxlsgd.analysis.measures import (
    BRACKETS,
    COUNTS,
    DIFFERENT,
    EXACT,
    IDENTITY,
    MEASURES,
    NO_TRUTH,
    NUMBERS,
    SHARE,
    TRUTH,
    columns_for_people,
    cost_notes,
    differences,
    no_truth,
    summarise,
    truth_notes,
)
from jaxlsgd.analysis.moments import Row
from jaxlsgd.core import checks
from jaxlsgd.core.causes import FAILURES
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.display import WIDTH, Table, error_decimals, percent, with_error
from jaxlsgd.core.rows import CellRows, cells_of

ALL = "all"
LATEX_WIDTH = 90  # characters of a table that fits between the margins of an article
# Fields of a selection, and the columns that they choose by.
_NAMED = {"problems": "problem", "schedules": "schedule", "methods": "method", "levels": "level"}


@dataclasses.dataclass(frozen=True)
class Selection:
    """Names to keep; an empty field keeps everything.

    Args:
      problems: names of problems.
      schedules: names of schedules.
      methods: names of methods.
      levels: confidence levels, one or several.
      coordinate: name of a coordinate, "all", or None for the first of each method.
    """

    problems: Sequence[str] = ()
    schedules: Sequence[str] = ()
    methods: Sequence[str] = ()
    levels: Any = ()  # tuple[float, ...] once made
    coordinate: str | None = None

    def __post_init__(self) -> None:
        levels = (self.levels,) if isinstance(self.levels, int | float) else tuple(self.levels)
        object.__setattr__(self, "levels", levels)
        object.__setattr__(self, "methods", tuple(self.methods))

    def check(self, cells: Sequence[CellRows]) -> None:
        """Refuse a name that no cell has, and suggest the nearest."""
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
                raise refusal(
                    "level", f"be one of {', '.join(map(str, levels))}", level, code="choice"
                )
        if self.coordinate not in (None, ALL):
            names = (name for cell in cells for c in cell.coordinates.values() for name in c)
            checks.choice("coordinate", self.coordinate, _unique(names))

    def cells(self, cells: Iterable[CellRows]) -> list[CellRows]:
        """Return the cells of the chosen problems."""
        return [cell for cell in cells if not self.problems or cell.problem in self.problems]

    def keeps(self, row: Row, first: str) -> bool:
        """Return whether a row is shown; `first` is the first coordinate of its method."""
        wanted = self.coordinate or first
        return wanted in (ALL, row["coordinate"]) and all(
            not getattr(self, field) or row[column] in getattr(self, field)
            for field, column in _NAMED.items()
        )


def sort_rows(rows: Sequence[Row], column: str | None, descending: bool = False) -> list[Row]:
    """Return rows sorted by a column, unknown values last, or as they are if the column is None."""
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


Format = Literal["text", "markdown", "csv", "latex", "json"]
SHOWN = ("coverage", "length", "bias", "rmse", "model_se_error")
EVERYTHING = Selection()
# Columns that a text table leaves out to be narrow, in this order, and those it is cut into parts by.
_SPARED = ("rmse", "bias", "model_se_error", "num_rounds", "why", "n_floored")
_SPARED_IN_LATEX = ("coverage_all", "n_ok")
_PARTED = ("problem", "algorithm", "level", "num_steps", "schedule")
_FOR_PEOPLE = {"text": Table.text, "markdown": Table.markdown, "latex": Table.latex}
_SHARES = ("coverage", "coverage_all", "coverage_bias_eliminated")
_PERCENT = (*_SHARES, "model_se_error")
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
    "coverage_all": "all runs %",
    "coverage_bias_eliminated": "bias-eliminated coverage %",
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
    "n_floored": "Regularised: completed, but a numerical floor acted on the scale.",
    "coverage_difference": "Differences and ratios are those of a row from its reference, over "
    "replications that completed in both.",
}


def render(
    source: Any,
    format: Format = "text",
    *,
    selection: Selection = EVERYTHING,
    measures: Sequence[str] | None = None,
    sort: str | None = None,
    descending: bool = False,
    across: bool = False,
) -> str:
    """Return a study's measures as a table.

    Text, Markdown and LaTeX are for people: the last saved round, the first coordinate, the usual
    measures as `value (standard error)`, and counts. The algorithm is named if it is not Local SGD.
    If runs failed, the table also has the coverage that counts failures as misses, and their causes.
    A coverage whose standard error is 0 has its 95 % Wilson interval in brackets instead. A note gives
    the error of a truth that was estimated, and warns if it is above a tenth of an interval's. Unless
    measures are named, text leaves some out until it fits 100 columns, with a note of which, and is cut
    into parts if that is not enough; so does LaTeX, for the text width of an article. LaTeX does not say
    what methods cost, and breaks a table that is longer than a page (longtable).

    CSV and JSON are for programs: every saved round, coordinate and measure in plain columns, a missing
    number as an empty field or null.

    Args:
      source: `CellRows`, a sequence of them, or the results of a study.
      format: "text", "markdown", "latex", "csv" or "json".
      selection: problems, schedules, methods, levels and coordinate to show.
      measures: names from `jaxlsgd.analysis.measures.MEASURES`; chosen as above if None.
      sort: column to sort by; the order of the study if None.
      descending: whether the largest is first.
      across: whether methods are columns, for people; one table per measure, coverage if none is named.

    Returns:
      The table.

    Example::

        print(render(cells, selection=Selection(methods=["one_step"]), sort="coverage"))
        pandas.read_csv(io.StringIO(render(cells, "csv")))
    """
    checks.choice("format", format, Format)
    for name in measures or ():
        checks.choice("measure", name, MEASURES)
    people = format in _FOR_PEOPLE
    cells = cells_of(source)
    selection.check(cells)
    chosen = _for_format(selection, people)
    rows = [
        row
        for cell in chosen.cells(cells)
        for row in summarise(cell, last_only=people)
        if chosen.keeps(row, cell.coordinates[row["method"]][0])
    ]
    rows = sort_rows(rows, sort, descending)
    if not people:
        return _machine(rows, _plain_columns(measures), format)
    if across and rows:
        found = across_methods(rows, measures, latex=format == "latex")
    elif format in ("text", "latex") and measures is None:
        found = _narrow(rows, latex=format == "latex")
    else:
        found = [for_people(rows, measures)]
    notes = (*found[-1].notes, *truth_notes(rows))
    found[-1] = found[-1]._replace(notes=notes)
    if format != "latex":  # in a paper they belong into the text
        found[-1] = with_costs(found[-1], rows)
    return "\n".join(map(_FOR_PEOPLE[format], found))


def _for_format(selection: Selection, people: bool) -> Selection:
    """Choose all coordinates for programs unless one is named; people get the first."""
    if people or selection.coordinate is not None:
        return selection
    return dataclasses.replace(selection, coordinate=ALL)


def render_differences(
    source: Any,
    format: Format = "text",
    *,
    reference: tuple[str, str] | None = None,
    selection: Selection = EVERYTHING,
    sort: str | None = None,
    descending: bool = False,
) -> str:
    """Return paired differences of every schedule and method from a reference, as a table.

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
    checks.choice("format", format, Format)
    cells = cells_of(source)
    selection.check(cells)
    people = format in _FOR_PEOPLE
    chosen = _for_format(selection, people)
    rows = differences(chosen.cells(cells), reference)
    first = rows[0]["coordinate"] if rows else ""
    rows = sort_rows([row for row in rows if chosen.keeps(row, first)], sort, descending)
    where = (*_COMPARED_WHERE, "reference_schedule", "reference_method")
    if not people:
        columns = [c for name in _COMPARED for c in (name, f"{name}_mcse")]
        return _machine(rows, [*where, "n_pairs", *columns], format)
    hidden = set(IDENTITY) - set(columns_for_people(rows))
    where = tuple(name for name in where if name not in hidden)
    return _FOR_PEOPLE[format](tabulate(rows, where, _COMPARED, ("n_pairs",)))


def _plain_columns(measures: Sequence[str] | None) -> list[str]:
    names = [*IDENTITY, *COUNTS]
    for name in measures or MEASURES:
        suffixes = ["", "_mcse"] if name not in EXACT else [""]
        suffixes += ["_low", "_high"] if name.startswith("coverage") else []
        names += [name + suffix for suffix in suffixes]
    return [*names, *TRUTH, "cost"]


def _machine(rows: Iterable[Row], columns: Sequence[str], format: Format) -> str:
    if format == "csv":
        return Table.of(rows, columns).csv()
    records = [{name: row[name] for name in columns} for row in rows]
    return json.dumps(records, indent=1, allow_nan=False) + "\n"


def for_people(
    rows: Sequence[Row],
    measures: Sequence[str] | None = None,
    without: Collection[str] = (),
    where: Sequence[str] | None = None,
    columns: Collection[str] = (),
) -> Table:
    """Return rows of the last round as the table that people see.

    Args:
      rows: of `summarise`.
      measures: which to show; the usual ones if None.
      without: columns to leave out.
      where: columns that identify rows; those that people need if None.
      columns: what stays a column also if it is the same in every row.
    """
    failed = any(row["n_failed"] for row in rows)
    floored = ("n_floored",) if any(row["n_floored"] for row in rows) else ()
    shown = tuple(measures or SHOWN)
    if measures is None and failed:
        shown = ("coverage", "coverage_all", *SHOWN[1:])
    causes = ("why",) if failed else ()
    parts = where or columns_for_people(rows), shown, ("n_ok", "n_failed", *causes, *floored)
    named, shown, counts = (tuple(x for x in part if x not in without) for part in parts)
    return tabulate([row | {"why": _why(row)} for row in rows], named, shown, counts, columns)


def with_costs(table: Table, rows: Sequence[Row]) -> Table:
    """Add notes on what the methods cost."""
    return table._replace(notes=(*table.notes, *cost_notes(rows)))


def _narrow(rows: Sequence[Row], latex: bool = False) -> list[Table]:
    """Leave measures out until the table fits, and cut it into parts if that is not enough.

    All parts have the same columns.
    """
    width = LATEX_WIDTH if latex else WIDTH
    counts = {(row["n_ok"], row["n_failed"]) for row in rows}
    alike = latex and len(counts) == 1 and not any(failed for _, failed in counts)
    groups = [list(rows)]
    while True:
        without = ["n_ok", "n_failed"] if alike else []
        tables = _alike(groups, without)
        for name in (*_SPARED, *(_SPARED_IN_LATEX if latex else ())):
            if max(table.width for table in tables) <= width:
                break
            if any(_heading(name) in table.header for table in tables):
                without.append(name)
                tables = _alike(groups, without)
        parted = [name for name in _PARTED if not latex or name != "schedule"]
        several = [name for name in parted if any(len({r[name] for r in g}) > 1 for g in groups)]
        if max(table.width for table in tables) <= width or not several:
            break
        groups = [part for group in groups for part in _parts(group, several[0])]
    tables = _alike(groups, without)
    notes = dict.fromkeys(note for table in tables for note in table.notes)
    left = [_heading(name).removesuffix(" %") for name in without if name in SHOWN]
    if left and not latex:
        notes[f"Left out for width: {', '.join(left)}. Name measures to see them (--measures)."] = (
            None
        )
    if "why" in without and not latex and any(row["n_failed"] for row in rows):
        notes["Why runs failed: see jaxlsgd failures."] = None
    if "coverage_all" in without:
        notes["Coverage is that of the runs that completed."] = None
    if alike:
        notes[f"{counts.pop()[0]:,} replications, of which none failed."] = None
    last = tables[-1]._replace(notes=tuple(notes))
    return [*(table._replace(notes=()) for table in tables[:-1]), last]


def _parts(rows: Sequence[Row], name: str) -> list[list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[name], []).append(row)
    return list(groups.values())


def _alike(groups: Sequence[Sequence[Row]], without: Collection[str]) -> list[Table]:
    """Return parts of one table: what varies in one of them is a column of all."""
    where = columns_for_people([row for group in groups for row in group])
    varying = [name for name in where if any(len({r[name] for r in g}) > 1 for g in groups)]
    return [for_people(group, None, without, where, varying) for group in groups]


def across_methods(
    rows: Sequence[Row], measures: Sequence[str] | None = None, latex: bool = False
) -> list[Table]:
    """Return a table per measure (coverage, if none is named), with a column per method.

    A table that is too wide is cut into parts.
    """
    width = LATEX_WIDTH if latex else WIDTH
    hidden = ("method", "num_rounds")
    where = tuple(name for name in columns_for_people(rows) if name not in hidden)
    groups = [list(rows)]
    while True:
        varying = [name for name in where if any(len({r[name] for r in g}) > 1 for g in groups)]
        parts = [
            _one_across(group, measure, where, varying)
            for measure in measures or ("coverage",)
            for group in groups
        ]
        several = [name for name in _PARTED[:-1] if name in varying]  # schedules stay together
        if not several or max(table.width for table in parts) <= width:
            break
        groups = [part for group in groups for part in _parts(group, several[0])]
    notes = dict.fromkeys(note for table in parts for note in table.notes)
    last = parts[-1]._replace(notes=tuple(notes))
    return [*(table._replace(notes=()) for table in parts[:-1]), last]


def _one_across(
    rows: Sequence[Row], measure: str, where: Sequence[str], columns: Collection[str]
) -> Table:
    names = list(dict.fromkeys(row["method"] for row in rows))
    lines: dict[tuple[Any, ...], Row] = {}
    for row, text in zip(rows, _number_column(rows, measure), strict=True):
        key = tuple(row[name] for name in where)
        line = lines.setdefault(key, dict.fromkeys(names, "-") | dict(zip(where, key, strict=True)))
        line[row["method"]] = text
    table = tabulate(list(lines.values()), where, (), names, columns)
    title = f"{_heading(measure)}: {table.title}" if table.title else _heading(measure)
    notes = [note for name, note in _NOTES.items() if name in ("", measure)]
    return table._replace(title=title, notes=(*notes, *_special_notes(rows, (measure,))))


def _why(row: Row) -> str:
    return failures.why({cause: row[cause.count] for cause in FAILURES}) or "-"


def tabulate(
    rows: Sequence[Row],
    where: Sequence[str],
    shown: Sequence[str],
    counts: Sequence[str],
    columns: Collection[str] = (),
) -> Table:
    """Return rows as a table: what is the same in every row goes to the title, the rest into columns.

    Args:
      rows: what to show.
      where: columns that identify rows.
      shown: measures, each with its `_mcse`.
      counts: columns to show as they are.
      columns: what stays a column also if it is the same in every row.
    """
    same = [
        name
        for name in where
        if rows and name not in columns and len({row[name] for row in rows}) == 1
    ]
    keys = [name for name in where if name not in same]
    texts = [[_plain(row[name]) for row in rows] for name in keys]
    texts += [_number_column(rows, name) for name in shown]
    texts += [[_plain(row[name]) for row in rows] for name in counts]
    title = ", ".join(f"{_heading(name)} {_plain(rows[0][name])}" for name in same)
    notes = [note for name, note in _NOTES.items() if name in ("", *shown, *counts)]
    notes += _special_notes(rows, shown)
    return Table(
        title=title,
        header=[_heading(name) for name in (*keys, *shown, *counts)],
        lines=[list(line) for line in zip(*texts, strict=True)],
        left=tuple(i for i, name in enumerate(keys) if name not in NUMBERS),
        notes=tuple(notes) if rows else ("No rows yet.",),
    )


def _heading(name: str) -> str:
    return _HEADINGS.get(name, name)


def _special_notes(rows: Sequence[Row], shown: Sequence[str]) -> list[str]:
    """Return notes on what only some rows have."""
    shares = [name for name in shown if name in _SHARES]
    certain = any(row[f"{name}_mcse"] == 0 for row in rows for name in shares)
    notes = [BRACKETS] if certain else []
    if not all(row.get("same_replications", True) for row in rows):
        notes.append(DIFFERENT)
    if "coverage" in shown and no_truth(rows):
        notes.append(NO_TRUTH)
    return notes


def _plain(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _number_column(rows: Sequence[Row], name: str) -> list[str]:
    if name == "numbers_sent":  # a count, shown with all its digits
        return ["-" if (x := row[name]) is None else f"{x:,.0f}" for row in rows]
    factor = 100 if name in _PERCENT or name == "coverage_difference" else 1
    pairs = [(_times(row[name], factor), _times(row.get(f"{name}_mcse"), factor)) for row in rows]
    places = _decimals([error for _, error in pairs if error])
    if name in _SHARES:
        return [percent(*(row[name + end] for end in SHARE), decimals=places) for row in rows]
    return [with_error(value, error, places) for value, error in pairs]


def _decimals(errors: Sequence[float]) -> int | None:
    """Return one number of decimals per column, so that the decimal points line up."""
    if not errors:
        return None
    usual = error_decimals(statistics.median(errors))
    return min(9, usual + 2, max(usual, error_decimals(min(errors)) - 1))


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else factor * value
