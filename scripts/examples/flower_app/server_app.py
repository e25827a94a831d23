"""The server: FedAvg, wrapped so that its metrics have intervals and its result a table."""

from __future__ import annotations

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from jaxlsgd.federation.flower import InferenceStrategy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and print the table."""
    config = context.run_config
    step = float(config["step-size"])
    strategy = InferenceStrategy(
        FedAvg(fraction_evaluate=0.0),
        E=int(config["local-steps"]),
        eta=lambda m: step * m**-0.505,
        rows="reused",  # hospitals go over the same patients again
        enough=float(config["sure-enough"]) or None,
    )
    start = ArrayRecord({"x": Array(np.zeros(3))})
    result = strategy.start(grid, start, num_rounds=int(config["rounds"]))
    print(result.table)
    print(*result.remarks, sep="\n")
