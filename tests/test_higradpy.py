"""HiGrad beside higradpy 0.17 from PyPI, on the same data: numbers that it gave, kept here, as it needs an old scikit-learn.

It has one observation per node and step, which is a tree whose clients below a node see the same one. Its level 0 takes
the value where that begins for its average, which was put right before it made the interval; and it mixes
coordinates up where there are several, so that there is one here.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxlsgd.algorithms import plain_rounds
from jaxlsgd.core.estimator import Sync
from jaxlsgd.inference.rivals.federation_tree import federation_tree
from jaxlsgd.inference.rivals.higrad import higrad

N, LENGTH, BURN_IN, ETA, ALPHA = 70, 10, 7, 0.5, 0.505
START = 0.0005056170714293956  # np.random.seed(4); np.random.normal(0, 0.01, 1)
ESTIMATE, HALF = 0.8510681195719049, 0.22998052771964217


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(17)
    x = rng.normal(size=N)
    return x, 0.8 * x + rng.normal(size=N)


def step_size(n: int) -> float:
    return ETA / n**ALPHA


def test_estimate_and_half_width_are_those_of_higradpy():
    x, y = data()
    at, start = 0, START
    for i in range(1, BURN_IN + 1):
        at += 1  # it begins with the second observation
        start -= step_size(i) * x[at] * (start * x[at] - y[at])
    splits = (LENGTH, 2 * LENGTH)
    loss = lambda row, seen: 0.5 * (seen[0] * row[seen[2], 0] - seen[1]) ** 2  # noqa: E731
    method = higrad((2, 2), splits)
    with jax.enable_x64(True):
        rounds = plain_rounds(loss, [0.25] * 4, federation_tree((2, 2), splits))
        state, streamed = rounds.init(jnp.full((4, 1), start)), method.init(jnp.zeros(4))
        for m in range(3 * LENGTH):
            level = m // LENGTH
            # Later levels count their steps from the length before them on, without the first 1.
            eta = step_size(m + 1 if level == 0 else m)
            nodes = 2**level
            which = at + 1 + np.arange(nodes) if level == 0 else at + np.arange(nodes)
            at += nodes
            seen = np.repeat(which % N, 4 // nodes)
            now = x[seen][None], y[seen][None], np.arange(4)[None]
            state, sync = rounds.round(state, now, eta)
            streamed = method.update(streamed, Sync(sync.params.ravel(), 1, eta))
        # Of its own clients a federation has n_j = m_j/C_j observations of all: here n_j of one.
        own = jnp.array([LENGTH, 2 * LENGTH, 4 * LENGTH])
        levels = streamed[0]._replace(m=own.astype(jnp.int32), s=own.astype(float))
        found = method.interval((levels,), 0.95)
    np.testing.assert_allclose(found.estimate, [ESTIMATE], rtol=1e-10)
    np.testing.assert_allclose(found.upper - found.estimate, [HALF], rtol=1e-8)
