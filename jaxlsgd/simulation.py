"""Many replications of Local SGD with online inference, or one."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxlsgd import distributed, local_sgd, sharded, tile
from jaxlsgd.base import (
    Array,
    Estimator,
    Horizon,
    Measurement,
    Problem,
    check_count,
    check_key,
    check_level,
)
from jaxlsgd.blocks import Layout, lay_out
from jaxlsgd.draws import replication_keys
from jaxlsgd.inference.plug_in import plug_in
from jaxlsgd.inference.random_scaling import random_scaling
from jaxlsgd.memory import WIDTH_MULTIPLE, default_tile
from jaxlsgd.rows import CellRows, MethodRows, pack, unpack
from jaxlsgd.schedules import Plan

Device = Any  # jax.Device is a value to type checkers
DTYPES = ("float32", "float64")


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """One cell of work, checked: everything but the replications.

    Args:
      problem: the problem.
      plan: the plan to run.
      methods: interval methods with distinct names.
      levels: confidence levels in (0, 1).
      save_at: rounds at which intervals are wanted; the last round is always among them.
      dtype: "float32" or "float64".
      transform: optax transformation of unit learning rate for the local step. Anything but the
        default is outside the theory: intervals are then measured, not promised.
    """

    problem: Problem
    plan: Plan
    methods: tuple[Estimator, ...] = (random_scaling(), plug_in())
    levels: tuple[float, ...] = (0.95,)
    save_at: tuple[int, ...] | None = None
    dtype: str = "float32"
    transform: optax.GradientTransformation = local_sgd.SGD
    layout: Layout = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.problem, Problem):
            raise ValueError(f"problem: must be a jaxlsgd.Problem, got {self.problem!r}")
        if not isinstance(self.plan, Plan):
            raise ValueError(f"plan: must be made by schedule.plan(...), got {self.plan!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        object.__setattr__(self, "methods", _check_methods(self.methods, self.problem))
        levels = self.levels if isinstance(self.levels, (tuple, list)) else (self.levels,)
        if not levels:
            raise ValueError(f"levels: must have at least one level in (0, 1), got {levels!r}")
        object.__setattr__(self, "levels", tuple(check_level(level) for level in levels))
        object.__setattr__(self, "layout", lay_out(self.plan, self.save_at))
        object.__setattr__(self, "save_at", self.layout.save_at)

    @property
    def shared(self) -> tuple[Problem, tuple[Estimator, ...], optax.GradientTransformation, str]:
        """What tasks that are run together have in common."""
        return self.problem, self.methods, self.transform, self.dtype

    def shares_draws(self, other: Task) -> bool:
        """Whether two tasks can be run together: they differ in plan, levels and saves alone."""
        return self.shared == other.shared

    @property
    def within_theory(self) -> bool:
        """Whether the local step is the plain SGD that the theory is about."""
        return self.transform is local_sgd.SGD


def as_tuple(value: Any) -> tuple[Any, ...]:
    """A sequence as a tuple; a single value as a tuple of one."""
    return tuple(value) if isinstance(value, Iterable) else (value,)


def _check_methods(methods: Any, problem: Problem) -> tuple[Estimator, ...]:
    methods = (methods,) if isinstance(methods, Estimator) else tuple(methods)
    if not methods or not all(isinstance(method, Estimator) for method in methods):
        raise ValueError(f"methods: must be estimators such as plug_in(), got {methods!r}")
    names = [method.name for method in methods]
    if len(set(names)) < len(names):
        raise ValueError(f"methods: names must differ, got {names}; give one a name=...")
    abstract = jax.ShapeDtypeStruct((problem.dim,), jnp.float32)
    for method in methods:
        jax.eval_shape(method.init, abstract)  # refuses contrasts that do not fit
    return methods


def run_replications(
    key: Array,
    task: Task,
    first: int,
    count: int,
    device: Device | None = None,
    on_call: Callable[[int], None] = lambda steps: None,
    on_measure: Callable[[dict[str, Measurement]], None] = lambda found: None,
    on_states: Callable[[dict[str, Any]], None] = lambda states: None,
) -> dict[str, MethodRows]:
    """Runs replications first, …, first + count − 1 of a task as one tile on one device.

    `on_call` hears after some steps how many they were; `on_measure` sees each saved round's
    measurements, as NumPy arrays with the replications first, and `on_states` what they were made of.
    """
    found: list[dict[str, MethodRows]] = []
    listen = _Listener(
        lambda _, rows: found.append(rows), lambda _, steps: on_call(steps), on_measure, on_states
    )
    _run([task], key, first, count, device, listen, shared_draws=False)
    return found[0]


def run_together(
    key: Array,
    tasks: Sequence[Task],
    first: int,
    count: int,
    device: Device | None = None,
    *,
    on_rows: Callable[[int, dict[str, MethodRows]], None],
    on_call: Callable[[int, int], None] = lambda index, steps: None,
) -> None:
    """Runs the same replications of tasks that differ only in their plans, drawing once for all.

    A task's rows do not depend on the company it runs in, to the last bit: alone or not, the programs
    are the same. They are also those of `run_replications`, up to rounding: one that draws as it goes
    is a program of its own, quicker for a task alone.

    Args:
      key: typed root key.
      tasks: with the same problem, methods, dtype and transform.
      first: the first replication.
      count: how many there are.
      device: where to run.
      on_rows: hears a task's index and its rows, as soon as it is finished.
      on_call: hears a task's index and how many steps it has made since the last time.

    Example::

        found = {}
        run_together(jax.random.key(0), tasks, 0, 512, on_rows=found.__setitem__)
    """
    if not tasks or not all(tasks[0].shares_draws(task) for task in tasks):
        raise ValueError("tasks: must be one or more that share problem, methods, dtype, transform")
    _run(tasks, key, first, count, device, _Listener(on_rows, on_call), shared_draws=True)


class _Listener(NamedTuple):
    """Who is told how tasks go; see `run_replications` and `run_together`."""

    on_rows: Callable[[int, dict[str, MethodRows]], None]
    on_call: Callable[[int, int], None]
    on_measure: Callable[[dict[str, Measurement]], None] = lambda found: None
    on_states: Callable[[dict[str, Any]], None] = lambda states: None


def _run(
    tasks: Sequence[Task],
    key: Array,
    first: int,
    count: int,
    device: Device | None,
    listen: _Listener,
    *,
    shared_draws: bool,
) -> None:
    problem, methods, transform, dtype = tasks[0].shared

    def run(index: int, task: Task) -> tile.Run:
        saved: list[dict[str, MethodRows]] = []

        def on_save(save: int, state: tile.TileState) -> None:
            plan = task.plan.prefix(task.layout.save_at[save])
            found = _measurements(program, data, state, task, plan)
            listen.on_measure(found)
            listen.on_states({m.name: tile.method_states(program, state, m) for m in methods})
            saved.append({m.name: _rows(m, found[m.name], plan, task.levels) for m in methods})
            if save == len(task.layout.save_at) - 1:
                names = [method.name for method in methods]
                rows = {n: MethodRows.stacked([one[n] for one in saved]) for n in names}
                listen.on_rows(index, rows)

        return tile.Run(task.layout, on_save, functools.partial(listen.on_call, index))

    with jax.enable_x64(dtype == "float64"), jax.default_device(device):
        program = tile.make_program(problem, methods, transform, dtype, shared_draws)
        data = jax.device_put(tile.make_data(problem, dtype), device)
        keys = _keys(jax.device_put(key, device), np.uint32(first), count)
        tile.run_tile(program, data, keys, [run(i, task) for i, task in enumerate(tasks)])


def run_on_mesh(
    key: Array,
    task: Task,
    firsts: Sequence[int],
    size: int,
    mesh: Mesh,
    on_call: Callable[[int], None] = lambda steps: None,
) -> dict[str, MethodRows]:
    """Runs a tile at each replication position of a mesh, where `firsts` says which it begins with.

    The rows are in the order of `firsts`; every process gets all of them.
    """
    saved: list[dict[str, MethodRows]] = []
    with jax.enable_x64(task.dtype == "float64"):
        program = tile.make_program(task.problem, task.methods, task.transform, task.dtype)
        run = sharded.Sharded(program, task.problem, mesh)
        keys = [jax.random.key_data(_keys(key, np.uint32(first), size)) for first in firsts]

        def on_save(index: int, statistics: tuple[Any, ...]) -> None:
            plan = task.plan.prefix(task.layout.save_at[index])
            horizon = Horizon.of(plan, task.dtype)
            found = {m.name: run.measure(statistics, m, horizon) for m in task.methods}
            saved.append({m.name: _rows(m, found[m.name], plan, task.levels) for m in task.methods})

        run.run(np.concatenate(keys), task.plan, task.layout.save_at, on_save, on_call)
    return {name: MethodRows.stacked([rows[name] for rows in saved]) for name in saved[0]}


@jax.jit(static_argnums=2)
def _keys(key: Array, first: Array, count: int) -> Array:
    return replication_keys(key, first + jnp.arange(count, dtype=jnp.uint32))


def _measurements(
    program: tile.Program, data: tile.ProblemData, state: tile.TileState, task: Task, plan: Plan
) -> dict[str, Measurement]:
    horizon = Horizon.of(plan, task.dtype)
    found = {m.name: tile.measure_tile(program, data, state, m, horizon) for m in task.methods}
    return jax.tree.map(lambda x: np.asarray(x, np.float64), found)


def _rows(
    method: Estimator, found: Measurement, plan: Plan, levels: tuple[float, ...]
) -> MethodRows:
    """A saved round's rows: half-widths are multiplier times scale, in float64 on the host."""
    half = [method.multiplier(level, plan, found.detail) * found.scale for level in levels]
    floored = np.asarray(found.floored).astype(bool)
    return MethodRows(np.asarray(found.estimate), np.asarray(found.scale), np.stack(half), floored)


def cell_rows(task: Task, rows: dict[str, MethodRows]) -> CellRows:
    """Puts a task's rows together with what is known of its truth and plan."""
    return CellRows(
        problem=task.problem.name,
        schedule=task.plan.name,
        num_steps=task.plan.num_steps,
        num_rounds=task.plan.num_rounds,
        save_at=task.layout.save_at,
        steps_at=tuple(int(task.plan.ends[m - 1]) for m in task.layout.save_at),
        levels=task.levels,
        coordinates={method.name: method.coordinates(task.problem) for method in task.methods},
        truth={method.name: method.truth(task.problem) for method in task.methods},
        methods=rows,
    )


def simulate(
    key: Array,
    problem: Problem,
    plan: Plan,
    *,
    replications: int,
    methods: Sequence[Estimator] = (random_scaling(), plug_in()),
    levels: Sequence[float] = (0.95,),
    save_at: Sequence[int] | None = None,
    dtype: str = "float32",
    transform: optax.GradientTransformation = local_sgd.SGD,
    tile_size: int | None = None,
    devices: Sequence[Device] | None = None,
    mesh: Mesh | None = None,
    progress: Callable[[float], None] | None = None,
) -> CellRows:
    """Runs many independent replications of Local SGD with online inference.

    Replication r sees the same data whatever the tile, the device, the schedule or the method.

    Args:
      key: typed root key; replication r uses the stream root → r → data.
      problem: what is estimated.
      plan: how many rounds, of how many steps, of what size.
      replications: how many independent runs.
      methods: interval methods, fed along the path.
      levels: confidence levels.
      save_at: rounds at which to read the intervals; the last is always read.
      dtype: "float32" or "float64"; draws are float32 in both, so that both follow one path (what a
        problem's own `sample` draws is its own affair).
      transform: local optax transformation of unit rate; another than SGD is outside the theory.
      tile_size: replications that run side by side on one device; if None, what `memory.default_tile`
        finds best. `memory.largest_tile` makes one from a budget of bytes.
      devices: where to run; all of the default backend's if None.
      mesh: where to run instead, with axes "replications" (devices run tiles of their own; the same bits)
        and "clients" (devices share the clients of a tile, with one sum a round; another order of that
        sum, see `client_rounds`). It may span all processes, which then all get all rows.
      progress: called with the finished share, from 0 to 1.

    Returns:
      `CellRows`: for each method the estimate, scale and half-widths of every replication.

    Example::

        plan = schedules.paper("C5").with_warmup(0.05).plan(power_decay(0.5), num_steps=1000)
        result = simulate(jax.random.key(0), problems.linear(5, 10), plan, replications=100)
        print(measures.coverage_table(result))
    """
    key = check_key(key)
    save = None if save_at is None else as_tuple(save_at)
    task = Task(problem, plan, as_tuple(methods), as_tuple(levels), save, dtype, transform)
    check_count("replications", replications, 1)
    if mesh is not None and devices is not None:
        raise ValueError("devices: must be None where a mesh is given, which has its own")
    places, shards = list(devices or jax.local_devices()), 1
    if mesh is not None:
        mesh = sharded.check_mesh(mesh, problem.num_clients, transform)
        places, shards = list(mesh.devices[:, 0]), mesh.shape[sharded.CLIENTS]
    if tile_size is None:
        platform = places[0].platform
        widest = default_tile(problem, task.methods, dtype, platform, shards)
        tile_size = min(widest, _round_up(-(-replications // len(places)), WIDTH_MULTIPLE))
    size = check_count("tile_size", tile_size, 1)
    firsts = range(0, replications, size)
    if mesh is not None and distributed.spans(list(mesh.devices.flat)):
        distributed.agree("simulate", _digest(key, task, replications, size, mesh))
    if mesh is None or shards == 1:
        parts = _run_tiles(key, task, firsts, size, places, progress)
    else:
        parts = _run_waves(key, task, firsts, size, mesh, progress)
    rows = {
        name: MethodRows.joined([part[name] for part in parts], replications) for name in parts[0]
    }
    return cell_rows(task, rows)


def _run_tiles(
    key: Array, task: Task, firsts: range, size: int, places: list[Device], progress: Any
) -> list[dict[str, MethodRows]]:
    """Tiles on one device each; of devices of several processes, each process runs its own."""
    here = jax.process_index()
    owners = [places[i % len(places)].process_index for i in range(len(firsts))]
    mine = [i for i, owner in enumerate(owners) if owner == here]
    report = _Progress(progress, len(mine) * task.layout.steps)
    jobs = [
        lambda device, i=i: run_replications(key, task, firsts[i], size, device, report)
        for i in mine
    ]
    found = on_devices(jobs, [place for place in places if place.process_index == here])
    if not distributed.spans(places):
        return found
    packed = {i: pack(rows) for i, rows in zip(mine, found, strict=True)}
    return [unpack(part) for part in distributed.share(packed, owners)]


def _run_waves(
    key: Array, task: Task, firsts: range, size: int, mesh: Mesh, progress: Any
) -> list[dict[str, MethodRows]]:
    """As many tiles at once as the mesh has replication positions, each on all its client shards."""
    places = mesh.shape[sharded.REPLICATIONS]
    waves = [range(first, first + places * size, size) for first in firsts[::places]]
    report = _Progress(progress, len(waves) * task.layout.steps)
    return [run_on_mesh(key, task, wave, size, mesh, report) for wave in waves]


def _digest(key: Array, task: Task, replications: int, size: int, mesh: Mesh) -> list[Any]:
    """What must be the same on every process of a run."""
    problem, plan = task.problem, task.plan
    numbers = [np.asarray(x).tobytes() for x in (plan.E, plan.eta, jax.random.key_data(key))]
    about = [problem.name, problem.num_clients, problem.dim, problem.weights.tobytes()]
    names = [method.name for method in task.methods]
    ids = [device.id for device in mesh.devices.flat]
    how = [task.levels, task.save_at, task.dtype, replications, size, dict(mesh.shape), ids]
    return [*numbers, *about, *names, *how]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def on_devices(jobs: Sequence[Callable[[Any], Any]], devices: Sequence[Any]) -> list[Any]:
    """Runs jobs, each given a device, one at a time on each device; results in order."""
    if len(devices) == 1 or len(jobs) == 1:
        return [job(devices[0]) for job in jobs]
    free = list(devices)
    lock = threading.Lock()

    def run(job: Callable[[Any], Any]) -> Any:
        with lock:
            device = free.pop()
        try:
            return job(device)
        finally:
            with lock:
                free.append(device)

    with concurrent.futures.ThreadPoolExecutor(len(devices)) as pool:
        return list(pool.map(run, jobs))


class _Progress:
    """Adds up steps from all devices and tells the user's function the share done."""

    def __init__(self, tell: Callable[[float], None] | None, total: int) -> None:
        self._tell, self._total, self._done = tell, total, 0
        self._lock = threading.Lock()

    def __call__(self, steps: int) -> None:
        if self._tell is None:
            return
        with self._lock:
            self._done += steps
            self._tell(min(1.0, self._done / self._total))
