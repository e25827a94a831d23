"""What the sums at anchors say: the next anchor, the estimate and its covariance.

With G_b the mean Hessian at anchor b, D_b the mean of H(a_b) − H(a_{b−1}), and L the last bin, Δ_b = Σ_{c>b} D_c carries
a Hessian from anchor b to the last one. Bins with ‖Δ_b‖ < ½ ‖G_L‖ count. With ḡ_b = Σh/ΣE and

    Ĝ = the mean of all G_b + Δ_b, by observations       Ḡ_b = Ĝ − ½ Δ_b  (the trapezoid between the two anchors)
    w_b = 1/(1 + C_b + Φ_b)                              t_b = ΣE,  A = Σ_b w_b t_b Ḡ_b

where C_b and Φ_b are the squares, in variances of bin b, of what curvature and the noise of Ĝ do to it,

    x̂ = A⁻¹ Σ_b w_b t_b (Ḡ_b a_b − ḡ_b)
    V = A⁻¹ [Σ_b w_b² Σ_{m∈b} r_m r_mᵀ] A⁻ᵀ n/(n − 1) + the noise of Ĝ times Σ_b w_b t_b (a_b − x̂),   r_m = h_m − E_m Ḡ_b (a_b − x̂).

V is too large on average, because Ĝ⁻¹ is not linear in Ĝ: that is removed to first order. Student's t has the degrees of
freedom of V, from the noise of Ĝ and of the sum of squares, by Satterthwaite.

Ĝ is the Hessian at the last anchor and not at x̂. What it still changes up to there, D_L |x̂ − a_L|/|a_L − a_(L−1)| in
the norm of Ĝ, counts as one more error of Ĝ, in V and in the degrees of freedom.

The next anchor is a_L + y/(1 + θ) with y = x̂ − a_L; or the optimiser's own average, as long as Hessians are few. θ is
half the relative change of the Hessian over the step, as the last move m shows it. With norms and products in Ĝ,
s² = tr((Ĝ⁻¹D)²), p = ⟨y, m⟩/|m|², q² = (|y|/|m|)² − p² and τ = p yᵀDy/|y|²,

    θ = ½ (max(τ, −1) + s q)   if τ < 0 and |y| ≤ |m|: the Hessian falls along the step, and Newton's is too short
    θ = ½ s |y|/|m|            otherwise

No interval is reported if Ĝ is not definite, if its change at the last anchor is not known, or if the bin before the
last one weighs less than a fifth: see `Reason`.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxlsgd.core.problem import Array

CARRY = 0.5  # a bin counts if its Hessian changed by less than this share up to the last anchor
ENOUGH = 10.0  # observations per parameter in the Hessians before they make an anchor
CONVERGED = 0.2  # least weight of the bin before the last
DEFINITE = 1e-5  # least pivot of a Hessian over its diagonal entry, whatever the units: float32 knows it to a few per cent
TINY = 1e-30


class Reason(enum.IntEnum):
    """Why there is no interval."""

    NONE = 0  # there is one
    SHORT = 1  # fewer than two bins
    NO_HESSIANS = 2  # at the last anchor
    SINGULAR = 3  # the mean Hessian, or nearly
    CHANGING = 4  # the Hessian, between the last two anchors
    NOISY = 5  # the mean Hessian
    NOT_FINITE = 6  # sums of gradients or a variance, or one that is 0
    DIVERGED = 7  # the optimiser


class Bins(NamedTuple):
    """Sums over the rounds of a bin; of several bins with a leading axis, the last one last."""

    a: Array  # (d,) anchor
    move: Array  # (d,) from the anchor before
    h: Array  # (d,) Σ h
    Eh: Array  # (d,) Σ E h
    hh: Array  # (d, d) Σ h hᵀ
    H: Array  # (2, d, d) Σ H at the anchor, in two groups
    D: Array  # (d, d) Σ of their differences from those at the anchor before


class Counts(NamedTuple):
    """What the rounds of a bin have in common for all replications."""

    n: Array  # () rounds
    E: Array  # () Σ E
    EE: Array  # () Σ E²
    seen: Array  # (2,) observations of `Bins.H`, of all clients


class Reading(NamedTuple):
    """What all bins say together."""

    estimate: Array  # (d,)
    V: Array  # (d, d)
    df: Array  # (d,)
    reason: Array  # () why there is no interval, a `Reason`
    ahead: Array  # () largest share of a variance that is for how the Hessian changes from the last anchor to x̂
    used: Array  # () Σ w t over Σ t
    gap: Array  # () the last bin against those before, F(d, rounds − d) if they agree
    rounds: Array  # () in effect


class _Fit(NamedTuple):
    """What the bins are made of, seen from the last anchor."""

    fine: Array  # (B,)
    r: Array  # (B, d) a_b − x̂
    G: Array
    inverse: Array
    dG: Array  # (2B, d, d) the squares of these add up to Ĝ's variance
    effective: Array  # () Hessians in effect
    seen: Array  # () observations in Ĝ
    D: Array  # (d, d) of the last bin
    known: Array  # () whether it is known
    gradient: Array  # (B, d) ḡ
    between: Array  # (B, d, d) Ḡ
    weight: Array  # (B,) w
    noisy: Array  # (B,) whether w is small by the noise of Ĝ, and not by curvature
    Ai: Array  # (d, d) (Σ w t Ḡ)⁻¹
    y: Array  # (d,) x̂ − a_L
    proper: Array  # () bool


def next_anchor(bins: Bins, counts: Counts, path: Array) -> Array:
    """Return the anchor that follows the last bin; `path` is the optimiser's own average."""
    xp = path.__array_namespace__()
    f = _fit(bins, counts)
    a, move = bins.a[-1], bins.move[-1]
    x = a + f.y / (1 + _bend(f, f.y, move))
    newton = f.proper & (f.seen >= ENOUGH * a.shape[0]) & xp.all(xp.isfinite(x))
    return xp.where(newton, x, xp.where(f.fine[-1], path, a - move))


def read(bins: Bins, counts: Counts) -> Reading:
    """Return the estimate of all bins, its covariance, and whether both can be trusted."""
    xp = bins.a.__array_namespace__()
    f = _fit(bins, counts)
    u, t = f.weight, xp.where(f.fine, counts.E, 0)
    ut = u * t
    total = xp.sum(ut)
    due = times(f.between, f.r)  # the gradients that the bins should have
    residual = _residual_squares(bins, counts, due, f.fine)
    n = over(total**2, xp.sum(u**2 * counts.EE))
    M = xp.sum((u**2)[:, None, None] * residual, 0) / xp.maximum(1 - 1 / xp.maximum(n, 1), 0.1)
    Ai = f.Ai
    V = product(product(Ai, M), Ai.T)
    v = xp.diagonal(V)
    correction = xp.sum(ut[:, None] * f.r, 0)
    length, far = _norm(f.G, bins.move[-1]), _norm(f.G, f.y)
    ahead = f.D * over(far, length)
    dG = xp.concatenate([f.dG, ahead[None]])
    z = times(product(Ai, dG), correction)  # (2B + 1, d) the errors of Ĝ times the correction
    noise = xp.sum(z[:, :, None] * z[:, None, :], 0)
    P = product(total * Ai, dG)  # relative errors of Ĝ
    PV = product(P, V)
    up = xp.sum((P * (2 * PV.mT + PV))[:-1], (0, 2))
    shrink = over(v, v + up)
    variance = shrink * v + xp.diagonal(noise)
    # Shares, which have no units: squares of small variances would vanish.
    by_noise = over(xp.diagonal(noise), variance)
    spread = 4 * xp.sum(over(xp.diagonal(PV, axis1=1, axis2=2), v) ** 2, 0) + 2 / xp.maximum(n, 1)
    lost = 2 * by_noise**2 / xp.maximum(f.effective - 1, 1)
    df = over(2.0, (1 - by_noise) ** 2 * spread + lost)
    scale = xp.sqrt(shrink)
    V = scale[:, None] * V * scale[None, :] + noise
    se = xp.sqrt(xp.maximum(variance, 0))
    x = bins.a[-1] + f.y
    finite = xp.all(xp.isfinite(x)) & xp.all(xp.isfinite(V)) & xp.all(se > 0)
    weak = xp.where(f.noisy[-2], Reason.NOISY, Reason.CHANGING)
    weak = xp.where(f.fine[-2], weak, Reason.NOT_FINITE)
    reason = xp.where(u[-2] < CONVERGED, weak, Reason.NONE)
    reason = xp.where((length > 0) | (far == 0), reason, Reason.CHANGING)
    reason = xp.where(finite, reason, Reason.NOT_FINITE)
    reason = xp.where(f.proper | ~f.fine[-1], reason, Reason.SINGULAR)
    known = f.known & (xp.sum(counts.seen[-1]) > 0)
    reason = xp.where(known, reason, Reason.NO_HESSIANS)
    reason = xp.where((counts.E[-2] > 0) & (counts.E[-1] > 0), reason, Reason.SHORT)
    share = xp.max(over(z[-1] ** 2, variance))
    used = over(total, xp.sum(counts.E))
    gap = _gap(f, dG, M, u, t, due, n)
    return Reading(x, V, xp.clip(df, 1, 1e6), reason, share, used, gap, n)


def _fit(bins: Bins, counts: Counts) -> _Fit:
    xp = bins.a.__array_namespace__()
    d, total = bins.a.shape[-1], xp.sum(counts.seen, -1)
    finite = xp.all(xp.isfinite(bins.h), -1) & xp.all(xp.isfinite(bins.hh), (-1, -2))
    fine = (counts.E > 0) & finite & xp.all(xp.isfinite(bins.a), -1)
    known = xp.all(xp.isfinite(bins.D), (-1, -2)) & (total > 0)
    D = xp.where(known[:, None, None], bins.D / xp.maximum(total, 1)[:, None, None], 0)
    delta = _later(D)
    whole = _later(xp.where((counts.E > 0) & ~known, 1.0, 0.0)) == 0
    H = bins.H / xp.maximum(counts.seen, 1)[..., None, None]
    w = xp.where(fine[:, None] & xp.all(xp.isfinite(H), (-1, -2)), counts.seen, 0)
    H = xp.where((w > 0)[..., None, None], H, 0)
    own = xp.sum(w[-1][:, None, None] * H[-1], 0) / xp.maximum(xp.sum(w[-1]), 1)
    # Sizes are in units of the parameters' own curvature.
    all_w = w.reshape(-1)[:, None]
    unit = over(xp.sum(all_w * xp.diagonal(H, axis1=-2, axis2=-1).reshape(-1, d), 0), xp.sum(w))
    unit = 1 / xp.sqrt(xp.maximum(xp.abs(unit), TINY))
    unit = unit[:, None] * unit[None, :]
    near = fine & whole & (_size(unit * delta) < CARRY * _size(unit * own))
    w = (w * near[:, None]).reshape(-1)
    share = over(w, xp.sum(w))
    H = (H + delta[:, None]).reshape(-1, d, d)
    H = xp.where((w > 0)[:, None, None], H, 0)
    G = xp.sum(share[:, None, None] * H, 0)
    G = (G + G.T) / 2
    inverse, pivot = inverted(G)
    proper = fine[-1] & (pivot > DEFINITE)
    identity = xp.eye(d, dtype=G.dtype)
    G, inverse = xp.where(proper, G, identity), xp.where(proper, inverse, identity)
    effective = over(1.0, xp.sum(share**2))
    few = xp.sqrt(xp.maximum(1 - 1 / xp.maximum(effective, 1), 0.1))
    dG = xp.where((w > 0)[:, None, None], (share / few)[:, None, None] * (H - G), 0)

    def kept(x: Array) -> Array:
        return xp.where(fine.reshape(-1, *[1] * (x.ndim - 1)), x, 0)

    a, t = kept(bins.a - bins.a[-1]), kept(counts.E)
    g = kept(bins.h) / xp.maximum(t, 1)[:, None]
    between = G - 0.5 * delta
    square = _residual_squares(bins, counts, g, fine)[-1]
    spread = d * (counts.E[-1] - over(counts.EE[-1], counts.E[-1]))
    sigma = xp.maximum(over(xp.sum(inverse * square), spread), TINY)
    y, u, Ai, by_noise = -times(inverse, g[-1]), near * 1.0, inverse, near
    relative = product(inverse, dG)
    noise = xp.sum(relative * relative.mT)  # of Ĝ, as a share of it
    last = xp.arange(len(t)) == len(t) - 1
    for _ in range(2):
        r = a - y
        c = 0.5 * times(delta, r)
        bent = xp.sum(c * times(inverse, c), -1)
        noisy = noise * xp.sum(r * times(G, r), -1) / d**2
        u = xp.where(last, fine, near / (1 + t * (bent + noisy) / sigma))
        by_noise = near & (noisy > bent)
        A = xp.where(proper, xp.sum((u * t)[:, None, None] * between, 0), identity)
        Ai = inverted(A)[0]
        y = times(Ai, xp.sum((u * t)[:, None] * (times(between, a) - g), 0))
    return _Fit(
        fine,
        a - y,
        G,
        inverse,
        dG,
        effective,
        xp.sum(w),
        D[-1],
        known[-1],
        g,
        between,
        u,
        by_noise,
        Ai,
        y,
        proper,
    )


def _later(x: Array) -> Array:
    """Sum over later bins."""
    xp = x.__array_namespace__()
    return xp.cumsum(x[::-1], 0)[::-1] - x


def _residual_squares(bins: Bins, counts: Counts, gradient: Array, fine: Array) -> Array:
    """(B, d, d) Σ (h − E g)(h − E g)ᵀ over the rounds of each bin."""
    xp = gradient.__array_namespace__()
    cross = bins.Eh[:, :, None] * gradient[:, None, :]
    square = counts.EE[:, None, None] * (gradient[:, :, None] * gradient[:, None, :])
    return xp.where(fine[:, None, None], bins.hh - cross - cross.mT + square, 0)


def _bend(f: _Fit, y: Array, move: Array) -> Array:
    """Return θ: half the relative change of the Hessian over the step y, as the last move shows it; 1 if unknown."""
    xp = y.__array_namespace__()
    relative = product(f.inverse, f.D)
    size = xp.sqrt(xp.maximum(xp.sum(relative * relative.T), 0))
    far, length = _norm(f.G, y), _norm(f.G, move)
    ratio = over(far, length)
    along = over(xp.sum(y * times(f.G, move)), length**2)
    across = xp.sqrt(xp.maximum(ratio**2 - along**2, 0))
    turn = along * over(xp.sum(y * times(f.D, y)), far**2)
    signed = 0.5 * (xp.maximum(turn, -1) + size * across)
    theta = xp.where((turn < 0) & (far <= length), signed, 0.5 * size * ratio)
    return xp.where(f.known & (length > 0), theta, 1.0)


def _gap(f: _Fit, dG: Array, M: Array, u: Array, t: Array, due: Array, n: Array) -> Array:
    """The zero of the last bin against that of the bins before it: F(d, n − d) if they agree."""
    xp = M.__array_namespace__()
    d = f.y.shape[0]
    e = u * t * (xp.arange(len(t)) < len(t) - 1)
    rest = xp.sum(e)
    off = f.gradient - due
    gap = over(xp.sum(e[:, None] * off, 0), rest) - off[-1]
    size = over(1.0, t[-1]) + over(xp.sum(u * e), rest**2)
    S = over(M, xp.sum(u**2 * t)) * size
    z = times(dG, over(xp.sum(e[:, None] * f.r, 0), rest) - f.r[-1])
    S = S + xp.sum(z[:, :, None] * z[:, None, :], 0)
    usable = f.proper & (rest > 0) & xp.all(xp.isfinite(S))
    S = xp.where(usable, S, xp.eye(d, dtype=S.dtype))
    q = xp.sum(gap * times(inverted(S)[0], gap))
    found = q * xp.maximum(n - d, 1) / (d * xp.maximum(n - 1, 1))
    return xp.where(usable, xp.maximum(found, 0), 0)


def over(x: Any, y: Any) -> Any:
    """Return x/y, or something large if y is 0."""
    return x / (jnp if isinstance(y, jax.Array) else np).maximum(y, TINY)


def _norm(G: Array, v: Array) -> Array:
    xp = v.__array_namespace__()
    return xp.sqrt(xp.maximum(xp.sum(v * times(G, v)), 0))


def _size(x: Array) -> Array:
    xp = x.__array_namespace__()
    return xp.sqrt(xp.sum(x**2, (-1, -2)))


# Under vmap, a sum over an axis, a product of matrices and a factorisation are not vectorised over replications on a
# CPU; those of few columns are written out.
_FEW = 8


def times(M: Array, v: Array) -> Array:
    """Return M v, (..., n, d) by (..., d)."""
    d = v.shape[-1]
    if d > _FEW:
        return v.__array_namespace__().sum(M * v[..., None, :], -1)
    return sum((M[..., j] * v[..., None, j] for j in range(1, d)), M[..., 0] * v[..., None, 0])


def product(A: Array, B: Array) -> Array:
    """Return A B, (..., n, d) by (..., d, k)."""
    d = B.shape[-2]
    if isinstance(B, np.ndarray):
        return A @ B
    if d > _FEW:
        return jnp.matmul(A, B, precision=lax.Precision.HIGHEST)
    term = lambda j: A[..., :, j, None] * B[..., None, j, :]  # noqa: E731
    return sum((term(j) for j in range(1, d)), term(0))


def inverted(S: Array) -> tuple[Array, Array]:
    """Return the inverse of a symmetric matrix, and its least pivot over its diagonal entry: positive if definite."""
    d, xp = S.shape[-1], S.__array_namespace__()
    diagonal = xp.maximum(xp.diagonal(S), TINY)

    def entry(v: Array, k: Any) -> Array:
        return xp.sum(xp.where(xp.arange(d) == k, v, 0)) if d > _FEW else v[k]

    # Sweep out one coordinate after the other, which leaves −S⁻¹. LAPACK's factorisations can wait for ever if two
    # devices of a CPU are in them at once.
    def sweep(k: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        S, least = carry
        at = xp.arange(d) == k
        column = xp.sum(xp.where(at[None, :], S, 0), -1) if d > _FEW else S[:, k]
        pivot = entry(column, k)
        row = column / pivot
        swept = S - column[:, None] * row[None, :]
        swept = xp.where(at[:, None], row[None, :], xp.where(at[None, :], row[:, None], swept))
        swept = xp.where(at[:, None] & at[None, :], -1 / pivot, swept)
        return swept, xp.minimum(least, pivot / entry(diagonal, k))

    carry = S, xp.ones_like(S[0, 0])
    if d > _FEW and xp is jnp:
        carry = lax.fori_loop(0, d, sweep, carry)
    else:
        for k in range(d):
            carry = sweep(k, carry)
    return -carry[0], carry[1]
