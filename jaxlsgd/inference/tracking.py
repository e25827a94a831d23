"""Estimators in a training loop of your own: any pytree of parameters goes in, and comes back.

An estimator works on flat vectors. A `Tracker` knows the pytree that you train, so that intervals have its shape
and names, a function of the parameters has an interval too, and a pytree of another shape is refused. Its state
is a pytree of arrays: it goes through `jax.jit`, `jax.vmap`, `lax.scan` and any checkpoint.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from jaxlsgd.core import checks
from jaxlsgd.core.algorithm import check_measure
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.display import align
from jaxlsgd.core.estimator import Anchored, Estimator, Horizon, Interval, Measurement, Sync
from jaxlsgd.core.problem import Params, unravel
from jaxlsgd.inference import joint
from jaxlsgd.schedules import Plan

NO_PLAN = "no plan was given: E_m is taken to be constant, or to grow no faster than a logarithm"


@dataclasses.dataclass(frozen=True, eq=False)
class Tracker:
    """An estimator for one pytree of parameters; made by `track`."""

    estimator: Estimator
    like: Params  # shapes and dtypes

    def init(self, params: Params) -> tuple[Any, ...]:
        """The state before the first round."""
        self._check("params", params)
        return self.estimator.init(ravel_pytree(params)[0])

    def update(
        self,
        state: tuple[Any, ...],
        params: Params,
        *,
        eta: Any,
        E: Any = 1,
        gradient: Params | None = None,
        hessian: Any = None,
        anchored: Anchored | None = None,
    ) -> tuple[Any, ...]:
        """The state after one more round, or one more step where E = 1.

        Args:
          state: from `init` or `update`.
          params: the average after the round.
          eta: step size of the round.
          E: its local steps.
          gradient: at `params` on fresh rows, where `estimator.needs_gradient`.
          hessian: (d, d) at `params` on fresh rows, where `estimator.needs_hessian`; see `hessian`.
          anchored: what clients evaluated at `anchors(state)` with the rows of the round, for a method with an
            anchor: the sum over steps of the mean gradients, and in a few rounds the mean Hessians at both anchors.
        """
        self._check("params", params)
        if gradient is not None:
            self._check("gradient", gradient)
            gradient = ravel_pytree(gradient)[0]
        if anchored is not None:
            self._check("anchored.gradient_sum", anchored.gradient_sum)
            total = ravel_pytree(anchored.gradient_sum)[0]
            anchored = anchored._replace(gradient_sum=total)
        flat = ravel_pytree(params)[0]
        sync = Sync(flat, E, eta, gradient, hessian, anchored=anchored)
        return _update(self.estimator, state, sync)

    def anchors(self, state: tuple[Any, ...]) -> tuple[Params, Params]:
        """Return where to evaluate the rows of the next round once more: the anchor, and the one before it."""
        now, before = self.estimator.anchors(state)
        return self._shaped(now), self._shaped(before)

    def hessian(self, loss: Callable[..., Any], params: Params, *data: Any) -> Any:
        """∇² of `loss(params, *data)` for the flattened parameters, (d, d)."""
        flat, unravel = ravel_pytree(params)
        return jax.hessian(lambda x: loss(unravel(x), *data))(flat)

    @property
    def names(self) -> tuple[str, ...]:
        """One name per parameter: its path in the pytree, and its place in the array."""
        found: list[str] = []
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.like):
            stem = jax.tree_util.keystr(path) or "x"
            places = np.ndindex(tuple(leaf.shape))
            found += [stem + (f"[{','.join(map(str, i))}]" if i else "") for i in places]
        return tuple(found)

    def interval(
        self,
        state: tuple[Any, ...],
        level: float = 0.95,
        *,
        plan: Plan | None = None,
        side: str = "both",
    ) -> Interval:
        """Estimate and bounds, each in the shape of the parameters.

        Args:
          state: from `update`.
          level: 0.95, not 95.
          plan: `Plan.from_arrays(E, eta)` of the rounds that were run. Without one, random scaling takes E_m to
            be constant, or to grow no faster than a logarithm; some methods need one.
          side: "both", or the only bound that is finite: "lower" or "upper".
        """
        found, q = self._measured(state, level, plan, side)
        around = Interval.around(found.estimate, q * found.scale, side)
        return Interval(*(self._shaped(part) for part in around))

    def _measured(
        self, state: tuple[Any, ...], level: float, plan: Plan | None, side: str
    ) -> tuple[Measurement, Any]:
        """The measurement and its critical values."""
        checks.level(level)
        self.estimator.check_plan(plan)
        horizon = None if plan is None else Horizon.of(plan)
        found = self.estimator.measure_one(state, horizon)
        return found, np.asarray(self.estimator.law.half(level, side, plan, found.detail))

    def done(
        self,
        state: tuple[Any, ...],
        *,
        half_width: float | None = None,
        excludes: float | None = None,
        level: float = 0.95,
    ) -> Any:
        """Return whether every interval is sure enough to stop; a boolean array, also under `jax.jit` and `lax.while_loop`.

        Critical values are computed on the host, which a compiled program calls.

        Args:
          state: from `update`.
          half_width: intervals are at most that to either side.
          excludes: they do not hold this null; for a method that is valid at all looks.
          level: 0.95, not 95.
        """
        checks.level(level)
        if half_width is None and excludes is None:
            raise refusal("half_width", "be given, or excludes", None)
        if half_width is not None:
            checks.positive("half_width", half_width)
        estimator = self.estimator
        if excludes is not None and estimator.valid == "fixed":
            rule = f"be left out for {estimator.name}, whose intervals hold at one time only"
            raise refusal("excludes", rule, excludes)
        estimator.check_plan(None)
        found = _measured(estimator.measure, state)
        shape = jax.ShapeDtypeStruct(found.scale.shape, found.scale.dtype)

        def multiplier(detail: Any) -> Any:
            value = estimator.law.half(level, "both", None, jax.tree.map(np.asarray, detail))
            return np.broadcast_to(value, shape.shape).astype(shape.dtype)

        q = jax.pure_callback(multiplier, shape, found.detail, vmap_method="sequential")
        half = q * found.scale
        sure = jnp.isfinite(found.estimate) & jnp.isfinite(half)
        if half_width is not None:
            sure = sure & (half <= half_width)
        if excludes is not None:
            sure = sure & (jnp.abs(found.estimate - excludes) > half)
        return jnp.all(sure)

    def function(
        self,
        state: tuple[Any, ...],
        g: Callable[[Params], Any],
        level: float = 0.95,
        *,
        plan: Plan | None = None,
        side: str = "both",
    ) -> Interval:
        """Interval for a function of the parameters, by the delta method: a contrast, or a prediction.

        Args:
          state: from `update`.
          g: `params → number or vector`, differentiable by JAX.
          level: of each component by itself.
          plan: as in `interval`.
          side: as in `interval`.
        """
        found = joint.joint(self.estimator, state, plan)
        return joint.function(found, lambda x: g(self._shaped(x)), level, side)

    def table(
        self, state: tuple[Any, ...], level: float = 0.95, *, plan: Plan | None = None
    ) -> str:
        """Names, estimates and intervals as text, with the critical value that was used."""
        found, q = self._measured(state, level, plan, "both")
        center, half = (np.asarray(one) for one in (found.estimate, q * found.scale))
        head = ["", "estimate", f"[{(1 - level) / 2:.4g}", f"{(1 + level) / 2:.4g}]"]
        numbers = zip(self.names, center, center - half, center + half, strict=True)
        body = [[name, *(f"{value:.5g}" for value in values)] for name, *values in numbers]
        spread = f"{q.min():.4g}" if np.ptp(q) < 1e-9 else f"{q.min():.4g} to {q.max():.4g}"
        about = f" ({NO_PLAN})" if plan is None and not self.estimator.standard_error else ""
        last = f"{self.estimator.name}: critical value {spread}{about}"
        return "\n".join([align([head, *body], left=(0,)), last])

    def _shaped(self, vector: Any) -> Params:
        """A flat vector in the pytree's shape, in the vector's precision."""
        return unravel(jnp.asarray(vector), self.like)

    def _check(self, argument: str, tree: Params) -> None:
        if _shapes(tree) != _shapes(self.like):
            rule = f"have the shape that the tracker was made for, {_told(self.like)}"
            raise refusal(argument, rule, _told(tree))


def track(estimator: Estimator, params: Params) -> Tracker:
    """An estimator for the parameters of your own loop.

    Args:
      estimator: such as `random_scaling("diagonal")`, which needs the path alone, or `one_step()`.
      params: those that are trained, any pytree of floating arrays.

    Returns:
      A `Tracker`: `init`, `update`, `interval`, `function`, `table`.

    Example::

        tracker = jaxlsgd.track(jaxlsgd.random_scaling("diagonal"), params)
        state = tracker.init(params)
        for m in range(1, 1001):
            params = step(params, eta=0.5 / m**0.505)
            state = tracker.update(state, params, eta=0.5 / m**0.505)
        print(tracker.table(state))
    """
    if not isinstance(estimator, Estimator):
        raise refusal("estimator", "be an estimator such as random_scaling()", estimator)
    if not jax.tree.leaves(params):
        raise refusal("params", "have at least one array", params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.floating):
            rule = "be of floating numbers"
            place = "params" + jax.tree_util.keystr(path)
            raise refusal(place, rule, str(jnp.asarray(leaf).dtype))
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.asarray(x).dtype), params)
    flat = jax.eval_shape(lambda tree: ravel_pytree(tree)[0], like)
    check_measure(estimator, flat.size, str(flat.dtype))
    return Tracker(estimator, like)


# Compiled, because a loop of your own need not be.
@functools.partial(jax.jit, static_argnums=0)
def _update(estimator: Estimator, state: Any, sync: Sync) -> tuple[Any, ...]:
    return estimator.update(state, sync)


@functools.partial(jax.jit, static_argnums=0)
def _measured(measure: Any, state: Any) -> Measurement:
    return measure(state, None)


def _shapes(tree: Params) -> tuple[Any, ...]:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple(tuple(jnp.shape(leaf)) for leaf in leaves)


def _told(tree: Params) -> str:
    paths = jax.tree_util.tree_leaves_with_path(tree)
    parts = (
        f"{jax.tree_util.keystr(path) or 'x'} {tuple(jnp.shape(leaf))}" for path, leaf in paths
    )
    return checks.shown(", ".join(parts))[1:-1]
