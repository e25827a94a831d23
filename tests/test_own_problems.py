"""Problems of users at full speed: their `sample` and `loss` are traced and made again, and stay the same."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxlsgd import Problem, random_scaling
from jaxlsgd.core.forms import OuterProduct, Scaled, dense
from jaxlsgd.core.problem import flatten, unravel
from jaxlsgd.core.tracing import is_zero, linear_form
from jaxlsgd.engine.draws import (
    Supply,
    erf_inv,
    make_source,
    over_replications,
    replication_keys,
    supply,
)
from jaxlsgd.engine.program import make_data, make_program
from jaxlsgd.engine.xla import innermost
from jaxlsgd.runs.cell import LOCAL_SGD

ONE = jnp.ones(())
REPLICATIONS = 5


def root() -> jax.Array:
    return jax.random.key(11)


def test_a_vector_of_parameters_takes_the_shape_of_a_pytree_and_keeps_its_precision():
    like = {"b": jax.ShapeDtypeStruct((), jnp.float32), "w": np.zeros((2, 3))}
    vector = np.arange(7.0)
    found = unravel(vector, like)
    assert found["b"] == 0 and found["w"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert all(isinstance(leaf, np.ndarray) and leaf.dtype == np.float64 for leaf in found.values())
    traced = jax.jit(lambda x: unravel(x, like))(vector)
    assert flatten(traced).tolist() == vector.tolist()
    assert unravel(vector, np.zeros(7)) is vector


def test_a_function_is_zero_only_if_its_program_is():
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    assert is_zero(lambda x: jnp.zeros_like(x) + 0 * jnp.ones(2), shape)
    assert not is_zero(lambda x: jnp.ones(2), shape)
    assert not is_zero(lambda x: 0 * x, shape), "an argument enters, whatever its values do"


# Samples: what jax.random gives to one key is what all replications get.


def _two_normals(key, client):
    a, b = jax.random.split(key)
    return jax.random.normal(a, (3,)), jax.random.normal(b) + client


def _many_kinds(key, client):
    first, *keys = jax.random.split(key, 6)
    return {
        "uniform": jax.random.uniform(jax.random.fold_in(first, client), (2, 3)),
        "label": jax.random.bernoulli(keys[0], 0.3),
        "whole": jax.random.randint(keys[1], (4,), 0, 10),
        "bytes": jax.random.bits(keys[2], (3,), "uint8"),
        "exponential": jax.random.exponential(keys[3]),
        "words": jax.random.key_data(keys[4]),
    }


def _of_another_key(key, client):
    del key
    return jax.random.normal(jax.random.fold_in(jax.random.key(7), client))


def _in_a_loop(key, client):
    def add(i, total):
        return total + client * jax.random.uniform(jax.random.fold_in(key, i))

    return jax.lax.fori_loop(0, 3, add, jnp.zeros(()))


def _counts(key, client):
    return jax.random.poisson(key, 2.0 + client)


SAMPLES = [_two_normals, _many_kinds, _of_another_key, _in_a_loop, _counts]


@pytest.mark.parametrize("sample", SAMPLES)
def test_a_sample_is_what_jax_random_makes_of_the_key(sample):
    client = jnp.asarray(2, jnp.int32)

    @jax.jit
    def ours(root):
        return over_replications(sample, ONE)(jax.random.split(root, REPLICATIONS), client)

    @jax.jit
    def theirs(root):
        each = jax.vmap(lambda key: sample(key, client), out_axes=-1)
        return each(jax.random.split(root, REPLICATIONS))

    pairs = zip(jax.tree.leaves(ours(root())), jax.tree.leaves(theirs(root())), strict=True)
    for mine, right in pairs:
        assert mine.dtype == right.dtype
        # Bits are the same; a normal's inverse error function is rounded otherwise, by 3 ulp at most.
        np.testing.assert_allclose(mine, right, rtol=4e-7, atol=1e-7)


def test_an_observation_has_the_key_of_its_replication_step_and_client():
    problem = Problem(np.zeros(1), lambda x, seen: jnp.sum(x) * seen[1], 3, sample=_two_normals)
    program = make_program(problem, (random_scaling(),), LOCAL_SGD)
    data, first = make_data(problem, "float32"), jnp.uint32(64)
    words = jax.random.key_data(replication_keys(root(), jnp.arange(2, 4)))
    made = supply(program, data, jax.random.wrap_key_data(words), 64).ahead
    assert made is not None
    functions = program.structure.flat_functions()

    @jax.jit
    def third(words, made):
        keys = jax.random.wrap_key_data(words)
        source = make_source(program, functions, data, Supply(keys, made), first)
        return source.observe(source.draw(jnp.asarray(3, jnp.int32)))

    for ahead in (made, None):  # before the block, and within it
        pair = third(words, ahead)
        for t, seen in zip((70, 71), pair, strict=True):
            for r, k in ((0, 0), (1, 2)):
                key = jax.random.wrap_key_data(words[r])
                right = _two_normals(jax.random.fold_in(jax.random.fold_in(key, t), k), k)
                np.testing.assert_allclose(seen[0][k, :, r], right[0], rtol=4e-7, atol=1e-7)
                np.testing.assert_allclose(seen[1][k, r], right[1], rtol=4e-7, atol=1e-7)


@functools.cache
def _drawn() -> tuple[np.ndarray, np.ndarray]:
    """Normals and uniforms of 2¹⁸ keys that are folded and split, (2, keys)."""

    def sample(key, client):
        one, two, three = jax.random.split(jax.random.fold_in(key, client), 3)
        normal = jnp.stack([jax.random.normal(one), jax.random.normal(two)])
        return normal, jax.random.uniform(three, (2,))

    keys = jax.vmap(lambda i: jax.random.fold_in(root(), i))(jnp.arange(2**18))
    found = jax.jit(lambda keys: over_replications(sample, ONE)(keys, jnp.asarray(1)))(keys)
    return np.asarray(found[0], np.float64), np.asarray(found[1], np.float64)


def test_samples_have_their_distributions():
    # Kolmogorov and Smirnov at a false-alarm rate of 1e-6 each; moments at 5 standard errors, 6e-7 each.
    normal, uniform = _drawn()
    n = normal.shape[1]
    limit = scipy.stats.kstwo.isf(1e-6, n)
    for row in normal:
        assert scipy.stats.kstest(row, "norm").statistic < limit
        assert abs(np.mean(row**2) - 1) < 5 * math.sqrt(2 / n)
    for row in uniform:
        assert scipy.stats.kstest(row, "uniform").statistic < limit
    for a, b in ((normal[0], normal[1]), (normal[0, 1:], normal[0, :-1])):
        assert abs(np.mean(a * b)) < 5 / math.sqrt(len(a))
    assert abs(np.mean((uniform[0] - 0.5) * (uniform[1] - 0.5))) < 5 / 12 / math.sqrt(n)
    planted = 0.02 * normal[0] + math.sqrt(1 - 0.02**2) * normal[1]
    assert abs(np.mean(normal[0] * planted)) > 5 / math.sqrt(n)


def test_the_inverse_error_function():
    x = np.linspace(-1, 1, 100_001, dtype=np.float32)[1:-1]
    x = np.concatenate([x, np.array([1 - 2.0**-24, 2.0**-24 - 1, 1e-30], np.float32)])
    x = x[x != 0]
    found = np.asarray(jax.jit(erf_inv)(x), np.float64)
    right = scipy.special.erfinv(x.astype(np.float64))
    # Giles promises 7e-7 relative; near ±1 one ulp of 1 − x² adds as much again.
    assert np.max(np.abs(found / right - 1)) < 2e-6


# Losses: those of one linear form are recognised, and derivatives are the right ones in any case.


def _squared(x, seen):
    return 0.5 * (seen[0] @ x - seen[1]) ** 2


def _logistic(x, seen):
    return jax.nn.softplus(seen[0] @ x) - seen[1] * (seen[0] @ x)


def _huber(x, seen):
    gap = jnp.abs(jnp.sum(seen[0] * x) / 2 + x[1] - seen[1])
    return jnp.where(gap < 1, 0.5 * gap**2, gap - 0.5)


def _ridge(x, seen):
    return _squared(x, seen) + 0.1 * x @ x


def _network(x, seen):
    return 0.5 * (jnp.tanh(x.reshape(3, 1) * seen[0][:, None]).sum(0) @ x[:1] - seen[1]) ** 2


def _two_forms(x, seen):
    return jnp.logaddexp(seen[0] @ x, seen[0] @ jnp.roll(x, 1)) - seen[1] * x[0]


def _square_of_x(x, seen):
    return jnp.sum(x * x * seen[0]) - seen[1] * x[0]


LINEAR = [_squared, _logistic, _huber]
OTHERS = [_ridge, _network, _two_forms, _square_of_x]
X = jnp.asarray([0.3, -0.2, 0.5])


def _observations(count: int):
    rng = np.random.default_rng(3)
    a, y = rng.normal(size=(3, count)), rng.normal(size=count)
    return jnp.asarray(a, jnp.float32), jnp.asarray(y, jnp.float32)


@pytest.mark.parametrize("loss", [_logistic, _huber, _ridge, _network])
def test_derivatives_of_a_loss_are_those_of_autodiff(loss):
    problem = Problem(np.zeros(3), loss, 1, sample=lambda key, k: (jnp.zeros(3), jnp.zeros(())))
    functions = problem.structure().flat_functions()
    seen = _observations(6)
    x = jnp.broadcast_to(X[:, None], (3, 6)) * jnp.arange(6.0)  # the first at 0, as x_0 often is

    @jax.jit
    def ours(x, seen):
        both = lambda x, seen: (functions.gradient(x, seen), functions.hessian(x, seen))  # noqa: E731
        return innermost(lambda x, seen: tuple(map(dense, both(x, seen))))(x, seen)

    @jax.jit
    def theirs(x, seen):
        both = lambda x, seen: (jax.grad(loss)(x, seen), jax.hessian(loss)(x, seen))  # noqa: E731
        return jax.vmap(both, -1, -1)(x, seen)

    for mine, right in zip(ours(x, seen), theirs(x, seen), strict=True):
        # Sums of three products of numbers up to 10, in float32.
        np.testing.assert_allclose(mine, right, rtol=1e-5, atol=2e-6)


def test_losses_of_one_linear_form_are_recognised_and_no_others():
    seen = (X, jnp.ones(()))
    for loss in LINEAR:
        form = linear_form(loss, X, seen)
        assert form is not None
        assert isinstance(form.gradient(X, seen), Scaled)
        assert isinstance(form.hessian(X, seen), OuterProduct)
    for loss in OTHERS:
        assert linear_form(loss, X, seen) is None
