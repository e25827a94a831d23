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
from scipy import special

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.display import align
from jaxlsgd.core.estimator import Anchored, Estimator, Interval, JointLaw, Side
from jaxlsgd.core.problem import unravel
from jaxlsgd.federation.agreement import (
    Agreement,
    Stacked,
    agree,
    between_clients,
    client_weights,
    constant_within_clients,
    jackknife,
    stack,
)
from jaxlsgd.federation.client import FinalMessage, RoundMessage, flatten
from jaxlsgd.inference import joint
from jaxlsgd.inference.anchored_rounds import bin_hessians, next_edge
from jaxlsgd.inference.one_step import one_step
from jaxlsgd.inference.tracking import Rows, Tracker, parameter_names, track

FloatArray = NDArray[np.floating[Any]]
Params = Any
ABOUT = ("population", "rows")
CLIENTS = ("given", "sampled")
VARIANCES = ("clients", "HC0", "HC1", "HC3", "CR1")
FAR = (
    0.5  # standard errors that the last step may be long before another final message is asked for
)


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
    rows: Rows,
    method: Estimator | None = None,
) -> ServerState:
    """Return the state of a server before the first round.

    Args:
      params: the model at the start, a pytree of floating arrays (NumPy or JAX).
      rows: "fresh" if no row is met twice, "reused" if clients go over the same rows again.
      method: `one_step()` if None, or another method with anchors.
    """
    chosen = one_step() if method is None else method
    if chosen.anchor is None:
        raise refusal(
            "method", "have an anchor, as one_step() does", chosen.name, code="unsupported"
        )
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
    p = client_weights({name: one.examples for name, one in good.items()}, weights)
    E = max(1, round(float(sum(w * one.steps for w, one in zip(p, good.values(), strict=True)))))
    mean = sum(
        w * E / one.steps * one.gradient_sum for w, one in zip(p, good.values(), strict=True)
    )
    if params is None:
        flat = sum(w * flatten(one.params) for w, one in zip(p, good.values(), strict=True))
        params = _shaped(flat, state.params)
    here, before, seen = _mean_hessians(good, p)
    total = _shaped(np.asarray(mean), state.params)
    tracked = state.tracker.update(
        state.tracked, params, eta=eta, E=E, anchored=Anchored(total, here, before, seen)
    )
    now = int(_clock(state.tracker, tracked).bin)
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
    messages: Mapping[str, FinalMessage] | None,
    *,
    about: str = "population",
    clients: str = "given",
    weights: Mapping[str, float] | None = None,
    expected: Sequence[str] = (),
    names: Sequence[str] | None = None,
    level: float = 0.95,
    variance: str = "clients",
    ridge: ArrayLike = 0.0,
    correct: bool = True,
) -> FederationFit:
    """Return estimate, intervals, tests and verdict from the final messages of all clients.

    Args:
      at: where clients evaluated them: parameters, or the server's state, of which `estimate(state)` is meant.
      messages: by client. Those that are not finite, of another shape or without rows are left out, with words.
        None for what the rounds alone say: about the population if rows were fresh, else about these rows only.
      about: "population", from which each client's rows are a sample; or "rows", the minimiser of these rows.
      clients: "given", the population is made of these clients; or "sampled", they are a sample of clients, and
        intervals are about the mean over all that there might be, with Student's t of K − 1 degrees of freedom.
      weights: p_k by client; their numbers of rows if None.
      expected: names of all clients; those without a message are named in the verdict.
      names: of parameters; their paths in the pytree if None.
      level: of intervals, unless they are called with another.
      variance: of clients that are given: "clients", each client's own spread; "HC0", clients' means left in, as if all
        rows were of one client; "HC1", times n/(n − d); "HC3", as HC0 of messages that were made with `all_rows`. Of
        clients that are sampled: "clients", by leaving out one after the other; or "CR1", as statsmodels has it.
      ridge: λ of ½ Σ_j λ_j x_j², a number or one per parameter; intervals are then for the penalised minimiser.
      correct: report x̂, one Newton step from `at`; False reports `at` itself, which needs the server's state, since
        its own variance counts.

    Example::

        messages = {name: final_message("logistic", rows, params) for name, rows in clients.items()}
        print(finish(params, messages))
    """
    checks.level(level)
    checks.choice("about", about, ABOUT)
    checks.choice("clients", clients, CLIENTS)
    checks.choice("variance", variance, VARIANCES)
    if (variance == "CR1") != (clients == "sampled") and variance != "clients":
        rule = "be clients or CR1 if clients are sampled, and clients, HC0, HC1 or HC3 if they are given"
        raise refusal("variance", rule, variance, code="conflict")
    state = at if isinstance(at, ServerState) else None
    params = at if state is None else estimate(state)
    labels = _names(params, names)
    remarks = () if state is None else state.remarks
    fresh = state is not None and state.tracker.rows == "fresh"
    if about == "rows" or messages is None or fresh:
        return _from_rounds(state, messages, about, clients, labels, level, remarks)
    good, left_out = _usable_final(messages, len(labels))
    absent = [name for name in expected if name not in messages]
    left_out += [f"client {name} sent no final message, and is left out" for name in absent]
    if not good:
        raise refusal(
            "messages",
            "have a usable one; " + "; ".join(left_out or ["none came"]),
            {},
            code="missing",
        )
    if clients == "sampled" and len(good) < 2:
        raise refusal(
            "messages", 'be of at least 2 clients for clients="sampled"', len(good), code="data"
        )
    x, sent = flatten(params), stack(good, weights)
    data = sent.penalised(np.broadcast_to(np.asarray(ridge, np.float64), x.shape), x)
    inverse = _inverse(data.G)
    step = -inverse @ data.mean_score
    moved = data.moved(step)
    rows = float(data.n.sum())
    if clients == "sampled":
        V = between_clients(moved) if variance == "CR1" else jackknife(moved)
        df = float(len(good) - 1)
    else:
        noise = sent.noise if variance == "clients" else sent.noise_uncentred
        df = max(rows - len(x), 1.0)
        V = inverse @ noise @ inverse.T * (rows / df if variance == "HC1" else 1.0)
    sampling = V
    remainder = float(np.max(np.abs(step) / np.sqrt(np.diagonal(V))))
    notes = [*remarks, *left_out]
    if correct:
        x = x + step
        if remainder > FAR:
            notes.append(
                f"messages were evaluated {remainder:.2g} standard errors from the minimiser: take "
                "final messages again at fit.params, and finish again"
            )
    else:
        own, own_df = _run(state, "correct")
        V, df = _sum_of_variances(V, df, own, own_df)
    notes += _sampled_notes(data, labels, len(good)) if clients == "sampled" else []
    return FederationFit(
        names=labels,
        estimate=x,
        covariance=V,
        df=df,
        about=about,
        clients=clients,
        level=level,
        messages=_messages(moved),
        weights=dict(zip(moved.names, moved.p.tolist(), strict=True)),
        like=params,
        remainder=remainder if correct else 0.0,
        notes=tuple(notes),
        own_sampling=sampling,
    )


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
    remainder: float  # length of the last step in standard errors
    notes: tuple[str, ...]
    own_sampling: FloatArray | None = None  # (d, d) of the rows alone

    @property
    def params(self) -> Params:
        """The estimate in the shape of the model."""
        return _shaped(self.estimate, self.like)

    @property
    def std_error(self) -> FloatArray:
        """Standard errors, (d,)."""
        return np.sqrt(np.diagonal(self.covariance))

    @property
    def p_values(self) -> FloatArray:
        """Two-sided p-values of no effect, (d,)."""
        return self._tail(self.estimate / self.std_error)

    def interval(self, level: float | None = None, side: Side = "both") -> Interval:
        """Return intervals of all parameters, (d,).

        Args:
          level: that of the fit if None.
          side: "both", or the only bound that is finite: "lower" or "upper".
        """
        half = self._multiplier(self.level if level is None else level, side) * self.std_error
        return Interval.around(self.estimate, half, side)

    def function(
        self, g: Callable[[Params], Any], level: float | None = None, side: Side = "both"
    ) -> Interval:
        """Return an interval for a function of the parameters by the delta method: a contrast, or a prediction.

        Args:
          g: `params → number or vector`, differentiable by JAX.
          level: that of the fit if None.
          side: as in `interval`.
        """
        level = self.level if level is None else level
        return joint.function(self._joint(), lambda x: g(_shaped(x, self.like)), level, side)

    def test(
        self, contrasts: ArrayLike | None = None, null: ArrayLike = 0.0, level: float | None = None
    ) -> joint.JointTest:
        """Test Rx* = r, all parameters at once if no contrasts R are given."""
        level = self.level if level is None else level
        return joint.joint_test(self._joint(), contrasts, null, level)

    def agreement(self, level: float | None = None) -> Agreement:
        """Return whether the clients agree, see `agree`."""
        if not self.messages:
            raise refusal(
                "messages", "have been given to finish, to compare clients", None, code="missing"
            )
        return agree(
            self.messages,
            estimate=self.estimate,
            weights=self.weights,
            names=self.names,
            level=self.level if level is None else level,
        )

    @property
    def sampling(self) -> FloatArray:
        """The covariance of the minimiser of the rows over samples of rows, for `Tracker.interval(..., sampling=...)`."""
        if self.own_sampling is None:
            raise refusal(
                "messages",
                "have been given to finish, for the sampling variance",
                None,
                code="missing",
            )
        return self.own_sampling

    @property
    def verdict(self) -> str:
        """What the intervals are about, in words."""
        if self.about == "rows":
            return "about the minimiser of these rows, and not the population that they come from"
        if self.clients == "sampled":
            return "about the mean of all clients that these are a sample of"
        return "about the population of these clients, each client's rows a sample of it"

    def table(self, level: float | None = None) -> str:
        """Return names, estimates, standard errors, p-values and intervals as text, with the verdict and all notes."""
        level = self.level if level is None else level
        low, high = self.interval(level)[1:]
        tails = (f"[{(1 - level) / 2:.4g}", f"{(1 + level) / 2:.4g}]")
        head = ["", "estimate", "std. error", "p", *tails]
        columns = (self.estimate, self.std_error, self.p_values, low, high)
        body = [
            [name, f"{x:.5g}", f"{se:.4g}", f"{p:.3g}", f"{a:.5g}", f"{b:.5g}"]
            for name, x, se, p, a, b in zip(self.names, *columns, strict=True)
        ]
        law = (
            "normal law" if np.isinf(self.df) else f"Student's t, {self.df:.4g} degrees of freedom"
        )
        who = f"{len(self.messages)} clients" if self.messages else "from the rounds alone"
        lines = [align([head, *body], left=(0,)), f"{self.verdict}; {who}; {law}"]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def __str__(self) -> str:
        return self.table()

    def _multiplier(self, level: float, side: Side = "both") -> float:
        checks.level(level)
        checks.choice("side", side, Side)
        if side != "both" and level <= 0.5:
            raise refusal("level", "be above 0.5 for an interval with one bound", level)
        up = (1 + level) / 2 if side == "both" else level
        return float(special.ndtri(up) if np.isinf(self.df) else special.stdtrit(self.df, up))

    def _tail(self, statistic: FloatArray) -> FloatArray:
        size = np.abs(statistic)
        return 2 * (special.ndtr(-size) if np.isinf(self.df) else special.stdtr(self.df, -size))

    def _joint(self) -> joint.Joint:
        df = 1e9 if np.isinf(self.df) else self.df
        law = JointLaw(
            lambda level, q: float(q * special.fdtri(q, df, level)),
            lambda w, q: (float(special.fdtrc(q, df, w / q)), 0.0),
            normal=bool(np.isinf(self.df)),
        )
        x, V = (np.asarray(one, np.float64) for one in (self.estimate, self.covariance))
        return joint.Joint(x, V, self._multiplier, law, one_sided=self._multiplier)


def _from_rounds(
    state: ServerState | None,
    messages: Mapping[str, FinalMessage] | None,
    about: str,
    clients: str,
    names: tuple[str, ...],
    level: float,
    remarks: Sequence[str],
) -> FederationFit:
    """Return what the rounds alone say."""
    V, df = _run(state, "at")
    assert state is not None
    if clients == "sampled":
        rule = 'be "given" for what the rounds alone say; sampled clients need final messages of reused rows'
        raise refusal("clients", rule, clients, code="conflict")
    if state.tracker.rows == "reused" and about == "population":
        rule = (
            "be final messages of clients, for intervals about the population: rows were reused, and "
            "the rounds alone say nothing of how these rows came about"
        )
        raise refusal("messages", rule, messages, '; about="rows" needs none', code="missing")
    if state.tracker.rows == "fresh" and about == "rows":
        raise refusal("about", 'be "population" if rows are fresh', about, code="conflict")
    if state.tracker.rows == "fresh" and messages:
        rule = "be None if rows are fresh, since the rounds are about the population already"
        raise refusal("messages", rule, sorted(messages), code="unwanted")
    params = estimate(state)
    return FederationFit(
        names, flatten(params), V, df, about, clients, level, {}, {}, params, 0.0, tuple(remarks)
    )


def _run(state: ServerState | None, argument: str) -> tuple[FloatArray, float]:
    """Return the covariance of the run's estimate and its degrees of freedom."""
    if state is None:
        rule = "be of a server's state, whose rounds have a variance of their own"
        raise refusal(argument, rule, "parameters alone", code="missing")
    V, df = state.tracker.covariance(state.tracked)
    if not np.isfinite(V).all():
        notes = "; ".join(state.tracker.notes(state.tracked)) or "too few rounds"
        raise refusal("at", "have rounds that give a covariance", notes, code="data")
    return V, df


def _sum_of_variances(
    V: FloatArray, df: float, own: FloatArray, own_df: float
) -> tuple[FloatArray, float]:
    """Add two covariances; degrees of freedom by Satterthwaite, the least of all parameters."""
    a, b = np.diagonal(V), np.diagonal(own)
    spread = a**2 / df + b**2 / own_df
    with np.errstate(divide="ignore"):
        return V + own, float(np.min((a + b) ** 2 / spread))


def _sampled_notes(data: Stacked, names: tuple[str, ...], count: int) -> list[str]:
    notes = []
    for i, j in constant_within_clients(data):
        notes.append(
            f"{names[i]} and {names[j]} differ between clients only: what is said of them rests on {count} "
            "clients and not on their rows"
        )
    if count < 10:
        notes.append(
            f"{count} clients are few for a sample: intervals rest on {count - 1} degrees of freedom"
        )
    if (largest := float(np.max(data.p))) > 0.5:
        notes.append(
            f"one client has {100 * largest:.0f} % of the weight: Student's t is optimistic"
        )
    return notes


def _messages(data: Stacked) -> dict[str, FinalMessage]:
    parts = zip(data.names, data.n, data.score, data.covariance, data.hessian, strict=True)
    return {name: FinalMessage(int(n), s, S, H) for name, n, s, S, H in parts}


def _inverse(G: FloatArray) -> FloatArray:
    """Return the inverse of the mean Hessian; refuse one that is not positive definite."""
    scale = np.sqrt(np.maximum(np.diagonal(G), 1e-300))
    least = float(np.linalg.eigvalsh((G + G.T) / 2 / np.outer(scale, scale))[0])
    if least < 1e-12:
        rule = "have a positive definite mean Hessian (no collinear columns, and a minimum)"
        raise refusal(
            "messages",
            rule,
            f"a smallest eigenvalue of {least:.2g} of its correlations",
            code="data",
        )
    return np.linalg.inv(G)


def _usable(
    state: ServerState, messages: Mapping[str, RoundMessage], need_params: bool
) -> tuple[dict[str, RoundMessage], list[str]]:
    """Return the messages that can be used, and why the others cannot."""
    good, remarks, d = {}, [], len(flatten(state.params))
    for name, one in messages.items():
        parts: dict[str, tuple[Any, tuple[int, ...]]] = {"gradient sum": (one.gradient_sum, (d,))}
        if need_params and one.params is None:
            raise refusal(
                f"messages[{name!r}].params", "be given if `params` is not", None, code="missing"
            )
        if one.params is not None:
            parts["parameters"] = (flatten(one.params), (d,))
        if one.hessian is not None:
            parts["Hessian"] = (one.hessian, (d, d))
            parts["Hessian at the anchor before"] = (one.hessian_before, (d, d))
        why = _fault(one.examples, parts) or ("no steps" if not one.steps >= 1 else "")
        if why:
            remarks.append(f"round {state.rounds + 1}: client {name} was left out: {why}")
        else:
            good[name] = one
    return good, remarks


def _usable_final(
    messages: Mapping[str, FinalMessage], d: int
) -> tuple[dict[str, FinalMessage], list[str]]:
    good, remarks = {}, []
    for name, one in messages.items():
        parts = {
            "score": (one.score, (d,)),
            "covariance of scores": (one.covariance, (d, d)),
            "Hessian": (one.hessian, (d, d)),
        }
        why = _fault(one.examples, parts)
        if why:
            remarks.append(f"client {name} was left out: {why}")
        else:
            good[name] = one
    return good, remarks


def _fault(examples: Any, parts: Mapping[str, tuple[Any, tuple[int, ...]]]) -> str:
    """Return what is wrong with a message, or ""."""
    if not np.isfinite(examples) or examples < 1:
        return f"it has no rows (examples = {examples})"
    for what, (value, shape) in parts.items():
        found = np.asarray(value, np.float64) if value is not None else np.zeros(0)
        if found.shape != shape:
            return f"its {what} has shape {found.shape}, not {shape}"
        if not np.isfinite(found).all():
            return f"its {what} is not finite"
    return ""


def _mean_hessians(
    good: Mapping[str, RoundMessage], p: FloatArray
) -> tuple[FloatArray | None, FloatArray | None, int | None]:
    """Return the weighted Hessians of those who sent them, and how many rows they rest on."""
    sent = [(w, one) for w, one in zip(p, good.values(), strict=True) if one.hessian is not None]
    if not sent:
        return None, None, None
    w = np.array([w for w, _ in sent])
    w = w / w.sum()
    here = np.tensordot(w, np.stack([np.asarray(one.hessian) for _, one in sent]), 1)
    before = np.tensordot(w, np.stack([np.asarray(one.hessian_before) for _, one in sent]), 1)
    return here, before, sum(int(one.observations) for _, one in sent)


def _hessians_due(state: ServerState) -> bool:
    """Return whether Hessians are due in the next round, spread over the rounds of an anchor."""
    clock = _clock(state.tracker, state.tracked)
    if int(clock.bin) < 1:
        return False
    start, length = int(clock.start), next_edge(int(clock.start)) - int(clock.start)
    many = bin_hessians(float(state.steps), length, state.num_clients, len(flatten(state.params)))
    count = state.hessians if int(clock.bin) == state.bin else 0
    return (int(clock.t) - start) * many >= count * length


def _clock(tracker: Tracker, tracked: Any) -> Any:
    parts = zip(tracker.estimator.accumulators, tracked.states, strict=True)
    return next(own.clock for part, own in parts if part.anchor is not None)


def _names(params: Params, names: Sequence[str] | None) -> tuple[str, ...]:
    own = parameter_names(params)
    if names is None:
        return own
    if len(names) != len(own):
        raise refusal("names", f"be {len(own)}, one per parameter", len(names), code="shape")
    return tuple(names)


def _shaped(vector: Any, like: Params) -> Params:
    return unravel(vector, like)
