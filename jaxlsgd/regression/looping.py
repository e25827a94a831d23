"""Local SGD in whitened coordinates, pass after pass, until its own variance is small enough."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxlsgd.regression import pilot as pilots
from jaxlsgd.regression import running
from jaxlsgd.regression.options import STEPS, Options
from jaxlsgd.regression.reading import Reading, read
from jaxlsgd.regression.rows import Rows
from jaxlsgd.schedules import Plan

FloatArray = NDArray[np.floating[Any]]


class Along(NamedTuple):
    """The estimate of the first method along the way, on the scale of the table."""

    round: int
    estimate: FloatArray  # (d,)
    run_error: FloatArray  # (d,) the run's own standard error


class Finished(NamedTuple):
    """A run that has reached its end."""

    readings: list[Reading]  # by method
    moments: list[pilots.Moments]  # by method, at its estimate
    along: list[Along]
    plan: Plan
    passes: int
    rule: pilots.Rule
    share: float  # of the sample's variance that the run adds to it, largest, of the first method
    slower: float  # 1, or the factor by which the rule's steps were too long


class Run:
    """Local SGD in whitened coordinates, pass after pass."""

    def __init__(
        self,
        rows: Rows,
        loss: pilots.Loss,
        theta: FloatArray,
        asked: Options,
    ) -> None:
        self.rows, self.loss, self.asked = rows, loss, asked
        before = pilots.moments(loss, rows.X, rows.y, rows.client, rows.p, theta)
        self.W = pilots.whitening(before.G)
        self.start = np.linalg.solve(self.W, theta)
        self.back = rows.coordinates.back @ self.W
        self.batches = np.maximum(1.0, rows.sizes / STEPS)
        self.rule = self._rule(theta)
        self.data, self.setting = self._data()
        self.width = running.padded(int(np.ceil(rows.sizes.max() / STEPS)))

    def _rule(self, theta: FloatArray) -> pilots.Rule:
        rows, W = self.rows, self.W
        A = rows.X @ W
        loss = self.loss._replace(ridge=np.zeros(len(theta)))
        found = pilots.moments(loss, A, rows.y, rows.client, rows.p, self.start)
        penalty = W.T @ np.diag(self.loss.ridge) @ W
        found = found._replace(
            hessians=found.hessians + penalty, gradients=found.gradients + penalty @ self.start
        )
        second = self.loss.family.second(np, A @ self.start, rows.y, self.loss.tuning)
        lever = second**2 * np.sum(A**2, axis=1)
        ends = np.searchsorted(rows.client, np.arange(len(rows.p) + 1))
        fourth = np.stack(
            [(A[i:j].T * lever[i:j]) @ A[i:j] / (j - i) for i, j in itertools.pairwise(ends)]
        )
        share = 1.0 if self.asked.fresh else self.asked.share
        found = pilots.rule(
            found,
            fourth,
            rows.p,
            rows.sizes,
            self.batches,
            self.back,
            STEPS,
            share,
            self.asked.local_steps,
        )
        return found._replace(passes=1) if self.asked.fresh else found

    def _data(self) -> tuple[running.ClientRows, running.Setting]:
        rows = self.rows
        length, K, d = running.padded(int(rows.sizes.max())), len(rows.sizes), len(self.W)
        A, y = np.zeros((K, length, d), np.float32), np.zeros((K, length), np.float32)
        place = np.arange(len(rows.y)) - np.repeat(np.cumsum(rows.sizes) - rows.sizes, rows.sizes)
        A[rows.client, place] = rows.X @ self.W
        y[rows.client, place] = rows.y
        penalty = self.W.T @ np.diag(self.loss.ridge) @ self.W
        numbers = (np.asarray(one, np.float32) for one in (rows.p, self.loss.tuning, penalty))
        return running.ClientRows(A, y), running.Setting(*numbers)

    def go(self, slower: float) -> Finished | None:
        """Runs until the run's variance is small enough; None where it diverged."""
        asked, E = self.asked, self.rule.E
        rng = np.random.default_rng([asked.seed, 2])
        order = running.with_replacement if asked.target == "sample" else running.reshuffled
        rounds = STEPS // E
        carried = running.start(asked.methods, self.start)
        data, setting = running.on_device(self.data), running.on_device(self.setting)
        along: list[Along] = []
        limit = 1 if asked.fresh else asked.max_passes
        for number in range(1, limit + 1):
            m = np.arange((number - 1) * rounds, number * rounds) + 1.0
            eta = (slower * self.rule.eta * m**-pilots.ALPHA).astype(np.float32)
            taken = order(rng, self.rows.sizes, rounds * E, E, self.width)
            carried, _ = running.run_pass(
                self.loss.family.derivatives, asked.methods, data, setting, taken, eta, carried
            )
            if not np.isfinite(carried.x).all():
                return None
            first = read(asked.methods[0], carried.states[0], self._plan(number, slower))
            along.append(self._along(first, number * rounds))
            if number >= min(self.rule.passes, limit):
                if not np.isfinite(first.estimate).all():
                    return None
                found = self._moments(first)
                share = self._share(first, found)
                if asked.fresh or share <= asked.share or number == limit:
                    return self._finish(carried, found, along, number, slower, share)
        raise AssertionError("the last pass returns")

    def _plan(self, passes: int, slower: float) -> Plan:
        rounds = passes * (STEPS // self.rule.E)
        eta = slower * self.rule.eta * np.arange(1, rounds + 1.0) ** -pilots.ALPHA
        return Plan.from_arrays(np.full(rounds, self.rule.E), eta)

    def _moments(self, reading: Reading) -> pilots.Moments:
        rows = self.rows
        theta = self.W @ reading.estimate
        return pilots.moments(self.loss, rows.X, rows.y, rows.client, rows.p, theta)

    def table(self, reading: Reading) -> FloatArray:
        """An estimate on the scale of the table."""
        return self.rows.coordinates.coefficients(self.W @ reading.estimate)

    def _along(self, reading: Reading, round: int) -> Along:
        variance = np.einsum("ij,jk,ik->i", self.back, reading.matrix, self.back)
        return Along(round, self.table(reading), np.sqrt(np.maximum(variance, 0)))

    def sample(self, found: pilots.Moments) -> FloatArray:
        """The sample's covariance of the coefficients."""
        half = self.rows.coordinates.back @ np.linalg.inv(found.G)
        return half @ found.sample(self.rows.p, self.asked.variance == "pooled") @ half.T

    def _share(self, reading: Reading, found: pilots.Moments) -> float:
        ours = np.einsum("ij,jk,ik->i", self.back, reading.matrix, self.back)
        return float(np.max(ours / np.diagonal(self.sample(found))))

    def _finish(
        self,
        carried: running.Carried,
        found: pilots.Moments,
        along: list[Along],
        passes: int,
        slower: float,
        share: float,
    ) -> Finished:
        plan = self._plan(passes, slower)
        pairs = zip(self.asked.methods, carried.states, strict=True)
        readings = [read(method, state, plan) for method, state in pairs]
        moments = [found, *(self._moments(one) for one in readings[1:])]
        rule = self.rule._replace(eta=self.rule.eta * slower)
        return Finished(readings, moments, along, plan, passes, rule, share, slower)
