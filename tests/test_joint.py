"""Joint tests, ellipsoids and simultaneous intervals."""

from __future__ import annotations

from typing import get_args

import jax
import numpy as np
import pytest
import scipy.stats
from refusals import Why, refused

import jaxlsgd
from jaxlsgd.inference import NORMAL, joint

STEP = jaxlsgd.schedules.power_decay(0.5)


@pytest.fixture(scope="module")
def result() -> jaxlsgd.Fit:
    plan = jaxlsgd.schedules.paper("C5").with_warmup(0.05).plan(STEP, num_steps=1000)
    methods = (jaxlsgd.random_scaling(), jaxlsgd.plug_in(), jaxlsgd.plug_in("finite"))
    return jaxlsgd.fit(jax.random.key(3), jaxlsgd.problems.linear(3, 4), plan, methods=methods)


def gaussian(estimate, matrix) -> joint.Joint:
    multiplier = lambda level: NORMAL.multiplier(level, None, ())  # noqa: E731
    return joint.Joint(np.asarray(estimate), np.asarray(matrix), multiplier, NORMAL.joint(None, ()))


@pytest.mark.parametrize("method", ["random_scaling", "plug_in", "plug_in[finite]"])
def test_one_contrast_is_the_square_of_its_t_statistic(result: jaxlsgd.Fit, method: str) -> None:
    found = result.joint_test(method, contrasts=[[0.0, 1.0, 0.0]], null=0.2)
    single = result.test(method, null=0.2)
    assert found.statistic == pytest.approx(single.statistic[1] ** 2, rel=1e-3)
    assert found.p_value == pytest.approx(single.p_value[1], rel=1e-2)


def test_wald_statistic_is_the_quadratic_form(result: jaxlsgd.Fit) -> None:
    found = result.joint("plug_in")
    rows, null = np.array([[1.0, -1.0, 0.0], [0.0, 1.0, 1.0]]), np.array([0.1, -0.2])
    gap = rows @ found.estimate - null
    expected = gap @ np.linalg.inv(rows @ found.matrix @ rows.T) @ gap
    tested = joint.joint_test(found, rows, null, level=0.9)
    assert tested.statistic == pytest.approx(expected, rel=1e-9)
    assert tested.critical == pytest.approx(scipy.stats.chi2.ppf(0.9, 2))
    assert tested.reject == (expected > tested.critical)


def test_ellipsoid_has_its_centre_and_not_a_far_point(result: jaxlsgd.Fit) -> None:
    for method in result.rows:
        found = joint.ellipsoid(result.joint(method))
        edge = np.linalg.cholesky(found.matrix)[:, 0] * found.radius
        assert found.contains(found.center + 0.999 * edge)
        assert not found.contains(found.center + 1.001 * edge)


def test_simultaneous_intervals_are_ordered_by_width(result: jaxlsgd.Fit) -> None:
    found = result.joint("plug_in")
    width = {
        how: np.ptp(np.asarray(joint.simultaneous(found, how=how)[1:]), axis=0)
        for how in get_args(joint.Simultaneous)
    }
    single = np.ptp(np.asarray(result.interval("plug_in")[1:]), axis=0)
    assert np.all(single < width["sup_t"])
    assert np.all(width["sup_t"] <= width["sidak"])
    assert np.all(width["sidak"] < width["bonferroni"])


def test_chi_square_covers_jointly() -> None:
    """Level 95 %, 600 Gaussian draws: off by 4.5 standard errors once in 150,000 runs."""
    rng = np.random.default_rng(0)
    matrix = np.array([[2.0, 0.6, 0.1], [0.6, 1.0, 0.2], [0.1, 0.2, 0.5]])
    truth = np.array([1.0, -1.0, 0.5])
    draws = rng.multivariate_normal(truth, matrix, size=600)
    inside, doubled = (
        np.mean([joint.ellipsoid(gaussian(x, scale * matrix)).contains(truth) for x in draws])
        for scale in (1, 2)
    )
    error = np.sqrt(0.95 * 0.05 / 600)
    assert abs(inside - 0.95) < 4.5 * error
    assert abs(doubled - 0.95) > 4.5 * error  # a planted bug: variance × 2


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda j: joint.joint_test(j, contrasts=[[1.0, 0.0]]), ("contrasts", "shape", "3")),
        (
            lambda j: joint.joint_test(j, contrasts=[[1, 0, 0], [2, 0, 0]]),
            ("contrasts", "value", "rank 1"),
        ),
        (lambda j: joint.joint_test(j, null=[1.0, 2.0]), ("null", "shape", "(3,)")),
        (lambda j: joint.joint_test(j, null=np.nan), ("null", "not_finite")),
        (lambda j: joint.joint_test(j, level=95), ("level", "value", "0.95")),
        (lambda j: joint.simultaneous(j, how="holm"), ("how", "choice")),
        (lambda j: joint.joint_test(j._replace(matrix=np.zeros((3, 3)))), ("matrix", "value")),
    ],
)
def test_bad_input_is_refused(result: jaxlsgd.Fit, call, why: Why) -> None:
    with refused(*why):
        call(result.joint("plug_in"))


def test_sup_t_is_for_normal_estimates(result: jaxlsgd.Fit) -> None:
    with refused("how", "unsupported"):
        joint.simultaneous(result.joint("random_scaling"), how="sup_t")
