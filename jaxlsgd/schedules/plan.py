"""A plan: a schedule and a step size written out for a finite horizon, as read-only arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.display import Table, Tabular, facts, frame
from jaxlsgd.schedules import assumptions
from jaxlsgd.schedules.families import Schedule, custom
from jaxlsgd.schedules.step_size import StepSize, custom_step

# Where a run that may stop is read unless it is said: shares of its observations, evenly spaced in the logarithm.
LOOKS = tuple(round(0.02 ** (1 - i / 49), 6) for i in range(50))


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array


@dataclass(frozen=True, eq=False, repr=False)
class Plan(Tabular):
    """A schedule and a step size written out for T rounds; arrays are read-only."""

    E: NDArray[np.int64]  # (T,) local steps of each round
    eta: NDArray[np.float64]  # (T,) local step size η_m = γ_m/E_m
    schedule: Schedule
    step_size: StepSize
    warmup_rounds: int = 0

    def __post_init__(self) -> None:
        E = checks.interval_array("E", self.E)
        eta = checks.positive_array("eta", self.eta).astype(np.float64)
        if len(E) != len(eta):
            raise refusal(
                "eta", f"have the {len(E)} rounds of E", f"{len(eta)} rounds", code="shape"
            )
        object.__setattr__(self, "E", _read_only(E))
        object.__setattr__(self, "eta", _read_only(eta))

    @staticmethod
    def from_arrays(E: ArrayLike, eta: ArrayLike) -> Plan:
        """Return a plan of given sequences.

        Args:
            E: local steps of each round, shape (T,), integers from 1.
            eta: local step size of each round, shape (T,), finite and > 0.

        >>> Plan.from_arrays([1, 1, 4], [0.5, 0.3, 0.05]).num_steps
        6
        """
        E, eta = checks.interval_array("E", E), checks.positive_array("eta", eta)
        plan = Plan(E, eta, custom(E), custom_step(eta))
        return replace(plan, step_size=custom_step(plan.gamma))

    @property
    def gamma(self) -> NDArray[np.float64]:
        """Return the effective steps γ_m = E_m η_m, shape (T,)."""
        return _read_only(self.E * self.eta)

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """Return t_1, …, t_T, the observations used by the end of each round, shape (T,)."""
        return _read_only(np.cumsum(self.E))

    def rounds_at(self, shares: ArrayLike) -> NDArray[np.int64]:
        """Return the rounds by whose end these shares of the observations are used."""
        steps = np.asarray(shares, np.float64) * self.num_steps
        rounds = np.searchsorted(self.ends, steps * (1 - 1e-12)) + 1
        return np.clip(rounds, 1, self.num_rounds)

    @property
    def num_rounds(self) -> int:
        """Return T."""
        return len(self.E)

    @property
    def num_steps(self) -> int:
        """Return t_T = Σ E_m."""
        return int(self.E.sum())

    @property
    def nu_hat(self) -> float:
        """Return ν̂ = (1/T²) (Σ E_m) (Σ 1/E_m), Section 4.1."""
        return float(self.num_steps * np.sum(1.0 / self.E) / self.num_rounds**2)

    @property
    def acf(self) -> float:
        """Return the average communication frequency T/t_T (Table 1)."""
        return self.num_rounds / self.num_steps

    @property
    def name(self) -> str:
        """Return the schedule's name."""
        return self.schedule.name

    @property
    def nu(self) -> float | None:
        """Return `Schedule.nu`."""
        return self.schedule.nu

    @property
    def beta(self) -> float | None:
        """Return `Schedule.beta`."""
        return self.schedule.beta

    @property
    def g(self) -> Callable[[ArrayLike], NDArray[np.float64]] | None:
        """Return the limit r ↦ r^(1/(1−β)) of Section 4.2, without warm-up; None if there is none."""
        beta = self.beta
        if beta is None:
            return None
        return lambda r: np.asarray(r, np.float64) ** (1.0 / (1.0 - beta))

    @cached_property
    def digest(self) -> str:
        """Return the SHA-256 of E and η, the same on every machine."""
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
        what = f"{self.schedule}, γ_m = {self.step_size.name}"
        return f"Plan({what}, num_rounds={self.num_rounds}, num_steps={self.num_steps})"

    def table(self) -> Table:
        """Return what the plan is, as a table; `print(plan)` and a notebook show it."""
        E, eta = self.E, self.eta
        steps = f"{E[0]} … {E[-1]}" if len(E) > 1 else f"{E[0]}"
        lines = [
            ("rounds T", f"{self.num_rounds:,}"),
            ("observations per client t_T", f"{self.num_steps:,}"),
            ("local steps E_m", f"{steps}, {E.min()} to {E.max()}"),
            ("warm-up rounds", f"{self.warmup_rounds:,}"),
            ("effective step γ_m", self.step_size.name),
            ("local step η_m", f"{eta[0]:.4g} … {eta[-1]:.4g}"),
            ("communication T/t_T", f"{self.acf:.4g}"),
            ("ν̂", f"{self.nu_hat:.4g}" + (f" (limit {self.nu:.4g})" if self.nu else "")),
        ]
        return facts("plan", str(self.schedule), lines)

    def to_frame(self) -> Any:
        """Return a `pandas.DataFrame` with a line per round: round, E, eta, gamma and observations so far."""
        columns = {"E": self.E, "eta": self.eta, "gamma": self.gamma, "observations": self.ends}
        return frame([("round", np.arange(1, self.num_rounds + 1)), *columns.items()])

    def prefix(self, num_rounds: int) -> Plan:
        """Return the first rounds of this plan (its warm-up is still that of the whole horizon).

        >>> paper("C5").plan(power_decay(0.5), num_rounds=9).prefix(2).num_steps
        10
        """
        n = checks.count("num_rounds", num_rounds)
        if n > self.num_rounds:
            raise refusal("num_rounds", f"be at most {self.num_rounds}", num_rounds)
        return replace(
            self, E=self.E[:n], eta=self.eta[:n], warmup_rounds=min(n, self.warmup_rounds)
        )

    def check(self) -> assumptions.AssumptionReport:
        """Check the plan against Assumptions 3.3 and 3.4, read literally.

        With γ_m of order m^−α and E_m of order m^β the verdicts are exact. A given sequence has no
        known limit: its rows show the estimated exponents. The warm-up rounds of this plan are held
        fixed; the last row shows what changes if they are not.

        >>> print(paper("C5").plan(power_decay(0.5), num_steps=100).check()[1].verdict)
        holds
        """
        return assumptions.check(self)
