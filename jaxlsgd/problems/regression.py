"""Regressions on normal covariates: five losses, heavy-tailed noise, one covariance per client."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.forms import OuterProduct, Scaled
from jaxlsgd.core.problem import Array, Draws, Problem
from jaxlsgd.core.registry import register
from jaxlsgd.problems import losses
from jaxlsgd.problems._moments import Design, gaussian_optimum
from jaxlsgd.problems.losses import Conditional, Loss, Noise

Family = Literal["gaussian", "huber", "quantile", "logistic", "poisson"]
_MOST_DIM = 500
_GAMMA0 = {"gaussian": 0.5, "huber": 0.8, "quantile": 1.0, "logistic": 2.0, "poisson": 0.5}
_MOST_RATE = 40.0  # of a Poisson count, five standard deviations up


class RegressionClient(NamedTuple):
    """What differs between clients."""

    truth: Any  # (d,) x*_k
    factor: Any  # (d',) of independent covariates, or (d', d'): a = factor · w, w ~ N(0, I)
    noise: Any  # ()


class _Kind(NamedTuple):
    """A family with its numbers."""

    loss: Loss
    numbers: tuple[float, ...]
    respond: Callable[..., Array]
    extra: tuple[int, int]  # normals and uniforms of a response
    conditional: Conditional
    width: float
    location: bool


@register("problem")
def regression(
    dim: int,
    num_clients: int,
    family: Family = "gaussian",
    *,
    heterogeneity: float = 0.0,
    spread: float = 0.0,
    correlation: float = 0.0,
    intercept: bool = False,
    noise: float = 1.0,
    degrees: float | None = None,
    ridge: float = 0.0,
    delta: float = 1.345,
    tau: float = 0.5,
    bandwidth: float = 0.5,
    weights: ArrayLike | None = None,
    truth_seed: int = 0,
    center: ArrayLike | None = None,
    init: ArrayLike | None = None,
) -> Problem:
    """Regression by squares, Huber's loss, a smooth quantile, labels or counts, with heterogeneous clients.

    Client k observes (a, b). Its covariates are a = D_k w with w ~ N(0, Σ), Σ_ij = correlation^|i−j| and a
    diagonal D_k whose squares are uniform on 1 ± spread: with spread > 0, clients have **different
    Hessians**, and with heterogeneity > 0 as well their local steps drift apart. The truths are
    x*_k = center + heterogeneity · N(0, I). Both are drawn once from `truth_seed`. Given z_k = aᵀx*_k and with
    z = aᵀx, a client's response and loss are

        gaussian   b = z_k + noise · ε       ½(z − b)²
        huber      b = z_k + noise · ε       ½r² for |r| ≤ delta, else linear; r = z − b
        quantile   b = z_k + noise · ε       h log(1 + e^(r/h)) − tau · r, with h = bandwidth
        logistic   P(b = 1) = σ(z_k)         log(1 + eᶻ) − bz
        poisson    b ~ Poisson(e^z_k)        eᶻ − bz

    and + ridge/2 · ‖x‖² in each. ε is standard normal, or Student's t of some `degrees`: above 2, squares have a
    gradient with moments just above the second, as the paper's Assumption 3.2 requires.

    x*, G and S are integrals over the plane of Lᵀx and Lᵀx*_k, computed to about 1e-11; x* is where Newton's
    method ends. The paper's theory requires second derivatives that are bounded and Lipschitz: huber's jump, and
    those of poisson are unbounded, so that the theory does not cover these two.

    Args:
      dim: d, from 1 to 500, the intercept among them.
      num_clients: K.
      family: which of the five.
      heterogeneity: scale of the x*_k around the center, at least 0.
      spread: of the clients' variances, in [0, 1).
      correlation: of neighbouring covariates, in (−1, 1).
      intercept: whether the first covariate is 1. Without it the tau of a quantile has no effect.
      noise: scale of b − z_k, greater than 0; unused by logistic and poisson.
      degrees: ν of Student's law, greater than 0, and than 2 for squares; normal noise if None.
      ridge: λ, at least 0.
      delta: of huber, greater than 0.
      tau: of quantile, in (0, 1).
      bandwidth: of quantile, greater than 0.
      weights: p_k, (K,); uniform if None.
      truth_seed: seed of what is drawn, at least 0.
      center: (d,); if None, d equally spaced points from 0 to 1, shortened to length ½ for poisson.
      init: x_0, (d,); zeros if None.

    Returns:
      A problem with x*, G and S.

    Example:
      >>> problem = regression(3, 4, "huber", spread=0.5, heterogeneity=1.0)
      >>> problem.dim, problem.name
      (3, 'huber')
    """
    dim = checks.count("dim", dim, 1, _MOST_DIM)
    num_clients = checks.count("num_clients", num_clients, 1, 10**5)
    family = checks.choice("family", family, Family)
    covariates = dim - int(intercept)
    if not covariates:
        raise refusal("dim", "be at least 2 with an intercept", dim)
    kind = _kind(family, _noise(family, noise, degrees), delta, tau, bandwidth)
    ridge = checks.scale("ridge", ridge)
    seed = checks.count("truth_seed", truth_seed, 0)
    truths = _truths(
        dim, num_clients, family, checks.scale("heterogeneity", heterogeneity), seed, center
    )
    factors = _factors(covariates, num_clients, spread, correlation, seed)
    if family == "poisson":
        _check_rates(truths, factors, int(intercept))
    found = gaussian_optimum(
        Design(
            truths,
            factors if factors.ndim == 3 else factors[..., None] * np.eye(covariates),
            checks.weights(weights, num_clients),
            bool(intercept),
            kind.conditional,
            kind.width,
            kind.location,
            ridge,
        )
    )
    loss, gradient, hessian = _functions(kind.loss, kind.numbers, ridge)
    return Problem(
        init=np.zeros(dim) if init is None else checks.array("init", init, (dim,)),
        loss=loss,
        num_clients=num_clients,
        draws=Draws(covariates + kind.extra[0], kind.extra[1]),
        observe=_observer(kind.respond, covariates, bool(intercept), factors.ndim == 3),
        weights=weights,
        truth=found.x,
        clients=RegressionClient(truths, factors, np.full(num_clients, float(noise))),
        gradient=gradient,
        hessian=hessian,
        G=found.G,
        S=found.S,
        name=family,
        convex=True,
        gamma0=_GAMMA0[family],
    )


def _noise(family: Family, noise: float, degrees: float | None) -> Noise:
    scale = checks.positive("noise", noise)
    if degrees is None:
        return Noise(scale, None)
    if family in ("logistic", "poisson"):
        raise refusal(
            "degrees",
            f"be None for {family}, which has no noise of its own",
            degrees,
            code="unwanted",
        )
    least = 2.0 if family == "gaussian" else 0.0
    rule = f"be a number greater than {least:g} for {family}"
    return Noise(scale, checks.number("degrees", degrees, rule, least))


def _kind(family: Family, noise: Noise, delta: float, tau: float, bandwidth: float) -> _Kind:
    student = noise.degrees is not None
    respond = losses.respond_student(noise.degrees) if student else losses.respond_normal
    extra = (0, 3) if student else (1, 0)
    if family == "logistic":
        moments = losses.logistic_moments()
        return _Kind(losses.LOGISTIC, (), losses.respond_label, (0, 1), moments, 1.0, False)
    if family == "poisson":
        moments = losses.poisson_moments()
        return _Kind(losses.POISSON, (), losses.respond_count, (0, 1), moments, 1.0, False)
    if family == "huber":
        c = checks.positive("delta", delta)
        moments = losses.huber_moments(noise, c)
        return _Kind(losses.HUBER, (c,), respond, extra, moments, noise.width, True)
    if family == "quantile":
        tau, h = checks.level(tau, "tau"), checks.positive("bandwidth", bandwidth)
        moments = losses.quantile_moments(noise, tau, h)
        return _Kind(losses.QUANTILE, (tau, h), respond, extra, moments, noise.width, True)
    moments = losses.squared_moments(noise)
    return _Kind(losses.SQUARED, (), respond, extra, moments, np.inf, True)


def _truths(
    dim: int, num_clients: int, family: Family, heterogeneity: float, seed: int, center: Any
) -> np.ndarray:
    middle = np.linspace(0.0, 1.0, dim) if dim > 1 else np.array([0.5])
    if family == "poisson":
        middle = 0.5 * middle / np.linalg.norm(middle)
    if center is not None:
        middle = checks.array("center", center, (dim,))
    unit = np.random.Generator(np.random.PCG64(seed)).standard_normal((num_clients, dim))
    return middle + heterogeneity * unit


def _factors(
    covariates: int, num_clients: int, spread: float, correlation: float, seed: int
) -> np.ndarray:
    """Return D_k times the root of Σ, (K, d', d'); a diagonal, (K, d'), if covariates are independent."""
    if not 0 <= checks.number("spread", spread) < 1:
        raise refusal("spread", "be in [0, 1)", spread)
    if not -1 < checks.number("correlation", correlation) < 1:
        raise refusal("correlation", "be in (-1, 1)", correlation)
    rng = np.random.Generator(np.random.PCG64([seed, 1]))
    scales = np.sqrt(rng.uniform(1 - spread, 1 + spread, (num_clients, covariates)))
    if correlation == 0:
        return scales
    apart = np.abs(np.subtract.outer(np.arange(covariates), np.arange(covariates)))
    return scales[:, :, None] * np.linalg.cholesky(float(correlation) ** apart)


def _check_rates(truths: np.ndarray, factors: np.ndarray, first: int) -> None:
    slopes = truths[:, first:]
    roots = factors if factors.ndim == 3 else factors[..., None] * np.eye(slopes.shape[1])
    white = np.einsum("kij,ki->kj", roots, slopes)
    level = truths[:, 0] if first else 0.0
    largest = float(np.exp(np.max(level + 5 * np.linalg.norm(white, axis=1))))
    if largest > _MOST_RATE:
        rule = f"keep a client's rates below {_MOST_RATE:g} five standard deviations up"
        hint = "; lower center, heterogeneity or spread"
        raise refusal("center", rule, float(f"{largest:.3g}"), hint)


@functools.cache
def _observer(
    respond: Callable[..., Array], covariates: int, intercept: bool, correlated: bool
) -> Callable[[Draws, Any], tuple[Array, Array]]:
    def observe(draws: Draws, client: Any) -> tuple[Array, Array]:
        w = draws.normal[:covariates]
        a = client.factor @ w if correlated else client.factor * w
        if intercept:
            a = jnp.concatenate([jnp.ones_like(w[:1]), a])
        z = a @ client.truth
        return a, respond(z, draws.normal[covariates:], draws.uniform, client.noise)

    return observe


@functools.cache
def _functions(
    loss: Loss, numbers: tuple[float, ...], ridge: float
) -> tuple[Callable[..., Any], ...]:
    """Loss, gradient and Hessian of an observation (a, b)."""

    def value(params: Any, observation: Any) -> Any:
        a, b = observation
        return loss.value(jnp, a @ params, b, numbers)

    def gradient(params: Any, observation: Any) -> Any:
        a, b = observation
        return Scaled(loss.first(jnp, a @ params, b, numbers), a)

    def hessian(params: Any, observation: Any) -> Any:
        a, b = observation
        return OuterProduct(a, loss.second(jnp, a @ params, b, numbers))

    if ridge == 0:
        return value, gradient, hessian

    def penalised(params: Any, observation: Any) -> Any:
        return value(params, observation) + 0.5 * ridge * (params @ params)

    def penalised_gradient(params: Any, observation: Any) -> Any:
        scale, a = gradient(params, observation)
        return scale * a + ridge * params

    def penalised_hessian(params: Any, observation: Any) -> Any:
        a, weight = hessian(params, observation)
        return weight * (a[:, None] * a[None, :]) + ridge * jnp.eye(a.shape[0], dtype=a.dtype)

    return penalised, penalised_gradient, penalised_hessian
