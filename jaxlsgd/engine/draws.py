"""Random draws by counter: the same numbers for any tile, device, order or schedule.

Observation t of client k in replication r takes its draws from threefry2x32 under the data key of
replication r, at the counter (t // 2, k·n + i) for its i-th of n draws; of the two words that one
counter gives, an even t takes the first and an odd t the second. The draws depend on nothing else. `core.random`
has threefry2x32 itself and the choice of clients.

Normals are made by Box and Muller's transform from both words, so that the two observations of a
pair share one logarithm and one square root. Its functions are short polynomials, because XLA's own
`erf_inv` does not vectorise on a CPU (153 against 459 million normals per second on one core).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxlsgd.core.problem import Array, Draws, FlatFunctions, at_time
from jaxlsgd.core.random import StreamKeys, threefry2x32
from jaxlsgd.core.tracing import p
from jaxlsgd.engine import xla
from jaxlsgd.engine.layout import AHEAD_BYTES, BLOCK_STEPS
from jaxlsgd.engine.program import ProblemData, Program
from jaxlsgd.engine.xla import KEY_KIND, Varying, VaryingKeys, innermost

_DATA_STREAM = 0  # keys: root → replication → purpose


def replication_keys(root: Array, replications: Array) -> Array:
    """Return the data key of each replication: root → replication → purpose."""

    def one(r: Array) -> Array:
        return jax.random.fold_in(jax.random.fold_in(root, r), _DATA_STREAM)

    return jax.vmap(one)(replications)


def stream_keys(keys: Array) -> StreamKeys:
    """Split typed keys (replications,) into arrays of key words."""
    words = jax.random.key_data(keys)
    return StreamKeys(words[:, 0], words[:, 1])


def uniform(bits: Array) -> Array:
    """Map 32 bits to the float32 midpoints (j + ½)/2²³ of (0, 1): never 0, never 1."""
    # 23 bits, not 24: (2²⁴ − ½)/2²⁴ would round to 1.
    return (_to_float(bits >> np.uint32(9)) + np.float32(0.5)) * np.float32(2.0**-23)


def normal_pair(bits0: Array, bits1: Array) -> tuple[Array, Array]:
    """Return two independent standard normals, √(−2 ln u)·(cos θ, sin θ), from two words.

    u has 24 bits, so |z| ≤ √(50 ln 2) = 5.89; θ has 2 bits of quadrant and 24 within it.
    """
    u = (_to_float(bits0 >> np.uint32(8)) + np.float32(0.5)) * np.float32(2.0**-24)
    radius = jnp.sqrt(np.float32(-2.0) * _log(u))
    cosine, sine = _cos_sin(bits1)
    return radius * cosine, radius * sine


def erf_inv(x: Array) -> Array:
    """Return the inverse of the error function in (−1, 1), float32.

    Reference: Giles (2012), Approximating the erfinv function; XLA uses the same polynomials.
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
    """Return the natural logarithm of float32 in (0, 1], to about 1 ulp (coefficients of Cephes' logf)."""
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
    """Return cosine and sine of a uniform angle: quadrant from the top bits, polynomial within it."""
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
    """Draw what observations t = 2·pair and t = 2·pair + 1 of all clients need.

    Both are returned as one complex array, the even t in its real part and the odd t in its imaginary one:
    XLA's CPU compiler makes one pass for each result, and two real ones would cost the generator twice.

    Args:
      keys: key words of the replications.
      pair: t // 2, () uint32.
      client_index: (K,) uint32, the clients' numbers in the whole federation; (K, replications) if each
        replication has other clients.
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
    """Return the draws of the even and of the odd observation."""
    return Draws(*(x.real for x in pair)), Draws(*(x.imag for x in pair))


Parameters = Mapping[str, Any]


def fold_in(keys: VaryingKeys, data: Array, unit: Array) -> VaryingKeys:
    """Fold a number into the keys of all replications, as `jax.random.fold_in` does."""
    return _Generator(unit).words(keys, (), data.astype(jnp.uint32))


def over_replications(
    sample: Callable[..., Any], unit: Array, in_axes: Any = (-1, None)
) -> Callable[..., Any]:
    """Return `sample` over all replications, (..., R): the same numbers, up to the rounding of normals."""
    made = _Generator(unit)
    rules = {
        p.random_bits_p: made.bits,
        p.random_split_p: made.split,
        p.random_fold_in_p: made.fold_in,
        p.erf_inv_p: made.erf_inv,
    }
    return innermost(sample, in_axes, varying_rules=rules)


class _Generator:
    """Replacements of JAX's operations on keys and bits."""

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
        """Return new keys, from counters (0, low)."""
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
        return [Varying(xla.once(erf_inv(x.array), self._unit))]


def _threefry(keys: VaryingKeys, shape: tuple[int, ...], low: Array) -> tuple[Array, Array]:
    """Return two words under keys (..., R) at counters (0, low) of a shape: (..., *shape, R)."""
    at = keys.high.ndim - 1
    words = (jnp.expand_dims(word, tuple(range(at, at + len(shape)))) for word in keys)
    return threefry2x32(StreamKeys(*words), jnp.zeros((), jnp.uint32), low)


def _counters(shape: tuple[int, ...]) -> Array:
    """Return the flat indices of a shape, in the order of JAX, (*shape, 1)."""
    return lax.reshape(lax.iota(jnp.uint32, math.prod(shape)), (*shape, 1))


def _keys(value: Any) -> VaryingKeys | None:
    if isinstance(value, VaryingKeys):
        return value
    if not isinstance(value, Varying) or str(jax.random.key_impl(value.array)) != KEY_KIND:
        return None
    data = jax.random.key_data(value.array)
    return VaryingKeys(data[..., 0], data[..., 1])


class Supply(NamedTuple):
    """The input from which a block takes its draws: the replications' keys, or draws that were made ahead."""

    keys: Array | None  # (R,) typed keys
    ahead: Any  # None, leaves (B/2, K, count, R), complex, or of samples (B/2, 2, K, ..., R)


class Source(NamedTuple):
    """Functions that make the observations of a block."""

    draw: Callable[[Array], Any]  # index of a pair in the block → its draws
    observe: Callable[[Any], tuple[Any, Any]]  # its draws → the two observations, (K, ..., R)


def supply(program: Program, data: ProblemData, keys: Array, first: int) -> Supply:
    """Return the draws of the block that starts at observation `first`, or the keys to make them from.

    Cells that differ only in schedule, horizon or step size see the same data, and share one `Supply`. Large
    problems draw within the block instead, and get the keys.
    """
    if not program.draws_ahead and not _samples_ahead(program, data):
        return Supply(keys, None)
    return Supply(None, _draw_block(program, data, keys, np.uint32(first)))


def _samples_ahead(program: Program, data: ProblemData) -> bool:
    """Return whether samples are made before the block: if they are few, since `sample` is then compiled once."""
    sample = program.structure.functions[1]
    if sample is None or program.algorithm.participation is not None:
        return False
    leaves, treedef = jax.tree.flatten(data.clients)
    shapes = tuple(jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in leaves)
    each = _sample_bytes(sample, program.structure.drifts, treedef, shapes)
    return BLOCK_STEPS * data.client_index.shape[0] * each <= AHEAD_BYTES


@functools.cache
def _sample_bytes(sample: Any, drifts: bool, treedef: Any, shapes: tuple[Any, ...]) -> int:
    key = jax.eval_shape(lambda: jax.random.key(0, impl=KEY_KIND))
    sample = at_time(sample, drifts, np.uint32(0))
    leaves = jax.tree.leaves(jax.eval_shape(sample, key, treedef.unflatten(shapes)))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


@functools.partial(jax.jit, static_argnums=0)
def _draw_block(program: Program, data: ProblemData, keys: Array, first: Array) -> Any:
    pairs = first // np.uint32(2) + jnp.arange(BLOCK_STEPS // 2, dtype=jnp.uint32)
    spec = program.structure.draws
    if spec is None:
        return lax.map(lambda pair: _sampled_pair(program, data, keys, pair), pairs)
    words = stream_keys(keys)
    return draw_pair(words, pairs[:, None, None, None], data.client_index, spec)


def make_source(
    program: Program, functions: FlatFunctions, data: ProblemData, given: Supply, first: Array
) -> Source:
    """Return the functions that make a block's observations, from observation `first` on."""
    spec = program.structure.draws
    start = first // np.uint32(2)
    if functions.observe is None or spec is None:
        return _sampled_source(program, data, given, start)
    axes, drifts = (-1, -1 if data.each else None), program.structure.drifts
    observe_at = functools.partial(at_time, functions.observe, drifts)

    def observe_one(one: Draws, t: Any) -> Any:
        observe = jax.vmap(xla.over_replications(observe_at(t), in_axes=axes))
        return observe(jax.tree.map(lambda x: x.astype(program.dtype), one), data.clients)

    def observe_both(pair: Any) -> tuple[Any, Any]:
        pair, t = pair if drifts else (pair, np.uint32(0))
        even, odd = split_pair(pair)
        return observe_one(even, t), observe_one(odd, t + np.uint32(1))

    def timed(draw: Callable[[Array], Draws]) -> Callable[[Array], Any]:
        """Add the time of the first of the two observations, if they drift."""
        times = lambda i: np.uint32(2) * (start + i.astype(jnp.uint32))  # noqa: E731
        return (lambda i: (draw(i), times(i))) if drifts else draw

    if given.ahead is not None:
        return Source(timed(functools.partial(xla.element, given.ahead)), observe_both)
    assert given.keys is not None
    words = stream_keys(given.keys)

    def draw(i: Array) -> Draws:
        return draw_pair(words, start + i.astype(jnp.uint32), data.client_index, spec)

    return Source(timed(draw), observe_both)


def _sampled_source(program: Program, data: ProblemData, given: Supply, start: Array) -> Source:
    def split(pair: Any) -> tuple[Any, Any]:
        return tuple(jax.tree.map(lambda x, half=half: x[half], pair) for half in (0, 1))

    if given.ahead is not None:
        return Source(functools.partial(xla.element, given.ahead), split)
    assert given.keys is not None
    keys = given.keys
    return Source(lambda i: _sampled_pair(program, data, keys, start + i.astype(jnp.uint32)), split)


def _sampled_pair(program: Program, data: ProblemData, keys: Array, pair: Array) -> Any:
    """Return two observations of every client by the user's `sample`, (2, K, ..., R).

    The key of an observation is that of replication → t → client.
    """
    own, drifts = program.structure.flat_functions().sample, program.structure.drifts
    assert own is not None
    words = VaryingKeys(*stream_keys(keys))
    axes = (-1, -1 if data.each else None)

    def one(t: Array) -> Any:
        sample = over_replications(at_time(own, drifts, t), data.unit, axes)
        at_t = fold_in(words, t, data.unit)

        def of(index: Array, client: Any) -> Any:
            return sample(fold_in(at_t, index, data.unit), client)

        return jax.vmap(of)(data.client_index, data.clients)

    return jax.vmap(one)(np.uint32(2) * pair + jnp.arange(2, dtype=jnp.uint32))
