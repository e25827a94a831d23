"""One-step intervals: Le Cam's one-step estimator from the gradients of all rounds, whatever optimiser made the path.

`one_step()` evaluates gradients at anchors: what is streamed is in `anchored_rounds`, and what is computed of it in
`anchored_step`. `one_step(gradients="increments")` is for servers that cannot have clients evaluate anything: it uses
the sums of gradients of the steps themselves, see `binned_rounds` and `newton_step`. This file has the builder and the
law, which both share: the half-width is √V_jj · t_df/z · cv(bias), Student's t with Satterthwaite's degrees of freedom
for what is random of V, and the folded normal quantile cv for a bias of known size, over √V_jj: 0.15 |κ_j| for
increments, 0 for anchors.

Centred at the paper's average ȳ instead, the bias is |ȳ − x̂|_j. An efficient x̂ is independent of ȳ − x̂ (Hausman), so
that given ȳ − x̂ the distance ȳ − x* is N(ȳ − x̂, V), and these are the shortest intervals around ȳ that hold x* 95
times in 100: whatever the horizon, the noise and the bias that the start has left in ȳ.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
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
)
from jaxlsgd.inference.binned_rounds import OneStepState, binned_rounds, mean_place
from jaxlsgd.inference.laws import sequential
from jaxlsgd.inference.laws.standard import NORMAL
from jaxlsgd.inference.sums import path_mean

if TYPE_CHECKING:
    from jaxlsgd.schedules import Plan

CENTERS = ("estimate", "average")
GRADIENTS = ("anchor", "increments")
VALID = ("fixed", "looks", "always")
_FARTHEST = 8.0  # standard deviations up to which Student's t is taken at the tail of the normal
# With 500 parameters a run keeps 60 MB and is read in 2.3 s of one core; with 1,000, 240 MB and 19 s, in 1.2 GB.
MOST_PARAMETERS = 500
AGREE = 0.001  # level of the test that the last bin agrees with those before
LEFT = 0.15  # share of the correction κ that may still be wrong
_Z = float(-ndtri(0.025))
# cv(b) at 95 %: P(|N(b, 1)| ≤ cv) = 0.95; beyond the table it is b + 1.645.
_BIAS = np.linspace(0, 6, 61)
_FOLDED = np.sqrt(chndtrix(0.95, 1, np.maximum(_BIAS, 1e-6) ** 2))


class OneStepDetail(NamedTuple):
    """What a multiplier needs, and how the interval was made."""

    df: Array  # (d,) degrees of freedom
    curvature: Array  # (d,) κ/√V
    first: Array  # () rounds that were left out at the beginning, as a share of the observations
    offset: Array  # (d,) (centre − x̂)/√V
    clock: Any = 0  # () observations per client


class AnchoredDetail(NamedTuple):
    """What a multiplier needs, and what there is to say of a run with anchors."""

    df: Array  # (d,) degrees of freedom
    curvature: Array  # (d,) 0: none is allowed for
    offset: Array  # (d,) (centre − x̂)/√V
    used: Array  # () share of the observations that count
    withheld: Array  # () bool
    left: Array  # () what curvature may still do at the last anchor, in standard errors
    weight: Array  # () of the bin before the last: small if the Hessian still changes
    gap: Array  # () F statistic of the last bin against those before
    rounds: Array  # () in effect
    settled: Array  # () how far the optimiser's average is from x̂, at most, in standard errors
    clock: Any = 0  # () observations per client


@register("method", brief="center")
def one_step(
    *,
    center: str = "estimate",
    gradients: str = "anchor",
    hessian_every: int = 1,
    valid: str = "fixed",
    best_at: float | None = None,
    looks: Sequence[int] | None = None,
    shape: str = "pocock",
    name: str | None = None,
) -> Estimator:
    """One-step intervals: x̂_j ± q √V_jj from gradients at the server's anchor, for any federated optimiser.

    Besides its model the server broadcasts an anchor, its best estimate so far, which changes whenever the number of
    observations has grown by half. A client evaluates the observations of its steps there too, sends the sum of these
    gradients after each round, d numbers, and in a few rounds two Hessians, d (d + 1) numbers. x̂ is one Newton step from
    the anchors, so the optimiser only has to come near. Needs no plan, and keeps about 48 d² numbers: it is for at most
    500 parameters.

    An interval is withheld (infinite) if the Hessian still changes between the anchors, which means that they have not
    arrived, or if there are too few rounds or Hessians. In 15 cells of 400 runs with unlike clients, other optimisers and
    a path that has not arrived (`benchmarks/results/limits.md`) it covers 94.4 to 95.2 %. Intervals are about the
    population that fresh observations come from: clients that go over the same rows again need more (same file).

    Args:
      center: "estimate", x̂; or "average", the paper's ȳ = Σ x̄_m/T, for those who must report it. The
        intervals then hold x* as often and are longer, the more so the further ȳ is from x̂. They
        are for coordinates, not for joint tests.
      gradients: "anchor"; or "increments", for servers whose clients send their models and a Hessian at every
        synchronisation and nothing else: from the sums of gradients of the steps themselves. It is for Local SGD with
        decreasing steps and clients that are not too unlike, and is known to fail elsewhere
        (`benchmarks/results/limits.md`).
      hessian_every: for increments, s to take the Hessian at every s-th synchronisation only, m = s, 2s, …; the
        others may then be None. The engine computes them all the same: it saves in a loop of one's own.
        In the paper's models at t_T = 2,000 (d = 5, C5 and P(1/2) with a warm-up, 1,000 runs) every third makes
        intervals 0.5 to 1.3 % longer, every tenth 2 to 6 %, every thirtieth 7 to 34 %; they cover 94.8 to 96.8 %.
      valid: "fixed", an interval for one time that does not depend on the data; "always", for looking at any
        time and stopping whenever one likes: all intervals of a run hold together, at 1.5 to 2 times the length
        (Robbins' mixture); or "looks", the same for looks that are known beforehand, at 1.1 to 1.5 times.
      best_at: for "always", the observations per client at which intervals are to be shortest.
      looks: for "looks", observations per client at every look, ascending; if None, those of the saved rounds.
      shape: for "looks", "pocock", one constant; or "obrien_fleming", wide at first and hardly longer at the last.
      name: name in tables; made from the arguments if None.

    Returns:
      An `Estimator`. Its `update` needs `sync.anchored`, evaluated at `estimator.anchors(state)`; with increments,
      `sync.hessian` and h_m in `sync.gradient_sum`, for which (x̄_{m−1} − x̄_m)/η_m stands in plain Local SGD.

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
    checks.count("hessian_every", hessian_every)
    efficient = center == "estimate"
    when = _when(valid, best_at, looks, shape, efficient)
    if checks.choice("gradients", gradients, GRADIENTS) == "anchor":
        if hessian_every != 1:
            rule = 'be 1, as anchors have few Hessians anyway; it is for gradients="increments"'
            raise refusal("hessian_every", rule, hessian_every)
        return _anchored(efficient, when, name)
    given = ["increments"] if efficient else ["increments", center]
    given += when.words
    given += [f"every {hessian_every}"] if hessian_every > 1 else []
    often = "and round" if hessian_every == 1 else f"in every {hessian_every} rounds"
    part = binned_rounds(hessian_every)
    return Estimator(
        name=name or f"one_step[{', '.join(given)}]",
        accumulators=(part,) if efficient else (part, path_mean()),
        measure=_measure if efficient else _measure_average,
        law=when.law if efficient else LAW._replace(joint=None),
        matrix=_matrix if efficient else None,
        standard_error=efficient,
        label="one-step from increments"
        + ("" if efficient else " around the average")
        + when.label,
        valid=when.valid,
        law_at=when.law_at,
        notes=_notes,
        reads_numpy=True,
        cost=f"a Hessian per client {often} to the server; memory about 56d²",
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
        judges=efficient and when.valid == "fixed",
        label=("one-step" if efficient else "one-step around the average") + when.label,
        valid=when.valid,
        law_at=when.law_at,
        notes=_anchored_notes,
        doubts=_doubts,
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
    zeros = xp.zeros_like(scale)
    detail = AnchoredDetail(
        found.df,
        zeros,
        zeros,
        found.used,
        found.withheld,
        found.left,
        found.weight,
        found.gap,
        found.rounds,
        off,
        state.clock.t,
    )
    lost = found.withheld & ~xp.all(xp.isfinite(found.estimate))
    estimate = xp.where(lost, state.x, found.estimate)
    return Measurement(estimate, xp.where(found.withheld, xp.inf, scale), False, detail, state.x)


def _measure_anchored_average(states: tuple[Any, ...], horizon: Horizon | None) -> Measurement:
    found, path = _measure_anchored(states[:1], horizon), states[1]
    xp = path.mean.__array_namespace__()
    y = path.mean + path.lost
    offset = (y - found.estimate) / xp.where(xp.isfinite(found.scale), found.scale, 1)
    return found._replace(estimate=y, detail=found.detail._replace(offset=offset), path=None)


def _matrix_anchored(states: tuple[AnchoredState, ...], horizon: Horizon | None) -> Array:
    del horizon
    found = _read_anchored(states[0])
    return states[0].x.__array_namespace__().where(found.withheld, np.nan, found.V)


def _read_anchored(state: AnchoredState) -> anchored_step.Reading:
    with np.errstate(all="ignore"):  # what is not finite is withheld
        return anchored_step.read(*closed(state))


def _doubts(detail: AnchoredDetail) -> str:
    """Return in words what speaks against an interval that is given: its bins disagree; "" if nothing does."""
    rounds, d = float(detail.rounds), np.size(detail.df)
    if not bool(detail.withheld) and fdtrc(d, max(rounds - d, 1.0), float(detail.gap)) < AGREE:
        return (
            f"the last rounds disagree with those before (p < {AGREE:g}): the data may have changed, or a "
            "client's gradients are not those of its loss"
        )
    return ""


def _anchored_notes(detail: AnchoredDetail) -> tuple[str, ...]:
    """Return what a person should know of a run."""
    if bool(detail.withheld):
        lone = float(detail.weight) == 1  # there is no bin before the last
        changes = (
            float(detail.left) >= anchored_step.LEFT or float(detail.weight) < anchored_step.ARRIVED
        )
        if changes and not lone:
            return (
                "withheld: the anchors have not arrived, since the Hessian still changes between them; "
                "run longer, start nearer, or take larger steps",
            )
        return ("withheld: too few rounds or Hessians for a covariance",)
    notes = [doubts] if (doubts := _doubts(detail)) else []
    if (left_out := 1 - float(detail.used)) > 0.2:
        notes.append(
            f"{100 * left_out:.0f} % of the observations count for nothing, as too far away"
        )
    if (least := float(np.min(detail.df))) < 10:
        notes.append(f"only {least:.0f} degrees of freedom: too few rounds to be sure")
    return tuple(notes)


def _notes(detail: OneStepDetail) -> tuple[str, ...]:
    """Return remarks on a run for its user."""
    notes = []
    if (left_out := float(detail.first)) > 0.01:
        notes.append(
            f"the first {100 * left_out:.0f} % of the observations were left out, as too far away"
        )
    if (least := float(np.min(detail.df))) < 10:
        notes.append(f"only {least:.0f} degrees of freedom: too few rounds to be sure")
    if (bent := float(np.max(np.abs(detail.curvature)))) > 2:
        notes.append(
            f"corrected for the curvature of the loss by {bent:.1f} standard errors; of a loss without "
            "curvature, a sign that the path has not arrived"
        )
    return tuple(notes)


def _measure(states: tuple[OneStepState, ...], horizon: Horizon | None) -> Measurement:
    del horizon
    xp = states[0].x.__array_namespace__()
    found = _read(states[0])
    variance = xp.diagonal(found.V)
    scale = xp.sqrt(xp.where(variance >= 0, variance, xp.nan))
    scale = xp.where(states[0].clock.m < 2, xp.inf, scale)
    centered = xp.zeros_like(scale)
    t = states[0].clock.t
    detail = OneStepDetail(found.df, found.curvature, found.left_out, centered, t)
    return Measurement(found.estimate, scale, found.floored, detail, mean_place(states[0]))


def _measure_average(states: tuple[Any, ...], horizon: Horizon | None) -> Measurement:
    found, path = _measure(states[:1], horizon), states[1]
    xp = path.mean.__array_namespace__()
    y = path.mean + path.lost
    offset = (y - found.estimate) / xp.where(found.scale > 0, found.scale, 1)
    return found._replace(estimate=y, detail=found.detail._replace(offset=offset))


def _matrix(states: tuple[OneStepState, ...], horizon: Horizon | None) -> Array:
    del horizon
    return _read(states[0]).V


def _read(state: OneStepState) -> newton_step.Reading:
    return newton_step.read(state, _score)


def _score(tail: newton_step.Tail) -> Array:
    """Mean logarithm of the 95 % half-widths."""
    xp = tail.move.__array_namespace__()
    se = xp.sqrt(xp.diagonal(tail.V))
    folded = _folded(LEFT * xp.abs(tail.curvature) / se, xp)
    return xp.mean(xp.log(se * _student(tail.df) * folded))


def _folded(bias: Array, xp: Any) -> Array:
    """cv at 95 %, by linear interpolation in a table of equal steps."""
    table, last = xp.asarray(_FOLDED, bias.dtype), len(_FOLDED) - 2
    place = xp.minimum(xp.where(xp.isnan(bias), 0, bias) / _BIAS[1], last + 1)
    left = xp.minimum(place.astype(xp.int32), last)
    share = place - left
    return xp.where(xp.isnan(bias), xp.nan, (1 - share) * table[left] + share * table[left + 1])


def _student(df: Array) -> Array:
    """t_df/z at 95 %, by Cornish and Fisher's expansion; to 1 % from 4 degrees of freedom on."""
    z = _Z
    first = (z**2 + 1) / (4 * df)
    second = (5 * z**4 + 16 * z**2 + 3) / (96 * df**2)
    return 1 + first + second + (3 * z**6 + 19 * z**4 + 17 * z**2 - 15) / (384 * df**3)


def multiplier(level: Any, plan: Plan | None, detail: Any) -> Any:
    """The factor of √V at a level, or at one per coordinate; t_df/z is for what is random of it."""
    del plan
    tail = (1 - np.asarray(level)) / 2
    df = np.maximum(np.asarray(detail.df, np.float64), 1.0)
    ratio = stdtrit(df, tail) / ndtri(tail)
    offset, left = _distances(detail)
    bias = offset + left
    near = np.sqrt(chndtrix(1 - 2 * tail, 1, np.clip(bias, 1e-6, 8.0) ** 2))
    found = np.where(bias < 8, near, bias - ndtri(2 * tail))
    return np.maximum(offset + ratio * (found - offset), 0)


def _distances(detail: Any) -> tuple[np.ndarray, np.ndarray]:
    """|centre − x̂| and what κ may have left, over √V."""
    offset, curvature = (np.asarray(each, np.float64) for each in (detail.offset, detail.curvature))
    return np.abs(offset), LEFT * np.abs(curvature)


def one_sided(level: float, plan: Plan | None, detail: Any) -> Any:
    """t_df/z · (z + 0.15 |κ|/√V), and the offset: both can be on one side."""
    del plan
    df = np.maximum(np.asarray(detail.df, np.float64), 1.0)
    z, t = ndtri(level), stdtrit(df, level)
    offset, left = _distances(detail)
    return offset + t / z * (z + left)


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
    valid: str, best_at: float | None, looks: Sequence[int] | None, shape: str, efficient: bool
) -> _When:
    checks.choice("valid", valid, VALID)
    checks.choice("shape", shape, sequential.SHAPES)
    if valid != "always" and best_at is not None:
        raise refusal("best_at", 'be left out unless valid="always"', best_at)
    if valid != "looks" and looks is not None:
        raise refusal("looks", 'be left out unless valid="looks"', looks)
    if valid != "looks" and shape != "pocock":
        raise refusal("shape", 'be left out unless valid="looks"', shape)
    if valid == "fixed":
        return _When(valid, LAW)
    if not efficient:
        rule = "be fixed around the average, whose error is no sum over time as that of x̂ is"
        raise refusal("valid", rule, valid)
    if valid == "always":
        if best_at is None:
            rule = "be given for valid='always': the observations per client at which intervals are shortest"
            raise refusal("best_at", rule, best_at)
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
def looks_law(shape: str, clocks: tuple[float, ...]) -> Law:
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

    They are laws of a limit. Before, an interval is infinite, and no look counts.
    """
    return 4 * first_edge(dim)


def _clock(detail: Any) -> np.ndarray:
    return np.maximum(np.asarray(detail.clock, np.float64), 1.0)[..., None]


def _begun(detail: Any) -> np.ndarray:
    return _clock(detail) >= first_look(np.shape(detail.df)[-1])


@functools.cache
def _law_at(shape: str) -> functools.partial[Law]:
    return functools.partial(looks_law, shape)


@functools.cache
def _no_looks() -> Law:
    """Return the law of a method that has not been given its looks."""

    def refuse(*given: Any) -> Any:
        del given
        rule = 'be given in a loop of your own, as one_step(valid="looks", looks=...) in observations per client'
        raise refusal("looks", rule, None)

    return Law(refuse, refuse, one_sided=refuse)


def _studentised(q: Any, detail: Any) -> np.ndarray:
    """Return Student's t of the same tail as a normal q, with what κ may have left."""
    df = np.maximum(np.asarray(detail.df, np.float64), 1.0)
    q = np.asarray(q, np.float64)
    near = np.clip(q, 1e-3, _FARTHEST)
    ratio = -stdtrit(df, ndtr(-near)) / near
    return np.where(_begun(detail), ratio * (q + _distances(detail)[1]), np.inf)


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
