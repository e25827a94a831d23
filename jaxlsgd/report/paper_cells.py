"""The simulations behind the paper's Tables 3 and 4 and Figures 1 to 3, each run once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxlsgd.base import Estimator
from jaxlsgd.inference.plug_in import plug_in
from jaxlsgd.inference.random_scaling import random_scaling
from jaxlsgd.problems import PAPER_STEP, paper_problem
from jaxlsgd.report.paper_numbers import LEVEL
from jaxlsgd.rows import CellRows
from jaxlsgd.schedules import PAPER_SCHEDULES, Plan, paper, power_decay
from jaxlsgd.simulation import simulate

WARMUP = 0.05  # of the observations
_POINTS = 25  # of a figure's curve

PAPER_METHODS: tuple[Estimator, ...] = (plug_in(), random_scaling(critical="paper"))
OUR_METHODS: tuple[Estimator, ...] = (plug_in("finite"), random_scaling(critical="finite_horizon"))


class Job(NamedTuple):
    """A simulation: of a model under a schedule, read at its end or all along its path."""

    model: str
    schedule: str
    num_steps: int
    along: bool = False


def table_jobs(model: str, horizons: Sequence[int]) -> list[Job]:
    """The cells of Table 3 or 4, the paper's methods and ours."""
    return [Job(model, name, steps) for steps in horizons for name in PAPER_SCHEDULES]


def figure_jobs(model: str, horizons: Sequence[int]) -> list[Job]:
    """The paths of a figure; the paper's methods only, ours cost too much at every point."""
    return [Job(model, name, max(horizons), True) for name in PAPER_SCHEDULES]


def make_plan(job: Job) -> Plan:
    """The plan of the paper: γ_m = γ_0 m^(−0.505), and E = 1 for the first 5 % observations."""
    schedule = paper(job.schedule).with_warmup(WARMUP)
    return schedule.plan(power_decay(PAPER_STEP[job.model]), num_steps=job.num_steps)


class Runner:
    """Runs jobs when they are asked for, and each only once."""

    def __init__(
        self, replications: int, seed: int, tell: Callable[[Job, float], None] = lambda *_: None
    ) -> None:
        self.replications, self._key, self._tell = replications, jax.random.key(seed), tell
        self._done: dict[Job, CellRows] = {}

    def __call__(self, job: Job) -> CellRows:
        if job not in self._done:
            self._done[job] = self._run(job)
        return self._done[job]

    def _run(self, job: Job) -> CellRows:
        plan = make_plan(job)
        return simulate(
            self._key,
            paper_problem(job.model),
            plan,
            replications=self.replications,
            methods=PAPER_METHODS if job.along else PAPER_METHODS + OUR_METHODS,
            levels=(LEVEL,),
            save_at=_points(plan) if job.along else None,
            progress=lambda share: self._tell(job, share),
        )


def _points(plan: Plan) -> list[int]:
    """Rounds evenly spaced on a logarithmic axis, from a tenth of the warm-up on."""
    first = max(2, plan.warmup_rounds // 10)
    return np.unique(np.geomspace(first, plan.num_rounds, _POINTS).round().astype(int)).tolist()
