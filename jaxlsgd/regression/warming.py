"""Compiles the program of a stream while its pilot is at work.

Its shapes follow from the first rows, but for E, which the pilot may choose otherwise. A wrong guess costs a
program that nobody uses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxlsgd.regression import pilot, running
from jaxlsgd.regression.chunks import Shape
from jaxlsgd.regression.columns import plain_design
from jaxlsgd.regression.design import extra
from jaxlsgd.regression.options import Options


def program(
    table: Any, how: tuple[Any, ...], asked: Options, rows: int, steps: int
) -> Callable[[], Any] | None:
    """What compiles the program, for a thread; None where its shapes cannot be told.

    Args:
      table: first rows, Arrow's.
      how: arguments of `design` after the table.
      asked: what is asked for.
      rows: of a chunk.
      steps: of a chunk.
    """
    plan = plain_design(table.schema, *how)
    if plan is None:
        return None
    d, counts = len(plan.names), np.array([table.num_rows])
    if plan.client is not None:
        counted = extra("pyarrow.compute").value_counts(table.column(plan.client))
        counts = counted.field("counts").to_numpy()
    E = pilot.LOCAL_STEPS if asked.local_steps is None else asked.local_steps
    shape = Shape.of(counts / counts.sum(), rows, steps, E)
    each = (shape.rounds * E, len(counts), shape.width)
    batches = running.Batches(_floats(*each, d), _floats(*each), _floats(len(counts)))
    setting = running.Setting(
        _floats(len(counts)), _floats(len(asked.family.in_units)), _floats(d, d)
    )
    carried = jax.eval_shape(functools.partial(running.start, asked.methods), _floats(d))
    # Tracing needs Python, so that only the rest is for a thread.
    lowered = running.run_batches.lower(
        asked.family.derivatives, asked.methods, batches, setting, _floats(shape.rounds), carried
    )
    return lowered.compile


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.float32)
