"""What a method says of a run, in float64, for every linear combination of its coordinates at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from jaxlsgd.core.estimator import Estimator
from jaxlsgd.inference.joint import measure_in_float64
from jaxlsgd.regression import local_sgd
from jaxlsgd.regression import pilot as pilots
from jaxlsgd.regression.options import STEPS, Options
from jaxlsgd.regression.standardise import Rows, along, gram, times
from jaxlsgd.schedules import Plan

FloatArray = NDArray[np.floating[Any]]


class Reading(NamedTuple):
    """An estimate, its matrix and its law, in the coordinates of the run."""

    method: Estimator
    estimate: FloatArray  # (d,)
    matrix: FloatArray  # (d, d)
    detail: Any
    plan: Plan
    floored: bool

    def multiplier(self, level: float, side: str = "both") -> float:
        """The critical value of a combination: where those of coordinates differ, the largest."""
        return float(np.max(self.method.law.half(level, side, self.plan, self.detail)))

    def tail(self, statistic: FloatArray) -> FloatArray:
        """Two-sided p-values; where those of coordinates differ, the largest."""
        d = len(self.estimate)
        each = [
            np.max(self.method.law.tail(np.full(d, one), self.plan, self.detail))
            for one in np.ravel(statistic)
        ]
        return np.asarray(each, np.float64).reshape(np.shape(statistic))

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know of the run."""
        found = () if self.method.notes is None else tuple(self.method.notes(self.detail))
        floor = ("a numerical floor acted: the interval is regularised",) if self.floored else ()
        return found + floor


def read(method: Estimator, states: Any, plan: Plan) -> Reading:
    """Reads a method's states.

    Args:
      method: one with a matrix.
      states: what its `update` returned.
      plan: the rounds that were run.
    """
    found, matrix = measure_in_float64(method, states, plan)
    matrix = np.asarray(matrix, np.float64)
    detail = jax.tree.map(np.asarray, found.detail)
    estimate = np.asarray(found.estimate, np.float64)
    return Reading(method, estimate, (matrix + matrix.T) / 2, detail, plan, bool(found.floored))


ONE_PASS_STEPS = 1000
_READINGS = 10  # of the estimate, about, along the way
DIVERGED = (
    "the run diverged, even with steps 64 times smaller than the pilot's; is a row an outlier?"
)


class Along(NamedTuple):
    """The estimate of the first method along the way, on the scale of the table."""

    round: int
    estimate: FloatArray  # (d,)
    run_error: FloatArray  # (d,) the run's own standard error


class Finished(NamedTuple):
    """A run that has reached its end."""

    readings: list[Reading]  # by method
    samples: list[FloatArray]  # by method, the sample's covariance of the table's coefficients
    left: FloatArray  # (d,) Newton's step from the first estimate to the minimiser of the rows
    sizes: NDArray[np.int64]  # (K,) rows that were met
    along: list[Along]
    plan: Plan
    passes: int
    rule: pilots.Rule
    share: float  # of the sample's variance that the run adds to it, largest, of the first method
    slower: float  # 1, or the factor by which the rule's steps were too long


class Whitened:
    """Rows of a pilot, and the coordinates in which their Hessian is I."""

    def __init__(self, rows: Rows, loss: pilots.Loss, theta: FloatArray) -> None:
        self.rows, self.loss = rows, loss
        self.theta = theta
        self.moments = pilots.moments(loss, rows.X, rows.y, rows.client, rows.p, theta)
        self.W = pilots.whitening(self.moments.G)
        self.start = np.linalg.solve(self.W, theta)
        self.back = rows.coordinates.back @ self.W
        self.penalty = self.W.T @ np.diag(loss.ridge) @ self.W

    def rule(
        self, sizes: NDArray[np.int64], batches: FloatArray, steps: int, asked: Options
    ) -> pilots.Rule:
        """Steps and length for clients of these sizes, with these batches in each of the steps."""
        rows, loss = self.rows, self.loss
        A = times(rows.X, self.W)
        second = loss.family.second(np, along(rows.X, self.theta), rows.y, loss.tuning)
        root = second * np.sqrt(np.einsum("ij,ij->i", A, A))
        A *= root[:, None]
        ends = np.cumsum(rows.sizes) - rows.sizes
        fourth = np.stack(
            [gram(A[i : i + n], A[i : i + n]) / n for i, n in zip(ends, rows.sizes, strict=True)]
        )
        found = self.moments.turned(self.W)
        share = 1.0 if asked.fresh else asked.share
        asks = pilots.Asks(rows.p, sizes, batches, self.back, steps, share, asked.local_steps)
        chosen = pilots.rule(found, fourth, asks)
        return chosen._replace(passes=1) if asked.fresh else chosen

    def setting(self) -> local_sgd.Setting:
        """The numbers of a pass."""
        numbers = (self.rows.p, self.loss.tuning, self.penalty)
        return local_sgd.Setting(*(np.asarray(one, np.float32) for one in numbers))

    def table(self, reading: Reading) -> FloatArray:
        """An estimate on the scale of the table."""
        return self.rows.coordinates.coefficients(self.W @ reading.estimate)

    def covariance(self, reading: Reading) -> FloatArray:
        """The run's own, on the scale of the table."""
        return self.back @ reading.matrix @ self.back.T

    def along(self, reading: Reading, round: int) -> Along:
        """The estimate after a round, with the run's own error."""
        variance = np.diagonal(self.covariance(reading))
        return Along(round, self.table(reading), np.sqrt(np.maximum(variance, 0)))


def plan_of(rule: pilots.Rule, rounds: int) -> Plan:
    """The rounds that were run."""
    eta = rule.eta * np.arange(1, rounds + 1.0) ** -pilots.ALPHA
    return Plan.from_arrays(np.full(rounds, rule.E), eta)


def etas(rule: pilots.Rule, before: int, rounds: int) -> Any:
    """η_m of some rounds, after those before."""
    m = np.arange(before, before + rounds) + 1.0
    return (rule.eta * m**-pilots.ALPHA).astype(np.float32)


class Run:
    """Local SGD in whitened coordinates, pass after pass."""

    def __init__(
        self,
        space: Whitened,
        asked: Options,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self.space, self.rows, self.asked = space, space.rows, asked
        self.progress = progress or (lambda text: None)
        sizes = self.rows.sizes
        # One pass needs many rounds of its own, to tell its noise from them.
        self.steps = min(ONE_PASS_STEPS, int(sizes.min())) if asked.fresh else STEPS
        batches = np.maximum(1.0, sizes / self.steps)
        self.rule = space.rule(sizes, batches, self.steps, asked)
        self.width = local_sgd.padded(int(np.ceil(sizes.max() / self.steps)))
        self.data = local_sgd.ClientRows(
            *local_sgd.by_client(times(self.rows.X, space.W), self.rows.y, sizes, int(sizes.max()))
        )

    def go(self, slower: float) -> Finished | None:
        """Runs until the run's variance is small enough; None where it diverged."""
        asked, rule = self.asked, self.rule._replace(eta=self.rule.eta * slower)
        E, rounds = rule.E, self.steps // rule.E
        rng = np.random.default_rng([asked.seed, 2])
        order = local_sgd.with_replacement if asked.target == "sample" else local_sgd.reshuffled
        carried = local_sgd.start(asked.methods, self.space.start)
        data, setting = local_sgd.on_device((self.data, self.space.setting()))
        along: list[Along] = []
        limit = 1 if asked.fresh else asked.max_passes
        every = max(1, min(rule.passes, limit) // _READINGS)
        for number in range(1, limit + 1):
            eta = etas(rule, (number - 1) * rounds, rounds)
            taken = order(rng, self.rows.sizes, rounds * E, E, self.width)
            carried, _ = local_sgd.run_pass(
                self.space.loss.family.derivatives,
                asked.methods,
                data,
                setting,
                taken,
                eta,
                carried,
            )
            if not np.isfinite(carried.x).all():
                return None
            self.progress(f"pass {number} of about {rule.passes}")
            enough = number >= min(self.rule.passes, limit)
            if not enough and number % every:
                continue
            first = read(asked.methods[0], carried.states[0], plan_of(rule, number * rounds))
            along.append(self.space.along(first, number * rounds))
            if enough:
                if not np.isfinite(first.estimate).all():
                    return None
                found = self._moments(first)
                share = self._share(first, found)
                if asked.fresh or share <= asked.share or number == limit:
                    self.progress("")
                    return self._finish(carried, found, along, number, rule, share)
        raise AssertionError("the last pass returns")

    def _moments(self, reading: Reading) -> pilots.Moments:
        rows = self.rows
        theta = self.space.W @ reading.estimate
        return pilots.moments(self.space.loss, rows.X, rows.y, rows.client, rows.p, theta)

    def sample(self, found: pilots.Moments) -> FloatArray:
        """The sample's covariance of the coefficients."""
        half = self.rows.coordinates.back @ np.linalg.inv(found.G)
        return half @ found.sample(self.rows.p, self.asked.variance == "pooled") @ half.T

    def _share(self, reading: Reading, found: pilots.Moments) -> float:
        ours = np.diagonal(self.space.covariance(reading))
        return float(np.max(ours / np.diagonal(self.sample(found))))

    def _finish(
        self,
        carried: local_sgd.Carried,
        found: pilots.Moments,
        along: list[Along],
        passes: int,
        rule: pilots.Rule,
        share: float,
    ) -> Finished:
        plan = plan_of(rule, passes * (self.steps // rule.E))
        pairs = zip(self.asked.methods, carried.states, strict=True)
        readings = [read(method, state, plan) for method, state in pairs]
        samples = [self.sample(found), *(self.sample(self._moments(one)) for one in readings[1:])]
        back = self.rows.coordinates.back
        left = back @ np.linalg.solve(found.G, self.rows.p @ found.gradients)
        sizes, slower = self.rows.sizes, rule.eta / self.rule.eta
        return Finished(readings, samples, left, sizes, along, plan, passes, rule, share, slower)
