"""From bins of rounds to x̂ and its covariance: `one_step(gradients="increments")`.

What is streamed is in `binned_rounds`, with the reason why one Newton step would do for a quadratic loss, a known
Hessian and short steps. What is computed here is more than that: three Newton steps, the last over a tail of the
run that is chosen by the length of its intervals; a Hessian that is extrapolated to x* by a ridge regression; an
allowance of 0.15 |κ| for what curvature may have left; Satterthwaite's degrees of freedom. The constants (0.15, three
steps, shares ½, ¾ and 0.97 of the observations, bins by factors of two, the ridge) were chosen by looking at
coverage and length in simulations, and follow from no theorem.

With p_b, G_b the means of place and Hessian over the rounds of bin b, and the Hessian as a linear function of its
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
_FACTORED = 32  # d from which the slope is kept in factors on the host
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

    xp: Any  # NumPy, or JAX's
    sums: Sums
    counts: Counts
    p: Array  # (bins, d) mean place
    G: Array  # (bins, d, d) mean Hessian
    bent: Array  # (bins, d) Σ E (H − G_b)(x̄ − p_b)/2
    used: Array  # (bins,) bool
    after: Array  # (bins,) observations from each bin on
    unit: Array  # () the 1 of `sums.product`


class _Factored(NamedTuple):
    """A slope Σ_b left_b ⊗ right_b. On the host, with many columns, d³ numbers are neither stored nor summed."""

    left: Array  # (bins, d, d)
    right: Array  # (bins, d)


class _Hessians(NamedTuple):
    """H(x) = G + slope [x − at]."""

    G: Array  # (d, d)
    at: Array  # (d,)
    slope: Array | _Factored  # (d, d, d)

    def bent(self, v: Array) -> Array:
        """Return slope v, (d, d) for (d,), and (bins, d, d) for (bins, d)."""
        if isinstance(self.slope, _Factored):
            return _einsum("...b,bij->...ij", v @ self.slope.right.T, self.slope.left)
        return times(self.slope, v if v.ndim == 1 else v[:, None, :])


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


@np.errstate(all="ignore")  # bins that nothing is in divide by 0, and are left out
def read(state: OneStepState, score: Score) -> Reading:
    """x̂ from the tail of bins with the lowest score."""
    bins, center = _bins(*_all_bins(state))
    xp = bins.xp
    near, wide = (_last_share(bins, share) for share in (_FOR_HESSIAN, _FOR_SLOPE))
    middle = xp.zeros_like(center)  # where the last bin began: an early explosion is far from it
    start = _Look(middle, _mean_hessian(bins, _from(bins, near))._replace(at=middle), near)

    def look(begin: _Look, number: Array) -> tuple[_Look, Reading]:
        return _look(bins, wide, score, begin, number == 0)

    # As a loop, because three looks would be compiled three times.
    last = _last_of(look, start, _LOOKS, xp)
    return last._replace(estimate=center + last.estimate)


def _look(
    bins: _Bins, wide: Array, score: Score, begin: _Look, first: Array
) -> tuple[_Look, Reading]:
    """A Newton step; the first look also finds where the path is calm, and how the Hessian changes."""
    xp, (x, hessians, near) = bins.xp, begin
    view = _view(bins, hessians, x)
    # All that is made of a view is made in this loop: a compiler would make the view again for each use outside.
    tails, scores = _each(lambda place: _scored(bins, view, score, place), xp)
    # Not `argmin`, which compares in bfloat16 on a TPU.
    pick = xp.min(xp.where(scores <= xp.min(scores), xp.arange(BINS), BINS - 1))
    near = xp.where(first, xp.maximum(near, pick), near)
    best, step = (jax.tree.map(lambda leaf: leaf[place], tails) for place in (pick, near))  # noqa: B023

    def learn() -> _Hessians:
        found = _mean_hessian(bins, _from(bins, near))
        return found._replace(slope=_slope(bins, _from(bins, wide), step.V))

    hessians = _either(first, learn, lambda: begin.hessians, xp)
    se = xp.sqrt(xp.diagonal(best.V))
    reading = Reading(
        x + best.move,
        best.V,
        best.df,
        best.curvature / xp.where(se > 0, se, 1),
        1 - bins.after[pick] / xp.maximum(bins.after[0], 1),
        view.floored,
    )
    return _Look(x + step.move, hessians, near), reading


def _scored(bins: _Bins, view: _View, score: Score, begin: Array) -> tuple[Tail, Array]:
    """The tail from a bin on and its score, which is infinite where the tail is too short."""
    xp = bins.xp

    def compute() -> tuple[Tail, Array]:
        found = _tail(bins, view, _from(bins, begin))
        value = score(found)
        return found, xp.where(xp.isnan(value), xp.inf, value)

    def skip() -> tuple[Tail, Array]:
        line = xp.zeros_like(view.Q[0])
        return Tail(line, xp.zeros_like(view.Q), line, line), xp.full_like(line[0], xp.inf)

    enough = bins.after[begin] >= _LEAST_TAIL * xp.maximum(bins.after[0], 1)
    return _either(bins.used[begin] & enough, compute, skip, xp)


def _last_of(look: Any, start: Any, count: int, xp: Any) -> Any:
    """What the last of some looks returned, each of which begins where the one before has ended."""
    if xp is jnp:
        _, found = lax.scan(look, start, xp.arange(count))
        return jax.tree.map(lambda leaf: leaf[-1], found)
    found = None
    for number in range(count):
        start, found = look(start, number)
    return found


def _each(one: Callable[[Any], Any], xp: Any) -> Any:
    """What a function makes of each bin, stacked."""
    if xp is jnp:
        return lax.map(one, xp.arange(BINS))
    return jax.tree.map(lambda *found: xp.stack(found), *map(one, range(BINS)))


def _either(flag: Any, yes: Callable[[], Any], no: Callable[[], Any], xp: Any) -> Any:
    if xp is jnp:
        return lax.cond(flag, yes, no)
    return yes() if flag else no()


def _einsum(how: str, *arrays: Array) -> Array:
    """Einstein's sums, at full precision."""
    xp = arrays[0].__array_namespace__()
    if xp is jnp:
        return xp.einsum(how, *arrays, precision=_HIGH)
    return xp.einsum(how, *arrays, optimize=len(arrays) > 2)


def _from(bins: _Bins, begin: Array) -> Array:
    """Those of the bins that are in the tail from one on, (bins,) bool."""
    xp = bins.xp
    return bins.used & (xp.arange(BINS) >= begin)


def _kept(chosen: Array, values: Array) -> Array:
    """Those of the chosen bins; what has exploded in another must not make a NaN of 0 · ∞."""
    xp = values.__array_namespace__()
    return xp.where(chosen.reshape(-1, *[1] * (values.ndim - 1)), values, 0)


def _all_bins(state: OneStepState) -> tuple[Sums, Counts]:
    """Closed bins and the open one, which joins the one before where it is a mere stub."""
    xp = state.x.__array_namespace__()
    clock: Clock = state.clock
    before = xp.maximum(clock.bin - 1, 0)
    stub = (clock.bin > 0) & (clock.now.E < _STUB * (xp.sum(clock.past.E) + clock.now.E))
    at = xp.where(stub, before, clock.bin)
    c = xp.where(stub, state.past.c[before], state.now.c)
    now = _measured_from(c, state.now, clock.now)
    place = xp.arange(BINS) == at

    def put(all_: Array, one: Array) -> Array:
        here = place.reshape(-1, *[1] * one.ndim)
        return xp.where(here, one + xp.where(stub, all_, 0), all_)

    joined = jax.tree.map(put, state.past, now)
    joined = joined._replace(c=xp.where(place[:, None], c, state.past.c))
    return joined, jax.tree.map(put, clock.past, clock.now)


def _measured_from(c: Array, sums: Sums, counts: Counts) -> Sums:
    """The sums of a bin as if it had begun at another place."""
    xp = c.__array_namespace__()
    d = sums.c - c
    outer = lambda u, v: u[:, None] * v[None, :]  # noqa: E731
    EEss = sums.EEss + outer(sums.EEs, d) + outer(d, sums.EEs) + counts.EE * outer(d, d)
    return sums._replace(
        c=c,
        Es=sums.Es + counts.E * d,
        known_Es=sums.known_Es + counts.known * d,
        EEs=sums.EEs + counts.EE * d,
        EHs=sums.EHs + xp.sum(sums.EH * d[None, :], axis=1),
        Ehs=sums.Ehs + outer(sums.Eh, d),
        EEss=EEss,
    )


def _bins(sums: Sums, counts: Counts) -> tuple[_Bins, Array]:
    """The bins measured from where the last began, and that place."""
    xp = sums.c.__array_namespace__()
    used = counts.n > 0
    center = sums.c[xp.max(xp.where(used, xp.arange(BINS), 0))]
    sums = sums._replace(c=sums.c - center)
    E, known = xp.maximum(counts.E, 1), xp.maximum(counts.known, 1)
    p = sums.c + sums.Es / E[:, None]
    G = (sums.EH + sums.EH.mT) / 2 / known[:, None, None]
    seen = counts.known > 0
    # A bin of one round has no Hessian: that of all others stands in.
    mean = xp.sum(_kept(seen, E[:, None, None] * G), 0) / xp.maximum(xp.sum(E * seen), 1)
    G = xp.where(seen[:, None, None], G, mean)
    bent = (sums.EHs - times(G, sums.known_Es)) * (E / known / 2)[:, None]
    after = xp.cumsum(counts.E[::-1])[::-1]
    unit = xp.where(after[0] >= 0, 1, after[0])
    return _Bins(xp, sums, counts, p, G, bent, used, after, unit), center


def _last_share(bins: _Bins, share: float) -> Array:
    """Where the fewest last bins with a share of the observations begin."""
    xp = bins.xp
    enough = bins.used & (bins.after >= share * bins.after[0])
    return xp.max(xp.where(enough, xp.arange(BINS), 0))


def _weights(bins: _Bins, chosen: Array) -> Array:
    xp = bins.xp
    E = xp.where(chosen, bins.counts.E, 0)
    return E / xp.maximum(xp.sum(E), 1)


def _mean_hessian(bins: _Bins, chosen: Array) -> _Hessians:
    xp = bins.xp
    weight = _weights(bins, chosen)
    G = xp.sum(_kept(chosen, weight[:, None, None] * bins.G), 0)
    at = xp.sum(_kept(chosen, weight[:, None] * bins.p), 0)
    if xp is not jnp and len(at) > _FACTORED:
        return _Hessians(G, at, _Factored(bins.G[:0], bins.p[:0]))
    return _Hessians(G, at, xp.zeros((*G.shape, at.shape[0]), G.dtype))


def _slope(bins: _Bins, chosen: Array, V: Array) -> Array | _Factored:
    """How the Hessian changes with its place, (d, d, d), by ridge regression over bins."""
    xp = bins.xp
    sizes = xp.sum(xp.abs(bins.G), (1, 2)) + xp.sum(bins.p * bins.p, 1)
    chosen = chosen & xp.isfinite(sizes)
    mean, weight = _mean_hessian(bins, chosen), _weights(bins, chosen)
    dp, dG = _kept(chosen, bins.p - mean.at), _kept(chosen, bins.G - mean.G)
    scatter = _einsum("b,bi,bj->ij", weight, dp, dp)
    values, Q, _ = _spectrum(scatter + xp.sum(chosen) * V)
    if xp is not jnp and len(values) > _FACTORED:
        return _Factored(dG, weight[:, None] * ((dp @ Q) / values) @ Q.T)
    crossed = _einsum("b,bij,bk->ijk", weight, dG, dp)
    return _einsum("ijk,kl,l,ml->ijm", crossed, Q, 1 / values, Q)


def _hessian_at(hessians: _Hessians, x: Array) -> Array:
    return hessians.G + hessians.bent(x - hessians.at)


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
    here, sums, gaps, unit = _hessian_at(hessians, x), bins.sums, bins.p - x, bins.unit
    values, Q, floored = _spectrum(here)
    pulled, E = _pulled(bins.counts, values), bins.counts.E[:, None]
    slopes = times(here + hessians.bent(gaps) / 2, gaps)
    rows = (slopes, gaps, bins.p - sums.c, bins.bent, sums.h, sums.Eh, sums.EEs)
    slope, gap, place, bent, h, Eh, EEs = (product(each, Q, unit) for each in rows)
    squares = (bins.G, sums.hh, sums.Ehs, sums.EEss)
    G, hh, Ehs, EEss = (product(Q.T, product(each, Q, unit), unit) for each in squares)
    ratio = pulled / values
    gradient = ratio * slope
    own = xp.eye(len(values), dtype=values.dtype) * (2 * pulled - values)[:, None, :]
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
    xp = bins.xp
    each = (bins.counts.E[:, None] * view.pulled, view.residual, view.linear)
    D, residual, linear = (xp.sum(_kept(chosen, one), 0) for one in each)
    left, move, straight = view.Q / D, -residual / D, -linear / D
    residuals = _kept(chosen, _residuals(bins, view, move)) / bins.unit
    half = product(left, residuals, bins.unit)
    v = xp.sum(half * left, axis=2)
    df = xp.sum(v, 0) ** 2 / xp.sum(v**2 / xp.maximum(bins.counts.n, 1)[:, None], 0)
    V = product(xp.sum(half, 0), left.T, bins.unit)
    return Tail(times(view.Q, move), V, times(view.Q, straight - move), df)


def _residuals(bins: _Bins, view: _View, move: Array) -> Array:
    """Σ r rᵀ of each bin, r = h − E [R_b ∇F(p_b) + K_b (x̄ − p_b)], after a move of x."""
    gap = view.gap - view.pulled * move
    # Not a product and its transpose, which would not be vectorised.
    half = bins.counts.EE[:, None] * gap / 2 - view.lever
    return view.spread + half[:, :, None] * gap[:, None, :] + gap[:, :, None] * half[:, None, :]
