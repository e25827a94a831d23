"""What others send is data: hostile study files and directories of results are refused, quickly."""

from __future__ import annotations

import faulthandler
import io
import json
import os
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import refused
from study_helpers import LIMIT, ROOT, TOML, call, fake_rows, small, tiles
from test_store import ENVIRONMENT, fill
from work import counted

from jaxlsgd.study import Damaged, Results, SpecError, StoreError, Study, replay
from jaxlsgd.study.store import files
from jaxlsgd.study.store.writer import Writer

LITTLE = 20_000_000  # lines of Python that a test may run; most of it is JAX that traces a problem


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """So that no test counts what is loaded and traced once."""
    small()


@pytest.fixture(autouse=True)
def little_work(loaded):
    """No refusal takes for ever: neither by its work, nor by waiting for what never comes."""
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    with counted() as lines:
        yield
    faulthandler.cancel_dump_traceback_later()
    assert lines.run < LITTLE


def many(line: str, count: int) -> str:
    return "".join(line.replace("#", str(i)) for i in range(count))


FILES: dict[str, tuple[bytes, str]] = {
    "too large": (TOML.encode() + b"#" * 1_000_001, "larger than"),
    "not text": (b"\xff\xfe" + TOML.encode(), "not valid TOML"),
    "null bytes": (b"\x00" * 1000, "not valid TOML"),
    "deep lists": (b"a = " + b"[" * 400_000, "not valid TOML"),
    "deep tables": (b"a = " + b"{a=" * 200_000, "not valid TOML"),
    "dotted key": (b".".join([b"a"] * 400_000) + b" = 1", "dots"),
    "dotted key with spaces": (b" . ".join([b"a"] * 200_000) + b" = 1", "dots"),
    "dotted table": (b"[" + b".".join([b"a"] * 400_000) + b"]", "dots"),
    "nested as far as allowed": (b".".join([b"a"] * 150) + b" = 1", "unknown key"),
    "number of many digits": (b"seed = " + b"9" * 100_000, "not valid TOML"),
    "large integer": (TOML.replace("warmup = 0.05", "warmup = " + "9" * 400).encode(), "warmup"),
    "not a number": (TOML.replace("warmup = 0.05", "warmup = nan").encode(), "warmup"),
    "infinite": (TOML.replace("[40]", "[inf]").encode(), "horizons[0]"),
    "infinite step": (TOML.encode() + b"gamma0 = inf\n", "gamma0"),
    "many replications": (TOML.replace("= 80", "= 10000000000").encode(), "replications"),
    "large tiles": (TOML.replace("= 16", "= 100000000").encode(), "tile_size"),
    "large problem": (TOML.replace("dim = 2", "dim = 1000000000").encode(), "dim"),
    "long horizon": (TOML.replace("[40]", "[10000000000000]").encode(), "horizons[0]"),
    "escape codes": (TOML.encode() + b'name = "\\u001b[2J"\n', "name"),
    "escape codes of one byte": (TOML.encode() + b'name = "\\u009b2J"\n', "name"),
    "text that runs backwards": (TOML.encode() + b'name = "a\\u202eb"\n', "name"),
    "a date": (TOML.replace("= 80", "= 1979-05-27").encode(), "replications"),
    "rules without end": (
        TOML.replace("[40]", str(list(range(1, 5000)))).encode()
        + many('[[exclude]]\nschedule = "C1"\nnum_steps = #\n', 9000).encode(),
        "exclude",
    ),
    "levels without end": (
        f"levels = {[round(0.5 + i / 10**5, 5) for i in range(1, 20000)]}\n{TOML}".encode(),
        "levels",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_hostile_study_file_is_refused_with_a_word(tmp_path, name: str) -> None:
    content, word = FILES[name]
    path = tmp_path / "study.toml"
    path.write_bytes(content)
    with pytest.raises(SpecError) as caught:
        Study.from_toml(path)
    text = str(caught.value)
    assert word in text.removeprefix(str(path))
    assert len(text) < 1000
    assert not re.search(r"[\x00-\x08\x1b\x7f-\x9f]", text)


@pytest.mark.parametrize(
    "name", ["../../../outside", "/etc/passwd", "..", "a/b", "C:\\x", "~root", "$(id)", "'; rm"]
)
def test_names_cannot_lead_out_of_the_directory(tmp_path, name: str) -> None:
    out = tmp_path / "deep" / "out"
    problems = [{"kind": "linear", "dim": 2, "num_clients": 3, "name": name}]
    schedules = [{"family": "constant", "E": 2, "name": name}]
    study = small(
        problems=problems, schedules=schedules, methods=[{"kind": "plug_in", "name": name}]
    )
    fill(out, study)
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]
    for cell in study.cells:
        assert re.fullmatch(r"[a-z0-9-]+", cell.id)
    assert Results(out).read_all()[0].problem == name


# A directory of results whose author can compute checksums.


def reseal(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes a JSON file and puts its checksum right."""
    content = files.read_json(path)
    changed = change(content)
    files.write_json(path, content if changed is None else changed)


def put(*keys: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


def drop(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda content: content.pop(key) and None


MANIFESTS = {
    "a list for a study": put("study", value=[1, 2]),
    "a word for a study": put("study", value="study"),
    "no study": drop("study"),
    "a list for problems": put("study", "problems", value=[[[]]]),
    "numbers for problems": put("study", "problems", value=7),
    "none for schedules": put("study", "schedules", value=None),
    "an unknown kind": put("study", "problems", value=["os.system"]),
    "an unknown family": put("study", "schedules", value=[{"family": "__import__"}]),
    "a private family": put("study", "schedules", value=[{"family": "_check"}]),
    "a million lists": put("study", "save_at", value=[[[]]] * 1000),
    "a float for a count": put("study", "replications", value=1e300),
    "no gamma0": lambda content: content["study"]["problems"][0].pop("gamma0") and None,
    "a table for a name": put("study", "problems", 0, "name", value={"a": 1}),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_hostile_manifest_is_refused(tmp_path, name: str) -> None:
    fill(tmp_path, small(), most=0)
    reseal(tmp_path / "manifest.json", MANIFESTS[name])
    for use in (Results, lambda place: Writer(place, small(), ENVIRONMENT)):
        with refused(tmp_path / "manifest.json", "damaged", kind=Damaged) as caught:
            use(tmp_path)
        text = str(caught.value)
        assert len(text) < 1000
        assert not re.search(r"object|indices|unhashable|\('\w+'\)", text), text
        assert name != "no gamma0" or "'gamma0' is missing" in text


@pytest.mark.parametrize("value", [None, [], [1], {}, "all", [[]]])
def test_manifest_with_strange_environments_is_refused(tmp_path, value) -> None:
    fill(tmp_path, small(), most=0)
    reseal(tmp_path / "manifest.json", put("environments", value=value))
    with refused(tmp_path / "manifest.json", "damaged", "environments", kind=Damaged):
        Writer(tmp_path, small(), ENVIRONMENT)


def test_number_that_json_allows_and_nobody_needs(tmp_path) -> None:
    fill(tmp_path, small(), most=0)
    path = tmp_path / "manifest.json"
    for old, new in [('"seed": 0', '"seed": NaN'), ('"seed": 0', '"seed": ' + "9" * 10**5)]:
        path.write_text(path.read_text().replace(old, new))
        with refused(path, "damaged", kind=Damaged):
            Results(tmp_path)


def test_study_that_asks_for_very_many_tiles_can_be_looked_at(tmp_path) -> None:
    fill(tmp_path, small(tile_size=1, replications=3))
    reseal(tmp_path / "manifest.json", put("study", "replications", value=10**8))
    results = Results(tmp_path)
    for cell in results.cells():
        assert results.counts()[cell][::2] == (3, 3)
    assert [rows.replications for rows in results.read_all()] == [3, 3]


CELLS = {
    "a list for rows": put("rows", value=[]),
    "no rows": drop("rows"),
    "one field more": put("rows", "__class__", value="x"),
    "one method more": put("rows", "coordinates", "more", value=["x"]),
    "a word for coordinates": put("rows", "coordinates", value="x"),
    "numbers for coordinates": put("rows", "coordinates", "plug_in", value=[1, 2]),
    "escape codes for coordinates": put("rows", "coordinates", "plug_in", value=["\x1b[2J", "b"]),
    "too few coordinates": put("rows", "coordinates", "plug_in", value=["a"]),
    "words for a truth": put("rows", "truth", "plug_in", value=["a", "b"]),
    "a short truth": put("rows", "truth", "plug_in", value=[1.0]),
    "a table for a truth": put("rows", "truth", "plug_in", value={}),
    "words for rounds": put("rows", "num_rounds", value="many"),
    "truth for rounds": put("rows", "num_rounds", value=True),
    "no saves": put("rows", "save_at", value=[]),
    "one save": put("rows", "save_at", value=[1]),
    "other levels": put("rows", "levels", value=[0.5]),
    "another name": put("rows", "problem", value="another"),
}


@pytest.mark.parametrize("name", CELLS)
def test_hostile_description_of_a_cell_is_not_read_and_written_anew(tmp_path, name: str) -> None:
    fill(tmp_path, small())
    path = sorted(tmp_path.glob("cells/*/cell.json"))[0]
    good = path.read_bytes()
    reseal(path, CELLS[name])
    results = Results(tmp_path)
    with refused(path, "damaged", kind=Damaged):
        results.stored_about(path.parent.name)
    results.read_all()
    assert "is damaged" in results.warnings[0]
    os.remove(next(path.parent.glob("tile-*")))
    fill(tmp_path, small())
    assert path.read_bytes() == good


def test_saves_that_do_not_fit_the_tiles(tmp_path) -> None:
    fill(tmp_path, small())
    path = sorted(tmp_path.glob("cells/*/cell.json"))[0]
    reseal(path, put("rows", "save_at", value=[1, 2]))
    reseal(path, put("rows", "steps_at", value=[1, 2]))
    with refused(path.parent, "damaged", kind=Damaged):
        Results(tmp_path).read_all()


def npy(header: str, data: bytes = b"") -> bytes:
    text = header.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


def archive_of(members: dict[str, bytes], how: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", how) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def good_members() -> dict[str, bytes]:
    cell = small().cells[0]
    with zipfile.ZipFile(io.BytesIO(files.encode_tile(cell, 0, fake_rows(cell, 0)))) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def with_member(name: str, content: bytes) -> bytes:
    return archive_of(good_members() | {name: content})


HUGE = "{'descr': '<f8', 'fortran_order': False, 'shape': (1000000, 1000000, 1000)}"
TILES: dict[str, Callable[[], bytes]] = {
    "absurd shape": lambda: with_member("0.estimate.npy", npy(HUGE)),
    "negative shape": lambda: with_member(
        "0.estimate.npy", npy(HUGE.replace("1000000, 1000000", "-2, -4"), b"\0" * 64_000)
    ),
    "objects": lambda: with_member("0.estimate.npy", npy(HUGE.replace("<f8", "|O"), b"cos\n.")),
    "code for a header": lambda: with_member("0.estimate.npy", npy("__import__('os').abort()")),
    "long header": lambda: with_member("0.estimate.npy", npy("{" + " " * 60_000 + "}")),
    "not an array": lambda: with_member("0.estimate.npy", b"hello"),
    "bomb": lambda: archive_of(
        good_members() | {"0.estimate.npy": b"\0" * 50_000_000}, zipfile.ZIP_DEFLATED
    ),
    "names that lead out": lambda: archive_of(good_members() | {"../../evil.npy": b""}),
    "many members": lambda: archive_of({f"{i}.npy": b"" for i in range(5000)}),
    "nothing": lambda: archive_of({}),
    "too large": lambda: with_member("0.estimate.npy", b"\0" * 3_000_000),
}


@pytest.mark.parametrize("name", TILES)
def test_hostile_tile_is_refused_without_making_room_for_it(tmp_path, name: str) -> None:
    fill(tmp_path, small())
    path = sorted(tmp_path.glob("cells/*/tile-*.npz"))[0]
    path.write_bytes(TILES[name]())
    before = _peak()
    with refused(path, "damaged", kind=Damaged):
        Results(tmp_path).read_all()
    assert _peak() - before < 40_000_000
    assert not (tmp_path / "evil.npy").exists()


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmPeak:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0


def test_parts_that_overlap_do_not_add_up(tmp_path) -> None:
    """Members that share their bytes could unpack to far more than the file."""
    content = bytearray(with_member("0.estimate.npy", b"\0" * 100_000))
    directory = content.index(b"PK\x01\x02")
    entry = content.index(b"0.half_width.npy", directory) - 46
    large = content.index(b"0.estimate.npy", directory) - 46
    # Sizes and offset of the large member, given to another one.
    content[entry + 16 : entry + 28] = content[large + 16 : large + 28]
    content[entry + 42 : entry + 46] = content[large + 42 : large + 46]
    cell = small().cells[0]
    with pytest.raises(Damaged):
        files.decode_tile(bytes(content), cell, 0)


def test_sparse_file_of_a_terabyte_is_not_read(tmp_path) -> None:
    fill(tmp_path, small())
    path = sorted(tmp_path.glob("cells/*/tile-*.npz"))[0]
    os.truncate(path, 10**12)
    with refused(path, "damaged", "1008000", kind=Damaged):
        Results(tmp_path).read_all()


@pytest.mark.parametrize("name", ["manifest.json", "cell.json", "tile", "lock"])
def test_pipes_and_devices_keep_nobody_waiting(tmp_path, name: str) -> None:
    fill(tmp_path, small())
    path = {
        "manifest.json": tmp_path / name,
        "cell.json": next(tmp_path.glob("cells/*/cell.json")),
        "tile": sorted(tmp_path.glob("cells/*/tile-*.npz"))[0],
        "lock": tmp_path / "lock",
    }[name]
    path.unlink()
    os.mkfifo(path)
    # What is lost of JSON files is made again from the rest; a tile is left out.
    assert _complaint(tmp_path) == ""
    path.unlink()
    path.symlink_to("/dev/zero")
    assert _complaint(tmp_path) == ""


def _complaint(directory: Path) -> str:
    """What a reader says who looks at all there is; '' if nothing."""
    try:
        results = Results(directory)
        assert not results.running()
        results.counts()
        results.read_all()
    except StoreError as error:
        return str(error)
    return ""


def test_links_do_not_lead_a_writer_out_of_the_directory(tmp_path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("keep")
    cell = small().cells[0]
    places = {
        "lock": precious / "file",
        "cells": precious,
        f"cells/{cell.id}": precious,
        ".manifest.json.writing": precious / "file",
    }
    for number, (name, target) in enumerate(places.items()):
        out = tmp_path / f"out{number}"
        (out / name).parent.mkdir(parents=True)
        files.write_json(out / "manifest.json", _manifest())
        (out / name).symlink_to(target)
        if name.endswith(".writing"):
            fill(out, small())  # what looks half-written is removed, not followed
        else:
            with refused(out / name, "exists", kind=StoreError):
                fill(out, small())
    assert os.listdir(precious) == ["file"]
    assert (precious / "file").read_text() == "keep"


def _manifest() -> dict[str, Any]:
    return {
        "format": files.FORMAT,
        "digest": small().digest,
        "created": "",
        "study": small().plain(),
        "environments": [ENVIRONMENT],
    }


def test_link_that_appears_while_a_tile_is_written_is_not_followed(tmp_path) -> None:
    (tmp_path / "file").write_text("keep")
    (tmp_path / ".tile.writing").symlink_to(tmp_path / "file")
    files.write_whole(tmp_path / "tile", b"content")
    assert (tmp_path / "file").read_text() == "keep"
    assert (tmp_path / "tile").read_bytes() == b"content"


def test_the_command_line_tells_it_in_one_line(tmp_path) -> None:
    fill(tmp_path / "out", small(), most=0)
    reseal(tmp_path / "out" / "manifest.json", put("study", value=[]))
    code, out, err = call("table", tmp_path / "out")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("jaxlsgd: error: ")


def test_figures_are_not_drawn_through_a_link(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    fill(tmp_path / "out", small())
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out" / "figures").symlink_to(tmp_path / "elsewhere")
    code, _, err = call("plot", tmp_path / "out")
    assert code == 1
    assert "figures is a symbolic link" in err
    assert os.listdir(tmp_path / "elsewhere") == []


# A file that the user names with --import is run, and jobs for Dask travel as Dask's own messages do.
RUNS_CODE = {"study/imports.py": ["exec("], "study/executors/dask_worker.py": ["cloudpickle.loads"]}


def test_no_code_of_the_package_unpickles_or_evaluates() -> None:
    package = ROOT / "jaxlsgd"
    for path in package.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        runs = re.findall(
            r"\b\w*pickle\.load\w*|\bimport pickle|\beval\(|\bexec\(|yaml|marshal", text
        )
        assert runs == RUNS_CODE.get(str(path.relative_to(package)), []), path
        for line in re.findall(r".*np\.load\(.*", text):
            assert "allow_pickle=False" in line, path


@pytest.mark.parametrize(
    ("table", "argument"),
    [
        ("problems", "problem linear"),
        ("methods", "method plug_in"),
        ("algorithms", "algorithm local_sgd"),
    ],
)
def test_a_manifest_that_names_own_kinds_runs_nothing(tmp_path, table: str, argument: str) -> None:
    """What it says can be looked at; to build it, somebody must have brought the kind in."""
    fill(tmp_path, small())
    manifest = tmp_path / "manifest.json"
    reseal(manifest, lambda content: content["study"][table][0].update(kind="os.system"))
    results = Results(tmp_path)
    with refused(argument, "unknown", "'os.system'"):
        replay(results, results.cells()[0], 0)


def test_what_is_fine_is_still_read(tmp_path) -> None:
    fill(tmp_path, small())
    (tmp_path / "notes.txt").write_text("a file of the user's own")
    rows = Results(tmp_path).read_all()
    assert [row.replications for row in rows] == [80, 80]
    assert all(np.isfinite(row.methods["plug_in"].estimate).all() for row in rows)
    assert len(tiles(tmp_path)) == 10
    assert json.loads((tmp_path / "manifest.json").read_text())["format"] == files.FORMAT
