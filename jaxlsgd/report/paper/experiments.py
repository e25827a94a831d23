"""Tables 3 and 4 of the paper, the experiments: `study_sheet` puts our numbers beside the printed ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from jaxlsgd.analysis.measures import summarise
from jaxlsgd.analysis.moments import Row
from jaxlsgd.core.display import Table
from jaxlsgd.core.rows import CellRows
from jaxlsgd.report.paper.printed import METHODS, Key, Printed, study_table
from jaxlsgd.report.paper.tables import Sheet, judged

COLUMNS = (
    "model",
    "schedule",
    "num_steps",
    "num_rounds",
    "method",
    "critical",
    "level",
    "coverage",
    "coverage_mcse",
    "coverage_low",
    "coverage_high",
    "length",
    "length_sd",
    "length_mcse",
    "acf",
    "n_ok",
    "n_failed",
    "paper_coverage",
    "paper_length",
)
# By the study's name: method and critical value as the CSV has them.
_NAMES = {
    "plug_in": ("plug_in", "normal"),
    "random_scaling[paper]": ("random_scaling", "paper"),
    "plug_in[finite]": ("plug_in[finite]", "normal"),
    "random_scaling[finite]": ("random_scaling", "finite"),
    "one_step": ("one_step", "student"),
}
_BLOCKS = (
    ("Plug-in", "plug_in", "plug_in[finite]"),
    ("Random scaling", "random_scaling[paper]", "random_scaling[finite]"),
)
_MEASURES = (("coverage", "coverage rate (%)", 2), ("length", "average length (1e-2)", 3))
_TITLES = {
    "table3": "Table 3: linear regression, d = 5",
    "table4": "Table 4: logistic regression, d = 5",
}
CALIBRATION = (
    "The scale of the clients' x*_k is ours: the stated N(0, I) gives intervals some 44 % shorter"
    " than the printed ones, so this one number (the x*_k are drawn once) was chosen such that the"
    " C1 plug-in length at t_T = 5,000 is the printed one."
)


def study_sheet(name: str, cells: Sequence[CellRows]) -> Sheet:
    """Make Table 3 or 4, arranged as in the paper.

    Args:
      name: "table3" (linear) or "table4" (logistic).
      cells: the rows of its study, with the paper's methods and ours.
    """
    cells = sorted(cells, key=lambda cell: cell.num_steps)  # within a horizon by schedule
    rows = [row for cell in cells for row in _cell_rows(cell, study_table(name))]
    order = {method: i for i, method in enumerate(_NAMES)}
    rows.sort(key=lambda row: order[row["name"]])
    tables = [_block(rows, *block, *item) for block in _BLOCKS for item in _MEASURES]
    tables.append(_communication(rows))
    tables[0] = tables[0]._replace(title=f"{_TITLES[name]}. {tables[0].title}")
    tables[-1] = tables[-1]._replace(notes=_notes(name, rows))
    return Sheet(name, tables, COLUMNS, rows, _verdict(name, rows))


def _cell_rows(cell: CellRows, printed: dict[Key, Printed]) -> Iterable[Row]:
    for row in summarise(cell, last_only=True):
        if row["coordinate"] != cell.coordinates[row["method"]][0]:
            continue
        method, critical = _NAMES[row["method"]]
        names = {"name": row["method"], "method": method, "critical": critical}
        found = {**row, **names, "model": cell.problem}
        for measure, *_ in _MEASURES:
            key = (METHODS.get(row["method"], ""), measure, cell.schedule, cell.num_steps)
            found |= _beside(row, measure, printed.get(key))
        yield found


def _beside(row: Row, measure: str, printed: Printed | None) -> Row:
    """Return the printed number and the z-score of ours."""
    if printed is None or row[measure] is None or row[f"{measure}_mcse"] is None:
        value = None if printed is None else printed.value
        return {f"paper_{measure}": value, f"z_{measure}": None}
    error = math.hypot(_error(row, measure), printed.standard_error)
    z = (row[measure] - printed.value) / error if error > 0 else None
    return {f"paper_{measure}": printed.value, f"z_{measure}": z}


def _error(row: Row, measure: str) -> float:
    """Return the standard error; of a coverage of 0 or 100 %, the width of its Wilson interval over 2 · 1.96."""
    if measure == "coverage" and row["coverage_mcse"] == 0:
        return (row["coverage_high"] - row["coverage_low"]) / (2 * 1.96)
    return row[f"{measure}_mcse"]


def _block(
    rows: Sequence[Row], title: str, paper: str, ours: str, measure: str, what: str, places: int
) -> Table:
    """Arrange schedules down and horizons across, as in the paper; per cell ours, paper's, z, finite."""
    at = {(row["name"], row["schedule"], row["num_steps"]): row for row in rows}
    horizons, schedules = _unique(rows, "num_steps"), _unique(rows, "schedule")
    header = [""]
    for steps in horizons:
        header += [f"t_T={steps:,}", "paper", "z", "finite"]
    lines = []
    for name in schedules:
        line = [name]
        for steps in horizons:
            one, other = at.get((paper, name, steps)), at.get((ours, name, steps))
            line += _entries(one, other, measure, places)
        lines.append(line)
    return Table(f"{title}: {what}", header, lines, (0,))


def _entries(row: Row | None, other: Row | None, measure: str, places: int) -> list[str]:
    if row is None or row[measure] is None:
        return ["-"] * 4
    behind = row["coverage_mcse" if measure == "coverage" else "length_sd"] or 0.0
    mine = f"{100 * row[measure]:.{places}f}({100 * behind:.3f})"
    if measure == "coverage" and behind == 0:  # by its formula, at 0 and at 100 %
        low, high = (100 * row[f"coverage_{end}"] for end in ("low", "high"))
        mine = f"{100 * row[measure]:.{places}f}[{low:.1f}, {high:.1f}]"
    z, finite = row[f"z_{measure}"], None if other is None else other[measure]
    printed, finite = (
        "-" if x is None else f"{100 * x:.{places}f}" for x in (row[f"paper_{measure}"], finite)
    )
    return [mine, printed, "-" if z is None else f"{round(z, 1) + 0.0:+.1f}", finite]  # never -0.0


def _communication(rows: Sequence[Row]) -> Table:
    horizons, schedules = _unique(rows, "num_steps"), _unique(rows, "schedule")
    at = {(row["schedule"], row["num_steps"]): row for row in rows}
    header = [""] + [h for steps in horizons for h in (f"t_T={steps:,}", "rounds")]
    lines = []
    for name in schedules:
        found = [at.get((name, steps)) for steps in horizons]
        pairs = [("-", "-") if r is None else _frequency(r) for r in found]
        lines.append([name, *(entry for pair in pairs for entry in pair)])
    return Table("Average communication frequency (%)", header, lines, (0,))


def _frequency(row: Row) -> tuple[str, str]:
    return f"{100 * row['acf']:.2f}", f"{row['num_rounds']:,}"


def _unique(rows: Sequence[Row], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))


def _notes(name: str, rows: Sequence[Row]) -> tuple[str, ...]:
    counts = sorted({(row["n_ok"], row["n_failed"]) for row in rows})
    runs = "; ".join(f"{ok:,} completed, {bad:,} failed" for ok, bad in counts)
    general = (
        "In parentheses, as in the paper: the standard error of a coverage rate, the standard"
        " deviation of a length. z: ours minus paper's over the combined standard errors. finite:"
        " our own finite-horizon intervals (their standard errors are in the CSV).",
        *(
            ("In brackets: 95 % Wilson intervals, where the standard error is 0 by its formula.",)
            if any(row["coverage_mcse"] == 0 for row in rows)
            else ()
        ),
        f"First coordinate, 95 % intervals. Runs of a cell: {runs}.",
    )
    return general + ((CALIBRATION,) if name == "table3" else ())


def _verdict(name: str, rows: Sequence[Row]) -> tuple[str, ...]:
    scores = [
        ((row["method"], measure, row["schedule"], row["num_steps"]), row[f"z_{measure}"])
        for row in rows
        for measure, *_ in _MEASURES
    ]
    within, count, label, z = judged(scores)
    title = _TITLES[name].split(":")[0]
    if not count:
        return (f"{title}: no cell to compare with the paper.", *_ours(rows))
    method, measure, schedule, steps = label
    where = f"{method} {measure}, {schedule}, t_T = {steps:,}"
    first = f"{title}: {within} of {count} cells within 4 combined standard errors of the paper;"
    return (f"{first} largest |z| {abs(z):.1f} ({where}).", *_lengths(rows), *_ours(rows))


def _lengths(rows: Sequence[Row]) -> tuple[str, ...]:
    known = [r for r in rows if r["method"] == "plug_in" and r["paper_length"] and r["length"]]
    if not known:
        return ()
    shares = [100 * (row["length"] / row["paper_length"] - 1) for row in known]
    within = sum(abs(share) <= 0.5 for share in shares)
    worst = max(shares, key=abs)
    found = f"{within} of {len(known)} within 0.5 %, largest difference {worst:+.2f} %"
    return (f"Plug-in lengths: {found}.",)


def _ours(rows: Sequence[Row]) -> tuple[str, ...]:
    lines = []
    for title, paper, ours in _BLOCKS:
        spans = [
            _span([r["coverage"] for r in rows if r["name"] == name]) for name in (paper, ours)
        ]
        if all(spans):
            lines.append(
                f"{title} covers {spans[0]} %; with its finite horizon allowed for {spans[1]} %."
            )
    return tuple(lines)


def _span(values: Sequence[float | None]) -> str:
    known = [100 * value for value in values if value is not None]
    return f"{min(known):.1f} to {max(known):.1f}" if known else ""
