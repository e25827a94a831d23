"""Algorithm 1 of the paper, Local SGD, and the plain round that every algorithm of this room runs.

    for round m = 1, …, T:
        every client k starts from the average, x_k ← x̄_{t_{m−1}}
        E_m times:  every client k draws ξ_k and steps,  x_k ← x_k − η_m ∇f_k(x_k; ξ_k)
        x̄_{t_m} ← Σ_k p_k x_k
    ȳ_T = (1/T) Σ_m x̄_{t_m}

Local SGD adds nothing to this; see `core.algorithm` for what other algorithms may add. The engine computes
the same numbers much faster for many replications; tests compare the two.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree
from numpy.typing import NDArray

from jaxlsgd.core import checks
from jaxlsgd.core.algorithm import Algorithm, Client, Round, an_algorithm, check_algorithm
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.estimator import Anchored, Sync
from jaxlsgd.core.problem import Array, Observation, Params
from jaxlsgd.core.random import (
    Cohort,
    algorithm_words,
    check_key,
    first_cohort,
    next_cohort,
    weight_bounds,
)
from jaxlsgd.core.registry import register


@register("algorithm")
@functools.cache
def local_sgd() -> Algorithm:
    """Local SGD, the paper's Algorithm 1: clients step along their gradients, the server averages."""
    return Algorithm("local_sgd", within_theory=True)


class RoundState(NamedTuple):
    """The state between two rounds."""

    params: Params  # x̄_{t_m}
    server: Any = None  # what the server keeps
    memory: Any = None  # what the clients keep; leaves (K, ...)
    cohort: Cohort | None = None  # who takes part in the next round, if not all do


class Rounds(NamedTuple):
    """An algorithm ready for your own loop over data: `init(params)`, `round(state, observations, eta)`.

    A random algorithm needs a key: `init(params, jax.random.key(0))`. If only n clients take part in a round,
    `state.cohort.clients` are those of the next one, and observations have leaves (E_m, n, ...) in that order.
    """

    init: Callable[..., RoundState]
    round: Callable[..., tuple[RoundState, Sync]]


def plain_rounds(
    loss: Callable[[Params, Observation], Array],
    weights: Any,
    algorithm: Algorithm | None = None,
) -> Rounds:
    """Return communication rounds on given observations, each a jitted `lax.scan` over E_m local steps.

    They are for one replication; `jax.vmap` the round for more. Each E_m is compiled separately.

    Args:
      loss: `(params, observation) → scalar`, of one observation of one client.
      weights: p_k, (K,), summing to 1.
      algorithm: from `jaxlsgd.algorithms`; Local SGD if None.

    Returns:
      `Rounds`. `round` takes the state, observations with leaves (E_m, K, ...) and η_m, and returns the
      next state and the `Sync` that an estimator's `update` takes. For a method with an anchor it also takes
      `anchors=estimator.anchors(state)`, and in a few rounds after each change of the anchor `hessians=True`.

    Example::

        rounds = plain_rounds(loss, weights=[0.5, 0.5])
        state = rounds.init(params)
        for observations in batches:  # leaves (E_m, 2, ...)
            state, sync = rounds.round(state, observations, 0.01)
            statistics = estimator.update(statistics, sync)
    """
    p = checks.weights(weights, np.size(weights))
    algorithm = local_sgd() if algorithm is None else an_algorithm(algorithm)
    return Rounds(
        functools.partial(_init, algorithm, p),
        jax.jit(functools.partial(_round, algorithm, loss, p), static_argnames="hessians"),
    )


def _init(
    algorithm: Algorithm, weights: NDArray[np.float64], params: Params, key: Any = None
) -> RoundState:
    x, _ = ravel_pytree(params)
    check_algorithm(algorithm, x.size, x.dtype, len(weights))
    clients = jnp.arange(len(weights), dtype=jnp.uint32)
    chance: tuple[Any, ...] = ()
    cohort, how = None, algorithm.participation
    if algorithm.random or how is not None:
        words = algorithm_words(jax.random.key_data(check_key(key)))
        p = jnp.asarray(weights, x.dtype)
        chance = (words, p) if algorithm.random else ()
        cohort = None if how is None else first_cohort(how, words, p, weight_bounds(weights))

    def first(k: Array) -> Any:
        numbered = (k,) if chance else ()
        return algorithm.init_client(x, *numbered) if algorithm.init_client else None

    server = algorithm.init_server(x, *chance) if algorithm.init_server else None
    return RoundState(params, server, jax.vmap(first)(clients), cohort)


def _round(
    algorithm: Algorithm,
    loss: Callable[[Params, Observation], Array],
    weights: NDArray[np.float64],
    state: RoundState,
    observations: Observation,
    eta: Any,
    anchors: Any = None,
    hessians: bool = False,
) -> tuple[RoundState, Sync]:
    """Run round m of Algorithm 1."""
    x_bar, unravel = ravel_pytree(state.params)
    n = algorithm.stepping(len(weights))
    E = _steps(observations, n)
    all_, eta = (jnp.asarray(value, x_bar.dtype) for value in (weights, eta))
    p = all_ if state.cohort is None else state.cohort.weights
    round = Round(x_bar, state.server, jnp.asarray(E, x_bar.dtype), eta)
    gradient = jax.grad(lambda x, xi: loss(unravel(x), xi))

    def start(memory: Any) -> Client:
        return Client(x_bar, algorithm.begin(memory, round) if algorithm.begin else None, memory)

    def local_step(client: Client, xi: Observation) -> tuple[Client, Any]:
        g, local = gradient(client.x, xi), client.local
        d, local = algorithm.direction(g, client, round) if algorithm.direction else (g, local)
        at_anchor = None
        if anchors is not None:
            reached = algorithm.reaches(client, round) if algorithm.reaches else 1
            at_anchor = reached * gradient(anchors[0], xi)
        return Client(client.x - eta * d, local, client.memory), at_anchor

    def send(client: Client) -> tuple[Any, Any]:
        return algorithm.send(client, round) if algorithm.send else (None, client.memory)

    clients = jax.vmap(start, axis_size=n)(state.memory)
    clients, at_anchor = lax.scan(jax.vmap(local_step), clients, observations)
    messages, memory = jax.vmap(send)(clients)
    moved, message = _mean(p, (clients.x - x_bar, messages))
    if algorithm.receive:
        x_bar, server = algorithm.receive(moved, message, round)
    else:
        x_bar, server = x_bar + moved, state.server
    params, cohort, how = unravel(x_bar), state.cohort, algorithm.participation
    if how is not None and cohort is not None:
        cohort = next_cohort(how, cohort, all_, weight_bounds(weights))
    sync = Sync(params, E, eta)
    if anchors is not None:
        given = Anchored(unravel(_mean(p, jnp.sum(at_anchor, 0))), observations=None)
        if hessians:
            second = jax.hessian(lambda x, xi: loss(unravel(x), xi))
            means = [
                _mean(
                    p,
                    jnp.mean(jax.vmap(jax.vmap(second, (None, 0)), (None, 0))(x, observations), 0),
                )
                for x in anchors
            ]
            given = given._replace(hessian=means[0], hessian_before=means[1], observations=E * n)
        sync = sync._replace(anchored=given)
    return RoundState(params, server, memory, cohort), sync


def _mean(p: Array, tree: Any) -> Any:
    """Return Σ_k p_k v_k."""
    product = functools.partial(jnp.tensordot, axes=1, precision=lax.Precision.HIGHEST)
    return jax.tree.map(lambda v: product(p, v), tree)


def _steps(observations: Observation, num_clients: int) -> int:
    """Return E_m, from the leading dimensions (E_m, K) that all leaves must have."""
    shapes = [jnp.shape(leaf)[:2] for leaf in jax.tree.leaves(observations)]
    if not shapes or any(shape != (shapes[0][0], num_clients) for shape in shapes):
        rule = f"have leaves (E_m, {num_clients}, ...), steps first and then clients"
        raise refusal("observations", rule, shapes, code="shape")
    return shapes[0][0]
