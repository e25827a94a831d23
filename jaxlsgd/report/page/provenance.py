"""Where the numbers come from: what made the rows, how to make them again, and a digest of them."""

from __future__ import annotations

import hashlib
import shlex
from pathlib import Path

from jaxlsgd.core.rows import CellRows
from jaxlsgd.study.spec import Study
from jaxlsgd.study.store.reader import Results

_ROWS = ("estimate", "scale", "half_width", "floored")


class Digest:
    """SHA-256 of all rows that were read, in the order of the study; however they were cut in tiles."""

    def __init__(self) -> None:
        self._total = hashlib.sha256()

    def add(self, cell_id: str, cell: CellRows) -> None:
        """Takes a cell in."""
        for name, rows in cell.methods.items():
            for field in _ROWS:
                array = getattr(rows, field)
                self._total.update(f"{cell_id} {name} {field} {array.shape}\n".encode())
                self._total.update(array.tobytes())

    def hex(self) -> str:
        """The digest of what was added."""
        return self._total.hexdigest()


def shown_path(directory: Path) -> str:
    """A directory as a command names it; where it lay on somebody's disk is nobody else's business."""
    name = directory.name or directory.resolve().name
    return shlex.quote(
        name if directory.is_absolute() or ".." in directory.parts else str(directory)
    )


def own_parts(study: Study) -> list[str]:
    """The names of problems, methods and algorithms that do not come with the package."""
    return [
        part.name for part in (*study.problems, *study.methods, *study.algorithms) if part.identity
    ]


def imports(study: Study) -> str:
    """What a command that computes must be told besides, for parts of somebody's own."""
    return " --import FILE" if own_parts(study) else ""


def provenance(results: Results, digest: str) -> list[tuple[str, str]]:
    """Names and values, for people."""
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
    own = own_parts(study)
    given = imports(study)
    facts += [
        ("Run again", f"jaxlsgd run study.toml --out {place}{given}"),
        ("This page", f"jaxlsgd report {place}"),
        ("Table", f"jaxlsgd table {place}"),
    ]
    if own:
        facts.append(("Own code", "registered by FILE, or given as objects: " + ", ".join(own)))
    return facts
