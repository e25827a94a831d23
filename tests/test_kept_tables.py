"""Tables that tiles have used are kept beside them, handed on, and can be lost without harm."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import refused
from study_helpers import fake_rows, small

from jaxlsgd.inference.laws import tables
from jaxlsgd.study import StoreError, progress, run
from jaxlsgd.study.executors import dask_worker, threads
from jaxlsgd.study.jobs import Job, Tabulated, TileFinished
from jaxlsgd.study.store import files, law_tables

ROWS = {"a": np.array([1.0, 0.1, np.inf]), "b": np.array([np.nextafter(2.0, 3.0)])}


def dear(key: str, made: list[str]) -> np.ndarray:
    """A law that looks before it computes."""
    found = tables.cached(key)
    if found is None:
        made.append(key)
        found = np.array([float(len(key)), np.inf])
        tables.remember({key: found})
    return found


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a process tabulates whose tiles each need a row of their cell, and nothing else."""
    made: list[str] = []

    def run_job(job: Job, device: Any = None) -> Iterator[Any]:
        for tile in job:
            used = tables.Rows()
            with tables.recording(used):
                dear(tile.cell.id, made)
            yield Tabulated(used)
            yield TileFinished(tile, fake_rows(tile.cell, tile.first))

    monkeypatch.setattr(threads, "run_job", run_job)
    monkeypatch.setattr(tables, "_cache", {})
    return made


@pytest.fixture
def new_process(made: list[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Forgets what this process knows."""

    def forget() -> None:
        made.clear()
        monkeypatch.setattr(tables, "_cache", {})

    return forget


def test_a_resumed_study_tabulates_nothing_again(
    tmp_path: Path, made: list[str], new_process: Callable[[], None]
) -> None:
    run(small(replications=16), tmp_path)
    assert len(made) == 2
    files = sorted((tmp_path / "tables").iterdir())
    assert len(files) == 2
    new_process()
    assert run(small(replications=80), tmp_path).exit_code == 0
    assert made == []
    assert sorted((tmp_path / "tables").iterdir()) == files


def test_damaged_tables_are_said_removed_and_made_again(
    tmp_path: Path, made: list[str], new_process: Callable[[], None]
) -> None:
    run(small(replications=16), tmp_path)
    path = sorted((tmp_path / "tables").iterdir())[0]
    path.write_text(path.read_text().replace("Infinity", "1").replace("null", "7.0"))
    new_process()
    told: list[str] = []
    silent: Any = progress.SilentProgress()
    silent.warn = told.append
    assert run(small(replications=32), tmp_path, progress=silent).exit_code == 0
    assert len(made) == 1
    assert len(told) == 1 and "checksum" in told[0] and "computed again" in told[0]
    new_process()
    run(small(replications=48), tmp_path)
    assert made == []


def test_tables_of_other_code_are_left_alone(tmp_path: Path) -> None:
    law_tables.write(tmp_path, ROWS, "this code")
    assert law_tables.read(tmp_path, "other code") == ({}, [])
    found, warnings = law_tables.read(tmp_path, "this code")
    assert not warnings and found.keys() == ROWS.keys()
    for key, row in ROWS.items():
        np.testing.assert_array_equal(found[key], row)


def test_tables_are_never_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "tables").symlink_to(tmp_path / "elsewhere")
    with refused(tmp_path / "tables", "exists", kind=StoreError):
        law_tables.write(tmp_path, ROWS, "code")


@pytest.mark.parametrize("content", [[], {"a": 1}, {"a": ["x"]}, None])
def test_what_are_no_tables_is_refused(content: Any) -> None:
    with refused("", "damaged", "tables", kind=files.Damaged):
        law_tables.from_plain(content)


def test_workers_hand_tables_over_and_take_them(
    made: list[str], new_process: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes back from a Dask worker is plain, and is what a worker of a later run is given."""
    cell = small().cells[0]
    monkeypatch.setattr("jaxlsgd.study.jobs.run_job", threads.run_job)
    answer = dask_worker._answer([cell], 0)
    plain = json.loads(json.dumps(answer.get("tables")))
    new_process()
    dask_worker.remember(plain)
    dask_worker._answer([cell], 0)
    assert made == []
