"""Functions of users that hand a state on: what they return is checked from shapes, before anything runs."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxlsgd.core.algorithm import Algorithm, Client, Round
from jaxlsgd.core.blame import blaming
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.estimator import Estimator, Horizon, Measurement


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
    client = Client(x, _made(algorithm, "begin", memory, round), memory)

    def pair(part: str, *arguments: Any) -> tuple[str, Any, Any]:
        where = f"algorithm ({algorithm.name}).{part}"
        found = _made(algorithm, part, *arguments)
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
    client = Client(x, _made(algorithm, "begin", memory, round), memory)
    message, _ = _made(algorithm, "send", client, round)
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
    server = _made(algorithm, "init_server", x, *chance[0])
    memory = _made(algorithm, "init_client", x, *chance[1])
    return x, number, server, memory


def _made(algorithm: Algorithm, part: str, *arguments: Any) -> Any:
    """Return the shapes that a function of the algorithm returns; None if it has no such function."""
    function = getattr(algorithm, part)
    with blaming(function, f"`{part}` of algorithm {algorithm.name!r}"):
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


@functools.lru_cache(maxsize=1024)
def check_measure(method: Estimator, dim: int, dtype: str) -> None:
    """Refuses a `measure` or a `matrix` whose result has another shape, or is no result at all.

    From shapes alone: otherwise this would come to light after the run.

    Args:
      method: that is checked.
      dim: d.
      dtype: of the run.
    """
    count = len(method.contrasts) or dim
    length = 64  # rounds of the shortest `Horizon`

    def horizon(E: Any, num_rounds: Any) -> Horizon | None:
        return Horizon(E, E, num_rounds) if method.needs_plan else None

    def measure(states: Any, *plan: Any) -> None:
        with blaming(method.measure, f"`measure` of method {method.name!r}"):
            found = method.measure(states, horizon(*plan))
        where = f"methods ({method.name}).measure"
        if not isinstance(found, Measurement):
            raise refusal(where, "return a jaxlsgd.Measurement", found)
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
        made: list[Any] = []
        for part in method.accumulators:
            with blaming(part.init, f"`init` of method {method.name!r}"):
                made.append(jax.eval_shape(part.init, x))
        jax.eval_shape(measure, tuple(made), *plan)
        if method.matrix is not None and not method.reads_numpy:
            jax.eval_shape(matrix, tuple(made), *plan)


def _check_result(
    where: str, what: str, found: Any, shape: tuple[int, ...], truth: bool = False
) -> None:
    """Refuses what is no array of real numbers of a shape; of truth values, if `truth` says so."""
    if shape == () and isinstance(found, (bool, int, float)):
        return
    if not hasattr(found, "shape") or not hasattr(found, "dtype"):
        raise refusal(where, f"return {what} that is an array of shape {shape}", found)
    if found.shape != shape:
        raise refusal(where, f"return {what} of shape {shape}", found.shape)
    kinds = (jnp.floating, jnp.integer, *([jnp.bool_] if truth else []))
    if not any(jnp.issubdtype(found.dtype, kind) for kind in kinds):
        raise refusal(where, f"return {what} of real numbers", str(found.dtype))
