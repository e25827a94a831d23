"""The law of random scaling's joint statistic, coverage of joint regions, and refusals."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from refusals import Why, refused

import jaxlsgd
from jaxlsgd import schedules
from jaxlsgd.inference import NORMAL, joint
from jaxlsgd.inference.laws import critical_values, wald_law

STEP = schedules.power_decay(0.5)


@pytest.fixture(scope="module")
def result() -> jaxlsgd.Fit:
    plan = schedules.paper("C5").with_warmup(0.05).plan(STEP, num_steps=1000)
    methods = (jaxlsgd.random_scaling(), jaxlsgd.plug_in(), jaxlsgd.plug_in("finite"))
    return jaxlsgd.fit(jax.random.key(3), jaxlsgd.problems.linear(3, 4), plan, methods=methods)


def gaussian(estimate: Any, matrix: Any) -> joint.Joint:
    multiplier = lambda level: NORMAL.multiplier(level, None, ())  # noqa: E731
    return joint.Joint(np.asarray(estimate), np.asarray(matrix), multiplier, NORMAL.joint(None, ()))


# --- the law of random scaling's joint statistic ---


@pytest.mark.parametrize("dim", [1, 2, 5, 20])
def test_simulated_law_agrees_with_the_table(dim: int) -> None:
    """P(W > table's value) within 4 errors of the simulation and 4 of the table, each at most 0.1 %."""
    flat = critical_values.beta_spectrum(0.0)
    for level in (0.8, 0.95, 0.99):
        found = wald_law.tail(critical_values.wald_critical_value(dim, level), dim, flat)
        allowed = 4 * found.error + 4 * 0.001 * (1 - level) * 5
        assert abs(found.probability - (1 - level)) < allowed


@pytest.mark.parametrize("beta", [1 / 3, 2 / 3])
def test_simulated_law_of_one_parameter_is_the_exact_one(beta: float) -> None:
    """Six comparisons at 4 standard errors: once in 2,600 runs."""
    spectrum = critical_values.beta_spectrum(beta)
    for level in (0.8, 0.95, 0.99):
        c = critical_values.critical_value(level, beta=beta)
        found = wald_law.tail(c**2, 1, spectrum)
        assert abs(found.probability - (1 - level)) < 4 * found.error
        assert abs(wald_law.tail((0.95 * c) ** 2, 1, spectrum).probability - (1 - level)) > (
            4 * found.error
        )  # a planted bug


def test_simulated_law_against_brownian_paths() -> None:
    """Three parameters, beta = 1/2, 10,000 paths of 500 steps: 4 standard errors, once in 5,000 runs."""
    rng, steps, exceeded = np.random.default_rng(7), 500, []
    r = np.arange(1, steps + 1)[:, None] / steps
    w = wald_law.quantile(0.95, 3, critical_values.beta_spectrum(0.5))
    for _ in range(10):
        B = np.cumsum(rng.standard_normal((1_000, steps, 3)), axis=1) / np.sqrt(steps)
        gap = B - r**2 * B[:, -1:]
        M = np.swapaxes(gap, 1, 2) @ gap / steps
        last = B[:, -1, :, None]
        exceeded.append((np.swapaxes(last, 1, 2) @ np.linalg.solve(M, last))[:, 0, 0] > w)
    assert abs(np.mean(exceeded) - 0.05) < 4 * np.sqrt(0.05 * 0.95 / 10_000)


def test_law_is_monotone_and_its_quantiles_invert_it() -> None:
    spectrum = critical_values.plan_spectrum(
        np.repeat([1, 5], [50, 200]).astype(np.int64).tobytes()
    )
    tails = [wald_law.tail(w, 4, spectrum).probability for w in (0.0, 1.0, 10.0, 100.0, 1e5)]
    assert tails[0] == 1.0 and tails[-1] < 1e-6 and np.all(np.diff(tails) < 0)
    for level in (0.01, 0.5, 0.999):
        w = wald_law.quantile(level, 4, spectrum)
        assert wald_law.tail(w, 4, spectrum).probability == pytest.approx(1 - level, rel=1e-5)


# --- coverage, by a training loop of one's own ---

HESSIAN = np.array([[1.0, 0.3, 0.0], [0.3, 0.8, -0.2], [0.0, -0.2, 1.2]])
ROOT = np.array([[1.0, 0.0, 0.0], [0.5, 0.8, 0.0], [-0.3, 0.2, 0.6]])
METHODS = {
    "random_scaling": jaxlsgd.random_scaling(critical="schedule"),
    "plug_in": jaxlsgd.plug_in(),
    "plug_in[finite]": jaxlsgd.plug_in("finite"),
}


@functools.partial(jax.jit, static_argnames="method")
def run_loop(key: jax.Array, E: jax.Array, eta: jax.Array, method: Any) -> Any:
    """SGD on a quadratic around 0, E_m steps a round, feeding an estimator."""
    G, root = jnp.asarray(HESSIAN, jnp.float32), jnp.asarray(ROOT, jnp.float32)

    def body(carry: Any, inputs: Any) -> Any:
        x, state, key = carry
        E_m, eta_m = inputs
        for i in range(2):
            key, now = jax.random.split(key)
            moved = x - eta_m * (G @ x + root @ jax.random.normal(now, (3,)))
            x = jnp.where(i < E_m, moved, x)
        key, now = jax.random.split(key)
        gradient = G @ x + root @ jax.random.normal(now, (3,))
        sync = jaxlsgd.Sync(params=x, E=E_m, eta=eta_m, gradient=gradient, hessian=G)
        return (x, method.update(state, sync), key), None

    x = jnp.zeros(3, jnp.float32)
    return jax.lax.scan(body, (x, method.init(x), key), (E, eta))[0][1]


@pytest.mark.parametrize("name", METHODS)
def test_joint_regions_cover(name: str) -> None:
    """500 runs at 95 %: off by 4 standard errors, 3.9 points, once in 16,000 runs.

    Two steps in each round but the first 300, so that the schedule matters; a constant step on a
    quadratic, so that 1,500 rounds are many. Simultaneous intervals may cover more than they promise.
    """
    method, runs = METHODS[name], 500
    plan = schedules.custom([1] * 300 + [2] * 1_200).plan(
        schedules.constant_step(0.3), num_rounds=1_500
    )
    keys = jax.random.split(jax.random.key(5), runs)
    run = jax.vmap(lambda key: run_loop(key, plan.E, plan.eta.astype(np.float32), method))
    states = jax.tree.map(np.asarray, run(keys))
    hits = {"ellipsoid": 0, "contrasts": 0, "bonferroni": 0, "sidak": 0, "planted": 0}
    rows = [[1.0, -1.0, 0.0], [0.0, 1.0, 1.0]]
    for i in range(runs):
        found = joint.joint(method, jax.tree.map(lambda leaf, i=i: leaf[i], states), plan)
        hits["ellipsoid"] += joint.ellipsoid(found).contains(np.zeros(3))
        hits["contrasts"] += joint.ellipsoid(found, rows).contains(np.zeros(2))
        narrow = found._replace(matrix=found.matrix / 1.6)
        hits["planted"] += joint.ellipsoid(narrow).contains(np.zeros(3))
        for how in ("bonferroni", "sidak"):
            _, lower, upper = joint.simultaneous(found, how=how)
            hits[how] += bool(np.all((lower <= 0) & (upper >= 0)))
    covered, error = {key: hit / runs for key, hit in hits.items()}, np.sqrt(0.95 * 0.05 / runs)
    for key in ("ellipsoid", "contrasts"):
        assert abs(covered[key] - 0.95) < 4 * error, covered
    assert min(covered["bonferroni"], covered["sidak"]) > 0.95 - 4 * error, covered
    assert abs(covered["planted"] - 0.95) > 4 * error, covered


# --- sup-t and refusals ---


def test_sup_t_is_exact_at_both_ends() -> None:
    """Independent coordinates have Šidák's value, equal ones that of a single one."""
    independent = joint.simultaneous(gaussian(np.zeros(4), np.eye(4)), how="sup_t").upper
    sidak = scipy.stats.norm.isf((1 - 0.95 ** (1 / 4)) / 2)
    np.testing.assert_allclose(independent, sidak, rtol=0.01)
    same = joint.simultaneous(
        gaussian(np.zeros(4), np.ones((4, 4)) + 1e-9 * np.eye(4)), how="sup_t"
    )
    np.testing.assert_allclose(same.upper, scipy.stats.norm.isf(0.025), rtol=0.01)


def test_contrasts_of_simultaneous_intervals(result: jaxlsgd.Fit) -> None:
    rows = np.array([[1.0, -1.0, 0.0], [0.0, 1.0, 1.0]])
    for method in result.rows:
        found = result.joint(method)
        center, lower, upper = joint.simultaneous(found, contrasts=rows)
        np.testing.assert_allclose(center, rows @ found.estimate)
        scale = np.sqrt(np.diagonal(rows @ found.matrix @ rows.T))
        half = found.multiplier(0.975) * scale
        np.testing.assert_allclose(np.asarray(upper) - np.asarray(lower), 2 * half, rtol=1e-9)


def test_finite_horizon_scaling_has_critical_values_of_each_coordinate() -> None:
    plan = jaxlsgd.schedules.paper("C5").plan(STEP, num_steps=300)
    method = jaxlsgd.random_scaling("finite")
    found = jaxlsgd.fit(jax.random.key(0), jaxlsgd.problems.linear(2, 2), plan, methods=method)
    name = method.name
    single = found.interval(name)
    both = joint.simultaneous(found.joint(name))
    assert np.all(np.asarray(both.upper) > single.upper)
    with refused("method", "unsupported"):
        joint.joint_test(found.joint(name)._replace(law=None))
    with refused("contrasts", "unsupported"):
        joint.simultaneous(found.joint(name), contrasts=[[1.0, 1.0]])


def fed(method: Any, rounds: int) -> Any:
    state = method.init(jnp.zeros(3))
    for x in np.random.default_rng(0).normal(size=(rounds, 3)).astype(np.float32):
        state = method.update(state, jaxlsgd.Sync(params=jnp.asarray(x), E=1, eta=0.1))
    return state


def test_states_that_cannot_be_inverted_are_refused() -> None:
    full, diagonal = jaxlsgd.random_scaling(), jaxlsgd.random_scaling(mode="diagonal")
    with refused("method", "unsupported", "'random_scaling'", "'full'"):
        joint.joint(diagonal, fed(diagonal, 9))
    with refused("matrix", "data", "rank m − 1"):
        joint.joint_test(joint.joint(full, fed(full, 3)))  # rank 2 of 3
    with refused("matrix"):
        joint.joint_test(joint.joint(full, fed(full, 0)))
    assert joint.joint_test(joint.joint(full, fed(full, 9))).p_value > 0
    with refused("plan", "missing", "plug_in[finite]"):
        joint.joint(jaxlsgd.plug_in("finite"), ())
    with refused("plan", "missing", "critical='schedule'"):
        joint.joint(jaxlsgd.random_scaling(critical="schedule"), fed(full, 9))


def test_a_diverged_run_is_refused() -> None:
    plan = schedules.constant(1).plan(schedules.constant_step(1e6), num_rounds=40)
    result = jaxlsgd.fit(jax.random.key(0), jaxlsgd.problems.linear(3, 2), plan)
    assert result.diverged
    with refused("method", "data"):
        result.joint_test("one_step")
    assert not result.compare()


def test_more_parameters_than_the_law_was_simulated_for() -> None:
    law = jaxlsgd.random_scaling().law.joint(None, ())
    with refused("contrasts", "unsupported", "20"):
        joint.joint_test(gaussian(np.zeros(21), np.eye(21))._replace(law=law))
    with refused("dim", "value", "20"):
        wald_law.tail(1.0, 21, critical_values.beta_spectrum(0.0))


@pytest.mark.parametrize(
    ("x", "why"), [(np.zeros(2), ("x", "shape")), (np.full(3, np.nan), ("x[0]", "not_finite"))]
)
def test_an_ellipsoid_refuses_other_spaces(x: np.ndarray, why: Why) -> None:
    with refused(*why):
        joint.ellipsoid(gaussian(np.zeros(3), np.eye(3))).contains(x)
