"""The anchored one-step by its formulas, in plain NumPy and float64, from rounds that are all kept."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np


class Round(NamedTuple):
    """Observations of a round of logistic regression."""

    A: np.ndarray  # (E, K, d)
    b: np.ndarray  # (E, K) 0 or 1


class Seen(NamedTuple):
    """What the server gets of a round."""

    E: int
    x: np.ndarray  # (d,) average after the round
    h: np.ndarray  # (d,) sum of mean gradients at the anchor
    hessians: tuple[np.ndarray, np.ndarray] | None  # at the anchor and at the one before
    observations: int


@dataclasses.dataclass
class Bin:
    """Rounds with one anchor."""

    a: np.ndarray
    before: np.ndarray
    start: int
    edge: int
    rounds: list[Seen] = dataclasses.field(
        default_factory=list
    )  # those that began under the anchor
    open_n: int = 0  # of these, how many ended before the bin was closed
    path: list[tuple[int, np.ndarray]] = dataclasses.field(default_factory=list)


class Found(NamedTuple):
    """What is read at the end."""

    estimate: np.ndarray
    scale: np.ndarray
    df: np.ndarray
    missing: bool  # no interval
    gap: float


def sigmoid(z: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-z))


def make_rounds(E: np.ndarray, K: int, d: int, seed: int = 0) -> list[Round]:
    rng, x = np.random.default_rng(seed), np.linspace(-0.5, 1, d)
    rounds = []
    for E_m in E:
        A = rng.standard_normal((E_m, K, d)) * np.linspace(0.7, 1.4, K)[:, None]
        rounds.append(Round(A, (rng.random((E_m, K)) < sigmoid(A @ x)).astype(float)))
    return rounds


def gradient(x: np.ndarray, A: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Per observation, (..., d)."""
    return (sigmoid(A @ x) - b)[..., None] * A


def mean_hessian(x: np.ndarray, A: np.ndarray) -> np.ndarray:
    v = sigmoid(A @ x) * (1 - sigmoid(A @ x))
    return np.einsum("lk,lki,lkj->ij", v, A, A) / v.size


def block(t: float) -> int:
    """The first multiple of 64 after t."""
    return 64 * (int(t) // 64 + 1)


def half_as_far_again(edge: int) -> int:
    """1.5 times as many observations, rounded down to multiples of 64; the next multiple at least."""
    return max(64 * int(1.5 * edge / 64), edge + 64)


def run(
    rounds: list[Round], eta: np.ndarray, x: np.ndarray, chosen: np.ndarray
) -> tuple[list[Bin], list[Seen]]:
    """Local SGD with equal weights, and anchors as they are defined; `chosen` rounds send Hessians."""
    d, t = len(x), 0
    bins = [Bin(x, x, 0, block(max(64, 2 * d) - 1))]
    seen = []
    for m, (A, b) in enumerate(rounds):
        E, K = b.shape
        now = bins[-1]
        total = gradient(now.a, A, b).mean(1).sum(0)
        pair = None
        if chosen[m]:
            pair = (mean_hessian(now.a, A), mean_hessian(now.before, A))
        clients = np.repeat(x[None], K, 0)
        for at in range(E):
            z = np.einsum("kd,kd->k", A[at], clients)
            clients = clients - eta[m] * (sigmoid(z) - b[at])[:, None] * A[at]
        x = clients.mean(0)
        seen.append(Seen(E, x, total, pair, E * K if pair else 0))
        # A bin is closed before the round that crosses its edge, which still belongs to it.
        if t < now.edge <= t + E and now.open_n >= 3:
            a = next_anchor(bins)
            now.rounds.append(seen[-1])
            bins.append(Bin(a, now.a, now.edge, half_as_far_again(now.edge)))
        else:
            now.rounds.append(seen[-1])
            now.open_n += 1
        last = bins[-1]
        if t >= (last.start + last.edge) // 2:
            last.path.append((E, x))
        t += E
        if t >= last.edge:
            last.edge = block(t)
    return bins, seen


def next_anchor(bins: list[Bin]) -> np.ndarray:
    now = bins[-1]
    path = sum(E * x for E, x in now.path) / sum(E for E, _ in now.path)
    if len(bins) == 1:
        return path
    f = fit(bins[1:][-12:])
    if f["seen"] < 10 * len(now.a):
        return path
    return now.a + damped(f["x"] - now.a, now.a - now.before, f["G"], f["D"][-1])


def damped(y: np.ndarray, m: np.ndarray, G: np.ndarray, D: np.ndarray) -> np.ndarray:
    """Newton's step y by the sign of the curvature, in coordinates in which G is the identity."""
    root = np.linalg.cholesky(G)  # G = R Rᵀ, |v|_G = |Rᵀv|
    inner = np.linalg.solve(root, np.linalg.solve(root, D).T)
    size = np.sqrt((inner * inner.T).sum())
    y_, m_ = root.T @ y, root.T @ m
    slope = (y_ @ m_) / (m_ @ m_)  # how often the last move, along itself
    aside = np.linalg.norm(y_ - slope * m_) / np.linalg.norm(m_)
    turn = slope * (y @ D @ y) / (y_ @ y_)
    if turn < 0 and np.linalg.norm(y_) <= np.linalg.norm(m_):
        return y / (1 + (max(turn, -1) + size * aside) / 2)
    return y / (1 + size * np.linalg.norm(y_) / np.linalg.norm(m_) / 2)


def groups(bin: Bin) -> list[tuple[float, np.ndarray]]:
    """Observations and mean Hessian of the two groups, which take turns."""
    sent = [(s.observations, s.hessians[0]) for s in bin.rounds if s.hessians is not None]
    parts: list[list[tuple[int, np.ndarray]]] = [[], []]
    for one in sent:
        counts = [sum(n for n, _ in part) for part in parts]
        parts[int(counts[0] > counts[1])].append(one)
    return [
        (sum(n for n, _ in part), sum(n * H for n, H in part) / sum(n for n, _ in part))
        for part in parts
        if part
    ]


def fit(bins: list[Bin]) -> dict[str, np.ndarray]:
    d = len(bins[0].a)
    D = []
    for b in bins:
        pairs = [(s.observations, *s.hessians) for s in b.rounds if s.hessians is not None]
        D.append(sum(n * (H - P) for n, H, P in pairs) / sum(n for n, _, _ in pairs))
    delta = [sum(D[i + 1 :], np.zeros((d, d))) for i in range(len(bins))]
    own = groups(bins[-1])
    # Every parameter in units of its own curvature: of all Hessians, wherever they were taken.
    every = [pair for b in bins for pair in groups(b)]
    unit = np.sqrt(np.diag(sum(n * H for n, H in every)) / sum(n for n, _ in every))
    norm = lambda M: np.linalg.norm(M / np.outer(unit, unit))  # noqa: E731
    size = norm(sum(n * H for n, H in own) / sum(n for n, _ in own))
    near = [norm(x) < 0.5 * size for x in delta]
    samples = [
        (n, H + shift)
        for b, shift, ok in zip(bins, delta, near, strict=True)
        if ok
        for n, H in groups(b)
    ]
    seen = sum(n for n, _ in samples)
    G = sum(n * H for n, H in samples) / seen
    share = np.array([n / seen for n, _ in samples])
    effective = 1 / (share**2).sum()
    correct = np.sqrt(max(1 - 1 / effective, 0.1))
    dG = [s * (H - G) / correct for s, (_, H) in zip(share, samples, strict=True)]
    t = np.array([sum(s.E for s in b.rounds) for b in bins], float)
    g = [sum(s.h for s in b.rounds) / n for b, n in zip(bins, t, strict=True)]
    between = [G - shift / 2 for shift in delta]
    Gi = np.linalg.inv(G)
    last = bins[-1].rounds
    square = sum(np.outer(s.h - s.E * g[-1], s.h - s.E * g[-1]) for s in last)
    q = sum(s.E**2 for s in last)
    sigma = np.trace(Gi @ square) / (d * (t[-1] - q / t[-1]))
    noise = sum(np.trace(Gi @ e @ Gi @ e) for e in dG)
    x = bins[-1].a - Gi @ g[-1]
    for _ in range(2):
        u = []
        for i, b in enumerate(bins):
            r, c = b.a - x, delta[i] @ (b.a - x) / 2
            spread = t[i] * (c @ Gi @ c + noise * (r @ G @ r) / d**2) / sigma
            u.append(1.0 if i == len(bins) - 1 else near[i] / (1 + spread))
        A = sum(w * n * B for w, n, B in zip(u, t, between, strict=True))
        right = sum(
            w * n * (B @ b.a - g_b) for w, n, B, b, g_b in zip(u, t, between, bins, g, strict=True)
        )
        x = np.linalg.solve(A, right)
    return {
        "x": x, "G": G, "D": D, "seen": seen, "u": np.array(u), "A": A, "between": between,
        "dG": dG, "effective": effective, "t": t,
    }  # fmt: skip


def read(bins: list[Bin]) -> Found:
    kept = bins[1:][-12:]
    if not any(s.hessians for s in kept[-1].rounds) or len(kept[-1].rounds) < 2:
        kept = bins[1:-1][-12:]
    f = fit(kept)
    x, u, t, Ai = f["x"], f["u"], f["t"], np.linalg.inv(f["A"])
    d, total = len(x), (u * t).sum()
    M, squares = np.zeros((d, d)), 0.0
    for b, w, B in zip(kept, u, f["between"], strict=True):
        for s in b.rounds:
            r = s.h - s.E * (B @ (b.a - x))
            M += w**2 * np.outer(r, r)
            squares += w**2 * s.E**2
    n = total**2 / squares
    V = Ai @ (M / max(1 - 1 / n, 0.1)) @ Ai.T
    mu = sum(w * n_b * (b.a - x) for w, n_b, b in zip(u, t, kept, strict=True))
    step, move, G = kept[-1].a - x, kept[-1].a - kept[-1].before, f["G"]
    ahead = f["D"][-1] * np.sqrt(step @ G @ step) / np.sqrt(move @ G @ move)
    v_noise = sum((Ai @ e @ mu) ** 2 for e in [*f["dG"], ahead])
    P = [total * Ai @ e for e in f["dG"]]
    v = np.diag(V)
    up = sum(2 * np.diag(p @ p @ V) + np.diag(p @ V @ p.T) for p in P)
    spread = 4 * sum(np.diag(p @ V) ** 2 for p in [*P, total * Ai @ ahead]) + 2 * v**2 / n
    shrink = v / (v + up)
    variance = shrink * v + v_noise
    df = 2 * variance**2 / (shrink**2 * spread + 2 * v_noise**2 / max(f["effective"] - 1, 1))
    se = np.sqrt(variance)
    # What the bins before the last say of the gradient at its anchor, against what it says itself.
    e, rest = (u * t)[:-1], (u * t)[:-1].sum()
    due = [B @ (b.a - x) for b, B in zip(kept, f["between"], strict=True)]
    off = [sum(s.h for s in b.rounds) / n_b - d_b for b, n_b, d_b in zip(kept, t, due, strict=True)]
    apart = sum(w * o for w, o in zip(e, off, strict=False)) / rest - off[-1]
    S = M / max(1 - 1 / n, 0.1) / (u**2 * t).sum() * (1 / t[-1] + (u[:-1] * e).sum() / rest**2)
    lever = sum(w * (b.a - x) for w, b in zip(e, kept, strict=False)) / rest - (kept[-1].a - x)
    S = S + sum(np.outer(z @ lever, z @ lever) for z in [*f["dG"], ahead])
    gap = apart @ np.linalg.solve(S, apart) * (n - d) / (d * (n - 1))
    missing = len(kept) < 2 or u[-2] < 0.2
    return Found(x, se, df, missing, gap)
