"""Whether a plan satisfies the paper's Assumptions 3.3 and 3.4, in words.

γ_m is of order m^−α and E_m of order m^β. `exact` is False if an exponent was estimated from a given sequence.
"""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxlsgd.core.display import Table

if TYPE_CHECKING:
    from jaxlsgd.schedules import Plan


class Verdict(NamedTuple):
    """One condition, whether it holds, and why."""

    label: str
    verdict: Literal["holds", "fails", "undecided"]
    sentence: str


class AssumptionReport(tuple[Verdict, ...]):
    """The result of `Plan.check`, to be printed."""

    def __str__(self) -> str:
        blank = " " * 25
        return "\n".join(
            textwrap.fill(f"{label:<9}{verdict:<16}{why}", 100, subsequent_indent=blank)
            for label, verdict, why in self
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return Table("", ("assumption", "verdict", "why"), self, (0, 1, 2)).html()


def check(plan: Plan) -> AssumptionReport:
    """Return the report of `Plan.check`."""
    schedule, alpha = plan.schedule, plan.step_size.alpha
    given_E, given_step = schedule.family == "custom", alpha is None
    alpha = -_slope(plan.gamma) if alpha is None else alpha
    beta = schedule.exponent if schedule.family == "power" else 0.0
    beta = _slope(plan.E[plan.warmup_rounds :]) if given_E else beta
    rows = _step_rows(plan, alpha, not given_step) + _interval_rows(plan, beta, not given_E)
    rows.append(_rate_row(alpha, beta, not (given_E or given_step)))
    return AssumptionReport(rows + ([_warmup_row(plan)] if schedule.warmup else []))


def _row(label: str, exact: bool, holds: bool, sentence: str) -> Verdict:
    return Verdict(label, ("holds" if holds else "fails") if exact else "undecided", sentence)


def _slope(values: NDArray[Any]) -> float:
    """Estimate the exponent of a given sequence: the log-log slope of block means over its second half."""
    m = np.arange(1, len(values) + 1)[len(values) // 2 :]
    if len(m) < 3:
        return math.nan
    size = 1 if len(m) < 8 else 2 * max(1, len(m) // 16)
    kept = len(m) // size * size
    place, mean = (of[-kept:].reshape(-1, size).mean(axis=1) for of in (m, values))
    return round(float(np.polyfit(np.log(place), np.log(mean), 1)[0]), 9) + 0.0  # never "-0"


def _here(exact: bool, **exponents: float) -> str:
    values = " and ".join(f"{name} = {value:.4g}" for name, value in exponents.items())
    if exact:
        return f"here {values}"
    return f"a given sequence has no limit, but over its second half it looks like {values}"


def _step_rows(plan: Plan, alpha: float, exact: bool) -> list[Verdict]:
    gamma, here = plan.gamma, _here(exact, α=alpha)
    rises = bool(np.any(gamma[1:] > gamma[:-1] * (1 + 1e-12)))
    never = f"γ_m must never increase; in this plan it {'does' if rises else 'does not'}."
    square = f"Σ γ_m² is finite if and only if α > 1/2; {here}."
    total = f"Σ γ_m is infinite if and only if α ≤ 1; {here}."
    slow = "(γ_m − γ_{m+1})/γ_m, of order 1/m, is o(γ_m) if and only if α < 1"
    return [
        _row("3.3", exact or rises, not rises and alpha >= 0, never),
        _row("3.3(i)", exact, alpha > 0.5, square),
        _row("3.3(ii)", exact, alpha <= 1, total),
        _row("3.3(iii)", exact, alpha < 1, f"{slow}; {here}."),
    ]


def _interval_rows(plan: Plan, beta: float, exact: bool) -> list[Verdict]:
    here = _here(exact, β=beta)
    falls = bool(np.any(np.diff(plan.E) < 0))
    cut = " (the last round of this plan is cut short to end at t_T)" if exact and falls else ""
    down = " and decreases at times" if falls and not cut else ""
    grows = f"E_m must be bounded or never decrease{cut}; here it is at most {plan.E.max()}{down}."
    moment = f"some δ_3 > 0 exists for E_m of order m^β if and only if β < 1; {here}."
    halfway = plan.prefix((plan.num_rounds + 1) // 2).nu_hat
    limit = f"ν̂ must tend to a finite ν; here it is {halfway:.4g} half way and"
    limit += f" {plan.nu_hat:.4g} at the end"
    if exact:
        limit += f", and it tends to {math.inf if plan.nu is None else plan.nu:.4g}"
    return [
        _row("3.4(i)", exact, True, grows),
        _row("3.4(ii)", exact, beta < 1, moment),
        _row("3.4(iii)", exact, beta < 1, f"{limit}."),
    ]


def _rate_row(alpha: float, beta: float, exact: bool) -> Verdict:
    """Return the row of 3.4(iv): with t_T of order T^(1+β), two powers of T must be negative."""
    first, second = (1 + beta) / 2 - min(alpha, 1.0), (alpha + beta - 1) / 2
    holds = max(first, second) < -1e-12
    why = (
        f"two terms must vanish: √t_T/T · Σ γ_m is of order T^{first:.4f}, which needs"
        f" α > (1+β)/2, and √(t_T/γ_T)/T is of order T^{second:.4f}, which needs"
        f" α < 1−β (both up to logarithms); {_here(exact, α=alpha, β=beta)}."
    )
    if exact and not holds and 0.5 < alpha < 1 and 0 < beta < 1:
        none = "no α meets both when β ≥ 1/3, yet " if beta > 1 / 3 - 1e-12 else ""
        why += (
            f" Note: {none}Section 3 of the paper says that every β in (0, 1) satisfies this,"
            " and its experiments use such schedules. It is sufficient, not necessary."
        )
    if exact and holds and (slowest := max(first, second)) > -0.05:
        why += f" It holds in the limit only: T^{slowest:.4f} is {1e6**slowest:.2f} at T = 10^6."
    return _row("3.4(iv)", exact, holds, why)


def _warmup_row(plan: Plan) -> Verdict:
    schedule, share = plan.schedule, plan.schedule.warmup
    why = (
        f"the rows above keep the {plan.warmup_rounds} warm-up rounds of this plan and let the"
        f" schedule run on. A warm-up that stays {share:.3g} of the observations makes another"
        " sequence for every horizon, which the theorems do not cover"
    )
    if schedule.beta is not None:
        bounded = schedule.family == "constant" or schedule.exponent == 0
        # T/t_T tends to share + (1 − share)/E, or to the share alone if E grows without bound.
        inverse = 1.0 / schedule.intervals(1)[0] if bounded else 0.0
        nu = (share + (1 - share) * inverse**2) / (share + (1 - share) * inverse) ** 2
        why += f": ν̂ then tends to {nu:.4g} (without warm-up to {schedule.nu:.4g})"
        why += "" if bounded else ", 3.4(ii) fails, and 3.4(iv) needs only 1/2 < α < 1"
    return Verdict("warm-up", "undecided", why + ".")
