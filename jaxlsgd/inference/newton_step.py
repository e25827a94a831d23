"""From bins of rounds to x̂ and its covariance; the formulas are in `one_step`.

Everything is measured from where the last bin began, so that a path far from the origin loses no digits. The
basis of H(x)'s eigenvectors makes λ̃ a vector: a general solve does not compile for every accelerator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxlsgd.core.problem import Array
from jaxlsgd.inference.binned_rounds import BINS, GRID, Clock, Counts, OneStepState, Sums
from jaxlsgd.inference.sums import product, symmetric_product, times

_FLOOR = 1e-6  # smallest eigenvalue of H(x) allowed, as a share of the largest
_STUB = 0.03  # an open bin with less than this share of the observations joins the one before
_FOR_HESSIAN, _FOR_SLOPE, _LEAST_TAIL = 0.75, 0.97, 0.5  # shares of the observations
_LOOKS = 3
_HIGH = lax.Precision.HIGHEST


class Reading(NamedTuple):
    """x̂ and what its interval is made of."""

    estimate: Array  # (d,)
    V: Array  # (d, d)
    df: Array  # (d,)
    curvature: Array  # (d,) κ/√V
    left_out: Array  # () share of the observations
    floored: Array  # () bool


class Tail(NamedTuple):
    """What the bins from one on give, in the coordinates of the parameters."""

    move: Array  # (d,) x̂ − x
    V: Array  # (d, d)
    curvature: Array  # (d,) κ
    df: Array  # (d,) Satterthwaite's degrees of freedom


Score = Callable[[Tail], Array]


class _Bins(NamedTuple):
    """The bins, and what they have in all views."""

    sums: Sums
    counts: Counts
    p: Array  # (bins, d) mean place
    G: Array  # (bins, d, d) mean Hessian
    bent: Array  # (bins, d) Σ E (H − G_b)(x̄ − p_b)/2
    used: Array  # (bins,) bool
    after: Array  # (bins,) observations from each bin on
    unit: Array  # () the 1 of `sums.product`


class _Hessians(NamedTuple):
    """H(x) = G + slope [x − at]."""

    G: Array  # (d, d)
    at: Array  # (d,)
    slope: Array  # (d, d, d)


class _View(NamedTuple):
    """The bins as seen from x, in the basis of the eigenvectors of H(x)."""

    Q: Array  # (d, d), columns
    floored: Array  # () bool
    residual: Array  # (bins, d) Σ h less what the gradients explain
    linear: Array  # (bins, d) the same for a loss without curvature
    pulled: Array  # (bins, d) λ̃_b
    gap: Array  # (bins, d) R_b ∇F(p_b) − K_b (p_b − c_b) if x were x*
    spread: Array  # (bins, d, d) Σ (h − E K s)(h − E K s)ᵀ
    lever: Array  # (bins, d) Σ E (h − E K s)


class _Look(NamedTuple):
    """What a look at the bins begins with."""

    x: Array  # (d,)
    hessians: _Hessians
    near: Array  # () the first of the last bins whose Hessians count


def read(state: OneStepState, score: Score) -> Reading:
    """x̂ from the tail of bins with the lowest score."""
    bins, center = _bins(*_all_bins(state))
    near, wide = (_last_share(bins, share) for share in (_FOR_HESSIAN, _FOR_SLOPE))
    middle = jnp.zeros_like(center)  # where the last bin began: an early explosion is far from it
    start = _Look(middle, _mean_hessian(bins, _from(bins, near))._replace(at=middle), near)

    def look(begin: _Look, number: Array) -> tuple[_Look, Reading]:
        return _look(bins, wide, score, begin, number == 0)

    # As a loop, because three looks would be compiled three times.
    _, found = lax.scan(look, start, jnp.arange(_LOOKS))
    last = jax.tree.map(lambda leaf: leaf[-1], found)
    return last._replace(estimate=center + last.estimate)


def _look(
    bins: _Bins, wide: Array, score: Score, begin: _Look, first: Array
) -> tuple[_Look, Reading]:
    """A Newton step; the first look also finds where the path is calm, and how the Hessian changes."""
    x, hessians, near = begin
    view = _view(bins, hessians, x)
    # All that is made of a view is made in this loop: a compiler would make the view again for each use outside.
    tails, scores = lax.map(lambda place: _scored(bins, view, score, place), jnp.arange(BINS))
    pick = jnp.argmin(scores)
    near = jnp.where(first, jnp.maximum(near, pick), near)
    best, step = (jax.tree.map(lambda leaf: leaf[place], tails) for place in (pick, near))  # noqa: B023

    def learn(_: Any) -> _Hessians:
        found = _mean_hessian(bins, _from(bins, near))
        return found._replace(slope=_slope(bins, _from(bins, wide), step.V))

    hessians = lax.cond(first, learn, lambda same: same, hessians)
    se = jnp.sqrt(jnp.diagonal(best.V))
    reading = Reading(
        x + best.move,
        best.V,
        best.df,
        best.curvature / jnp.where(se > 0, se, 1),
        1 - bins.after[pick] / jnp.maximum(bins.after[0], 1),
        view.floored,
    )
    return _Look(x + step.move, hessians, near), reading


def _scored(bins: _Bins, view: _View, score: Score, begin: Array) -> tuple[Tail, Array]:
    """The tail from a bin on and its score, which is infinite where the tail is too short."""

    def compute() -> tuple[Tail, Array]:
        found = _tail(bins, view, _from(bins, begin))
        value = score(found)
        return found, jnp.where(jnp.isnan(value), jnp.inf, value)

    def skip() -> tuple[Tail, Array]:
        line = jnp.zeros_like(view.Q[0])
        return Tail(line, jnp.zeros_like(view.Q), line, line), jnp.full_like(line[0], jnp.inf)

    enough = bins.after[begin] >= _LEAST_TAIL * jnp.maximum(bins.after[0], 1)
    return lax.cond(bins.used[begin] & enough, compute, skip)


def _from(bins: _Bins, begin: Array) -> Array:
    """Those of the bins that are in the tail from one on, (bins,) bool."""
    return bins.used & (jnp.arange(BINS) >= begin)


def _kept(chosen: Array, values: Array) -> Array:
    """Those of the chosen bins; what has exploded in another must not make a NaN of 0 · ∞."""
    return jnp.where(chosen.reshape(-1, *[1] * (values.ndim - 1)), values, 0)


def _all_bins(state: OneStepState) -> tuple[Sums, Counts]:
    """Closed bins and the open one, which joins the one before where it is a mere stub."""
    clock: Clock = state.clock
    before = jnp.maximum(clock.bin - 1, 0)
    stub = (clock.bin > 0) & (clock.now.E < _STUB * (jnp.sum(clock.past.E) + clock.now.E))
    at = jnp.where(stub, before, clock.bin)
    c = jnp.where(stub, state.past.c[before], state.now.c)
    now = _measured_from(c, state.now, clock.now)
    place = jnp.arange(BINS) == at

    def put(all_: Array, one: Array) -> Array:
        here = place.reshape(-1, *[1] * one.ndim)
        return jnp.where(here, one + jnp.where(stub, all_, 0), all_)

    joined = jax.tree.map(put, state.past, now)
    joined = joined._replace(c=jnp.where(place[:, None], c, state.past.c))
    return joined, jax.tree.map(put, clock.past, clock.now)


def _measured_from(c: Array, sums: Sums, counts: Counts) -> Sums:
    """The sums of a bin as if it had begun at another place."""
    d = sums.c - c
    outer = lambda u, v: u[:, None] * v[None, :]  # noqa: E731
    EEss = sums.EEss + outer(sums.EEs, d) + outer(d, sums.EEs) + counts.EE * outer(d, d)
    return sums._replace(
        c=c,
        Es=sums.Es + counts.E * d,
        known_Es=sums.known_Es + counts.known * d,
        EEs=sums.EEs + counts.EE * d,
        EHs=sums.EHs + jnp.sum(sums.EH * d[None, :], axis=1),
        Ehs=sums.Ehs + outer(sums.Eh, d),
        EEss=EEss,
    )


def _bins(sums: Sums, counts: Counts) -> tuple[_Bins, Array]:
    """The bins measured from where the last began, and that place."""
    used = counts.n > 0
    center = sums.c[jnp.max(jnp.where(used, jnp.arange(BINS), 0))]
    sums = sums._replace(c=sums.c - center)
    E, known = jnp.maximum(counts.E, 1), jnp.maximum(counts.known, 1)
    p = sums.c + sums.Es / E[:, None]
    G = (sums.EH + sums.EH.mT) / 2 / known[:, None, None]
    seen = counts.known > 0
    # A bin of one round has no Hessian: that of all others stands in.
    mean = jnp.sum(_kept(seen, E[:, None, None] * G), 0) / jnp.maximum(jnp.sum(E * seen), 1)
    G = jnp.where(seen[:, None, None], G, mean)
    bent = (sums.EHs - times(G, sums.known_Es)) * (E / known / 2)[:, None]
    after = jnp.cumsum(counts.E[::-1])[::-1]
    unit = jnp.where(after[0] >= 0, 1, after[0])
    return _Bins(sums, counts, p, G, bent, used, after, unit), center


def _last_share(bins: _Bins, share: float) -> Array:
    """Where the fewest last bins with a share of the observations begin."""
    enough = bins.used & (bins.after >= share * bins.after[0])
    return jnp.max(jnp.where(enough, jnp.arange(BINS), 0))


def _weights(bins: _Bins, chosen: Array) -> Array:
    E = jnp.where(chosen, bins.counts.E, 0)
    return E / jnp.maximum(jnp.sum(E), 1)


def _mean_hessian(bins: _Bins, chosen: Array) -> _Hessians:
    weight = _weights(bins, chosen)
    G = jnp.sum(_kept(chosen, weight[:, None, None] * bins.G), 0)
    at = jnp.sum(_kept(chosen, weight[:, None] * bins.p), 0)
    return _Hessians(G, at, jnp.zeros((*G.shape, at.shape[0]), G.dtype))


def _slope(bins: _Bins, chosen: Array, V: Array) -> Array:
    """How the Hessian changes with its place, (d, d, d), by ridge regression over bins."""
    sizes = jnp.sum(jnp.abs(bins.G), (1, 2)) + jnp.sum(bins.p * bins.p, 1)
    chosen = chosen & jnp.isfinite(sizes)
    mean, weight = _mean_hessian(bins, chosen), _weights(bins, chosen)
    dp, dG = _kept(chosen, bins.p - mean.at), _kept(chosen, bins.G - mean.G)
    scatter = jnp.einsum("b,bi,bj->ij", weight, dp, dp, precision=_HIGH)
    values, Q, _ = _spectrum(scatter + jnp.sum(chosen) * V)
    crossed = jnp.einsum("b,bij,bk->ijk", weight, dG, dp, precision=_HIGH)
    return jnp.einsum("ijk,kl,l,ml->ijm", crossed, Q, 1 / values, Q, precision=_HIGH)


def _hessian_at(hessians: _Hessians, x: Array) -> Array:
    return hessians.G + times(hessians.slope, x - hessians.at)


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


def _view(bins: _Bins, hessians: _Hessians, x: Array) -> _View:
    here, sums, gaps, unit = _hessian_at(hessians, x), bins.sums, bins.p - x, bins.unit
    values, Q, floored = _spectrum(here)
    pulled, E = _pulled(bins.counts, values), bins.counts.E[:, None]
    slopes = times(here + times(hessians.slope, gaps[:, None, :]) / 2, gaps)
    rows = (slopes, gaps, bins.p - sums.c, bins.bent, sums.h, sums.Eh, sums.EEs)
    slope, gap, place, bent, h, Eh, EEs = (product(each, Q, unit) for each in rows)
    squares = (bins.G, sums.hh, sums.Ehs, sums.EEss)
    G, hh, Ehs, EEss = (product(Q.T, product(each, Q, unit), unit) for each in squares)
    ratio = pulled / values
    gradient = ratio * slope
    own = jnp.eye(len(values), dtype=values.dtype) * (2 * pulled - values)[:, None, :]
    K = (G + own) / (2 * unit)
    # C Kᵀ + K Cᵀ − K S Kᵀ = A Kᵀ + K Aᵀ with A = C − ½ K S
    A = Ehs - product(K, EEss, unit) / 2
    return _View(
        Q,
        floored,
        h - E * gradient - ratio * bent,
        h - E * pulled * gap,
        pulled,
        gradient - times(K, place),
        hh - symmetric_product(A, K, unit),
        Eh - times(K, EEs),
    )


def _tail(bins: _Bins, view: _View, chosen: Array) -> Tail:
    """One Newton step from x with the chosen bins."""
    each = (bins.counts.E[:, None] * view.pulled, view.residual, view.linear)
    D, residual, linear = (jnp.sum(_kept(chosen, one), 0) for one in each)
    left, move, straight = view.Q / D, -residual / D, -linear / D
    residuals = _kept(chosen, _residuals(bins, view, move)) / bins.unit
    half = product(left, residuals, bins.unit)
    v = jnp.sum(half * left, axis=2)
    df = jnp.sum(v, 0) ** 2 / jnp.sum(v**2 / jnp.maximum(bins.counts.n, 1)[:, None], 0)
    V = product(jnp.sum(half, 0), left.T, bins.unit)
    return Tail(times(view.Q, move), V, times(view.Q, straight - move), df)


def _residuals(bins: _Bins, view: _View, move: Array) -> Array:
    """Σ r rᵀ of each bin, r = h − E [R_b ∇F(p_b) + K_b (x̄ − p_b)], after a move of x."""
    gap = view.gap - view.pulled * move
    # Not a product and its transpose, which would not be vectorised.
    half = bins.counts.EE[:, None] * gap / 2 - view.lever
    return view.spread + half[:, :, None] * gap[:, None, :] + gap[:, :, None] * half[:, None, :]
