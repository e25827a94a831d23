"""The law of random scaling's joint statistic at a finite horizon, by simulation.

In the basis of G's eigenvectors the linearised path is the Gaussian process s_m = ρ_m ∘ s_{m−1} + ε_m with
Cov ε_m = n_m ∘ S̃, see `finite_horizon`, and its sums P_n = s_1 + … + s_n have

    W = P_Tᵀ [Σ_n w_n (P_n − (n/T) P_T)(P_n − (n/T) P_T)ᵀ]⁻¹ P_T,     w_n = (1/E_n)/Σ 1/E.

(s, P) is a Markov chain, so that it is drawn from one kept round to the next with its exact moments, the
start's fading part is added, and W is read off for any contrasts. Between kept rounds the squares in V̂ are
interpolated, which keeps its mean.

At the 5 % level, t_T = 5,000 and q = 2 and 5, the test rejected in 4.4 to 5.1 % of 4,096 runs (standard error 0.34)
of the paper's models under C1 and P(1/2), and the limit law in 8 to 67 %. Critical values of a run's own law,
from its own Ĝ and Ŝ and these draws, scatter by 1.5 to 3 %, and reject in 4.3 to 5.0 %.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.estimator import JointLaw
from jaxlsgd.inference.laws import finite_horizon
from jaxlsgd.schedules import Plan

FloatArray = NDArray[np.float64]
DRAWS = 8_000  # the tail at 5 % has a standard error of 0.24 %
_NODES = 200
_CHUNK = 1_000
_SEED = 21


class Process(NamedTuple):
    """The linearised path, and the coordinates as combinations of its directions."""

    eigenvalues: FloatArray  # (d,)
    S: FloatArray  # (d, d) in the eigenvectors' basis
    view: FloatArray  # (coordinates, d) each coordinate's part of each direction
    bias: FloatArray  # (coordinates,) bias that the start leaves in ȳ_T


class Leaps(NamedTuple):
    """From one kept round to the next: s ← r ∘ s + e, P ← P + u ∘ s + f, with Cov(e, f) = root rootᵀ."""

    r: FloatArray  # (nodes, d)
    u: FloatArray  # (nodes, d)
    root: FloatArray  # (nodes, 2d, 2d)


class PathDraws(NamedTuple):
    """Simulated P_T and Σ w (P − (n/T) P_T)(P − (n/T) P_T)ᵀ."""

    last: FloatArray  # (draws, coordinates)
    spread: FloatArray  # (draws, coordinates, coordinates)


def joint_law(plan: Plan, process: Process) -> JointLaw:
    """Return the law of W for one run; simulated at first use, the same at every call."""
    draws = functools.cache(lambda: simulate(plan, process))

    def of(rows: ArrayLike) -> JointLaw:
        sorted_w = functools.cache(lambda: np.sort(statistics(draws(), np.asarray(rows))))
        return _law(sorted_w, len(np.asarray(rows)))

    everything = of(np.eye(len(process.view)))
    return everything._replace(of=of)


def _law(sorted_w: Callable[[], FloatArray], size: int) -> JointLaw:
    """Return the empirical law; the statistic counts as one of the draws, which is valid for any number of them."""

    def check(q: int) -> None:
        if q != size:
            raise refusal(
                "contrasts",
                f"be given to JointLaw.of, whose rows here are {size}",
                q,
                code="unsupported",
            )

    def quantile(level: float, q: int) -> float:
        check(q)
        place = math.ceil((sorted_w().size + 1) * checks.level(level) - 1e-9)
        return float(np.append(sorted_w(), np.inf)[place - 1])

    def tail(statistic: float, q: int) -> tuple[float, float]:
        check(q)
        count = sorted_w().size
        p = (1 + count - int(np.searchsorted(sorted_w(), statistic))) / (count + 1)
        return p, math.sqrt(p * (1 - p) / count)

    return JointLaw(quantile, tail)


def statistics(draws: PathDraws, rows: FloatArray) -> FloatArray:
    """Return W of every draw for contrasts R of the coordinates."""
    last = draws.last @ rows.T
    spread = rows @ draws.spread @ rows.T
    solved = np.linalg.solve(spread, last[..., None])[..., 0]
    return np.asarray(np.sum(last * solved, axis=-1), np.float64)


@np.errstate(over="ignore", invalid="ignore")
def simulate(plan: Plan, process: Process, draws: int = DRAWS, seed: int = _SEED) -> PathDraws:
    """Draw the process at the kept rounds."""
    nodes, weight = finite_horizon.nodes(plan, _NODES)
    leaps = make_leaps(plan, process, nodes)
    share = (nodes + 1.0) / plan.num_rounds
    fading = finite_horizon.start_path(plan, float(process.eigenvalues.max()), nodes)
    mean = plan.num_rounds * np.outer(fading, process.bias)
    generator = np.random.Generator(np.random.PCG64(seed))
    parts = [
        _chunk(generator, leaps, process.view, mean, np.sqrt(weight), share, count)
        for count in _counts(draws)
    ]
    found = PathDraws(*(np.concatenate(column) for column in zip(*parts, strict=True)))
    _check_finite(plan, process, *found)
    return found


def _counts(draws: int) -> list[int]:
    return [min(_CHUNK, draws - first) for first in range(0, draws, _CHUNK)]


def _chunk(
    generator: np.random.Generator,
    leaps: Leaps,
    view: FloatArray,
    mean: FloatArray,
    root: FloatArray,
    share: FloatArray,
    count: int,
) -> tuple[FloatArray, FloatArray]:
    dim = leaps.r.shape[1]
    s, P = np.zeros((count, dim)), np.zeros((count, dim))
    path = np.empty((len(share), count, len(view)))
    for n in range(len(share)):
        noise = generator.standard_normal((count, 2 * dim)) @ leaps.root[n].T
        P = P + leaps.u[n] * s + noise[:, dim:]
        s = leaps.r[n] * s + noise[:, :dim]
        path[n] = P @ view.T + mean[n]
    last = path[-1].copy()
    path -= share[:, None, None] * last
    path *= root[:, None, None]
    deviations = path.transpose(1, 2, 0)
    return last, deviations @ deviations.transpose(0, 2, 1)


@np.errstate(over="ignore", invalid="ignore")
def make_leaps(plan: Plan, process: Process, nodes: NDArray[np.int64]) -> Leaps:
    """Return the moments between kept rounds, for all leaps at once, round by round."""
    rho, noise = _rounds(plan, process)
    begin = np.append(0, nodes[:-1] + 1)
    count, dim = len(nodes), len(process.eigenvalues)
    r, u = np.ones((count, dim)), np.zeros((count, dim))
    ss, sP, PP = (np.zeros((count, dim, dim)) for _ in range(3))
    for step in range(int(np.max(nodes - begin)) + 1):
        on = begin + step <= nodes
        m = (begin + step)[on]
        rate = rho[m]
        r[on] *= rate
        u[on] += r[on]
        ss[on] = rate[:, :, None] * rate[:, None, :] * ss[on] + noise[m]
        crossed = rate[:, :, None] * sP[on]  # Cov(s_m, P_{m−1})
        PP[on] += crossed + crossed.transpose(0, 2, 1) + ss[on]
        sP[on] = crossed + ss[on]
    whole = np.block([[ss, sP], [sP.transpose(0, 2, 1), PP]])
    _check_finite(plan, process, whole, u)
    return Leaps(r, u, _roots(whole))


def _check_finite(plan: Plan, process: Process, *found: FloatArray) -> None:
    if not all(np.isfinite(each).all() for each in found):
        top = float(process.eigenvalues.max())
        rule = f"have first steps short enough for an eigenvalue λ = {top:.4g}"
        got = f"η_1 λ = {plan.eta[0] * top:.4g}, with which the path overflows"
        raise refusal("plan", rule, got, code="conflict")


def _rounds(plan: Plan, process: Process) -> tuple[FloatArray, FloatArray]:
    """Return ρ_m, (T, d), and Cov ε_m, (T, d, d)."""
    values, eta, E = process.eigenvalues, plan.eta[:, None], plan.E[:, None]
    step = eta * values
    noise = finite_horizon.pair_noise(
        values, finite_horizon.lost_share(step, E), eta[..., None], E[..., None], zero=1e-12
    )
    return finite_horizon.round_rate(step, E), noise * process.S


def _roots(covariances: FloatArray) -> FloatArray:
    """Return symmetric factors; by eigenvalues, because (s, P) of a leap of one round is degenerate."""
    size = np.sqrt(np.diagonal(covariances, axis1=1, axis2=2))
    size = np.where(size > 0, size, 1.0)
    values, vectors = np.linalg.eigh(covariances / (size[:, :, None] * size[:, None, :]))
    return size[:, :, None] * vectors * np.sqrt(np.maximum(values, 0.0))[:, None, :]
