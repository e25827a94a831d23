"""`innermost`: the same numbers as `jax.vmap`, whatever is repeated or computed once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from refusals import refused

from jaxlsgd.engine import xla

R = 7


def moves(A, x, count):
    """Operations that move, repeat, or cut arrays, also some that all replications share."""
    both = jnp.concatenate([A, jnp.broadcast_to(count, (1, 3)), x[None]])
    turned = both[::-1].T.reshape(5, 3)[1:4:2]
    columns = jnp.ravel(A, order="F"), jnp.reshape(A, (1, 9), order="F")
    return turned, jnp.squeeze(x[None, 1:]), jnp.stack([x, 2 * x], -1), A.mT @ x, columns


def sums(A, x, count):
    """Sums over few and over many terms, over several axes, and running ones."""
    many = jnp.ones((50, 1)) * x
    return (
        jnp.sum(A),
        jnp.sum(A, 0),
        jnp.max(A, 1),
        jnp.min(x),
        jnp.sum(many**2, 0) / count,
        jnp.sum(many, (0, 1)),
        jnp.cumsum(A[::-1], 0)[::-1],
        jnp.all(A > -3, 1),
        jnp.any(x > 1),
        jnp.sum(x[3:]) + count,
        jnp.all(x[:0] > 0),
        jnp.max(x[:0], initial=3.0),
    )


def choices(A, x, count):
    """Numbers of all kinds, and decisions by a scalar, a vector and something shared."""
    near = jnp.sqrt(jnp.sum(x**2)) < 1.5
    small = jnp.where(near, A, A.T)
    rank = jnp.sum((x[:, None] > x[None, :]).astype(jnp.int32), 1)
    finite = jnp.all(jnp.isfinite(A / x), 1)
    return small, rank, jnp.where(finite, x, 0), jnp.where(count > 1, x, -x), jnp.clip(x, -1, count)


@jax.jit
def inner(A, x):
    size = jnp.exp(jnp.log1p(jnp.abs(x)) ** 2 / 3 + 1)
    return A * size, size, x


def nested(A, x, count):
    """Functions that are compiled by themselves, whose dear results are used many times outside."""
    B, size, same = inner(A, x)
    for _ in range(3):
        B = B * size[:, None] + B.T / (1 + jnp.sum(size))
        size = jnp.tanh(size + count) + same
    return B, size


def loops(A, x, count):
    """Operations that have no rule of their own: they are mapped."""
    found = lax.fori_loop(0, 3, lambda i, y: y + A[i] * y[i], x)
    jax.debug.callback(lambda y: None, x)
    chosen = lax.cond(x[0] > 0, lambda y: y, lambda y: -y, found)
    return chosen, jnp.sort(x), A[jnp.argmax(x)], jnp.linalg.inv(A + 9 * jnp.eye(3)), count


@pytest.fixture(scope="module")
def given():
    rng = np.random.default_rng(5)
    A, x = rng.normal(size=(3, 3, R)), rng.normal(size=(3, R))
    return jnp.asarray(A, jnp.float32), jnp.asarray(x, jnp.float32), jnp.float32(2.0)


@pytest.mark.parametrize("function", [moves, sums, choices, nested, loops])
def test_the_same_numbers_as_vmap(function, given):
    right = jax.jit(jax.vmap(function, (-1, -1, None), -1))(*given)
    found = jax.jit(functools.partial(_kept, function))(*given)
    assert jax.tree.structure(found) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        # Sums in another order, or fused to another product: a few units in the last place of the largest term.
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


def _kept(function, *given):
    vector = given[1][:, 0]
    return xla.innermost(function, (-1, -1, None), unit=xla.unit_of(vector))(*given)


def test_trees_of_axes_and_what_all_replications_share(given):
    A, x, count = given

    def function(state):
        return {"own": state["own"] * jnp.sum(state["shared"]), "shared": state["shared"] + count}

    axes = {"own": -1, "shared": None}
    state = {"own": x, "shared": A[..., 0]}
    run = xla.innermost(function, (axes,), unit=jnp.ones(()), out_axes=axes)
    found = run(state)
    assert found["shared"].shape == (3, 3)
    np.testing.assert_allclose(found["own"], x * jnp.sum(A[..., 0]), rtol=1e-6)
    everywhere = xla.innermost(function, (axes,), unit=jnp.ones(()))(state)
    assert everywhere["shared"].shape == (3, 3, R)


def test_what_is_dear_and_used_often_is_computed_once(given):
    A, x, count = given

    def divisions(function):
        run = functools.partial(_kept, function)
        return str(jax.make_jaxpr(run)(A, x, count)).count(" div ")

    def cheap(A, x, count):
        return A * x + x, x * x

    def dear(A, x, count):
        y = jnp.exp(jnp.exp(jnp.exp(jnp.exp(jnp.exp(jnp.exp(x))))))
        return A * y + y, y * x

    def single(A, x, count):
        return jnp.exp(jnp.exp(jnp.exp(jnp.exp(jnp.exp(jnp.exp(x))))))

    assert [divisions(each) for each in (cheap, dear, single)] == [0, 1, 0]


def test_what_differs_is_not_declared_as_shared(given):
    run = xla.innermost(lambda x: x + 1, (-1,), unit=jnp.ones(()), out_axes=None)
    with refused("out_axes"):
        run(given[1])
