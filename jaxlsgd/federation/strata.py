"""Sums of every client at the open anchor, and the bin that they make together.

The mean over the clients of a round is not the mean over all clients unless all take part. The server therefore keeps
the reports of each client apart while an anchor is open. Client k has sent n_k reports h_i of E_i local steps each:

    t_k = Σ E_i,    ḡ_k = Σ h_i / t_k,    S_k = Σ r_i r_iᵀ/E_i / (n_k − 1),    r_i = h_i − E_i ḡ_k.

S_k is the covariance of a step's gradient, so that S_k/t_k is the variance of ḡ_k. With weights p_k,

    ḡ = Σ p_k ḡ_k,    C = Σ p_k² S_k/t_k,    G = Σ p_k H_k

are unbiased for gradient, variance and Hessian over all clients, whoever takes part and how often. That clients differ
is no part of C. A client needs two reports for S_k, and one Hessian.

`anchored_step.read` reads bins of rounds. It takes t = ΣE for the precision of a bin, and Σ (h − E g)(h − E g)ᵀ over its
rounds for t² C. The bin that makes it find ḡ and C has

    t = 1 / Σ (p_k²/Σp²)/t_k          the steps of a federation in which all take part that is as precise
    n = 1 + df(C),   EE = t²/n        Satterthwaite's degrees of freedom
    h = t ḡ,   Eh = EE ḡ,   hh = t² C (1 − 1/n) + EE ḡ ḡᵀ

since then Σ (h − E g)(h − E g)ᵀ = t² C (1 − 1/n) + EE (ḡ − g)(ḡ − g)ᵀ. The n_k rows behind Hessians count as 1/Σ p_k²/n_k.
With one client and a constant E these are the plain sums over rounds. With K clients that all take part, ḡ is the mean
over rounds as well; n is 1 + K(n_k − 1), since each client's noise is seen by itself.

df(C): with the shares c_k = p_k² S_k/t_k of C in a coordinate, Σ c_k²/(n_k + 1) estimates Σ c_k²/(n_k − 1) without bias, as
estimated shares are too uneven; df = 1/q − 2 with q its mean over coordinates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxlsgd.federation.client import RoundMessage
from jaxlsgd.inference.anchored_step import Bins, Counts

FloatArray = NDArray[np.floating[Any]]
REPORTS = 2  # of a client, before a bin can be read


class Stratum(NamedTuple):
    """What one client has sent at the open anchor."""

    n: int  # reports
    t: int  # their local steps
    mean: FloatArray  # (d,) ḡ_k
    square: FloatArray  # (d, d) Σ r rᵀ/E
    hessians: int  # reports that had them
    seen: FloatArray  # (2,) observations behind them, by turns in two groups
    H: FloatArray  # (2, d, d) Σ of Hessians over observations, at the anchor
    D: FloatArray  # (d, d) Σ of their differences from those at the anchor before

    @property
    def complete(self) -> bool:
        """Whether a bin can be read as far as this client goes."""
        return self.n >= REPORTS and self.hessians > 0


def empty(dim: int) -> Stratum:
    """Return the sums before the first report."""
    square = np.zeros((dim, dim))
    return Stratum(0, 0, square[0], square, 0, np.zeros(2), np.zeros((2, dim, dim)), square)


def with_report(sums: Stratum, message: RoundMessage) -> Stratum:
    """Return the sums with one more report, which has been checked."""
    E, t = message.steps, sums.t + message.steps
    off = message.gradient_sum / E - sums.mean
    sums = sums._replace(
        n=sums.n + 1,
        t=t,
        mean=sums.mean + off * (E / t),
        square=sums.square + (sums.t / t) * E * np.outer(off, off),
    )
    if message.hessian is None or message.hessian_before is None:
        return sums
    rows = float(message.observations) * (np.arange(2) == sums.hessians % 2)
    return sums._replace(
        hessians=sums.hessians + 1,
        seen=sums.seen + rows,
        H=sums.H + rows[:, None, None] * message.hessian,
        D=sums.D + message.observations * (message.hessian - message.hessian_before),
    )


def together(sums: Sequence[Stratum], p: FloatArray, bin: Bins) -> tuple[Bins, Counts]:
    """Return the bin of all clients at an anchor, from complete sums and weights that sum to 1."""
    n, t = (np.array([getattr(one, name) for one in sums], np.float64) for name in ("n", "t"))
    share = p**2 / (t * (n - 1))
    C = sum(a * one.square for a, one in zip(share, sums, strict=True))
    each = share[:, None] * np.stack([np.diagonal(one.square) for one in sums])
    whole = np.diagonal(C)
    known = whole > 0
    q = np.sum((each[:, known] / whole[known]) ** 2 / (n + 1)[:, None], 0)
    df = np.clip(1 / np.mean(q) - 2, np.min(n) - 1, np.sum(n - 1)) if known.any() else np.sum(n - 1)
    E, rounds = float(np.sum(p**2)) * _precision(p, t), 1 + df
    EE = E**2 / rounds
    g = p @ np.stack([one.mean for one in sums])
    seen = np.stack([one.seen for one in sums])
    if np.any(seen == 0):  # some client has one Hessian only: one group
        seen = np.stack([seen.sum(1), np.zeros(len(seen))], 1)
        H = [np.stack([one.H.sum(0), 0 * one.D]) for one in sums]
    else:
        H = [one.H for one in sums]
    count = np.array([_precision(p, column) for column in seen.T])
    rows = np.maximum(seen, 1)
    means = sum(a[:, None, None] * each for a, each in zip(p[:, None] / rows, H, strict=True))
    D = sum(a * one.D for a, one in zip(p / seen.sum(1), sums, strict=True))
    found = bin._replace(
        h=E * g,
        Eh=EE * g,
        hh=E**2 * (1 - 1 / rounds) * C + EE * np.outer(g, g),
        H=count[:, None, None] * means,
        D=count.sum() * D,
    )
    counts: list[Any] = [np.asarray(one) for one in (rounds, E, EE, count)]
    return found, Counts(*counts)


def _precision(p: FloatArray, count: FloatArray) -> float:
    """Return how many observations without strata are as precise as these, 1/Σ p²/n; all of them if weights fit."""
    return float(1 / np.sum(p**2 / count)) if np.all(count > 0) else 0.0
