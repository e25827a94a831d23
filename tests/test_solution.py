"""The truth of a problem, found numerically: where it is known, its error, and refusals."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from refusals import refused

from jaxlsgd import Draws, Problem, problems
from jaxlsgd.problems import solution, solve


@pytest.fixture(autouse=True)
def _solved_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Solve everything, whatever an earlier run of the tests has kept."""
    monkeypatch.setattr(solution._kept_truths, "folder", lambda: None)


@pytest.mark.parametrize("build", [problems.linear, problems.logistic])
def test_a_known_truth_is_found_within_its_error(build: object) -> None:
    """Six coordinates at 4.5 standard errors: a false alarm once in 24,000 runs."""
    problem = build(3, 2)  # type: ignore[operator]
    found = solve(problem, 20_000)
    z = (found.problem.true_vector - problem.true_vector) / found.standard_error
    assert np.max(np.abs(z)) < 4.5 and np.max(np.abs(z)) > 0.01
    inverse = np.linalg.inv(problem.G)
    expected = np.sqrt(np.diagonal(inverse @ problem.S @ inverse) / 20_000)
    np.testing.assert_allclose(found.standard_error, expected, rtol=0.05)
    assert found.residual < 0.01
    assert found.observations == 20_000
    assert found.problem.G is problem.G  # what a problem knows is kept


def test_the_error_is_honest() -> None:
    """Of 200 samples: Σ (x − x*)ᵀ C⁻¹ (x − x*) is about χ² of 400; a false alarm once in 10,000 runs.

    A standard error that is a third too large or too small is found.
    """
    problem, total = problems.linear(2, 2), 0.0
    assert problem.true_vector is not None
    for seed in range(200):
        found = solve(problem, 1_000, seed).problem
        off = found.true_vector - problem.true_vector
        total += off @ np.linalg.solve(found.truth_covariance, off)
    low, high = scipy.stats.chi2.ppf([5e-5, 1 - 5e-5], 400)
    assert low < total < high
    assert total * 1.33**2 > high and total / 1.33**2 < low


def test_arrays_of_numpys_in_a_loss_work_or_are_refused_with_the_remedy() -> None:
    """JAX gives a NumPy array of float64 back as it traced it first, in float32, and then finds two dtypes."""
    A = np.array([[1.0, 0.2], [0.2, 2.0]])

    def made(rows: Callable[[], Any]) -> Problem:
        def loss(x: Any, seen: Any) -> Any:
            return jnp.sum(jax.vmap(lambda a: 0.25 * jnp.sum((x - seen - a) ** 2))(rows()))

        draws = Draws(normal=2)
        return Problem(
            init=np.zeros(2), loss=loss, num_clients=2, draws=draws, observe=lambda z, _: z.normal
        )

    with refused("problem", "unsupported") as caught:
        solve(made(lambda: A), 1_000)
    assert "jnp.asarray" in str(caught.value)
    found = solve(made(lambda: jnp.asarray(A)), 1_000)
    off = (found.problem.true_vector - A.mean(0)) / found.standard_error
    assert np.abs(off).max() < 4.5  # a false alarm once in 70,000 runs


def test_the_sample_is_as_large_as_the_runs_ask_for() -> None:
    ask = functools.partial(solution._wanted, observations=None, num_steps=None)
    assert ask(problems.linear(3, 2)) == 2_000_000  # 400 × 5,000
    assert ask(problems.linear(3, 100)) == 100_000  # 10,000,000 of all
    assert ask(problems.linear(100, 10)) == 250_000  # a quarter at twice d = 50
    assert ask(problems.linear(3, 100), num_steps=20_000) == 8_000_000
    assert ask(problems.linear(3, 100), observations=7) == 7
    with refused("num_steps", "unwanted"):
        ask(problems.linear(3, 2), observations=7, num_steps=7)


def test_parts_make_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample in many calls, of which Newton's method begins on a few, against one of one call."""
    problem, shares = problems.linear(2, 2), list[float]()
    assert solution._Sample(problem, 10_000, 0, None).calls == 1
    whole = solve(problem, 10_000, seed=5)
    monkeypatch.setattr(solution, "_TOGETHER", 50)
    monkeypatch.setattr(solution, "_CALL", 4)
    sample = solution._Sample(problem, 10_000, 0, None)
    assert (sample.calls, sample.pilot, sample.n) == (100, 7, 10_000)
    parts = [solve(problem, 10_000, seed, progress=shares.append) for seed in (5, 5, 6)]
    assert shares[-1] == 1.0 and shares[: shares.index(1.0)] == sorted(shares[: shares.index(1.0)])
    x, again, other = (part.problem.true_vector for part in parts)
    assert np.array_equal(x, again) and not np.array_equal(x, other)
    assert parts[0].residual < 0.01 and parts[0].observations == whole.observations
    np.testing.assert_allclose(parts[0].standard_error, whole.standard_error, rtol=0.1)
    z = (x - problem.true_vector) / parts[0].standard_error
    assert np.max(np.abs(z)) < 4.5


def median(sharp: float = 1.0) -> Problem:
    """A smooth distance to uniforms on (0, 1) + client: x* = 1 for clients 0 and 1 by symmetry."""
    return Problem(
        init={"x": np.zeros(())},
        loss=lambda params, obs: jnp.sqrt(1 + sharp * (params["x"] - obs) ** 2),
        num_clients=2,
        draws=Draws(uniform=1),
        observe=lambda draws, client: draws.uniform[0] + client,
    )


def test_a_problem_of_ones_own() -> None:
    found = solve(median(), 20_000)
    assert jax.tree.structure(found.problem.truth) == jax.tree.structure(median().init)
    assert abs(found.problem.truth["x"] - 1) < 4.5 * found.standard_error[0]  # type: ignore[index]
    assert found.problem.G.shape == found.problem.S.shape == (1, 1)
    other = solve(median(), 20_000, seed=1)
    assert found.problem.truth["x"] != other.problem.truth["x"]  # type: ignore[index]


def test_what_has_no_solution_is_refused() -> None:
    flat = Problem(
        init=np.zeros(2),
        loss=lambda x, obs: 0.5 * (x[0] - obs) ** 2,
        num_clients=2,
        sample=lambda key, client: jax.random.normal(key),
    )
    with refused("problem", "data", "definite"):
        solve(flat, 1_000)
    down = Problem(
        init=np.zeros(1),
        loss=lambda x, obs: x[0] + obs,
        num_clients=1,
        sample=lambda key, client: jax.random.normal(key),
    )
    with refused("problem", "data", "gradient"):
        solve(down, 1_000)
    with refused("observations"):
        solve(flat, 0)


def test_newton_halves_a_step_that_is_too_long() -> None:
    """The first step is 64 times too long; the iteration ends when no halved step is better."""
    points = solution.newton(
        lambda x: float(x[0] ** 2),
        np.array([1.0]),
        step=lambda found: np.full(1, 64.0),
        better=lambda new, old: new < old,
        halvings=7,
    )
    assert [(x[0], found, step[0]) for x, found, step in points] == [
        (1.0, 1.0, 64.0),
        (0.0, 0.0, 64.0),
    ]
