"""Parts of a study for array jobs: every tile is in one part, and all parts together are one run."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from refusals import refused
from study_helpers import TOML, Held, call, count, small, start, tiles, wait_until

from jaxlsgd.study import ArrayPart, Results, StoreError, Study, collect
from jaxlsgd.study.store import files, provenance

REPLICATIONS = (
    16 * 60
)  # 60 tiles of each of two cells that share draws: three jobs for each of 20 parts
COUNT = 20


def parts(count: int = COUNT) -> list[ArrayPart]:
    return [ArrayPart(number, count) for number in range(1, count + 1)]


def study(**changes) -> Study:
    return small(replications=REPLICATIONS, **changes)


def described(directory: Path) -> dict[str, bytes]:
    paths = directory.glob("cells/*/cell.json")
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run of the study."""
    directory = tmp_path_factory.mktemp("whole") / "results"
    study().run(directory, progress=False, devices=1)
    return directory


@pytest.fixture(scope="module")
def twenty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its twenty parts: three killed in their middle and run again, and two run on another day."""
    place = tmp_path_factory.mktemp("array")
    (place / "study.toml").write_text(
        TOML.replace("replications = 80", f"replications = {REPLICATIONS}")
    )
    results = place / "results"
    command = ("run", place / "study.toml", "--out", results, "--devices", 1, "--quiet")
    killed = parts()[4:7]
    processes = []
    for part in killed:
        held = Held(place / f"held-{part.number}")
        held.let(1)
        processes.append(start(*command, "--part", part, env=held.environment))
    for part, process in zip(killed, processes, strict=True):
        wait_until(lambda folder=results / part.folder: count(folder) == 2, process)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(provenance, "now", lambda: "2031-01-01T00:00:00+00:00")
        for part in parts()[:2]:
            study().run(results, part=(part.number, COUNT), progress=False, devices=1)
    for part in parts()[2:]:
        assert count(results / part.folder) == (2 if part in killed else 0)
        outcome = study().run(results, part=part, progress=False, devices=1)
        assert outcome.exit_code == 0
    return results


@pytest.fixture
def copy(twenty: Path, tmp_path: Path) -> Path:
    return shutil.copytree(twenty, tmp_path / "results")


def test_twenty_parts_are_one_run(copy: Path, whole: Path):
    found = collect(copy)
    assert (found.parts, found.tiles) == (COUNT, 120)
    assert tiles(copy) == tiles(whole)
    assert described(copy) == described(whole)
    keys = ("study", "digest")
    ours, theirs = (json.loads((place / "manifest.json").read_text()) for place in (copy, whole))
    assert {key: ours[key] for key in keys} == {key: theirs[key] for key in keys}
    assert collect(copy).tiles == 120  # again, which changes nothing
    outcome = study().run(copy, progress=False, devices=1)
    assert (outcome.tiles_run, outcome.tiles_left) == (0, 0)
    assert str(Results(copy)).count("complete") == 1


@pytest.mark.parametrize("count", [1, 3, 7, 200])
@pytest.mark.parametrize("replications", [80, 170])
def test_every_tile_is_in_one_part(count: int, replications: int):
    made = small(replications=replications, schedules=["C1", "C5", "P(1/2)"])
    of = [part.tiles(made) for part in parts(count)]
    everything = set(range(0, replications, 16))
    for cell in made.cells:
        listed = [first for each in of for first in each[cell.id]]
        assert sorted(listed) == sorted(everything)
    work = [sum(len(each[cell.id]) * cell.num_steps for cell in made.cells) for each in of]
    assert max(work) - min(work) <= sum(cell.num_steps for cell in made.cells)  # of one group


def test_parts_do_not_depend_on_objects(whole: Path):
    """A collector knows a study by its manifest alone."""
    for part in parts()[:3]:
        assert part.tiles(Results(whole).study) == part.tiles(study())


def test_what_is_incomplete_is_named_with_its_command(copy: Path):
    shutil.rmtree(copy / "part-03-of-20")
    gone = next((copy / "part-07-of-20").glob("cells/*/tile-*.npz"))
    gone.unlink()
    broken = next((copy / "part-09-of-20").glob("cells/*/tile-*.npz"))
    broken.write_bytes(broken.read_bytes()[:-7])
    with pytest.raises(StoreError) as caught:
        collect(copy)
    text = str(caught.value)
    assert caught.value.code == "damaged" and not (copy / "manifest.json").exists()
    for number in (3, 7, 9):
        assert f"--part {number}/20" in text and f"part-0{number}-of-20" in text
    assert text.count("--part") == 3
    for number in (3, 7, 9):
        study().run(copy, part=(number, 20), progress=False, devices=1)
    assert collect(copy).tiles == 120


def test_parts_that_do_not_fit_together_are_refused(copy: Path, tmp_path: Path):
    def manifest(change) -> None:
        path = copy / "part-02-of-20" / "manifest.json"
        content = files.read_json(path)
        change(content)
        files.write_json(path, content)

    def code(content) -> None:
        content["environments"][0]["code"] = "other"

    def replications(content) -> None:
        content["study"]["replications"] = 16

    for change in (code, replications):
        kept = (copy / "part-02-of-20" / "manifest.json").read_bytes()
        manifest(change)
        with refused(str(copy), "conflict", "part-02-of-20", kind=StoreError):
            collect(copy)
        (copy / "part-02-of-20" / "manifest.json").write_bytes(kept)
    other = small(replications=REPLICATIONS, seed=9)
    shutil.rmtree(copy / "part-05-of-20")
    other.run(copy, part=(5, 20), progress=False, devices=1)
    with refused(str(copy), "conflict", "another study", kind=StoreError):
        collect(copy)
    shutil.rmtree(copy / "part-05-of-20")
    shutil.copytree(copy / "part-04-of-20", copy / "part-05-of-20")
    with refused(str(copy), "damaged", "part 4/20", kind=StoreError):
        collect(copy)
    study().run(copy, part=(1, 2), progress=False, devices=1)
    with refused(str(copy), "conflict", "2 and 20", kind=StoreError):
        collect(copy)
    assert not (copy / "cells").exists()


def test_a_part_is_no_whole_study(copy: Path, tmp_path: Path):
    attempts = {
        "conflict": lambda: study().run(copy / "part-01-of-20", progress=False),
        "exists": lambda: study().run(copy, progress=False),  # parts that were not collected
        "missing": lambda: collect(tmp_path / "results" / "part-01-of-20"),
    }
    for code, attempt in attempts.items():
        with pytest.raises(StoreError) as caught:
            attempt()
        assert caught.value.code == code


WRONG = {
    **dict.fromkeys(["0/3", "4/3", "3", "a/b", "1/0", "-1/2", "1/100001", "", (0, 2)], "value"),
    **dict.fromkeys([3, (3,), ("1", "3"), (1.5, 3), (True, True), None], "type"),
}


@pytest.mark.parametrize("value", WRONG, ids=str)
def test_what_is_no_part_is_refused(value: Any):
    with refused("part", WRONG[value]):
        ArrayPart.of(value)


def test_a_part_is_given_as_text_or_numbers():
    assert ArrayPart.of(" 3/20") == ArrayPart.of((3, 20)) == ArrayPart(3, 20)


def test_rows_that_differ_between_parts_are_named(copy: Path):
    source, target = (copy / part.folder for part in parts()[3:5])
    tile = next(source.glob("cells/*/tile-*.npz"))
    other = target / tile.relative_to(source)
    mine = next(target.glob(f"cells/{tile.parent.name}/tile-*.npz"))
    changed = small(replications=REPLICATIONS, seed=0)
    cell = next(cell for cell in changed.cells if cell.id == tile.parent.name)
    first = int(tile.stem.partition("-")[2])
    rows = files.read_tile(mine, cell, int(mine.stem.partition("-")[2]))
    other.write_bytes(files.encode_tile(cell, first, rows))
    with refused(str(copy), "conflict", str(tile), str(other), kind=StoreError):
        collect(copy)


def test_a_damaged_manifest_accuses_its_own_part(copy: Path):
    (copy / "part-01-of-20" / "manifest.json").write_text("{}")
    with refused(str(copy), "damaged", "part-01-of-20", "--part 1/20", kind=StoreError) as caught:
        collect(copy)
    assert "part-02" not in str(caught.value)
    study().run(copy, part="1/20", progress=False, devices=1)
    assert collect(copy).tiles == 120


def test_parts_of_other_code_can_be_accepted(copy: Path):
    for number in (2, 3):
        path = copy / f"part-0{number}-of-20" / "manifest.json"
        content = files.read_json(path)
        content["environments"][0]["code"] = "other"
        files.write_json(path, content)
    with refused(
        str(copy),
        "conflict",
        "part-02-of-20",
        "part-03-of-20",
        "--allow-other-code",
        kind=StoreError,
    ):
        collect(copy)
    found = collect(copy, allow_other_code=True)
    assert found.tiles == 120 and any("other" in one for one in found.warnings)


def test_what_lies_beside_parts_is_left_alone(copy: Path):
    (copy / "notes.txt").write_text("mine")
    with pytest.raises(StoreError) as caught:
        Results(copy)
    assert "jaxlsgd collect" in str(caught.value)
    collect(copy)
    assert (copy / "notes.txt").read_text() == "mine"


def test_the_command_line(copy: Path, tmp_path: Path):
    code, out, _ = call("collect", copy)
    assert code == 0 and "collected 120 tiles of 20 parts" in out
    (tmp_path / "study.toml").write_text(TOML)
    code, out, _ = call(
        "run", tmp_path / "study.toml", "--out", tmp_path / "new", "--part", "2/3", "--devices", 1
    )
    assert code == 0 and "when all 3 parts are: jaxlsgd collect" in out
    code, _, err = call("collect", tmp_path / "new")
    assert code != 0 and "--part 1/3" in err and "--part 3/3" in err
