"""A hospital: its rows stay here. All that leaves is listed in `jaxlsgd.federation.client`."""

from __future__ import annotations

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from jaxlsgd.federation.flower import InferenceMod


def load(context: Context) -> tuple[np.ndarray, np.ndarray]:
    """Return this hospital's rows: intercept, age and dose, and who recovered. Replace this by your own."""
    rng = np.random.default_rng(int(context.node_config["partition-id"]))
    n = 300
    A = np.column_stack([np.ones(n), rng.standard_normal((n, 2))])
    y = rng.random(n) < 1 / (1 + np.exp(-A @ [0.2, -0.5, 1.0]))
    return A, y.astype(float)


mod = InferenceMod("logistic", rows=load)
app = ClientApp(mods=[mod])


@app.train()
def train(message: Message, context: Context) -> Message:
    """Take E local steps from the server's model, with rows that are drawn anew in each."""
    A, y = load(context)
    config = message.content["config"]
    x = message.content["arrays"]["x"].numpy()
    rng = np.random.default_rng([int(context.node_config["partition-id"]), config["server-round"]])
    for _ in range(config["E"]):
        batch = rng.integers(len(y), size=int(context.run_config["batch"]))
        rows = A[batch], y[batch]
        x = x - config["eta"] * rows[0].T @ (1 / (1 + np.exp(-rows[0] @ x)) - rows[1]) / len(batch)
        mod.observed(rows)
    metrics = MetricRecord({"num-examples": len(y)})
    return Message(
        RecordDict({"arrays": ArrayRecord({"x": Array(x)}), "metrics": metrics}), reply_to=message
    )
