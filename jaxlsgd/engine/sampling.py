"""The problem's own `sample`, made of the engine's generator.

What `sample` gets is an ordinary key, and its bits are those of `jax.random`. But JAX's threefry is a loop on
a CPU, which nothing is fused with, and XLA's `erf_inv` does not vectorise. So `sample` is traced, and its
random bits, its keys and its normals are made as passes over all replications.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as p

from jaxlsgd.core.problem import Array
from jaxlsgd.engine import draws as draws_lib
from jaxlsgd.engine import xla
from jaxlsgd.engine.draws import StreamKeys
from jaxlsgd.engine.innermost import KEY_KIND, Varying, VaryingKeys, innermost

Parameters = Mapping[str, Any]


def fold_in(keys: VaryingKeys, data: Array, unit: Array) -> VaryingKeys:
    """`jax.random.fold_in` of a number into the keys of all replications."""
    return _Generator(unit).words(keys, (), data.astype(jnp.uint32))


def over_replications(
    sample: Callable[..., Any], unit: Array, in_axes: Any = (-1, None)
) -> Callable[..., Any]:
    """`sample(keys, client)` of all replications, (..., R): the same numbers, up to rounding of normals."""
    made = _Generator(unit)
    rules = {
        p.random_bits_p: made.bits,
        p.random_split_p: made.split,
        p.random_fold_in_p: made.fold_in,
        p.erf_inv_p: made.erf_inv,
    }
    return innermost(sample, in_axes, varying_rules=rules)


class _Generator:
    """What takes the place of JAX's operations on keys and bits."""

    def __init__(self, unit: Array) -> None:
        self._unit = unit

    def fold_in(self, parameters: Parameters, keys: Any, data: Any) -> Sequence[Any] | None:
        del parameters
        found = _keys(keys)
        if found is None:
            return None
        number = data.array if isinstance(data, Varying) else jnp.asarray(data)[..., None]
        return [self.words(found, (), number.astype(jnp.uint32))]

    def split(self, parameters: Parameters, keys: Any) -> Sequence[Any] | None:
        found = _keys(keys)
        shape = parameters["shape"]
        return None if found is None else [self.words(found, shape, _counters(shape))]

    def words(self, keys: VaryingKeys, shape: tuple[int, ...], low: Array) -> VaryingKeys:
        """New keys, from counters (0, low)."""
        return xla.apart(lambda: VaryingKeys(*_threefry(keys, shape, low)), self._unit)

    def bits(self, parameters: Parameters, keys: Any) -> Sequence[Any] | None:
        found = _keys(keys)
        shape, width = parameters["shape"], parameters["bit_width"]
        if found is None:
            return None
        one, two = _threefry(found, shape, _counters(shape))
        if width == 64:
            return [Varying((one.astype(jnp.uint64) << np.uint64(32)) | two.astype(jnp.uint64))]
        return [Varying((one ^ two).astype(f"uint{width}"))]

    def erf_inv(self, parameters: Parameters, x: Any) -> Sequence[Any] | None:
        del parameters
        if x.array.dtype != jnp.float32:
            return None
        return [Varying(xla.once(draws_lib.erf_inv(x.array), self._unit))]


def _threefry(keys: VaryingKeys, shape: tuple[int, ...], low: Array) -> tuple[Array, Array]:
    """Two words under keys (..., R) at counters (0, low) of a shape: (..., *shape, R)."""
    at = keys.high.ndim - 1
    words = (jnp.expand_dims(word, tuple(range(at, at + len(shape)))) for word in keys)
    return draws_lib.threefry2x32(StreamKeys(*words), jnp.zeros((), jnp.uint32), low)


def _counters(shape: tuple[int, ...]) -> Array:
    """The places of a shape, counted as JAX counts them, (*shape, 1)."""
    return lax.reshape(lax.iota(jnp.uint32, math.prod(shape)), (*shape, 1))


def _keys(value: Any) -> VaryingKeys | None:
    if isinstance(value, VaryingKeys):
        return value
    if not isinstance(value, Varying) or str(jax.random.key_impl(value.array)) != KEY_KIND:
        return None
    data = jax.random.key_data(value.array)
    return VaryingKeys(data[..., 0], data[..., 1])
