"""Wrong combinations of problem, algorithm, method and plan: refused at once, with a reason, and nothing written."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused

from jaxlsgd import (
    Draws,
    Problem,
    algorithms,
    fit,
    one_step,
    plug_in,
    problems,
    random_scaling,
    simulate,
)
from jaxlsgd.core.problem import has_curvature
from jaxlsgd.inference.rivals.higrad import grow, higrad
from jaxlsgd.runs.cell import Cell
from jaxlsgd.schedules import Plan, constant, power_decay
from jaxlsgd.study import Study


@functools.cache
def plan(rounds: int = 7) -> Plan:
    return constant(2).plan(power_decay(0.5), num_rounds=rounds)


def _gap(x: Any, seen: Any) -> Any:
    return seen[0] @ x - seen[1]


LOSSES = {
    "absolute": lambda x, seen: jnp.abs(_gap(x, seen)),
    "quantile": lambda x, seen: jnp.maximum(0.3 * _gap(x, seen), -0.7 * _gap(x, seen)),
    "quantile by where": lambda x, seen: _gap(x, seen) * jnp.where(_gap(x, seen) > 0, 0.3, -0.7),
    "median of each": lambda x, seen: jnp.sum(jnp.abs(x - seen[0])),
    "linear": lambda x, seen: seen[0] @ x,
}
CURVED = {
    # Far from where it is curved: flat at x_0 for all that a few observations can tell.
    "huber": lambda x, seen: jnp.where(
        jnp.abs(_gap(x, seen) - 1e6) < 1, _gap(x, seen) ** 2, jnp.abs(_gap(x, seen))
    ),
    "squares": lambda x, seen: 0.5 * _gap(x, seen) ** 2,
    "distance": lambda x, seen: jnp.sqrt(jnp.sum((x - seen[0]) ** 2)),
}


def with_loss(loss: Any) -> Problem:
    def observe(draws: Any, client: Any) -> Any:
        del client
        return draws.normal[:2], draws.normal[2]

    return Problem(np.zeros(2), loss, 2, draws=Draws(normal=3), observe=observe, name="own")


@pytest.mark.parametrize("loss", LOSSES)
def test_methods_with_hessians_ask_for_a_second_derivative(loss: str):
    problem = with_loss(LOSSES[loss])
    finite = random_scaling("finite")
    for method in (plug_in(), plug_in("finite"), one_step(), finite):
        with refused("methods", "unsupported", method.name, "random_scaling()"):
            Cell(problem, plan(), (method,))
    assert Cell(problem, plan(), (random_scaling(),)).methods


@pytest.mark.parametrize("loss", CURVED)
def test_losses_that_are_curved_somewhere_are_taken(loss: str):
    assert has_curvature(with_loss(CURVED[loss]))


def test_a_given_hessian_counts():
    flat = with_loss(LOSSES["absolute"])
    given = dataclasses.replace(flat, hessian=lambda x, seen: jnp.eye(2))
    assert not has_curvature(flat) and has_curvature(given)


@pytest.mark.parametrize(
    "algorithm",
    [algorithms.server_adam(), algorithms.scaffold(), algorithms.participation(2)],
    ids=lambda algorithm: algorithm.name,
)
def test_laws_of_local_sgd_are_for_local_sgd(algorithm: Any):
    problem, method = problems.linear(2, 3), random_scaling("finite")
    for run in (fit, functools.partial(simulate, replications=1)):
        with refused("algorithm", "unsupported", method.name, algorithm.name):
            run(jax.random.key(0), problem, plan(), methods=method, algorithm=algorithm)
    assert Cell(problem, plan(), (random_scaling(),), algorithm=algorithm).methods


def test_higrad_asks_for_a_horizon_that_its_tree_divides():
    problem = problems.linear(2, 4, heterogeneity=0.0)
    with refused("plan", "value", "3 levels"):
        grow(problem, plan())
    tree = grow(problem, plan(6))
    for run in (fit, functools.partial(simulate, replications=1)):
        with refused("plan", "value", "5 rounds", "higrad[2x2]"):
            run(
                jax.random.key(0),
                tree.problem,
                plan(4),
                methods=tree.method,
                algorithm=tree.algorithm,
            )
    assert higrad((2,), (9,)).least_rounds == 10


STUDIES = {
    "finite horizon": (
        {"methods": ["random_scaling[finite]"], "algorithms": ["server_adam"]},
        ("problem linear", "unsupported", "algorithm: ", "random_scaling[finite]"),
    ),
    "nobody takes part": (
        {"algorithms": [{"kind": "participation", "clients": 0}]},
        ("algorithms[0].clients", "value"),
    ),
    "more than there are": (
        {"algorithms": [{"kind": "participation", "clients": 4}]},
        ("problem linear", "unsupported", "4 clients", "participation"),
    ),
}


@pytest.mark.parametrize("case", STUDIES)
def test_a_study_is_refused_before_anything_is_written(case: str, tmp_path: Path):
    parts, why = STUDIES[case]
    where = tmp_path / "results"
    given: dict[str, Any] = {
        "problems": [{"kind": "linear", "dim": 2, "num_clients": 3, "gamma0": 0.5}],
        "schedules": ["C1"],
        "horizons": [8],
        "methods": ["random_scaling"],
        "replications": 2,
    }
    with refused(*why):
        Study(**(given | parts)).run(where)
    assert not where.exists()
