"""Federations that split: groups of clients continue separately from a common state.

Clients are divided into L = b_1 b_2 … groups, the leaves of a tree with b_1 branches, b_2 at each of these, and so on.
Up to the first split all clients are one federation; then there are C_1 = b_1 of them, of K/b_1 clients each; then
C_2 = b_1 b_2; finally each leaf is one. A federation is Local SGD of its own clients and starts where its parent
ended. A single split after round 0 makes independent federations.

Every observation is used once, by its client's own federation, and a round sends one vector per client, as usual.
Federations of fewer clients have more noise: per step, C_j S. All leaves estimate x* only if each group of clients
has x* for its optimum: similar clients, or similar groups. Otherwise their spread includes that of the groups'
optima, and their mean is not the optimum of all.

In the engine this is a problem with parameters (L, d), of which a client uses its leaf's row (`split_clients`), and
an algorithm whose server averages rows within a federation (`federation_tree`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxlsgd.core import checks
from jaxlsgd.core.algorithm import Algorithm, Round
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.forms import dense
from jaxlsgd.core.problem import Array, Moment, Problem
from jaxlsgd.core.registry import register
from jaxlsgd.inference.rivals.copies import given_dim, stacked, stacked_problem


@register("problem")
def split_clients(problem: Problem, leaves: int) -> Problem:
    """Return a problem with a row of parameters for each of L groups of neighbouring clients.

    Args:
      problem: what is estimated.
      leaves: L, of which the number of clients is a multiple; groups have equal weight.

    Returns:
      A problem with parameters (L, d), to be run by `federation_tree`.
    """
    return _split(problem, checks.count("leaves", leaves, 1))


@functools.lru_cache(maxsize=64)
def _split(problem: Problem, leaves: int) -> Problem:
    if problem.num_clients % leaves:
        rule = f"divide the {problem.num_clients} clients into equal groups"
        raise refusal("leaves", rule, leaves, code="conflict")
    shares = np.asarray(problem.weights).reshape(leaves, -1).sum(axis=1)
    if not np.allclose(shares, 1 / leaves, rtol=1e-6):
        rule = f"have clients' weights that add up to 1/{leaves} in each group"
        raise refusal("problem", rule, shares.round(6).tolist(), code="unsupported")
    functions = problem.structure().flat_functions()
    group = np.repeat(np.arange(leaves, dtype=np.int32), problem.num_clients // leaves)
    which = np.arange(leaves, dtype=np.int32)

    def own(leaf: Array) -> Array:
        return (leaf == which)[:, None]

    def row(x: Array, leaf: Array) -> Array:
        # Not a product with 0: another federation may have diverged.
        return jnp.sum(jnp.where(own(leaf), x, 0), axis=0)

    def one_of(client: Any) -> tuple[Any, Any]:
        """Return the client in the problem's own form, and its leaf."""
        if problem.drifts:
            (inner, leaf), t = client
            return Moment(inner, t), leaf
        return client

    def observe(draws: Any, client: Any) -> Any:
        assert functions.observe is not None
        inner, leaf = one_of(client)
        return functions.observe(draws, inner), leaf

    def sample(key: Array, client: Any) -> Any:
        assert functions.sample is not None
        inner, leaf = one_of(client)
        return functions.sample(key, inner), leaf

    def loss(x: Array, observation: Any) -> Array:
        seen, leaf = observation
        return functions.loss(row(x, leaf), seen)

    def gradient(x: Array, observation: Any) -> Array:
        seen, leaf = observation
        found = dense(functions.gradient(row(x, leaf), seen))
        return jnp.where(own(leaf), found[None, :], 0)

    clients = (problem.clients, group)
    if problem.sample is not None:
        return stacked_problem(problem, leaves, loss, gradient, sample=sample, clients=clients)
    source = {"draws": problem.draws, "observe": observe, "clients": clients}
    return stacked_problem(problem, leaves, loss, gradient, **source)


@register("algorithm")
def federation_tree(
    branches: Sequence[int] = (2, 2),
    splits: Sequence[int] = (100, 200),
    *,
    dim: int | None = None,
) -> Algorithm:
    """Local SGD of federations that split into smaller ones after given rounds.

    For a problem made by `split_clients` with as many leaves as the tree has.

    Args:
      branches: how many federations one splits into, at each split.
      splits: the rounds after which they split, increasing; 0 for from the start.
      dim: d of one federation; that of the problem if None, and checked if given.
    """
    return _tree(given_dim(dim), *check_tree(branches, splits))


def check_tree(
    branches: Sequence[int], splits: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return branches and splits as tuples; refuse those that make no tree."""
    given = checks.sequence("branches", branches, "integer")
    branches = tuple(checks.count("branches", branch, 2) for branch in given)
    given = checks.sequence("splits", splits, "round")
    splits = tuple(checks.count("splits", split, 0) for split in given)
    if len(splits) != len(branches):
        raise refusal(
            "splits", f"be {len(branches)}, one for each of branches", splits, code="shape"
        )
    if any(b <= a for a, b in itertools.pairwise(splits)):
        raise refusal("splits", "increase", splits)
    return branches, splits


@functools.cache
def _tree(dim: int | None, branches: tuple[int, ...], splits: tuple[int, ...]) -> Algorithm:
    leaves = math.prod(branches)

    def receive(moved: Array, message: Any, round: Round) -> tuple[Array, Array]:
        del message
        # A leaf has 1/L of the weight, and only its clients move its row.
        rows = moved.reshape(leaves, -1) * leaves
        so_far = round.server
        shared = within_nodes(rows, 1)
        for level, split in enumerate(splits, start=1):
            nodes = math.prod(branches[:level])
            shared = jnp.where(so_far >= split, within_nodes(rows, nodes), shared)
        return round.params + shared.reshape(moved.shape), so_far + 1

    def init_server(x: Array) -> Array:
        stacked(x, leaves, dim)
        return jnp.zeros((), jnp.int32)

    # A client moves and sends the row of its leaf only.
    return Algorithm(
        "federation_tree",
        init_server=init_server,
        receive=receive,
        sends=lambda d: d // leaves,
        copies=leaves if dim is None else 1,
    )


def within_nodes(rows: Array, nodes: int) -> Array:
    """Replace each leaf's row by the mean over its node; (L, d) → (L, d)."""
    grouped = rows.reshape(nodes, rows.shape[0] // nodes, rows.shape[1])
    means = jnp.mean(grouped, axis=1, keepdims=True)
    return jnp.broadcast_to(means, grouped.shape).reshape(rows.shape)
