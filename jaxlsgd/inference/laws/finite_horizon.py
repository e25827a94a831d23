"""The law of (ȳ_T − x*)/√V̂_T at a finite horizon, in one direction, without simulation.

Along an eigenvector of G with eigenvalue λ the linearised path is the Gaussian process

    s_m = ρ_m s_{m−1} + ε_m,    ρ_m = (1 − η_m λ)^{E_m},    Var ε_m = σ² η_m² Σ_{l<E_m} (1 − η_m λ)^{2l},

plus a deterministic part from the start x_0, which fades at the rate ρ_m of a second eigenvalue, the
largest. The sums P_n = s_1 + … + s_n have means and covariances known from a few recursions, and
P(|P_T/T| > c √V̂_T), with V̂_T = Σ_n (P_n − (n/T) P_T)²/(E_n T² Σ1/E), is the probability that a
quadratic form in normals is positive:

    (Z + b)² − c² Σ_k (√D_k ζ_k + h_k Z + d_k)² > 0.

Given Z the ζ_k are independent, so its characteristic function is a product and one Gaussian
integral; one more turns that into the probability. The start matters: it bends the path's first rounds,
which widens V̂ long after its bias in ȳ has faded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import eigh
from scipy.special import ndtri

from jaxlsgd.core.checks import refusal
from jaxlsgd.schedules import Plan

FloatArray = NDArray[np.float64]
# Rounds kept of a long path, and some more near its start. Against all rounds, and all terms, of paths of up
# to 1,000 rounds that moves critical values at 95 and 99 % by at most 0.03 %.
_NODES = 160
# Basis in which eigenvectors are computed, 32 functions in all.
_FIRST, _FADING, _SINES = 8, 4, np.arange(1, 21)
# Terms of the quadratic form kept one by one; the rest enter by their mean.
_TERMS = 20
# The integral for the tail goes over τ = sinh u, by the trapezoidal rule.
_STEP = 0.4
_U = np.arange(0.0, 10.0, _STEP)
_SINH, _COSH = np.sinh(_U), np.cosh(_U) * np.append(0.5, np.ones(_U.size - 1))
# Grid of its search for the saddle, in logarithms relative to the form's size.
_COARSE, _FINE = np.arange(-8.0, 10.0), np.linspace(-1.0, 1.0, 17)
_LARGEST = 1e9  # critical values beyond it are infinite


class Path(NamedTuple):
    """Second moments of the path's sums at the kept rounds, for σ = 1."""

    covariance: FloatArray  # (nodes, nodes) Cov(P_n, P_m); the last node is T
    share: FloatArray  # (nodes,) n/T
    weight: FloatArray  # (nodes,) the node's share of Σ1/E_n


class Form(NamedTuple):
    """The quadratic form above; the last term stands for all that follow, with `rest` their ΣD_k."""

    D: FloatArray  # (terms + 1,), 0 in the last
    hh: FloatArray  # h_k²
    hd: FloatArray  # h_k d_k, for b = 1
    dd: FloatArray  # d_k², for b = 1
    rest: float

    @property
    def parts(self) -> FloatArray:
        """hh, hd and dd as columns."""
        return np.stack([self.hh, self.hd, self.dd], axis=1)


def round_rate(step: Any, E: Any) -> Any:
    """Return ρ = (1 − ηλ)^E, of the right sign for ηλ > 1; of NumPy or JAX arrays."""
    xp, rate = step.__array_namespace__(), 1 - step
    size = xp.exp(E * xp.log(xp.maximum(xp.abs(rate), xp.finfo(step.dtype).tiny)))
    return xp.where((rate < 0) & (E % 2 == 1), -size, size)


def lost_share(step: Any, E: Any) -> Any:
    """Return 1 − ρ, without cancellation for small ηλ."""
    xp = step.__array_namespace__()
    near = -xp.expm1(E * xp.log1p(-xp.minimum(step, 0.5)))
    return xp.where(step < 0.5, near, 1 - round_rate(step, E))


def pair_noise(values: Any, lost: Any, eta: Any, E: Any, zero: float) -> Any:
    """Return η² Σ_{l<E} (r_i r_j)^l = η (1 − ρ_iρ_j)/(λ_i + λ_j − ηλ_iλ_j) for pairs of λ, with r = 1 − ηλ.

    Args:
      values: λ, (d,).
      lost: 1 − ρ, (..., d).
      eta: η, of shape () or (..., 1, 1).
      E: as eta.
      zero: below this |1 − r_i r_j| all E terms are taken to be 1.
    """
    xp = lost.__array_namespace__()
    one, other = lost[..., :, None], lost[..., None, :]
    bottom = values[:, None] + values[None, :] - eta * values[:, None] * values[None, :]
    flat = xp.abs(eta * bottom) < zero
    top = one + other - one * other
    return xp.where(flat, eta * eta * E, eta * top / xp.where(flat, 1, bottom))


def local_factors(plan: Plan, eigenvalue: float | FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return ρ_m and Var ε_m of every round."""
    step = plan.eta * eigenvalue
    lost = lost_share(step, plan.E)
    apart = step * (2 - step)
    flat = np.abs(apart) < 1e-14
    geometric = np.where(flat, plan.E, lost * (2 - lost) / np.where(flat, 1.0, apart))
    return round_rate(step, plan.E), plan.eta**2 * geometric


def path(plan: Plan, eigenvalue: float) -> Path:
    """Return the moments of the path's sums in one eigendirection; refuse one that overflows."""
    found = paths(plan, np.array([eigenvalue]))
    if not np.isfinite(found.covariance).all():
        rule = f"have first steps short enough for an eigenvalue λ = {eigenvalue:.4g}"
        got = f"η_1 λ = {plan.eta[0] * eigenvalue:.4g}, with which the path overflows"
        raise refusal("plan", rule, got, code="conflict")
    return found._replace(covariance=found.covariance[0])


@np.errstate(over="ignore", invalid="ignore")
def paths(plan: Plan, eigenvalues: FloatArray) -> Path:
    """Return the moments in several eigendirections, directions first; not finite if one overflows.

    From one kept round to the next s ← r s + e and P ← P + u s + f. Then Cov(P_n, P_m), n ≤ m, is
    Var P_n + Cov(P_n, s_n) Σ_{n<k≤m} ρ_{n+1}…ρ_k.
    """
    kept, weight = nodes(plan, _NODES, early=True)
    leap = _leaps(*local_factors(plan, eigenvalues[:, None]), kept)
    count, size = len(eigenvalues), len(kept)
    covariance = np.empty((count, size, size))
    v = np.zeros(count)  # Var s_n; below Cov(P_n, s_n), Var P_n, ρ_{n+1}…ρ_m and its sum over m
    c, p, product, reach = (np.zeros((count, size)) for _ in range(4))
    last_c, last_p = np.zeros(count), np.zeros(count)
    for m in range(size):
        r, u = leap.r[:, m], leap.u[:, m]
        reach[:, :m] += product[:, :m] * u[:, None]
        product[:, :m] *= r[:, None]
        last_p = last_p + 2 * u * last_c + u * u * v + leap.ff[:, m]
        last_c = r * (last_c + u * v) + leap.ef[:, m]
        v = r * r * v + leap.ee[:, m]
        c[:, m], p[:, m], product[:, m] = last_c, last_p, 1.0
        covariance[:, m, : m + 1] = p[:, : m + 1] + c[:, : m + 1] * reach[:, : m + 1]
        covariance[:, :m, m] = covariance[:, m, :m]
    return Path(covariance, (kept + 1.0) / plan.num_rounds, weight)


class _Leaps(NamedTuple):
    """s ← r s + e and P ← P + u s + f from one kept round to the next; each (directions, nodes)."""

    r: FloatArray
    u: FloatArray
    ee: FloatArray  # Var e
    ef: FloatArray  # Cov(e, f)
    ff: FloatArray  # Var f


def _leaps(rho: FloatArray, noise: FloatArray, kept: NDArray[np.int64]) -> _Leaps:
    """Return all leaps, computed together round by round."""
    begin = np.append(0, kept[:-1] + 1)
    shape = (len(rho), len(kept))
    r, (u, ee, ef, ff) = np.ones(shape), (np.zeros(shape) for _ in range(4))
    # The longest first, so that unfinished leaps are a leading slice.
    order = np.argsort(begin - kept, kind="stable")
    first, length = begin[order], (kept - begin + 1)[order]
    for step in range(int(length[0])):
        on = int(np.searchsorted(-length, -step))
        m = first[:on] + step
        rate, now = rho[:, m], np.s_[:, :on]
        r[now] *= rate
        u[now] += r[now]
        ee[now] = rate * rate * ee[now] + noise[:, m]
        ef[now] *= rate  # Cov(s_m, P_{m−1})
        ff[now] += 2 * ef[now] + ee[now]
        ef[now] += ee[now]
    back = np.argsort(order)
    return _Leaps(*(np.ascontiguousarray(part[:, back]) for part in (r, u, ee, ef, ff)))


def nodes(
    plan: Plan, most: int = _NODES, early: bool = False
) -> tuple[NDArray[np.int64], FloatArray]:
    """Return the rounds to keep, evenly spaced in r_m = Σ1/E, and each one's share of V̂'s sum.

    With `early` there are more near the start, which a start far from x* bends.
    """
    clock = np.cumsum(1 / plan.E)
    T = plan.num_rounds
    if T <= most:
        kept = np.arange(T)
    else:
        even = np.searchsorted(clock, clock[-1] * np.arange(1, most + 1) / most * (1 - 1e-12))
        if early:
            finer = 2.0 ** (np.arange(1, 4 * np.log2(most)) / -4)
            even = np.append(even, np.searchsorted(clock, clock[-1] * finer * 4 / most))
        kept = np.unique(np.append(even, [0, T - 1]).clip(0, T - 1))
    place = np.interp(np.arange(T), kept, np.arange(kept.size))
    low = place.astype(np.int64)
    up = place - low
    each = 1 / plan.E / clock[-1]
    weight = np.bincount(low, each * (1 - up), kept.size).astype(np.float64)
    weight += np.bincount(np.minimum(low + 1, kept.size - 1), each * up, kept.size)
    return kept.astype(np.int64), weight


class Noise(NamedTuple):
    """The form's part that does not depend on the start."""

    D: FloatArray  # (terms,) the largest, descending
    total: float  # the sum of all
    h: FloatArray  # (terms,)
    along: FloatArray  # (nodes,) what h are the coordinates of
    vectors: FloatArray  # (nodes, terms), columns
    root: FloatArray  # (nodes,) root of the rounds' weights
    share: FloatArray  # (nodes,) n/T


def noise_form(found: Path) -> Noise:
    """Split the path's deviations from n ȳ_T into their part along ȳ_T and the rest.

    The rest's eigenvectors are sought among those of `_waves`.
    """
    share, root = found.share, np.sqrt(found.weight)
    C = found.covariance / found.covariance[-1, -1]
    along = C[-1] - share  # Cov(P_n − (n/T) P_T, P_T)
    crossed = np.outer(share, C[-1])
    apart = C - crossed - crossed.T + np.outer(share, share)
    rest = root[:, None] * (apart - np.outer(along, along)) * root
    waves, along = _waves(found.weight.tobytes()), root * along
    # QR iterations: LAPACK's other drivers start threads from 26 rows on.
    values, turn = eigh(_projected(rest, waves), driver="ev")
    vectors = waves @ turn[:, ::-1][:, :_TERMS]
    D = np.maximum(values[::-1][:_TERMS], 0.0)
    total = max(float(np.trace(rest)), float(D.sum()))
    return Noise(D, total, along @ vectors, along, vectors, root, share)


@functools.lru_cache(maxsize=16)  # the same in all directions of a plan
def _waves(weights: bytes) -> FloatArray:
    """Return orthonormal functions of r, (nodes, waves), that span the deviations; a full basis of few nodes.

    The slowest sines, a start that fades at several rates, and the first rounds one by one, which oscillate
    if the first steps are long.
    """
    weight = np.frombuffer(weights)
    r = (np.cumsum(weight) - weight / 2)[:, None]
    fading = (r - 1) * np.expm1(-r * 2.0 ** np.arange(1, 2 * _FADING, 2))
    smooth = np.sqrt(weight)[:, None] * np.hstack([fading, np.sin(np.pi * r * _SINES)])
    every = np.hstack([np.eye(weight.size)[:, :_FIRST], smooth])
    return np.linalg.qr(every[:, : weight.size])[0]


def _projected(matrix: FloatArray, waves: FloatArray) -> FloatArray:
    """Return wavesᵀ matrix waves, in products so small that BLAS starts no threads.

    Threads would wait for cores that the engine keeps busy, up to a hundred times as long as they compute.
    """
    half = np.concatenate([rows @ waves for rows in np.array_split(matrix, 8)])
    parts = zip(np.array_split(waves, 8), np.array_split(half, 8), strict=True)
    return np.asarray(sum(w.T @ rows for w, rows in parts))


def start_path(plan: Plan, eigenvalue: float, kept: NDArray[np.int64] | None = None) -> FloatArray:
    """Return Σ_{m≤n} ρ_1…ρ_m at the kept rounds, over its value at T; ρ is 0 for a step that overshoots."""
    rho = np.maximum(1 - plan.eta * eigenvalue, 0.0) ** plan.E
    if kept is None:
        kept = nodes(plan, _NODES, early=True)[0]
    total = np.cumsum(np.cumprod(rho))[kept]
    return np.asarray(total / total[-1] if total[-1] > 0 else np.ones(total.size), np.float64)


def quadratic_form(noise: Noise, start: FloatArray) -> Form:
    """Return the form, for a start that biases ȳ_T by one standard deviation."""
    bend = noise.root * (start - noise.share)
    d = bend @ noise.vectors

    def completed(terms: FloatArray, total: FloatArray) -> FloatArray:
        return np.append(terms, total - terms.sum())

    hh = completed(noise.h**2, noise.along @ noise.along)
    hd = completed(noise.h * d, noise.along @ bend)
    dd = completed(d * d, bend @ bend)
    return Form(np.append(noise.D, 0.0), hh, hd, dd, noise.total - float(noise.D.sum()))


def tail_probability(form: Form, biases: FloatArray, c: FloatArray) -> FloatArray:
    """Return P(|ȳ_T − x*| > c √V̂_T) if the start biases ȳ_T by `biases` standard deviations.

    For Q, the form above, it is (1/2πi) ∫ E exp(sQ) ds/s along any line Re s = σ > 0 on which the mean
    exists. On that through the integrand's saddle nothing cancels, however large the bias.

    Args:
      form: of `quadratic_form`.
      biases: (n,).
      c: (n,), at least 0.
    """
    square, b = (c * c)[:, None], biases[:, None]
    size = 1 + b**2 + square * (form.D.sum() + form.rest + form.hh.sum() + b**2 * form.dd.sum())
    centre, width = _saddle(form, b, square, size)
    s = centre + 1j * (width * _SINH)
    values = np.exp(_log_mean(form, b, square, s)) / s
    tail = _STEP / np.pi * width[:, 0] * (values.real @ _COSH)
    return np.where(c > 0, np.clip(tail, 0.0, 1.0), 1.0)


@np.errstate(invalid="ignore")
def _saddle(
    form: Form, b: FloatArray, square: FloatArray, size: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return the approximate minimum of the integrand on the real axis, and its width across."""
    x = np.broadcast_to(_COARSE, (len(size), _COARSE.size))
    height = _log_mean(form, b, square, np.exp(x) / size) - x
    x = np.take_along_axis(x, np.argmin(height, axis=1)[:, None], axis=1) + _FINE
    height = _log_mean(form, b, square, np.exp(x) / size) - x
    best = np.argmin(height, axis=1)[:, None].clip(1, _FINE.size - 2)
    low, middle, high = (np.take_along_axis(height, best + i, axis=1) for i in (-1, 0, 1))
    step, bend = _FINE[1] - _FINE[0], low + high - 2 * middle
    # Not finite next to the last s that has a mean, where the integrand is narrow.
    inside = np.isfinite(bend) & (bend > 0)
    shift = np.where(inside, 0.5 * (low - high) / np.where(inside, bend, 1.0), 0.0).clip(-0.5, 0.5)
    curvature = np.where(inside, bend / step**2, 100.0).clip(0.5)
    centre = np.exp(np.take_along_axis(x, best, axis=1) + step * shift) / size
    return centre, centre / np.sqrt(curvature)


def _log_mean(form: Form, b: FloatArray, square: FloatArray, s: NDArray[Any]) -> NDArray[Any]:
    """Return log E exp(sQ) at every s, (n, points); infinite at a real s for which the mean does not exist."""
    scaled = square * s
    spread = 1 + (2 * scaled)[..., None] * form.D
    parts = (1 / spread) @ form.parts
    a2 = s - scaled * parts[..., 0]
    a1 = 2 * b * (s - scaled * parts[..., 1])
    a0 = b**2 * (s - scaled * parts[..., 2]) - scaled * form.rest
    left = 1 - 2 * a2
    if s.dtype.kind == "f":
        a0, left = np.where(left > 1e-9, a0, np.inf), np.maximum(left, 1e-9)
        log = np.log(spread).sum(-1)
    else:
        # A sum of angles stays on the branch of the real axis; the root of a product would not.
        log = 0.5 * np.log(spread.real**2 + spread.imag**2).sum(-1)
        log = log + 1j * np.arctan(spread.imag / spread.real).sum(-1)
    return a0 + a1 * a1 / (2 * left) - 0.5 * (np.log(left) + log)


def critical_value(form: Form, bias: ArrayLike, level: float) -> FloatArray:
    """Return the c with P(|ȳ_T − x*| > c √V̂_T) = 1 − level, for each bias; infinite if there is none.

    By secants of the normal quantile of P as a function of log c, which is nearly a line.
    """
    biases = np.atleast_1d(np.asarray(bias, np.float64))
    aim = ndtri(1 - level)

    def excess(log_c: FloatArray) -> FloatArray:
        tail = tail_probability(form, biases, np.exp(log_c))
        return ndtri(tail.clip(1e-16, 1 - 1e-16)) - aim

    low, f_low, high, f_high = _bracket(excess, _guess(form, biases, aim))
    none = (f_high > 0) | (f_low <= 0)
    before, f_before, x, f = low, f_low, high, f_high
    for _ in range(60):
        flat = f == f_before
        there = x - f * (x - before) / np.where(flat, 1.0, f - f_before)
        inside = ~flat & (low < there) & (there < high)
        before, f_before = x, f
        x = np.where(inside, there, (low + high) / 2)
        f = excess(x)
        if np.all(none | (np.abs(f) < 1e-5)):
            break
        low, high = np.where(f > 0, x, low), np.where(f > 0, high, x)
    return np.where(none, np.inf, np.exp(x)).reshape(np.shape(bias))[()]


def _guess(form: Form, biases: FloatArray, aim: float) -> FloatArray:
    """Return log c if V̂ were its mean, plus a small margin."""
    mean = form.D.sum() + form.rest + form.hh.sum() + biases**2 * form.dd.sum()
    return np.log(1.2 * (biases + max(-aim, 0.1)) / np.sqrt(mean))


def _bracket(
    excess: Callable[[FloatArray], FloatArray], x: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Return a bracket of the root, by growing steps from x; there is none below `_LARGEST` if f_high > 0."""
    f, stride = excess(x), 0.3
    low = high = x
    f_low = f_high = f
    while np.any(up := (f_high > 0) & (high < np.log(_LARGEST))):
        low, f_low = np.where(up, high, low), np.where(up, f_high, f_low)
        high, stride = np.where(up, high + stride, high), 1.6 * stride
        f_high = np.where(up, excess(high), f_high)
    stride = 0.3
    while np.any(down := (f_low <= 0) & (low > -np.log(_LARGEST))):
        high, f_high = np.where(down, low, high), np.where(down, f_low, f_high)
        low, stride = np.where(down, low - stride, low), 1.6 * stride
        f_low = np.where(down, excess(low), f_low)
    return low, f_low, high, f_high


def tail_curve(
    plan: Plan, eigenvalue: float, fastest: float, bias: float, thresholds: FloatArray
) -> FloatArray:
    """Return P(|ȳ_T − x*| > c √V̂_T) at each threshold c, in one direction; `fastest` is the largest λ."""
    form = quadratic_form(_noise(plan, eigenvalue), start_path(plan, fastest))
    return tail_probability(form, np.full(thresholds.size, bias), thresholds)


@functools.lru_cache(maxsize=64)  # every coordinate of a run uses all its directions
def _noise(plan: Plan, eigenvalue: float) -> Noise:
    return noise_form(path(plan, eigenvalue))
