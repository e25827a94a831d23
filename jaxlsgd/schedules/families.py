"""Communication schedules: the number of local steps E_m in round m.

Section, table and assumption numbers in this room are those of "Statistical Estimation and Inference
via Local SGD in Federated Learning". Everything is NumPy on the host, int64 and float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jaxlsgd.core import checks
from jaxlsgd.core.checks import LARGEST_INTERVAL, refusal
from jaxlsgd.core.registry import register
from jaxlsgd.schedules.step_size import StepSize

if TYPE_CHECKING:
    from jaxlsgd.schedules.plan import Plan

# A plan stores every round: so many take a second or two, and 320 MB.
MOST_ROUNDS = 20_000_000
CHUNK = 2**18  # rounds computed at once, so that intermediate arrays stay in a cache
PAPER_SCHEDULES = ("C1", "C5", "Log", "P(1/3)", "P(1/2)")


def _ceil(x: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the ceiling as an interval, with 6 and not 7 for 7776^(1/5) = 6.000000000000001."""
    # 16 units in the last place cover pow, log and the rounding of the exponent itself, and are
    # less than the step from a perfect power to the next m, up to m = 1e12.
    rounded = np.ceil(x * (1.0 - 16 * np.finfo(np.float64).eps))
    return np.clip(rounded, 1, LARGEST_INTERVAL + 1).astype(np.int64)


# A family is defined by its shape s(m, exponent, base), with E'_m = ⌈scale · s⌉.
_SHAPES: dict[str, Callable[[NDArray[np.float64], float, float], NDArray[np.float64]]] = {
    "constant": lambda m, exponent, base: np.ones_like(m),
    "logarithmic": lambda m, exponent, base: (np.log2(m + 1) / np.log2(base)) ** exponent,
    "iterated_logarithmic": lambda m, exponent, base: np.log(np.log(m + 2)) ** exponent,
    "power": lambda m, exponent, base: m**exponent,
}
FAMILIES = (*_SHAPES, "custom")


@dataclass(frozen=True)
class Schedule:
    """The number of local steps in each round; made by the builders below.

    E_m = 1 in the warm-up rounds, then E'_1, E'_2, … with E'_m = max(1, ⌈scale · s(m)⌉).
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
        """Return the exponent β of g(r) = r^(1/(1−β)), Section 4.2, without warm-up; None if there is none."""
        if self.family == "custom" or (self.exponent >= 1 and self.family == "power"):
            return None
        return self.exponent if self.family == "power" else 0.0

    @property
    def nu(self) -> float | None:
        """Return the limit ν = 1/(1−β²) of Table 1, without warm-up; None if there is none.

        A warm-up that stays a fixed share of the observations changes the limit: see `Plan.check`.
        """
        return None if self.beta is None else 1.0 / (1.0 - self.beta**2)

    def intervals(self, num_rounds: int) -> NDArray[np.int64]:
        """Return E'_1, …, E'_n, without warm-up.

        Args:
            num_rounds: n, at least 1, and at most the length of a custom sequence.

        Returns:
            int64 array of shape (num_rounds,).

        >>> power(1 / 3).intervals(9).tolist()
        [1, 2, 2, 2, 2, 2, 2, 2, 3]
        """
        E = self._available(checks.count("num_rounds", num_rounds, most=MOST_ROUNDS))
        if len(E) < num_rounds:
            rule = f"hold at least {num_rounds} rounds"
            raise refusal("sequence", rule, f"{len(E)} rounds")
        return checks.interval_array("E", E)

    def with_warmup(self, fraction: float) -> Schedule:
        """Return the same schedule after a warm-up of E = 1 over a share of the *observations*.

        round(fraction · t_T) rounds of E = 1 come first, then E'_1, E'_2, … (Section 5: "the
        first 5% observations"; its interval lengths do not agree with 5% of the rounds).

        Args:
            fraction: in [0, 1); the paper has 0.05. It replaces an earlier warm-up.

        >>> plan = paper("C5").with_warmup(0.05).plan(power_decay(0.5), num_steps=5000)
        >>> plan.warmup_rounds, plan.num_rounds
        (250, 1200)
        """
        fraction = checks.number("fraction", fraction, "be in [0, 1)")
        if not 0 <= fraction < 1:
            raise refusal("fraction", "be in [0, 1)", fraction)
        return replace(self, warmup=fraction)

    def plan(
        self, step_size: StepSize, *, num_steps: int | None = None, num_rounds: int | None = None
    ) -> Plan:
        """Return the schedule and the step size written out for a finite horizon.

        With num_steps = t_T the last round is shortened so that Σ E_m = t_T exactly, and
        η_T = γ_T/E_T keeps its effective step. With num_rounds = T the warm-up is the
        smallest w ≥ round(fraction · t_T) for the t_T that results from w; with growing intervals
        it may be longer than the fraction.

        Args:
            step_size: from `power_decay`, `constant_step` or `custom_step`; m counts every round.
            num_steps: observations per client t_T. Exactly one of the two must be given.
            num_rounds: rounds T, at most 20 million (`MOST_ROUNDS`).

        Returns:
            The `Plan`.

        >>> paper("P(1/2)").plan(power_decay(2.0), num_steps=12).E.tolist()
        [1, 2, 2, 2, 3, 2]
        """
        if not isinstance(step_size, StepSize):
            raise refusal("step_size", "be a StepSize, as power_decay(0.5)", step_size, code="type")
        if (num_steps is None) == (num_rounds is None):
            given = {"num_steps": num_steps, "num_rounds": num_rounds}
            raise refusal(
                "num_steps", "be given, or num_rounds, but not both", given, code="conflict"
            )
        from jaxlsgd.schedules.plan import Plan

        if num_rounds is None:
            E, warmup_rounds = self._fill_steps(checks.count("num_steps", num_steps))
        else:
            rounds = checks.count("num_rounds", num_rounds, most=MOST_ROUNDS)
            E, warmup_rounds = self._fill_rounds(rounds)
        if warmup_rounds:
            E = np.concatenate([np.ones(warmup_rounds, np.int64), E])
        eta = step_size.effective(len(E))
        eta /= E
        return Plan(E, eta, self, step_size, warmup_rounds)

    def _available(self, num_rounds: int) -> NDArray[np.int64]:
        """Return E' up to num_rounds: fewer if a custom sequence ends, clipped above LARGEST_INTERVAL."""
        if self.family == "custom":
            return np.array(self.sequence[:num_rounds], np.int64)
        E = np.empty(num_rounds, np.int64)
        for first in range(0, num_rounds, CHUNK):
            E[first : first + CHUNK] = self._chunk(first, min(first + CHUNK, num_rounds))
        return E

    def _chunk(self, first: int, stop: int) -> NDArray[np.int64]:
        """Return E'_{first + 1}, …, E'_stop, or fewer if a custom sequence ends."""
        if self.family == "custom":
            return np.array(self.sequence[first:stop], np.int64)
        m = np.arange(first + 1, stop + 1, dtype=np.float64)
        with np.errstate(over="ignore"):
            return _ceil(self.scale * _SHAPES[self.family](m, self.exponent, self.base))

    def _fill_steps(self, num_steps: int) -> tuple[NDArray[np.int64], int]:
        warmup_rounds = round(self.warmup * num_steps)
        left = num_steps - warmup_rounds
        if left < 1:
            rule = f"leave at least one observation after a warm-up of {warmup_rounds}"
            raise refusal("num_steps", rule, num_steps)
        most = MOST_ROUNDS - warmup_rounds
        if not self._reaches(left, most):
            raise _too_long(num_steps)
        parts, rounds, steps, size = [], 0, 0, 64
        while steps < left and rounds < most:
            part = self._chunk(rounds, min(rounds + size, most))
            if not len(part):
                rule = f"hold at least {left} local steps"
                raise refusal("sequence", rule, f"{steps} local steps")
            ends = steps + np.cumsum(part)
            last = int(np.searchsorted(ends, left))
            if last < len(part):
                part = part[: last + 1]
                part[last] -= ends[last] - left
            parts.append(part)
            rounds, steps = rounds + len(part), int(ends[len(part) - 1])
            size = min(4 * size, CHUNK)
        if steps < left:
            raise _too_long(num_steps)
        return np.concatenate(parts), warmup_rounds

    def _reaches(self, num_steps: int, num_rounds: int) -> bool:
        """Return whether so many rounds can reach so many steps: no interval is longer than the last."""
        if self.family == "custom" or num_rounds < 1:
            return num_rounds >= 1
        shape = _SHAPES[self.family](np.array([float(num_rounds)]), self.exponent, self.base)
        return num_rounds * int(_ceil(self.scale * shape)[0]) >= num_steps

    def _fill_rounds(self, num_rounds: int) -> tuple[NDArray[np.int64], int]:
        # Beyond the end of a custom sequence, ones are a placeholder, which `intervals` then refuses.
        E = self._available(num_rounds)
        ends = np.cumsum(np.concatenate([[0], E, np.ones(num_rounds - len(E), np.int64)]))
        w = np.arange(num_rounds + 1)
        num_steps = w + ends[::-1]
        # w − fraction · t_T increases with w, so that the first sufficient w is the answer.
        warmup_rounds = int(np.argmax(w >= np.rint(self.warmup * num_steps)))
        if warmup_rounds == num_rounds:
            rule = f"leave at least one round after a warm-up of {warmup_rounds}"
            raise refusal("num_rounds", rule, num_rounds)
        return self.intervals(num_rounds - warmup_rounds), warmup_rounds


def _too_long(num_steps: int) -> ValueError:
    hint = "; a larger E or intervals that grow need fewer rounds"
    return refusal("num_steps", f"be reached in at most {MOST_ROUNDS} rounds", num_steps, hint)


@register("schedule")
def constant(E: int) -> Schedule:
    """E'_m = E (Table 1, rows Base and 1).

    >>> constant(5).name
    'C5'
    """
    E = checks.count("E", E, most=LARGEST_INTERVAL)
    return Schedule("constant", f"C{E}", scale=float(E))


@register("schedule")
def logarithmic(scale: float = 1.0, power: float = 1.0, base: float = 2.0) -> Schedule:
    """E'_m = ⌈scale · log_base(m + 1)^power⌉ (Table 1, row 3; default: the paper's Log).

    Args:
        scale: E > 0.
        power: β of row 3, > 0. (A power of 0 or less is bounded: use `constant` or `custom`.)
        base: of the logarithm, > 1; math.e gives ln.

    >>> logarithmic().intervals(8).tolist()
    [1, 2, 2, 3, 3, 3, 3, 4]
    """
    scale, power = checks.positive("scale", scale), checks.positive("power", power)
    base = checks.number("base", base, "be finite and greater than 1", 1.0)
    plain = (scale, power, base) == (1.0, 1.0, 2.0)
    name = "Log" if plain else f"Log({scale:g},{power:g},{'e' if base == math.e else f'{base:g}'})"
    return Schedule("logarithmic", name, scale, power, base)


@register("schedule")
def iterated_logarithmic(scale: float = 1.0, power: float = 1.0) -> Schedule:
    """E'_m = ⌈scale · ln(ln(m + 2))^power⌉, scale and power > 0 (Table 1, row 4).

    >>> iterated_logarithmic(scale=3).intervals(6).tolist()
    [1, 1, 2, 2, 2, 3]
    """
    scale, power = checks.positive("scale", scale), checks.positive("power", power)
    return Schedule("iterated_logarithmic", f"LogLog({scale:g},{power:g})", scale, power)


@register("schedule")
def power(beta: float, scale: float = 1.0, *, allow_outside_theory: bool = False) -> Schedule:
    """E'_m = ⌈scale · m^β⌉ (Table 1, row 5).

    Args:
        beta: β, in [0, 1). Below 0 the ceiling becomes 1: use `constant` or `custom`.
        scale: E > 0.
        allow_outside_theory: accept β ≥ 1, for which ν is infinite and `Plan.check` fails.

    >>> power(1 / 2).name, power(1 / 2).nu
    ('P(1/2)', 1.3333333333333333)
    """
    beta, scale = checks.number("beta", beta), checks.positive("scale", scale)
    if beta < 0 or (beta >= 1 and not allow_outside_theory):
        raise refusal("beta", "be in [0, 1)", beta)
    short = Fraction(beta).limit_denominator(12)
    name = f"P({short if float(short) == beta else f'{beta:g}'})"
    return Schedule("power", name if scale == 1 else f"{scale:g}*{name}", scale, beta)


@register("schedule")
def custom(sequence: ArrayLike) -> Schedule:
    """E'_1, E'_2, … as given: integers from 1 (a float array of integers is accepted).

    >>> custom([1, 1, 4]).intervals(2).tolist()
    [1, 1]
    """
    E = checks.interval_array("sequence", sequence)
    return Schedule("custom", f"custom[{len(E)}]", sequence=tuple(E.tolist()))


def paper(name: str) -> Schedule:
    """Return one of the five schedules of Section 5 by its name there, without warm-up.

    >>> [paper(name).intervals(10)[-1].item() for name in PAPER_SCHEDULES]
    [1, 5, 4, 3, 4]
    """
    checks.choice("name", name, PAPER_SCHEDULES)
    built = (constant(1), constant(5), logarithmic(), power(1 / 3), power(1 / 2))
    return built[PAPER_SCHEDULES.index(name)]
