"""The cells that the benchmarks run: the paper's two problems, with its step sizes and warm-up."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxlsgd.core.problem import Problem
    from jaxlsgd.schedules import Plan

PROBLEMS = ("linear", "logistic")
SCHEDULES = ("P(1/2)", "C1")
REPLICATIONS, TILE = 1_024, 512
NUM_STEPS = 5_000


def start(devices: int | None = None) -> list[Any]:
    """Set JAX up as a study does, and return its devices."""
    from jaxlsgd.engine import machine

    machine.prepare(devices)
    import jax

    return jax.local_devices()


@functools.cache
def problem(name: str, dim: int = 5, num_clients: int = 10) -> Problem:
    """Return a problem of the paper, or one of its kind and another size."""
    from jaxlsgd import problems

    if (dim, num_clients) == (5, 10):
        return problems.paper_problem(name)
    return getattr(problems, name)(dim, num_clients)


def plan(name: str, schedule: str, num_steps: int, gamma0: float | None = None) -> Plan:
    """Return the plan of one of the paper's schedules, or of a constant one such as "C20"."""
    from jaxlsgd import schedules

    if schedule in schedules.PAPER_SCHEDULES:
        made = schedules.paper(schedule).with_warmup(0.05)
    else:
        made = schedules.constant(int(schedule[1:]))
    step = schedules.power_decay(gamma0 or problem(name).gamma0)
    return made.plan(step, num_steps=num_steps)


@functools.cache
def both_methods() -> tuple[Any, ...]:
    """Return full random scaling and plug-in, made once so that they share compiled programs."""
    from jaxlsgd import plug_in, random_scaling

    return random_scaling(), plug_in()


def simulate(name: str, schedule: str, num_steps: int, **changes: Any) -> Any:
    """Run a cell in the engine; `changes` are arguments of `jaxlsgd.simulate`, or sizes."""
    import jax

    from jaxlsgd.runs.simulate import simulate as run

    sizes = {key: changes.pop(key) for key in ("dim", "num_clients") if key in changes}
    settings = {"replications": REPLICATIONS, "tile_size": TILE, "methods": both_methods()}
    chosen = plan(name, schedule, num_steps, changes.pop("gamma0", None))
    return run(jax.random.key(1), problem(name, **sizes), chosen, **{**settings, **changes})
