"""The paper's tables and figures, made from two studies of `paper.toml`: start reading at `reproduce`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxlsgd.core.rows import CellRows
from jaxlsgd.report import figures, style
from jaxlsgd.report.paper import experiments, tables
from jaxlsgd.report.paper.printed import FIGURES, METHODS, PROBLEMS, TARGETS, TITLE, title
from jaxlsgd.report.paper.tables import write_csv
from jaxlsgd.schedules import Schedule, power_decay
from jaxlsgd.study import study as study_module
from jaxlsgd.study.store.files import StoreError, cannot, write_whole
from jaxlsgd.study.store.reader import Results
from jaxlsgd.study.study import Study

PAPER = Path(study_module.__file__).with_name("paper.toml")
_POINTS = 25  # of a figure's curve


class Size(NamedTuple):
    """What a reproduction may change in `paper.toml`."""

    horizons: tuple[int, ...]  # t_T
    replications: int
    seed: int


def folder_of(target: str) -> str:
    """Return the directory of the study behind a target, below that of all targets."""
    return "study-figures" if target in FIGURES else "study-tables"


def study_of(target: str, size: Size) -> Study:
    """Return the study behind Table 3 or 4 or one of the figures."""
    return _for_figures(size) if target in FIGURES else _for_tables(size)


def _for_tables(size: Size) -> Study:
    study = Study.from_toml(PAPER)
    changes = {"replications": size.replications, "seed": size.seed}
    return dataclasses.replace(study, horizons=sorted(set(size.horizons)), **changes)


def _for_figures(size: Size) -> Study:
    """Return the same problems and schedules along their paths, with the paper's own methods.

    All schedules make as many rounds T as the longest horizon allows the one with the most observations
    per round. Finite-horizon methods are left out: they would need new critical values at every point.
    """
    study = _for_tables(size)
    step = power_decay(1.0)  # of any size: the number of rounds does not depend on it
    bare = [schedule.with_warmup(0.0) for schedule in study.schedules]
    rounds = min(s.plan(step, num_steps=max(size.horizons)).num_rounds for s in bare)
    first = round(study.schedules[0].warmup * rounds)
    return dataclasses.replace(
        study,
        schedules=[_warmed(schedule, rounds) for schedule in study.schedules],
        horizons=[{"num_rounds": rounds}],
        methods=[method for method in study.methods if method.name in METHODS],
        save_at=_points(first, rounds),
    )


def _warmed(schedule: Schedule, rounds: int) -> Schedule:
    """Return the schedule with its warm-up as a share of the rounds, which are the figure's axis.

    `with_warmup` takes a share of the observations: the one that gives as many rounds.
    """
    first = round(schedule.warmup * rounds)
    steps = first + int(schedule.intervals(rounds - first).sum())
    return schedule.with_warmup(first / steps)


def _points(first: int, rounds: int) -> list[int]:
    """Return rounds evenly spaced on a logarithmic axis, from a quarter of the warm-up on."""
    start = min(rounds, max(2, first // 4))
    return np.unique(np.geomspace(start, rounds, _POINTS).round().astype(int)).tolist()


def _refuse_another(place: Path, study: Study) -> None:
    """Refuse a directory that holds another study, naming the options of `reproduce` that differ."""
    if not (place / "manifest.json").is_file():
        return
    there = Results(place).study
    if there.digest == study.digest:
        return
    old, new = _size_text(there), _size_text(study)
    held = f"one with {old}, not with {new}" if old != new else "one made from another paper.toml"
    text = f"{place} holds another study, {held}; give another --out, or delete {place}"
    raise StoreError(text, place, "conflict")


def _size_text(study: Study) -> str:
    return f"seed {study.seed} and horizons {', '.join(map(str, study.horizons))}"


_ALONG = "coverage and length against communication rounds; plug-in above, random scaling below."
_CAPTIONS = {
    "figure1": "L2 error of the average against communication rounds; left linear, right logistic.",
    "figure2": f"Linear regression: {_ALONG}",
    "figure3": f"Logistic regression: {_ALONG}",
}
_WHERE = ("problem", "schedule", "num_steps", "save_round", "save_steps", "method", "level")
_CURVES = ("coverage", "coverage_mcse", "length", "length_mcse", "l2_error", "l2_error_mcse")
COLUMNS = (*_WHERE, *_CURVES, "n_ok")


def write(target: str, cells: Sequence[CellRows], warmup: int, directory: Path) -> tuple[str, str]:
    """Write a figure as PNG, PDF and CSV; return it as Markdown, and its caption.

    Args:
      target: "figure1", "figure2" or "figure3".
      cells: what it shows, read along the rounds.
      warmup: rounds of warm-up, which are marked.
      directory: where to write.
    """
    rows = [row for cell in cells for row in figures.first_coordinate(cell)]
    if target == "figure1":
        figure = figures.error_along_rounds(rows, lambda problem: warmup)
    else:
        figure = figures.along_rounds(rows, warmup)
    style.save(figure, directory / target)
    write_csv(directory / f"{target}.csv", rows, COLUMNS)
    runs, rounds = rows[0]["replications"], rows[0]["num_rounds"]
    size = f"{runs:,} runs of T = {rounds:,} rounds, E = 1 for the first {warmup:,} of them."
    caption = f"{title(target)}: {_CAPTIONS[target]} {size}"
    return f"{caption}\n\n![{title(target)}]({target}.png)\n", caption


Run = Callable[[Study, Path], int]  # runs what is missing of a study and returns the exit code


def reproduce(targets: Sequence[str], directory: Path, size: Size, run: Run) -> int:
    """Make tables and figures of the paper in a directory, each as soon as its rows are there.

    Args:
      targets: some of `TARGETS`.
      directory: made if it is not there; studies in it are resumed, or refused if they are others.
      size: horizons, replications and seed.
      run: runs what is missing of a study in a directory; returns 0, or another exit code if rows are
        still missing.

    Returns:
      0, or the exit code of a study that is not complete; targets from there on are not made.
    """
    if set(targets) & set(FIGURES):
        style.matplotlib()  # before hours of work, not after
    folders = {folder_of(target): target for target in targets if target in PROBLEMS}
    needed = {folder: study_of(target, size) for folder, target in folders.items()}
    for folder, study in needed.items():
        _refuse_another(directory / folder, study)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot("make", directory, error) from error
    for target in targets:
        folder = folder_of(target) if target in PROBLEMS else ""
        if folder in needed and (code := run(needed.pop(folder), directory / folder)):
            return code
        _make(target, directory, size)
        _join_parts(directory)
    print(f"written to {directory}")
    return 0


def _make(target: str, directory: Path, size: Size) -> None:
    """Write a target and its part of the whole, and print the verdict."""
    if target == "table1":
        part, verdict = tables.write(tables.table1(), directory)
    elif target == "table2":
        part, verdict = tables.write(tables.table2(size.replications, size.seed), directory)
    else:
        results = Results(directory / folder_of(target))
        part, verdict = _from_rows(target, results, directory)
        part += f"\nMade from the rows in `{results.directory.name}`, seed {results.study.seed}.\n"
    write_whole(directory / f"{target}.md", part.encode())
    print(verdict)


def _from_rows(target: str, results: Results, directory: Path) -> tuple[str, str]:
    wanted = [x for x in results.cells() if results.cell(x).problem.kind in PROBLEMS[target]]
    cells = [rows for cell in wanted if (rows := results.read(cell)) is not None]
    if target in FIGURES:
        warmup = results.study.cells[0].plan().warmup_rounds
        return write(target, cells, warmup, directory)
    return tables.write(experiments.study_sheet(target, cells), directory)


def _join_parts(directory: Path) -> None:
    """Write all parts in the directory, made now or earlier, as one file."""
    lines = [f"# {TITLE}: reproduced\n"]
    for target in TARGETS:
        path = directory / f"{target}.md"
        if path.is_file():
            lines += [f"## {title(target)}\n", path.read_text(encoding="utf-8")]
    write_whole(directory / "reproduction.md", "\n".join(lines).encode())
