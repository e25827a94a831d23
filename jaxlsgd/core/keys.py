"""Random keys that come from people."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def check_key(key: Any) -> jax.Array:
    """Refuses anything but one typed threefry2x32 key."""
    if not isinstance(key, jax.Array) or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise ValueError(f"key: must be a typed key such as jax.random.key(0), got {key!r}")
    if key.shape != ():
        raise ValueError(f"key: must be one key, got an array of keys of shape {key.shape}")
    if str(jax.random.key_impl(key)) != "threefry2x32":
        raise ValueError(
            "key: must be of the threefry2x32 implementation, whose streams do not depend on "
            f"tiles or devices; got {jax.random.key_impl(key)}"
        )
    return key
