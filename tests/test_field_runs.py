"""Methods of the field in the engine: trees of federations, federations side by side, perturbed copies."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import numpy as np
import oracle as slow
import pytest
from engine_helpers import numpy_draws

from jaxlsgd import Draws, Problem, problems, simulate
from jaxlsgd.inference.rivals.bootstrap import bootstrap, perturbed
from jaxlsgd.inference.rivals.higrad import grow
from jaxlsgd.inference.rivals.hulc import hulc
from jaxlsgd.inference.rivals.parallel_runs import parallel_runs, split
from jaxlsgd.schedules import Plan

pytestmark = pytest.mark.for_users

CLIENTS, COUNT = 4, 3
PLAN = Plan.from_arrays([1, 2, 3, 1, 2, 3], [0.3, 0.2, 0.1, 0.2, 0.1, 0.1])
STEPS = int(PLAN.E.sum())


def key() -> jax.Array:
    return jax.random.key(31)


@functools.cache
def linear() -> Problem:
    return problems.linear(2, CLIENTS, heterogeneity=0.0)


@functools.cache
def draws() -> Draws:
    """(t, K, count, replications)."""
    spec = linear().draws
    assert spec is not None
    return numpy_draws(key(), range(COUNT), STEPS + 1, range(CLIENTS), spec)


def federation(r: int, clients: slice, rounds: slice, start: np.ndarray) -> np.ndarray:
    """The averages of a federation of some clients over some rounds, (rounds, d)."""
    first = int(PLAN.E[: rounds.start].sum())
    drawn = slow.Draws(*(part[first:, clients, :, r] for part in draws()))
    truths = np.tile(np.asarray(linear().truth), (CLIENTS, 1))
    K = clients.stop - clients.start
    model, weights = slow.MODELS["linear"], np.full(K, 1 / K)
    E, eta = PLAN.E[rounds], PLAN.eta[rounds]
    return slow.local_sgd(model, drawn, truths[clients], weights, start, E, eta).averages


def run(problem: Problem, method: Any, **how: Any) -> Any:
    return simulate(
        key(),
        problem,
        PLAN,
        replications=COUNT,
        tile_size=COUNT,
        methods=method,
        devices=jax.devices()[:1],
        **how,
    )


def test_a_tree_of_federations_is_what_a_plain_loop_does():
    """Float32 rounds at 6e-8 a step; 12 steps."""
    tree = grow(linear(), PLAN, (2, 2))
    found = run(tree.problem, tree.method, algorithm=tree.algorithm)
    rows = found.methods["higrad[2x2]"]
    np.testing.assert_allclose(found.truth["higrad[2x2]"], linear().truth)
    start = np.zeros(2)
    for r in range(COUNT):
        root = federation(r, slice(0, 4), slice(0, 2), start)
        values = []
        for a in range(2):
            half = federation(r, slice(2 * a, 2 * a + 2), slice(2, 4), root[-1])
            for b in range(2):
                leaf = federation(r, slice(2 * a + b, 2 * a + b + 1), slice(4, 6), half[-1])
                values.append([root.mean(axis=0), half.mean(axis=0), leaf.mean(axis=0)])
        s = np.add.reduceat(1 / PLAN.E, [0, 2, 4])
        mu = np.tensordot(np.asarray(values), 4 / s / np.sum(4 / s), (1, 0))
        np.testing.assert_allclose(rows.estimate[-1, r], mu.mean(axis=0), rtol=1e-5)
        assert (rows.scale[-1, r] > 0).all()


def test_parallel_federations_are_what_plain_loops_do():
    apart = split(linear(), runs=2)
    methods = (parallel_runs(2), hulc(2))
    found = run(apart.problem, methods, algorithm=apart.algorithm, levels=(0.4, 0.5)).methods
    for r in range(COUNT):
        means = [
            federation(r, slice(i, i + 2), slice(0, 6), np.zeros(2)).mean(axis=0) for i in (0, 2)
        ]
        rows, hull = found["parallel_runs"], found["hulc"]
        np.testing.assert_allclose(rows.estimate[-1, r], np.mean(means, axis=0), rtol=1e-5)
        gap = np.abs(means[0] - means[1]) / 2
        np.testing.assert_allclose(rows.scale[-1, r], gap, rtol=1e-4)
        np.testing.assert_allclose(hull.half_width[-1, 1, r], gap, rtol=1e-4)


def hashed_weights(normals: np.ndarray, copies: int) -> np.ndarray:
    """The exponential weights of an observation with these draws, in plain integers."""

    def mixed(h: int) -> int:
        h = (h ^ (h >> 16)) * 0x85EBCA6B % 2**32
        h = (h ^ (h >> 13)) * 0xC2B2AE35 % 2**32
        return h ^ (h >> 16)

    words = normals.astype(np.float32).view(np.uint32).tolist()
    total = sum(word * (2 * mixed(i) + 1) for i, word in enumerate(words, start=1)) % 2**32
    bits = [mixed((mixed(total) + b * 0x9E3779B9) % 2**32) for b in range(1, copies + 1)]
    return np.array([-math.log(((word >> 9) + 0.5) / 2**23) for word in bits])


def test_copies_are_perturbed_runs_and_the_first_is_the_run_itself():
    copies = 3
    method = bootstrap(copies)
    rows = run(perturbed(linear(), copies), (method,)).methods[method.name]
    truth = np.asarray(linear().truth)
    for r in range(COUNT):
        means = []
        for b in range(copies + 1):
            x, t, averages = np.zeros(2), 0, []
            for E, eta in zip(PLAN.E, PLAN.eta, strict=True):
                clients = np.tile(x, (CLIENTS, 1))
                for _ in range(E):
                    for k in range(CLIENTS):
                        z = draws().normal[t, k, :, r].astype(np.float64)
                        w = np.append(1.0, hashed_weights(z, copies))[b]
                        a, target = z[:2], z[:2] @ truth + z[2]
                        clients[k] -= eta * w * (a @ clients[k] - target) * a
                    t += 1
                x = clients.mean(axis=0)
                averages.append(x)
            means.append(np.mean(averages, axis=0))
        np.testing.assert_allclose(rows.estimate[-1, r], means[0], rtol=1e-4)
        np.testing.assert_allclose(rows.scale[-1, r], np.std(means[1:], axis=0, ddof=1), rtol=1e-3)


@pytest.mark.parametrize("weights", ["exponential", "double"])
def test_weights_have_mean_and_variance_one_and_know_nothing(weights: str):
    """60 comparisons at 4.5 standard errors: a false-alarm rate of 4e-4.

    Fourth moments of W − 1 are 9 (exponential) and 1, so that its variance has an error of √8/√n at most.
    """
    n, copies = 20_000, 6
    many = perturbed(linear(), copies, weights)
    z = np.random.default_rng(3).standard_normal((n, 3)).astype(np.float32)
    assert many.observe is not None
    uniform = np.zeros((n, 0), np.float32)
    (a, b), w = jax.jit(jax.vmap(many.observe, (0, None)))(Draws(z, uniform), _client(many))
    w = np.asarray(w, np.float64)
    np.testing.assert_array_equal(w[:, 0], 1)
    w = w[:, 1:] - 1
    assert (np.abs(w.mean(axis=0)) < 4.5 / math.sqrt(n)).all()
    assert (np.abs((w**2).mean(axis=0) - 1) < 4.5 * math.sqrt(8 / n)).all()
    others = np.column_stack([w, np.roll(w, 1, axis=0), np.asarray(a), np.asarray(b)])
    known = np.corrcoef(others.T)[:copies]
    np.fill_diagonal(known, 0)
    assert (np.abs(known) < 4.5 / math.sqrt(n)).all()


def _client(problem: Problem) -> Any:
    return jax.tree.map(lambda leaf: np.asarray(leaf[0], np.float32), problem.clients)
