"""HulC: the hull of the averages of B federations that never meet.

If each ȳ^b is as likely above x*_j as below it, all B are on one side with probability 2^(1−B): the interval from
the least to the largest covers x*_j with probability 1 − 2^(1−B) at least, whatever the variance, the schedule, ν,
and the law of ȳ^b. The federations are those of `parallel_runs`, and need what these need.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.estimator import Estimator, Horizon, Law, Measurement
from jaxlsgd.core.registry import register
from jaxlsgd.inference.rivals.copies import RunState, averages, contrasts_of, given_dim, run_means


def runs_for(level: float) -> int:
    """Return the least B with 1 − 2^(1−B) ≥ level.

    >>> runs_for(0.95)
    6
    """
    return int(np.ceil(1 - np.log2(1 - checks.level(level)) - 1e-9))


@register("method")
def hulc(runs: int, dim: int | None = None, name: str | None = None) -> Estimator:
    """HulC: from the least to the largest of the averages of B parallel federations.

    The estimate is the middle of the interval. Its level is 1 − 2^(1−B); a higher one is refused, and for a lower
    one the interval is the same. The published method draws between B and B − 1 runs so as to meet a level
    exactly; here B is given.

    For a run of `federation_tree` on a problem made by `split_clients`; `parallel_runs.split` makes both.

    Args:
      runs: B, at least 2; `runs_for(0.95)` is 6.
      dim: d of one federation; that of the problem if None, and checked if given.
      name: name in tables; "hulc" if None.

    Returns:
      An `Estimator`. It costs what `parallel_runs` costs.

    Reference: Kuchibhotla, Balakrishnan, Wasserman (2024), The HulC: confidence regions from convex hulls,
    JRSS B 86.
    """
    checks.count("runs", runs, 2)
    given = given_dim(dim)
    return Estimator(
        name=name or "hulc",
        accumulators=(run_means(runs, given),),
        measure=_measure_hull(runs, given),
        law=_hull(runs),
        **contrasts_of(runs, given),
        label="HulC",
        cost=f"no gradients, no communication; {runs} × the server's memory",
    )


@functools.cache
def _measure_hull(runs: int, dim: int | None) -> Any:
    def measure(states: tuple[RunState, ...], horizon: Horizon | None) -> Measurement:
        del horizon
        each = averages(states[0], runs, dim)
        low, high = jnp.min(each, axis=0), jnp.max(each, axis=0)
        scale = jnp.where(states[0].m < 1, jnp.inf, (high - low) / 2)
        return Measurement((low + high) / 2, scale)

    return measure


@functools.cache
def _hull(runs: int) -> Law:
    """Return the law: within 1 half-range of the middle with probability 1 − 2^(1−B), otherwise unknown."""
    outside = 2.0 ** (1 - runs)

    def multiplier(level: float, plan: Any, detail: Any) -> float:
        del plan, detail
        if level > 1 - outside + 1e-12:
            rule = f"be at most {1 - outside:.6g}, that of the hull of {runs} runs"
            raise refusal(
                "level", rule, level, f"; take {runs_for(level)} runs", code="unsupported"
            )
        return 1.0

    def tail(statistic: Any, plan: Any, detail: Any) -> np.ndarray:
        del plan, detail
        return np.where(np.abs(np.asarray(statistic, np.float64)) > 1, outside, 1.0)

    return Law(multiplier, tail, from_plan=True, least_p=outside)
