"""The result of `fit_table` as text, HTML, JSON, CSV and LaTeX; for `jaxlsgd.fit` see `runs.fit`."""

from __future__ import annotations

import dataclasses
import html
import io
import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxlsgd.core.display import align, escape_latex, p_value, plural, printable, write_csv

if TYPE_CHECKING:
    from jaxlsgd.regression.result import Coefficients, TableFit

_RUNS_ONLY = "about the minimiser of these rows, not the population that they were drawn from"


def _head(fit: TableFit) -> list[str]:
    """Return lines on what was fitted, and what the intervals are about."""
    about, n = fit.about, sum(fit.sizes.values())
    clients = plural(len(fit.sizes), "client")
    by = f" ({about['client']})" if about["client"] else ""
    dropped = f"; {plural(fit.dropped, 'row')} dropped, with missing values" if fit.dropped else ""
    lines = [
        f"Federated {about['family']} regression of {about['response']}: {n:,} rows of {clients}{by}, "
        f"weighted {'by size' if about['weights'] == 'size' else 'equally'}{dropped}",
    ]
    lines += [f"Loss: {about['loss']}"] if about["loss"] else []
    columns = (("row_weights", "rows weighted by"), ("offset", "offset"), ("exposure", "exposure"))
    used = [f"{words} {about[key]}" for key, words in columns if about[key]]
    lines += [f"With {', '.join(used)}"] if used else []
    return [*lines, _target(fit), _exchanged(fit), _goodness(fit)]


def _goodness(fit: TableFit) -> str:
    found = fit.details
    name = "R²" if fit.family.name == "gaussian" else "pseudo-R²"
    of = f" (of the first {found.first_rows:,} rows)" if found.first_rows else ""
    return (
        f"Deviance {found.deviance:.5g}, of the intercept alone {found.null_deviance:.5g}; "
        f"{name} {found.pseudo_r2:.4g}{of}"
    )


def _target(fit: TableFit) -> str:
    about = fit.about
    what = "Intervals are "
    if about["target"] == "sample":
        what += _RUNS_ONLY
    else:
        how = "clients are given, their rows are drawn"
        if about["clients"] == "sampled":
            how = f"clients are a sample of others, t with {about['freedom']} degrees of freedom"
        elif about["variance"] != "clients":
            name = "" if about["variance"] == "pooled" else f", {about['variance']}"
            how = f"rows are drawn from all clients at once{name}"
        what += f"about the population that the rows were drawn from ({how})"
    if about["ridge"]:
        what += (
            f", with a ridge of {about['ridge']:g}: the penalised coefficients, not those without"
        )
    return what + "."


def _exchanged(fit: TableFit) -> str:
    used = fit.communication
    if not used.rounds:
        return f"Newton's method: {plural(used.pilot, 'exchange')} of d² numbers with every client"
    passes = "one pass" if used.passes == 1 else f"{used.passes} passes"
    return (
        f"Local SGD: {passes}, {plural(used.rounds, 'round')} of {plural(used.local_steps, 'local step')} "
        f"({used.acf:.2g} exchanges per step); the pilot took {used.pilot} exchanges of d² numbers"
    )


def _added(one: Coefficients) -> str:
    if one.reading is None:
        return "Standard errors are the sample's."
    if one.from_run:
        return "Standard errors are the run's own."
    return f"The run adds at most {100 * float(np.max(one.added)):.2g} % to a standard error."


def _cells(fit: TableFit, method: str) -> list[list[str]]:
    low, high = ((1 - fit.level) / 2, (1 + fit.level) / 2)
    header = ["", "estimate", "std. error", "statistic", "p", f"[{low:.4g}", f"{high:.4g}]"]
    body = [
        [
            printable(row["coefficient"], breaks=""),
            *(f"{row[key]:.5g}" for key in ("estimate", "std_error", "statistic")),
            p_value(row["p_value"]),
            *(f"{row[key]:.5g}" for key in ("lower", "upper")),
        ]
        for row in fit.rows()
        if row["method"] == method
    ]
    return [header, *body]


def as_text(fit: TableFit) -> str:
    """Return the fit as text for a terminal."""
    lines = [printable(line, breaks="") for line in _head(fit)]
    for name, one in fit.methods.items():
        lines += ["", name, align(_cells(fit, name), left=(0,)), _added(one)]
    if fit.warnings:
        lines += ["", "Warnings", *(f"  {printable(one, breaks='')}" for one in fit.warnings)]
    return "\n".join(lines)


def as_html(fit: TableFit) -> str:
    """Return the fit as HTML for a notebook."""
    parts = ["<div>", *(f"<p>{html.escape(line)}</p>" for line in _head(fit))]
    for name, one in fit.methods.items():
        header, *body = _cells(fit, name)
        parts.append(f"<table><caption>{html.escape(name)}</caption><thead>")
        parts.append("<tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in header) + "</tr>")
        parts.append("</thead><tbody>")
        for first, *rest in body:
            cells = "".join(
                f"<td style='text-align:right'>{html.escape(cell)}</td>" for cell in rest
            )
            parts.append(f"<tr><th style='text-align:left'>{html.escape(first)}</th>{cells}</tr>")
        parts.append(f"</tbody></table><p>{_added(one)}</p>")
    if fit.warnings:
        items = "".join(f"<li>{html.escape(one)}</li>" for one in fit.warnings)
        parts.append(f"<p>Warnings</p><ul>{items}</ul>")
    return "".join([*parts, "</div>"])


def as_json(fit: TableFit) -> str:
    """Return everything but the path as JSON; numbers that JSON does not have are null."""
    content = {
        "about": {**fit.about, "words": _target(fit), "level": fit.level},
        "clients": fit.sizes,
        "dropped": fit.dropped,
        "communication": {**dataclasses.asdict(fit.communication), "acf": fit.communication.acf},
        "coefficients": fit.rows(),
        "warnings": list(fit.warnings),
    }
    written = json.dumps(_finite(content), indent=2, ensure_ascii=False, allow_nan=False)
    return re.sub(r"[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", written)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def as_csv(fit: TableFit) -> str:
    """Return the rows of all methods as CSV, with the target in a column."""
    rows = [{**row, "target": fit.about["target"]} for row in fit.rows()]
    out = io.StringIO()
    write_csv(out, list(rows[0]), (row.values() for row in rows))
    return out.getvalue()


def as_latex(fit: TableFit) -> str:
    """Return a LaTeX table per method; needs booktabs."""
    lines = [f"% {printable(line, breaks='')}" for line in _head(fit)]
    for name in fit.methods:
        header, *body = ([*map(escape_latex, line)] for line in _cells(fit, name))
        lines += [rf"\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}", r"\toprule"]
        lines += [" & ".join(header) + r" \\", r"\midrule"]
        lines += [" & ".join(line) + r" \\" for line in body]
        lines += [r"\bottomrule", r"\end{tabular}"]
    return "\n".join([*lines, ""])
