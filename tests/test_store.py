"""The directory of a study: whole files only, damage found, one writer, any number of readers."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from refusals import refused
from study_helpers import fake_rows, missing, small, tiles

from jaxlsgd.core import storage
from jaxlsgd.core.rows import CellRows
from jaxlsgd.study import Damaged, Results, StoreError, Study
from jaxlsgd.study.cells import CellSpec
from jaxlsgd.study.store import files
from jaxlsgd.study.store.writer import Writer

ENVIRONMENT = {"jax": "0", "xla_flags": ""}


def about(cell: CellSpec) -> CellRows:
    """What the engine would say of a cell."""
    plan = cell.plan()
    saves = cell.saved_rounds(plan)
    names = [method.name for method in cell.methods]
    return CellRows(
        problem=cell.problem.name,
        algorithm=cell.algorithm.name,
        schedule=cell.schedule.name,
        num_steps=plan.num_steps,
        num_rounds=plan.num_rounds,
        save_at=saves,
        steps_at=tuple(int(plan.ends[m - 1]) for m in saves),
        levels=cell.levels,
        coordinates=dict.fromkeys(names, ("x[0]", "x[1]")),
        truth={name: np.array([0.1, 1 / 3]) for name in names},
        standard_error={name: name == "plug_in" for name in names},
        labels={name: name.replace("_", "-") for name in names},
        methods={},
    )


def fill(directory: Path, study: Study, most: int = 10**9) -> list[tuple[CellSpec, int]]:
    """Writes fake rows for what is missing, at most so many tiles; returns which."""
    done = []
    with Writer(directory, study, ENVIRONMENT) as writer:
        for cell, first in missing(writer)[:most]:
            writer.describe(cell, about(cell))
            writer.commit(cell, first, fake_rows(cell, first))
            done.append((cell, first))
    return done


def some_tile(directory: Path) -> Path:
    return sorted(directory.glob("cells/*/tile-*.npz"))[1]


def test_rows_come_back_as_they_were_written(tmp_path) -> None:
    study = small(replications=40)
    fill(tmp_path, study)
    results = Results(tmp_path)
    assert results.study == study
    assert results.cells() == [cell.id for cell in study.cells]
    rows = results.read(results.cells()[1])
    assert rows is not None
    assert (rows.problem, rows.schedule, rows.num_steps) == ("linear", "P(1/2)", 40)
    assert rows.truth["plug_in"].tolist() == [0.1, 1 / 3]
    assert rows.standard_error == {"plug_in": True, "random_scaling": False}
    assert (rows.algorithm, rows.labels["plug_in"]) == ("local_sgd", "plug-in")
    assert rows.coordinates["plug_in"] == ("x[0]", "x[1]")
    assert rows.replications == 40  # of 48 in three tiles
    assert rows.methods["plug_in"].estimate[0, :, 0].tolist() == list(range(40))
    assert rows.methods["plug_in"].half_width.shape == (len(rows.save_at), 1, 40, 2)
    assert list(rows.methods) == ["plug_in", "random_scaling"]


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("order", [["plug_in", "random_scaling"], ["random_scaling", "plug_in"]])
def test_each_method_has_its_own_rows_in_the_order_of_the_study(order, lost, tmp_path) -> None:
    study, places = small(methods=order, replications=16), {"plug_in": 1, "random_scaling": 2}
    with Writer(tmp_path, study, ENVIRONMENT) as writer:
        for cell, first in missing(writer):
            rows = fake_rows(cell, first)
            for name, own in rows.items():
                rows[name] = dataclasses.replace(own, estimate=own.estimate + 1000 * places[name])
            writer.describe(cell, about(cell))
            writer.commit(cell, first, rows)
    if lost:
        (tmp_path / "manifest.json").unlink()
    for cell in Results(tmp_path).read_all():
        assert list(cell.methods) == list(cell.coordinates) == order
        for name, place in places.items():
            assert cell.methods[name].estimate[0, 3, 0] == 1000 * place + 3


def test_bytes_of_a_tile_are_a_function_of_its_rows(tmp_path, monkeypatch) -> None:
    cell = small().cells[0]
    first = files.encode_tile(cell, 16, fake_rows(cell, 16))
    monkeypatch.setattr("time.time", lambda: 2e9)
    assert files.encode_tile(cell, 16, fake_rows(cell, 16)) == first
    assert files.encode_tile(cell, 32, fake_rows(cell, 16)) != first


def test_not_finite_rows_are_kept(tmp_path) -> None:
    cell = small().cells[0]
    rows = fake_rows(cell, 0)
    rows["plug_in"].estimate[0, 3] = np.nan
    rows["plug_in"].estimate[0, 4] = np.inf
    (tmp_path / "tile").write_bytes(files.encode_tile(cell, 0, rows))
    found = files.read_tile(tmp_path / "tile", cell, 0)["plug_in"].estimate
    np.testing.assert_array_equal(found, rows["plug_in"].estimate)


def test_readers_see_a_partial_study(tmp_path) -> None:
    fill(tmp_path, small(), most=7)  # of 5 tiles in each of 2 cells
    results = Results(tmp_path)
    first, second = results.cells()
    assert [results.counts()[x] for x in (first, second)] == [(80, 80, 5, 5), (32, 80, 2, 5)]
    assert [rows.replications for rows in results.read_all()] == [80, 32]


def test_cell_without_tiles_reads_as_none(tmp_path) -> None:
    fill(tmp_path, small(), most=0)
    results = Results(tmp_path)
    assert results.read(results.cells()[0]) is None
    assert results.read_all() == []


def test_rows_behind_a_gap_wait_so_that_cells_stay_paired(tmp_path) -> None:
    fill(tmp_path, small())
    results = Results(tmp_path)
    results.tile_path(results.cells()[0], 32).unlink()
    rows = results.read(results.cells()[0])
    assert rows is not None
    assert rows.replications == 32
    assert results.counts()[results.cells()[0]].tiles == 4


def test_more_replications_extend_without_touching_what_is_there(tmp_path) -> None:
    fill(tmp_path, small(replications=40))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("cells/*/*")}
    added = fill(tmp_path, small(replications=90))
    assert sorted({first for _, first in added}) == [48, 64, 80]
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    assert Results(tmp_path).study.replications == 90


def test_fewer_replications_keep_what_is_there(tmp_path) -> None:
    fill(tmp_path, small(replications=40))
    with Writer(tmp_path, small(replications=10), ENVIRONMENT) as writer:
        assert missing(writer) == []
        assert "already has a study of 40" in writer.warnings[0]
    assert Results(tmp_path).study.replications == 40


def test_changed_study_is_refused_with_the_difference(tmp_path) -> None:
    fill(tmp_path, small())
    before = tiles(tmp_path), (tmp_path / "manifest.json").read_bytes()
    with refused(tmp_path, "conflict", "seed: 0 → 1", kind=StoreError):
        Writer(tmp_path, small(seed=1, replications=9), ENVIRONMENT)
    assert (tiles(tmp_path), (tmp_path / "manifest.json").read_bytes()) == before


def test_fresh_never_overwrites(tmp_path) -> None:
    place = tmp_path / "results"
    fill(place, small(), most=1)
    with refused(place, "exists", "results-2", kind=StoreError):
        Writer(place, small(), ENVIRONMENT, fresh=True)
    with Writer(tmp_path / "results-2", small(), ENVIRONMENT, fresh=True):
        pass


def test_directory_of_something_else_is_left_alone(tmp_path) -> None:
    (tmp_path / "thesis.tex").write_text("important")
    with refused(tmp_path, "exists", "thesis.tex", kind=StoreError):
        Writer(tmp_path, small(), ENVIRONMENT)
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_file_in_place_of_the_directory(tmp_path) -> None:
    (tmp_path / "file").write_text("x")
    with refused(tmp_path / "file", "unavailable", kind=StoreError):
        Writer(tmp_path / "file", small(), ENVIRONMENT)
    with refused(tmp_path / "file" / "manifest.json", "missing", kind=StoreError):
        Results(tmp_path / "file")


def test_one_writer_at_a_time_and_readers_without_a_lock(tmp_path) -> None:
    with Writer(tmp_path, small(), ENVIRONMENT):
        assert Results(tmp_path).running()
        with refused(tmp_path, "busy", f"process {os.getpid()} ", kind=StoreError):
            Writer(tmp_path, small(), ENVIRONMENT)
    assert not Results(tmp_path).running()
    with Writer(tmp_path, small(), ENVIRONMENT):
        pass


def test_another_environment_is_warned_of_and_recorded(tmp_path) -> None:
    fill(tmp_path, small(), most=1)
    with Writer(tmp_path, small(), ENVIRONMENT | {"jax": "1"}) as writer:
        assert "jax: '0' → '1'" in writer.warnings[0]
    with Writer(tmp_path, small(), ENVIRONMENT) as writer:
        assert writer.warnings == []
    assert len(Results(tmp_path).manifest["environments"]) == 2


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def alter(path: Path) -> None:
    """Other numbers, with the zip file's own checksums in order."""
    with np.load(path) as archive:
        arrays = dict(archive)
    arrays["0.estimate"] = arrays["0.estimate"] + 1
    np.savez(path, **arrays)


def swap(path: Path) -> None:
    """A tile of the same cell in another place."""
    other = next(p for p in sorted(path.parent.glob("tile-*.npz")) if p != path)
    path.write_bytes(other.read_bytes())


def compress(path: Path) -> None:
    with np.load(path) as archive:
        arrays = dict(archive)
    np.savez_compressed(path, **arrays)


def pickle_inside(path: Path) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.array([{}], object), allow_pickle=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("header.npy", buffer.getvalue())


@pytest.mark.parametrize(
    "damage", [shorten, halve, empty, flip, alter, swap, compress, pickle_inside]
)
def test_damaged_tile_is_never_read_and_is_made_anew(tmp_path, damage) -> None:
    fill(tmp_path, small())
    good = tiles(tmp_path)
    path = some_tile(tmp_path)
    damage(path)
    results = Results(tmp_path)
    with refused(path, "damaged", "run the study again", kind=Damaged):
        results.read_all()
    with Writer(tmp_path, small(), ENVIRONMENT) as writer:
        assert len(missing(writer)) == 1
        assert "set aside as tile-000000016.npz.damaged" in writer.warnings[0]
    assert len(fill(tmp_path, small())) == 1
    assert tiles(tmp_path) == good
    assert path.with_name(path.name + ".damaged").exists()


def test_altered_description_of_a_cell_is_found_and_written_anew(tmp_path) -> None:
    fill(tmp_path, small(), most=1)
    path = next(tmp_path.glob("cells/*/cell.json"))
    good = path.read_bytes()
    path.write_bytes(good.replace(b"0.1", b"0.2"))
    results = Results(tmp_path)
    results.read_all()
    assert "cell.json is damaged: its checksum" in results.warnings[0]
    fill(tmp_path, small())
    assert path.read_bytes() == good


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"sha256": 3}', b"\xff", b"[" * 10**5])
def test_damaged_manifest_without_cells_is_refused(tmp_path, content: bytes) -> None:
    fill(tmp_path, small(), most=0)
    (tmp_path / "manifest.json").write_bytes(content)
    with refused(tmp_path / "manifest.json", "damaged", kind=Damaged):
        Results(tmp_path)
    with refused(tmp_path / "manifest.json", "damaged", kind=Damaged):
        Writer(tmp_path, small(), ENVIRONMENT)


def test_manifest_with_a_study_that_is_none_is_refused(tmp_path) -> None:
    files.write_json(tmp_path / "manifest.json", {"format": files.FORMAT, "study": {"x": 1}})
    with refused(tmp_path / "manifest.json", "damaged", kind=Damaged):
        Results(tmp_path)


def test_format_of_a_later_version_is_refused(tmp_path) -> None:
    files.write_json(tmp_path / "manifest.json", {"format": 99})
    with refused(
        tmp_path / "manifest.json", "unsupported", "99", str(files.FORMAT), kind=StoreError
    ):
        Results(tmp_path)


def test_manifest_is_readable_json_with_what_made_the_rows(tmp_path) -> None:
    fill(tmp_path, small(), most=1)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["study"]["seed"] == 0
    assert manifest["digest"] == small().digest
    assert manifest["environments"] == [ENVIRONMENT]


def test_what_a_killed_writer_left_is_removed_and_never_read(tmp_path) -> None:
    fill(tmp_path, small(), most=1)
    folder = next(tmp_path.glob("cells/*"))
    left = [folder / ".tile-000000016.npz.writing", tmp_path / ".manifest.json.writing"]
    for path in left:
        path.write_bytes(b"half")
    assert Results(tmp_path).counts()[folder.name].tiles == 1
    fill(tmp_path, small())
    assert not any(path.exists() for path in left)


def test_failed_write_leaves_nothing_visible(tmp_path, monkeypatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with refused(tmp_path / "x", "unavailable", "No space left", kind=StoreError):
        files.write_whole(tmp_path / "x", b"content")
    assert os.listdir(tmp_path) == []


def test_first_tile_of_a_run_is_read_back(tmp_path, monkeypatch) -> None:
    honest = storage.npz
    # One more array than was asked for, as `numpy.savez` of NumPy 2.0 made of its options.
    other = lambda arrays: honest({**arrays, "option": np.array(False)})  # noqa: E731
    monkeypatch.setattr(storage, "npz", other)
    path = tmp_path / "cells" / small().cells[0].id / "tile-000000000.npz"
    with refused(path, "damaged", "NumPy ", kind=StoreError):
        fill(tmp_path, small())
    assert tiles(tmp_path) == {}
    assert len(list(tmp_path.glob("cells/*/*.damaged"))) == 1
    monkeypatch.undo()
    assert len(fill(tmp_path, small())) == 10


def test_disk_that_alters_what_is_written_ends_a_run_at_its_first_tile(
    tmp_path, monkeypatch
) -> None:
    fill(tmp_path, small(), most=3)
    honest = files.write_whole

    def altering(path: Path, content: bytes) -> None:
        """Writes a whole file, with a checksum that is right, of other rows."""
        if path.suffix == ".npz":
            cell = next(x for x in small().cells if x.id == path.parent.name)
            content = files.encode_tile(cell, int(path.stem[5:]), fake_rows(cell, 1))
        honest(path, content)

    monkeypatch.setattr(files, "write_whole", altering)
    path = tmp_path / "cells" / small().cells[0].id / "tile-000000048.npz"
    with refused(path, "damaged", "estimate of plug_in", kind=StoreError):
        fill(tmp_path, small())
    assert len(tiles(tmp_path)) == 3


@pytest.mark.parametrize("empty", [True, False])
def test_directory_in_the_place_of_a_tile_is_set_aside(tmp_path, empty: bool) -> None:
    fill(tmp_path, small())
    whole, path = tiles(tmp_path), some_tile(tmp_path)
    path.unlink()
    path.mkdir()
    if not empty:
        (path / "file").write_text("somebody's")
    with Writer(tmp_path, small(), ENVIRONMENT) as writer:
        assert [(cell.id, first) for cell, first in missing(writer)] == [
            (path.parent.name, int(path.stem[5:]))
        ]
        assert writer.warnings == [f"{path} is a directory; it is set aside as {path.name}.damaged"]
    assert len(fill(tmp_path, small())) == 1
    assert tiles(tmp_path) == whole
    aside = path.with_name(path.name + ".damaged")
    assert empty or (aside / "file").read_text() == "somebody's"


def test_directory_in_the_place_of_a_description_is_set_aside(tmp_path) -> None:
    fill(tmp_path, small())
    path = next(tmp_path.glob("cells/*/cell.json"))
    good = path.read_bytes()
    path.unlink()
    path.mkdir()
    cell = next(x for x in small().cells if x.id == path.parent.name)
    with Writer(tmp_path, small(), ENVIRONMENT) as writer:
        writer.describe(cell, about(cell))
        assert writer.warnings == [
            f"{path} is damaged: it is a directory; it is set aside as cell.json.damaged and rewritten"
        ]
    assert path.read_bytes() == good


def test_directory_in_the_place_of_the_manifest(tmp_path) -> None:
    fill(tmp_path / "full", small())
    fill(tmp_path / "empty", small(), most=0)
    for folder in ("full", "empty"):
        path = tmp_path / folder / "manifest.json"
        path.unlink()
        path.mkdir()
    assert len(Results(tmp_path / "full").read_all()) == 2
    with Writer(tmp_path / "full", small(), ENVIRONMENT) as writer:
        assert "it is a directory (set aside as manifest.json.damaged)" in writer.warnings[0]
    assert fill(tmp_path / "full", small()) == []
    with refused(tmp_path / "empty" / "manifest.json", "damaged", "directory", kind=StoreError):
        fill(tmp_path / "empty", small())


@pytest.mark.parametrize("name", ["lock", "cells", "tables"])
def test_what_is_in_the_way_is_named_with_what_to_do(tmp_path, name: str) -> None:
    fill(tmp_path, small(), most=0)
    path = tmp_path / name
    if name == "lock":
        path.unlink()
        path.mkdir()
    else:
        path.write_text("")

    def write() -> None:
        fill(tmp_path, small())
        with Writer(tmp_path, small(), ENVIRONMENT) as writer:
            writer.keep({"key": np.zeros(1)})

    below = {"cells": small().cells[0].id}.get(name, "")
    with refused(path / below, "unavailable", "in the way", kind=StoreError):
        write()


@pytest.mark.parametrize("replaced", [True, False])
def test_lock_that_is_deleted_or_replaced_ends_a_run(tmp_path, replaced: bool) -> None:
    with Writer(tmp_path, small(), ENVIRONMENT) as writer:
        cells = missing(writer)
        writer.describe(cells[0][0], about(cells[0][0]))
        writer.commit(*cells[0], fake_rows(*cells[0]))
        (tmp_path / "lock").unlink()
        if replaced:
            assert len(fill(tmp_path, small(), most=2)) == 2  # a second writer, which nothing stops
        for act in (lambda: writer.commit(*cells[1], fake_rows(*cells[1])), writer.lost):
            with refused(tmp_path / "lock", "busy", kind=StoreError):
                act()
    assert len(tiles(tmp_path)) == (3 if replaced else 1)
    assert len(fill(tmp_path, small())) == (7 if replaced else 9)
