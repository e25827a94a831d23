"""NVFlare's client side: its rows stay here. All that leaves is listed in `jaxlsgd.federation.client`."""

from __future__ import annotations

import argparse

import numpy as np
import nvflare.client as flare

from jaxlsgd import federation


def main() -> None:
    """Take local steps in each round; in the last one, send the final message instead."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--eta", type=float)
    parser.add_argument("--steps", type=int)
    given = parser.parse_args()
    flare.init()
    site = flare.get_site_name()
    rng = np.random.default_rng(int(site.removeprefix("site-")))
    n = 300  # replace these rows by your own
    A = np.column_stack([np.ones(n), rng.standard_normal((n, 2))])
    y = (rng.random(n) < 1 / (1 + np.exp(-A @ [0.2, -0.5, 1.0]))).astype(float)
    while flare.is_running():
        model = flare.receive()
        x = np.asarray(model.params["numpy_key"], float)
        if model.current_round == model.total_rounds - 1:
            last = federation.final_message("logistic", (A, y), model.params["estimate"])
            params = {key: np.atleast_1d(one) * 1.0 for key, one in last._asdict().items()}
            flare.send(flare.FLModel(params=params, meta={"site": site, "final": True}))
            continue
        batches = rng.integers(n, size=(given.steps, 16))
        anchors = [np.asarray(model.params.get(key, x)) for key in ("now", "before")]
        hessians = bool(np.any(model.params.get("hessians", 0)))
        for batch in batches:
            off = 1 / (1 + np.exp(-A[batch] @ x)) - y[batch]
            x = x - given.eta * A[batch].T @ off / len(batch)
        rows = A[batches.ravel()], y[batches.ravel()]
        made = federation.round_message(
            "logistic",
            rows,
            anchors,
            round=int(np.sum(model.params.get("round", 1))),
            steps=given.steps,
            examples=n,
            hessians=hessians,
        )
        sums = {"gradient_sum": made.gradient_sum}
        if hessians:
            sums |= {"hessian": made.hessian, "hessian_before": made.hessian_before}
        meta = {"site": site, "final": False, "examples": n, "steps": given.steps}
        meta |= {"observations": made.observations, "answers": made.answers}
        flare.send(flare.FLModel(params={"numpy_key": x, **sums}, meta=meta))


if __name__ == "__main__":
    main()
