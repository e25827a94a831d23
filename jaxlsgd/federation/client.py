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

All are sums over rows: no row leaves. But sums over few rows reveal them. All rows of a client can be computed from one final message,
or from the Hessians of one round, if there are at most about d + 4 (`benchmarks/results/disclosure.md`). A client therefore refuses a
final message of fewer than max(20, 5d) different rows, and Hessians of a round with fewer than max(15, 3d); `least_rows` sets
another number. More rows are no guarantee. Messages at several parameters say more about the same rows. Whoever knows all columns but
one can compute that one from up to about d² rows. A row that alone has its level of a factor can be read off, however many there
are. Only a formal guarantee, such as differential privacy, protects a row, and nothing here adds noise. A message also has a digest
of what it answers.

Secure aggregation can hide single rounds only if the server knows the probability π_k with which client k takes part,
1 if all do in every round. Clients then multiply what they send by p_k/π_k, and the server takes the sum for the message of
one client, whose model it averages itself. Otherwise the server keeps the sums of every client apart, and final messages are
always read one by one.

A loss is the name of a family, for rows (A, y) with A (n, d) and y (n,), or any JAX function `loss(params, row)` of one row.
Rows of a family may have weights and offsets: (A, y, weights, offsets), either of them None. `jaxlsgd.fit_table` makes its
estimates and variances of these very messages, with all clients in one process.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import scipy.linalg
from jax.flatten_util import ravel_pytree
from numpy.typing import NDArray

from jaxlsgd.core import checks
from jaxlsgd.core.checks import Refusal, refusal
from jaxlsgd.core.display import align
from jaxlsgd.core.products import across, along, gram
from jaxlsgd.problems import losses

FloatArray = NDArray[np.floating[Any]]
Params = Any  # an array, or a pytree of them
Rows = Any  # a pytree of arrays whose first axis is rows; (A, y) or (A, y, weights, offsets) for a family
RowLoss = Callable[[Any, Any], Any]  # (params, row) → number, written in JAX

_MOST_LEVERAGE = 1 - 1e-8
_ROWS_AT_ONCE = 1024  # of which different ones are counted


class RoundMessage(NamedTuple):
    """What a client sends after the local steps of a round."""

    params: Params  # after its local steps; None if the framework sends and averages them itself
    examples: int  # rows that the client has, its weight unless the server has others
    steps: int  # E, local steps of the round
    gradient_sum: FloatArray  # (d,) Σ over steps of the mean gradient of the step's rows, at the server's anchor
    answers: int  # digest of the round and the anchor
    hessian: FloatArray | None = None  # (d, d) mean over the rows of the round, at the anchor
    hessian_before: FloatArray | None = None  # the same rows at the anchor before
    observations: int = 0  # rows behind the Hessians


class FinalMessage(NamedTuple):
    """What a client sends once, at the end: 2d² + d numbers, how many rows it has, and what it answers."""

    examples: int  # n_k
    score: FloatArray  # (d,) mean gradient at x̂
    covariance: FloatArray  # (d, d) of the gradients of single rows, around their mean
    hessian: FloatArray  # (d, d) mean at x̂
    answers: int  # digest of x̂


def round_message(
    loss: str | RowLoss,
    rows: Rows,
    anchors: Sequence[Params],
    *,
    round: int,
    steps: int,
    examples: int,
    params: Params = None,
    hessians: bool = False,
    numbers: Sequence[float] = (),
    least_rows: int | None = None,
) -> RoundMessage:
    """Return what a client sends after a round.

    Args:
      loss: the name of a family ("gaussian", "logistic", "poisson", "huber", "quantile", "negative_binomial"), or a
        JAX function `loss(params, row)` of one row.
      rows: the rows of all local steps of the round, those of one step after those of another, in batches of one size.
      anchors: where the server has them evaluated, `Broadcast.anchors`.
      round: which round it is, `Broadcast.round`.
      steps: E, how many local steps were taken with these rows.
      examples: how many rows the client has. Hessians need as many as a final message does.
      params: after the local steps; None if the framework sends and averages them itself.
      hessians: whether to send Hessians in this round, `Broadcast.asks(name)`.
      numbers: of the family, on the scale of the response: (delta,) for "huber", (tau, bandwidth) for "quantile";
        (dispersion,) for "negative_binomial".
      least_rows: different rows of positive weight that Hessians need, max(15, 3d) if None; 0 sends them in any case.
    """
    checks.count("steps", steps)
    checks.count("examples", examples)
    count = _count(rows)
    if not isinstance(anchors, (tuple, list)) or hasattr(anchors, "_fields") or len(anchors) != 2:
        rule = "be the two of the server's message, sent.anchors"
        raise refusal("anchors", rule, type(anchors).__name__, code="type")
    anchor, before = (flatten(one) for one in anchors)
    now = _derivatives(loss, rows, anchors[0], numbers)
    total = steps * _of_finite_rows(now.score(), rows)
    answers = digest(anchor, checks.count("round", round))
    if not hessians:
        return RoundMessage(params, examples, steps, total, answers)
    _refuse_few_of_round(loss, rows, count, steps, examples, len(anchor), least_rows)
    here = there = now.hessian()
    if not np.array_equal(anchor, before):
        there = _derivatives(loss, rows, anchors[1], numbers).hessian()
    return RoundMessage(params, examples, steps, total, answers, here, there, count)


def final_message(
    loss: str | RowLoss,
    rows: Rows,
    params: Params,
    *,
    numbers: Sequence[float] = (),
    all_rows: FloatArray | None = None,
    least_rows: int | None = None,
) -> FinalMessage:
    """Return what a client sends once, at the end: score, its covariance and Hessian at x̂ on all of its own rows.

    Args:
      loss: as in `round_message`.
      rows: all rows of the client.
      params: x̂, as the server has sent it.
      numbers: as in `round_message`.
      all_rows: Σ_k n_k H_k at x̂, as the server has it after a first final message of all clients, (d, d). The score of
        each row is then divided by 1 minus its leverage, for `finish(..., variance="HC3")`; families only.
      least_rows: different rows of positive weight that the client must have, max(20, 5d) if None. Columns of categories
        have few different rows, however many persons share them. The message then gives away how many persons are
        in each cell; if no cell is small, 0 sends it. One row has no covariance: its square is sent.

    Example::

        message = final_message("logistic", (A, y), params)
    """
    count, dim = _count(rows), len(flatten(params))
    least = (
        least_of_client(dim) if least_rows is None else checks.count("least_rows", least_rows, 0)
    )
    if (different := distinct_rows(*_as_rows(loss, rows), least)) < least:
        raise _too_few("rows", least, different, "leave this client out, or join it with another")
    found = _derivatives(loss, rows, params, numbers)
    scores, mean = found.scores(), _of_finite_rows(found.score(), rows)
    if all_rows is not None:
        if np.shape(all_rows) != (dim, dim):
            raise refusal("all_rows", f"have shape {(dim, dim)}", np.shape(all_rows), code="shape")
        if not np.all(np.linalg.eigvalsh((all_rows + all_rows.T) / 2) > 0):
            raise refusal("all_rows", "be positive definite", "another matrix", code="data")
    if all_rows is None:
        off = scores - mean if count > 1 else scores
        squares = gram(off, off)
    else:
        off = scores / found.free(all_rows)[:, None]
        squares = gram(off, off) - (count * np.outer(mean, mean) if count > 1 else 0.0)
    covariance = squares / max(count - 1, 1)
    return FinalMessage(count, mean, covariance, found.hessian(), digest(params))


def numbers_leaving(message: RoundMessage | FinalMessage) -> int:
    """Return how many numbers leave a client with a message."""
    leaves = jax.tree.leaves(tuple(message))
    return sum(int(np.size(leaf)) for leaf in leaves)


def what_leaves(dim: int) -> str:
    """Return the table of what leaves a client with `dim` parameters, how many numbers, and what it reveals."""
    d = checks.count("dim", dim)
    body = [
        ["each round", "parameters", f"{d}", "what federated training sends anyway"],
        ["", "rows, steps, rows of the round, digest", "4", "the size of the client"],
        ["", "sum of gradients at the anchor", f"{d}", "the mean score of the rows of the round"],
        ["a few rounds", "Hessians at two anchors", f"{2 * d * d}", "second moments of covariates"],
        ["at the end", "rows, digest", "2", "the size of the client"],
        ["", "mean score at the estimate", f"{d}", "where its own minimum lies"],
        ["", "covariance of scores", f"{d * d}", "second moments of residuals times covariates"],
        ["", "Hessian at the estimate", f"{d * d}", "second moments of covariates"],
    ]
    return align([["when", "what leaves", "numbers", "what it reveals"], *body], left=(0, 1, 3))


def flatten(params: Params) -> FloatArray:
    """Return parameters as one float64 vector, in the order of `jax.flatten_util.ravel_pytree`."""
    leaves = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(params)]
    return np.concatenate(leaves) if leaves else np.zeros(0)


def digest(params: Params, round: int = 0) -> int:
    """Return a whole number below 2**53 that tells places apart, and rounds; it is sent back as what a message answers.

    Numbers are rounded to float32, so that a framework that sends float32 answers for the same place. Not a secret.
    """
    code = hashlib.sha256(str(round).encode())
    with np.errstate(over="ignore"):
        code.update((flatten(params).astype("<f4") + np.float32(0.0)).tobytes())
    return int.from_bytes(code.digest()[:7], "big") >> 3


def _count(rows: Rows) -> int:
    """Return the number of rows; refuse none, and arrays of different lengths."""
    leaves = jax.tree.leaves(rows)
    if any(np.asarray(leaf).dtype.kind in "OSUMm" for leaf in leaves):
        raise refusal("rows", "be numbers", "text or objects", code="type")
    sizes = {np.shape(leaf)[:1] for leaf in leaves}
    if len(sizes) != 1 or sizes == {()}:
        raise refusal("rows", "be arrays with one first axis of rows", sorted(sizes), code="shape")
    (count,) = next(iter(sizes))
    if count == 0:
        raise refusal("rows", "be at least 1", count, code="data")
    return int(count)


def least_of_client(dim: int) -> int:
    """Return how many different rows a client must have, unless it says another number."""
    return max(20, 5 * dim)


def least_of_round(dim: int) -> int:
    """Return how many different rows the Hessians of a round need, unless the client says another number."""
    return max(15, 3 * dim)


def distinct_rows(rows: Rows, weights: Any, enough: int) -> int:
    """Return how many different rows of positive weight there are, counted up to `enough` or a little more."""
    arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(rows)]
    count = len(arrays[0])
    weights = None if weights is None else np.asarray(weights)
    seen: set[bytes] = set()
    for start in range(0, count, _ROWS_AT_ONCE):
        if len(seen) >= enough:
            break
        part = np.arange(start, min(start + _ROWS_AT_ONCE, count))
        part = part if weights is None else part[weights[part] > 0]
        each = [np.reshape(one[part] + 0, (len(part), -1)) for one in arrays]  # −0.0 is 0.0
        block = np.concatenate([np.ascontiguousarray(one).view(np.uint8) for one in each], axis=1)
        seen.update(map(bytes, block))
    return len(seen)


def _as_rows(loss: str | RowLoss, rows: Rows) -> tuple[Rows, Any]:
    """Return what tells rows apart, and their weights."""
    if isinstance(loss, str) and isinstance(rows, (tuple, list)) and len(rows) > 2:
        return (*rows[:2], *rows[3:]), rows[2]
    return rows, None


def _refuse_few_of_round(
    loss: str | RowLoss,
    rows: Rows,
    count: int,
    steps: int,
    examples: int,
    dim: int,
    least_rows: int | None,
) -> None:
    if least_rows is None:
        least, most = least_of_round(dim), least_of_client(dim)
    else:
        least = most = checks.count("least_rows", least_rows, 0)
    if examples < most:
        raise _too_few("examples", most, examples, "leave this client out, or join it with another")
    different = distinct_rows(*_as_rows(loss, rows), least)
    if different < least:
        # If draws repeat rows, as many more of them.
        needed = -(-least * count // max(different, 1))
        batch, more = -(-needed // steps), -(-needed * steps // count)
        what = f"take batches of {batch} in {steps} steps, or {more} steps with batches of {count // steps}"
        raise _too_few("rows", least, different, what)


def _too_few(argument: str, least: int, count: int, what: str) -> Refusal:
    rule = f"be at least {least} different rows of positive weight, as sums over few give rows away"
    return refusal(argument, rule, count, f"; {what}, or set least_rows", code="disclosure")


class Linear(NamedTuple):
    """Rows of a family, with the derivatives of their loss in the linear predictor, times weights of mean 1."""

    A: FloatArray  # (n, d)
    first: FloatArray  # (n,)
    second: FloatArray  # (n,)

    def scores(self) -> FloatArray:
        """Return the gradient of every row, (n, d)."""
        return self.first[:, None] * self.A

    def score(self) -> FloatArray:
        """Return their mean, (d,)."""
        return across(self.A, self.first) / len(self.A)

    def hessian(self) -> FloatArray:
        """Return the mean Hessian, (d, d)."""
        root = np.sqrt(self.second / len(self.A))[:, None] * self.A
        return gram(root, root)

    def free(self, all_rows: FloatArray) -> FloatArray:
        """Return 1 minus the leverage of each row in a Hessian of all rows, (n,)."""
        half = scipy.linalg.solve_triangular(
            np.linalg.cholesky(all_rows), self.A.T, lower=True, check_finite=False
        )
        leverage = self.second * np.einsum("ij,ij->j", half, half)
        return 1 - np.minimum(leverage, _MOST_LEVERAGE)


class _AnyLoss(NamedTuple):
    """The same of a JAX function of one row."""

    loss: RowLoss
    params: Params
    rows: Rows

    def scores(self) -> FloatArray:
        with jax.enable_x64(True):
            return np.asarray(_jax_scores(self.loss, self.params, self.rows), np.float64)

    def score(self) -> FloatArray:
        return self.scores().mean(axis=0)

    def hessian(self) -> FloatArray:
        with jax.enable_x64(True):
            return np.asarray(_jax_hessian(self.loss, self.params, self.rows), np.float64)

    def free(self, all_rows: FloatArray) -> FloatArray:
        raise refusal(
            "all_rows",
            "be left out unless the loss is a family's name",
            all_rows.shape,
            code="unwanted",
        )


def _derivatives(
    loss: str | RowLoss, rows: Rows, params: Params, numbers: Sequence[float]
) -> Linear | _AnyLoss:
    if isinstance(loss, str):
        return linear(loss, rows, params, numbers)
    return _AnyLoss(loss, _wide(params), _wide(rows))


def linear(loss: str, rows: Rows, params: Params, numbers: Sequence[float] = ()) -> Linear:
    """Return the rows of a family with the derivatives of their loss."""
    checks.choice("loss", loss, tuple(losses.FAMILIES))
    wanted = losses.NUMBERS.get(loss, ())
    if not isinstance(numbers, (tuple, list, np.ndarray)) or len(numbers) != len(wanted):
        raise refusal("numbers", f"be ({', '.join(wanted)}) for {loss}", numbers, code="shape")
    if not (isinstance(rows, (tuple, list)) and 2 <= len(rows) <= 4):
        raise refusal(
            "rows",
            "be (A, y) or (A, y, weights, offsets) for a family",
            type(rows).__name__,
            code="type",
        )
    x = flatten(params)
    A, y = (np.asarray(one, np.float64) for one in rows[:2])
    if A.ndim != 2 or A.shape[1] != len(x):
        raise refusal("rows[0]", f"have shape (rows, {len(x)})", A.shape, code="shape")
    more = [None if one is None else np.asarray(one, np.float64) for one in rows[2:]]
    for i, one in enumerate((y, *more), 1):
        if one is not None and one.shape != A.shape[:1]:
            raise refusal(f"rows[{i}]", f"have shape {A.shape[:1]}", one.shape, code="shape")
    weight, offset = (*more, None, None)[:2]
    z, part = along(A, x), losses.FAMILIES[loss]
    z = z if offset is None else z + offset
    first, second = (each(np, z, y, tuple(numbers)) for each in (part.first, part.second))
    if weight is not None and not (np.all(weight >= 0) and weight.sum() > 0):
        raise refusal("rows[2]", "be weights of at least 0, not all 0", "others")
    if weight is None:
        return Linear(A, first, second)
    weight = weight * (len(y) / weight.sum())
    return Linear(A, weight * first, weight * second)


def _of_finite_rows(score: FloatArray, rows: Rows) -> FloatArray:
    """Return a score; refuse rows that are not finite, which are looked for only if the score is not."""
    if not np.isfinite(score).all():
        for leaf in jax.tree.leaves(rows):
            checks.finite("rows", leaf)
    return score


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
