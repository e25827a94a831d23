"""The parts of a study as plain data: problems, schedules, horizons, methods.

Nothing here imports jax, so that a study can be read, checked and counted in a moment; `build`
turns the parts into what the engine runs.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

from jaxlsgd import schedules
from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal
from jaxlsgd.schedules import Schedule
from jaxlsgd.study.errors import SpecError

_POPULATION = (
    *("dim", "num_clients", "heterogeneity", "weights", "covariance"),
    *("truth_seed", "client_truths", "center", "init"),
)
# Arguments of the builders in `problems`; a new kind of problem is one line.
PROBLEMS: dict[str, tuple[str, ...]] = {
    "linear": (*_POPULATION, "noise"),
    "logistic": _POPULATION,
    "paper-linear": (),
    "paper-logistic": (),
}
# γ_0 of the paper's experiments, for want of another.
DEFAULT_GAMMA0 = {"linear": 0.5, "logistic": 2.0, "paper-linear": 0.5, "paper-logistic": 2.0}
_PAPER_SIZES = {"dim": 5, "num_clients": 10}
_LARGEST = {"dim": 10**6, "num_clients": 10**7, "truth_seed": 2**63 - 1}
_MOST_PARAMETERS = 10**8  # dim × num_clients: one replication would pass 400 MB
MOST_STEPS = 10**8

# The argument that a name in brackets stands for, and its values, the default first.
METHODS: dict[str, tuple[str, tuple[str, ...]]] = {
    "plug_in": ("horizon", ("asymptotic", "finite")),
    "random_scaling": ("critical", ("asymptotic", "schedule", "paper", "finite_horizon")),
}
_METHOD_ARGUMENTS = {"plug_in": (), "random_scaling": ("mode", "contrasts", "beta")}
_MODES = ("full", "diagonal", "contrasts")

FAMILIES = ("constant", "logarithmic", "iterated_logarithmic", "power", "custom")
# Where a builder's argument is kept in a `Schedule`.
_FIELDS = {"E": "scale", "beta": "exponent", "power": "exponent"}


@dataclasses.dataclass(frozen=True)
class ProblemSpec:
    """A problem by kind and arguments, with the step size γ_m = γ_0 m^(−α) that goes with it."""

    kind: str
    name: str
    gamma0: float
    alpha: float
    arguments: tuple[tuple[str, Any], ...]  # sorted, of numbers and tuples

    @classmethod
    def of(cls, value: Any, where: str) -> ProblemSpec:
        """Reads a kind's name, or a table with `kind` and the builder's arguments."""
        if isinstance(value, cls):
            return value
        given = {"kind": value} if isinstance(value, str) else value
        given = checks.table(where, given, f"one of {', '.join(PROBLEMS)} or a table with `kind`")
        kind = checks.choice(f"{where}.kind", given.pop("kind", None), PROBLEMS)
        name = checks.label(f"{where}.name", given.pop("name", kind.removeprefix("paper-")))
        gamma0 = checks.number(f"{where}.gamma0", given.pop("gamma0", DEFAULT_GAMMA0[kind]))
        alpha = checks.number(f"{where}.alpha", given.pop("alpha", 0.505))
        told(where, lambda: schedules.power_decay(gamma0, alpha))
        checks.known_keys(where, given, (*PROBLEMS[kind], "kind", "name", "gamma0", "alpha"))
        return cls(kind, name, gamma0, alpha, _problem_arguments(where, kind, given))

    @property
    def dim(self) -> int:
        """Number of parameters d."""
        return dict(self.arguments).get("dim", _PAPER_SIZES["dim"])

    @property
    def num_clients(self) -> int:
        """Number of clients K."""
        return dict(self.arguments).get("num_clients", _PAPER_SIZES["num_clients"])

    def plain(self) -> dict[str, Any]:
        """The table that `of` reads."""
        steps = {"kind": self.kind, "name": self.name, "gamma0": self.gamma0, "alpha": self.alpha}
        return steps | {key: thawed(value) for key, value in self.arguments}


def _problem_arguments(where: str, kind: str, given: dict[str, Any]) -> tuple[Any, ...]:
    for key in ("dim", "num_clients"):
        if key in PROBLEMS[kind] and key not in given:
            raise SpecError(
                f"{where}.{key}: is missing; a {kind} problem needs dim and num_clients"
            )
    arguments = {
        key: checks.count(f"{where}.{key}", value, 0 if key == "truth_seed" else 1, _LARGEST[key])
        if key in _LARGEST
        else checks.numeric(f"{where}.{key}", value)
        for key, value in given.items()
    }
    if arguments and arguments["dim"] * arguments["num_clients"] > _MOST_PARAMETERS:
        raise refusal(
            f"{where}.num_clients",
            f"keep dim × num_clients at most {_MOST_PARAMETERS}",
            arguments["num_clients"],
        )
    return tuple(sorted(arguments.items()))


def read_schedule(value: Any, where: str, warmup: float = 0.0) -> Schedule:
    """Reads a paper name, a table with `family` and the builder's arguments, or a `Schedule`.

    Args:
      value: "C5", or {family = "power", beta = 0.25, scale = 2}, with `name` and `warmup` at will.
      where: key, for messages.
      warmup: share of the observations, where the schedule has none of its own.
    """
    if isinstance(value, Schedule):
        return value if value.warmup else value.with_warmup(warmup)
    if isinstance(value, str):
        known = schedules.PAPER_SCHEDULES
        if value not in known:
            table = '{family = "power", beta = 0.25}'
            rule = f"be one of {', '.join(known)}, or a table such as {table}"
            raise refusal(where, rule, value, checks.nearest(value, known))
        return schedules.paper(value).with_warmup(warmup)
    given = checks.table(where, value, "a schedule's name or a table with `family`")
    family = checks.choice(f"{where}.family", given.pop("family", None), FAMILIES)
    share, name = given.pop("warmup", warmup), given.pop("name", None)
    builder = getattr(schedules, family)
    arguments = tuple(inspect.signature(builder).parameters)
    checks.known_keys(where, given, (*arguments, "family", "warmup", "name"))
    given = {key: _fraction(part) for key, part in given.items()}
    made = told(where, lambda: builder(**given).with_warmup(share))
    if name is not None:
        made = dataclasses.replace(made, name=checks.label(f"{where}.name", name))
    return made


def _fraction(value: Any) -> Any:
    """1/3 from "1/3": TOML has no fractions."""
    try:
        return float(Fraction(value)) if isinstance(value, str) else value
    except (ValueError, ZeroDivisionError):
        return value


def plain_schedule(schedule: Schedule) -> dict[str, Any]:
    """The table that `read_schedule` reads."""
    table: dict[str, Any] = {"family": schedule.family, "name": schedule.name}
    for argument in inspect.signature(getattr(schedules, schedule.family)).parameters:
        if argument == "allow_outside_theory":
            table[argument] = schedule.exponent >= 1
        else:
            table[argument] = thawed(getattr(schedule, _FIELDS.get(argument, argument)))
    if schedule.family == "constant":
        table["E"] = int(table["E"])
    return table | {"warmup": schedule.warmup}


@dataclasses.dataclass(frozen=True, order=True)
class Extent:
    """How long a cell runs: so many observations per client, or so many rounds."""

    unit: str  # "num_steps" or "num_rounds"
    count: int

    @classmethod
    def of(cls, value: Any, where: str) -> Extent:
        """Reads 5000, {num_steps = 5000} or {num_rounds = 1200}."""
        if isinstance(value, cls):
            return value
        given = value if isinstance(value, dict) else {"num_steps": value}
        checks.known_keys(where, given, ("num_steps", "num_rounds"))
        if len(given) != 1:
            raise refusal(where, "give exactly one of num_steps and num_rounds", value)
        unit, count = next(iter(given.items()))
        place = f"{where}.{unit}" if isinstance(value, dict) else where
        return cls(unit, checks.count(place, count, 1, MOST_STEPS))

    def plain(self) -> dict[str, int]:
        """The table that `of` reads."""
        return {self.unit: self.count}

    def __str__(self) -> str:
        return str(self.count) if self.unit == "num_steps" else f"{self.count} rounds"


@dataclasses.dataclass(frozen=True)
class MethodSpec:
    """An interval method by kind and arguments."""

    kind: str
    name: str
    arguments: tuple[tuple[str, Any], ...]  # sorted

    @classmethod
    def of(cls, value: Any, where: str) -> MethodSpec:
        """Reads "plug_in", "random_scaling[schedule]", or a table with `kind`."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            return _method_by_name(value, where)
        given = checks.table(where, value, "a method's name or a table with `kind`")
        kind = checks.choice(f"{where}.kind", given.pop("kind", None), METHODS)
        main, values = METHODS[kind]
        checks.known_keys(where, given, (*_METHOD_ARGUMENTS[kind], main, "kind", "name"))
        option = checks.choice(f"{where}.{main}", given.pop(main, values[0]), values)
        name = checks.label(f"{where}.name", given.pop("name", _method_name(kind, option)))
        arguments = {key: _method_argument(f"{where}.{key}", key, v) for key, v in given.items()}
        return cls(kind, name, tuple(sorted((arguments | {main: option}).items())))

    def plain(self) -> dict[str, Any]:
        """The table that `of` reads."""
        arguments = {key: thawed(value) for key, value in self.arguments}
        return {"kind": self.kind, "name": self.name} | arguments


def _method_by_name(value: str, where: str) -> MethodSpec:
    known = [_method_name(kind, option) for kind in METHODS for option in METHODS[kind][1]]
    if value not in known:
        raise refusal(where, f"be one of {', '.join(known)}", value, checks.nearest(value, known))
    kind, _, option = value.removesuffix("]").partition("[")
    main, values = METHODS[kind]
    return MethodSpec(kind, value, ((main, option or values[0]),))


def _method_name(kind: str, option: str) -> str:
    return kind if option == METHODS[kind][1][0] else f"{kind}[{option}]"


def _method_argument(where: str, key: str, value: Any) -> Any:
    if key == "mode":
        return checks.choice(where, value, _MODES)
    return checks.numeric(where, _fraction(value))


def thawed(value: Any) -> Any:
    """Nested tuples as nested lists, for JSON."""
    return [thawed(part) for part in value] if isinstance(value, tuple) else value


def names(parts: Iterable[Any]) -> list[str]:
    """The names of problems, schedules or methods."""
    return [part.name for part in parts]
