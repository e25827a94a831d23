"""Runs the app in NVFlare's simulator, and prints the table: `python scripts/examples/nvflare_app/job.py`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from aggregator import InferenceAggregator
from nvflare.app_common.np.recipes.fedavg import NumpyFedAvgRecipe
from nvflare.recipe import SimEnv


def main(clients: int = 2, rounds: int = 16, steps: int = 40, eta: float = 0.1) -> str:
    """Return the table."""
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "table"
        recipe = NumpyFedAvgRecipe(
            name="hospitals",
            model=[0.0, 0.0, 0.0],
            min_clients=clients,
            num_rounds=rounds,
            train_script=str(Path(__file__).parent / "client.py"),
            train_args=f"--eta {eta} --steps {steps}",
            aggregator=InferenceAggregator(eta, str(table)),
        )
        recipe.execute(SimEnv(num_clients=clients, workspace_root=folder))
        return table.read_text("utf-8")


if __name__ == "__main__":
    print(main())
