"""Make one study of the parts that array jobs have run."""

from __future__ import annotations

import collections
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxlsgd.core.display import plural
from jaxlsgd.study.array import FOLDER, ArrayPart, dealt
from jaxlsgd.study.store import files
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


class _Problem(NamedTuple):
    """What is wrong with a part, and whether running it again mends it."""

    part: ArrayPart
    words: str
    again: bool = True


def collect(directory: str | os.PathLike[str], *, allow_other_code: bool = False) -> Collected:
    """Make one study of all its parts, in the directory that holds them.

    Nothing is written unless all parts are complete and fit together. The parts are kept.

    Args:
      directory: holds what `run(..., part=...)` writes, such as part-01-of-20 to part-20-of-20.
      allow_other_code: accept parts that different code of this package made.

    Example::

        study.run("results", part=(3, 20))  # one of 20 jobs
        collect("results")
    """
    place = Path(directory)
    expected = _expected(place)
    problems: list[_Problem] = []
    parts: dict[ArrayPart, Results] = {}
    for part in expected:
        opened = _opened(place / part.folder, part)
        if isinstance(opened, _Problem):
            problems.append(opened)
        else:
            parts[part] = opened
    if not parts:
        raise StoreError(_advice(place, problems), place, "damaged")
    study = _common_study(place, parts)
    if not allow_other_code:
        _refuse_other_code(place, parts)
    there: dict[tuple[str, int], ArrayPart] = {}
    for part, results in parts.items():
        problems += _read(place, results, part, parts, there)
    missing: collections.Counter[int] = collections.Counter(
        number for number, cell, first in dealt(study, len(expected)) if (cell, first) not in there
    )
    problems += [
        _Problem(part, f"{plural(missing[part.number], 'tile')} missing")
        for part in parts
        if missing[part.number]
    ]
    if problems:
        raise StoreError(_advice(place, problems), place, "damaged")
    environments = _environments(parts)
    with Writer(
        place, study, environments[0], collecting=True, allow_other_code=allow_other_code
    ) as writer:
        for (cell, first), part in there.items():
            spec, results = parts[part].cell(cell), parts[part]
            if writer.lacks(spec, first):
                writer.describe(spec, results.stored_about(cell))
                writer.commit(spec, first, results.read_tile(cell, first))
        writer.record(environments)
        lost, left = writer.lost(), sum(writer.left(cell) for cell in writer.study.cells)
        warnings = list(writer.warnings)
    if lost:
        text = f"{lost[0]} disappeared from {place}; run the same command again"
        raise StoreError(text, place, "missing")
    if left:
        tiles = plural(left, "tile")
        warnings.append(
            f"the study in {place} has more replications than its parts: {tiles} missing; run it to compute them"
        )
    warnings += [
        f"rows may differ in their last digits between parts: {'; '.join(changed)}"
        for other in environments[1:]
        if (changed := differences(environments[0], other))
    ]
    return Collected(place, len(parts), len(there), tuple(warnings))


def _expected(place: Path) -> list[ArrayPart]:
    """Return all parts that there should be, from the names of the directories."""
    try:
        named = [found for name in os.listdir(place) if (found := FOLDER.fullmatch(name))]
    except OSError as error:
        raise files.cannot("read", place, error) from error
    counts = sorted({int(found[2]) for found in named} - {0})
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


def _opened(folder: Path, part: ArrayPart) -> Results | _Problem:
    """Return the results of a part; a problem if it is missing, damaged, still running or of another number."""
    try:
        results = Results(folder)
    except StoreError as error:
        return _Problem(part, str(error))
    recorded = results.manifest.get("part")
    if recorded not in (None, str(part)):
        return _Problem(part, f"it holds part {recorded}; rename or remove it", again=False)
    if results.running():
        return _Problem(part, "it is still running; wait for it", again=False)
    if results.warnings:  # a manifest that was rebuilt need not be that of the study
        return _Problem(part, results.warnings[0])
    known = results.manifest.get("environments")
    if not isinstance(known, list) or not known or not all(isinstance(x, dict) for x in known):
        return _Problem(part, "its manifest does not say what made its rows")
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
    codes: dict[Any, list[str]] = {}
    for part, results in parts.items():
        for code in {environment.get("code") for environment in results.manifest["environments"]}:
            codes.setdefault(code, []).append(part.folder)
    if len(codes) > 1:
        named = "; ".join(f"code {code}: {_several(names)}" for code, names in codes.items())
        text = f"different code of jaxlsgd made the parts in {place} ({named})"
        advice = (
            "remove those of one code and run them again, or accept both with --allow-other-code"
        )
        raise StoreError(f"{text}; {advice}", place, "conflict")


def _read(
    place: Path,
    results: Results,
    part: ArrayPart,
    parts: Parts,
    there: dict[tuple[str, int], ArrayPart],
) -> list[_Problem]:
    """Read all tiles of a part into `there`; return what is wrong with them."""
    problems = []
    for cell in results.cells():
        listed = sorted(results.listed(cell))
        try:
            if listed:
                results.stored_about(cell)
        except (Damaged, Missing) as error:
            problems.append(_Problem(part, str(error)))
            continue
        for first in listed:
            try:
                results.read_tile(cell, first)
            except (Damaged, Missing) as error:
                problems.append(_Problem(part, str(error)))
                continue
            other = there.setdefault((cell, first), part)
            if other == part:
                continue
            paths = [parts[each].tile_path(cell, first) for each in (part, other)]
            if paths[0].read_bytes() != paths[1].read_bytes():
                text = f"{paths[0]} and {paths[1]} hold different rows of the same replications"
                raise StoreError(
                    f"{text}; remove the wrong one and run its part again", place, "conflict"
                )
    return problems


def _environments(parts: Parts) -> list[dict[str, Any]]:
    """Return the different environments that made the rows."""
    found: list[dict[str, Any]] = []
    for results in parts.values():
        found += [x for x in results.manifest["environments"] if x not in found]
    return found


def _advice(place: Path, problems: list[_Problem]) -> str:
    words = [f"{problem.part.folder}: {problem.words}" for problem in problems]
    lines = [f"{place} is not complete:", *_shortened(words)]
    again = dict.fromkeys(problem.part for problem in problems if problem.again)
    if again:
        lines.append("run these parts again, which computes what is missing:")
        lines += _shortened([f"jaxlsgd run STUDY --out {place} --part {part}" for part in again])
    return "\n".join(lines)


def _shortened(lines: list[str]) -> list[str]:
    rest = [f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return [f"  {line}" for line in lines[:_SHOWN]] + rest


def _several(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
