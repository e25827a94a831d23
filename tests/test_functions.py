"""Intervals with one bound, intervals for functions of the parameters, and p-values at their edges."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from engine_helpers import paper_plan
from refusals import refused

import jaxlsgd
from jaxlsgd import one_step, plug_in, random_scaling
from jaxlsgd.inference import joint
from jaxlsgd.inference.laws import critical_values

METHODS = (
    one_step(),
    plug_in("finite"),
    random_scaling(),
    random_scaling("finite"),
    random_scaling(critical="paper"),
    random_scaling(contrasts=[[1.0, 1.0, 0.0]], name="sum"),
)
PLAN = paper_plan("C5", num_steps=1_000)


@pytest.fixture(scope="module")
def result() -> jaxlsgd.Fit:
    problem = jaxlsgd.problems.linear(3, 4)
    return jaxlsgd.fit(jax.random.key(3), problem, PLAN, methods=METHODS, save_at=(50,))


# --- one bound ---


def expected_one_sided(name: str, detail: Any, level: float) -> Any:
    """Of a symmetric law, the two-sided value at 2 level − 1; one_step has Student's t."""
    if name == "plug_in[finite]":
        return scipy.stats.norm.ppf(level)
    if name == "random_scaling":
        return critical_values.critical_value(2 * level - 1)
    return scipy.stats.t.ppf(level, detail.df)


@pytest.mark.parametrize("name", ["one_step", "plug_in[finite]", "random_scaling"])
@pytest.mark.parametrize("level", [0.9, 0.975])
def test_intervals_with_one_bound(result: jaxlsgd.Fit, name: str, level: float) -> None:
    half = expected_one_sided(name, result.details[name], level) * result.rows[name].scale[-1, 0]
    lower, upper = (result.interval(name, level, side=side) for side in ("lower", "upper"))
    np.testing.assert_allclose(lower.estimate - lower.lower, half, rtol=1e-9)
    np.testing.assert_allclose(upper.upper - upper.estimate, half, rtol=1e-9)
    assert np.all(lower.upper == np.inf) and np.all(upper.lower == -np.inf)
    method = next(m for m in METHODS if m.name == name)
    streamed = method.interval(result.states[name], level, PLAN, side="lower")
    np.testing.assert_allclose(streamed.lower, lower.lower, rtol=1e-4)
    assert np.all(np.asarray(streamed.upper) == np.inf)


def test_one_bound_refuses(result: jaxlsgd.Fit) -> None:
    with refused("side", "choice"):
        result.interval("one_step", side="left")
    with refused("level"):
        result.interval("one_step", 0.3, side="lower")
    with refused("save", "unsupported"):
        result.interval("one_step", save=0, side="lower")


# --- functions of the parameters ---


def test_a_linear_function_is_a_contrast(result: jaxlsgd.Fit) -> None:
    found = result.function(lambda x: x[0] + x[1], "random_scaling")
    expected = result.interval("sum")
    for part in (0, 1, 2):
        np.testing.assert_allclose(found[part], np.asarray(expected[part])[0], rtol=1e-4)


@pytest.mark.parametrize("name", ["one_step", "plug_in[finite]", "random_scaling"])
def test_the_delta_method_by_hand(result: jaxlsgd.Fit, name: str) -> None:
    one = result.joint(name)
    x = one.estimate
    J = np.array([[1 / x[1], -x[0] / x[1] ** 2, 0.0], [0.0, 0.0, np.exp(x[2])]])
    q = np.max(one.multiplier(0.9))
    half = q * np.sqrt(np.diagonal(J @ one.matrix @ J.T))
    found = result.function(lambda x: jnp.stack([x[0] / x[1], jnp.exp(x[2])]), name, 0.9)
    np.testing.assert_allclose(found.estimate, [x[0] / x[1], np.exp(x[2])], rtol=1e-12)
    np.testing.assert_allclose(found.upper - found.estimate, half, rtol=1e-9)
    upper = result.function(lambda x: jnp.exp(x[2]), name, side="upper")
    assert upper.lower == -np.inf and np.exp(x[2]) < upper.upper


def test_a_function_at_a_finite_horizon_has_its_own_law(result: jaxlsgd.Fit) -> None:
    """That of its gradient as a contrast: of a coordinate, the law that intervals have, to 6 %."""
    name = "random_scaling[finite]"
    found, expected = result.function(lambda x: x[0], name), result.interval(name)
    half = np.asarray(expected.upper - expected.estimate)[0]
    assert found.upper - found.estimate == pytest.approx(half, rel=0.06)


def test_functions_that_have_no_interval(result: jaxlsgd.Fit) -> None:
    with refused("method", "unsupported"):
        result.function(lambda x: x[0], "sum")
    with refused("g", "value", "gradient"):
        result.function(lambda x: 0 * x[0])
    with refused("g", "not_finite"):
        result.function(lambda x: jnp.log(-jnp.abs(x[0])))


def test_parameters_in_a_dict() -> None:
    problem = jaxlsgd.Problem(
        init={"a": np.zeros(2), "b": np.zeros(())},
        loss=lambda x, obs: (
            0.5 * jnp.sum((x["a"] - obs) ** 2) + 0.5 * (x["b"] - 1) ** 2 * obs[0] ** 2
        ),
        num_clients=2,
        sample=lambda key, client: 1 + jax.random.normal(key, (2,)),
    )
    result = jaxlsgd.fit(
        jax.random.key(0), problem, paper_plan("C1", num_steps=300), methods=(plug_in(),)
    )
    found = result.function(lambda x: x["a"].sum())
    gap = joint.joint(plug_in(), result.states["plug_in"])
    assert found.estimate == pytest.approx(gap.estimate[:2].sum())


# --- p-values ---


@pytest.mark.parametrize("beta", [0.0, 1 / 3, 1 / 2, 2 / 3])
def test_p_values_agree_with_the_papers_table(beta: float) -> None:
    law = random_scaling(critical="paper", beta=beta).law
    for level in (0.8, 0.9, 0.95, 0.98):
        q = law.multiplier(level, None, ())
        assert law.tail(q, None, ()) == pytest.approx(1 - level, rel=1e-6)
    many = law.tail(np.linspace(0, 20, 200), None, ())
    assert many[0] == 1 and np.all(np.diff(many) < 0)
    np.testing.assert_allclose(
        many, critical_values.p_value(np.linspace(0, 20, 200), beta=beta), rtol=0.1
    )


def test_the_smallest_p_value_is_printed_as_a_bound() -> None:
    method = random_scaling("finite")
    problem = jaxlsgd.problems.linear(2, 4, center=[50.0, 50.0], init=[50.0, 50.0])
    result = jaxlsgd.fit(jax.random.key(0), problem, PLAN, methods=(method,))
    assert np.all(result.test(method.name).p_value == 1e-6)
    assert str(result).count("<1e-06") == 2
