"""Forecasts by trial: what a study takes is put together rightly from a few runs of its first jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from study_helpers import small

from jaxlsgd.inference.laws import tables
from jaxlsgd.study import Study, forecast
from jaxlsgd.study.jobs import Job, work

STEP, READING, PROGRAMS, LENGTH, TABLE = 1e-6, 0.01, 5.0, 0.7, 0.05


class Machine:
    """A clock that goes by a model: it compiles once, reads programs faster than that, makes a table once."""

    def __init__(self) -> None:
        self.compiled: set[Any] = set()
        self.loaded: set[Any] = set()
        self.tables: set[str] = set()
        self.runs: list[float] = []  # without compiling

    def run(self, job: Job, devices: Sequence[Any], used: tables.Rows) -> float:
        seconds = sum(STEP * work(tile.cell) + READING for tile in job)
        compiling = 0.0
        needed = {"programs": PROGRAMS} | {
            length: LENGTH for tile in job for length in forecast._lengths(tile.cell)
        }
        for name, price in needed.items():
            if name not in self.loaded:
                fresh = name not in self.compiled
                seconds += price if fresh else price / 10
                compiling += price if fresh else 0.0
        self.compiled.update(needed)
        self.loaded.update(needed)
        for digest in {tile.cell.plan().digest for tile in job} - self.tables:
            seconds += TABLE
            self.tables.add(digest)
        self.runs.append(seconds - compiling)
        used.update({tile.cell.plan().digest: np.zeros(1) for tile in job})
        return seconds


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    model = Machine()
    monkeypatch.setattr(forecast, "_run", model.run)
    monkeypatch.setattr(forecast, "_commit", lambda: 0.0)
    monkeypatch.setattr(forecast, "_start", lambda: 1.5)
    monkeypatch.setattr("jax.clear_caches", model.loaded.clear)
    monkeypatch.setattr(forecast.tables, "forget", model.tables.difference_update)
    return model


def study(**changes: Any) -> Study:
    return small(**({"horizons": [5_000], "save_at": [], "replications": 80} | changes))


def thorough(asked: Study, count: int) -> forecast.Times:
    return forecast.measured(asked, [None], count, most=None)


def test_steps_readings_and_devices_are_counted(machine: Machine) -> None:
    asked = study(save_at=12)
    total = 5 * sum(STEP * work(cell) + 12 * READING for cell in asked.cells)
    assert thorough(asked, 1).tiles == pytest.approx(total, rel=0.02)
    assert thorough(asked, 2).tiles == pytest.approx(total / 2, rel=0.02)
    # No more devices are busy than there are tiles.
    assert thorough(asked, 1000).tiles == pytest.approx(total / 10, rel=0.02)


def test_programs_that_the_trial_has_compiled_are_read_and_the_rest_compiled(
    machine: Machine,
) -> None:
    asked = study(schedules=["C1"], save_at=[100, 1_000])
    found = thorough(asked, 1)
    # Plans padded to 128 (tried), 1024 and 8192.
    assert found.programs == pytest.approx((PROGRAMS + LENGTH) / 10 + 2 * LENGTH, rel=0.02)


def test_tables_are_made_once_per_cell_and_saved_round(machine: Machine) -> None:
    found = thorough(study(save_at=12), 1)
    assert found.tables == pytest.approx(2 * 12 * TABLE, rel=0.02)
    assert thorough(study(replications=8_000), 1).tables == pytest.approx(2 * TABLE)


def test_every_kind_of_program_counts_and_a_few_are_tried(machine: Machine) -> None:
    problems = [
        {"kind": "linear", "name": f"p{dim}", "dim": dim, "num_clients": 3} for dim in range(1, 7)
    ]
    found = thorough(study(problems=problems, schedules=["C1"]), 1)
    one = thorough(study(problems=problems[:1], schedules=["C1"]), 1)
    assert found.programs > 5 * one.programs
    assert found.total == pytest.approx(sum(found))


def test_a_study_as_short_as_its_trial(machine: Machine) -> None:
    asked = small(horizons=[40], save_at=[])
    found = thorough(asked, 1)
    assert found.tiles == pytest.approx(
        5 * sum(STEP * work(cell) + READING for cell in asked.cells), rel=0.5
    )


@pytest.mark.parametrize("replications", [80, 80_000], ids=["a short study", "a long study"])
def test_trials_take_ten_seconds_or_a_tenth_of_the_forecast(
    machine: Machine, replications: int
) -> None:
    """Besides compiling, and the first program, which is run twice whatever it takes."""
    problems = [
        {"kind": "linear", "name": f"p{dim}", "dim": dim, "num_clients": 3} for dim in range(1, 4)
    ]
    asked = study(problems=problems, replications=replications)
    found = forecast.measured(asked, [None], 1)
    assert sum(machine.runs[2:]) <= min(10.0, 0.11 * found.total)
    exact = thorough(asked, 1)
    assert found.tiles == pytest.approx(exact.tiles, rel=0.5)


def test_a_long_study_is_tried_as_thoroughly_as_asked(machine: Machine) -> None:
    forecast.measured(study(replications=800_000), [None], 1)
    assert len(machine.runs) == 7
