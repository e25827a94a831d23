"""All clients of all replications under one algorithm: a local step of everybody, and the end of a round.

    x_k ← x_k − η d_k;   Δ ← Δ − η Σ_k p_k d_k;   where a round ends, x̄ ← receive(Δ, ...) and x_k ← x̄

Δ = Σ_k p_k (x_k − x̄) is carried along: one sum over clients per step serves the average, and for Local
SGD also the mean gradient that the plug-in method needs. Where nobody reads x̄ during a round, x̄ and Δ
are one array. `algorithms.local_sgd` has the same round as it stands on paper; a test compares the two.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxlsgd.core.algorithm import Algorithm, Client, Round
from jaxlsgd.core.forms import Scaled
from jaxlsgd.core.problem import Array, FlatFunctions, Observation
from jaxlsgd.core.random import Cohort, algorithm_words, first_cohort, next_cohort
from jaxlsgd.engine import xla
from jaxlsgd.engine.program import ProblemData


class Federation(NamedTuple):
    """Where everybody is. What the algorithm has no use for is None."""

    clients: Array  # (K, d, R) x_k
    params: Array  # (d, R) x̄ where the round began; `folded`: with `moved` in it already
    moved: Any = None  # (d, R) Δ
    local: Any = None  # leaves (K, ..., R)
    memory: Any = None  # leaves (K, ..., R)
    server: Any = None  # leaves (..., R)
    total: Any = None  # (d, R) mean gradients of the round so far added up, if a statistic asks
    anchors: Any = None  # per statistic with an anchor, (d, R): that of the round
    anchored: Any = (
        None  # per such statistic, (d, R): mean gradients there of the round so far added up
    )
    members: Any = None  # those who take part; K is then their number


class Step(NamedTuple):
    """A step's numbers; None where neither the algorithm nor a statistic asks for one."""

    eta: Any  # () η_m; 0 makes the step a pure evaluation
    ends: Any  # () bool, the step is the last of its round
    E: Any = None  # () E_m
    opens: Any = None  # () bool, the step is the first of its round
    active: Any = None  # () bool, the step moves


def folded(algorithm: Algorithm) -> bool:
    """Whether nobody reads x̄ during a round, so that x̄ and how far it has moved can be one array."""
    return algorithm.direction is None and algorithm.begin is None and algorithm.averages


def start(
    vector: Array,
    num_clients: int,
    num_replications: int,
    algorithm: Algorithm,
    gradient_sum: bool = False,
    anchors: int = 0,
) -> Federation:
    """All clients of all replications at x_0."""
    params = jnp.broadcast_to(vector[:, None], (vector.shape[0], num_replications))
    clients = jnp.broadcast_to(params, (num_clients, *params.shape))

    def everywhere(function: Callable[..., Any] | None, *chance: Any) -> Any:
        given = chance if algorithm.random else ()
        return function and xla.over_replications(lambda x: function(x, *given))(params)

    # Words of chance are 0 until they are `dealt`, when the replications have their keys.
    words, weights = jnp.zeros(2, jnp.uint32), jnp.zeros(num_clients, vector.dtype)
    server = everywhere(algorithm.init_server, words, weights)
    memory = everywhere(algorithm.init_client, words[0])
    memory = jax.tree.map(lambda x: jnp.broadcast_to(x, (num_clients, *x.shape)), memory)
    moved = None if folded(algorithm) else jnp.zeros_like(params)
    total = jnp.zeros_like(params) if gradient_sum else None
    state = Federation(clients, params, moved, None, memory, server, total)
    if anchors:
        state = state._replace(
            anchors=(params,) * anchors, anchored=(jnp.zeros_like(params),) * anchors
        )
    one = jnp.ones((), vector.dtype)
    begun = jax.eval_shape(lambda s: begin(algorithm, s, Step(one, None, one)), state)
    return state._replace(local=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), begun))


@functools.partial(jax.jit, static_argnums=0)
def dealt(
    algorithm: Algorithm, state: Federation, words: Array, weights: Array, client_index: Array
) -> Federation:
    """A new federation, with what an algorithm draws from in its place.

    Args:
      algorithm: one that is `random`.
      state: as `start` makes it.
      words: key words of the replications' data, (R, 2).
      weights: p_k, (K,).
      client_index: the numbers of the clients.
    """
    own, server, memory = jax.vmap(algorithm_words)(words), state.server, state.memory
    if algorithm.init_server is not None:
        make = jax.vmap(algorithm.init_server, in_axes=(-1, 0, None), out_axes=-1)
        server = make(state.params, own, weights)
    if algorithm.init_client is not None:
        each = jax.vmap(algorithm.init_client, in_axes=(-1, None), out_axes=-1)
        memory = jax.vmap(each, in_axes=(None, 0))(state.params, client_index)
    return state._replace(server=server, memory=memory)


def local_step(
    state: Federation,
    observations: Observation,
    at: Step,
    data: ProblemData,
    functions: FlatFunctions,
    algorithm: Algorithm,
    anchors: tuple[Array, ...] = (),
) -> tuple[Federation, Array]:
    """One local step of every client in every replication.

    Args:
      state: where everybody is.
      observations: leaves (K, ..., R).
      at: the step's numbers.
      data: the problem's numbers.
      functions: the problem's functions.
      algorithm: what is run.
      anchors: of rounds that begin, (d, R) per statistic with an anchor.

    Returns:
      The state after the step, and Σ_k p_k ∇f_k(x_k; ξ_k) before it, (d, R).
    """
    weights, unit = data.weights, data.unit
    if algorithm.begin is not None:
        fresh = xla.where_flagged(
            at.opens & at.active, lambda _: begin(algorithm, state, at), state.local
        )
        state = state._replace(local=fresh)
    gradients = jax.vmap(xla.over_replications(functions.gradient))(state.clients, observations)
    if isinstance(gradients, Scaled):
        gradients = Scaled(xla.once(gradients.scale, unit), gradients.vector)
        full = gradients.scale[:, None, :] * gradients.vector
    else:
        gradients = full = xla.once(gradients, unit)
    mean = xla.once(xla.weighted_sum(weights, gradients), unit)
    if state.total is not None:
        so_far = jnp.where(at.opens, 0, state.total)
        state = state._replace(total=so_far + jnp.where(at.active, mean, 0))
    if state.anchors is not None:
        state = _at_anchors(state, observations, at, data, functions, algorithm, anchors)
    if folded(algorithm):
        params = state.params - at.eta * mean
        clients = jnp.where(at.ends, params, state.clients - at.eta * full)
        return state._replace(clients=clients, params=params), mean
    state = advance(state, full, mean, at, weights, algorithm)
    if not algorithm.averages:
        return xla.where_flagged(at.ends, lambda s: turn(algorithm, s, at, weights), state), mean
    params = jnp.where(at.ends, state.params + state.moved, state.params)
    clients = jnp.where(at.ends, params, state.clients)
    moved = jnp.where(at.ends, jnp.zeros_like(params), state.moved)
    return state._replace(clients=clients, params=params, moved=moved), mean


def _at_anchors(
    state: Federation,
    observations: Observation,
    at: Step,
    data: ProblemData,
    functions: FlatFunctions,
    algorithm: Algorithm,
    anchors: tuple[Array, ...],
) -> Federation:
    """Add the mean gradients at the anchors to those of the round so far, as far as they reach the server."""
    kept, sums, weights = [], [], data.weights
    if algorithm.reaches is not None:
        known = Client(state.clients, state.local, state.memory)
        weights = _each_client(algorithm.reaches, 1)(known, round_of(state, at))
        weights = (data.weights if data.each else data.weights[:, None]) * weights
    for old, new, total in zip(state.anchors, anchors, state.anchored, strict=True):
        anchor = jnp.where(at.opens, new, old)
        everywhere = jnp.broadcast_to(anchor, state.clients.shape)
        gradients = jax.vmap(xla.over_replications(functions.gradient))(everywhere, observations)
        if isinstance(gradients, Scaled):
            gradients = Scaled(xla.once(gradients.scale, data.unit), gradients.vector)
        mean = xla.once(_mean(weights, gradients), data.unit)
        kept.append(anchor)
        sums.append(jnp.where(at.opens, 0, total) + jnp.where(at.active, mean, 0))
    return state._replace(anchors=tuple(kept), anchored=tuple(sums))


def _mean(weights: Array, gradients: Array | Scaled) -> Array:
    """Σ_k w_k g_k with weights (K,), or (K, R) of every replication."""
    if weights.ndim == 2 and not isinstance(gradients, Scaled):
        return xla.weighted_sum(weights[:, None], gradients)
    return xla.weighted_sum(weights, gradients)


def advance(
    state: Federation, full: Array, mean: Array, at: Step, weights: Array, algorithm: Algorithm
) -> Federation:
    """Every client a step further along its direction."""
    direction, mean_direction, local = full, mean, state.local
    if algorithm.direction is not None:
        known = Client(state.clients, state.local, state.memory)
        each = _each_client(algorithm.direction, 2)
        direction, local = each(full, known, round_of(state, at))
        mean_direction = xla.weighted_sum(weights, direction)
        # An evaluation must not age a momentum.
        local = jax.tree.map(lambda new, old: jnp.where(at.active, new, old), local, state.local)
    return state._replace(
        clients=state.clients - at.eta * direction,
        moved=state.moved - at.eta * mean_direction,
        local=local,
    )


def turn(
    algorithm: Algorithm,
    state: Federation,
    at: Step,
    weights: Array,
) -> Federation:
    """The end of a round: clients to server, one sum, server to clients.

    Args:
      algorithm: what is run.
      state: after the round's last step.
      at: the numbers of that step.
      weights: p_k, (K,).
    """
    message, memory = sent(algorithm, state, at, weights)
    params, server = received(algorithm, state, at, state.moved, message)
    return opened(state, params)._replace(memory=memory, server=server)


def sent(algorithm: Algorithm, state: Federation, at: Step, weights: Array) -> tuple[Any, Any]:
    """Σ_k p_k message_k, and what clients keep."""
    if algorithm.send is None:
        return None, state.memory
    known = Client(state.clients, state.local, state.memory)
    messages, memory = _each_client(algorithm.send, 1)(known, round_of(state, at))
    return jax.tree.map(lambda x: xla.weighted_sum(weights, x), messages), memory


def received(
    algorithm: Algorithm, state: Federation, at: Step, moved: Array, message: Any
) -> tuple[Array, Any]:
    """The server's next x̄, and what it keeps."""
    if algorithm.receive is None:
        return state.params + moved, state.server
    axes = (-1, -1, _ROUND_AXES)
    take_in = jax.vmap(algorithm.receive, in_axes=axes, out_axes=-1)
    return take_in(moved, message, round_of(state, at))


def opened(state: Federation, params: Array) -> Federation:
    """Everybody at x̄."""
    clients = jnp.broadcast_to(params, state.clients.shape)
    return state._replace(clients=clients, params=params, moved=jnp.zeros_like(params))


def begin(algorithm: Algorithm, state: Federation, at: Step) -> Any:
    """What every client makes when a round begins."""
    if algorithm.begin is None:
        return None
    known = round_of(state, at)
    if state.memory is None:
        one = jax.vmap(algorithm.begin, in_axes=(None, _ROUND_AXES), out_axes=-1)(None, known)
        K = state.clients.shape[0]
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (K, *x.shape)), one)
    return _each_client(algorithm.begin, 1)(state.memory, known)


_ROUND_AXES: Any = Round(-1, -1, None, None)


def round_of(state: Federation, at: Step) -> Round:
    """Return the state of the round that the server and all clients share."""
    return Round(state.params, state.server, at.E, at.eta)


def _each_client(function: Any, arguments: int) -> Any:
    """Vmaps over clients, (K, ...), and replications, (..., R); the last argument is the round."""
    inner = jax.vmap(function, in_axes=(*[-1] * arguments, _ROUND_AXES), out_axes=-1)
    return jax.vmap(inner, in_axes=(*[0] * arguments, None))


class Members(NamedTuple):
    """Those who take part in a round, in every replication."""

    cohort: Cohort  # leaves (..., R)
    clients: Any  # their part of the problem's `clients`, leaves (n, ..., R)

    def numbers(self, data: ProblemData) -> ProblemData:
        """The problem's numbers with those of the chosen in place of all clients'."""
        of, clients = self.cohort, self.clients
        return data._replace(weights=of.weights, clients=clients, client_index=of.clients)


@functools.partial(jax.jit, static_argnums=0)
def first_members(algorithm: Algorithm, data: ProblemData, words: Array) -> Members:
    """Those of the first round, from the key words of the replications' data, (R, 2)."""
    assert algorithm.participation is not None
    choose = functools.partial(first_cohort, algorithm.participation)
    own = jax.vmap(algorithm_words)(words)
    chosen = jax.vmap(choose, in_axes=(0, None, None), out_axes=-1)
    return _gathered(data, chosen(own, data.weights, data.bounds))


def taking_part(state: Federation, data: ProblemData) -> ProblemData:
    """Return the problem's numbers of those who take part."""
    return data if state.members is None else state.members.numbers(data)


def others_take_part(
    algorithm: Algorithm, data: ProblemData, state: Federation, at: Step
) -> Federation:
    """Return the state with those who take part in the next round, where a step ends one."""
    assert algorithm.participation is not None
    choose = functools.partial(next_cohort, algorithm.participation)
    chosen = jax.vmap(choose, in_axes=(-1, None, None), out_axes=-1)

    def others(members: Members) -> Members:
        return _gathered(data, chosen(members.cohort, data.weights, data.bounds))

    return state._replace(members=xla.where_flagged(at.ends, others, state.members))


def _gathered(data: ProblemData, cohort: Cohort) -> Members:
    def take(leaf: Array) -> Array:
        return jax.vmap(lambda index: leaf[index], in_axes=-1, out_axes=-1)(cohort.clients)

    return Members(cohort, jax.tree.map(take, data.clients))
