"""One-step intervals: as short as if every observation had been communicated, at any schedule.

The estimator, its variance and what is streamed are in `binned_rounds`. Here the bins become an interval.
With Ĝ = QΛQᵀ the mean Hessian over the last bins with ¾ of the observations, and

    λ̃_b = Σ_{m∈b} [1 − (1 − η_mλ)^{E_m}]/η_m ÷ Σ_b E_m,     D = Σ_b λ̃_b Σ_b E,

over the bins b ≥ b₀ (local steps pull back by λ̃ and not by λ, because a client has moved already)

    x̂₀ = Q D⁻¹ Σ_b [λ̃_b ∘ Qᵀ(ΣE x̄_{m−1}) − QᵀΣh]
    κ = −½ Q D⁻¹ Qᵀ Σ_b [ΣEH(x̄ − x̂₀) − Ĝ ΣE(x̄ − x̂₀)]        what the curvature of the loss does
    x̂ = x̂₀ − κ
    r_m = h_m − E_m K_b (x̄_{m−1} − x̂),   K_b = Q diag(λ̃_b) Qᵀ + ½ (Ĝ_b − Ĝ)
    V = Q D⁻¹ Qᵀ (Σ_m r_m r_mᵀ) Q D⁻¹ Qᵀ.

The half-width is √V_jj · t_df/z · cv(0.15 |κ_j|/√V_jj): Student's t with Satterthwaite's degrees of freedom
over bins, and the folded normal quantile cv for what the correction κ may have left. b₀ is the tail with
half of the observations or more whose intervals are shortest, in the mean of their logarithms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from scipy.special import chndtrix, ndtri, stdtrit

from jaxlsgd.core.estimator import Estimator, Horizon, Law, Measurement
from jaxlsgd.core.problem import Array
from jaxlsgd.core.registry import register
from jaxlsgd.inference.binned_rounds import (
    BINS,
    GRID,
    Clock,
    Counts,
    OneStepState,
    Sums,
    binned_rounds,
)
from jaxlsgd.inference.laws.normal import NORMAL

if TYPE_CHECKING:
    from jaxlsgd.schedules import Plan

LEFT = 0.15  # share of the correction κ that may still be wrong
_FLOOR = 1e-6  # smallest eigenvalue of Ĝ allowed, as a share of the largest
_STUB = 0.03  # an open bin with less than this share of the observations joins the one before
_FOR_HESSIAN, _LEAST_TAIL = 0.75, 0.5
_HIGH = lax.Precision.HIGHEST
_Z = float(-ndtri(0.025))
# cv(b) at 95 %: P(|N(b, 1)| ≤ cv) = 0.95; beyond the table it is b + 1.645.
_BIAS = np.linspace(0, 6, 61)
_FOLDED = np.sqrt(chndtrix(0.95, 1, np.maximum(_BIAS, 1e-6) ** 2))


class OneStepDetail(NamedTuple):
    """What a multiplier needs, and how the interval was made."""

    df: Array  # (d,) degrees of freedom
    curvature: Array  # (d,) κ/√V
    first: Array  # () rounds that were left out at the beginning, as a share of the observations


@register("method")
def one_step(*, name: str | None = None) -> Estimator:
    """One-step intervals: x̂_j ± q √V_jj, as short as under E_m = 1 whatever the schedule.

    Centred at x̂, one Newton step from the path, and not at ȳ. Needs no plan, stays right where noise is
    multiplicative, few clients take part or the start is far away, and keeps about 4 · 14 · d² numbers.

    Args:
      name: name in tables; "one_step" if None.

    Returns:
      An `Estimator`. Its `update` needs `sync.hessian`; without `sync.gradient_sum` it takes
      (x̄_{m−1} − x̄_m)/η_m, which is the same for Local SGD up to rounding.

    Example::

        estimator = one_step()
        state = estimator.init(jnp.zeros(2))
        for _ in range(100):
            ...  # a round of local steps
            state = estimator.update(state, Sync(params=x, E=5, eta=0.01, hessian=H))
        estimator.interval(state, level=0.95)
    """
    return Estimator(
        name=name or "one_step",
        accumulators=(binned_rounds(),),
        measure=_measure,
        law=Law(multiplier, tail, NORMAL.joint, one_sided=one_sided, least_p=1e-15),
        matrix=_matrix,
        standard_error=True,
        judges=True,
        label="one-step",
        notes=_notes,
    )


def _notes(detail: OneStepDetail) -> tuple[str, ...]:
    """What a person should know of a run."""
    notes = []
    if (left_out := float(detail.first)) > 0.01:
        notes.append(
            f"the first {100 * left_out:.0f} % of the observations were left out, as too far away"
        )
    if (least := float(np.min(detail.df))) < 10:
        notes.append(f"only {least:.0f} degrees of freedom: too few rounds to be sure")
    if (bent := float(np.max(np.abs(detail.curvature)))) > 2:
        notes.append(f"the loss curves: corrected by {bent:.1f} standard errors")
    return tuple(notes)


class _Tail(NamedTuple):
    """What the bins from one on give, in the basis of Ĝ's eigenvectors."""

    move: Array  # (d,) x̂ − c of the last bin
    D: Array  # (d,)
    curvature: Array  # (d,) κ
    variances: Array  # (bins, d) what each bin adds to V_jj, in the coordinates of the parameters


class _Reading(NamedTuple):
    """The interval as it is read off."""

    estimate: Array  # (d,)
    V: Array  # (d, d)
    df: Array  # (d,)
    curvature: Array  # (d,) κ/√V
    left_out: Array  # () share of the observations
    floored: Array  # () bool


def _measure(states: tuple[OneStepState, ...], horizon: Horizon | None) -> Measurement:
    del horizon
    found = _read(states[0])
    variance = jnp.diagonal(found.V)
    scale = jnp.sqrt(jnp.where(variance >= 0, variance, jnp.nan))
    scale = jnp.where(states[0].clock.m < 2, jnp.inf, scale)
    detail = OneStepDetail(found.df, found.curvature, found.left_out)
    return Measurement(found.estimate, scale, found.floored, detail)


def _matrix(states: tuple[OneStepState, ...], horizon: Horizon | None) -> Array:
    del horizon
    return _read(states[0]).V


def _read(state: OneStepState) -> _Reading:
    sums, counts = _all_bins(state)
    after = jnp.cumsum(counts.E[::-1])[::-1]  # observations from each bin on
    used, total, places = counts.n > 0, jnp.maximum(after[0], 1), jnp.arange(BINS)
    for_G = used & (places >= jnp.max(jnp.where(used & (after >= _FOR_HESSIAN * total), places, 0)))
    # As if the Hessian of every round were known.
    weight = jnp.where(counts.known > 0, counts.E / jnp.maximum(counts.known, 1), 0)
    sums = sums._replace(EH=sums.EH * weight[:, None, None])
    G = jnp.sum(_kept(for_G, sums.EH), 0) / jnp.sum(jnp.where(for_G, counts.E, 0))
    values, Q, floored = _spectrum(G)
    c = sums.c[jnp.max(jnp.where(used, places, 0))]
    bins = _rotated(sums._replace(c=sums.c - c), counts, values, Q)

    def one(first: Array) -> tuple[_Tail, Array]:
        found = _tail_from(bins, values, Q, used & (places >= first))
        enough = used[first] & (after[first] >= _LEAST_TAIL * total)
        score = jnp.where(enough, _score(found, counts, Q), jnp.inf)
        return found, jnp.where(jnp.isnan(score), jnp.inf, score)

    tails, scores = lax.map(one, places)
    pick = jnp.argmin(scores)
    best = jax.tree.map(lambda leaf: leaf[pick], tails)
    V = _covariance(bins, best, Q, used & (places >= pick))
    se = jnp.sqrt(jnp.diagonal(V))
    return _Reading(
        c + _times(Q, best.move),
        V,
        _degrees(best, counts),
        _times(Q, best.curvature) / jnp.where(se > 0, se, 1),
        1 - after[pick] / total,
        floored,
    )


def _times(M: Array, v: Array) -> Array:
    return jnp.einsum("...ij,...j->...i", M, v, precision=_HIGH)


def _kept(chosen: Array, values: Array) -> Array:
    """Those of the chosen bins; what has exploded in another must not make a NaN of 0 · ∞."""
    return jnp.where(chosen.reshape(-1, *[1] * (values.ndim - 1)), values, 0)


def _all_bins(state: OneStepState) -> tuple[Sums, Counts]:
    """Closed bins and the open one, which joins the one before where it is a mere stub."""
    clock: Clock = state.clock
    b, before = clock.bin, jnp.maximum(clock.bin - 1, 0)
    stub = (b > 0) & (clock.now.E < _STUB * (jnp.sum(clock.past.E) + clock.now.E))
    at = jnp.where(stub, before, b)
    last = jax.tree.map(lambda leaf: leaf[before], state.past)
    joined = _joined(last, state.now, clock.now)
    open_ = jax.tree.map(lambda one, two: jnp.where(stub, one, two), joined, state.now)
    count = jax.tree.map(
        lambda all_, now: jnp.where(stub, all_[before] + now, now), clock.past, clock.now
    )
    put = lambda all_, one: lax.dynamic_update_index_in_dim(all_, one, at, 0)  # noqa: E731
    return jax.tree.map(put, state.past, open_), jax.tree.map(put, clock.past, count)


def _joined(one: Sums, two: Sums, of_two: Counts) -> Sums:
    """Two bins as one that begins where the first does."""
    d = two.c - one.c
    outer = lambda u, v: u[:, None] * v[None, :]  # noqa: E731
    Hd = jnp.sum(two.EH * d[None, :], axis=1)
    EEss = two.EEss + outer(two.EEs, d) + outer(d, two.EEs) + of_two.EE * outer(d, d)
    moved = two._replace(
        Es=two.Es + of_two.E * d,
        EEs=two.EEs + of_two.EE * d,
        EHs=two.EHs + Hd,
        Ehs=two.Ehs + outer(two.Eh, d),
        EEss=EEss,
    )
    return jax.tree.map(jnp.add, one, moved)._replace(c=one.c)


def _spectrum(G: Array) -> tuple[Array, Array, Array]:
    """Eigenvalues with a floor, eigenvectors as columns, and whether the floor acted."""
    G = (G + G.T) / 2
    finite = jnp.all(jnp.isfinite(G))
    values, Q = jnp.linalg.eigh(jnp.where(finite, G, jnp.eye(G.shape[0], dtype=G.dtype)))
    floor = _FLOOR * jnp.max(jnp.abs(values))
    low = jnp.any(values < floor)
    return jnp.where(finite, jnp.maximum(values, floor), jnp.nan), Q, low & finite


def _pulled(counts: Counts, values: Array) -> Array:
    """λ̃_b, (bins, d): cubic interpolation of λ̃/λ in ln λ."""
    grid, dtype = np.log(GRID), values.dtype
    ratio = counts.pull / jnp.maximum(counts.E, 1)[:, None] / jnp.asarray(GRID, dtype)
    place = (jnp.log(values) - grid[0]) / (grid[1] - grid[0])
    left = jnp.clip(jnp.floor(jnp.where(jnp.isnan(place), 0, place)), 1, len(GRID) - 3)
    u = jnp.clip(place - left, -1, 2).astype(dtype)
    left = left.astype(jnp.int32)
    weights = (
        -u * (u - 1) * (u - 2) / 6,
        (u + 1) * (u - 1) * (u - 2) / 2,
        -(u + 1) * u * (u - 2) / 2,
        (u + 1) * u * (u - 1) / 6,
    )
    found = sum(w[None, :] * ratio[:, left + i - 1] for i, w in enumerate(weights))
    return found * values


class _Bins(NamedTuple):
    """The bins in the basis of Ĝ's eigenvectors, with c = 0 where the last one began."""

    sums: Sums
    counts: Counts
    pulled: Array  # (bins, d) λ̃_b
    K: Array  # (bins, d, d)
    spread: Array  # (bins, d, d) Σ (h − E K s)(h − E K s)ᵀ
    lever: Array  # (bins, d) Σ E (h − E K s)


def _rotated(sums: Sums, counts: Counts, values: Array, Q: Array) -> _Bins:
    def turn(leaf: Array) -> Array:
        if leaf.ndim == 2:
            return _times(Q.T, leaf)
        return jnp.einsum("ji,bjk,kl->bil", Q, leaf, Q, precision=_HIGH)

    sums = jax.tree.map(turn, sums)
    pulled = _pulled(counts, values)
    G_b = sums.EH / jnp.maximum(counts.E, 1)[:, None, None]
    K = 0.5 * (G_b + jnp.eye(len(values), dtype=G_b.dtype) * (2 * pulled - values)[:, None, :])
    CK = jnp.einsum("bij,bkj->bik", sums.Ehs, K, precision=_HIGH)
    KSK = jnp.einsum("bij,bjk,blk->bil", K, sums.EEss, K, precision=_HIGH)
    spread = sums.hh - CK - jnp.swapaxes(CK, 1, 2) + KSK
    return _Bins(sums, counts, pulled, K, spread, sums.Eh - _times(K, sums.EEs))


def _tail_from(bins: _Bins, values: Array, Q: Array, chosen: Array) -> _Tail:
    """What the chosen bins give."""
    sums, E = bins.sums, bins.counts.E[:, None]
    D = jnp.sum(_kept(chosen, E * bins.pulled), 0)
    path = sums.Es + E * sums.c  # ΣE (x̄ − c)
    x0 = jnp.sum(_kept(chosen, bins.pulled * path - sums.h), 0) / D
    bent = sums.EHs + _times(sums.EH, sums.c - x0) - values * (path - E * x0)
    curvature = -0.5 * jnp.sum(_kept(chosen, bent), 0) / D
    move = x0 - curvature
    residuals = _kept(chosen, _residuals(bins, move))
    V = jnp.einsum("ji,bik->bjk", Q / D, residuals, precision=_HIGH)
    return _Tail(move, D, curvature, jnp.sum(V * (Q / D), axis=2))


def _residuals(bins: _Bins, move: Array) -> Array:
    """Σ r rᵀ of each bin, r = h − E K (s + c_b − move)."""
    gap = _times(bins.K, bins.sums.c - move)
    outer = bins.lever[:, :, None] * gap[:, None, :]
    square = bins.counts.EE[:, None, None] * gap[:, :, None] * gap[:, None, :]
    return bins.spread - outer - jnp.swapaxes(outer, 1, 2) + square


def _covariance(bins: _Bins, best: _Tail, Q: Array, chosen: Array) -> Array:
    middle = jnp.sum(_kept(chosen, _residuals(bins, best.move)), 0)
    return jnp.einsum("ji,ik,lk->jl", Q / best.D, middle, Q / best.D, precision=_HIGH)


def _degrees(tail: _Tail, counts: Counts) -> Array:
    """Satterthwaite's degrees of freedom, (d,)."""
    v = tail.variances
    return jnp.sum(v, 0) ** 2 / jnp.sum(v**2 / jnp.maximum(counts.n, 1)[:, None], 0)


def _score(tail: _Tail, counts: Counts, Q: Array) -> Array:
    """Mean logarithm of the 95 % half-widths."""
    se = jnp.sqrt(jnp.sum(tail.variances, 0))
    bias = LEFT * jnp.abs(_times(Q, tail.curvature)) / se
    table = (jnp.asarray(leaf, se.dtype) for leaf in (_BIAS, _FOLDED))
    return jnp.mean(jnp.log(se * _student(_degrees(tail, counts)) * jnp.interp(bias, *table)))


def _student(df: Array) -> Array:
    """t_df/z at 95 %, by Cornish and Fisher's expansion; to 1 % from 4 degrees of freedom on."""
    z = _Z
    first = (z**2 + 1) / (4 * df)
    second = (5 * z**4 + 16 * z**2 + 3) / (96 * df**2)
    return 1 + first + second + (3 * z**6 + 19 * z**4 + 17 * z**2 - 15) / (384 * df**3)


def multiplier(level: Any, plan: Plan | None, detail: Any) -> Any:
    """t_df/z · cv(0.15 |κ|/√V) at a level, or at one per coordinate."""
    del plan
    tail = (1 - np.asarray(level)) / 2
    df = np.maximum(np.asarray(detail.df, np.float64), 1.0)
    ratio = stdtrit(df, tail) / ndtri(tail)
    bias = LEFT * np.abs(np.asarray(detail.curvature, np.float64))
    near = np.sqrt(chndtrix(1 - 2 * tail, 1, np.clip(bias, 1e-6, 8.0) ** 2))
    return ratio * np.where(bias < 8, near, bias - ndtri(2 * tail))


def one_sided(level: float, plan: Plan | None, detail: Any) -> Any:
    """t_df/z · (z + 0.15 |κ|/√V): what κ may have left can all be on one side."""
    del plan
    df = np.maximum(np.asarray(detail.df, np.float64), 1.0)
    z, t = ndtri(level), stdtrit(df, level)
    return t / z * (z + LEFT * np.abs(np.asarray(detail.curvature, np.float64)))


def tail(statistic: Any, plan: Plan | None, detail: Any) -> np.ndarray:
    """Two-sided p-value: 1 − the level whose interval just reaches the null, by bisection."""
    size = np.abs(np.asarray(statistic, np.float64))
    low, high = np.full(size.shape, np.log(1e-15)), np.full(size.shape, -1e-12)  # ln p
    for _ in range(60):
        middle = (low + high) / 2
        reaches = multiplier(-np.expm1(middle), plan, detail) >= size
        low, high = np.where(reaches, middle, low), np.where(reaches, high, middle)
    return np.where(np.isnan(size), np.nan, np.exp(high))
