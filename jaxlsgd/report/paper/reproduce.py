"""`jaxlsgd reproduce`: the paper's tables and figures, ours beside the printed ones.

DIR/study-tables, DIR/study-figures   the studies behind Tables 3 and 4 and Figures 1 to 3
DIR/table3.txt, .csv, .md             a table for people and for programs; .md is its part of the whole
DIR/figure1.png, .pdf, .csv, .md      a figure, the data behind it, its part of the whole
DIR/reproduction.md                   all parts that there are
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from jaxlsgd.report import drawing
from jaxlsgd.report.paper import experiments, figures, sheet, studies, tables
from jaxlsgd.report.paper.numbers import TITLE
from jaxlsgd.report.paper.studies import Size
from jaxlsgd.report.paper.targets import FIGURES, PROBLEMS, TARGETS, title
from jaxlsgd.study.spec import Study
from jaxlsgd.study.store.codec import cannot, write_whole
from jaxlsgd.study.store.reader import Results

Run = Callable[[Study, Path], int]  # runs what is missing of a study; returns the exit code


def reproduce(targets: Sequence[str], directory: Path, size: Size, run: Run) -> int:
    """Makes tables and figures of the paper in a directory, each as soon as its rows are there.

    Args:
      targets: some of `TARGETS`.
      directory: made if need be; the studies in it are resumed, or refused if they are others.
      size: horizons, replications and seed.
      run: runs what is missing of a study in a directory; returns 0, or another exit code if rows are
        still missing.

    Returns:
      0, or the exit code of a study that is not complete; targets from there on are not made.
    """
    if set(targets) & set(FIGURES):
        drawing.matplotlib()  # before hours of work, not after
    folders = {studies.folder(target): target for target in targets if target in PROBLEMS}
    needed = {folder: studies.study_of(target, size) for folder, target in folders.items()}
    for folder, study in needed.items():
        studies.refuse_another(directory / folder, study)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot("make", directory, error) from error
    for target in targets:
        folder = studies.folder(target) if target in PROBLEMS else ""
        if folder in needed and (code := run(needed.pop(folder), directory / folder)):
            return code
        _make(target, directory, size)
        _put_together(directory)
    print(f"written to {directory}")
    return 0


def _make(target: str, directory: Path, size: Size) -> None:
    """Writes a target and its part of the whole, and prints the verdict."""
    if target == "table1":
        part, verdict = sheet.write(tables.table1(), directory)
    elif target == "table2":
        part, verdict = sheet.write(tables.table2(size.replications, size.seed), directory)
    else:
        results = Results(directory / studies.folder(target))
        part, verdict = _from_rows(target, results, directory)
        part += f"\nMade from the rows in `{results.directory.name}`, seed {results.study.seed}.\n"
    write_whole(directory / f"{target}.md", part.encode())
    print(verdict)


def _from_rows(target: str, results: Results, directory: Path) -> tuple[str, str]:
    wanted = [x for x in results.cells() if results.cell(x).problem.kind in PROBLEMS[target]]
    cells = [rows for cell in wanted if (rows := results.read(cell)) is not None]
    if target in FIGURES:
        warmup = results.study.cells[0].plan().warmup_rounds
        return figures.write(target, cells, warmup, directory)
    return sheet.write(experiments.study_sheet(target, cells), directory)


def _put_together(directory: Path) -> None:
    """Writes all parts that were made in the directory, now or earlier, as one file."""
    lines = [f"# {TITLE}: reproduced\n"]
    for target in TARGETS:
        path = directory / f"{target}.md"
        if path.is_file():
            lines += [f"## {title(target)}\n", path.read_text(encoding="utf-8")]
    write_whole(directory / "reproduction.md", "\n".join(lines).encode())
