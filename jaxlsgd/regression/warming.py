"""Compiles the programs of a stream while its pilot is at work.

Shapes follow from the first rows, but for E, which the pilot may choose otherwise. A wrong guess costs a
program that nobody uses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxlsgd.regression import pilot, running
from jaxlsgd.regression.chunks import Shape
from jaxlsgd.regression.columns import client_counts, plain_design
from jaxlsgd.regression.hosted import on_host
from jaxlsgd.regression.options import Options


def programs(
    table: Any, how: tuple[Any, ...], asked: Options, rows: int, steps: int
) -> Callable[[], Any] | None:
    """What compiles the programs, for a thread; None where their shapes cannot be told.

    Args:
      table: first rows, Arrow's.
      how: arguments of `design` after the table.
      asked: what is asked for.
      rows: of a chunk.
      steps: of a chunk.
    """
    plan = plain_design(table.schema, *how)
    counts = None if plan is None else client_counts(plan, table)
    if plan is None or counts is None:
        return None
    d = len(plan.names)
    E = pilot.LOCAL_STEPS if asked.local_steps is None else asked.local_steps
    shape = Shape.of(counts / counts.sum(), rows, steps, E)
    each = (shape.rounds * E, len(counts), shape.width)
    batches = running.Batches(_floats(*each, d), _floats(*each), _floats(len(counts)))
    setting = running.Setting(
        _floats(len(counts)), _floats(len(asked.family.in_units)), _floats(d, d)
    )
    # Tracing needs Python, so that only the rest is for a thread.
    outside = on_host(asked.methods)
    inside = () if outside else asked.methods
    starting = running.init.lower(inside, _floats(d))
    states = jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype), starting.out_info)
    meeting = running.run_batches.lower(
        asked.family.derivatives,
        asked.methods,
        batches,
        setting,
        _floats(shape.rounds),
        running.Carried(_floats(d), states),
        outside,
    )
    return lambda: (meeting.compile(), starting.compile())


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.float32)
