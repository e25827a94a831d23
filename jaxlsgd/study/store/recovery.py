"""Rebuild a lost manifest from the cells and tiles, which identify themselves."""

from __future__ import annotations

import contextlib
import graphlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from jaxlsgd.core.checks import MOST_REPLICATIONS
from jaxlsgd.study.cells import CellSpec
from jaxlsgd.study.store import files
from jaxlsgd.study.store.files import FORMAT, Damaged, StoreError
from jaxlsgd.study.study import Study

_ERRORS = (KeyError, TypeError, ValueError, AttributeError, OverflowError)
_SHARED = ("levels", "save_at", "seed", "dtype", "tile_size")  # by all cells of a study


class Note(NamedTuple):
    """A copy of parts of the manifest in a cell's description."""

    place: int  # of the cell in the study
    cells: int
    replications: int
    environment: dict[str, Any]


def note_of(content: dict[str, Any]) -> Note | None:
    """Return the note in a description; None if it has none that can be used."""
    found = content.get("manifest")
    if not isinstance(found, dict) or set(found) != set(Note._fields):
        return None
    note = Note(**found)
    counts = (note.place, note.cells, note.replications)
    fits = all(type(x) is int and 0 <= x <= MOST_REPLICATIONS for x in counts)
    return note if fits and isinstance(note.environment, dict) else None


def _described(directory: Path) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return each cell.json, by the name of its directory and in the order of the study, and unreadable ones."""
    contents, unread = {}, []
    for name in _folders(directory):
        try:
            contents[name] = files.read_json(directory / "cells" / name / "cell.json")
        except StoreError:
            unread.append(name)
    places = {name: (note.place if (note := note_of(x)) else -1) for name, x in contents.items()}
    return {name: contents[name] for name in sorted(places, key=places.__getitem__)}, unread


def _folders(directory: Path) -> list[str]:
    """Return the names in `cells`, sorted."""
    try:
        return sorted(os.listdir(directory / "cells"))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise files.cannot("read", directory / "cells", error) from error


def environments(contents: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the distinct environments in descriptions."""
    found: list[dict[str, Any]] = []
    for note in filter(None, map(note_of, contents)):
        if note.environment not in found:
            found.append(note.environment)
    return found


def manifest(directory: Path) -> tuple[dict[str, Any], Study, str] | None:
    """Return a manifest made of the cells, its study, and a text on what is missing; None without cells."""
    contents, unread = _described(directory)
    if not contents:
        return None
    notes = list(filter(None, map(note_of, contents.values())))
    asked = max((note.replications for note in notes), default=0)
    study = _study(contents, max(asked, 1), directory)
    known = {cell.id for cell in study.cells}
    lost = [*unread, *(name for name in contents if name not in known)]
    total = max([note.cells for note in notes] + [len(known)])
    if most := most_replications(directory, study.cells, asked):
        study = Study.read(study.plain() | {"replications": most})
    content = {"format": FORMAT, "digest": "", "created": "", "study": study.plain()}
    content["environments"] = environments(contents.values())
    return content, study, _missing(len(known), total, lost)


def _missing(known: int, total: int, lost: list[str]) -> str:
    damaged = f"; the description of {lost[0]} is damaged" if lost else ""
    more = f" and of {len(lost) - 1} more" if len(lost) > 1 else ""
    return f"{known} of {total} cells have rows that can be shown{damaged}{more}"


def _study(contents: dict[str, dict[str, Any]], replications: int, directory: Path) -> Study:
    try:
        cells = [content["cell"] for content in contents.values()]
        shared = {key: cells[0][key] for key in _SHARED}
        if any(cell[key] != value for cell in cells for key, value in shared.items()):
            text = f"{directory} has cells of several studies and no usable manifest"
            raise StoreError(text, directory, "damaged")
        return Study.read(shared | _grid(cells) | {"replications": replications})
    except _ERRORS as error:
        text = (
            f"{directory} is damaged: neither its manifest nor its cells describe a study "
            f"({files.unread(error)})"
        )
        raise Damaged(text, directory) from error


def _grid(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a grid that lists these cells one by one."""
    methods = {method["name"]: method for cell in cells for method in cell["methods"]}
    listed: graphlib.TopologicalSorter[str] = graphlib.TopologicalSorter()
    for cell in cells:  # each has some of the methods, in the study's order
        names = [method["name"] for method in cell["methods"]]
        for after, name in enumerate(names):
            listed.add(name, *names[:after])
    return {
        "problems": _distinct(cell["problem"] for cell in cells),
        "algorithms": _distinct(cell["algorithm"] for cell in cells),
        "schedules": _distinct(cell["schedule"] for cell in cells),
        "methods": [methods[name] for name in listed.static_order()],
        "cross": False,
        "extra": [_rule(cell) for cell in cells],
    }


def _distinct(parts: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({part["name"]: part for part in parts}.values())


def _rule(cell: dict[str, Any]) -> dict[str, Any]:
    named = {key: cell[key]["name"] for key in ("problem", "algorithm", "schedule")}
    return named | dict(cell["horizon"]) | {"methods": [x["name"] for x in cell["methods"]]}


def identified(directory: Path, study: Study) -> dict[str, dict[str, Any]] | None:
    """Return the descriptions of a study's cells if its manifest is lost; None if no cell is of this study."""
    known = {cell.id: cell for cell in study.cells}
    names = _folders(directory)
    if not names or not set(names) <= set(known):
        return None
    contents, _ = _described(directory)
    mine = {name: x for name, x in contents.items() if x.get("digest") == known[name].digest}
    if mine or any(_intact(directory, known[name]) for name in names):
        return mine
    return None


def _intact(directory: Path, cell: CellSpec) -> bool:
    """Whether at least one tile is of this cell."""
    return any(_reads(path, cell) for path in (directory / "cells" / cell.id).glob("tile-*.npz"))


def _reads(path: Path, cell: CellSpec) -> bool:
    with contextlib.suppress(Damaged, ValueError):
        files.read_tile(path, cell, int(path.stem.removeprefix("tile-")))
        return True
    return False


def most_replications(directory: Path, cells: Iterable[CellSpec], known: int) -> int:
    """Return where tiles beyond the `known` replications end; 0 if there are no such tiles."""
    most = 0
    for cell in cells:
        beyond = sorted((directory / "cells" / cell.id).glob("tile-*.npz"), reverse=True)
        for path in beyond:
            digits = path.stem.removeprefix("tile-")
            end = int(digits) + cell.tile_size if digits.isdecimal() else 0
            if end - cell.tile_size < max(known, most):
                break
            if end <= MOST_REPLICATIONS and _reads(path, cell):
                most = end
                break
    return most
