"""Federated algorithms as their papers write them: slow float64 loops in NumPy, one function each.

Nothing here is taken from the package. Clients move one by one and step by step; only the data are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

Vector = np.ndarray


class Data(NamedTuple):
    """Observations (a, b) of a linear model, and the plan they are used under."""

    a: np.ndarray  # (t_T, K, d)
    b: np.ndarray  # (t_T, K)
    weights: np.ndarray  # (K,)
    init: Vector  # (d,)
    E: np.ndarray  # (T,)
    eta: np.ndarray  # (T,)
    own: np.ndarray  # (T, K) a uniform number for each client and round
    words: np.ndarray  # (T, n) words that everybody sees in a round

    def rounds(self) -> Iterator[tuple[int, int, float]]:
        """First observation, local steps and step size of each round."""
        begins = np.concatenate([[0], np.cumsum(self.E)])
        yield from zip(begins[:-1].tolist(), self.E.tolist(), self.eta.tolist(), strict=True)

    def mean(self, values: list[Vector]) -> Vector:
        """Σ_k p_k v_k."""
        return sum(p * value for p, value in zip(self.weights, values, strict=True))


def walk(
    data: Data,
    k: int,
    t: int,
    E: int,
    eta: float,
    x: Vector,
    direction: Callable[[Vector, Vector], Vector] = lambda g, x: g,
) -> Vector:
    """Where client k is after E local steps from x, beginning with observation t."""
    for a, b in zip(data.a[t : t + E, k], data.b[t : t + E, k], strict=True):
        x = x - eta * direction((a @ x - b) * a, x)
    return x


def local_sgd(data: Data) -> np.ndarray:
    """McMahan and others (2017); the paper's Algorithm 1. Returns x̄ after each round, (T, d)."""
    x, path = data.init, []
    for t, E, eta in data.rounds():
        x = data.mean([walk(data, k, t, E, eta, x) for k in range(len(data.weights))])
        path.append(x)
    return np.array(path)


def fedprox(data: Data, mu: float) -> np.ndarray:
    """Li and others (2020): a client minimises f_k(x) + μ/2 ‖x − x̄‖²."""
    x, path = data.init, []
    for t, E, eta in data.rounds():

        def pulled(g: Vector, at: Vector, center: Vector = x) -> Vector:
            return g + mu * (at - center)

        x = data.mean([walk(data, k, t, E, eta, x, pulled) for k in range(len(data.weights))])
        path.append(x)
    return np.array(path)


def local_momentum(data: Data, decay: float) -> np.ndarray:
    """Heavy-ball steps at the clients, whose velocity is 0 where a round begins."""
    x, path = data.init, []
    for t, E, eta in data.rounds():
        ends = []
        for k in range(len(data.weights)):
            velocity, at = np.zeros_like(x), x
            for i in range(t, t + E):
                velocity = decay * velocity + (data.a[i, k] @ at - data.b[i, k]) * data.a[i, k]
                at = at - eta * velocity
            ends.append(at)
        x = data.mean(ends)
        path.append(x)
    return np.array(path)


def local_adam(data: Data, rate: float) -> np.ndarray:
    """Kingma and Ba (2015), Algorithm 1, at the clients, from the beginning in each round."""
    x, path = data.init, []
    for t, E, eta in data.rounds():
        ends = []
        for k in range(len(data.weights)):
            mean, square, at = np.zeros_like(x), np.zeros_like(x), x
            for i in range(E):
                g = (data.a[t + i, k] @ at - data.b[t + i, k]) * data.a[t + i, k]
                mean, square = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g**2
                step = mean / (1 - 0.9 ** (i + 1))
                at = at - eta * rate * step / (np.sqrt(square / (1 - 0.999 ** (i + 1))) + 1e-8)
            ends.append(at)
        x = data.mean(ends)
        path.append(x)
    return np.array(path)


def clipping(data: Data, norm: float) -> np.ndarray:
    """Abadi and others (2016) without their noise: a gradient longer than `norm` is made that long."""

    def shortened(g: Vector, at: Vector) -> Vector:
        del at
        return g / max(1.0, float(np.linalg.norm(g)) / norm)

    x, path = data.init, []
    for t, E, eta in data.rounds():
        x = data.mean([walk(data, k, t, E, eta, x, shortened) for k in range(len(data.weights))])
        path.append(x)
    return np.array(path)


def server_momentum(data: Data, decay: float, rate: float) -> np.ndarray:
    """FedAvgM, Hsu, Qi and Brown (2019)."""
    x, velocity, path = data.init, np.zeros_like(data.init), []
    for t, E, eta in data.rounds():
        moved = data.mean([walk(data, k, t, E, eta, x) - x for k in range(len(data.weights))])
        velocity = decay * velocity - moved
        x = x - rate * velocity
        path.append(x)
    return np.array(path)


def server_adam(
    data: Data, rate: float, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8
) -> np.ndarray:
    """FedAdam, Reddi and others (2021), with Adam as Kingma and Ba (2015) have it."""
    x, first, second, path = data.init, np.zeros_like(data.init), np.zeros_like(data.init), []
    for m, (t, E, eta) in enumerate(data.rounds(), start=1):
        moved = data.mean([walk(data, k, t, E, eta, x) - x for k in range(len(data.weights))])
        first = beta1 * first - (1 - beta1) * moved
        second = beta2 * second + (1 - beta2) * moved**2
        mean, square = first / (1 - beta1**m), second / (1 - beta2**m)
        x = x - rate * mean / (np.sqrt(square) + epsilon)
        path.append(x)
    return np.array(path)


def scaffold(data: Data, rate: float) -> np.ndarray:
    """Karimireddy and others (2020), option II, all clients in every round."""
    K = len(data.weights)
    x, control, own, path = data.init, np.zeros_like(data.init), np.zeros((K, len(data.init))), []
    for t, E, eta in data.rounds():
        ends, changes = [], []
        for k in range(K):
            shift = control - own[k]
            ends.append(walk(data, k, t, E, eta, x, lambda g, at, shift=shift: g + shift))
            new = own[k] - control + (x - ends[k]) / (E * eta)
            changes.append(new - own[k])
            own[k] = new
        x = x + rate * data.mean([end - x for end in ends])
        control = control + data.mean(changes)
        path.append(x)
    return np.array(path)


def kept_momentum(data: Data, decay: float) -> np.ndarray:
    """Heavy-ball steps at the clients, whose velocity lasts."""
    x, velocity, path = data.init, np.zeros((len(data.weights), len(data.init))), []
    for t, E, eta in data.rounds():
        ends = []
        for k in range(len(data.weights)):
            at = x
            for i in range(t, t + E):
                gradient = (data.a[i, k] @ at - data.b[i, k]) * data.a[i, k]
                velocity[k] = decay * velocity[k] + gradient
                at = at - eta * velocity[k]
            ends.append(at)
        x = data.mean(ends)
        path.append(x)
    return np.array(path)


def stragglers(data: Data, probability: float) -> np.ndarray:
    """A slow client makes 1 to E steps, each number equally likely."""
    x, path = data.init, []
    for (t, E, eta), luck in zip(data.rounds(), data.own, strict=True):
        steps = [E if u >= probability else int(E * (u / probability)) + 1 for u in luck]
        ends = [walk(data, k, t, min(steps[k], E), eta, x) for k in range(len(data.weights))]
        x = data.mean(ends)
        path.append(x)
    return np.array(path)


def client_dropout(data: Data, probability: float) -> np.ndarray:
    """Those that are not lost are averaged by their weights."""
    x, path = data.init, []
    for (t, E, eta), luck in zip(data.rounds(), data.own, strict=True):
        left = [k for k in range(len(data.weights)) if luck[k] >= probability]
        if left:
            ends = [data.weights[k] * walk(data, k, t, E, eta, x) for k in left]
            x = sum(ends) / sum(data.weights[k] for k in left)
        path.append(x)
    return np.array(path)


def floyd(words: list[int], K: int) -> list[int]:
    """Bentley and Floyd (1987): different numbers below K, from words of 32 bits."""
    chosen: list[int] = []
    for j, word in enumerate(words, start=K - len(words)):
        drawn = word * (j + 1) // 2**32
        chosen.append(j if drawn in chosen else drawn)
    return chosen


def participation(data: Data, n: int) -> np.ndarray:
    """Li and others (2020), scheme II: n different clients, weighed by K/n."""
    x, path, K = data.init, [], len(data.weights)
    for (t, E, eta), words in zip(data.rounds(), data.words, strict=True):
        chosen = floyd([int(word) for word in words[:n]], K)
        moves = [data.weights[k] * (walk(data, k, t, E, eta, x) - x) for k in chosen]
        x = x + K / n * sum(moves)
        path.append(x)
    return np.array(path)


def participation_by_weight(data: Data) -> np.ndarray:
    """Li and others (2020), scheme I: a draw for each word that everybody sees, then the plain mean."""
    x, path = data.init, []
    for (t, E, eta), words in zip(data.rounds(), data.words, strict=True):
        below = np.cumsum(data.weights)
        drawn = [int(np.sum(below <= word / 2**32)) for word in words]
        x = np.mean([walk(data, k, t, E, eta, x) for k in drawn], axis=0)
        path.append(x)
    return np.array(path)
