"""What a server keeps of the messages of its clients during training, and what it asks them.

During training, per round: `broadcast(state)` → clients → `receive(state, messages, ...)`. The server keeps sums over rounds
(`jaxlsgd.one_step` at anchors), never a client's rows. While an anchor is open, it keeps about 4d² numbers per client, so
that it does not matter who takes part and how often (`strata`). At the end, once: `estimate(state)` goes to the clients,
their final messages come back, and `final.finish` reads them. A framework that cannot send anything during training calls
`finish` alone, with the parameters that it has trained.

Clients may be faulty or hostile: `validate` checks every message. Who is left out is named.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from jaxlsgd.core import checks
from jaxlsgd.core.checks import Refusal, refusal
from jaxlsgd.core.estimator import Estimator, Sync
from jaxlsgd.core.problem import unravel
from jaxlsgd.federation import strata, validate
from jaxlsgd.federation.agreement import client_weights
from jaxlsgd.federation.client import RoundMessage, digest, flatten
from jaxlsgd.federation.strata import Stratum
from jaxlsgd.federation.validate import several, shown_name
from jaxlsgd.inference import anchored_rounds
from jaxlsgd.inference.anchored_rounds import LEAST_ROUNDS, AnchoredState, first_edge
from jaxlsgd.inference.one_step import one_step
from jaxlsgd.inference.tracking import Rows, Tracked, Tracker, track

FloatArray = NDArray[np.floating[Any]]
Params = Any
FEWEST_HESSIANS = 2  # of a client at one anchor, so that the noise of their mean is known
MOST_STRANGERS = 1000  # that are named
_NO_MODEL = ("params", "missing")


class Broadcast(NamedTuple):
    """What the server sends with its model: where to evaluate the rows of the round, and who is to send Hessians."""

    round: int
    anchors: tuple[Params, Params]  # the anchor, and the one before it
    hessians: bool  # whether Hessians are due, from clients that are not in `enough`
    enough: frozenset[str]

    def asks(self, client: str) -> bool:
        """Return whether this client is to send Hessians in the round."""
        return self.hessians and client not in self.enough


class Latest(NamedTuple):
    """What the last usable message of a client was like."""

    steps: int
    move: float  # length of its step of the model; NaN if it has sent none


class Remark(NamedTuple):
    """What the rounds have shown of a client."""

    first: int
    last: int
    rounds: int
    words: str

    def __str__(self) -> str:
        if self.rounds == 1:
            return f"round {self.first}: {self.words}"
        return f"{self.rounds} of rounds {self.first} to {self.last}: {self.words}"


@dataclasses.dataclass(frozen=True, eq=False)
class ServerState:
    """What the server keeps between rounds; made by `begin`, never changed in place."""

    tracker: Tracker
    stream: Tracked  # sums at earlier anchors
    params: Params  # the server's model after the last round
    weights: Mapping[str, float] | None  # of all clients; None for their numbers of examples
    clients: Mapping[str, Stratum] = dataclasses.field(default_factory=dict)  # at the open anchor
    examples: Mapping[str, int] = dataclasses.field(default_factory=dict)  # by client, as last sent
    rounds: int = 0
    steps: int = 1  # E of the last round
    latest: Mapping[str, Latest] = dataclasses.field(default_factory=dict)
    unnamed: int = 0  # messages of unknown clients beyond those that are named
    log: Mapping[tuple[str, ...], Remark] = dataclasses.field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """All clients that the estimate is about."""
        return tuple(self.examples if self.weights is None else self.weights)

    @property
    def shares(self) -> FloatArray:
        """Their weights, which sum to 1."""
        return client_weights(dict.fromkeys(self.names, 1), self.weights or self.examples)

    @functools.cached_property
    def tracked(self) -> Tracked:
        """All sums, for methods of the tracker; those of the open anchor are in it once all clients have reported."""
        return _with_anchored(self, _with_open_bin(self))

    @functools.cached_property
    def asking(self) -> Broadcast:
        """What is sent to clients with the model of the next round."""
        own = _anchored(self)
        both, dtype = (own.now.a, own.now.a - own.now.move), _dtype(self.params)
        anchors = tuple(_shaped(a.astype(dtype), self.params) for a in both)
        start, t, E = own.clock.start, own.clock.t, float(self.steps)
        if own.clock.bin < 1:
            return Broadcast(self.rounds + 1, anchors, False, frozenset())
        length = anchored_rounds.next_edge(start) - start
        many = anchored_rounds.bin_hessians(E, length, max(len(self.names), 1), own.x.size)
        # Spread over the bin. A bin that has to wait for some clients asks the others for no more.
        due = min((t - start) * many / length, max(many, FEWEST_HESSIANS) - 1)
        enough = frozenset(name for name, one in self.clients.items() if one.hessians > due)
        return Broadcast(self.rounds + 1, anchors, not enough.issuperset(self.names), enough)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Clients whose reports the next anchor waits for: two by each, one of them with Hessians."""
        own = _anchored(self).clock
        if own.bin < 1 or own.t < anchored_rounds.next_edge(own.start):
            return ()
        return tuple(name for name in self.names if not _complete(self.clients, [name]))

    @property
    def remarks(self) -> tuple[str, ...]:
        """Who was left out and why, and what is odd about clients, in sentences."""
        notes = [str(one) for one in self.log.values()]
        notes += [text for key, text in _decisive(self).items() if key not in self.log]
        if self.unnamed:
            notes.append(f"{self.unnamed} more messages of unknown clients are left out")
        if waiting := self.waiting:
            notes.append(
                "rounds since the last anchor do not count yet: each client must report twice at an anchor, once "
                f"with Hessians, and these have not: {several(waiting)}"
            )
        return (*notes, *majority(self.names, self.shares))


def begin(
    params: Params,
    *,
    rows: Rows,
    method: Estimator | None = None,
    weights: Mapping[str, float] | None = None,
) -> ServerState:
    """Return the state of a server before the first round.

    Args:
      params: the model at the start, a pytree of floating arrays (NumPy or JAX).
      rows: "fresh" if no row is met twice, "reused" if clients go over the same rows again.
      method: `one_step()` if None, or another method with anchors.
      weights: p_k by client, of all clients that there are: the estimate minimises Σ p_k F_k, whoever takes part, and
        messages of others are refused. If None, the clients are all that have reported so far, with the numbers of
        examples that they last sent. A client that reports for the first time later on changes what is estimated,
        so rounds of earlier anchors are then forgotten, and a remark says so.
    """
    chosen = one_step() if method is None else method
    if not isinstance(chosen, Estimator):
        raise refusal("method", "be a method, such as one_step()", method, code="type")
    if chosen.anchor is None:
        raise refusal(
            "method", "have an anchor, as one_step() does", chosen.name, code="unsupported"
        )
    start = flatten(params)
    if not start.size:
        raise refusal("params", "have at least one number", start.shape, code="shape")
    checks.finite("params", start)
    tracker = track(chosen, params, rows=rows)
    first = jax.tree.map(_on_host, tracker.init(params))
    found = ServerState(tracker, first, params, checked_weights(weights))
    own = _anchored(found)
    return dataclasses.replace(
        found,
        stream=_with_anchored(found, own._replace(x=start, now=own.now._replace(a=start))),
    )


def broadcast(state: ServerState) -> Broadcast:
    """Return what to send to clients with the model of the next round."""
    return _a_state(state).asking


def receive(
    state: ServerState,
    messages: Mapping[str, RoundMessage],
    *,
    eta: float,
    params: Params = None,
) -> ServerState:
    """Return the state after a round.

    A message is left out, with a remark that names its client, if it is not finite, of another shape, of no rows, of another
    round, of a client that `begin` was not told of, or not what `validate` lets pass.

    Args:
      state: from `begin` or `receive`.
      messages: by client, of those that took part in the round.
      eta: step size of the round.
      params: the server's model after the round, if the framework has averaged it; else the weighted mean is taken, over
        those that took part.
    """
    checks.positive("eta", eta)
    averaged = params is not None
    if params is not None:
        params = validate.model_like("params", params, state.params)
    good, left_out = usable(_a_state(state), messages, model=params is None)
    if not good and {(why.argument, why.code) for why in left_out.values()} == {_NO_MODEL}:
        raise refusal("params", "be given, or be in the messages", None, code="missing")
    named, unnamed = _named(state, left_out)
    log = _logged(
        state,
        {
            (name, why.argument, why.code): validate.left_out(name, why)
            for name, why in named.items()
        },
    )
    state = dataclasses.replace(state, unnamed=state.unnamed + unnamed)
    if not good:
        none = {(): "no client sent a usable message, and nothing is kept"}
        state = dataclasses.replace(state, log=log)
        return dataclasses.replace(state, rounds=state.rounds + 1, log=_logged(state, none))
    examples = {**state.examples, **{name: one.examples for name, one in good.items()}}
    p = client_weights({name: one.examples for name, one in good.items()}, state.weights)
    before = flatten(state.params)
    moves = {n: flatten(one.params) - before for n, one in good.items() if one.params is not None}
    sizes = {name: float(np.linalg.norm(move)) for name, move in moves.items()}
    latest = {n: Latest(one.steps, sizes.get(n, np.nan)) for n, one in good.items()}
    latest = {**state.latest, **latest}
    most = _most_move(latest)
    if params is None:
        cut = [min(1.0, most / max(size, 1e-300)) for size in sizes.values()]
        flat = before + sum(w * a * v for w, a, v in zip(p, cut, moves.values(), strict=True))
        params = _shaped(flat, state.params)
    E = _usual_steps(latest, first_edge(before.size), alone=state.names == tuple(latest))
    params = jax.tree.map(lambda new, old: new.astype(np.asarray(old).dtype), params, state.params)
    clients, empty = dict(state.clients), strata.empty(_anchored(state).x.size)
    for name, one in good.items():
        clients[name] = strata.with_report(clients.get(name, empty), one)
    joined = [name for name in examples if name not in state.examples]
    moved = dataclasses.replace(
        state,
        stream=_advanced(state, flatten(params), E, eta),
        params=params,
        clients=clients,
        examples=examples,
        rounds=state.rounds + 1,
        steps=E,
        latest=latest,
    )
    words: dict[tuple[str, ...], str] = {
        (name, "unlike"): note for name, note in _unlike_rounds(moved).items() if name in good
    }
    for name, size in sizes.items():
        if size > most and not averaged:
            words[name, "unlike"] = (
                f"client {shown_name(name)} is unlike the others: its step of the model is "
                f"{validate.UNLIKE * size / most:.2g} times the median; it is cut to {validate.UNLIKE:g} times"
            )
    if state.weights is None and joined and _anchored(state).clock.bin > 1:
        moved = _without_past(moved)
        words["joined", *joined] = (
            f"{several(joined)} joined: earlier rounds are about the other clients only, and are forgotten; "
            "begin(weights=...) names all clients"
        )
    moved = dataclasses.replace(moved, log=log)
    return _at_next_anchor(dataclasses.replace(moved, log=_logged(moved, words, moved.rounds)))


def usable(
    state: ServerState, messages: Mapping[str, RoundMessage], *, model: bool = False
) -> tuple[dict[str, RoundMessage], dict[str, Refusal]]:
    """Return the messages of a round that can be used, and why the others cannot; `model` if they must have models."""
    messages = checks.table("messages", messages, "be a mapping from clients to messages")
    sent = broadcast(state)
    asked = digest(sent.anchors[0], sent.round)

    def check(name: str, message: Any) -> RoundMessage:
        return validate.round_message(
            message, state.params, asked=asked, hessians=sent.asks(name), model=model
        )

    return validate.usable(messages, check, () if state.weights is None else state.weights)


def estimate(state: ServerState) -> Params:
    """Return x̂ of the rounds so far, to be sent to all clients for their final messages; the model if there is none."""
    if state.rounds < 2:
        return state.params
    found = state.tracker.estimate(state.tracked)
    return found if np.isfinite(flatten(found)).all() else state.params


def checked_weights(weights: Any) -> dict[str, float] | None:
    """Return weights by client, or None; refuse what is not positive."""
    if weights is None:
        return None
    found = checks.table("weights", weights, "be a mapping from clients to numbers")
    if not found:
        raise refusal("weights", "name all clients, or be None", {}, code="missing")
    return {name: checks.positive(f"weights[{name!r}]", w) for name, w in found.items()}


def _on_host(leaf: Any) -> Any:
    """Return an array of a state in NumPy, with as many digits as there are."""
    leaf = np.asarray(leaf)
    return leaf.astype(np.int64 if leaf.dtype.kind == "i" else np.float64)


def _anchored(state: ServerState) -> AnchoredState:
    """Return the sums at anchors that are closed, and the clock."""
    parts = zip(state.tracker.estimator.accumulators, state.stream.states, strict=True)
    return next(own for part, own in parts if part.anchor is not None)


def _with_anchored(state: ServerState, own: AnchoredState) -> Tracked:
    parts = zip(state.tracker.estimator.accumulators, state.stream.states, strict=True)
    states = tuple(old if part.anchor is None else own for part, old in parts)
    return state.stream._replace(states=states)


def _advanced(state: ServerState, x: FloatArray, E: int, eta: float) -> Tracked:
    """Return the stream after a round, but for the sums of its clients."""
    stream, sync = state.stream, Sync(x, E, eta)
    parts = zip(state.tracker.estimator.accumulators, stream.states, strict=True)
    states = tuple(
        part.update(own, sync) if part.anchor is None else anchored_rounds.after_round(own, x, E)
        for part, own in parts
    )
    size = np.float64(eta * E)
    return Tracked(states, stream.rounds + 1, size if stream.rounds == 0 else stream.first, size)


def _complete(clients: Mapping[str, Stratum], names: Iterable[str]) -> bool:
    return all(name in clients and clients[name].complete for name in names)


def _with_open_bin(state: ServerState) -> AnchoredState:
    """Return the sums at anchors with those of the open one, if all clients have reported."""
    own = _anchored(state)
    if own.clock.bin < 1 or not state.names or not _complete(state.clients, state.names):
        return own
    now, counts = strata.together(
        [state.clients[name] for name in state.names], state.shares, own.now
    )
    return own._replace(now=now, clock=own.clock._replace(now=counts))


def _at_next_anchor(state: ServerState) -> ServerState:
    """Return the state with the next anchor, if the open bin has ended and all clients have reported."""
    own = _anchored(state)
    if own.clock.t < own.clock.edge:
        return state
    first = own.clock.bin < 1
    ready = state.rounds >= LEAST_ROUNDS if first else _complete(state.clients, state.names)
    moved = anchored_rounds.after_bin(_with_open_bin(state), ready)
    if not ready:
        return dataclasses.replace(
            state, stream=_with_anchored(state, own._replace(clock=moved.clock))
        )
    # In the precision that clients evaluate it in.
    a = moved.now.a.astype(_dtype(state.params)).astype(np.float64)
    moved = moved._replace(now=moved.now._replace(a=a, move=a - own.now.a))
    log = _logged(state, _twins(state) | _decisive(state), state.rounds)
    return dataclasses.replace(state, stream=_with_anchored(state, moved), clients={}, log=log)


def _without_past(state: ServerState) -> ServerState:
    """Return the state without the sums at closed anchors, which are about fewer clients."""
    own = _anchored(state)
    past = jax.tree.map(np.zeros_like, own.past)
    none = jax.tree.map(np.zeros_like, own.clock.past)
    clock = own.clock._replace(past=none, bin=np.ones_like(own.clock.bin))
    own = own._replace(past=past, clock=clock)
    return dataclasses.replace(state, stream=_with_anchored(state, own))


def _dtype(params: Params) -> Any:
    """Return the precision of a model, float32 at least."""
    return np.result_type(np.float32, *(np.asarray(leaf).dtype for leaf in jax.tree.leaves(params)))


def _usual_steps(latest: Mapping[str, Latest], first: int, alone: bool) -> int:
    """Return the median over clients of the last number of steps, the lower one of two.

    It sets the pace of anchors only. Less than half of the clients cannot make it longer; one that reports before all
    others has at most the length of the first bin, unless there are none.
    """
    steps = sorted(one.steps for one in latest.values())
    E = steps[(len(steps) - 1) // 2]
    return E if len(steps) > 1 or alone else min(E, first)


def _most_move(latest: Mapping[str, Latest]) -> float:
    """Return how far the model of a client may be from the server's, as many times as the lower median of all clients."""
    sizes = np.sort([one.move for one in latest.values() if np.isfinite(one.move)])
    usual = float(sizes[(len(sizes) - 1) // 2]) if len(sizes) else 0.0
    return validate.UNLIKE * usual or np.inf


def _named(state: ServerState, left_out: Mapping[str, Refusal]) -> tuple[dict[str, Refusal], int]:
    """Return who is named of those that are left out: all known clients, and `MOST_STRANGERS` others; how many are not."""
    known = set(state.names)
    strangers = [name for name in left_out if name not in known]
    old = {key[0] for key in state.log if strangers and key and key[0] not in known}
    new = [name for name in strangers if name not in old]
    hidden = set(new[max(MOST_STRANGERS - len(old), 0) :])
    return {name: why for name, why in left_out.items() if name not in hidden}, len(hidden)


def _a_state(state: Any) -> ServerState:
    if not isinstance(state, ServerState):
        raise refusal("state", "be made by begin", type(state).__name__, code="type")
    return state


def _logged(
    state: ServerState, words: Mapping[tuple[str, ...], str], when: int | None = None
) -> dict[tuple[str, ...], Remark]:
    """Return the remarks with those of a round."""
    log, m = dict(state.log), state.rounds + 1 if when is None else when
    for key, text in words.items():
        old = log.get(key)
        if old is not None:
            log[key] = old._replace(last=m, rounds=old.rounds + 1)
        else:
            log[key] = Remark(m, m, 1, text)
    return log


def _unlike_rounds(state: ServerState) -> dict[str, str]:
    """Return notes on clients whose sums at the open anchor, or last messages, are implausible beside the others."""
    sums = state.clients
    moves = {n: one.move for n, one in state.latest.items() if np.isfinite(one.move)}
    with_hessians = {name: one for name, one in sums.items() if one.hessians}
    hessians = {}
    for name, one in with_hessians.items():
        rows, H = one.seen.sum(), one.H.sum(0)
        hessians[name] = {
            "Hessian's diagonal": np.diagonal(H) / rows,
            "Hessian's diagonal at the anchor before": np.diagonal(H - one.D) / rows,
            "number of observations": rows / one.hessians,
        }
    return (
        validate.unlike({name: {"step of the model": np.array([v])} for name, v in moves.items()})
        | validate.unlike(hessians)
        | validate.unlike(
            {
                name: {"gradient": np.sqrt(one.mean**2 + np.diagonal(one.square) / one.t)}
                for name, one in sums.items()
            }
        )
        | validate.unlike(
            {
                n: {"number of steps": np.array([float(one.steps)])}
                for n, one in state.latest.items()
            }
        )
    )


def _decisive(state: ServerState) -> dict[tuple[str, ...], str]:
    """Return notes on clients without which the open anchor would say something else, of those with complete sums."""
    shares = dict(zip(state.names, state.shares, strict=True)) if state.names else {}
    sums = {name: one for name, one in state.clients.items() if one.complete}
    if len(sums) < 3:
        return {}
    notes = validate.decisive(
        tuple(sums),
        np.array([one.t for one in sums.values()], np.float64),
        np.array([shares[name] for name in sums]),
        np.stack([one.mean for one in sums.values()]),
        np.stack([one.square / (one.n - 1) for one in sums.values()]),
        np.stack([one.H.sum(0) / one.seen.sum() for one in sums.values()]),
        noisy=True,
    )
    return {(name, "decides"): text for name, text in notes.items()}


def _twins(state: ServerState) -> dict[tuple[str, ...], str]:
    """Return notes on clients with equal sums in all of several rounds.

    They are used: rows of zeros and ones coincide often, and to leave out what coincides would be a choice by outcome.
    """
    sums = {
        name: (one.n, one.t, one.mean, one.square)
        for name, one in state.clients.items()
        if one.n >= LEAST_ROUNDS
    }
    return {
        pair: f"clients {several(pair)} sent the same sums in all rounds at an anchor: are they one client?"
        for pair in validate.equal(sums)
    }


def majority(names: Sequence[str], p: FloatArray) -> list[str]:
    """Return a note on a client with more than half of the weight."""
    if len(names) < 2 or np.max(p) <= 0.5:
        return []
    name, share = names[int(np.argmax(p))], 100 * float(np.max(p))
    return [
        f"client {shown_name(name)} has {share:.3g} % of the weight: it decides more than all others"
    ]


def _shaped(vector: Any, like: Params) -> Params:
    return unravel(vector, like)
