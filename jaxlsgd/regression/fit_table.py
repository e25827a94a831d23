"""Federated regression on a table: named coefficients with intervals, steps chosen by a pilot."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal
from jaxlsgd.regression import files
from jaxlsgd.regression.design import Block, Design, as_frame, design
from jaxlsgd.regression.in_memory import DIVERGED, Run, Whitened
from jaxlsgd.regression.options import Options, options
from jaxlsgd.regression.pilot import start_from
from jaxlsgd.regression.result import TableFit, assemble
from jaxlsgd.regression.standardise import by_client, remarks
from jaxlsgd.regression.stream import fit_stream

_RETRIES = 3


def fit_table(
    frame: Any,
    *,
    response: str | None = None,
    client: str | None = None,
    family: str = "gaussian",
    formula: str | None = None,
    features: Sequence[str] | None = None,
    intercept: bool = True,
    missing: str = "refuse",
    stream: bool | None = None,
    progress: Callable[[str], None] | None = None,
    **asked: Any,
) -> TableFit:
    """Fits a regression to rows that clients hold, by Local SGD, with intervals.

    Step size and length come from a pilot (see `regression.pilot`). The run stops when its own variance is
    below 5 % of the sample's. Columns are standardised inside; all results are on the scale of the table.

    Args:
      frame: a pandas table, anything with `to_pandas`, a mapping of columns, or the path of a CSV or
        Parquet file.
      response: column to explain.
      client: column that says whose row it is; None for one client.
      family: "gaussian", "logistic", "poisson", "huber" or "quantile".
      formula: as in "y ~ age + C(ward) + log(dose)", in place of response and features. formulaic evaluates it;
        all but columns, numbers, operators and the functions of `regression.formulas.FUNCTIONS` is refused first.
      features: columns to explain it by; all but response and client if None.
      intercept: whether to add one; a formula says so itself.
      missing: "refuse" or "drop" rows in which something is missing.
      stream: whether to read a file once, a block at a time; where it is larger than a quarter of the memory
        if None. Its rows must be in random order.
      progress: called with a line of text now and then; with "" at the end.
      target: "population", what the clients' rows were drawn from, or "sample", the minimiser of these rows.
      rows: "reshuffled" in every pass, or "one pass", for which all clients need 100 rows.
      variance: of the sample: "clients", each client's own spread, or "pooled", clients' means left in, as
        heteroskedasticity-robust standard errors of all rows have it.
      weights: of clients: by "size", or "equal".
      ridge: λ of ½ λ ‖slopes‖² on standardised columns; intervals are then for the penalised minimiser.
      level: of the intervals.
      methods: "one_step", "plug_in[finite]", "random_scaling[schedule]" (in one pass, or for the sample), or
        estimators.
      local_steps: E, steps between two exchanges; from the pilot if None.
      share: of the sample's variance that the run may add.
      max_passes: over the rows, at most.
      seed: of the orders of rows.
      tau: which quantile, for "quantile".
      delta: where Huber's loss becomes linear, on the scale of the response.
      bandwidth: of the smoothed quantile, on the scale of the response.

    Returns:
      A `TableFit`; `print` it, or see `to_frame`, `to_json`, `to_csv`, `to_latex`, `interval`, `function`.

    Example::

        result = jaxlsgd.fit_table(frame, response="sick", client="hospital", family="logistic")
        print(result)
    """
    _check_options(asked)
    chosen = options(family, **asked)
    how = (response, client, features, formula, intercept, missing)
    if isinstance(frame, (str, Path)):
        if files.is_large(frame) if stream is None else stream:
            return fit_stream(frame, how, chosen, fit_block, progress)
        frame = files.read_all(frame)
    elif stream:
        raise refusal("stream", "be left out for a table in memory", stream)
    frame = as_frame(frame)
    plan = design(frame, *how)
    return fit_block(plan, plan.read(frame), chosen, progress)


def _check_options(asked: Iterable[str]) -> None:
    """Refuses an option that `fit_table` does not have, and suggests the nearest."""
    named = (inspect.signature(function).parameters for function in (fit_table, options))
    known = [name for group in named for name in group if name not in ("frame", "asked")]
    for name in asked:
        if name not in known:
            hint = checks.nearest(name, known) or f"; it takes {', '.join(sorted(set(known)))}"
            raise TypeError(f"fit_table: has no option {checks.shown(name)}{hint}")


def fit_block(
    plan: Design,
    block: Block,
    asked: Options,
    progress: Callable[[str], None] | None = None,
) -> TableFit:
    """Fits rows that are numbers already."""
    rows = by_client(plan, block, asked)
    loss, theta, exchanges = start_from(plan, rows, asked)
    run = Run(Whitened(rows, loss, theta), asked, progress)
    for retry in range(_RETRIES + 1):
        found = run.go(4.0**-retry)
        if found is not None:
            notes = remarks(rows, asked)
            return assemble(plan, asked, run.space, found, exchanges, block.dropped, notes)
    raise RuntimeError(DIVERGED)
