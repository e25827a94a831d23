"""Problems outside the paper's regime, for `benchmarks.stress`: written as a user would write them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
import scipy.optimize

from jaxlsgd import (
    Algorithm,
    Draws,
    OuterProduct,
    Plan,
    Problem,
    Scaled,
    algorithms,
    problems,
    schedules,
)


class Case(NamedTuple):
    """A cell of the stress test."""

    name: str
    problem: Problem
    schedule: str
    num_steps: int
    gamma0: float
    alpha: float = 0.505
    paper: bool = False  # one of the paper's own cells
    algorithm: Algorithm = algorithms.local_sgd()
    constant: bool = False  # steps of gamma0 that do not fall
    rare: bool = False  # rare outcomes, or other reasons why runs may have no interval

    @property
    def plain(self) -> bool:
        """Whether it is Local SGD as in the paper, which all methods are run for."""
        usual = not (self.constant or self.rare or "drift" in self.name)
        return self.algorithm.within_theory and usual

    def plan(self) -> Plan:
        """Return the plan; C with a number has rounds of that length."""
        family = schedules.constant(int(self.schedule[1:])) if self.schedule[0] == "C" else None
        family = family or schedules.paper(self.schedule)
        if self.plain:
            family = family.with_warmup(0.05)
        step = schedules.power_decay(self.gamma0, self.alpha)
        if self.constant:
            step = schedules.constant_step(self.gamma0)
        return family.plan(step, num_steps=self.num_steps)


def _dot(a: Any, b: Any) -> Any:
    return sum(a[i] * b[i] for i in range(a.shape[0]))


def observe_poisson(draws: Draws, client: Any) -> Any:
    """Return covariates and counts of rate exp(aᵀx*), a = ½ N(0, I), by inversion of one uniform."""
    a = 0.5 * draws.normal
    return a, observe_count(draws.uniform[0], jnp.exp(_dot(a, client)))


def observe_count(uniform: Any, rate: Any) -> Any:
    """Return a Poisson count of a uniform."""
    term = jnp.exp(-rate)
    below, count = term, jnp.zeros_like(rate)
    for k in range(1, 25):
        count = count + (uniform > below)
        term = term * rate / k
        below = below + term
    return count


def poisson(dim: int, num_clients: int) -> Problem:
    """Return Poisson regression, whose gradient noise grows with the rate."""
    truth = np.linspace(0.0, 1.0, dim)
    return Problem(
        init=np.zeros(dim),
        loss=lambda x, seen: jnp.exp(_dot(seen[0], x)) - seen[1] * _dot(seen[0], x),
        num_clients=num_clients,
        draws=Draws(normal=dim, uniform=1),
        observe=observe_poisson,
        clients=np.tile(truth, (num_clients, 1)),
        truth=truth,
        gradient=lambda x, seen: Scaled(jnp.exp(_dot(seen[0], x)) - seen[1], seen[0]),
        hessian=lambda x, seen: OuterProduct(seen[0], jnp.exp(_dot(seen[0], x))),
        name="poisson",
        gamma0=2.0,
    )


SLOPES = np.array([0.5, -0.5, 0.5])


def observe_rare(draws: Draws, client: Any) -> Any:
    """Return 1 and three normal covariates, and a rare event or a small count by inversion of one uniform."""
    a = jnp.concatenate([jnp.ones(1, draws.normal.dtype), client.scale * draws.normal])
    z = _dot(a, client.truth)
    p = 1 / (1 + jnp.exp(-z))
    event = (draws.uniform[0] < p).astype(a.dtype)
    return a, jnp.where(client.counts, observe_count(draws.uniform[0], jnp.exp(z)), event)


class _Rare(NamedTuple):
    truth: Any
    scale: Any  # of the covariates
    counts: Any


def rare(intercept: float, num_clients: int, counts: bool = False) -> Problem:
    """Return logistic regression with few events, or Poisson regression with few counts, that starts at 0.

    With a = (1, z) and Z the normal along the slopes, E[w(Z) a aᵀ] has the moments of w, wZ and wZ². Covariates of
    counts have half the scale, so that Local SGD does not explode from 0.
    """
    size, scale = np.linalg.norm(SLOPES), 0.5 if counts else 1.0
    truth, units = np.concatenate([[intercept], SLOPES / scale]), np.array([1.0, *[scale] * 3])
    nodes, weights = np.polynomial.hermite_e.hermegauss(200)
    mean = np.exp(intercept + size * nodes)
    w = weights / weights.sum() * (mean if counts else mean / (1 + mean) ** 2)
    m, along = [float(w @ nodes**k) for k in range(3)], SLOPES / size
    inner = m[0] * np.eye(3) + (m[2] - m[0]) * np.outer(along, along)
    G = np.block([[np.array([[m[0]]]), m[1] * along[None]], [m[1] * along[:, None], inner]])
    G = units[:, None] * G * units

    def value(z: Any) -> Any:
        return jnp.exp(z) if counts else jnp.logaddexp(0.0, z)

    def slope(z: Any) -> Any:
        return jnp.exp(z) if counts else 1 / (1 + jnp.exp(-z))

    def curvature(z: Any) -> Any:
        return jnp.exp(z) if counts else 1 / (4 * jnp.cosh(z / 2) ** 2)

    return Problem(
        init=np.zeros(4),
        loss=lambda x, seen: value(_dot(seen[0], x)) - seen[1] * _dot(seen[0], x),
        num_clients=num_clients,
        draws=Draws(normal=3, uniform=1),
        observe=observe_rare,
        clients=_Rare(
            np.tile(truth, (num_clients, 1)),
            np.full(num_clients, scale),
            np.full(num_clients, counts),
        ),
        truth=truth,
        G=G,
        S=G / num_clients,
        gradient=lambda x, seen: Scaled(slope(_dot(seen[0], x)) - seen[1], seen[0]),
        hessian=lambda x, seen: OuterProduct(seen[0], curvature(_dot(seen[0], x))),
        name="poisson" if counts else "logistic",
        gamma0=2.0,
    )


def observe_heavy(draws: Draws, client: Any) -> Any:
    """Return an observation of a linear model whose covariates are Student's t with three degrees of freedom."""
    scale = jnp.sqrt(3 / jnp.sum(draws.normal[-3:] ** 2))
    a = scale * draws.normal[:-4]
    return a, _dot(a, client) + draws.normal[-4]


def heavy(dim: int, num_clients: int) -> Problem:
    """Return least squares whose Hessians have no variance."""
    truth = np.linspace(0.0, 1.0, dim)
    G = 3 * np.eye(dim)
    return Problem(
        init=np.zeros(dim),
        loss=lambda x, seen: 0.5 * (_dot(seen[0], x) - seen[1]) ** 2,
        num_clients=num_clients,
        draws=Draws(normal=dim + 4),
        observe=observe_heavy,
        clients=np.tile(truth, (num_clients, 1)),
        truth=truth,
        G=G,
        S=G / num_clients,
        gradient=lambda x, seen: Scaled(_dot(seen[0], x) - seen[1], seen[0]),
        hessian=lambda x, seen: OuterProduct(seen[0]),
        name="linear",
        gamma0=0.1,
    )


def observe_contaminated(draws: Draws, client: Any) -> Any:
    """Return an observation of a linear model; one in ten has noise ten times as large."""
    a, noise = draws.normal[:-1], draws.normal[-1]
    return a, _dot(a, client) + jnp.where(draws.uniform[0] < 0.1, 10.0, 1.0) * noise


def huber(dim: int, num_clients: int) -> Problem:
    """Return Huber regression with contaminated noise; derivatives by JAX."""
    truth = np.linspace(0.0, 1.0, dim)

    def loss(x: Any, seen: Any) -> Any:
        r = jnp.abs(_dot(seen[0], x) - seen[1])
        return jnp.where(r <= 1.345, 0.5 * r * r, 1.345 * (r - 0.5 * 1.345))

    return Problem(
        init=np.zeros(dim),
        loss=loss,
        num_clients=num_clients,
        draws=Draws(normal=dim + 1, uniform=1),
        observe=observe_contaminated,
        clients=np.tile(truth, (num_clients, 1)),
        truth=truth,
        name="huber",
        gamma0=0.8,
    )


class _Unequal(NamedTuple):
    truth: Any
    scale: Any


def observe_unequal(draws: Draws, client: Any) -> Any:
    """Return an observation of a linear model whose covariates have variances of the client's own."""
    a = client.scale * draws.normal[:-1]
    return a, _dot(a, client.truth) + draws.normal[-1]


def unequal(dim: int, num_clients: int, heterogeneity: float) -> Problem:
    """Return least squares on clients with Hessians of their own, so that local steps drift."""
    rng = np.random.default_rng(7)
    scales = np.sqrt(rng.uniform(0.25, 1.75, (num_clients, dim)))
    truths = heterogeneity * rng.standard_normal((num_clients, dim))
    G = (scales**2).mean(0)
    return Problem(
        init=np.zeros(dim),
        loss=lambda x, seen: 0.5 * (_dot(seen[0], x) - seen[1]) ** 2,
        num_clients=num_clients,
        draws=Draws(normal=dim + 1),
        observe=observe_unequal,
        clients=_Unequal(truths, scales),
        truth=(scales**2 * truths).mean(0) / G,
        gradient=lambda x, seen: Scaled(_dot(seen[0], x) - seen[1], seen[0]),
        hessian=lambda x, seen: OuterProduct(seen[0]),
        name="unequal",
        gamma0=0.5,
    )


def unlike(
    apart: float, seed: int, dim: int = 5, variances: Sequence[float] = (1.0, 2.0, 4.0, 8.0)
) -> Problem:
    """Return least squares on clients of these covariances whose optima are N(0, apart²), drawn once."""
    scales = np.sqrt(np.repeat(np.array(variances)[:, None], dim, 1))
    truths = apart * np.random.default_rng(seed).standard_normal(scales.shape)
    return dataclasses.replace(
        unequal(dim, len(scales), 1.0),
        clients=_Unequal(truths, scales),
        truth=(scales**2 * truths).mean(0) / (scales**2).mean(0),
        name="unlike",
    )


def observe_scaled_logistic(draws: Draws, client: Any) -> Any:
    """Return an observation of a logistic model whose covariates have the client's own scale."""
    a = client.scale * draws.normal
    return a, (draws.uniform[0] < 1 / (1 + jnp.exp(-_dot(a, client.truth)))).astype(a.dtype)


def unlike_logistic(scales: Sequence[float], apart: float, seed: int, dim: int = 5) -> Problem:
    """Return logistic regression on clients with covariates s_k N(0, I) whose optima are 0.5 + N(0, apart²).

    By Stein's lemma E[σ(aᵀx) a] = s² E[σ'(s |x| Z)] x, so that x* is the zero of a sum of integrals over one normal.
    """
    s = np.array(scales)
    truths = 0.5 + apart * np.random.default_rng(seed).standard_normal((len(s), dim))
    nodes, weights = np.polynomial.hermite_e.hermegauss(200)
    weights = weights / weights.sum()

    def pull(x: np.ndarray) -> np.ndarray:
        slope = 1 / (
            4 * np.cosh(s[:, None] * np.linalg.norm(x, axis=-1)[..., None] * nodes / 2) ** 2
        )
        return (s**2 * (slope @ weights))[:, None] * x

    x = scipy.optimize.root(
        lambda x: pull(np.tile(x, (len(s), 1))).mean(0) - pull(truths).mean(0),
        truths.mean(0),
        tol=1e-13,
    ).x
    return Problem(
        init=np.zeros(dim),
        loss=lambda x, seen: jnp.logaddexp(0.0, _dot(seen[0], x)) - seen[1] * _dot(seen[0], x),
        num_clients=len(s),
        draws=Draws(normal=dim, uniform=1),
        observe=observe_scaled_logistic,
        clients=_Unequal(truths, s),
        truth=x,
        gradient=lambda x, seen: Scaled(1 / (1 + jnp.exp(-_dot(seen[0], x))) - seen[1], seen[0]),
        hessian=lambda x, seen: OuterProduct(
            seen[0], 1 / (4 * jnp.cosh(_dot(seen[0], x) / 2) ** 2)
        ),
        name="unlike logistic",
        gamma0=1.0,
    )


def conditioned(dim: int, condition: float) -> np.ndarray:
    """Return a covariance with eigenvalues spread over a condition number, of mean 1."""
    rotation = np.linalg.qr(np.random.default_rng(0).normal(size=(dim, dim)))[0]
    values = np.geomspace(1.0, condition, dim)
    found = rotation * (values / values.mean()) @ rotation.T
    return (found + found.T) / 2


def cases() -> list[Case]:
    """Return all cells."""
    linear, logistic = problems.paper_linear(), problems.paper_logistic()
    schedules = ("C1", "C5", "Log", "P(1/3)", "P(1/2)")
    found = [
        Case("paper", problem, schedule, steps, problem.gamma0 or 0.0, paper=True)
        for problem in (linear, logistic)
        for steps in (500, 2_000, 5_000)
        for schedule in schedules
    ]
    hard: list[tuple[str, Problem, float, float, int]] = []
    for K in (1, 2, 50):
        hard += [
            (f"K={K}", problems.linear(5, K), 0.5, 0.505, 2_000),
            (f"K={K}", problems.logistic(5, K), 2.0, 0.505, 2_000),
        ]
    hard += [
        ("d=1", problems.linear(1, 10), 0.5, 0.505, 2_000),
        ("d=1", problems.logistic(1, 10, center=[1.0]), 2.0, 0.505, 2_000),
        ("", poisson(5, 10), 2.0, 0.505, 2_000),
        ("K=1", poisson(5, 1), 1.0, 0.505, 5_000),
        ("", huber(5, 10), 0.8, 0.505, 2_000),
        ("heterogeneity 1", unequal(5, 10, 1.0), 0.5, 0.505, 2_000),
        ("heterogeneity 3", unequal(5, 10, 3.0), 0.5, 0.505, 2_000),
        ("start 10 away", problems.linear(5, 10, init=np.full(5, 10.0)), 0.5, 0.505, 2_000),
        ("start 3 away", problems.logistic(5, 10, init=np.full(5, 3.0)), 2.0, 0.505, 2_000),
        ("gamma0 small", problems.linear(5, 10), 0.1, 0.505, 2_000),
        ("gamma0 small", problems.logistic(5, 10), 0.5, 0.505, 2_000),
        ("gamma0 large", problems.linear(5, 10), 4.0, 0.505, 2_000),
        ("gamma0 large", problems.logistic(5, 10), 8.0, 0.505, 2_000),
        ("alpha 0.8", problems.linear(5, 10), 0.5, 0.8, 2_000),
        ("alpha 0.8", problems.logistic(5, 10), 2.0, 0.8, 2_000),
        ("d=20", problems.linear(20, 10), 0.3, 0.505, 5_000),
        (
            "d=20, condition 20",
            problems.linear(20, 10, covariance=conditioned(20, 20.0)),
            0.3,
            0.505,
            5_000,
        ),
    ]
    for name, problem, gamma0, alpha, steps in hard:
        found += [
            Case(name, problem, schedule, steps, gamma0, alpha) for schedule in ("C5", "P(1/2)")
        ]
    return found + drifting() + optimised() + hardest()


def hardest() -> list[Case]:
    """Return cells with rare outcomes, heavy tails, far starts and short runs: some runs have no interval."""
    at_5 = problems.logistic(5, 10, init=np.full(5, 5.0))
    cells = [
        ("2 % events", rare(-4.25, 10), (1_000, 2_000), 2.0),
        ("2 % events, K=2", rare(-4.25, 2), (2_000,), 2.0),
        ("1 % events, K=4", rare(-5.0, 4), (2_000,), 2.0),
        ("intercept -3.5", rare(-3.5, 10, counts=True), (1_000, 2_000), 2.0),
        ("t3 covariates", heavy(5, 10), (500, 2_000), 0.1),
        ("t3 covariates, K=1", heavy(5, 1), (2_000,), 0.1),
        ("start 5 away", at_5, (2_000,), 2.0),
        ("K=2", problems.logistic(5, 2), (300,), 2.0),
    ]
    return [
        Case(name, problem, "C5", steps, gamma0, rare=True)
        for name, problem, horizons, gamma0 in cells
        for steps in horizons
    ]


def beyond() -> list[Case]:
    """Return cells beyond what `one_step` is made for, for `benchmarks.limits`."""
    apart = problems.logistic(5, 1, center=np.full(5, 7.0 / np.sqrt(5)))
    cells = [
        ("2 % events, K=2", rare(-4.25, 2), (320, 400, 600, 1_000)),
        ("nearly separable (norm of x* 7), K=1", apart, (500, 1_000, 2_000)),
    ]
    return [
        Case(name, problem, "C5", steps, 2.0, rare=True)
        for name, problem, horizons in cells
        for steps in horizons
    ]


def drifting() -> list[Case]:
    """Return cells in which clients with other Hessians and other optima pull long rounds aside."""
    four, two = unlike(1.0, seed=21), unlike(1.0, seed=22, variances=(1.0, 10.0))
    many = unlike(0.5, 23, variances=np.random.default_rng(5).lognormal(0.0, 1.0, 50).tolist())
    scaled = unlike_logistic((0.5, 1.0, 2.0, 4.0), 0.5, seed=24)
    cells = [("1 to 8", four, 0.13), ("1 and 10", two, 0.1), ("lognormal, K=50", many, 0.2)]
    cells += [
        ("scales 0.5 to 4, gamma0 1", scaled, 1.0),
        ("scales 0.5 to 4, gamma0 2", scaled, 2.0),
    ]
    return [
        Case(f"drift, {name}", problem, schedule, 10_000, gamma0)
        for name, problem, gamma0 in cells
        for schedule in ("C5", "C50")
    ]


def optimised() -> list[Case]:
    """Return other optimisers than Local SGD with decreasing steps, on clients that are alike and unlike."""
    alike = problems.logistic(5, 10)
    scaled = unlike_logistic(np.geomspace(0.5, 2.0, 10).tolist(), 0.5, seed=25)
    ways = [
        ("constant step", algorithms.local_sgd(), 0.2, True),
        ("local momentum", algorithms.local_momentum(0.9), 0.2, False),
        ("local Adam", algorithms.local_optimizer(optax.adam(1.0), "local Adam"), 0.2, False),
        ("clipped", algorithms.clipping(0.5), 1.0, False),
        ("FedAdam", algorithms.server_adam(), 1.0, False),
        ("SCAFFOLD", algorithms.scaffold(), 1.0, False),
        ("5 of 10", algorithms.participation(5), 1.0, False),
        ("dropout", algorithms.client_dropout(0.3), 1.0, False),
    ]
    return [
        Case(name, problem, schedule, 5_000, gamma0, 0.505, False, algorithm, constant)
        for problem in (alike, scaled)
        for name, algorithm, gamma0, constant in ways
        for schedule in ("C5", "C10", "C50")
    ]
