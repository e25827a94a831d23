"""States of methods that are updated in NumPy, after the rounds of a chunk, and not compiled with its steps.

The loop of a stream is then compiled without them, which is most of its compiling. A round has thousands of rows, so that what NumPy
takes for one (0.1 ms for `one_step`) does not matter.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxlsgd.core.estimator import Estimator, Sync


def on_host(methods: tuple[Estimator, ...]) -> bool:
    """Whether all of them can."""
    return all(part.on_host is not None for method in methods for part in method.accumulators)


class Hosted:
    """The states, one per accumulator of each method."""

    def __init__(self, methods: tuple[Estimator, ...], x: Any) -> None:
        self.parts = [
            [part.on_host for part in method.accumulators if part.on_host is not None]
            for method in methods
        ]
        self.states = tuple(tuple(part.init(x) for part in parts) for parts in self.parts)

    def update(self, E: int, eta: Any, told: Any) -> None:
        """Takes in the rounds of a chunk, as `running.run_batches` tells of them."""
        told = [None if one is None else np.asarray(one, np.float64) for one in told]
        for m, size in enumerate(np.asarray(eta, np.float64)):
            x, gradient, hessian, total = (None if one is None else one[m] for one in told)
            sync = Sync(x, E, size, gradient, hessian, total)
            self.states = tuple(
                tuple(part.update(state, sync) for part, state in zip(parts, states, strict=True))
                for parts, states in zip(self.parts, self.states, strict=True)
            )
