"""What a client computes from its own rows, and all that it sends: nothing else leaves it.

A client trains as it likes, in any framework. Beside its model it sends two kinds of messages, d numbers being the
size of the model:

| message | when | what leaves | numbers | what it reveals |
|---|---|---|---|---|
| `RoundMessage` | every round | parameters after the local steps | d | what federated training sends anyway |
| | | number of rows | 1 | the size of the client |
| | | sum of gradients at the server's anchor | d | the mean score of the rows of the round |
| | in a few rounds | mean Hessians at two anchors | 2d² | second moments of the covariates of the rows of the round |
| `FinalMessage` | once, at the end | number of rows | 1 | the size of the client |
| | | mean score at x̂ | d | where its own minimum lies, compared with x̂ |
| | | covariance of the scores | d² | second moments of residuals times covariates |
| | | Hessian at x̂ | d² | second moments of its covariates |

All are sums over rows: no row leaves. But sums over few rows reveal them: with one row in a round the gradient of a
regression is a multiple of that row, and with fewer rows than parameters a Hessian spans exactly their covariates. A
client with no more rows than parameters therefore refuses to make a Hessian or a covariance unless it is allowed
(`few_rows=True`). Nothing here adds noise: this is no differential privacy. Secure aggregation hides single rounds, since
the server needs weighted sums of them only; final messages are read one by one.

A loss is the name of a family, for rows (A, y) with A (n, d) and y (n,), or any JAX function `loss(params, row)` of one row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.flatten_util import ravel_pytree
from numpy.typing import NDArray

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.display import align
from jaxlsgd.problems import losses

FloatArray = NDArray[np.floating[Any]]
Params = Any  # an array, or a pytree of them
Rows = Any  # a pytree of arrays whose first axis is rows; (A, y) for a family
RowLoss = Callable[[Any, Any], Any]  # (params, row) → number, written in JAX

FAMILIES = {
    "gaussian": losses.SQUARED,
    "logistic": losses.LOGISTIC,
    "poisson": losses.POISSON,
    "huber": losses.HUBER,
    "quantile": losses.QUANTILE,
}
_NUMBERS = {"huber": ("threshold",), "quantile": ("level", "bandwidth")}


class RoundMessage(NamedTuple):
    """What a client sends after the local steps of a round."""

    params: Params  # after its local steps; None if the framework sends and averages them itself
    examples: int  # rows that the client has, its weight unless the server has others
    steps: int  # E, local steps of the round
    gradient_sum: FloatArray  # (d,) Σ over steps of the mean gradient of the step's rows, at the server's anchor
    hessian: FloatArray | None = None  # (d, d) mean over the rows of the round, at the anchor
    hessian_before: FloatArray | None = None  # the same rows at the anchor before
    observations: int = 0  # rows behind the Hessians


class FinalMessage(NamedTuple):
    """What a client sends once, at the end: 2d² + d numbers, and how many rows it has."""

    examples: int  # n_k
    score: FloatArray  # (d,) mean gradient at x̂
    covariance: FloatArray  # (d, d) of the gradients of single rows, around their mean
    hessian: FloatArray  # (d, d) mean at x̂


def round_message(
    loss: str | RowLoss,
    rows: Rows,
    anchors: Sequence[Params],
    *,
    steps: int,
    examples: int,
    params: Params = None,
    hessians: bool = False,
    numbers: Sequence[float] = (),
    few_rows: bool = False,
) -> RoundMessage:
    """Return what a client sends after a round.

    Args:
      loss: the name of a family ("gaussian", "logistic", "poisson", "huber", "quantile"), or a JAX function
        `loss(params, row)` of one row.
      rows: the rows of all local steps of the round, those of one step after those of another, in batches of one size.
      anchors: where the server has them evaluated, `Broadcast.anchors`.
      steps: E, how many local steps were taken with these rows.
      examples: how many rows the client has.
      params: after the local steps; None if the framework sends and averages them itself.
      hessians: whether to send Hessians in this round, `Broadcast.hessians`.
      numbers: of the family, on the scale of the response: (threshold,) for "huber", (level, bandwidth) for "quantile".
      few_rows: allow Hessians of no more rows than parameters.
    """
    checks.count("steps", steps)
    checks.count("examples", examples)
    count = _count(rows)
    anchor, before = (flatten(one) for one in anchors)
    total = steps * np.mean(_scores(loss, anchors[0], rows, numbers), axis=0)
    if not hessians:
        return RoundMessage(params, examples, steps, total)
    _refuse_few("rows", count, len(anchor), few_rows)
    here = _hessian(loss, anchors[0], rows, numbers)
    there = here if np.array_equal(anchor, before) else _hessian(loss, anchors[1], rows, numbers)
    return RoundMessage(params, examples, steps, total, here, there, count)


def final_message(
    loss: str | RowLoss,
    rows: Rows,
    params: Params,
    *,
    numbers: Sequence[float] = (),
    few_rows: bool = False,
) -> FinalMessage:
    """Return what a client sends once, at the end: score, its covariance and Hessian at x̂ on all of its own rows.

    Args:
      loss: as in `round_message`.
      rows: all rows of the client.
      params: x̂, as the server has sent it.
      numbers: as in `round_message`.
      few_rows: allow a client with no more rows than parameters, whose rows these numbers would give away.

    Example::

        message = final_message("logistic", (A, y), params)
    """
    count, dim = _count(rows), len(flatten(params))
    _refuse_few("rows", count, dim, few_rows)
    if count < 2:
        raise refusal("rows", "be at least 2 for a covariance", count)
    scores = _scores(loss, params, rows, numbers)
    mean = scores.mean(axis=0)
    off = scores - mean
    covariance = off.T @ off / (count - 1)
    return FinalMessage(count, mean, covariance, _hessian(loss, params, rows, numbers))


def numbers_leaving(message: RoundMessage | FinalMessage) -> int:
    """Return how many numbers leave a client with a message."""
    leaves = jax.tree.leaves(tuple(message))
    return sum(int(np.size(leaf)) for leaf in leaves)


def what_leaves(dim: int) -> str:
    """Return the table of what leaves a client with `dim` parameters, how many numbers, and what it reveals."""
    d = checks.count("dim", dim)
    body = [
        ["each round", "parameters", f"{d}", "what federated training sends anyway"],
        ["", "rows, steps, rows of the round", "3", "the size of the client"],
        ["", "sum of gradients at the anchor", f"{d}", "the mean score of the rows of the round"],
        ["a few rounds", "Hessians at two anchors", f"{2 * d * d}", "second moments of covariates"],
        ["at the end", "rows", "1", "the size of the client"],
        ["", "mean score at the estimate", f"{d}", "where its own minimum lies"],
        ["", "covariance of scores", f"{d * d}", "second moments of residuals times covariates"],
        ["", "Hessian at the estimate", f"{d * d}", "second moments of covariates"],
    ]
    return align([["when", "what leaves", "numbers", "what it reveals"], *body], left=(0, 1, 3))


def flatten(params: Params) -> FloatArray:
    """Return parameters as one float64 vector, in the order of `jax.flatten_util.ravel_pytree`."""
    leaves = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(params)]
    return np.concatenate(leaves) if leaves else np.zeros(0)


def _count(rows: Rows) -> int:
    """Return the number of rows; refuse none, and arrays of different lengths."""
    sizes = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(rows)}
    if len(sizes) != 1 or sizes == {()}:
        raise refusal("rows", "be arrays with one first axis of rows", sorted(sizes))
    (count,) = next(iter(sizes))
    if count == 0:
        raise refusal("rows", "be at least 1", count)
    return int(count)


def _refuse_few(argument: str, count: int, dim: int, allowed: bool) -> None:
    if count <= dim and not allowed:
        rule = f"be more than the {dim} parameters, or a Hessian would give them away"
        raise refusal(argument, rule, count, "; few_rows=True sends it all the same")


def _scores(
    loss: str | RowLoss, params: Params, rows: Rows, numbers: Sequence[float]
) -> FloatArray:
    """Return the gradient of every row, (n, d)."""
    if isinstance(loss, str):
        part, A, y, x = _family(loss, params, rows, numbers)
        return part.first(np, A @ x, y, tuple(numbers))[:, None] * A
    with jax.enable_x64(True):
        return np.asarray(_jax_scores(loss, _wide(params), _wide(rows)), np.float64)


def _hessian(
    loss: str | RowLoss, params: Params, rows: Rows, numbers: Sequence[float]
) -> FloatArray:
    """Return the mean Hessian, (d, d)."""
    if isinstance(loss, str):
        part, A, y, x = _family(loss, params, rows, numbers)
        bend = part.second(np, A @ x, y, tuple(numbers))
        return (bend[:, None] * A).T @ A / len(A)
    with jax.enable_x64(True):
        return np.asarray(_jax_hessian(loss, _wide(params), _wide(rows)), np.float64)


def _family(
    name: str, params: Params, rows: Rows, numbers: Sequence[float]
) -> tuple[losses.Loss, FloatArray, FloatArray, FloatArray]:
    checks.choice("loss", name, tuple(FAMILIES))
    wanted = _NUMBERS.get(name, ())
    if len(numbers) != len(wanted):
        raise refusal("numbers", f"be ({', '.join(wanted)}) for {name}", tuple(numbers))
    if not (isinstance(rows, (tuple, list)) and len(rows) == 2):
        raise refusal("rows", "be (A, y) for a family", type(rows).__name__)
    x = flatten(params)
    A, y = (np.asarray(one, np.float64) for one in rows)
    if A.ndim != 2 or A.shape[1] != len(x):
        raise refusal("rows[0]", f"have shape (rows, {len(x)})", A.shape)
    if y.shape != A.shape[:1]:
        raise refusal("rows[1]", f"have shape {A.shape[:1]}", y.shape)
    return FAMILIES[name], A, y, x


def _wide(tree: Any) -> Any:
    def widened(leaf: Any) -> Any:
        found = np.asarray(leaf)
        return found.astype(np.float64) if found.dtype.kind in "fV" else found

    return jax.tree.map(widened, tree)


@functools.partial(jax.jit, static_argnums=0)
def _jax_scores(loss: RowLoss, params: Params, rows: Rows) -> Any:
    flat, shaped = ravel_pytree(params)
    return jax.vmap(jax.grad(lambda x, row: loss(shaped(x), row)), (None, 0))(flat, rows)


@functools.partial(jax.jit, static_argnums=0)
def _jax_hessian(loss: RowLoss, params: Params, rows: Rows) -> Any:
    flat, shaped = ravel_pytree(params)
    mean = lambda x: jax.vmap(lambda row: loss(shaped(x), row))(rows).mean()  # noqa: E731
    return jax.hessian(mean)(flat)
