"""The contract of an interval method: statistics that it streams, and the interval they become.

Written for one replication; the engine alone adds that dimension.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.problem import Array, Params, Problem

if TYPE_CHECKING:
    from jaxlsgd.schedules.plan import Plan


class Sync(NamedTuple):
    """What the server knows when round m ends.

    `gradient` is Σ_k p_k ∇f_k(x̄; ξ^k) and `hessian` Σ_k p_k ∇²f_k(x̄; ξ^k) at the average x̄, with
    the sample of the first local step of the next round; None unless an estimator asks for it.
    """

    params: Params  # x̄_{t_m}
    E: Any  # local steps of round m
    eta: Any  # step size of round m
    gradient: Params | None = None
    hessian: Any = None  # (d, d), for the flattened parameters
    gradient_sum: Params | None = None  # h_m, the mean gradients of the round's steps added up


SIDES = ("both", "lower", "upper")


class Interval(NamedTuple):
    """A confidence interval, coordinate by coordinate (or contrast by contrast)."""

    estimate: Any  # (d,)
    lower: Any  # (d,)
    upper: Any  # (d,)

    @classmethod
    def around(cls, estimate: Any, half: Any, side: str = "both") -> Interval:
        """estimate ± half; a bound that was not asked for is infinite."""
        lower = estimate - half if side != "upper" else estimate - np.inf
        upper = estimate + half if side != "lower" else estimate + np.inf
        return cls(estimate, lower, upper)


class Measurement(NamedTuple):
    """What an estimator has found: the interval is `estimate ± multiplier(level) · scale`."""

    estimate: Array  # (d,)
    scale: Array  # (d,); infinite where there is too little data for one
    floored: Any = False  # () bool: a numerical floor acted, so that `scale` is regularised
    detail: Any = ()  # what a law that depends on the data needs: (d,) or (1,) per leaf
    path: Any = (
        None  # (d,) the path's average, if `estimate` is a correction of it; see `Cause.CORRECTION`
    )


class Accumulator(NamedTuple):
    """A streaming statistic: `init(params) → state`, `update(state, sync) → state`, both pure.

    Every leaf of the state belongs to one replication, except those in `shared`: fields of a
    NamedTuple state (round counter, Σ1/E_m) that are functions of the schedule alone, of which the
    engine then keeps one copy for all replications. `any_width` says that on a CPU it is the same to the last
    bit whether a cell runs alone in a program or beside others, as its tests have shown. `on_host` is the same in
    NumPy and float64, for one run whose loop would take longer to compile than to run.

    What it needs is also what a client has to send for it, see `engine.cost.numbers_sent`. `hessian_every` is s if
    it reads the Hessians of rounds s, 2s, … alone: a client then sends no others.
    """

    init: Callable[[Params], Any]
    update: Callable[[Any, Sync], Any]
    needs_gradient: bool = False
    needs_hessian: bool = False
    needs_gradient_sum: bool = False
    shared: tuple[str, ...] = ()
    rolling: Rolling | None = None
    any_width: bool = False
    on_host: OnHost | None = None
    hessian_every: int = 1


class OnHost(NamedTuple):
    """`init(x) → state` and `update(state, sync) → state` on NumPy arrays."""

    init: Callable[[np.ndarray], Any]
    update: Callable[[Any, Sync], Any]


BLOCK_STEPS = 64  # consecutive local steps that the engine runs as one block


class Rolling(NamedTuple):
    """An update in two parts, for statistics that seldom move what they have to another place.

    `update(state, sync)` is then `add(state, sync)` after `roll(state)` where one is due. The engine leaves
    the rolling out of its loops: `roll_before(E, eta)` says for a plan before which blocks of
    `BLOCK_STEPS` steps it is due (a round belongs to the block of step t_m), and the engine rolls between blocks.
    """

    add: Callable[[Any, Sync], Any]
    roll: Callable[[Any], Any]
    roll_before: Callable[[np.ndarray, np.ndarray], np.ndarray]
    store: tuple[str, ...] = ()  # fields of the state that `add` leaves as they are


class JointLaw(NamedTuple):
    """The law of W = (Rx̂ − r)ᵀ (R M Rᵀ)⁻¹ (Rx̂ − r) under Rx* = r, for q contrasts R.

    `quantile(level, q) → c`, and `tail(statistic, q) → (p, Monte-Carlo standard error of p)`. Where the
    law depends on R and not on q alone, `of(R) → JointLaw` gives that of R.
    """

    quantile: Callable[[float, int], float]
    tail: Callable[[float, int], tuple[float, float]]
    normal: bool = False  # whether the estimate is jointly normal with covariance M
    of: Callable[[Any], JointLaw] | None = None


class Law(NamedTuple):
    """The distribution of (estimate − truth)/scale, on the host, in NumPy.

    `multiplier(level, plan, detail) → q` with P(|statistic| ≤ q) = level, and
    `tail(statistic, plan, detail) → p`, two-sided. `plan` is the `Plan` up to the round that is read,
    or None. `detail` is that of the measurement; replications, where there are many, come first, so
    that q is a number or broadcasts to (..., d). `joint(plan, detail) → JointLaw`, for the
    detail of one run, where that is known.
    `one_sided(level, plan, detail) → q` with P(statistic ≤ q) = level; without it the law is taken to be
    symmetric. `least_p`: the smallest p-value that `tail` can tell; it stands for all below it.
    `from_plan`: whether the multiplier ignores `detail`, so that a level without a critical value is
    refused before a run.

    Example, Student's t with as many degrees of freedom as the plan has pairs of rounds::

        def multiplier(level, plan, detail):
            return scipy.stats.t.isf((1 - level) / 2, plan.num_rounds // 2)

        def tail(statistic, plan, detail):
            return 2 * scipy.stats.t.sf(abs(statistic), plan.num_rounds // 2)

        law = jaxlsgd.Law(multiplier, tail, from_plan=True)  # and needs_plan=True for the estimator
    """

    multiplier: Callable[[float, Plan | None, Any], Any]
    tail: Callable[[Any, Plan | None, Any], Any]
    joint: Callable[[Plan | None, Any], JointLaw] | None = None
    from_plan: bool = False
    one_sided: Callable[[float, Plan | None, Any], Any] | None = None
    least_p: float = 0.0

    def half(self, level: float, side: str, plan: Plan | None, detail: Any) -> Any:
        """The multiplier of an interval with both bounds, or with one."""
        checks.level(level)
        checks.choice("side", side, SIDES)
        if side == "both":
            return self.multiplier(level, plan, detail)
        if level <= 0.5:
            raise refusal("level", "be above 0.5 for an interval with one bound", level)
        if self.one_sided is not None:
            return self.one_sided(level, plan, detail)
        return self.multiplier(2 * level - 1, plan, detail)

    def check(self, levels: Iterable[float], plan: Plan) -> None:
        """Raise ValueError where the law has no critical value for a level under a plan."""
        for level in levels if self.from_plan else ():
            self.multiplier(level, plan, ())


@dataclasses.dataclass(frozen=True)
class Estimator:
    """An interval method: the statistics it streams, and how they become an interval.

    Made by a builder such as `jaxlsgd.random_scaling`. Works in the engine and in any JAX loop::

        estimator = jaxlsgd.random_scaling()
        state = estimator.init(params)
        state = estimator.update(state, jaxlsgd.Sync(params=average, E=5, eta=0.01))
        lower, upper = estimator.interval(state, level=0.95)[1:]

    What tables, studies, joint tests, forecasts and figures need to know of a method, it declares.

    Functions are compared by identity: a builder of accumulators is cached (`functools.cache`) and
    `measure` is a function of its module, or every call of the builder would compile again.

    Attributes:
      name: short, unique among the methods of a run.
      accumulators: the statistics; two methods that name the same one share it in the engine.
      measure: `(states, horizon) → Measurement`, with one state per accumulator; traced by JAX.
        `horizon` is the plan as a `Horizon` of arrays; it may be None unless `needs_plan`.
      law: the law behind critical values and p-values, such as `jaxlsgd.inference.NORMAL`.
      matrix: `(states, horizon) → M`, the (d, d) matrix whose diagonal is the squared scale; joint
        inference calls it in float64. None where there is none.
      standard_error: whether the scale estimates the standard error of the estimate.
      judges: whether estimate and scale hold so widely that the intervals of methods that share none of its
        accumulators can be judged by them, see `analysis.verdict`.
      needs_plan: whether `measure` or `law` needs the plan.
      contrasts: rows R where the interval is for Rx, or () where it is for x itself.
      label: the name as people write it, for figures; the name itself if "".
      notes: `detail → sentences`, what a person should know of a run, from the detail of its measurement.
      reads_numpy: whether `measure` and `matrix` compute in NumPy where states and horizon are NumPy's, so that
        one run is read without compiling anything.
      cost: in words, what it costs beyond the run itself: gradients, communication, memory; "" if not told.
      within_theory: whether its law follows Local SGD's own recursion round by round, so that it is refused
        for an algorithm outside the paper's theory.
      least_rounds: how many rounds a plan must have.
    """

    name: str
    accumulators: tuple[Accumulator, ...]
    measure: Callable[[tuple[Any, ...], Horizon | None], Measurement]
    law: Law
    matrix: Callable[[tuple[Any, ...], Horizon | None], Any] | None = None
    standard_error: bool = False
    judges: bool = False
    needs_plan: bool = False
    contrasts: tuple[tuple[float, ...], ...] = ()
    label: str = ""
    notes: Callable[[Any], tuple[str, ...]] | None = None
    reads_numpy: bool = False
    cost: str = ""
    within_theory: bool = False
    least_rounds: int = 1

    @property
    def needs_gradient(self) -> bool:
        """Return whether it asks for the mean gradient at each synchronised average."""
        return any(part.needs_gradient for part in self.accumulators)

    @property
    def needs_gradient_sum(self) -> bool:
        """Return whether it asks for the sum of a round's mean gradients."""
        return any(part.needs_gradient_sum for part in self.accumulators)

    @property
    def needs_hessian(self) -> bool:
        """Return whether it asks for the mean Hessian at each synchronised average."""
        return any(part.needs_hessian for part in self.accumulators)

    @property
    def hessian_every(self) -> int:
        """s if it needs the Hessians of rounds s, 2s, … and no others."""
        return min(
            (part.hessian_every for part in self.accumulators if part.needs_hessian), default=1
        )

    def coordinates(self, problem: Problem) -> tuple[str, ...]:
        """Names of what the interval is for."""
        if self.contrasts:
            return tuple(f"contrast[{i}]" for i in range(len(self.contrasts)))
        return tuple(problem.parameter_names())

    def truth(self, problem: Problem) -> np.ndarray | None:
        """True value of what the interval is for, where the problem knows it."""
        x = problem.true_vector
        if x is None or not self.contrasts:
            return x
        return np.asarray(self.contrasts) @ x

    def truth_error(self, problem: Problem) -> np.ndarray | None:
        """Standard error of `truth`, √diag(R Σ Rᵀ) for contrasts R; None if it is exact or not known."""
        covariance = problem.truth_covariance
        if covariance is None or not self.contrasts:
            return problem.truth_error
        R = np.asarray(self.contrasts)
        return np.sqrt(np.maximum(np.einsum("ij,jk,ik->i", R, np.asarray(covariance), R), 0.0))

    def init(self, params: Params) -> tuple[Any, ...]:
        """Return the state before the first round."""
        return tuple(part.init(params) for part in self.accumulators)

    def update(self, state: tuple[Any, ...], sync: Sync) -> tuple[Any, ...]:
        """Return the state after one more round."""
        pairs = zip(self.accumulators, state, strict=True)
        return tuple(part.update(old, sync) for part, old in pairs)

    def check_plan(self, plan: Plan | None) -> None:
        """Refuse to do without a plan that the method needs, and one with too few rounds."""
        if self.needs_plan and plan is None:
            raise refusal("plan", f"be given: {self.name} needs the plan that was run", plan)
        if plan is not None and plan.num_rounds < self.least_rounds:
            rule = f"have at least {self.least_rounds} rounds for {self.name}"
            raise refusal("plan", rule, plan.num_rounds)

    def measure_one(self, state: tuple[Any, ...], horizon: Horizon | None) -> Measurement:
        """`measure` of one run that has ended: in NumPy where that can do it, else as one program."""
        if self.reads_numpy:
            return self.measure(jax.tree.map(np.asarray, state), horizon)
        return _compiled(self.measure, state, horizon)

    def interval(
        self, state: tuple[Any, ...], level: float, plan: Plan | None = None, side: str = "both"
    ) -> Interval:
        """Return the interval of the given level (0.95, not 95).

        Args:
          state: what `init` and `update` returned.
          level: how often the interval covers.
          plan: the plan that was run, where the method needs it.
          side: "both", or the only bound that is finite: "lower" or "upper".
        """
        checks.level(level)
        self.check_plan(plan)
        measured = self.measure_one(state, None if plan is None else Horizon.of(plan))
        half = self.law.half(level, side, plan, measured.detail) * measured.scale
        return Interval.around(measured.estimate, half, side)


# Operation by operation, a measurement takes seconds to compile.
_compiled = functools.partial(jax.jit, static_argnums=0)(lambda measure, *given: measure(*given))


class Horizon(NamedTuple):
    """A plan as arrays of padded length, so that plans of many lengths share one program."""

    E: Any  # (padded,) E_m, 0 beyond the last round
    eta: Any  # (padded,) η_m, 0 beyond the last round
    num_rounds: Any  # () T

    @classmethod
    def of(cls, plan: Plan, dtype: Any = None) -> Horizon:
        """Pad a plan to the next power of two."""
        length = 1 << max(6, (plan.num_rounds - 1).bit_length())
        pad = (0, length - plan.num_rounds)
        dtype = dtype or jnp.result_type(float)
        return cls(
            np.pad(plan.E, pad).astype(dtype),
            np.pad(plan.eta, pad).astype(dtype),
            np.asarray(plan.num_rounds, np.int32),
        )
