"""One program on a mesh of devices: clients spread with one sum a round, replications side by side.

Where a mesh has replications only, its devices run tiles of their own, as without one; this file is for
those that spread clients as well. See `client_rounds` for what each device does. A mesh may span
several processes, all of which must make the same calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlsgd import client_rounds, distributed, local_sgd, tile
from jaxlsgd.base import Array, Estimator, Horizon, Measurement, Problem
from jaxlsgd.client_rounds import CLIENTS, Seen, ShardState
from jaxlsgd.schedules import Plan

REPLICATIONS = "replications"
# Calls queued before the host waits, as for a tile.
_WAIT_EVERY = 8


def check_mesh(mesh: Any, num_clients: int, transform: Any) -> Mesh:
    """Refuses a mesh that a simulation cannot use; adds the axis that is missing."""
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh: must be a jax.sharding.Mesh, got {mesh!r}")
    names = mesh.axis_names
    if not names or not set(names) <= {REPLICATIONS, CLIENTS}:
        raise ValueError(f"mesh: axes must be named {REPLICATIONS!r} or {CLIENTS!r}, got {names}")
    shards = mesh.shape.get(CLIENTS, 1)
    if shards > num_clients:
        raise ValueError(
            f"mesh: must have at most as many client shards as clients ({num_clients}), got {shards}"
        )
    if shards > 1 and transform is not local_sgd.SGD:
        raise ValueError("transform: must be plain SGD where clients are sharded, got another")
    devices = mesh.devices if names[0] == REPLICATIONS else mesh.devices.T
    return Mesh(devices.reshape(-1, shards), (REPLICATIONS, CLIENTS))


class Sharded:
    """A problem whose clients are spread over a mesh, ready to run tiles.

    Args:
      program: what is compiled.
      problem: whose numbers are placed on the devices.
      mesh: as `check_mesh` returns it.
    """

    def __init__(self, program: tile.Program, problem: Problem, mesh: Mesh) -> None:
        self.program, self.mesh = program, mesh
        data = pad_clients(tile.make_data(problem, program.dtype), mesh.shape[CLIENTS])
        self.data = _place(mesh, data, _DATA)

    def run(
        self,
        words: np.ndarray,
        plan: Plan,
        save_at: tuple[int, ...],
        on_save: Callable[[int, tuple[Any, ...]], None],
        on_call: Callable[[int], None] = lambda steps: None,
    ) -> None:
        """Runs one tile at each replication position, from x_0 to the end.

        Args:
          words: key words of all replications, (positions · R, 2).
          plan: the plan.
          save_at: rounds to read, ascending, the last one T.
          on_save: sees the statistics at each saved round, as (index, statistics).
          on_call: hears after some calls how many steps they made.
        """
        program, mesh, data = self.program, self.mesh, self.data
        waiting = _Waiting(on_call)
        keys = _place(mesh, words, P(REPLICATIONS))
        state = start(program, mesh, keys.shape[0], data)
        for each in client_rounds.lay_out(plan, save_at):
            state = turn(program, mesh, data, keys, state, each.turn)
            for block in each.steps:
                state = steps(program, mesh, data, keys, state, block)
            waiting.after(each.num_steps, state.begun)
            if each.reading is not None:
                waiting.now(state.begun)
                statistics = read(program, mesh, data, keys, state, each.reading)
                on_save(save_at.index(each.number), statistics)
        on_call(1)  # the last evaluation

    def measure(
        self, statistics: tuple[Any, ...], method: Estimator, horizon: Horizon
    ) -> Measurement:
        """One method's measurement of every replication, on every process, as NumPy arrays."""
        found = _measure(self.program, self.mesh, method, self.data, statistics, horizon)
        return jax.tree.map(lambda x: np.asarray(distributed.whole(x), np.float64), found)


class _Waiting:
    """Lets calls queue up, but not without end, and tells how many steps are done."""

    def __init__(self, on_call: Callable[[int], None]) -> None:
        self._on_call, self._calls, self._steps = on_call, 0, 0

    def after(self, steps: int, result: Array) -> None:
        """A call is queued."""
        self._calls, self._steps = self._calls + 1, self._steps + steps
        if self._calls == _WAIT_EVERY:
            self.now(result)

    def now(self, result: Array) -> None:
        """Waits for all of them."""
        jax.block_until_ready(result)
        if self._steps:
            self._on_call(self._steps)
        self._calls = self._steps = 0


def pad_clients(data: tile.ProblemData, shards: int) -> tile.ProblemData:
    """Makes the number of clients a multiple of `shards`.

    A padding client is the last client once more, with the same draws, and of weight 0: it can only
    diverge where that one does.
    """
    extra = -data.weights.shape[0] % shards

    def copies(leaf: Any) -> np.ndarray:
        return np.concatenate([leaf, np.repeat(np.asarray(leaf)[-1:], extra, axis=0)])

    weights = np.concatenate([data.weights, np.zeros(extra, data.weights.dtype)])
    clients = jax.tree.map(copies, data.clients)
    return data._replace(weights=weights, clients=clients, client_index=copies(data.client_index))


# How a problem's numbers lie on a mesh.
_DATA = tile.ProblemData(P(), P(CLIENTS), P(CLIENTS), P(CLIENTS), P())


def _place(mesh: Mesh, tree: Any, specs: Any) -> Any:
    """Puts arrays on a mesh, each process its own devices' part."""

    def put(spec: P, part: Any) -> Any:
        def one(leaf: Any) -> Array:
            leaf = np.asarray(leaf)
            return jax.make_array_from_callback(
                leaf.shape, NamedSharding(mesh, spec), lambda index: leaf[index]
            )

        return jax.tree.map(one, part)

    return jax.tree.map(put, specs, tree, is_leaf=lambda x: isinstance(x, P))


def _by_replication(tree: Any) -> Any:
    """Specs of what is the same on every client shard: the last axis is the replications."""
    return jax.tree.map(
        lambda leaf: P(*[None] * (leaf.ndim - 1), REPLICATIONS) if leaf.ndim else P(), tree
    )


def _by_both(tree: Any) -> Any:
    """Specs of what differs between client shards: the first axis counts them, or has their parts."""
    return jax.tree.map(lambda leaf: P(CLIENTS, *[None] * (leaf.ndim - 2), REPLICATIONS), tree)


def _on_mesh(mesh: Mesh, function: Any, in_specs: Any, out_specs: Any) -> Any:
    # Without the check of what varies over the mesh: it would ask a user's loss for annotations.
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def _specs(program: tile.Program, data: tile.ProblemData) -> ShardState:
    state = jax.eval_shape(lambda d: client_rounds.start(program, d, 1), data)
    return ShardState(
        _by_both(state.local),
        _by_replication(state.begun),
        Seen(*_by_both(tuple(state.seen))),
        _by_replication(state.statistics),
    )


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def start(
    program: tile.Program, mesh: Mesh, replications: int, data: tile.ProblemData
) -> ShardState:
    """`client_rounds.start` on every device; `replications` are those of the whole mesh."""
    here = replications // mesh.shape[REPLICATIONS]
    body = lambda d: client_rounds.start(program, d, here)  # noqa: E731
    return _on_mesh(mesh, body, (_DATA,), _specs(program, data))(data)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(4,))
def turn(
    program: tile.Program, mesh: Mesh, data: Any, words: Array, state: ShardState, numbers: Any
) -> ShardState:
    """`client_rounds.turn` on every device."""
    specs = _specs(program, data)
    run = _shards(client_rounds.turn, program, mesh, specs, specs)
    return run(data, words, state, numbers)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(4,))
def steps(
    program: tile.Program, mesh: Mesh, data: Any, words: Array, state: ShardState, block: Any
) -> ShardState:
    """`client_rounds.steps` on every device."""
    specs = _specs(program, data)
    run = _shards(client_rounds.steps, program, mesh, specs, specs)
    return run(data, words, state, block)


@functools.partial(jax.jit, static_argnums=(0, 1))
def read(
    program: tile.Program, mesh: Mesh, data: Any, words: Array, state: ShardState, numbers: Any
) -> tuple[Any, ...]:
    """`client_rounds.read` on every device."""
    specs = _specs(program, data)
    run = _shards(client_rounds.read, program, mesh, specs, specs.statistics)
    return run(data, words, state, numbers)


def _shards(
    function: Any, program: tile.Program, mesh: Mesh, specs: ShardState, out_specs: Any
) -> Any:
    def body(data: Any, words: Any, state: Any, numbers: Any) -> Any:
        keys = jax.random.wrap_key_data(words, impl="threefry2x32")
        return function(program, data, keys, state, numbers)

    return _on_mesh(mesh, body, (_DATA, P(REPLICATIONS), specs, P()), out_specs)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _measure(
    program: tile.Program,
    mesh: Mesh,
    method: Estimator,
    data: tile.ProblemData,
    statistics: tuple[Any, ...],
    horizon: Horizon,
) -> Measurement:
    def body(data: Any, statistics: Any, horizon: Any) -> Measurement:
        state = tile.TileState(None, statistics)  # type: ignore[arg-type]
        return tile.measure_tile(program, data, state, method, horizon)

    given = (_DATA, _by_replication(statistics), P())
    return _on_mesh(mesh, body, given, P(REPLICATIONS))(data, statistics, horizon)
