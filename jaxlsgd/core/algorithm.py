"""The contract of a federated algorithm, written for one client and one replication.

In round m, client k starts from the server's x̄ and repeats

    x_k ← x_k − η_m d_k,     d_k = direction(g_k, ...),     g_k = ∇f_k(x_k; ξ_k).

The server then computes the next x̄ from the clients' mean movement, Σ_k p_k (x_k − x̄), and from whatever
else they send. Local SGD is the algorithm without any additions.

If an algorithm declares a `Participation`, only n clients take part in a round, chosen anew each time and
weighted so that every Σ is unbiased. Nothing is computed for the others.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxlsgd.core import checks
from jaxlsgd.core.checks import blaming, refusal
from jaxlsgd.core.estimator import Estimator, Horizon, Measurement
from jaxlsgd.core.problem import Array


@dataclasses.dataclass(frozen=True)
class Participation:
    """How many clients take part in a round, and how they are chosen.

    Attributes:
      clients: n, how many take part; `core.random.Cohort` has the chosen ones.
      by_weight: if True, n clients are drawn by p_k, with replacement, and each has weight 1/n. If False, n
        different clients are chosen, all sets equally likely, and client k has weight p_k K/n.
    """

    clients: int
    by_weight: bool = False

    def __post_init__(self) -> None:
        checks.count("clients", self.clients, 1)


class Round(NamedTuple):
    """The state in round m that the server and all clients share."""

    params: Any  # (d,) x̄ at the start of the round
    server: Any  # the server's own state
    E: Any  # () E_m
    eta: Any  # () η_m


class Client(NamedTuple):
    """The state of client k."""

    x: Array  # (d,) x_k
    local: Any  # made at the start of every round
    memory: Any  # kept between rounds; changes only at the end of a round


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """A federated algorithm as pure functions on flat parameter vectors (d,).

    A part that is None does what Local SGD does, and costs nothing. Cache builders (`functools.cache`):
    JAX compares functions by identity, and would compile two equal algorithms twice.

    Example, FedProx, whose clients minimise f_k(x) + μ/2 ‖x − x̄‖²::

        @functools.cache
        def fedprox(mu: float) -> Algorithm:
            def direction(gradient, client, round):
                return gradient + mu * (client.x - round.params), client.local

            return Algorithm("fedprox", direction=direction)

    Attributes:
      name: short, for tables and studies.
      init_server: `x_0 → server`, the server's state; nothing if None.
      init_client: `x_0 → memory`, what a client keeps from round to round; nothing if None.
      begin: `(memory, round) → local`, a client's state at the start of a round; nothing if None.
      direction: `(gradient, client, round) → (d_k, local)`, one local step; the gradient if None.
      send: `(client, round) → (message, memory)`, what a client sends when a round ends; the server
        receives Σ_k p_k message. Nothing if None.
      receive: `(moved, message, round) → (x̄, server)`, the server's update from the mean movement
        Σ_k p_k (x_k − x̄) and the mean message; x̄ + moved if None.
      within_theory: whether the paper's theory covers it. If not, coverage is measured, not promised.
      random: whether it draws random numbers. `init_server` is then called as `(x_0, key, weights)`, with the
        two words of the replication's own threefry2x32 key, (2,) uint32, and p_k, (K,); `init_client` as
        `(x_0, k)`, with the client's number, () uint32. `algorithms.client_dropout` is an example.
      least_clients: how many clients a problem must have.
      participation: who takes part in a round; all clients if None. If only some do, clients keep nothing
        between rounds, and `init_client` must be None.
      sends: `d → numbers` that a client sends when a round ends, its model included. If None, d plus the size
        of its message.
      copies: how many copies of one model the parameters of a problem must hold.
      moves_by_gradients: whether Σ_k p_k (x_k − x̄) is −η_m times the sum of the round's mean gradients, so that
        the server can compute that sum. If None, this is so without a `direction`.
      reaches: `(client, round) → 1 or 0`, whether the client's gradients at the server's anchor reach the server in this
        round, which `one_step` needs. All of them do if None; `algorithms.client_dropout` is an example of the other.
    """

    name: str
    init_server: Callable[..., Any] | None = None
    init_client: Callable[..., Any] | None = None
    begin: Callable[[Any, Round], Any] | None = None
    direction: Callable[[Array, Client, Round], tuple[Array, Any]] | None = None
    send: Callable[[Client, Round], tuple[Any, Any]] | None = None
    receive: Callable[[Array, Any, Round], tuple[Array, Any]] | None = None
    within_theory: bool = False
    random: bool = False
    least_clients: int = 1
    participation: Participation | None = None
    sends: Callable[[int], int] | None = None
    moves_by_gradients: bool | None = None
    copies: int = 1
    reaches: Callable[[Client, Round], Array] | None = None

    @property
    def gradient_sum_known(self) -> bool:
        """Return whether the mean movement gives the sum of the round's mean gradients."""
        declared = self.moves_by_gradients
        return self.direction is None if declared is None else declared

    @property
    def averages(self) -> bool:
        """Return whether a round ends as in Local SGD, with x̄ = Σ_k p_k x_k and nothing else."""
        return self.send is None and self.receive is None

    def among(self, num_clients: int) -> Algorithm:
        """Return the algorithm for K clients, without a `participation` that chooses all K of them."""
        how = self.participation
        all_take_part = how is not None and how.clients == num_clients and not how.by_weight
        return dataclasses.replace(self, participation=None) if all_take_part else self

    def stepping(self, num_clients: int) -> int:
        """Return how many of K clients step in a round."""
        how = self.participation
        return num_clients if how is None else how.clients


def an_algorithm(value: Any) -> Algorithm:
    """Return an algorithm; refuse anything else."""
    if not isinstance(value, Algorithm):
        raise refusal(
            "algorithm", "be an algorithm such as algorithms.fedprox(mu=0.1)", value, code="type"
        )
    return value


def check_algorithm(algorithm: Any, dim: int, dtype: Any, num_clients: int) -> None:
    """Refuse an algorithm whose functions do not fit together; the error names the one at fault.

    Call it under the precision of the run.

    Args:
      algorithm: the algorithm.
      dim: d.
      dtype: of the parameters.
      num_clients: K.
    """
    algorithm = an_algorithm(algorithm)
    _check_clients(algorithm, num_clients)
    x, number, server, memory = _abstract(algorithm, dim, dtype, num_clients)
    round = Round(x, server, number, number)
    client = Client(x, _made(algorithm, "begin", memory, round), memory)

    def pair(part: str, *arguments: Any) -> tuple[str, Any, Any]:
        where = f"algorithm ({algorithm.name}).{part}"
        found = _made(algorithm, part, *arguments)
        if not isinstance(found, tuple) or len(found) != 2:
            raise refusal(where, "return a pair", found, code="type")
        return where, *found

    message = None
    if algorithm.direction is not None:
        where, direction, local = pair("direction", x, client, round)
        check_same(where, "the direction in the shape and dtype of the gradient", x, direction)
        check_same(where, "`local` in its shapes and dtypes", client.local, local)
    if algorithm.send is not None:
        where, message, after = pair("send", client, round)
        check_same(where, "`memory` in its shapes and dtypes", memory, after)
    if algorithm.receive is not None:
        where, params, after = pair("receive", x, message, round)
        check_same(where, "x̄ in the shape and dtype of `round.params`", x, params)
        check_same(where, "`server` in its shapes and dtypes", server, after)


def message_size(algorithm: Algorithm, dim: int, num_clients: int) -> int:
    """Return how many numbers a client's message has; 0 without `send`."""
    if algorithm.send is None:
        return 0
    x, number, server, memory = _abstract(algorithm, dim, jnp.float32, num_clients)
    round = Round(x, server, number, number)
    client = Client(x, _made(algorithm, "begin", memory, round), memory)
    message, _ = _made(algorithm, "send", client, round)
    return sum(leaf.size for leaf in jax.tree.leaves(message))


def _check_clients(algorithm: Algorithm, num_clients: int) -> None:
    how, least = algorithm.participation, algorithm.least_clients
    if how is not None and not how.by_weight:
        least = max(least, how.clients)
    if num_clients < least:
        rule = f"have at least {least} clients for {algorithm.name}"
        raise refusal("problem", rule, num_clients, code="unsupported")
    if how is not None and algorithm.init_client is not None:
        rule = "be None if only some clients take part in a round"
        raise refusal(
            f"algorithm ({algorithm.name}).init_client",
            rule,
            algorithm.init_client,
            code="unwanted",
        )


def _abstract(
    algorithm: Algorithm, dim: int, dtype: Any, num_clients: int
) -> tuple[Any, Any, Any, Any]:
    """Return x_0, a scalar, the server's state and a client's memory, as shapes."""
    abstract: Any = jax.ShapeDtypeStruct
    x, number = abstract((dim,), jnp.dtype(dtype)), abstract((), jnp.dtype(dtype))
    key, weights = abstract((2,), jnp.uint32), abstract((num_clients,), jnp.dtype(dtype))
    chance = ((key, weights), (abstract((), jnp.uint32),)) if algorithm.random else ((), ())
    server = _made(algorithm, "init_server", x, *chance[0])
    memory = _made(algorithm, "init_client", x, *chance[1])
    return x, number, server, memory


def _made(algorithm: Algorithm, part: str, *arguments: Any) -> Any:
    """Return the result of a function of the algorithm as shapes; None if it has no such function."""
    function = getattr(algorithm, part)
    with blaming(function, f"`{part}` of algorithm {algorithm.name!r}"):
        return None if function is None else jax.eval_shape(function, *arguments)


def check_same(where: str, what: str, before: Any, after: Any) -> None:
    """Refuse a function that returns a state of another structure, or of other shapes or dtypes.

    Args:
      where: name of the function.
      what: what it must return.
      before: its argument, abstract.
      after: its result, abstract.
    """
    structures = jax.tree.structure(before), jax.tree.structure(after)
    if structures[0] != structures[1]:
        got = f"got {structures[1]} for {structures[0]}"
        raise checks.Refusal(f"{where}: must return {what}, {got}", where, "shape")
    pairs = zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True)
    for (path, old), new in pairs:
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            place = f" at {jax.tree_util.keystr(path)}" if path else ""
            got = f"{new.dtype}{list(new.shape)} for {old.dtype}{list(old.shape)}{place}"
            raise checks.Refusal(f"{where}: must return {what}, got {got}", where, "shape")


@functools.lru_cache(maxsize=1024)
def check_measure(method: Estimator, dim: int, dtype: str) -> None:
    """Refuse a method that is not for so many parameters, or returns a wrong shape or type, before it runs."""
    if method.most_parameters is not None and dim > method.most_parameters:
        rule = f"be for at most {method.most_parameters} parameters if {method.name} is among them"
        hint = "; its memory grows with their square and its time with their cube: random_scaling(mode='diagonal') needs neither"
        raise refusal("methods", rule, dim, hint, code="unsupported")
    count = len(method.contrasts) or dim
    length = 64  # rounds of the shortest `Horizon`

    def horizon(E: Any, num_rounds: Any) -> Horizon | None:
        return Horizon(E, E, num_rounds) if method.needs_plan else None

    def measure(states: Any, *plan: Any) -> None:
        with blaming(method.measure, f"`measure` of method {method.name!r}"):
            found = method.measure(states, horizon(*plan))
        where = f"methods ({method.name}).measure"
        if not isinstance(found, Measurement):
            raise refusal(where, "return a jaxlsgd.Measurement", found, code="type")
        _check_result(where, "an estimate", found.estimate, (count,))
        _check_result(where, "a scale", found.scale, (count,))
        _check_result(where, "`floored`", found.floored, (), truth=True)
        for path, leaf in jax.tree_util.tree_leaves_with_path(found.detail):
            place = f"`detail{jax.tree_util.keystr(path)}`"
            _check_result(where, place, leaf, getattr(leaf, "shape", ()), truth=True)

    def matrix(states: Any, *plan: Any) -> None:
        assert method.matrix is not None
        with blaming(method.matrix, f"`matrix` of method {method.name!r}"):
            found = method.matrix(states, horizon(*plan))
        _check_result(f"methods ({method.name}).matrix", "a matrix", found, (count, count))

    with jax.enable_x64(dtype == "float64"):
        x = jax.ShapeDtypeStruct((dim,), jnp.dtype(dtype))
        plan = jax.ShapeDtypeStruct((length,), x.dtype), jax.ShapeDtypeStruct((), jnp.int32)
        states: list[Any] = []
        for part in method.accumulators:
            with blaming(part.init, f"`init` of method {method.name!r}"):
                states.append(jax.eval_shape(part.init, x))
        jax.eval_shape(measure, tuple(states), *plan)
        if method.matrix is not None and not method.reads_numpy:
            jax.eval_shape(matrix, tuple(states), *plan)


def _check_result(
    where: str, what: str, found: Any, shape: tuple[int, ...], truth: bool = False
) -> None:
    """Refuse anything but an array of this shape with real numbers, or with truth values if `truth`."""
    if shape == () and isinstance(found, (bool, int, float)):
        return
    if not hasattr(found, "shape") or not hasattr(found, "dtype"):
        raise refusal(where, f"return {what} that is an array of shape {shape}", found, code="type")
    if found.shape != shape:
        raise refusal(where, f"return {what} of shape {shape}", found.shape, code="shape")
    kinds = (jnp.floating, jnp.integer, *([jnp.bool_] if truth else []))
    if not any(jnp.issubdtype(found.dtype, kind) for kind in kinds):
        raise refusal(where, f"return {what} of real numbers", str(found.dtype), code="type")
