"""Intervals in a plain optax loop: logistic regression with decreasing steps, checkpoints included.

Each batch is evaluated at the tracker's anchor too, which is all that `one_step` needs: the optimiser is no matter to
it, as long as it comes near the minimiser. Hessians in a few steps would do; here they are made in all.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxlsgd

TRUTH = {"w": jnp.array([1.0, -0.5]), "b": jnp.array(0.25)}


def draw(key: Any, size: int) -> tuple[Any, Any]:
    """Fresh rows."""
    of_x, of_y = jax.random.split(key)
    x = jax.random.normal(of_x, (size, 2))
    chance = jax.nn.sigmoid(x @ TRUTH["w"] + TRUTH["b"])
    return x, jax.random.bernoulli(of_y, chance).astype(jnp.float32)


def loss(params: Any, batch: tuple[Any, Any]) -> Any:
    """Mean over a batch."""
    x, y = batch
    return optax.sigmoid_binary_cross_entropy(x @ params["w"] + params["b"], y).mean()


def main(steps: int = 4000) -> dict[str, Any]:
    """Trains, prints the table, and shows that a restored state goes on bit by bit."""
    schedule = lambda count: 2.0 / (count + 1.0) ** 0.505  # noqa: E731
    optimizer = optax.sgd(schedule)
    params = jax.tree.map(jnp.zeros_like, TRUTH)
    tracker = jaxlsgd.track(jaxlsgd.one_step(), params, rows="fresh")

    @jax.jit
    def step(carried: Any, m: Any) -> tuple[Any, None]:
        params, inner, state = carried
        batch = draw(jax.random.fold_in(jax.random.key(0), m), 8)
        anchor, before = tracker.anchors(state)
        anchored = jaxlsgd.Anchored(
            jax.grad(loss)(anchor, batch),
            tracker.hessian(loss, anchor, batch),
            tracker.hessian(loss, before, batch),
            observations=8,
        )
        gradient = jax.grad(loss)(params, batch)
        updates, inner = optimizer.update(gradient, inner)
        params = optax.apply_updates(params, updates)
        state = tracker.update(state, params, eta=schedule(m), anchored=anchored)
        return (params, inner, state), None

    half = steps // 2
    start = (params, optimizer.init(params), tracker.init(params))
    midway, _ = jax.lax.scan(step, start, jnp.arange(half))
    restored = _through_npz(midway)
    ends = [jax.lax.scan(step, each, jnp.arange(half, steps))[0][2] for each in (midway, restored)]
    same = jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), *ends)
    interval = tracker.interval(ends[0])
    print(tracker.table(ends[0]))
    odds = tracker.function(ends[0], lambda p: jnp.exp(p["w"][0]))
    print(
        f"odds ratio of the first column: {odds.estimate:.3f} [{odds.lower:.3f}, {odds.upper:.3f}]"
    )
    least = tracker.interval(ends[0], side="lower").lower["b"]
    print(f"b is at least {least:.3f}, with 95 % confidence")
    return {"interval": interval, "same": all(jax.tree.leaves(same)), "odds": odds}


def _through_npz(tree: Any) -> Any:
    """Saved and loaded: a state is arrays."""
    leaves, treedef = jax.tree.flatten(tree)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "state.npz"
        np.savez(path, *leaves)
        with np.load(path) as stored:
            return treedef.unflatten([jnp.asarray(stored[f"arr_{i}"]) for i in range(len(leaves))])


if __name__ == "__main__":
    main()
