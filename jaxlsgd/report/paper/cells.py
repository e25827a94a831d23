"""The simulations behind the paper's Tables 3 and 4 and Figures 1 to 3, each run once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxlsgd.core.estimator import Estimator
from jaxlsgd.core.rows import CellRows
from jaxlsgd.inference.plug_in import plug_in
from jaxlsgd.inference.random_scaling import random_scaling
from jaxlsgd.problems import PAPER_STEP, paper_problem
from jaxlsgd.report.paper.numbers import LEVEL
from jaxlsgd.runs.simulation import simulate
from jaxlsgd.schedules import PAPER_SCHEDULES, Plan, paper, power_decay

WARMUP = 0.05  # of the observations in tables, of the rounds in figures
_POINTS = 25  # of a figure's curve

PAPER_METHODS: tuple[Estimator, ...] = (plug_in(), random_scaling(critical="paper"))
OUR_METHODS: tuple[Estimator, ...] = (plug_in("finite"), random_scaling(critical="finite_horizon"))


class Job(NamedTuple):
    """A simulation of a model under a schedule: for a table by t_T, or for a figure by rounds T."""

    model: str
    schedule: str
    num_steps: int = 0
    num_rounds: int = 0

    @property
    def plan(self) -> Plan:
        """The paper's plan: γ_m = γ_0 m^(−0.505), and a warm-up of E = 1."""
        step, schedule = power_decay(PAPER_STEP[self.model]), paper(self.schedule)
        if not self.num_rounds:
            return schedule.with_warmup(WARMUP).plan(step, num_steps=self.num_steps)
        # E_m = E'_(m − 5 % T): of a figure, whose axis is T, the first 5 % rounds.
        first = round(WARMUP * self.num_rounds)
        rest = schedule.intervals(self.num_rounds - first)
        E = np.concatenate([np.ones(first, np.int64), rest])
        return Plan(E, step.effective(len(E)) / E, schedule, step, first)


def table_jobs(model: str, horizons: Sequence[int]) -> list[Job]:
    """The cells of Table 3 or 4, the paper's methods and ours."""
    return [Job(model, name, steps) for steps in horizons for name in PAPER_SCHEDULES]


def figure_jobs(model: str, horizons: Sequence[int]) -> list[Job]:
    """The paths of a figure: of every schedule as many rounds T as the fastest can make.

    P(1/2), which uses most observations a round, makes T of the longest horizon.
    """
    step = power_decay(PAPER_STEP[model])
    rounds = paper("P(1/2)").plan(step, num_steps=max(horizons)).num_rounds
    return [Job(model, name, num_rounds=rounds) for name in PAPER_SCHEDULES]


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
        plan, figure = job.plan, job.num_rounds > 0
        return simulate(
            self._key,
            paper_problem(job.model),
            plan,
            replications=self.replications,
            # Ours would have to be computed anew at every point of a curve.
            methods=PAPER_METHODS if figure else PAPER_METHODS + OUR_METHODS,
            levels=(LEVEL,),
            save_at=_points(plan) if figure else None,
            progress=lambda share: self._tell(job, share),
        )


def _points(plan: Plan) -> list[int]:
    """Rounds evenly spaced on a logarithmic axis, from a quarter of the warm-up on."""
    first = max(2, plan.warmup_rounds // 4)
    return np.unique(np.geomspace(first, plan.num_rounds, _POINTS).round().astype(int)).tolist()
