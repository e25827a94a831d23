"""Many replications of Local SGD with online inference. Start reading at `simulate`, the function for users."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlsgd.core import checks
from jaxlsgd.core.algorithm import Algorithm
from jaxlsgd.core.checks import Dtype
from jaxlsgd.core.estimator import Estimator, Horizon, Measurement
from jaxlsgd.core.problem import Array, Problem
from jaxlsgd.core.progress import Progress, shown
from jaxlsgd.core.random import check_key
from jaxlsgd.core.rows import CellRows, MethodRows, Until
from jaxlsgd.engine import machine, statistics
from jaxlsgd.engine.cost import WIDTH_MULTIPLE, default_tile, lane_widths
from jaxlsgd.engine.draws import replication_keys
from jaxlsgd.engine.lanes import run_side_by_side
from jaxlsgd.engine.program import ProblemData, Program, make_data, make_program
from jaxlsgd.engine.statistics import Statistics, axes_of
from jaxlsgd.engine.tile import Advanced, run_tile
from jaxlsgd.inference.joint import widened
from jaxlsgd.runs.cell import (
    LOCAL_SGD,
    METHODS,
    Cell,
    Growth,
    as_tuple,
    growths,
    method_rows,
    saved_rounds,
)
from jaxlsgd.schedules import Plan

Device = Any  # jax.Device is a value to type checkers
Show = Callable[[float], None] | None  # called with the finished share, from 0 to 1


class SavedRound(NamedTuple):
    """The measurements of a cell at a saved round; arrays have the replications first.

    `states` are on the device, and valid until the next event only.
    """

    cell: int
    save: int
    plan: Plan  # up to the saved round
    found: dict[str, Measurement]  # by method, NumPy float64
    states: dict[str, tuple[Any, ...]]  # by method, of its statistics; replications last
    growth: dict[str, Growth]  # by method, of the loss

    def rows(self, cell: Cell) -> dict[str, MethodRows]:
        """Return the rows of every method, computed in float64 on the host."""
        return {
            m.name: method_rows(
                cell.with_looks(m), self.found[m.name], self.plan, cell.levels, self.growth[m.name]
            )
            for m in cell.methods
        }


class Finished(NamedTuple):
    """All rows of a cell."""

    cell: int
    rows: dict[str, MethodRows]


def read_cells(
    key: Array,
    cells: Sequence[Cell],
    first: int,
    count: int,
    device: Device | None = None,
    *,
    shared_draws: bool,
    lanes: Sequence[int] | None = None,
    in_numpy: bool = False,
) -> Iterator[Advanced | SavedRound]:
    """Run replications first, …, first + count − 1 of cells as one tile on one device.

    Args:
      key: typed root key.
      cells: one, or several that differ in plan, levels and saves alone.
      first: the first replication.
      count: how many there are.
      device: where to run.
      shared_draws: whether to make a block's draws once for all cells. A cell's rows are then
        bit-identical whichever cells run with it. Without, draws are made in another program, which is
        faster for a single cell; its rows are the same up to rounding.
      lanes: how many cells may run side by side in one program; () for one after another. If None, what
        `cost.lane_widths` finds best for cells that share draws. Rows are the same up to rounding.
      in_numpy: whether to read the only replication without compiling, by the methods that can be read so.

    Yields:
      `Advanced` now and then, and a `SavedRound` at each saved round of each cell.
    """
    dtype = _shared(cells)[-1]
    machine.release_programs()
    events = _tile_events(key, cells, first, count, device, shared_draws, lanes, in_numpy)
    while True:
        # The settings must not leak to the caller, who runs between two events.
        with jax.enable_x64(dtype == "float64"), jax.default_device(device):
            event = next(events, None)
        if event is None:
            return
        yield event


def _tile_events(
    key: Array,
    cells: Sequence[Cell],
    first: int,
    count: int,
    device: Device | None,
    shared_draws: bool,
    widths: Sequence[int] | None,
    in_numpy: bool,
) -> Iterator[Advanced | SavedRound]:
    problem, methods, algorithm, dtype = cells[0].shared
    platform = (device or jax.local_devices()[0]).platform
    program = make_program(problem, methods, algorithm, dtype, shared_draws, platform)
    data = jax.device_put(make_data(problem, dtype, algorithm), device)
    keys = _keys(jax.device_put(key, device), np.uint32(first), count)
    if widths is None and shared_draws:
        widths = lane_widths(problem, methods, count, dtype, platform, algorithm)
    if widths:
        whole = [cell.laid_out_whole(program.rooms) for cell in cells]
        events = run_side_by_side(program, data, keys, whole, widths)
    else:
        layouts = [cell.laid_out(program.rooms) for cell in cells]
        events = run_tile(program, data, keys, layouts)
    read = _read_in_numpy if in_numpy else statistics.measure
    for event in events:
        if isinstance(event, Advanced):
            yield event
            continue
        cell = cells[event.cell]
        plan = cell.plan.prefix(cell.layout.save_at[event.save])
        # Methods that differ in their law alone share a measurement.
        made: dict[Any, Measurement] = {}
        for m in methods:
            if (what := (m.measure, m.accumulators)) not in made:
                one = read(program, data, event.statistics, m, plan)
                made[what] = jax.tree.map(lambda x: np.asarray(x, np.float64), one)
        found = {m.name: made[m.measure, m.accumulators] for m in methods}
        states = {m.name: statistics.states_of(program, event.statistics, m) for m in methods}
        growth = growths(problem, dtype, methods, found)
        yield SavedRound(event.cell, event.save, plan, found, states, growth)


def _read_in_numpy(
    program: Program, data: ProblemData, found: Statistics, method: Estimator, plan: Plan
) -> Measurement:
    """Return the measurement of the only replication, by NumPy in float64 if the method can be read so."""
    if method.reads_numpy:
        states = only(method, data.init, statistics.states_of(program, found, method))
        horizon = Horizon.of(plan, np.float64) if method.needs_plan else None
        # NumPy warns or raises where JAX has NaN.
        with contextlib.suppress(np.linalg.LinAlgError), np.errstate(all="ignore"):
            one = method.measure_one(jax.tree.map(widened, states), horizon)
            return jax.tree.map(lambda leaf: np.asarray(leaf)[None], one)
    return statistics.measure(program, data, found, method, plan)


def only(method: Estimator, vector: Any, states: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the states of the only replication, without its axis, as NumPy arrays; `vector` is like x_0."""

    def one(leaf: Any, axis: int | None) -> np.ndarray:
        return np.asarray(leaf) if axis is None else np.asarray(leaf)[..., 0]

    axes = (axes_of(part, vector) for part in method.accumulators)
    return tuple(jax.tree.map(one, state, axis) for state, axis in zip(states, axes, strict=True))


def _shared(cells: Sequence[Cell]) -> tuple[Problem, tuple[Estimator, ...], Algorithm, Dtype]:
    """Return what all cells have in common; refuse cells that differ in it."""
    if not cells:
        raise checks.refusal("cells", "be one or more", "none", code="missing")
    names = ("problem", "methods", "algorithm", "dtype")
    for i, cell in enumerate(cells):
        pairs = zip(names, cell.shared, cells[0].shared, strict=True)
        if differing := [name for name, here, first in pairs if here != first]:
            what = " and ".join(differing)
            rule = f"have the same {', '.join(names)} as the first"
            raise checks.refusal(f"cells[{i}]", rule, f"another {what}", code="conflict")
    return cells[0].shared


def run_cells(
    key: Array,
    cells: Sequence[Cell],
    first: int,
    count: int,
    device: Device | None = None,
    *,
    shared_draws: bool = True,
    lanes: Sequence[int] | None = None,
) -> Iterator[Advanced | Finished]:
    """Run the same replications of cells that differ in plan, levels and saves alone.

    The arguments are those of `read_cells`.

    Yields:
      `Advanced` now and then, and a cell's rows as soon as it is finished.

    Example::

        for event in run_cells(jax.random.key(0), cells, 0, 512):
            if isinstance(event, Finished):
                print(cells[event.cell].plan, event.rows)
    """
    saved: list[list[dict[str, MethodRows]]] = [[] for _ in cells]
    events = read_cells(key, cells, first, count, device, shared_draws=shared_draws, lanes=lanes)
    for event in events:
        if isinstance(event, Advanced):
            yield event
            continue
        cell, parts = cells[event.cell], saved[event.cell]
        parts.append(event.rows(cell))
        if len(parts) == len(cell.layout.save_at):
            yield Finished(event.cell, _stacked(parts))


def _stacked(saves: Sequence[dict[str, MethodRows]]) -> dict[str, MethodRows]:
    return {name: MethodRows.stacked([rows[name] for rows in saves]) for name in saves[0]}


@jax.jit(static_argnums=2)
def _keys(key: Array, first: Array, count: int) -> Array:
    return replication_keys(key, first + jnp.arange(count, dtype=jnp.uint32))


def simulate(
    key: Array,
    problem: Problem,
    plan: Plan,
    *,
    replications: int,
    methods: Sequence[Estimator] = METHODS,
    levels: float | Sequence[float] = (0.95,),
    save_at: Sequence[int] | None = None,
    dtype: Dtype = "float32",
    algorithm: Algorithm = LOCAL_SGD,
    tile_size: int | None = None,
    devices: int | Sequence[Device] | None = None,
    until: float | Until | None = None,
    progress: Progress = None,
) -> CellRows:
    """Run many independent replications of Local SGD with online inference.

    Replication r sees the same data whatever the tile, the device, the schedule or the method.

    Args:
      key: typed root key; replication r uses the stream root → r → data.
      problem: what is estimated.
      plan: how many rounds, of how many steps, of what size.
      replications: how many independent runs, 10**8 at most; their rows are kept in memory.
      methods: interval methods, fed along the path; `one_step()` and `plug_in("finite")` unless given.
      levels: confidence levels, one or several.
      save_at: rounds at which to read the intervals; the last is always read.
      dtype: "float32" or "float64"; draws are float32 in both, so that both follow one path (but a
        problem's own `sample` may draw in another precision).
      algorithm: from `jaxlsgd.algorithms`; another than Local SGD is outside the theory.
      tile_size: replications that run side by side on one device; if None, what `cost.default_tile`
        finds best. `cost.largest_tile` makes one from a budget of bytes.
      devices: how many of the default backend's devices to use, or a list of JAX devices; all if None.
      until: a half-width, or an `Until`: when a run would stop, see `looks.summarise_stops`. All looks of all
        runs are computed, which costs what the whole plan does, so that any other rule can be tried on the rows. The
        plan is then a budget. Looks are at `save_at`; if that is None, 50 from 2 % of the observations on.
      progress: None shows it in a terminal or notebook, True everywhere, False nowhere; a function is
        called with the finished share, from 0 to 1. The rows are the same.

    Returns:
      `CellRows`: for each method the estimate, scale and half-widths of every replication.

    Example::

        plan = schedules.paper("C5").with_warmup(0.05).plan(power_decay(0.5), num_steps=1000)
        result = simulate(jax.random.key(0), problems.linear(5, 10), plan, replications=100)
        print(measures.coverage_table(result))
    """
    key = check_key(key)
    save = saved_rounds(plan, save_at, until)
    cell = Cell(problem, plan, as_tuple(methods), as_tuple(levels), save, dtype, algorithm)
    cell.check_plan()
    rule = cell.check_until(until)
    checks.count("replications", replications, 1, checks.MOST_REPLICATIONS)
    _check_rows(cell, replications)
    places = machine.chosen(devices)
    if tile_size is None:
        platform = places[0].platform
        widest = default_tile(problem, cell.methods, dtype, platform, algorithm)
        tile_size = min(widest, _round_up(-(-replications // len(places)), WIDTH_MULTIPLE))
    size = checks.count("tile_size", tile_size, 1)
    firsts = range(0, replications, size)
    with shown(progress, f"{problem.name or 'problem'}, {plan.name}") as show:
        parts = _run_tiles(key, cell, firsts, size, places, show)
    rows = {
        name: MethodRows.joined([part[name] for part in parts], replications) for name in parts[0]
    }
    return dataclasses.replace(cell.with_rows(rows), until=rule)


def _check_rows(cell: Cell, replications: int) -> None:
    """Refuse more replications than the machine's memory can keep the rows of."""
    room = machine.memory()
    need = replications * cell.row_bytes
    if room is not None and need > room:
        rule = "leave room in memory for their rows"
        hint = (
            f", which need {need / 1e9:,.1f} GB, and {room / 1e9:,.1f} GB are available; use fewer "
            "replications, methods, levels or saved rounds, or run a Study, which keeps rows on the disk"
        )
        raise checks.refusal("replications", rule, replications, hint, code="memory")


def _run_tiles(
    key: Array, cell: Cell, firsts: range, size: int, places: list[Device], show: Show
) -> list[dict[str, MethodRows]]:
    """Run each tile on one device."""
    report = _Progress(show, len(firsts) * cell.layout.steps)

    def run(first: int, device: Device) -> dict[str, MethodRows]:
        return report.through(run_cells(key, [cell], first, size, device, shared_draws=False))

    jobs = [functools.partial(run, first) for first in firsts]
    return on_devices(jobs, places, report.stop)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def on_devices(
    jobs: Sequence[Callable[[Any], Any]],
    devices: Sequence[Any],
    stop: Callable[[], None] = lambda: None,
) -> list[Any]:
    """Run jobs, each called with a device, one at a time per device; return results in order.

    After an error or Ctrl-C, `stop` is called before the jobs that run are waited for.
    """
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
        try:
            return list(pool.map(run, jobs))
        except BaseException:
            stop()
            raise


class _Progress:
    """Adds up the steps of all devices and shows the share that is done."""

    def __init__(self, show: Show, total: int) -> None:
        self._show, self._total, self._done = show, total, 0
        self._lock, self._stopped = threading.Lock(), False

    def stop(self) -> None:
        """Have all cells end at their next event."""
        self._stopped = True

    def through(self, events: Iterator[Advanced | Finished]) -> dict[str, MethodRows]:
        """Consume the events of one cell and return its rows."""
        rows: dict[str, MethodRows] = {}
        for event in events:
            if self._stopped:
                raise concurrent.futures.CancelledError
            if isinstance(event, Finished):
                rows = event.rows
            elif self._show is not None:
                with self._lock:
                    self._done += event.steps
                    self._show(min(1.0, self._done / self._total))
        return rows
