"""Do the clients agree? From final messages alone: nobody fits by itself, so small or separated clients are no obstacle.

With s_k, S_k, H_k, n_k of the final messages, moved to x̂, and Σ_k = S_k/n_k, B = G⁻¹, M = Σ p_k² Σ_k: if all clients have
one minimum, s_k = ε_k − H_k B Σ_l p_l ε_l with independent ε_k of covariance Σ_k, so that

    C_kl = Cov(s_k, s_l) = [k = l] Σ_k − H_k B p_l Σ_l − p_k Σ_k Bᵀ H_l + H_k B M Bᵀ H_l.

*Overall*: T = Σ_k n_k s_kᵀ W⁻¹ s_k with W the mean of S_k over all rows. Its mean and variance follow from C; T over its mean
is compared with F(f, ν), f = 2 mean²/variance, which is (K − 1) d if all S_k are alike, and ν from the noise of the S_k.
s_k has no part in directions that client k's rows do not inform, so that T has none either. No S_k or H_k is inverted.

*Per coefficient*: client k's own one-step estimate is u_k = x̂ − H_k⁻¹ s_k, with all coefficients its own. x̂ cancels, so that
u_kj are independent of one another, with variances v_kj = (H_k⁻¹ Σ_k H_k⁻ᵀ)_jj, whether the other coefficients agree or not.
Client k takes part in the comparison of coefficient j if its rows identify it: its information, the Schur complement
1/(H_k⁻¹)_jj, is at least that of one average row of all, 1/(G⁻¹)_jj/n_k. A column that is constant within a client is thus compared
between the others. With weights w_k = n_k/(H_k⁻¹)_jj the squares Q = Σ w_k (u_kj − ū_j)² have mean Σ w_k (1 − w_k/Σw) v_kj; Q over it is
compared with F, with degrees of freedom as above.

S_k is made at x̂, where the residuals of a client with, say, another intercept are larger than its noise. If the shift of the other
coefficients, δ, adds the excess e_k = δᵀ H_k δ to each squared residual, v_kj grows by e_k/w_k. By how much of it v_kj does grow is
a regression over clients of w_k v_kj on e_k, whose slope is between 0 and 1. It allows for the noise of e_k.

From u_kj and v_kj come τ² by Paule and Mandel (1982), and the interval for the minimum of a client that is not among these. It
is of N(mean(τ²), τ² + variance of the mean), mixed over what the data leave open of τ²: its confidence distribution,
Q(τ²) ~ χ² with K − 1 degrees of freedom (Viechtbauer 2007; Nagashima, Noma and Furukawa 2019). With one τ² in its place
(Higgins, Thompson and Spiegelhalter 2009), intervals of 95 % held 83 to 93 %.

One step from x̂ is exact for the squared loss. For others, u_k is off by a term of order |x̂ − x*_k|², so that large differences
in some coefficients are taken for small ones in others; `benchmarks/results/federations.md` has how large they may be.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.display import align
from jaxlsgd.federation.client import FinalMessage
from jaxlsgd.federation.validate import several

FloatArray = NDArray[np.floating[Any]]
PAIRS = (
    200  # clients up to which all pairs count in the variance of T; beyond, pairs add less than 1/K
)
_GRID = (np.arange(60) + 0.5) / 60  # shares of a confidence distribution
_IDENTIFIED = 1.0  # average rows that a client's rows must be worth, for a coefficient
_LEAST_SHARE = 1e-4  # of the information of as many average rows; below is rounding
_ALONE = 1e-8  # share of G that clients have without one of them, below which it is alone
_SINGULAR = 1e-6  # eigenvalues of H_k relative to G below this are taken for this


class Stacked(NamedTuple):
    """Final messages of all clients as arrays."""

    names: tuple[str, ...]
    n: FloatArray  # (K,) rows
    p: FloatArray  # (K,) weights
    score: FloatArray  # (K, d)
    covariance: FloatArray  # (K, d, d)
    hessian: FloatArray  # (K, d, d)

    @property
    def G(self) -> FloatArray:
        """The mean Hessian."""
        return np.tensordot(self.p, self.hessian, 1)

    @property
    def mean_score(self) -> FloatArray:
        """The mean score."""
        return self.p @ self.score

    @property
    def noise(self) -> FloatArray:
        """Covariance of the mean score: Σ p_k² S_k/n_k."""
        return np.tensordot(self.p**2 / self.n, self.covariance, 1)

    @property
    def noise_uncentred(self) -> FloatArray:
        """The same with clients' means left in, as if all rows were of one client: Σ p_k²/n_k² Σ_i g_i g_iᵀ."""
        n, each = self.n, self.p / self.n
        within = np.tensordot(each**2 * np.maximum(n - 1, 1), self.covariance, 1)
        means = (np.where(n > 1, self.p, 0.0) / np.sqrt(n))[:, None] * self.score
        return within + means.T @ means

    def turned(self, W: FloatArray) -> Stacked:
        """Return the same in the coordinates u of x = W u."""
        S, H = (W.T @ each @ W for each in (self.covariance, self.hessian))
        return self._replace(score=self.score @ W, covariance=S, hessian=H)

    def penalised(self, ridge: FloatArray, x: FloatArray) -> Stacked:
        """Return the messages of losses with ½ Σ_j λ_j x_j² added."""
        if not np.any(ridge):
            return self
        return self._replace(score=self.score + ridge * x, hessian=self.hessian + np.diag(ridge))

    def moved(self, step: FloatArray) -> Stacked:
        """Return the messages as they would be at x + step, to first order."""
        return self._replace(score=self.score + self.hessian @ step)


def stack(messages: Mapping[str, FinalMessage], weights: Mapping[str, float] | None) -> Stacked:
    """Return final messages as arrays; weights p_k sum to 1, and are numbers of rows if None."""
    parts = list(messages.values())
    n = np.array([one.examples for one in parts], np.float64)
    arrays = [np.stack([np.asarray(one[i], np.float64) for one in parts]) for i in (1, 2, 3)]
    p = client_weights({name: one.examples for name, one in messages.items()}, weights)
    return Stacked(tuple(messages), n, p, *arrays)


def client_weights(examples: Mapping[str, int], weights: Mapping[str, float] | None) -> FloatArray:
    """Return weights of these clients that sum to 1: those given, or their numbers of rows."""
    if weights is not None:
        for name in examples:
            if name not in weights:
                raise refusal(
                    "weights", f"have a weight of client {name!r}", sorted(weights), code="missing"
                )
    chosen = [examples[name] if weights is None else weights[name] for name in examples]
    found = np.array(
        [checks.positive(f"weights[{name!r}]", w) for name, w in zip(examples, chosen, strict=True)]
    )
    return found / found.sum()


@dataclasses.dataclass(frozen=True, eq=False)
class Agreement:
    """Whether the minima of clients differ, by how much, whose, and what to expect of a new client."""

    names: tuple[str, ...]  # of coefficients
    clients: tuple[str, ...]
    statistic: float  # T over its mean
    df: tuple[float, float]
    p_value: float  # all coefficients at once
    p_values: FloatArray  # (d,) by coefficient; NaN if fewer than 2 clients identify it
    level: float
    estimates: FloatArray  # (K, d) each client's own one-step estimate; NaN if not identified
    errors: FloatArray  # (K, d) their standard errors
    client_p_values: FloatArray  # (K,) each client against all, times the number of clients

    @property
    def tau2(self) -> FloatArray:
        """Variance of the minima between clients, (d,); NaN if fewer than 2 clients identify a coefficient."""
        return self._spread[0]

    @property
    def mean(self) -> FloatArray:
        """Mean of the minima, (d,)."""
        return self._spread[1]

    @property
    def new_client(self) -> tuple[FloatArray, FloatArray]:
        """Bounds of the minimum of a client that is not among these, (d,) each; infinite if fewer than 3 identify it."""
        return self._spread[2], self._spread[3]

    @functools.cached_property
    def _spread(self) -> tuple[FloatArray, ...]:
        found = []
        for y, error in zip(self.estimates.T, self.errors.T, strict=True):
            k = np.isfinite(y)
            found.append(_new_client(y[k], error[k] ** 2, self.level))
        return tuple(map(np.array, zip(*found, strict=True)))

    @property
    def informed_by(self) -> NDArray[np.intp]:
        """How many clients identify each coefficient, (d,); the others have no part in its comparison."""
        return np.sum(np.isfinite(self.estimates), axis=0)

    @property
    def stands_out(self) -> tuple[str, ...]:
        """The clients that differ from all at once, at 5 % in all comparisons together."""
        order = np.argsort(self.client_p_values)
        return tuple(self.clients[k] for k in order if self.client_p_values[k] < 0.05)

    @property
    def verdict(self) -> str:
        """What to conclude, in words."""
        if self.p_value >= 0.05:
            return f"no sign that clients differ (p = {self.p_value:.2g})"
        who = several(self.stands_out)
        which = f"; {who} stands out" if who else "; no single client stands out"
        return f"clients differ (p = {self.p_value:.2g}){which}"

    def __str__(self) -> str:
        level = f"{100 * self.level:g} %"
        head = ["", "p", "between clients", f"new client, {level}", ""]
        body, notes = [], []
        columns = (self.names, self.p_values, self.tau2, *self.new_client, self.informed_by)
        for name, p, t, a, b, count in zip(*columns, strict=True):
            spread = [f"{p:.3g}", f"{np.sqrt(t):.4g}"] if count >= 2 else ["-", "-"]
            body.append(
                [name, *spread, *([f"[{a:.4g}", f"{b:.4g}]"] if count >= 3 else ["-", "-"])]
            )
            if count < len(self.clients):
                which = f"{count} of {len(self.clients)} clients" if count else "no client"
                few = {0: "; no comparison", 1: "; no comparison", 2: "; a new client needs 3"}
                notes.append(f"note: {name} is identified by {which}{few.get(int(count), '')}")
        f, nu = self.df
        last = f"{len(self.clients)} clients, F = {self.statistic:.4g} with {f:.4g} and {nu:.4g} degrees of freedom: {self.verdict}"
        return "\n".join([align([head, *body], left=(0,)), last, *notes])


def agree(
    messages: Mapping[str, FinalMessage],
    *,
    estimate: Sequence[float] | FloatArray | None = None,
    weights: Mapping[str, float] | None = None,
    names: Sequence[str] | None = None,
    level: float = 0.95,
) -> Agreement:
    """Test whether clients have one minimum, and describe how their minima differ.

    Args:
      messages: final messages by client, all evaluated at one place.
      estimate: that place, (d,); estimates are differences from it if None.
      weights: p_k by client; their numbers of rows if None.
      names: of coefficients.
      level: of the interval for a new client.
    """
    checks.level(level)
    if len(messages) < 2:
        raise refusal("messages", "be of at least 2 clients", len(messages), code="data")
    data = stack(messages, weights)
    at = np.zeros(data.score.shape[1]) if estimate is None else np.asarray(estimate, np.float64)
    scale = np.sqrt(np.maximum(np.diagonal(data.G), 1e-300))
    if np.linalg.eigvalsh(data.G / np.outer(scale, scale))[0] < 1e-12:
        rule = "have a positive definite mean Hessian (no collinear columns, and a minimum)"
        raise refusal("messages", rule, "another", code="data")
    step = -np.linalg.solve(data.G, data.mean_score)
    return _agree(data.moved(step), at + step, names, level)


def _agree(data: Stacked, x: FloatArray, names: Sequence[str] | None, level: float) -> Agreement:
    (K, d), n = data.score.shape, data.n
    pooled = np.tensordot(n / n.sum(), data.covariance, 1)
    root = np.linalg.inv(np.linalg.cholesky(pooled))
    C = _own_covariance(data)
    white = n[:, None, None] * (root @ C @ root.T)
    T = n * np.sum((data.score @ root.T) ** 2, 1)
    means, squares = np.trace(white, axis1=1, axis2=2), np.sum(white**2, (1, 2))
    mean, spread = means.sum(), 2 * (squares.sum() + _between(data, root))
    S = root @ data.covariance @ root.T
    own = np.maximum(2 * np.sum(S**2, (1, 2)) / np.maximum(n - 1, 1), 1e-300)
    f, nu = 2 * mean**2 / spread, 2 * mean**2 / own.sum()
    each = special.fdtrc(means**2 / squares, 2 * means**2 / own, T / means)
    own_steps = _own_steps(data)
    p_values, errors = zip(*(_coefficient(own_steps, j) for j in range(d)), strict=True)
    return Agreement(
        names=tuple(names) if names is not None else tuple(f"x[{j}]" for j in range(d)),
        clients=data.names,
        statistic=float(T.sum() / mean),
        df=(float(f), float(nu)),
        p_value=float(special.fdtrc(f, nu, T.sum() / mean)),
        p_values=np.array(p_values),
        level=level,
        estimates=np.where(own_steps.identified, x + own_steps.move, np.nan),
        errors=np.stack(errors, axis=1),
        client_p_values=np.minimum(K * each, 1.0),
    )


def _own_covariance(data: Stacked) -> FloatArray:
    """C_kk, (K, d, d)."""
    B = np.linalg.inv(data.G)
    sigma = data.covariance / data.n[:, None, None]
    HB = data.hessian @ B
    cross = data.p[:, None, None] * (HB @ sigma)
    return sigma - cross - cross.transpose(0, 2, 1) + HB @ data.noise @ HB.transpose(0, 2, 1)


def _between(data: Stacked, root: FloatArray) -> float:
    """Σ over pairs k ≠ l of |√(n_k n_l) W^−½ C_kl W^−½|²."""
    if len(data.n) > PAIRS:
        return 0.0
    B = np.linalg.inv(data.G)
    sigma = data.covariance / data.n[:, None, None]
    scale = np.sqrt(data.n)[:, None, None]
    left = scale * (root @ data.hessian @ B)  # √n_k W^−½ H_k B
    right = scale * data.p[:, None, None] * (sigma @ root.T)  # p_l Σ_l W^−½ √n_l
    cross = np.einsum("kij,ljm->klim", left, right)
    both = np.einsum("kij,jm,lnm->klin", left, data.noise, left)
    C = both - cross - cross.transpose(1, 0, 3, 2)
    off = ~np.eye(len(data.n), dtype=bool)
    return float(np.sum(C[off] ** 2))


class _OwnSteps(NamedTuple):
    """Each client's own Newton step from the common minimiser, by coefficient; all (K, d) but n."""

    n: FloatArray  # (K,)
    identified: NDArray[np.bool_]
    move: FloatArray  # −H_k⁻¹ s_k
    bread: FloatArray  # diagonal of H_k⁻¹
    sandwich: FloatArray  # diagonal of H_k⁻¹ S_k H_k⁻ᵀ
    excess: FloatArray  # δᵀ H_k δ of the shift δ of all other coefficients, as it enters S_k


def _own_steps(data: Stacked) -> _OwnSteps:
    """Return own steps. In directions that H_k does not inform they are wrong, which no identified coefficient notices."""
    n, d = data.n, data.score.shape[1]
    W = np.linalg.inv(np.linalg.cholesky(data.G)).T  # WᵀGW = I, whatever the units
    share, own = np.linalg.eigh(W.T @ data.hessian @ W)
    half = W @ own / np.sqrt(np.maximum(share, _SINGULAR))[:, None, :]
    inverse = half @ half.transpose(0, 2, 1)
    bread = np.diagonal(inverse, axis1=1, axis2=2)
    worth = np.sum(W**2, 1) / bread  # of a row of the client, in average rows
    move = -np.einsum("kij,kj->ki", inverse, data.score)
    sandwich = np.diagonal(inverse @ data.covariance @ inverse, axis1=1, axis2=2)
    whole = -np.sum(move * data.score, 1) - np.einsum("kij,kji->k", inverse, data.covariance) / n
    # The noise that is taken off is that of S_k, which has the excess in it; and S_k is divided by n − 1.
    factor = n / np.maximum(n - 1, 1) * n / np.maximum(n - d + 1, 1)
    return _OwnSteps(
        n=n,
        identified=(worth >= _LEAST_SHARE) & (n[:, None] * worth >= _IDENTIFIED),
        move=move,
        bread=bread,
        sandwich=sandwich,
        excess=factor[:, None] * (whole[:, None] - (move**2 - sandwich / n[:, None]) / bread),
    )


def _coefficient(own: _OwnSteps, j: int) -> tuple[float, FloatArray]:
    """Return the p-value of a coefficient, and each client's standard error."""
    k, errors = own.identified[:, j], np.full(len(own.n), np.nan)
    count = int(k.sum())
    if count < 2:
        errors[k] = np.sqrt(own.sandwich[k, j] / own.n[k])
        return np.nan, errors
    n, y, bread, excess = own.n[k], own.move[k, j], own.bread[k, j], own.excess[k, j]
    d = own.move.shape[1]
    plain = np.maximum(own.sandwich[k, j] / bread, 1e-100)  # w_k v_kj; 1 for the logistic loss
    noise = plain - _excess_that_counts(n, plain, excess, d) * excess
    w = n / bread
    left = 1 - w / w.sum()
    Q, mean = w @ (y - w @ y / w.sum()) ** 2, max(left @ noise, left @ plain / 10)
    common = mean / left.sum()
    noise = np.maximum(noise, common / 10)
    of_noise = np.sum(2 * (left * plain) ** 2 / np.maximum(n - 1, 1))
    squares = noise**2 @ (2 * left - 1) + (w @ noise / w.sum()) ** 2
    # Squares of noisy variances are too large on average; those of equal ones are the least possible.
    squares = max(squares - of_noise, mean**2 / (count - 1))
    p = float(special.fdtrc(mean**2 / squares, 2 * mean**2 / of_noise, Q / mean))
    # A client with few rows borrows the mean noise of all.
    v = ((n - 1) * noise + d * common) / (n - 1 + d) / w
    errors[k] = np.sqrt(np.maximum(v, 1e-300))
    return p, errors


def _excess_that_counts(n: FloatArray, plain: FloatArray, excess: FloatArray, d: int) -> float:
    """Return the slope of noise on excess over clients, between 0 and 1, and 0 if it is not known."""
    center, middle = (n @ one / n.sum() for one in (plain, excess))
    base = max(center - middle, center / 10)
    blur = 4 * base * max(excess.sum(), 0.0) + 2 * (d - 1) * base**2 * np.sum(1 / n)
    spread = max(n @ (excess - middle) ** 2 - blur, 0.0)
    return float(
        np.clip(n @ ((excess - middle) * (plain - center)) / (spread + 2 * center**2), 0, 1)
    )


def _new_client(y: FloatArray, v: FloatArray, level: float) -> tuple[float, float, float, float]:
    """Return τ², mean, and the bounds for a new client."""
    K = len(y)
    if K < 2:
        return np.nan, np.nan, -np.inf, np.inf
    tau2 = paule_mandel(y, v)
    center = float(np.average(y, weights=1 / (v + tau2)))
    if K < 3:
        return tau2, center, -np.inf, np.inf
    likely = _solve_q(y, v, special.chdtri(K - 1, _GRID))
    Q, means, weight = _q(y, v, likely)
    # Hartung and Knapp's variance of the mean, but not below the plain one; that of Student's t with K − 1.
    spread = np.sqrt(likely + np.maximum(Q / (K - 1), 1.0) / weight * (K - 1) / max(K - 3, 1))
    low, high = (_mixture(means, spread, p) for p in ((1 - level) / 2, (1 + level) / 2))
    return tau2, center, low, high


def _mixture(means: FloatArray, spread: FloatArray, p: float) -> float:
    """Return a quantile of normal laws mixed in equal shares."""
    reach = -special.ndtri(min(p, 1 - p) / 2) + 1
    low, high = float(np.min(means - reach * spread)), float(np.max(means + reach * spread))
    for _ in range(60):
        middle = (low + high) / 2
        below = special.ndtr((middle - means) / spread).mean() < p
        low, high = (middle, high) if below else (low, middle)
    return (low + high) / 2


def _q(y: FloatArray, v: FloatArray, tau2: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return Σ (y_k − ȳ)²/(v_k + τ²), ȳ weighted likewise, and the sum of weights, for several τ²."""
    w = 1 / (v + tau2[:, None])
    total = w.sum(1)
    mean = w @ y / total
    return np.sum(w * (y - mean[:, None]) ** 2, 1), mean, total


def _solve_q(y: FloatArray, v: FloatArray, goals: FloatArray) -> FloatArray:
    """Return the τ² with Q(τ²) equal to each goal; 0 if there is none above 0."""
    low, high = np.zeros(len(goals)), np.full(len(goals), float(np.var(y, ddof=1) + np.max(v)))
    while np.any(far := _q(y, v, high)[0] > goals):
        high = np.where(far, 2 * high, high)
    for _ in range(60):
        middle = (low + high) / 2
        above = _q(y, v, middle)[0] > goals
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return np.where(_q(y, v, np.zeros(1))[0] > goals, (low + high) / 2, 0.0)


def paule_mandel(y: FloatArray, v: FloatArray) -> float:
    """Return τ² with Σ (y_k − ȳ)²/(v_k + τ²) = K − 1, ȳ weighted likewise; 0 if there is none above 0."""
    return float(_solve_q(y, v, np.array([len(y) - 1.0]))[0])


def jackknife(data: Stacked) -> FloatArray:
    """Return the covariance of x̂ over samples of clients, by leaving out one after the other.

    x̂ without client k is, to first order, x̂ + (G − p_k H_k)⁻¹ p_k s_k. This is the cluster-robust covariance with its
    small-sample correction for K (CR3). `data` is at x̂, where Σ p_k s_k = 0. With K − 1 degrees of freedom it is the
    reading whose coverage is nearest to 95 % for all kinds of columns (`benchmarks/federations.py`).
    """
    G, K = data.G, len(data.n)
    rest = G - data.p[:, None, None] * data.hessian
    W = np.linalg.inv(np.linalg.cholesky(G)).T  # WᵀGW = I, whatever the units
    shares = np.linalg.eigvalsh(W.T @ rest @ W)[:, 0]  # least of G that is left without a client
    for share, name in zip(shares, data.names, strict=True):
        if share <= _ALONE:
            rule = 'be "given" unless two clients or more inform every coefficient'
            raise refusal(
                "clients", rule, f"'sampled', and some that {name} alone informs", code="data"
            )
    moves = np.linalg.solve(rest, (data.p[:, None] * data.score)[..., None])[..., 0]
    return (K - 1) / K * moves.T @ moves


def between_clients(data: Stacked) -> FloatArray:
    """Return the cluster-robust covariance with the factor of statsmodels and Stata (CR1), too small for few clients."""
    inverse, K, n = np.linalg.inv(data.G), len(data.n), float(data.n.sum())
    moves = (data.p[:, None] * data.score) @ inverse.T
    return moves.T @ moves * (K / (K - 1) * (n - 1) / max(n - len(inverse), 1.0))


def constant_within_clients(data: Stacked) -> tuple[tuple[int, int], ...]:
    """Return pairs of columns that are multiples of each other within every client, with multiples that differ.

    A column that is constant within clients is a multiple of the intercept there. Hessians show it: the two by two
    part of such a pair is singular.
    """
    H = data.hessian
    alike = np.ones(H.shape[1:], bool)
    for one in H:
        size = np.outer(np.diagonal(one), np.diagonal(one))
        alike &= size - one**2 <= 1e-10 * size
    found = []
    for i, j in zip(*np.nonzero(np.triu(alike, 1)), strict=True):
        first = i if np.all(H[:, i, i] > 0) else j if np.all(H[:, j, j] > 0) else None
        if first is None:
            continue
        ratio = H[:, i, j] / H[:, first, first]
        if np.ptp(ratio) > 1e-6 * np.max(np.abs(ratio), initial=0):
            found.append((int(i), int(j)))
    return tuple(found)
