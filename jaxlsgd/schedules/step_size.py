"""Step sizes: the effective step γ_m = E_m η_m of round m."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal


@dataclass(frozen=True)
class StepSize:
    """The effective step γ_m of round m, by formula or a given sequence; η_m = γ_m/E_m."""

    name: str
    gamma0: float | None = None
    alpha: float | None = None  # None for a given sequence
    sequence: tuple[float, ...] = ()

    def effective(self, num_rounds: int) -> NDArray[np.float64]:
        """Return γ_1, …, γ_n as a float64 array of shape (num_rounds,).

        >>> power_decay(2.0, 0.75).effective(16)[-1].item()
        0.25
        """
        num_rounds = checks.count("num_rounds", num_rounds)
        if self.gamma0 is not None and self.alpha is not None:
            gamma = np.arange(1, num_rounds + 1, dtype=np.float64)
            np.power(gamma, -self.alpha, out=gamma)
            return np.multiply(self.gamma0, gamma, out=gamma)
        if len(self.sequence) < num_rounds:
            rule = f"hold at least {num_rounds} rounds"
            raise refusal("step sequence", rule, f"{len(self.sequence)} rounds")
        return np.array(self.sequence[:num_rounds])


def power_decay(
    gamma0: float, alpha: float = 0.505, *, allow_outside_theory: bool = False
) -> StepSize:
    """γ_m = γ_0 m^−α, m = 1, 2, … over all rounds, warm-up included (Section 5).

    Args:
        gamma0: γ_0 > 0; the paper has 0.5 for linear and 2 for logistic regression.
        alpha: α, in (1/2, 1), Assumption 3.3.
        allow_outside_theory: accept any finite α; `Plan.check` then lists what fails.

    >>> power_decay(0.5).name
    '0.5 m^-0.505'
    """
    gamma0, alpha = checks.positive("gamma0", gamma0), checks.number("alpha", alpha)
    if not (0.5 < alpha < 1 or allow_outside_theory):
        raise refusal("alpha", "be in (1/2, 1)", alpha)
    return StepSize(f"{gamma0:g} m^{-alpha:g}", gamma0, alpha)


def power_or_constant(gamma0: float, alpha: float) -> StepSize:
    """γ_m = γ_0 m^−α, for study files: α = 0 is a constant step.

    >>> power_or_constant(0.1, 0).name
    '0.1'
    """
    if alpha == 0:
        return constant_step(gamma0)
    if not 0.5 < checks.number("alpha", alpha) < 1:
        raise refusal("alpha", "be in (1/2, 1), or 0 for a constant step", alpha)
    return power_decay(gamma0, alpha)


def constant_step(gamma: float) -> StepSize:
    """γ_m = γ > 0, which violates Assumption 3.3(i).

    >>> constant_step(0.1).effective(2).tolist()
    [0.1, 0.1]
    """
    gamma = checks.positive("gamma", gamma)
    return StepSize(f"{gamma:g}", gamma, 0.0)


def custom_step(sequence: ArrayLike) -> StepSize:
    """γ_1, γ_2, … as given: effective steps γ_m = E_m η_m, finite and > 0.

    >>> custom_step([0.5, 0.25]).effective(2).tolist()
    [0.5, 0.25]
    """
    gamma = checks.positive_array("sequence", sequence).astype(np.float64)
    return StepSize(f"custom[{len(gamma)}]", sequence=tuple(gamma.tolist()))
