"""Neither the manifest nor a cell's description is a single point of failure."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from refusals import Why, refused
from study_helpers import TOML, fake_rows, missing, small, tiles
from test_store import ENVIRONMENT, empty, fill, flip, shorten

from jaxlsgd import cli
from jaxlsgd.study import Damaged, Results, StoreError, Study
from jaxlsgd.study.store import files, recovery
from jaxlsgd.study.store.writer import Writer

HARM: dict[str, Callable[[Path], None]] = {
    "deleted": Path.unlink,
    "emptied": empty,
    "cut short": shorten,
    "one bit": flip,
    "no study": lambda path: files.write_json(path, {"format": files.FORMAT, "study": []}),
}


def wide() -> Study:
    """Methods that some cells lack, so that their order must be found again."""
    rule = {"schedule": "C1", "method": "plug_in"}
    return small(exclude=[rule], methods=["random_scaling", "plug_in"], horizons=[40, 60])


@pytest.mark.parametrize("harm", HARM)
def test_the_same_command_rebuilds_the_manifest_and_goes_on(tmp_path, harm: str) -> None:
    fill(tmp_path, small(), most=7)
    before, path = tiles(tmp_path), tmp_path / "manifest.json"
    good = files.read_json(path)
    HARM[harm](path)
    with Writer(tmp_path, small(), ENVIRONMENT) as writer:
        assert len(missing(writer)) == 3
        assert "manifest.json is " in writer.warnings[0]
        assert "rebuilt from the study and 2 cells" in writer.warnings[0]
    assert files.read_json(path) | {"created": ""} == good | {"created": ""}
    assert tiles(tmp_path) == before
    assert (tmp_path / "manifest.json.damaged").exists() == (harm != "deleted")


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.parametrize("study", [small(), wide()], ids=["small", "wide"])
def test_readers_rebuild_it_in_memory_and_write_nothing(tmp_path, harm: str, study: Study) -> None:
    fill(tmp_path, study)
    whole = Results(tmp_path)
    HARM[harm](tmp_path / "manifest.json")
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    results = Results(tmp_path)
    assert "manifest.json is " in results.warnings[0]
    assert results.cells() == whole.cells()
    assert results.counts() == whole.counts()
    for new, old in zip(results.read_all(), whole.read_all(), strict=True):
        assert (new.schedule, new.replications, list(new.methods)) == (
            old.schedule,
            old.replications,
            list(old.methods),
        )
        for name, rows in new.methods.items():
            np.testing.assert_array_equal(rows.estimate, old.methods[name].estimate)
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before


def test_verbs_say_that_the_manifest_is_rebuilt(tmp_path, capsys) -> None:
    fill(tmp_path, small())
    assert cli.main(["table", str(tmp_path)]) == 0
    whole = capsys.readouterr().out
    flip(tmp_path / "manifest.json")
    assert cli.main(["table", str(tmp_path)]) == 0
    found = capsys.readouterr()
    assert found.out == whole
    assert found.err.startswith("jaxlsgd: ")
    assert "manifest.json is damaged" in found.err
    assert "rebuilt in memory from the cells (2 of 2 cells" in found.err
    assert cli.main(["status", str(tmp_path)]) == 0
    found = capsys.readouterr()
    assert "cells 2/2, tiles 10/10" in found.out
    assert "rebuilt in memory" in found.err


def test_cells_that_cannot_be_told_are_named(tmp_path) -> None:
    fill(tmp_path, small())
    (tmp_path / "manifest.json").unlink()
    lost = sorted(tmp_path.glob("cells/*/cell.json"))[0]
    flip(lost)
    results = Results(tmp_path)
    assert len(results.cells()) == 1
    assert (
        f"1 of 2 cells have rows that can be shown; the description of {lost.parent.name}"
        in (results.warnings[0])
    )
    with Writer(tmp_path, small(), ENVIRONMENT) as writer:  # the study file tells the rest
        assert missing(writer) == []


def test_tiles_alone_identify_a_study(tmp_path) -> None:
    fill(tmp_path, small())
    for path in [tmp_path / "manifest.json", *tmp_path.glob("cells/*/cell.json")]:
        path.unlink()
    with refused(tmp_path / "manifest.json", "missing", kind=StoreError):
        Results(tmp_path)
    with Writer(tmp_path, small(), ENVIRONMENT) as writer:
        assert missing(writer) == []


def test_replications_that_were_asked_for_are_found_again(tmp_path) -> None:
    fill(tmp_path, small(replications=40))
    fill(tmp_path, small(replications=90), most=6)
    (tmp_path / "manifest.json").unlink()
    with Writer(tmp_path, small(replications=40), ENVIRONMENT) as writer:
        # 90 is written nowhere any more; the last of the tiles has the replications 80 to 95.
        assert writer.study.replications == 96
        assert "already has a study of 96 replications" in " ".join(writer.warnings)


def test_another_study_is_not_taken_over(tmp_path) -> None:
    fill(tmp_path, small(), most=3)
    (tmp_path / "manifest.json").unlink()
    before = tiles(tmp_path)
    with refused(tmp_path, "exists", kind=StoreError):
        Writer(tmp_path, small(seed=1), ENVIRONMENT)
    with refused(tmp_path, "exists", "overwritten", kind=StoreError):
        Writer(tmp_path, small(), ENVIRONMENT, fresh=True)
    assert tiles(tmp_path) == before
    assert not (tmp_path / "manifest.json").exists()


def test_cells_of_two_studies_are_not_mixed(tmp_path) -> None:
    fill(tmp_path / "a", small(), most=1)
    fill(tmp_path / "b", small(seed=1), most=1)
    for folder in (tmp_path / "b" / "cells").iterdir():
        shutil.move(folder, tmp_path / "a" / "cells")
    (tmp_path / "a" / "manifest.json").unlink()
    with refused(tmp_path / "a", "damaged", "several studies", kind=StoreError):
        Results(tmp_path / "a")


def test_hostile_descriptions_do_not_make_a_manifest(tmp_path) -> None:
    fill(tmp_path, small(), most=1)
    (tmp_path / "manifest.json").unlink()
    path = next(tmp_path.glob("cells/*/cell.json"))
    good = files.read_json(path)
    cells = [[], {}, good["cell"] | {"methods": [{"name": {}}]}, good["cell"] | {"tile_size": 1e9}]
    for cell in [*cells, good["cell"] | {"horizon": {"num_steps": 10**12}}]:
        files.write_json(path, good | {"cell": cell})
        with refused(tmp_path, "damaged", "neither its manifest nor its cells", kind=Damaged):
            Results(tmp_path)
    for note in ([], {}, {"place": "x"}, good["manifest"] | {"replications": 10**12}):
        files.write_json(path, good | {"manifest": note})
        assert recovery.note_of(files.read_json(path)) is None
        assert Results(tmp_path).study.replications == 16  # of the one tile


def test_description_is_rebuilt_for_readers_from_the_kinds_of_the_package(tmp_path, capsys) -> None:
    (tmp_path / "study.toml").write_text(TOML)
    fill(tmp_path / "out", small())
    path = sorted((tmp_path / "out").glob("cells/*/cell.json"))[0]
    for harm in HARM:
        good = path.read_bytes()
        HARM[harm](path)
        results = Results(tmp_path / "out")
        rows = results.read_all()
        assert rows[0].truth["plug_in"].shape == (2,)
        assert f"{path.name}" in results.warnings[0]
        assert "rebuilt in memory" in results.warnings[0]
        path.write_bytes(good)


def test_a_tile_of_another_user_is_refused_and_not_computed_again(tmp_path, monkeypatch) -> None:
    fill(tmp_path, small())
    path = sorted(tmp_path.glob("cells/*/tile-*.npz"))[0]
    honest = os.open

    def denied(name, *arguments, **options):
        if str(name) == str(path):
            raise PermissionError(13, "Permission denied", str(name))
        return honest(name, *arguments, **options)

    monkeypatch.setattr(os, "open", denied)
    with refused(path, "unavailable", "Permission denied", kind=StoreError):
        fill(tmp_path, small())
    with refused(path, "unavailable", "Permission denied", kind=StoreError):
        Results(tmp_path).read_all()
    assert path.exists()
    assert not path.with_name(path.name + ".damaged").exists()


# A directory that is not ours is looked at, and left as it is.


def listing(directory: Path) -> dict[str, tuple[int, bytes]]:
    paths = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in paths}


FOREIGN = {
    "a lock of somebody's": {"lock": b"pid 17 of another program"},
    "a lock beside a file": {"lock": b"process 1 on here\n", "thesis.tex": b"important"},
    "notes that are being written": {".notes.writing": b"important", "thesis.tex": b"x"},
    "only such notes": {".notes.writing": b"important"},
    "a manifest of something else": {"manifest.json": b'{"name": "app"}', "lock": b""},
    "a log of something else": {"run.log": b"2026 another program\n"},
    "cells of something else": {"cells/blood/cell.json": b"{}", "lock": b"x"},
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_directory_is_not_touched(tmp_path, name: str) -> None:
    damaged = name == "a manifest of something else"
    why: Why = (tmp_path / "manifest.json", "damaged") if damaged else (tmp_path, "exists")
    for path, content in FOREIGN[name].items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)
    before = listing(tmp_path)
    with refused(*why, "choose a new directory", kind=StoreError):
        Writer(tmp_path, small(), ENVIRONMENT)
    assert listing(tmp_path) == before


def test_refused_study_leaves_the_directory_as_it_was(tmp_path) -> None:
    fill(tmp_path, small(), most=3)
    (tmp_path / "lock").write_text("process 1 on elsewhere\n")
    (tmp_path / ".notes.writing").write_text("mine")
    before = listing(tmp_path)
    with refused(tmp_path, "conflict", "seed: 0 → 1", kind=StoreError):
        Writer(tmp_path, small(seed=1), ENVIRONMENT)
    assert listing(tmp_path) == before
    fill(tmp_path, small())
    assert (tmp_path / ".notes.writing").read_text() == "mine"


@pytest.mark.parametrize("name", ["lock", "run.log"])
def test_other_names_of_a_file_are_not_written_to(tmp_path, name: str) -> None:
    (tmp_path / "precious").write_text("keep")
    out = tmp_path / "out"
    fill(out, small(), most=1)
    (out / name).unlink(missing_ok=True)
    os.link(tmp_path / "precious", out / name)
    if name == "lock":
        with refused(out / "lock", "exists", kind=StoreError):
            fill(out, small())
    else:
        fill(out, small())
    assert (tmp_path / "precious").read_text() == "keep"


@pytest.mark.parametrize("what", ["moved", "deleted", "replaced"])
def test_directory_that_goes_away_under_a_run(tmp_path, what: str) -> None:
    out, there = tmp_path / "out", tmp_path / "elsewhere"
    with Writer(out, small(), ENVIRONMENT) as writer:
        (first, second) = missing(writer)[4:6]  # of one cell, and of the next
        for cell, number in (first,):
            from test_store import about

            writer.describe(cell, about(cell))
            writer.commit(cell, number, fake_rows(cell, number))
        shutil.rmtree(out) if what == "deleted" else out.rename(there)
        if what == "replaced":
            out.mkdir()
        for act in (
            lambda: writer.commit(*first, fake_rows(*first)),
            lambda: writer.describe(second[0], about(second[0])),
        ):
            with refused(out, "missing", kind=StoreError):
                act()
    assert out.exists() == (what == "replaced")
    assert what != "replaced" or not list(out.iterdir())
    fill(out, small())
    assert len(tiles(out)) == 10
    if what != "deleted":
        assert len(tiles(there)) == 1
        fill(there, small())
        assert tiles(there) == tiles(out)
