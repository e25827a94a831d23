"""Plug-in: intervals from running estimates of the Hessian G and the gradient covariance S.

With two averages, over rounds and over observations, and for each the covariance in the limit and at a finite
horizon (`finite_horizon`). `plug_in` builds all four; start reading there.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.estimator import Accumulator, Estimator, Horizon, Measurement, Sync
from jaxlsgd.core.problem import Array, Params, flatten
from jaxlsgd.core.registry import register
from jaxlsgd.inference.finite_horizon import HorizonFactors, horizon_factors
from jaxlsgd.inference.laws.standard import NORMAL
from jaxlsgd.inference.sums import Average, compensated_add, path_mean, widened

Covariance = Literal["asymptotic", "finite"]
_COST = "a gradient and a Hessian per client and round to the server; memory 2d² + 3d"
_FLOOR = 1e-6  # smallest eigenvalue of Ĝ allowed, as a share of the largest


class PlugInState(NamedTuple):
    """Running means of Hessians and squared gradients, and the path's mean."""

    G: Array  # (d, d)
    S: Array  # (d, d)
    mean: Array  # (d,) ȳ_m
    lost: Array  # (d,) rounding error of ȳ_m so far
    s: Array  # () Σ 1/E_n
    s_lost: Array  # ()
    m: Array  # () int32
    start: Array  # (d,) x_0


@functools.cache
def curvature() -> Accumulator:
    """Return the streaming statistic Ĝ = (1/m) Σ Σ_k p_k ∇²f_k(x̄; ξ^k) and Ŝ = (1/m) Σ g gᵀ, g = Σ_k p_k ∇f_k(x̄; ξ^k)."""

    def init(params: Params) -> PlugInState:
        x = widened(flatten(params))
        y, zero = jnp.zeros_like(x), jnp.zeros((), x.dtype)
        square = y[:, None] * y[None, :]
        return PlugInState(square, square, y, y, zero, zero, jnp.zeros((), jnp.int32), x)

    def update(state: PlugInState, sync: Sync) -> PlugInState:
        if sync.gradient is None or sync.hessian is None:
            rule = "have gradient and hessian at the average, which plug_in needs"
            raise refusal("sync", rule, None, code="missing")
        x, g = widened(flatten(sync.params)), widened(flatten(sync.gradient))
        m = state.m + 1
        share = jnp.asarray(1, x.dtype) / m.astype(x.dtype)
        E = jnp.asarray(sync.E, x.dtype)
        mean, lost = compensated_add(
            state.mean, state.lost, ((x - state.mean) - state.lost) * share
        )
        s, s_lost = compensated_add(state.s, state.s_lost, 1 / E)
        G = state.G + (sync.hessian - state.G) * share
        S = state.S + (g[:, None] * g[None, :] - state.S) * share
        return PlugInState(G, S, mean, lost, s, s_lost, m, state.start)

    shared = ("s", "s_lost", "m")
    return Accumulator(
        init, update, needs_gradient=True, needs_hessian=True, shared=shared, any_width=True
    )


class Eigenbasis(NamedTuple):
    """Ĝ = Q diag(λ) Qᵀ with eigenvalues kept above a floor, and S̃ = QᵀŜQ."""

    eigenvalues: Array  # (d,)
    vectors: Array  # (d, d), columns
    S: Array  # (d, d)
    floored: Array  # () bool

    def rotate_back(self, middle: Array) -> Array:
        """Return Q · middle · Qᵀ."""
        return product(product(self.vectors, middle), self.vectors.mT)


def product(A: Array, B: Array) -> Array:
    """Return the product of matrices, of JAX in full precision."""
    if isinstance(B, np.ndarray):
        return A @ B
    return jnp.matmul(A, B, precision=lax.Precision.HIGHEST)


def eigenbasis(state: PlugInState) -> Eigenbasis:
    """Return the eigendecomposition of Ĝ with a floor on its eigenvalues, and whether that floor acted.

    Eigenvalues rather than Cholesky: the finite-horizon formulas need them, a floor can be put on
    them, and `eigh` compiles for every accelerator, unlike a general solve. NumPy states may have leading axes.
    """
    xp, S = state.G.__array_namespace__(), state.S
    G = (state.G + state.G.mT) / 2
    if xp is np:
        G, S = G.astype(np.float64), S.astype(np.float64)
    finite = xp.all(xp.isfinite(G), (-2, -1))
    identity = xp.eye(G.shape[-1], dtype=G.dtype)
    values, Q = xp.linalg.eigh(xp.where(finite[..., None, None], G, identity))
    floor = _FLOOR * xp.max(xp.abs(values), -1)
    low = xp.any(values < floor[..., None], -1)
    values = xp.where(finite[..., None], xp.maximum(values, floor[..., None]), xp.nan)
    S = product(Q.mT, product(S, Q))
    return Eigenbasis(values, Q, S, low & finite)


@register("method", brief="horizon")
def plug_in(
    horizon: Covariance = "asymptotic",
    *,
    average: Average = "rounds",
    name: str | None = None,
) -> Estimator:
    """Plug-in: ȳ_j ± z √Cov(ȳ)_jj with the covariance from running Ĝ and Ŝ.

    "asymptotic" is the paper's Cov(ȳ) = ν̂ Ĝ⁻¹ŜĜ⁻ᵀ/t_T, which is too small at short horizons.
    "finite" is the covariance of the linearised Local SGD recursion under the plan; see
    `finite_horizon`. In the paper's models it covers as often as it claims, but it ignores multiplicative
    noise and the bias that the start leaves: in logistic regression under C5 at t_T = 2,000 its 95 %
    intervals covered 85 % with one client, 86 % at alpha = 0.8 and 1 % from a start 3 away
    (`benchmarks.stress`), and those of `one_step` 96, 94 and 96 %. `one_step` is the first default method
    of `fit`; use this one if ȳ must be reported.

    Args:
      horizon: "asymptotic" or "finite". A study in float32 interpolates the finite factors in the eigenvalues of Ĝ,
        which moves half-widths by about 1e-6; one in float64 does not.
      average: "rounds", the paper's ȳ = Σ x̄_m/T; or "observations", ȳ = Σ E_m x̄_m/t_T, whose covariance tends
        to G⁻¹SG⁻ᵀ/t_T under every schedule, without the ν of the paper.
      name: name in tables; made from the arguments if None.

    Returns:
      An `Estimator`. Its `update` needs `sync.gradient` and `sync.hessian`.

    Example::

        estimator = plug_in()
        state = estimator.init(jnp.zeros(2))
        sync = Sync(params=jnp.ones(2), E=1, eta=0.1, gradient=jnp.ones(2), hessian=jnp.eye(2))
        estimator.interval(estimator.update(state, sync), level=0.95)

    Reference: Li, Liang, Chang, Zhang, Section 4.1.
    """
    checks.choice("horizon", horizon, Covariance)
    checks.choice("average", average, Average)
    finite, observations = horizon == "finite", average == "observations"
    given = ", ".join(["finite"] * finite + ["observations"] * observations)
    label = ", observations" * observations + ", finite horizon" * finite
    measure, matrix = _functions(finite, observations)
    return Estimator(
        name=name or "plug_in" + (f"[{given}]" if given else ""),
        accumulators=(curvature(), path_mean(True)) if observations else (curvature(),),
        measure=measure,
        law=NORMAL,
        matrix=matrix,
        standard_error=True,
        needs_plan=finite,
        reads_tiles=finite,
        label=f"plug-in{label}",
        cost=_COST,
    )


class FiniteDetail(NamedTuple):
    """Effects of the finite horizon on a run, coordinate by coordinate."""

    inflation: Array  # (d,) finite over asymptotic standard error
    transient: Array  # (d,) estimated bias that the start leaves


@functools.cache
def _functions(finite: bool, observations: bool) -> tuple[Any, Any]:
    """Return `measure` and `matrix` of an estimator."""

    def covariance(
        states: tuple[Any, ...], horizon: Horizon | None
    ) -> tuple[Array, Eigenbasis, HorizonFactors | None]:
        basis = eigenbasis(states[0])
        if not finite:
            return limit(states, basis), basis, None
        assert horizon is not None
        factors = horizon_factors(basis.eigenvalues, horizon, observations)
        return basis.rotate_back(factors.pair * basis.S), basis, factors

    def limit(states: tuple[Any, ...], basis: Eigenbasis) -> Array:
        """Return ν̂ Ĝ⁻¹ŜĜ⁻ᵀ/t_T, without ν̂ for the average over observations."""
        values, xp = basis.eigenvalues, basis.S.__array_namespace__()
        sandwich = basis.rotate_back(basis.S / (values[..., :, None] * values[..., None, :]))
        if observations:
            return sandwich / xp.maximum(states[1].t, 1).astype(basis.S.dtype)
        rounds = xp.maximum(states[0].m, 1).astype(basis.S.dtype)
        # ν̂/t_T = (Σ1/E)/T²
        return sandwich * (states[0].s / rounds / rounds)

    def matrix(states: tuple[Any, ...], horizon: Horizon | None) -> Array:
        return covariance(states, horizon)[0]

    def measure(states: tuple[Any, ...], horizon: Horizon | None) -> Measurement:
        found, basis, factors = covariance(states, horizon)
        xp = found.__array_namespace__()
        variance = xp.diagonal(found, axis1=-2, axis2=-1)
        scale = xp.sqrt(xp.where(variance >= 0, variance, xp.nan))
        scale = xp.where(states[0].m < 1, xp.inf, scale)
        average = states[1] if observations else states[0]
        estimate = average.mean + average.lost
        if factors is None:
            return Measurement(estimate, scale, basis.floored)
        Q = basis.vectors
        turned = xp.sum(Q * (states[0].start - estimate)[..., :, None], axis=-2)
        transient = xp.sum(Q * (factors.start * turned)[..., None, :], axis=-1)
        inflation = scale / xp.sqrt(xp.diagonal(limit(states, basis), axis1=-2, axis2=-1))
        return Measurement(estimate, scale, basis.floored, FiniteDetail(inflation, transient))

    return measure, matrix
