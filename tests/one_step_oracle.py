"""One-step intervals by the formulas as they are written down, in plain NumPy, round by round."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import scipy.linalg
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
    """The rounds of each bin that count, by the rule as it is written down."""
    ends = np.cumsum(path.E)
    blocks = ends // BLOCK_STEPS
    first = int(np.sum(ends <= 8))
    bins, start = [], first
    for m in range(first + 1, len(path.E)):
        last = m - 1
        changed = (
            last + 2 >= 2 * (start + 1)
            or path.E[last] >= 2 * path.E[start]
            or 2 * path.E[last] <= path.E[start]
            or path.eta[last] * 2**1.01 <= path.eta[start]
        )
        if blocks[m] > blocks[m - 1] and changed and len(bins) < binned_rounds.BINS - 1:
            bins.append(np.arange(start, m))
            start = m
    bins.append(np.arange(start, len(path.E)))
    return bins


class Found(NamedTuple):
    """What the oracle found."""

    estimate: np.ndarray
    scale: np.ndarray
    half_width: np.ndarray
    V: np.ndarray
    far: float


def oracle(path: Path, level: float = 0.95, hessians: Any = None) -> Found:
    """The formulas of `newton_step`, round by round, with residuals and regressions written out.

    `hessians` are the rounds, from 0 on, whose Hessians at their ends are known; all if None.
    """
    bins, E, d = bins_of(path), path.E.astype(float), path.x.shape[1]
    hessians = np.arange(len(E)) if hessians is None else np.asarray(hessians, int)
    total = E[np.concatenate(bins)].sum()
    rest = [sum(E[r].sum() for r in bins[b + 1 :]) for b in range(len(bins))]
    late = [r for r, left in zip(bins, rest, strict=True) if left < total / 2]
    S = sum(_scatter(path, r) for r in late) / sum(len(r) - 1 for r in late)
    hot = -1
    for b, r in enumerate(bins):
        g = path.h[r].sum(0)
        if rest[b] >= total / 2 and g @ np.linalg.solve(S, g) / E[r].sum() > d + 4 * (2 * d) ** 0.5:
            hot = b
    bins = bins[hot + 1 :]
    groups = _groups(path, bins, hessians)
    pull, weight = np.ones(len(bins)), np.ones(len(bins))
    for _ in range(2):
        fit = _fit(path, bins, groups, S, pull, weight)
        pull = np.array([_pull(path, r, np.trace(fit.G) / d) for r in bins])
        squares = [_squares(path, r, fit, a) for r, a in zip(bins, pull, strict=True)]
        ratio = np.array(
            [
                np.trace(np.linalg.solve(S, sq)) / len(r) / d
                for sq, r in zip(squares, bins, strict=True)
            ]
        )
        n = np.array([len(r) for r in bins])
        weight = np.where(ratio > 1 + 3 * np.sqrt(2 / (n * d)), 1 / ratio, 1.0)
        S = sum(w * sq for w, sq in zip(weight, squares, strict=True)) / (weight @ n - 2)
    fit = _fit(path, bins, groups, S, pull, weight)
    alone = sum(map(len, groups)) < 2
    return _interval(path, bins, fit, pull, weight, level, alone)


def _scatter(path: Path, r: np.ndarray) -> np.ndarray:
    E = path.E[r].astype(float)
    off = path.h[r] - E[:, None] * path.h[r].sum(0) / E.sum()
    return (off / E[:, None]).T @ off


def _groups(path: Path, bins: list[np.ndarray], hessians: np.ndarray) -> list[list[np.ndarray]]:
    """The Hessians of each bin, every other one in a group."""
    found = []
    for r in bins:
        # The first bin also has those of the rounds that do not count.
        low = r[0] if r is not bins[0] or r[0] > 8 else 0
        mine = [(path.H[m + 1] + path.H[m + 1].T) / 2 for m in hessians if low <= m <= r[-1]]
        found += [mine[::2], mine[1::2]]
    return [group for group in found if group]


class Fit(NamedTuple):
    """One look."""

    x: np.ndarray
    G: np.ndarray
    W: np.ndarray
    inner: np.ndarray
    variance: np.ndarray
    h: np.ndarray
    t2: float


def _fit(path: Path, bins: list[np.ndarray], groups: Any, S: Any, pull: Any, weight: Any) -> Fit:
    """Weighted least squares over all rounds, by their whitened coordinates."""
    rounds = np.concatenate(bins)
    E, x, h = path.E[rounds].astype(float), path.x[rounds], path.h[rounds]
    a = np.concatenate([np.full(len(r), one) for r, one in zip(bins, pull, strict=True)])
    w = np.concatenate([np.full(len(r), one) for r, one in zip(bins, weight, strict=True)])
    t2 = np.sum(w * a * a * E)
    center, mean = (w * a * a * E) @ x / t2, (w * a) @ h / t2
    off = x - center
    A, C = ((w * a * a * E)[:, None] * off).T @ off, ((w * a)[:, None] * h).T @ off
    root = np.real(scipy.linalg.sqrtm(S))
    values, Q = np.linalg.eigh(root @ A @ root)
    W = root @ Q
    Wi, d = np.linalg.inv(W), len(S)
    C = Wi @ C @ W
    H = [Wi @ np.mean(group, axis=0) @ Wi.T for group in groups]
    many = np.array([len(group) for group in groups], float)
    inner, variance = np.zeros((d, d)), np.zeros((d, d))
    for i in range(d):
        for j in range(d):
            twice = 2.0 if i == j else 1.0
            precision = (values[i] + values[j]) / twice
            said = (C[i, j] + C[j, i]) / (values[i] + values[j]) * precision
            if len(H) > 1:
                middle = np.average(H, axis=0, weights=many)
                spread = sum(
                    k * np.sum((one - middle) ** 2) for k, one in zip(many, H, strict=True)
                )
                phi = spread / (len(H) - 1) / (d * (d + 1)) / many.sum()
                precision += 1 / (phi * twice)
                said += middle[i, j] / (phi * twice)
            inner[i, j], variance[i, j] = said / precision, 1 / precision
    G = W @ inner @ W.T
    return Fit(center - np.linalg.solve(G, mean), G, W, inner, variance, mean, t2)


def _pull(path: Path, r: np.ndarray, value: float) -> float:
    E = path.E[r].astype(float)
    length, step = E.mean(), value * (E @ path.eta[r]) / E.sum()
    return (1 - (1 - step) ** length) / (length * step)


def _squares(path: Path, r: np.ndarray, fit: Fit, pull: float) -> np.ndarray:
    E = path.E[r].astype(float)[:, None]
    off = path.h[r] - E * pull * (path.x[r] - fit.x) @ fit.G.T
    return (off / E).T @ off


def _interval(
    path: Path,
    bins: list[np.ndarray],
    fit: Fit,
    pull: Any,
    weight: Any,
    level: float,
    alone: bool,
) -> Found:
    d, n = len(fit.x), sum(len(r) for r in bins)
    Gi, Wi = np.linalg.inv(fit.G), np.linalg.inv(fit.W)
    M = sum(
        (w * a) ** 2 * path.E[r].sum() / len(r) * _squares(path, r, fit, a)
        for r, w, a in zip(bins, weight, pull, strict=True)
    ) * (n / (n - 2))
    V = Gi @ M @ Gi / fit.t2**2
    change = np.zeros((d, d, d, d))  # what a unit of each element of Γ does to G
    for i in range(d):
        for j in range(i + 1):
            unit = np.zeros((d, d))
            unit[i, j] = unit[j, i] = 1
            change[i, j] = fit.W @ unit @ fit.W.T
    error, sandwich = np.zeros(d), np.diag(Gi @ M @ Gi)
    for i in range(d):
        for j in range(i + 1):
            moved = Gi @ change[i, j] @ Gi @ fit.h
            V = V + fit.variance[i, j] * np.outer(moved, moved)
            # d diag(Gi M Gi) = −2 diag(Gi dG Gi M Gi), as a share, halved for a standard error
            share = np.diag(Gi @ change[i, j] @ Gi @ M @ Gi) / sandwich
            error += fit.variance[i, j] * share**2
    error = np.maximum(error, error.mean())
    df = 1 / (1 / np.maximum(1 / (2 * error), 4) + 1 / (n - d))
    if alone:
        time = sum(path.E[r] @ path.eta[r] for r in bins)
        V = V / (1 - (max(d + 3, 8) / (np.trace(fit.G) / d * time)) ** 2)
    se = np.sqrt(np.diag(V))
    t = sum(path.E[r].sum() for r in bins)
    mean = np.concatenate([path.h[r] for r in bins]).sum(0) / t
    far = np.sqrt(t * np.sum((Wi @ mean) ** 2) / d)
    return Found(fit.x, se, se * scipy.stats.t.ppf((1 + level) / 2, df), V, far)
