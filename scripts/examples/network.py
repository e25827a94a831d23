"""The interval of a prediction of a small network, with an honest word about what it means.

The theory is for convex losses. A network has many minima, and a path stays near one of them. What the interval
is about is then the prediction at that local minimum, seen from the noise of the steps; not what another start
would have led to, and not the data's true curve. Weights themselves are not even identified (hidden units can be
exchanged), so read intervals of predictions only. Three starts below show what the interval leaves out.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxlsgd

AT = jnp.array([[0.5]])


def predict(params: Any, x: Any) -> Any:
    """One hidden layer of four units."""
    hidden = jnp.tanh(x @ params["in"] + params["shift"])
    return hidden @ params["out"] + params["level"]


def loss(params: Any, batch: tuple[Any, Any]) -> Any:
    """Squares, and a little weight decay, without which the minimum would be flat."""
    x, y = batch
    decay = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
    return 0.5 * jnp.mean((predict(params, x)[:, 0] - y) ** 2) + 5e-3 * decay


def draw(key: Any) -> tuple[Any, Any]:
    """Rows around a sine."""
    of_x, of_y = jax.random.split(key)
    x = jax.random.uniform(of_x, (16, 1), minval=-2.0, maxval=2.0)
    return x, jnp.sin(2 * x[:, 0]) + 0.3 * jax.random.normal(of_y, (16,))


def train(seed: int, steps: int) -> tuple[jaxlsgd.Interval, tuple[str, ...]]:
    """A run from one start; random scaling sees the path alone, so no Hessian is needed."""
    keys = jax.random.split(jax.random.key(seed), 3)
    params = {
        "in": jax.random.normal(keys[0], (1, 4)),
        "shift": jax.random.normal(keys[1], (4,)),
        "out": 0.5 * jax.random.normal(keys[2], (4, 1)),
        "level": jnp.zeros(1),
    }
    tracker = jaxlsgd.track(jaxlsgd.random_scaling(), params, rows="fresh")

    @jax.jit
    def run(params: Any) -> tuple[Any, Any]:
        def step(carried: Any, m: Any) -> tuple[Any, None]:
            params, state = carried
            eta = 0.5 / (m + 1.0) ** 0.505
            gradient = jax.grad(loss)(params, draw(jax.random.fold_in(jax.random.key(100), m)))
            params = jax.tree.map(lambda p, g: p - eta * g, params, gradient)
            # The first half leads to a minimum; the second goes around it.
            moved = tracker.update(state, params, eta=eta)
            late = m >= steps // 2
            state = jax.tree.map(lambda new, old: jnp.where(late, new, old), moved, state)
            return (params, state), None

        return jax.lax.scan(step, (params, tracker.init(params)), jnp.arange(steps))[0]

    _, state = run(params)
    return tracker.function(state, lambda p: predict(p, AT)[0, 0]), tracker.about(state)


def main(steps: int = 20_000) -> list[jaxlsgd.Interval]:
    """Prints the interval of one prediction, from three starts."""
    runs = [train(seed, steps) for seed in (1, 2, 3)]
    found = [one for one, _ in runs]
    for seed, one in enumerate(found, start=1):
        print(f"start {seed}: f(0.5) = {one.estimate:.3f} [{one.lower:.3f}, {one.upper:.3f}]")
    centres = np.array([float(one.estimate) for one in found])
    print(f"between starts: {np.ptp(centres):.3f}, which none of the intervals includes")
    print(*runs[0][1], sep="\n")
    print(f"the curve behind the rows, for comparison: {np.sin(1.0):.3f}")
    return found


if __name__ == "__main__":
    main()
