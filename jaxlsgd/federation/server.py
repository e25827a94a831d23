"""What a server keeps of the messages of its clients, and what comes out: estimate, intervals, tests, verdict.

During training, per round: `broadcast(state)` → clients → `receive(state, messages, ...)`. The server keeps sums of d and
d² numbers over rounds (`jaxlsgd.one_step` at anchors), never a client's rows. At the end, once: `estimate(state)` goes to the
clients, their final messages come back, and `finish` reads them. A framework that cannot send anything during training
calls `finish` alone, with the parameters that it has trained.

With weights p_k, and of client k on its own n_k rows at x the mean score s_k, the covariance S_k of scores and the Hessian H_k,

    G = Σ p_k H_k,    x̂ = x − G⁻¹ Σ p_k s_k,    V = G⁻¹ (Σ p_k² S_k/n_k) G⁻ᵀ.

x̂ is the minimiser of these rows up to a term of order |x̂ − x|², whatever optimiser has found x, so that a run's own
noise is no part of V. Reported at x itself (`correct=False`), the run's own variance is added to V.
About these rows x̂ is known, up to what `remainder` says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.display import align
from jaxlsgd.core.estimator import SIDES, Anchored, Estimator, Interval, JointLaw
from jaxlsgd.core.problem import unravel
from jaxlsgd.federation.agreement import Agreement, agree, constant_within_clients, jackknife
from jaxlsgd.federation.client import FinalMessage, RoundMessage, flatten
from jaxlsgd.inference import joint
from jaxlsgd.inference.anchored_rounds import bin_hessians
from jaxlsgd.inference.one_step import one_step
from jaxlsgd.inference.tracking import Tracker, track

FloatArray = NDArray[np.float64]
Params = Any
ABOUT = ("population", "rows")
CLIENTS = ("given", "sampled")
FAR = 0.5  # standard errors that the last step may be long before another final message is asked for


class Broadcast(NamedTuple):
    """What the server sends with its model: where to evaluate the rows of the round, and whether Hessians are due."""

    anchors: tuple[Params, Params]  # the anchor, and the one before it
    hessians: bool


@dataclasses.dataclass(frozen=True, eq=False)
class ServerState:
    """What the server keeps between rounds; made by `begin`, never changed in place."""

    tracker: Tracker
    tracked: Any  # sums at anchors
    params: Params  # the server's model after the last round
    rounds: int = 0
    bin: int = -1  # which anchor is out, and in how many of its rounds Hessians have come
    hessians: int = 0
    num_clients: int = 1  # that took part in the last round
    steps: int = 1  # E of the last round
    examples: Mapping[str, int] = dataclasses.field(default_factory=dict)  # by client, as last sent
    remarks: tuple[str, ...] = ()  # who was left out, and why


def begin(
    params: Params,
    *,
    rows: str,
    method: Estimator | None = None,
) -> ServerState:
    """Return the state of a server before the first round.

    Args:
      params: the model at the start, a pytree of floating arrays (NumPy or JAX).
      rows: "fresh" if no row is met twice, "reused" if clients go over the same rows again.
      method: `one_step(gradients="anchor")` if None, or another method with anchors.
    """
    chosen = one_step(gradients="anchor") if method is None else method
    if chosen.anchor is None:
        raise refusal("method", 'have an anchor, as one_step(gradients="anchor") does', chosen.name)
    tracker = track(chosen, params, rows=rows)
    return ServerState(tracker, tracker.init(params), params)


def broadcast(state: ServerState) -> Broadcast:
    """Return what to send to clients with the model of the next round."""
    return Broadcast(state.tracker.anchors(state.tracked), _hessians_due(state))


def receive(
    state: ServerState,
    messages: Mapping[str, RoundMessage],
    *,
    eta: float,
    params: Params = None,
    weights: Mapping[str, float] | None = None,
) -> ServerState:
    """Return the state after a round.

    A message that is not finite, of another shape, or of a client without rows is left out, and `remarks` says so; the others
    are reweighted to 1.

    Args:
      state: from `begin` or `receive`.
      messages: by client, of those that took part in the round.
      eta: step size of the round.
      params: the server's model after the round, if the framework has averaged it; else the weighted mean is taken.
      weights: p_k by client, of all clients; their numbers of examples if None.
    """
    good, remarks = _usable(state, messages, params is None)
    if not good:
        told = f"round {state.rounds + 1}: no client sent a usable message, and nothing is kept"
        return dataclasses.replace(
            state, rounds=state.rounds + 1, remarks=(*state.remarks, *remarks, told)
        )
    p = _weights(good, weights)
    E = max(1, round(float(sum(w * one.steps for w, one in zip(p, good.values(), strict=True)))))
    mean = sum(w * E / one.steps * one.gradient_sum for w, one in zip(p, good.values(), strict=True))
    if params is None:
        flat = sum(w * flatten(one.params) for w, one in zip(p, good.values(), strict=True))
        params = _shaped(flat, state.params)
    here, before, seen = _mean_hessians(good, p)
    total = _shaped(np.asarray(mean), state.params)
    tracked = state.tracker.update(
        state.tracked, params, eta=eta, E=E, anchored=Anchored(total, here, before, seen)
    )
    now = state.tracker.bin(tracked)
    count = (state.hessians if now == state.bin else 0) + (here is not None)
    return dataclasses.replace(
        state,
        tracked=tracked,
        params=params,
        rounds=state.rounds + 1,
        bin=now,
        hessians=count,
        num_clients=len(good),
        steps=E,
        examples={**state.examples, **{name: one.examples for name, one in good.items()}},
        remarks=(*state.remarks, *remarks),
    )


def estimate(state: ServerState) -> Params:
    """Return x̂ of the rounds so far, to be sent to all clients for their final messages; the model if there is none."""
    if state.rounds < 2:
        return state.params
    found = state.tracker.estimate(state.tracked)
    return found if np.isfinite(flatten(found)).all() else state.params


def finish(
    at: Params | ServerState,
    messages: Mapping[str, FinalMessage],
    *,
    about: str = "population",
    clients: str = "given",
    weights: Mapping[str, float] | None = None,
    expected: Sequence[str] = (),
    names: Sequence[str] | None = None,
    level: float = 0.95,
    correct: bool = True,
) -> FederationFit:
    """Return estimate, intervals, tests and verdict from the final messages of all clients.

    Args:
      at: where clients evaluated them: parameters, or the server's state, of which `estimate(state)` is meant.
      messages: by client. Those that are not finite, of another shape or without rows are left out, with words.
      about: "population", from which each client's rows are a sample; or "rows", the minimiser of these rows.
      clients: "given", the population is made of these clients; or "sampled", they are a sample of clients, and
        intervals are about the mean over all that there might be, with Student's t of K − 1 degrees of freedom.
      weights: p_k by client; their numbers of rows if None.
      expected: names of all clients; those without a message are named in the verdict.
      names: of parameters; their paths in the pytree if None.
      level: of intervals, unless they are called with another.
      correct: report x̂, one Newton step from `at`; False reports `at` itself, which needs the server's state, since
        its own variance counts.

    Example::

        messages = {name: final_message("logistic", rows, params) for name, rows in clients.items()}
        print(finish(params, messages))
    """
    raise NotImplementedError


@dataclasses.dataclass(frozen=True, eq=False)
class FederationFit:
    """Estimate, covariance and laws; `print` shows a table and the verdict."""

    names: tuple[str, ...]
    estimate: FloatArray  # (d,)
    covariance: FloatArray  # (d, d)
    df: float  # of Student's t; infinite for the normal law
    about: str
    clients: str
    level: float
    messages: Mapping[str, FinalMessage]  # at the estimate: scores moved there by the Hessians
    weights: Mapping[str, float]
    like: Params
    remainder: float  # length of the last step in standard errors; 0 if exact
    notes: tuple[str, ...]
