"""One program on a mesh of devices: clients spread with one sum per round, replications side by side.

If a mesh has replications only, its devices run tiles of their own, as without a mesh; this file is for
meshes that spread clients as well. See `client_rounds` for what each device does. A mesh may span
several processes, all of which must make the same calls.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlsgd.core.algorithm import Algorithm
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.estimator import Estimator, Measurement
from jaxlsgd.core.problem import Array, Problem
from jaxlsgd.engine import client_rounds, distributed, federation, statistics
from jaxlsgd.engine.client_rounds import CLIENTS, Seen, ShardState
from jaxlsgd.engine.federation import Federation
from jaxlsgd.engine.layout import BLOCK_STEPS
from jaxlsgd.engine.program import Loop, ProblemData, Program, make_data
from jaxlsgd.engine.statistics import Statistics
from jaxlsgd.engine.tile import WAIT_EVERY, Advanced, Saved, hessian_steps, rolls_of
from jaxlsgd.schedules import Plan

REPLICATIONS = "replications"


def check_mesh(mesh: Any, num_clients: int, algorithm: Algorithm | None = None) -> Mesh:
    """Return a mesh with both axes; refuse a mesh that a simulation cannot use."""
    if not isinstance(mesh, Mesh):
        raise refusal("mesh", "be a jax.sharding.Mesh", mesh, code="type")
    names = mesh.axis_names
    if not names or not set(names) <= {REPLICATIONS, CLIENTS}:
        raise refusal(
            "mesh", f"have axes named {REPLICATIONS!r} or {CLIENTS!r}", names, code="unknown"
        )
    shards = mesh.shape.get(CLIENTS, 1)
    if shards > num_clients:
        rule = f"have at most as many client shards as clients ({num_clients})"
        raise refusal("mesh", rule, shards, code="conflict")
    if shards > 1 and algorithm and algorithm.among(num_clients).participation is not None:
        # It would gain nothing: each replication steps few clients, and replications fill the devices.
        rule = f"spread replications, not clients, if only some take part ({algorithm.name})"
        raise refusal("mesh", rule, dict(mesh.shape), code="unsupported")
    devices = mesh.devices if names[0] == REPLICATIONS else mesh.devices.T
    return Mesh(devices.reshape(-1, shards), (REPLICATIONS, CLIENTS))


class Sharded:
    """A problem whose clients are spread over a mesh, ready to run tiles.

    Args:
      program: what is compiled.
      problem: whose numbers are placed on the devices.
      mesh: as `check_mesh` returns it.
    """

    def __init__(self, program: Program, problem: Problem, mesh: Mesh) -> None:
        self.program, self.mesh = program, mesh
        data = make_data(problem, program.dtype)
        self._vector, self._weights = data.init, _place(mesh, data.weights, P())
        self.data = _place(mesh, pad_clients(data, mesh.shape[CLIENTS]), _DATA)

    def run(
        self, words: np.ndarray, plan: Plan, save_at: tuple[int, ...]
    ) -> Iterator[Advanced | Saved]:
        """Run one tile at each replication position, from x_0 to the end.

        Args:
          words: key words of all replications, (positions · R, 2).
          plan: the plan.
          save_at: rounds to read, ascending, the last one T.

        Yields:
          The events of `run_tile`, for cell number 0.
        """
        program, mesh, data = self.program, self.mesh, self.data
        waiting = _Waiting()
        keys = _place(mesh, words, P(REPLICATIONS))
        state = start(program, mesh, keys.shape[0], data)
        if program.algorithm.random:
            state = deal(program, mesh, data, keys, self._weights, state)
        dim, clients = len(self._vector), len(self._weights)
        edges = rolls_of(program, plan, dim)
        rolls = [[block * BLOCK_STEPS for block in edges[i]] for i in program.anchored]
        sent = hessian_steps(program, plan, dim, clients)
        for each in client_rounds.lay_out(plan, save_at, rolls):
            state = turn(program, mesh, data, keys, state, each.turn)
            for i, weights in sent.items():
                for block in _hessian_blocks(program.loop, plan, each.number - 1, weights):
                    state = hessians(program, mesh, i, data, keys, state, block)
            yield from waiting.after(int(np.count_nonzero(each.turn.etas)), state)
            for block in each.steps:
                state = steps(program, mesh, data, keys, state, block)
                yield from waiting.after(int(np.count_nonzero(block.eta)), state)
            if each.read is not None:
                yield from waiting.now(state)
                found = read(program, mesh, data, keys, state, each.read)
                yield Saved(0, save_at.index(each.number), found)
        yield Advanced(0, 1)  # the last evaluation

    def measure(self, found: Statistics, method: Estimator, plan: Plan) -> Measurement:
        """Return one method's measurement of every replication, on every process, as NumPy arrays."""
        # On one device, because two at once may deadlock on a CPU: see `statistics.measure_states`.
        states = statistics.states_of(self.program, found, method)
        states = jax.tree.map(distributed.whole, states)
        measured = statistics.measure_states(method, self._vector, states, plan, self.program.dtype)
        return jax.tree.map(lambda x: np.asarray(x, np.float64), measured)


class _Waiting:
    """A queue of calls with a limit, which reports how many steps are done."""

    def __init__(self) -> None:
        self._calls = self._steps = 0

    def after(self, steps: int, state: ShardState) -> Iterator[Advanced]:
        """Count a call that was queued; wait for all of them if they are many."""
        self._calls, self._steps = self._calls + 1, self._steps + steps
        if self._calls == WAIT_EVERY:
            yield from self.now(state)

    def now(self, state: ShardState) -> Iterator[Advanced]:
        """Wait for all calls."""
        jax.block_until_ready(state.federation.params)
        if self._steps:
            yield Advanced(0, self._steps)
        self._calls = self._steps = 0


def pad_clients(data: ProblemData, shards: int) -> ProblemData:
    """Make the number of clients a multiple of `shards`.

    A padding client is a copy of the last client, with the same draws and weight 0, so that it diverges
    only if that one does.
    """
    extra = -data.weights.shape[0] % shards

    def copies(leaf: Any) -> np.ndarray:
        return np.concatenate([leaf, np.repeat(np.asarray(leaf)[-1:], extra, axis=0)])

    weights = np.concatenate([data.weights, np.zeros(extra, data.weights.dtype)])
    clients = jax.tree.map(copies, data.clients)
    return data._replace(weights=weights, clients=clients, client_index=copies(data.client_index))


# How a problem's numbers are spread over a mesh.
_DATA = ProblemData(P(), P(CLIENTS), P(CLIENTS), P(CLIENTS), P())  # no `bounds`: all take part


def _place(mesh: Mesh, tree: Any, specs: Any) -> Any:
    """Put arrays on a mesh; each process puts the parts of its own devices."""

    def put(spec: P, part: Any) -> Any:
        def one(leaf: Any) -> Array:
            leaf = np.asarray(leaf)
            return jax.make_array_from_callback(
                leaf.shape, NamedSharding(mesh, spec), lambda index: leaf[index]
            )

        return jax.tree.map(one, part)

    return jax.tree.map(put, specs, tree, is_leaf=lambda x: isinstance(x, P))


def _by_replication(tree: Any) -> Any:
    """Return the specs of arrays that are the same on every client shard: the last axis is the replications."""
    return jax.tree.map(lambda leaf: P(*[None] * (leaf.ndim - 1), REPLICATIONS), tree)


def _by_both(tree: Any) -> Any:
    """Return the specs of arrays that differ between client shards: the first axis is spread over them."""
    return jax.tree.map(lambda leaf: P(CLIENTS, *[None] * (leaf.ndim - 2), REPLICATIONS), tree)


def _of_statistics(program: Program, vector: Array, states: Statistics) -> Statistics:
    """Return the specs of the statistics; what all replications share is on every device."""

    def specs(part: Any, state: Any) -> Any:
        axes = statistics.axes_of(part, vector)
        return jax.tree.map(
            lambda axis, leaf: P() if axis is None else P(*[None] * (leaf.ndim - 1), REPLICATIONS),
            axes,
            state,
            is_leaf=lambda axis: axis is None,
        )

    return tuple(specs(*pair) for pair in zip(program.accumulators, states, strict=True))


def _on_mesh(mesh: Mesh, function: Any, in_specs: Any, out_specs: Any) -> Any:
    # Without the check of what varies over the mesh, which would require annotations in a user's loss.
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def _specs(program: Program, data: ProblemData) -> ShardState:
    state = jax.eval_shape(lambda d: client_rounds.start(program, d, 1), data)
    now = state.federation
    return ShardState(
        Federation(
            clients=_by_both(now.clients),
            params=_by_replication(now.params),
            moved=_by_both(now.moved),
            local=_by_both(now.local),
            memory=_by_both(now.memory),
            server=_by_replication(now.server),
            total=_by_both(now.total),
            anchors=_by_replication(now.anchors),
            anchored=_by_both(now.anchored),
        ),
        Seen(*_by_both(tuple(state.seen))),
        _by_replication(state.total),
        _by_replication(state.anchored),
        _of_statistics(program, data.init, state.statistics),
    )


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def start(program: Program, mesh: Mesh, replications: int, data: ProblemData) -> ShardState:
    """Run `client_rounds.start` on every device; `replications` are those of the whole mesh."""
    here = replications // mesh.shape[REPLICATIONS]
    body = lambda d: client_rounds.start(program, d, here)  # noqa: E731
    return _on_mesh(mesh, body, (_DATA,), _specs(program, data))(data)


@functools.partial(jax.jit, static_argnums=(0, 1))
def deal(
    program: Program, mesh: Mesh, data: Any, words: Array, weights: Array, state: ShardState
) -> ShardState:
    """Run `federation.dealt` on every device."""

    def body(data: Any, words: Any, weights: Any, state: ShardState) -> ShardState:
        begun = federation.dealt(
            program.algorithm, state.federation, words, weights, data.client_index
        )
        return state._replace(federation=begun)

    specs = _specs(program, data)
    run = _on_mesh(mesh, body, (_DATA, P(REPLICATIONS), P(), specs), specs)
    return run(data, words, weights, state)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(4,))
def turn(
    program: Program, mesh: Mesh, data: Any, words: Array, state: ShardState, numbers: Any
) -> ShardState:
    """Run `client_rounds.turn` on every device."""
    specs = _specs(program, data)
    run = _shards(client_rounds.turn, program, mesh, specs, specs)
    return run(data, words, state, numbers)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(4,))
def steps(
    program: Program, mesh: Mesh, data: Any, words: Array, state: ShardState, block: Any
) -> ShardState:
    """Run `client_rounds.steps` on every device."""
    specs = _specs(program, data)
    run = _shards(client_rounds.steps, program, mesh, specs, specs)
    return run(data, words, state, block)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(5,))
def hessians(
    program: Program, mesh: Mesh, i: int, data: Any, words: Array, state: ShardState, block: Any
) -> ShardState:
    """Run `client_rounds.hessians` on every device."""
    own = _specs(program, data).statistics[i]

    def body(data: Any, words: Any, state: Any, block: Any) -> Any:
        keys = jax.random.wrap_key_data(words, impl="threefry2x32")
        return client_rounds.hessians(program, i, data, keys, state, block)

    run = _on_mesh(mesh, body, (_DATA, P(REPLICATIONS), own, P()), own)
    changed = list(state.statistics)
    changed[i] = run(data, words, state.statistics[i], block)
    return state._replace(statistics=tuple(changed))


def _hessian_blocks(
    loop: Loop, plan: Plan, m: int, weights: np.ndarray
) -> Iterator[tuple[np.uint32, statistics.HessianPairs]]:
    """Yield the pairs of steps of round m (from 0) whose Hessians clients send, by blocks of steps."""
    last = int(plan.ends[m])
    begin = last - int(plan.E[m])
    for first in range(begin - begin % 2, last, BLOCK_STEPS):
        own = np.zeros((BLOCK_STEPS, weights.shape[1]))
        start, stop = max(first, begin), min(first + BLOCK_STEPS, last)
        own[start - first : stop - first] = weights[start:stop]
        pairs = statistics.hessian_pairs(loop, own)
        if pairs is not None:
            yield np.uint32(first), pairs


@functools.partial(jax.jit, static_argnums=(0, 1))
def read(
    program: Program, mesh: Mesh, data: Any, words: Array, state: ShardState, numbers: Any
) -> tuple[Any, ...]:
    """Run `client_rounds.read` on every device."""
    specs = _specs(program, data)
    run = _shards(client_rounds.read, program, mesh, specs, specs.statistics)
    return run(data, words, state, numbers)


def _shards(function: Any, program: Program, mesh: Mesh, specs: ShardState, out_specs: Any) -> Any:
    def body(data: Any, words: Any, state: Any, numbers: Any) -> Any:
        keys = jax.random.wrap_key_data(words, impl="threefry2x32")
        return function(program, data, keys, state, numbers)

    return _on_mesh(mesh, body, (_DATA, P(REPLICATIONS), specs, P()), out_specs)
