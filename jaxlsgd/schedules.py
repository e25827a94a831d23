"""Communication schedules, step sizes, and the plan made of them.

A schedule says how many local steps E_m round m takes. A step size says how far round m moves,
gamma_m = E_m eta_m. A plan is both written out for a finite horizon, as read-only arrays.

Section, table and assumption numbers are those of "Statistical Estimation and Inference via Local
SGD in Federated Learning". Everything here is NumPy on the host, int64 and float64.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import numbers
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

PAPER_SCHEDULES = ("C1", "C5", "Log", "P(1/3)", "P(1/2)")
LARGEST_INTERVAL = 2**31 - 1  # an interval is an int32 on the device


def _must(argument: str, rule: str, value: object) -> str:
    return f"{argument} must {rule}; received {value!r}"


def _real(argument: str, value: object, rule: str = "be finite", above: float = -math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(_must(argument, "be a number", value))
    number = float(value)
    if not (math.isfinite(number) and number > above):
        raise ValueError(_must(argument, rule, value))
    return number


def _integer(argument: str, value: object) -> int:
    rule, number = "be an integer from 1 to 2**53", 0
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        number = int(value)
    else:
        _real(argument, value, rule)
    if not 1 <= number <= 2**53:
        raise ValueError(_must(argument, rule, value))
    return number


def _positive(argument: str, value: object) -> float:
    return _real(argument, value, "be finite and greater than 0", 0.0)


def _positive_array(argument: str, values: ArrayLike) -> NDArray[Any]:
    """A non-empty vector of finite numbers greater than 0, whatever its dtype."""
    array = np.asarray(values)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(_must(argument, "be a sequence that is not empty", values))
    # NumPy reads [2, True] as [2, 1].
    has_bool = isinstance(values, (list, tuple)) and any(isinstance(v, bool) for v in values)
    if has_bool or array.dtype.kind not in "iuf":
        raise TypeError(_must(argument, "hold numbers only", "bool" if has_bool else array.dtype))
    good = np.isfinite(array) & (array > 0)
    if not good.all():
        first = int(good.argmin())
        raise ValueError(_must(f"{argument}[{first}]", "be finite and > 0", array[first].item()))
    return array


def _interval_array(argument: str, values: ArrayLike) -> NDArray[np.int64]:
    array = _positive_array(argument, values)
    good = (array == np.floor(array)) & (array <= LARGEST_INTERVAL)
    if not good.all():
        first, rule = int(good.argmin()), f"be an integer from 1 to {LARGEST_INTERVAL}"
        raise ValueError(_must(f"{argument}[{first}]", rule, array[first].item()))
    return array.astype(np.int64)


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array


def _ceil(x: NDArray[np.float64]) -> NDArray[np.int64]:
    """Ceiling to an interval, so that 7776**(1/5) = 6.000000000000001 gives 6 and not 7."""
    # 16 units in the last place cover pow, log and the rounding of the exponent itself, and are
    # less than the step from a perfect power to the next m, up to m = 1e12.
    rounded = np.ceil(x * (1.0 - 16 * np.finfo(np.float64).eps))
    return np.clip(rounded, 1, LARGEST_INTERVAL + 1).astype(np.int64)


# A family is its shape s(m, exponent, base), and E'_m = ceil(scale * s): a new one is one line.
_SHAPES: dict[str, Callable[[NDArray[np.float64], float, float], NDArray[np.float64]]] = {
    "constant": lambda m, exponent, base: np.ones_like(m),
    "logarithmic": lambda m, exponent, base: (np.log2(m + 1) / np.log2(base)) ** exponent,
    "iterated_logarithmic": lambda m, exponent, base: np.log(np.log(m + 2)) ** exponent,
    "power": lambda m, exponent, base: m**exponent,
}


@dataclass(frozen=True)
class Schedule:
    """How many local steps each round takes; made by the builders below, never by hand.

    E_m = 1 for the warm-up rounds, then E'_1, E'_2, ... with E'_m = max(1, ceil(scale * s(m))).
    """

    family: str
    name: str
    scale: float = 1.0
    exponent: float = 0.0
    base: float = 2.0
    sequence: tuple[int, ...] = ()
    warmup: float = 0.0

    def __str__(self) -> str:
        return self.name + (f" with {self.warmup:.3g} warm-up" if self.warmup else "")

    @property
    def beta(self) -> float | None:
        """Exponent of g(r) = r**(1/(1-beta)), Section 4.2, for E' alone; None if there is none."""
        if self.family == "custom" or (self.exponent >= 1 and self.family == "power"):
            return None
        return self.exponent if self.family == "power" else 0.0

    @property
    def nu(self) -> float | None:
        """The limit nu = 1/(1-beta**2) of Table 1, for E' alone; None if there is none.

        A warm-up that stays a fixed share of the observations moves the limit: see `Plan.check`.
        """
        return None if self.beta is None else 1.0 / (1.0 - self.beta**2)

    def intervals(self, num_rounds: int) -> NDArray[np.int64]:
        """E'_1, ..., E'_n, without warm-up.

        Args:
            num_rounds: n, at least 1, and at most the length of a custom sequence.

        Returns:
            int64 array of shape (num_rounds,).

        >>> power(1 / 3).intervals(9).tolist()
        [1, 2, 2, 2, 2, 2, 2, 2, 3]
        """
        E = self._available(_integer("num_rounds", num_rounds))
        if len(E) < num_rounds:
            rule = f"hold at least the {num_rounds} rounds asked for"
            raise ValueError(_must("sequence", rule, f"{len(E)} rounds"))
        return _interval_array("E", E)

    def with_warmup(self, fraction: float) -> Schedule:
        """The same schedule after a warm-up of E = 1 over a share of the *observations*.

        round(fraction * t_T) rounds of E = 1 come first, then E'_1, E'_2, ... (Section 5: "the
        first 5% observations"; its interval lengths do not agree with 5% of the rounds).

        Args:
            fraction: in [0, 1); the paper has 0.05. It replaces an earlier warm-up.

        >>> plan = paper("C5").with_warmup(0.05).plan(power_decay(0.5), num_steps=5000)
        >>> plan.warmup_rounds, plan.num_rounds
        (250, 1200)
        """
        fraction = _real("fraction", fraction, "be in [0, 1)")
        if not 0 <= fraction < 1:
            raise ValueError(_must("fraction", "be in [0, 1)", fraction))
        return replace(self, warmup=fraction)

    def plan(
        self, step_size: StepSize, *, num_steps: int | None = None, num_rounds: int | None = None
    ) -> Plan:
        """Write the schedule and the step size out for a finite horizon.

        With num_steps = t_T the last round is shortened so that sum E_m = t_T exactly, and
        eta_T = gamma_T / E_T keeps its effective step. With num_rounds = T the warm-up is the
        smallest w with w >= round(fraction * t_T) for the t_T that w leads to; where growing
        intervals step over equality it is that much longer than the fraction.

        Args:
            step_size: from `power_decay`, `constant_step` or `custom_step`; m counts every round.
            num_steps: observations per client t_T. Exactly one of the two must be given.
            num_rounds: rounds T.

        Returns:
            The `Plan`.

        >>> paper("P(1/2)").plan(power_decay(2.0), num_steps=12).E.tolist()
        [1, 2, 2, 2, 3, 2]
        """
        if not isinstance(step_size, StepSize):
            raise TypeError(_must("step_size", "be a StepSize, as power_decay(0.5)", step_size))
        if (num_steps is None) == (num_rounds is None):
            given = f"num_steps={num_steps!r}, num_rounds={num_rounds!r}"
            raise ValueError(
                f"exactly one of num_steps and num_rounds must be given; received {given}"
            )
        if num_rounds is None:
            E, warmup_rounds = self._fill_steps(_integer("num_steps", num_steps))
        else:
            E, warmup_rounds = self._fill_rounds(_integer("num_rounds", num_rounds))
        E = np.concatenate([np.ones(warmup_rounds, np.int64), E])
        return Plan(E, step_size.effective(len(E)) / E, self, step_size, warmup_rounds)

    def _available(self, num_rounds: int) -> NDArray[np.int64]:
        """E' up to num_rounds: fewer if a custom sequence ends, clipped above LARGEST_INTERVAL."""
        if self.family == "custom":
            return np.array(self.sequence[:num_rounds], np.int64)
        m = np.arange(1, num_rounds + 1, dtype=np.float64)
        with np.errstate(over="ignore"):
            return _ceil(self.scale * _SHAPES[self.family](m, self.exponent, self.base))

    def _fill_steps(self, num_steps: int) -> tuple[NDArray[np.int64], int]:
        warmup_rounds = round(self.warmup * num_steps)
        left = num_steps - warmup_rounds
        if left < 1:
            rule = f"leave at least one observation after a warm-up of {warmup_rounds}"
            raise ValueError(_must("num_steps", rule, num_steps))
        guess = min(left, 64)
        while (E := self._available(guess)).sum() < left and guess < left:
            guess = min(left, 4 * guess)
        ends = np.cumsum(E)
        if ends[-1] < left:
            rule = f"hold at least the {left} local steps asked for"
            raise ValueError(_must("sequence", rule, f"{ends[-1]} local steps"))
        last = int(np.searchsorted(ends, left))
        E = E[: last + 1].copy()
        E[last] -= ends[last] - left
        return E, warmup_rounds

    def _fill_rounds(self, num_rounds: int) -> tuple[NDArray[np.int64], int]:
        # Where a custom sequence ends the ones are a stand-in, which `intervals` then refuses.
        E = self._available(num_rounds)
        ends = np.cumsum(np.concatenate([[0], E, np.ones(num_rounds - len(E), np.int64)]))
        w = np.arange(num_rounds + 1)
        num_steps = w + ends[::-1]
        # w - fraction * t_T increases with w, so the first w that is enough is the answer.
        warmup_rounds = int(np.argmax(w >= np.rint(self.warmup * num_steps)))
        if warmup_rounds == num_rounds:
            rule = f"leave at least one round after a warm-up of {warmup_rounds}"
            raise ValueError(_must("num_rounds", rule, num_rounds))
        return self.intervals(num_rounds - warmup_rounds), warmup_rounds


def constant(E: int) -> Schedule:
    """E'_m = E (Table 1, rows Base and 1).

    >>> constant(5).name
    'C5'
    """
    E = int(_interval_array("E", [_integer("E", E)])[0])
    return Schedule("constant", f"C{E}", scale=float(E))


def logarithmic(scale: float = 1.0, power: float = 1.0, base: float = 2.0) -> Schedule:
    """E'_m = ceil(scale * log_base(m + 1)**power) (Table 1, row 3; default: the paper's Log).

    Args:
        scale: E > 0.
        power: beta of row 3, > 0. (A power of 0 or less is bounded: use `constant` or `custom`.)
        base: of the logarithm, > 1; math.e gives ln.

    >>> logarithmic().intervals(8).tolist()
    [1, 2, 2, 3, 3, 3, 3, 4]
    """
    scale, power = _positive("scale", scale), _positive("power", power)
    base = _real("base", base, "be finite and greater than 1", 1.0)
    plain = (scale, power, base) == (1.0, 1.0, 2.0)
    name = "Log" if plain else f"Log({scale:g},{power:g},{'e' if base == math.e else f'{base:g}'})"
    return Schedule("logarithmic", name, scale, power, base)


def iterated_logarithmic(scale: float = 1.0, power: float = 1.0) -> Schedule:
    """E'_m = ceil(scale * ln(ln(m + 2))**power), scale and power > 0 (Table 1, row 4).

    >>> iterated_logarithmic(scale=3).intervals(6).tolist()
    [1, 1, 2, 2, 2, 3]
    """
    scale, power = _positive("scale", scale), _positive("power", power)
    return Schedule("iterated_logarithmic", f"LogLog({scale:g},{power:g})", scale, power)


def power(beta: float, scale: float = 1.0, *, allow_outside_theory: bool = False) -> Schedule:
    """E'_m = ceil(scale * m**beta) (Table 1, row 5).

    Args:
        beta: in [0, 1). Below 0 the ceiling is 1 in the end: use `constant` or `custom`.
        scale: E > 0.
        allow_outside_theory: accept beta >= 1, where nu is infinite and `Plan.check` says so.

    >>> power(1 / 2).name, power(1 / 2).nu
    ('P(1/2)', 1.3333333333333333)
    """
    beta, scale = _real("beta", beta), _positive("scale", scale)
    if beta < 0 or (beta >= 1 and not allow_outside_theory):
        raise ValueError(_must("beta", "be in [0, 1)", beta))
    short = Fraction(beta).limit_denominator(12)
    name = f"P({short if float(short) == beta else f'{beta:g}'})"
    return Schedule("power", name if scale == 1 else f"{scale:g}*{name}", scale, beta)


def custom(sequence: ArrayLike) -> Schedule:
    """E'_1, E'_2, ... as given: whole numbers from 1 up (a float array of whole numbers will do).

    >>> custom([1, 1, 4]).intervals(2).tolist()
    [1, 1]
    """
    E = _interval_array("sequence", sequence)
    return Schedule("custom", f"custom[{len(E)}]", sequence=tuple(E.tolist()))


def paper(name: str) -> Schedule:
    """One of the five schedules of Section 5 by its name there, without warm-up.

    >>> [paper(name).intervals(10)[-1].item() for name in PAPER_SCHEDULES]
    [1, 5, 4, 3, 4]
    """
    if not isinstance(name, str):
        raise TypeError(_must("name", f"be one of {', '.join(PAPER_SCHEDULES)}", name))
    built = (constant(1), constant(5), logarithmic(), power(1 / 3), power(1 / 2))
    if name not in PAPER_SCHEDULES:
        folded = {known.upper(): known for known in PAPER_SCHEDULES}
        near = difflib.get_close_matches(name.upper(), folded, n=1, cutoff=0.5)
        hint = f" (did you mean {folded[near[0]]!r}?)" if near else ""
        raise ValueError(_must("name", f"be one of {', '.join(PAPER_SCHEDULES)}", name) + hint)
    return dict(zip(PAPER_SCHEDULES, built, strict=True))[name]


@dataclass(frozen=True)
class StepSize:
    """The effective step gamma_m of round m, or a given sequence; eta_m = gamma_m / E_m."""

    name: str
    gamma0: float | None = None
    alpha: float | None = None  # None for a given sequence
    sequence: tuple[float, ...] = ()

    def effective(self, num_rounds: int) -> NDArray[np.float64]:
        """gamma_1, ..., gamma_n as a float64 array of shape (num_rounds,).

        >>> power_decay(2.0, 0.75).effective(16)[-1].item()
        0.25
        """
        num_rounds = _integer("num_rounds", num_rounds)
        if self.gamma0 is not None and self.alpha is not None:
            return self.gamma0 * np.arange(1, num_rounds + 1, dtype=np.float64) ** -self.alpha
        if len(self.sequence) < num_rounds:
            rule = f"hold at least the {num_rounds} rounds asked for"
            raise ValueError(_must("step sequence", rule, f"{len(self.sequence)} rounds"))
        return np.array(self.sequence[:num_rounds])


def power_decay(
    gamma0: float, alpha: float = 0.505, *, allow_outside_theory: bool = False
) -> StepSize:
    """gamma_m = gamma0 * m**-alpha, m = 1, 2, ... over all rounds, warm-up included (Section 5).

    Args:
        gamma0: > 0; the paper has 0.5 for linear and 2 for logistic regression.
        alpha: in (1/2, 1), Assumption 3.3.
        allow_outside_theory: accept any finite alpha; `Plan.check` then says what fails.

    >>> power_decay(0.5).name
    '0.5 m^-0.505'
    """
    gamma0, alpha = _positive("gamma0", gamma0), _real("alpha", alpha)
    if not (0.5 < alpha < 1 or allow_outside_theory):
        raise ValueError(_must("alpha", "be in (1/2, 1)", alpha))
    return StepSize(f"{gamma0:g} m^{-alpha:g}", gamma0, alpha)


def constant_step(gamma: float) -> StepSize:
    """gamma_m = gamma > 0: never within Assumption 3.3(i), as `Plan.check` says.

    >>> constant_step(0.1).effective(2).tolist()
    [0.1, 0.1]
    """
    gamma = _positive("gamma", gamma)
    return StepSize(f"{gamma:g}", gamma, 0.0)


def custom_step(sequence: ArrayLike) -> StepSize:
    """gamma_1, gamma_2, ... as given: effective steps gamma_m = E_m eta_m, finite and > 0.

    >>> custom_step([0.5, 0.25]).effective(2).tolist()
    [0.5, 0.25]
    """
    gamma = _positive_array("sequence", sequence).astype(np.float64)
    return StepSize(f"custom[{len(gamma)}]", sequence=tuple(gamma.tolist()))


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """A schedule and a step size written out for T rounds; arrays are read-only."""

    E: NDArray[np.int64]  # (T,) local steps of each round
    eta: NDArray[np.float64]  # (T,) local step size, gamma_m / E_m
    schedule: Schedule
    step_size: StepSize
    warmup_rounds: int = 0

    def __post_init__(self) -> None:
        E = _interval_array("E", self.E)
        eta = _positive_array("eta", self.eta).astype(np.float64)
        if len(E) != len(eta):
            raise ValueError(_must("eta", f"have the {len(E)} rounds of E", f"{len(eta)} rounds"))
        object.__setattr__(self, "E", _read_only(E))
        object.__setattr__(self, "eta", _read_only(eta))

    @staticmethod
    def from_arrays(E: ArrayLike, eta: ArrayLike) -> Plan:
        """A plan from sequences that you already have.

        Args:
            E: local steps of each round, shape (T,), whole numbers from 1 up.
            eta: local step size of each round, shape (T,), finite and > 0.

        >>> Plan.from_arrays([1, 1, 4], [0.5, 0.3, 0.05]).num_steps
        6
        """
        E, eta = _interval_array("E", E), _positive_array("eta", eta)
        plan = Plan(E, eta, custom(E), custom_step(eta))
        return replace(plan, step_size=custom_step(plan.gamma))

    @property
    def gamma(self) -> NDArray[np.float64]:
        """Effective steps E_m eta_m, shape (T,)."""
        return _read_only(self.E * self.eta)

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """t_1, ..., t_T: observations used by the end of each round, shape (T,)."""
        return _read_only(np.cumsum(self.E))

    @property
    def num_rounds(self) -> int:
        """T."""
        return len(self.E)

    @property
    def num_steps(self) -> int:
        """t_T = sum E_m."""
        return int(self.E.sum())

    @property
    def nu_hat(self) -> float:
        """(1/T**2) (sum E_m) (sum 1/E_m), Section 4.1."""
        return float(self.num_steps * np.sum(1.0 / self.E) / self.num_rounds**2)

    @property
    def acf(self) -> float:
        """Average communication frequency T / t_T (Table 1)."""
        return self.num_rounds / self.num_steps

    @property
    def name(self) -> str:
        """The schedule's name."""
        return self.schedule.name

    @property
    def nu(self) -> float | None:
        """`Schedule.nu`."""
        return self.schedule.nu

    @property
    def beta(self) -> float | None:
        """`Schedule.beta`."""
        return self.schedule.beta

    @property
    def g(self) -> Callable[[ArrayLike], NDArray[np.float64]] | None:
        """The limit r -> r**(1/(1-beta)) of Section 4.2 for E' alone; None if there is none."""
        beta = self.beta
        if beta is None:
            return None
        return lambda r: np.asarray(r, np.float64) ** (1.0 / (1.0 - beta))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of E and eta, the same on every machine."""
        content = self.E.astype("<i8").tobytes() + self.eta.astype("<f8").tobytes()
        return hashlib.sha256(content).hexdigest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        mine = (self.digest, self.schedule, self.step_size, self.warmup_rounds)
        return mine == (other.digest, other.schedule, other.step_size, other.warmup_rounds)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        what = f"{self.schedule}, gamma_m = {self.step_size.name}"
        return f"Plan({what}, num_rounds={self.num_rounds}, num_steps={self.num_steps})"

    def prefix(self, num_rounds: int) -> Plan:
        """The first rounds of this plan (its warm-up is still that of the whole horizon).

        >>> paper("C5").plan(power_decay(0.5), num_rounds=9).prefix(2).num_steps
        10
        """
        n = _integer("num_rounds", num_rounds)
        if n > self.num_rounds:
            raise ValueError(_must("num_rounds", f"be at most {self.num_rounds}", num_rounds))
        return replace(
            self, E=self.E[:n], eta=self.eta[:n], warmup_rounds=min(n, self.warmup_rounds)
        )

    def check(self) -> AssumptionReport:
        """Hold the plan against Assumptions 3.3 and 3.4, read literally.

        With gamma_m of order m**-alpha and E_m of order m**beta the verdicts are exact. A given
        sequence says nothing about a limit: its rows give the exponents it seems to have. The
        warm-up rounds of this plan are held fixed; the last row says what moves if they are not.

        >>> print(paper("C5").plan(power_decay(0.5), num_steps=100).check()[1].verdict)
        holds
        """
        schedule, alpha = self.schedule, self.step_size.alpha
        given_E, given_step = schedule.family == "custom", alpha is None
        alpha = -_slope(self.gamma) if alpha is None else alpha
        beta = schedule.exponent if schedule.family == "power" else 0.0
        beta = _slope(self.E[self.warmup_rounds :]) if given_E else beta
        rows = _step_rows(self, alpha, not given_step) + _interval_rows(self, beta, not given_E)
        rows.append(_rate_row(alpha, beta, not (given_E or given_step)))
        return AssumptionReport(rows + ([_warmup_row(self)] if schedule.warmup else []))


# The report of `Plan.check`: alpha and beta are the exponents of gamma_m and E_m, and `told` is
# False where they were only read off a given sequence.


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


def _row(label: str, told: bool, holds: bool, sentence: str) -> Verdict:
    return Verdict(label, ("holds" if holds else "fails") if told else "cannot be told", sentence)


def _slope(values: NDArray[Any]) -> float:
    """The exponent that a given sequence seems to have: log-log slope over its second half."""
    m = np.arange(1, len(values) + 1)[len(values) // 2 :]
    return float(np.polyfit(np.log(m), np.log(values[-len(m) :]), 1)[0]) if len(m) > 2 else math.nan


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
    grows = f"E_m must be bounded or never decrease{cut}; here it is at most {plan.E.max()}."
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
