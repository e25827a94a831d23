"""One-step intervals: from the sums of gradients of all rounds, so that their length need not depend on the schedule.

What is streamed is in `binned_rounds`, with the reason why one Newton step would do for a quadratic loss, a known
Hessian and short steps. What is computed here is more than that: three Newton steps, the last over a tail of the
run that is chosen by the length of its intervals; a Hessian that is extrapolated to x* by a ridge regression; an
allowance of 0.15 |κ| for what curvature may have left; Satterthwaite's degrees of freedom. The constants (0.15, three
steps, shares ½, ¾ and 0.97 of the observations, bins by factors of two, the ridge) were chosen by looking at
coverage and length in simulations, and follow from no theorem.

With
p_b, G_b the means of place and Hessian over the rounds of bin b, and the Hessian as a linear function of its
place, H(x) = Ḡ + 𝒯[x − p̄] (means over the last bins with ¾ of the observations, 𝒯 by regression),

    ∇F(p_b) = ½ (H(p_b) + H(x)) (p_b − x)

is the gradient if x were x*. A path that is still far away, or has come from afar, is so taken at its own
curvature, and x* at its own and not at that of the path. Local steps pull by less than the gradient where they
begin, because a client has moved already: with H(x) = QΛQᵀ and

    λ̃_b = Σ_{m∈b} [1 − (1 − η_mλ)^{E_m}]/η_m ÷ Σ_b E_m,     R_b = Q diag(λ̃_b/λ) Qᵀ,     D = Σ_b λ̃_b Σ_b E

x̂ is where the sums of gradients are explained,

    Σ_b Σ_{m∈b} h_m = Σ_b R_b [ΣE ∇F(p_b) + ½ Σ_{m∈b} E_m (H_m − G_b)(x̄_{m−1} − p_b)],

found by Newton's method in three steps, the last of them over the bins b ≥ b₀. Its covariance is

    r_m = h_m − E_m [R_b ∇F(p_b) + K_b (x̄_{m−1} − p_b)],   K_b = Q diag(λ̃_b) Qᵀ + ½ (G_b − H(x))
    V = Q D⁻¹ Qᵀ (Σ_m r_m r_mᵀ) Q D⁻¹ Qᵀ.

The half-width is √V_jj · t_df/z · cv(0.15 |κ_j|/√V_jj): Student's t with Satterthwaite's degrees of freedom
over bins, and the folded normal quantile cv for what may be left of κ, by which the curvature of the loss has
moved x̂. b₀ is the tail with half of the observations or more whose intervals are shortest, in the mean of
their logarithms. The regression for 𝒯 has the penalty that a settled path asks for: there the p_b of B bins
scatter by B V around x*, and their Hessians differ by noise alone.

Centred at the paper's average ȳ instead, the half-width is √V_jj · t_df/z · cv((|ȳ − x̂|_j + 0.15 |κ_j|)/√V_jj).
An efficient x̂ is independent of ȳ − x̂ (Hausman), so that given ȳ − x̂ the distance ȳ − x* is N(ȳ − x̂, V) and
these are the shortest intervals around ȳ that hold x* 95 times in 100: whatever the horizon, the noise and the
bias that the start has left in ȳ.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
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
GRADIENTS = ("increments", "anchor")
VALID = ("fixed", "looks", "always")
_FARTHEST = 8.0  # standard deviations up to which Student's t is taken at the tail of the normal
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
    gradients: str = "increments",
    hessian_every: int = 1,
    valid: str = "fixed",
    best_at: float | None = None,
    looks: Sequence[int] | None = None,
    shape: str = "pocock",
    name: str | None = None,
) -> Estimator:
    """One-step intervals: x̂_j ± q √V_jj from the sums of gradients of all rounds, with x̂ beside the average.

    Centred at x̂, to which three Newton steps lead from the path, and not at ȳ. Needs no plan, and keeps about
    4 · 14 · d² numbers. A client sends a Hessian, d (d + 1)/2 numbers, beside its model of d.

    Of 76 cells of 2,000 runs (`benchmarks/results/stress.md`), among them one client, multiplicative noise and far
    starts, with d from 1 to 20, it covers within 1.5 points of 95 % in all, and in the paper's at t_T = 5,000 it is
    0.99 to 1.01 times as long as an interval from the true covariances, under all five schedules.
    It is known to fail (`benchmarks/results/limits.md`) for clients whose Hessians and optima both differ, in rounds of
    several steps; for constant steps, clipped or adaptive ones; if the path has not arrived; and, about the population,
    for clients that go over the same rows again.

    Args:
      center: "estimate", x̂; or "average", the paper's ȳ = Σ x̄_m/T, for those who must report it. The
        intervals then hold x* as often and are longer, the more so the further ȳ is from x̂. They
        are for coordinates, not for joint tests.
      hessian_every: s, to take the Hessian at every s-th synchronisation only, m = s, 2s, …; the
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
      An `Estimator`. Its `update` needs `sync.hessian`. It asks for h_m in `sync.gradient_sum`: the gradients
      themselves, so that a server may do with them as it likes (momentum, adaptive steps), and the engine
      gives them whatever the algorithm. Without, it takes (x̄_{m−1} − x̄_m)/η_m, which is h_m for plain Local SGD
      only. λ̃ is that of plain local steps: momentum or a proximal term at the clients make it wrong by the
      order of E_m η_m λ.

    Example::

        estimator = one_step()
        state = estimator.init(jnp.zeros(2))
        for _ in range(100):
            ...  # a round of local steps
            state = estimator.update(state, Sync(params=x, E=5, eta=0.01, hessian=H))
        estimator.interval(state, level=0.95)
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
    given = [] if efficient else [center]
    given += when.words
    given += [f"every {hessian_every}"] if hessian_every > 1 else []
    often = "and round" if hessian_every == 1 else f"in every {hessian_every} rounds"
    part = binned_rounds(hessian_every)
    return Estimator(
        name=name or "one_step" + (f"[{', '.join(given)}]" if given else ""),
        accumulators=(part,) if efficient else (part, path_mean()),
        measure=_measure if efficient else _measure_average,
        law=when.law if efficient else LAW._replace(joint=None),
        matrix=_matrix if efficient else None,
        standard_error=efficient,
        judges=efficient and when.valid == "fixed",
        label=("one-step" if efficient else "one-step around the average") + when.label,
        valid=when.valid,
        law_at=when.law_at,
        notes=_notes,
        reads_numpy=True,
        cost=f"a Hessian per client {often} to the server; memory about 56d²",
    )


def _anchored(efficient: bool, when: _When, name: str | None) -> Estimator:
    part = anchored_rounds()
    given = ["anchor", *([] if efficient else ["average"]), *when.words]
    return Estimator(
        name=name or f"one_step[{', '.join(given)}]",
        accumulators=(part,) if efficient else (part, path_mean()),
        measure=_measure_anchored if efficient else _measure_anchored_average,
        law=when.law if efficient else LAW._replace(joint=None),
        matrix=_matrix_anchored if efficient else None,
        standard_error=efficient,
        label=("anchored one-step" if efficient else "anchored one-step around the average")
        + when.label,
        valid=when.valid,
        law_at=when.law_at,
        notes=_anchored_notes,
        cost="a gradient sum per client and round, and two Hessians in a few rounds, to the server; "
        f"memory about {4 * BINS}d²",
    )


def _measure_anchored(states: tuple[AnchoredState, ...], horizon: Horizon | None) -> Measurement:
    del horizon
    state = states[0]
    found = anchored_step.read(*closed(state))
    scale = jnp.sqrt(jnp.maximum(jnp.diagonal(found.V), 0))
    off = jnp.max(jnp.abs(state.x - found.estimate) / jnp.maximum(scale, anchored_step.TINY))
    zeros = jnp.zeros_like(scale)
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
    estimate = jnp.where(
        found.withheld & ~jnp.all(jnp.isfinite(found.estimate)), state.x, found.estimate
    )
    return Measurement(estimate, jnp.where(found.withheld, jnp.inf, scale), False, detail)


def _measure_anchored_average(states: tuple[Any, ...], horizon: Horizon | None) -> Measurement:
    found, path = _measure_anchored(states[:1], horizon), states[1]
    y = path.mean + path.lost
    offset = (y - found.estimate) / jnp.where(jnp.isfinite(found.scale), found.scale, 1)
    return found._replace(estimate=y, detail=found.detail._replace(offset=offset))


def _matrix_anchored(states: tuple[AnchoredState, ...], horizon: Horizon | None) -> Array:
    del horizon
    found = anchored_step.read(*closed(states[0]))
    return jnp.where(found.withheld, jnp.nan, found.V)


def _anchored_notes(detail: AnchoredDetail) -> tuple[str, ...]:
    """What a person should know of a run."""
    notes = []
    if bool(detail.withheld):
        if float(detail.left) >= anchored_step.LEFT or float(detail.weight) < anchored_step.ARRIVED:
            notes.append(
                "withheld: the anchors have not arrived, since the Hessian still changes between them; "
                "run longer, start nearer, or take larger steps"
            )
        else:
            notes.append("withheld: too few rounds or Hessians for a covariance")
        return tuple(notes)
    rounds, d = float(detail.rounds), np.size(detail.df)
    if fdtrc(d, max(rounds - d, 1.0), float(detail.gap)) < 0.001:
        notes.append(
            "the last rounds disagree with those before (p < 0.001): the data may have changed, or a "
            "client's gradients are not those of its loss"
        )
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
