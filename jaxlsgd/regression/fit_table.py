"""Federated regression on a table: named coefficients with intervals, steps chosen by a pilot.

The signature and the docstring of `fit_table` declare its options; the command line follows from them.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.estimator import Estimator
from jaxlsgd.core.progress import Progress, shown
from jaxlsgd.regression import files
from jaxlsgd.regression.design import Model, as_frame, design
from jaxlsgd.regression.in_memory import fit_block
from jaxlsgd.regression.options import check_options
from jaxlsgd.regression.result import TableFit
from jaxlsgd.regression.stream import fit_stream


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
    row_weights: str | None = None,
    offset: str | None = None,
    exposure: str | None = None,
    ridge: float = 0.0,
    tau: float | None = None,
    delta: float | None = None,
    bandwidth: float | None = None,
    dispersion: float | None = None,
    target: str = "population",
    variance: str = "clients",
    clients: str = "given",
    weights: str = "size",
    level: float = 0.95,
    methods: Sequence[str | Estimator] | None = None,
    rows: str = "reused",
    local_steps: int | None = None,
    share: float = 0.05,
    max_passes: int = 60,
    seed: int = 0,
    stream: bool | None = None,
    encoding: str | None = None,
    separator: str | None = None,
    decimal: str = ".",
    until: float | None = None,
    progress: Progress = None,
    **unknown: NoReturn,
) -> TableFit:
    """Fit a regression to rows that clients hold, with intervals.

    A table in memory is fitted by Newton's method: clients send d² numbers per step, and no rows. With `methods`,
    and for a file that is read once, Local SGD runs instead. Its step size and length come from a pilot (see
    `regression.pilot`), and it stops when its own variance is below 5 % of the sample's. A run that fails its own
    test is refused, and the error names the call that works. Columns are standardised inside; all results are on
    the scale of the table.

    Args:
      frame: a pandas table, anything with `to_pandas`, a mapping of columns, or the path of a CSV or
        Parquet file.
      response: column to explain.
      client: column with the client of each row; None for one client.
      family: "gaussian", "logistic" (0 and 1, or shares between), "poisson", "huber", "quantile" or
        "negative_binomial" (counts that vary more than Poisson's).
      formula: as in "y ~ age + C(ward) + log(dose)", in place of response and features. formulaic evaluates it;
        all but columns, numbers, operators and the functions of `regression.formulas.FUNCTIONS` is refused first.
      features: columns to explain it by; if None all but response, client, weights, offset and exposure.
      intercept: whether to add one; unused with a formula, which has or omits its own.
      missing: "refuse" or "drop" rows in which something is missing: None, NaN, and text that is blank or reads NA,
        N/A, #N/A, <NA>, NaN or NULL, in capitals or not. The rule is the same for tables, CSV and Parquet, and for
        numbers, factors and clients.
      row_weights: column with the weight of each row, as of a survey or of a mean of several observations; standard
        errors are robust (HC0 of weighted rows). A weight does not count as several rows.
      offset: column that is added to the linear predictor, with a coefficient of 1.
      exposure: column of times or sizes that counts are in proportion to; its logarithm is an offset. For "poisson"
        and "negative_binomial".
      ridge: λ of ½ λ ‖slopes‖² on standardised columns; intervals are then for the penalised minimiser.
      tau: which quantile, for "quantile"; 0.5, the median, if None.
      delta: where Huber's loss becomes linear, on the scale of the response; 1.345 robust standard deviations
        of the pilot's residuals if None.
      bandwidth: of the smoothed quantile, on the scale of the response; from the pilot if None.
      dispersion: α of a variance of mean + α mean², for "negative_binomial"; the likeliest, after a Poisson
        regression, if None.
      target: "population", what the clients' rows were drawn from, or "sample", the minimiser of these rows.
      variance: of the sample: "clients", each client's own spread; "HC0" (also "pooled"), clients' means left in, as
        heteroskedasticity-robust standard errors of all rows have it; "HC1", times n/(n − d); "HC3", each row divided
        by 1 minus its leverage, for small tables; "CR1", with clients="sampled", the cluster-robust one of statsmodels.
        Quantiles are Student's with n − d degrees of freedom.
      clients: "given", so that intervals are about the population of these clients, or "sampled" from others, which
        intervals are then about: by leaving out one client after the other (cluster-robust, CR3), Student's t with as
        many degrees of freedom as clients less 1.
      weights: of clients: by "size", or "equal".
      level: of the intervals.
      methods: of intervals of Local SGD: "one_step", "plug_in[finite]", "random_scaling[schedule]" (in one pass, or for
        the sample), or estimators; or none, as in (), for Newton's method. If None none for a table in memory, and
        "one_step" for a file that is read once, for rows="fresh" and for target="sample".
      rows: "reused", in another order in every pass, or "fresh", each met once, for which all clients need 100 rows;
        as `track` has them.
      local_steps: E, steps between two exchanges; from the pilot, 5 at most, if None.
      share: of the sample's variance that the run may add.
      max_passes: over the rows, at most.
      seed: of the orders of rows.
      stream: whether to read a file once, block by block; if None, when it is larger than a quarter of the
        memory. Its rows must be in random order.
      encoding: of a CSV file; if None UTF-8, or what its first bytes say.
      separator: of a CSV file; if None a comma, tab, semicolon or bar, by its first line.
      decimal: mark of a CSV file's numbers, "." or ",".
      until: for a file that is read once, stop as soon as all intervals are at most that to either side, on the
        scale of the table; the rest is not read. Looked at after 131,072 rows, and after every 65,536 from there on;
        a file of fewer than 100,000 is read whole. Stops by width keep the level of fixed intervals in the limit
        (Chow and Robbins).
      progress: as for `simulate`: None shows it in a terminal or notebook, True everywhere, False nowhere; a
        function is called with the share that is done.

    Returns:
      A `TableFit`; `print` it, or see `params`, `bse`, `pvalues`, `conf_int`, `ratios`, `predict`, `margins`, `test`,
      `function`, `interval`, `plot`, `to_frame`, `to_json`, `to_csv`, `to_latex`.

    Example::

        result = jaxlsgd.fit_table(frame, response="sick", client="hospital", family="logistic")
        print(result)
    """
    given = locals()
    _refuse_unknown(unknown)
    options = check_options(given)
    model = Model(**{field.name: given[field.name] for field in dataclasses.fields(Model)})
    dialect = files.Dialect.of(encoding, separator, decimal)
    if isinstance(frame, (str, Path)):
        if files.is_large(frame) if stream is None else stream:
            with shown(progress, Path(frame).name, after=1.0) as report:
                return fit_stream(frame, model, options, report, dialect)
        frame = files.read_all(frame, dialect)
    elif stream:
        raise refusal("stream", "be left out for a table in memory", stream, code="unwanted")
    if options.until is not None:
        rule = "be left out for a table in memory, whose rows are met again and again; it needs stream=True"
        raise refusal("until", rule, until, code="unwanted")
    frame = as_frame(frame)
    plan = design(frame, model)
    with shown(progress, f"{family} regression", after=1.0) as report:
        return fit_block(plan, plan.read(frame), options, report)


# Options of `fit_table` with their defaults.
DEFAULTS = MappingProxyType(
    {
        name: parameter.default
        for name, parameter in inspect.signature(fit_table).parameters.items()
        if name not in ("frame", "unknown")
    }
)


def _refuse_unknown(names: Iterable[str]) -> None:
    """Refuse an option that `fit_table` does not have, and suggest the nearest."""
    for name in names:
        hint = checks.nearest(name, DEFAULTS) or f"; it takes {', '.join(sorted(DEFAULTS))}"
        raise TypeError(f"fit_table: has no option {checks.shown(name)}{hint}")
