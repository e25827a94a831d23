"""From bins of rounds to x̂ and its covariance; the formulas are in `one_step`.

Everything is measured from where the last bin began, so that a path far from the origin loses no digits. The
basis of H(x)'s eigenvectors makes λ̃ a vector: a general solve does not compile for every accelerator.

Written for NumPy and JAX alike, by the state's own arrays. Compiling takes seconds, and reading one run in NumPy
some milliseconds.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxlsgd.core.problem import Array
from jaxlsgd.inference.binned_rounds import BINS, GRID, Clock, Counts, OneStepState, Sums

_FLOOR = 1e-6  # smallest eigenvalue of H(x) allowed, as a share of the largest
_STUB = 0.03  # an open bin with less than this share of the observations joins the one before
_FOR_HESSIAN, _FOR_SLOPE, _LEAST_TAIL = 0.75, 0.97, 0.5  # shares of the observations
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
    """What the bins from one on give, in the coordinates of the parameters unless said otherwise."""

    move: Array  # (d,) x̂ − x
    D: Array  # (d,) in the basis of H(x)
    curvature: Array  # (d,) κ
    variances: Array  # (bins, d) what each bin adds to V_jj
    df: Array  # (d,) Satterthwaite's degrees of freedom


Score = Callable[[Tail], Array]


class _Bins(NamedTuple):
    """The bins, and what they have in all views."""

    xp: Any  # numpy or jax.numpy
    sums: Sums
    counts: Counts
    p: Array  # (bins, d) mean place
    G: Array  # (bins, d, d) mean Hessian
    bent: Array  # (bins, d) Σ E (H − G_b)(x̄ − p_b)/2
    used: Array  # (bins,) bool
    after: Array  # (bins,) observations from each bin on


class _Hessians(NamedTuple):
    """H(x) = G + slope [x − at]."""

    G: Array  # (d, d)
    at: Array  # (d,)
    slope: Array  # (d, d, d)


class _View(NamedTuple):
    """The bins as seen from x, in the basis of the eigenvectors of H(x)."""

    values: Array  # (d,)
    Q: Array  # (d, d), columns
    floored: Array  # () bool
    pulled: Array  # (bins, d) λ̃_b
    gradient: Array  # (bins, d) R_b ∇F(p_b) if x were x*
    residual: Array  # (bins, d) Σ h less what the gradients explain
    linear: Array  # (bins, d) the same for a loss without curvature
    D: Array  # (bins, d) Σ E λ̃_b
    K: Array  # (bins, d, d)
    place: Array  # (bins, d) p_b − c_b
    spread: Array  # (bins, d, d) Σ (h − E K s)(h − E K s)ᵀ
    lever: Array  # (bins, d) Σ E (h − E K s)


@np.errstate(all="ignore")  # bins that nothing is in divide by 0, and are left out
def read(state: OneStepState, score: Score) -> Reading:
    """x̂ from the tail of bins with the lowest score."""
    bins, center = _bins(*_all_bins(state))
    xp = bins.xp
    total, places = xp.maximum(bins.after[0], 1), xp.arange(BINS)
    near, wide = (_last_share(bins, share) for share in (_FOR_HESSIAN, _FOR_SLOPE))
    middle = xp.zeros_like(center)  # where the last bin began: an early explosion is far from it
    first = _view(bins, _mean_hessian(bins, near)._replace(at=middle), middle)
    calm, _ = _best(bins, first, score)
    near = near & (places >= calm)
    flat, look = _mean_hessian(bins, near), _tail(bins, first, near)
    hessians = flat._replace(slope=_slope(bins, wide, _covariance(bins, first, look, near)))
    x = middle + look.move
    view = _view(bins, hessians, x)
    x = x + _tail(bins, view, near).move
    view = _view(bins, hessians, x)
    pick, best = _best(bins, view, score)
    V = _covariance(bins, view, best, bins.used & (places >= pick))
    se = xp.sqrt(xp.diagonal(V))
    return Reading(
        center + (x + best.move),
        V,
        best.df,
        best.curvature / xp.where(se > 0, se, 1),
        1 - bins.after[pick] / total,
        view.floored,
    )


def _best(bins: _Bins, view: _View, score: Score) -> tuple[Array, Tail]:
    """The first bin of the tail with the lowest score, and that tail."""
    xp = bins.xp
    places, least = xp.arange(BINS), _LEAST_TAIL * xp.maximum(bins.after[0], 1)

    def one(begin: Array) -> tuple[Tail, Array]:
        found = _tail(bins, view, bins.used & (xp.arange(BINS) >= begin))
        value = xp.where(bins.used[begin] & (bins.after[begin] >= least), score(found), xp.inf)
        return found, xp.where(xp.isnan(value), xp.inf, value)

    if xp is np:  # which of them count is known
        chosen: Any = np.flatnonzero(bins.used & (bins.after >= least))
        places = chosen if len(chosen) else places[:1]
    tails, scores = _each(xp, one, places)
    pick = xp.argmin(scores)
    tail = jax.tree.map(lambda leaf: leaf[pick], tails)
    return pick if xp is jnp else places[pick], tail


def _each(xp: Any, one: Callable[[Array], Any], places: Any) -> Any:
    """What `one` gives at each place, stacked."""
    if xp is jnp:
        return lax.map(one, places)
    return jax.tree.map(lambda *found: xp.stack(found), *map(one, places))


def _sum(how: str, *arrays: Array) -> Array:
    """Einstein's sums, at full precision."""
    xp = arrays[0].__array_namespace__()
    if xp is jnp:
        return xp.einsum(how, *arrays, precision=_HIGH)
    return xp.einsum(how, *arrays, optimize=len(arrays) > 2)


def _times(M: Array, v: Array) -> Array:
    return _sum("...ij,...j->...i", M, v)


def _kept(chosen: Array, values: Array) -> Array:
    """Those of the chosen bins; what has exploded in another must not make a NaN of 0 · ∞."""
    xp = values.__array_namespace__()
    return xp.where(_wide(chosen, values), values, 0)


def _wide(chosen: Array, values: Array) -> Array:
    return chosen.reshape(-1, *[1] * (values.ndim - 1))


def _all_bins(state: OneStepState) -> tuple[Sums, Counts]:
    """Closed bins and the open one, which joins the one before where it is a mere stub."""
    clock: Clock = state.clock
    xp = state.x.__array_namespace__()
    b, before = clock.bin, xp.maximum(clock.bin - 1, 0)
    stub = (b > 0) & (clock.now.E < _STUB * (xp.sum(clock.past.E) + clock.now.E))
    here = xp.arange(BINS) == xp.where(stub, before, b)
    last = jax.tree.map(lambda leaf: leaf[before], state.past)
    joined = _joined(last, state.now, clock.now)
    open_ = jax.tree.map(lambda one, two: xp.where(stub, one, two), joined, state.now)
    count = jax.tree.map(
        lambda all_, now: xp.where(stub, all_[before] + now, now), clock.past, clock.now
    )
    put = lambda all_, one: xp.where(_wide(here, all_), one, all_)  # noqa: E731
    return jax.tree.map(put, state.past, open_), jax.tree.map(put, clock.past, count)


def _joined(one: Sums, two: Sums, of_two: Counts) -> Sums:
    """Two bins as one that begins where the first does."""
    d = two.c - one.c
    outer = lambda u, v: u[:, None] * v[None, :]  # noqa: E731
    Hd = (two.EH * d[None, :]).sum(1)
    EEss = two.EEss + outer(two.EEs, d) + outer(d, two.EEs) + of_two.EE * outer(d, d)
    moved = two._replace(
        Es=two.Es + of_two.E * d,
        known_Es=two.known_Es + of_two.known * d,
        EEs=two.EEs + of_two.EE * d,
        EHs=two.EHs + Hd,
        Ehs=two.Ehs + outer(two.Eh, d),
        EEss=EEss,
    )
    return jax.tree.map(operator.add, one, moved)._replace(c=one.c)


def _bins(sums: Sums, counts: Counts) -> tuple[_Bins, Array]:
    """The bins measured from where the last began, and that place."""
    xp = sums.c.__array_namespace__()
    used = counts.n > 0
    center = sums.c[xp.max(xp.where(used, xp.arange(BINS), 0))]
    sums = sums._replace(c=sums.c - center)
    E, known = xp.maximum(counts.E, 1), xp.maximum(counts.known, 1)
    p = sums.c + sums.Es / E[:, None]
    G = (sums.EH + xp.swapaxes(sums.EH, 1, 2)) / 2 / known[:, None, None]
    seen = counts.known > 0
    # A bin of one round has no Hessian: that of all others stands in.
    mean = xp.sum(_kept(seen, E[:, None, None] * G), 0) / xp.maximum(xp.sum(E * seen), 1)
    G = xp.where(seen[:, None, None], G, mean)
    bent = (sums.EHs - _times(G, sums.known_Es)) * (E / known / 2)[:, None]
    after = xp.cumsum(counts.E[::-1])[::-1]
    return _Bins(xp, sums, counts, p, G, bent, used, after), center


def _last_share(bins: _Bins, share: float) -> Array:
    """The fewest last bins with a share of the observations."""
    xp = bins.xp
    enough = bins.used & (bins.after >= share * bins.after[0])
    places = xp.arange(BINS)
    return bins.used & (places >= xp.max(xp.where(enough, places, 0)))


def _weights(bins: _Bins, chosen: Array) -> Array:
    xp = bins.xp
    E = xp.where(chosen, bins.counts.E, 0)
    return E / xp.maximum(xp.sum(E), 1)


def _mean_hessian(bins: _Bins, chosen: Array) -> _Hessians:
    xp, weight = bins.xp, _weights(bins, chosen)
    G = xp.sum(_kept(chosen, weight[:, None, None] * bins.G), 0)
    at = xp.sum(_kept(chosen, weight[:, None] * bins.p), 0)
    return _Hessians(G, at, xp.zeros((*G.shape, at.shape[0]), G.dtype))


def _slope(bins: _Bins, chosen: Array, V: Array) -> Array:
    """How the Hessian changes with its place, (d, d, d), by ridge regression over bins."""
    xp = bins.xp
    sizes = xp.sum(xp.abs(bins.G), (1, 2)) + xp.sum(bins.p * bins.p, 1)
    chosen = chosen & xp.isfinite(sizes)
    mean, weight = _mean_hessian(bins, chosen), _weights(bins, chosen)
    dp, dG = _kept(chosen, bins.p - mean.at), _kept(chosen, bins.G - mean.G)
    scatter = _sum("b,bi,bj->ij", weight, dp, dp)
    values, Q, _ = _spectrum(scatter + xp.sum(chosen) * V)
    crossed = _sum("b,bij,bk->ijk", weight, dG, dp)
    return _sum("ijk,kl,l,ml->ijm", crossed, Q, 1 / values, Q)


def _hessian_at(hessians: _Hessians, x: Array) -> Array:
    return hessians.G + _times(hessians.slope, x - hessians.at)


def _spectrum(G: Array) -> tuple[Array, Array, Array]:
    """Eigenvalues with a floor, eigenvectors as columns, and whether the floor acted."""
    xp = G.__array_namespace__()
    G = (G + G.T) / 2
    finite = xp.all(xp.isfinite(G))
    values, Q = xp.linalg.eigh(xp.where(finite, G, xp.eye(G.shape[0], dtype=G.dtype)))
    floor = _FLOOR * xp.max(xp.abs(values))
    low = xp.any(values < floor)
    return xp.where(finite, xp.maximum(values, floor), xp.nan), Q, low & finite


def _pulled(counts: Counts, values: Array) -> Array:
    """λ̃_b, (bins, d): cubic interpolation of λ̃/λ in ln λ."""
    xp = values.__array_namespace__()
    grid, dtype = np.log(GRID), values.dtype
    ratio = counts.pull / xp.maximum(counts.E, 1)[:, None] / xp.asarray(GRID, dtype)
    place = (xp.log(values) - grid[0]) / (grid[1] - grid[0])
    left = xp.clip(xp.floor(xp.where(xp.isnan(place), 0, place)), 1, len(GRID) - 3)
    u = xp.clip(place - left, -1, 2).astype(dtype)
    left = left.astype(xp.int32)
    weights = (
        -u * (u - 1) * (u - 2) / 6,
        (u + 1) * (u - 1) * (u - 2) / 2,
        -(u + 1) * u * (u - 2) / 2,
        (u + 1) * u * (u - 1) / 6,
    )
    found = sum(w[None, :] * ratio[:, left + i - 1] for i, w in enumerate(weights))
    return found * values


def _view(bins: _Bins, hessians: _Hessians, x: Array) -> _View:
    xp = bins.xp
    here, gaps = _hessian_at(hessians, x), bins.p - x
    values, Q, floored = _spectrum(here)
    pulled = _pulled(bins.counts, values)
    turn = lambda rows: _times(Q.T, rows)  # noqa: E731
    square = lambda all_: _sum("ji,bjk,kl->bil", Q, all_, Q)  # noqa: E731
    change = _sum("ijk,bk->bij", hessians.slope, gaps)
    ratio, E = pulled / values, bins.counts.E[:, None]
    gradient = ratio * turn(_times(here + change / 2, gaps))
    h, sums = turn(bins.sums.h), bins.sums
    own = xp.eye(len(values), dtype=values.dtype) * (2 * pulled - values)[:, None, :]
    K = (square(bins.G) + own) / 2
    CK = _sum("bij,bkj->bik", square(sums.Ehs), K)
    KSK = _sum("bij,bjk,blk->bil", K, square(sums.EEss), K)
    return _View(
        values,
        Q,
        floored,
        pulled,
        gradient,
        h - E * gradient - ratio * turn(bins.bent),
        h - E * pulled * turn(gaps),
        E * pulled,
        K,
        turn(bins.p - sums.c),
        square(sums.hh) - CK - xp.swapaxes(CK, 1, 2) + KSK,
        turn(sums.Eh) - _times(K, turn(sums.EEs)),
    )


def _tail(bins: _Bins, view: _View, chosen: Array) -> Tail:
    """One Newton step from x with the chosen bins."""
    xp = bins.xp
    Q, D = view.Q, xp.sum(_kept(chosen, view.D), 0)
    move, straight = (-xp.sum(_kept(chosen, each), 0) / D for each in (view.residual, view.linear))
    residuals = _kept(chosen, _residuals(bins, view, move))
    V = _sum("ji,bik->bjk", Q / D, residuals)
    v = xp.sum(V * (Q / D), axis=2)
    df = xp.sum(v, 0) ** 2 / xp.sum(v**2 / xp.maximum(bins.counts.n, 1)[:, None], 0)
    return Tail(_times(Q, move), D, _times(Q, straight - move), v, df)


def _residuals(bins: _Bins, view: _View, move: Array) -> Array:
    """Σ r rᵀ of each bin, r = h − E [R_b ∇F(p_b) + K_b (x̄ − p_b)], after a move of x."""
    gap = view.gradient - view.pulled * move - _times(view.K, view.place)
    outer = view.lever[:, :, None] * gap[:, None, :]
    square = bins.counts.EE[:, None, None] * gap[:, :, None] * gap[:, None, :]
    return view.spread - outer - outer.swapaxes(1, 2) + square


def _covariance(bins: _Bins, view: _View, tail: Tail, chosen: Array) -> Array:
    residuals = _residuals(bins, view, _times(view.Q.T, tail.move))
    middle, left = _kept(chosen, residuals).sum(0), view.Q / tail.D
    return _sum("ji,ik,lk->jl", left, middle, left)
