"""Problems made of other problems, in study files: minibatches, copies for the bootstrap, groups that split."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from refusals import Why, refused

from jaxlsgd import problems, simulate
from jaxlsgd.inference.rivals.bootstrap import bootstrap, perturbed
from jaxlsgd.inference.rivals.parallel_runs import parallel_runs, split
from jaxlsgd.report.page.provenance import study_file
from jaxlsgd.report.page.text import question
from jaxlsgd.schedules import paper, power_decay
from jaxlsgd.study import Results, Study

# The bootstrap's weights are made of the bits of the draws.
pytestmark = pytest.mark.for_users

LINEAR = '{kind = "linear", dim = 2, num_clients = 4, heterogeneity = 0}'
FILE = f"""
problems = [
  {{kind = "minibatch", problem = {LINEAR}, size = 3, gamma0 = 0.5}},
  {{kind = "perturbed", problem = {LINEAR}, copies = 4, gamma0 = 0.5}},
  {{kind = "split_clients", problem = {LINEAR}, leaves = 2, gamma0 = 0.5, name = "halves"}},
]
schedules = ["C5"]
horizons = [40]
methods = [
  "random_scaling",
  {{kind = "bootstrap", copies = 4, dim = 2}},
  {{kind = "parallel_runs", runs = 2, dim = 2}},
]
algorithms = ["local_sgd", {{kind = "federation_tree", dim = 2, branches = [2], splits = [0]}}]
replications = 4
tile_size = 4
cross = false
extra = [
  {{problem = "linear-3", schedule = "C5", num_steps = 40, methods = ["random_scaling"]}},
  {{problem = "linear-x5", schedule = "C5", num_steps = 40, methods = ["bootstrap[sd]"]}},
  {{problem = "halves", schedule = "C5", num_steps = 40, methods = ["parallel_runs"], algorithm = "federation_tree"}},
]
"""


def study() -> Study:
    return Study.from_dict(tomllib.loads(FILE))


def test_a_study_file_of_wrapped_problems_runs_as_python_does(tmp_path: Path):
    asked = study()
    assert asked.run(tmp_path / "results", devices=jax.devices()[:1]).exit_code == 0
    found = {cell.problem: cell for cell in Results(tmp_path / "results").read_all()}
    plain, plan = (
        problems.linear(2, 4, heterogeneity=0),
        paper("C5").plan(power_decay(0.5), num_steps=40),
    )
    apart = split(plain, 2)
    for name, problem, method, more in (
        ("linear-x5", perturbed(plain, 4), bootstrap(4), {}),
        ("halves", apart.problem, parallel_runs(2), {"algorithm": apart.algorithm}),
    ):
        rows = simulate(
            jax.random.key(0), problem, plan, replications=4, tile_size=4, methods=method, **more
        ).methods[method.name]
        again = found[name].methods[method.name]
        np.testing.assert_allclose(again.estimate, rows.estimate, rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(again.half_width, rows.half_width, rtol=1e-3)
    assert found["linear-3"].methods["random_scaling"].estimate.shape == (1, 4, 2)


def test_what_is_kept_of_it_is_the_same_study():
    """As JSON in a directory of results, and as a study file on its page."""
    asked = study()
    kept = Study.read(asked.plain())
    assert kept.plain() == asked.plain() and kept.digest == asked.digest
    assert kept.problems == asked.problems and hash(kept.problems) == hash(asked.problems)
    assert kept.problems[0].built().made.dim == 2
    written = Study.from_dict(tomllib.loads(study_file(asked)))
    assert written.problems == asked.problems
    assert (
        "(minibatch): 2 parameters, 4 clients, equal client weights, problem linear, size 3"
        in str(question(asked, {}, ()))
    )
    assert asked.problems[0].plain()["arguments"]["problem"]["num_clients"] == 4


def nested(depth: int) -> Any:
    table: Any = {"kind": "linear", "dim": 2, "num_clients": 2}
    for _ in range(depth):
        table = {"kind": "minibatch", "problem": table, "size": 1}
    return table | {"gamma0": 0.5}


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        ({"kind": "minibatch", "size": 2}, ("problems[0].problem", "missing")),
        (
            {"kind": "minibatch", "problem": "linaer", "size": 2},
            ("problems[0].problem.kind", "choice", "'linear'"),
        ),
        (
            {
                "kind": "minibatch",
                "problem": {"kind": "linear", "dim": 0, "num_clients": 2},
                "size": 2,
            },
            ("problems[0].problem.dim", "value"),
        ),
        ({"kind": "minibatch", "problem": 3, "size": 2}, ("problems[0].problem", "type")),
        (
            {"kind": "minibatch", "problem": problems.linear(2, 2), "size": 2},
            ("problems[0].problem", "type", "Problem('linear'"),
        ),
        (nested(6), ("problems[0].problem.problem.problem.problem.problem", "value", "4 times")),
    ],
)
def test_what_is_refused(problem: dict[str, Any], why: Why):
    with refused(*why):
        Study(problems=[{"gamma0": 0.5} | problem], schedules=["C1"], horizons=[8])
    assert Study(problems=[nested(3)], schedules=["C1"], horizons=[8]).cells
