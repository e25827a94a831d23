"""From bins of rounds to x̂ and its covariance: `one_step(gradients="increments")`.

What is streamed is in `binned_rounds`. Of bin b there are the mean place p_b, the mean gradient ḡ_b = Σh/ΣE, and around
them A_b = ΣE(x̄ − p)(x̄ − p)ᵀ, C_b = Σ(h − Eḡ)(x̄ − p)ᵀ and Σ(h − Eḡ)(h − Eḡ)ᵀ/E. Local steps pull by less than the
gradient where they begin, because a client has moved already: by r_b = [1 − (1 − ηλ)^E]/(Eηλ) with the mean E and η of the
bin and λ = tr G/d. With weights w_b, t₂ = Σ w r² t, means x̃ = Σ w r² t p/t₂ and h̃ = Σ w r t ḡ/t₂, and

    A = Σ w r² [A_b + t_b (p_b − x̃)(p_b − x̃)ᵀ],     C = Σ w r [C_b + t_b ḡ_b (p_b − x̃)ᵀ]

the path tells G by regression: with W Wᵀ = S, the covariance of a gradient, and WᵀAW = diag(a), the symmetric matrix
Γ = W⁻¹GW⁻ᵀ has the elements (C′_ij + C′_ji)/(a_i + a_j), C′ = W⁻¹CW, of variance (1 + δ_ij)/(a_i + a_j). Hessians in the same
basis have elements of variance φ(1 + δ_ij), with φ from how their groups differ; both are averaged by precision, π_ij. Then

    x̂ = x̃ − G⁻¹h̃
    V = W⁻ᵀΓ⁻¹ [M/t₂² + 𝒱(μ)] Γ⁻¹W⁻¹,     M = W⁻¹ (Σ w²r² (t_b/n_b) Σ_{m∈b} r_m r_mᵀ/E_m) W⁻ᵀ,     r_m = h_m − E_m r_b G (x̄_{m−1} − x̂)

with 𝒱(μ), the covariance of the error of Γ times the correction μ = Γ⁻¹W⁻¹h̃. Student's t has degrees of freedom from what
the error of Γ does to V, and from the number of rounds. S, w, r and G are found in three looks. A bin whose residuals are too
large has the weight that its variance asks for; bins up to the last whose mean gradient is far from 0 are left out, if half of
the observations remain.

An interval is withheld if the path has not arrived: if the correction is `FAR` standard errors or more (root mean square),
a Newton step is not to be trusted of a loss that may be curved. It is also withheld if Γ is not known well enough. Without
Hessians that is so if ℓ = λΣη_mE_m/max(d + 3, 8) is below `TOLD`: regression makes λΣη_mE_m too large by about d + 3; above
it, V is divided by 1 − 1/ℓ².

`FAR`, `TOLD`, 1 − 1/ℓ², the least degrees of freedom, the mean over coordinates below which no one's error of Γ goes, and the
rule for bins were chosen by looking at simulations, and follow from no theorem.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxlsgd.core.problem import Array
from jaxlsgd.inference.anchored_step import TINY, inverted, over, product, times
from jaxlsgd.inference.binned_rounds import OneStepState, all_bins

FAR = 6.0  # standard errors
TOLD = 1.5
LEAST_DF, FLOOR_DF = 1.0, 4.0
LEAST_TAIL = 0.5  # share of the observations
_LOOKS = 3
_SWEEPS = 9


class Reading(NamedTuple):
    """x̂, what its interval is made of, and why it is withheld if it is."""

    estimate: Array  # (d,)
    V: Array  # (d, d)
    df: Array  # (d,)
    used: Array  # () share of the observations
    far: Array  # () length of the correction in standard errors, root mean square
    known: Array  # () bool: the Hessian is known well enough
    withheld: Array  # () bool


class _Bins(NamedTuple):
    """The bins, measured from where the last began."""

    n: Array  # (bins,)
    t: Array  # (bins,)
    gamma: Array  # (bins,)
    p: Array  # (bins, d)
    g: Array  # (bins, d)
    A: Array  # (bins, d, d)
    C: Array  # (bins, d, d)
    hh: Array  # (bins, d, d)
    H: Array  # (2 bins, d, d) mean Hessians
    seen: Array  # (2 bins,)


class _Fit(NamedTuple):
    """One look."""

    t2: Array
    Wi: Array  # W⁻¹
    inverse: Array  # Γ⁻¹
    mu: Array  # Γ⁻¹W⁻¹h̃
    x: Array
    G: Array
    precision: Array  # (d, d) π
    proper: Array  # () bool


@np.errstate(all="ignore")  # bins that nothing is in divide by 0, and are left out
def read(state: OneStepState) -> Reading:
    """Return x̂, its covariance, and whether both can be trusted."""
    xp = state.x.__array_namespace__()
    b, center = _bins(state, xp)
    d, total = center.shape[0], xp.sum(b.t)
    after = xp.cumsum(b.t[::-1])[::-1]
    rest = after - b.t
    late = (b.t > 0) & (rest < LEAST_TAIL * total)
    rounds = xp.sum(xp.where(late, b.n - 1, 0))
    S = xp.sum(_kept(late, b.hh), 0) / xp.maximum(rounds, 1)
    z = _norms(b.g, inverted(S)[0]) * b.t
    hot = ((z > d + 4 * (2 * d) ** 0.5) | ~xp.isfinite(z)) & (rest >= LEAST_TAIL * total)
    used = (b.t > 0) & (xp.cumsum(hot[::-1])[::-1] == 0)
    one = xp.ones_like(b.t)

    def look(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        S, w, r = carry
        fit = _fit(b, used, S, w, r)
        r = _pull(b, xp.trace(fit.G) / d)
        squares = _residual_squares(b, fit, r)
        ratio = xp.sum(product(fit.Wi.T, fit.Wi) * squares, (-1, -2)) / xp.maximum(b.n * d, 1)
        loud = ratio > 1 + 3 * (2 / xp.maximum(b.n * d, 1)) ** 0.5
        w = xp.where(loud, 1 / xp.maximum(ratio, 1), 1).astype(b.t.dtype)
        rounds = xp.sum(xp.where(used, w * b.n, 0))
        S = xp.sum(_kept(used, w[:, None, None] * squares), 0) / xp.maximum(rounds - 2, 1)
        return S, w, r

    S, w, r = _repeat(look, (S, one, one), _LOOKS - 1, xp)
    fit = _fit(b, used, S, w, r)
    return _reading(b, used, fit, w, r, center, total)


def _reading(
    b: _Bins, used: Array, fit: _Fit, w: Array, r: Array, center: Array, total: Array
) -> Reading:
    xp, d = center.__array_namespace__(), center.shape[0]
    squares = _kept(
        used,
        ((w * r) ** 2 * b.t / xp.maximum(b.n, 1))[:, None, None] * _residual_squares(b, fit, r),
    )
    rounds = xp.sum(xp.where(used, b.n, 0))
    M = product(product(fit.Wi, xp.sum(squares, 0)), fit.Wi.T) * (
        rounds / xp.maximum(rounds - 2, 1)
    )
    left = product(fit.Wi.T, fit.inverse)  # rows v_j
    half = product(left, M)
    v = xp.sum(half * left, -1)
    noise = _error_times(fit.mu[None], fit.precision)[0]
    V = product(product(left, M / fit.t2**2 + noise), left.T)
    # What the error Δ of Γ does to v: −2 zᵀΔv_j with z = Γ⁻¹Mv_j.
    z = product(half, fit.inverse)
    error = xp.sum(left[:, :, None] * _error_times(z, fit.precision) * left[:, None, :], (-1, -2))
    error = over(error, v**2)
    error = xp.maximum(error, xp.mean(error))
    from_G = 1 / xp.maximum(2 * error, 1e-6)
    df = 1 / (1 / xp.maximum(from_G, FLOOR_DF) + 1 / xp.maximum(rounds - d, 1))
    t = xp.where(used, b.t, 0)
    mean = xp.sum(_kept(used, b.t[:, None] * b.g), 0) / xp.sum(t)
    far = xp.sqrt(xp.sum(t) * xp.sum(times(fit.Wi, mean) ** 2) / d)
    lasted = xp.trace(fit.G) / d * xp.sum(xp.where(used, b.gamma, 0)) / max(d + 3, 8)
    alone = xp.sum(xp.where(xp.concatenate([used, used]), b.seen, 0)) < 2
    V = xp.where(alone, V / xp.maximum(1 - 1 / lasted**2, TINY), V)
    told = ~alone | (lasted > TOLD)
    known = fit.proper & told & xp.all(from_G > LEAST_DF)
    good = known & (far < FAR) & (rounds > d + 2)
    good = good & xp.all(xp.isfinite(V)) & xp.all(xp.isfinite(fit.x)) & xp.all(xp.diagonal(V) > 0)
    return Reading(center + fit.x, V, df, xp.sum(t) / xp.maximum(total, 1), far, known, ~good)


def _bins(state: OneStepState, xp: Any) -> tuple[_Bins, Array]:
    sums, counts = all_bins(state, xp)
    sizes = sum(xp.sum(xp.abs(x), tuple(range(1, x.ndim))) for x in sums)
    center, fine = state.x, (counts.n > 0) & xp.isfinite(sizes)
    n, t, gamma, seen = (xp.where(fine.reshape(-1, *[1] * (x.ndim - 1)), x, 0) for x in counts)
    c, h, Es, hs, Ess, hh, H = (_kept(fine, x) for x in sums)
    many = xp.maximum(t, 1)[:, None]
    mean, g = Es / many, h / many
    outer = lambda u, v: u[:, :, None] * v[:, None, :]  # noqa: E731
    A, C, hh = Ess - outer(Es, mean), hs - outer(h, mean), hh - outer(h, g)
    p = _kept(fine, c - center + mean)
    H = H / xp.maximum(seen, 1)[:, :, None, None]
    H, seen = xp.concatenate([H[:, 0], H[:, 1]]), xp.concatenate([seen[:, 0], seen[:, 1]])
    return _Bins(n, t, gamma, p, g, A, C, hh, (H + H.mT) / 2, seen), center


def _fit(b: _Bins, used: Array, S: Array, w: Array, r: Array) -> _Fit:
    xp, d = S.__array_namespace__(), S.shape[0]
    w1, w2 = xp.where(used, w * r, 0), xp.where(used, w * r * r, 0)
    t2 = xp.maximum(xp.sum(w2 * b.t), TINY)
    x = xp.sum(_kept(used, (w2 * b.t)[:, None] * b.p), 0) / t2
    h = xp.sum(_kept(used, (w1 * b.t)[:, None] * b.g), 0) / t2
    off, tg = _kept(used, b.p - x), (w1 * b.t)[:, None] * _kept(used, b.g)
    A = xp.sum(_kept(used, w2[:, None, None] * b.A), 0) + product(
        ((w2 * b.t)[:, None] * off).T, off
    )
    C = xp.sum(_kept(used, w1[:, None, None] * b.C), 0) + product(tg.T, off)
    L, Li = _triangle(S)
    a, Q = _eigen(product(product(L.T, A), L))
    a = xp.maximum(a, 1e-6 * xp.max(a) + TINY)
    W, Wi = product(L, Q), product(Q.T, Li)
    twice = 1 + xp.eye(d, dtype=S.dtype)
    precision = (a[:, None] + a[None, :]) / twice
    C = product(product(Wi, C), W)
    evidence = (C + C.T) / twice
    # How the groups of Hessians differ says how well their mean is known.
    seen = xp.where(xp.concatenate([used, used]), b.seen, 0)
    many, groups = xp.sum(seen), xp.sum(xp.where(seen > 0, 1, 0))
    H = product(product(Wi, b.H), Wi.T)
    mean = xp.sum(_kept(seen > 0, seen[:, None, None] * H), 0) / xp.maximum(many, 1)
    spread = xp.sum(seen * xp.sum((H - mean) ** 2, (-1, -2)))
    phi = spread / xp.maximum(groups - 1, 1) / (d * (d + 1) * xp.maximum(many, 1))
    from_H = xp.where(groups > 1, 1 / (xp.maximum(phi, TINY) * twice), 0)
    precision, evidence = precision + from_H, evidence + from_H * mean
    inner = evidence / precision
    size = xp.maximum(xp.trace(inner) / d, TINY)
    inverse, pivot = inverted(inner)
    proper = pivot > 1e-6
    plain = xp.maximum(xp.diagonal(inner), 0.05 * size)
    identity = xp.eye(d, dtype=S.dtype)
    inner = xp.where(proper, inner, identity * plain)
    inverse = xp.where(proper, inverse, identity / plain)
    mu = times(inverse, times(Wi, h))
    G = product(product(W, inner), W.T)
    return _Fit(t2, Wi, inverse, mu, x - times(Wi.T, mu), G, precision, proper)


def _residual_squares(b: _Bins, fit: _Fit, r: Array) -> Array:
    """Return Σ r_m r_mᵀ/E_m of each bin, r_m = h_m − E_m r_b G (x̄ − x̂)."""
    off = b.g - r[:, None] * times(fit.G, b.p - fit.x)
    cross = r[:, None, None] * product(fit.G, b.C.mT)
    bent = (r**2)[:, None, None] * product(product(fit.G, b.A), fit.G)
    return b.hh + b.t[:, None, None] * off[:, :, None] * off[:, None, :] - cross - cross.mT + bent


def _pull(b: _Bins, value: Array) -> Array:
    """Return r_b at an eigenvalue."""
    xp = b.t.__array_namespace__()
    E = b.t / xp.maximum(b.n, 1)
    step = xp.clip(value * b.gamma / xp.maximum(b.t, 1), 1e-6, 0.999)
    return xp.where(b.t > 0, -xp.expm1(E * xp.log1p(-step)) / xp.maximum(E * step, TINY), 1)


def _error_times(z: Array, precision: Array) -> Array:
    """Return the covariances of Δz, (n, d, d), for vectors z, (n, d), and a symmetric Δ of elements that vary by 1/π."""
    xp = z.__array_namespace__()
    across = z[:, :, None] * z[:, None, :] / precision
    identity = xp.eye(z.shape[1], dtype=z.dtype)
    own = times(1 / precision, z**2)  # Σ_j z_j²/π_ij
    return across * (1 - identity) + identity * own[:, None, :]


def _norms(v: Array, M: Array) -> Array:
    xp = v.__array_namespace__()
    return xp.sum(v * times(M, v), -1)


def _kept(chosen: Array, values: Array) -> Array:
    """Return those of the chosen bins; what has exploded in another must not make a NaN of 0 · ∞."""
    xp = values.__array_namespace__()
    return xp.where(chosen.reshape(-1, *[1] * (values.ndim - 1)), values, 0)


def _repeat(one: Any, start: Any, count: int, xp: Any) -> Any:
    if xp is jnp:  # as a loop, because looks would be compiled one by one
        return lax.fori_loop(0, count, lambda i, carry: one(carry), start)
    for _ in range(count):
        start = one(start)
    return start


def _triangle(S: Array) -> tuple[Array, Array]:
    """Return the lower triangle L with LLᵀ = S, and its inverse. No LAPACK: see `anchored_step`."""
    d, xp = S.shape[0], S.__array_namespace__()
    places = xp.arange(d)

    def column(k: Any, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        S, L, Li = carry
        at = places == k
        line = xp.sum(xp.where(at[None, :], S, 0), 1)
        pivot = xp.sqrt(xp.maximum(xp.sum(xp.where(at, line, 0)), TINY))
        line = xp.where(places >= k, line / pivot, 0)
        row = xp.sum(xp.where(at[:, None], Li, 0), 0) / pivot
        Li = xp.where(at[:, None], row[None, :], Li - xp.where(at, 0, line)[:, None] * row[None, :])
        return S - line[:, None] * line[None, :], xp.where(at[None, :], line[:, None], L), Li

    carry: Any = S, xp.zeros_like(S), xp.eye(d, dtype=S.dtype)
    if xp is jnp:
        return lax.fori_loop(0, d, column, carry)[1:]
    for k in range(d):
        carry = column(k, carry)
    return carry[1], carry[2]


def _eigen(A: Any) -> Any:
    """Return eigenvalues and eigenvectors of a symmetric matrix; in JAX by Jacobi's rotations, half of the pairs at once."""
    A = (A + A.T) / 2
    if isinstance(A, np.ndarray):
        return np.linalg.eigh(np.where(np.isfinite(A), A, 0))
    d = A.shape[0]
    partners, places = jnp.asarray(_partners(d)), jnp.arange(d)

    def turn(i: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        A, Q = carry
        other = partners[i % len(partners)]
        own = jnp.diagonal(A)
        gap, between = own[other] - own, jnp.sum(jnp.where(other[:, None] == places, A, 0), 1)
        side = jnp.where((gap > 0) | ((gap == 0) & (other > places)), 1, -1)
        below = gap + side * jnp.sqrt(gap**2 + 4 * between**2)
        still = (other == places) | (below == 0)
        t = jnp.where(still, 0, 2 * between / jnp.where(still, 1, below))
        c = 1 / jnp.sqrt(1 + t**2)
        s = c * t
        A = c * A - s * A[:, other]
        return c[:, None] * A - s[:, None] * A[other], c * Q - s * Q[:, other]

    A, Q = lax.fori_loop(0, _SWEEPS * len(partners), turn, (A, jnp.eye(d, dtype=A.dtype)))
    return jnp.diagonal(A), Q


@functools.cache
def _partners(d: int) -> np.ndarray:
    """Return who is paired with whom, so that all meet once; (steps, d), oneself for those who rest."""
    even = d + d % 2
    ring, found = list(range(even)), []
    for _ in range(max(even - 1, 1)):
        pairs = dict(zip(ring, ring[::-1], strict=True))
        found.append([i if pairs[i] >= d else pairs[i] for i in range(d)])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return np.asarray(found, np.int32)
