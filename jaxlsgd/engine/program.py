"""The static description of a compiled program, `Program`, and the numbers that it runs on, `ProblemData`."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlsgd.core.algorithm import Algorithm
from jaxlsgd.core.checks import Dtype
from jaxlsgd.core.estimator import Accumulator, Estimator
from jaxlsgd.core.problem import Problem, Structure, flatten
from jaxlsgd.core.random import weight_bounds
from jaxlsgd.engine.layout import AHEAD_BYTES, BLOCK_STEPS, SLOTS


class Loop(NamedTuple):
    """The form of the loop over steps that suits a platform."""

    prepares: bool = True  # an iteration makes the draws of the next one
    unroll: int = 1  # iterations in one turn of the loop
    partial: bool = True  # it may leave out pairs of steps, so that its length is not known
    ahead: bool = True  # if cells share their draws, those of a block are made before it runs
    dense: bool = False  # the statistics are always updated in the step loop
    rooms: tuple[int, ...] = (
        SLOTS  # slots for synchronisations that a block may have, besides one per step
    )


# On a CPU, XLA would make draws again in every pass that uses them, so the iteration before makes them. On a
# GPU every pass is a kernel: a step's draws are made in the kernel that uses them, and eight iterations are
# unrolled. Compiled for an H100 (linear, K = 10, d = 5), that reduces the kernels per step from 7 to 3.4, statistics
# included, and the bytes per client-step from 286 to 210; 20 cells as lanes take 3.3 kernels together, and 84 bytes.
LOOPS = {
    "gpu": Loop(prepares=False, unroll=8, partial=False, ahead=False, dense=True),
    "tpu": Loop(partial=False),
}
OTHER_LOOP = Loop()
# If a step is cheap, a second loop that makes its observations again costs more than statistics at every step:
# a sixth more with K = 10 and d = 2 or 5 (C5, P(1/2)), the same with d = 20; with K = 100 it is 1.4 times as fast.
FEW_PARAMETERS, FEW_CLIENTS = 10, 32


class Program(NamedTuple):
    """Everything that decides the compiled code, apart from shapes; hashable."""

    structure: Structure
    accumulators: tuple[Accumulator, ...]
    algorithm: Algorithm
    dtype: Dtype
    draws_ahead: bool = (
        False  # a block's draws are made before it runs, for all cells that share them
    )
    loop: Loop = OTHER_LOOP

    @property
    def needs_gradient(self) -> bool:
        """Whether a statistic needs the mean gradient."""
        return any(part.needs_gradient for part in self.accumulators)

    @property
    def needs_gradient_sum(self) -> bool:
        """Whether a statistic needs the sum of a round's mean gradients."""
        return any(part.needs_gradient_sum for part in self.accumulators)

    @property
    def needs_hessian(self) -> bool:
        """Whether a statistic needs the mean Hessian."""
        return any(part.needs_hessian for part in self.accumulators)

    @property
    def anchored(self) -> tuple[int, ...]:
        """Which statistics have clients evaluate their observations at an anchor."""
        return tuple(i for i, part in enumerate(self.accumulators) if part.anchor is not None)

    @property
    def rooms(self) -> tuple[int, ...]:
        """Slots for synchronisations that a block may have, besides one per step."""
        return () if self.loop.dense else self.loop.rooms


class ProblemData(NamedTuple):
    """A problem's numbers, in the dtype of the run."""

    init: Any  # (d,)
    weights: Any  # (K,)
    clients: Any  # leaves (K, ...)
    client_index: Any  # (K,) uint32
    unit: Any  # () 1, see `xla.once`
    bounds: Any = None  # (K,) uint32, `core.random.weight_bounds`, if clients are drawn by weight

    @property
    def each(self) -> bool:
        """Whether each replication has other clients: weights are then (n, R), and so on."""
        return self.client_index.ndim == 2


def make_program(
    problem: Problem,
    methods: tuple[Estimator, ...],
    algorithm: Algorithm,
    dtype: Dtype = "float32",
    shared_draws: bool = False,
    platform: str = "cpu",
) -> Program:
    """Return the program of a run: the statistics of all methods, each once, and the loop for the platform.

    With `shared_draws`, the draws of a block are made before it runs, unless they are so many that this costs
    more than it saves, or the platform makes them faster in the step that uses them.
    """
    parts = dict.fromkeys(part for method in methods for part in method.accumulators)
    algorithm = algorithm.among(problem.num_clients)
    loop = loop_for(platform, problem, algorithm)
    few = problem.draws is not None and block_draws_bytes(problem) <= AHEAD_BYTES
    ahead = shared_draws and few and loop.ahead
    return Program(problem.structure(), tuple(parts), algorithm, dtype, ahead, loop)


def loop_for(platform: str, problem: Problem, algorithm: Algorithm | None = None) -> Loop:
    """Return the form of the loop that suits a platform and a problem.

    Statistics in the step loop need few launches, but write their d × d matrices at every step: more than the
    step itself writes, unless there are as many clients as parameters.
    """
    loop = LOOPS.get(platform, OTHER_LOOP)
    if algorithm is not None and algorithm.among(problem.num_clients).participation is not None:
        # Who takes part is decided in the step loop, so that loop also updates the statistics.
        return loop._replace(dense=True, ahead=False, rooms=())
    d, K = problem.dim, problem.num_clients
    rooms = SLOTS[:1] if d <= FEW_PARAMETERS and K <= FEW_CLIENTS else SLOTS
    return loop._replace(dense=loop.dense and d <= K, rooms=rooms)


def make_data(problem: Problem, dtype: Dtype, algorithm: Algorithm | None = None) -> ProblemData:
    """Cast a problem's numbers to the dtype of the run; add the bounds by which clients are drawn, if any."""
    how = None if algorithm is None else algorithm.participation

    def cast(leaf: Any) -> np.ndarray:
        leaf = np.asarray(leaf)
        return leaf.astype(dtype) if np.issubdtype(leaf.dtype, np.floating) else leaf

    return ProblemData(
        cast(np.asarray(flatten(jax.tree.map(cast, problem.init)))),
        cast(problem.weights),
        jax.tree.map(cast, problem.clients),
        np.arange(problem.num_clients, dtype=np.uint32),
        np.ones((), dtype),
        weight_bounds(problem.weights) if how is not None and how.by_weight else None,
    )


def block_draws_bytes(problem: Problem) -> int:
    """Return the bytes per replication of a block's draws, for a problem that declares its draws."""
    assert problem.draws is not None
    return 4 * BLOCK_STEPS * problem.num_clients * sum(map(int, problem.draws))


def cast_floats(tree: Any, dtype: Dtype) -> Any:
    """Cast floating-point leaves to the dtype of the run."""
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )
