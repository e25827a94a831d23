"""Where a page comes from: a study file for the same study, a digest of the rows, and commands."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxlsgd.core.rows import CellRows
from jaxlsgd.schedules import Schedule
from jaxlsgd.study.parts import Part, ProblemPart, thawed
from jaxlsgd.study.store.reader import Results
from jaxlsgd.study.study import Study

_OBJECT = "# {}: {} was given as an object in Python, and cannot be written here"
# Fields of a schedule by the names of its family's arguments.
_ARGUMENTS = {
    "constant": {"scale": "E"},
    "power": {"exponent": "beta", "scale": "scale"},
    "logarithmic": {"scale": "scale", "exponent": "power", "base": "base"},
    "iterated_logarithmic": {"scale": "scale", "exponent": "power"},
    "custom": {"sequence": "sequence"},
}


def study_file(study: Study) -> str:
    """Return the study as TOML; parts that were given as objects are named in a comment."""
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
        **({"until": plain["until"]} if "until" in plain else {}),
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


_ROWS = ("estimate", "scale", "half_width", "floored")


class Digest:
    """SHA-256 of all rows in the order of the study, whatever the tiles."""

    def __init__(self) -> None:
        self._total = hashlib.sha256()

    def add(self, cell_id: str, cell: CellRows) -> None:
        """Add a cell."""
        for name, rows in cell.methods.items():
            for field in _ROWS:
                array = getattr(rows, field)
                self._total.update(f"{cell_id} {name} {field} {array.shape}\n".encode())
                self._total.update(array.tobytes())

    def hex(self) -> str:
        """Return the digest of what was added."""
        return self._total.hexdigest()


def shown_path(directory: Path) -> str:
    """Return a directory as a command names it, without the absolute path, which is private."""
    name = directory.name or directory.resolve().name
    return shlex.quote(
        name if directory.is_absolute() or ".." in directory.parts else str(directory)
    )


def _own_parts(study: Study) -> list[str]:
    """Return the names of problems, methods and algorithms that do not come with the package."""
    return [
        part.name for part in (*study.problems, *study.methods, *study.algorithms) if part.identity
    ]


def imports(study: Study) -> str:
    """Return the option that a command which computes needs for a user's own parts."""
    return " --import FILE" if _own_parts(study) else ""


def provenance(results: Results, digest: str) -> list[tuple[str, str]]:
    """Return names and values, for people."""
    place, study = shown_path(results.directory), results.study
    facts = [
        ("Study", f"{results.manifest.get('digest', '')}"),
        ("Rows", digest),
        ("Seed", str(study.seed)),
        ("Started", str(results.manifest.get("created", ""))),
    ]
    for i, environment in enumerate(results.manifest.get("environments", [])):
        text = ", ".join(f"{key} {value}" for key, value in environment.items() if value != "")
        facts.append(("Made with" if not i else "and with", text))
    own = _own_parts(study)
    given = imports(study)
    facts += [
        ("Run again", f"jaxlsgd run study.toml --out {place}{given}"),
        ("This page", f"jaxlsgd report {place}"),
        ("Table", f"jaxlsgd table {place}"),
    ]
    if own:
        facts.append(("Own code", "registered by FILE, or given as objects: " + ", ".join(own)))
    return facts
