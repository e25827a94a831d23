"""The engine against a slow oracle with the same draws, and what its results may not depend on."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from engine_helpers import (
    PAPER_STEPS,
    Inside,
    counted_compilations,
    numpy_draws,
    paper_plan,
    run_inside,
)

from jaxlsgd import (
    Draws,
    Problem,
    algorithms,
    fit,
    plug_in,
    problems,
    random_scaling,
    schedules,
    simulate,
)
from jaxlsgd.core.causes import Cause
from jaxlsgd.engine import machine
from jaxlsgd.engine.layout import BLOCK_STEPS, SLOTS, lay_out
from jaxlsgd.schedules import PAPER_SCHEDULES, Plan

DIM, CLIENTS, TILE = 3, 3, 4
REPLICATIONS = (0, 3)  # of the tile, for the oracle
WEIGHTS = {"uniform": None, "weighted": (0.5, 0.3, 0.2)}
LONG = "long rounds"
# A float32 step rounds to 6e-8 and later steps contract its error: found are 7e-7 for iterates and
# 2e-6 for V̂. In float64 it is the oracle's raw sums that cancel, to 1e-13.
TOLERANCE = {"float32": 1e-5, "float64": 1e-12}


def key() -> jax.Array:
    return jax.random.key(20)


def device() -> list[jax.Device]:
    return jax.devices()[:1]


@functools.cache
def problem(model: str, weights: str) -> Problem:
    make = {"linear": problems.linear, "logistic": problems.logistic}[model]
    return make(
        DIM, CLIENTS, heterogeneity=0.7, weights=WEIGHTS[weights], init=np.array([1.0, -1.0, 0.5])
    )


@functools.cache
def plan(name: str, model: str) -> Plan:
    gamma0 = PAPER_STEPS[model]
    if name != LONG:
        return paper_plan(name, gamma0, num_rounds=200)
    # Rounds that are longer than a block, that end with one, and that leave blocks without an end.
    E = [1] * 15 + [16] * 12 + [BLOCK_STEPS] * 3 + [75, 1, 2, 90]
    return schedules.custom(E).plan(schedules.power_decay(gamma0), num_rounds=len(E))


@functools.cache
def draws(model: str) -> Draws:
    spec = problem(model, "uniform").draws
    assert spec is not None
    return numpy_draws(key(), REPLICATIONS, 1300, range(CLIENTS), spec)


@functools.cache
def engine_runs(model: str, weights: str, name: str, dtype: str) -> Inside:
    return run_inside(key(), problem(model, weights), plan(name, model), TILE, dtype)


class Reference:
    """What the oracle finds for one replication."""

    def __init__(self, model: str, weighting: str, name: str, which: int, **changes: Any) -> None:
        case, run_plan, drawn = problem(model, weighting), plan(name, model), draws(model)
        given = {
            "draws": oracle.Draws(drawn.normal[..., which], drawn.uniform[..., which]),
            "truths": case.clients.truth,
            "weights": case.weights,
            "init": case.init,
            "E": run_plan.E,
            "eta": run_plan.eta,
        } | changes
        self.run = oracle.local_sgd(oracle.MODELS[model], **given)
        self.V = oracle.random_scaling(self.run.averages, run_plan.E)[1]


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def path_distance(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest relative distance of an iterate, in norm."""
    found = found[: len(expected)]
    lengths = np.linalg.norm(expected, axis=1)
    return float(np.max(np.linalg.norm(found - expected, axis=1) / lengths))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", [*PAPER_SCHEDULES, LONG])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("model", ["linear", "logistic"])
def test_same_draws_give_what_the_oracle_finds(model: str, weights: str, name: str, dtype: str):
    found = engine_runs(model, weights, name, dtype)
    for which, replication in enumerate(REPLICATIONS):
        expected = Reference(model, weights, name, which)
        one = jax.tree.map(lambda leaf, r=replication: leaf[r], found)
        assert path_distance(one.path, expected.run.averages) < TOLERANCE[dtype]
        assert distance(one.G, expected.run.G) < TOLERANCE[dtype]
        assert distance(one.S, expected.run.S) < TOLERANCE[dtype]
        assert distance(one.V, expected.V) < TOLERANCE[dtype]


def test_many_clients():
    """More clients than the engine sums one by one."""
    many = 40
    case = problems.linear(DIM, many, weights=np.arange(1, many + 1) / (many * (many + 1) / 2))
    run_plan = paper_plan("C1", num_rounds=60)
    assert case.draws is not None
    drawn = numpy_draws(key(), [0], 61, range(many), case.draws)
    found = run_inside(key(), case, run_plan, TILE)
    expected = oracle.local_sgd(
        oracle.MODELS["linear"],
        oracle.Draws(drawn.normal[..., 0], drawn.uniform[..., 0]),
        case.clients.truth,
        case.weights,
        case.init,
        run_plan.E,
        run_plan.eta,
    )
    assert path_distance(found.path[0], expected.averages) < TOLERANCE["float32"]
    assert distance(found.G[0], expected.G) < TOLERANCE["float32"]
    assert distance(found.S[0], expected.S) < TOLERANCE["float32"]


def _rolled(model: str, which: int, by: int, axis: int) -> oracle.Draws:
    drawn = draws(model)
    return oracle.Draws(*(np.roll(x[..., which], by, axis) for x in drawn))


PLANTED = {
    "gradient at another sample": lambda: {"draws": _rolled("linear", 0, 1, 0)},
    "clients mixed up": lambda: {"draws": _rolled("linear", 0, 1, 1)},
    "another replication": lambda: {"draws": _rolled("linear", 1, 0, 0)},
    "weights ignored": lambda: {"weights": np.full(CLIENTS, 1 / CLIENTS)},
    "step size off by 1 %": lambda: {"eta": plan("C5", "linear").eta * 1.01},
    "one start for another": lambda: {"init": np.zeros(DIM)},
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_seen(bug: str):
    found = jax.tree.map(lambda leaf: leaf[0], engine_runs("linear", "weighted", "C5", "float32"))
    wrong = Reference("linear", "weighted", "C5", 0, **PLANTED[bug]())
    assert path_distance(found.path, wrong.run.averages) > 10 * TOLERANCE["float32"]
    if "start" not in bug:  # a start is forgotten, and Ĝ of a linear model never sees it
        assert distance(found.S, wrong.run.S) > 10 * TOLERANCE["float32"]
    if "sample" in bug:
        assert distance(found.G, wrong.run.G) > 10 * TOLERANCE["float32"]


def test_scaling_needs_the_intervals():
    found = engine_runs("linear", "weighted", "P(1/2)", "float64").V[0]
    path = Reference("linear", "weighted", "P(1/2)", 0).run.averages
    ignoring = oracle.random_scaling(path, np.ones(len(path)))[1]
    assert distance(found, ignoring) > 1e-2


def test_the_plans_above_use_every_kind_of_block():
    names = [*PAPER_SCHEDULES, LONG]
    used = {
        call.slots
        for name in names
        for group in lay_out(plan(name, "linear"), rooms=SLOTS[:1]).groups  # of small problems
        for call in group
    }
    assert used == {SLOTS[0], BLOCK_STEPS}


def test_masked_steps_stay_few():
    # One partial block at the end, whatever the schedule.
    for name in PAPER_SCHEDULES:
        made = lay_out(paper_plan(name, num_steps=5000))
        assert 1 - made.steps / made.drawn < 0.012


# What the results may not depend on.


METHODS = (random_scaling(), plug_in())


@functools.cache
def rows(name: str = "C1", **options: Any):
    case = problem("linear", "weighted")
    arguments = {"replications": 10, "tile_size": TILE, "methods": METHODS} | options
    arguments["devices"] = [jax.devices()[i] for i in options.get("devices", (0,))]
    return simulate(key(), case, paper_plan(name, num_steps=400), **arguments)


def assert_same_bits(one: Any, other: Any) -> None:
    a, b = (
        {name: dataclasses.asdict(rows) for name, rows in x.methods.items()} for x in (one, other)
    )
    chex.assert_trees_all_equal(a, b)


@pytest.mark.parametrize("devices", [(0, 1), (1, 0), (1,)])
def test_devices_and_their_order_do_not_change_a_bit(devices: tuple[int, ...]):
    assert_same_bits(rows(), rows(devices=devices))


def test_threads_of_a_cpu_compile_once_and_change_no_bit():
    """As many programs for two threads as for one, of objects that nothing was compiled for."""
    assert machine.chosen() == machine.chosen(2) == jax.local_devices()[:1] * 2

    def fresh(devices: Any) -> tuple[Any, int]:
        case = problem("linear", "weighted")
        case = dataclasses.replace(case, loss=functools.partial(case.loss))
        how = {"replications": 2 * TILE, "tile_size": TILE, "methods": METHODS, "devices": devices}
        with counted_compilations() as programs:
            made = simulate(key(), case, paper_plan("C5", num_steps=400), **how)
        return made, len(programs)

    fresh(1)  # what depends on no problem
    (one, programs), (two, again), (apart, more) = map(fresh, (1, 2, jax.local_devices()))
    assert_same_bits(one, two)
    assert_same_bits(one, apart)
    assert 0 < programs == again < more


def test_a_second_run_does_not_change_a_bit():
    one = rows()
    rows.cache_clear()
    assert_same_bits(one, rows())


def test_more_replications_leave_the_first_as_they_are():
    few, many = rows(replications=5), rows()
    for method in few.methods:
        np.testing.assert_array_equal(
            few.methods[method].estimate, many.methods[method].estimate[:, :5]
        )


@pytest.mark.parametrize("size", [1, 7])
def test_a_tile_of_another_size_follows_the_same_path(size: int):
    # The draws are the same bits; sums are ordered as XLA likes for a size, hence a tolerance.
    one, other = rows(), rows(tile_size=size)
    for method in one.methods:
        a, b = one.methods[method], other.methods[method]
        np.testing.assert_allclose(a.estimate, b.estimate, rtol=1e-5)
        np.testing.assert_allclose(a.scale, b.scale, rtol=1e-4)


def test_fit_is_one_replication_of_simulate():
    case, run_plan = problem("linear", "weighted"), paper_plan("C1", num_steps=400)
    one = fit(key(), case, run_plan, methods=METHODS, replication=6)
    for method in METHODS:
        many = rows().methods[method.name]
        interval = one.interval(method.name)
        np.testing.assert_allclose(interval.estimate, many.estimate[-1, 6], rtol=1e-5)
        half = (np.asarray(interval.upper) - np.asarray(interval.lower)) / 2
        np.testing.assert_allclose(half, many.half_width[-1, 0, 6], rtol=1e-4)


@pytest.mark.parametrize("name", ["C1", "P(1/2)"])
def test_saved_rounds_are_those_of_a_shorter_plan(name: str):
    case, whole = problem("linear", "weighted"), paper_plan(name, num_steps=400)
    save_at = (1, 7, 50, whole.num_rounds)
    saved = rows(name, save_at=save_at)
    assert saved.save_at == save_at
    assert saved.steps_at == tuple(whole.ends[np.array(save_at) - 1])
    assert_same_numbers(rows(name), saved, -1)
    for i, m in enumerate(save_at):
        cut = simulate(
            key(),
            case,
            whole.prefix(m),
            replications=10,
            tile_size=TILE,
            methods=METHODS,
            devices=device(),
        )
        assert_same_numbers(cut, saved, i)


def assert_same_numbers(one: Any, saved: Any, index: int) -> None:
    # Not the same bits: a cut moves the blocks' borders, and with them which of two programs, each
    # with its own order of multiplications and additions, runs a step.
    for method in one.methods:
        a, b = one.methods[method], saved.methods[method]
        np.testing.assert_allclose(a.estimate[-1], b.estimate[index], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(a.scale[-1], b.scale[index], rtol=1e-4, atol=1e-7)


def test_both_precisions_follow_the_same_path():
    single, double = rows(), rows(dtype="float64")
    for method in single.methods:
        np.testing.assert_allclose(
            single.methods[method].estimate, double.methods[method].estimate, rtol=1e-4
        )


def test_progress_rises_to_one():
    shares: list[float] = []
    rows.__wrapped__(progress=shares.append)
    assert shares == sorted(shares)
    assert shares[0] > 0
    assert shares[-1] == 1.0


# Compilations.


def small(num_steps: int, name: str = "C1", gamma0: float = 0.5, **changes: Any):
    case = problems.linear(2, 2, **changes)
    run_plan = paper_plan(name, gamma0, num_steps=num_steps)
    how = {"replications": 4, "tile_size": 4, "devices": device(), "methods": METHODS}
    return simulate(key(), case, run_plan, **how)


def test_schedules_horizons_and_steps_share_programs():
    with counted_compilations() as first:
        small(300)
        small(4000, "P(1/2)")  # its rounds go from 1 to 18 steps: all kinds of blocks
    assert first  # the counter counts
    with counted_compilations() as others:
        for name, steps, gamma0 in (
            ("C5", 100, 0.5),
            ("Log", 250, 0.3),
            ("P(1/3)", 731, 0.7),
            ("P(1/2)", 5000, 0.1),
            ("C1", 64, 0.5),
            ("C1", 1025, 0.2),
            ("Log", 2000, 0.6),
            ("C5", 3333, 0.45),
        ):
            small(steps, name, gamma0)
        small(300, truth_seed=7)
        small(300, weights=(0.9, 0.1), noise=0.3, heterogeneity=0.0)
    assert others == []


def test_the_same_call_again_compiles_nothing():
    methods = (*METHODS, plug_in("finite"))
    case, run_plan = problems.linear(2, 2), paper_plan("C5", num_steps=100)

    def call() -> None:
        simulate(
            key(), case, run_plan, replications=4, tile_size=4, methods=methods, devices=device()
        )

    call()
    with counted_compilations() as again:
        call()
    assert again == []


# Divergence.


def test_a_path_that_diverges_is_flagged_at_every_method():
    wild = schedules.paper("C5").plan(schedules.power_decay(50.0), num_steps=400)
    methods = (*METHODS, plug_in("finite"), random_scaling(critical="schedule", name="schedule"))
    result = simulate(
        key(),
        problem("linear", "weighted"),
        wild,
        replications=4,
        tile_size=4,
        methods=methods,
        save_at=(2,),
        devices=device(),
    )
    for method in result.methods.values():
        assert not method.ok[-1].any()
    early = result.methods["random_scaling"]  # after two wild rounds: numbers, but no estimates
    assert np.isfinite(early.estimate[0]).all() and (early.cause[0] == Cause.EXPLODED).all()
    one = fit(key(), problem("linear", "weighted"), wild, methods=METHODS)
    assert one.diverged
    assert "diverged" in str(one)


RARE = 0.004


def _observe_with_accidents(draws: Draws, size: Any) -> jax.Array:
    return draws.normal[0] + jnp.where(draws.uniform[0] < RARE, size, 0.0)


def _half_square(params: jax.Array, observation: jax.Array) -> jax.Array:
    return 0.5 * jnp.sum((params - observation) ** 2)


def test_an_accident_in_one_replication_leaves_the_others_alone():
    def run(size: float):
        case = Problem(
            init=np.zeros(1),
            loss=_half_square,
            num_clients=2,
            draws=Draws(1, 1),
            observe=_observe_with_accidents,
            clients=np.full(2, size),
        )
        run_plan = paper_plan("C5", num_steps=100)
        how = {"replications": 16, "tile_size": 16, "devices": device(), "methods": METHODS}
        return simulate(key(), case, run_plan, **how)

    calm, wild = run(0.0), run(1e30)
    uniforms = numpy_draws(key(), range(16), 101, range(2), Draws(1, 1)).uniform
    # The last observation is only looked at, for Ĝ and Ŝ; random scaling does not see it.
    hit = (uniforms[:100] < RARE).any(axis=(0, 1, 2))
    assert 3 < hit.sum() < 13  # a mixed case, as 1 − (1 − 0.004)^200 = 0.55 has it
    np.testing.assert_array_equal(wild.methods["random_scaling"].ok[-1], ~hit)
    for name, method in wild.methods.items():
        assert calm.methods[name].ok.all()
        good = method.ok[-1]
        assert not good[hit].any()
        np.testing.assert_array_equal(
            method.half_width[..., good, :], calm.methods[name].half_width[..., good, :]
        )
        np.testing.assert_array_equal(
            method.estimate[:, good], calm.methods[name].estimate[:, good]
        )


# The theory is about Local SGD.


def test_another_algorithm_is_marked_as_outside_the_theory():
    case, run_plan = problem("linear", "weighted"), paper_plan("C1", num_steps=30)
    methods = (random_scaling(),)
    outside = fit(key(), case, run_plan, methods=methods, algorithm=algorithms.fedprox(0.1))
    assert "fedprox is outside the theory of the intervals of random_scaling." in str(outside)
    assert "outside the theory" not in str(fit(key(), case, run_plan, methods=methods))
