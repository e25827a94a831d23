"""A problem made of data: clients hold rows, and an observation is a row drawn at random."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.forms import OuterProduct, Scaled
from jaxlsgd.core.problem import Array, Draws, Observation, Params, Problem, check_finite
from jaxlsgd.problems import _moments
from jaxlsgd.problems._common import MAX_MATRIX_DIM
from jaxlsgd.problems.linear import squared_gradient, squared_hessian, squared_loss
from jaxlsgd.problems.logistic import logistic_gradient, logistic_hessian, logistic_loss
from jaxlsgd.problems.losses import LOGISTIC, SQUARED, Loss

MAX_ROWS = 2**23  # a float32 uniform has 23 random bits


def read_rows(name: str, clients: Any) -> list[Any]:
    """Return the clients' rows as pytrees of arrays; a list within a client is an array."""
    if not isinstance(clients, (list, tuple, np.ndarray, jax.Array)) or len(clients) == 0:
        raise refusal(name, "be a sequence with one entry per client", clients, code="type")
    found = [jax.tree.map(_as_rows, c, is_leaf=lambda x: isinstance(x, list)) for c in clients]
    for k, client in enumerate(found):
        shapes = [leaf.shape for leaf in jax.tree.leaves(client)]
        if not shapes or any(shape[:1] != shapes[0][:1] or not shape for shape in shapes):
            raise refusal(f"{name}[{k}]", "have arrays of n_k rows", shapes, code="shape")
        kinds = [str(leaf.dtype) for leaf in jax.tree.leaves(client)]
        if any(leaf.dtype.kind not in "fiub" for leaf in jax.tree.leaves(client)):
            raise refusal(f"{name}[{k}]", "hold real numbers", kinds, code="type")
        if _row_shape(client) != _row_shape(found[0]):
            rule = f"have rows of the shape of client 0's, {_row_shape(found[0])}"
            raise refusal(f"{name}[{k}]", rule, _row_shape(client), code="shape")
    return found


def _as_rows(leaf: Any) -> np.ndarray:
    try:
        return np.asarray(leaf)
    except ValueError:  # ragged
        return np.asarray(leaf, object)


def _row_shape(client: Any) -> Any:
    return jax.tree.structure(client), [leaf.shape[1:] for leaf in jax.tree.leaves(client)]


def check_sizes(features: list[Any], targets: list[Any]) -> np.ndarray:
    """Return the n_k; refuse clients that are empty or too long, and data that is not finite."""
    if len(features) != len(targets):
        rule = f"have one entry for each of the {len(features)} clients"
        raise refusal("targets", rule, len(targets), code="shape")
    counts = [len(jax.tree.leaves(client)[0]) for client in features]
    for k, n in enumerate(counts):
        other = len(jax.tree.leaves(targets[k])[0])
        if n != other:
            raise refusal(f"targets[{k}]", f"have {n} rows as in features", other, code="shape")
        if not 1 <= n <= MAX_ROWS:
            raise refusal(f"features[{k}]", f"have 1 to {MAX_ROWS} rows", n)
    check_finite("features", features)
    check_finite("targets", targets)
    return np.array(counts, np.int32)


def pad(clients: Sequence[Any], length: int) -> Any:
    """Stack the clients' rows to (K, length, ...), with zeros after the n_k."""

    def stack(*leaves: np.ndarray) -> np.ndarray:
        padded = np.zeros((len(leaves), length, *leaves[0].shape[1:]), np.result_type(*leaves))
        for row, leaf in zip(padded, leaves, strict=True):
            row[: len(leaf)] = leaf
        return padded

    return jax.tree.map(stack, *clients)


ABOUT = (
    "about the minimiser of these rows, not the population that they were drawn from; for that, "
    "see jaxlsgd.fit_table"
)


class DatasetClient(NamedTuple):
    """A client's rows, padded to the length of the longest client's."""

    rows: tuple[Any, Any]  # features and targets, pytrees with leading dimension max n_k
    size: Any  # () int32, n_k


class _Closed(NamedTuple):
    loss: Callable[..., Array]
    gradient: Callable[..., Scaled]
    hessian: Callable[..., OuterProduct]
    solve: Callable[..., np.ndarray]
    scalar: Loss  # f(z, b), z = aᵀx


_CLOSED = {
    "squared": _Closed(
        squared_loss,
        squared_gradient,
        squared_hessian,
        _moments.solve_squared,
        SQUARED,
    ),
    "logistic": _Closed(
        logistic_loss,
        logistic_gradient,
        logistic_hessian,
        _moments.solve_logistic,
        LOGISTIC,
    ),
}


def observe(draws: Draws, client: Any) -> Observation:
    """Return row ⌊u n_k⌋ of a `DatasetClient`."""
    # float32 in every precision, so that a float64 run draws the same rows.
    size = jnp.asarray(client.size).astype(jnp.int32)
    place = draws.uniform[0].astype(jnp.float32) * size.astype(jnp.float32)
    index = jnp.minimum(jnp.floor(place).astype(jnp.int32), size - 1)  # u n_k can round up to n_k
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[index], client.rows)


def dataset(
    features: Sequence[Any],
    targets: Sequence[Any],
    *,
    loss: Literal["squared", "logistic"] | Callable[[Params, Observation], Array],
    init: Any = None,
    weights: ArrayLike | None = None,
    gradient: Callable[[Params, Observation], Params] | None = None,
    hessian: Callable[[Params, Observation], Array] | None = None,
    truth: Params | None = None,
    name: str = "dataset",
) -> Problem:
    """A finite-sum problem: minimise Σ_k p_k (1/n_k) Σ_i f(x; ξ_ki) over rows held by clients.

    An observation of client k is (features[k][i], targets[k][i]) with i uniform on its n_k rows,
    drawn with replacement: i = ⌊u n_k⌋. As u is a float32, the rows' probabilities are equal up to
    a relative n_k 2⁻²³. Intervals are therefore about the minimiser of these rows, and shrink with the number
    of steps, however many rows there are; for the population, use `jaxlsgd.fit_table`. Clients are padded to
    the longest, so that memory is K · max n_k rows.

    Args:
      features: one array (n_k, ...) per client, or one pytree of such arrays; the n_k may differ.
      targets: the same for the targets, (n_k,) for the losses with a name.
      loss: `(params, (features, targets)) → scalar` of one row, or 'squared', ½(aᵀx − b)², or
        'logistic', log(1 + eᶻ) − bz with z = aᵀx and b ∈ {0, 1}. With a name the problem has x*,
        G and S of the finite sum, and the data is float64; an intercept must be among the features.
      init: x_0, any pytree; zeros if None, which needs a loss with a name.
      weights: p_k, (K,); n_k/Σn if None, which makes the objective the average over all rows.
      gradient: as in `Problem`, for a loss without a name.
      hessian: as in `Problem`, for a loss without a name.
      truth: x* of a loss without a name, if it is known.
      name: short name for tables.

    Returns:
      The problem, with one uniform draw per observation.

    Example:
      >>> import numpy as np
      >>> rows = np.eye(2), np.array([[1.0, 1.0], [1.0, -1.0], [2.0, 0.0]])
      >>> problem = dataset(rows, ([1.0, 2.0], [3.0, -1.0, 2.0]), loss="squared")
      >>> problem.truth.round(6).tolist(), problem.weights.tolist()
      ([1.0, 2.0], [0.4, 0.6])

    Reference:
      "Statistical Estimation and Inference via Local SGD in Federated Learning", the finite-sum
      case of its problem set-up.
    """
    features, targets = read_rows("features", features), read_rows("targets", targets)
    sizes = check_sizes(features, targets)
    p = checks.weights(sizes / sizes.sum() if weights is None else weights, len(sizes))
    given = {"gradient": gradient, "hessian": hessian, "truth": truth}
    if callable(loss):
        if init is None:
            raise refusal("init", "be given with a loss without a name", None, code="missing")
        known: dict[str, Any] = {"init": init, "loss": loss, **given}
    else:
        features, targets = _check_regression(features, targets, loss)
        known = _closed_form(features, targets, p, loss, init, given)
    length = int(sizes.max())
    return Problem(
        num_clients=len(sizes),
        draws=Draws(uniform=1),
        observe=observe,
        weights=p,
        clients=DatasetClient((pad(features, length), pad(targets, length)), sizes),
        name=name,
        about=ABOUT,
        **known,
    )


def _closed_form(
    features: Any, targets: Any, weights: np.ndarray, loss: str, init: Any, given: dict[str, Any]
) -> dict[str, Any]:
    """Return the fields of a problem with a named loss."""
    for argument, value in given.items():
        if value is not None:
            raise checks.refusal(argument, f"be None with loss={loss!r}", value, code="unwanted")
    dim, closed = features[0].shape[1], _CLOSED[loss]
    truth = closed.solve(features, targets, weights)
    G, S = None, None
    if dim <= MAX_MATRIX_DIM:
        G, S = _moments.moments(features, targets, weights, truth, closed.scalar)
    return {
        "init": np.zeros(dim) if init is None else checks.array("init", init, (dim,)),
        "loss": closed.loss,
        "gradient": closed.gradient,
        "hessian": closed.hessian,
        "truth": truth,
        "G": G,
        "S": S,
        "convex": True,
    }


def _check_regression(features: list[Any], targets: list[Any], loss: Any) -> tuple[Any, Any]:
    """Return float64 rows (n_k, d) and targets (n_k,); refuse other shapes and labels."""
    if not isinstance(loss, str) or loss not in _CLOSED:
        raise checks.refusal(
            "loss", f"be a function or one of {sorted(_CLOSED)}", loss, code="choice"
        )
    for argument, data, ndim in (("features", features, 2), ("targets", targets, 1)):
        if not isinstance(data[0], np.ndarray) or data[0].ndim != ndim:
            shape = "(n_k, d)" if ndim == 2 else "(n_k,)"
            found = jax.tree.map(np.shape, data[0])
            raise refusal(argument, f"be arrays {shape} for loss={loss!r}", found, code="shape")
    if features[0].shape[1] == 0:
        raise refusal("features", "have at least one column", features[0].shape, code="shape")
    if loss == "logistic":
        for k, labels in enumerate(targets):
            if not np.isin(labels, (0, 1)).all():
                raise refusal(f"targets[{k}]", "have labels 0 and 1", labels)
    rows, numbers = ([np.asarray(x, np.float64) for x in data] for data in (features, targets))
    return rows, numbers
