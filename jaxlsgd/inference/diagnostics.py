"""Whether a run is long enough for asymptotic intervals, and what horizon would be."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.estimator import Horizon
from jaxlsgd.inference import finite_horizon, plug_in
from jaxlsgd.schedules import Plan

FloatArray = NDArray[np.float64]
_LONGEST = 2**20  # rounds at which the search ends; some seconds
_CLOSE = 1.02  # the search finds the horizon needed up to this factor


class Figures(NamedTuple):
    """What a horizon does to each coordinate."""

    inflation: FloatArray  # (d,) finite-horizon over asymptotic standard error
    bias: FloatArray  # (d,) bias that the start leaves, over the standard error

    @property
    def worst(self) -> float:
        """The larger of |inflation − 1| and |bias| over all coordinates."""
        return float(max(np.max(np.abs(self.inflation - 1)), np.max(np.abs(self.bias))))


@dataclasses.dataclass(frozen=True)
class Regime:
    """How far a run is from its asymptotics; `print(regime)` sums it up in one sentence."""

    inflation: FloatArray  # (d,) finite-horizon over asymptotic standard error
    bias: FloatArray  # (d,) bias that the start leaves, over the standard error
    tolerance: float
    num_steps: int  # observations per client that were used
    needed: int | None  # observations per client that bring both under the tolerance, if known
    why_not: str  # why it is not known, or ""
    names: tuple[str, ...]  # of the coordinates
    steps: NDArray[np.int64]  # (horizons,) observations per client of the horizons that were tried
    inflation_at: FloatArray  # (horizons, d)
    bias_at: FloatArray  # (horizons, d)

    @property
    def reached(self) -> bool:
        """Whether both figures are within the tolerance for every coordinate."""
        return Figures(self.inflation, self.bias).worst <= self.tolerance

    def __str__(self) -> str:
        facts = f"{self._errors()}, and {self._start()}"
        if self.reached:
            return f"In the asymptotic regime: {facts} (tolerance {self.tolerance:g})."
        if self.needed is None:
            return f"Not in the asymptotic regime: {facts}; {self.why_not}."
        return (
            f"Not in the asymptotic regime: {facts}; about {self.needed:,} observations per client "
            f"(now {self.num_steps:,}) would bring both under {self.tolerance:g}."
        )

    def _errors(self) -> str:
        j = int(np.argmax(np.abs(self.inflation - 1)))
        share = 100 * (self.inflation[j] - 1)
        side = "above" if share >= 0 else "below"
        return (
            f"the finite-horizon standard error is up to {abs(share):.1f} % {side} the asymptotic "
            f"one ({self.names[j]})"
        )

    def _start(self) -> str:
        j = int(np.argmax(np.abs(self.bias)))
        return (
            f"the bias from the start is up to {abs(self.bias[j]):.2g} standard errors "
            f"({self.names[j]})"
        )


def regime(
    state: plug_in.PlugInState,
    plan: Plan,
    tolerance: float = 0.05,
    names: Sequence[str] | None = None,
) -> Regime:
    """Compares a run's finite-horizon standard errors with the asymptotic ones.

    Tries longer horizons with this run's Ĝ, Ŝ, start, schedule and step size: doubles, then bisects
    to the shortest one, to 2 %, at which both figures of all coordinates are within the tolerance. A
    sequence that was given cannot be extended, so that no such horizon is known for it. All figures
    are those of the recursion linearised at ȳ. Where the loss curves more at the start, as logistic
    loss does, the start fades faster, and its bias is smaller than stated here.

    Args:
      state: of `plug_in(...)`, after the run, one replication; or a tuple of states with it.
      plan: the plan that was run, of at least two rounds.
      tolerance: what counts as small, for |SE ratio − 1| and for |bias|/SE alike.
      names: of the coordinates, for the sentence.

    Returns:
      A `Regime`; `report.diagnostics` draws it.

    Example::

        result = jaxlsgd.fit(key, problem, plan)
        print(result.regime(tolerance=0.05))
    """
    tolerance = checks.level(tolerance, "tolerance")
    if plan.num_rounds < 2:
        raise refusal("plan", "have at least 2 rounds", plan.num_rounds)
    source = _Source.of(_plug_in_state(state))
    seen = {plan.num_steps: _figures(source, plan)}
    here, needed, why_not = seen[plan.num_steps], plan.num_steps, ""
    if _is_given(plan):
        needed, why_not = None, "the horizon needed is not known for a given sequence"
    else:
        needed = _search(source, plan, tolerance, seen)
        longest = max(seen)
        why_not = "" if needed else f"even {longest:,} observations per client are not enough"
    steps = sorted(seen)
    return Regime(
        *here,
        tolerance=float(tolerance),
        num_steps=plan.num_steps,
        needed=plan.num_steps if here.worst <= tolerance else needed,
        why_not=why_not,
        names=tuple(names or (f"x[{j}]" for j in range(len(here.bias)))),
        steps=np.array(steps),
        inflation_at=np.stack([seen[n].inflation for n in steps]),
        bias_at=np.stack([seen[n].bias for n in steps]),
    )


def figures(state: plug_in.PlugInState, plan: Plan) -> Figures:
    """SE ratio and bias/SE by coordinate that this Ĝ, Ŝ and start would have under a plan."""
    return _figures(_Source.of(_plug_in_state(state)), plan)


def _plug_in_state(state: Any) -> plug_in.PlugInState:
    for one in state if type(state) is tuple else (state,):
        if isinstance(one, plug_in.PlugInState):
            return one
    raise ValueError(f"state: must be that of plug_in(...), got {type(state).__name__}")


def _is_given(plan: Plan) -> bool:
    return plan.schedule.family == "custom" or bool(plan.step_size.sequence)


class _Source(NamedTuple):
    """Ĝ = QΛQᵀ, QᵀŜQ and the start's distance Qᵀ(x_0 − ȳ), in float64."""

    eigenvalues: FloatArray
    vectors: FloatArray
    S: FloatArray
    move: FloatArray

    @classmethod
    def of(cls, state: plug_in.PlugInState) -> _Source:
        wide = state._replace(
            **{name: np.asarray(getattr(state, name), np.float64) for name in ("G", "S")}
        )
        if wide.G.ndim != 2:
            raise ValueError(f"state: must be of one replication, got Ĝ of shape {wide.G.shape}")
        with jax.enable_x64(True):
            spec = plug_in.spectrum(wide)
        if bool(spec.floored):
            raise ValueError("state: must have a regular Ĝ, got one that is singular")
        move = np.asarray(state.start, np.float64) - np.asarray(state.mean, np.float64)
        values, vectors, S = map(np.asarray, (spec.eigenvalues, spec.vectors, spec.S))
        finite = all(np.isfinite(part).all() for part in (values, vectors, S, move))
        if int(state.m) < 1 or not finite:
            raise ValueError("state: must be finite, got a run that diverged or has no rounds yet")
        return cls(values, vectors, S, vectors.T @ move)


def _figures(source: _Source, plan: Plan) -> Figures:
    with jax.enable_x64(True):
        factors = _factors(source.eigenvalues, Horizon.of(plan, np.float64))
    Q, values = source.vectors, source.eigenvalues
    finite = np.sum((Q @ (np.asarray(factors.pair) * source.S)) * Q, axis=1)
    limit = np.sum((Q @ (source.S / np.outer(values, values))) * Q, axis=1)
    limit *= np.sum(1 / plan.E) / plan.num_rounds**2
    bias = Q @ (np.asarray(factors.start) * source.move)
    if not (np.all(finite > 0) and np.all(limit > 0) and np.isfinite(bias).all()):
        raise ValueError(
            "state: must give every coordinate a positive, finite variance under the plan, got "
            "another; Ŝ may be singular, or the first steps too long (η_1 λ > 2)"
        )
    return Figures(np.sqrt(finite / limit), bias / np.sqrt(finite))


_factors = jax.jit(finite_horizon.horizon_factors)


def _search(source: _Source, plan: Plan, tolerance: float, seen: dict[int, Figures]) -> int | None:
    """Doubles the horizon until both are small, then bisects; keeps all figures in `seen`."""

    def good(num_steps: int) -> bool | None:
        """None beyond the longest horizon that is tried."""
        if num_steps not in seen:
            longer = plan.schedule.plan(plan.step_size, num_steps=num_steps)
            if longer.num_rounds > max(_LONGEST, plan.num_rounds):
                return None
            seen[num_steps] = _figures(source, longer)
        return seen[num_steps].worst <= tolerance

    low = high = plan.num_steps
    while not (found := good(high)):
        if found is None:
            return None
        low, high = high, 2 * high
    while high > _CLOSE * low and high - low > 1:
        middle = round((low * high) ** 0.5)
        low, high = (low, middle) if good(middle) else (middle, high)
    return high
