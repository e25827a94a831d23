"""The command line: what it prints, how it refuses, and what it does not import."""

from __future__ import annotations

import importlib
import inspect
import os
import pickle
import pkgutil
import re
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import numpy as np
import page_helpers
import pytest
from refusals import refused
from study_helpers import LIMIT, ROOT, TOML, call, environment, small, start
from test_store import ENVIRONMENT, fill

import jaxlsgd
from jaxlsgd import cli
from jaxlsgd.cli._common import seconds
from jaxlsgd.study import Results, forecast
from jaxlsgd.study.store.writer import Writer


@pytest.fixture(autouse=True)
def own_flags(monkeypatch) -> None:
    """What the command line sets for XLA is gone at the end of a test."""
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))


@pytest.fixture
def study_file(tmp_path) -> Path:
    path = tmp_path / "study.toml"
    path.write_text(TOML)
    return path


@pytest.fixture
def faked_results(tmp_path) -> Path:
    fill(tmp_path / "out", small(), most=7)
    return tmp_path / "out"


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """A real, complete study."""
    folder = tmp_path_factory.mktemp("real")
    (folder / "study.toml").write_text(TOML)
    code, _, err = call("run", folder / "study.toml", "--out", folder / "out", "--quiet")
    assert (code, err) == (0, "")
    return folder / "out"


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    """The command line in this process."""
    try:
        code = cli.main([str(argument) for argument in arguments])
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    return (code, *capsys.readouterr())


def test_help_teaches(capsys, monkeypatch) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    studies = ["init", "kinds", "plan", "run", "reproduce"]
    for verb in [*studies, "status", "table", "plot", "report", "replay", "critical-value"]:
        assert verb in out
        code, text, _ = run(capsys, verb, "--help")
        assert code == 0
        assert "examples:" in text
        assert f"jaxlsgd {verb}" in text
        assert max(map(len, text.splitlines())) <= 108
    assert "exit codes: 0 done, 1 failed, 2 refused" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["a verb is needed"]),
        (["statsu"], ["unknown verb 'statsu'", "'status'"]),
        (["run"], ["study", "--out"]),
        (["run", "x.toml", "--out", "y", "--max-time", "soon"], ["--max-time", "'soon'"]),
        (["run", "x.toml", "--out", "y", "--devices", "0"], ["--devices", "'0'"]),
        (["run", "no.toml", "--out", "y"], ["no.toml: cannot be read"]),
        (["critical-value", "--levels", "95"], ["--levels", "'95'", "did you mean 0.95"]),
        (["critical-value", "--beta", "1.5"], ["beta", "1.5"]),
        (["critical-value", "--beta", "half"], ["--beta", "'half'"]),
        (["critical-value", "--beta", ""], ["--beta", "''"]),
        (["critical-value", "--warmup", "0.1"], ["--warmup", "--schedule"]),
        (["critical-value", "--schedule", "C1"], ["--num-steps"]),
        (["run", "STUDY", "--out", "a\0b"], ["null"]),
        (["status", "\0"], ["null"]),
        (["run", "STUDY", "--out", ""], ["--out", "''"]),
        (["report", "STUDY", "-o", ""], ["--out", "''"]),
        (["critical-value", "--schedule", "C3", "--num-steps", "9"], ["'C3'"]),
        (["table", "x", "--format", "xls"], ["--format", "xls"]),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(capsys, arguments, words) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("jaxlsgd: error: ")
    assert err.count("\n") == 1
    assert [word for word in words if word not in err] == []


def test_bad_study_file_is_refused_before_anything_is_written(capsys, study_file) -> None:
    study_file.write_text(TOML.replace("horizons", "horizon"))
    out = study_file.with_name("out")
    for arguments in (["run", study_file, "--out", out], ["plan", study_file]):
        code, _, err = run(capsys, *arguments)
        assert code == 2
        assert err == (
            f"jaxlsgd: error: {study_file}: horizon: unknown key; did you mean 'horizons'?\n"
        )
    assert not out.exists()


def test_debug_shows_the_traceback(capsys, monkeypatch) -> None:
    monkeypatch.setenv("JAXLSGD_DEBUG", "1")
    with refused("path", "unavailable", "no.toml"):
        cli.main(["plan", "no.toml"])


def test_init_writes_a_study_that_runs_and_never_overwrites(capsys, tmp_path) -> None:
    path = tmp_path / "mine.toml"
    assert run(capsys, "init", path)[0] == 0
    assert run(capsys, "plan", path, "--rate", 1000)[0] == 0
    code, _, err = run(capsys, "init", path)
    assert code == 2
    assert "already exists" in err
    assert run(capsys, "init", "--paper", tmp_path / "paper.toml")[0] == 0
    code, out, _ = run(capsys, "plan", tmp_path / "paper.toml", "--mcse", 0.002, "--rate", 1)
    assert code == 0
    assert "11,875 replications" in out


def test_plan_tells_cells_tiles_programs_memory_time_and_precision(capsys, study_file) -> None:
    code, out, _ = run(capsys, "plan", study_file, "--devices", 2, "--rate", 1000)
    assert code == 0
    found = dict(line.split(None, 1) for line in out.split("\n") if line)
    assert found["cells"] == "2"
    assert found["tiles"] == "10 of 16 replications each"
    # 2 cells × 80 replications × 41 steps × 3 clients
    assert found["work"] == "1.97e+04 client-steps"
    # 10 s of work after 3 s to start, and 2 s for the program
    assert "0:00:15 at 0.001 million client-steps per second per device (given)" in found["time"]
    assert "0.0244 with 80 replications" in out
    assert "compiled" in found
    assert "memory" in found


def test_plan_measures_unless_it_is_given_a_rate(capsys, study_file, monkeypatch) -> None:
    """What is made of the measurements is in `test_trial`."""
    monkeypatch.setattr(forecast, "_run", lambda *_: 0.1)
    monkeypatch.setattr("jax.clear_caches", lambda: None)
    code, out, _ = run(capsys, "plan", study_file)
    assert code == 0
    lines = out.split("\n")
    time = next(i for i, line in enumerate(lines) if line.startswith("time"))
    assert re.search(r"about 0:0\d:\d\d on \d+ devices \(measured\)", lines[time])
    assert re.match(r" +start \d+ s", lines[time + 1])


def test_plan_says_when_much_of_a_tile_is_idle(capsys, study_file) -> None:
    study_file.write_text(TOML.replace("tile_size = 16", "tile_size = 512"))
    assert (
        "512 replications would take no longer" in run(capsys, "plan", study_file, "--rate", 1)[1]
    )


def test_programs_are_counted_as_the_engine_lays_them_out() -> None:
    from jaxlsgd.engine.layout import lay_out
    from jaxlsgd.engine.program import loop_for

    for schedule in ("C1", "C5", "P(1/2)"):
        study = small(schedules=[schedule], horizons=[3000], save_at=[])
        cell = study.cells[0]
        layout = lay_out(cell.plan(), rooms=loop_for("cpu", cell.problem.built().made).rooms)
        rooms = {call.slots for group in layout.groups for call in group}
        assert forecast.forecast(study).programs == len(rooms)


def test_replications_for_a_standard_error() -> None:
    for level, error in [(0.95, 0.002), (0.9, 0.01), (0.5, 0.05)]:
        count = forecast.replications_for(level, error)
        assert forecast.standard_error(level, count) <= error * (1 + 1e-9)
        assert forecast.standard_error(level, count - 1) > error


def test_status_of_a_partial_study(capsys, faked_results) -> None:
    code, out, _ = run(capsys, "status", faked_results)
    lines = out.strip().split("\n")
    assert code == 0
    assert lines[0].split()[1:] == ["80", "/", "80"]
    assert lines[1].split()[1:] == ["32", "/", "80"]
    assert lines[2] == "cells 1/2, tiles 7/10 (70%); no run is writing"


def test_status_table_and_help_import_no_jax(faked_results) -> None:
    code = (
        "import sys; from jaxlsgd import cli\n"
        "try: code = cli.main(sys.argv[1:])\n"
        "except SystemExit as leaving: code = leaving.code\n"
        "slow = [name for name in ('jax', 'scipy.stats') if name in sys.modules]\n"
        "print(slow); sys.exit(code)"
    )
    quick = (["--help"], ["--version"], ["status", faked_results], ["run", "--help"])
    for arguments in quick:
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)],
            env=environment(),
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip().split("\n")[-1] == "[]"


def test_version(capsys) -> None:
    assert run(capsys, "--version") == (0, f"jaxlsgd {jaxlsgd.__version__}\n", "")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == jaxlsgd.__version__


def test_the_papers_horizons_are_listed(capsys) -> None:
    code, out, _ = run(capsys, "reproduce", "--help")
    assert code == 0 and "5000 10000 20000 40000" in " ".join(out.split())


def test_kinds_are_listed_with_their_arguments(capsys) -> None:
    code, out, _ = run(capsys, "kinds")
    assert code == 0
    lines = out.split("\n")
    for role in ("problems", "methods", "algorithms", "schedules"):
        assert role in lines
    after = lines[lines.index(next(line for line in lines if line.startswith("  fedprox:"))) + 1]
    assert after.strip() == "mu"
    assert "      beta, scale = 1.0, allow_outside_theory = False" in lines
    order = [line.strip() for line in lines if line[:1] not in ("", " ")]
    assert order[:4] == [
        "problems",
        "schedules",
        "methods",
        "algorithms",
    ]  # as a study file has them
    for role, first in {
        "problems": "linear",
        "methods": "one_step",
        "algorithms": "local_sgd",
    }.items():
        assert lines[lines.index(role) + 1].startswith(f"  {first}: ")
    for kind in ("linear", "paper-logistic", "plug_in", "random_scaling", "local_sgd", "custom"):
        assert any(line.startswith(f"  {kind}: ") for line in lines), kind


def test_the_names_of_the_library_are_there_whatever_was_imported_before() -> None:
    for module in pkgutil.walk_packages(jaxlsgd.__path__, "jaxlsgd."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    rooms = [jaxlsgd, jaxlsgd.study, jaxlsgd.inference, jaxlsgd.report]
    for room in rooms:
        assert {*room.__all__} <= {*dir(room)}
        for name, where in room._WHERE.items():  # a name must not be hidden by a file called alike
            found = getattr(room, name)
            assert isinstance(found, types.ModuleType) == where.endswith(":"), (room, name)
    assert callable(jaxlsgd.prepare) and callable(jaxlsgd.study.replay)
    # Builders are functions in all rooms, though their files have the same names.
    builders = ("bootstrap", "one_step", "hulc", "random_scaling")
    assert all(callable(getattr(jaxlsgd.inference, name)) for name in builders)
    assert jaxlsgd.inference.one_step is jaxlsgd.one_step
    assert pickle.loads(pickle.dumps(jaxlsgd.inference)) is jaxlsgd.inference
    assert jaxlsgd.study.Study is jaxlsgd.Study
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        jaxlsgd.simulat  # type: ignore[attr-defined]  # noqa: B018


def test_reproduce_from_python(capsys, tmp_path) -> None:
    code, out, err = run(capsys, "reproduce", "table1", "--out", tmp_path / "paper", "--quiet")
    assert code == 0, err
    assert list((tmp_path / "paper").iterdir())
    assert "Table 1" in out + "".join(path.read_text() for path in tmp_path.rglob("*.md"))


def test_no_study_and_no_rows(capsys, tmp_path) -> None:
    code, _, err = run(capsys, "status", tmp_path)
    assert code == 1
    assert "holds no study" in err
    with Writer(tmp_path / "out", small(), ENVIRONMENT):
        pass
    code, _, err = run(capsys, "plot", tmp_path / "out")
    assert code == 1
    assert "has no finished tiles yet" in err


def test_damaged_tile_makes_no_table(capsys, faked_results) -> None:
    path = next(faked_results.glob("cells/*/tile-*.npz"))
    path.write_bytes(path.read_bytes()[:100])
    code, out, err = run(capsys, "plot", faked_results)
    assert (code, out) == (1, "")
    assert str(path) in err
    assert "run the study again" in err


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["table", "--methods", "plugin"], ["--methods: must be one of", "mean 'plug_in'?"]),
        (["table", "--measures", "lenght"], ["--measures: must be one of", "mean 'length'?"]),
        (["table", "--sort", "lenght"], ["--sort: must be one of", "mean 'length'?"]),
        (["table", "--coordinate", "x[7]"], ["--coordinate: must be one of x[0], x[1], got"]),
        (["looks", "--until", "-1"], ["--until: must be a finite number greater than 0"]),
    ],
)
def test_refusals_name_the_option_that_was_given(capsys, faked_results, given, words) -> None:
    verb, *options = given
    code, out, err = run(capsys, verb, faked_results, *options)
    assert (code, out) == (2, "")
    assert [word for word in words if word not in err] == []


def test_second_run_on_one_directory_is_refused(study_file, tmp_path) -> None:
    with Writer(tmp_path / "out", small(), ENVIRONMENT):
        code, _, err = call("run", study_file, "--out", tmp_path / "out")
    assert code == 1
    assert "is being written by another run" in err
    assert err.count("\n") == 1


def test_changed_study_and_fresh_are_refused_with_what_to_do(results, tmp_path) -> None:
    changed = tmp_path / "changed.toml"
    changed.write_text(TOML.replace("warmup = 0.05", "warmup = 0.1"))
    code, _, err = call("run", changed, "--out", results)
    assert code == 1
    assert "schedules[0].warmup: 0.05 → 0.1" in err
    changed.write_text(TOML)
    code, _, err = call("run", changed, "--out", results, "--fresh")
    assert code == 1
    assert "never overwritten" in err
    assert "out-2" in err


def test_real_rows_cover_the_truth_about_as_often_as_they_should(results) -> None:
    rows = Results(results).read_all()
    assert [(cell.schedule, cell.replications) for cell in rows] == [("C1", 80), ("P(1/2)", 80)]
    for cell in rows:
        for name, found in cell.methods.items():
            inside = np.abs(found.estimate[-1] - cell.truth[name]) <= found.half_width[-1, 0]
            # 40 steps are far from the limit; a wrong truth or half-width would give next to 0.
            assert inside.mean() > 0.5, (cell.schedule, name)


def test_replay_shows_the_path_and_agrees_with_the_stored_row(results) -> None:
    code, out, err = call("replay", results, "--cell", "linear-p", "--replication", 17)
    assert code == 0, err
    lines = out.split("\n")
    assert lines[0].startswith("plug_in, level 0.95: linear-p-1-2-40-")
    assert "agrees with the stored row" in out
    stored = Results(results).read(Results(results).cells()[1])
    assert stored is not None
    last = lines[lines.index("") - 1].split()
    assert float(last[2]) == pytest.approx(stored.methods["plug_in"].estimate[-1, 17, 0], rel=1e-4)


def test_replay_refuses_a_cell_that_is_not_or_not_unique(capsys, faked_results) -> None:
    for part, word in [("linear", "it matches linear-c1"), ("cubic", "the cells are linear-c1")]:
        code, _, err = run(capsys, "replay", faked_results, "--cell", part, "--replication", 1)
        assert code == 2
        assert f"--cell: must match exactly one cell, got {part!r}; {word}-40-" in err


def test_critical_values(capsys) -> None:
    assert run(capsys, "critical-value", "--beta", "0.5") == (0, "5.8069\n", "")
    several = run(capsys, "critical-value", "--beta", "1/3", "--levels", 0.9, 0.95)[1].split()
    assert several[::2] == ["0.9", "0.95"]
    assert 5 < float(several[1]) < float(several[3]) == 6.3616
    schedule = ("--schedule", "C5", "--num-steps", 5000, "--warmup", 0.05)
    assert run(capsys, "critical-value", *schedule)[1] == "5.5549\n"


def test_times_with_units() -> None:
    assert [seconds(text) for text in ("90", "1.5m", "1h30m", "2d")] == [90, 90, 5400, 172800]


def test_interrupted_reader_is_no_traceback(faked_results) -> None:
    process = start("status", faked_results)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read()
    process.wait(timeout=LIMIT)
    process.stderr.close()


def test_the_table_answers_and_rows_are_exported(tmp_path, capsys):
    page_helpers.write(tmp_path / "s", small())
    place = str(tmp_path / "s")
    asked = ["table", place, "--methods", "plug_in", "--schedules", "C1"]
    asked += ["--measures", "coverage"]
    assert cli.main([*asked, "--sort", "coverage", "--descending"]) == 0
    told = capsys.readouterr().out
    assert "method plug_in" in told and "length" not in told and "P(1/2)" not in told
    assert cli.main(["table", place, "--differences", "--coordinate", "x[1]"]) == 0
    assert "coordinate x[1]" in capsys.readouterr().out
    for wrong, hint in (
        (["--methods", "plugin"], "did you mean 'plug_in'?"),
        (["--measures", "lenght"], "did you mean 'length'?"),
        (["--levels", "0.5"], "level: must be one of 0.95, got 0.5"),
        (["--descending"], "--descending: must be given with --sort"),
        (["--differences", "--measures", "length"], "--measures: must not be given"),
    ):
        assert cli.main(["table", place, *wrong]) == 2
        assert hint in capsys.readouterr().err
    assert cli.main(["export", place, "--format", "csv"]) == 0
    assert (tmp_path / "s" / "rows.csv").is_file()
    assert cli.main(["export", place, "--format", "csv"]) == 1
    assert "rows.csv: it exists already" in capsys.readouterr().err
    assert cli.main(["export", place, "--format", "csv", "--force"]) == 0
    assert cli.main(["export", place, "-o", str(tmp_path / "x.nc"), "--format", "netcdf"]) == 0
    assert cli.main(["status", place]) == 0  # the file in the directory is in nobody's way


def test_types_of_signatures_have_a_place() -> None:
    """Every name in an annotation of the front doors is one of the package, or of its `typing`."""
    known = {*jaxlsgd.__all__, *jaxlsgd.typing.__all__, "Until"}
    for door in (jaxlsgd.fit, jaxlsgd.simulate, jaxlsgd.fit_table, jaxlsgd.track):
        for parameter in inspect.signature(door).parameters.values():
            for name in re.findall(r"\b[A-Z]\w+", str(parameter.annotation)):
                elsewhere = {"Sequence", "Any", "None", "Callable", "NoReturn", "Mapping"}
                assert name in known | elsewhere, (door.__name__, parameter.name, name)
