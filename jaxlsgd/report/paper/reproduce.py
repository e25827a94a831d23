"""`jaxlsgd reproduce`: the paper's tables and figures, ours beside the printed ones."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlsgd.report import drawing, figures, layout
from jaxlsgd.report.paper import experiments as paper_studies
from jaxlsgd.report.paper import numbers as paper_numbers
from jaxlsgd.report.paper import tables as paper_tables
from jaxlsgd.report.paper.tables import Sheet
from jaxlsgd.report.tables import to_csv

if TYPE_CHECKING:
    from jaxlsgd.report.paper.cells import Job, Runner

TABLES = ("table1", "table2", "table3", "table4")
FIGURES = ("figure1", "figure2", "figure3")
_MODELS = {
    "table3": ("linear",),
    "table4": ("logistic",),
    "figure1": ("linear", "logistic"),
    "figure2": ("linear",),
    "figure3": ("logistic",),
}
_ALONG = "coverage and length against communication rounds; plug-in above, random scaling below."
_CAPTIONS = {
    "figure1": "L2 error of the average against communication rounds; left linear, right logistic.",
    "figure2": f"Linear regression: {_ALONG}",
    "figure3": f"Logistic regression: {_ALONG}",
}
_DATA = ("problem", "schedule", "num_steps", "save_round", "save_steps", "method", "level")
_CURVES = (
    "coverage",
    "coverage_mcse",
    "length",
    "length_mcse",
    "l2_error",
    "l2_error_mcse",
    "n_ok",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `jaxlsgd reproduce` to a parser."""
    parser.add_argument("target", choices=(*TABLES, *FIGURES, "all"), help="what to reproduce")
    parser.add_argument(
        "--replications", type=_count, default=1_000, metavar="N", help="runs a cell (paper: 1000)"
    )
    parser.add_argument(
        "--horizons",
        type=_count,
        nargs="+",
        default=list(paper_numbers.HORIZONS),
        metavar="STEPS",
        help="observations per client t_T; figures use at most the largest (default: the paper's)",
    )
    parser.add_argument("--seed", type=_seed, default=0, help="seed of all draws (default 0)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("reproduction"),
        metavar="DIR",
        help="where to write (default: reproduction)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress")


def _count(text: str) -> int:
    return _whole(text, 2)


def _seed(text: str) -> int:
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"must be an integer of at least {least}, got {text!r}")
    return value


def main(args: argparse.Namespace) -> int:
    """Reproduces what was asked for and writes it to `args.out`.

    Every table is written as text, Markdown and CSV, every figure as PNG and PDF with its data as
    CSV, each as soon as it is there; `reproduction.md` holds them all.

    Args:
      args: what `add_arguments` parsed.

    Returns:
      The exit code: 0, or 1 if something could not be written or drawn.
    """
    targets = (*TABLES, *FIGURES) if args.target == "all" else (args.target,)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        parts = _reproduce(targets, args)
        (args.out / "reproduction.md").write_text("\n".join(parts), encoding="utf-8")
    except OSError as error:
        print(f"jaxlsgd reproduce: cannot write to {args.out}: {error}", file=sys.stderr)
        return 1
    except ImportError as error:
        print(f"jaxlsgd reproduce: {error}", file=sys.stderr)
        return 1
    print(f"written to {args.out}")
    return 0


def _reproduce(targets: Sequence[str], args: argparse.Namespace) -> list[str]:
    from jaxlsgd.engine import machine

    if set(targets) & set(FIGURES):
        drawing.matplotlib()  # before hours of work, not after
    machine.prepare()
    parts = [f"# {paper_numbers.TITLE}: reproduced", ""]
    horizons = sorted(set(args.horizons))
    with _Simulations(targets, args, horizons) as run:
        for target in targets:
            if target in FIGURES:
                parts += _figure(target, run, horizons, args.out)
            else:
                parts += _write_sheet(_sheet(target, run, horizons, args), args.out)
    return parts


class _Simulations:
    """All simulations of the targets, with progress over them together."""

    def __init__(
        self, targets: Sequence[str], args: argparse.Namespace, horizons: list[int]
    ) -> None:
        self._args, self._shares, self._runner = args, {}, None
        self._jobs = dict.fromkeys(job for name in targets for job in _jobs(name, horizons))

    def __enter__(self) -> _Simulations:
        from jaxlsgd.study import progress

        self._progress = progress.for_stream(sys.stderr, self._args.quiet or not self._jobs)
        runs = len(self._jobs) * self._args.replications
        work = sum(job.plan.num_steps for job in self._jobs)
        self._progress.start(progress.Totals(len(self._jobs), 0, runs, work))
        return self

    def __call__(self, job: Job) -> Any:
        if self._runner is None:
            self._runner = self._start()
        return self._runner(job)

    def __exit__(self, *error: object) -> None:
        self._progress.close()

    def _start(self) -> Runner:
        from jaxlsgd.report.paper.cells import Runner

        return Runner(self._args.replications, self._args.seed, self._tell)

    def _tell(self, job: Job, share: float) -> None:
        step = share - self._shares.get(job, 0.0)
        self._shares[job] = share
        self._progress.advance(step * self._args.replications, step * job.plan.num_steps)
        if share >= 1 and step > 0:
            self._progress.cell_done()
        self._progress.tick()


def _jobs(target: str, horizons: Sequence[int]) -> list[Job]:
    models = _MODELS.get(target, ())
    if not models:
        return []
    from jaxlsgd.report.paper import cells as paper_cells

    make = paper_cells.figure_jobs if target in FIGURES else paper_cells.table_jobs
    return [job for model in models for job in make(model, horizons)]


def _sheet(
    target: str, run: Callable[[Job], Any], horizons: Sequence[int], args: argparse.Namespace
) -> Sheet:
    if target == "table1":
        return paper_tables.table1()
    if target == "table2":
        return paper_tables.table2(args.replications, args.seed)
    return paper_studies.study_sheet(target, [run(job) for job in _jobs(target, horizons)])


def _write_sheet(sheet: Sheet, directory: Path) -> list[str]:
    """Writes a table three times, prints its verdict, returns it as Markdown."""
    verdict = "\n".join(sheet.verdict)
    text = "\n".join(layout.text(table) for table in sheet.tables)
    body = "\n".join(layout.markdown(table) for table in sheet.tables)
    listed = "\n".join(f"- {line}" for line in sheet.verdict)
    records = [{name: row[name] for name in sheet.columns} for row in sheet.rows]
    _write(directory / f"{sheet.name}.txt", f"{text}\n{verdict}\n")
    _write(directory / f"{sheet.name}.md", f"{body}\n{listed}\n")
    _write(directory / f"{sheet.name}.csv", to_csv(records, sheet.columns))
    print(verdict)
    return [f"## {sheet.name.capitalize().replace('Table', 'Table ')}", "", body, listed, ""]


def _figure(
    target: str, run: Callable[[Job], Any], horizons: Sequence[int], directory: Path
) -> list[str]:
    """Writes a figure and the data behind it, returns it as Markdown."""
    jobs = _jobs(target, horizons)
    rows = [row for job in jobs for row in figures.first_coordinate(run(job))]
    warmup = jobs[0].plan.warmup_rounds
    if target == "figure1":
        figure = figures.error_along_rounds(rows, lambda problem: warmup)
    else:
        figure = figures.along_rounds(rows, warmup)
    drawing.save(figure, directory / target)
    columns = (*_DATA, *_CURVES)
    records = [{name: row[name] for name in columns} for row in rows]
    _write(directory / f"{target}.csv", to_csv(records, columns))
    title = target.capitalize().replace("Figure", "Figure ")
    size = f"{rows[0]['replications']:,} runs of T = {jobs[0].num_rounds:,} rounds"
    caption = f"{title}: {_CAPTIONS[target]} {size}, E = 1 for the first 5 % of them."
    print(caption)
    return [f"## {title}", "", caption, "", f"![{title}]({target}.png)", ""]


def _write(path: Path, content: str) -> None:
    path.write_text(content, encoding="utf-8")
