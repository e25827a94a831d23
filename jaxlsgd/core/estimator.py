"""The contract of an interval method: the statistics that it streams, and the interval made of them.

Methods are written for one replication; only the engine adds that dimension.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlsgd.core import checks
from jaxlsgd.core.checks import blaming, refusal
from jaxlsgd.core.problem import Array, Params, Problem

if TYPE_CHECKING:
    from jaxlsgd.schedules.plan import Plan


class Sync(NamedTuple):
    """What the server has when round m ends.

    `gradient` is Σ_k p_k ∇f_k(x̄; ξ^k) and `hessian` Σ_k p_k ∇²f_k(x̄; ξ^k) at the average x̄, with
    the sample of the first local step of the next round; None unless an estimator needs it.
    """

    params: Params  # x̄_{t_m}
    E: Any  # local steps of round m
    eta: Any  # step size of round m
    gradient: Params | None = None
    hessian: Any = None  # (d, d), for the flattened parameters
    gradient_sum: Params | None = None  # h_m, the mean gradients of the round's steps added up
    anchored: Anchored | None = None
    share: Any = None  # t_m/t_T, if the plan is known


class Anchored(NamedTuple):
    """What clients evaluate at an anchor that the server has broadcast, with the observations of their steps.

    A client sends the sum of its gradients at the anchor after every round, and in a few rounds its Hessian there and
    at the anchor before, each averaged over the observations of the round.
    """

    gradient_sum: Params  # Σ_l Σ_k p_k ∇f_k(a; ξ_{k,l}) over the steps of the round
    hessian: Any = (
        None  # (d, d) mean over clients and observations of ∇²f_k(a; ξ); None in most rounds
    )
    hessian_before: Any = None  # (d, d) the same at the anchor before
    observations: Any = 0  # how many those means are over, all clients together


Side = Literal["both", "lower", "upper"]


class Interval(NamedTuple):
    """A confidence interval, coordinate by coordinate (or contrast by contrast)."""

    estimate: Any  # (d,)
    lower: Any  # (d,)
    upper: Any  # (d,)

    @classmethod
    def around(cls, estimate: Any, half: Any, side: Side = "both") -> Interval:
        """Return estimate ± half; with one side only, the other bound is infinite."""
        lower = estimate - half if side != "upper" else estimate - np.inf
        upper = estimate + half if side != "lower" else estimate + np.inf
        return cls(estimate, lower, upper)


class Measurement(NamedTuple):
    """The result of an estimator: the interval is `estimate ± multiplier(level) · scale`."""

    estimate: Array  # (d,)
    scale: Array  # (d,); infinite if there is too little data for one
    floored: Any = False  # () bool: a numerical floor acted, so that `scale` is regularised
    # What a law that depends on the data needs: (d,) or (1,) per leaf. If it has a true attribute `disagrees`, parts of the
    # run contradict each other, and `Fit.compare` gives no chances by this method.
    detail: Any = ()
    # (d,) the path's average, if `estimate` is a correction of it; see `Cause.CORRECTION`
    path: Array | None = None


class Accumulator(NamedTuple):
    """A streaming statistic: `init(params) → state`, `update(state, sync) → state`, both pure.

    Every leaf of the state belongs to one replication, except those in `shared`: fields of a
    NamedTuple state (round counter, Σ1/E_m) that depend on the schedule alone, of which the
    engine keeps one copy for all replications. `any_width` declares that on a CPU its results are the same to
    the last bit whether a cell runs alone in a program or beside others. `on_host` is the same statistic in
    NumPy and float64, for one run whose loop would take longer to compile than to run.

    Clients send what a statistic needs, see `engine.cost.numbers_sent`. `hessians` is n if it reads only n of
    them, see `hessians_due`: a client then sends no others; None if it reads one per round.
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
    hessians: int | None = None
    anchor: Anchor | None = None


def hessians_due(count: int, share: Any, xp: Any = np) -> Any:
    """Return how many of `count` Hessians are due when a share of the observations has been made: they are spread evenly."""
    return xp.floor(count * share + 1e-3)


class Anchor(NamedTuple):
    """Where a statistic has clients evaluate their observations once more, see `Anchored`.

    `places(state)` are the anchor and the one before it, (2, d). They change when the state rolls, so the engine
    evaluates one anchor in all steps of a round. `hessian_rounds(E, num_clients, dim)` says for a plan which rounds
    send Hessians: (T,) 0 for none, else 1 + the group of Hessians that they belong to. The engine adds those of the
    steps between two rolls with `add_hessians(state, sums, difference, counts)`: sums at the anchor by group,
    (groups, d, d), the sum of their differences from those at the anchor before, (d, d), and how many observations
    each group has, (groups,).
    """

    places: Callable[[Any], Array]
    begins: Callable[
        [int], int
    ]  # d → from which observation on clients evaluate an anchor other than the start
    hessian_rounds: Callable[[np.ndarray, int, int], np.ndarray]
    add_hessians: Callable[[Any, Array, Array, Array], Any]
    groups: int = 2


class OnHost(NamedTuple):
    """`init(x) → state` and `update(state, sync) → state` on NumPy arrays."""

    init: Callable[[np.ndarray], Any]
    update: Callable[[Any, Sync], Any]


BLOCK_STEPS = 64  # consecutive local steps that the engine runs as one block


class Rolling(NamedTuple):
    """An update in two parts, for statistics that seldom move their contents to another place.

    `update(state, sync)` is then `add(state, sync)`, after `roll(state)` when that is due. To keep `roll` out of
    the engine's loops, `roll_before(E, eta, dim)` gives for a plan the blocks of `BLOCK_STEPS` steps before which it
    is due (a round belongs to the block of step t_m), and the engine rolls between blocks.
    """

    add: Callable[[Any, Sync], Any]
    roll: Callable[[Any], Any]
    roll_before: Callable[[np.ndarray, np.ndarray, int], np.ndarray]
    store: tuple[str, ...] = ()  # fields of the state that `add` does not change


class JointLaw(NamedTuple):
    """The law of W = (Rx̂ − r)ᵀ (R M Rᵀ)⁻¹ (Rx̂ − r) under Rx* = r, for q contrasts R.

    `quantile(level, q) → c`, and `tail(statistic, q) → (p, Monte-Carlo standard error of p)`. If the
    law depends on R and not on q alone, `of(R) → JointLaw` gives the law for R.
    """

    quantile: Callable[[float, int], float]
    tail: Callable[[float, int], tuple[float, float]]
    normal: bool = False  # whether the estimate is jointly normal with covariance M
    of: Callable[[Any], JointLaw] | None = None


class Law(NamedTuple):
    """The distribution of (estimate − truth)/scale, on the host, in NumPy.

    `multiplier(level, plan, detail) → q` with P(|statistic| ≤ q) = level, and
    `tail(statistic, plan, detail) → p`, two-sided. `plan` is the `Plan` up to the round that is read,
    or None. `detail` is that of the measurement; its leading axes are replications, if there are many, so
    that q is a number or broadcasts to (..., d). `joint(plan, detail) → JointLaw`, for the
    detail of one run, if that law is known.
    `one_sided(level, plan, detail) → q` with P(statistic ≤ q) = level; without it the law is assumed to be
    symmetric. `least_p`: the smallest p-value that `tail` can compute; it stands for all below it.
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

    def half(self, level: float, side: Side, plan: Plan | None, detail: Any) -> Any:
        """Return the multiplier of an interval with both bounds, or with one."""
        checks.level(level)
        checks.choice("side", side, Side)
        if side == "both":
            return self.multiplier(level, plan, detail)
        if level <= 0.5:
            raise refusal("level", "be above 0.5 for an interval with one bound", level)
        if self.one_sided is not None:
            return self.one_sided(level, plan, detail)
        return self.multiplier(2 * level - 1, plan, detail)

    def check(self, levels: Iterable[float], plan: Plan) -> None:
        """Raise ValueError if the law has no critical value for a level under a plan."""
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

    A method declares all that tables, studies, joint tests, forecasts and figures need.

    Functions are compared by identity: cache builders of accumulators (`functools.cache`) and make
    `measure` a function of its module, or every call of the builder compiles again.

    Attributes:
      name: short, unique among the methods of a run.
      accumulators: the statistics; two methods that name the same one share it in the engine.
      measure: `(states, horizon) → Measurement`, with one state per accumulator; traced by JAX.
        `horizon` is the plan as a `Horizon` of arrays; it may be None unless `needs_plan`.
      law: the law behind critical values and p-values, such as `jaxlsgd.inference.NORMAL`.
      matrix: `(states, horizon) → M`, the (d, d) matrix whose diagonal is the squared scale; joint
        inference calls it in float64. None if there is none.
      standard_error: whether the scale estimates the standard error of the estimate.
      needs_plan: whether `measure` or `law` needs the plan.
      contrasts: rows R if the interval is for Rx, or () if it is for x itself.
      contrasts_for: `problem → rows R`, for contrasts that depend on it, as those of copies of its parameters do.
      label: the name in figures; `name` if "".
      notes: `detail → sentences` to print with a run, from the detail of its measurement.
      reads_numpy: whether `measure` and `matrix` compute in NumPy if states and horizon are NumPy's, so that
        one run is read without compiling anything.
      reads_tiles: whether `measure` also reads many runs of one plan at once: NumPy states with the replications
        first, and the `Plan` as horizon. It may raise `NotTabulated`. The engine does so in float32.
      cost: in words, what it costs beyond the run itself: gradients, communication, memory; "" if not stated.
      any_optimiser: whether its theory holds for any algorithm whose averages come near the minimum. If it has
        standard errors too, other methods are compared with it, see `Fit.compare`.
      within_theory: whether its law follows Local SGD's own recursion round by round, so that it is refused
        for algorithms outside the paper's theory.
      least_rounds: how many rounds a plan must have.
      most_parameters: how many parameters it is for at most; None if it is for any number.
      valid: "fixed" if an interval holds at one time that does not depend on the data, "looks" if all at the looks
        of a run hold together, "always" if all at any times do.
      law_at: for "looks", `clocks → Law` for looks at these numbers of observations per client.
    """

    name: str
    accumulators: tuple[Accumulator, ...]
    measure: Callable[[tuple[Any, ...], Horizon | None], Measurement]
    law: Law
    matrix: Callable[[tuple[Any, ...], Horizon | None], Any] | None = None
    standard_error: bool = False
    needs_plan: bool = False
    contrasts: tuple[tuple[float, ...], ...] = ()
    label: str = ""
    notes: Callable[[Any], tuple[str, ...]] | None = None
    reads_numpy: bool = False
    reads_tiles: bool = False
    cost: str = ""
    any_optimiser: bool = False
    within_theory: bool = False
    least_rounds: int = 1
    most_parameters: int | None = None
    valid: str = "fixed"
    law_at: Callable[[tuple[int, ...]], Law] | None = None
    contrasts_for: Callable[[Problem], tuple[tuple[float, ...], ...]] | None = None

    @property
    def needs_gradient(self) -> bool:
        """Return whether it needs the mean gradient at each synchronised average."""
        return any(part.needs_gradient for part in self.accumulators)

    @property
    def needs_gradient_sum(self) -> bool:
        """Return whether it needs the sum of a round's mean gradients."""
        return any(part.needs_gradient_sum for part in self.accumulators)

    @property
    def needs_hessian(self) -> bool:
        """Return whether it needs the mean Hessian at each synchronised average."""
        return any(part.needs_hessian for part in self.accumulators)

    @property
    def hessians(self) -> int | None:
        """Return n if it needs only n Hessians in all, see `hessians_due`; None if it needs one per round."""
        many = [part.hessians for part in self.accumulators if part.needs_hessian]
        return None if None in many else max((n for n in many if n is not None), default=0)

    @property
    def anchor(self) -> Anchor | None:
        """Where it has clients evaluate their observations once more, if it does."""
        return next((part.anchor for part in self.accumulators if part.anchor is not None), None)

    def anchors(self, state: tuple[Any, ...]) -> Array:
        """Return where clients evaluate the observations of the next round once more: the anchor and the one before.

        For a loop of your own and a method with an `anchor`; (2, d), of the flattened parameters.
        """
        for part, own in zip(self.accumulators, state, strict=True):
            if part.anchor is not None:
                return part.anchor.places(own)
        raise refusal(
            "estimator", "have an anchor, as one_step() does", self.name, code="unsupported"
        )

    def at_looks(self, clocks: Sequence[int]) -> Estimator:
        """Return the method with the law of looks at these numbers of observations; itself unless it needs them."""
        if self.law_at is None:
            return self
        return dataclasses.replace(self, law=self.law_at(tuple(clocks)), law_at=None)

    def for_problem(self, problem: Problem) -> Estimator:
        """Return the method with its contrasts for a problem; itself unless they depend on that."""
        if self.contrasts_for is None:
            return self
        return dataclasses.replace(self, contrasts=self.contrasts_for(problem), contrasts_for=None)

    def coordinates(self, problem: Problem) -> tuple[str, ...]:
        """Return the names of what the interval is for."""
        if contrasts := self.for_problem(problem).contrasts:
            return tuple(f"contrast[{i}]" for i in range(len(contrasts)))
        return tuple(problem.parameter_names())

    def truth(self, problem: Problem) -> np.ndarray | None:
        """Return the true value of what the interval is for, or None."""
        x, contrasts = problem.true_vector, self.for_problem(problem).contrasts
        return x if x is None or not contrasts else np.asarray(contrasts) @ x

    def truth_error(self, problem: Problem) -> np.ndarray | None:
        """Return the standard error of `truth`, √diag(R Σ Rᵀ) for contrasts R; None if it is exact or not known."""
        covariance, contrasts = problem.truth_covariance, self.for_problem(problem).contrasts
        if covariance is None or not contrasts:
            return problem.truth_error
        R = np.asarray(contrasts)
        return np.sqrt(np.maximum(np.einsum("ij,jk,ik->i", R, np.asarray(covariance), R), 0.0))

    def init(self, params: Params) -> tuple[Any, ...]:
        """Return the state before the first round."""
        return tuple(part.init(params) for part in self.accumulators)

    def update(self, state: tuple[Any, ...], sync: Sync) -> tuple[Any, ...]:
        """Return the state after one more round."""
        pairs = zip(self.accumulators, state, strict=True)
        return tuple(part.update(old, sync) for part, old in pairs)

    def check_plan(self, plan: Plan | None, levels: float | Iterable[float] = ()) -> None:
        """Refuse a missing plan if the method needs one, and a plan that has too few rounds or no critical values."""
        levels = levels if isinstance(levels, Iterable) else (levels,)
        if self.needs_plan and plan is None:
            raise refusal(
                "plan", f"be given: {self.name} needs the plan that was run", plan, code="missing"
            )
        if plan is not None and plan.num_rounds < self.least_rounds:
            rule = f"have at least {self.least_rounds} rounds for {self.name}"
            raise refusal("plan", rule, plan.num_rounds)
        if plan is not None:
            with blaming(self.law.multiplier, f"`law.multiplier` of method {self.name!r}"):
                self.law.check(levels, plan)

    def measure_one(self, state: tuple[Any, ...], horizon: Horizon | None) -> Measurement:
        """Measure one run that has ended: in NumPy if the method can, else as one program."""
        if self.reads_numpy:
            return self.measure(jax.tree.map(np.asarray, state), horizon)
        return _compiled(self.measure, state, horizon)

    def interval(
        self, state: tuple[Any, ...], level: float, plan: Plan | None = None, side: Side = "both"
    ) -> Interval:
        """Return the interval of the given level (0.95, not 95).

        Args:
          state: what `init` and `update` returned.
          level: how often the interval covers.
          plan: the plan that was run, if the method needs it.
          side: "both", or the only bound that is finite: "lower" or "upper".
        """
        checks.level(level)
        self.check_plan(plan)
        measured = self.measure_one(state, None if plan is None else Horizon.of(plan))
        half = self.law.half(level, side, plan, measured.detail) * measured.scale
        return Interval.around(measured.estimate, half, side)


# One program: compiled operation by operation, a measurement takes seconds.
_compiled = functools.partial(jax.jit, static_argnums=0)(lambda measure, *given: measure(*given))


class NotTabulated(Exception):
    """Raised by a method that `reads_tiles` for runs that it has to read one by one."""


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
