"""Problems: closed forms against autodiff, quadrature, Monte Carlo and enumeration; refusals."""

# Wrong types are passed on purpose.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalCall=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false

import dataclasses
import doctest
import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import Why, refused

from jaxlsgd import fit, one_step
from jaxlsgd.core.forms import dense
from jaxlsgd.core.problem import Draws, Problem
from jaxlsgd.problems import _moments as moments
from jaxlsgd.problems import dataset, linear, logistic, paper_linear, paper_logistic
from jaxlsgd.problems.dataset import MAX_ROWS
from jaxlsgd.schedules import constant, power_decay

SIGMA = np.array([[2.0, 0.6, -0.3], [0.6, 1.0, 0.2], [-0.3, 0.2, 0.5]])
WEIGHTS = np.array([0.5, 0.3, 0.2])


def regression_data(labels: bool) -> tuple[list[np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(1)
    features = [rng.normal(size=(n, 3)) + 0.3 for n in (30, 7, 55)]
    targets = [a @ [1.0, -0.5, 0.2] + rng.normal(size=len(a)) for a in features]
    return features, [(b > 0).astype(np.int64) if labels else b for b in targets]


SYNTHETIC = {
    "linear": lambda: linear(3, 3),
    "linear, one parameter": lambda: linear(1, 2, heterogeneity=0.5, noise=0.0),
    "linear, correlated": lambda: linear(
        3, 3, heterogeneity=0.7, noise=0.5, weights=WEIGHTS, covariance=SIGMA, center=[1, 2, 3]
    ),
    "logistic": lambda: logistic(3, 2),
    "logistic, one parameter": lambda: logistic(1, 3, heterogeneity=1.0, weights=WEIGHTS),
    "logistic, heterogeneous": lambda: logistic(3, 3, heterogeneity=1.0, weights=WEIGHTS),
    "logistic, correlated": lambda: logistic(
        3, 3, heterogeneity=0.7, weights=WEIGHTS, covariance=SIGMA, truth_seed=3
    ),
}
FINITE = {
    "dataset, squared": lambda: dataset(*regression_data(False), loss="squared"),
    "dataset, logistic": lambda: dataset(*regression_data(True), loss="logistic", weights=WEIGHTS),
}
CASES = {**SYNTHETIC, **FINITE}
HETEROGENEOUS = [name for name in SYNTHETIC if name.startswith("logistic, ")]


def numpy_draws(problem: Problem, *shape: int, dtype: str = "float32") -> Draws:
    rng = np.random.default_rng(2)
    assert problem.draws is not None
    return Draws(
        normal=rng.normal(size=(*shape, problem.draws.normal)).astype(dtype),
        uniform=rng.uniform(size=(*shape, problem.draws.uniform)).astype(dtype),
    )


def observe_all(problem: Problem, count: int, dtype: str = "float32") -> object:
    """Observations with leading dimensions (count, K)."""
    assert problem.observe is not None
    cast = jax.tree.map(
        lambda leaf: leaf.astype(dtype) if leaf.dtype.kind == "f" else leaf, problem.clients
    )
    draws = numpy_draws(problem, count, problem.num_clients, dtype=dtype)
    return jax.jit(jax.vmap(jax.vmap(problem.observe), (0, None)))(draws, cast)


@functools.cache
def over_rows(function: object, transform: object = None) -> object:
    """`function`, or a derivative of it, at one point for many observations."""
    function = function if transform is None else transform(function)  # type: ignore[operator]
    return jax.jit(jax.vmap(function, (None, 0)))  # type: ignore[arg-type]


def written_out(function: Callable[..., Any] | None) -> Callable[..., Any]:
    """A gradient or Hessian as an array, whichever way the problem gives it."""
    assert function is not None
    return lambda params, observation: dense(function(params, observation))


# --- functions ---


@pytest.mark.parametrize("case", CASES)
def test_a_loss_that_is_said_to_be_convex_is(case: str) -> None:
    problem = CASES[case]()
    assert problem.convex
    with jax.enable_x64(True):
        observations = jax.tree.map(lambda x: x[:, 0], observe_all(problem, 20, "float64"))
        hessian = over_rows(problem.loss, jax.hessian)
        for point in (jnp.zeros(problem.dim), jnp.linspace(-2.0, 2.0, problem.dim)):
            H = np.asarray(hessian(point, observations))
            assert np.linalg.eigvalsh(H).min() > -1e-9 * np.abs(H).max()


def test_a_printed_fit_says_which_minimum_unless_there_is_only_one() -> None:
    problem = linear(2, 2)
    plan = constant(5).plan(power_decay(0.5), num_steps=500)
    words = "about the minimum near the estimate"
    for known in (True, False):
        same = dataclasses.replace(problem, convex=known)
        found = fit(jax.random.key(0), same, plan, methods=[one_step()])
        assert (words in str(found)) == (words in found._repr_html_()) == (not known)


@pytest.mark.parametrize("case", CASES)
def test_gradient_and_hessian_are_those_of_the_loss(case: str) -> None:
    problem = CASES[case]()
    assert problem.gradient is not None and problem.hessian is not None
    with jax.enable_x64(True):
        observations = jax.tree.map(lambda x: x[:, 0], observe_all(problem, 20, "float64"))
        point = jnp.linspace(-1.0, 2.0, problem.dim)
        for ours, reference in (
            (written_out(problem.gradient), over_rows(problem.loss, jax.grad)),
            (written_out(problem.hessian), over_rows(problem.loss, jax.hessian)),
        ):
            found, expected = (f(point, observations) for f in (over_rows(ours), reference))
            np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("x64", [False, True])
def test_float32_stays_float32_and_no_dot_products(case: str, x64: bool) -> None:
    problem = CASES[case]()
    assert problem.gradient is not None and problem.hessian is not None
    with jax.enable_x64(x64):
        observations = observe_all(problem, 2)
        point = jnp.zeros(problem.dim, jnp.float32)

        def everything(draws: Draws, client: object) -> object:
            observation = problem.observe(draws, client)  # type: ignore[misc]
            return [
                f(point, observation) for f in (problem.loss, problem.gradient, problem.hessian)
            ]

        client = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), problem.clients)
        client = jax.tree.map(
            lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, client
        )
        draws = numpy_draws(problem, 4)
        program = jax.make_jaxpr(jax.vmap(everything, (0, None)))(draws, client)
        results = jax.eval_shape(jax.vmap(everything, (0, None)), draws, client)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves((observations, results)))
    assert "dot_general" not in str(program)


def test_hessian_keeps_its_small_slope_in_float32() -> None:
    problem = logistic(1, 1)
    found = written_out(problem.hessian)(jnp.full(1, 30.0), (jnp.ones(1), jnp.ones(())))
    assert found[0, 0] == pytest.approx(math.exp(-30.0), rel=1e-5)


@pytest.mark.parametrize("case", ["linear", "linear, correlated"])
def test_linear_observation_is_the_formula(case: str) -> None:
    problem = CASES[case]()
    with jax.enable_x64(True):
        a, b = map(np.asarray, observe_all(problem, 50, "float64"))  # type: ignore[arg-type]
    normal = numpy_draws(problem, 50, 3, dtype="float64").normal
    assert problem.G is not None
    L = np.linalg.cholesky(problem.G)
    np.testing.assert_allclose(a, normal[..., :-1] @ L.T, rtol=1e-12, atol=1e-14)
    expected = (a * problem.clients.truth).sum(-1) + problem.clients.noise * normal[..., -1]
    np.testing.assert_allclose(b, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("case", ["logistic", "logistic, correlated"])
def test_logistic_observation_is_the_formula(case: str) -> None:
    problem = CASES[case]()
    with jax.enable_x64(True):
        a, b = map(np.asarray, observe_all(problem, 200, "float64"))  # type: ignore[arg-type]
    draws = numpy_draws(problem, 200, problem.num_clients, dtype="float64")
    L = np.linalg.cholesky(SIGMA) if "correlated" in case else np.eye(3)
    np.testing.assert_allclose(a, draws.normal @ L.T, rtol=1e-12, atol=1e-14)
    probability = 1 / (1 + np.exp(-(a * problem.clients.truth).sum(-1)))
    np.testing.assert_array_equal(b, draws.uniform[..., 0] < probability)


@pytest.mark.parametrize("build", [linear, logistic])
def test_problems_of_a_kind_share_their_structure(build: object) -> None:
    def make(**settings: object) -> Problem:
        return build(3, 4, **settings)  # type: ignore[operator]

    assert make(truth_seed=5, heterogeneity=2.0).structure() == make().structure()
    assert hash(make(truth_seed=5).structure()) == hash(make().structure())
    correlated = make(covariance=SIGMA).structure()
    assert correlated == make(covariance=2 * SIGMA).structure() != make().structure()
    assert make(covariance=np.eye(3)).structure() == make().structure()


def test_datasets_of_a_loss_share_their_structure() -> None:
    features, targets = regression_data(False)
    first = dataset(features, targets, loss="squared")
    other = dataset(features[:1], targets[:1], loss="squared", name="other")
    assert first.structure() == other.structure()
    assert first.loss is linear(3, 1).loss


# --- truth, G and S of the synthetic problems ---

# Of about 110 |t| with 39 degrees of freedom the largest passes 5.5 once in 3,000 tries.
BATCHES, BATCH, STANDARD_ERRORS = 40, 3_000, 5.5


def batch_moments(problem: Problem) -> dict[str, np.ndarray]:
    """Monte Carlo estimates of the mean gradient, G and S at x*, one a batch."""
    observations = observe_all(problem, BATCHES * BATCH)
    truth = jnp.asarray(problem.truth, jnp.float32)
    each = [
        jax.vmap(jax.vmap(f, (None, 0)), (None, 0))
        for f in (written_out(problem.gradient), written_out(problem.hessian))
    ]
    gradients, hessians = (np.asarray(f(truth, observations), np.float64) for f in each)
    p = problem.weights
    gradients = gradients.reshape(BATCHES, BATCH, *gradients.shape[1:])
    hessians = hessians.reshape(BATCHES, BATCH, *hessians.shape[1:]).mean(axis=1)
    centred = gradients - gradients.mean(axis=1, keepdims=True)
    S = np.einsum("k,bnki,bnkj->bij", p**2, centred, centred, optimize=True) / (BATCH - 1)
    return {
        "gradient": np.einsum("k,bnki->bi", p, gradients) / BATCH,
        "G": np.einsum("k,bkij->bij", p, hessians),
        "S": S,
    }


def assert_mean(batches: np.ndarray, expected: object) -> None:
    error = np.abs(batches.mean(axis=0) - expected)
    standard_error = batches.std(axis=0, ddof=1) / math.sqrt(len(batches))
    assert np.all(error <= STANDARD_ERRORS * standard_error + 1e-7), error / standard_error


@pytest.mark.parametrize("case", SYNTHETIC)
def test_monte_carlo_agrees(case: str) -> None:
    problem = SYNTHETIC[case]()
    found = batch_moments(problem)
    assert_mean(found["gradient"], 0.0)
    assert_mean(found["G"], problem.G)
    assert_mean(found["S"], problem.S)


def test_monte_carlo_sees_a_planted_error() -> None:
    problem = SYNTHETIC["linear, correlated"]()
    G, p = problem.G, problem.weights
    means = (problem.truth - problem.clients.truth) @ G
    with pytest.raises(AssertionError):  # S with second moments in place of covariances
        assert_mean(batch_moments(problem)["S"], problem.S + (p[:, None] ** 2 * means).T @ means)


def hermite_grid(dim: int, order: int) -> tuple[np.ndarray, np.ndarray]:
    z, weight = np.polynomial.hermite_e.hermegauss(order)
    points = np.stack(np.meshgrid(*[z] * dim, indexing="ij"), axis=-1).reshape(-1, dim)
    grids = np.meshgrid(*[weight / weight.sum()] * dim, indexing="ij")
    return points, np.prod(grids, axis=0).reshape(-1)


@pytest.mark.parametrize("case", HETEROGENEOUS)
def test_logistic_moments_agree_with_a_full_gauss_hermite_grid(case: str) -> None:
    """The definitions themselves, with none of the reductions: error below 1e-8."""
    problem = SYNTHETIC[case]()
    w, weight = hermite_grid(problem.dim, 90 if problem.dim == 3 else 200)
    a = w @ np.linalg.cholesky(SIGMA).T if "correlated" in case else w
    sigmoid = lambda z: 1 / (1 + np.exp(-z))  # noqa: E731
    at_truth = sigmoid(a @ problem.truth)
    G = (a * (weight * at_truth * (1 - at_truth))[:, None]).T @ a
    total, S = np.zeros(problem.dim), np.zeros_like(G)
    for p, truth in zip(problem.weights, problem.clients.truth, strict=True):
        label = sigmoid(a @ truth)
        mean = (weight * (at_truth - label)) @ a
        second = weight * (at_truth**2 * (1 - label) + (1 - at_truth) ** 2 * label)
        S += p**2 * ((a * second[:, None]).T @ a - np.outer(mean, mean))
        total += p * mean
    np.testing.assert_allclose(total, 0.0, atol=1e-8)
    np.testing.assert_allclose(problem.G, G, atol=1e-8)
    np.testing.assert_allclose(problem.S, S, atol=1e-8)


@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 1.25, 3.0, 15.0])
def test_quadrature_is_converged(scale: float) -> None:
    np.testing.assert_allclose(moments.curvature(scale), moments.curvature(scale, 2.0), atol=1e-13)
    y, other = scale * np.array([[0.6, 0.8, 0.0], [0.5, -0.1, 0.7]])
    coarse, fine = (moments.cross_moment(y, other, refine) for refine in (1.0, 2.0))
    np.testing.assert_allclose(coarse, fine, atol=1e-13)


@pytest.mark.parametrize("scale", [0.3, 3.0, 30.0])
def test_logistic_optimum_has_no_gradient(scale: float) -> None:
    rng = np.random.default_rng(5)
    truths = scale * rng.normal(size=(4, 3)) / math.sqrt(3)
    y = moments.logistic_optimum(truths, np.full(4, 0.25))
    norms = np.linalg.norm(truths, axis=1)
    client_mean = np.array([moments.curvature(r, 2.0)[0] for r in norms]) @ truths / 4
    mean = moments.curvature(float(np.linalg.norm(y)), 2.0)[0] * y
    np.testing.assert_allclose(mean, client_mean, atol=1e-13)


def test_logistic_special_cases() -> None:
    same = logistic(4, 5, covariance=np.diag([1.0, 2.0, 3.0, 4.0]))
    np.testing.assert_array_equal(same.truth, np.linspace(0, 1, 4))
    np.testing.assert_allclose(same.S, same.G / 5, rtol=1e-12)  # the information identity
    slightly = logistic(4, 5, covariance=np.diag([1.0, 2.0, 3.0, 4.0]), heterogeneity=1e-9)
    np.testing.assert_allclose(slightly.S, same.S, atol=1e-9)
    opposed = logistic(2, 2, client_truths=[[1.0, 2.0], [-1.0, -2.0]])
    np.testing.assert_array_equal(opposed.truth, 0.0)
    np.testing.assert_allclose(opposed.G, np.eye(2) / 4, rtol=1e-12)
    np.testing.assert_array_equal(logistic(1, 1).truth, [0.5])
    np.testing.assert_allclose(logistic(2, 1, center=[0, 0]).G, np.eye(2) / 4, rtol=1e-12)
    extreme = logistic(2, 2, client_truths=[[60.0, 0.0], [0.0, 60.0]])
    assert np.all(np.linalg.eigvalsh(extreme.S) > 0)


def test_truths_are_drawn_once_by_numpy() -> None:
    unit = np.random.Generator(np.random.PCG64(7)).standard_normal((4, 3))
    problem = linear(3, 4, heterogeneity=2.0, center=[1.0, 0.0, -1.0], truth_seed=7)
    np.testing.assert_array_equal(problem.clients.truth, [1.0, 0.0, -1.0] + 2.0 * unit)
    np.testing.assert_allclose(problem.truth, problem.clients.truth.mean(axis=0), rtol=1e-14)
    given = linear(3, 4, client_truths=unit, weights=[0.1, 0.2, 0.3, 0.4], init=[1, 1, 1])
    np.testing.assert_allclose(given.truth, [0.1, 0.2, 0.3, 0.4] @ unit, rtol=1e-14)
    assert given.init.dtype == np.float64 and given.init.tolist() == [1.0, 1.0, 1.0]


def test_wide_problems_leave_their_matrices_out() -> None:
    for problem in (linear(2_001, 1), logistic(2_001, 1)):
        assert problem.G is None and problem.S is None and problem.truth is not None


# --- the paper's problems ---


def test_paper_linear_is_calibrated_to_table_3() -> None:
    problem = paper_linear()
    G_inverse = np.linalg.inv(problem.G)
    variance = (G_inverse @ problem.S @ G_inverse)[0, 0]
    # Ŝ averages the transient too, so that the mean length at t_T = 5,000 is 0.5 % above the limit's.
    assert variance == pytest.approx(1.9852, abs=1e-3)
    assert 2 * 1.959964 * math.sqrt(variance / 5_000) == pytest.approx(7.857e-2, rel=0.007)
    assert (problem.dim, problem.num_clients) == (5, 10)
    np.testing.assert_array_equal(problem.init, 0.0)


def test_paper_logistic_gives_the_lengths_of_table_4() -> None:
    problem = paper_logistic()
    np.testing.assert_allclose(problem.truth, [0, 0.25, 0.5, 0.75, 1])
    variance = np.linalg.solve(problem.G, np.linalg.solve(problem.G, problem.S).T)[0, 0]
    length = 2 * 1.959964 * math.sqrt(variance / 40_000)
    assert length == pytest.approx(1.448e-2, rel=5e-3)
    assert (paper_linear().gamma0, problem.gamma0) == (0.5, 2.0)


# --- refusals ---

ONE = np.ones((4, 1))
LONG = np.broadcast_to(np.float32(0), (MAX_ROWS + 1, 1))
WRONG_CONFIGURATIONS = [
    *(
        (build, arguments, settings, why)
        for build in (linear, logistic)
        for arguments, settings, why in [
            ((0, 1), {}, ("dim", "value")),
            ((-2, 1), {}, ("dim", "value")),
            ((2.0, 1), {}, ("dim", "type")),
            ((True, 1), {}, ("dim", "type")),
            ((2, 0), {}, ("num_clients", "value")),
            ((2, "3"), {}, ("num_clients", "type")),
            ((2, 1), {"heterogeneity": -1.0}, ("heterogeneity", "value")),
            ((2, 1), {"heterogeneity": math.nan}, ("heterogeneity", "not_finite")),
            ((2, 1), {"heterogeneity": "1"}, ("heterogeneity", "type")),
            ((2, 1), {"heterogeneity": True}, ("heterogeneity", "type")),
            ((2, 1), {"truth_seed": -1}, ("truth_seed", "value")),
            ((2, 1), {"truth_seed": 0.5}, ("truth_seed", "type")),
            ((2, 1), {"weights": [0.5]}, ("weights", "value")),
            ((2, 1), {"weights": [0.5, 0.5]}, ("weights", "shape")),
            ((2, 1), {"covariance": np.eye(3)}, ("covariance", "shape")),
            ((2, 1), {"covariance": [1.0, 1.0]}, ("covariance", "shape")),
            ((2, 1), {"covariance": [[1.0, 0.5], [0.4, 1.0]]}, ("covariance", "value")),
            ((2, 1), {"covariance": [[1.0, 2.0], [2.0, 1.0]]}, ("covariance", "value")),
            ((2, 1), {"covariance": np.ones((2, 2))}, ("covariance", "value")),
            ((2, 1), {"covariance": np.zeros((2, 2))}, ("covariance", "value")),
            ((2, 1), {"covariance": np.full((2, 2), np.nan)}, ("covariance[0, 0]", "not_finite")),
            ((2, 1), {"client_truths": np.zeros(2)}, ("client_truths", "shape")),
            ((2, 1), {"client_truths": np.zeros((2, 2))}, ("client_truths", "shape")),
            ((2, 1), {"client_truths": [[math.inf, 0.0]]}, ("client_truths[0, 0]", "not_finite")),
            ((2, 1), {"client_truths": [["a", "b"]]}, ("client_truths", "type")),
            ((2, 1), {"client_truths": np.zeros((1, 2)), "center": [0, 0]}, ("center", "conflict")),
            ((2, 1), {"center": [0.0]}, ("center", "shape")),
            ((2, 1), {"init": [0.0, math.nan]}, ("init[1]", "not_finite")),
            ((2, 1), {"init": [0.0, 0.0, 0.0]}, ("init", "shape")),
        ]
    ),
    (linear, (2, 1), {"noise": -1.0}, ("noise", "value")),
    (linear, (2, 1), {"noise": math.inf}, ("noise", "not_finite")),
    (logistic, (2, 2), {"heterogeneity": 1e4}, ("client_truths", "value")),
    *(
        (dataset, arguments, {"loss": "squared", **settings}, why)
        for arguments, settings, why in [
            (([], []), {}, ("features", "type")),
            (({"x": ONE}, [np.ones(4)]), {}, ("features", "type")),
            (([ONE], [np.ones(4), np.ones(4)]), {}, ("targets", "shape")),
            (([ONE], [np.ones(3)]), {}, ("targets[0]", "shape")),
            (([np.ones((0, 1))], [np.ones(0)]), {}, ("features[0]", "value")),
            (([ONE, np.ones((0, 1))], [np.ones(4), np.ones(0)]), {}, ("features[1]", "value")),
            (([ONE, np.ones((4, 2))], [np.ones(4)] * 2), {}, ("features[1]", "shape")),
            (([1.0, 2.0], [1.0, 2.0]), {}, ("features[0]", "shape")),
            (([[[1.0], [1.0, 2.0]]], [np.ones(2)]), {}, ("features[0]", "type")),
            (([[["a"], ["b"]]], [np.ones(2)]), {}, ("features[0]", "type")),
            (([ONE * math.nan], [np.ones(4)]), {}, ("features[0][0, 0]", "not_finite")),
            (([ONE], [np.array([1, 2, 3, math.inf])]), {}, ("targets[0][3]", "not_finite")),
            (([LONG], [LONG[:, 0]]), {}, ("features[0]", "value")),
            (([np.ones((4, 2))], [np.ones(4)]), {}, ("features", "data")),
            (([np.ones(4)], [np.ones(4)]), {}, ("features", "shape")),
            (([np.ones((4, 0))], [np.ones(4)]), {}, ("features", "shape")),
            (([{"x": ONE}], [np.ones(4)]), {}, ("features", "shape")),
            (([ONE], [ONE]), {}, ("targets", "shape")),
            (([ONE], [np.ones(4)]), {"loss": "hinge"}, ("loss", "choice")),
            (([ONE], [np.ones(4)]), {"loss": None}, ("loss", "choice")),
            (([ONE], [np.array([0, 1, 2, 1])]), {"loss": "logistic"}, ("targets[0]", "value")),
            (([ONE], [np.array([-1, 1, 1, 1])]), {"loss": "logistic"}, ("targets[0]", "value")),
            (([ONE], [np.ones(4)]), {"truth": np.zeros(1)}, ("truth", "unwanted")),
            (([ONE], [np.ones(4)]), {"gradient": lambda x, row: x}, ("gradient", "unwanted")),
            (([ONE], [np.ones(4)]), {"init": np.zeros(2)}, ("init", "shape")),
            (([ONE], [np.ones(4)]), {"weights": [2.0]}, ("weights", "value")),
            (([ONE], [np.ones(4)]), {"loss": lambda x, row: x[0]}, ("init", "missing")),
        ]
    ),
]


@pytest.mark.parametrize("build, arguments, settings, why", WRONG_CONFIGURATIONS)
def test_bad_arguments_are_refused(
    build: object, arguments: tuple[object, ...], settings: dict[str, object], why: Why
) -> None:
    with refused(*why, ": ", "got") as caught:
        build(*arguments, **settings)  # type: ignore[operator]
    assert len(str(caught.value)) < 1_000


@pytest.mark.parametrize("module", ["linear", "logistic", "dataset", "paper"])
def test_examples_run(module: str) -> None:
    found = doctest.testmod(importlib.import_module(f"jaxlsgd.problems.{module}"))
    assert found.attempted > 0 and found.failed == 0
