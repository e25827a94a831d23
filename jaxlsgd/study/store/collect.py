"""Make one study of the parts that array jobs have run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxlsgd.core.display import plural
from jaxlsgd.study.array import FOLDER, ArrayPart
from jaxlsgd.study.store import files, law_tables
from jaxlsgd.study.store.files import Damaged, Missing, StoreError
from jaxlsgd.study.store.reader import Results
from jaxlsgd.study.store.writer import Writer
from jaxlsgd.study.study import Study, differences

_SHOWN = 10  # problems that an error lists

Parts = Mapping[ArrayPart, Results]


class Collected(NamedTuple):
    """What was collected."""

    directory: Path
    parts: int
    tiles: int
    warnings: tuple[str, ...]


def collect(directory: str | os.PathLike[str]) -> Collected:
    """Make one study of all its parts, in the directory that holds them.

    Nothing is written unless all parts are complete and fit together. The parts are kept.

    Args:
      directory: holds what `run(..., part=...)` writes, such as part-01-of-20 to part-20-of-20.

    Example::

        study.run("results", part=(3, 20))  # one of 20 jobs
        collect("results")
    """
    place = Path(directory)
    problems: list[tuple[ArrayPart, str]] = []
    parts: dict[ArrayPart, Results] = {}
    for part in _expected(place):
        try:
            parts[part] = _opened(place / part.folder, part)
        except StoreError as error:
            problems.append((part, str(error)))
    if not parts:
        raise StoreError(_advice(place, problems), place, "damaged")
    study = _common_study(place, parts)
    _refuse_other_code(place, parts)
    there: dict[tuple[str, int], ArrayPart] = {}
    for part, results in parts.items():
        problems += [(part, text) for text in _read(results, part, parts, there)]
    for part in _expected(place):
        wanted = part.tiles(study)
        missing = sum((cell, first) not in there for cell in wanted for first in wanted[cell])
        if missing and part in parts:
            problems.append((part, f"{plural(missing, 'tile')} missing"))
    if problems:
        raise StoreError(_advice(place, problems), place, "damaged")
    environments = _environments(parts)
    with Writer(place, study, environments[0], collecting=True) as writer:
        for (cell, first), part in there.items():
            spec, results = parts[part].cell(cell), parts[part]
            if writer.lacks(spec, first):
                writer.describe(spec, results.stored_about(cell))
                writer.commit(spec, first, results.read_tile(cell, first))
        for part in parts:
            tables, _ = law_tables.read(place / part.folder, str(environments[0].get("code", "")))
            writer.keep(tables)
        writer.record(environments)
        lost = writer.lost()
    if lost:
        text = f"{lost[0]} disappeared from {place}; run the same command again"
        raise StoreError(text, place, "missing")
    warnings = tuple(
        f"rows may differ in their last digits between parts: {'; '.join(changed)}"
        for other in environments[1:]
        if (changed := differences(environments[0], other))
    )
    return Collected(place, len(parts), len(there), warnings)


def _expected(place: Path) -> list[ArrayPart]:
    """Return all parts that there should be, from the names of the directories."""
    try:
        named = [found for name in os.listdir(place) if (found := FOLDER.fullmatch(name))]
    except OSError as error:
        raise files.cannot("read", place, error) from error
    counts = sorted({int(found[2]) for found in named})
    if not counts:
        text = (
            f"{place} has no parts; run 'jaxlsgd run STUDY --out {place} --part 1/N' to N/N first"
        )
        raise StoreError(text, place, "missing")
    if len(counts) > 1:
        kinds = " and ".join(map(str, counts))
        text = f"{place} has parts of {kinds}, which overlap; move those of one kind away"
        raise StoreError(text, place, "conflict")
    return [ArrayPart(number, counts[0]) for number in range(1, counts[0] + 1)]


def _opened(folder: Path, part: ArrayPart) -> Results:
    """Return the results of a part; refuse one that is missing, still running or of another number."""
    results = Results(folder)
    recorded = results.manifest.get("part")
    if recorded not in (None, str(part)):
        text = f"it holds part {recorded}; rename or remove it"
        raise StoreError(text, folder, "conflict")
    if results.running():
        raise StoreError("it is still running; wait for it", folder, "busy")
    return results


def _common_study(place: Path, parts: Parts) -> Study:
    """Return the study of all parts; refuse parts of different studies."""
    (first, known), *others = parts.items()
    for part, results in others:
        if results.study.digest != known.study.digest:
            text = (
                f"{part.folder} holds another study than {first.folder} in {place}; move one away"
            )
            raise StoreError(text, place, "conflict")
    counts = {results.study.replications: part for part, results in parts.items()}
    if len(counts) > 1:
        listed = ", ".join(f"{part.folder} has {count}" for count, part in counts.items())
        text = f"the parts in {place} differ in their replications: {listed}"
        advice = "run the parts again with the same study file"
        raise StoreError(f"{text}; {advice}", place, "conflict")
    return known.study


def _refuse_other_code(place: Path, parts: Parts) -> None:
    """Refuse parts that different code of this package made."""
    codes = {
        environment.get("code"): part
        for part, results in parts.items()
        for environment in results.manifest.get("environments", [])
    }
    if len(codes) > 1:
        named = ", ".join(f"{part.folder} (code {code})" for code, part in codes.items())
        text = f"different code of jaxlsgd made the parts in {place}: {named}"
        raise StoreError(f"{text}; remove those of one code and run them again", place, "conflict")


def _read(
    results: Results, part: ArrayPart, parts: Parts, there: dict[tuple[str, int], ArrayPart]
) -> list[str]:
    """Read all tiles of a part into `there`; return what is wrong with them."""
    problems = []
    for cell in results.cells():
        listed = sorted(results.listed(cell))
        try:
            if listed:
                results.stored_about(cell)
        except (Damaged, Missing) as error:
            problems.append(str(error))
            continue
        for first in listed:
            try:
                results.read_tile(cell, first)
            except (Damaged, Missing) as error:
                problems.append(str(error))
                continue
            other = there.setdefault((cell, first), part)
            paths = [parts[each].tile_path(cell, first) for each in (part, other)]
            if paths[0].read_bytes() != paths[1].read_bytes():
                problems.append(f"{paths[0].name} of {cell} has other rows than in {other.folder}")
    return problems


def _environments(parts: Parts) -> list[dict[str, Any]]:
    """Return the different environments that made the rows."""
    found: list[dict[str, Any]] = []
    for results in parts.values():
        found += [x for x in results.manifest.get("environments", []) if x not in found]
    return found


def _advice(place: Path, problems: list[tuple[ArrayPart, str]]) -> str:
    shown = [f"  {part.folder}: {text}" for part, text in problems[:_SHOWN]]
    if len(problems) > _SHOWN:
        shown.append(f"  and {len(problems) - _SHOWN} more")
    again = dict.fromkeys(part for part, _ in problems)
    commands = [f"  jaxlsgd run STUDY --out {place} --part {part}" for part in again][:_SHOWN]
    lines = "\n".join([*shown, "run these parts again, which computes what is missing:", *commands])
    return f"{place} is not complete:\n{lines}"
