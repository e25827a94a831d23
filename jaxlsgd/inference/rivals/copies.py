"""Copies of a problem's parameters, (copies, d), as one problem: several runs in one run of the engine.

The engine has one path per replication. A method that needs further runs (perturbed, or of some clients only) is
therefore run on a problem with more parameters, of which each copy has d.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.estimator import Accumulator, Sync
from jaxlsgd.core.problem import Array, Params, Problem, flatten
from jaxlsgd.inference.sums import compensated_add, widened


def stacked_problem(
    problem: Problem, copies: int, loss: Any, gradient: Any, **source: Any
) -> Problem:
    """Return a problem whose parameters are `copies` rows of another's."""
    start = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(problem.init)])
    truth, error = problem.true_vector, problem.truth_covariance
    return Problem(
        init=np.tile(start, (copies, 1)),
        loss=loss,
        num_clients=problem.num_clients,
        weights=problem.weights,
        truth=None if truth is None else np.tile(truth, (copies, 1)),
        # One error, which all copies share.
        truth_covariance=None if error is None else np.tile(error, (copies, copies)),
        gradient=gradient,
        name=f"{problem.name}-x{copies}" if problem.name else "",
        gamma0=problem.gamma0,
        drifts=problem.drifts,
        copies=copies * problem.copies,
        **{"clients": problem.clients, **source},
    )


def rows_of_copies(
    copies: int, dim: int, first_only: bool = False
) -> tuple[tuple[float, ...], ...]:
    """Return R with Rx the mean of the copies in x (or the first of them), coordinate by coordinate."""
    shares = [1.0] + [0.0] * (copies - 1) if first_only else [1.0 / copies] * copies
    return tuple(
        tuple(share * (i == j) for share in shares for i in range(dim)) for j in range(dim)
    )


@functools.cache
def _for_problem(copies: int, first_only: bool) -> Any:
    """Return the rows of `rows_of_copies` as a function of the problem with the copies."""

    def contrasts_for(problem: Problem) -> tuple[tuple[float, ...], ...]:
        if problem.copies % copies:
            rule = f"hold {copies} copies, as perturbed and split_clients make them"
            raise refusal("problem", rule, problem.copies, code="unsupported")
        return rows_of_copies(copies, problem.dim // copies, first_only)

    return contrasts_for


def given_dim(dim: int | None) -> int | None:
    """Check the number of parameters of a copy, if it is given."""
    return None if dim is None else checks.count("dim", dim, 1)


def contrasts_of(copies: int, dim: int | None, first_only: bool = False) -> dict[str, Any]:
    """Return the field of an `Estimator` with its rows R, or with how they follow from the problem."""
    if dim is None:
        return {"contrasts_for": _for_problem(copies, first_only)}
    return {"contrasts": rows_of_copies(copies, dim, first_only)}


class RunState(NamedTuple):
    """The averages over rounds, and the information time behind them."""

    mean: Array  # (copies · d,) ȳ_m
    lost: Array  # (copies · d,) its rounding error so far
    s: Array  # () Σ 1/E_n
    s_lost: Array  # ()
    m: Array  # () int32


@functools.cache
def run_means(copies: int, dim: int | None) -> Accumulator:
    """Return ȳ_m of every copy of d parameters, any number if None, and Σ 1/E_n, as a streaming statistic."""

    def init(params: Params) -> RunState:
        y = jnp.zeros_like(stacked(params, copies, dim))
        zero = jnp.zeros((), y.dtype)
        return RunState(y, y, zero, zero, jnp.zeros((), jnp.int32))

    def update(state: RunState, sync: Sync) -> RunState:
        x = widened(flatten(sync.params))
        m = state.m + 1
        move = ((x - state.mean) - state.lost) / m.astype(x.dtype)
        mean, lost = compensated_add(state.mean, state.lost, move)
        s, s_lost = compensated_add(state.s, state.s_lost, 1 / jnp.asarray(sync.E, x.dtype))
        return RunState(mean, lost, s, s_lost, m)

    return Accumulator(init, update, shared=("s", "s_lost", "m"))


def stacked(params: Params, copies: int, dim: int | None) -> Array:
    """Return the flat parameters; refuse a wrong number of them."""
    x = widened(flatten(params))
    if dim is not None and x.shape != (copies * dim,):
        of = f", {copies} runs of {dim} each" if copies > 1 else ""
        raise refusal("problem", f"have {copies * dim} parameters{of}", x.shape[0], code="shape")
    return x


def averages(state: RunState, copies: int, dim: int | None) -> Array:
    """Return ȳ of each copy, (copies, d)."""
    return (state.mean + state.lost).reshape(copies, -1 if dim is None else dim)
