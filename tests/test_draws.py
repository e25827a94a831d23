"""Draws: the generator's bits, what they may not depend on, and their distributions.

Statistical tests use one fixed key. Each declares k, the number of standard errors allowed, so that
the false alarms of all of them together have a probability below 1e-3 for a random key.
"""

from __future__ import annotations

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from engine_helpers import NO_LAW, draw_block, last_reading, numpy_draws, paper_plan
from jax.extend.random import threefry_2x32

from jaxlsgd import Draws, Problem, problems
from jaxlsgd.core.estimator import Accumulator, Estimator, Measurement
from jaxlsgd.engine.draws import (
    StreamKeys,
    normal_pair,
    replication_keys,
    stream_keys,
    threefry2x32,
    uniform,
)
from jaxlsgd.engine.layout import BLOCK_STEPS, lay_out
from jaxlsgd.runs.cell import Cell

pytestmark = pytest.mark.for_users

SPEC = Draws(normal=3, uniform=2)
EXTREME = np.array([0, 1, 0x3FFFFFFF, 0x40000000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF])
WORDS = EXTREME.astype(np.uint32)


def key() -> jax.Array:
    return jax.random.key(11)


# Bits.


def test_threefry_is_that_of_jax_bit_for_bit():
    rng = np.random.default_rng(0)
    key_words = rng.integers(0, 2**32, (40, 2), dtype=np.uint32)
    key_words[:8, 0], key_words[:8, 1] = WORDS, WORDS[::-1]
    counters = rng.integers(0, 2**32, (2, 50), dtype=np.uint32)
    counters[:, :8] = WORDS, WORDS[::-1]
    keys = StreamKeys(jnp.asarray(key_words[:, :1]), jnp.asarray(key_words[:, 1:]))
    ours = np.stack(jax.jit(threefry2x32)(keys, *map(jnp.asarray, counters)))
    for i, words in enumerate(key_words):
        theirs = threefry_2x32(jnp.asarray(words), jnp.asarray(counters.ravel()))
        np.testing.assert_array_equal(ours[:, i].ravel(), theirs)


def test_threefry_gives_the_published_vectors():
    # Random123, kat_vectors: threefry2x32, 20 rounds.
    cases = [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ]
    for words, counter, expected in cases:
        keys = StreamKeys(*(jnp.asarray(w, jnp.uint32) for w in words))
        found = jax.jit(threefry2x32)(keys, *(jnp.asarray(c, jnp.uint32) for c in counter))
        assert tuple(map(int, found)) == expected


def test_a_draw_is_where_its_counter_says():
    """Observation t of client k takes word t % 2 at the counter (t // 2, k n + i), and no other."""
    drawn = numpy_draws(key(), [5], 6, range(4), SPEC)
    words = np.asarray(jax.random.key_data(replication_keys(key(), jnp.array([5]))))[0]
    for t, k, i in itertools.product(range(6), range(4), range(5)):
        counter = jnp.asarray([t // 2, k * 5 + i], jnp.uint32)
        bits = np.asarray(threefry_2x32(jnp.asarray(words), counter))
        if i < 3:
            expected, found = _box_muller(bits)[t % 2], drawn.normal[t, k, i, 0]
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        else:
            expected = ((bits[t % 2] >> 9) + 0.5) / 2**23
            assert drawn.uniform[t, k, i - 3, 0] == np.float32(expected)


def _box_muller(bits: np.ndarray) -> tuple[float, float]:
    """Box and Muller's transform in float64: quadrant from two bits, angle within it from 24."""
    radius = math.sqrt(-2 * math.log(((bits[0] >> 8) + 0.5) / 2**24))
    within = (((bits[1] & 0x3FFFFFFF) >> 6) + 0.5) / 2**24 - 0.5
    c, s = math.cos(within * math.pi / 2), math.sin(within * math.pi / 2)
    if bits[1] & 0x40000000:
        c, s = s, c
    sign = -1 if bits[1] & 0x80000000 else 1
    return sign * radius * c, sign * radius * s


def test_normals_follow_their_formula_in_float64():
    bits = np.random.default_rng(1).integers(0, 2**32, (2, 20_000), dtype=np.uint32)
    found = np.stack(jax.jit(normal_pair)(*map(jnp.asarray, bits)))
    expected = np.array([_box_muller(pair) for pair in bits.T]).T
    # u near 1 is rounded by 2⁻²⁵, which moves the square of the radius by up to 1.2e-7.
    radius = np.linalg.norm(expected, axis=0)
    assert np.all(np.abs(found - expected) < 1e-6 * (1 + radius) + 1.2e-7 / radius)


def test_extreme_bits_give_numbers():
    u = np.asarray(jax.jit(uniform)(jnp.asarray(WORDS)))
    assert u.dtype == np.float32
    assert ((u > 0) & (u < 1)).all()
    assert u.min() == np.float32(2.0**-24)
    assert u.max() == np.float32(1 - 2.0**-24)
    first, second = (x.ravel() for x in np.meshgrid(WORDS, WORDS))
    pair = np.stack(jax.jit(normal_pair)(jnp.asarray(first), jnp.asarray(second)))
    assert pair.dtype == np.float32
    assert np.isfinite(pair).all()
    assert np.abs(pair).max() <= math.sqrt(50 * math.log(2)) + 1e-5


# What a replication's draws may not depend on.


@functools.cache
def alone(replication: int) -> Draws:
    return numpy_draws(key(), [replication], 32, range(5), SPEC)


@pytest.mark.parametrize("size", [1, 7, 64])
def test_a_tile_of_any_size_gives_the_same_bits(size: int):
    tile = numpy_draws(key(), range(size), 32, range(5), SPEC)
    for replication in {0, size // 2, size - 1}:
        for a, b in zip(tile, alone(replication), strict=True):
            np.testing.assert_array_equal(a[..., replication], b[..., 0])


def test_a_tile_that_starts_elsewhere_gives_the_same_bits():
    tile = numpy_draws(key(), range(3, 10), 32, range(5), SPEC)
    for a, b in zip(tile, alone(6), strict=True):
        np.testing.assert_array_equal(a[..., 3], b[..., 0])


@pytest.mark.parametrize("clients", [(0,), (4, 1), (2, 3, 4)])
def test_any_subset_of_the_clients_gets_the_same_bits(clients: tuple[int, ...]):
    part = numpy_draws(key(), [2], 32, clients, SPEC)
    for a, b in zip(part, alone(2), strict=True):
        np.testing.assert_array_equal(a, b[:, list(clients)])


@pytest.mark.parametrize("first", [0, 2, 30])
def test_blocks_may_start_anywhere(first: int):
    keys = stream_keys(replication_keys(key(), jnp.array([2])))
    clients = jnp.arange(5, dtype=jnp.uint32)
    block = jax.jit(draw_block, static_argnums=(2, 4))(keys, jnp.uint32(first), 2, clients, SPEC)
    for a, b in zip(block, alone(2), strict=True):
        np.testing.assert_array_equal(a, b[first : first + 2])


def test_replications_clients_and_steps_differ():
    tile = numpy_draws(key(), range(7), 32, range(5), SPEC)
    for x in tile:
        # 23 random bits each; of 10^4 numbers some few agree by chance.
        assert np.unique(x).size > 0.99 * x.size
    other = numpy_draws(jax.random.key(12), range(7), 32, range(5), SPEC)
    assert not np.any(tile.normal == other.normal)


# Two schedules see the same data: what reaches a loss is recorded in the engine itself.


@functools.cache
def _data_recorder(steps: int) -> Accumulator:
    """Keeps the gradients, which the problem below makes equal to the observations."""

    def init(params):
        return jnp.zeros((steps, *params.shape), params.dtype), jnp.zeros((), jnp.int32)

    def update(state, sync):
        seen, m = state
        return seen.at[m].set(sync.gradient), m + 1

    return Accumulator(init, update, needs_gradient=True)


def _measure_data(states, horizon) -> Measurement:
    del horizon
    seen = states[0][0]
    return Measurement(seen[0], seen[0], jnp.zeros((), bool), seen)


def _observation_times_parameter(params, observation):
    return jnp.sum(params * observation)


def _observe_all(draws: Draws, client):
    del client
    return jnp.concatenate([draws.normal, draws.uniform])


def _seen(name: str) -> tuple[np.ndarray, np.ndarray]:
    """What client 0 was shown when each round of a schedule began, (T, 3, R), and when that was."""
    problem = Problem(
        init=np.zeros(3),
        loss=_observation_times_parameter,
        num_clients=2,
        draws=Draws(2, 1),
        observe=_observe_all,
        weights=(1.0, 0.0),
    )
    plan = paper_plan(name, num_steps=300)
    estimator = Estimator("data", (_data_recorder(300),), _measure_data, NO_LAW)
    reading = last_reading(key(), Cell(problem, plan, (estimator,)), 3)
    seen = np.asarray(reading.found["data"].detail)[:, : plan.num_rounds]
    return np.moveaxis(seen, 0, -1).astype(np.float32), plan.ends


def test_two_schedules_see_the_same_observations():
    drawn = numpy_draws(key(), range(3), 301, range(2), Draws(2, 1))
    data = np.concatenate([drawn.normal[:, 0], drawn.uniform[:, 0]], axis=1)
    seen_at: dict[int, np.ndarray] = {}
    shared = 0
    for name in ("C1", "C5", "P(1/2)"):
        seen, ends = _seen(name)
        np.testing.assert_array_equal(seen, data[ends])
        for t, observation in zip(ends, seen, strict=True):
            if t in seen_at:
                np.testing.assert_array_equal(observation, seen_at[t])
                shared += 1
            seen_at[t] = observation
    assert shared > 100


def test_blocks_cover_every_step_once():
    for name in ("C1", "C5", "P(1/2)"):
        plan = paper_plan(name, num_steps=333)
        layout = lay_out(plan, (3, 50))
        active, ends = np.zeros(334, int), 0
        for group in layout.groups:
            for call in group:
                steps = call.block.first + np.flatnonzero(call.block.eta > 0)
                active[steps] += 1
                ends += call.block.ends.sum()
                assert call.block.first % 2 == 0
                assert call.block.eta.shape == (BLOCK_STEPS,)
        np.testing.assert_array_equal(active, [1] * 333 + [0])
        assert ends == plan.num_rounds


# Distributions. With n draws a mean has the standard error σ/√n; k = 5 has a false-alarm rate of
# 6e-7 a comparison, and there are fewer than 100 of them.

K_SIGMA = 5.0
COUNT = 2**20


@pytest.fixture(scope="module")
def sample() -> Draws:
    """A million normals and uniforms: (t, client, i, replication)."""
    return numpy_draws(key(), range(64), 2048, range(4), Draws(2, 2))


def assert_mean(values: np.ndarray, mean: float, variance: float) -> None:
    error = math.sqrt(variance / values.size)
    assert abs(values.mean(dtype=np.float64) - mean) < K_SIGMA * error


def test_normals_have_the_moments_of_normals(sample: Draws):
    z = sample.normal.astype(np.float64)
    assert z.size == COUNT
    for power, moment in enumerate((0, 1, 0, 3, 0, 15), start=1):
        next_moment = math.prod(range(2 * power - 1, 0, -2))  # E z^(2p)
        assert_mean(z**power, moment, next_moment - moment**2)
    even, odd = z[::2], z[1::2]  # the two members of a pair
    for half in (even, odd):
        assert_mean(half, 0, 1)
        assert_mean(half**2, 1, 2)


@pytest.mark.parametrize("threshold", [0.5, 1.0, 2.0, 3.0, 4.0])
def test_normals_have_the_tails_of_normals(sample: Draws, threshold: float):
    p = scipy.stats.norm.sf(threshold)
    for side in (sample.normal > threshold, sample.normal < -threshold):
        # Poisson limits rather than k σ: 33 draws beyond 4 are too few for a normal approximation.
        low, high = scipy.stats.poisson.ppf([3e-7, 1 - 3e-7], COUNT * p)
        assert low <= side.sum() <= high


def test_normals_and_uniforms_have_their_distribution_functions(sample: Draws):
    # Kolmogorov and Smirnov; the limit is for a false-alarm rate of 1e-6.
    limit = scipy.stats.kstwo.isf(1e-6, COUNT)
    for x, law in ((sample.normal, "norm"), (sample.uniform, "uniform")):
        assert scipy.stats.kstest(x.ravel().astype(np.float64), law).statistic < limit


def test_uniforms_are_uniform(sample: Draws):
    u = sample.uniform.astype(np.float64)
    assert_mean(u, 1 / 2, 1 / 12)
    assert_mean(u**2, 1 / 3, 1 / 5 - 1 / 9)
    assert_mean(u[::2] * u[1::2], 1 / 4, 1 / 9 - 1 / 16)


def test_pairs_and_neighbours_are_independent(sample: Draws):
    z = sample.normal.astype(np.float64)
    neighbours = {
        "the members of a pair": (z[::2], z[1::2]),
        "one pair and the next": (z[1:-1:2], z[2::2]),
        "clients": (z[:, :-1], z[:, 1:]),
        "draws of an observation": (z[:, :, 0], z[:, :, 1]),
        "replications": (z[..., :-1], z[..., 1:]),
        "normals and uniforms": (z[:, :, 0], math.sqrt(12) * (sample.uniform[:, :, 0] - 0.5)),
    }
    for a, b in neighbours.values():
        assert_mean(a * b, 0, 1)
        # Pairs share a radius: squares show it where products do not.
        fourth = float(np.mean((b**2 - 1) ** 2))
        assert_mean((a**2 - 1) * (b**2 - 1), 0, 2 * fourth)
    angle = np.arctan2(z[1::2], z[::2]).ravel() / (2 * np.pi) + 0.5
    limit = scipy.stats.kstwo.isf(1e-6, angle.size)
    assert scipy.stats.kstest(angle, "uniform").statistic < limit


def test_a_planted_correlation_of_one_per_cent_is_seen(sample: Draws):
    z = sample.normal[::2].astype(np.float64)
    other = 0.01 * z + math.sqrt(1 - 0.01**2) * np.roll(z, 1, axis=0)
    with pytest.raises(AssertionError):
        assert_mean(z * other, 0, 1)


def test_problems_declare_the_draws_that_they_use():
    assert problems.linear(4, 2).draws == Draws(5, 0)
    assert problems.logistic(4, 2).draws == Draws(4, 1)
