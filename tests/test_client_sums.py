"""Sums over clients: one by one, or in shares where there are many."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlsgd.core.forms import Scaled
from jaxlsgd.engine import xla

pytestmark = pytest.mark.for_users


@pytest.mark.parametrize("count", [1, 32, 33, 128, 129, 300, 1000])
def test_a_sum_over_clients_is_the_weighted_sum(count: int):
    rng = np.random.default_rng(count)
    weights, scale = rng.uniform(size=count) / count, rng.normal(size=(count, 3))
    vector = rng.normal(size=(count, 2, 3))
    given = [jnp.asarray(x, jnp.float32) for x in (weights, scale, vector)]
    found = jax.jit(lambda w, s, v: xla.weighted_sum(w, Scaled(s, v)))(*given)
    right = np.einsum("k,kr,kdr->dr", *(np.asarray(x, np.float64) for x in given))
    # Rounding of n terms of size 1/n: √n·1e-7/n at least, n·1e-7/n at most.
    np.testing.assert_allclose(found, right, rtol=0, atol=3e-7)
    dense = jax.jit(xla.weighted_sum)(given[0], given[2])
    right = np.einsum("k,kdr->dr", np.asarray(given[0], np.float64), np.asarray(given[2]))
    np.testing.assert_allclose(dense, right, rtol=0, atol=3e-7)
