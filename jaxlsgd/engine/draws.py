"""Random draws by counter: the same numbers for any tile, device, order or schedule.

Observation t of client k in replication r takes its draws from threefry2x32 under the data key of
replication r, at the counter (t // 2, k·n + i) for its i-th of n draws; of the two words that one
counter gives, an even t takes the first and an odd t the second. Nothing else enters.

Normals are made by Box and Muller's transform from both words, so that the two observations of a
pair share one logarithm and one square root. Its functions are short polynomials, because XLA's own
`erf_inv` does not vectorise on a CPU (153 against 459 million normals per second on one core).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxlsgd.core.problem import Array, Draws
from jaxlsgd.core.threefry import StreamKeys, threefry2x32

_DATA_STREAM = 0  # keys: root → replication → purpose


def replication_keys(root: Array, replications: Array) -> Array:
    """Returns the data key of each replication: root → replication → purpose."""

    def one(r: Array) -> Array:
        return jax.random.fold_in(jax.random.fold_in(root, r), _DATA_STREAM)

    return jax.vmap(one)(replications)


def stream_keys(keys: Array) -> StreamKeys:
    """Splits typed keys (replications,) into arrays of key words."""
    words = jax.random.key_data(keys)
    return StreamKeys(words[:, 0], words[:, 1])


def uniform(bits: Array) -> Array:
    """Maps 32 bits to the float32 midpoints (j + ½)/2²³ of (0, 1): never 0, never 1."""
    # 23 bits, not 24: (2²⁴ − ½)/2²⁴ would round to 1.
    return (_to_float(bits >> np.uint32(9)) + np.float32(0.5)) * np.float32(2.0**-23)


def normal_pair(bits0: Array, bits1: Array) -> tuple[Array, Array]:
    """Two independent standard normals, √(−2 ln u)·(cos θ, sin θ), from two words.

    u has 24 bits, so |z| ≤ √(50 ln 2) = 5.89; θ has 2 bits of quadrant and 24 within it.
    """
    u = (_to_float(bits0 >> np.uint32(8)) + np.float32(0.5)) * np.float32(2.0**-24)
    radius = jnp.sqrt(np.float32(-2.0) * _log(u))
    cosine, sine = _cos_sin(bits1)
    return radius * cosine, radius * sine


def erf_inv(x: Array) -> Array:
    """The inverse of the error function in (−1, 1), float32.

    Reference: Giles (2012), Approximating the erfinv function; the polynomials that XLA has, too.
    """
    w = -_log((np.float32(1.0) - x) * (np.float32(1.0) + x))
    near = _polynomial(
        w - np.float32(2.5),
        (2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087)
        + (-0.00125372503, -0.00417768164, 0.246640727, 1.50140941),
    )
    far = _polynomial(
        jnp.sqrt(w) - np.float32(3.0),
        (-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773)
        + (-0.0076224613, 0.00943887047, 1.00167406, 2.83297682),
    )
    return jnp.where(w < np.float32(5.0), near, far) * x


def _to_float(bits: Array) -> Array:
    # By way of int32, which every vector unit converts in one instruction.
    return bits.astype(jnp.int32).astype(jnp.float32)


def _polynomial(x: Array, coefficients: tuple[float, ...]) -> Array:
    value = jnp.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x + np.float32(coefficient)
    return value


def _log(u: Array) -> Array:
    """Natural logarithm of float32 in (0, 1], to about 1 ulp (coefficients of Cephes' logf)."""
    bits = lax.bitcast_convert_type(u, jnp.int32)
    mantissa = lax.bitcast_convert_type((bits & 0x007FFFFF) | 0x3F000000, jnp.float32)
    low = mantissa < np.float32(0.70710678)
    exponent = ((bits >> 23) - 126 - low.astype(jnp.int32)).astype(jnp.float32)
    x = jnp.where(low, mantissa + mantissa, mantissa) - np.float32(1.0)
    square = x * x
    tail = _polynomial(
        x,
        (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1)
        + (-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
    )
    tail = tail * x * square + exponent * np.float32(-2.12194440e-4) - np.float32(0.5) * square
    return x + tail + exponent * np.float32(0.693359375)


def _cos_sin(bits: Array) -> tuple[Array, Array]:
    """Cosine and sine of a uniform angle: quadrant from the top bits, polynomial within it."""
    position = _to_float((bits & np.uint32(0x3FFFFFFF)) >> np.uint32(6)) + np.float32(0.5)
    theta = (position * np.float32(2.0**-24) - np.float32(0.5)) * np.float32(np.pi / 2)
    square = theta * theta
    sine = _polynomial(square, (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1))
    sine = sine * square * theta + theta
    cosine = _polynomial(square, (2.443315711809948e-5, -1.388731625493765e-3, 4.16666456829e-2))
    cosine = cosine * square * square - np.float32(0.5) * square + np.float32(1.0)
    turned = (bits & np.uint32(0x40000000)) != 0
    flip = bits & np.uint32(0x80000000)
    return (
        _flip_sign(jnp.where(turned, sine, cosine), flip),
        _flip_sign(jnp.where(turned, cosine, sine), flip),
    )


def _flip_sign(x: Array, sign_bit: Array) -> Array:
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint32) ^ sign_bit, jnp.float32)


def draw_pair(keys: StreamKeys, pair: Array, client_index: Array, spec: Draws) -> Draws:
    """Draws what observations t = 2·pair and t = 2·pair + 1 of all clients need.

    Both come as one complex array, the even t in its real part and the odd t in its imaginary one:
    XLA's CPU compiler makes one pass for each result, and two real ones would cost the generator twice.

    Args:
      keys: key words of the replications.
      pair: t // 2, () uint32.
      client_index: (K,) uint32, the clients' numbers in the whole federation; (K, replications) where
        every replication has other clients.
      spec: how many normals and uniforms an observation needs.

    Returns:
      Draws of complex64 arrays (K, count, replications).
    """
    counts = (int(spec.normal), int(spec.uniform))
    index = client_index if client_index.ndim == 2 else client_index[:, None]
    base = index.astype(jnp.uint32)[:, None] * np.uint32(sum(counts))

    def words(start: int, count: int) -> tuple[Array, Array]:
        low = base + jnp.arange(start, start + count, dtype=jnp.uint32)[None, :, None]
        return threefry2x32(keys, jnp.zeros_like(low) + pair, low)

    normal = lax.complex(*normal_pair(*words(0, counts[0])))
    bits = words(counts[0], counts[1])
    return Draws(normal, lax.complex(uniform(bits[0]), uniform(bits[1])))


def split_pair(pair: Draws) -> tuple[Draws, Draws]:
    """The draws of the even and of the odd observation."""
    return Draws(*(x.real for x in pair)), Draws(*(x.imag for x in pair))


def draw_block(
    keys: StreamKeys, first: Array, num_steps: int, client_index: Array, spec: Draws
) -> Draws:
    """Draws what observations t = first, …, first + num_steps − 1 of all clients need.

    The same numbers as `draw_pair`, for those who want to look at them.

    Args:
      keys: key words of the replications.
      first: first observation index, even, () uint32.
      num_steps: even and static.
      client_index: (K,) uint32, the clients' numbers in the whole federation.
      spec: how many normals and uniforms an observation needs.

    Returns:
      Draws of float32 arrays (num_steps, K, count, replications).
    """
    pairs = first // np.uint32(2) + jnp.arange(num_steps // 2, dtype=jnp.uint32)
    drawn = lax.map(lambda pair: draw_pair(keys, pair, client_index, spec), pairs)

    def in_order(even: Array, odd: Array) -> Array:
        return jnp.stack([even, odd], axis=1).reshape(num_steps, *even.shape[1:])

    return Draws(*map(in_order, *split_pair(drawn)))
