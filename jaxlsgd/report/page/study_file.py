"""A study file that asks for the same study, from what a directory of results has kept of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlsgd.schedules import Schedule
from jaxlsgd.study.parts import Part, ProblemPart, thawed
from jaxlsgd.study.spec import Study

_OBJECT = "# {}: {} was given as an object in Python, and cannot be written here"
# What the families call their numbers.
_ARGUMENTS = {
    "constant": {"scale": "E"},
    "power": {"exponent": "beta", "scale": "scale"},
    "logarithmic": {"scale": "scale", "exponent": "power", "base": "base"},
    "iterated_logarithmic": {"scale": "scale", "exponent": "power"},
    "custom": {"sequence": "sequence"},
}


def study_file(study: Study) -> str:
    """The study as TOML; parts that were given as objects are named in a comment."""
    plain = study.plain()
    values = {
        "replications": study.replications,
        "seed": study.seed,
        "horizons": plain["horizons"],
        "levels": plain["levels"],
        "schedules": [_schedule(part) for part in study.schedules],
        "methods": [_part(part) for part in study.methods if part.kind],
        "algorithms": [_part(part) for part in study.algorithms if part.kind],
        "save_at": plain["save_at"],
        "tile_size": study.tile_size,
        "dtype": study.dtype,
        "cross": study.cross,
    }
    lines = [f"{key} = {_toml(value)}" for key, value in values.items() if value != []]
    for part in (*study.problems, *study.methods, *study.algorithms):
        if not part.kind:
            lines.append(_OBJECT.format(part.role, part.name))
    tables = [("problems", _problem(part)) for part in study.problems if part.kind]
    tables += [(key, rule) for key in ("exclude", "extra") for rule in plain[key]]
    for key, table in tables:
        lines += ["", f"[[{key}]]", *(f"{_key(k)} = {_toml(v)}" for k, v in table.items())]
    return "\n".join(lines) + "\n"


def _part(part: Part) -> dict[str, Any]:
    return {"kind": part.kind, "name": part.name} | {k: thawed(v) for k, v in part.arguments}


def _problem(part: ProblemPart) -> dict[str, Any]:
    return _part(part) | {"gamma0": part.gamma0, "alpha": part.alpha}


def _schedule(schedule: Schedule) -> dict[str, Any]:
    names = _ARGUMENTS[schedule.family]
    given = {name: thawed(getattr(schedule, field)) for field, name in names.items()}
    if "E" in given:
        given["E"] = int(given["E"])
    if given.get("beta", 0) >= 1:
        given["allow_outside_theory"] = True
    warmup = {"warmup": schedule.warmup} if schedule.warmup else {}
    return {"family": schedule.family, "name": schedule.name} | given | warmup


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's too.
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {_toml(part)}" for key, part in value.items()) + "}"
    if isinstance(value, Sequence):
        broken = any(isinstance(part, Mapping) for part in value)
        start, between, end = ("\n  ", ",\n  ", ",\n") if broken else ("", ", ", "")
        return f"[{start}{between.join(map(_toml, value))}{end}]"
    return repr(value)


def _key(key: str) -> str:
    return key if key.replace("_", "").isalnum() and key.isascii() else json.dumps(key)
