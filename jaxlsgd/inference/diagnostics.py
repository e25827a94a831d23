"""Am I in the asymptotic regime? What the horizon of a run does to its intervals."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from numpy.typing import NDArray

from jaxlsgd.base import Horizon
from jaxlsgd.inference import finite_horizon, plug_in
from jaxlsgd.schedules import Plan

FloatArray = NDArray[np.float64]
_LONGEST = 2**40  # observations; beyond that the answer is "not within reach"


@dataclasses.dataclass(frozen=True)
class Regime:
    """How far a run is from its asymptotics; `print(regime)` says it in one sentence."""

    inflation: FloatArray  # (d,) finite-horizon over asymptotic standard error
    bias: FloatArray  # (d,) bias that the start leaves, over the standard error
    tolerance: float
    num_steps: int  # observations a client that were used
    needed: int | None  # observations that would bring both under the tolerance, if it can be told

    @property
    def reached(self) -> bool:
        """Whether both figures are within the tolerance for every coordinate."""
        return _within(self.inflation, self.bias, self.tolerance)

    def __str__(self) -> str:
        worst, bias = float(np.max(self.inflation)), float(np.max(np.abs(self.bias)))
        facts = (
            f"the finite-horizon standard error is up to {100 * (worst - 1):.1f} % above the "
            f"asymptotic one, and the start's bias up to {bias:.2f} standard errors"
        )
        if self.reached:
            return f"In the asymptotic regime: {facts} (tolerance {self.tolerance:g})."
        if self.needed is None:
            return f"Not in the asymptotic regime: {facts}; what horizon would do cannot be told."
        return (
            f"Not in the asymptotic regime: {facts}; about {self.needed:,} observations a client "
            f"(now {self.num_steps:,}) would bring both under {self.tolerance:g}."
        )


def regime(state: plug_in.PlugInState, plan: Plan, tolerance: float = 0.05) -> Regime:
    """Compares a run's finite-horizon standard errors with the asymptotic ones.

    Args:
      state: of `plug_in(...)`, after the run; one replication.
      plan: the plan that was run.
      tolerance: what counts as small, for SE ratio − 1 and for bias/SE alike.

    Returns:
      A `Regime`. The horizon needed is that of the same schedule and step size, with this run's Ĝ and Ŝ.

    Example::

        result = jaxlsgd.fit(key, problem, plan)
        print(result.regime(tolerance=0.05))
    """
    if not (np.isfinite(tolerance) and 0 < tolerance < 1):
        raise ValueError(f"tolerance: must be in (0, 1), got {tolerance!r}")
    inflation, bias = figures(state, plan)
    if not np.all(np.isfinite(inflation) & np.isfinite(bias)):
        raise ValueError("state: must be finite; the run has diverged or has no rounds yet")
    needed = plan.num_steps
    if not _within(inflation, bias, tolerance):
        needed = _search(state, plan, tolerance)
    return Regime(inflation, bias, tolerance, plan.num_steps, needed)


def figures(state: plug_in.PlugInState, plan: Plan) -> tuple[FloatArray, FloatArray]:
    """SE ratio and bias/SE by coordinate that this Ĝ, Ŝ and start would have under a plan."""
    horizon = Horizon.of(plan, state.G.dtype)
    # ν̂/t_T belongs to the plan that is asked about, not to the one that was run.
    sums = state._replace(
        s=np.asarray(np.sum(1 / plan.E), state.G.dtype), m=np.asarray(plan.num_rounds, np.int32)
    )
    found = _measure((sums,), horizon)
    bias = np.asarray(found.detail.transient, np.float64) / np.asarray(found.scale, np.float64)
    return np.asarray(found.detail.inflation, np.float64), bias


_measure = jax.jit(finite_horizon.measure_plug_in)


def _within(inflation: FloatArray, bias: FloatArray, tolerance: float) -> bool:
    return bool(np.all(inflation - 1 <= tolerance) and np.all(np.abs(bias) <= tolerance))


def _search(state: plug_in.PlugInState, plan: Plan, tolerance: float) -> int | None:
    """Doubles the horizon until both are small, then halves the bracket to 5 %."""

    def good(num_steps: int) -> bool:
        longer = plan.schedule.plan(plan.step_size, num_steps=num_steps)
        return _within(*figures(state, longer), tolerance)

    low = high = plan.num_steps
    try:
        while not good(high):
            low, high = high, 2 * high
            if high > min(_LONGEST, 256 * plan.num_steps):
                return None
    except ValueError:  # a given sequence ends
        return None
    while high - low > 0.05 * high:
        middle = (low + high) // 2
        low, high = (low, middle) if good(middle) else (middle, high)
    return int(high)
