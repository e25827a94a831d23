"""Flower: its messages, strategies and client apps as they are, with all nodes in one process."""

from __future__ import annotations

import copy
import functools
import itertools
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused

from jaxlsgd import Plan, algorithms, one_step
from jaxlsgd.inference import anchored_rounds

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
pytest.importorskip("flwr", reason="Flower is not installed: pip install flwr")
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAdam, FedAvg
from flwr.supercore.task_identity import TaskIdentity

from jaxlsgd.federation import broadcast, flatten
from jaxlsgd.federation.flower import InferenceMod, InferenceStrategy

METHOD = one_step()
EXAMPLES = (420, 840, 1260)
E, ROUNDS, DIM = 7, 60, 2


class OneProcess(Grid):
    """Calls the client apps of all nodes, one after the other."""

    def __init__(self, apps: list[Callable[[Message, Context], Message]]) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.apps = {10 + k: app for k, app in enumerate(apps)}
        self.asked: list[dict[str, Any]] = []

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any: ...

    def create_message(self, *args: Any, **kwargs: Any) -> Any: ...

    def push_messages(self, messages: Iterable[Message]) -> Any: ...

    def pull_messages(self, message_ids: Iterable[str]) -> Any: ...

    def get_node_ids(self) -> Iterable[int]:
        return list(self.apps)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            self.asked.append({**message.content["jaxlsgd.asked"], "node": node})
            context = Context(1, node, {"partition-id": node % 10}, RecordDict(), {})
            try:
                reply = self.apps[node](message, context)
            except TimeoutError:
                continue
            except Exception as error:
                reply = Message(Error(2, str(error)), reply_to=message)
            replies.append(reply)
        return replies


def rows_of(client: int, count: int = E * ROUNDS) -> tuple[np.ndarray, np.ndarray]:
    """Least squares; clients differ in their covariates and in their optima."""
    rng = np.random.default_rng(client)
    A = (1 + 0.5 * client) * rng.standard_normal((count, DIM))
    return A, A @ [1.0, client - 1.0] + rng.standard_normal(count)


def a_client(
    k: int, change: Callable[[int, dict[str, Any]], None] = lambda m, reply: None, **options: Any
) -> ClientApp:
    """Rows in their order, one per step; `change` spoils what its train function returns."""
    given: dict[str, Any] = {"least_rows": 0, **options}
    mod = InferenceMod("gaussian", rows=lambda context: rows_of(k), **given)
    app = ClientApp(mods=[mod])
    A, y = rows_of(k)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        assert set(message.content) == {"arrays", "config"}
        config = message.content["config"]
        x, m = message.content["arrays"]["x"].numpy(), config["server-round"]
        for i in range((m - 1) * E, (m - 1) * E + config["E"]):
            x = x - config["eta"] * A[i] * (A[i] @ x - y[i])
            mod.observed((A[i : i + 1], y[i : i + 1]))
        parts = {"x": x, "num-examples": EXAMPLES[k]}
        change(m, parts)
        metrics = MetricRecord({"num-examples": parts["num-examples"], "loss": 1.0})
        arrays = ArrayRecord({"x": Array(np.asarray(parts["x"]))})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app


def eta(m: int) -> float:
    return 0.3 * m**-0.505 / E


def run(
    apps: list[Any], rounds: int = ROUNDS, inner: Any = None, **options: Any
) -> tuple[InferenceStrategy, Any, OneProcess]:
    grid = OneProcess(apps)
    inner = FedAvg(fraction_evaluate=0.0) if inner is None else inner
    given: dict[str, Any] = {"E": E, "eta": eta, "rows": "fresh", **options}
    strategy = InferenceStrategy(inner, **given)
    start = ArrayRecord({"x": Array(np.zeros(DIM))})
    with jax.enable_x64(True):
        return strategy, strategy.start(grid, start, num_rounds=rounds), grid


def test_the_same_draws_give_the_same_numbers_as_plain_rounds():
    strategy, result, grid = run([a_client(k) for k in range(3)])
    weights = np.array(EXAMPLES) / sum(EXAMPLES)
    plan = Plan.from_arrays([E] * ROUNDS, [eta(m) for m in range(1, ROUNDS + 1)])
    chosen = anchored_rounds.hessian_rounds(plan.E, 3, DIM)
    A, y = (np.stack(part, 1) for part in zip(*(rows_of(k) for k in range(3)), strict=True))

    def loss(x: Any, row: Any) -> Any:
        return 0.5 * (jnp.sum(row[0] * x) - row[1]) ** 2

    rounds = algorithms.plain_rounds(loss, weights)
    with jax.enable_x64(True):
        state, statistics = rounds.init(jnp.zeros(DIM)), METHOD.init(jnp.zeros(DIM))
        update = jax.jit(METHOD.update)
        for m in range(ROUNDS):
            seen = A[m * E : (m + 1) * E], y[m * E : (m + 1) * E]
            anchors = METHOD.anchors(statistics)
            state, sync = rounds.round(state, seen, plan.eta[m], anchors, hessians=bool(chosen[m]))
            statistics = update(statistics, sync)
        found = METHOD.interval(statistics, 0.95)
    last = result.train_metrics_clientapp[ROUNDS]
    chex.assert_trees_all_close(result.arrays["x"].numpy(), np.asarray(sync.params), rtol=1e-12)
    # The strategy sees each client's noise by itself, and makes anchors between rounds.
    half = np.asarray(found.upper) - np.asarray(found.estimate)
    ours = [np.asarray(last[f"jaxlsgd.{name}"]) for name in ("lower", "estimate", "upper")]
    assert np.all(np.abs(ours[1] - np.asarray(found.estimate)) < 0.05 * half)
    chex.assert_trees_all_close(ours[2] - ours[0], 2 * half, rtol=0.1)
    asked = [one["hessians"] for one in grid.asked[::3]]
    assert asked == chosen.astype(bool).tolist()
    assert last["loss"] == pytest.approx(1.0)  # the wrapped strategy's own metrics
    assert set(strategy.took_part[0].examples.values()) == set(EXAMPLES)
    assert "x" in result.table and result.fit is None


def test_it_stops_when_it_is_sure_enough_and_asks_for_final_messages():
    strategy, result, grid = run(
        [a_client(k) for k in range(3)],
        rows="reused",
        enough=0.25,
        inner=FedAdam(fraction_evaluate=0.0),
    )
    stopped = result.stopped_after
    assert stopped is not None and 10 < stopped < ROUNDS
    metrics = result.train_metrics_clientapp
    assert max(metrics) == stopped and metrics[stopped]["jaxlsgd.sure-enough"] == 1
    assert metrics[stopped - 1]["jaxlsgd.sure-enough"] == 0
    assert np.isinf(metrics[1]["jaxlsgd.upper"]).all()
    final = [one["final"] for one in grid.asked]
    assert not any(final[: 3 * stopped]) and all(final[3 * stopped :])
    assert len(final) - 3 * stopped in (3, 6)  # again if the first were far from the minimiser
    # The minimiser of all rows, and its sandwich, without any row at the server.
    parts = [rows_of(k) for k in range(3)]
    H = sum(A.T @ A for A, _ in parts)
    exact = np.linalg.solve(H, sum(A.T @ y for A, y in parts))
    chex.assert_trees_all_close(result.fit.estimate, exact, rtol=1e-8)
    assert result.fit.about == "population"
    assert strategy.names[0] in result.table


def nan(m: int, reply: dict[str, Any]) -> None:
    reply["x"] = reply["x"] * np.nan


def no_rows(m: int, reply: dict[str, Any]) -> None:
    reply["num-examples"] = 0


def other_shape(m: int, reply: dict[str, Any]) -> None:
    reply["x"] = np.zeros(DIM + 1)


def leaves(m: int, reply: dict[str, Any]) -> None:
    if m > 1:
        raise TimeoutError


def fails(m: int, reply: dict[str, Any]) -> None:
    raise RuntimeError("out of memory")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (nan, "model: must be finite, got"),
        (no_rows, "num-examples: must be a whole number from 1"),
        (other_shape, "model: must have shape (2,), got (3,)"),
        (leaves, "no reply came"),
        (fails, "it failed: out of memory"),
    ],
)
def test_wrong_clients_are_left_out_with_words(change: Any, words: str):
    """The other two give the same run as they would without the third."""
    apps = [a_client(0), a_client(1)]
    strategy, result, _ = run([*apps, a_client(2, change)], rounds=3)
    last = strategy.took_part[-1]
    assert set(last.examples) == {10, 11} and words in last.left_out[12]
    assert any(words in one and "node 12" in one for one in result.remarks)
    assert result.train_metrics_clientapp[3]["jaxlsgd.left-out"] == 1
    if change is not leaves:
        _, alone, _ = run(apps, rounds=3)
        assert result.arrays["x"].numpy().tolist() == alone.arrays["x"].numpy().tolist()


def test_all_clients_may_fail_in_a_round():
    def once(m: int, reply: dict[str, Any]) -> None:
        if m == 2:
            raise RuntimeError("power cut")

    strategy, result, _ = run([a_client(k, once) for k in range(3)], rounds=3)
    assert len(strategy.took_part[1].left_out) == 3
    assert strategy.state.rounds == 2
    assert np.isfinite(result.arrays["x"].numpy()).all()


def test_a_client_without_the_mod_or_without_observed_rows():
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        records = {"arrays": message.content["arrays"], "m": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(records), reply_to=message)

    silent = ClientApp(mods=[InferenceMod("gaussian", rows=lambda context: rows_of(0))])
    silent.train()(train)
    strategy, result, _ = run([app, silent], rounds=1, rows="reused")
    left_out = strategy.took_part[0].left_out
    assert "reply: must have the sums that InferenceMod adds" in left_out[10]
    assert "train: must call observed(rows) in each local step" in left_out[11]
    assert result.fit is not None and "node 10" in result.remarks[-1]


def test_a_node_that_comes_back_under_another_id_is_the_same_client():
    """Client 2 is node 12 in odd rounds and node 22 in even ones."""
    grid_apps = [a_client(k) for k in range(3)]
    grid = OneProcess(grid_apps)
    weights = {str(k): EXAMPLES[k] for k in range(3)}
    strategy = InferenceStrategy(
        FedAvg(fraction_evaluate=0.0), E=E, eta=eta, rows="fresh", weights=weights
    )
    arrays = ArrayRecord({"x": Array(np.zeros(DIM))})
    config: Any = ConfigRecord()
    for m in range(1, 13):
        grid.apps = {10: grid_apps[0], 11: grid_apps[1], (12 if m % 2 else 22): grid_apps[2]}
        asked = strategy.configure_train(m, arrays, config, grid)
        found, _ = strategy.aggregate_train(m, grid.send_and_receive(asked))
        assert found is not None
        arrays = found
    state = strategy.state
    assert state is not None and set(state.clients) == {"0", "1", "2"}
    assert {one.n for one in state.clients.values()} == {state.clients["0"].n}
    assert not state.remarks and not any(one.left_out for one in strategy.took_part)
    assert set(strategy.took_part[-1].names) == {10, 11, 22}  # of this round's nodes, not of all
    # A second node with the name of one that is connected is refused.
    grid.apps[30] = lambda message, context: grid_apps[2](
        message, Context(1, 30, {"partition-id": 0}, RecordDict(), {})
    )
    asked = list(strategy.configure_train(13, arrays, config, grid))
    strategy.aggregate_train(13, grid.send_and_receive(asked))
    assert "which is connected" in strategy.took_part[-1].left_out[30]
    # So is one that comes back after another has taken its place, and that other goes on.
    grid.apps = {22: grid_apps[2], 12: grid_apps[2]}
    strategy.aggregate_train(
        14, grid.send_and_receive(strategy.configure_train(14, arrays, config, grid))
    )
    assert set(strategy.took_part[-1].examples) == {22}
    assert "which is connected" in strategy.took_part[-1].left_out[12]


@functools.cache
def before_hessians() -> tuple[InferenceStrategy, OneProcess, ArrayRecord]:
    """A run whose next round asks all clients for Hessians."""
    grid = OneProcess([a_client(k) for k in range(3)])
    strategy = InferenceStrategy(FedAvg(fraction_evaluate=0.0), E=E, eta=eta, rows="reused")
    arrays, config = ArrayRecord({"x": Array(np.zeros(DIM))}), ConfigRecord()
    for m in itertools.count(1):
        if m > 10 and broadcast(strategy.state).asks("2"):  # pyright: ignore[reportArgumentType]
            return strategy, grid, arrays
        replies = grid.send_and_receive(strategy.configure_train(m, arrays, config, grid))
        arrays = strategy.aggregate_train(m, replies)[0] or arrays
    raise AssertionError


def one_more(spoil: Callable[[Message], None]) -> tuple[InferenceStrategy, ArrayRecord]:
    """Return the strategy after a round in which the reply of node 12 is spoilt, and the model."""
    begun, grid, arrays = before_hessians()
    strategy = copy.copy(begun)
    strategy.took_part, strategy._clients = [], dict(begun._clients)
    strategy._nodes = dict(begun._nodes)
    asked = strategy.configure_train(ROUNDS, arrays, ConfigRecord(), grid)
    replies = sorted(grid.send_and_receive(asked), key=lambda one: one.metadata.src_node_id)
    spoil(replies[2])
    found, metrics = strategy.aggregate_train(ROUNDS, replies)
    assert found is not None and metrics is not None
    return strategy, found


def sums_with(**wrong: Any) -> Callable[[Message], None]:
    def spoil(reply: Message) -> None:
        record = {key: one.numpy() for key, one in reply.content.array_records["jaxlsgd"].items()}
        found = {key: one for key, one in {**record, **wrong}.items() if one is not None}
        reply.content["jaxlsgd"] = ArrayRecord(
            {key: Array(np.asarray(one)) for key, one in found.items()}
        )

    return spoil


def metrics_with(**wrong: Any) -> Callable[[Message], None]:
    def spoil(reply: Message) -> None:
        found = {"num-examples": EXAMPLES[2], "loss": 1.0, **wrong}
        reply.content["metrics"] = MetricRecord(
            {key: one for key, one in found.items() if one is not None}
        )

    return spoil


def records_with(**records: Any) -> Callable[[Message], None]:
    return lambda reply: reply.content.update(records)


def broken(reply: Message) -> None:
    array = reply.content.array_records["jaxlsgd"]["gradient_sum"]
    array.data = array.data[:-4]


NUMBERS = ("gradient_sum", "hessian", "hessian_before", "steps", "observations", "answers")
WRONG_SUMS = {
    "NaN": lambda value: value * np.nan,
    "infinity": lambda value: value + np.inf,
    "text": lambda value: np.full(value.shape, "1"),
    "bools": lambda value: np.ones(value.shape, bool),
    "complex": lambda value: value * 1j,
    "longer": lambda value: np.ones((*value.shape, 2)),
    "size": lambda value: value * 0 + 1e200,
    "missing": lambda value: None,
}
ODD = {
    "one more metric": metrics_with(accuracy=0.5),
    "one metric less": metrics_with(loss=None),
    "a metric that is a list": metrics_with(loss=[1.0, 2.0]),
    "a metric that is an empty list": metrics_with(loss=[]),
    "a metric that is NaN": metrics_with(loss=float("nan")),
    "no weight": metrics_with(**{"num-examples": None}),
    "a weight that is NaN": metrics_with(**{"num-examples": float("nan")}),
    "a weight that is a list": metrics_with(**{"num-examples": [1.0]}),
    "two records of metrics": records_with(more=MetricRecord({"loss": 1.0})),
    "two models": records_with(more=ArrayRecord({"x": Array(np.zeros(DIM))})),
    "a model of text": records_with(arrays=ArrayRecord({"x": Array(np.array(["1", "2"]))})),
    "a model far away": records_with(arrays=ArrayRecord({"x": Array(np.array([1e90, 0.0]))})),
    "another model": records_with(arrays=ArrayRecord({"z": Array(np.zeros(DIM))})),
    "the name of another": records_with(**{"jaxlsgd.client": ConfigRecord({"name": "1"})}),
    "another name": records_with(**{"jaxlsgd.client": ConfigRecord({"name": "7"})}),
    "a name of bytes": records_with(**{"jaxlsgd.client": ConfigRecord({"name": b"2"})}),
    "broken bytes": broken,
}


@pytest.mark.parametrize(
    "spoil",
    [
        *(
            pytest.param((field, way), id=f"{field}, {way}")
            for field, way in itertools.product(NUMBERS, WRONG_SUMS)
            if (field, way) != ("hessian", "missing")
        ),
        *(pytest.param(one, id=name) for name, one in ODD.items()),
    ],
)
def test_one_odd_reply_is_left_out_and_ends_nothing(spoil: Any):
    """The rest of the round is as if that client had not replied."""
    if isinstance(spoil, tuple):
        shape = {"gradient_sum": (DIM,), "hessian": (DIM, DIM), "hessian_before": (DIM, DIM)}
        value = WRONG_SUMS[spoil[1]](np.ones(shape.get(spoil[0], ())))
        spoil = sums_with(**{spoil[0]: value})
    strategy, model = one_more(spoil)
    assert set(strategy.took_part[0].left_out) == {12}
    assert "node 12: client 2 is left out: " in strategy.remarks[0]
    others = client_2_is_silent()
    np.testing.assert_array_equal(model["x"].numpy(), others[1]["x"].numpy())
    assert strategy.state is not None and others[0].state is not None
    assert strategy.state.clients.keys() == others[0].state.clients.keys()
    for name, one in others[0].state.clients.items():
        np.testing.assert_array_equal(strategy.state.clients[name].mean, one.mean)


def test_one_odd_reply_to_an_evaluation_ends_nothing(caplog: Any):
    strategy, grid, _ = before_hessians()
    asked = [Message(RecordDict(), dst_node_id=node, message_type="evaluate") for node in grid.apps]
    metrics = [{"num-examples": 10, "loss": 1.0}] * 2 + [{"num-examples": 10, "accuracy": 1.0}]
    replies = [
        Message(RecordDict({"m": MetricRecord(one)}), reply_to=message)
        for one, message in zip(metrics, asked, strict=True)
    ]
    nothing = Message(RecordDict(), reply_to=asked[2])
    wrong: list[dict[str, Any]] = [{"loss": value} for value in ([], [1.0], np.nan, np.inf, 1e200)]
    wrong += [{"num-examples": value} for value in (-20, 0, 0.5, np.nan, 10**18)]
    for change in wrong:
        record = MetricRecord({"num-examples": 10, "loss": 2.0, **change})
        replies.append(Message(RecordDict({"m": record}), reply_to=asked[2]))
    for last in (*replies[2:], nothing):
        caplog.clear()
        found = strategy.aggregate_evaluate(1, [*replies[:2], last])
        assert found is not None and found["loss"] == 1.0
        assert "node 12: client 2 is left out" in caplog.text


def test_models_far_away_are_named_however_few_take_part():
    """Two of three take part, so that only earlier rounds tell which of them is far away."""
    begun, grid, arrays = before_hessians()
    strategy = copy.copy(begun)
    strategy.took_part = []
    for size, left_out in ((1e3, set()), (1e30, {12})):
        asked = list(strategy.configure_train(ROUNDS, arrays, ConfigRecord(), grid))
        asked = sorted(asked, key=lambda one: one.metadata.dst_node_id)[1:]
        replies = list(grid.send_and_receive(asked))
        far = np.array([size * strategy._moves[-1], 0.0]) / 10 + arrays["x"].numpy()
        replies[1].content["arrays"] = ArrayRecord({"x": Array(far)})
        strategy.aggregate_train(ROUNDS, replies)
        assert set(strategy.took_part[-1].left_out) - {10} == left_out
    assert "model: must be at most 1000 times as far" in strategy.took_part[-1].left_out[12]
    assert np.isfinite(flatten(strategy.state.params)).all()


@functools.cache
def client_2_is_silent() -> tuple[InferenceStrategy, ArrayRecord]:
    return one_more(lambda reply: setattr(reply, "content", RecordDict()))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("covariance", -np.eye(DIM)),
        ("hessian", np.array([[1.0, 9.0], [-9.0, 1.0]])),
        ("score", np.full(DIM, np.nan)),
        ("examples", 10**15),
        ("answers", 7),
    ],
)
def test_a_wrong_final_message_is_left_out(field: str, value: Any):
    begun, grid, _ = before_hessians()
    strategy, right = copy.copy(begun), grid.apps[12]

    def wrong(message: Message, context: Context) -> Message:
        reply = right(message, context)
        sums_with(**{field: value})(reply)
        return reply

    strategy.took_part, spoilt = [], OneProcess([grid.apps[10], grid.apps[11], wrong])
    table, fit = strategy.finish(spoilt)
    assert fit is not None and set(fit.messages) == {"0", "1"}
    assert set(strategy.took_part[-1].left_out) == {12} and "client 2 is left out" in table


def test_a_good_reply_is_used():
    strategy, _ = one_more(lambda reply: None)
    assert not strategy.took_part[0].left_out and len(strategy.took_part[0].examples) == 3


def test_a_client_with_few_rows_keeps_its_hessian_to_itself():
    mod = InferenceMod("gaussian", rows=lambda context: rows_of(0, 19))
    app = ClientApp(mods=[mod])
    app.train()(lambda message, context: Message(RecordDict(), reply_to=message))
    strategy, _, grid = run([a_client(0), a_client(1)], rounds=ROUNDS, rows="reused")
    grid.apps[12] = app
    with jax.enable_x64(True):
        table, fit = strategy.finish(grid)
    assert "at least 20 different rows" in strategy.took_part[-1].left_out[12]
    assert set(fit.messages) == {"0", "1"} and "12" in table


@pytest.mark.parametrize(
    ("options", "examples", "argument"), [({}, 100, "rows"), ({"least_rows": E}, E - 1, "examples")]
)
def test_hessians_of_a_round_with_few_rows_are_not_sent(
    options: dict[str, Any], examples: int, argument: str
):
    def few(m: int, reply: dict[str, Any]) -> None:
        reply["num-examples"] = examples

    asked = {"least_rows": None, **options}
    strategy, _, grid = run([a_client(0, few, **asked), a_client(1)], rounds=ROUNDS)
    due = [bool(one["hessians"]) for one in grid.asked if one["node"] == 10]
    refused = [10 in one.left_out for one in strategy.took_part[:ROUNDS]]
    assert due[:ROUNDS] == refused and any(due)
    words = {one.left_out[10] for one in strategy.took_part if 10 in one.left_out}
    assert all(f"{argument}: must be at least" in one for one in words)


def test_bad_input():
    with refused("strategy", "type", "'FedAvg'"):
        InferenceStrategy("FedAvg", E=1, eta=0.1, rows="fresh")  # pyright: ignore[reportArgumentType]
    for wrong, why in [
        ({"E": 0}, ("E", "value")),
        ({"eta": -1.0}, ("eta", "value")),
        ({"rows": "some"}, ("rows", "choice")),
        ({"clients": "few"}, ("clients", "choice")),
        ({"enough": 0.0}, ("enough", "value")),
    ]:
        given: dict[str, Any] = {"E": 1, "eta": 0.1, "rows": "fresh", **wrong}
        with refused(*why):
            InferenceStrategy(FedAvg(), **given)
    with refused("loss", "choice"):
        InferenceMod("probit", rows=rows_of)
    with pytest.raises(TypeError, match="rows"):
        InferenceStrategy(FedAvg(), E=1, eta=0.1)  # pyright: ignore[reportCallIssue]


def test_the_guide_shows_lines_of_the_example():
    root = Path(__file__).parent.parent / "scripts"
    guide = (root / "guides" / "flower.md").read_text("utf-8")
    apps = [(root / "examples" / "flower_app" / f"{name}_app.py") for name in ("server", "client")]
    shown = re.findall(r"^```python\n(.*?)^```$", guide, re.M | re.S)
    for block, path in zip(shown, apps, strict=True):
        rest = [line.strip() for line in path.read_text("utf-8").splitlines()]
        for line in filter(None, map(str.strip, block.splitlines())):
            assert line in rest, line
            rest = rest[rest.index(line) + 1 :]
