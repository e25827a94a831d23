"""The average over observations: plug-in and random scaling against float64 NumPy, and by coverage."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import paper_plan
from refusals import refused

from jaxlsgd import Estimator, Sync, one_step, plug_in, random_scaling, schedules, simulate
from jaxlsgd.core.estimator import Horizon
from jaxlsgd.inference.laws import critical_values
from jaxlsgd.problems import linear

METHODS = (
    plug_in(average="observations"),
    plug_in("finite", average="observations"),
    random_scaling(average="observations"),
)
G = np.array([[1.0, 0.3, 0.0], [0.3, 0.8, -0.2], [0.0, -0.2, 1.2]])


def a_path(num_rounds: int, center: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """An autoregression around a center, (T, 3) float32, and E_m of order √m."""
    rng = np.random.default_rng(seed)
    steps, x = rng.normal(size=(num_rounds, 3)), np.zeros((num_rounds, 3))
    for m in range(1, num_rounds):
        x[m] = 0.8 * x[m - 1] + 0.1 * steps[m]
    E = np.ceil(np.sqrt(np.arange(1, num_rounds + 1))).astype(np.int32)
    return (x + center).astype(np.float32), E


def fed(method: Estimator, path: Any, E: np.ndarray, dtype: str = "float32") -> Any:
    """The state after a path, with gradients 0.1 x and the Hessian G."""
    hessian = jnp.asarray(G, dtype)

    def body(state: Any, inputs: Any) -> tuple[Any, None]:
        x, steps = inputs
        sync = Sync(params=x, E=steps, eta=0.1, gradient=0.1 * x, hessian=hessian)
        return method.update(state, sync), None

    xs = jnp.asarray(path, dtype)
    return jax.lax.scan(body, method.init(xs[0]), (xs, jnp.asarray(E)))[0]


def by_definition(path: np.ndarray, E: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """ȳ and V̂ in float64 as they are written down."""
    x, t = path.astype(np.float64), np.cumsum(E, dtype=np.float64)
    sums = np.cumsum(E[:, None] * x, axis=0)
    mean = sums[-1] / t[-1]
    gaps = sums - t[:, None] * mean
    return mean, (E[:, None] * gaps).T @ gaps / t[-1] ** 3


@pytest.mark.parametrize(
    ("num_rounds", "center", "dtype", "error"),
    [(300, 0.0, "float64", 1e-9), (20_000, 1.0, "float32", 1e-3), (20_000, 100.0, "float32", 0.01)],
)
def test_scaling_by_definition(num_rounds: int, center: float, dtype: str, error: float) -> None:
    """Rounding in float32 as for the average over rounds; raw sums would leave no digit at 100."""
    path, E = a_path(num_rounds, center)
    mean, V = by_definition(path, E)
    with jax.enable_x64(dtype == "float64"):
        state = fed(METHODS[2], path, E, dtype)
        found = METHODS[2].measure(state, None)
        matrix = METHODS[2].matrix(state, None)  # type: ignore[misc]
    size = np.sqrt(np.diagonal(V))
    np.testing.assert_allclose(np.asarray(found.estimate), mean, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(np.asarray(found.scale), size, rtol=error)
    assert np.max(np.abs(np.asarray(matrix) - V) / np.outer(size, size)) < error


def test_modes_and_the_law() -> None:
    path, E = a_path(400, 1.0)
    mean, V = by_definition(path, E)
    rows = np.array([[1.0, -1.0, 0.0]])
    plan = schedules.Plan.from_arrays(E, np.full(400, 0.1))
    for critical in ("asymptotic", "schedule"):
        method = random_scaling(mode="diagonal", critical=critical, average="observations")
        lower, upper = method.interval(fed(method, path, E), 0.95, plan)[1:]
        half = critical_values.critical_value(0.95) * np.sqrt(np.diagonal(V))
        np.testing.assert_allclose(np.asarray(upper) - mean, half, rtol=1e-3)
        np.testing.assert_allclose(mean - np.asarray(lower), half, rtol=1e-3)
    method = random_scaling(contrasts=rows, average="observations", critical="paper")
    upper = method.interval(fed(method, path, E), 0.95, plan).upper
    expected = rows @ mean + 6.753 * np.sqrt(np.diagonal(rows @ V @ rows.T))
    np.testing.assert_allclose(np.asarray(upper), expected, rtol=1e-3)


def exact_covariance(S: np.ndarray, plan: schedules.Plan) -> np.ndarray:
    """Cov(Σ E_m x̄_m/t_T) of x ← x − η(Gx + noise), one local step at a time."""
    state, cross, total = np.zeros((3, 3, 3))
    for E, eta in zip(plan.E, plan.eta, strict=True):
        move = np.eye(3) - eta * G
        for _ in range(E):
            state = move @ state @ move.T + eta**2 * S
            cross = cross @ move.T
        total = total + E * (cross + cross.T) + E**2 * state
        cross = cross + E * state
    return total / plan.num_steps**2


@pytest.mark.parametrize("name", ["C5", "P(1/2)"])
def test_covariances_of_plug_in(name: str) -> None:
    plan = paper_plan(name, 0.7, num_rounds=150)
    path = a_path(150, 1.0)[0].astype(np.float64)
    S = 0.01 * path.T @ path / 150
    with jax.enable_x64(True):
        limit, finite = (
            np.asarray(method.matrix(fed(method, path, plan.E, "float64"), horizon))  # type: ignore[misc]
            for method, horizon in ((METHODS[0], None), (METHODS[1], Horizon.of(plan, np.float64)))
        )
    inverse = np.linalg.inv(G)
    np.testing.assert_allclose(limit, inverse @ S @ inverse / plan.num_steps, rtol=1e-9)
    np.testing.assert_allclose(finite, exact_covariance(S, plan), rtol=1e-9)


def test_the_law_of_scaling_is_that_of_observations() -> None:
    """Rounds whose sums are a random walk in observations: 12,000 intervals at 4 standard errors."""
    rng, E = np.random.default_rng(2), a_path(400, 0.0)[1]
    walks = rng.normal(size=(4_000, 400, 3)) / np.sqrt(E)[:, None]
    state = jax.jit(jax.vmap(lambda path: fed(METHODS[2], path, E)))(walks.astype(np.float32))
    found = jax.vmap(lambda state: METHODS[2].measure(state, None))(state)
    ratio = np.abs(np.asarray(found.estimate)) / np.asarray(found.scale)
    error = 4 * np.sqrt(0.95 * 0.05 / ratio.size)
    assert abs(np.mean(ratio <= critical_values.critical_value(0.95)) - 0.95) < error
    # A planted bug: the law of the average over rounds.
    assert abs(np.mean(ratio <= critical_values.critical_value(0.95, beta=0.5)) - 0.95) > error


@pytest.mark.for_users
@pytest.mark.parametrize("name", ["C1", "P(1/2)"])
def test_coverage_and_length(name: str) -> None:
    """1,000 runs, 3 coordinates of independent noise: |z| < 4.5 for the mean coverage of 3,000 intervals.

    They are shorter than those of the average over rounds by √ν̂, about 2 under P(1/2), as in the limit.
    """
    problem = linear(3, 4)
    methods = (METHODS[1], plug_in("finite"))
    plan = paper_plan(name, 0.8, num_steps=4_000)
    rows = simulate(jax.random.key(5), problem, plan, replications=1_000, methods=methods).methods
    error = 4.5 * np.sqrt(0.95 * 0.05 / 3_000)
    one = rows["plug_in[finite, observations]"]
    covered = np.mean(np.abs(one.estimate[-1] - problem.true_vector) <= one.half_width[-1, 0])
    assert abs(covered - 0.95) < error + 0.003
    ratio = rows["plug_in[finite, observations]"].scale[-1] / rows["plug_in[finite]"].scale[-1]
    assert ratio.mean() == pytest.approx(plan.nu_hat**-0.5, rel=0.1)


def test_what_cannot_be_had_is_refused() -> None:
    with refused("critical", "conflict", "one_step"):
        random_scaling("finite", average="observations")
    with refused("beta", "unwanted"):
        random_scaling(beta=0.5, average="observations")
    for build in (plug_in, random_scaling):
        with refused("average", "choice"):
            build(average="steps")


SUMMED = (
    *METHODS[::2],
    plug_in(),
    random_scaling(),
    one_step(gradients="increments", name="one_step"),
)


@pytest.mark.parametrize("method", SUMMED, ids=lambda method: method.name)
def test_bfloat16_parameters_are_summed_in_float32(method: Estimator) -> None:
    """The same as if what was rounded to bfloat16 had been fed in float32."""
    path, E = a_path(500, 1.0)
    coarse = np.asarray(jnp.asarray(path, jnp.bfloat16), np.float32)
    state = fed(method, path, E, "bfloat16")
    floats = [leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert {leaf.dtype for leaf in floats} == {jnp.dtype("float32")}
    states = (state, fed(method, coarse, E))
    found, expected = (method.measure_one(each, None) for each in states)
    # gradients and Hessians, rounded to 8 bits, move one_step a little
    np.testing.assert_allclose(
        found.estimate, expected.estimate, atol=1e-6 + 0.02 * (method.name == "one_step")
    )
