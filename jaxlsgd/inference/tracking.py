"""Intervals in a training loop of your own, for parameters in any pytree. Start reading at `track`.

An estimator works on flat vectors. A `Tracker` is made for the pytree that you train, so that intervals have its
shape and names, a function of the parameters has an interval too, and a pytree of another shape is refused. Its
state is a pytree of arrays, which works with `jax.jit`, `jax.vmap`, `lax.scan` and any checkpoint.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.flatten_util import ravel_pytree
from scipy.special import ndtri

from jaxlsgd.core import checks
from jaxlsgd.core.algorithm import check_measure
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.display import align
from jaxlsgd.core.estimator import Anchored, Estimator, Horizon, Interval, Measurement, Side, Sync
from jaxlsgd.core.problem import Params, check_finite, unravel
from jaxlsgd.inference import joint
from jaxlsgd.schedules import Plan

Rows = Literal["fresh", "reused"]
FALLEN = (
    0.9  # a step size that is still above this share of the first after `SEEN` rounds does not fall
)
SEEN = 20
NO_PLAN = "no plan was given: E_m is taken to be constant, or to grow no faster than a logarithm"


class Tracked(NamedTuple):
    """The state of a `Tracker`."""

    states: tuple[Any, ...]  # of the estimator
    rounds: Any  # () int32
    first: Any  # () η_1 E_1
    last: Any  # () η_m E_m


@dataclasses.dataclass(frozen=True, eq=False)
class Tracker:
    """An estimator for one pytree of parameters; made by `track`."""

    estimator: Estimator
    like: Params  # shapes and dtypes
    rows: Rows  # "fresh" or "reused"

    def init(self, params: Params) -> Tracked:
        """Return the state before the first round."""
        self._check("params", params)
        zero = jnp.zeros((), jnp.float32)
        states = self.estimator.init(ravel_pytree(params)[0])
        return Tracked(states, jnp.zeros((), jnp.int32), zero, zero)

    def update(
        self,
        state: Tracked,
        params: Params,
        *,
        eta: Any,
        E: Any = 1,
        gradient: Params | None = None,
        hessian: Any = None,
        anchored: Anchored | None = None,
    ) -> Tracked:
        """Return the state after one more round, or one more step if E = 1.

        Numbers outside `jax.jit` are checked; those of a traced loop cannot be.

        Args:
          state: from `init` or `update`.
          params: the average after the round.
          eta: step size of the round.
          E: its local steps.
          gradient: at `params` on fresh rows, if `estimator.needs_gradient`.
          hessian: (d, d) at `params` on fresh rows, if `estimator.needs_hessian`; see `hessian`.
          anchored: what clients evaluated at `anchors(state)` with the rows of the round, for a method with an
            anchor: the sum over steps of the mean gradients, and in a few rounds the mean Hessians at both anchors.
        """
        self._check("params", params)
        _check_numbers(eta, E)
        _check_finite("params", params)
        if hessian is not None:
            self._check_square("hessian", hessian)
        if gradient is not None:
            self._check("gradient", gradient)
            _check_finite("gradient", gradient)
            gradient = ravel_pytree(gradient)[0]
        if anchored is not None:
            self._check("anchored.gradient_sum", anchored.gradient_sum)
            _check_finite("anchored.gradient_sum", anchored.gradient_sum)
            for name in ("hessian", "hessian_before"):
                if getattr(anchored, name) is not None:
                    self._check_square(f"anchored.{name}", getattr(anchored, name))
            total = ravel_pytree(anchored.gradient_sum)[0]
            anchored = anchored._replace(gradient_sum=total)
        flat = ravel_pytree(params)[0]
        sync = Sync(flat, E, eta, gradient, hessian, anchored=anchored)
        return _update(self.estimator, state, sync)

    def anchors(self, state: Tracked) -> tuple[Params, Params]:
        """Return where to evaluate the rows of the next round once more: the anchor, and the one before it."""
        now, before = self.estimator.anchors(state.states)
        return self._shaped(now), self._shaped(before)

    def hessian(self, loss: Callable[..., Any], params: Params, *data: Any) -> Any:
        """Return ∇² of `loss(params, *data)` for the flattened parameters, (d, d)."""
        flat, unravel = ravel_pytree(params)
        return jax.hessian(lambda x: loss(unravel(x), *data))(flat)

    @property
    def names(self) -> tuple[str, ...]:
        """One name per parameter: its path in the pytree, and its index in the array."""
        return parameter_names(self.like)

    def interval(
        self,
        state: Tracked,
        level: float = 0.95,
        *,
        plan: Plan | None = None,
        side: Side = "both",
        sampling: Any = None,
    ) -> Interval:
        """Return estimate and bounds, each in the shape of the parameters; `about` says what they are about.

        Args:
          state: from `update`.
          level: 0.95, not 95.
          plan: `Plan.from_arrays(E, eta)` of the rounds that were run. Without one, random scaling takes E_m to
            be constant, or to grow no faster than a logarithm; some methods need one.
          side: "both", or the only bound that is finite: "lower" or "upper".
          sampling: (d, d) covariance of the minimiser of the rows over samples of rows, if rows are reused: the
            intervals are then about the population. `federation.finish` has it from one message per client.
        """
        found, q = self._measured(state, level, plan, side)
        half = _widened(q * found.scale, self._sampling(sampling), level, side)
        around = Interval.around(found.estimate, half, side)
        return Interval(*(self._shaped(part.astype(found.estimate.dtype)) for part in around))

    def estimate(self, state: Tracked, *, plan: Plan | None = None) -> Params:
        """The estimate alone, in the shape and the precision of the parameters."""
        self.estimator.check_plan(plan)
        horizon = None if plan is None else Horizon.of(plan)
        found = self._shaped(self.estimator.measure_one(state.states, horizon).estimate)
        precisions = jax.tree.map(lambda like: np.result_type(np.float32, like.dtype), self.like)
        return jax.tree.map(lambda leaf, dtype: leaf.astype(dtype), found, precisions)

    def covariance(self, state: Tracked, *, plan: Plan | None = None) -> tuple[np.ndarray, float]:
        """The covariance of the estimate, (d, d), NaN if withheld, and its least degrees of freedom."""
        if self.estimator.matrix is None or not self.estimator.standard_error:
            raise refusal("estimator", "have a covariance", self.estimator.name, code="unsupported")
        _refuse_few(state)
        found, matrix = joint.measure_in_float64(self.estimator, state.states, plan)
        df = getattr(found.detail, "df", np.inf)
        return np.asarray(matrix, np.float64), float(np.min(np.asarray(df)))

    def notes(self, state: Tracked, *, plan: Plan | None = None) -> tuple[str, ...]:
        """What the method says of the run."""
        if self.estimator.notes is None:
            return ()
        horizon = None if plan is None else Horizon.of(plan)
        detail = self.estimator.measure_one(state.states, horizon).detail
        return tuple(self.estimator.notes(jax.tree.map(np.asarray, detail)))

    def about(self, state: Tracked, *, sampling: Any = None) -> tuple[str, ...]:
        """Return in sentences what an interval of this run is about, and what it leaves out."""
        if self.rows == "fresh":
            told = ["about the population, provided that no row was met twice"]
        elif sampling is None:
            told = [
                "about these rows: the minimiser of their mean loss, and not the population that they come from "
                "(give the sampling variance for that)"
            ]
        else:
            told = ["about the population: the run's own variance, and that of these rows"]
        if self.estimator.anchor is None:
            told.append(
                "holds for plain SGD steps that fall; momentum, Adam and constant steps are outside, unless "
                "gradients at the server's anchor are handed in, one_step()"
            )
            if int(state.rounds) >= SEEN and float(state.last) > FALLEN * float(state.first):
                told.append(
                    f"outside: the steps do not fall, from {float(state.first):.3g} in the first round to "
                    f"{float(state.last):.3g} in the last"
                )
        if self._layered:
            told.append(
                "of a network: about this minimum only, which another start need not reach; intervals of "
                "predictions are by the delta method, and leave out how far the network is from the truth"
            )
        return tuple(told)

    @property
    def _layered(self) -> bool:
        """Whether the parameters have two matrices or more, as the layers of a network."""
        return sum(len(leaf.shape) >= 2 for leaf in jax.tree.leaves(self.like)) > 1

    def _sampling(self, given: Any) -> np.ndarray | None:
        if given is None:
            return None
        if self.rows == "fresh":
            rule = "be None if rows are fresh, since the run is about the population already"
            raise refusal("sampling", rule, np.shape(given), code="unwanted")
        return np.diagonal(checks.array("sampling", given, (len(self.names),) * 2))

    def _measured(
        self, state: Tracked, level: float, plan: Plan | None, side: Side
    ) -> tuple[Measurement, Any]:
        """Return the measurement and its critical values."""
        checks.level(level)
        self.estimator.check_plan(plan)
        _refuse_few(state)
        horizon = None if plan is None else Horizon.of(plan)
        found = self.estimator.measure_one(state.states, horizon)
        return found, np.asarray(self.estimator.law.half(level, side, plan, found.detail))

    def done(
        self,
        state: Tracked,
        *,
        half_width: float | None = None,
        excludes: float | None = None,
        level: float = 0.95,
    ) -> Any:
        """Return whether every interval is sure enough to stop; a boolean array, also under `jax.jit` and `lax.while_loop`.

        False as long as there is no interval: the state needs two updates, and some methods more. Critical values
        are computed on the host, which a compiled program calls.

        Args:
          state: from `init` or `update`.
          half_width: intervals are at most that to either side.
          excludes: they do not hold this null; for a method that is valid at all looks.
          level: 0.95, not 95.
        """
        checks.level(level)
        if not isinstance(state, Tracked):
            raise refusal(
                "state", "be what `init` or `update` of a tracker returned", state, code="type"
            )
        if half_width is None and excludes is None:
            raise refusal("half_width", "be given, or excludes", None, code="missing")
        if half_width is not None:
            checks.positive("half_width", half_width)
        if excludes is not None:
            checks.number("excludes", excludes)
        estimator = self.estimator
        if excludes is not None and estimator.valid == "fixed":
            rule = f"be left out for {estimator.name}, whose intervals hold at one time only"
            raise refusal("excludes", rule, excludes, code="unsupported")
        if estimator.law_at is not None:
            rule = 'be given its looks in a loop of your own, as one_step(valid="looks", looks=...)'
            raise refusal("estimator", rule, estimator.name, code="missing")
        estimator.check_plan(None)
        found = _measured(estimator.measure, state.states)
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
        return jnp.all(sure) & (state.rounds >= 2)

    def function(
        self,
        state: Tracked,
        g: Callable[[Params], Any],
        level: float = 0.95,
        *,
        plan: Plan | None = None,
        side: Side = "both",
        sampling: Any = None,
    ) -> Interval:
        """Return an interval for a function of the parameters, a contrast or a prediction, by the delta method.

        Of a network it is about this minimum only: `about` says what may be said.

        Args:
          state: from `update`.
          g: `params → number or vector`, differentiable by JAX.
          level: of each component by itself.
          plan: as in `interval`.
          side: as in `interval`.
          sampling: as in `interval`, for a method with standard errors.
        """
        _refuse_few(state)
        found = joint.joint(self.estimator, state.states, plan)
        if self._sampling(sampling) is not None:
            if not self.estimator.standard_error:
                rule = "be None unless the method has standard errors"
                raise refusal("sampling", rule, self.estimator.name, code="unsupported")
            found = found._replace(matrix=found.matrix + np.asarray(sampling, np.float64))
        return joint.function(found, g, level, side, self._shaped)

    def table(
        self,
        state: Tracked,
        level: float = 0.95,
        *,
        plan: Plan | None = None,
        sampling: Any = None,
    ) -> str:
        """Return names, estimates and intervals as text, with the critical value that was used and what they are about."""
        found, q = self._measured(state, level, plan, "both")
        half = _widened(q * found.scale, self._sampling(sampling), level, "both")
        center, half = (np.asarray(one) for one in (found.estimate, half))
        head = ["", "estimate", f"[{(1 - level) / 2:.4g}", f"{(1 + level) / 2:.4g}]"]
        numbers = zip(self.names, center, center - half, center + half, strict=True)
        body = [[name, *(f"{value:.5g}" for value in values)] for name, *values in numbers]
        spread = f"{q.min():.4g}" if np.ptp(q) < 1e-9 else f"{q.min():.4g} to {q.max():.4g}"
        about = f" ({NO_PLAN})" if plan is None and not self.estimator.standard_error else ""
        last = f"{self.estimator.name}: critical value {spread}{about}"
        told = [*self.about(state, sampling=sampling), *self.notes(state, plan=plan)]
        return "\n".join([align([head, *body], left=(0,)), last, *told])

    def _shaped(self, vector: Any) -> Params:
        """Return a flat vector in the pytree's shape, in the vector's precision, which JAX may not have."""
        found = jnp.asarray(vector)
        wide = isinstance(vector, np.ndarray) and vector.dtype != found.dtype
        return unravel(vector if wide else found, self.like)

    def _check(self, argument: str, tree: Params) -> None:
        if _shapes(tree) != _shapes(self.like):
            rule = f"have the shape that the tracker was made for, {_shapes_text(self.like)}"
            raise refusal(argument, rule, _shapes_text(tree), code="shape")

    def _check_square(self, argument: str, matrix: Any) -> None:
        shape = (len(self.names),) * 2
        if np.shape(matrix) != shape:
            raise refusal(argument, f"have shape {shape}", np.shape(matrix), code="shape")
        _check_finite(argument, matrix)


def track(estimator: Estimator, params: Params, *, rows: Rows) -> Tracker:
    """Return an estimator for the parameters of your own loop.

    Args:
      estimator: such as `random_scaling(mode="diagonal")`, which needs the path alone, or `one_step()`.
      params: the parameters to be trained, any pytree of floating-point arrays.
      rows: "fresh" if no row is met twice, as in a stream: intervals are about the population. "reused" if the
        loop goes over the same rows again, as in most training: intervals are then about these rows, and of
        the population only with the `sampling` variance of one message per client, see `federation.finish`.

    Returns:
      A `Tracker`: `init`, `update`, `interval`, `function`, `table`.

    Example::

        tracker = jaxlsgd.track(jaxlsgd.random_scaling(mode="diagonal"), params, rows="fresh")
        state = tracker.init(params)
        for m in range(1, 1001):
            params = step(params, eta=0.5 / m**0.505)
            state = tracker.update(state, params, eta=0.5 / m**0.505)
        print(tracker.table(state))
    """
    if not isinstance(estimator, Estimator):
        raise refusal(
            "estimator", "be an estimator such as random_scaling()", estimator, code="type"
        )
    checks.choice("rows", rows, Rows)
    if not jax.tree.leaves(params):
        raise refusal("params", "have at least one array", params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.floating):
            rule = "be of floating numbers"
            place = "params" + jax.tree_util.keystr(path)
            raise refusal(place, rule, str(jnp.asarray(leaf).dtype), code="type")
    # Of NumPy's float64, too, which a server has in any case.
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            jnp.shape(x), jnp.result_type(x) if isinstance(x, float) else x.dtype
        ),
        params,
    )
    flat = jax.eval_shape(lambda tree: ravel_pytree(tree)[0], like)
    check_measure(estimator, flat.size, str(flat.dtype))
    return Tracker(estimator, like, rows)


# Compiled, because a loop of your own need not be.
@functools.partial(jax.jit, static_argnums=0)
def _update(estimator: Estimator, state: Tracked, sync: Sync) -> Tracked:
    size = jnp.asarray(sync.eta * sync.E, jnp.float32)
    first = jnp.where(state.rounds == 0, size, state.first)
    return Tracked(estimator.update(state.states, sync), state.rounds + 1, first, size)


def parameter_names(params: Params) -> tuple[str, ...]:
    """Return one name per parameter of a pytree: its path, and its place in the array."""
    found: list[str] = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        stem = jax.tree_util.keystr(path) or "x"
        places = np.ndindex(tuple(np.shape(leaf)))
        found += [stem + (f"[{','.join(map(str, i))}]" if i else "") for i in places]
    return tuple(found)


def _traced(value: Any) -> bool:
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value))


def _check_numbers(eta: Any, E: Any) -> None:
    if not _traced(eta) and not (np.all(np.isfinite(eta)) and np.all(np.asarray(eta) > 0)):
        code = "value" if np.all(np.isfinite(eta)) else "not_finite"
        raise refusal("eta", "be a finite number greater than 0", eta, code=code)
    if not _traced(E) and not np.all(np.asarray(E) >= 1):
        raise refusal("E", "be at least 1", E)


def _check_finite(argument: str, tree: Any) -> None:
    if not _traced(tree):
        check_finite(argument, tree)


def _refuse_few(state: Tracked) -> None:
    if not _traced(state.rounds) and np.max(np.asarray(state.rounds)) < 2:
        raise refusal(
            "state", "have at least 2 updates for an interval", int(state.rounds), code="data"
        )


def _widened(half: Any, sampling: np.ndarray | None, level: float, side: Side) -> Any:
    """Return half-widths with the sampling variance added, as a normal one."""
    if sampling is None:
        return half
    z = ndtri((1 + level) / 2 if side == "both" else level)
    return np.sqrt(np.asarray(half, np.float64) ** 2 + z**2 * sampling)


@functools.partial(jax.jit, static_argnums=0)
def _measured(measure: Any, state: Any) -> Measurement:
    return measure(state, None)


def _shapes(tree: Params) -> tuple[Any, ...]:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple(tuple(jnp.shape(leaf)) for leaf in leaves)


def _shapes_text(tree: Params) -> str:
    paths = jax.tree_util.tree_leaves_with_path(tree)
    parts = (
        f"{jax.tree_util.keystr(path) or 'x'} {tuple(jnp.shape(leaf))}" for path, leaf in paths
    )
    return checks.shown(", ".join(parts))[1:-1]
