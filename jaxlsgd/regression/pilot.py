"""Where a run starts: the minimiser of some rows, and the numbers of a loss that come from the data."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import scipy.linalg
from numpy.typing import NDArray

from jaxlsgd.core.checks import refusal
from jaxlsgd.regression.design import Design
from jaxlsgd.regression.losses import Family
from jaxlsgd.regression.options import Options, check_methods
from jaxlsgd.regression.standardise import Rows, across, along, gram

FloatArray = NDArray[np.floating[Any]]
PILOT = 20_000  # rows


def start_from(plan: Design, rows: Rows, asked: Options) -> tuple[Loss, FloatArray, int]:
    """The loss with its numbers, the pilot's minimiser, and the exchanges that found it."""
    check_methods(asked.methods, len(plan.names))
    ridge = asked.ridge * rows.coordinates.slopes
    rng = np.random.default_rng([asked.seed, 1])
    size = PILOT
    while True:
        chosen = _some(rng, len(rows.y), size)
        X, y, client = rows.X[chosen], rows.y[chosen], rows.client[chosen]
        weights = (rows.p / np.maximum(np.bincount(client, minlength=len(rows.p)), 1))[client]
        loss = _tuned(asked.family, X, y, weights, ridge, rows)
        try:
            theta, count = minimise(loss, X, y, weights, plan.names)
            return loss, theta, count
        except ValueError:
            # What separates some rows need not separate all.
            if len(y) == len(rows.y):
                raise
            size *= 4


def _some(rng: np.random.Generator, n: int, size: int) -> Any:
    if n <= size:
        return slice(None)
    return np.sort(rng.choice(n, size, replace=False))


def _tuned(
    family: Family,
    X: FloatArray,
    y: FloatArray,
    weights: FloatArray,
    ridge: FloatArray,
    rows: Rows,
) -> Loss:
    if family.tune is None:
        return Loss(family, np.zeros(1), ridge)
    root = np.sqrt(weights)
    theta = np.linalg.lstsq(root[:, None] * X, root * y, rcond=None)[0]
    scale = rows.coordinates.y_scale
    found = family.tune(scale * (y - X @ theta), len(rows.y), X.shape[1])
    return Loss(family, np.asarray(found) / family.units(scale), ridge)


ALPHA = 0.505  # the paper's
LOCAL_STEPS = 5
_DRIFT = 0.05  # of a standard error
_FORGOTTEN = 10.0  # Σ γ_m: what is left of the start is e^(−10)
_NEWTON = 60
_FLOOR = 1e-10  # of Ĝ's eigenvalues over the largest


class Loss(NamedTuple):
    """A family with its numbers, and a ridge on the standardised slopes."""

    family: Family
    tuning: FloatArray
    ridge: FloatArray  # (d,) λ for slopes, 0 for the intercept


class Moments(NamedTuple):
    """What the rows of all clients say at one θ."""

    G: FloatArray  # (d, d) Σ p_k H_k, ridge included
    gradients: FloatArray  # (K, d) ḡ_k, ridge included
    hessians: FloatArray  # (K, d, d) H_k, ridge included
    S: FloatArray  # (K, d, d) covariance of client k's gradients, its mean taken out
    raw: FloatArray  # (K, d, d) their mean squares, nothing taken out
    sizes: NDArray[np.int64]  # (K,)

    def sample(self, p: FloatArray, pooled: bool) -> FloatArray:
        """Σ p_k² S_k/n_k, or with the clients' means left in."""
        each = self.raw if pooled else self.S
        return np.einsum("k,kij->ij", p**2 / self.sizes, each)

    def turned(self, W: FloatArray) -> Moments:
        """The same in the coordinates u of θ = W u."""
        G, H, S, raw = (W.T @ each @ W for each in (self.G, self.hessians, self.S, self.raw))
        return Moments(G, self.gradients @ W, H, S, raw, self.sizes)


class Rule(NamedTuple):
    """Steps and lengths that the pilot asks for."""

    eta: float  # η_1
    E: int
    passes: int
    bound: str  # which of the three bounds it was
    bounds: dict[str, float]


def minimise(
    loss: Loss, X: FloatArray, y: FloatArray, row_weights: FloatArray, names: tuple[str, ...]
) -> tuple[FloatArray, int]:
    """Damped Newton on weighted rows; returns θ̂ and how many exchanges of d² numbers it took."""
    family, tuning, ridge = loss
    theta = np.zeros(X.shape[1])
    value = _value(loss, X, y, row_weights, theta)
    count = 0
    while count < _NEWTON:
        count += 1
        z = along(X, theta)
        first = family.first(np, z, y, tuning) * row_weights
        second = family.second(np, z, y, tuning) * row_weights
        gradient = across(X, first) + ridge * theta
        H = gram(second[:, None] * X, X) + np.diag(ridge)
        H += 1e-9 * np.trace(H) / len(H) * np.eye(len(H)) + 1e-12 * np.eye(len(H))
        step = scipy.linalg.solve(H, gradient, assume_a="pos")
        decrement = float(gradient @ step)
        theta, new = _descend(loss, X, y, row_weights, theta, step, value)
        if decrement < 1e-12 * (1 + abs(value)) or abs(value - new) < 1e-15 * (1 + abs(value)):
            break
        value = new
    _check_separated(loss, X, y, theta, names)
    return theta, count


def _value(
    loss: Loss, X: FloatArray, y: FloatArray, weights: FloatArray, theta: FloatArray
) -> float:
    with np.errstate(over="ignore"):
        rows = loss.family.loss(np, along(X, theta), y, loss.tuning)
    return float(weights @ rows + 0.5 * np.sum(loss.ridge * theta**2))


def _descend(
    loss: Loss,
    X: FloatArray,
    y: FloatArray,
    weights: FloatArray,
    theta: FloatArray,
    step: FloatArray,
    value: float,
) -> tuple[FloatArray, float]:
    """θ − step/2^j and its value, for the first j that does not raise it."""
    for halving in range(40):
        shorter = theta - step / 2**halving
        new = _value(loss, X, y, weights, shorter)
        if new <= value:
            return shorter, new
    return theta, value


def _check_separated(
    loss: Loss, X: FloatArray, y: FloatArray, theta: FloatArray, names: tuple[str, ...]
) -> None:
    """Refuses responses that a combination of columns tells apart, so that no minimum exists."""
    if not loss.family.separable or loss.ridge.any():
        return
    # Where f'' has vanished in some direction: fitted means run off to an end of their range.
    second = loss.family.second(np, along(X, theta), y, loss.tuning)
    base = np.mean(second)
    H = gram(second[:, None] * X, X) / len(X)
    values = scipy.linalg.eigh(H, gram(X, X) / len(X), eigvals_only=True)
    if values[0] > 1e-6 * max(base, 1e-4):
        return
    # Coefficients of what separates have run off; where f'' has vanished in all rows, all directions look alike.
    share = np.abs(theta) * X.std(axis=0)
    involved = [names[j] for j in np.argsort(-share) if share[j] > 0.1 * share.max()][:3]
    raise refusal(
        "columns",
        "not separate the responses: no finite coefficients are best",
        " and ".join(involved or names[:1]),
        "; leave them out, or give a ridge",
    )


def moments(
    loss: Loss,
    X: FloatArray,
    y: FloatArray,
    client: NDArray[np.int64],
    p: FloatArray,
    theta: FloatArray,
) -> Moments:
    """Hessians and gradients by client at θ; rows must be sorted by client."""
    family, tuning, ridge = loss
    z = along(X, theta)
    first, second = family.first(np, z, y, tuning), family.second(np, z, y, tuning)
    ends = np.searchsorted(client, np.arange(len(p) + 1))
    d = X.shape[1]
    H, raw, S = (np.zeros((len(p), d, d)) for _ in range(3))
    mean = np.zeros((len(p), d))
    for k, (start, end) in enumerate(itertools.pairwise(ends)):
        A, n = X[start:end], end - start
        g = first[start:end, None] * A
        mean[k] = g.mean(axis=0)
        raw[k] = gram(g, g) / n
        # One row has no spread of its own: its square bounds it.
        centred = g - mean[k] if n > 1 else g
        S[k] = gram(centred, centred) / max(n - 1, 1)
        H[k] = gram(second[start:end, None] * A, A) / n + np.diag(ridge)
    G = np.einsum("k,kij->ij", p, H)
    return Moments(G, mean + ridge * theta, H, S, raw, np.diff(ends))


def whitening(G: FloatArray) -> FloatArray:
    """W with WᵀGW = I; directions without curvature are bounded."""
    values, Q = np.linalg.eigh((G + G.T) / 2)
    return Q / np.sqrt(np.maximum(values, _FLOOR * values[-1]))


class Asks(NamedTuple):
    """What the rule is asked for."""

    p: FloatArray  # (K,) weights
    sizes: NDArray[np.int64]  # (K,) rows of the whole table
    batches: FloatArray  # (K,) rows a step
    back: FloatArray  # (d, d) whitened coordinates to those of the table
    steps: int  # a pass
    share: float  # of the sample's variance that the run's may have
    local_steps: int | None  # E; chosen if None


def rule(found: Moments, fourth: FloatArray, asks: Asks) -> Rule:
    """The rule above, from the pilot's moments and C_k, (K, d, d), in whitened coordinates."""
    p, sizes, batches, back, steps, share, local_steps = asks
    ours = np.einsum("k,kij->ij", p**2 / batches / steps, found.S)
    sample = np.einsum("k,kij->ij", p**2 / sizes, found.S)
    ours, sample = (np.einsum("ij,jk,ik->i", back, each, back) for each in (ours, sample))
    worst = float(np.max(ours / np.maximum(sample, 1e-300)))
    passes = max(1, int(np.ceil(worst / share)))
    top = max(
        np.linalg.eigvalsh(H + C / B)[-1]
        for H, C, B in zip(found.hessians, fourth, batches, strict=True)
    )
    wander = max(np.trace(S) / B for S, B in zip(found.S, batches, strict=True))
    center = found.gradients - p @ found.gradients
    pull = np.abs(back @ np.einsum("k,kij,kj->i", p, found.hessians, center))
    drift = float(np.max(pull / np.sqrt(np.maximum(sample, 1e-300))))
    candidates = range(LOCAL_STEPS, 0, -1) if local_steps is None else [local_steps]
    chosen = None
    for E in candidates:
        rounds = max(1, passes * steps // E)
        slowing = float(np.mean(np.arange(1, rounds + 1.0) ** -ALPHA))
        bounds = {
            "stability": 0.5 / float(top),
            "noise": float(1 / np.sqrt(2 * E * max(wander, 1e-300))),
            "drift": _DRIFT / max(0.5 * (E - 1) * drift * slowing, 1e-300),
        }
        bound = min(bounds, key=lambda name: bounds[name])
        chosen = Rule(bounds[bound], E, passes, bound, bounds)
        if bound != "drift" or chosen.eta * slowing * rounds * E >= _FORGOTTEN:
            break
    assert chosen is not None
    return chosen
