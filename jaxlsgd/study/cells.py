"""The cells of a study, and the rules that exclude some or add others. Start at `CellSpec`."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jaxlsgd.core import checks
from jaxlsgd.core.checks import Dtype
from jaxlsgd.schedules import Plan, Schedule
from jaxlsgd.schedules.step_size import power_or_constant
from jaxlsgd.study.errors import SpecError
from jaxlsgd.study.parts import (
    MOST_STEPS,
    Extent,
    Part,
    ProblemPart,
    names,
    plain_schedule,
    read_problem,
    read_schedule,
)

if TYPE_CHECKING:
    from jaxlsgd.study.study import Study

_ROUTE = ("problem", "algorithm", "schedule", "num_steps", "num_rounds")
EXCLUDE_KEYS = (*_ROUTE, "method")
EXTRA_KEYS = (*_ROUTE, "methods")


def canonical(content: Any) -> bytes:
    """Return JSON data as bytes, equal for equal data."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")


def digest_of(content: Any) -> str:
    """Return the SHA-256 of JSON data."""
    return hashlib.sha256(canonical(content)).hexdigest()


@dataclasses.dataclass(frozen=True)
class CellSpec:
    """One problem under one algorithm and schedule to one horizon: all that decides its rows."""

    problem: ProblemPart
    algorithm: Part
    schedule: Schedule
    extent: Extent
    methods: tuple[Part, ...]
    levels: tuple[float, ...]
    save_at: tuple[int | float, ...]
    seed: int
    dtype: Dtype
    tile_size: int

    def plain(self) -> dict[str, Any]:
        """Return the cell as JSON data."""
        return {
            "problem": self.problem.plain(),
            "algorithm": self.algorithm.plain(),
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
    def read(cls, plain: dict[str, Any]) -> CellSpec:
        """Return the cell that `plain` describes, without its objects."""
        return cls(
            read_problem(plain["problem"]),
            Part.read("algorithm", plain["algorithm"]),
            read_schedule(plain["schedule"]),
            Extent.of(plain["horizon"], "horizon"),
            tuple(Part.read("method", method) for method in plain["methods"]),
            *(tuple(plain["levels"]), tuple(plain["save_at"])),
            *(plain["seed"], plain["dtype"], plain["tile_size"]),
        )

    def built(self) -> CellSpec:
        """Return the cell with the objects of all its parts."""
        methods = tuple(method.built() for method in self.methods)
        parts = {"problem": self.problem.built(), "algorithm": self.algorithm.built()}
        return dataclasses.replace(self, methods=methods, **parts)

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
    def coordinates(self) -> tuple[str, ...]:
        """Problem, schedule, horizon and, unless it is Local SGD, the algorithm: unique to a cell."""
        other = (self.algorithm.name,) if self.algorithm.name != "local_sgd" else ()
        return self.problem.name, self.schedule.name, str(self.extent), *other

    @functools.cached_property
    def num_steps(self) -> int:
        """Local steps of a client, and one evaluation after the last round."""
        return self.plan().num_steps + 1

    @property
    def tile_bytes(self) -> int:
        """Bytes of the rows of one tile, at most; see `Cell.row_bytes`."""
        dim, numbers = self.problem.fact("dim"), 8 * (2 + len(self.levels))
        each = sum(numbers * max(dim, method.fact("contrasts")) + 2 for method in self.methods)
        return self.tile_size * (len(self.save_at) + 1) * each

    def plan(self) -> Plan:
        """Return the schedule and the step sizes, round by round."""
        step = power_or_constant(self.problem.gamma0, self.problem.alpha)
        plan = self.schedule.plan(step, **{self.extent.unit: self.extent.count})
        if plan.num_steps > MOST_STEPS:
            raise checks.refusal("num_rounds", f"take at most {MOST_STEPS} steps", plan.num_steps)
        return plan

    def saved_rounds(self, plan: Plan) -> tuple[int, ...]:
        """Return the rounds of `save_at`, with shares of the observations turned into rounds, and the last."""
        given = [value for value in self.save_at if not isinstance(value, float)]
        shares = [value for value in self.save_at if isinstance(value, float)]
        for m in given:
            if m > plan.num_rounds:
                rule = f"be at most {plan.num_rounds}, the last round"
                raise checks.refusal("save_at", rule, m)
        return tuple(sorted({*given, *plan.rounds_at(shares).tolist(), plan.num_rounds}))


def draws_of(cell: CellSpec) -> tuple[Any, ...]:
    """Return what cells in one job have in common; their schedules, horizons and step sizes may differ."""
    parts = cell.problem.content, cell.algorithm.content, cell.methods
    return (*parts, cell.levels, cell.seed, cell.dtype, cell.tile_size)


def read_rules(study: Study, key: str, keys: tuple[str, ...]) -> tuple[Any, ...]:
    """Check the tables of `exclude` or `extra`, and return them as sorted pairs."""
    values = getattr(study, key)
    if not isinstance(values, (list, tuple)):
        raise checks.refusal(key, "be a list of tables", values, code="type")
    return tuple(_rule(study, f"{key}[{i}]", value, keys) for i, value in enumerate(values))


def _rule(study: Study, where: str, rule: Any, keys: tuple[str, ...]) -> tuple[Any, ...]:
    rule = dict(rule) if isinstance(rule, tuple) else rule
    rule = checks.table(where, rule, f"a table of {', '.join(keys)}")
    checks.known_keys(where, rule, keys)
    for key in ("problem", "algorithm", "schedule", "method"):
        if key in rule:
            known = tuple(names(getattr(study, f"{key}s")))
            checks.choice(f"{where}.{key}", rule[key], known)
    if "methods" in rule:
        listed = checks.sequence(f"{where}.methods", rule["methods"], "method")
        known = tuple(names(study.methods))
        rule["methods"] = tuple(checks.choice(f"{where}.methods", x, known) for x in listed)
    if "methods" in keys and not {"problem", "schedule"} <= rule.keys():
        text = f"{where}: an extra cell needs problem, schedule and num_steps or num_rounds"
        raise SpecError(text, where, "missing")
    lengths = {unit: rule[unit] for unit in ("num_steps", "num_rounds") if unit in rule}
    if "methods" in keys or lengths:
        Extent.of(lengths, where)
    if not rule:
        raise SpecError(f"{where}: is empty and would exclude everything", where)
    return tuple(sorted(rule.items()))


def expand(study: Study) -> Iterator[CellSpec]:
    """Yield the cells: the crossed grid without what is excluded, and the extra ones."""
    rules = [dict(rule) for rule in study.exclude]
    crossed = itertools.product(study.problems, study.algorithms, study.schedules, study.horizons)
    for where in crossed if study.cross else ():
        methods = tuple(
            method
            for method in study.methods
            if not any(_matches(rule, *where, method) for rule in rules)
        )
        if methods:
            yield _cell_spec(study, *where, methods)
    for i, pairs in enumerate(study.extra):
        yield _extra(study, dict(pairs), f"extra[{i}]")


def _matches(
    rule: dict[str, Any],
    problem: Part,
    algorithm: Part,
    schedule: Schedule,
    extent: Extent,
    method: Part,
) -> bool:
    coordinates = {
        "problem": problem.name,
        "algorithm": algorithm.name,
        "schedule": schedule.name,
        extent.unit: extent.count,
        "method": method.name,
    }
    return all(coordinates.get(key) == value for key, value in rule.items())


def _extra(study: Study, rule: dict[str, Any], where: str) -> CellSpec:
    named = {"algorithm": study.algorithms[0].name} | rule
    problem, algorithm, schedule = (
        next(part for part in getattr(study, f"{key}s") if part.name == named[key])
        for key in ("problem", "algorithm", "schedule")
    )
    lengths = {unit: rule[unit] for unit in ("num_steps", "num_rounds") if unit in rule}
    wanted = rule.get("methods", tuple(names(study.methods)))
    methods = tuple(method for method in study.methods if method.name in wanted)
    return _cell_spec(study, problem, algorithm, schedule, Extent.of(lengths, where), methods)


def _cell_spec(
    study: Study,
    problem: ProblemPart,
    algorithm: Part,
    schedule: Schedule,
    extent: Extent,
    methods: tuple[Part, ...],
) -> CellSpec:
    rest = study.levels, study.save_at, study.seed, study.dtype, study.tile_size
    return CellSpec(problem, algorithm, schedule, extent, methods, *rest)
