"""The contracts: one table of problems and methods, and what must hold for every pair of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import NO_LAW, paper_plan
from jax import lax
from refusals import Why, refused

from jaxlsgd import (
    Accumulator,
    Draws,
    Estimator,
    Measurement,
    MethodRows,
    Problem,
    Sync,
    fit,
    plug_in,
    problems,
    random_scaling,
    simulate,
)
from jaxlsgd.core.forms import dense
from jaxlsgd.core.problem import flatten
from jaxlsgd.engine.draws import replication_keys
from jaxlsgd.inference.oracle import oracle
from jaxlsgd.inference.rivals.bootstrap import bootstrap
from jaxlsgd.inference.rivals.equal_batches import equal_batches
from jaxlsgd.inference.rivals.growing_batches import growing_batches
from jaxlsgd.inference.rivals.parallel_runs import parallel_runs
from jaxlsgd.schedules import Plan, constant, power_decay

ROUNDS = 6


def _observe_pair(draws: Draws, client: Any) -> tuple[jax.Array, jax.Array]:
    a = draws.normal[:2]
    return a, jnp.sum(a * jnp.array([1.0, -1.0])) + 0.5 + client * 0.1 + draws.normal[2]


def _dict_loss(params: Any, observation: Any) -> jax.Array:
    a, b = observation
    return 0.5 * (jnp.sum(a * params["slope"]) + params["level"] - b) ** 2


def _pytree() -> Problem:
    """Parameters in a dict, derivatives by JAX; client k's level is 0.5 + 0.1 k."""
    return Problem(
        init={"slope": np.zeros(2), "level": np.zeros(())},
        loss=_dict_loss,
        num_clients=3,
        draws=Draws(normal=3),
        observe=_observe_pair,
        truth={"slope": np.array([1.0, -1.0]), "level": 0.6},
    )


def _sample_pair(key: jax.Array, client: Any) -> tuple[jax.Array, jax.Array]:
    return _observe_pair(Draws(jax.random.normal(key, (3,))), client)


def _sampled() -> Problem:
    """The same by `sample`."""
    return Problem(
        init={"slope": np.zeros(2), "level": np.zeros(())},
        loss=_dict_loss,
        num_clients=3,
        sample=_sample_pair,
        truth={"slope": np.array([1.0, -1.0]), "level": 0.6},
    )


def _dataset() -> Problem:
    rng = np.random.default_rng(4)
    features = [rng.normal(size=(n, 3)) for n in (20, 5, 41)]
    targets = [a @ [1.0, -0.5, 0.2] + 0.3 * rng.normal(size=len(a)) for a in features]
    return problems.dataset(features, targets, loss="squared")


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "linear": functools.cache(lambda: problems.linear(3, 3)),
    "logistic": functools.cache(lambda: problems.logistic(3, 3, weights=(0.5, 0.3, 0.2))),
    "regression": functools.cache(lambda: problems.regression(3, 3, "huber", spread=0.5)),
    "dataset": functools.cache(_dataset),
    "pytree": functools.cache(_pytree),
    "sampled": functools.cache(_sampled),
}
METHODS: dict[str, Estimator] = {
    "full": random_scaling(),
    "diagonal": random_scaling(mode="diagonal"),
    "contrasts": random_scaling(contrasts=[[1.0, -1.0, 0.0], [0.0, 0.5, 0.5]]),
    "schedule": random_scaling(critical="schedule"),
    "finite scaling": random_scaling("finite"),
    "plug-in": plug_in(),
    "finite plug-in": plug_in("finite"),
    "scaling of observations": random_scaling(average="observations"),
    "plug-in of observations": plug_in("finite", average="observations"),
}
# Copies are single parameters here.
RIVALS: dict[str, Estimator] = {
    "overlapping batches": growing_batches(),
    "batches apart": growing_batches("nonoverlapping", C=0.05),
    "equal batches": equal_batches(c=2.0),
    "bootstrap": bootstrap(2, 1),
    "parallel runs": parallel_runs(3, 1),
    "oracle": oracle(np.eye(3), np.eye(3), horizon="finite"),
}
METHODS |= RIVALS
# A method sees `Sync` alone, so that one problem is as good as another: every method with one problem, and every
# problem with one method that uses gradients and Hessians.
CASES = [("pytree", method) for method in METHODS]
CASES += [(problem, "finite plug-in") for problem in PROBLEMS if problem != "pytree"]
every_case = pytest.mark.parametrize(("problem", "method"), CASES)
PLAN = paper_plan("C5", num_rounds=ROUNDS)


@functools.cache
def syncs(name: str, count: int = 2) -> Sync:
    """Synchronisations of `count` replications of a problem, leaves (count, ROUNDS, ...)."""
    problem = PROBLEMS[name]()
    functions = problem.structure().flat_functions()
    weights = jnp.asarray(problem.weights, jnp.float32)
    clients = jax.tree.map(_single, problem.clients)
    start = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), problem.init)

    source = problem.sample or problem.observe
    assert source is not None

    def one(x: jax.Array, drawn: Any, E: jax.Array, eta: jax.Array) -> Sync:
        seen = jax.vmap(source)(drawn, clients)
        gradient = weights @ jax.vmap(lambda *at: dense(functions.gradient(*at)), (None, 0))(
            x, seen
        )
        hessians = jax.vmap(lambda *at: dense(functions.hessian(*at)), (None, 0))(x, seen)
        hessian = jnp.tensordot(weights, hessians, 1)
        return Sync(functions.unravel(x), E, eta, functions.unravel(gradient), hessian)

    rng, shape = np.random.default_rng(6), (count, ROUNDS)
    x = np.asarray(flatten(start)) + 0.3 * rng.standard_normal((*shape, problem.dim), np.float32)
    if problem.draws is None:
        drawn: Any = jax.random.split(jax.random.key(1), (*shape, problem.num_clients))
    else:
        sizes = [(*shape, problem.num_clients, size) for size in problem.draws]
        drawn = Draws(rng.standard_normal(sizes[0], np.float32), rng.uniform(0.01, 0.99, sizes[1]))
    E, eta = PLAN.E.astype(np.float32), PLAN.eta.astype(np.float32)
    found = jax.jit(jax.vmap(jax.vmap(one), (0, 0, None, None)))(x, drawn, E, eta)
    return jax.tree.map(np.asarray, found)  # NumPy slices need no compilation


def _single(leaf: Any) -> jax.Array:
    leaf = np.asarray(leaf)
    return jnp.asarray(leaf.astype(np.float32) if leaf.dtype == np.float64 else leaf)


def at(tree: Any, *index: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], tree)


def start_of(problem: str) -> Any:
    """Parameters of one replication, in float32."""
    return at(syncs(problem), 0, 0).params


def assert_close(one: Any, other: Any, rtol: float = 1e-5) -> None:
    chex.assert_trees_all_equal_dtypes(one, other)
    chex.assert_trees_all_close(one, other, rtol=rtol, atol=1e-6)


@every_case
def test_an_update_leaves_shapes_and_dtypes_alone(problem: str, method: str):
    estimator = METHODS[method]
    for dtype in (jnp.float32, jnp.float64):
        with jax.enable_x64(dtype == jnp.float64):
            sync = jax.tree.map(lambda x, to=dtype: jnp.asarray(x, to), at(syncs(problem), 0, 0))
            state = jax.eval_shape(estimator.init, sync.params)
            after = jax.eval_shape(estimator.update, state, sync)
            chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
            assert {leaf.dtype for leaf in jax.tree.leaves(state)} <= {
                dtype(0).dtype,
                np.dtype("i4"),
            }


@every_case
def test_jit_is_eager(problem: str, method: str):
    estimator = METHODS[method]
    state = estimator.init(start_of(problem))
    sync = at(syncs(problem), 0, 0)
    state = estimator.update(state, sync)
    for m in (1, 2):
        sync = at(syncs(problem), 0, m)
        eager, jitted = estimator.update(state, sync), _jit_update(estimator)(state, sync)
        assert_close(eager, jitted)
        state = eager


@functools.cache
def _jit_update(estimator: Estimator) -> Any:
    return jax.jit(estimator.update)


@functools.cache
def scanned(problem: str, method: str) -> Any:
    """States of both replications after a user's own scan, vmapped."""
    estimator = METHODS[method]

    def one(rounds: Sync) -> Any:
        state = estimator.init(at(rounds, 0).params)
        return lax.scan(lambda s, sync: (estimator.update(s, sync), None), state, rounds)[0]

    return jax.tree.map(np.asarray, jax.jit(jax.vmap(one))(syncs(problem)))


@every_case
def test_vmap_and_scan_are_loops(problem: str, method: str):
    estimator = METHODS[method]
    for r in range(2):
        state = estimator.init(at(syncs(problem), r, 0).params)
        for m in range(ROUNDS):
            state = _jit_update(estimator)(state, at(syncs(problem), r, m))
        assert_close(at(scanned(problem, method), r), state)


@every_case
def test_an_interval_in_a_users_own_loop(problem: str, method: str):
    estimator, case = METHODS[method], PROBLEMS[problem]()
    state = at(scanned(problem, method), 0)
    interval = estimator.interval(state, level=0.9, plan=PLAN)
    width = len(estimator.coordinates(case))
    for field in interval:
        assert field.shape == (width,)
        assert np.isfinite(field).all()
    assert (interval.lower < interval.estimate).all()
    assert (interval.estimate < interval.upper).all()
    wider = estimator.interval(state, level=0.99, plan=PLAN)
    assert (wider.upper > interval.upper).all()
    path = np.stack([flatten(at(syncs(problem), 0, m).params) for m in range(ROUNDS)])
    steps = [float(at(syncs(problem), 0, m).E) for m in range(ROUNDS)]
    mean = np.average(path, axis=0, weights=steps if "observations" in method else None)
    expected = np.asarray(estimator.contrasts) @ mean if estimator.contrasts else mean
    np.testing.assert_allclose(interval.estimate, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_every_problem_runs_in_the_engine_with_every_method(problem: str):
    case = PROBLEMS[problem]()
    methods = tuple(
        method if name not in ("diagonal", "contrasts") else _named(method, name)
        for name, method in METHODS.items()
        if problem == "pytree" or name not in RIVALS
    )
    result = simulate(
        jax.random.key(2),
        case,
        constant(5).plan(power_decay(0.5), num_steps=60),
        replications=4,
        tile_size=4,
        methods=methods,
        levels=(0.9, 0.99),
        devices=jax.devices()[:1],
    )
    for method in methods:
        rows = result.methods[method.name]
        assert rows.ok.all()
        assert rows.estimate.shape == (1, 4, len(method.coordinates(case)))
        assert (rows.half_width[:, 1] > rows.half_width[:, 0]).all()
        truth = result.truth[method.name]
        assert truth is not None
        assert truth.shape == rows.estimate.shape[-1:]
    full, diagonal = (result.methods[name] for name in ("random_scaling", "diagonal"))
    np.testing.assert_allclose(full.scale, diagonal.scale, rtol=1e-4)


def _named(method: Estimator, name: str) -> Estimator:
    if name == "diagonal":
        return random_scaling(mode="diagonal", name=name)
    return random_scaling(contrasts=method.contrasts, name=name)


def test_plug_in_says_what_it_misses():
    for method in (plug_in(), plug_in("finite"), random_scaling("finite")):
        state = method.init(jnp.zeros(2))
        with refused("sync", "missing", "gradient", "hessian"):
            method.update(state, Sync(jnp.zeros(2), 1, 0.1))
    for method in (plug_in("finite"), random_scaling("finite")):
        state = method.init(jnp.zeros(2))
        with refused("plan", "missing"):
            method.interval(state, 0.95)


def test_random_scaling_needs_no_gradient():
    state = random_scaling().init({"x": jnp.zeros(2)})
    after = random_scaling().update(state, Sync({"x": jnp.ones(2)}, 1, 0.1))
    np.testing.assert_array_equal(after[0].mean, [1.0, 1.0])


def test_sample_and_draws_are_the_same_model():
    """The same model by both contracts: estimates agree up to Monte-Carlo error.

    Three coordinates, means and variances: six comparisons at 4.5 standard errors, a false-alarm
    rate of 4e-5. A level that is off by 0.1 is 40 of them.
    """
    plan, count = paper_plan("C5", num_steps=60), 256
    found = [
        simulate(
            jax.random.key(3),
            make(),
            plan,
            replications=count,
            tile_size=count,
            methods=(random_scaling(),),
            devices=jax.devices()[:1],
        )
        .methods["random_scaling"]
        .estimate[-1]
        for make in (PROBLEMS["pytree"], PROBLEMS["sampled"])
    ]
    difference = found[0].mean(axis=0) - found[1].mean(axis=0)
    error = np.sqrt(found[0].var(axis=0) / count + found[1].var(axis=0) / count)
    assert (np.abs(difference) < 4.5 * error).all()
    assert (error < 0.1 / 4.5).all()  # it would be seen
    # log of a ratio of two variances of normals: standard error √(2·2/(n − 1))
    ratio = np.log(found[0].var(axis=0) / found[1].var(axis=0))
    assert (np.abs(ratio) < 4.5 * np.sqrt(4 / (count - 1))).all()


def test_a_sampled_observation_depends_on_replication_step_and_client_only():
    seen: dict[str, np.ndarray] = {}

    def sample(key: jax.Array, client: Any) -> jax.Array:
        return jax.random.normal(key, (1,)) + 10.0 * client

    case = Problem(init=np.zeros(1), sample=sample, loss=lambda x, o: jnp.sum(x * o), num_clients=2)
    # One round of one step of size one: x̄ = −Σ p_k ξ_k of step 0.
    for name, E in {"one": [1, 1, 1], "other": [1, 2]}.items():
        plan = Plan.from_arrays(E, np.ones(len(E)))
        rows = simulate(
            jax.random.key(4),
            case,
            plan,
            replications=3,
            tile_size=3,
            methods=(random_scaling(beta=0.0),),
            save_at=(1,),
            devices=jax.devices()[:1],
        )
        seen[name] = rows.methods["random_scaling"].estimate
    np.testing.assert_array_equal(seen["one"][0], seen["other"][0])
    keys = replication_keys(jax.random.key(4), jnp.arange(3))
    for r in range(3):
        step = jax.random.fold_in(jax.random.clone(keys[r]), 0)
        draws = [
            sample(jax.random.fold_in(jax.random.clone(step), k), jnp.float32(k)) for k in range(2)
        ]
        np.testing.assert_allclose(seen["one"][0, r], -np.mean(draws, axis=0), rtol=1e-5)


def test_fit_speaks_the_problems_language():
    case = PROBLEMS["pytree"]()
    result = fit(
        jax.random.key(5),
        case,
        paper_plan("C5", num_steps=60),
        methods=(plug_in(), plug_in("finite")),
    )
    assert set(result.estimate) == {"slope", "level"}
    assert result.estimate["slope"].shape == (2,)
    assert result.estimate["level"].shape == ()
    text = str(result)
    for name in ("['level']", "['slope'][0]", "['slope'][1]", "plug_in[finite]"):
        assert name in text
    at_truth, at_zero = (result.test("plug_in", null) for null in (case.truth, 0.0))
    assert (at_truth.p_value > at_zero.p_value).all()
    np.testing.assert_allclose(at_truth.null, [0.6, 1.0, -1.0])
    interval = result.interval("plug_in")
    touching = result.test("plug_in", {"level": interval.upper[0], "slope": interval.lower[1:]})
    np.testing.assert_allclose(touching.p_value, 0.05, rtol=1e-6)


# Statistics of one's own, which keep numbers: some the same in all replications, some not.


class Mean(NamedTuple):
    """The mean of the first coordinate along the path, and its largest value."""

    total: jax.Array  # (), of a replication
    largest: jax.Array  # (), of a replication
    rounds: jax.Array  # (), of the plan


def _mean_init(params: jax.Array) -> Mean:
    zero = jnp.zeros((), params.dtype)
    return Mean(zero, zero - jnp.inf, jnp.zeros((), jnp.int32))


def _mean_update(state: Mean, sync: Sync) -> Mean:
    first = sync.params[0]
    return Mean(state.total + first, jnp.maximum(state.largest, first), state.rounds + 1)


def _bare_init(params: jax.Array) -> jax.Array:
    return jnp.zeros((), params.dtype)


def _bare_update(state: jax.Array, sync: Sync) -> jax.Array:
    return state + sync.params[0]


def _mean_measure(states: Any, horizon: Any) -> Measurement:
    del horizon
    mean, total = states
    both = jnp.stack([mean.total, total]) / mean.rounds
    return Measurement(both, jnp.stack([mean.largest] * 2), mean.largest > 0)


def numbers(shared: tuple[str, ...] = ("rounds",)) -> Estimator:
    parts = (Accumulator(_mean_init, _mean_update, shared=shared), BARE)
    return Estimator("numbers", parts, _mean_measure, NO_LAW, contrasts=((1.0, 0.0, 0.0),) * 2)


BARE = Accumulator(_bare_init, _bare_update)
NUMBERS = numbers()
WHERE: dict[str, Callable[[], dict[str, Any]]] = {
    "one device": lambda: {"devices": jax.devices()[:1]},
    "two devices": lambda: {"devices": jax.devices()[:2]},
}


@functools.cache
def with_numbers(where: str) -> dict[str, MethodRows]:
    return simulate(
        jax.random.key(7),
        PROBLEMS["linear"](),
        PLAN,
        replications=4,
        tile_size=2,
        methods=(random_scaling(), NUMBERS),
        save_at=(2,),
        **WHERE[where](),
    ).methods


@pytest.mark.parametrize("where", WHERE)
def test_a_replication_has_numbers_of_its_own(where: str):
    found = with_numbers(where)
    ours, expected = found["numbers"], found["random_scaling"].estimate[..., :1]
    assert len(np.unique(expected[-1])) == 4  # as the replications differ
    np.testing.assert_allclose(ours.estimate, np.repeat(expected, 2, axis=-1), rtol=1e-5)
    assert (ours.scale >= ours.estimate - 1e-6).all()  # the largest is not below the mean
    np.testing.assert_array_equal(ours.floored, ours.scale[..., 0] > 0)


def test_a_fit_has_numbers_of_its_own():
    result = fit(jax.random.key(7), PROBLEMS["linear"](), PLAN, methods=(NUMBERS,), replication=3)
    many = with_numbers("one device")["numbers"]
    np.testing.assert_allclose(result.rows["numbers"].estimate[-1, 0], many.estimate[-1, 3], 1e-5)
    mean, total = result.states["numbers"]
    assert [np.shape(leaf) for leaf in (*mean, total)] == [()] * 4
    assert mean.rounds == ROUNDS
    np.testing.assert_allclose(mean.total, total)


@pytest.mark.parametrize(
    ("shared", "why"),
    [
        (("m",), ("methods (numbers).shared", "unknown", "'m'")),
        (
            ("rounds", "total"),
            ("methods (numbers).shared", "value", "'total'"),
        ),
    ],
)
def test_what_is_not_shared_cannot_be_declared_so(shared: tuple[str, ...], why: Why):
    with refused(*why):
        fit(jax.random.key(0), PROBLEMS["linear"](), PLAN, methods=(numbers(shared),))


def test_a_state_that_changes_its_kind_is_refused():
    wrong = BARE._replace(update=lambda state, sync: sync.params)
    method = Estimator("wrong", (wrong,), _mean_measure, NO_LAW)
    why = ("methods (wrong).update", "shape", "float32[3]")
    with refused(*why):
        fit(jax.random.key(0), PROBLEMS["linear"](), PLAN, methods=(method,))
