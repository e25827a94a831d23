"""The problems of the field: derivatives by differences, truth and moments by closed forms and Monte Carlo."""

# What a problem may lack is used, and wrong types are passed on purpose.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalCall=false
# pyright: reportOptionalSubscript=false, reportOptionalOperand=false

from __future__ import annotations

import doctest
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import Why, refused
from scipy import special, stats

from jaxlsgd import Draws, Problem, problems, random_scaling, simulate
from jaxlsgd.core.forms import dense
from jaxlsgd.core.problem import at_time
from jaxlsgd.problems import _moments as moments
from jaxlsgd.problems import instrumental, losses, minibatch, multinomial, regression
from jaxlsgd.schedules import constant, power_decay

WEIGHTS = (0.5, 0.3, 0.2)


def of(family: str, dim: int = 3, **settings: Any) -> Callable[[], Problem]:
    settings = {"heterogeneity": 0.5, "spread": 0.6, "weights": WEIGHTS} | settings
    return functools.cache(lambda: regression(dim, 3, family, **settings))


CASES: dict[str, Callable[[], Problem]] = {
    "gaussian": of("gaussian", correlation=0.5, ridge=0.2),
    "gaussian, heavy tails": of("gaussian", degrees=2.5, noise=0.5),
    "huber": of("huber", intercept=True),
    "huber, no moments": of("huber", degrees=1.0, correlation=-0.4),
    "quantile": of("quantile", tau=0.8, bandwidth=0.3, intercept=True),
    "quantile, heavy tails": of("quantile", tau=0.3, degrees=1.5, intercept=True),
    "logistic": of("logistic", correlation=0.3, ridge=0.1, intercept=True),
    "poisson": of("poisson", heterogeneity=0.1, intercept=True),
    "multinomial": functools.cache(lambda: multinomial(2, 3, weights=WEIGHTS)),
    "instrumental": functools.cache(
        lambda: instrumental(3, 3, heterogeneity=0.7, strength=1.5, weights=WEIGHTS)
    ),
    "minibatch": functools.cache(lambda: minibatch(CASES["huber"](), 4)),
    "drifting": functools.cache(lambda: problems.drifting(3, 3, period=50, weights=WEIGHTS)),
}
every_case = pytest.mark.parametrize("case", CASES)


def flat(problem: Problem) -> Any:
    return problem.structure().flat_functions()


def observed(problem: Problem, draws: Draws, client: Any, t: Any = 7) -> Any:
    return at_time(flat(problem).observe, problem.drifts, jnp.uint32(t))(draws, client)


def numpy_draws(problem: Problem, *shape: int) -> Draws:
    rng = np.random.default_rng(5)
    assert problem.draws is not None
    return Draws(
        rng.standard_normal((*shape, problem.draws.normal)),
        rng.uniform(size=(*shape, problem.draws.uniform)),
    )


@pytest.fixture(autouse=True)
def in_float64() -> Any:
    with jax.enable_x64(True):
        yield


# Derivatives.


@pytest.mark.parametrize("case", [case for case in CASES if "tails" not in case])  # of one loss
def test_derivatives_are_those_of_the_loss(case: str) -> None:
    """By central differences of 1e-5: their own error is 1e-10, and 1e-5 of curvature."""
    problem = CASES[case]()
    functions, h = flat(problem), 1e-5
    x, steps = np.linspace(-0.3, 0.5, problem.dim), h * np.eye(problem.dim)

    def slope(function: Callable[..., Any], seen: Any) -> Any:
        around = jax.vmap(lambda e: (function(x + e, seen) - function(x - e, seen)) / (2 * h))
        return around(steps)

    def gradient(x: Any, seen: Any) -> Any:
        return dense(functions.gradient(x, seen))

    def each(draws: Draws, client: Any) -> Any:
        seen = observed(problem, draws, client)
        second = slope(gradient, seen)
        ours = gradient(x, seen), dense(functions.hessian(x, seen))
        return *ours, slope(functions.loss, seen), (second + second.T) / 2

    found = jax.jit(jax.vmap(each))(numpy_draws(problem, 3), problem.clients)
    if case != "instrumental":  # whose steps follow a moment, and no loss
        np.testing.assert_allclose(found[0], found[2], atol=1e-8)
    np.testing.assert_allclose(found[1], found[3], atol=1e-8)
    assert np.abs(found[3]).max() > 0.01


def test_the_moment_of_instruments() -> None:
    problem = CASES["instrumental"]()
    a, fitted, b = np.eye(3)[0], np.array([1.0, 2.0, 3.0]), 0.5
    found = dense(flat(problem).gradient(np.full(3, 2.0), (a, fitted, b)))
    np.testing.assert_allclose(found, 1.5 * fitted)


# Truth, G and S.

BATCHES, BATCH = 40, 500
# Of about 200 |t| with 39 degrees of freedom the largest passes 6 once in 10,000 runs.
STANDARD_ERRORS = 6.0


@functools.cache
def batch_means(case: str) -> tuple[np.ndarray, ...]:
    """Mean gradient, G and S at x*, one a batch."""
    problem = CASES[case]()
    functions, p = flat(problem), np.asarray(WEIGHTS)
    truth = jnp.asarray(problem.true_vector)
    clients = jax.tree.map(jnp.asarray, problem.clients)

    def one(draws: Draws, client: Any, t: Any) -> Any:
        seen = observed(problem, draws, client, t)
        return dense(functions.gradient(truth, seen)), dense(functions.hessian(truth, seen))

    over = jax.vmap(jax.vmap(jax.vmap(one, (0, 0, None)), (0, None, 0)), (0, None, None))
    drawn, t = numpy_draws(problem, BATCHES, BATCH, 3), np.arange(BATCH)
    g, H = map(np.asarray, jax.jit(over)(drawn, clients, t))
    centred = g - g.mean(axis=(0, 1))
    if problem.drifts:  # around means that are other ones at every time of the period
        times = g.reshape(BATCHES, -1, 50, *g.shape[2:])
        centred = (times - times.mean(axis=(0, 1))).reshape(g.shape)
    own = np.einsum("bnki,bnkj->bkij", centred, centred) / (BATCH - 1)
    return (
        np.einsum("k,bnki->bi", p, g) / BATCH,
        np.einsum("k,bnkij->bij", p, H) / BATCH,
        np.einsum("k,bkij->bij", p**2, own),
    )


def assert_mean(found: np.ndarray, expected: Any) -> None:
    error = found.std(axis=0, ddof=1) / np.sqrt(BATCHES)
    t = (found.mean(axis=0) - expected) / np.where(error > 1e-12, error, 1e-12)
    assert np.abs(t).max() < STANDARD_ERRORS


@every_case
def test_the_mean_gradient_vanishes_at_the_truth(case: str) -> None:
    gradient, _, _ = batch_means(case)
    assert_mean(gradient, 0.0)
    # A truth that is off by a batch's noise, 6.3 standard errors of the mean, and a half, would be seen.
    with pytest.raises(AssertionError):
        assert_mean(gradient + 1.5 * gradient.std(axis=0, ddof=1), 0.0)


@every_case
def test_hessian_and_noise_at_the_truth(case: str) -> None:
    problem = CASES[case]()
    _, G, S = batch_means(case)
    if case == "multinomial":  # which gives neither; but where the model is right, S_k = G_k
        assert_mean(S - np.sum(np.square(WEIGHTS)) * G, 0.0)
        return
    assert_mean(G, problem.G)
    # Of squares of 2.5 degrees, gradients have no fourth moment, and a sample's S no standard error.
    if case != "gaussian, heavy tails":
        assert_mean(S, problem.S)
    else:
        assert (np.median(S, axis=0)[range(3), range(3)] < np.diagonal(problem.S)).all()


@pytest.mark.parametrize("family", ["gaussian", "logistic"])
def test_closed_forms_of_clients_with_one_covariance(family: str) -> None:
    """What `linear` and `logistic` know by other formulas."""
    settings: dict[str, Any] = {"heterogeneity": 1.0, "weights": WEIGHTS, "truth_seed": 3}
    settings["center"] = np.array([0.2, -0.5, 1.0])
    base = {"gaussian": problems.linear, "logistic": problems.logistic}[family]
    ours, other = regression(3, 3, family, **settings), base(3, 3, **settings)
    for name in ("truth", "G", "S"):
        np.testing.assert_allclose(getattr(ours, name), getattr(other, name), atol=2e-11)


def test_closed_form_of_clients_with_covariances_of_their_own() -> None:
    problem = regression(3, 3, spread=0.7, heterogeneity=1.0, ridge=0.3, weights=WEIGHTS)
    p, scales, truths = np.asarray(WEIGHTS), problem.clients.factor**2, problem.clients.truth
    assert np.ptp(scales, axis=0).min() > 0.1
    G = p @ scales + 0.3
    truth = (p[:, None] * scales * truths).sum(0) / G
    np.testing.assert_allclose(problem.truth, truth, rtol=1e-12)
    np.testing.assert_allclose(problem.G, np.diag(G), atol=1e-12)
    S = np.zeros((3, 3))
    for k in range(3):
        gap = scales[k] * (truth - truths[k])
        level = (truth - truths[k]) @ gap + 1
        S += p[k] ** 2 * (level * np.diag(scales[k]) + np.outer(gap, gap))
    np.testing.assert_allclose(problem.S, S, atol=1e-12)


def test_the_intercept_of_a_quantile() -> None:
    """It is the noise's own quantile, as the smoothing goes to 0."""
    for degrees in (None, 3.0):
        settings: dict[str, Any] = {"degrees": degrees, "intercept": True, "tau": 0.9}
        problem = regression(2, 2, "quantile", bandwidth=1e-3, center=[0.5, 1.0], **settings)
        law = stats.norm() if degrees is None else stats.t(degrees)
        np.testing.assert_allclose(problem.truth, [0.5 + law.ppf(0.9), 1.0], atol=1e-5)


@pytest.mark.parametrize("family", ["huber", "quantile", "logistic", "poisson"])
def test_a_finer_rule_finds_the_same(family: str) -> None:
    x, truth = np.array([0.4, -0.2, 0.5]), np.array([0.1, 0.3, 0.4])
    L = np.linalg.cholesky(np.array([[0.8, 0.2], [0.2, 0.4]]))
    for degrees in (None, 1.5):
        noise = losses.Noise(0.7, degrees)
        conditional, width = {
            "huber": (losses.huber_moments(noise, 1.345), noise.width),
            "quantile": (losses.quantile_moments(noise, 0.7, 0.4), noise.width),
            "logistic": (losses.logistic_moments(), 1.0),
            "poisson": (losses.poisson_moments(), 1.0),
        }[family]
        location = family in ("huber", "quantile")
        design = moments.Design(
            truth[None], L[None], np.ones(1), True, conditional, width, location, 0.0
        )
        pair = (x - truth, 0 * truth) if location else (x, truth)
        for one, other in zip(
            moments.client_moments(design, *pair, L),
            moments.client_moments(design, *pair, L, refine=1.9),
            strict=True,
        ):
            np.testing.assert_allclose(one, other, atol=1e-11)


NUMBERS = np.array([0.7, 0.4])


@pytest.mark.parametrize("name", ["SQUARED", "LOGISTIC", "POISSON", "HUBER", "QUANTILE"])
def test_derivatives_of_every_loss(name: str) -> None:
    """NumPy and JAX agree, and f' and f'' are those of f, away from the corner of Huber's second derivative."""
    loss: losses.Loss = getattr(losses, name)
    with jax.enable_x64(True):
        z, b = jnp.linspace(-3.0, 3.0, 13) + 0.01, jnp.linspace(0.0, 1.0, 13)
        value = lambda one, target: loss.value(jnp, one, target, NUMBERS)  # noqa: E731
        first, second = (jax.grad(value), jax.grad(jax.grad(value)))
        right = [jax.vmap(function)(z, b) for function in (value, first, second)]
    for part, expected in zip(loss, right, strict=True):
        for xp, given in ((np, np.asarray), (jnp, lambda x: x)):
            with jax.enable_x64(True):
                found = part(xp, given(z), given(b), NUMBERS)
            assert isinstance(found, np.ndarray) is (xp is np)
            np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


# Responses.


@pytest.mark.parametrize("degrees", [1.0, 2.5])
def test_students_law(degrees: float) -> None:
    """Kolmogorov and Smirnov's distance: √n D passes 2.8 once in 3 million runs."""
    n = 20_000
    uniform = np.random.default_rng(3).uniform(size=(n, 3))
    respond = losses.respond_student(degrees)
    found = jax.vmap(lambda u: respond(jnp.zeros(()), None, u, 2.0))(uniform)
    at = np.sort(special.stdtr(degrees, np.asarray(found) / 2.0))
    distance = np.abs(at - (np.arange(n) + 0.5) / n).max()
    assert np.sqrt(n) * distance < 2.8
    # Beyond what one word of 23 bits could give.
    deep = respond(jnp.zeros(()), None, jnp.array([2.0**-24, 1e-3, 0.0]), 1.0)
    assert float(deep) > np.sqrt(degrees * 2.0 ** (48 / degrees))


def test_counts() -> None:
    rng = np.random.default_rng(4)
    z, u = rng.uniform(-2, 3, 2_000), rng.uniform(size=2_000)
    found = jax.vmap(lambda z, u: losses.respond_count(z, None, u[None], None))(z, u)
    np.testing.assert_array_equal(found, stats.poisson(np.exp(z)).ppf(u))


def test_classes() -> None:
    """The frequencies of three classes within 4.5 standard errors: a false alarm in 50,000 runs."""
    problem, n = CASES["multinomial"](), 20_000
    a = np.array([0.7, -1.2])
    uniform = np.random.default_rng(8).uniform(size=(n, 1))
    truth = np.asarray(problem.truth)
    _, y = jax.vmap(lambda u: flat(problem).observe(Draws(jnp.asarray(a), u), truth))(uniform)
    weight = np.exp([*(truth @ a), 0.0])
    p = (weight / weight.sum())[:2]
    assert (np.abs(np.mean(y, axis=0) - p) < 4.5 * np.sqrt(p * (1 - p) / n)).all()


def test_a_minibatch_is_a_mean() -> None:
    one, many = CASES["huber"](), CASES["minibatch"]()
    x, draws = jnp.ones(3), numpy_draws(one, 4)
    client = jax.tree.map(lambda leaf: jnp.asarray(leaf[1]), one.clients)
    each = jax.vmap(lambda drawn: dense(one.gradient(x, one.observe(drawn, client))))(draws)
    joined = Draws(*(part.reshape(-1) for part in draws))
    found = many.gradient(x, many.observe(joined, client))
    np.testing.assert_allclose(found, np.mean(each, axis=0), rtol=1e-12)
    np.testing.assert_allclose(many.S, one.S / 4)
    assert (many.name, many.draws) == ("huber-4", Draws(12, 0))
    assert minibatch(one, 4).structure() == many.structure()
    sampled = Problem(
        init={"x": np.zeros(2)},
        loss=lambda params, seen: jnp.sum((params["x"] - seen) ** 2),
        num_clients=2,
        sample=lambda key, client: jax.random.normal(key, (2,)),
    )
    batch = minibatch(sampled, 3)
    seen = batch.sample(jax.random.key(0), 0)
    found = batch.gradient(batch.init, seen)["x"]
    np.testing.assert_allclose(found, -2 * np.mean(seen, axis=0), rtol=1e-12)


def test_problems_of_a_family_share_their_structure() -> None:
    first, other = (regression(3, 3, "huber", spread=s, truth_seed=4) for s in (0.0, 0.5))
    assert first.structure() == other.structure()
    assert first.structure() != regression(3, 3, "huber", delta=2.0).structure()


def test_instruments_in_the_engine() -> None:
    """Means of 64 runs within 5 standard errors of x*, where least squares would be 40 away.

    Two coordinates: a false alarm in 100,000 runs of 63 degrees of freedom.
    """
    problem = instrumental(2, 2, endogeneity=0.8, init=[0.0, 1.0])  # at x*
    with jax.enable_x64(False):
        rows = simulate(
            jax.random.key(1),
            problem,
            constant(2).plan(power_decay(0.3), num_steps=600),
            replications=64,
            tile_size=64,
            methods=random_scaling(mode="diagonal"),
            devices=jax.devices()[:1],
        ).methods["random_scaling"]
    found = rows.estimate[-1]
    error = found.std(axis=0, ddof=1) / 8
    assert (np.abs(found.mean(axis=0) - problem.truth) < 5 * error).all()
    bias = 0.8 / np.sqrt(2) / 2  # Cov(a, ε)/Var(a)
    assert (error < bias / 30).all()


# What is refused.


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda: regression(3, 3, "hubr"), ("family", "choice", "'huber'")),
        (lambda: regression(1, 3, intercept=True), ("dim", "value", "intercept")),
        (lambda: regression(501, 3), ("dim", "value", "500")),
        (lambda: regression(3, 3, spread=1.0), ("spread", "value")),
        (lambda: regression(3, 3, correlation=1), ("correlation", "value")),
        (lambda: regression(3, 3, degrees=2.0), ("degrees", "value")),
        (lambda: regression(3, 3, "logistic", degrees=3.0), ("degrees", "unwanted")),
        (lambda: regression(3, 3, "huber", delta=0), ("delta", "value")),
        (lambda: regression(3, 3, "quantile", tau=1.5), ("tau", "value")),
        (lambda: regression(3, 3, noise=0.0), ("noise", "value")),
        (
            lambda: regression(3, 3, "poisson", center=[1.0, 1.0, 1.0]),
            ("center", "value", "40"),
        ),
        (lambda: multinomial(2, 3, classes=1), ("classes", "value")),
        (lambda: instrumental(2, 2, endogeneity=1.0), ("endogeneity", "value")),
        (lambda: instrumental(2, 2, strength=0.0), ("strength", "value")),
        (lambda: minibatch("linear", 2), ("problem", "type")),
        (lambda: minibatch(problems.linear(2, 2), 0), ("size", "value")),
    ],
)
def test_bad_arguments(build: Callable[[], Any], why: Why) -> None:
    with refused(*why):
        build()


@pytest.mark.parametrize("name", ["regression", "multinomial", "instrumental"])
def test_examples(name: str) -> None:
    found = doctest.testmod(importlib.import_module(f"jaxlsgd.problems.{name}"))
    assert found.attempted > 0 and found.failed == 0
