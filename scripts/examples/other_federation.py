"""A federated run that is not ours: NumPy arrays, one round at a time, clients of unequal weight.

The server has averages, and from each client a Hessian, as other frameworks can send. Nothing
here is traced or compiled by us but the update of the statistic. A plan is built from the E_m and η_m that were seen.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import jaxlsgd

WEIGHTS = np.array([0.5, 0.3, 0.2])
TRUTH = np.array([1.0, -2.0, 0.5])


class Client:
    """Somebody's own code: least squares on rows of its own."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.scale = 0.5 + 0.5 * seed

    def rows(self, n: int) -> tuple[Any, Any]:
        """Fresh rows."""
        A = self.scale * self.rng.standard_normal((n, 3))
        return A, A @ TRUTH + self.rng.standard_normal(n)

    def local_steps(self, x: Any, E: int, eta: float) -> Any:
        """E steps from the average."""
        x = x.copy()
        for _ in range(E):
            A, b = self.rows(4)
            x -= eta * A.T @ (A @ x - b) / 4
        return x

    def curvature(self) -> Any:
        """Hessian on fresh rows; of least squares it is the same everywhere."""
        A, _ = self.rows(4)
        return A.T @ A / 4


def main(rounds: int = 600) -> dict[str, jaxlsgd.Interval]:
    """Runs, and prints two methods beside each other."""
    clients = [Client(seed) for seed in range(3)]
    x = np.zeros(3)
    trackers = {
        method.name: jaxlsgd.track(method, x, rows="fresh")
        for method in (
            jaxlsgd.one_step(gradients="increments"),
            jaxlsgd.random_scaling("schedule"),
        )
    }
    states = {name: tracker.init(x) for name, tracker in trackers.items()}
    E_seen, eta_seen = [], []
    for m in range(1, rounds + 1):
        E = 1 if m <= rounds // 20 else 4
        eta = 0.4 * m**-0.505 / E
        x = WEIGHTS @ np.stack([client.local_steps(x, E, eta) for client in clients])
        hessian = np.tensordot(WEIGHTS, [client.curvature() for client in clients], 1)
        for name, tracker in trackers.items():
            states[name] = tracker.update(states[name], x, eta=eta, E=E, hessian=hessian)
        E_seen.append(E)
        eta_seen.append(eta)
    plan = jaxlsgd.Plan.from_arrays(E_seen, eta_seen)
    for name, tracker in trackers.items():
        print(tracker.table(states[name], plan=plan), end="\n\n")
    return {name: tracker.interval(states[name], plan=plan) for name, tracker in trackers.items()}


if __name__ == "__main__":
    main()
