"""Local SGD on a table in memory, pass after pass, until the run adds little to the sample's variance."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxlsgd.core.products import times
from jaxlsgd.core.progress import Report
from jaxlsgd.federation import FederationFit
from jaxlsgd.regression import local_sgd
from jaxlsgd.regression.design import Block, Design
from jaxlsgd.regression.options import (
    MANY_COLUMNS,
    STEPS,
    Options,
    check_columns,
    no_interval,
)
from jaxlsgd.regression.pilot import Rule, Whitened, start_from
from jaxlsgd.regression.result import Along, Finished, MethodReading, TableFit, assemble, read
from jaxlsgd.regression.standardise import by_client, check_one_pass, comparable, remarks

FloatArray = NDArray[np.floating[Any]]
DIVERGED = "it diverged, even with steps 64 times smaller than the pilot's"
_FAR_OFF = "its estimate is far from the pilot's: the rows are too few for Local SGD's curvature"
_ONE_PASS_STEPS = 1000
_READINGS = 10  # of the estimate during a run, about
_RETRIES = 3
_FAR = 2.0  # whitened, per coordinate: curvature about the pilot says nothing at such a distance


def fit_block(
    plan: Design,
    block: Block,
    options: Options,
    report: Report | None = None,
) -> TableFit:
    """Fit rows that are numbers already."""
    clients = len(np.unique(comparable(block.client)))
    check_columns(len(block.y), len(plan.names), clients, options)
    rows = by_client(plan, block, options)
    check_one_pass(rows, options)
    space = start_from(plan, rows, options)
    if not options.methods:
        return assemble(
            plan,
            options,
            space,
            _pilot_alone(space, options),
            block.dropped,
            remarks(rows, options),
        )
    run = _Run(space, options, report or (lambda share: None))
    for retry in range(_RETRIES + 1):
        found = run.go(4.0**-retry)
        if found is not None:
            return assemble(plan, options, space, found, block.dropped, remarks(rows, options))
    raise no_interval(options.first, DIVERGED, options)


def _pilot_alone(space: Whitened, options: Options) -> Finished:
    """Return Newton's minimiser of all rows as a finished run of no rounds."""
    return Finished(
        readings=[],
        finished=[space.finish(space.theta, options)],
        sizes=space.rows.sizes,
        along=[],
        rounds=0,
        passes=0,
        rule=Rule(0.0, 1, 0, "none"),
        share=0.0,
        slower=1.0,
    )


class _Run:
    """Local SGD in whitened coordinates, pass after pass."""

    def __init__(self, space: Whitened, options: Options, report: Report) -> None:
        self.space, self.rows, self.options = space, space.rows, options
        self.report = report
        sizes = self.rows.sizes
        # One pass needs many rounds, as its noise is estimated from them.
        self.steps = min(_ONE_PASS_STEPS, int(sizes.min())) if options.fresh else STEPS
        batches = np.maximum(1.0, sizes / self.steps)
        self.rule = space.rule(sizes, batches, self.steps, options)
        self.width = local_sgd.padded(int(np.ceil(sizes.max() / self.steps)))
        columns = (times(self.rows.X, space.W), self.rows.y, self.rows.weight, self.rows.offset)
        self.data = local_sgd.ClientRows(
            *(
                None if one is None else local_sgd.pad(one, sizes, int(sizes.max()))
                for one in columns
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
        few = len(self.space.start) > MANY_COLUMNS  # a reading takes d³ operations
        every = limit if few else max(1, min(rule.passes, limit) // _READINGS)
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
            self.report(min(0.99, number / min(rule.passes, limit)))
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
            if np.linalg.norm(first.estimate - self.space.start) > _FAR * np.sqrt(
                len(first.estimate)
            ):
                raise no_interval(options.first, _FAR_OFF, options)
            found = self._finish(first)
            ours = np.diagonal(self.space.covariance(first.matrix))
            back = self.rows.coordinates.back
            sample = np.sum((back @ found.covariance) * back, 1)
            share = float(np.max(ours / np.maximum(sample, 1e-300)))
            if options.fresh or share <= options.share or number == limit:
                self.report(1.0)
                pairs = zip(options.methods[1:], carried.states[1:], strict=True)
                others = [read(method, state, plan) for method, state in pairs]
                return Finished(
                    readings=[first, *others],
                    finished=[found, *map(self._finish, others)],
                    sizes=self.rows.sizes,
                    along=along,
                    rounds=number * rounds,
                    passes=number,
                    rule=rule,
                    share=share,
                    slower=slower,
                )
        raise AssertionError("the last pass returns")

    def _finish(self, reading: MethodReading) -> FederationFit:
        """Return the minimiser of the rows and the sample's covariance, from final messages at an estimate."""
        return self.space.finish(self.space.W @ reading.estimate, self.options)
