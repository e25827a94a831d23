"""Intervals in a federation that Flower runs: a strategy that wraps yours, and a mod for its clients.

`InferenceStrategy` wraps any `flwr.serverapp.strategy.Strategy`, as Flower's differential privacy does. Each train message
carries the server's anchors and whether Hessians are asked for; `InferenceMod` takes them out before your train function
sees the message, and adds the client's sums to its reply. The strategy takes these out again before yours averages the
models, so that strategies which refuse a second `ArrayRecord` (FedAvg does) work unchanged, and so do robust or adaptive
ones: the intervals do not depend on how models are averaged.

What leaves a client is what `jaxlsgd.federation.client` lists, no more. `InferenceMod` must stand first among the mods, or
another one, such as local differential privacy, would see two `ArrayRecord`s; that one then protects the model only.
"""

from __future__ import annotations

import contextvars
import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal
from jaxlsgd.federation import client, server
from jaxlsgd.federation.client import FinalMessage, RoundMessage
from jaxlsgd.inference.tracking import Rows
from jaxlsgd.problems import losses

try:
    from flwr.app import (
        Array,
        ArrayRecord,
        ConfigRecord,
        Context,
        Error,
        Message,
        MessageType,
        MetricRecord,
        RecordDict,
    )
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import Result, Strategy
except ImportError as error:
    raise ImportError(
        "jaxlsgd.federation.flower needs Flower: pip install 'jaxlsgd[flower]'"
    ) from error

LOG = logging.getLogger("flwr")  # Flower's own
SENT = "jaxlsgd"  # the ArrayRecord of anchors, and of a client's sums
ASKED = "jaxlsgd.asked"  # the ConfigRecord of what a client is asked for
E_KEY, ETA_KEY = "E", "eta"  # in the ConfigRecord that a train function reads
_RAISED = 2  # Flower's code for an exception in a ClientApp
_ROUND = ("gradient_sum", "hessian", "hessian_before")
# Final messages are asked for again at the estimate that they give, up to four times in all, while that is further than
# this from where they were evaluated, in standard errors.
FINAL_MESSAGES, CLOSE = 4, 0.1
_FINAL = ("score", "covariance", "hessian")
# The rows of the local steps of the round that is under way. Clients in one process may run in threads, and a simulation
# pickles client apps, so that a mod has no such variable of its own.
_STEPS: contextvars.ContextVar[list[client.Rows] | None] = contextvars.ContextVar(
    "_STEPS", default=None
)

Arrays = dict[str, np.ndarray]


class InferenceMod:
    """Adds to the replies of a Flower client what intervals need.

    Your train function calls `observed(rows)` in each local step, with the rows of that step. After it has returned, the
    mod evaluates these rows at the server's anchor and adds the sums to the reply. Once, after the last round, the mod
    answers by itself, from all rows of the client. Messages of a server without `InferenceStrategy` pass through.

    Args:
      loss: the name of a family ("gaussian", "logistic", "poisson", "huber", "quantile") for rows (A, y), or a JAX function
        `loss(params, row)` of one row, in which `params` is a dictionary of the model's arrays by name. It is the loss
        whose minimum is of interest, whatever the train function does.
      rows: `context → rows`, all rows of this client, for the final message.
      numbers: of the family, as in `client.round_message`.
      few_rows: allow Hessians of no more rows than parameters, which give these rows away.

    Example::

        mod = InferenceMod("logistic", rows=load)
        app = ClientApp(mods=[mod])

        @app.train()
        def train(message, context):
            config = message.content["config"]
            for A, y in batches(context, config["E"]):
                x = x - config["eta"] * gradient(x, A, y)
                mod.observed((A, y))
            ...
    """

    def __init__(
        self,
        loss: str | client.RowLoss,
        rows: Callable[[Context], client.Rows],
        *,
        numbers: Sequence[float] = (),
        few_rows: bool = False,
    ) -> None:
        if not callable(loss):
            checks.choice("loss", loss, tuple(losses.FAMILIES))
        if not callable(rows):
            raise refusal("rows", "be a function of the context", rows, code="type")
        self.loss, self.rows = loss, rows
        self.options: dict[str, Any] = {"numbers": tuple(numbers), "few_rows": few_rows}

    def observed(self, rows: client.Rows) -> None:
        """Record the rows of one local step; all steps of a round have equally many."""
        if (steps := _STEPS.get()) is not None:
            steps.append(rows)

    def __call__(
        self, message: Message, context: Context, call_next: Callable[[Message, Context], Message]
    ) -> Message:
        """Pass a train message on without the server's questions, and answer these in the reply."""
        if ASKED not in message.content:
            return call_next(message, context)
        asked = message.content.config_records[ASKED]
        given = message.content.array_records[SENT]
        anchors = [_with_prefix(given, prefix) for prefix in ("anchor:", "before:")]
        records = {key: one for key, one in message.content.items() if key not in (SENT, ASKED)}
        message.content = RecordDict(records)
        if asked["final"]:
            return self._final(message, context, anchors[0])
        steps: list[client.Rows] = []
        token = _STEPS.set(steps)
        try:
            reply = call_next(message, context)
            if not reply.has_error():
                reply.content[SENT] = self._sums(steps, anchors, bool(asked["hessians"]))
        except ValueError as error:
            return _failed(message, error)
        finally:
            _STEPS.reset(token)
        return reply

    def _sums(self, steps: list[client.Rows], anchors: list[Arrays], hessians: bool) -> ArrayRecord:
        if not steps:
            raise refusal(
                "train", "call observed(rows) in each local step", "no call", code="missing"
            )
        sizes = {np.shape(jax.tree.leaves(rows)[0])[0] for rows in steps}
        if len(sizes) > 1:
            raise refusal(
                "observed", "have equally many rows in each step", sorted(sizes), code="shape"
            )
        rows = jax.tree.map(lambda *parts: np.concatenate(parts), *steps)
        made = client.round_message(
            self.loss,
            rows,
            anchors,
            steps=len(steps),
            examples=1,
            hessians=hessians,
            **self.options,
        )
        return round_record(made)

    def _final(self, message: Message, context: Context, params: Arrays) -> Message:
        try:
            made = client.final_message(self.loss, self.rows(context), params, **self.options)
        except ValueError as error:
            return _failed(message, error)
        return Message(RecordDict({SENT: final_record(made)}), reply_to=message)


def round_record(message: RoundMessage) -> ArrayRecord:
    """Return a client's sums as the `ArrayRecord` "jaxlsgd" of its reply, for clients without `InferenceMod`."""
    found = {name: part for name in _ROUND if (part := getattr(message, name)) is not None}
    return _record({**found, "steps": message.steps, "observations": message.observations})


def final_record(message: FinalMessage) -> ArrayRecord:
    """Return a client's final message as the `ArrayRecord` "jaxlsgd" of its reply."""
    return _record(
        {**{name: getattr(message, name) for name in _FINAL}, "examples": message.examples}
    )


def _record(parts: Mapping[str, Any]) -> ArrayRecord:
    return ArrayRecord({key: Array(np.asarray(value)) for key, value in parts.items()})


def _with_prefix(record: ArrayRecord, prefix: str) -> Arrays:
    keys = [key for key in record if key.startswith(prefix)]
    return {key.removeprefix(prefix): record[key].numpy() for key in keys}


def _failed(message: Message, error: Exception) -> Message:
    return Message(Error(code=_RAISED, reason=str(error)), reply_to=message)


@dataclasses.dataclass
class InferenceResult(Result):
    """Flower's result, with the table and what it was made from."""

    table: str = ""
    fit: server.FederationFit | None = None  # from the final messages; None if rows are fresh
    stopped_after: int | None = None  # the round in which the run was sure enough
    remarks: tuple[str, ...] = ()  # who was left out, and why


class TakingPart(NamedTuple):
    """Who took part in a round."""

    server_round: int  # 0 for the final messages
    examples: Mapping[int, float]  # by node
    left_out: Mapping[int, str]  # by node, why

    @property
    def when(self) -> str:
        """The round in words."""
        return f"round {self.server_round}" if self.server_round else "final message"


class InferenceStrategy(Strategy):
    """Wraps a strategy, and adds intervals to its metrics and a table to its result.

    The server sends E and η to clients, in the `ConfigRecord` that their train function reads. Replies that cannot be used (not
    finite, of another shape, without rows or without sums) are left out with a warning that names the node and the reason,
    before the wrapped strategy averages; failed replies and missing ones are recorded and survived. The metrics of each
    round have `jaxlsgd.estimate`, `jaxlsgd.lower`, `jaxlsgd.upper` (infinite until there is an interval), one per parameter in
    the order of `names`, and `jaxlsgd.sure-enough`.

    Args:
      strategy: any strategy of Flower's Message API.
      E: local steps per round, or `round → steps`.
      eta: step size, or `round → step size`.
      rows: "fresh" if clients meet no row twice, "reused" if they go over the same rows again. With "reused" the intervals
        of single rounds are about these rows, and the table at the end, from the final messages, is about the population.
      clients: "given" or "sampled", for the table at the end; see `jaxlsgd.federation.finish`.
      level: of intervals.
      enough: stop when the half-widths of all parameters are at most this; None for never. Flower's loop cannot be left, so
        the rounds after it send nothing. It is a width that is waited for, not a result.
      weighted_by_key: metric with the weight of a client; that of the wrapped strategy if it has one.

    Example::

        strategy = InferenceStrategy(FedAvg(), E=5, eta=lambda m: 0.5 / m**0.505, rows="reused")
        result = strategy.start(grid, initial_arrays=ArrayRecord([x]), num_rounds=100)
        print(result.table)
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        E: int | Callable[[int], int],
        eta: float | Callable[[int], float],
        rows: Rows,
        clients: str = "given",
        level: float = 0.95,
        enough: float | None = None,
        weighted_by_key: str | None = None,
    ) -> None:
        if not isinstance(strategy, Strategy):
            raise refusal(
                "strategy", "be a Strategy of flwr.serverapp.strategy", strategy, code="type"
            )
        if not callable(E):
            checks.count("E", E)
        if not callable(eta):
            checks.positive("eta", eta)
        self.strategy = strategy
        self.E: Callable[[int], int] = E if callable(E) else lambda _: E
        self.eta: Callable[[int], float] = eta if callable(eta) else lambda _: eta
        self.rows: Rows = checks.choice("rows", rows, Rows)
        self.clients = checks.choice("clients", clients, server.CLIENTS)
        self.level = checks.level(level)
        self.enough = None if enough is None else checks.positive("enough", enough)
        self.weighted_by_key = weighted_by_key or getattr(
            strategy, "weighted_by_key", "num-examples"
        )
        self.state: server.ServerState | None = None
        self.took_part: list[TakingPart] = []
        self.stopped_after: int | None = None
        self._asked: tuple[set[int], bool] = (
            set(),
            False,
        )  # nodes of this round, whether for Hessians

    @property
    def names(self) -> tuple[str, ...]:
        """One name per parameter, in the order of all lists of numbers."""
        return self._begun().tracker.names

    @property
    def remarks(self) -> tuple[str, ...]:
        """Who was left out, and why, one sentence per round and reason."""
        told = [
            f"{one.when}: node {node} was left out: {reason}"
            for one in self.took_part
            for node, reason in one.left_out.items()
        ]
        return (*told, *self._begun().remarks)

    def summary(self) -> None:
        """Log what is wrapped, and how."""
        about = f"rows {self.rows}, clients {self.clients}, level {self.level:g}"
        LOG.info("\t├──> Intervals around %s: %s", type(self.strategy).__name__, about)
        self.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Add E, η and the anchors to the messages of the wrapped strategy."""
        if self.stopped_after is not None:
            return []
        if self.state is None:
            self.state = server.begin(_params(arrays), rows=self.rows)
        config[E_KEY] = checks.count("E", self.E(server_round))
        config[ETA_KEY] = checks.positive("eta", self.eta(server_round))
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        sent = server.broadcast(self.state)
        for message in messages:
            message.content = _asking(message.content, sent.anchors, hessians=sent.hessians)
        self._asked = {one.metadata.dst_node_id for one in messages}, sent.hessians
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Take the clients' sums out of their replies, let the wrapped strategy average, and add intervals."""
        state = self._begun()
        if self.stopped_after is not None:
            return None, None
        usable: dict[int, RoundMessage] = {}
        left_out: dict[int, str] = {}
        passed: list[Message] = []
        for reply in replies:
            node = reply.metadata.src_node_id
            if reply.has_error():
                left_out[node] = f"it failed: {reply.error.reason}"
                passed.append(reply)  # which strategies count and log
                continue
            try:
                usable[node] = self._read(reply, state)
                passed.append(reply)
            except ValueError as error:
                left_out[node] = str(error)
        nodes, _ = self._asked
        left_out.update(dict.fromkeys(nodes - usable.keys() - left_out.keys(), "no reply came"))
        for node, reason in left_out.items():
            LOG.warning("round %d: node %d was left out: %s", server_round, node, reason)
        examples = {node: one.examples for node, one in usable.items()}
        self.took_part.append(TakingPart(server_round, examples, left_out))
        arrays, metrics = self.strategy.aggregate_train(server_round, passed)
        if usable:
            self.state = server.receive(
                state,
                {str(node): one for node, one in usable.items()},
                eta=self.eta(server_round),
                params=state.params if arrays is None else _params(arrays),
            )
        return arrays, self._with_intervals(server_round, metrics, len(usable), len(left_out))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Evaluate as the wrapped strategy does, until the run is sure enough; in the round of that, once more."""
        if self.stopped_after is not None and server_round > self.stopped_after:
            return []
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Aggregate as the wrapped strategy does."""
        if self.stopped_after is not None and server_round > self.stopped_after:
            return None
        return self.strategy.aggregate_evaluate(server_round, replies)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> InferenceResult:
        """Run as Flower does, ask all clients once more for their final messages, and return the table with the result."""
        result = super().start(
            grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn
        )
        try:
            table, fit = self.finish(grid, timeout=timeout)
        except ValueError as error:  # a table that is refused must not lose the model
            table, fit = f"No table: {error}", None
        LOG.info("")
        for line in table.splitlines():
            LOG.info("\t%s", line)
        parts = {one.name: getattr(result, one.name) for one in dataclasses.fields(Result)}
        return InferenceResult(
            **parts, table=table, fit=fit, stopped_after=self.stopped_after, remarks=self.remarks
        )

    def finish(
        self, grid: Grid, *, timeout: float = 3600
    ) -> tuple[str, server.FederationFit | None]:
        """Return the table, and what it was made from; for loops that are not `start`."""
        state = self._begun()
        if self.rows == "fresh":
            return self._table_of_rounds(state), None
        x, fit = server.estimate(state), None
        for _ in range(FINAL_MESSAGES):
            final, nodes = self._ask_for_final(grid, x, timeout)
            if not final:
                told = "No client sent a final message: nothing is said about the population."
                return f"{self._table_of_rounds(state)}\n{told}", None
            fit = server.finish(
                x,
                final,
                clients=self.clients,
                expected=sorted({*map(str, nodes), *state.examples}),
                level=self.level,
            )
            if fit.remainder <= CLOSE:
                break
            x = fit.params
        return str(fit), fit

    def _ask_for_final(
        self, grid: Grid, x: Arrays, timeout: float
    ) -> tuple[dict[str, FinalMessage], list[int]]:
        """Return the final messages of all nodes at x, and the nodes."""
        nodes = sorted(grid.get_node_ids())
        content = _asking(RecordDict(), (x, x), final=True)
        asked = [Message(content, dst_node_id=one, message_type=MessageType.TRAIN) for one in nodes]
        final: dict[str, FinalMessage] = {}
        left_out: dict[int, str] = {}
        for reply in grid.send_and_receive(asked, timeout=timeout):
            node = reply.metadata.src_node_id
            try:
                final[str(node)] = _read_final(reply, len(client.flatten(x)))
            except ValueError as error:
                left_out[node] = str(error)
        for node in nodes:
            if str(node) not in final:
                reason = left_out.setdefault(node, "no reply came")
                LOG.warning("final message: node %d was left out: %s", node, reason)
        self.took_part.append(
            TakingPart(0, {int(k): one.examples for k, one in final.items()}, left_out)
        )
        return final, nodes

    def _table_of_rounds(self, state: server.ServerState) -> str:
        if state.rounds < 2:
            return "No interval: fewer than two rounds had a reply that could be used."
        return state.tracker.table(state.tracked, self.level)

    def _begun(self) -> server.ServerState:
        if self.state is None:
            raise refusal("strategy", "have had a round", "none", code="missing")
        return self.state

    def _read(self, reply: Message, state: server.ServerState) -> RoundMessage:
        """Return a client's sums, and take them out of its reply; refuse what cannot be used."""
        content = reply.content
        records = {key: one for key, one in content.items() if key != SENT}
        if SENT not in content.array_records:
            raise refusal("reply", "have the sums that InferenceMod adds", "none", code="untrusted")
        sums = {key: one.numpy() for key, one in content.array_records[SENT].items()}
        reply.content = RecordDict(records)
        models = list(reply.content.array_records.values())
        if len(models) != 1:
            raise refusal(
                "reply", "have one ArrayRecord with the model", len(models), code="untrusted"
            )
        _check_model(_params(models[0]), state.params)
        weight = _weight(reply, self.weighted_by_key)
        shapes = {"gradient_sum": 1, "hessian": 2, "hessian_before": 2}
        dim, needed = len(client.flatten(state.params)), _ROUND if self._asked[1] else _ROUND[:1]
        parts = {name: _part(sums, name, (dim,) * shapes[name]) for name in needed}
        steps = checks.count("steps", _whole(sums, "steps"))
        seen = (
            checks.count("observations", _whole(sums, "observations"), 1) if len(parts) > 1 else 0
        )
        return RoundMessage(None, weight, steps, **parts, observations=seen)

    def _with_intervals(
        self, server_round: int, metrics: MetricRecord | None, used: int, left_out: int
    ) -> MetricRecord:
        state = self._begun()
        d = len(client.flatten(state.params))
        if state.rounds < 2:
            center, low, high = (
                client.flatten(state.params),
                np.full(d, -np.inf),
                np.full(d, np.inf),
            )
        else:
            found = state.tracker.interval(state.tracked, self.level)
            center, low, high = (client.flatten(part) for part in found)
        sure = self.enough is not None and bool(np.all(high - low <= 2 * self.enough))
        if sure:
            self.stopped_after = server_round
            LOG.info("round %d: sure enough, all half-widths at most %g", server_round, self.enough)
        told = MetricRecord() if metrics is None else metrics
        told["jaxlsgd.estimate"] = center.tolist()
        told["jaxlsgd.lower"], told["jaxlsgd.upper"] = low.tolist(), high.tolist()
        told["jaxlsgd.sure-enough"] = int(sure)
        told["jaxlsgd.clients"], told["jaxlsgd.left-out"] = used, left_out
        return told


def _params(arrays: ArrayRecord) -> Arrays:
    return {key: one.numpy() for key, one in arrays.items()}


def _asking(
    content: RecordDict,
    anchors: tuple[Arrays, Arrays],
    *,
    hessians: bool = False,
    final: bool = False,
) -> RecordDict:
    """Return a message's content with the anchors in it; a strategy may give all its messages one content."""
    now, before = anchors
    arrays = {f"anchor:{key}": value for key, value in now.items()}
    if hessians:
        arrays |= {f"before:{key}": value for key, value in before.items()}
    asked = ConfigRecord({"hessians": hessians, "final": final})
    return RecordDict({**dict(content.items()), SENT: _record(arrays), ASKED: asked})


def _check_model(found: Arrays, like: Arrays) -> None:
    shapes = {key: np.shape(value) for key, value in like.items()}
    if (got := {key: value.shape for key, value in found.items()}) != shapes:
        raise refusal("model", f"have arrays {shapes}", got, code="untrusted")
    if not np.isfinite(client.flatten(found)).all():
        raise refusal("model", "be finite", "NaN or infinity", code="not_finite")


def _weight(reply: Message, key: str) -> int:
    """Return the weight of a client, which its one MetricRecord has."""
    records = list(reply.content.metric_records.values())
    if len(records) != 1 or key not in records[0]:
        raise refusal(
            "reply",
            f"have one MetricRecord with {key!r}",
            [sorted(r) for r in records],
            code="untrusted",
        )
    value = records[0][key]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return checks.count(key, value)


def _part(sums: Mapping[str, np.ndarray], name: str, shape: tuple[int, ...]) -> np.ndarray:
    if name not in sums:
        raise refusal("reply", f"have {name}, which was asked for", sorted(sums), code="untrusted")
    found = np.asarray(sums[name], np.float64)
    if found.shape != shape:
        raise refusal(name, f"have shape {shape}", found.shape, code="shape")
    if not np.isfinite(found).all():
        raise refusal(name, "be finite", "NaN or infinity", code="not_finite")
    return found


def _whole(sums: Mapping[str, np.ndarray], name: str) -> int:
    value = float(_part(sums, name, ()))
    return int(value) if value.is_integer() else 0


def _read_final(reply: Message, dim: int) -> FinalMessage:
    if reply.has_error():
        raise checks.Refusal(f"it failed: {reply.error.reason}", "reply", "missing")
    if SENT not in reply.content.array_records:
        raise refusal(
            "reply", "have the final message that InferenceMod sends", "none", code="untrusted"
        )
    sums = {key: one.numpy() for key, one in reply.content.array_records[SENT].items()}
    shapes = {"score": 1, "covariance": 2, "hessian": 2}
    parts = {name: _part(sums, name, (dim,) * shapes[name]) for name in _FINAL}
    return FinalMessage(checks.count("examples", _whole(sums, "examples")), **parts)
