"""Promises at the edges: signals, logs, other code, numbers without end, and what a terminal shows."""

from __future__ import annotations

import csv
import io
import itertools
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from refusals import refused
from study_helpers import (
    LIMIT,
    TOML,
    Held,
    call,
    count,
    environment,
    missing,
    read_until,
    small,
    start,
    stopped_by_permissions,
    tiles,
    wait_until,
)
from test_hostile import put, reseal
from test_runner import fake_engine
from test_store import ENVIRONMENT, fill
from work import counted

import jaxlsgd
from jaxlsgd import cli
from jaxlsgd.core import display
from jaxlsgd.engine import machine
from jaxlsgd.study import Results, StoreError, jobs, run
from jaxlsgd.study.progress import RunLog, SilentProgress, Stop
from jaxlsgd.study.store import files
from jaxlsgd.study.store.writer import Writer

NOW, THEN = ENVIRONMENT | {"code": "b2"}, ENVIRONMENT | {"code": "a1"}


@pytest.fixture
def study_file(tmp_path) -> Path:
    path = tmp_path / "study.toml"
    path.write_text(TOML)
    return path


def with_code(directory: Path, environment: dict[str, str], most: int = 10**9, **options) -> Writer:
    """Commits tiles under some code; returns the closed writer."""
    from study_helpers import fake_rows
    from test_store import about

    with Writer(directory, small(), environment, **options) as writer:
        for cell, first in missing(writer)[:most]:
            writer.describe(cell, about(cell))
            writer.commit(cell, first, fake_rows(cell, first))
    return writer


def test_local_runs_record_the_code(tmp_path, monkeypatch) -> None:
    fake_engine(monkeypatch)
    run(small(), tmp_path)
    assert Results(tmp_path).manifest["environments"][0]["code"] == machine.code()


def test_rows_of_other_code_are_refused_or_accepted_on_request(tmp_path) -> None:
    with_code(tmp_path, THEN, most=3)
    before = (tmp_path / "manifest.json").read_bytes(), (tmp_path / "lock").stat().st_mtime_ns
    with refused(tmp_path, "conflict", "a1", "b2", "--allow-other", kind=StoreError):
        Writer(tmp_path, small(), NOW)
    assert before[0] == (tmp_path / "manifest.json").read_bytes()
    assert before[1] == (tmp_path / "lock").stat().st_mtime_ns
    writer = with_code(tmp_path, NOW, most=1, allow_other_code=True)
    assert "rows of other code are kept beside new ones" in writer.warnings[0]
    manifest = Results(tmp_path).manifest
    assert [x["code"] for x in manifest["environments"]] == ["a1", "b2"]
    assert [(x["before"], x["now"]) for x in manifest["accepted"]] == [("a1", "b2")]
    for place in (NOW, THEN):  # once accepted, both may go on
        assert with_code(tmp_path, place, most=1).warnings == []
    assert len(tiles(tmp_path)) == 6


def test_other_code_without_rows_is_nothing_to_refuse(tmp_path) -> None:
    with_code(tmp_path, THEN, most=0)
    assert with_code(tmp_path, NOW, most=1).warnings == []
    assert Results(tmp_path).manifest["environments"] == [NOW]


def test_code_is_known_without_a_manifest(tmp_path) -> None:
    with_code(tmp_path, THEN, most=3)
    (tmp_path / "manifest.json").unlink()
    with refused(tmp_path, "conflict", "a1", kind=StoreError):
        Writer(tmp_path, small(), NOW)
    assert not (tmp_path / "manifest.json").exists()


def test_option_of_the_command_line_accepts_other_code(study_file, tmp_path) -> None:
    out = tmp_path / "out"
    with_code(out, machine.describe(_Device()) | {"code": "a1"}, most=9)
    code, _, err = call("run", study_file, "--out", out, "--quiet")
    assert code == 1
    assert "has rows that other code of jaxlsgd made" in err
    code, text, err = call("run", study_file, "--out", out, "--allow-other-code")
    assert (code, text.split(" in ")[0]) == (0, "done: 1 tile"), err
    assert "as allowed: version" in err
    assert "as allowed: version" in (out / "run.log").read_text()


class _Device:
    platform, device_kind = "cpu", "cpu"


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_signals_of_batch_systems_drain(study_file, tmp_path, number) -> None:
    out, held = tmp_path / "out", Held(tmp_path / "held")
    held.let(1)
    command = ("run", study_file, "--out", out, "--devices", 1)
    process = start(*command, env=held.environment)
    wait_until(lambda: count(out) == 2 and held.begun == 2, process)
    process.send_signal(number)
    read_until(process.stderr, "stopping ")
    held.open()
    text, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, text.split(":")[0]) == (3, "partial"), err
    assert count(out) == 4
    log = (out / "run.log").read_text()
    for words in (
        " start: process ",
        " code ",
        " stopping ",
        " end: partial; tiles run 4, to come 6",
    ):
        assert words in log
    assert call(*command)[0] == 0
    resumed = (out / "run.log").read_text()
    assert resumed.startswith(log)
    assert resumed.count(" is complete\n") == 2
    assert resumed.endswith("\n") and " end: done; tiles run 6, to come 0" in resumed


def test_log_tells_failures_and_is_plain_text(tmp_path, monkeypatch) -> None:
    def poisoned(cell, first):
        raise RuntimeError("out of \x1b[2Jluck\nand more")

    fake_engine(monkeypatch, poisoned)
    assert run(small(), tmp_path).exit_code == 1
    log = (tmp_path / "run.log").read_text()
    assert "failed and is left out: RuntimeError: out of \\x1b[2Jluck" in log
    assert "end: failed; tiles run 0, to come 10, cells failed 2" in log
    assert log.replace("\n", "").isprintable()


def test_log_that_cannot_be_written_does_not_end_a_run(tmp_path, monkeypatch) -> None:
    fake_engine(monkeypatch)
    (tmp_path / "out").mkdir()
    fill(tmp_path / "out", small(), most=1)
    (tmp_path / "out" / "run.log").mkdir()
    assert run(small(), tmp_path / "out").exit_code == 0
    warned: list[str] = []
    silent = SilentProgress()
    silent.warn = warned.append  # type: ignore[method-assign]
    log = RunLog(silent)
    log.open(tmp_path / "nowhere", "start")
    log.note("this goes nowhere")
    assert len(warned) == 1 and "No such file" in warned[0]


def test_the_log_has_what_was_noted_before_it_was_opened(tmp_path) -> None:
    log = RunLog(SilentProgress())
    log.note("early")
    log.open(tmp_path, "start")
    log.note("late")
    log.close()
    lines = (tmp_path / "run.log").read_text().splitlines()
    assert [line.split()[-1] for line in lines[1:]] == ["start", "early", "late"]


def test_jobs_are_made_as_they_are_taken() -> None:
    study = small(replications=10**8, tile_size=1)
    cells, firsts = study.cells, range(0, study.replications)
    next(jobs.planned(cells, firsts, lambda cell, first: True, 2))
    with counted() as lines:
        found = jobs.planned(cells, firsts, lambda cell, first: first not in (0, 2), 2)
        taken = [job[0].first for job in itertools.islice(found, 3)]
    assert taken == [1, 3, 4]
    assert lines.run < 10_000


def test_very_many_tiles_do_not_keep_a_request_to_stop_waiting(tmp_path, monkeypatch) -> None:
    stop = Stop()
    fake_engine(monkeypatch, lambda cell, first: stop())
    study = small(replications=10**8, tile_size=1, save_at=[])
    run(small(), tmp_path / "warm")  # what is traced once
    with counted() as lines:
        outcome = run(study, tmp_path / "out", stop=stop)
    assert outcome.exit_code in (
        3,
        130,
    )  # two devices may have asked by the time that it is noticed
    assert outcome.tiles_left + outcome.tiles_run == 2 * 10**8
    assert lines.run < 5_000_000


def test_a_request_to_stop_is_heard_while_tiles_are_read(tmp_path, monkeypatch) -> None:
    fill(tmp_path, small())
    stop = Stop()
    stop()
    read, honest = [], files.read_tile
    monkeypatch.setattr(files, "read_tile", lambda *x: read.append(x) or honest(*x))
    outcome = run(small(), tmp_path, stop=stop, allow_other_code=True)
    assert (outcome.exit_code, len(read)) == (3, 1)


@pytest.mark.parametrize(
    "arguments",
    [
        ["critical-value", "--beta", "1e999999999"],
        ["critical-value", "--beta", "1e-999999999/7"],
        ["critical-value", "--beta", "1" * 5000],
        ["critical-value", "--schedule", "C1", "--num-steps", str(10**15)],
        ["plan", "STUDY", "--mcse", "1e-300"],
        ["run", "STUDY", "--out", "OUT", "--devices", "99999"],
        ["run", "STUDY", "--out", "OUT", "--dask", "local", "--devices", "99999"],
        ["plan", "PIPE"],
        ["plan", "/dev/zero"],
        ["plan", "STUDY", "--import", "PIPE"],
    ],
)
def test_what_would_never_end_is_refused(study_file, tmp_path, arguments) -> None:
    os.mkfifo(tmp_path / "pipe")
    places = {"STUDY": study_file, "OUT": tmp_path / "out", "PIPE": tmp_path / "pipe"}
    code, out, err = call(*(places.get(word, word) for word in arguments))
    assert (code, out) == (2, ""), err
    assert err.count("\n") == 1
    assert "must" in err or "cannot be read: it is not a regular file" in err
    assert len(err) < 500


@pytest.mark.parametrize("beta", ["1e999999999", "1" * 10**6, "9" * 300 + "/1"])
def test_numbers_in_words_are_not_written_out(beta: str) -> None:
    with refused("schedules[0].beta", "type"):
        small(schedules=[{"family": "power", "beta": beta}])


def test_tiny_beta_is_a_number(capsys) -> None:
    assert cli.main(["critical-value", "--beta", "1e-999999999"]) == 0
    assert capsys.readouterr() == ("6.7473\n", "")


def test_critical_value_without_arguments_says_what_it_is(capsys) -> None:
    assert cli.main(["critical-value"]) == 0
    assert capsys.readouterr() == (
        "6.7473\n",
        "jaxlsgd: for --beta 0 (constant E_m), --levels 0.95\n",
    )


def test_wrong_contrasts_are_refused_at_plan(study_file, capsys) -> None:
    method = '{ kind = "random_scaling", mode = "contrasts", contrasts = [[1, 1, 1]] }'
    study_file.write_text(TOML.replace('"random_scaling"', method))
    assert cli.main(["plan", str(study_file)]) == 2
    assert "2 columns" in capsys.readouterr().err


def test_running_out_of_memory_is_said(capsys, monkeypatch) -> None:
    def full(arguments):
        raise MemoryError

    monkeypatch.setattr(cli, "_run", full)
    assert cli.main(["status", "x"]) == 1
    assert capsys.readouterr().err == "jaxlsgd: error: out of memory\n"


def test_text_of_files_does_not_steer_the_terminal(tmp_path, capsys) -> None:
    fill(tmp_path, small(), most=0)
    hostile = [{"family": "\x1b[2J\x07\u202e\x9b2J"}]
    reseal(tmp_path / "manifest.json", put("study", "schedules", value=hostile))
    assert cli.main(["status", str(tmp_path)]) == 1
    assert cli.main(["status", str(tmp_path / "\x1b[2J")]) == 1
    shown = capsys.readouterr()
    assert (shown.out + shown.err).replace("\n", "").isprintable()


@pytest.mark.parametrize("verb", ["status", "table", "plot"])
def test_directory_without_permission_is_told_plainly(tmp_path, verb: str, capsys) -> None:
    fill(tmp_path / "out", small())
    (tmp_path / "out").chmod(0)
    with stopped_by_permissions():
        code = cli.main([verb, str(tmp_path / "out")])
    (tmp_path / "out").chmod(0o755)
    assert code == 1
    err = capsys.readouterr().err
    assert "Permission denied" in err
    assert "Errno" not in err
    assert err.count("\n") == 1


PREPARED = """
from jaxlsgd.engine import machine
machine.prepare(1)
import jax
print(jax.config.jax_compilation_cache_dir, jax.jit(lambda x: x + 1)(1.0))
"""


def test_a_home_that_cannot_be_written_costs_the_cache_alone(tmp_path, monkeypatch) -> None:
    home = {"HOME": "/dev/null/home", "XDG_CACHE_HOME": ""}
    command = [sys.executable, "-W", "error", "-c", PREPARED]
    found = subprocess.run(
        command, env=environment() | home, capture_output=True, text=True, timeout=LIMIT, check=True
    )
    assert (found.stdout, found.stderr) == ("None 2.0\n", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert machine.cache_directory() == tmp_path / "jaxlsgd"
    (tmp_path / "jaxlsgd").chmod(0o500)  # another user's, or on a read-only mount
    with stopped_by_permissions():
        assert machine.cache_directory() is None
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", _no_home)
    assert machine.cache_directory() is None


def _no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_many_problems_are_drawn_on_few_pages(caplog) -> None:
    pytest.importorskip("matplotlib")
    from jaxlsgd.report import figures

    problems = [{"kind": "linear", "name": f"p{i}", "dim": 2, "num_clients": 3} for i in range(20)]
    study = small(problems=problems, replications=16)
    rows = [row for cell in study.cells for row in figures.first_coordinate(_filled(cell))]
    names = [name for name, _ in figures._figures(rows)]
    measures = ("coverage", "length", "l2_error")
    assert names[:12] == [name + page for page in ("", "_2", "_3", "_4") for name in measures]
    assert len(names) == 12 + 20


def _filled(cell):
    """A cell with rows that cost nothing."""
    import dataclasses

    from study_helpers import fake_rows
    from test_store import about

    return dataclasses.replace(about(cell), methods=fake_rows(cell, 0))


def test_what_is_beyond_the_most_figures_is_left_out_and_said(tmp_path, caplog) -> None:
    pytest.importorskip("matplotlib")
    from jaxlsgd.report import figures

    cells = [_filled(cell) for cell in small(replications=16).cells]
    assert len(figures.save_all(cells, tmp_path, most=1)) == 2
    assert "the first 1 of 4 figures" in caplog.text


@pytest.mark.parametrize(
    "name", ["=cmd|' /C calc'!A0", "+1", "-1+1", "@SUM(1)", "<script>x</script>"]
)
def test_names_are_only_names_in_tables(name: str) -> None:
    from jaxlsgd.report import tables

    study = small(problems=[{"kind": "linear", "dim": 2, "num_clients": 3, "name": name}])
    cells = [_filled(cell) for cell in study.cells]
    found = tables.render(cells, "csv")
    assert not any(line[:1] in "=+-@" for line in found.split("\n")[1:] if line)
    assert not any(line[:2] in ('"=', '"+', '"-', '"@') for line in found.split("\n")[1:])
    assert "<script>" not in tables.render(cells, "markdown")


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Path:
    """A study's directory, with rows that cost nothing."""
    directory = tmp_path_factory.mktemp("done") / "out"
    fill(directory, small())
    return directory


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _link(path: Path) -> None:
    target = path.with_name("target")
    target.write_text("precious")
    path.symlink_to(target)


def _dangling(path: Path) -> None:
    path.symlink_to(path.with_name("target"))


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))  # a short name, as it must be


def _device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("no devices of our own here")


OTHER_KINDS = (_pipe, _link, _dangling, _socket, _device)
WRITERS: dict[str, tuple[list[str], str]] = {  # arguments, and what they say of the place
    "report": (["report", "DONE", "-o", "PATH"], "PATH"),
    "export": (["export", "DONE", "--format", "csv", "--force", "-o", "PATH"], "PATH"),
    "figures": (["plot", "DONE", "--out", "FOLDER"], "FOLDER/coverage.png"),
    "print": (
        ["plot", "DONE", "--figure", "coverage", "--out", "FOLDER"],
        "FOLDER/coverage_column.pdf",
    ),
    "init": (["init", "PATH"], "PATH"),
    "forest plot": (["fit", "TABLE", "--response", "y", "--plot", "PATH"], "PATH"),
    "predictions": (["fit", "TABLE", "--response", "y", "--predict", "TABLE", "PATH"], "PATH"),
}


@pytest.mark.parametrize("make", OTHER_KINDS)
@pytest.mark.parametrize("writer", WRITERS)
def test_outputs_replace_no_links_pipes_and_devices(writer, make, done, tmp_path, capsys) -> None:
    if writer in ("figures", "print"):
        pytest.importorskip("matplotlib")
    arguments, place = WRITERS[writer]
    path = tmp_path / place.rpartition("/")[2]
    make(path)
    before = _what_is_there(tmp_path)
    (table := tmp_path / "table.csv").write_text("y,x\n1,2\n")
    places = {"DONE": done, "FOLDER": tmp_path, "PATH": path, "TABLE": table}
    assert cli.main([str(places.get(word, word)) for word in arguments]) != 0
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1
    assert shown.err.startswith(f"jaxlsgd: error: {path}: it is a ")
    table.unlink()
    assert _what_is_there(tmp_path) == before


def _what_is_there(folder: Path) -> dict[str, tuple[int, int, int]]:
    found = {path.name: path.lstat() for path in folder.iterdir()}
    return {name: (x.st_mode, x.st_ino, x.st_size) for name, x in found.items()}


@pytest.mark.parametrize("make", OTHER_KINDS)
def test_files_of_a_library_call_replace_no_links_pipes_and_devices(make, tmp_path) -> None:
    make(path := tmp_path / "x.npz")
    with pytest.raises(FileExistsError, match="x.npz"):
        _filled(small().cells[0]).save(path, force=True)
    with refused(path, "unavailable", "it is a ", kind=StoreError):
        files.write_whole(path, b"content")
    assert not path.is_file() or path.read_text() == "precious"


def test_standard_output_is_no_place_for_a_page(done) -> None:
    code, out, err = call("report", done, "-o", "/dev/stdout")
    assert (code, out) == (1, "")
    assert err.startswith("jaxlsgd: error: /dev/stdout: it is a link to /proc/self/fd/1")
    assert "give the name of a file" in err


EVIL = ('=HYPERLINK("http://evil","x")', "+cmd", "@x", "\x1b[31mred\nfake: all is well\x9b31m")


@pytest.fixture(scope="module")
def evil_fit() -> jaxlsgd.TableFit:
    """A fit of columns whose names are spreadsheet formulas, LaTeX commands and terminal codes."""
    rng = np.random.default_rng(0)
    columns = {name: rng.normal(size=200) for name in EVIL}
    response, client = "y\n\\input{/etc/passwd}\n%", "\\write18{id}\r\n\\bye"
    frame = columns | {response: rng.normal(size=200), client: np.arange(200) % 2}
    return jaxlsgd.fit_table(frame, response=response, client=client, methods=())


def test_names_of_columns_are_only_names_in_csv(evil_fit: jaxlsgd.TableFit) -> None:
    header, *lines = csv.reader(io.StringIO(evil_fit.to_csv()))
    names = [line[header.index("coefficient")] for line in lines]
    assert names[1:] == [f"'{name}" for name in EVIL[:3]] + [
        "\\x1b[31mred\nfake: all is well\\x9b31m"
    ]


def test_names_of_columns_are_only_names_in_latex(evil_fit: jaxlsgd.TableFit) -> None:
    lines = evil_fit.to_latex().splitlines()
    ours = (r"\begin{tabular}", r"\toprule", r"\midrule", r"\bottomrule", r"\end{tabular}")
    for line in lines:
        assert line.startswith(("% ", *ours)) or (" & " in line and line.endswith(r" \\"))
    body = [line for line in lines if not line.startswith(("%", *ours))]
    assert len(body) == 1 + 1 + len(EVIL)  # header and intercept
    assert not any(command in line for line in body for command in (r"\input", r"\write", "\x1b"))


def test_names_of_columns_do_not_reach_a_terminal(evil_fit, tmp_path, capsys) -> None:
    written = (str(evil_fit), evil_fit.to_json(), evil_fit.to_latex())
    for text in written:
        assert display.printable(text) == text
    assert not any(line.startswith("fake") for line in str(evil_fit).splitlines())
    values = np.random.default_rng(0).normal(size=(200, 2))
    path = tmp_path / "evil.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("y", EVIL[3]), *values.tolist()])
    options = ("--margins", "--methods")
    assert cli.main(["fit", str(path), "--response", "y", *options]) == 0
    shown = capsys.readouterr()
    assert "red" in shown.out
    for text in shown:
        assert display.printable(text) == text
