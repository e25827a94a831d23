"""Compiles the engine's programs for a device that is not there, and writes down what came out.

Runs inside an environment made by `compile_for_accelerators`. Compiled, not executed.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

DIM, CLIENTS, ROUNDS = 5, 10, 5_000
# Memory is fitted at widths for which a TPU no longer keeps the draws in its on-chip memory.
WIDTHS = (32_768, 65_536)
MEMORY = {"h100": 80 * 10**9, "tpu": 16 * 10**9}
SUBLANES = {"h100": 1, "tpu": 8}


class Job(NamedTuple):
    """A program to compile, for any number of replications."""

    problem: str
    name: str
    slots: int  # 0 where it is no block
    lower: Callable[[int], Any]
    group: str  # of methods


def topology(target: str) -> Any:
    """The device that is compiled for."""
    os.environ["JAX_PLATFORMS"] = "cpu"
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
        "random scaling, finite horizon": random_scaling(critical="finite_horizon"),
    }
    return {"": paper, "one-step": {"one-step": one_step()}}


class Programs:
    """The programs of one problem, lowered for any number of replications."""

    def __init__(self, kind: str, device: Any, chosen: dict[str, Any]) -> None:
        import jax

        from jaxlsgd import problems
        from jaxlsgd.algorithms import local_sgd
        from jaxlsgd.engine.program import make_data, make_program
        from jaxlsgd.schedules import constant, power_decay

        self._sharding = jax.sharding.SingleDeviceSharding(device)
        self.methods = chosen
        problem = getattr(problems, kind)(DIM, CLIENTS)
        self._program = make_program(problem, tuple(self.methods.values()), local_sgd())
        self._data = self._abstract(make_data(problem, "float32"))
        self._plan = constant(1).plan(power_decay(0.5), num_rounds=ROUNDS)

    def _abstract(self, tree: Any) -> Any:
        import jax
        import numpy as np

        def one(leaf: Any) -> Any:
            # Shapes on the device; numbers in the dtype of the run.
            dtype = np.float32 if leaf.dtype == np.float64 else leaf.dtype
            return jax.ShapeDtypeStruct(np.shape(leaf), dtype, sharding=self._sharding)

        return jax.tree.map(one, tree)

    def _state(self, R: int) -> Any:
        import jax

        from jaxlsgd.engine.block import start_tile

        make = functools.partial(start_tile, self._program, replications=R)
        return self._abstract(jax.eval_shape(make, self._data))

    def start(self, R: int) -> Any:
        """The start of a tile."""
        import jax

        from jaxlsgd.engine.block import start_tile

        return jax.jit(lambda d: start_tile(self._program, d, R)).lower(self._data)

    def block(self, slots: int, R: int) -> Any:
        """A block of steps with room for so many synchronisations."""
        import jax
        import numpy as np

        from jaxlsgd.engine.block import run_block
        from jaxlsgd.engine.layout import lay_out
        from jaxlsgd.engine.source import Supply

        # Typed keys have no abstract value on a device that is not there; their words do.
        def run(d: Any, words: Any, s: Any, b: Any) -> Any:
            keys = jax.random.wrap_key_data(words)
            return run_block(self._program, slots, d, Supply(keys, None), s, b)

        block = lay_out(self._plan).groups[0][0].block
        resized = jax.tree.map(lambda leaf: np.resize(leaf, slots), block.syncs)
        words = self._abstract(np.zeros((R, 2), np.uint32))
        given = self._abstract(block._replace(syncs=resized))
        return jax.jit(run, donate_argnums=2).lower(self._data, words, self._state(R), given)

    def measurement(self, name: str, R: int) -> Any:
        """What a method makes of its statistics."""
        import jax

        from jaxlsgd.core.estimator import Horizon
        from jaxlsgd.engine import statistics

        def run(d: Any, s: Any, h: Any) -> Any:
            return statistics.measure(self._program, d, s, self.methods[name], h)

        horizon = self._abstract(Horizon.of(self._plan, "float32"))
        return jax.jit(run).lower(self._data, self._state(R).statistics, horizon)


def jobs(device: Any) -> Iterator[Job]:
    """The start of a tile, its three kinds of blocks, and every measurement; both problems."""
    from jaxlsgd.engine.layout import BLOCK_STEPS, SLOTS

    for kind in ("linear", "logistic"):
        for group, chosen in methods().items():
            programs = Programs(kind, device, chosen)
            suffix = f" ({group})" if group else ""
            yield Job(kind, f"start of a tile{suffix}", 0, programs.start, group)
            for slots in (*SLOTS, BLOCK_STEPS):
                lower = functools.partial(programs.block, slots)
                yield Job(kind, f"block, room for {slots} rounds{suffix}", slots, lower, group)
            for name in chosen:
                lower = functools.partial(programs.measurement, name)
                yield Job(kind, f"measurement: {name}", 0, lower, group)


def report(target: str, job: Job, replications: int) -> dict[str, Any]:
    """Compiles one program and reads it."""
    import hlo

    from jaxlsgd.engine.layout import BLOCK_STEPS

    began = time.perf_counter()
    compiled = job.lower(replications).compile()
    text = compiled.as_text()
    found = hlo.loops(text, scalars=target == "h100")
    result = {
        "problem": job.problem,
        "program": job.name,
        "slots": job.slots,
        "compile_seconds": time.perf_counter() - began,
        "loops": [loop._asdict() for loop in found],
        "unknown_trip_counts": sum(loop.trips is None for loop in found),
        "low_precision": hlo.low_precision(text),
        "collectives_in_loops": sorted({name for loop in found for name in loop.collectives}),
        "bytes": _bytes(compiled),
    }
    if job.slots:
        step, rounds = 0.0, 0.0
        for loop in found:
            count = len(loop.kernels)
            if loop.trips == BLOCK_STEPS // 2:  # two steps an iteration
                step += (count - loop.statistics) / 2
                rounds += loop.statistics / 2
            else:
                rounds += count
        result["kernels_a_step"], result["kernels_a_round"] = step, rounds
    return result


def _bytes(compiled: Any) -> int:
    told = compiled.memory_analysis()
    own = told.output_size_in_bytes - told.alias_size_in_bytes
    return told.argument_size_in_bytes + told.temp_size_in_bytes + own


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
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    device = topology(arguments.target)
    import jax

    programs, memories = [], []
    for job in jobs(device):
        print(f"{arguments.target}: {job.problem}, {job.name}", flush=True)
        programs.append(report(arguments.target, job, arguments.replications))
        if job.slots:
            memories.append(memory(arguments.target, job))
    answer = {
        "device": str(device.device_kind),
        "jax": jax.__version__,
        "replications": arguments.replications,
        "programs": programs,
        "memory": memories,
    }
    arguments.out.write_text(json.dumps(answer, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
