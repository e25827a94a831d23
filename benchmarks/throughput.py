"""Client-steps per second: the engine against NumPy on all cores, and against drawing alone."""

from __future__ import annotations

import functools
import multiprocessing
from typing import Any, NamedTuple

import numpy as np

from benchmarks import cases, numpy_baseline
from benchmarks.timing import Finding, finding, interleaved, rates, ratio, seconds

Z = 4.0  # standard errors between the two mean lengths that count as agreement


class Processes:
    """NumPy in as many worker processes as cores, started once."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = multiprocessing.get_context("spawn").Pool(count)

    def run(
        self, model: numpy_baseline.Model, path: numpy_baseline.Path, replications: int, seed: int
    ) -> numpy_baseline.Found:
        """Split the replications evenly among the processes."""
        share = -(-replications // self.count)
        jobs = [(model, path, share, seed * self.count + i) for i in range(self.count)]
        parts = self._pool.starmap(numpy_baseline.run, jobs)
        joined = (np.concatenate(part)[:replications] for part in zip(*parts, strict=True))
        return numpy_baseline.Found(*joined)

    def close(self) -> None:
        """End the processes."""
        self._pool.close()
        self._pool.join()


class Sizes(NamedTuple):
    """The size of a run."""

    num_steps: int
    replications: int
    tile: int
    repeats: int

    @classmethod
    def of(cls, quick: bool) -> Sizes:
        """Return the sizes of the targets, or small ones that only show that it works."""
        if quick:
            return cls(200, 64, 32, 2)
        return cls(cases.NUM_STEPS, cases.REPLICATIONS, cases.TILE, 7)


def floor(problem: Any, num_blocks: int, sizes: Sizes, devices: list[Any]) -> None:
    """Make the draws of a run, tile by tile on all devices, and nothing else."""
    import jax

    from jaxlsgd.engine.draws import replication_keys, stream_keys
    from jaxlsgd.runs.simulate import on_devices

    def tile(device: Any, first: int) -> None:
        with jax.default_device(device):
            index = np.arange(problem.num_clients, dtype=np.uint32)
            keys = replication_keys(jax.random.key(1), first + np.arange(sizes.tile, dtype="u4"))
            words = jax.device_put(stream_keys(keys), device)
            program = _drawing(problem.draws)
            for block in range(num_blocks):
                found = program(words, np.uint32(block * block_steps()), index)
                if block % 8 == 7:
                    jax.block_until_ready(found)
            jax.block_until_ready(found)

    firsts = range(0, sizes.replications, sizes.tile)
    on_devices([functools.partial(tile, first=first) for first in firsts], devices)


def block_steps() -> int:
    """Return the number of steps in a block of the engine."""
    from jaxlsgd.engine.layout import BLOCK_STEPS

    return BLOCK_STEPS


@functools.cache
def _drawing(draws: Any) -> Any:
    """Return a compiled program that draws a block, pair by pair as the engine does, and keeps the last."""
    import jax
    import jax.numpy as jnp

    from jaxlsgd.engine.draws import draw_pair

    @jax.jit
    def draw(keys: Any, first: Any, index: Any) -> Any:
        pairs = first // np.uint32(2) + jnp.arange(block_steps() // 2, dtype=jnp.uint32)
        start = draw_pair(keys, pairs[0], index, draws)
        # A loop that cannot be shortened, whatever is read of its result.
        return jax.lax.scan(lambda _, t: (draw_pair(keys, t, index, draws), None), start, pairs[1:])

    return draw


def _agreement(case: str, engine: Any, rival: numpy_baseline.Found) -> list[Finding]:
    """Check that both did the same job: differences of mean lengths, in standard errors."""
    found = []
    for name in ("random_scaling", "plug_in"):
        ours = 2 * engine.methods[name].half_width[-1, 0].mean(axis=-1)
        theirs = 2 * getattr(rival, name).mean(axis=-1)
        error = np.hypot(ours.std() / len(ours) ** 0.5, theirs.std() / len(theirs) ** 0.5)
        apart = abs(float(ours.mean() - theirs.mean())) / float(error)
        what = f"mean length of {name}: engine and NumPy apart"
        found.append(finding(case, what, apart, "standard errors", at_most=Z))
    return found


def _case(
    name: str, schedule: str, sizes: Sizes, devices: list[Any], numpy: Processes
) -> tuple[list[Finding], dict[str, list[float]]]:
    from jaxlsgd.engine.layout import lay_out

    case = f"{name}, {schedule}"
    plan, problem = cases.plan(name, schedule, sizes.num_steps), cases.problem(name)
    blocks = lay_out(plan).drawn // block_steps()
    model, path = numpy_baseline.Model.of(problem), numpy_baseline.Path.of(plan)
    settings = {"replications": sizes.replications, "tile_size": sizes.tile}
    engine = functools.partial(cases.simulate, name, schedule, sizes.num_steps, **settings)
    rival = functools.partial(numpy.run, model, path, sizes.replications, 1)
    drawing = functools.partial(floor, problem, blocks, sizes, devices)

    first = seconds(engine)
    drawing()
    findings = _agreement(case, engine(), rival())
    times = interleaved({"engine": engine, "NumPy": rival, "drawing": drawing}, sizes.repeats)
    work = sizes.replications * sizes.num_steps * problem.num_clients / 1e6
    findings += rates(case, work, times)
    warm = finding(case, "first call, with compiling", first, "s")
    gain = ratio(times["NumPy"], times["engine"])
    cost = ratio(times["engine"], times["drawing"])
    bound = 1.5 if schedule == "P(1/2)" else None
    findings += [
        finding(case, "engine over NumPy, both on all cores", gain, at_least=2.0),
        finding(case, "engine's time over drawing alone", cost, at_most=bound),
        warm,
    ]
    return findings, times


def run(quick: bool) -> tuple[list[Finding], dict[str, Any]]:
    """Run both problems under both schedules."""
    sizes = Sizes.of(quick)
    devices = cases.start()
    numpy = Processes(len(devices))
    findings, raw = [], {}
    try:
        for name in cases.PROBLEMS:
            for schedule in cases.SCHEDULES:
                found, raw[f"{name}, {schedule}"] = _case(name, schedule, sizes, devices, numpy)
                findings += found
    finally:
        numpy.close()
    return findings, {"sizes": sizes._asdict(), "seconds": raw}
