"""Predict what a run costs: the memory of a tile, from shapes alone, and the numbers that a client sends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlsgd.core import checks
from jaxlsgd.core.algorithm import Algorithm, message_size
from jaxlsgd.core.checks import Dtype
from jaxlsgd.core.estimator import Accumulator, Estimator, Horizon, hessians_due
from jaxlsgd.core.forms import OuterProduct
from jaxlsgd.core.problem import Draws, Problem, abstract_source
from jaxlsgd.engine import federation, xla
from jaxlsgd.engine.layout import AHEAD_BYTES, BLOCK_STEPS, SLOTS
from jaxlsgd.engine.program import loop_for
from jaxlsgd.engine.statistics import axes_of
from jaxlsgd.schedules import constant, power_decay
from jaxlsgd.schedules.plan import Plan

# A tile's width is a multiple of this if it is not smaller, to fill vector registers.
WIDTH_MULTIPLE = 16
# Wider tiles are no faster, and a run that is stopped would lose more work.
WIDEST = 4096
# On a CPU a tile is fastest if it fits in a core's second-level cache.
CACHE_BYTES, CACHE_WIDEST = 2 * 2**20, 512
# Memory of a tile that does not fit in the cache, or of a device without such a cache.
DEFAULT_BYTES = 2**30
# Cells in one program, as lanes: widths, and the most bytes and replications of their states together. On a CPU
# launches are expensive compared with short passes, and the states must fit in the last-level cache. A GPU is busy
# with so many replications at once; it gets one width, the largest that fits, so that rows cannot depend on it.
LANES = {"cpu": ((1, 4), 16 * 2**20, 8 * 512), "gpu": ((8, 24), 2**33, 2**15)}
# The most clients with which rows were the same for all widths in tests.
LANE_CLIENTS = 32

Shape = tuple[int, ...]  # of a buffer, without its last axis, the replications
_LOCAL_SGD = Algorithm("local_sgd", within_theory=True)  # whose parts are all None


def numbers_sent(
    problem: Problem,
    plan: Plan,
    method: Estimator | None = None,
    algorithm: Algorithm | None = None,
    *,
    rounds: int | None = None,
) -> float:
    """Count the numbers that a client sends to the server, from its model to its Hessians.

    With d parameters a client sends, in each of T rounds,

        d                 its model, or what the algorithm declares (`Algorithm.sends`; 2d for SCAFFOLD)
        d                 a gradient at the average, for a method that needs one (`Accumulator.needs_gradient`)
        d                 the sum of its gradients, if a method needs it (`needs_gradient_sum`) and the server
                          cannot compute it from how clients moved; in Local SGD it can
        d (d + 1)/2       a Hessian, for a method that needs one; of some, only in a few rounds (`Accumulator.hessians`)
        d                 the sum of its gradients at an anchor, if a method has one and it is not the start
        d (d + 1)         its Hessians at that anchor and the one before, in the rounds that such a method chooses

    What clients receive is not counted. If n of K clients take part in a round, the number is the mean over clients,
    n/K of this. Methods that run side by side share what they need; this is the number for one of them alone.

    Args:
      problem: has d and K.
      plan: has T.
      method: the interval method; a run without intervals if None.
      algorithm: Local SGD if None.
      rounds: how many of the plan's rounds; all if None.

    Returns:
      Numbers sent per client, an expectation if clients are chosen at random.

    Example::

        plan = schedules.paper("P(1/2)").plan(schedules.power_decay(0.5), num_steps=5000)
        numbers_sent(problem, plan, one_step()) / numbers_sent(problem, plan)
    """
    algorithm = (algorithm or _LOCAL_SGD).among(problem.num_clients)
    d, clients = problem.dim, problem.num_clients
    T = plan.num_rounds if rounds is None else checks.count("rounds", rounds, 1, plan.num_rounds)
    declared = algorithm.sends
    each = d + message_size(algorithm, d, clients) if declared is None else declared(d)
    hessians = anchored = 0
    if method is not None:
        each += d * method.needs_gradient
        each += d * (method.needs_gradient_sum and not algorithm.gradient_sum_known)
        hessians = method.needs_hessian * T
        if method.needs_hessian and method.hessians is not None:
            due = hessians_due(method.hessians, plan.ends[:T] / plan.num_steps)
            hessians = int(np.count_nonzero(np.diff(due, prepend=0)))
        if method.anchor is not None:
            E, count = plan.E[:T], algorithm.stepping(clients)
            hessians += 2 * int(np.count_nonzero(method.anchor.hessian_rounds(E, count, d)))
            anchored = int(np.count_nonzero(np.cumsum(E) - E >= method.anchor.begins(d)))
    total = T * each + anchored * d + hessians * (d * (d + 1) // 2)
    taking_part = algorithm.stepping(clients)
    return total if taking_part == clients else total * taking_part / clients


def sent_under_c1(problem: Problem, num_steps: int) -> int:
    """Count what a client of plain Local SGD sends if it communicates after every step: d numbers each time."""
    return num_steps * (problem.dim // problem.copies)


def tile_bytes(
    problem: Problem,
    methods: Iterable[Estimator],
    tile_size: int,
    dtype: Dtype = "float32",
    *,
    algorithm: Algorithm | None = None,
    sublanes: int = 1,
) -> int:
    """Predict the peak memory of a tile on its device, reached in the block of steps that needs most.

    With K clients, d parameters, n draws per observation, room for B synchronisations in a block and
    R replications,

        state (K·d + d + statistics + own)·R   +   draws 3·2·K·n·R   +   met 2·(B + 1)·d·R
                                               +   passes (2·K·d + 3·K + statistics + own)·R

    or, if that is more, clients and statistics, and twice the sums of `one_step` once more (three times on a TPU),
    while it makes an anchor. Here `own` is what the algorithm keeps, and K counts the clients that take part in a round. Draws are made for
    two steps at once, and three copies are counted: those in use, those being made, and those in the loop's carry.
    Hessians by automatic differentiation are counted twice per client. The intermediate arrays of a user's own
    loss or `sample` are not counted.

    Args:
      problem: the problem.
      methods: the interval methods of the run.
      tile_size: R, replications that run side by side.
      dtype: "float32" or "float64"; draws are float32 in both.
      algorithm: what is run; Local SGD if None.
      sublanes: the device pads the last axis but one to a multiple of this: 1 on CPUs and GPUs, 8 on TPUs.

    Returns:
      Bytes on one device. With few clients this is within 30 % of what XLA reports for a CPU, and mostly above
      it; with many clients a program may need `beyond_bytes` in addition.

    Example::

        tile_bytes(problems.linear(5, 10), (random_scaling(), plug_in()), 512)
    """
    tile_size = checks.count("tile_size", tile_size, 1)
    return tile_size * replication_bytes(
        problem, methods, dtype, algorithm=algorithm, sublanes=sublanes
    )


def largest_tile(
    problem: Problem,
    methods: Iterable[Estimator],
    budget_bytes: int,
    dtype: Dtype = "float32",
    *,
    algorithm: Algorithm | None = None,
    sublanes: int = 1,
    widest: int = WIDEST,
) -> int:
    """Return the largest tile, in replications, that a budget of memory on one device allows.

    Args:
      problem: the problem.
      methods: the interval methods of the run.
      budget_bytes: memory for one tile.
      dtype: "float32" or "float64".
      algorithm: as in `tile_bytes`.
      sublanes: as in `tile_bytes`.
      widest: no tile is wider than this.

    Returns:
      A multiple of 16 if 16 replications fit, and fewer if they do not.

    Example::

        largest_tile(problems.linear(10_000, 2), (random_scaling(mode="diagonal"),), 2 * 2**30)
    """
    budget_bytes = checks.count("budget_bytes", budget_bytes, 1)
    widest = checks.count("widest", widest, 1)
    how: dict[str, Any] = {"algorithm": algorithm, "sublanes": sublanes}
    each = replication_bytes(problem, methods, dtype, **how)
    fits = min(widest, budget_bytes // each)
    if fits < 1:
        rule = f"be at least {each}, which one replication of {problem.name} needs"
        hint = "; fewer clients, or random_scaling(mode='diagonal') instead of matrices, need less"
        raise checks.refusal("budget_bytes", rule, budget_bytes, hint, code="memory")
    return _rounded(fits)


def _rounded(fits: int) -> int:
    return fits if fits < WIDTH_MULTIPLE else fits - fits % WIDTH_MULTIPLE


def default_tile(
    problem: Problem,
    methods: Iterable[Estimator],
    dtype: Dtype = "float32",
    platform: str = "cpu",
    algorithm: Algorithm | None = None,
) -> int:
    """Return the default width of a tile: small enough for the cache on a CPU, wide on other devices.

    Example::

        default_tile(problems.linear(5, 10), (random_scaling(), plug_in()))  # 512
    """
    methods = tuple(methods)
    sublanes = 8 if platform == "tpu" else 1
    how: dict[str, Any] = {"algorithm": algorithm, "sublanes": sublanes}
    each = replication_bytes(problem, methods, dtype, **how)
    in_cache = replication_bytes(problem, methods, dtype, **how, stored=False)
    if platform == "cpu" and WIDTH_MULTIPLE * in_cache <= CACHE_BYTES:
        return _rounded(min(CACHE_WIDEST, CACHE_BYTES // in_cache))
    widest = WIDTH_MULTIPLE if platform == "cpu" else WIDEST
    budget = max(DEFAULT_BYTES, each)  # at least one replication, whatever it needs
    return largest_tile(problem, methods, budget, dtype, **how, widest=widest)


def lane_widths(
    problem: Problem,
    methods: Iterable[Estimator],
    tile_size: int,
    dtype: Dtype = "float32",
    platform: str = "cpu",
    algorithm: Algorithm | None = None,
) -> tuple[int, ...]:
    """Return how many cells of a study may run as lanes of one program; () if they run one after another.

    This depends only on what the cells have in common, not on how many there are, so that missing cells of
    a study are always run as the others were.

    Example::

        lane_widths(problems.linear(5, 10), (random_scaling(), plug_in()), 512)  # (1, 4)
    """
    widths, most_bytes, most_replications = LANES.get(platform, ((), 0, 0))
    methods, on_cpu = tuple(methods), platform == "cpu"
    if algorithm is not None and algorithm.among(problem.num_clients).participation is not None:
        return ()
    if not (
        _alike_at_any_width(problem, methods, algorithm)
        if on_cpu
        else loop_for(platform, problem).dense
    ):
        return ()
    each = own_bytes(problem, methods, dtype, algorithm=algorithm)
    most = min(most_bytes // each, most_replications) // tile_size
    fits = tuple(width for width in widths if width <= most)
    if on_cpu:
        return fits if len(fits) > 1 else ()
    return fits[-1:]


def _alike_at_any_width(
    problem: Problem, methods: tuple[Estimator, ...], algorithm: Algorithm | None
) -> bool:
    """Return whether a CPU's rows are the same bytes in programs of one lane and of several.

    XLA drops an axis of length 1, and may then add in another order, or fuse other products and sums. Rows did
    differ with more clients than are added one by one, and with algorithms that carry more than x_k and x̄. They
    did not with few clients, a given gradient and declared draws under Local SGD, which tests check.
    """
    simple = algorithm is None or federation.folded(algorithm)
    given = problem.gradient is not None and problem.draws is not None
    known = all(part.any_width for method in methods for part in method.accumulators)
    return simple and given and known and problem.num_clients <= LANE_CLIENTS


def replication_bytes(
    problem: Problem,
    methods: Iterable[Estimator],
    dtype: Dtype = "float32",
    *,
    algorithm: Algorithm | None = None,
    sublanes: int = 1,
    stored: bool = True,
) -> int:
    """Predict the peak bytes per replication of a tile; see `tile_bytes` and `own_bytes`."""
    how: dict[str, Any] = {"algorithm": algorithm, "sublanes": sublanes}
    methods = tuple(methods)
    own = own_bytes(problem, methods, dtype, **how, stored=stored)
    block = draws_bytes(problem, dtype, **how) + own
    if not stored:
        return block
    clients = _stepping(problem, algorithm)
    return max(block, _anchor_bytes(problem, methods, dtype, clients, sublanes))


# What making an anchor needs besides the statistics, as a multiple of its own: 1.4 (d = 2 to 8), 1.9 (d = 12), 1.7
# (d = 20) and 2.4 (d = 50) on a CPU, 1.3 (d = 5) and 2.0 (d = 20) on an H100, 3.0 of the padded one on a TPU (d = 5).
_BESIDES, _BESIDES_PADDED = 2, 3


def _anchor_bytes(
    problem: Problem, methods: tuple[Estimator, ...], dtype: Dtype, clients: int, sublanes: int
) -> int:
    """Return the bytes per replication while an anchor is made, of the statistic that needs most; 0 if none has one."""
    item, d = jnp.dtype(dtype).itemsize, problem.dim

    def size(part: Accumulator) -> int:
        both = (_state_shapes(part, d, dtype, stored=stored) for stored in (True, False))
        return sum(item * _padded(shape, sublanes) for shapes in both for shape in shapes)

    parts = dict.fromkeys(part for method in methods for part in method.accumulators)
    largest = max((size(part) for part in parts if part.anchor is not None), default=0)
    if not largest:
        return 0
    resident = item * _padded((clients, d), sublanes) + sum(map(size, parts))
    return resident + (_BESIDES_PADDED if sublanes > 1 else _BESIDES) * largest


def draws_bytes(
    problem: Problem,
    dtype: Dtype = "float32",
    *,
    algorithm: Algorithm | None = None,
    sublanes: int = 1,
    ahead: bool = False,
) -> int:
    """Return the bytes per replication of keys and draws, which cells that run together share.

    Counts three copies of the draws of two steps (see `tile_bytes`). With `ahead`, counts those of a block as
    well, if they are few enough to be made before it runs.
    """
    K = _stepping(problem, algorithm)
    item = jnp.dtype(dtype).itemsize if problem.draws is None else 4
    step = sum(item * _padded(shape, sublanes) for shape in _observed(problem, K))
    block = BLOCK_STEPS * step if ahead and problem.draws is not None else 0
    return 8 + 6 * step + (block if block <= AHEAD_BYTES else 0)


def beyond_bytes(
    problem: Problem,
    methods: Iterable[Estimator],
    dtype: Dtype = "float32",
    *,
    algorithm: Algorithm | None = None,
    dense: bool = True,
) -> int:
    """Return the bytes per replication that a CPU's programs may need beyond `replication_bytes`.

    If draws are made within a block, XLA was seen to keep up to 12 steps of them, not 6 (9 to 12 with 100 to
    20,000 clients). If rounds are so short that Hessians are formed in the loop, it keeps twice the outer products
    of a share of the clients: 0.4 to 0.6 of the memory of linear regression with 2,000 clients and 200 parameters.
    This number decides whether a study fits in memory, not how wide a tile is.

    Args:
      problem: the problem.
      methods: the interval methods of the run.
      dtype: "float32" or "float64".
      algorithm: as in `tile_bytes`.
      dense: whether a block has rounds of one or a few steps.
    """
    K, item = _stepping(problem, algorithm), jnp.dtype(dtype).itemsize
    drawn = 4 if problem.draws is not None else item
    step = sum(drawn * _padded(shape, 1) for shape in _observed(problem, K))
    ahead = problem.draws is not None and BLOCK_STEPS * step <= AHEAD_BYTES
    beyond = 0 if ahead else 6 * step
    hessian = any(part.needs_hessian for method in methods for part in method.accumulators)
    if dense and hessian and K > xla.UNROLLED_CLIENTS and not _writes_hessians(problem):
        beyond += 2 * max(K // xla.SHARES, xla.LEAST_SHARE) * problem.dim**2 * item
    return beyond


class ReadingCost(NamedTuple):
    """The size of the program that reads a method's intervals, and its memory."""

    equations: int  # operations of its program, as traced
    bytes: int  # per replication, besides the statistics
    kept: int  # per replication, of the statistics


def reading_cost(method: Estimator, dim: int, dtype: Dtype = "float32") -> ReadingCost:
    """Predict the size of the program that reads a method's intervals, and its memory per replication.

    A program that factorises matrices was seen to keep about twice its largest product of arrays and up to
    twice the statistics. One that reads the sums of `one_step` keeps 2.1 times the statistics with 5 parameters, and 3.5
    times with 50. Others keep next to nothing.

    Args:
      method: the interval method.
      dim: parameters.
      dtype: "float32" or "float64".
    """
    vector = jax.ShapeDtypeStruct((dim,), jnp.float32)
    states = tuple(jax.eval_shape(part.init, vector) for part in method.accumulators)
    plan = constant(1).plan(power_decay(0.5), num_rounds=128)
    given = Horizon.of(plan, "float32") if method.needs_plan else None
    equations = list(_equations(jax.make_jaxpr(method.measure)(states, given).jaxpr))
    names = (*_FACTORISATIONS, "dot_general")  # the rest is fused
    whole = [one for one in equations if one.primitive.name in names]
    made = [math.prod(x.aval.shape) for one in whole for x in one.outvars]
    parts = dict.fromkeys(method.accumulators)
    shapes = [
        shape
        for part in parts
        for stored in (True, False)
        for shape in _state_shapes(part, dim, "float32", stored=stored)
    ]
    item, kept = jnp.dtype(dtype).itemsize, sum(map(math.prod, shapes))
    factorises = any(one.primitive.name in _FACTORISATIONS for one in equations)
    needed = 2 * (kept + max(made, default=0)) if factorises else 0
    if method.reads_numpy:  # the sums of `one_step`, of either form
        needed = max(needed, 4 * kept)
    return ReadingCost(len(equations), item * needed, item * kept)


_FACTORISATIONS = ("eigh", "cholesky", "lu", "svd", "qr", "geqrf", "schur", "triangular_solve")


def _equations(jaxpr: Any) -> Iterator[Any]:
    """Yield all operations of a traced function, also those inside other operations."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                yield from _equations(getattr(value, "jaxpr", value))


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def own_bytes(
    problem: Problem,
    methods: Iterable[Estimator],
    dtype: Dtype = "float32",
    *,
    algorithm: Algorithm | None = None,
    sublanes: int = 1,
    stored: bool = True,
) -> int:
    """Return the bytes per replication that a cell needs besides the draws; see `tile_bytes`.

    Without `stored`, counts only what the loop over steps reads or writes.
    """
    item, d = jnp.dtype(dtype).itemsize, problem.dim
    K = _stepping(problem, algorithm)
    parts = tuple(dict.fromkeys(part for method in methods for part in method.accumulators))

    def size(shapes: Iterable[Shape]) -> int:
        return sum(item * _padded(shape, sublanes) for shape in shapes)

    clients: list[Shape] = [(K, d)]
    kept = [shape for part in parts for shape in _state_shapes(part, d, dtype, stored=False)]
    store = [shape for part in parts for shape in _state_shapes(part, d, dtype, stored=True)]
    kept += _algorithm_shapes(algorithm, K, d, dtype) + _gathered_shapes(problem, algorithm, K)
    if any(part.needs_gradient_sum for part in parts):
        kept.append((d,))
    hessians = 0
    if any(part.needs_hessian for part in parts) and _writes_hessians(problem):
        hessians = 2 * size([(K, d, d)])
    state = size([*clients, (d,), *kept, *(store if stored else [])])
    met = 2 * size([(max(SLOTS) + 1, d)])
    passes = size([*clients, *clients, (3, K), *kept])
    return state + met + passes + hessians


def _stepping(problem: Problem, algorithm: Algorithm | None) -> int:
    """Return how many clients step."""
    K = problem.num_clients
    return K if algorithm is None else algorithm.stepping(K)


def _gathered_shapes(problem: Problem, algorithm: Algorithm | None, n: int) -> list[Shape]:
    """Return the shapes of what is gathered of the clients that take part: index, weights and constants."""
    if algorithm is None or algorithm.among(problem.num_clients).participation is None:
        return []
    constants = [(n, *leaf.shape[1:]) for leaf in jax.tree.leaves(problem.clients)]
    return [(n,), (n,), *constants]


def _writes_hessians(problem: Problem) -> bool:
    """Return whether the engine stores a d × d matrix per client: Hessians by autodiff, of no special form."""
    if problem.hessian is not None:
        return False
    source, argument = abstract_source(problem)
    client = jax.eval_shape(lambda: jax.tree.map(lambda leaf: leaf[0], problem.clients))
    x = jax.ShapeDtypeStruct((problem.dim,), jnp.float32)
    hessian = problem.structure().flat_functions().hessian
    found = jax.eval_shape(hessian, x, jax.eval_shape(source, argument, client))
    return not isinstance(found, OuterProduct)


def _padded(shape: Shape, sublanes: int) -> int:
    """Return the number of elements of a buffer whose last axis (the last but one in memory) is padded."""
    # A single row has a layout of its own, without padding.
    rows = shape[-1] if shape[-1] == 1 else -(-shape[-1] // sublanes) * sublanes
    return math.prod(shape[:-1]) * rows


def _state_shapes(part: Accumulator, dim: int, dtype: Dtype, *, stored: bool) -> list[Shape]:
    """Return the shapes of a statistic's state per replication: the part that updates do not touch, or the rest."""
    vector = jax.ShapeDtypeStruct((dim,), jnp.dtype(dtype))
    state, axes = jax.eval_shape(part.init, vector), axes_of(part, vector)
    fields = part.rolling.store if part.rolling else ()
    if fields:
        chosen = [name for name in state._fields if (name in fields) == stored]
        state, axes = ([getattr(tree, name) for name in chosen] for tree in (state, axes))
    elif stored:
        return []
    leaves = jax.tree.leaves(axes, is_leaf=lambda axis: axis is None)
    pairs = zip(jax.tree.leaves(state), leaves, strict=True)
    return [leaf.shape or (1,) for leaf, axis in pairs if axis is not None]


def _algorithm_shapes(algorithm: Algorithm | None, K: int, d: int, dtype: Dtype) -> list[Shape]:
    """Return the shapes of an algorithm's state besides x_k and x̄."""
    if algorithm is None or federation.folded(algorithm):
        return []
    vector = jax.ShapeDtypeStruct((d,), jnp.dtype(dtype))
    state = jax.eval_shape(lambda x: federation.start(x, K, 1, algorithm), vector)
    own = jax.tree.leaves((state.moved, state.local, state.memory, state.server))
    return [leaf.shape[:-1] or (1,) for leaf in own]


def _observed(problem: Problem, num_clients: int) -> list[Shape]:
    """Return the shapes of what a step draws or samples for so many clients."""
    if problem.draws is not None:
        counts = [int(count) for count in Draws(*problem.draws) if count]
        return [(num_clients, count) for count in counts]
    source, argument = abstract_source(problem)
    client = jax.eval_shape(lambda: jax.tree.map(lambda leaf: leaf[0], problem.clients))
    leaves = jax.tree.leaves(jax.eval_shape(source, argument, client))
    return [(num_clients, *leaf.shape) for leaf in leaves]
