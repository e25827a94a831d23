"""Problems outside the paper's regime, for `benchmarks.stress`: written as a user would write them."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxlsgd import Draws, OuterProduct, Problem, Scaled, problems


class Case(NamedTuple):
    """A cell of the stress test."""

    name: str
    problem: Problem
    schedule: str
    num_steps: int
    gamma0: float
    alpha: float = 0.505
    paper: bool = False  # one of the paper's own cells


def _dot(a: Any, b: Any) -> Any:
    return sum(a[i] * b[i] for i in range(a.shape[0]))


def observe_poisson(draws: Draws, client: Any) -> Any:
    """Return covariates and counts of rate exp(aᵀx*), a = ½ N(0, I), by inversion of one uniform."""
    a = 0.5 * draws.normal
    rate = jnp.exp(_dot(a, client))
    term = jnp.exp(-rate)
    below, count = term, jnp.zeros_like(rate)
    for k in range(1, 25):
        count = count + (draws.uniform[0] > below)
        term = term * rate / k
        below = below + term
    return a, count


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


def unlike(apart: float, seed: int, dim: int = 5) -> Problem:
    """Return least squares on four clients of covariances 1, 2, 4 and 8 whose optima are N(0, apart²), drawn once."""
    scales = np.sqrt(np.repeat(np.array([1.0, 2.0, 4.0, 8.0])[:, None], dim, 1))
    truths = apart * np.random.default_rng(seed).standard_normal(scales.shape)
    return dataclasses.replace(
        unequal(dim, len(scales), 1.0),
        clients=_Unequal(truths, scales),
        truth=(scales**2 * truths).mean(0) / (scales**2).mean(0),
        name="unlike",
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
    return found
