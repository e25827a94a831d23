"""Files that are read once: columns of Arrow's, chunks, and what a stream finds in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from refusals import Why, refused
from test_table_input import fit, table

from jaxlsgd.regression import design, stream

pytestmark = pytest.mark.usefixtures("small_chunks")


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stream, "CHUNK", 1200)
    monkeypatch.setattr(stream, "PILOT_ROWS", 2000)
    monkeypatch.setattr("jaxlsgd.regression.files.BLOCK_ROWS", 2000)


def mixed_kinds() -> pd.DataFrame:
    frame = table(50, seed=1).assign(visits=np.arange(50) % 7, smokes=np.arange(50) % 3 == 0)
    return frame.assign(small=frame["age"].astype(np.float32))


CLIENTS = {
    "text": lambda frame: frame["site"],
    "a category": lambda frame: frame["site"].astype("category"),
    "whole numbers": lambda frame: np.arange(50) % 4 - 1,
    "whole numbers far apart": lambda frame: np.arange(50) % 4 * 10**9,
    "no numbers": lambda frame: np.arange(50) % 4 / 2,
    "nobody": None,
}


@pytest.mark.parametrize("kind", CLIENTS)
def test_columns_of_arrow_are_those_of_pandas(kind: str, monkeypatch: pytest.MonkeyPatch):
    frame, who = mixed_kinds(), CLIENTS[kind]
    if who is None:
        frame, client = frame.drop(columns="site"), None
    else:
        frame["site"], client = who(frame), "site"
    batch = pa.Table.from_pandas(frame).combine_chunks().to_batches()[0]
    plan = design.design(frame, design.Model("sick", client, None, None, True, "refuse"))
    direct = design.read_columns(plan, batch)
    monkeypatch.setattr(design, "_plain", lambda *given: None)
    by_pandas = design.read_columns(plan, batch)
    assert direct.dropped == by_pandas.dropped == 0
    np.testing.assert_array_equal(direct.y, by_pandas.y)
    for one, other in zip(direct.features, by_pandas.features, strict=True):
        np.testing.assert_array_equal(np.broadcast_to(one, 50), other)
    ours, theirs = (np.asarray(one.labels)[one.codes] for one in (direct, by_pandas))
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(theirs, [str(one) for one in np.asarray(plan.read(frame).client)])


def test_the_first_rows_are_those_of_pandas(monkeypatch: pytest.MonkeyPatch):
    frame = mixed_kinds().drop(columns="smokes")
    frame["site"] = np.arange(50) % 12  # sorted as numbers: 2 before 10
    model = design.Model("sick", "site", None, None, True, "refuse")
    rows = pa.Table.from_pandas(frame)
    plan, block = design.first_rows(rows, model)
    monkeypatch.setattr(design, "plain_design", lambda *given: None)
    same, by_pandas = design.first_rows(rows, model)
    assert plan == same
    for one, other in zip(block, by_pandas, strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.asarray(one).dtype == np.asarray(other).dtype


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"age": np.nan}, ("frame", "data", "1 of 'age'", "row 5000")),
        ({"dose": np.inf}, ("column 'dose'", "not_finite")),
    ],
)
def test_what_is_wrong_in_a_later_block_is_refused(tmp_path: Path, change: Any, why: Why):
    frame = table(6000, seed=5)
    for name, value in change.items():
        frame.loc[5000, name] = value
    frame.to_parquet(tmp_path / "late.parquet")
    with refused(*why):
        fit(tmp_path / "late.parquet", stream=True)


def test_a_file_whose_first_rows_have_gaps_is_read_to_its_end(tmp_path: Path):
    """Also where clients are whole numbers, which with a gap among them pandas reads as 1.0."""
    frame = table(6000, seed=5)
    frame["site"] = pd.array(frame["site"].str[1:].astype(int), dtype="Int64")
    frame.loc[10, "age"] = np.nan
    frame.loc[3000, "site"] = pd.NA
    rows = pa.Table.from_pandas(frame).replace_schema_metadata(None)
    pq.write_table(rows, tmp_path / "gaps.parquet")
    found = fit(tmp_path / "gaps.parquet", stream=True, missing="drop")
    assert found.dropped == 2
    assert sum(found.sizes.values()) == 5998
    assert list(found.sizes) == ["0", "1", "2"]


def test_columns_of_any_scale(tmp_path: Path):
    """A column in other units, and far from 0: the same fit to a thousandth of a standard error."""
    frame = table(6000, seed=6)
    other = frame.assign(age=5e8 + 1e6 * frame["age"], dose=1e-22 * frame["dose"])
    frame.to_parquet(tmp_path / "one.parquet")
    other.to_parquet(tmp_path / "other.parquet")
    one, two = (fit(tmp_path / f"{name}.parquet", stream=True) for name in ("one", "other"))
    error = one.coefficients().std_error[1:]
    scale = np.array([1e6, 1e-22])
    gap = two.coefficients().estimate[1:] * scale - one.coefficients().estimate[1:]
    assert np.all(np.abs(gap) < 1e-3 * error)
    np.testing.assert_allclose(two.coefficients().std_error[1:] * scale, error, rtol=1e-3)


def test_a_stream_stops_when_it_is_sure_enough(tmp_path: Path):
    table(9000, seed=6).to_parquet(tmp_path / "long.parquet")
    whole = fit(tmp_path / "long.parquet", stream=True)
    low, high = (np.asarray(x) for x in whole.interval()[1:])
    goal = 1.25 * float(np.max(high - low)) / 2
    found = fit(tmp_path / "long.parquet", stream=True, until=goal)
    assert sum(found.sizes.values()) < 9000
    low, high = (np.asarray(x) for x in found.interval()[1:])
    assert np.all(high - low <= 2 * goal)
    assert "stopped when all intervals were at most" in str(found)
    with refused("until", "unwanted"):
        fit(table(500, seed=6), until=goal)


def test_a_short_file_says_that_it_is_read_to_its_end(tmp_path: Path):
    table(500, seed=6).to_parquet(tmp_path / "short.parquet")
    for until, told in ((None, False), (9.0, True)):
        found = fit(tmp_path / "short.parquet", stream=True, until=until)
        assert sum(found.sizes.values()) == 500
        assert ("not stopped before its end" in str(found)) == told
