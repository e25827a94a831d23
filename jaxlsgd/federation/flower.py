"""Intervals in a federation that Flower runs: a strategy that wraps yours, and a mod for its clients.

`InferenceStrategy` wraps any `flwr.serverapp.strategy.Strategy`, as Flower's differential privacy does. Each train message
carries the server's anchors and whether Hessians are asked for; `InferenceMod` takes them out before your train function
sees the message, and adds the client's sums to its reply. The strategy takes these out again before yours averages the
models, so that strategies which refuse a second `ArrayRecord` (FedAvg does) work unchanged, and so do robust or adaptive
ones: the intervals do not depend on how models are averaged.

Sums are kept by client, so that a client needs a name that stays: its node may come back under a new id. The mod sends
one with each reply.

What leaves a client is what `jaxlsgd.federation.client` lists, no more. `InferenceMod` must stand first among the mods, or
another one, such as local differential privacy, would see two `ArrayRecord`s; that one then protects the model only.
"""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import jax
import numpy as np

from jaxlsgd.core import checks
from jaxlsgd.core.checks import Refusal, refusal
from jaxlsgd.federation import client, server, validate
from jaxlsgd.federation.client import FinalMessage, RoundMessage
from jaxlsgd.federation.final import CLIENTS, FederationFit, finish
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
CLIENT = "jaxlsgd.client"  # the ConfigRecord with the client's "name"
E_KEY, ETA_KEY = "E", "eta"  # in the ConfigRecord that a train function reads
_RAISED = 2  # Flower's code for an exception in a ClientApp
_PARTITION = "partition-id"  # in the node's config
_EXAMPLES = "num-examples"  # Flower's own metric for rows
_ROUND = ("gradient_sum", "hessian", "hessian_before")
_ROUND_COUNTS = ("steps", "answers", "observations")
# Final messages are asked for again at the estimate that they give, up to four times in all, while that is further than
# this from where they were evaluated, in standard errors.
FINAL_MESSAGES, CLOSE = 4, 0.1
RECENT = (
    99  # replies of earlier rounds with which a model's step is compared, besides those of its own
)
_FINAL = ("examples", "score", "covariance", "hessian", "answers")
# The rows of the local steps of the round that is under way. Clients in one process may run in threads, and a simulation
# pickles client apps, so that a mod has no such variable of its own.
_STEPS: contextvars.ContextVar[list[client.Rows] | None] = contextvars.ContextVar(
    "_STEPS", default=None
)

Arrays = dict[str, np.ndarray]
Key = TypeVar("Key", str, int)


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
      least_rows: different rows that Hessians need, as in `client.final_message` and `client.round_message`. How many rows
        the client has is read from the metric "num-examples" of its reply.
      name: `context → name` of the client, which must stay the same if its node comes back; the node's "partition-id" if
        None, or else its id, which does not stay.

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
        least_rows: int | None = None,
        name: Callable[[Context], str] | None = None,
    ) -> None:
        if not callable(loss):
            checks.choice("loss", loss, tuple(losses.FAMILIES))
        if not callable(rows):
            raise refusal("rows", "be a function of the context", rows, code="type")
        if name is not None and not callable(name):
            raise refusal("name", "be a function of the context", name, code="type")
        self.loss, self.rows, self.name = loss, rows, _node_name if name is None else name
        self.options: dict[str, Any] = {"numbers": tuple(numbers), "least_rows": least_rows}

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
                reply.content[SENT] = self._sums(steps, anchors, asked, reply)
                reply.content[CLIENT] = self._named(context)
        except ValueError as error:
            return _failed(message, error)
        finally:
            _STEPS.reset(token)
        return reply

    def _named(self, context: Context) -> ConfigRecord:
        return ConfigRecord({"name": str(self.name(context))})

    def _sums(
        self, steps: list[client.Rows], anchors: list[Arrays], asked: ConfigRecord, reply: Message
    ) -> ArrayRecord:
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
            round=int(cast(int, asked["round"])),
            steps=len(steps),
            examples=_own_examples(reply, len(steps) * sizes.pop()),
            hessians=bool(asked["hessians"]),
            **self.options,
        )
        return round_record(made)

    def _final(self, message: Message, context: Context, params: Arrays) -> Message:
        try:
            made = client.final_message(self.loss, self.rows(context), params, **self.options)
        except ValueError as error:
            return _failed(message, error)
        records = {SENT: final_record(made), CLIENT: self._named(context)}
        return Message(RecordDict(records), reply_to=message)


def _node_name(context: Context) -> str:
    return str(context.node_config.get(_PARTITION, context.node_id))


def _own_examples(reply: Message, otherwise: int) -> int:
    """Return how many rows a client says that it has, in the metric that Flower weights by unless told another."""
    found = [one.get("num-examples") for one in reply.content.metric_records.values()]
    usable = [int(one) for one in found if isinstance(one, int | float) and 1 <= one < 2**53]
    return usable[0] if usable else otherwise


def round_record(message: RoundMessage) -> ArrayRecord:
    """Return a client's sums as the `ArrayRecord` "jaxlsgd" of its reply, for clients without `InferenceMod`.

    Such a client sends its name as well, in the `ConfigRecord` "jaxlsgd.client"; without one it has its node's id.
    """
    names = (*_ROUND, *_ROUND_COUNTS)
    return _record({name: part for name in names if (part := getattr(message, name)) is not None})


def final_record(message: FinalMessage) -> ArrayRecord:
    """Return a client's final message as the `ArrayRecord` "jaxlsgd" of its reply."""
    return _record({name: getattr(message, name) for name in _FINAL})


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
    fit: FederationFit | None = None  # from the final messages; None if rows are fresh
    stopped_after: int | None = None  # the round in which the run was sure enough
    remarks: tuple[str, ...] = ()  # who was left out, and why


class TakingPart(NamedTuple):
    """Who took part in a round."""

    server_round: int  # 0 for the final messages
    examples: Mapping[int, float]  # by node
    left_out: Mapping[int, str]  # by node, why
    names: Mapping[int, str]  # of these nodes' clients, as far as they are known

    @property
    def when(self) -> str:
        """The round in words."""
        return f"round {self.server_round}" if self.server_round else "final message"

    @property
    def remarks(self) -> tuple[str, ...]:
        """Who was left out, and why, in sentences."""
        return tuple(
            f"{self.when}: node {node}: {validate.left_out(self.names.get(node, node), reason)}"
            for node, reason in self.left_out.items()
        )


class InferenceStrategy(Strategy):
    """Wraps a strategy, and adds intervals to its metrics and a table to its result.

    The server sends E and η to clients, in the `ConfigRecord` that their train function reads. Replies that cannot be used (not
    finite, of another shape, of another round, without rows or sums, or with other metrics than most) are left out with a
    warning that names client, node and reason, before the wrapped strategy averages; failed replies and missing ones are recorded and survived. The metrics of each
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
      weights: p_k of all clients by name, for the intervals; see `jaxlsgd.federation.begin`.

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
        weights: Mapping[str, float] | None = None,
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
        self.clients = checks.choice("clients", clients, CLIENTS)
        self.level = checks.level(level)
        self.enough = None if enough is None else checks.positive("enough", enough)
        self.weighted_by_key = weighted_by_key or getattr(strategy, "weighted_by_key", _EXAMPLES)
        self.weights = server.checked_weights(weights)
        self.state: server.ServerState | None = None
        self.took_part: list[TakingPart] = []
        self.stopped_after: int | None = None
        self._asked: dict[int, bool] = {}  # nodes of this round, whether for Hessians
        self._clients: dict[int, str] = {}  # names by node
        self._nodes: dict[str, int] = {}  # the last node by name
        self._moves: tuple[float, ...] = ()  # lengths of the last steps of clients' models
        self._connected: set[int] = set()
        self._layouts: dict[str, Layout] = {}  # of the last replies, by kind

    @property
    def names(self) -> tuple[str, ...]:
        """One name per parameter, in the order of all lists of numbers."""
        return self._begun().tracker.names

    @property
    def remarks(self) -> tuple[str, ...]:
        """Who was left out, and why, one sentence per round and reason; and what else there is to say of clients."""
        told = [remark for one in self.took_part for remark in one.remarks]
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
            self.state = server.begin(_params(arrays), rows=self.rows, weights=self.weights)
        config[E_KEY] = checks.count("E", self.E(server_round))
        config[ETA_KEY] = checks.positive("eta", self.eta(server_round))
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        sent, self._asked = server.broadcast(self.state), {}
        self._connected = set(grid.get_node_ids())
        for message in messages:
            node = message.metadata.dst_node_id
            name = self._clients.get(node)
            due = sent.hessians if name is None else sent.asks(name)
            self._asked[node] = due
            message.content = _asking(message.content, sent, hessians=due)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Take the clients' sums out of their replies, let the wrapped strategy average, and add intervals."""
        state = self._begun()
        if self.stopped_after is not None:
            return None, None
        left_out: dict[int, str] = {}
        failed: list[Message] = []
        came: dict[str, Message] = {}
        sums: dict[str, RoundMessage] = {}
        for reply in replies:
            node = reply.metadata.src_node_id
            if reply.has_error():
                left_out[node] = f"it failed: {reply.error.reason}"
                failed.append(reply)  # which strategies count and log
                continue
            try:
                name = self._name(reply)
                if name in came:
                    raise refusal("reply", "be the client's only one", "another", code="duplicate")
                sums[name], came[name] = self._read(reply, state, name), reply
            except Exception as error:  # whatever a client's records raise when they are read
                left_out[node] = str(error)
        used, refused = server.usable(state, sums)
        odd = self._odd("train", {name: came[name].content for name in used})
        odd |= self._far({name: one for name, one in used.items() if name not in odd}, state.params)
        for name, why in {**refused, **odd}.items():
            left_out[came[name].metadata.src_node_id] = str(why)
            used.pop(name, None)
        nodes = {came[name].metadata.src_node_id: one for name, one in used.items()}
        missing = self._asked.keys() - nodes.keys() - left_out.keys()
        left_out.update(dict.fromkeys(sorted(missing), "no reply came"))
        examples = {node: one.examples for node, one in nodes.items()}
        self._record_part(server_round, examples, left_out)
        passed = [*failed, *(came[name] for name in used)]
        arrays, metrics = self.strategy.aggregate_train(server_round, passed)
        if used:
            params = state.params if arrays is None else _params(arrays)
            self.state = server.receive(state, used, eta=self.eta(server_round), params=params)
        return arrays, self._with_intervals(server_round, metrics, len(used), len(left_out))

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
        """Aggregate as the wrapped strategy does, without replies whose metrics are not like those of most."""
        if self.stopped_after is not None and server_round > self.stopped_after:
            return None
        came = list(replies)
        contents = {i: one.content for i, one in enumerate(came) if not one.has_error()}
        odd = self._odd("evaluate", contents)
        for i, why in odd.items():
            node = came[i].metadata.src_node_id
            reason = validate.left_out(self._clients.get(node, node), why)
            LOG.warning("round %d, evaluation: node %d: %s", server_round, node, reason)
        used = [one for i, one in enumerate(came) if i not in odd]
        return self.strategy.aggregate_evaluate(server_round, used)

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

    def finish(self, grid: Grid, *, timeout: float = 3600) -> tuple[str, FederationFit | None]:
        """Return the table, and what it was made from; for loops that are not `start`."""
        state = self._begun()
        if self.rows == "fresh":
            return self._table_of_rounds(state), None
        x, fit = server.estimate(state), None
        for _ in range(FINAL_MESSAGES):
            final, silent = self._ask_for_final(grid, x, timeout)
            if not final:
                told = "No client sent a final message: nothing is said about the population."
                return f"{self._table_of_rounds(state)}\n{told}", None
            fit = finish(
                x,
                final,
                clients=self.clients,
                weights=self.weights,
                expected=list(self.weights or sorted({*final, *silent, *state.examples})),
                level=self.level,
            )
            if fit.remainder <= CLOSE:
                break
            x = fit.params
        return str(fit), fit

    def _ask_for_final(
        self, grid: Grid, x: Arrays, timeout: float
    ) -> tuple[dict[str, FinalMessage], list[str]]:
        """Return the final messages of clients at x, and the names of those without one."""
        nodes = sorted(grid.get_node_ids())
        self._connected = set(nodes)
        content = _asking(RecordDict(), server.Broadcast(0, (x, x), False, frozenset()), final=True)
        asked = [Message(content, dst_node_id=one, message_type=MessageType.TRAIN) for one in nodes]
        final: dict[str, FinalMessage] = {}
        left_out: dict[int, str] = {}
        sent: dict[int, float] = {}
        for reply in grid.send_and_receive(asked, timeout=timeout):
            node = reply.metadata.src_node_id
            try:
                name, message = self._read_final(reply, x)
                if name in final:
                    raise refusal("reply", "be the client's only one", "another", code="duplicate")
                final[name], sent[node] = message, message.examples
            except Exception as error:  # whatever a client's records raise when they are read
                left_out[node] = str(error)
        for node in nodes:
            if node not in sent:
                left_out.setdefault(node, "no reply came")
        self._record_part(0, sent, left_out)
        return final, [self._clients.get(node, str(node)) for node in left_out]

    def _record_part(
        self, server_round: int, examples: Mapping[int, float], left_out: Mapping[int, str]
    ) -> None:
        nodes = (*examples, *left_out)
        names = {node: self._clients[node] for node in nodes if node in self._clients}
        part = TakingPart(server_round, examples, left_out, names)
        for remark in part.remarks:
            LOG.warning("%s", remark)
        self.took_part.append(part)

    def _table_of_rounds(self, state: server.ServerState) -> str:
        if state.rounds < 2:
            return "No interval: fewer than two rounds had a reply that could be used."
        notes = [f"note: {remark}" for remark in state.remarks]
        return "\n".join([state.tracker.table(state.tracked, self.level), *notes])

    def _begun(self) -> server.ServerState:
        if self.state is None:
            raise refusal("strategy", "have had a round", "none", code="missing")
        return self.state

    def _name(self, reply: Message) -> str:
        """Return the name of the client that replies; refuse one that another connected node has."""
        node = reply.metadata.src_node_id
        record = reply.content.config_records.get(CLIENT)
        name = str(node) if record is None else record.get("name")
        if not isinstance(name, str) or not name:
            raise refusal("name", "be text", name, code="type")
        other = self._nodes.get(name, node)
        if other != node and other in self._connected:
            rule = f"not be that of node {other}, which is connected"
            raise refusal("name", rule, name, code="duplicate")
        if self._clients.setdefault(node, name) != name:
            raise refusal("name", f"stay {self._clients[node]!r}", name, code="untrusted")
        self._nodes[name] = node
        return name

    def _read(self, reply: Message, state: server.ServerState, name: str) -> RoundMessage:
        """Return a client's sums, and take them out of its reply; refuse what has none."""
        content = reply.content
        if SENT not in content.array_records:
            raise refusal("reply", "have the sums that InferenceMod adds", "none", code="untrusted")
        sums = {key: one.numpy() for key, one in content.array_records[SENT].items()}
        records = {key: one for key, one in content.items() if key not in (SENT, CLIENT)}
        reply.content = RecordDict(records)
        models = list(reply.content.array_records.values())
        if len(models) != 1:
            raise refusal(
                "reply", "have one ArrayRecord with the model", len(models), code="untrusted"
            )
        model = validate.model_like("model", _params(models[0]), state.params)
        node, sent = reply.metadata.src_node_id, server.broadcast(state)
        if self._asked.get(node) and not sent.asks(name):  # asked before its name was known
            sums = {key: one for key, one in sums.items() if key not in _ROUND[1:]}
        elif sent.asks(name) and _ROUND[1] not in sums:
            have = f"have {_ROUND[1]}, which was asked for"
            raise refusal("reply", have, sorted(sums), code="untrusted")
        parts: dict[str, Any] = {key: sums.get(key) for key in (*_ROUND, *_ROUND_COUNTS)}
        return RoundMessage(model, _weight(reply, self.weighted_by_key), **parts)

    def _far(self, sums: Mapping[str, RoundMessage], model: Any) -> dict[str, Refusal]:
        """Return clients whose models are implausibly far from the server's: their average would end the run."""
        before = client.flatten(model)
        steps = {
            n: float(np.linalg.norm(client.flatten(m.params) - before)) for n, m in sums.items()
        }
        compared = (*self._moves, *steps.values())
        usual = float(np.median(compared)) if len(compared) > 2 else 0.0
        rule = f"be at most {validate.UNLIKE:g} times as far from the server's as the median model"
        far = {
            name: refusal("model", rule, float(f"{step / usual:.2g}"), code="untrusted")
            for name, step in steps.items()
            if step > validate.UNLIKE * usual > 0
        }
        near = tuple(step for name, step in steps.items() if name not in far)
        self._moves = (*self._moves, *near)[-RECENT:]
        return far

    def _odd(self, kind: str, contents: Mapping[Key, RecordDict]) -> dict[Key, Refusal]:
        """Return the replies that strategies cannot average: their records are not like those of most, or not finite."""
        layouts = {key: _layout(content) for key, content in contents.items()}
        count = collections.Counter(layouts.values())
        if not count:
            return {}
        old = self._layouts.get(kind)
        usual = self._layouts[kind] = max(count, key=lambda one: (count[one], one == old))
        odd: dict[Key, Refusal] = {}
        for key, layout in layouts.items():
            try:
                if layout != usual:
                    same = layout.keys == usual.keys
                    rule = f"have the {'lengths' if same else 'keys'} of most, {usual[1 + same]}"
                    raise refusal("metrics", rule, layout[1 + same], code="untrusted")
                for record in contents[key].metric_records.values():
                    _check_metrics(record, self.weighted_by_key)
            except Refusal as error:
                odd[key] = error
        return odd

    def _read_final(self, reply: Message, x: Arrays) -> tuple[str, FinalMessage]:
        """Return a client's name and final message."""
        if reply.has_error():
            raise Refusal(f"it failed: {reply.error.reason}", "reply", "missing")
        if SENT not in reply.content.array_records:
            rule = "have the final message that InferenceMod sends"
            raise refusal("reply", rule, "none", code="untrusted")
        name, state = self._name(reply), self._begun()
        if state.weights is not None and name not in state.weights:
            raise refusal("name", "be one of those in weights", name, code="unknown")
        sums = {key: one.numpy() for key, one in reply.content.array_records[SENT].items()}
        parts: dict[str, Any] = {key: sums.get(key) for key in _FINAL}
        rows = state.examples.get(name) if self.weighted_by_key == _EXAMPLES else None
        flat = client.flatten(x)
        made = FinalMessage(**parts)
        return name, validate.final_message(made, flat.size, client.digest(x), rows)

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
    sent: server.Broadcast,
    *,
    hessians: bool = False,
    final: bool = False,
) -> RecordDict:
    """Return a message's content with the anchors in it; a strategy may give all its messages one content."""
    now, before = sent.anchors
    arrays = {f"anchor:{key}": value for key, value in now.items()}
    if hessians:
        arrays |= {f"before:{key}": value for key, value in before.items()}
    asked = ConfigRecord({"hessians": hessians, "final": final, "round": sent.round})
    return RecordDict({**dict(content.items()), SENT: _record(arrays), ASKED: asked})


class Layout(NamedTuple):
    """What strategies want to be the same in all replies that they average."""

    records: tuple[str, ...]
    keys: tuple[str, ...]  # of metrics
    lengths: tuple[int, ...]  # of metrics that are lists; -1 for numbers


def _layout(content: RecordDict) -> Layout:
    records = content.metric_records.values()
    metrics = sorted(
        (item for record in records for item in record.items()), key=lambda one: one[0]
    )
    lengths = tuple(len(value) if isinstance(value, list) else -1 for _, value in metrics)
    names = (*content.array_records, *content.metric_records)
    return Layout(names, tuple(key for key, _ in metrics), lengths)


def _check_metrics(record: MetricRecord, weight: str) -> None:
    """Refuse metrics that are not finite, and a weight that is not a whole number from 1."""
    for key, value in record.items():
        if key == weight:
            validate.whole(key, value)
        else:
            validate.real(key, value, np.shape(value))


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
    return validate.whole(key, records[0][key])
