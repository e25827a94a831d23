"""Bad input is refused at once, with the argument, the rule and the value in the message."""

# Wrong types are passed on purpose.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import Why, refused

from jaxlsgd import (
    Draws,
    Plan,
    Problem,
    Study,
    fit,
    plug_in,
    problems,
    random_scaling,
    schedules,
    simulate,
)
from jaxlsgd.analysis import looks, measures
from jaxlsgd.core import checks
from jaxlsgd.engine import machine
from jaxlsgd.runs import simulate as simulation
from jaxlsgd.runs.cell import Cell
from jaxlsgd.schedules import constant, custom, custom_step, power, power_decay

NAN = float("nan")


def sample(key: jax.Array, client: Any) -> jax.Array:
    return jax.random.normal(key, (3,))


@pytest.mark.parametrize(
    ("name", "hint"),
    [("x[7]", ""), ("X[1]", "x[1]"), ("P(1/3)", "P(1/2)"), ("one_stp", "one_step"), ("w", "")],
)
def test_the_nearest_name_is_one_that_was_meant(name: str, hint: str) -> None:
    found = checks.nearest(name, ["x[1]", "x[3]", "P(1/2)", "one_step"])
    assert found == (f"; did you mean {hint!r}?" if hint else "")


def loss(params: Any, observation: Any) -> jax.Array:
    return jnp.sum((params - observation) ** 2)


def problem(**changes: Any) -> Problem:
    given = {"init": np.zeros(3), "sample": sample, "loss": loss, "num_clients": 3}
    return Problem(**(given | changes))


def named(**changes: Any) -> Problem:
    """Parameters a, of two numbers, and b, of one."""
    given = {"init": {"a": np.zeros(2), "b": 0.0}, "loss": lambda x, o: jnp.sum(x["a"]) * x["b"]}
    return problem(**(given | changes))


@functools.cache
def good() -> tuple[Problem, Plan]:
    return problems.linear(3, 3), constant(5).plan(power_decay(0.5), num_steps=50)


def run(**changes: Any) -> Any:
    given = {
        "key": jax.random.key(0),
        "problem": good()[0],
        "plan": good()[1],
        "replications": 2,
    } | changes
    return simulate(given.pop("key"), given.pop("problem"), given.pop("plan"), **given)


def run_once(**changes: Any) -> Any:
    given = {"key": jax.random.key(0), "problem": good()[0], "plan": good()[1]} | changes
    return fit(given.pop("key"), given.pop("problem"), given.pop("plan"), **given)


class Refusal(NamedTuple):
    """What is tried, and the argument, the rule and the value that the message must have."""

    attempt: Callable[[], Any]
    argument: str
    rule: str
    value: str


def study(**changes: Any) -> Study:
    given = {
        "problems": [good()[0]],
        "schedules": ["C1"],
        "horizons": [40],
        "methods": [plug_in()],
    }
    return Study(**(given | changes))


def contrasts(rows: Any) -> Any:
    return random_scaling(contrasts=rows)


TABLE: dict[str, Refusal] = {
    # weights
    "weights sum": Refusal(lambda: problem(weights=[0.5, 0.5, 0.5]), "weights", "sum to 1", "1.5"),
    "weights negative": Refusal(
        lambda: problem(weights=[1.5, -0.25, -0.25]), "weights[1]", "not be negative", "-0.25"
    ),
    "weights NaN": Refusal(lambda: problem(weights=[NAN, 0.5, 0.5]), "weights[0]", "finite", "nan"),
    "weights of another length": Refusal(
        lambda: problem(weights=[0.5, 0.5]), "weights", "shape (3,)", "(2,)"
    ),
    "weights of linear": Refusal(
        lambda: problems.linear(2, 2, weights=[0.2, 0.2]), "weights", "sum to 1", "0.4"
    ),
    "weights of logistic": Refusal(
        lambda: problems.logistic(2, 2, weights=[1.2, -0.2]),
        "weights[1]",
        "not be negative",
        "-0.2",
    ),
    # sizes
    "no clients": Refusal(lambda: problem(num_clients=0), "num_clients", "at least 1", "0"),
    "half a client": Refusal(lambda: problem(num_clients=2.5), "num_clients", "integer", "2.5"),
    "linear, no clients": Refusal(lambda: problems.linear(3, 0), "num_clients", "from 1 to", "0"),
    "linear, no dimension": Refusal(lambda: problems.linear(0, 3), "dim", "from 1 to", "0"),
    "logistic, no dimension": Refusal(lambda: problems.logistic(0, 3), "dim", "from 1 to", "0"),
    "no parameters": Refusal(
        lambda: problem(init=np.zeros(0)), "init", "at least one parameter", "none"
    ),
    "no replications": Refusal(lambda: run(replications=0), "replications", "from 1 to", "0"),
    "more replications than can be": Refusal(
        lambda: run(replications=2**31), "replications", "from 1 to 100000000", "2147483648"
    ),
    "half a replication": Refusal(lambda: run(replications=2.5), "replications", "integer", "2.5"),
    "no tile": Refusal(lambda: run(tile_size=0), "tile_size", "at least 1", "0"),
    "replication before 0": Refusal(
        lambda: run_once(replication=-1), "replication", "at least 0", "-1"
    ),
    # intervals and step sizes
    "E of 0": Refusal(lambda: Plan.from_arrays([2, 0], [0.1, 0.1]), "E[1]", "> 0", "0"),
    "E of 1.5": Refusal(lambda: Plan.from_arrays([1.5], [0.1]), "E[0]", "integer", "1.5"),
    "E of NaN": Refusal(lambda: Plan.from_arrays([NAN], [0.1]), "E[0]", "finite", "nan"),
    "constant 0": Refusal(lambda: constant(0), "E", "integer from 1", "0"),
    "constant 1.5": Refusal(lambda: constant(1.5), "E", "integer from 1", "1.5"),
    "custom 0": Refusal(lambda: custom([1, 0]), "sequence[1]", "> 0", "0"),
    "custom 2.5": Refusal(lambda: custom([2.5]), "sequence[0]", "integer", "2.5"),
    "eta NaN": Refusal(lambda: Plan.from_arrays([1], [NAN]), "eta[0]", "finite", "nan"),
    "eta 0": Refusal(lambda: Plan.from_arrays([1], [0.0]), "eta[0]", "> 0", "0.0"),
    "gamma0 NaN": Refusal(lambda: power_decay(NAN), "gamma0", "finite", "nan"),
    "alpha NaN": Refusal(lambda: power_decay(0.5, NAN), "alpha", "finite", "nan"),
    "alpha 1": Refusal(lambda: power_decay(0.5, 1.0), "alpha", "(1/2, 1)", "1.0"),
    "gammas NaN": Refusal(lambda: custom_step([0.5, NAN]), "sequence[1]", "finite", "nan"),
    "beta NaN": Refusal(lambda: power(NAN), "beta", "finite", "nan"),
    "beta 1": Refusal(lambda: power(1.0), "beta", "[0, 1)", "1.0"),
    "warm-up NaN": Refusal(lambda: constant(1).with_warmup(NAN), "fraction", "[0, 1)", "nan"),
    "num_steps smaller than the warm-up": Refusal(
        lambda: constant(5).with_warmup(0.9).plan(power_decay(0.5), num_steps=4),
        "num_steps",
        "after a warm-up of 4",
        "4",
    ),
    "num_steps of 0": Refusal(
        lambda: constant(5).plan(power_decay(0.5), num_steps=0), "num_steps", "at least 1", "0"
    ),
    "num_steps that no plan can write out": Refusal(
        lambda: constant(1).plan(power_decay(0.5), num_steps=10**8),
        "num_steps",
        "reached in at most 20000000 rounds",
        "100000000; a larger E or intervals that grow need fewer rounds",
    ),
    "num_rounds that no plan can write out": Refusal(
        lambda: constant(5).plan(power_decay(0.5), num_rounds=10**9),
        "num_rounds",
        "from 1 to 20000000",
        "1000000000",
    ),
    "intervals that cannot be written out": Refusal(
        lambda: power(0.5).intervals(10**9), "num_rounds", "from 1 to 20000000", "1000000000"
    ),
    "num_rounds smaller than the warm-up": Refusal(
        lambda: constant(5).with_warmup(0.99).plan(power_decay(0.5), num_rounds=3),
        "num_rounds",
        "after a warm-up of 3",
        "3",
    ),
    # NaN in what a problem is made of
    "init NaN": Refusal(lambda: problem(init=np.array([0, NAN, 0])), "init[1]", "finite", "nan"),
    "init infinite": Refusal(lambda: problem(init=np.full(3, np.inf)), "init[0]", "finite", "inf"),
    "truth NaN": Refusal(lambda: problem(truth=np.full(3, NAN)), "truth[0]", "finite", "nan"),
    "truth under other names": Refusal(
        lambda: named(truth={"A": 1.0, "b": [1.0, 2.0]}), "truth", "like init", "{'A': ()"
    ),
    "truth of lists of several lengths": Refusal(
        lambda: problem(truth=[[1.0], [2.0, 3.0]]), "truth", "like init", "[[()], [(), ()]]"
    ),
    "truth of another length": Refusal(
        lambda: problem(truth=np.zeros(2)), "truth", "3 parameters", "2"
    ),
    "clients NaN": Refusal(lambda: problem(clients=np.full(3, NAN)), "clients[0]", "finite", "nan"),
    "clients of another number": Refusal(
        lambda: problem(clients=np.zeros(2)), "clients", "num_clients = 3", "(2,)"
    ),
    "G NaN": Refusal(lambda: problem(G=np.full((3, 3), NAN)), "G[0, 0]", "finite", "nan"),
    "S of another shape": Refusal(lambda: problem(S=np.eye(2)), "S", "shape (3, 3)", "(2, 2)"),
    "noise NaN": Refusal(lambda: problems.linear(3, 3, noise=NAN), "noise", "finite", "nan"),
    "heterogeneity NaN": Refusal(
        lambda: problems.logistic(3, 3, heterogeneity=NAN), "heterogeneity", "finite", "nan"
    ),
    "client_truths NaN": Refusal(
        lambda: problems.linear(1, 2, client_truths=[[0.0], [NAN]]),
        "client_truths[1, 0]",
        "finite",
        "nan",
    ),
    "covariance NaN": Refusal(
        lambda: problems.linear(1, 2, covariance=[[NAN]]), "covariance[0, 0]", "finite", "nan"
    ),
    "features NaN": Refusal(
        lambda: problems.dataset([np.full((3, 2), NAN)], [np.zeros(3)], loss="squared"),
        "features[0][0, 0]",
        "finite",
        "nan",
    ),
    "contrasts NaN": Refusal(lambda: contrasts([[1.0, NAN]]), "contrasts[0, 1]", "finite", "nan"),
    "null NaN": Refusal(
        lambda: run_once(methods=plug_in()).test("plug_in", NAN), "null", "finite", "nan"
    ),
    # functions
    "loss is a vector": Refusal(
        lambda: problem(loss=lambda x, o: x - o), "loss", "return a scalar", "(3,)"
    ),
    "loss is a tuple": Refusal(
        lambda: problem(loss=lambda x, o: (jnp.sum(x), 1)), "loss", "return a scalar", "((), ())"
    ),
    "gradient of another length": Refusal(
        lambda: problem(gradient=lambda x, o: x[:2]), "gradient", "3 parameters", "(2,)"
    ),
    "gradient is a matrix": Refusal(
        lambda: problem(gradient=lambda x, o: x[None]), "gradient", "like init", "(1, 3)"
    ),
    "gradient under other names": Refusal(
        lambda: named(gradient=lambda x, o: {"A": x["b"], "b": x["a"]}),
        "gradient",
        "return a pytree like init, or one vector of all 3 parameters",
        "{'A': (), 'b': (2,)}",
    ),
    "hessian is a pair": Refusal(
        lambda: problem(hessian=lambda x, o: (x, x)), "hessian", "shape (3, 3)", "((3,), (3,))"
    ),
    "hessian is a vector": Refusal(
        lambda: problem(hessian=lambda x, o: x), "hessian", "shape (3, 3)", "(3,)"
    ),
    "sample's shape changes with the client": Refusal(
        lambda: problem(sample=lambda key, k: jax.random.normal(key, (int(k) + 1,))),
        "sample",
        "same shape for every client",
        "float32[1] for client 0 and float32[2] for client 1",
    ),
    "sample's shape is made of the client": Refusal(
        lambda: problem(sample=lambda key, k: jax.random.normal(key, (k + 1,))),
        "sample",
        "may not depend on the client",
        "TypeError",
    ),
    "sample branches on the client": Refusal(
        lambda: problem(sample=lambda key, k: jax.random.normal(key, (2 if k == 1 else 3,))),
        "sample",
        "may not depend on the client",
        "TracerBool",
    ),
    "sample's length is looked up": Refusal(
        lambda: problem(sample=lambda key, k: jax.random.normal(key, ([3, 3, 3][k],))),
        "sample",
        "may not depend on the client",
        "TracerInteger",
    ),
    "no source": Refusal(lambda: problem(sample=None), "sample", "either", "neither"),
    "two sources": Refusal(
        lambda: problem(draws=Draws(3), observe=lambda d, k: d.normal), "sample", "either", "both"
    ),
    "no declaration": Refusal(
        lambda: problem(sample=None, observe=lambda d, k: d.normal), "draws", "Draws(...)", "None"
    ),
    "negative draws": Refusal(
        lambda: problem(sample=None, draws=Draws(-1), observe=lambda d, k: d.normal),
        "draws.normal",
        "at least 0",
        "-1",
    ),
    # levels
    **{
        f"level {level!r}": Refusal(
            lambda x=level: run(levels=(x,)), "level", "between 0 and 1", f"{level}"
        )
        for level in (0.0, 1.0, -0.1, 95, NAN, True, "0.95")
    },
    "level of an interval": Refusal(
        lambda: plug_in().interval(plug_in().init(jnp.zeros(2)), 1.5),
        "level",
        "between 0 and 1",
        "1.5",
    ),
    "level that was not run": Refusal(
        lambda: run_once(methods=plug_in()).interval("plug_in", 0.5), "level", "0.95", "0.5"
    ),
    "no levels": Refusal(lambda: run(levels=()), "levels", "at least one", "()"),
    # contrasts
    "contrasts of width 2": Refusal(
        lambda: run(methods=contrasts([[1.0, -1.0]])), "contrasts", "3 columns", "(1, 2)"
    ),
    "contrasts of width 1": Refusal(
        lambda: run(methods=contrasts([[1.0]])), "contrasts", "3 columns", "(1, 1)"
    ),
    "contrasts for one parameter": Refusal(
        lambda: run(problem=problems.linear(1, 2), methods=contrasts([[1.0, 0.0]])),
        "contrasts",
        "1 columns",
        "(1, 2)",
    ),
    "contrasts of width 2 in a user's loop": Refusal(
        lambda: contrasts([[1.0, -1.0]]).init(jnp.zeros(3)), "contrasts", "3 columns", "(1, 2)"
    ),
    "contrasts without rows": Refusal(
        lambda: contrasts(np.zeros((0, 3))), "contrasts", "matrix", "(0, 3)"
    ),
    "contrasts that repeat": Refusal(
        lambda: contrasts([[1.0, 0.0], [2.0, 0.0]]), "contrasts", "independent", "rank 1"
    ),
    # keys
    "an untyped key": Refusal(
        lambda: run(key=jax.random.PRNGKey(0)), "key", "jax.random.key(0)", "uint32"
    ),
    "an untyped key in fit": Refusal(
        lambda: run_once(key=jax.random.PRNGKey(0)), "key", "jax.random.key(0)", "uint32"
    ),
    "a seed for a key": Refusal(lambda: run(key=0), "key", "jax.random.key(0)", "got 0"),
    "an rbg key": Refusal(
        lambda: run(key=jax.random.key(0, impl="rbg")), "key", "threefry2x32", "rbg"
    ),
    "two keys": Refusal(
        lambda: run(key=jax.random.split(jax.random.key(0))), "key", "one key", "(2,)"
    ),
    # the rest of a call
    "a name for a problem": Refusal(lambda: run(problem="linear"), "problem", "Problem", "linear"),
    "a name for a plan": Refusal(lambda: run(plan="C5"), "plan", "schedule.plan", "C5"),
    "a name for a method": Refusal(
        lambda: run(methods=["plug_in"]), "methods", "estimators", "plug_in"
    ),
    "no methods": Refusal(lambda: run(methods=()), "methods", "estimators", "()"),
    "a method twice": Refusal(
        lambda: run(methods=(plug_in(), plug_in())), "methods", "distinct", "plug_in"
    ),
    "float16": Refusal(lambda: run(dtype="float16"), "dtype", "float32, float64", "float16"),
    "save_at 0": Refusal(lambda: run(save_at=(0,)), "save_at", "1..10", "0"),
    "save_at beyond the end": Refusal(lambda: run(save_at=(3, 11)), "save_at", "1..10", "11"),
    "save_at 2.5": Refusal(lambda: run(save_at=(2.5,)), "save_at", "integers", "2.5"),
    "an unknown mode": Refusal(
        lambda: random_scaling(mode="half"), "mode", "full, diagonal", "half"
    ),
    "an unknown critical value": Refusal(
        lambda: random_scaling(critical="exact"), "critical", "asymptotic", "exact"
    ),
    "an unknown horizon": Refusal(lambda: plug_in("short"), "horizon", "asymptotic", "short"),
    "an unknown method of a fit": Refusal(
        lambda: run_once(methods=plug_in()).test("wald"), "method", "plug_in", "wald"
    ),
    "an unknown schedule": Refusal(lambda: schedules.paper("C7"), "name", "one of C1", "C7"),
    # studies
    "study, no replications": Refusal(
        lambda: study(replications=0), "replications", "integer from 1", "0"
    ),
    "study, half a tile": Refusal(lambda: study(tile_size=0.5), "tile_size", "integer", "0.5"),
    "study, level 95": Refusal(lambda: study(levels=[95]), "levels[0]", "between 0 and 1", "95"),
    "study, seed": Refusal(lambda: study(seed=-1), "seed", "integer from 0", "-1"),
    "study, float16": Refusal(
        lambda: study(dtype="float16"), "dtype", "float32, float64", "float16"
    ),
    "study, warm-up": Refusal(lambda: study(warmup=1), "warmup", "[0, 1)", "1"),
    "study, schedule": Refusal(lambda: study(schedules=["C7"]), "schedules[0]", "one of C1", "C7"),
    "study, problem": Refusal(lambda: study(problems=[3]), "problems[0]", "jaxlsgd.Problem", "3"),
    "study, plan for a method": Refusal(
        lambda: study(methods=[good()[1]]), "methods[0]", "jaxlsgd.Estimator", "Plan"
    ),
    "study, kind": Refusal(
        lambda: study(problems=["cubic"]), "problems[0].kind", "linear", "cubic"
    ),
    "study, argument": Refusal(
        lambda: study(problems=[{"kind": "linear", "dim": 2, "num_clients": 2, "noise": -1}]),
        "problems[0].noise",
        "at least 0",
        "-1",
    ),
    "study, save_at": Refusal(lambda: study(save_at=[1.5]), "save_at[0]", "(0, 1]", "1.5"),
}


@pytest.mark.parametrize("case", TABLE)
def test_refused(case: str):
    attempt, argument, rule, value = TABLE[case]
    with pytest.raises(ValueError) as caught:
        attempt()
    message = str(caught.value)
    assert message.startswith(f"{argument}: "), message
    assert rule in message, message
    # The value stands at the end, behind the rule, so that neither is taken for the other.
    received = re.split(r"got |\(", message, maxsplit=1)[-1]
    assert value in received, message


@pytest.mark.parametrize(
    ("init", "truth"),
    [
        (np.zeros(3), [1, 2, 3]),
        (np.zeros(3), (1.0, 2.0, 3.0)),
        ([0.0, 0.0, 0.0], np.array([1.0, 2.0, 3.0])),
        (np.zeros((3, 1)), [[1.0], [2.0], [3.0]]),
        ({"a": np.zeros(2), "b": 0.0}, {"a": np.array([1.0, 2.0]), "b": 3}),
        ({"a": np.zeros(2), "b": 0.0}, np.array([1.0, 2.0, 3.0])),
    ],
)
def test_truths_in_every_form_that_is_clear(init: Any, truth: Any):
    made = problem(init=init, truth=truth, loss=lambda x, o: sum(map(jnp.sum, jax.tree.leaves(x))))
    assert made.true_vector.tolist() == [1, 2, 3]


class Raises:
    def __repr__(self) -> str:
        raise KeyError("no")


class NoText:
    def __repr__(self) -> str:
        return 3  # pyright: ignore[reportReturnType]


class Text(str):
    def __repr__(self) -> str:
        raise KeyError("no")

    def __str__(self) -> str:
        raise KeyError("no")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Raises(), "(Raises whose repr raises KeyError)"),
        (NoText(), "(NoText whose repr raises TypeError)"),
        ([Raises()], "(list whose repr raises KeyError)"),
        (Text("abc"), "'abc'"),
    ],
)
def test_a_value_that_cannot_be_shown_is_refused_all_the_same(value: Any, words: str):
    assert checks.shown(value) == words
    attempts: list[Callable[[], Any]] = [
        lambda: run(key=value),
        lambda: run(problem=value),
        lambda: run(levels=(value,)),
        lambda: problem(sample=None, observe=lambda d, k: d.normal, draws=value),
        lambda: problems.linear(2, 2, client_truths=np.zeros((2, 2)), center=value),
        lambda: problems.dataset([np.zeros((3, 2))], [np.zeros(3)], loss=value),
        lambda: study(seed=value),
    ]
    for attempt in attempts:
        with pytest.raises(ValueError) as caught:
            attempt()
        assert words in str(caught.value)


def test_one_level_and_one_method_need_no_tuple():
    rows = run(levels=0.9, methods=plug_in(), save_at=3)
    assert rows.levels == (0.9,)
    assert rows.save_at == (3, 10)
    assert list(rows.methods) == ["plug_in"]
    assert run(methods=plug_in(), save_at=()).save_at == (10,)


@pytest.mark.parametrize("size", [1, 3])
def test_the_smallest_problems_are_not_refused(size: int):
    plan = constant(1).plan(power_decay(0.5), num_steps=size)
    rows = run(
        problem=problems.linear(1, 1), plan=plan, methods=plug_in(), devices=jax.devices()[:1]
    )
    assert rows.methods["plug_in"].estimate.shape == (1, 2, 1)


def test_more_replications_than_memory_has_room_for_are_refused_with_what_to_do(monkeypatch):
    monkeypatch.setattr(machine, "memory", lambda: 10**9)
    with refused("replications", "memory", "50000000", "Study"):
        run(replications=50_000_000)
    monkeypatch.setattr(machine, "memory", lambda: None)
    simulation._check_rows(Cell(*good(), (plug_in(),)), 50_000_000)  # where nothing is known


def test_the_rows_of_a_replication_are_counted_in_bytes():
    rows = run(methods=[plug_in(), random_scaling()], levels=(0.9, 0.95), save_at=3)
    cell = Cell(*good(), (plug_in(), random_scaling()), (0.9, 0.95), (3,))
    arrays = [x for m in rows.methods.values() for x in (m.estimate, m.scale, m.half_width)]
    # Beside them are what became of each replication, and whether it was floored.
    assert cell.row_bytes == sum(x.nbytes for x in arrays) / 2 + 2 * 2 * 2


@functools.cache
def fitted() -> Any:
    return fit(jax.random.key(0), *good(), methods=(plug_in(),), progress=False)


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (lambda: measures.coverage_table(5), ("cells", "type")),
        (lambda: measures.coverage_table(None), ("cells", "type")),
        (lambda: looks.looks_table(5), ("cells", "type")),
        (lambda: looks.looks_table([5]), ("cells", "type")),
        (lambda: fitted().test([]), ("method", "choice")),
        (lambda: fitted().test(null="x"), ("null", "type")),
        (lambda: fitted().test(null=[1.0, 2.0]), ("null", "shape")),
        (lambda: fitted().test(null={}), ("null", "shape")),
        (lambda: fitted().joint_test(null={}), ("null", "type")),
        (lambda: fitted().joint_test(null=[[1], [1, 2]]), ("null", "type")),
        (lambda: fitted().joint_test(contrasts="x"), ("contrasts", "type")),
        (lambda: fitted().joint_test(contrasts=[[1], [1, 2]]), ("contrasts", "type")),
        (lambda: fitted().function(5), ("g", "type")),
        (lambda: fitted().function(lambda x: "a"), ("g", "type")),
        (lambda: fitted().function(lambda x: {"a": x[0]}), ("g", "type")),
        (lambda: fitted().function(lambda x: 5), ("g", "value")),
        (lambda: fitted().function(lambda x: x[:, None] * x), ("g", "shape")),
    ],
)
def test_wrong_kinds_are_refused_by_what_reads_results(act: Callable[[], Any], why: Why) -> None:
    with refused(*why):
        act()


def test_an_error_in_a_function_of_the_parameters_is_its_own() -> None:
    with pytest.raises(ZeroDivisionError):
        fitted().function(lambda x: x[0] * (1 / 0))
