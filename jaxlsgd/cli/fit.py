"""The verb fit: a regression on a table. Its options are those of `jaxlsgd.fit_table`."""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlsgd.cli._common import Verbs, add_verb, in_options
from jaxlsgd.core.display import p_value, plural, printable
from jaxlsgd.core.storage import check_output, replacing

if TYPE_CHECKING:
    from jaxlsgd.regression.result import TableFit

VERBS = ("fit",)
FORMATS = ("text", "csv", "json", "latex")
# Words for Python alone, and those for a command line.
_WORDS = {
    "if None": "if left out",
    "If None": "If left out",
    "None for": "left out for",
    ", or estimators; or none, as in (),": "; or no name,",
    "; as `track` has them": "",
    "the functions of `regression.formulas.FUNCTIONS`": "the functions above",
}
# Where each group of options begins, in the order of `fit_table`.
_GROUPS = {"response": "the model", "target": "the intervals", "rows": "the run"}


def add_verbs(verbs: Verbs) -> None:
    """Declare the verb."""
    text = (
        "fit a regression to a CSV or Parquet file whose rows belong to clients\n\n"
        "By Newton's method, for which clients send d² numbers per step; with --methods, and for a file that\n"
        "is read once, by Local SGD. Columns are standardised inside; coefficients, standard errors and\n"
        "intervals are on the scale of the file, and about the population that its rows were drawn from,\n"
        "unless --target sample. Needs the extra 'data'.\n\n"
        "A formula is made of columns (in `backticks` if their names have spaces), numbers, ~ + - * / : ** ( )\n"
        "and functions: log, log2, log10, log1p, exp, expm1, sqrt, abs, sin, cos, I, C, Treatment, Sum, poly,\n"
        "bs, cr, cc, center, scale. All other Python in it is refused, and not run."
    )
    examples = (
        "jaxlsgd fit data.csv --response y --client site --family logistic\n"
        'jaxlsgd fit data.csv --client site --formula "y ~ age + C(ward) + log(dose)"\n'
        "jaxlsgd fit data.parquet --response cost --client site --format latex > table.tex\n"
        "jaxlsgd fit deaths.csv --response deaths --exposure years --family poisson --ratios\n"
        "jaxlsgd fit data.csv --response y --client school --clients sampled --predict new.csv means.csv"
    )
    parser = add_verb(verbs, "fit", fit, text, examples)
    parser.add_argument("file", metavar="FILE", help="CSV (.csv, .tsv, .csv.gz) or .parquet")
    parser.when_used = add_options  # importing `fit_table` takes as long as importing JAX


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `fit_table`, with the defaults of its signature and the words of its docstring."""
    from jaxlsgd.regression.fit_table import DEFAULTS, fit_table
    from jaxlsgd.regression.options import CHOICES

    types, text = typing.get_type_hints(fit_table), inspect.getdoc(fit_table) or ""
    meanings = dict(re.findall(r"^  (\w+): (.+(?:\n    .+)*)", text, re.MULTILINE))
    group: Any = parser
    for name, default in DEFAULTS.items():
        if name == "progress":
            continue
        group = parser.add_argument_group(_GROUPS[name]) if name in _GROUPS else group
        given: dict[str, Any] = {"default": default, "help": _help(meanings[name], default)}
        kinds = (types[name], *typing.get_args(types[name]))
        if bool in kinds:
            given["action"] = argparse.BooleanOptionalAction
        elif name in CHOICES:
            given["choices"] = CHOICES[name]
        elif any(typing.get_origin(kind) is Sequence for kind in kinds):
            given["nargs"] = "*" if name == "methods" else "+"
        else:
            given["type"] = next((kind for kind in (int, float) if kind in kinds), str)
        group.add_argument("--" + name.replace("_", "-"), **given)
    group = parser.add_argument_group("what comes out")
    group.add_argument("--format", choices=FORMATS, default="text", help="default: text")
    group.add_argument("--plot", metavar="FILE", type=Path, help="forest plot (extra 'plots')")
    group.add_argument(
        "--ratios",
        action="store_true",
        help="after the text, odds or rate ratios: exp of coefficients and of the ends of their intervals",
    )
    group.add_argument(
        "--margins",
        action="store_true",
        help="after the text, average marginal effects; for columns of 0 and 1 the change from 0 to 1",
    )
    group.add_argument(
        "--test",
        nargs="+",
        metavar="NAME",
        help="after the text, Wald's test that these coefficients, or all of a term such as 'C(ward)', are 0",
    )
    group.add_argument(
        "--predict",
        nargs=2,
        metavar=("ROWS", "OUT"),
        type=Path,
        help="write the means of the rows of a file, with intervals on the scale of the response, as CSV",
    )
    group.add_argument("--quiet", action="store_true", help="print no progress")


def _help(meaning: str, default: Any) -> str:
    """Returns an entry of a docstring as the help of an option."""
    words = " ".join(meaning.split()).rstrip(".").replace("%", "%%")
    for python, option in _WORDS.items():
        words = words.replace(python, option)
    if default is None or isinstance(default, bool):
        return words
    shown = " ".join(default) if isinstance(default, tuple) else default
    return f"{words} (default: {shown})"


def fit(arguments: argparse.Namespace) -> int:
    """Fits, and prints the table."""
    from jaxlsgd.regression import files
    from jaxlsgd.regression.fit_table import DEFAULTS, fit_table

    for out in (arguments.plot, arguments.predict and arguments.predict[1]):
        if out is not None:
            check_output(out)  # before the fit, which takes longer
    new = None
    if arguments.predict:
        dialect = files.Dialect.of(arguments.encoding, arguments.separator, arguments.decimal)
        new = files.read_all(arguments.predict[0], dialect)
    options = {name: getattr(arguments, name) for name in DEFAULTS if name != "progress"}
    progress = False if arguments.quiet else None
    named = {name: f"--{name.replace('_', '-')}" for name in options}
    named |= {"frame": arguments.file, "hypotheses": "--test"}
    with in_options(named):
        result = fit_table(Path(arguments.file), **options, progress=progress)
    written = {
        "text": lambda: f"{result}\n",
        "csv": result.to_csv,
        "json": lambda: result.to_json() + "\n",
        "latex": result.to_latex,
    }
    sys.stdout.write(written[arguments.format]())
    if arguments.format == "text":
        with in_options(named):
            sys.stdout.write(_more(result, arguments))
    if new is not None:
        with replacing(arguments.predict[1], force=True) as temporary:
            result.predict(new).to_csv(temporary, index=False)
    if arguments.plot is not None:
        result.plot(arguments.plot)
    return 0


def _more(result: TableFit, arguments: argparse.Namespace) -> str:
    """Returns what was asked for beside the table of coefficients."""
    parts = []
    if arguments.ratios:
        parts.append(result.ratios().to_string(float_format="{:.5g}".format))
    if arguments.margins:
        look: dict[str, Any] = {"float_format": "{:.5g}".format, "formatters": {"p_value": p_value}}
        shown = result.margins().to_string(**look)
        head = "Average marginal effects (for columns of 0 and 1, the change from 0 to 1)"
        parts.append(f"{head}\n{shown}")
    if arguments.test:
        found = result.test(arguments.test)
        parts.append(
            f"Wald test of {', '.join(arguments.test)}: W = {found.statistic:.5g} of "
            f"{plural(found.constraints, 'constraint')}, p = {p_value(found.p_value)}"
        )
    return printable("".join(f"\n{part}\n" for part in parts))
