"""One-step intervals: Le Cam's one-step estimator from the gradients of all rounds, whatever optimiser made the path.

`one_step()` evaluates gradients at anchors: what is streamed is in `anchored_rounds`, and what is computed of it in
`anchored_step`. `one_step(gradients="increments")` is for servers that cannot have clients evaluate anything: it uses
the sums of gradients of the steps themselves, see `binned_rounds` and `newton_step`. This file has the builder and the
law, which both share: the half-width is √V_jj · t_df, Student's t with Satterthwaite's degrees of freedom for what is random
of V.

Centred at the paper's average ȳ instead, it is √V_jj · t_df/z · cv(bias), with the folded normal quantile cv for a bias of
known size, |ȳ − x̂|_j over √V_jj. An efficient x̂ is independent of ȳ − x̂ (Hausman), so
that given ȳ − x̂ the distance ȳ − x* is N(ȳ − x̂, V), and these are the shortest intervals around ȳ that hold x* 95
times in 100: whatever the horizon, the noise and the bias that the start has left in ȳ.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy.special import chndtrix, fdtrc, ndtr, ndtri, stdtrit

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.estimator import Estimator, Horizon, Law, Measurement
from jaxlsgd.core.problem import Array
from jaxlsgd.core.registry import register
from jaxlsgd.inference import anchored_step, newton_step
from jaxlsgd.inference.anchored_rounds import (
    BINS,
    AnchoredState,
    anchored_rounds,
    closed,
    first_edge,
    next_edge,
)
from jaxlsgd.inference.anchored_step import Reason
from jaxlsgd.inference.binned_rounds import OneStepState, binned_rounds, mean_place
from jaxlsgd.inference.laws import sequential
from jaxlsgd.inference.laws.standard import NORMAL, student_quantiles
from jaxlsgd.inference.sums import path_mean

if TYPE_CHECKING:
    from jaxlsgd.schedules import Plan

CENTERS = ("estimate", "average")
GRADIENTS = ("anchor", "increments")
VALID = ("fixed", "looks", "always")
_FARTHEST = 8.0  # standard deviations up to which Student's t is taken at the tail of the normal
HESSIANS = 30  # of a whole run, for increments
# With 500 parameters a run keeps 60 MB and is read in 2.3 s of one core; with 1,000, 240 MB and 19 s, in 1.2 GB.
MOST_PARAMETERS = 500
AGREE = 0.001  # level of the test that the last bin agrees with those before


class OneStepDetail(NamedTuple):
    """What a multiplier needs, and how the interval from increments was made."""

    df: Array  # (d,) degrees of freedom
    offset: Array  # (d,) (centre − x̂)/√V
    used: Array  # () share of the observations that count
    withheld: Array  # () bool
    far: Array  # () length of the Newton step from the path, in standard errors
    known: Array  # () bool: the Hessian is known well enough
    clock: Any = 0  # () observations per client


class AnchoredDetail(NamedTuple):
    """What a multiplier needs, and what there is to say of a run with anchors."""

    df: Array  # (d,) degrees of freedom
    offset: Array  # (d,) (centre − x̂)/√V
    used: Array  # () share of the observations that count
    reason: Array  # () an `anchored_step.Reason`: why there is no interval
    ahead: Array  # () largest share of a variance that is for how the Hessian still changes
    gap: Array  # () F statistic of the last bin against those before
    rounds: Array  # () in effect
    settled: Array  # () how far the optimiser's average is from x̂, at most, in standard errors
    clock: Any = 0  # () observations per client

    @property
    def withheld(self) -> Array:
        """Whether there is no interval."""
        return self.reason != Reason.NONE

    @property
    def disagrees(self) -> bool:
        """Whether the last rounds of a run disagree with those before."""
        rounds, d = float(self.rounds), np.size(self.df)
        p = fdtrc(d, max(rounds - d, 1.0), float(self.gap))
        return not bool(self.withheld) and bool(p < AGREE)


@register("method", brief="center")
def one_step(
    center: str = "estimate",
    *,
    gradients: str = "anchor",
    hessians: int = HESSIANS,
    valid: str = "fixed",
    best_at: float | None = None,
    looks: Sequence[int] | None = None,
    shape: sequential.Shape = "pocock",
    name: str | None = None,
) -> Estimator:
    """One-step intervals: x̂_j ± q √V_jj from gradients at the server's anchor, for any federated optimiser.

    Besides its model the server broadcasts an anchor, its best estimate so far, which changes whenever the number of
    observations has grown by half. A client evaluates the observations of its steps there too, sends the sum of these
    gradients after each round, d numbers, and in a few rounds two Hessians, d (d + 1) numbers. x̂ is one Newton step from
    the anchors, so the optimiser only needs to get close. Needs no plan, and keeps about 48 d² numbers: it is for at most
    500 parameters.

    No interval is reported (its width is infinite) if the Hessian still changes too much between the anchors, which
    means that they have not converged, or if there are too few rounds or Hessians. In 134 cells of 2,000 runs, with
    heterogeneous clients and other optimisers among them, it covers 94.2 to 95.7 % (`benchmarks/results/stress.md`).
    Intervals are about the population that fresh observations come from: clients that go over the same rows again need
    more (`benchmarks/results/limits.md`). They are about the minimum that was reached, if there are several.

    Args:
      center: "estimate", x̂; or "average", the paper's ȳ = Σ x̄_m/T, for those who must report it. The
        intervals then hold x* at least as often and are longer, the more so the further ȳ is from x̂. They
        are for coordinates, not for joint tests.
      gradients: "anchor"; or "increments", for servers whose clients evaluate nothing but their steps: from the sums of
        gradients of the steps themselves, which the server has. It is for Local SGD with decreasing steps and clients
        that are not too unlike, is known to fail elsewhere (`benchmarks/results/limits.md`), and is withheld if the
        path has not arrived.
      hessians: for increments, how many Hessians clients send in the whole run, spread evenly over the observations;
        0 for the path alone, which asks nothing of clients: how gradients change along it tells the Hessian, if the
        run is long enough. In a loop of one's own all that are given count. In the paper's models (d = 5, t_T = 2,000
        and 5,000) see `benchmarks/results/path_only.md`. The engine computes one per round and reads these.
      valid: "fixed", an interval for one time that does not depend on the data; "always", for looking at any
        time and stopping whenever one likes: all intervals of a run hold together, at 1.5 to 2 times the length
        (Robbins' mixture); or "looks", the same for looks that are known beforehand, at 1.1 to 1.5 times.
      best_at: for "always", the observations per client at which intervals are to be shortest.
      looks: for "looks", observations per client at every look, ascending; if None, those of the saved rounds.
      shape: for "looks", "pocock", one constant; or "obrien_fleming", wide at first and hardly longer at the last.
      name: name in tables; made from the arguments if None.

    Returns:
      An `Estimator`. Its `update` needs `sync.anchored`, evaluated at `estimator.anchors(state)`; with increments,
      h_m in `sync.gradient_sum`, for which (x̄_{m−1} − x̄_m)/η_m stands in plain Local SGD, and `sync.hessian` in a few
      rounds, or never.

    Example::

        tracker = track(one_step(), params)
        state = tracker.init(params)
        for m in range(1000):
            anchor, before = tracker.anchors(state)
            ...  # a round of local steps, in which clients evaluate `anchor` too
            state = tracker.update(state, params, E=5, eta=0.1, anchored=Anchored(gradient_sum))
        tracker.interval(state, level=0.95)
    """
    checks.choice("center", center, CENTERS)
    checks.count("hessians", hessians, 0)
    efficient = center == "estimate"
    when = _when(valid, best_at, looks, shape, efficient)
    if checks.choice("gradients", gradients, GRADIENTS) == "anchor":
        if hessians != HESSIANS:
            rule = (
                'be left out, as anchors have few Hessians anyway; it is for gradients="increments"'
            )
            raise refusal("hessians", rule, hessians, code="unwanted")
        return _anchored(efficient, when, name)
    given = ["increments"] if efficient else ["increments", center]
    given += when.words
    if hessians != HESSIANS:
        given.append(f"{hessians} Hessians" if hessians else "path only")
    part = binned_rounds(hessians)
    return Estimator(
        name=name or f"one_step[{', '.join(given)}]",
        accumulators=(part,) if efficient else (part, path_mean()),
        measure=_measure if efficient else _measure_average,
        law=when.law if efficient else LAW._replace(joint=None),
        matrix=_matrix if efficient else None,
        standard_error=efficient,
        label=("one-step from increments" if hessians else "one-step from the path")
        + ("" if efficient else " around the average")
        + when.label,
        valid=when.valid,
        law_at=when.law_at,
        notes=_notes if when.valid == "fixed" else _looks_notes(_notes),
        reads_numpy=True,
        cost=f"{f'{hessians} Hessians' if hessians else 'nothing'} per client and run to the server; memory about 75d²",
    )


def _anchored(efficient: bool, when: _When, name: str | None) -> Estimator:
    part = anchored_rounds()
    given = [*([] if efficient else ["average"]), *when.words]
    return Estimator(
        name=name or "one_step" + (f"[{', '.join(given)}]" if given else ""),
        accumulators=(part,) if efficient else (part, path_mean()),
        measure=_measure_anchored if efficient else _measure_anchored_average,
        law=when.law if efficient else LAW._replace(joint=None),
        matrix=_matrix_anchored if efficient else None,
        standard_error=efficient,
        label=("one-step" if efficient else "one-step around the average") + when.label,
        valid=when.valid,
        law_at=when.law_at,
        notes=_anchored_notes if when.valid == "fixed" else _looks_notes(_anchored_notes),
        any_optimiser=True,
        reads_numpy=True,
        most_parameters=MOST_PARAMETERS,
        cost="a gradient sum per client and round, and two Hessians in a few rounds, to the server; "
        f"memory about {4 * BINS}d²",
    )


def _measure_anchored(states: tuple[AnchoredState, ...], horizon: Horizon | None) -> Measurement:
    del horizon
    state, xp = states[0], states[0].x.__array_namespace__()
    found = _read_anchored(state)
    scale = xp.sqrt(xp.maximum(xp.diagonal(found.V), 0))
    off = xp.max(xp.abs(state.x - found.estimate) / xp.maximum(scale, anchored_step.TINY))
    detail = AnchoredDetail(
        _given_df(found.df),
        xp.zeros_like(scale),
        found.used,
        _reason(state, found.reason),
        found.ahead,
        found.gap,
        found.rounds,
        off,
        state.clock.t,
    )
    lost = detail.withheld & ~xp.all(xp.isfinite(found.estimate))
    estimate = xp.where(lost, state.x, found.estimate)
    return Measurement(estimate, xp.where(detail.withheld, xp.inf, scale), False, detail, state.x)


def _reason(state: AnchoredState, reason: Array) -> Array:
    """Return why there is no interval, by what the bins do not show."""
    xp = state.x.__array_namespace__()
    # Bins without Hessians are not kept.
    reason = xp.where((reason == Reason.SHORT) & (state.clock.bin > 2), Reason.NO_HESSIANS, reason)
    diverged = (reason != Reason.NONE) & ~xp.all(xp.isfinite(state.x))
    return xp.where(diverged, Reason.DIVERGED, reason)


def _given_df(df: Array) -> Array:
    """Return degrees of freedom that are numbers, so that what is withheld is infinite and not NaN."""
    xp = df.__array_namespace__()
    return xp.where(xp.isnan(df), 3, df)


def _measure_anchored_average(states: tuple[Any, ...], horizon: Horizon | None) -> Measurement:
    found, path = _measure_anchored(states[:1], horizon), states[1]
    xp = path.mean.__array_namespace__()
    y = path.mean + path.lost
    offset = (y - found.estimate) / xp.where(xp.isfinite(found.scale), found.scale, 1)
    return found._replace(estimate=y, detail=found.detail._replace(offset=offset), path=None)


def _matrix_anchored(states: tuple[AnchoredState, ...], horizon: Horizon | None) -> Array:
    del horizon
    found = _read_anchored(states[0])
    return states[0].x.__array_namespace__().where(found.reason != Reason.NONE, np.nan, found.V)


def _read_anchored(state: AnchoredState) -> anchored_step.Reading:
    with np.errstate(all="ignore"):  # what is not finite is withheld
        return anchored_step.read(*closed(state))


_REASONS = {
    Reason.NONE: "",
    Reason.SHORT: "there are too few rounds; an interval needs more than {first} observations per client, and eight "
    "rounds or more",
    Reason.NO_HESSIANS: "clients sent no Hessians at the last anchors; have them sent in a few rounds of each anchor",
    Reason.SINGULAR: "the mean Hessian is singular, or nearly; run longer, leave out columns that are nearly sums of "
    "others, or subtract the mean from a column that is far from 0",
    Reason.CHANGING: "the anchors have not converged, since the Hessian still changes between them; run longer, start "
    "nearer, or take larger steps",
    Reason.NOISY: "a few observations dominate the mean Hessian, so that it is not known well enough; run longer, or "
    "transform columns with heavy tails",
    Reason.NOT_FINITE: "gradients at the anchors are not finite, or one has no variance; start nearer, or look for "
    "rows that are not finite",
    Reason.DIVERGED: "the optimiser's model is not finite; take smaller steps, or look for rows that are not finite",
}


def _anchored_notes(detail: AnchoredDetail) -> tuple[str, ...]:
    """Return what a person should know of a run."""
    if why := _REASONS[Reason(int(detail.reason))]:
        first = next_edge(first_edge(np.size(detail.df)))
        return (f"no interval is reported: {why.format(first=first)}",)
    notes = []
    if detail.disagrees:
        notes.append(
            f"the last rounds disagree with those before (p < {AGREE:g}): the data may have changed, or a "
            "client's gradients are not those of its loss"
        )
    if (left_out := 1 - float(detail.used)) > 0.2:
        notes.append(
            f"{100 * left_out:.0f} % of the observations count for nothing, as too far away"
        )
    if float(detail.ahead) > 0.5:
        notes.append(
            "most of the width is for how much the Hessian still changes: run longer, or start nearer"
        )
    if (least := float(np.min(detail.df))) < 10:
        notes.append(f"only {least:.0f} degrees of freedom: too few rounds to be sure")
    return tuple(notes)


def _notes(detail: OneStepDetail) -> tuple[str, ...]:
    """Return remarks on a run for its user."""
    far = float(detail.far)
    if bool(detail.withheld):
        if newton_step.FAR <= far < np.inf:
            return (
                f"withheld: the path has not arrived, since it is {far:.0f} standard errors from its own estimate; "
                "run longer, start nearer, or take larger steps",
            )
        if not bool(detail.known):
            return (
                "withheld: the path is too short to tell the Hessian; run longer, or have clients send Hessians "
                "(hessians=30)",
            )
        return ("withheld: too few rounds for a covariance",)
    notes = []
    if (left_out := 1 - float(detail.used)) > 0.01:
        notes.append(
            f"the first {100 * left_out:.0f} % of the observations were left out, as too far away"
        )
    if (least := float(np.min(detail.df))) < 10:
        notes.append(f"only {least:.0f} degrees of freedom: too short a run to be sure")
    return tuple(notes)


@functools.cache
def _looks_notes(notes: Callable[[Any], tuple[str, ...]]) -> Callable[[Any], tuple[str, ...]]:
    """Return the notes of a method for several looks, which also says why it has no interval at first."""

    def told(detail: Any) -> tuple[str, ...]:
        first = first_look(np.shape(detail.df)[-1])
        if bool(detail.withheld) or np.all(_begun(detail)):
            return notes(detail)
        return (
            f"no interval yet: for several looks there is none before {first} observations per client, or later if "
            f"many do not count; after {float(detail.clock):.0f}, {100 * float(detail.used):.0f} % count",
        )

    return told


def _measure(states: tuple[OneStepState, ...], horizon: Horizon | None) -> Measurement:
    del horizon
    state, xp = states[0], states[0].x.__array_namespace__()
    found = newton_step.read(state)
    scale = xp.sqrt(xp.maximum(xp.diagonal(found.V), 0))
    zeros = xp.zeros_like(scale)
    detail = OneStepDetail(
        _given_df(found.df),
        zeros,
        found.used,
        found.withheld,
        found.far,
        found.known,
        state.clock.t,
    )
    lost = found.withheld & ~xp.all(xp.isfinite(found.estimate))
    estimate = xp.where(lost, state.x, found.estimate)
    scale = xp.where(found.withheld, xp.inf, scale)
    return Measurement(estimate, scale, False, detail, mean_place(state))


def _measure_average(states: tuple[Any, ...], horizon: Horizon | None) -> Measurement:
    found, path = _measure(states[:1], horizon), states[1]
    xp = path.mean.__array_namespace__()
    y = path.mean + path.lost
    offset = (y - found.estimate) / xp.where(xp.isfinite(found.scale), found.scale, 1)
    return found._replace(estimate=y, detail=found.detail._replace(offset=offset))


def _matrix(states: tuple[OneStepState, ...], horizon: Horizon | None) -> Array:
    del horizon
    found = newton_step.read(states[0])
    return states[0].x.__array_namespace__().where(found.withheld, np.nan, found.V)


def multiplier(level: Any, plan: Plan | None, detail: Any) -> Any:
    """The factor of √V at a level, or at one per coordinate; t_df/z is for what is random of it."""
    del plan
    tail = (1 - np.asarray(level)) / 2
    df = np.maximum(np.asarray(detail.df, np.float64), 1.0)
    quantile = student_quantiles(df, tail)
    bias = offset = np.abs(np.asarray(detail.offset, np.float64))
    if not offset.any():
        return -quantile
    ratio = quantile / ndtri(tail)
    near = np.sqrt(chndtrix(1 - 2 * tail, 1, np.clip(bias, 1e-6, 8.0) ** 2))
    found = np.where(bias < 8, near, bias - ndtri(2 * tail))
    return np.maximum(offset + ratio * (found - offset), 0)


def one_sided(level: float, plan: Plan | None, detail: Any) -> Any:
    """t_df, and the offset: both can be on one side."""
    del plan
    df = np.maximum(np.asarray(detail.df, np.float64), 1.0)
    return np.abs(np.asarray(detail.offset, np.float64)) + stdtrit(df, level)


def tail(statistic: Any, plan: Plan | None, detail: Any) -> np.ndarray:
    """Two-sided p-value: 1 − the level whose interval just reaches the null, by bisection."""
    size = np.abs(np.asarray(statistic, np.float64))
    low, high = np.full(size.shape, np.log(1e-15)), np.full(size.shape, -1e-12)  # ln p
    for _ in range(60):
        middle = (low + high) / 2
        reaches = multiplier(-np.expm1(middle), plan, detail) >= size
        low, high = np.where(reaches, middle, low), np.where(reaches, high, middle)
    return np.where(np.isnan(size), np.nan, np.exp(high))


LAW = Law(multiplier, tail, NORMAL.joint, one_sided=one_sided, least_p=1e-15)


class _When(NamedTuple):
    """At which times the intervals of a run hold together."""

    valid: str
    law: Law
    law_at: Any = None
    words: tuple[str, ...] = ()  # of the method's name
    label: str = ""


def _when(
    valid: str,
    best_at: float | None,
    looks: Sequence[int] | None,
    shape: sequential.Shape,
    efficient: bool,
) -> _When:
    checks.choice("valid", valid, VALID)
    checks.choice("shape", shape, sequential.Shape)
    if valid != "always" and best_at is not None:
        raise refusal("best_at", 'be left out unless valid="always"', best_at, code="unwanted")
    if valid != "looks" and looks is not None:
        raise refusal("looks", 'be left out unless valid="looks"', looks, code="unwanted")
    if valid != "looks" and shape != "pocock":
        raise refusal("shape", 'be left out unless valid="looks"', shape, code="unwanted")
    if valid == "fixed":
        return _When(valid, LAW)
    if not efficient:
        rule = "be fixed around the average, whose error is no sum over time as that of x̂ is"
        raise refusal("valid", rule, valid, code="unsupported")
    if valid == "always":
        if best_at is None:
            rule = "be given for valid='always': the observations per client at which intervals are shortest"
            raise refusal("best_at", rule, best_at, code="missing")
        best = checks.positive("best_at", best_at)
        return _When(
            valid, always_law(best), None, (f"always, best at {best:g}",), ", always valid"
        )
    late = shape == "obrien_fleming"
    words, label = ("looks", *(["late"] if late else [])), ", known looks" + ", late" * late
    if looks is None:
        return _When(valid, _no_looks(), _law_at(shape), words, label)
    return _When(valid, looks_law(shape, sequential.check_clocks(looks)), None, words, label)


@functools.cache
def always_law(best_at: float) -> Law:
    """Return the law for looking at any time, shortest at `best_at` observations per client for 95 %.

    The variance is estimated with df degrees of freedom. As Pocock did for the t-test, a normal boundary q is moved to
    Student's t of the same tail, and a statistic to the normal one of the same tail, so that tests and intervals agree.
    """
    rho = sequential.best_ratio(0.95) / best_at

    def u(detail: Any) -> np.ndarray:
        return rho * _clock(detail)

    def both(level: Any, plan: Plan | None, detail: Any) -> Any:
        del plan
        return _studentised(sequential.robbins(level, u(detail)), detail)

    def one(level: float, plan: Plan | None, detail: Any) -> Any:
        del plan
        return _studentised(sequential.robbins_one_sided(level, u(detail)), detail)

    def p_value(statistic: Any, plan: Plan | None, detail: Any) -> np.ndarray:
        del plan
        p = sequential.robbins_p(_normalised(statistic, detail), u(detail))
        return np.where(_begun(detail), p, 1.0)

    return Law(both, p_value, one_sided=one, least_p=1e-300)


@functools.cache
def looks_law(shape: sequential.Shape, clocks: tuple[float, ...]) -> Law:
    """Return the law for looks at known numbers of observations per client; those before `first_look` do not count."""

    def counted(detail: Any) -> tuple[float, ...]:
        first = first_look(np.shape(detail.df)[-1])
        return tuple(t for t in clocks if t >= first) or clocks[-1:]

    def factor(detail: Any) -> np.ndarray:
        return sequential.shape_of(np.minimum(_clock(detail), clocks[-1]), clocks, shape)

    def both(level: Any, plan: Plan | None, detail: Any) -> Any:
        del plan
        own = counted(detail)
        values = np.vectorize(lambda one: sequential.looks_value(one, own, shape))(level)
        return _studentised(values * factor(detail), detail)

    def one(level: float, plan: Plan | None, detail: Any) -> Any:
        del plan
        value = sequential.looks_value(level, counted(detail), shape, 1)
        return _studentised(value * factor(detail), detail)

    def p_value(statistic: Any, plan: Plan | None, detail: Any) -> np.ndarray:
        del plan
        own, c = counted(detail), np.abs(_normalised(statistic, detail)) / factor(detail)
        reached = np.vectorize(
            lambda z: sequential.looks_p(z, own, own[-1], shape),  # s_K is 1
            otypes=[float],
        )
        return np.where(_begun(detail), reached(c), 1.0)

    return Law(both, p_value, one_sided=one, least_p=1e-12)


def first_look(dim: int) -> int:
    """Return from how many observations per client on laws for several looks were measured to hold.

    They are laws of a limit. Before, an interval is infinite, and no look counts. Those before the first anchor never
    count; where anchors arrive late, others do not either, and the first look waits until as many do, see `_begun`.
    """
    return 4 * first_edge(dim)


def _clock(detail: Any) -> np.ndarray:
    return np.maximum(np.asarray(detail.clock, np.float64), 1.0)[..., None]


def _begun(detail: Any) -> np.ndarray:
    # The error moves like a Brownian motion in the observations that count, and has hardly begun where most do not.
    d, used = np.shape(detail.df)[-1], np.asarray(detail.used, np.float64)[..., None]
    return used * (_clock(detail) - first_edge(d)) >= first_look(d) - first_edge(d)


@functools.cache
def _law_at(shape: sequential.Shape) -> functools.partial[Law]:
    return functools.partial(looks_law, shape)


@functools.cache
def _no_looks() -> Law:
    """Return the law of a method that has not been given its looks."""

    def refuse(*given: Any) -> Any:
        del given
        rule = 'be given in a loop of your own, as one_step(valid="looks", looks=...) in observations per client'
        raise refusal("looks", rule, None, code="missing")

    return Law(refuse, refuse, one_sided=refuse)


def _studentised(q: Any, detail: Any) -> np.ndarray:
    """Return Student's t of the same tail as a normal q."""
    df = np.maximum(np.asarray(detail.df, np.float64), 1.0)
    q = np.asarray(q, np.float64)
    near = np.clip(q, 1e-3, _FARTHEST)
    ratio = -student_quantiles(df, ndtr(-near)) / near
    return np.where(_begun(detail), ratio * q, np.inf)


def _normalised(statistic: Any, detail: Any) -> np.ndarray:
    """Return the normal statistic whose interval is `_studentised`: the inverse of it, by bisection."""
    size = np.abs(np.asarray(statistic, np.float64))
    size = np.broadcast_to(size, np.broadcast_shapes(size.shape, np.shape(detail.df)))
    low, high = np.zeros(size.shape), np.where(np.isfinite(size), size, 1e300)
    for _ in range(200):
        middle = (low + high) / 2
        below = _studentised(middle, detail) <= size
        low, high = np.where(below, middle, low), np.where(below, high, middle)
        if np.all(high - low <= 1e-12 * high):
            break
    return np.where(np.isnan(size), np.nan, low)
