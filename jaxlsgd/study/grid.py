"""The grid of a study: its cells, and the rules that leave some out or add others."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jaxlsgd import schedules
from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal
from jaxlsgd.schedules import Plan, Schedule
from jaxlsgd.study.errors import SpecError
from jaxlsgd.study.parts import (
    MOST_STEPS,
    Extent,
    MethodSpec,
    ProblemSpec,
    names,
    plain_schedule,
    read_schedule,
)

if TYPE_CHECKING:
    from jaxlsgd.study.spec import Study

_ROUTE = ("problem", "schedule", "num_steps", "num_rounds")
EXCLUDE_KEYS = (*_ROUTE, "method")
EXTRA_KEYS = (*_ROUTE, "methods")


def canonical(content: Any) -> bytes:
    """JSON with one spelling."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")


def digest_of(content: Any) -> str:
    """SHA-256 of JSON data."""
    return hashlib.sha256(canonical(content)).hexdigest()


@dataclasses.dataclass(frozen=True)
class Cell:
    """One problem under one schedule to one horizon: all that decides its rows but their number."""

    problem: ProblemSpec
    schedule: Schedule
    extent: Extent
    methods: tuple[MethodSpec, ...]
    levels: tuple[float, ...]
    save_at: tuple[int | float, ...]
    seed: int
    dtype: str
    tile_size: int

    def plain(self) -> dict[str, Any]:
        """The cell as JSON data."""
        return {
            "problem": self.problem.plain(),
            "schedule": plain_schedule(self.schedule),
            "horizon": self.extent.plain(),
            "methods": [method.plain() for method in self.methods],
            "levels": list(self.levels),
            "save_at": list(self.save_at),
            "seed": self.seed,
            "dtype": self.dtype,
            "tile_size": self.tile_size,
        }

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Cell:
        """The cell that `plain` describes."""
        return cls(
            ProblemSpec.of(plain["problem"], "problem"),
            read_schedule(plain["schedule"], "schedule"),
            Extent.of(plain["horizon"], "horizon"),
            tuple(MethodSpec.of(method, "methods") for method in plain["methods"]),
            *(tuple(plain["levels"]), tuple(plain["save_at"])),
            *(plain["seed"], plain["dtype"], plain["tile_size"]),
        )

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of everything that decides the rows."""
        return digest_of(self.plain())

    @functools.cached_property
    def id(self) -> str:
        """Name of the cell's directory: letters, digits and dashes only."""
        words = " ".join(self.coordinates).casefold()
        slug = re.sub(r"[^a-z0-9]+", "-", words).strip("-")[:60].strip("-")
        return f"{slug or 'cell'}-{self.digest[:10]}"

    @property
    def coordinates(self) -> tuple[str, str, str]:
        """Problem, schedule and horizon: no two cells of a study share all three."""
        return self.problem.name, self.schedule.name, str(self.extent)

    def plan(self) -> Plan:
        """The schedule and the step size written out."""
        step = schedules.power_decay(self.problem.gamma0, self.problem.alpha)
        plan = self.schedule.plan(step, **{self.extent.unit: self.extent.count})
        if plan.num_steps > MOST_STEPS:
            raise ValueError(f"num_rounds: takes {plan.num_steps} steps, more than {MOST_STEPS}")
        return plan

    def saved_rounds(self, num_rounds: int) -> tuple[int, ...]:
        """The rounds of `save_at`, fractions turned into rounds, and the last."""
        rounds = {num_rounds}
        for value in self.save_at:
            m = max(1, round(value * num_rounds)) if isinstance(value, float) else value
            if m > num_rounds:
                raise ValueError(f"save_at: round {m} is beyond the last, {num_rounds}")
            rounds.add(m)
        return tuple(sorted(rounds))


def read_rules(study: Study, key: str, keys: tuple[str, ...]) -> tuple[Any, ...]:
    """Checked tables of `exclude` or `extra`, as sorted pairs."""
    values = getattr(study, key)
    if not isinstance(values, (list, tuple)):
        raise refusal(key, "be a list of tables", values)
    return tuple(_rule(study, f"{key}[{i}]", value, keys) for i, value in enumerate(values))


def _rule(study: Study, where: str, rule: Any, keys: tuple[str, ...]) -> tuple[Any, ...]:
    rule = dict(rule) if isinstance(rule, tuple) else rule
    rule = checks.table(where, rule, f"a table of {', '.join(keys)}")
    checks.known_keys(where, rule, keys)
    wanted = {"problem": study.problems, "schedule": study.schedules, "method": study.methods}
    for key, parts in wanted.items():
        if key in rule:
            checks.choice(f"{where}.{key}", rule[key], names(parts))
    if "methods" in rule:
        listed = checks.sequence(f"{where}.methods", rule["methods"], "method")
        chosen = (checks.choice(f"{where}.methods", x, names(study.methods)) for x in listed)
        rule["methods"] = tuple(chosen)
    if "methods" in keys and not {"problem", "schedule"} <= rule.keys():
        raise SpecError(
            f"{where}: an extra cell needs problem, schedule and num_steps or num_rounds"
        )
    lengths = {unit: rule[unit] for unit in ("num_steps", "num_rounds") if unit in rule}
    if "methods" in keys or lengths:
        Extent.of(lengths, where)
    if not rule:
        raise SpecError(f"{where}: is empty and would exclude everything")
    return tuple(sorted(rule.items()))


def expand(study: Study) -> Iterator[Cell]:
    """The cells: the crossed grid less what is excluded, and the extra ones."""
    rules = [dict(rule) for rule in study.exclude]
    crossed = itertools.product(study.problems, study.schedules, study.horizons)
    for problem, schedule, extent in crossed if study.cross else ():
        methods = tuple(
            method
            for method in study.methods
            if not any(_matches(rule, problem, schedule, extent, method) for rule in rules)
        )
        if methods:
            yield _cell(study, problem, schedule, extent, methods)
    for i, pairs in enumerate(study.extra):
        yield _extra(study, dict(pairs), f"extra[{i}]")


def _matches(
    rule: dict[str, Any],
    problem: ProblemSpec,
    schedule: Schedule,
    extent: Extent,
    method: MethodSpec,
) -> bool:
    coordinates = {
        "problem": problem.name,
        "schedule": schedule.name,
        extent.unit: extent.count,
        "method": method.name,
    }
    return all(coordinates.get(key) == value for key, value in rule.items())


def _extra(study: Study, rule: dict[str, Any], where: str) -> Cell:
    problem = next(part for part in study.problems if part.name == rule["problem"])
    schedule = next(part for part in study.schedules if part.name == rule["schedule"])
    lengths = {unit: rule[unit] for unit in ("num_steps", "num_rounds") if unit in rule}
    wanted = rule.get("methods", names(study.methods))
    methods = tuple(method for method in study.methods if method.name in wanted)
    return _cell(study, problem, schedule, Extent.of(lengths, where), methods)


def _cell(
    study: Study,
    problem: ProblemSpec,
    schedule: Schedule,
    extent: Extent,
    methods: tuple[MethodSpec, ...],
) -> Cell:
    rest = study.levels, study.save_at, study.seed, study.dtype, study.tile_size
    return Cell(problem, schedule, extent, methods, *rest)
