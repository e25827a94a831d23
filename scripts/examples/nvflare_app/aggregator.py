"""NVFlare's server side: averages models, and keeps what intervals need."""

from __future__ import annotations

import numpy as np
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator

from jaxlsgd import federation


class InferenceAggregator(ModelAggregator):
    """Federated averaging; the last round brings the final messages, from which a table is written to a file.

    The model travels as "numpy_key", as NVFlare's NumPy recipe names it, and beside it the anchors, whether Hessians are
    due, and the estimate so far.
    """

    def __init__(self, eta: float, table: str) -> None:
        super().__init__()
        self.eta, self.table = eta, table
        self.state: federation.ServerState | None = None
        self.received: dict[str, FLModel] = {}

    def accept_model(self, model: FLModel) -> None:
        """Keep a client's message until the round is over."""
        self.received[str((model.meta or {})["site"])] = model

    def aggregate_model(self) -> FLModel:
        """Return the next model with anchors; after the last round, write the table."""
        metas = {name: model.meta or {} for name, model in self.received.items()}
        params = {name: model.params or {} for name, model in self.received.items()}
        if any(meta["final"] for meta in metas.values()):
            return self._finish(params)
        weights = np.array([meta["examples"] for meta in metas.values()], float)
        stacked = np.stack([one["numpy_key"] for one in params.values()])
        mean = weights @ stacked / weights.sum()
        if self.state is None:
            self.state = federation.begin(np.zeros_like(mean), rows="reused")
        messages = {
            name: federation.RoundMessage(
                None,
                metas[name]["examples"],
                metas[name]["steps"],
                one["gradient_sum"],
                metas[name]["answers"],
                one.get("hessian"),
                one.get("hessian_before"),
                metas[name]["observations"],
            )
            for name, one in params.items()
        }
        self.state = federation.receive(self.state, messages, eta=self.eta, params=mean)
        sent = federation.broadcast(self.state)
        now, before = (np.asarray(one) for one in sent.anchors)
        found = np.asarray(federation.estimate(self.state))
        # One model goes to all sites, which all take part: Hessians are due from all or from none.
        flags = np.array([float(any(map(sent.asks, messages)))])
        told = {"numpy_key": mean, "now": now, "before": before, "hessians": flags}
        told["round"] = np.array([float(sent.round)])
        return FLModel(params={**told, "estimate": found})

    def reset_stats(self) -> None:
        """Forget the messages of the round."""
        self.received = {}

    def _finish(self, params: dict[str, dict[str, np.ndarray]]) -> FLModel:
        assert self.state is not None
        final = {
            name: federation.FinalMessage(
                int(one["examples"][0]),
                one["score"],
                one["covariance"],
                one["hessian"],
                int(one["answers"][0]),
            )
            for name, one in params.items()
        }
        found = federation.finish(self.state, final)
        with open(self.table, "w", encoding="utf-8") as file:
            file.write(f"{found}\n")
        return FLModel(params={"numpy_key": found.estimate})
