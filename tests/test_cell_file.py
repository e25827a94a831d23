"""Rows of a cell in a file: the same bits, or a refusal."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import zipfile

import chex
import numpy as np
import pytest
from refusals import refused
from report_helpers import fake_cell

import jaxlsgd
from jaxlsgd.core import storage


@pytest.fixture
def cell():
    found = fake_cell("P(1/2)", saves=3, levels=(0.9, 0.95), diverged=2, replications=7)
    rows = found.methods["plug_in"]
    odd = dataclasses.replace(rows, scale=np.where(rows.scale > 0.3, np.inf, rows.scale))
    return dataclasses.replace(found, methods={"plug_in": odd, "random_scaling[paper]": rows})


def as_tree(cell):
    return {
        field.name: getattr(cell, field.name)
        for field in dataclasses.fields(cell)
        if field.name != "methods"
    } | {name: dataclasses.asdict(rows) for name, rows in cell.methods.items()}


@pytest.mark.parametrize("truth", [(0.1, 1 / 3), None])
def test_what_is_loaded_is_what_was_saved(cell, truth, tmp_path):
    known = dict.fromkeys(cell.methods, None if truth is None else np.array(truth))
    cell = dataclasses.replace(cell, truth=known)
    path = cell.save(tmp_path / "cell.npz")
    found = jaxlsgd.load_cell(path)
    chex.assert_trees_all_equal(as_tree(found), as_tree(cell))
    for name, rows in cell.methods.items():
        assert rows.estimate.tobytes() == found.methods[name].estimate.tobytes()  # NaN and all
    assert found.save(tmp_path / "again.npz").read_bytes() == path.read_bytes()
    found.methods["plug_in"].estimate[0] = 0  # arrays of one's own, not views of the file


@pytest.mark.parametrize(
    "order", [("plug_in", "random_scaling[paper]"), ("random_scaling[paper]", "plug_in")]
)
def test_each_method_gets_its_own_rows_back(order, cell, tmp_path):
    cell = dataclasses.replace(cell, methods={name: cell.methods[name] for name in order})
    found = jaxlsgd.load_cell(cell.save(tmp_path / "cell.npz"))
    assert tuple(found.methods) == tuple(found.coordinates) == order
    for name, rows in cell.methods.items():
        for field in dataclasses.fields(rows):
            before, after = getattr(rows, field.name), getattr(found.methods[name], field.name)
            assert before.tobytes() == after.tobytes(), (name, field.name)


def test_nothing_is_replaced_unasked(cell, tmp_path):
    path = cell.save(tmp_path / "cell.npz")
    with pytest.raises(FileExistsError):
        cell.save(path)
    assert cell.save(path, force=True) == path
    assert list(tmp_path.iterdir()) == [path]


def test_every_altered_byte_is_noticed(cell, tmp_path):
    content = cell.save(tmp_path / "cell.npz").read_bytes()
    whole = as_tree(cell)
    unread = 0
    rng, bad = np.random.default_rng(0), tmp_path / "bad.npz"
    for place in rng.choice(len(content), 150, replace=False):
        altered = bytearray(content)
        altered[place] ^= 1 << int(rng.integers(8))
        bad.write_bytes(altered)
        with contextlib.suppress(ValueError):
            # If it is read, the byte is one of the container's that nobody reads.
            chex.assert_trees_all_equal(as_tree(jaxlsgd.load_cell(bad)), whole)
            unread += 1
    assert unread < 50  # names and times in the container, of 10 kB with 2 kB of headers
    for end in (0, 10, len(content) // 2, len(content) - 1):
        bad.write_bytes(content[:end])
        with refused("path", "damaged"):
            jaxlsgd.load_cell(bad)


def resealed(path, change):
    """The file with another header, and a checksum that fits."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files if name != "sha256"}
    header = change(json.loads(arrays["header"].tobytes()))
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    path.write_bytes(storage.seal(arrays))


@pytest.mark.parametrize(
    "change",
    [
        # Rows of the first format may have been given to the wrong methods.
        lambda header: header | {"format": 1},  # format 1, and this version reads 3
        lambda header: [],  # header cannot be read
        lambda header: header | {"methods": []},  # names no methods
        lambda header: header | {"methods": ["plug_in", "plug_in"]},  # names no methods
        lambda header: header | {"methods": ["plug_in", "x"]},  # arrays that it should
        lambda header: header | {"cell": {}},  # other fields
        lambda header: header | {"cell": header["cell"] | {"x": 1}},  # other fields
        lambda header: header | {"cell": header["cell"] | {"save_at": [1]}},  # whole numbers
        lambda header: header | {"cell": header["cell"] | {"levels": [0.9]}},  # shape of the cell
        lambda header: header | {"cell": header["cell"] | {"problem": "\x1b[2J"}},  # printable
    ],
)
def test_a_header_that_does_not_fit_is_refused(cell, change, tmp_path):
    path = cell.save(tmp_path / "cell.npz")
    resealed(path, change)
    with refused("path", "damaged"):
        jaxlsgd.load_cell(path)


def test_arrays_may_have_any_names():
    """Names of `numpy.savez`'s own arguments too; before NumPy 2.2, one that was given was stored."""
    names = ("file", "allow_pickle", "args", "kwds", "a/b[paper]")
    arrays = {name: np.full((2, i), i / 3) for i, name in enumerate(names)}
    found = storage.unseal(storage.seal(arrays), names)
    chex.assert_trees_all_equal(found, arrays)
    chex.assert_trees_all_equal_dtypes(found, arrays)


def test_bytes_are_those_of_numpy():
    arrays = {
        "header": np.frombuffer(b"{}", np.uint8),
        "empty": np.zeros((0, 3)),
        "number": np.float32(1.5),
        "flags/plug_in": np.array([[True], [False]]),
    }
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    assert storage.npz(arrays) == buffer.getvalue()
    with pytest.raises(ValueError, match="Object arrays cannot be saved"):
        storage.npz({"x": np.array([{}], object)})


def test_nothing_is_unpickled(tmp_path):
    class Trap:
        def __reduce__(self):
            return (pytest.fail, ("it was run",))

    buffer = io.BytesIO()
    np.save(buffer, np.array([Trap()], object), allow_pickle=True)
    path = tmp_path / "trap.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("header.npy", buffer.getvalue())
    with refused("path", "damaged"):
        jaxlsgd.load_cell(path)
