"""The verb fit: a regression on a table."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from jaxlsgd.cli._common import Verbs, add_verb, positive, share
from jaxlsgd.core.storage import check_output

VERBS = ("fit",)
FAMILIES = ("gaussian", "logistic", "poisson", "huber", "quantile")
FORMATS = ("text", "csv", "json", "latex")
_PASSED_ON = (
    *("response", "client", "family", "formula", "features", "intercept", "missing", "target"),
    *("rows", "variance", "weights", "ridge", "level", "methods", "local_steps", "share"),
    *("max_passes", "seed", "tau", "delta", "bandwidth", "stream"),
)


def add_verbs(verbs: Verbs) -> None:
    """Declare the verb."""
    text = (
        "fit a regression to a CSV or Parquet file whose rows belong to clients\n\n"
        "By Local SGD, with steps and length from a pilot. Columns are standardised inside; coefficients,\n"
        "standard errors and intervals are on the scale of the file, and about the population that its rows\n"
        "were drawn from, unless --target sample. Needs the extra 'data'.\n\n"
        "A formula is made of columns (in `backticks` if their names have spaces), numbers, ~ + - * / : ** ( )\n"
        "and functions: log, log2, log10, log1p, exp, expm1, sqrt, abs, sin, cos, I, C, Treatment, Sum, poly,\n"
        "bs, cr, cc, center, scale. All other Python in it is refused, and not run."
    )
    examples = (
        "jaxlsgd fit data.csv --response y --client site --family logistic\n"
        'jaxlsgd fit data.csv --client site --formula "y ~ age + C(ward) + log(dose)"\n'
        "jaxlsgd fit data.parquet --response cost --client site --format latex > table.tex"
    )
    parser = add_verb(verbs, "fit", fit, text, examples)
    parser.add_argument("file", metavar="FILE", help="CSV (.csv, .tsv, .csv.gz) or .parquet")
    _add_model(parser)
    _add_inference(parser)
    _add_run(parser)
    _add_output(parser)


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the model")
    group.add_argument("--response", metavar="COLUMN", help="what is explained")
    group.add_argument("--client", metavar="COLUMN", help="whose row it is; one client without it")
    group.add_argument("--family", choices=FAMILIES, default="gaussian", help="default: gaussian")
    group.add_argument(
        "--formula", help="as in 'y ~ x + C(z)', instead of --response and --features"
    )
    group.add_argument("--features", metavar="COLUMN", nargs="+", help="default: all others")
    group.add_argument("--no-intercept", dest="intercept", action="store_false")
    group.add_argument("--missing", choices=("refuse", "drop"), default="refuse")
    group.add_argument("--ridge", type=float, default=0.0, help="on standardised slopes")
    group.add_argument("--tau", type=share, default=0.5, help="which quantile (default: 0.5)")
    group.add_argument("--delta", type=float, help="where Huber's loss becomes linear")
    group.add_argument("--bandwidth", type=float, help="of the smoothed quantile")


def _add_inference(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the intervals")
    group.add_argument("--target", choices=("population", "sample"), default="population")
    help = "each client's own spread, or that of all rows (heteroskedasticity-robust)"
    group.add_argument("--variance", choices=("clients", "pooled"), default="clients", help=help)
    group.add_argument("--weights", choices=("size", "equal"), default="size", help="of clients")
    group.add_argument("--level", type=share, default=0.95, help="default: 0.95")
    group.add_argument("--methods", nargs="+", default=["one_step"], help="default: one_step")


def _add_run(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the run")
    group.add_argument("--rows", choices=("reshuffled", "one pass"), default="reshuffled")
    group.add_argument("--local-steps", type=positive, help="default: from the pilot, 5 at most")
    group.add_argument("--share", type=share, default=0.05, help="of the sample's variance")
    group.add_argument("--max-passes", type=positive, default=60, help="default: 60")
    group.add_argument("--seed", type=int, default=0)
    group.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="read the file once, a block at a time (default: if it is large)",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what comes out")
    group.add_argument("--format", choices=FORMATS, default="text", help="default: text")
    group.add_argument("--plot", metavar="FILE", type=Path, help="forest plot (extra 'plots')")


def fit(arguments: argparse.Namespace) -> int:
    """Fit, and print the table."""
    from jaxlsgd.regression.fit_table import fit_table

    if arguments.plot is not None:
        check_output(arguments.plot)  # before the fit, which takes long
    options = {name: getattr(arguments, name) for name in _PASSED_ON}
    progress = _progress if sys.stderr.isatty() else None
    result = fit_table(Path(arguments.file), progress=progress, **options)
    written = {
        "text": lambda: f"{result}\n",
        "csv": result.to_csv,
        "json": lambda: result.to_json() + "\n",
        "latex": result.to_latex,
    }
    sys.stdout.write(written[arguments.format]())
    if arguments.plot is not None:
        result.plot(arguments.plot)
    return 0


def _progress(text: str) -> None:
    """Overwrite one line of the terminal."""
    sys.stderr.write(f"\r\x1b[K{text}" if text else "\r\x1b[K")
    sys.stderr.flush()
