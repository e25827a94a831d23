"""Schedules of a study: by name, by table, or given."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxlsgd import schedules
from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.text import fraction
from jaxlsgd.schedules import Schedule
from jaxlsgd.study.parts import thawed

_FIELDS = ("family", "name", "scale", "exponent", "base", "sequence", "warmup")


def of(value: Any, where: str, warmup: float = 0.0) -> Schedule:
    """Reads a paper name, a table with `family` and the builder's arguments, or a `Schedule`.

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
            raise refusal(where, rule, value, checks.nearest(value, known))
        return schedules.paper(value).with_warmup(warmup)
    return _of_table(
        checks.table(where, value, "a schedule's name or a table with `family`"), where, warmup
    )


def _of_table(given: dict[str, Any], where: str, warmup: float) -> Schedule:
    from jaxlsgd.study import kinds

    family = kinds.find("schedule", given.pop("family", None), f"{where}.family")
    share, name = given.pop("warmup", warmup), given.pop("name", None)
    made = kinds.make(family, {key: fraction(part) for key, part in given.items()}, where)
    if not isinstance(made, Schedule):
        raise refusal(where, f"be built as a Schedule by {family.name}", made)
    made = made.with_warmup(share)
    if name is not None:
        made = dataclasses.replace(made, name=checks.label(f"{where}.name", name))
    return made


def plain(schedule: Schedule) -> dict[str, Any]:
    """JSON data, from which `read` makes an equal schedule."""
    return {name: thawed(getattr(schedule, name)) for name in _FIELDS}


def read(content: dict[str, Any]) -> Schedule:
    """The schedule that `plain` describes; every value is checked by making plans of it."""
    numbers = {key: checks.number(key, content[key]) for key in ("scale", "exponent", "base")}
    sequence = content["sequence"]
    if sequence:
        sequence = checks.interval_array("sequence", sequence).tolist()
    family = checks.choice("family", content["family"], schedules.FAMILIES)
    name = checks.label("name", content["name"])
    made = Schedule(family, name, **numbers, sequence=tuple(sequence))
    return made.with_warmup(content["warmup"])
