"""One-step intervals by the formulas as they are written down, in plain NumPy, round by round."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import scipy.stats

from jaxlsgd.core.estimator import BLOCK_STEPS
from jaxlsgd.inference import binned_rounds


class Path(NamedTuple):
    """A run as the server sees it."""

    x: np.ndarray  # (T + 1, d)
    h: np.ndarray  # (T, d)
    H: np.ndarray  # (T + 1, d, d), those at x
    E: np.ndarray  # (T,)
    eta: np.ndarray  # (T,)


def make_path(
    num_rounds: int, dim: int = 3, center: float = 0.0, seed: int = 0, beta: float = 1 / 3
) -> Path:
    """A linear model with one client whose local steps are summed up by their exact mean and noise."""
    rng = np.random.default_rng(seed)
    m = np.arange(1, num_rounds + 1)
    E = np.ceil(m**beta - 1e-9).astype(int)
    eta = 0.5 * m**-0.505 / E
    truth = center + np.linspace(0, 1, dim)
    x, h, H = [np.full(dim, center)], [], []
    for E_m, eta_m in zip(E, eta, strict=True):
        a = rng.standard_normal((E_m, dim))
        b = a @ truth + rng.standard_normal(E_m)
        here, total = x[-1].copy(), np.zeros(dim)
        for a_l, b_l in zip(a, b, strict=True):
            g = (a_l @ here - b_l) * a_l
            total += g
            here = here - eta_m * g
        H.append(np.outer(a[0], a[0]))
        x.append(here)
        h.append(total)
    H.append(np.eye(dim))
    return Path(np.array(x), np.array(h), np.array(H), E, eta)


def bins_of(path: Path) -> list[np.ndarray]:
    """The rounds of each bin, by the rule as it is written down."""
    blocks = np.cumsum(path.E) // BLOCK_STEPS
    bins, start = [], 0
    for m in range(1, len(path.E)):
        first, last = start, m - 1
        changed = (
            last + 2 >= 2 * (first + 1)
            or path.E[last] >= 2 * path.E[first]
            or 2 * path.E[last] <= path.E[first]
            or path.eta[last] * 2**1.01 <= path.eta[first]
        )
        if blocks[m] > blocks[m - 1] and changed and len(bins) < binned_rounds.BINS - 1:
            bins.append(np.arange(start, m))
            start = m
    bins.append(np.arange(start, len(path.E)))
    if len(bins) > 1 and path.E[bins[-1]].sum() < 0.03 * path.E.sum():
        bins[-2:] = [np.concatenate(bins[-2:])]
    return bins


class Found(NamedTuple):
    """What the oracle found."""

    estimate: np.ndarray
    scale: np.ndarray
    half_width: np.ndarray
    V: np.ndarray


def oracle(path: Path, level: float = 0.95, every: int = 1) -> Found:
    """The formulas of the module, round by round, with the residuals written out."""
    bins, E = bins_of(path), path.E.astype(float)
    total = E.sum()
    after = [E[np.concatenate(bins[b:])].sum() for b in range(len(bins))]
    curve = _curve(path, bins, every)
    near, wide = (
        max(b for b in range(len(bins)) if after[b] >= share * total) for share in (0.75, 0.97)
    )
    G, at = _mean(curve.G[near:], E, bins[near:]), _mean(curve.p[near:], E, bins[near:])
    flat = _at(path, bins, curve, at, G, np.zeros((*G.shape, len(at))))
    halves = [b for b in range(len(bins)) if after[b] >= 0.5 * total]
    calm = min(
        halves, key=lambda b: np.log(_from(flat, range(b, len(bins)), level).half_width).mean()
    )
    near = max(near, calm)
    G, at = _mean(curve.G[near:], E, bins[near:]), _mean(curve.p[near:], E, bins[near:])
    look = _from(flat, range(near, len(bins)), level)
    slope = _slope(path, bins, curve, wide, look.V)
    x = look.estimate
    x = _from(_at(path, bins, curve, x, G + slope @ (x - at), slope), range(near, len(bins)), level)
    x = x.estimate
    seen = _at(path, bins, curve, x, G + slope @ (x - at), slope)
    tails = [_from(seen, range(b, len(bins)), level) for b in halves]
    return min(tails, key=lambda found: np.log(found.half_width).mean())


class Curve(NamedTuple):
    """By bin: mean places and Hessians, and what bends the gradient within."""

    p: list[np.ndarray]
    G: list[np.ndarray]
    bent: list[np.ndarray]


def _curve(path: Path, bins: list[np.ndarray], every: int) -> Curve:
    E, x, H = path.E.astype(float), path.x[:-1], (path.H[:-1] + path.H[:-1].swapaxes(1, 2)) / 2
    p = [np.average(x[r], axis=0, weights=E[r]) for r in bins]
    # The first round's Hessian is not fed to statistics.
    known = [r[(r > 0) & (r % every == 0)] for r in bins]
    G = [np.average(H[r], axis=0, weights=E[r]) for r in known]
    bent = [
        0.5 * E[all_].sum() / E[r].sum() * sum(E[m] * (H[m] - G_b) @ (x[m] - x[all_[0]]) for m in r)
        for all_, r, G_b in zip(bins, known, G, strict=True)
    ]
    return Curve(p, G, bent)


def _mean(values: list[np.ndarray], E: np.ndarray, bins: list[np.ndarray]) -> np.ndarray:
    return np.average(values, axis=0, weights=[E[r].sum() for r in bins])


def _slope(
    path: Path, bins: list[np.ndarray], curve: Curve, first: int, V: np.ndarray
) -> np.ndarray:
    E = path.E.astype(float)
    G, p = (_mean(each[first:], E, bins[first:]) for each in (curve.G, curve.p))
    w = np.array([E[r].sum() for r in bins[first:]])
    w = w / w.sum()
    dG, dp = np.array(curve.G[first:]) - G, np.array(curve.p[first:]) - p
    ridge = np.einsum("b,bi,bj->ij", w, dp, dp) + len(w) * V
    return np.einsum("b,bij,bk->ijk", w, dG, dp) @ np.linalg.inv(ridge)


class Seen(NamedTuple):
    """By bin, from a place x: what one Newton step needs."""

    x: np.ndarray
    L: list[np.ndarray]  # ΣE Q λ̃ Qᵀ
    residual: list[np.ndarray]
    straight: list[np.ndarray]
    rounds: list[np.ndarray]  # (rounds, d) residuals of each round at x
    lever: list[np.ndarray]  # (rounds, d, d) what a move of x adds to them


def _at(
    path: Path,
    bins: list[np.ndarray],
    curve: Curve,
    x: np.ndarray,
    G: np.ndarray,
    slope: np.ndarray,
) -> Seen:
    E, eta = path.E.astype(float), path.eta
    lam, Q = np.linalg.eigh((G + G.T) / 2)
    G = (G + G.T) / 2
    seen = Seen(x, [], [], [], [], [])
    for b, r in enumerate(bins):
        pulled = sum((1 - (1 - eta[m] * lam) ** E[m]) / eta[m] for m in r) / E[r].sum()
        R, pull = Q @ np.diag(pulled / lam) @ Q.T, Q @ np.diag(pulled) @ Q.T
        K = pull + 0.5 * (curve.G[b] - G)
        gap = curve.p[b] - x
        gradient = R @ (G + slope @ gap / 2) @ gap
        h, total = path.h[r].sum(0), E[r].sum()
        seen.L.append(total * pull)
        seen.residual.append(h - total * gradient - R @ curve.bent[b])
        seen.straight.append(h - total * pull @ (curve.p[b] - x))
        moves = (path.x[:-1][r] - curve.p[b]) @ K.T
        seen.rounds.append(path.h[r] - E[r][:, None] * (gradient + moves))
        seen.lever.append(E[r][:, None, None] * pull)
    return seen


def _from(seen: Seen, chosen: Any, level: float) -> Found:
    L = np.linalg.inv(sum(seen.L[b] for b in chosen))
    move = -L @ sum(seen.residual[b] for b in chosen)
    curvature = -L @ sum(seen.straight[b] for b in chosen) - move
    parts = []
    for b in chosen:
        residuals = seen.rounds[b] + seen.lever[b] @ move
        parts.append(L @ (residuals.T @ residuals) @ L.T)
    V, v = np.sum(parts, axis=0), np.array([np.diag(part) for part in parts])
    se = np.sqrt(np.diag(V))
    n = np.array([[len(seen.rounds[b])] for b in chosen])
    df = v.sum(0) ** 2 / (v**2 / n).sum(0)
    upper = (1 + level) / 2
    t = scipy.stats.t.ppf(upper, df) / scipy.stats.norm.ppf(upper)
    bias = np.maximum(0.15 * np.abs(curvature) / se, 1e-6)
    cv = np.sqrt(scipy.stats.ncx2.ppf(level, 1, bias**2))
    return Found(seen.x + move, se, se * t * cv, V)
