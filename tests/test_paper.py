"""The paper's Tables 3 and 4 at t_T = 5,000: lengths and coverage of the first coordinate."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import numpy as np
import pytest
from engine_helpers import paper_plan

from jaxlsgd import plug_in, random_scaling, simulate
from jaxlsgd.problems import paper_problem
from jaxlsgd.schedules import PAPER_SCHEDULES

RUNS, NUM_STEPS = 1_000, 5_000
# A false alarm at 4 standard errors has a probability of 6e-5 per comparison; there are 29.
K_SIGMA = 4.0
METHODS = (plug_in(), random_scaling(critical="paper"))
PLUG_IN, SCALING = (method.name for method in METHODS)


class Printed(NamedTuple):
    """A cell of the paper: coverage in per cent, and length in 1e-2 with its standard deviation."""

    coverage: float
    length: float
    deviation: float  # of the length over the 1,000 runs


# Li, Liang, Chang and Zhang, "Statistical Estimation and Inference via Local SGD in Federated
# Learning" (2021), Table 4 (logistic regression) and Table 3 (linear), columns t_T = 5000.
TABLES = {
    "logistic": {
        PLUG_IN: {
            "C1": Printed(94.70, 4.113, 0.046),
            "C5": Printed(93.00, 5.081, 0.118),
            "Log": Printed(92.30, 6.347, 0.175),
            "P(1/3)": Printed(92.70, 5.949, 0.146),
            "P(1/2)": Printed(90.80, 8.062, 0.256),
        },
        SCALING: {
            "C1": Printed(95.50, 5.112, 2.302),
            "C5": Printed(96.00, 7.296, 3.714),
            "Log": Printed(97.60, 9.703, 5.176),
            "P(1/3)": Printed(96.10, 8.499, 4.465),
            "P(1/2)": Printed(94.40, 10.574, 5.688),
        },
    },
    "linear": {
        PLUG_IN: {
            "C1": Printed(95.70, 7.857, 0.099),
            "C5": Printed(93.70, 9.737, 0.242),
            "Log": Printed(91.70, 12.168, 0.371),
            "P(1/3)": Printed(91.90, 11.372, 0.336),
            "P(1/2)": Printed(91.10, 15.431, 0.559),
        },
        SCALING: {
            "C1": Printed(95.00, 10.011, 4.343),
            "C5": Printed(97.70, 14.434, 6.950),
            "Log": Printed(98.20, 19.187, 9.763),
            "P(1/3)": Printed(97.60, 16.781, 8.397),
            "P(1/2)": Printed(96.00, 20.888, 10.842),
        },
    },
}


@functools.cache
def cell(model: str, schedule: str) -> dict[str, Printed]:
    """A cell of ours, run once, as the paper would print it."""
    problem = paper_problem(model)
    plan = paper_plan(schedule, problem.gamma0, num_steps=NUM_STEPS)
    rows = simulate(jax.random.key(2021), problem, plan, replications=RUNS, methods=METHODS)
    found = {}
    for name, method in rows.methods.items():
        assert method.ok.all()
        half, estimate = method.half_width[-1, 0, :, 0], method.estimate[-1, :, 0]
        covered = np.abs(estimate - rows.truth[name][0]) <= half
        found[name] = Printed(100 * covered.mean(), 200 * half.mean(), 200 * half.std())
    return found


def coverage_distance(ours: Printed, theirs: Printed) -> float:
    """In combined standard errors; a proportion's is taken at the mean of both."""
    p = (ours.coverage + theirs.coverage) / 200
    return abs(ours.coverage - theirs.coverage) / 100 / math.sqrt(2 * p * (1 - p) / RUNS)


def length_distance(ours: Printed, theirs: Printed) -> float:
    error = math.hypot(ours.deviation, theirs.deviation) / math.sqrt(RUNS)
    return abs(ours.length - theirs.length) / error


every_schedule = pytest.mark.parametrize("schedule", PAPER_SCHEDULES)


@pytest.mark.for_users
@every_schedule
def test_table_4(schedule: str):
    ours = cell("logistic", schedule)
    theirs = {name: table[schedule] for name, table in TABLES["logistic"].items()}
    assert ours[PLUG_IN].length == pytest.approx(theirs[PLUG_IN].length, rel=0.005)
    assert length_distance(ours[SCALING], theirs[SCALING]) < K_SIGMA
    for name in ours:
        assert coverage_distance(ours[name], theirs[name]) < K_SIGMA


@pytest.mark.for_users
@every_schedule
def test_table_3(schedule: str):
    """Lengths are compared as ratios to C1: the paper does not say which x*_k it drew."""
    ours, base = cell("linear", schedule), cell("linear", "C1")
    for name, table in TABLES["linear"].items():
        assert coverage_distance(ours[name], table[schedule]) < K_SIGMA
        ratios = [_ratio(ours[name], base[name]), _ratio(table[schedule], table["C1"])]
        if name == PLUG_IN:
            assert ratios[0][0] == pytest.approx(ratios[1][0], rel=0.005)
        elif schedule != "C1":
            error = math.hypot(ratios[0][1], ratios[1][1])
            assert abs(ratios[0][0] - ratios[1][0]) < K_SIGMA * error


def _ratio(top: Printed, bottom: Printed) -> tuple[float, float]:
    """A ratio of mean lengths with its standard error, the two taken as independent."""
    ratio = top.length / bottom.length
    relative = math.hypot(top.deviation / top.length, bottom.deviation / bottom.length)
    return ratio, ratio * relative / math.sqrt(RUNS)


@pytest.mark.for_users
def test_the_tables_tell_schedules_apart():
    """A planted bug: one schedule's cell for another's is refused."""
    ours, table = cell("logistic", "C5"), TABLES["logistic"]
    assert abs(ours[PLUG_IN].length / table[PLUG_IN]["P(1/3)"].length - 1) > 0.1
    assert length_distance(ours[SCALING], table[SCALING]["P(1/3)"]) > K_SIGMA
