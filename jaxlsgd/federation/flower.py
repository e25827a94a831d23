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
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from logging import INFO, WARNING
from typing import Any

import jax
import numpy as np

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal
from jaxlsgd.federation import client
from jaxlsgd.federation.client import FinalMessage, RoundMessage

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
    from flwr.common.logger import log
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import Result, Strategy
except ImportError as error:
    raise ImportError("jaxlsgd.federation.flower needs Flower: pip install 'jaxlsgd[flower]'") from error

SENT = "jaxlsgd"  # the ArrayRecord of anchors, and of a client's sums
ASKED = "jaxlsgd.asked"  # the ConfigRecord of what a client is asked for
E_KEY, ETA_KEY = "E", "eta"  # in the ConfigRecord that a train function reads
_RAISED = 2  # Flower's code for an exception in a ClientApp
_ROUND = ("gradient_sum", "hessian", "hessian_before")
_FINAL = ("score", "covariance", "hessian")

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
            checks.choice("loss", loss, tuple(client.FAMILIES))
        if not callable(rows):
            raise refusal("rows", "be a function of the context", rows)
        self.loss, self.rows = loss, rows
        self.options: dict[str, Any] = {"numbers": tuple(numbers), "few_rows": few_rows}
        # Clients in one process may run in threads, and each has its own round.
        self._steps: contextvars.ContextVar[list[client.Rows]] = contextvars.ContextVar("steps")

    def observed(self, rows: client.Rows) -> None:
        """Record the rows of one local step; all steps of a round have equally many."""
        if (steps := self._steps.get(None)) is not None:
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
        token = self._steps.set([])
        try:
            reply = call_next(message, context)
            if not reply.has_error():
                reply.content[SENT] = self._sums(self._steps.get(), anchors, bool(asked["hessians"]))
        except ValueError as error:
            return _failed(message, error)
        finally:
            self._steps.reset(token)
        return reply

    def _sums(self, steps: list[client.Rows], anchors: list[Arrays], hessians: bool) -> ArrayRecord:
        if not steps:
            raise refusal("train", "call observed(rows) in each local step", "no call")
        sizes = {np.shape(jax.tree.leaves(rows)[0])[0] for rows in steps}
        if len(sizes) > 1:
            raise refusal("observed", "have equally many rows in each step", sorted(sizes))
        rows = jax.tree.map(lambda *parts: np.concatenate(parts), *steps)
        made = client.round_message(
            self.loss, rows, anchors, steps=len(steps), examples=1, hessians=hessians, **self.options
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
    return _record({**{name: getattr(message, name) for name in _FINAL}, "examples": message.examples})


def _record(parts: Mapping[str, Any]) -> ArrayRecord:
    return ArrayRecord({key: Array(np.asarray(value)) for key, value in parts.items()})


def _with_prefix(record: ArrayRecord, prefix: str) -> Arrays:
    keys = [key for key in record if key.startswith(prefix)]
    return {key.removeprefix(prefix): record[key].numpy() for key in keys}


def _failed(message: Message, error: Exception) -> Message:
    return Message(Error(code=_RAISED, reason=str(error)), reply_to=message)
