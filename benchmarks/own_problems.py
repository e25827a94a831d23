"""Compare problems as users write them with the built-in ones and NumPy, on one core; time their first call.

The paper's two problems three times: built in; *declared*, by draws and a loss that is differentiated by JAX; and
*easy*, by `sample(key, client)` with `jax.random` and the same loss.
"""

from __future__ import annotations

import functools
import os
import tempfile
import time
from typing import Any

from benchmarks import cases, numpy_baseline
from benchmarks.timing import Finding, finding, fresh, interleaved, rates, ratio

FORMS = ("built in", "declared", "easy")
SCHEDULE = "C5"


@functools.cache
def problem(name: str, form: str) -> Any:
    """Return one of the paper's problems in one of three forms."""
    import jax
    import numpy as np

    from jaxlsgd import Draws, Problem

    known = cases.problem(name)
    if form == "built in":
        return known
    linear = name == "linear"

    def observed(a: Any, chance: Any, truth: Any) -> Any:
        if linear:
            return a, a @ truth + chance
        return a, (chance < jax.nn.sigmoid(a @ truth)).astype(a.dtype)

    def observe(draws: Any, truth: Any) -> Any:
        if linear:
            return observed(draws.normal[:-1], draws.normal[-1], truth)
        return observed(draws.normal, draws.uniform[0], truth)

    def sample(key: Any, truth: Any) -> Any:
        one, two = jax.random.split(key)
        draw = jax.random.normal if linear else jax.random.uniform
        return observed(jax.random.normal(one, (5,)), draw(two), truth)

    def loss(x: Any, seen: Any) -> Any:
        z = seen[0] @ x
        return 0.5 * (z - seen[1]) ** 2 if linear else jax.nn.softplus(z) - seen[1] * z

    draws = Draws(normal=6) if linear else Draws(normal=5, uniform=1)
    source: dict[str, Any] = (
        {"sample": sample} if form == "easy" else {"draws": draws, "observe": observe}
    )
    truths = np.asarray(known.clients.truth)
    return Problem(known.init, loss, known.num_clients, clients=truths, **source)


def simulate(name: str, form: str, num_steps: int, replications: int) -> Any:
    """Run one tile."""
    import jax

    from jaxlsgd.runs.simulate import simulate as run

    plan = cases.plan(name, SCHEDULE, num_steps)
    return run(
        jax.random.key(1),
        problem(name, form),
        plan,
        replications=replications,
        tile_size=replications,
        methods=cases.both_methods(),
    )


def _speed(name: str, quick: bool) -> tuple[list[Finding], dict[str, Any]]:
    steps, replications = (70, 32) if quick else (1_000, cases.TILE)
    plan, known = cases.plan(name, SCHEDULE, steps), problem(name, "built in")
    model, path = numpy_baseline.Model.of(known), numpy_baseline.Path.of(plan)
    jobs: dict[str, Any] = {
        form: functools.partial(simulate, name, form, steps, replications) for form in FORMS
    }
    jobs["NumPy"] = functools.partial(numpy_baseline.run, model, path, replications, 1)
    for job in jobs.values():
        job()
    times = interleaved(jobs, 2 if quick else 7)
    case = f"{name}, {SCHEDULE}"
    work = steps * replications * known.num_clients / 1e6
    findings = rates(case, work, times)
    easy, declared = (
        ratio(times["NumPy"], times["easy"]),
        ratio(times["built in"], times["declared"]),
    )
    findings += [
        finding(case, "easy form over NumPy", easy, at_least=0.75),
        finding(case, "declared form over built in", declared, at_least=0.75),
    ]
    return findings, times


def first_call(name: str, form: str, began: float) -> float:
    """Return seconds from the start of the interpreter to the first rows. In a process of its own."""
    cases.start(1)
    simulate(name, form, 500, 512)
    return time.time() - began


def run(quick: bool) -> tuple[list[Finding], dict[str, Any]]:
    """Run both problems."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    cases.start(1)
    findings, raw = [], {}
    for name in cases.PROBLEMS[:1] if quick else cases.PROBLEMS:
        found, raw[name] = _speed(name, quick)
        findings += found
        for form in FORMS[2:] if quick else FORMS[1:]:
            with tempfile.TemporaryDirectory() as cache:
                cold, warm = (
                    fresh("own_problems", "first_call", cache, name, form) for _ in range(2)
                )
            case = f"{name}, {form} form, 500 steps"
            findings.append(finding(case, "first rows, nothing compiled", cold, "s", at_most=15))
            findings.append(finding(case, "first rows, from the cache", warm, "s", at_most=5))
    return findings, {"seconds": raw}
