"""The limit law of random scaling, t*(β) or that of the plan's own E_m, for intervals and joint tests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxlsgd.core.checks import refusal
from jaxlsgd.core.estimator import JointLaw, Law
from jaxlsgd.inference.laws import critical_values, wald_law

if TYPE_CHECKING:
    from jaxlsgd.schedules import Plan


@functools.cache
def limit_law(critical: str, beta: float | None) -> Law:
    """The law of (ȳ − x*)/√V̂ as T → ∞.

    Args:
      critical: "asymptotic", "schedule" or "paper"; see `random_scaling`.
      beta: growth exponent of E_m; the plan's if None.
    """

    def multiplier(level: float, plan: Plan | None, detail: Any) -> float:
        del detail
        if plan is not None and plan.num_rounds < 2:
            return float("inf")  # as the scale: one round has no spread
        if _by_schedule(critical, beta, plan):
            return critical_values.for_plan(_required(plan), level)
        if critical == "paper":
            return critical_values.paper_value(_growth(beta, plan), level)
        return critical_values.critical_value(level, beta=_growth(beta, plan))

    def tail(statistic: Any, plan: Plan | None, detail: Any) -> Any:
        del detail
        if _by_schedule(critical, beta, plan):
            return critical_values.p_value_for_plan(_required(plan), statistic)
        by = critical_values.paper_p_value if critical == "paper" else critical_values.p_value
        return by(statistic, beta=_growth(beta, plan))

    def joint(plan: Plan | None, detail: Any) -> JointLaw:
        del detail

        def one_quantile(level: float) -> float:
            return multiplier(level, plan, ()) ** 2

        def one_tail(statistic: float) -> float:
            return float(tail(statistic**0.5, plan, ()))

        return _joint_law(_spectrum(critical, beta, plan), one_quantile, one_tail)

    # The law of a schedule is an integral that takes its time, and exists for every schedule.
    return Law(multiplier, tail, joint, from_plan=critical != "schedule")


def _joint_law(
    spectrum: critical_values.Spectrum,
    one_quantile: Callable[[float], float],
    one_tail: Callable[[float], float],
) -> JointLaw:
    """Exact for one contrast, from the table where there is one, else simulated."""

    def quantile(level: float, q: int) -> float:
        if q == 1:
            return one_quantile(level)
        if q > wald_law.DIMS:
            raise refusal("contrasts", f"be at most {wald_law.DIMS} for random scaling", q)
        if not spectrum.energy.any() and critical_values.wald_has_level(level):
            return critical_values.wald_critical_value(q, level)
        return wald_law.quantile(level, q, spectrum)

    def tail(statistic: float, q: int) -> tuple[float, float]:
        return (one_tail(statistic), 0.0) if q == 1 else wald_law.tail(statistic, q, spectrum)

    return JointLaw(quantile, tail)


def _growth(beta: float | None, plan: Plan | None) -> float:
    if beta is not None:
        return beta
    if plan is None:
        return 0.0
    if plan.beta is None:
        rule = f"be given for the schedule {plan.name}, whose growth exponent is not known"
        raise refusal("beta", rule, None, "; critical='schedule' needs none")
    return plan.beta


def _by_schedule(critical: str, beta: float | None, plan: Plan | None) -> bool:
    """Whether the law is that of the plan's own E_m: on request, and for a sequence without a family."""
    without_family = beta is None and plan is not None and plan.beta is None
    return critical == "schedule" or (critical == "asymptotic" and without_family)


def _spectrum(critical: str, beta: float | None, plan: Plan | None) -> critical_values.Spectrum:
    if _by_schedule(critical, beta, plan):
        return critical_values.plan_spectrum(critical_values.check_plan(_required(plan)))
    return critical_values.beta_spectrum(_growth(beta, plan))


def _required(plan: Plan | None) -> Plan:
    if plan is None:
        raise refusal("plan", "be given: critical='schedule' needs the plan that was run", plan)
    return plan
