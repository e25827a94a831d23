"""What a study needs in memory, what there is, and what is refused before it begins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from refusals import refused
from study_helpers import TOML, environment, fake_rows, small

import jaxlsgd
from jaxlsgd import cli
from jaxlsgd.engine import cost, machine
from jaxlsgd.study import forecast, run

MB = 10**6


@pytest.fixture(autouse=True)
def own_flags(monkeypatch) -> None:
    """What the command line sets for XLA is gone at the end of a test."""
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))


def has(monkeypatch, count: int | None) -> None:
    """Let the machine have so many bytes."""
    monkeypatch.setattr(machine, "memory", lambda: count)


def test_the_process_and_its_compiler_are_counted() -> None:
    need = forecast.memory(small(), 1)
    assert need.process + need.programs > 350 * MB
    assert need.host >= need.process + need.programs + need.arrays
    two = forecast.memory(small(), 2)
    assert (two.programs, two.devices) == (need.programs, 2)  # a CPU's threads share them
    assert forecast.memory(small(), 2, "gpu").programs == 2 * need.programs
    assert forecast.memory(small(), 1000).devices == 10  # no more than there are tiles


def test_a_long_program_to_read_intervals_needs_memory_to_compile() -> None:
    long, short = (forecast.memory(small(methods=[m]), 1) for m in ("one_step", "plug_in"))
    assert long.programs > short.programs + 50 * MB
    assert long.reading > 0


def test_reading_is_predicted_near_what_the_compiler_plans() -> None:
    from jaxlsgd.core.estimator import Horizon
    from jaxlsgd.engine import statistics

    plan = jaxlsgd.schedules.constant(1).plan(jaxlsgd.schedules.power_decay(0.5), num_rounds=128)
    for method in (
        *(jaxlsgd.plug_in(), jaxlsgd.plug_in("finite")),
        *(jaxlsgd.random_scaling(), jaxlsgd.one_step()),
    ):
        vector = jax.ShapeDtypeStruct((30,), np.float32)
        states = []
        for part in method.accumulators:
            one, axes = jax.eval_shape(part.init, vector), statistics.axes_of(part, vector)
            leaves = jax.tree.leaves(axes, is_leaf=lambda axis: axis is None)
            flat = [
                x if axis is None else jax.ShapeDtypeStruct((*x.shape, 64), x.dtype)
                for x, axis in zip(jax.tree.leaves(one), leaves, strict=True)
            ]
            states.append(jax.tree.unflatten(jax.tree.structure(one), flat))
        given = Horizon.of(plan, "float32") if method.needs_plan else None
        lowered = statistics.measure_compiled.lower(
            method.measure, method.accumulators, vector, tuple(states), given
        )
        planned = lowered.compile().memory_analysis().temp_size_in_bytes
        predicted = 64 * cost.reading_cost(method, 30).bytes
        assert 0.7 * planned - 100_000 < predicted < 3 * planned + 100_000


def test_a_method_that_cannot_be_traced_is_left_to_the_run(monkeypatch) -> None:
    def broken(*_):
        raise RuntimeError("somebody's")

    monkeypatch.setattr(cost, "reading_cost", broken)
    forecast._reading_of.cache_clear()
    assert forecast.memory(small(), 1).reading == 0
    forecast._reading_of.cache_clear()


def test_the_bytes_of_rows_are_those_of_the_arrays() -> None:
    cell = small().cells[0]
    rows = fake_rows(cell, 0).values()
    arrays = [x for m in rows for x in (m.estimate, m.scale, m.half_width)]
    found = cell.tile_bytes
    assert sum(x.nbytes for x in arrays) <= found < 1.5 * sum(x.nbytes for x in arrays)


@pytest.mark.skipif(sys.platform != "linux", reason="the unit of a peak is another elsewhere")
def test_a_run_needs_about_what_was_forecast(tmp_path) -> None:
    (tmp_path / "study.toml").write_text(TOML)
    # The peak since its program began: what wait4 says includes the process that it was forked from.
    code = (
        "import sys; from jaxlsgd import cli; code = cli.main(sys.argv[1:])\n"
        "print(next(line.split()[1] for line in open('/proc/self/status') if 'VmHWM' in line))\n"
        "sys.exit(code)"
    )
    arguments = (
        "run",
        tmp_path / "study.toml",
        "--out",
        tmp_path / "out",
        "--devices",
        1,
        "--quiet",
    )
    command = [sys.executable, "-c", code, *map(str, arguments)]
    peak = subprocess.run(command, env=environment(), check=True, stdout=subprocess.PIPE).stdout
    # Wide, as tests compile quickly, and mostly not at all; arrays alone would be a hundredth.
    assert 0.5 < forecast.memory(small(), 1).host / (1024 * int(peak)) < 2


def test_a_study_that_does_not_fit_is_refused_before_anything_is_written(
    tmp_path, monkeypatch
) -> None:
    need = forecast.memory(small(), 1).host
    has(monkeypatch, int(need / forecast.FORECAST_ERROR) - 1)
    with refused("study", "memory", " MB"):
        run(small(), tmp_path / "out", devices=1)
    assert not (tmp_path / "out").exists()


def test_the_command_refuses_it_too(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "study.toml").write_text(TOML)
    has(monkeypatch, 10 * MB)
    assert cli.main(["run", str(tmp_path / "study.toml"), "--out", str(tmp_path / "out")]) != 0
    assert "does not fit in memory" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_plan_says_that_a_study_does_not_fit_and_tries_nothing(
    tmp_path, monkeypatch, capsys
) -> None:
    huge = TOML.replace("dim = 2", "dim = 300").replace("num_clients = 3", "num_clients = 3000")
    (tmp_path / "study.toml").write_text(huge.replace("tile_size = 16", "tile_size = 4096"))
    has(monkeypatch, 8_000 * MB)
    monkeypatch.setattr(forecast, "measured", lambda *_: pytest.fail("tried"))
    assert cli.main(["plan", str(tmp_path / "study.toml"), "--devices", "1"]) == 0
    out = capsys.readouterr().out
    assert "this machine has 8,000 MB" in out
    assert "does not fit: needs about" in out
    assert "not measured: a trial does not fit in memory" in out
    assert "tile_size = " in out
    assert "work" in out
    assert "MC error at 0.95" in out


def test_advice_is_fewer_devices_then_a_narrower_tile_then_less() -> None:
    study = small(tile_size=4096, problems=[{"kind": "linear", "dim": 100, "num_clients": 50}])
    one, two = (forecast.memory(study, n).host for n in (1, 2))
    said = forecast.what_fits(study, forecast.Room(one), 2)
    assert said.startswith("--devices 1 ")
    assert said.endswith("for the same rows")
    assert one < two
    said = forecast.what_fits(study, forecast.Room(one - 1), 2)
    assert said.startswith("tile_size = 2048 and --devices 1 would need")
    assert forecast.what_fits(study, forecast.Room(1), 1).startswith("not even one replication")


def test_a_device_with_memory_of_its_own_is_looked_at() -> None:
    need = forecast.memory(small(), 1, "gpu")
    assert not need.shared
    assert need.host < forecast.memory(small(), 1).host + 1
    room = forecast.Room(10**12, need.device - 1)
    assert "on each device, which has" in room.lacks(need)
    assert not forecast.Room(10**12, need.device).lacks(need)
    assert not forecast.Room(None).lacks(need)


def system(root: Path, **files: str) -> Path:
    """A file system with what is asked of it."""
    places = {
        "meminfo": "proc/meminfo",
        "statm": "proc/self/statm",
        "groups": "proc/self/cgroup",
        "first": "sys/fs/cgroup/memory/job/memory.limit_in_bytes",
        "second": "sys/fs/cgroup/a/memory.max",
        "inner": "sys/fs/cgroup/a/b/memory.max",
    }
    for name, content in files.items():
        path = root / places[name]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def test_memory_is_what_is_available_or_the_limit_of_a_group(tmp_path) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    about = {"meminfo": "MemTotal: 9000 kB\nMemAvailable:    4000 kB\n", "statm": "900 100 5"}
    all_of_it = 4_000 * 1024 + 100 * page
    assert machine.memory(system(tmp_path / "plain", **about)) == all_of_it
    groups = {"groups": "0::/a/b\n", "second": "70000\n", "inner": "max\n"}
    assert machine.memory(system(tmp_path / "second", **about, **groups)) == 70_000
    groups = {"groups": "4:memory:/job\n", "first": "60000\n"}
    assert machine.memory(system(tmp_path / "first", **about, **groups)) == 60_000
    groups = {"groups": "4:memory:/job\n", "first": str(2**63 - 4096)}
    assert machine.memory(system(tmp_path / "none", **about, **groups)) == all_of_it
    total = os.sysconf("SC_PHYS_PAGES") * page
    assert machine.memory(system(tmp_path / "other", meminfo="nothing")) == total
