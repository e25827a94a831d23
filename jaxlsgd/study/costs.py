"""What a cell costs, from its description alone: steps, memory, and which programs it needs."""

from __future__ import annotations

import functools
from typing import Any

from jaxlsgd.engine.layout import AHEAD_BYTES, BLOCK_STEPS
from jaxlsgd.study.grid import Cell


@functools.lru_cache(maxsize=4096)
def steps(cell: Cell) -> int:
    """Local steps of a client, with the one draw more that plug-in needs."""
    return cell.plan().num_steps + 1


def work(cell: Cell) -> int:
    """Client-steps of one tile."""
    return steps(cell) * cell.problem.num_clients * cell.tile_size


def program_kind(cell: Cell) -> tuple[Any, ...]:
    """What decides the compiled programs of a cell: not its schedule, horizon or step size."""
    problem = cell.problem
    kind = problem.kind.removeprefix("paper-"), "covariance" in dict(problem.arguments)
    return (*kind, problem.dim, problem.num_clients, cell.methods, cell.dtype, cell.tile_size)


def draw_bytes(cell: Cell) -> int:
    """Memory of the draws, which cells that run together share."""
    step = cell.problem.num_clients * (cell.problem.dim + 1) * 4  # float32 in both precisions
    # Those of two steps: as they are used, made and handed on. Those of a block, where they are few.
    block = BLOCK_STEPS * step
    return (6 * step + (block if block <= AHEAD_BYTES else 0)) * cell.tile_size


def state_bytes(cell: Cell) -> int:
    """Memory of one tile besides the draws: the clients and the statistics."""
    problem, item = cell.problem, 8 if cell.dtype == "float64" else 4
    d, K = problem.dim, problem.num_clients
    clients = 2 * K * d * item  # parameters and gradients
    kinds = {method.kind for method in cell.methods}
    matrices = 3 * ("plug_in" in kinds) + ("random_scaling" in kinds)
    statistics = 2 * (matrices * d * d + 8 * d) * item  # old and new; plug-in: G, S, Hessian
    return (clients + statistics) * cell.tile_size
