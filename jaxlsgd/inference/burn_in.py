"""Leaving out the first rounds: a method whose statistics begin at a later one.

How many is said when the method is made, in rounds. A share of a plan would have to be known to a stream that
does not know how long it will be, and a number chosen by the transient would be chosen by the data that the
interval is then made of; `one_step` chooses its first bin by itself and allows for it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxlsgd.core.estimator import Accumulator, Estimator, JointLaw, Law, Sync
from jaxlsgd.core.problem import Array, Params

if TYPE_CHECKING:
    from jaxlsgd.schedules import Plan


class LateState(NamedTuple):
    """A statistic that has not begun before its round."""

    seen: Array  # () int32, rounds so far
    inner: Any


def begun_after(method: Estimator, rounds: int, name: str | None) -> Estimator:
    """The method without the first rounds; the name says so if None is given."""
    if not rounds:
        return method
    stem, _, given = method.name.removesuffix("]").partition("[")
    told = ", ".join(part for part in (given, f"burn-in {rounds}") if part)
    return dataclasses.replace(
        method,
        name=name or f"{stem}[{told}]",
        label=f"{method.label}, without {rounds} rounds",
        accumulators=tuple(_late(part, rounds) for part in method.accumulators),
        measure=_of_inner(method.measure),
        matrix=None if method.matrix is None else _of_inner(method.matrix),
        law=_late_law(method.law, rounds),
    )


@functools.cache
def _late(part: Accumulator, rounds: int) -> Accumulator:
    def init(params: Params) -> LateState:
        return LateState(jnp.zeros((), jnp.int32), part.init(params))

    def update(state: LateState, sync: Sync) -> LateState:
        begun = state.seen >= rounds
        new = part.update(state.inner, sync)
        inner = jax.tree.map(lambda one, two: jnp.where(begun, one, two), new, state.inner)
        return LateState(state.seen + 1, inner)

    return part._replace(init=init, update=update, shared=("seen",))


@functools.cache
def _of_inner(function: Any) -> Any:
    def inner(states: tuple[LateState, ...], horizon: Any) -> Any:
        return function(tuple(state.inner for state in states), horizon)

    return inner


@functools.cache
def _late_law(law: Law, rounds: int) -> Law:
    def multiplier(level: float, plan: Plan | None, detail: Any) -> Any:
        return law.multiplier(level, _later(plan, rounds), detail)

    def tail(statistic: Any, plan: Plan | None, detail: Any) -> Any:
        return law.tail(statistic, _later(plan, rounds), detail)

    def joint(plan: Plan | None, detail: Any) -> JointLaw:
        assert law.joint is not None
        return law.joint(_later(plan, rounds), detail)

    return law._replace(
        multiplier=multiplier, tail=tail, joint=None if law.joint is None else joint
    )


def _later(plan: Plan | None, rounds: int) -> Plan | None:
    """What is left of a plan; all of it where nothing is, and no scale is finite."""
    if plan is None or plan.num_rounds <= rounds:
        return plan
    warmup = max(plan.warmup_rounds - rounds, 0)
    return dataclasses.replace(plan, E=plan.E[rounds:], eta=plan.eta[rounds:], warmup_rounds=warmup)
