"""The streaming estimators alone: accuracy in float32, their modes, and their intervals."""

from __future__ import annotations

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import lax

from jaxlsgd import Sync, plug_in, problems, random_scaling, schedules
from jaxlsgd.core.estimator import Accumulator
from jaxlsgd.inference.laws import critical_values
from jaxlsgd.inference.plug_in import curvature
from jaxlsgd.inference.random_scaling import path_scale, scaling_matrix

ALPHA = 0.505


def intervals(rounds: int, beta: float) -> np.ndarray:
    return np.ceil(np.arange(1, rounds + 1) ** beta - 1e-9).astype(np.int32)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def synthetic_path(key: jax.Array, rounds: int, beta: float, width: int) -> jax.Array:
    """x̄_m − x* as Local SGD has it close to x*: s ← (1 − γ_m) s + γ_m ε/√E_m, (rounds, width)."""
    m = jnp.arange(1, rounds + 1, dtype=jnp.float32)
    gamma = 0.5 * m**-ALPHA
    size = gamma / jnp.sqrt(jnp.asarray(intervals(rounds, beta), jnp.float32))

    def step(s: jax.Array, inputs: Any) -> tuple[jax.Array, jax.Array]:
        rate, scale, normal = inputs
        s = (1 - rate) * s + scale * normal
        return s, s

    normals = jax.random.normal(key, (rounds, width), jnp.float32)
    return lax.scan(step, jnp.ones(width), (gamma, size, normals))[1]


@functools.partial(jax.jit, static_argnums=0)
def run_scan(part: Accumulator, path: jax.Array, E: jax.Array) -> Any:
    """The state after a path (T, paths, d), each path by itself."""

    def one(x: jax.Array) -> Any:
        def body(state: Any, inputs: Any) -> tuple[Any, None]:
            average, steps = inputs
            return part.update(state, Sync(average, steps, 0.1)), None

        return lax.scan(body, part.init(x[0]), (x, E))[0]

    return jax.vmap(one, in_axes=1)(path)


def errors(rounds: int, truth: float, beta: float, paths: int, dim: int = 2) -> np.ndarray:
    """Relative errors of diag V̂ in float32 against float64, both fed the same float32 path."""
    noise = synthetic_path(jax.random.key(3), rounds, beta, paths * dim)
    path = np.asarray(noise, np.float32).reshape(rounds, paths, dim) + np.float32(truth)
    E = intervals(rounds, beta)
    state = run_scan(path_scale("full"), jnp.asarray(path), jnp.asarray(E, jnp.float32))
    found = np.asarray(jax.vmap(scaling_matrix)(state), np.float64)
    diagonal = np.diagonal(found, axis1=-2, axis2=-1)
    assert (diagonal > 0).all()
    exact = oracle.scaling_by_definition(np.moveaxis(path.astype(np.float64), 0, 1), E)
    sizes = np.sqrt(np.diagonal(exact, axis1=-2, axis2=-1))
    # Off the diagonal relative to √(V_ii V_jj), of which an entry itself can be a small part.
    return np.abs(found - exact) / (sizes[:, :, None] * sizes[:, None, :])


# (rounds, |x*|, β, paths): largest median and maximum allowed.
PROMISES = {
    "40,000 rounds at 1": ((40_000, 1.0, 0.0, 64), 0.002, 0.01),
    "40,000 growing rounds at 1": ((40_000, 1.0, 0.5, 64), 0.002, 0.01),
    "40,000 rounds at 100": ((40_000, 100.0, 0.0, 64), 0.02, 0.02),
    "40,000 growing rounds at 100": ((40_000, 100.0, 0.5, 64), 0.02, 0.02),
    "1,000,000 rounds at 1": ((1_000_000, 1.0, 0.0, 4), 0.05, 0.05),
}


@pytest.mark.for_users
@pytest.mark.parametrize("promise", PROMISES)
def test_scaling_in_float32_keeps_its_digits(promise: str):
    arguments, median, largest = PROMISES[promise]
    found = errors(*arguments)
    print(f"{promise}: median {np.median(found):.2e}, maximum {found.max():.2e}")
    assert np.median(found) <= median
    assert found.max() <= largest


def test_raw_sums_would_fail_the_same_promise():
    """Algorithm 2 as printed, in float32: the test above is not passed by any recursion."""
    noise = np.asarray(synthetic_path(jax.random.key(3), 40_000, 0.0, 4), np.float32)
    path, E = noise + np.float32(1.0), np.ones(40_000)
    exact = np.diag(oracle.scaling_by_definition(path.astype(np.float64), E))

    def step(carry: Any, inputs: Any) -> tuple[Any, None]:
        y, A, b, q = carry
        x, m = inputs
        y = (m - 1) / m * y + x / m
        return (y, A + m * m * y * y, b + m * m * y, q + m * m), None

    zero = jnp.zeros(4)
    m = jnp.arange(1, 40_001, dtype=jnp.float32)
    (y, A, b, q), _ = lax.scan(step, (zero, zero, zero, zero), (jnp.asarray(path), m))
    raw = np.asarray((A - 2 * y * b + q * y * y) / 40_000.0**3)
    assert np.median(np.abs(raw / exact - 1)) > 0.01


@pytest.fixture(scope="module")
def short() -> tuple[np.ndarray, np.ndarray]:
    """A path of 300 rounds in five dimensions, (300, d), with its intervals."""
    path = np.asarray(synthetic_path(jax.random.key(5), 300, 0.5, 5), np.float64)
    return path + np.linspace(-1, 1, 5), intervals(300, 0.5)


def state_of(part: Accumulator, path: np.ndarray, E: np.ndarray) -> Any:
    state = run_scan(part, jnp.asarray(path)[:, None], jnp.asarray(E, path.dtype))
    return jax.tree.map(lambda leaf: leaf[0], state)


def test_scaling_in_float64_is_algorithm_2(short: tuple[np.ndarray, np.ndarray]):
    with jax.enable_x64(True):
        state = state_of(path_scale("full"), *short)
        found = np.asarray(scaling_matrix(state))
        mean = np.asarray(state.mean + state.lost)
    y, V = oracle.random_scaling(*short)
    np.testing.assert_allclose(mean, y, rtol=1e-13)
    np.testing.assert_allclose(found, V, rtol=1e-9, atol=1e-12 * np.abs(V).max())
    by_definition = oracle.scaling_by_definition(*short)
    np.testing.assert_allclose(found, by_definition, rtol=1e-12, atol=1e-13 * np.abs(V).max())


def test_the_modes_are_one_estimator_at_three_prices(short: tuple[np.ndarray, np.ndarray]):
    path, E = short[0].astype(np.float32), short[1]
    R = ((1.0, -1.0, 0.0, 0.0, 0.0), (0.2, 0.2, 0.2, 0.2, 0.2))
    full, diagonal = (state_of(path_scale(mode), path, E) for mode in ("full", "diagonal"))
    contrasts = state_of(path_scale("contrasts", R), path, E)
    V = np.asarray(scaling_matrix(full), np.float64)
    chex.assert_shape([scaling_matrix(diagonal), scaling_matrix(contrasts)], [(5,), (2, 2)])
    np.testing.assert_allclose(np.diag(V), scaling_matrix(diagonal), rtol=1e-5)
    expected = np.asarray(R) @ V @ np.asarray(R).T
    np.testing.assert_allclose(scaling_matrix(contrasts), expected, rtol=1e-4)
    np.testing.assert_allclose(np.asarray(R) @ full.mean, contrasts.mean, rtol=1e-4, atol=1e-6)


def test_random_scaling_interval(short: tuple[np.ndarray, np.ndarray]):
    path, E = short
    y, V = oracle.random_scaling(path, E)
    plan = schedules.Plan.from_arrays(E, np.full(len(E), 0.1))
    cases = (
        (random_scaling(beta=0.5), critical_values.critical_value(0.9, beta=0.5)),
        (random_scaling(critical="paper", beta=0.5), critical_values.paper_value(0.5, 0.9)),
        (random_scaling(critical="schedule"), critical_values.for_plan(plan, 0.9)),
    )
    for estimator, q in cases:
        state = (state_of(estimator.accumulators[0], path.astype(np.float32), E),)
        interval = estimator.interval(state, level=0.9, plan=plan)
        half = q * np.sqrt(np.diag(V))
        chex.assert_trees_all_close(tuple(interval), (y, y - half, y + half), rtol=1e-4)


def _observations(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(8)
    a = rng.normal(size=(count, 4, 3))
    b = (rng.random((count, 4)) < 0.5).astype(np.float64)
    return rng.normal(size=(count, 3)), a, b


@functools.cache
def plug_in_state(dtype: str) -> Any:
    """plug_in fed by hand with logistic gradients and Hessians of four clients with weights."""
    x, a, b = _observations(60)
    weights, E = np.array([0.4, 0.3, 0.2, 0.1]), intervals(60, 0.5)
    estimator, model = plug_in(), oracle.MODELS["logistic"]
    update = jax.jit(estimator.update)
    state = estimator.init(jnp.asarray(x[0], dtype))
    hessians, squares = [], []
    for m in range(60):
        clients = [(a[m, k], b[m, k]) for k in range(4)]
        g = sum(w * model.gradient(x[m], *c) for w, c in zip(weights, clients, strict=True))
        H = sum(w * model.hessian(x[m], *c) for w, c in zip(weights, clients, strict=True))
        hessians.append(H)
        squares.append(np.outer(g, g))
        cast = functools.partial(jnp.asarray, dtype=dtype)
        state = update(state, Sync(cast(x[m]), E[m], 0.1, cast(g), cast(H)))
    return state, oracle.Run(x, np.mean(hessians, 0), np.mean(squares, 0)), E


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-12)])
def test_plug_in_by_hand(dtype: str, tolerance: float):
    with jax.enable_x64(dtype == "float64"):
        (state,), run, E = plug_in_state(dtype)
        chex.assert_type([state.G, state.S, state.mean, state.lost], np.dtype(dtype).type)
        sums = (state.G, state.S), (run.G, run.S)
        chex.assert_trees_all_close(*sums, rtol=tolerance, atol=tolerance)
        interval = plug_in().interval((state,), level=0.95)
        half = 1.959963984540054 * np.sqrt(oracle.plug_in_variance(run, E))
        mean = run.averages.mean(axis=0)
        np.testing.assert_allclose(interval.estimate, mean, rtol=10 * tolerance)
        # Ĝ⁻¹ŜĜ⁻ᵀ has twice the condition number of Ĝ, which is about 3 here.
        halves = interval.upper - interval.estimate, interval.estimate - interval.lower
        chex.assert_trees_all_close(halves, (half, half), rtol=20 * tolerance)


@pytest.mark.parametrize(("smallest", "floored"), [(1e-2, False), (0.0, True), (-0.5, True)])
def test_a_floor_under_the_hessian_is_reported_when_it_acts(smallest: float, floored: bool):
    estimator = plug_in()
    state = estimator.init(jnp.zeros(2))
    H, g = jnp.diag(jnp.array([1.0, smallest])), jnp.ones(2)
    state = estimator.update(state, Sync(jnp.zeros(2), 1, 0.1, g, H))
    found = estimator.measure(state, None)
    assert bool(found.floored) == floored
    chex.assert_tree_all_finite(found)
    assert (found.scale > 0).all()


def test_estimators_share_what_they_accumulate():
    assert plug_in().accumulators == plug_in("finite").accumulators == (curvature(),)
    shared = random_scaling("finite").accumulators
    assert shared == (*random_scaling().accumulators, *plug_in().accumulators)
    rows = [[1.0, -1.0, 0.0]]
    one, other = (random_scaling(contrasts=rows) for _ in range(2))
    assert one.accumulators == other.accumulators


def test_contrasts_in_the_engine_have_their_own_truth():
    R = [[1.0, -1.0, 0.0], [0.0, 1.0, 1.0]]
    problem, estimator = problems.logistic(3, 2), random_scaling(contrasts=R)
    np.testing.assert_allclose(estimator.truth(problem), np.asarray(R) @ problem.truth)
    assert estimator.coordinates(problem) == ("contrast[0]", "contrast[1]")
    assert random_scaling().coordinates(problem) == ("x[0]", "x[1]", "x[2]")
