"""Compiles the engine's programs for a device that is not there, and writes down what came out.

Runs inside an environment made by `compile_for_accelerators`. Compiled, not executed.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

KINDS = ("linear", "logistic")
DIM, CLIENTS, ROUNDS = 5, 10, 5_000
WIDE = 20  # parameters: so many that products of matrices are not written out
RARE = 5  # steps of a round in C5, the plan for which one cell's Hessians at anchors are made
# Memory is fitted at widths for which a TPU no longer keeps the draws in its on-chip memory.
WIDTHS = (32_768, 65_536)
MEMORY = {"h100": 80 * 10**9, "tpu": 16 * 10**9}
SUBLANES = {"h100": 1, "tpu": 8}
PLATFORMS = {"h100": "gpu", "tpu": "tpu"}  # as the engine names them
INTERPRETED = 64  # replications of the block that is run by interpreting its code
LANES, LANE_REPLICATIONS = 20, 1_000  # the cells of the paper's Table 4, together


class Job(NamedTuple):
    """A program to compile, for any number of replications."""

    problem: str
    name: str
    slots: int  # 0 where it is no block
    lower: Callable[[int], Any]
    group: str  # of methods
    lanes: int = 1
    turn: int = 2  # steps in one turn of the loop over steps
    pairs: int = 0  # of steps whose Hessians it makes at an anchor
    dim: int = DIM
    anchors: bool = False  # it makes some

    @property
    def fills(self) -> bool:
        """Whether it may be what a tile needs most memory for."""
        return self.lanes == 1 and self.dim == DIM and (self.slots > 0 or self.anchors)


def topology(target: str, dump: Path | None = None) -> Any:
    """The device that is compiled for; the program to interpret is written to a directory."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    if dump is not None:
        flags = f"--xla_dump_to={dump} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=interpreted"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    if target == "tpu":
        os.environ["TPU_SKIP_MDS_QUERY"] = "1"
        os.environ["TPU_ACCELERATOR_TYPE"] = "v5litepod-4"
        os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"
    from jax.experimental import topologies

    if target == "tpu":
        return topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
    config = (HERE / "h100.textproto").read_text()
    return topologies.get_topology_desc(
        platform="cuda", topology_name="one", target_config=config, topology="1x1x1"
    ).devices[0]


def methods() -> dict[str, dict[str, Any]]:
    """What is measured in one run, by name: the paper's methods and their finite-horizon forms, and ours."""
    from jaxlsgd import one_step, plug_in, random_scaling

    paper = {
        "random scaling": random_scaling(),
        "plug-in": plug_in(),
        "plug-in, finite horizon": plug_in("finite"),
        "random scaling, finite horizon": random_scaling("finite"),
    }
    return {"": paper, "one-step": {"one-step": one_step()}}


class Asked(NamedTuple):
    """What a run asks for between its blocks."""

    steps: int
    anchors: int  # how often one is made
    rooms: list[int]  # for pairs of steps, of every block with Hessians at anchors


def _table_4() -> list[Any]:
    from jaxlsgd.report.paper.printed import HORIZONS
    from jaxlsgd.schedules import PAPER_SCHEDULES, paper, power_decay

    families = [paper(name).with_warmup(0.05) for name in PAPER_SCHEDULES]
    decay = power_decay(0.5)
    return [one.plan(decay, num_steps=steps) for one in families for steps in HORIZONS]


class Programs:
    """The programs of one problem, lowered for any number of replications."""

    def __init__(
        self, kind: str, target: str, device: Any, chosen: dict[str, Any], dim: int = DIM
    ) -> None:
        import jax

        from jaxlsgd import problems
        from jaxlsgd.algorithms import local_sgd
        from jaxlsgd.engine.program import make_data, make_program
        from jaxlsgd.schedules import constant, power_decay

        self._kind = kind
        self._sharding = jax.sharding.SingleDeviceSharding(device)
        self.methods = chosen
        problem = getattr(problems, kind)(dim, CLIENTS)
        self.program = make_program(
            problem, tuple(chosen.values()), local_sgd(), platform=PLATFORMS[target]
        )
        self._numbers = make_data(problem, "float32")
        self._data = self._abstract(self._numbers)
        self._plan = constant(1).plan(power_decay(0.5), num_rounds=ROUNDS)
        self._rare = constant(RARE).plan(power_decay(0.5), num_rounds=ROUNDS // RARE)

    def _abstract(self, tree: Any) -> Any:
        import jax

        def one(leaf: Any) -> Any:
            # Shapes on the device; numbers in the dtype of the run.
            dtype = np.float32 if leaf.dtype == np.float64 else leaf.dtype
            return jax.ShapeDtypeStruct(np.shape(leaf), dtype, sharding=self._sharding)

        return jax.tree.map(one, tree)

    def _state(self, R: int) -> Any:
        import jax

        from jaxlsgd.engine.block import start_tile

        make = functools.partial(start_tile, self.program, replications=R)
        return self._abstract(jax.eval_shape(make, self._data))

    def start(self, R: int) -> Any:
        """The start of a tile."""
        import jax

        from jaxlsgd.engine.block import start_tile

        return jax.jit(lambda d: start_tile(self.program, d, R)).lower(self._data)

    def block(self, slots: int, lanes: int, R: int) -> Any:
        """A block of steps with room for so many synchronisations, of one cell or of several as lanes."""
        import jax

        from jaxlsgd.engine.block import run_block
        from jaxlsgd.engine.draws import Supply
        from jaxlsgd.engine.lanes import run_lanes
        from jaxlsgd.engine.layout import lay_out

        run_one = run_block if lanes == 1 else run_lanes

        # Typed keys have no abstract value on a device that is not there; their words do.
        def run(d: Any, words: Any, s: Any, b: Any) -> Any:
            keys = jax.random.wrap_key_data(words)
            return run_one(self.program, slots, d, Supply(keys, None), s, b)

        block = lay_out(self._plan).groups[0][0].block
        block = block._replace(syncs=jax.tree.map(lambda x: np.resize(x, slots), block.syncs))
        state = self._state(R)
        if lanes > 1:
            first = block.first
            block, state = (
                jax.tree.map(lambda x: np.broadcast_to(np.zeros((), x.dtype), (lanes, *x.shape)), t)
                for t in (block, state)
            )
            block = block._replace(first=first)
        words = self._abstract(np.zeros((R, 2), np.uint32))
        given, state = self._abstract(block), self._abstract(state)
        return jax.jit(run, donate_argnums=2).lower(self._data, words, state, given)

    def anchor(self, lanes: int, R: int) -> Any:
        """The next anchor of the statistic that has one, of one cell or of several as lanes."""
        import jax

        from jaxlsgd.engine import statistics

        part, state = self._anchored(lanes, R)

        def run(d: Any, s: Any) -> Any:
            one = functools.partial(statistics.roll, part, d.init)
            return one(s) if lanes == 1 else jax.vmap(one)(s)

        return jax.jit(run, donate_argnums=1).lower(self._data, state)

    def hessians(self, room: int, lanes: int, R: int) -> Any:
        """Hessians at anchors of a block, with room for so many pairs of steps, of one cell or of several as lanes."""
        import jax

        from jaxlsgd.engine.block import run_hessians
        from jaxlsgd.engine.draws import Supply
        from jaxlsgd.engine.statistics import HessianPairs

        program = self.program
        part, state = self._anchored(lanes, R)

        def run(d: Any, words: Any, s: Any, first: Any, pairs: Any) -> Any:
            given = Supply(jax.random.wrap_key_data(words), None)
            one = functools.partial(run_hessians, program, program.anchored[0], d, given)
            axes: Any = HessianPairs(None, 0, None)
            every = one if lanes == 1 else jax.vmap(one, in_axes=(0, None, axes))
            return every(s, first, pairs)

        weight = np.zeros((room, 2, part.anchor.groups), np.float32)
        weight = weight if lanes == 1 else np.broadcast_to(weight, (lanes, *weight.shape))
        pairs = HessianPairs(np.zeros(room, np.int32), weight, np.int32(0))
        given = np.zeros((R, 2), np.uint32), np.uint32(0), pairs
        words, first, pairs = self._abstract(given)
        return jax.jit(run, donate_argnums=2).lower(self._data, words, state, first, pairs)

    def _anchored(self, lanes: int, R: int) -> tuple[Any, Any]:
        """The statistic with an anchor, and its states."""
        import jax

        (i,) = self.program.anchored
        state = self._state(R).statistics[i]
        if lanes > 1:
            stack = lambda x: np.broadcast_to(np.zeros((), x.dtype), (lanes, *x.shape))  # noqa: E731
            state = self._abstract(jax.tree.map(stack, state))
        return self.program.accumulators[i], state

    def asked(self, lanes: int) -> Asked:
        """What one-step asks for between the blocks of a run: of C5, or of the cells of Table 4 as lanes."""
        from jaxlsgd.engine import statistics, tile
        from jaxlsgd.engine.layout import BLOCK_STEPS, lay_out_whole

        program, plans = self.program, [self._rare] if lanes == 1 else _table_4()
        (i,) = program.anchored
        layouts = [lay_out_whole(plan, (plan.num_rounds,), program.rooms) for plan in plans]
        sent = [tile.hessian_steps(program, plan, DIM, CLIENTS)[i] for plan in plans]
        rooms = []
        for number in range(max(len(layout.calls) for layout in layouts)):
            weights = [
                tile.in_block(each, layout.calls[number].block)
                for layout, each in zip(layouts, sent, strict=True)
                if number < len(layout.calls)
            ]
            pairs = statistics.hessian_pairs(program.loop, *weights)
            rooms += [] if pairs is None else [len(pairs.at)]
        anchors = {block for plan in plans for block in tile.rolls_of(program, plan, DIM)[i]}
        assert len(layouts) == lanes
        return Asked(BLOCK_STEPS * max(len(one.calls) for one in layouts), len(anchors), rooms)

    def interpreted(self) -> Any:
        """A block on arrays that are there, for `computed`: the program, its arguments, and the CPU's results."""
        import jax

        from jaxlsgd.engine.block import run_block, start_tile
        from jaxlsgd.engine.draws import Supply, replication_keys
        from jaxlsgd.engine.layout import BLOCK_STEPS, lay_out
        from jaxlsgd.engine.program import OTHER_LOOP, cast_floats
        from jaxlsgd.schedules import constant, power_decay

        keys = replication_keys(jax.random.key(1), np.arange(INTERPRETED, dtype=np.uint32))
        plan = constant(5).plan(power_decay(0.5), num_rounds=100)
        blocks = [call.block for call in lay_out(plan, rooms=()).groups[0][:3]]

        def on(program: Any, d: Any, words: Any, s: Any, b: Any) -> Any:
            given = Supply(jax.random.wrap_key_data(words), None)
            return run_block(program, BLOCK_STEPS, d, given, s, cast_floats(b, "float32"))

        here = functools.partial(on, self.program._replace(loop=OTHER_LOOP))
        words = np.asarray(jax.random.key_data(keys))
        state = start_tile(self.program, self._numbers, INTERPRETED)
        for block in blocks[:-1]:
            state = here(self._numbers, words, state, block)
        given = jax.tree.map(np.asarray, (self._numbers, words, state, blocks[-1]))
        given = jax.tree.map(lambda x: x.astype(np.float32) if x.dtype == np.float64 else x, given)
        right = jax.tree.map(np.asarray, here(*given))

        def interpreted(*given: Any) -> Any:
            return on(self.program, *given)

        interpreted.__name__ += f"_{self._kind}"  # of the files that are written
        lowered = jax.jit(interpreted, keep_unused=True).lower(*self._abstract(given))
        return lowered, jax.tree.leaves(given), right

    def measurement(self, name: str, R: int) -> Any:
        """What a method makes of its statistics."""
        import jax

        from jaxlsgd.core.estimator import Horizon
        from jaxlsgd.engine import statistics

        def run(d: Any, s: Any, h: Any) -> Any:
            method = self.methods[name]
            states = statistics.states_of(self.program, s, method)
            parts, given = method.accumulators, h if method.needs_plan else None
            return statistics.measure_compiled(method.measure, parts, d.init, states, given)

        horizon = self._abstract(Horizon.of(self._plan, "float32"))
        return jax.jit(run).lower(self._data, self._state(R).statistics, horizon)


def jobs(target: str, device: Any) -> Iterator[Job]:
    """The start of a tile, its kinds of blocks, lanes, and every measurement; both problems."""
    from jaxlsgd.engine.layout import BLOCK_STEPS

    for kind in KINDS:
        yield from _wide_jobs(kind, target, device)
        for group, chosen in methods().items():
            programs = Programs(kind, target, device, chosen)
            loop, suffix = programs.program.loop, f" ({group})" if group else ""
            yield Job(kind, f"start of a tile{suffix}", 0, programs.start, group)
            for slots in (*programs.program.rooms, BLOCK_STEPS):
                lower = functools.partial(programs.block, slots, 1)
                name = f"block, room for {slots} rounds{suffix}"
                yield Job(kind, name, slots, lower, group, turn=2 * loop.unroll)
            if target == "h100":
                lower = functools.partial(programs.block, BLOCK_STEPS, LANES)
                name = f"block of {LANES} cells as lanes{suffix}"
                yield Job(kind, name, BLOCK_STEPS, lower, group, LANES, 2 * loop.unroll)
            if programs.program.anchored:
                yield from _anchor_jobs(kind, target, programs, group)
            for name in chosen:
                lower = functools.partial(programs.measurement, name)
                yield Job(kind, f"measurement: {name}", 0, lower, group)


def _anchor_jobs(kind: str, target: str, programs: Programs, group: str) -> Iterator[Job]:
    """An anchor, and the Hessians there that C5 asks for; of lanes, which differ in their plans, with all the room."""
    from jaxlsgd.engine.statistics import HESSIAN_ROOMS

    widths = {1: sorted(set(programs.asked(1).rooms))}
    if target == "h100":
        widths[LANES] = [HESSIAN_ROOMS[-1]]
    for lanes, rooms in widths.items():
        of = "" if lanes == 1 else f" of {lanes} cells as lanes"
        lower = functools.partial(programs.anchor, lanes)
        yield Job(kind, f"anchor{of} ({group})", 0, lower, group, lanes, anchors=True)
        for room in rooms:
            lower = functools.partial(programs.hessians, room, lanes)
            name = f"Hessians at anchors{of}, room for {room} pairs ({group})"
            yield Job(kind, name, 0, lower, group, lanes, pairs=room)


def _wide_jobs(kind: str, target: str, device: Any) -> Iterator[Job]:
    """What one-step makes of matrices too large to be written out: the programs that have products."""
    group = "one-step"
    programs = Programs(kind, target, device, methods()[group], WIDE)
    lower = functools.partial(programs.anchor, 1)
    yield Job(kind, f"anchor, {WIDE} parameters ({group})", 0, lower, group, dim=WIDE)
    lower = functools.partial(programs.measurement, group)
    yield Job(kind, f"measurement: {group}, {WIDE} parameters", 0, lower, group, dim=WIDE)


def between(
    problem: str, lanes: int, asked: Asked, programs: list[dict[str, Any]]
) -> dict[str, Any]:
    """The kernels of all anchors and Hessians of a run, per local step, from the programs that were compiled."""
    own = [
        one
        for one in programs
        if (one["problem"], one["lanes"], one["dim"]) == (problem, lanes, DIM)
    ]
    (anchor,) = (one for one in own if one["program"].startswith("anchor"))
    hessians = sorted((one for one in own if one["pairs"]), key=lambda one: one["pairs"])
    total = anchor["launches"] * asked.anchors
    for room in asked.rooms:
        # Where all the room was compiled, fewer turns of the same loop.
        one = next(one for one in hessians if one["pairs"] >= room)
        a_turn = sum(len(loop["kernels"]) for loop in one["loops"])
        total += one["launches"] - (one["pairs"] - room) * a_turn
    return {
        "problem": problem,
        "lanes": lanes,
        "steps": asked.steps,
        "anchors": asked.anchors,
        "hessians": len(asked.rooms),
        "kernels_a_step": total / asked.steps,
    }


def report(target: str, job: Job, replications: int) -> dict[str, Any]:
    """Compiles one program and reads it."""
    import hlo

    from jaxlsgd.engine.layout import BLOCK_STEPS

    began = time.perf_counter()
    compiled = job.lower(replications if job.lanes == 1 else LANE_REPLICATIONS).compile()
    text = compiled.as_text()
    found = hlo.loops(text, scalars=target == "h100")
    result = {
        "problem": job.problem,
        "program": job.name,
        "slots": job.slots,
        "compile_seconds": time.perf_counter() - began,
        "loops": [loop._asdict() for loop in found],
        "launches": hlo.launches(text, scalars=target == "h100"),
        "products": len(hlo.products(text)),
        "lanes": job.lanes,
        "dim": job.dim,
        "pairs": job.pairs,
        "unknown_trip_counts": sum(loop.trips is None for loop in found),
        "low_precision": hlo.low_precision(text),
        "collectives_in_loops": sorted({name for loop in found for name in loop.collectives}),
        "bytes": _bytes(compiled),
    }
    if job.slots:
        step, rounds, moved = 0.0, 0.0, 0.0
        for loop in found:
            count = len(loop.kernels)
            if loop.trips == BLOCK_STEPS // job.turn:
                step += (count - loop.statistics) / job.turn
                rounds += loop.statistics / job.turn
                moved += loop.bytes / job.turn
            else:
                rounds += count
        result["kernels_a_step"], result["kernels_a_round"] = step, rounds
        result["dense"] = job.slots == BLOCK_STEPS
        size = replications if job.lanes == 1 else LANE_REPLICATIONS
        result["bytes_a_client_step"] = moved / (size * CLIENTS * job.lanes)
    return result


def _bytes(compiled: Any) -> int:
    memory = compiled.memory_analysis()
    own = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes + own


def computed(kind: str, device: Any, directory: Path) -> dict[str, Any]:
    """Runs the H100's code for a block by interpreting it, and compares with the CPU."""
    import interpret
    import jax

    programs = Programs(kind, "h100", device, methods()[""])
    lowered, given, right = programs.interpreted()
    lowered.compile()
    began = time.perf_counter()
    module = interpret.Module(directory, f"jit_interpreted_{kind}")
    found = jax.tree.unflatten(jax.tree.structure(right), module.run(given))
    parts = zip((found[0], *found.statistics), (right[0], *right.statistics), strict=True)
    differences = [_apart(*map(jax.tree.leaves, pair)) for pair in parts]
    return {
        "problem": kind,
        "replications": INTERPRETED,
        "kernels": module.kernel_runs,
        "difference": max(differences),
        "seconds": time.perf_counter() - began,
    }


def _apart(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    """The largest difference, of the largest number: compensated sums also carry what was rounded off."""
    largest = max(1.0, *(float(np.max(np.abs(x))) for x in theirs))
    pairs = zip(ours, theirs, strict=True)
    return max(float(np.max(np.abs(x.astype(float) - y))) for x, y in pairs) / largest


def memory(target: str, job: Job) -> dict[str, Any]:
    """Memory as a line in R, against the prediction, and the R that fills the device."""
    from jaxlsgd import problems
    from jaxlsgd.engine import cost

    sizes = [_bytes(job.lower(R).compile()) for R in WIDTHS]
    each = (sizes[1] - sizes[0]) / (WIDTHS[1] - WIDTHS[0])
    fixed = sizes[0] - each * WIDTHS[0]
    problem = getattr(problems, job.problem)(DIM, CLIENTS)
    chosen = tuple(methods()[job.group].values())
    predicted = cost.replication_bytes(problem, chosen, sublanes=SUBLANES[target])
    return {
        "problem": job.problem,
        "program": job.name,
        "bytes_a_replication": each,
        "predicted": predicted,
        "largest": int((MEMORY[target] - fixed) / each),
        "budget": MEMORY[target],
    }


def main() -> int:
    """Compiles everything for one target and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=sorted(MEMORY), required=True)
    parser.add_argument("--replications", type=int, required=True)
    parser.add_argument("--blocks", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as dump:
        chosen = arguments.target, arguments.replications, arguments.blocks
        answer = everything(*chosen, Path(dump))
    arguments.out.write_text(json.dumps(answer, indent=1) + "\n")
    return 0


def everything(target: str, replications: int, blocks: bool, dump: Path) -> dict[str, Any]:
    """All programs of a target, or its blocks of steps alone."""
    device = topology(target, dump if target == "h100" else None)
    import jax

    runs = []
    if target == "h100":
        for kind in KINDS:
            print(f"{target}: {kind}, interpreting a block", flush=True)
            runs.append(computed(kind, device, dump))
    programs, memories = [], []
    for job in (job for job in jobs(target, device) if job.slots or not blocks):
        print(f"{target}: {job.problem}, {job.name}", flush=True)
        programs.append(report(target, job, replications))
        if job.fills:
            memories.append(memory(target, job))
    shares = []
    if target == "h100" and not blocks:
        for kind, lanes in itertools.product(KINDS, (1, LANES)):
            asked = Programs(kind, target, device, methods()["one-step"]).asked(lanes)
            shares.append(between(kind, lanes, asked, programs))
    return {
        "device": str(device.device_kind),
        "jax": jax.__version__,
        "replications": replications,
        "programs": programs,
        "memory": memories,
        "computed": runs,
        "between": shares,
    }


if __name__ == "__main__":
    sys.exit(main())
