"""What a plan has to do with the paper's Assumptions 3.3 and 3.4, in words.

alpha and beta are the exponents of gamma_m and E_m, and `told` is False where they were only read off
a given sequence.
"""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from jaxlsgd.schedules import Plan


class Verdict(NamedTuple):
    """One condition, whether it holds, and why."""

    label: str
    verdict: Literal["holds", "fails", "cannot be told"]
    sentence: str


class AssumptionReport(tuple[Verdict, ...]):
    """The rows of `Plan.check`; print it to read it."""

    def __str__(self) -> str:
        blank = " " * 25
        return "\n".join(
            textwrap.fill(f"{label:<9}{verdict:<16}{why}", 100, subsequent_indent=blank)
            for label, verdict, why in self
        )


def check(plan: Plan) -> AssumptionReport:
    """The report of `Plan.check`."""
    schedule, alpha = plan.schedule, plan.step_size.alpha
    given_E, given_step = schedule.family == "custom", alpha is None
    alpha = -_slope(plan.gamma) if alpha is None else alpha
    beta = schedule.exponent if schedule.family == "power" else 0.0
    beta = _slope(plan.E[plan.warmup_rounds :]) if given_E else beta
    rows = _step_rows(plan, alpha, not given_step) + _interval_rows(plan, beta, not given_E)
    rows.append(_rate_row(alpha, beta, not (given_E or given_step)))
    return AssumptionReport(rows + ([_warmup_row(plan)] if schedule.warmup else []))


def _row(label: str, told: bool, holds: bool, sentence: str) -> Verdict:
    return Verdict(label, ("holds" if holds else "fails") if told else "cannot be told", sentence)


def _slope(values: NDArray[Any]) -> float:
    """The exponent that a given sequence seems to have: log-log slope over its second half.

    Of means over blocks, because single values may jump up and down.
    """
    m = np.arange(1, len(values) + 1)[len(values) // 2 :]
    if len(m) < 3:
        return math.nan
    size = 1 if len(m) < 8 else 2 * max(1, len(m) // 16)
    kept = len(m) // size * size
    place, mean = (of[-kept:].reshape(-1, size).mean(axis=1) for of in (m, values))
    return round(float(np.polyfit(np.log(place), np.log(mean), 1)[0]), 9) + 0.0  # never "-0"


def _here(told: bool, **exponents: float) -> str:
    values = " and ".join(f"{name} = {value:.4g}" for name, value in exponents.items())
    if told:
        return f"here {values}"
    return f"a given sequence has no limit, but over its second half it looks like {values}"


def _step_rows(plan: Plan, alpha: float, told: bool) -> list[Verdict]:
    gamma, here = plan.gamma, _here(told, alpha=alpha)
    rises = bool(np.any(gamma[1:] > gamma[:-1] * (1 + 1e-12)))
    never = f"gamma_m must never increase; in this plan it {'does' if rises else 'does not'}."
    square = f"sum gamma_m^2 is finite if and only if alpha > 1/2; {here}."
    total = f"sum gamma_m is infinite if and only if alpha <= 1; {here}."
    slow = "(gamma_m - gamma_(m+1)) / gamma_m, of order 1/m, is o(gamma_m) if and only if alpha < 1"
    return [
        _row("3.3", told or rises, not rises and alpha >= 0, never),
        _row("3.3(i)", told, alpha > 0.5, square),
        _row("3.3(ii)", told, alpha <= 1, total),
        _row("3.3(iii)", told, alpha < 1, f"{slow}; {here}."),
    ]


def _interval_rows(plan: Plan, beta: float, told: bool) -> list[Verdict]:
    here = _here(told, beta=beta)
    falls = bool(np.any(np.diff(plan.E) < 0))
    cut = " (the last round of this plan is cut short to end at t_T)" if told and falls else ""
    down = " and decreases at times" if falls and not cut else ""
    grows = f"E_m must be bounded or never decrease{cut}; here it is at most {plan.E.max()}{down}."
    moment = f"some delta_3 > 0 will do for E_m of order m^beta if and only if beta < 1; {here}."
    halfway = plan.prefix((plan.num_rounds + 1) // 2).nu_hat
    limit = f"nu_hat must tend to a finite nu; here it is {halfway:.4g} half way and"
    limit += f" {plan.nu_hat:.4g} at the end"
    if told:
        limit += f", and it tends to {math.inf if plan.nu is None else plan.nu:.4g}"
    return [
        _row("3.4(i)", told, True, grows),
        _row("3.4(ii)", told, beta < 1, moment),
        _row("3.4(iii)", told, beta < 1, f"{limit}."),
    ]


def _rate_row(alpha: float, beta: float, told: bool) -> Verdict:
    """Assumption 3.4(iv): with t_T of order T^(1+beta), two powers of T that must be negative."""
    first, second = (1 + beta) / 2 - min(alpha, 1.0), (alpha + beta - 1) / 2
    holds = max(first, second) < -1e-12
    why = (
        f"two terms must vanish: sqrt(t_T)/T * sum gamma_m is of order T^{first:.4f}, which needs"
        f" alpha > (1+beta)/2, and sqrt(t_T/gamma_T)/T is of order T^{second:.4f}, which needs"
        f" alpha < 1-beta (both up to logarithms); {_here(told, alpha=alpha, beta=beta)}."
    )
    if told and not holds and 0.5 < alpha < 1 and 0 < beta < 1:
        none = "no alpha meets both when beta >= 1/3, yet " if beta > 1 / 3 - 1e-12 else ""
        why += (
            f" Note: {none}Section 3 of the paper says that every beta in (0, 1) satisfies this,"
            " and its experiments use such schedules. It is sufficient, not necessary."
        )
    if told and holds and (slowest := max(first, second)) > -0.05:
        why += f" It holds in the limit only: T^{slowest:.4f} is {1e6**slowest:.2f} at T = 10^6."
    return _row("3.4(iv)", told, holds, why)


def _warmup_row(plan: Plan) -> Verdict:
    schedule, share = plan.schedule, plan.schedule.warmup
    why = (
        f"the rows above keep the {plan.warmup_rounds} warm-up rounds of this plan and let the"
        f" schedule run on. A warm-up that stays {share:.3g} of the observations makes another"
        " sequence for every horizon, which the theorems do not cover"
    )
    if schedule.beta is not None:
        bounded = schedule.family == "constant" or schedule.exponent == 0
        # T/t_T tends to share + (1 - share)/E, and to the share alone when E grows without bound.
        inverse = 1.0 / schedule.intervals(1)[0] if bounded else 0.0
        nu = (share + (1 - share) * inverse**2) / (share + (1 - share) * inverse) ** 2
        why += f": nu_hat then tends to {nu:.4g} (without warm-up to {schedule.nu:.4g})"
        why += "" if bounded else ", 3.4(ii) fails, and 3.4(iv) asks only for 1/2 < alpha < 1"
    return Verdict("warm-up", "cannot be told", why + ".")
