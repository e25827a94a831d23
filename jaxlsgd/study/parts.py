"""Parts of a study (problems, methods, algorithms, schedules, horizons), as given and as JSON data.

Each may be a kind's name, a table of a kind and its arguments, or an object. Start at `Part`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Self

from jaxlsgd import schedules
from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.display import fraction
from jaxlsgd.core.registry import Kind, Role
from jaxlsgd.schedules import Schedule
from jaxlsgd.schedules.step_size import power_or_constant
from jaxlsgd.study.errors import SpecError, refusing

MOST_STEPS = 10**8
_DEEPEST = 4  # problems that wrap one another
_OBJECTS = {"problem": "Problem", "method": "Estimator", "algorithm": "Algorithm"}


@dataclasses.dataclass(frozen=True)
class Part:
    """A problem, a method or an algorithm under its name in the study."""

    role: Role
    name: str
    kind: str  # registered kind, or "" for an object
    arguments: tuple[tuple[str, Any], ...]  # sorted, plain
    identity: str  # digest of data and code that do not come with the package, or ""
    facts: tuple[tuple[str, int], ...]  # sorted: sizes that readers of results need
    made: Any = dataclasses.field(default=None, compare=False, repr=False)

    def plain(self) -> dict[str, Any]:
        """Return JSON data, from which `read` makes an equal part."""
        return {
            "kind": self.kind,
            "name": self.name,
            "arguments": {key: thawed(value) for key, value in self.arguments},
            "identity": self.identity,
            "facts": dict(self.facts),
        }

    @classmethod
    def read(cls, role: Role, plain: dict[str, Any], **more: Any) -> Self:
        """Return the part that `plain` describes, without the object."""
        texts = {key: plain[key] for key in ("kind", "name", "identity")}
        if not all(isinstance(text, str) for text in texts.values()):
            raise refusal(role, "have texts as kind, name and identity", texts, code="type")
        checks.label(f"{role}.name", texts["name"])
        facts = {key: checks.count(f"{role}.{key}", n, 0) for key, n in plain["facts"].items()}
        arguments = frozen(plain["arguments"])
        return cls(role, arguments=arguments, facts=tuple(sorted(facts.items())), **texts, **more)

    def fact(self, key: str) -> int:
        """Return one of the sizes."""
        return dict(self.facts)[key]

    @property
    def content(self) -> tuple[Any, ...]:
        """What the part is, apart from its name."""
        return self.kind, self.arguments, self.identity

    def built(self) -> Self:
        """Return the part with its object; refuse code or data that have changed since."""
        if self.made is not None:
            return self
        from jaxlsgd.study import imports

        where = f"{self.role} {self.name}"
        if not self.kind:
            text = f"{where}: was given as an object in Python; give the study as well"
            raise SpecError(text, where, "missing")
        if not imports.known(self.role, self.kind):
            text = (
                f"{where}: its kind {checks.shown(self.kind)} is not registered here; import the file "
                "that registers it, as for the run (--import FILE)"
            )
            raise SpecError(text, where, "unknown")
        table = {"kind": self.kind, "name": self.name} | {k: thawed(v) for k, v in self.arguments}
        with refusing(where):
            rebuilt = _of_kind(self.role, _Given(table), where)
        if rebuilt.identity != self.identity:
            raise SpecError(changed(self, rebuilt), where, "conflict")
        return dataclasses.replace(self, made=rebuilt.made)


def changed(old: Part, new: Part) -> str:
    """Return the message for code or data that differ from those that made the rows."""
    before, now = (part.identity.partition("-py")[2] for part in (old, new))
    if before and now and before != now:
        return (
            f"{new.role} {new.name}: its rows were made under Python {before}, and its code cannot be "
            f"compared under {now}; use that version, or choose a new directory"
        )
    return (
        f"{new.role} {new.name}: its code or data changed since its rows were made; bring the old code "
        "back, or choose a new directory"
    )


@dataclasses.dataclass(frozen=True)
class ProblemPart(Part):
    """A problem with the effective step γ_m = γ_0 m^(−α) that it is run with."""

    gamma0: float = 0.0
    alpha: float = 0.0

    def plain(self) -> dict[str, Any]:
        """Return JSON data, from which `read_problem` makes an equal part."""
        return super().plain() | {"gamma0": self.gamma0, "alpha": self.alpha}


def read_problem(plain: dict[str, Any]) -> ProblemPart:
    """Return the part that `ProblemPart.plain` describes."""
    steps = {key: checks.number(key, plain[key]) for key in ("gamma0", "alpha")}
    return ProblemPart.read("problem", plain, **steps)


def problems(value: Any, where: str) -> list[ProblemPart]:
    """Read a kind's name, a `Problem`, or a table of a kind and its arguments, γ_0 and α.

    In a table, `problem` may stand for an object in place of `kind`. Lists of `gamma0` and `alpha` make
    one problem of each combination.
    """
    if isinstance(value, ProblemPart):
        return [value]
    given = _given("problem", value, where)
    steps = {key: given.table.pop(key, None) for key in ("gamma0", "alpha")}
    part = _read("problem", given, where)
    gammas = _steps(f"{where}.gamma0", steps["gamma0"], part.made.gamma0, part.name)
    alphas = _steps(f"{where}.alpha", steps["alpha"], 0.505, part.name)
    found = []
    for gamma0 in gammas:
        for alpha in alphas:
            name = part.name
            name += f" gamma0={gamma0:g}" if isinstance(steps["gamma0"], (list, tuple)) else ""
            name += f" alpha={alpha:g}" if isinstance(steps["alpha"], (list, tuple)) else ""
            found.append(
                _with_step(part, checks.label(f"{where}.name", name), gamma0, alpha, where)
            )
    return found


def _steps(where: str, value: Any, default: float | None, name: str) -> list[float]:
    value = default if value is None else value
    if value is None:
        text = (
            f"{where}: is missing; the step size is gamma0 / m^alpha: give gamma0 in the table of {name}, "
            "or Problem(gamma0=...)"
        )
        raise SpecError(text, where, "missing")
    listed = (
        checks.sequence(where, value, "number") if isinstance(value, (list, tuple)) else [value]
    )
    return [checks.number(where, fraction(part)) for part in listed]


def _with_step(part: Part, name: str, gamma0: float, alpha: float, where: str) -> ProblemPart:
    with refusing(where):
        power_or_constant(gamma0, alpha)
    fields = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    fields |= {"name": name, "made": dataclasses.replace(part.made, name=name)}
    return ProblemPart(**fields, gamma0=gamma0, alpha=alpha)


def part(role: Role, value: Any, where: str) -> Part:
    """Read a method or an algorithm: a name such as "plug_in[finite]", an object, or a table."""
    if isinstance(value, Part):
        return value
    return _read(role, _given(role, value, where), where)


class _Given(NamedTuple):
    """A part as a table, and the text in brackets behind the name of its kind, if there is one."""

    table: dict[str, Any]
    option: str | None = None


def _given(role: Role, value: Any, where: str) -> _Given:
    if isinstance(value, str):
        named = re.fullmatch(r"([^\[\]]*)\[([^\[\]]*)\]", value)
        return _Given({"kind": named[1]}, named[2]) if named else _Given({"kind": value})
    if _is_object(role, value):
        return _Given({role: value})
    what = f"a kind's name, a table with `kind`, or a jaxlsgd.{_OBJECTS[role]}"
    return _Given(checks.table(where, value, what))


def _is_object(role: Role, value: Any) -> bool:
    from jaxlsgd.core.algorithm import Algorithm
    from jaxlsgd.core.estimator import Estimator
    from jaxlsgd.core.problem import Problem

    return isinstance(
        value, {"problem": Problem, "method": Estimator, "algorithm": Algorithm}[role]
    )


def _read(role: Role, given: _Given, where: str) -> Part:
    if role in given.table and "kind" not in given.table:
        return _of_object(role, given.table, where)
    return _of_kind(role, given, where)


def _of_object(role: Role, table: dict[str, Any], where: str) -> Part:
    checks.known_keys(where, table, (role, "name"))
    made = table[role]
    if not _is_object(role, made):
        raise refusal(f"{where}.{role}", f"be a jaxlsgd.{_OBJECTS[role]}", made, code="type")
    name = table.get("name", made.name)
    if not name:
        text = f"{where}: needs a name in a study; give {_OBJECTS[role]}(..., name=...)"
        raise SpecError(text, where, "missing")
    return _finished(role, made, name, "", (), where, own=True)


def _of_kind(role: Role, given: _Given, where: str) -> Part:
    from jaxlsgd.study import imports

    table = dict(given.table)
    kind = imports.find(role, table.pop("kind", None), f"{where}.kind")
    if given.option is not None:
        if not kind.brief:
            text = f"{where}: {kind.name} takes no brackets, got [{given.option}]"
            raise SpecError(f"{text}; {_in_a_table(kind)}", where, "unwanted")
        table[kind.brief] = _number(given.option)
    name = table.pop("name", None)
    hints = _type_hints(kind.build)
    inner = {
        key: _wrapped(table.pop(key), f"{where}.{key}")
        for key in kind.parameters
        if key in table and _takes_problem(hints.get(key))
    }
    data = {key: _data(f"{where}.{key}", value, kind, key) for key, value in table.items()}
    plain = {key: thawed(value) for key, value in data.items()}
    try:
        made = imports.make(kind, plain | {key: part.made for key, part in inner.items()}, where)
    except SpecError as error:
        if given.option is None or error.argument != f"{where}.{kind.brief}":
            raise
        text = f"{error}; brackets give {kind.brief}; other {_in_a_table(kind)}"
        raise SpecError(text, error.argument, error.code) from error
    data |= {key: _nested(part) for key, part in inner.items()}
    if not _is_object(role, made):
        hint = "; return its .problem" if _is_object(role, getattr(made, "problem", None)) else ""
        raise refusal(
            where, f"be built as a jaxlsgd.{_OBJECTS[role]} by {kind.name}", made, hint, code="type"
        )
    arguments = tuple(sorted(data.items()))
    name = name or made.name or kind.name
    own = kind.own or any(part.identity for part in inner.values())
    return _finished(role, made, name, kind.name, arguments, where, own=own)


def _in_a_table(kind: Kind) -> str:
    return f'arguments go in a table, {{kind = "{kind.name}", ...}}'


class Nested(tuple[tuple[str, Any], ...]):
    """A table among arguments, as sorted pairs: a problem that another one wraps."""


def _wrapped(value: Any, where: str) -> Part:
    """Read a problem that is an argument of another: a kind's name, or a table with `kind`."""
    if where.count(".") > _DEEPEST:
        text = f"{where}: problems must not wrap one another more than {_DEEPEST} times"
        raise SpecError(text, where)
    given = _given("problem", value, where)
    if "kind" not in given.table:
        raise refusal(
            where,
            "be a kind's name or a table with `kind`; wrap objects in Python",
            value,
            code="type",
        )
    return _of_kind("problem", given, where)


def _nested(part: Part) -> Nested:
    return Nested(sorted((("kind", part.kind), ("name", part.name), *part.arguments)))


def _type_hints(build: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of a builder's arguments; none if an annotation cannot be evaluated."""
    try:
        return typing.get_type_hints(build)
    except Exception:  # names that are imported for type checkers alone, or any text
        return {}


def _mentions(hint: Any, *types: type) -> bool:
    """Whether a type is, or is made of, one of some types: `float | Sequence[float]` of float."""
    return hint in types or any(_mentions(part, *types) for part in typing.get_args(hint))


def _takes_problem(hint: Any) -> bool:
    from jaxlsgd.core.problem import Problem

    return _mentions(hint, Problem)


def _takes_floats(hint: Any, default: Any) -> bool:
    """Whether a builder takes real numbers, so that 2 and 2.0 are the same study."""
    # NumPy's ArrayLike has complex numbers alone, JAX's has both.
    return type(default) is float or _mentions(hint, float, complex)


def _finished(
    role: Role,
    made: Any,
    name: Any,
    kind: str,
    arguments: tuple[tuple[str, Any], ...],
    where: str,
    own: bool,
) -> Part:
    from jaxlsgd.core import identity

    name = checks.label(f"{where}.name", name)
    digest = identity.digest(made) if own else ""
    made = made if made.name == name else dataclasses.replace(made, name=name)
    return Part(role, name, kind, arguments, digest, _FACTS[role](made), made)


# Sizes that bound what a reader of results must expect.
_FACTS: dict[str, Callable[[Any], tuple[tuple[str, int], ...]]] = {
    "problem": lambda made: (("dim", made.dim), ("num_clients", made.num_clients)),
    "method": lambda made: (("contrasts", len(made.contrasts)),),
    "algorithm": lambda made: (),
}


def _data(where: str, value: Any, kind: Kind, key: str) -> Any:
    """Check an argument that is plain data: text, a truth value, a number or a list of numbers."""
    value = fraction(value)
    if isinstance(value, (str, bool)):
        return value
    found, parameter = checks.numeric(where, value), kind.parameters.get(key)
    if parameter is None or not _takes_floats(_type_hints(kind.build).get(key), parameter.default):
        return found
    return _as_floats(where, found)


def _as_floats(where: str, value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_as_floats(where, part) for part in value)
    return checks.number(where, value)


def _number(text: str) -> Any:
    """Return a number from its text, as in "batch_means[20]"; the text if it is none."""
    for read in (int, float):
        with contextlib.suppress(ValueError):
            return read(text)
    return text


_SCHEDULE_FIELDS = ("family", "name", "scale", "exponent", "base", "sequence", "warmup")


def schedule(value: Any, where: str, warmup: float = 0.0) -> Schedule:
    """Read a paper name, a table with `family` and the builder's arguments, or a `Schedule`.

    Args:
      value: "C5", or {family = "power", beta = 0.25, scale = 2}, and optionally `name` and `warmup`.
      where: key, for messages.
      warmup: share of the observations, for a schedule without a warm-up of its own.
    """
    if isinstance(value, Schedule):
        return value if value.warmup else value.with_warmup(warmup)
    if isinstance(value, str):
        known = schedules.PAPER_SCHEDULES
        if value not in known:
            table = '{family = "power", beta = 0.25}'
            rule = f"be one of {', '.join(known)}, or a table such as {table}"
            raise refusal(where, rule, value, checks.nearest(value, known), code="choice")
        return schedules.paper(value).with_warmup(warmup)
    from jaxlsgd.study import imports

    given = checks.table(where, value, "a schedule's name or a table with `family`")
    family = imports.find("schedule", given.pop("family", None), f"{where}.family")
    share, name = given.pop("warmup", warmup), given.pop("name", None)
    numbers = {key: fraction(part) for key, part in given.items()}
    made = imports.make(family, numbers, where)
    if not isinstance(made, Schedule):
        raise refusal(where, f"be built as a Schedule by {family.name}", made, code="type")
    if (
        made.sequence
        and family.name != made.family
        and made.name == schedules.custom(made.sequence).name
    ):
        # A builder of one's own that names nothing: its own name says more than `custom[16000]`.
        values = ", ".join(map(str, given.values()))
        made = dataclasses.replace(made, name=family.name + (f"({values})" if values else ""))
    made = made.with_warmup(share)
    if name is not None:
        made = dataclasses.replace(made, name=checks.label(f"{where}.name", name))
    return made


def plain_schedule(schedule: Schedule) -> dict[str, Any]:
    """Return JSON data, from which `read_schedule` makes an equal schedule."""
    return {name: thawed(getattr(schedule, name)) for name in _SCHEDULE_FIELDS}


def read_schedule(content: dict[str, Any]) -> Schedule:
    """Return the schedule that `plain_schedule` describes, with every value checked."""
    numbers = {key: checks.number(key, content[key]) for key in ("scale", "exponent", "base")}
    sequence = content["sequence"]
    if sequence:
        sequence = checks.interval_array("sequence", sequence).tolist()
    family = checks.choice("family", content["family"], schedules.FAMILIES)
    name = checks.label("name", content["name"])
    made = Schedule(family, name, **numbers, sequence=tuple(sequence))
    return made.with_warmup(content["warmup"])


@dataclasses.dataclass(frozen=True, order=True)
class Extent:
    """How long a cell runs: so many observations per client, or so many rounds."""

    unit: str  # "num_steps" or "num_rounds"
    count: int

    @classmethod
    def of(cls, value: Any, where: str) -> Extent:
        """Read 5000, {num_steps = 5000} or {num_rounds = 1200}."""
        if isinstance(value, cls):
            return value
        given = value if isinstance(value, dict) else {"num_steps": value}
        checks.known_keys(where, given, ("num_steps", "num_rounds"))
        if len(given) != 1:
            raise refusal(
                where, "give exactly one of num_steps and num_rounds", value, code="conflict"
            )
        unit, count = next(iter(given.items()))
        place = f"{where}.{unit}" if isinstance(value, dict) else where
        return cls(unit, checks.count(place, count, 1, MOST_STEPS))

    def plain(self) -> dict[str, int]:
        """Return the table that `of` reads."""
        return {self.unit: self.count}

    def __str__(self) -> str:
        return str(self.count) if self.unit == "num_steps" else f"{self.count} rounds"


def frozen(table: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return a table of plain data as sorted pairs, with lists as tuples."""

    def freeze(value: Any) -> Any:
        if isinstance(value, dict):
            return Nested(frozen(value))
        return tuple(freeze(part) for part in value) if isinstance(value, list) else value

    return tuple(sorted((key, freeze(value)) for key, value in table.items()))


def thawed(value: Any) -> Any:
    """Return nested tuples as nested lists and tables, for JSON."""
    if isinstance(value, Nested):
        return {key: thawed(part) for key, part in value}
    return [thawed(part) for part in value] if isinstance(value, tuple) else value


def names(parts: Iterable[Any]) -> Iterator[str]:
    """Yield the names of problems, schedules or methods."""
    return (part.name for part in parts)
