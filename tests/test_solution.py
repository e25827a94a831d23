"""The truth of a problem, found numerically: where it is known, its error, and refusals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlsgd import Draws, Problem, problems
from jaxlsgd.problems import solve


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
    assert found.residual < 1e-3
    assert found.problem.G is problem.G  # what a problem knows is kept


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
    with pytest.raises(ValueError, match="problem: must have a positive definite mean Hessian"):
        solve(flat, 1_000)
    down = Problem(
        init=np.zeros(1),
        loss=lambda x, obs: x[0] + obs,
        num_clients=1,
        sample=lambda key, client: jax.random.normal(key),
    )
    with pytest.raises(ValueError, match="problem: must have a mean gradient that vanishes"):
        solve(down, 1_000)
    with pytest.raises(ValueError, match="observations: must be an integer of at least 2"):
        solve(flat, 0)
