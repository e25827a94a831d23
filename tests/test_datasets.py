"""Problems of data that are there: optimum, moments, which rows are drawn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused
from test_problems import FINITE, ONE, WEIGHTS, over_rows, regression_data

from jaxlsgd.core.problem import Draws
from jaxlsgd.problems import dataset
from jaxlsgd.problems.dataset import MAX_ROWS, DatasetClient
from jaxlsgd.problems.dataset import observe as observe_row


@pytest.mark.parametrize("case", FINITE)
def test_finite_sum_is_enumerated(case: str) -> None:
    """x*, G and S against autodiff of every row's loss."""
    problem, labels = FINITE[case](), "logistic" in case
    features, targets = regression_data(labels)
    p = np.array([30, 7, 55]) / 92 if not labels else WEIGHTS
    np.testing.assert_allclose(problem.weights, p, rtol=1e-14)
    total, G, S = np.zeros(3), np.zeros((3, 3)), np.zeros((3, 3))
    derivatives = [over_rows(problem.loss, f) for f in (jax.grad, jax.hessian)]
    with jax.enable_x64(True):
        for k in range(3):
            rows, x = (features[k], targets[k].astype(float)), jnp.asarray(problem.truth)
            gradients, hessians = (np.asarray(f(x, rows)) for f in derivatives)
            G += p[k] * hessians.mean(axis=0)
            S += p[k] ** 2 * np.cov(gradients, rowvar=False, bias=True)
            total += p[k] * gradients.mean(axis=0)
    np.testing.assert_allclose(total, 0.0, atol=1e-14)
    np.testing.assert_allclose(problem.G, G, rtol=1e-12)
    np.testing.assert_allclose(problem.S, S, rtol=1e-12, atol=1e-16)


def row_at(uniform: object, client: object) -> tuple[jax.Array, jax.Array]:
    return observe_row(Draws(uniform=uniform), client)  # type: ignore[return-value]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1_000, 65_537, MAX_ROWS - 1, MAX_ROWS])
def test_row_index_stays_in_range(size: int) -> None:
    # The rows are their own numbers; one row beyond n_k stands for the padding.
    client = DatasetClient((np.arange(size + 1, dtype=np.int32), np.zeros(1, np.float32)), size)
    for u, expected in ((0.0, 0), (np.nextafter(np.float32(1), np.float32(0)), size - 1)):
        assert row_at(np.full(1, u, np.float32), client)[0] == expected


def test_rows_are_drawn_uniformly_from_clients_of_unequal_size() -> None:
    sizes = (1, 5, 8, 100)
    rows = [np.arange(n) for n in sizes]
    problem = dataset(rows, rows, loss=lambda x, row: (x[0] - row[0]) ** 2, init=np.zeros(1))
    np.testing.assert_allclose(problem.weights, np.array(sizes) / 114)
    u = ((np.arange(100_000) + 0.5) / 100_000).astype(np.float32)
    for k, n in enumerate(sizes):
        client = jax.tree.map(lambda leaf, k=k: leaf[k], problem.clients)
        both = jax.vmap(row_at, (0, None))(u[:, None], client)
        np.testing.assert_array_equal(both[0], both[1])
        counts = np.bincount(np.asarray(both[0]), minlength=n)
        assert len(counts) == n and np.abs(counts - 100_000 / n).max() <= 1


def test_both_precisions_draw_the_same_rows() -> None:
    client = DatasetClient((np.arange(99_991), np.zeros(99_991)), 99_991)
    u = np.random.default_rng(0).uniform(size=(100_000, 1)).astype(np.float32)
    single = jax.vmap(row_at, (0, None))(u, client)
    with jax.enable_x64(True):
        double = jax.vmap(row_at, (0, None))(u.astype(np.float64), client)
    np.testing.assert_array_equal(single[0], double[0])


def test_dataset_of_pytrees_with_a_loss_of_ones_own() -> None:
    features = [{"x": np.ones((n, 2)), "id": np.arange(n)} for n in (2, 3)]
    targets = [[0.0, 1.0], [2.0, 3.0, 4.0]]

    def loss(params: dict[str, jax.Array], row: object) -> jax.Array:
        inputs, target = row  # type: ignore[misc]
        return (jnp.sum(inputs["x"] * params["w"]) - target) ** 2

    init = {"w": np.zeros(2), "bias": np.zeros(())}
    problem = dataset(features, targets, loss=loss, init=init, name="own")
    assert problem.truth is None and problem.G is None and problem.name == "own"
    client = jax.tree.map(lambda leaf: leaf[1], problem.clients)
    inputs, target = row_at(np.array([0.99], np.float32), client)
    assert inputs["id"] == 2 and jnp.issubdtype(inputs["id"].dtype, jnp.integer) and target == 4.0
    known = dataset(features, targets, loss=loss, init=init, truth=init)
    np.testing.assert_array_equal(known.true_vector, 0.0)


def test_logistic_dataset_that_is_almost_separable_or_badly_scaled() -> None:
    x = np.array([-3.0, -2.0, -1.0, 1.0, 2.0, 3.0])
    labels = np.array([0, 0, 1, 0, 1, 1])
    for scale in (1.0, 1e-6, 1e6):
        A = np.stack([np.ones(6), scale * x], axis=1)
        problem = dataset([A], [labels], loss="logistic")
        residual = 1 / (1 + np.exp(-A @ problem.truth)) - labels
        np.testing.assert_allclose(residual @ A / scale, 0.0, atol=1e-9)


SEPARABLE = {
    "completely": (np.array([[-1.0], [-2.0], [1.0], [2.0]]), [0, 0, 1, 1]),
    "one label": (ONE, [1, 1, 1, 1]),
    "quasi": (np.array([[1.0, 0.0], [1.0, 0.0], [1.0, 1.0], [1.0, 2.0]]), [0, 1, 1, 1]),
    "quasi, at zero": (np.array([[1.0, -1.0], [1.0, 0.0], [1.0, 0.0], [1.0, 1.0]]), [0, 0, 1, 1]),
}


@pytest.mark.parametrize("case", SEPARABLE)
def test_separable_data_is_refused(case: str) -> None:
    features, labels = SEPARABLE[case]
    with refused("targets", "data"):
        dataset([features], [labels], loss="logistic")


def test_clients_without_weight_do_not_decide_the_optimum() -> None:
    features, targets = [ONE, 2 * ONE], [np.arange(4.0), np.zeros(4)]
    problem = dataset(features, targets, loss="squared", weights=[1.0, 0.0])
    np.testing.assert_allclose(problem.truth, [1.5], rtol=1e-14)
