"""Jobs: tiles that share their draws run together, evenly, and are committed one by one."""

from __future__ import annotations

import time

import pytest
from study_helpers import LIMIT, count, fake_rows, small

from jaxlsgd.core.rows import MethodRows
from jaxlsgd.study import Results, jobs, run
from jaxlsgd.study.executors import threads
from jaxlsgd.study.jobs import Tile, TileFinished, draws_of, grouped
from jaxlsgd.study.progress import Stop

pytestmark = pytest.mark.for_users

ALL = ["C1", "C5", "Log", "P(1/3)", "P(1/2)"]


def tiles_of(study) -> list[Tile]:
    firsts = range(0, study.replications, study.tile_size)
    return [Tile(cell, first) for cell in study.cells for first in firsts]


def wide(**changes):
    """Five schedules to four horizons, of so many replications."""
    return small(schedules=ALL, horizons=[40, 80, 160, 320], **changes)


def lengths(found) -> list[int]:
    return [sum(tile.cell.num_steps for tile in job) for job in found]


def test_every_tile_is_in_one_job_and_a_job_is_one_range_of_one_stream_of_draws() -> None:
    study = wide(
        problems=[
            {"kind": "linear", "name": "a", "dim": 2, "num_clients": 3},
            {"kind": "linear", "name": "faster", "dim": 2, "num_clients": 3, "gamma0": 1.0},
            {"kind": "linear", "name": "larger", "dim": 3, "num_clients": 3},
        ],
        exclude=[{"schedule": "C5", "method": "plug_in"}],
    )
    found = grouped(tiles_of(study), 2)
    done = [(tile.cell.id, tile.first) for job in found for tile in job]
    assert sorted(done) == sorted((tile.cell.id, tile.first) for tile in tiles_of(study))
    for job in found:
        assert len({(draws_of(tile.cell), tile.first) for tile in job}) == 1
        assert len(job) <= jobs.MOST_CELLS
    together = {frozenset(tile.cell.problem.name for tile in job) for job in found}
    assert together == {frozenset({"a", "faster"}), frozenset({"larger"})}


@pytest.mark.parametrize(("replications", "workers", "count"), [(16, 1, 1), (16, 2, 2), (16, 8, 8)])
def test_one_range_is_split_among_the_workers(replications, workers, count) -> None:
    found = grouped(tiles_of(wide(replications=replications)), workers)
    assert len(found) == count
    assert max(lengths(found)) <= 1.6 * min(lengths(found))


@pytest.mark.parametrize(("ranges", "workers"), [(3, 2), (5, 4), (7, 4), (9, 8), (4, 4)])
def test_no_worker_idles_through_the_last_jobs(ranges, workers) -> None:
    found = grouped(tiles_of(wide(replications=16 * ranges)), workers)
    assert len(found) % workers == 0
    assert [len(job) for job in found[: ranges // workers * workers]] == [20] * (
        ranges // workers * workers
    )


def test_jobs_stay_short_and_small(monkeypatch) -> None:
    whole = tiles_of(wide(replications=16))
    monkeypatch.setattr(jobs, "MOST_CELLS", 7)
    assert sorted(len(job) for job in grouped(whole, 1)) == [6, 7, 7]
    monkeypatch.setattr(jobs, "MOST_CELLS", 100)
    most = sum(jobs.work(tile.cell) for tile in whole) // 4
    for widths, name in (((), "MOST_WORK"), ((1, 4), "MOST_WORK_IN_LANES")):
        monkeypatch.setattr(jobs, "_widths", lambda cell, widths=widths: widths)
        monkeypatch.setattr(jobs, name, most)
        assert len(grouped(whole, 1)) in (4, 5)
        monkeypatch.setattr(jobs, name, 10**15)
        assert len(grouped(whole, 1)) == 1
    monkeypatch.setattr(jobs, "MOST_BYTES", 1)
    assert [len(job) for job in grouped(whole, 1)] == [1] * 20


def test_replications_advance_from_the_first_in_all_cells_at_once() -> None:
    found = grouped(reversed(tiles_of(small())), 1)
    assert [job[0].first for job in found] == [0, 16, 32, 48, 64]
    assert {len(job) for job in found} == {2}


def test_a_tile_is_handed_over_before_its_job_ends(tmp_path, monkeypatch) -> None:
    """Were it not, the job would wait for itself."""
    seen: list[int] = []

    def run_job(job, device):
        for number, tile in enumerate(job, start=1):
            yield TileFinished(tile, fake_rows(tile.cell, tile.first))
            deadline = time.monotonic() + LIMIT
            while count(tmp_path) < number and time.monotonic() < deadline:
                time.sleep(0.01)
            seen.append(count(tmp_path))

    monkeypatch.setattr(threads, "run_job", run_job)
    run(small(replications=16), tmp_path, devices=[_Device()])
    assert seen == [1, 2]


class _Device:
    platform, device_kind = "cpu", "cpu"


def attempts(monkeypatch, directory, bad, study):
    """Runs a study in which one tile fails whenever it is computed; returns what was tried."""
    tried = []

    def run_job(job, device):
        tried.append((len(job), job[0].first))
        for tile in job:
            if (tile.cell.id, tile.first) == bad:
                raise RuntimeError("poison")
            yield TileFinished(tile, fake_rows(tile.cell, tile.first))

    monkeypatch.setattr(threads, "run_job", run_job)
    return run(study, directory, devices=[_Device()]), tried


def test_a_poisoned_tile_fails_alone(tmp_path, monkeypatch) -> None:
    study = small(schedules=ALL)
    bad = study.cells[2].id
    outcome, tried = attempts(monkeypatch, tmp_path, (bad, 16), study)
    assert outcome.errors == {bad: "RuntimeError: poison"}
    counts = {cell: count.tiles for cell, count in Results(tmp_path).counts().items()}
    assert counts.pop(bad) < 5
    assert set(counts.values()) == {5}
    # What the failing job had handed over is not computed again.
    alone = tried.count((1, 16))
    assert alone == 5 - len(_before(study, bad))
    assert tried.count((5, 16)) == 1


def _before(study, bad):
    """The tiles of the job that were finished when the bad one was reached."""
    job = next(job for job in grouped(tiles_of(study), 1) if job[0].first == 16)
    return job[: [tile.cell.id for tile in job].index(bad)]


def test_a_failing_job_that_is_asked_to_end_is_left_and_not_called_bad(monkeypatch) -> None:
    stop = Stop()

    def run_job(job, device):
        stop()
        raise RuntimeError("interrupted")

    monkeypatch.setattr(threads, "run_job", run_job)
    found = threads.Threads([_Device()]).run(grouped(tiles_of(small()), 1), stop)
    assert [type(event.error).__name__ for event in found if event] == ["Dropped"] * 2


def rows_of(cells, first) -> dict[str, dict[str, MethodRows]]:
    job = tuple(Tile(cell, first) for cell in cells)
    found = jobs.run_job(job)
    return {event.tile.cell.id: event.rows for event in found if isinstance(event, TileFinished)}


def test_rows_of_a_job_are_those_of_its_tiles_alone() -> None:
    study = small(
        problems=[
            {"kind": "linear", "name": "a", "dim": 2, "num_clients": 3},
            {"kind": "linear", "name": "b", "dim": 2, "num_clients": 3, "gamma0": 1.0},
        ],
        horizons=[40, 90],
    )
    together = rows_of(study.cells, 16)
    assert len(together) == len(study.cells) == 8
    for cell in study.cells:
        alone = rows_of([cell], 16)[cell.id]
        for name, rows in alone.items():
            for field in ("estimate", "scale", "half_width", "floored"):
                left, right = getattr(rows, field), getattr(together[cell.id][name], field)
                assert left.tobytes() == right.tobytes(), (cell.id, name, field)
