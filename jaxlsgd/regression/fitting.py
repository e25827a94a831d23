"""Federated regression on a table: named coefficients with intervals, steps chosen by a pilot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxlsgd.regression import pilot as pilots
from jaxlsgd.regression.design import Block, Design, as_frame, design
from jaxlsgd.regression.families import Family
from jaxlsgd.regression.looping import Finished, Run
from jaxlsgd.regression.options import Options, options
from jaxlsgd.regression.reading import Reading
from jaxlsgd.regression.result import Coefficients, Communication, TableFit
from jaxlsgd.regression.rows import Rows, by_client, remarks

FloatArray = NDArray[np.floating[Any]]
PILOT = 20_000  # rows
_RETRIES = 3
_FAR = 0.25  # of a standard error


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
      formula: as in "y ~ age + C(ward) + log(dose)", in place of response and features (formulaic's).
      features: columns to explain it by; all but response and client if None.
      intercept: whether to add one; a formula says so itself.
      missing: "refuse" or "drop" rows in which something is missing.
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
    chosen = options(family, **asked)
    if isinstance(frame, (str, Path)):
        from jaxlsgd.regression import files

        frame = files.read_all(frame)
    frame = as_frame(frame)
    plan = design(frame, response, client, features, formula, intercept, missing)
    return fit_block(plan, plan.read(frame), chosen)


def fit_block(plan: Design, block: Block, asked: Options) -> TableFit:
    """Fits rows that are numbers already."""
    rows = by_client(plan, block, asked)
    loss, theta, exchanges = _pilot(plan, rows, asked)
    run = Run(rows, loss, theta, asked)
    for retry in range(_RETRIES + 1):
        found = run.go(4.0**-retry)
        if found is not None:
            return _result(plan, block.dropped, run, found, exchanges)
    raise RuntimeError(
        "the run diverged, even with steps 64 times smaller than the pilot's; is a row an outlier?"
    )


def _pilot(plan: Design, rows: Rows, asked: Options) -> tuple[pilots.Loss, FloatArray, int]:
    """The loss with its numbers, the pilot's minimiser, and the exchanges that found it."""
    ridge = asked.ridge * rows.coordinates.slopes
    rng = np.random.default_rng([asked.seed, 1])
    size = PILOT
    while True:
        chosen = _some(rng, len(rows.y), size)
        X, y, client = rows.X[chosen], rows.y[chosen], rows.client[chosen]
        weights = (rows.p / np.maximum(np.bincount(client, minlength=len(rows.p)), 1))[client]
        loss = _tuned(asked.family, X, y, weights, ridge, rows)
        try:
            theta, count = pilots.minimise(loss, X, y, weights, plan.names)
            return loss, theta, count
        except ValueError:
            # What separates some rows need not separate all.
            if len(y) == len(rows.y):
                raise
            size *= 4


def _some(rng: np.random.Generator, n: int, size: int) -> Any:
    if n <= size:
        return slice(None)
    return np.sort(rng.choice(n, size, replace=False))


def _tuned(
    family: Family,
    X: FloatArray,
    y: FloatArray,
    weights: FloatArray,
    ridge: FloatArray,
    rows: Rows,
) -> pilots.Loss:
    if family.tune is None:
        return pilots.Loss(family, np.zeros(1), ridge)
    root = np.sqrt(weights)
    theta = np.linalg.lstsq(root[:, None] * X, root * y, rcond=None)[0]
    scale = rows.coordinates.y_scale
    found = family.tune(scale * (y - X @ theta), len(rows.y), X.shape[1])
    return pilots.Loss(family, np.asarray(found) / family.units(scale), ridge)


def _result(plan: Design, dropped: int, run: Run, found: Finished, exchanges: int) -> TableFit:
    rows, asked = run.rows, run.asked
    pairs = zip(found.readings, found.moments, strict=True)
    methods = {one.method.name: _coefficients(run, one, at) for one, at in pairs}
    first = next(iter(methods.values()))
    about = {
        "response": plan.response,
        "client": plan.client,
        "family": asked.family.name,
        "loss": asked.family.told(run.loss.tuning, rows.coordinates.y_scale),
        "target": asked.target,
        "rows": asked.rows,
        "variance": asked.variance,
        "weights": asked.weights,
        "ridge": asked.ridge,
        "share": asked.share,
    }
    communication = Communication(
        found.plan.num_rounds,
        found.rule.E,
        found.passes,
        found.rule.eta,
        found.rule.bound,
        exchanges,
    )
    warnings = [*_run_warnings(run, found, first), *remarks(rows, asked)]
    sizes = dict(zip(rows.labels, rows.sizes.tolist(), strict=True))
    return TableFit(
        plan.names,
        methods,
        about,
        sizes,
        dropped,
        asked.level,
        communication,
        tuple(warnings),
        tuple(found.along),
    )


def _coefficients(run: Run, reading: Reading, at: pilots.Moments) -> Coefficients:
    """Estimate and covariance of the table's coefficients.

    For the population the run's own covariance and the sample's add up. Where each row was met once, the
    chance in the sample is the run's, and for these rows alone there is no other.
    """
    asked = run.asked
    ours = run.back @ reading.matrix @ run.back.T
    from_run = asked.fresh or asked.target == "sample"
    total = ours if from_run else ours + run.sample(at)
    return Coefficients(reading.method.name, run.table(reading), total, ours, reading, from_run)


def _run_warnings(run: Run, found: Finished, first: Coefficients) -> list[str]:
    """What went otherwise than it should, in words."""
    asked, told = run.asked, []
    if not asked.fresh and found.share > asked.share:
        told.append(
            f"the run's own variance is {100 * found.share:.2g} % of the sample's after "
            f"{found.passes} passes, where {100 * asked.share:g} % were asked for: standard errors are up "
            f"to {100 * np.max(first.added):.2g} % longer for it; raise max_passes"
        )
    if found.slower < 1:
        told.append(
            f"the run diverged with the pilot's steps, and was begun again {1 / found.slower:g} times slower"
        )
    at = found.moments[0]
    step = run.rows.coordinates.back @ np.linalg.solve(at.G, run.rows.p @ at.gradients)
    far = np.abs(step) / first.std_error
    limit = 4.0 if asked.target == "sample" else _FAR
    if far.max() > limit:
        told.append(
            f"the estimate is up to {far.max():.2g} standard errors from the minimiser of these rows: "
            "the run has not settled; raise max_passes or lower local_steps"
        )
    for reading in found.readings:
        told += [f"{reading.method.name}: {note}" for note in reading.notes]
    return told
