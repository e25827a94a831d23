"""From a run to the result that a person sees."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxlsgd.regression.design import Design
from jaxlsgd.regression.looping import Finished, Whitened
from jaxlsgd.regression.options import Options
from jaxlsgd.regression.reading import Reading
from jaxlsgd.regression.result import Coefficients, Communication, TableFit

FloatArray = NDArray[np.floating[Any]]
_FAR = 0.25  # of a standard error


def assemble(
    plan: Design,
    asked: Options,
    space: Whitened,
    found: Finished,
    exchanges: int,
    dropped: int,
    remarks: list[str],
) -> TableFit:
    """The result of a run.

    Args:
      plan: what was read.
      asked: what was asked for.
      space: coordinates of the run.
      found: the run.
      exchanges: of d² numbers, that the pilot took.
      dropped: rows left out.
      remarks: on the table, in words.
    """
    rows = space.rows
    methods = {
        one.method.name: _coefficients(space, asked, one, sample)
        for one, sample in zip(found.readings, found.samples, strict=True)
    }
    first = next(iter(methods.values()))
    about = {
        "response": plan.response,
        "client": plan.client,
        "family": asked.family.name,
        "loss": asked.family.told(space.loss.tuning, rows.coordinates.y_scale),
        "target": asked.target,
        "rows": asked.rows,
        "variance": asked.variance,
        "weights": asked.weights,
        "ridge": asked.ridge,
        "share": asked.share,
    }
    used = Communication(
        found.plan.num_rounds,
        found.rule.E,
        found.passes,
        found.rule.eta,
        found.rule.bound,
        exchanges,
    )
    told = (*_run_warnings(asked, found, first), *remarks)
    along, sizes = tuple(found.along), dict(zip(rows.labels, found.sizes.tolist(), strict=True))
    return TableFit(plan.names, methods, about, sizes, dropped, asked.level, used, told, along)


def _coefficients(
    space: Whitened, asked: Options, reading: Reading, sample: FloatArray
) -> Coefficients:
    """Estimate and covariance of the table's coefficients.

    For the population the run's own covariance and the sample's add up. Where each row was met once, the
    chance in the sample is the run's, and for these rows alone there is no other.
    """
    ours = space.covariance(reading)
    from_run = asked.fresh or asked.target == "sample"
    total = ours if from_run else ours + sample
    return Coefficients(reading.method.name, space.table(reading), total, ours, reading, from_run)


def _run_warnings(asked: Options, found: Finished, first: Coefficients) -> list[str]:
    """What went otherwise than it should, in words."""
    told = []
    if not asked.fresh and found.share > asked.share:
        told.append(
            f"the run's own variance is {100 * found.share:.2g} % of the sample's after "
            f"{found.passes} passes, where {100 * asked.share:g} % were asked for; raise max_passes"
        )
    if found.slower < 1:
        told.append(
            f"the run diverged with the pilot's steps, and was begun again {1 / found.slower:g} times slower"
        )
    far = np.max(np.abs(found.left) / first.std_error)
    if far > (4.0 if asked.target == "sample" else 1.0 if asked.fresh else _FAR):
        told.append(
            f"the estimate is up to {far:.2g} standard errors from the minimiser of these rows: "
            "the run has not settled; raise max_passes or lower local_steps"
        )
    for reading in found.readings:
        told += [f"{reading.method.name}: {note}" for note in reading.notes]
    return told
