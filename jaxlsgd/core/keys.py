"""Random keys: those that come from people, and those that an algorithm draws from."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlsgd.core.checks import refusal


def check_key(key: Any) -> jax.Array:
    """Refuses anything but one typed threefry2x32 key."""
    if not isinstance(key, jax.Array) or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise refusal("key", "be a typed key such as jax.random.key(0)", key)
    if key.shape != ():
        raise ValueError(f"key: must be one key, got an array of keys of shape {key.shape}")
    if str(jax.random.key_impl(key)) != "threefry2x32":
        raise ValueError(
            "key: must be of the threefry2x32 implementation, whose streams do not depend on "
            f"tiles or devices; got {jax.random.key_impl(key)}"
        )
    return key


def algorithm_words(words: jax.Array) -> jax.Array:
    """The key words that an algorithm draws from in a replication, (2,), from those of its data.

    The counter is one that no observation reaches, so that the two never meet.
    """
    key = jax.random.wrap_key_data(words, impl="threefry2x32")
    return jax.random.key_data(jax.random.fold_in(key, np.uint32(2**32 - 1)))
