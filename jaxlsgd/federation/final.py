"""What comes out at the end: estimate, intervals, tests and verdict from the final messages of all clients.

With weights p_k, and of client k on its own n_k rows at x the mean score s_k, the covariance S_k of scores and the Hessian H_k,

    G = Σ p_k H_k,    x̂ = x − G⁻¹ Σ p_k s_k,    V = G⁻¹ (Σ p_k² S_k/n_k) G⁻ᵀ.

x̂ is the minimiser of these rows up to a term of order |x̂ − x|², whatever optimiser has found x, so that a run's own
noise is no part of V. Reported at x itself (`correct=False`), the run's own variance is added to V.
About these rows x̂ is known, up to what `remainder` says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from jaxlsgd.core import checks
from jaxlsgd.core.checks import Refusal, refusal
from jaxlsgd.core.display import align
from jaxlsgd.core.estimator import Interval, JointLaw, Side
from jaxlsgd.core.problem import unravel
from jaxlsgd.federation import validate
from jaxlsgd.federation.agreement import (
    Agreement,
    Stacked,
    agree,
    between_clients,
    constant_within_clients,
    jackknife,
    stack,
)
from jaxlsgd.federation.client import FinalMessage, digest, flatten
from jaxlsgd.federation.server import ServerState, checked_weights, estimate, majority
from jaxlsgd.federation.validate import several, shown_name
from jaxlsgd.inference import joint
from jaxlsgd.inference.tracking import parameter_names

FloatArray = NDArray[np.floating[Any]]
Params = Any
ABOUT = ("population", "rows")
CLIENTS = ("given", "sampled")
VARIANCES = ("clients", "HC0", "HC1", "HC3", "CR1")
# Standard errors that the last step may be long before another final message is asked for.
FAR = 0.5


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
      messages: by client. Those that are not finite, of another shape, of another place, or not what `validate` lets
        pass are left out, with words. None for what the rounds alone say: about the population if rows were fresh,
        else about these rows only.
      about: "population", from which each client's rows are a sample; or "rows", the minimiser of these rows.
      clients: "given", the population is made of these clients; or "sampled", they are a sample of clients, and
        intervals are about the mean over all that there might be, with Student's t of K − 1 degrees of freedom.
      weights: p_k of all clients, by name; if None, those of the server's state, or else their numbers of rows.
      expected: names of all clients; those of `weights` if empty. Those without a message are named in the verdict, and
        messages of others are refused.
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
    x, labels = _place(params), _names(params, names)
    penalty = _ridge(ridge, len(x))
    remarks = () if state is None else state.remarks
    if messages is not None:
        messages = checks.table("messages", messages, "be a mapping from clients to messages")
    fresh = state is not None and state.tracker.rows == "fresh"
    if about == "rows" or messages is None or fresh:
        return _from_rounds(state, messages, about, clients, labels, level, remarks)
    chosen = checked_weights(weights)
    chosen = state.weights if chosen is None and state is not None else chosen
    rounds = {} if state is None else state.examples
    listed = isinstance(expected, Iterable) and not isinstance(expected, str)
    if not listed or not all(isinstance(name, str) for name in expected):
        raise refusal("expected", "be a list of names", expected, code="type")
    due = list(expected) or list(chosen or rounds)
    if chosen is not None and (lost := [name for name in due if name not in chosen]):
        raise refusal(
            "weights", f"have a weight of {several(lost)}", several(chosen), code="missing"
        )
    good, notes = _usable_final(messages, params, due, rounds, named=bool(expected or chosen))
    if not good:
        rule = "have a usable one; " + "; ".join(notes or ["none came"])
        raise refusal("messages", rule, {}, code="missing")
    own = None if correct else _run(state, "correct")
    notes = [*remarks, *notes, *_influence(good, chosen, penalty, x)]
    try:
        return minimiser(
            params,
            good,
            clients=clients,
            weights=chosen,
            labels=labels,
            level=level,
            variance=variance,
            ridge=penalty,
            run=own,
            notes=notes,
        )
    except Refusal as error:
        if not notes:
            raise
        raise Refusal("; ".join([str(error), *notes]), error.argument, error.code) from None


def minimiser(
    params: Params,
    messages: Mapping[str, FinalMessage],
    *,
    clients: str,
    weights: Mapping[str, float] | None,
    labels: tuple[str, ...],
    level: float,
    variance: str,
    ridge: FloatArray,
    run: tuple[FloatArray, float] | None = None,
    notes: Sequence[str] = (),
) -> FederationFit:
    """Return what final messages that can be trusted say; with a `run`'s covariance and df, `params` are kept."""
    if clients == "sampled" and len(messages) < 2:
        rule = 'be of at least 2 clients for clients="sampled"'
        raise refusal("messages", rule, len(messages), code="data")
    x, sent = flatten(params), stack(messages, weights)
    data = sent.penalised(ridge, x)
    inverse = _inverse(data.G)
    step = -inverse @ data.mean_score
    moved = data.moved(step)
    rows = float(data.n.sum())
    if clients == "sampled":
        V = between_clients(moved) if variance == "CR1" else jackknife(moved)
        df = float(len(messages) - 1)
    else:
        noise = sent.noise if variance == "clients" else sent.noise_uncentred
        df = max(rows - len(x), 1.0)
        V = inverse @ noise @ inverse.T * (rows / df if variance == "HC1" else 1.0)
    _check_variance(V, labels)
    sampling = V
    remainder = float(np.max(np.abs(step) / np.sqrt(np.diagonal(V))))
    notes = list(notes)
    if run is None:
        x = x + step
        if remainder > FAR:
            notes.append(
                f"messages were evaluated {remainder:.2g} standard errors from the minimiser: take "
                "final messages again at fit.params, and finish again"
            )
    else:
        V, df = _sum_of_variances(V, df, *run)
    notes += [note for note in majority(data.names, data.p) if note not in notes]
    notes += _sampled_notes(data, labels, len(messages)) if clients == "sampled" else []
    return FederationFit(
        names=labels,
        estimate=x,
        covariance=V,
        df=df,
        about="population",
        clients=clients,
        level=level,
        messages=_messages(moved, digest(x)),
        weights=dict(zip(moved.names, moved.p.tolist(), strict=True)),
        like=params,
        remainder=remainder if run is None else 0.0,
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
        return unravel(self.estimate, self.like)

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
        return joint.function(self._joint(), g, level, side, lambda x: unravel(x, self.like))

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
        try:
            return agree(
                self.messages,
                estimate=self.estimate,
                weights=self.weights,
                names=self.names,
                level=self.level if level is None else level,
            )
        except np.linalg.LinAlgError:
            rule = "have covariances of scores with all directions in them, to compare clients"
            hint = "; ".join(["", *self.notes])
            raise refusal("messages", rule, "others", hint, code="data") from None

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
        notes = "; ".join([*state.tracker.notes(state.tracked), *state.remarks]) or "too few rounds"
        raise refusal("at", "have rounds that give a covariance", "none", f"; {notes}", code="data")
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
    if float(np.max(data.p)) > 0.5:
        notes.append("one client has most of the weight: Student's t is optimistic")
    return notes


def _messages(data: Stacked, answers: int) -> dict[str, FinalMessage]:
    parts = zip(data.names, data.n, data.score, data.covariance, data.hessian, strict=True)
    return {name: FinalMessage(int(n), s, S, H, answers) for name, n, s, S, H in parts}


def _usable_final(
    messages: Mapping[str, Any],
    params: Params,
    due: Sequence[str],
    rounds: Mapping[str, int],
    named: bool,
) -> tuple[dict[str, FinalMessage], list[str]]:
    """Return the final messages that can be used, and notes: why the others cannot, and what is odd.

    Args:
      messages: by client.
      params: where they were to be evaluated.
      due: clients that are expected.
      rounds: how many rows clients had in their rounds.
      named: whether there are no other clients than those.
    """
    dim, asked = flatten(params).size, digest(params)
    good, left_out = validate.usable(
        messages,
        lambda name, message: validate.final_message(message, dim, asked, rounds.get(name)),
        set(due) if named else (),
    )
    notes = [validate.left_out(name, why) for name, why in left_out.items()]
    absent = [name for name in due if name not in messages]
    notes += [validate.left_out(name, "it sent no final message") for name in absent]
    sizes = {
        name: {
            "covariance's diagonal": np.diagonal(one.covariance),
            "Hessian's diagonal": np.diagonal(one.hessian),
            "number of rows": np.float64(one.examples),
            "score": _in_deviations(one),
        }
        for name, one in good.items()
    }
    notes += validate.unlike(sizes).values()
    for first, second in validate.equal({name: one[:4] for name, one in good.items()}):
        words = f"its message equals that of {shown_name(first)}: one client under two names?"
        if named:  # which have their weights, whoever is behind them
            notes.append(f"client {shown_name(second)} is used, but {words}")
        else:
            del good[second]
            notes.append(validate.left_out(second, words))
    return good, notes


def _in_deviations(message: FinalMessage) -> FloatArray:
    """Return a score in standard deviations of the scores of single rows."""
    spread = np.sqrt(np.maximum(np.diagonal(message.covariance), 1e-300))
    with np.errstate(over="ignore"):
        return np.minimum(np.abs(message.score) / spread, 1e300)


def _influence(
    good: dict[str, FinalMessage],
    weights: Mapping[str, float] | None,
    ridge: FloatArray,
    x: FloatArray,
) -> list[str]:
    """Return notes on clients that decide more than their weight; leave out one that makes the mean Hessian indefinite."""
    data, notes = stack(good, weights).penalised(ridge, x), []
    if (
        not validate.is_definite(data.G)
        and (k := validate.needless(data.p, data.hessian)) is not None
    ):
        words = "with its Hessian the mean Hessian is not positive definite, and without it it is"
        notes.append(validate.left_out(data.names[k], words))
        del good[data.names[k]]
        data = stack(good, weights).penalised(ridge, x)
    return [*notes, *validate.decisive(*data).values()]


def _place(params: Any) -> FloatArray:
    """Return the numbers of `at`; refuse what is no place."""
    try:
        x = flatten(params)
    except (TypeError, ValueError):
        rule = "be parameters, or a server's state"
        raise refusal("at", rule, type(params).__name__, code="type") from None
    if not x.size:
        raise refusal("at", "have at least one number", x.shape, code="shape")
    checks.finite("at", x)
    return x


def _ridge(ridge: Any, dim: int) -> FloatArray:
    """Return the penalty of every parameter."""
    many = np.ndim(ridge) == 1 and not isinstance(ridge, str)
    each = list(ridge) if many else [ridge]
    found = [checks.scale(f"ridge[{j}]" if many else "ridge", one) for j, one in enumerate(each)]
    if many and len(found) != dim:
        raise refusal("ridge", f"be a number, or {dim} numbers", len(found), code="shape")
    return np.broadcast_to(np.array(found), (dim,))


def _check_variance(V: FloatArray, labels: tuple[str, ...]) -> None:
    """Refuse variances that are not positive numbers."""
    v = np.diagonal(V)
    if not np.all(np.isfinite(V)) or np.any(v <= 0):
        bad = [name for name, one in zip(labels, v, strict=True) if not one > 0]
        rule = f"give a positive variance of {', '.join(bad or labels)}"
        raise refusal("messages", rule, v.tolist(), code="data")


def _inverse(G: FloatArray) -> FloatArray:
    """Return the inverse of the mean Hessian; refuse one that is not positive definite."""
    least = validate.least_eigenvalue(G)
    if least < validate.LEAST_EIGENVALUE:
        rule = "have a positive definite mean Hessian (no collinear columns, and a minimum)"
        raise refusal(
            "messages",
            rule,
            f"a smallest eigenvalue of {least:.2g} of its correlations",
            code="data",
        )
    return np.linalg.inv(G)


def _names(params: Params, names: Sequence[str] | None) -> tuple[str, ...]:
    own = parameter_names(params)
    if names is None:
        return own
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise refusal("names", "be a list of names", names, code="type")
    if len(names) != len(own):
        raise refusal("names", f"be {len(own)}, one per parameter", len(names), code="shape")
    checks.distinct("names", names)
    return tuple(names)
