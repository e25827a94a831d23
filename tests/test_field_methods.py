"""Rival interval methods against brute force in NumPy, on stored paths and on the engine's own draws."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import jax
import numpy as np
import pytest
import scipy.stats
from jax import lax
from refusals import Why, refused
from test_field_runs import CLIENTS, linear, run

from jaxlsgd import Estimator, Problem, Sync, problems
from jaxlsgd.core.estimator import Horizon
from jaxlsgd.inference.laws.standard import student
from jaxlsgd.inference.oracle import of, oracle
from jaxlsgd.inference.rivals.bootstrap import bootstrap, perturbed
from jaxlsgd.inference.rivals.equal_batches import equal_batches
from jaxlsgd.inference.rivals.federation_tree import federation_tree, split_clients
from jaxlsgd.inference.rivals.growing_batches import batch_starts, growing_batches
from jaxlsgd.inference.rivals.higrad import grow, higrad
from jaxlsgd.inference.rivals.hulc import hulc, runs_for
from jaxlsgd.inference.rivals.parallel_runs import parallel_runs, split
from jaxlsgd.schedules import Plan, constant, power_decay

pytestmark = pytest.mark.for_users

# A stored path of 12 parameters: to methods with copies, 4 runs of 3.
ROUNDS, RUNS, DIM = 90, 4, 3
BRANCHES, SPLITS = (2, 2), (20, 50)
C = 0.02  # of batch starts, so that there are several
METHODS: dict[str, Estimator] = {
    "overlapping": growing_batches(C=C),
    "overlapping, diagonal": growing_batches(mode="diagonal", C=C),
    "apart": growing_batches("nonoverlapping", C=C),
    "apart, diagonal": growing_batches("nonoverlapping", mode="diagonal", C=C),
    "equal": equal_batches(lugsail=False),
    "lugsail": equal_batches(c=2.0),
    "parallel": parallel_runs(RUNS, DIM),
    "hulc": hulc(RUNS, DIM),
    "higrad": higrad(BRANCHES, SPLITS, dim=DIM),
    "bootstrap": bootstrap(RUNS - 1, DIM),
    "percentile": bootstrap(RUNS - 1, DIM, interval="percentile"),
}
SCHEDULES = {
    "one": np.ones(ROUNDS, int),
    "growing": np.ceil(np.arange(1, ROUNDS + 1) ** 0.5).astype(int),
    "warm": np.where(np.arange(ROUNDS) < 30, 1, 5),
}
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


@functools.cache
def path() -> np.ndarray:
    """Correlated, and far from the origin."""
    rng = np.random.default_rng(1)
    steps = rng.standard_normal((ROUNDS, RUNS * DIM))
    for m in range(1, ROUNDS):
        steps[m] += 0.7 * steps[m - 1]
    return 50 + steps


@functools.partial(jax.jit, static_argnums=0)
def _scanned(names: tuple[str, ...], path: Any, E: Any) -> Any:
    methods = tuple(METHODS[name] for name in names)
    start = tuple(method.init(path[0]) for method in methods)

    def one(states: Any, at: Any) -> tuple[Any, None]:
        sync = Sync(at[0], at[1], 0.1)
        pairs = zip(methods, states, strict=True)
        return tuple(method.update(state, sync) for method, state in pairs), None

    return lax.scan(one, start, (path, E))[0]


@functools.cache
def measured(
    schedule: str, dtype: str = "float64", names: tuple[str, ...] = tuple(METHODS)
) -> dict[str, Any]:
    with jax.enable_x64(dtype == "float64"):
        states = _scanned(names, path().astype(dtype), SCHEDULES[schedule].astype(dtype))
        pairs = zip(names, states, strict=True)
        found = {name: (METHODS[name].measure(state, None), state) for name, state in pairs}
        return jax.tree.map(np.asarray, found)


def covariance(method: str, schedule: str) -> np.ndarray:
    matrix = METHODS[method].matrix
    assert matrix is not None
    with jax.enable_x64(True):
        return np.asarray(matrix(measured(schedule)[method][1], None))


def batch_sums(E: np.ndarray) -> tuple[list[np.ndarray], list[float], list[int]]:
    """B_i and τ_i of every round i, and the last rounds of batches, by definition."""
    x = path() - path().mean(axis=0)
    starts = set(batch_starts(0.505, C).tolist())
    sums, lengths, ends, first = [], [], [], 1
    for i in range(1, ROUNDS + 1):
        if i in starts:
            first = i
        sums.append(x[first - 1 : i].sum(axis=0))
        lengths.append(float(sum(1 / E[first - 1 : i])))
        if i + 1 in starts or i == ROUNDS:
            ends.append(i - 1)
    return sums, lengths, ends


@every_schedule
def test_growing_batches_by_definition(schedule: str):
    E = SCHEDULES[schedule]
    sums, lengths, ends = batch_sums(E)
    assert 3 < len(ends) < ROUNDS / 4
    factor = np.sum(1 / E) / ROUNDS**2
    top = sum(np.outer(B, B) / e for B, e in zip(sums, E, strict=True))
    expected = top / sum(t / e for t, e in zip(lengths, E, strict=True)) * factor
    np.testing.assert_allclose(covariance("overlapping", schedule), expected, rtol=1e-9, atol=1e-12)
    top = sum(np.outer(sums[i], sums[i]) for i in ends)
    expected = top / sum(lengths[i] for i in ends) * factor
    np.testing.assert_allclose(covariance("apart", schedule), expected, rtol=1e-9, atol=1e-12)
    for name in ("overlapping", "apart"):
        full, diagonal = measured(schedule)[name][0], measured(schedule)[f"{name}, diagonal"][0]
        np.testing.assert_allclose(full.scale, diagonal.scale, rtol=1e-9)
        np.testing.assert_allclose(full.estimate, path().mean(axis=0), rtol=1e-12)


def test_on_one_machine_growing_batches_are_the_published_ones():
    """Zhu, Chen, Wu: Σ_i (Σ_{k=t_i..i} x_k − l_i x̄)(·)ᵀ / Σ l_i with l_i = i − t_i + 1, over n."""
    x, a = path(), batch_starts(0.505, C)
    total, lengths = np.zeros((12, 12)), 0
    for i in range(1, ROUNDS + 1):
        t = a[a <= i].max()
        l = i - t + 1
        away = x[t - 1 : i].sum(axis=0) - l * x.mean(axis=0)
        total, lengths = total + np.outer(away, away), lengths + l
    expected = total / lengths / ROUNDS
    np.testing.assert_allclose(covariance("overlapping", "one"), expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(batch_starts(0.5, 1.0)[:4], [1, 16, 81, 256])


def equal_spread(E: np.ndarray, size: float) -> tuple[np.ndarray, int]:
    """V̂ of whole batches of information time `size`, and how many there are."""
    x, squares, lengths, first = path() - path().mean(axis=0), [], [], 0
    for i in range(ROUNDS):
        tau = float(np.sum(1 / E[first : i + 1]))
        if tau >= size - 1e-9:
            squares.append(x[first : i + 1].sum(axis=0) ** 2)
            lengths.append(tau)
            first = i + 1
    return sum(squares) / sum(lengths), len(squares)


@every_schedule
def test_equal_batches_by_definition(schedule: str):
    E = SCHEDULES[schedule]
    s = np.sum(1 / E)
    for name, c in {"equal": 1.0, "lugsail": 2.0}.items():
        size = 2.0 ** math.ceil(math.log2(s / (c * ROUNDS**0.2475)))
        while equal_spread(E, size)[1] < 2:
            size /= 2
        V = equal_spread(E, size)[0]
        if name == "lugsail":
            corrected = 2 * V - equal_spread(E, size / 2)[0]
            assert (corrected > V).any()
            V = np.maximum(V, corrected)
        found = measured(schedule)[name][0]
        np.testing.assert_allclose(found.scale, np.sqrt(V * s) / ROUNDS, rtol=1e-9)
        if (
            schedule == "one" and name == "equal"
        ):  # b = 2^⌈log2 n^((1+α)/2)⌉, a = ⌊n/b⌋, whole batches only
            b = 2 ** math.ceil(math.log2(ROUNDS ** (1.505 / 2)))
            means = [path()[i * b : (i + 1) * b].mean(axis=0) for i in range(ROUNDS // b)]
            V = b * np.mean((means - path().mean(axis=0)) ** 2, axis=0)
            np.testing.assert_allclose(found.scale, np.sqrt(V / ROUNDS), rtol=1e-9)


def test_float32_keeps_its_digits_far_from_the_origin():
    """The path is known to 4e-6 and moves by 1; recentred sums lose a digit or two of that."""
    names = ("overlapping, diagonal", "apart, diagonal", "equal")
    single, double = measured("growing", "float32", names), measured("growing")
    for name in names:
        np.testing.assert_allclose(single[name][0].scale, double[name][0].scale, rtol=1e-3)


def test_a_batch_is_as_long_as_its_information_time():
    """Var Σ_batch (x̄ − x*) = V Σ 1/E, where E_m = 1 and where it is 10; V = 1 here.

    Linear recursion with λ = S = 1 and γ = 0.2, 2,000 paths, batches of 400 rounds: batches that remember
    1/γ = 5 rounds have 1.3 % too little, and the Monte-Carlo error is 1.6 % (two batches of each path). A length
    in rounds would be off by a factor of ten.
    """
    rng = np.random.default_rng(2)
    E, gamma, paths = np.repeat([1, 10], 1000), 0.2, 2000
    x, sums = np.zeros(paths), np.zeros((5, paths))
    for m, steps in enumerate(E):
        for _ in range(steps):
            x = x - gamma / steps * (x + rng.standard_normal(paths))
        sums[m // 400] += x
    lengths = np.add.reduceat(1 / E, np.arange(0, 2000, 400))
    found = np.mean(sums**2, axis=1) / lengths
    for chosen in (found[:2], found[3:]):
        assert abs(np.mean(chosen) - 1) < 0.013 + 4 * 0.016 + 0.02


def leaf_values(E: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """μ and Σ of the tree by definition; nodes of a level are named by their way."""
    x = path().reshape(ROUNDS, RUNS, DIM)
    edges = [0, *SPLITS, ROUNDS]
    spans = [slice(a, b) for a, b in itertools.pairwise(edges)]
    s = np.array([np.sum(1 / E[span]) for span in spans])
    m = np.array([span.stop - span.start for span in spans])
    w = m**2 / s / np.sum(m**2 / s)
    mu = sum(w[j] * x[span].mean(axis=0) for j, span in enumerate(spans))
    ways = [(), ((0,), (0,), (1,), (1,)), ((0, 0), (0, 1), (1, 0), (1, 1))]
    Sigma = np.zeros((RUNS, RUNS))
    for j, nodes in enumerate([1, 2, 4]):
        same = [[j == 0 or ways[j][a] == ways[j][b] for b in range(RUNS)] for a in range(RUNS)]
        Sigma += w[j] ** 2 * nodes * s[j] / m[j] ** 2 * np.asarray(same)
    return mu, Sigma


@every_schedule
def test_higrad_by_definition(schedule: str):
    mu, Sigma = leaf_values(SCHEDULES[schedule])
    away = mu - mu.mean(axis=0)
    V = away.T @ np.linalg.inv(Sigma) @ away / (RUNS - 1)
    found = measured(schedule)["higrad"][0]
    np.testing.assert_allclose(found.estimate, mu.mean(axis=0), rtol=1e-12)
    expected = V * Sigma.sum() / RUNS**2
    np.testing.assert_allclose(found.scale**2, np.diag(expected), rtol=1e-9)
    np.testing.assert_allclose(covariance("higrad", schedule), expected, rtol=1e-9, atol=1e-15)
    if schedule == "one":  # the plain average, and n_j = m_j/C_j observations at level j
        flat = path().reshape(ROUNDS, RUNS, DIM).mean(axis=(0, 1))
        np.testing.assert_allclose(found.estimate, flat, rtol=1e-12)
        np.testing.assert_allclose(Sigma[0, 0], (20**2 / 20 + 30**2 / 15 + 40**2 / 10) / 90**2)


@every_schedule
def test_runs_side_by_side_by_definition(schedule: str):
    means = path().mean(axis=0).reshape(RUNS, DIM)
    found = measured(schedule)
    parallel, hull = found["parallel"][0], found["hulc"][0]
    np.testing.assert_allclose(parallel.estimate, means.mean(axis=0))
    np.testing.assert_allclose(parallel.scale, means.std(axis=0, ddof=1) / np.sqrt(RUNS))
    np.testing.assert_allclose(covariance("parallel", schedule), np.cov(means.T) / RUNS)
    np.testing.assert_allclose(hull.estimate - hull.scale, means.min(axis=0))
    np.testing.assert_allclose(hull.estimate + hull.scale, means.max(axis=0))
    for name in ("bootstrap", "percentile"):
        np.testing.assert_allclose(found[name][0].estimate, means[0])
        np.testing.assert_allclose(found[name][0].scale, means[1:].std(axis=0, ddof=1))
    method, states = METHODS["percentile"], found["percentile"][1]
    with jax.enable_x64(True):
        interval = method.interval(states, 0.5)
        half = np.sort(np.abs(means[1:] - means[0]), axis=0)[1]  # the second of three: 0.5 · 4
        np.testing.assert_allclose(interval.upper - means[0], half, rtol=1e-9)
    away = found["percentile"][0].detail
    p = method.law.tail(half / found["percentile"][0].scale * (1 - 1e-9), None, away)
    np.testing.assert_allclose(p, 3 / 4)


def test_students_law_and_hotellings():
    law = student(5)
    assert math.isclose(law.multiplier(0.95, None, ()), scipy.stats.t.ppf(0.975, 5))
    np.testing.assert_allclose(law.tail(2.0, None, ()), 2 * scipy.stats.t.sf(2.0, 5))
    assert law.joint is not None
    joint = law.joint(None, ())
    # One contrast is the square of t; of two, 5·2/4 F(2, 4).
    assert math.isclose(joint.quantile(0.95, 1), law.multiplier(0.95, None, ()) ** 2, rel_tol=1e-9)
    expected = 2.5 * scipy.stats.f.ppf(0.95, 2, 4)
    assert math.isclose(joint.quantile(0.95, 2), expected, rel_tol=1e-9)
    assert math.isclose(joint.tail(expected, 2)[0], 0.05, rel_tol=1e-9)
    with refused("contrasts", "data"):
        joint.quantile(0.95, 6)


def test_oracle_intervals_are_made_of_the_truth():
    case = problems.linear(2, CLIENTS)
    G, S = np.array([[2.0, 0.5], [0.5, 1.0]]), np.array([[1.0, 0.3], [0.3, 0.5]])
    inverse = np.linalg.inv(G)
    V = inverse @ S @ inverse.T
    plan = Plan.from_arrays([1, 2, 3, 2, 1], [0.3, 0.2, 0.1, 0.1, 0.1])
    T = plan.num_rounds
    with jax.enable_x64(True):
        limit, finite = oracle(G, S), oracle(G.tolist(), S.tolist(), horizon="finite")
        state = limit.init(np.zeros(2))
        for E in plan.E:
            state = limit.update(state, Sync(np.ones(2), int(E), 0.1))
        found = [m.measure(state, Horizon.of(plan)) for m in (limit, finite)]
    expected = np.sqrt(np.diag(V) * np.sum(1 / plan.E)) / T
    np.testing.assert_allclose(found[0].scale, expected, rtol=1e-9)
    # The average is linear in the noise of each step: its coefficient, step by step.
    total = np.zeros((2, 2))
    for m in range(T):
        for l in range(int(plan.E[m])):
            shrink = np.eye(2) - plan.eta[m] * G
            at = -plan.eta[m] * np.linalg.matrix_power(shrink, int(plan.E[m]) - 1 - l)
            weight = at.copy()
            for n in range(m + 1, T):
                at = np.linalg.matrix_power(np.eye(2) - plan.eta[n] * G, int(plan.E[n])) @ at
                weight += at
            total += weight @ S @ weight.T / T**2
    np.testing.assert_allclose(found[1].scale, np.sqrt(np.diag(total)), rtol=1e-9)
    assert of(case).measure is of(case).measure  # one program
    np.testing.assert_allclose(of(case).truth(case), case.true_vector)


def _no_moments() -> Problem:
    return Problem(
        init=np.zeros(2),
        loss=lambda x, o: ((x - o) ** 2).sum(),
        num_clients=1,
        sample=lambda key, client: jax.random.normal(key, (2,)),
    )


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda: growing_batches("sometimes"), ("batches", "choice")),
        (lambda: growing_batches(alpha=1.0), ("alpha", "value")),
        (lambda: growing_batches(C=0.0), ("C", "value")),
        (lambda: equal_batches(c=-1.0), ("c", "value")),
        (lambda: bootstrap(1, 2), ("copies", "value")),
        (lambda: perturbed(linear(), 2, "normal"), ("weights", "choice")),
        (
            lambda: bootstrap(19, 1, interval="percentile").law.multiplier(0.99, None, ()),
            ("level", "unsupported", "0.95", "19 copies"),
        ),
        (
            lambda: hulc(5, 2).law.multiplier(0.95, None, ()),
            ("level", "unsupported", "0.9375", "6 runs"),
        ),
        (lambda: split(linear(), 3), ("leaves", "conflict")),
        (lambda: split_clients(_weighted(), 2), ("problem", "unsupported")),
        (lambda: federation_tree((2, 2), (5,)), ("splits", "shape")),
        (lambda: federation_tree((2, 2), (5, 5)), ("splits", "value")),
        (
            lambda: grow(linear(), _five_rounds()),
            ("plan", "value", "3 levels"),
        ),
        (lambda: oracle(np.eye(2), np.eye(3)), ("S", "shape")),
        (lambda: oracle(-np.eye(2), np.eye(2)), ("G", "value", "definite")),
        (lambda: oracle([[1.0, 0.5], [0.0, 1.0]], np.eye(2)), ("G", "value", "symmetric")),
        (lambda: of(_no_moments()), ("problem", "missing")),
        (
            lambda: run(linear(), (hulc(2, 1),), algorithm=federation_tree((2,), (0,), dim=2)),
            ("problem", "shape", "4 parameters"),
        ),
        (
            lambda: run(
                linear(), (oracle(np.eye(2), np.eye(2)),), algorithm=federation_tree((2,), (0,))
            ),
            ("problem", "unsupported", "federation_tree"),
        ),
        (
            lambda: run(linear(), (parallel_runs(3, 2),)),
            ("problem", "shape", "6 parameters"),
        ),
    ],
)
def test_what_cannot_work_is_refused(call: Any, why: Why):
    with refused(*why):
        call()


def _weighted() -> Problem:
    return problems.linear(2, CLIENTS, weights=(0.4, 0.4, 0.1, 0.1))


def _five_rounds() -> Plan:
    return constant(1).plan(power_decay(0.5), num_rounds=5)


def test_hulc_knows_how_many_runs_it_takes():
    assert [runs_for(level) for level in (0.5, 0.9, 0.9375, 0.95, 0.99)] == [2, 5, 5, 6, 8]


def test_every_method_says_what_it_costs():
    assert all(method.cost for method in METHODS.values())
