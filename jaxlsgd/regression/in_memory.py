"""Local SGD on a table in memory, pass after pass, until the run adds little to the sample's variance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxlsgd.regression import local_sgd
from jaxlsgd.regression.design import Block, Design
from jaxlsgd.regression.options import STEPS, Options
from jaxlsgd.regression.pilot import Moments, Whitened, start_from
from jaxlsgd.regression.result import Along, Finished, MethodReading, TableFit, assemble, read
from jaxlsgd.regression.standardise import by_client, remarks, times

FloatArray = NDArray[np.floating[Any]]
DIVERGED = (
    "the run diverged, even with steps 64 times smaller than the pilot's; is a row an outlier?"
)
_ONE_PASS_STEPS = 1000
_READINGS = 10  # of the estimate during a run, about
_RETRIES = 3


def fit_block(
    plan: Design,
    block: Block,
    options: Options,
    progress: Callable[[str], None] | None = None,
) -> TableFit:
    """Fit rows that are numbers already."""
    rows = by_client(plan, block, options)
    space = start_from(plan, rows, options)
    run = _Run(space, options, progress or (lambda text: None))
    for retry in range(_RETRIES + 1):
        found = run.go(4.0**-retry)
        if found is not None:
            return assemble(plan, options, space, found, block.dropped, remarks(rows, options))
    raise RuntimeError(DIVERGED)


class _Run:
    """Local SGD in whitened coordinates, pass after pass."""

    def __init__(self, space: Whitened, options: Options, progress: Callable[[str], None]) -> None:
        self.space, self.rows, self.options = space, space.rows, options
        self.progress = progress
        sizes = self.rows.sizes
        # One pass needs many rounds, as its noise is estimated from them.
        self.steps = min(_ONE_PASS_STEPS, int(sizes.min())) if options.fresh else STEPS
        batches = np.maximum(1.0, sizes / self.steps)
        self.rule = space.rule(sizes, batches, self.steps, options)
        self.width = local_sgd.padded(int(np.ceil(sizes.max() / self.steps)))
        self.data = local_sgd.ClientRows(
            *local_sgd.pad_by_client(
                times(self.rows.X, space.W), self.rows.y, sizes, int(sizes.max())
            )
        )

    def go(self, slower: float) -> Finished | None:
        """Run until the run's variance is small enough; return None if it diverged."""
        options, rule = self.options, self.rule._replace(eta=self.rule.eta * slower)
        E, rounds = rule.E, self.steps // rule.E
        rng = np.random.default_rng([options.seed, 2])
        order = local_sgd.with_replacement if options.target == "sample" else local_sgd.reshuffled
        carried = local_sgd.start(options.methods, self.space.start)
        data, setting = local_sgd.on_device((self.data, local_sgd.setting(self.space)))
        along: list[Along] = []
        limit = 1 if options.fresh else options.max_passes
        every = max(1, min(rule.passes, limit) // _READINGS)
        for number in range(1, limit + 1):
            carried, _ = local_sgd.run_pass(
                options.family.loss,
                options.methods,
                data,
                setting,
                order(rng, self.rows.sizes, rounds * E, E, self.width),
                local_sgd.etas(rule, (number - 1) * rounds, rounds),
                carried,
            )
            if not np.isfinite(carried.x).all():
                return None
            self.progress(f"pass {number} of about {rule.passes}")
            enough = number >= min(rule.passes, limit)
            if not enough and number % every:
                continue
            plan = local_sgd.plan_of(rule, number * rounds)
            first = read(options.methods[0], carried.states[0], plan)
            along.append(Along.at(self.space, first, number * rounds))
            if not enough:
                continue
            if not np.isfinite(first.estimate).all():
                return None
            found = self._moments(first)
            ours = np.diagonal(self.space.covariance(first.matrix))
            share = float(np.max(ours / np.diagonal(self._sample(found))))
            if options.fresh or share <= options.share or number == limit:
                self.progress("")
                pairs = zip(options.methods[1:], carried.states[1:], strict=True)
                others = [read(method, state, plan) for method, state in pairs]
                back = self.rows.coordinates.back
                return Finished(
                    readings=[first, *others],
                    samples=[self._sample(one) for one in (found, *map(self._moments, others))],
                    left=back @ np.linalg.solve(found.G, self.rows.p @ found.gradients),
                    sizes=self.rows.sizes,
                    along=along,
                    rounds=number * rounds,
                    passes=number,
                    rule=rule,
                    share=share,
                    slower=slower,
                )
        raise AssertionError("the last pass returns")

    def _moments(self, reading: MethodReading) -> Moments:
        return self.space.moments_at(self.space.W @ reading.estimate)

    def _sample(self, found: Moments) -> FloatArray:
        """Return the sample's covariance of the coefficients."""
        half = self.rows.coordinates.back @ np.linalg.inv(found.G)
        return half @ found.sample(self.rows.p, self.options.variance == "pooled") @ half.T
