"""Functions of users that hand a state on: what they return is checked from shapes, before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxlsgd.core.algorithm import Algorithm, Client, Round
from jaxlsgd.core.checks import refusal


def an_algorithm(value: Any) -> Algorithm:
    """The value, if it is an algorithm."""
    if not isinstance(value, Algorithm):
        raise refusal("algorithm", "be an algorithm such as algorithms.fedprox(mu=0.1)", value)
    return value


def check_algorithm(algorithm: Any, dim: int, dtype: Any, num_clients: int) -> None:
    """Refuses an algorithm whose functions do not fit together, and names the one that does not.

    To be called under the precision of the run.

    Args:
      algorithm: what is checked.
      dim: d.
      dtype: of the parameters.
      num_clients: K.
    """
    algorithm = an_algorithm(algorithm)
    _check_clients(algorithm, num_clients)
    x, number, server, memory = _abstract(algorithm, dim, dtype, num_clients)
    round = Round(x, server, number, number)
    client = Client(x, _made(algorithm.begin, memory, round), memory)

    def pair(part: str, *arguments: Any) -> tuple[str, Any, Any]:
        where = f"algorithm ({algorithm.name}).{part}"
        found = jax.eval_shape(getattr(algorithm, part), *arguments)
        if not isinstance(found, tuple) or len(found) != 2:
            raise refusal(where, "return a pair", found)
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
    """Return how many numbers a client's message has, from the shapes that `send` returns; 0 without one."""
    if algorithm.send is None:
        return 0
    x, number, server, memory = _abstract(algorithm, dim, jnp.float32, num_clients)
    round = Round(x, server, number, number)
    client = Client(x, _made(algorithm.begin, memory, round), memory)
    message, _ = jax.eval_shape(algorithm.send, client, round)
    return sum(leaf.size for leaf in jax.tree.leaves(message))


def _check_clients(algorithm: Algorithm, num_clients: int) -> None:
    how, least = algorithm.participation, algorithm.least_clients
    if how is not None and not how.by_weight:
        least = max(least, how.clients)
    if num_clients < least:
        rule = f"have at least {least} clients for {algorithm.name}"
        raise refusal("problem", rule, num_clients)
    if how is not None and algorithm.init_client is not None:
        rule = "be None where only some clients take part in a round"
        raise refusal(f"algorithm ({algorithm.name}).init_client", rule, algorithm.init_client)


def _abstract(
    algorithm: Algorithm, dim: int, dtype: Any, num_clients: int
) -> tuple[Any, Any, Any, Any]:
    """x_0, a number, what the server keeps and what a client keeps, as shapes."""
    abstract: Any = jax.ShapeDtypeStruct
    x, number = abstract((dim,), jnp.dtype(dtype)), abstract((), jnp.dtype(dtype))
    key, weights = abstract((2,), jnp.uint32), abstract((num_clients,), jnp.dtype(dtype))
    chance = ((key, weights), (abstract((), jnp.uint32),)) if algorithm.random else ((), ())
    server = _made(algorithm.init_server, x, *chance[0])
    memory = _made(algorithm.init_client, x, *chance[1])
    return x, number, server, memory


def _made(function: Callable[..., Any] | None, *arguments: Any) -> Any:
    return None if function is None else jax.eval_shape(function, *arguments)


def check_same(where: str, what: str, before: Any, after: Any) -> None:
    """Refuses a function that returns a state of another structure, or of other shapes or dtypes.

    Args:
      where: which function.
      what: what it must return.
      before: the state that it is given, abstract.
      after: the state that it returns, abstract.
    """
    structures = jax.tree.structure(before), jax.tree.structure(after)
    if structures[0] != structures[1]:
        raise ValueError(f"{where}: must return {what}, got {structures[1]} for {structures[0]}")
    pairs = zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True)
    for (path, old), new in pairs:
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            place = f" at {jax.tree_util.keystr(path)}" if path else ""
            got = f"{new.dtype}{list(new.shape)} for {old.dtype}{list(old.shape)}{place}"
            raise ValueError(f"{where}: must return {what}, got {got}")
