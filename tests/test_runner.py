"""Running a study: the same bytes however it is run, errors in one cell, ends in good order."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import random
import resource
import signal
import subprocess
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import jax
import pytest
from refusals import refused
from study_helpers import (
    CACHE,
    LIMIT,
    TOML,
    Held,
    call,
    count,
    environment,
    fake_rows,
    read_until,
    small,
    start,
    stopped_by_permissions,
    tiles,
    wait_until,
)

from jaxlsgd.cli import studies
from jaxlsgd.core.progress import MEASURING, Lines, LiveLine, TimeLeft, duration
from jaxlsgd.engine import machine
from jaxlsgd.runs import simulate
from jaxlsgd.runs.simulate import on_devices
from jaxlsgd.study import Results, SpecError, StoreError, progress, run
from jaxlsgd.study.executors import threads
from jaxlsgd.study.jobs import TileAdvanced, TileFinished
from jaxlsgd.study.progress import Stop

# Many small tiles, so that a process can be killed between any two of them.
MANY = TOML.replace("replications = 80", "replications = 480")


@pytest.fixture
def study_file(tmp_path) -> Path:
    path = tmp_path / "study.toml"
    path.write_text(TOML)
    return path


@pytest.fixture(scope="module")
def quiet(tmp_path_factory) -> dict[str, bytes]:
    """The tiles of an uninterrupted run of `MANY` on one device without progress."""
    folder = tmp_path_factory.mktemp("quiet")
    (folder / "study.toml").write_text(MANY)
    code, out, err = call(
        "run", folder / "study.toml", "--out", folder / "out", "--devices", 1, "--quiet"
    )
    assert (code, out, err) == (0, "", ""), (out, err)
    return tiles(folder / "out")


@pytest.fixture
def held(tmp_path) -> Held:
    return Held(tmp_path / "held")


def fake_engine(monkeypatch, before=lambda cell, first: None) -> None:
    """Jobs without computing; `before` is called ahead of each tile."""

    def run_job(job, device):
        for tile in job:
            before(tile.cell, tile.first)
            yield TileAdvanced(tile, tile.cell.num_steps)
            yield TileFinished(tile, fake_rows(tile.cell, tile.first))

    monkeypatch.setattr(threads, "run_job", run_job)


@pytest.fixture
def faked(monkeypatch) -> list[tuple[str, int]]:
    """Tiles without computing; the list says which were asked for."""
    asked: list[tuple[str, int]] = []
    fake_engine(monkeypatch, lambda cell, first: asked.append((cell.id, first)))
    return asked


def on_a_terminal(*arguments: object) -> tuple[int, str]:
    """Runs the command line with a terminal for stderr; returns exit code and what it showed."""
    ours, theirs = pty.openpty()
    process = start(*arguments, stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal is an error on Linux
        while part := os.read(ours, 4096):
            shown += part
    os.close(ours)
    return process.wait(timeout=LIMIT), shown.decode()


def test_killed_at_random_moments_and_resumed_gives_the_same_bytes(tmp_path, held, quiet) -> None:
    (tmp_path / "study.toml").write_text(MANY)
    out = tmp_path / "out"
    moments = random.Random(20)
    committed: dict[Path, int] = {}
    for _ in range(3):
        # Jobs have two tiles each; what has begun before and was killed has its ticket already.
        held.let(held.begun + 6)
        process = start(
            "run", tmp_path / "study.toml", "--out", out, "--quiet", env=held.environment
        )
        target = len(committed) + moments.randint(1, 8)
        wait_until(lambda: count(out) >= target, process)  # noqa: B023
        time.sleep(moments.random() * 0.02)
        process.kill()
        process.communicate()
        here = {path: path.stat().st_mtime_ns for path in out.glob("cells/*/tile-*.npz")}
        assert all(here[path] == stamp for path, stamp in committed.items())
        committed = here
        assert tiles(out).items() < quiet.items()
    code, shown = on_a_terminal("run", tmp_path / "study.toml", "--out", out)
    assert code == 0, shown
    assert "cells 2/2, 100%" in shown
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in committed.items())
    assert tiles(out) == quiet
    assert not list(out.glob("cells/*/.*"))


def test_signal_drains_and_the_rest_is_resumed_on_other_devices(tmp_path, held, quiet) -> None:
    (tmp_path / "study.toml").write_text(MANY)
    out = tmp_path / "out"
    command = ("run", tmp_path / "study.toml", "--out", out, "--devices", 2)
    held.let(2)
    process = start(*command, env=held.environment)
    wait_until(lambda: count(out) == 4 and held.begun == 4, process)
    assert Results(out).running()
    code, text, _ = call("status", out)
    assert code == 0
    assert "a run is writing" in text
    process.send_signal(signal.SIGTERM)
    err = read_until(process.stderr, "stopping once the 4 tiles in flight are finished, in ")
    held.open()
    text, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, text.split(":")[0]) == (3, "partial"), err
    assert len(tiles(out)) == 8  # those in flight too, and no more
    code, text, err = call(*command)
    assert (code, text.split(":")[0]) == (0, "done"), err
    assert tiles(out) == quiet


def test_max_time_ends_partial(study_file, tmp_path) -> None:
    code, out, _ = call("run", study_file, "--out", tmp_path / "out", "--max-time", 0, "--quiet")
    assert code == 3
    assert "partial: 0 tiles" in out
    assert tiles(tmp_path / "out") == {}


def test_full_disk_is_told_plainly_and_leaves_nothing_half_written(study_file, tmp_path) -> None:
    out = tmp_path / "out"
    # Python and JAX do not notice that their own caches are cut short: they may read them only.
    caches = {
        "PYTHONDONTWRITEBYTECODE": "1",
        "JAX_COMPILATION_CACHE_DIR": str(CACHE / "jaxlsgd"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1e9",
    }
    process = start("run", study_file, "--out", out, "--quiet", env=environment() | caches)
    limit = 6_000  # bytes a file: room for the manifest and the lock, not for a tile
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, limit))
    err = process.communicate(timeout=LIMIT)[1]
    assert process.returncode == 1
    last = err.strip().split("\n")[-1]
    assert last.startswith("jaxlsgd: error: cannot write"), err
    assert "tile-" in last
    assert "Traceback" not in err
    assert tiles(out) == {}
    assert not list(out.glob("cells/*/.*"))
    code, _, err = call("run", study_file, "--out", out, "--quiet")
    assert code == 0, err


def test_directory_that_cannot_be_made_is_told_plainly(study_file, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = call("run", study_file, "--out", tmp_path / "file" / "out")
    assert code == 1
    assert err.startswith("jaxlsgd: error: cannot make")
    assert err.count("\n") == 1


@pytest.mark.parametrize("folder", ["", "below"])
def test_read_only_directory(faked, tmp_path, folder: str) -> None:
    place = tmp_path / "place"
    place.mkdir(mode=0o500)
    with (
        stopped_by_permissions(),
        refused(place / (folder or "lock"), "unavailable", "Permission denied", kind=StoreError),
    ):
        run(small(), place / folder)
    place.chmod(0o700)
    assert list(place.iterdir()) == []


def test_directory_that_turns_read_only(faked, tmp_path) -> None:
    run(small(), tmp_path, stop=Stop(0))
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells").chmod(0o500)
    cell = tmp_path / "cells" / small().cells[0].id
    with (
        stopped_by_permissions(),
        refused(cell, "unavailable", "Permission denied", kind=StoreError),
    ):
        run(small(), tmp_path)
    (tmp_path / "cells").chmod(0o700)
    assert tiles(tmp_path) == {}
    assert run(small(), tmp_path).exit_code == 0


def test_rows_do_not_depend_on_the_tile_that_is_asked_first(tmp_path, faked) -> None:
    assert run(small(replications=40), tmp_path).exit_code == 0
    before = len(faked)
    assert run(small(replications=80), tmp_path).tiles_run == 4
    assert sorted(first for _, first in faked[before:]) == [48, 48, 64, 64]
    assert run(small(replications=80), tmp_path).tiles_run == 0


def test_error_in_one_cell_is_reported_and_the_others_go_on(tmp_path, monkeypatch) -> None:
    study, said = small(), []
    bad = study.cells[0].id

    def poisoned(cell, first):
        if cell.id == bad and first == 16:
            raise RuntimeError("out of luck\nand more")

    fake_engine(monkeypatch, poisoned)
    silent = progress.SilentProgress()
    silent.warn = said.append  # type: ignore[method-assign]
    outcome = run(study, tmp_path, progress=silent)
    assert outcome.exit_code == 1
    assert outcome.errors == {bad: "RuntimeError: out of luck\nand more"}
    assert said == [f"cell {bad} failed and is left out: RuntimeError: out of luck"]
    results = Results(tmp_path)
    counts = results.counts()
    assert (counts[study.cells[1].id].tiles, counts[bad].tiles < 5) == (5, True)
    fake_engine(monkeypatch)
    assert run(study, tmp_path).exit_code == 0


def test_damaged_description_of_a_complete_cell_is_written_anew(tmp_path, faked) -> None:
    run(small(), tmp_path)
    path = next(tmp_path.glob("cells/*/cell.json"))
    good = path.read_bytes()
    path.write_bytes(good[:100])
    results = Results(tmp_path)
    assert len(results.read_all()) == 2
    assert "run the study again" in results.warnings[0]
    assert run(small(), tmp_path).tiles_run == 0
    assert path.read_bytes() == good


def test_failed_commit_ends_the_run_and_frees_the_lock(tmp_path, faked, monkeypatch) -> None:
    from jaxlsgd.study.store import files

    def full(path: Path, content: bytes) -> None:
        if path.suffix == ".npz":
            raise StoreError(f"cannot write {path}", path)
        path.write_bytes(content)

    monkeypatch.setattr(files, "write_whole", full)
    cell = tmp_path / "cells" / small().cells[0].id
    with pytest.raises(StoreError) as caught:
        run(small(), tmp_path)
    assert Path(caught.value.argument).parent == cell
    monkeypatch.undo()
    assert not Results(tmp_path).running()


def test_second_request_drops_the_tiles_in_flight(tmp_path, monkeypatch) -> None:
    stop = Stop()

    def run_job(job, device):
        stop()
        while True:  # nothing but the second request ends it
            yield TileAdvanced(job[0], 1)
            if stop.draining:
                stop()

    monkeypatch.setattr(threads, "run_job", run_job)
    outcome = run(small(), tmp_path, stop=stop)
    assert (outcome.exit_code, outcome.tiles_run, outcome.tiles_left) == (130, 0, 10)
    assert tiles(tmp_path) == {}


def test_a_second_ctrl_c_ends_a_run_whose_threads_do_not(tmp_path, held, study_file) -> None:
    out = tmp_path / "out"
    process = start("run", study_file, "--out", out, "--devices", 2, env=held.environment)
    wait_until(lambda: held.begun == 2, process)
    process.send_signal(signal.SIGINT)
    text = read_until(process.stderr, "stopping ")
    assert "the 4 tiles in flight are finished, in a time that is not known" in text
    process.send_signal(signal.SIGINT)  # the jobs are held for good, as by a compiler
    text, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 130, err
    assert "partial: 0 tiles" in text and "dropped; the same command resumes" in text
    assert not Results(out).running()
    assert "partial, dropped by signal 2" in (out / "run.log").read_text()
    held.open()
    assert call("run", study_file, "--out", out, "--quiet")[0] == 0


def test_an_error_on_one_device_stops_the_others() -> None:
    """So does Ctrl-C, which is an error in the thread that waits."""
    stopped = threading.Event()

    def failing(device):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        on_devices([failing, lambda device: stopped.wait()], ["a", "b"], stopped.set)
    report = simulate._Progress(None, 1)
    report.stop()
    with pytest.raises(CancelledError):
        report.through(iter([None]))


def test_what_is_in_flight_is_said_with_its_time(tmp_path, monkeypatch) -> None:
    stop, stream = Stop(), io.StringIO()
    lines = progress.ShownProgress(Lines(stream))
    monkeypatch.setattr(TimeLeft, "seconds_per_work", lambda self, now: 0.01)

    def run_job(job, device):
        for tile in job:
            yield TileAdvanced(tile, tile.cell.num_steps // 4)  # 10
        wait(lambda: lines._work == 2 * 16 * 10 * 3)
        stop()
        wait(lambda: "stopping" in stream.getvalue())
        for tile in job:
            yield TileFinished(tile, fake_rows(tile.cell, tile.first))

    def wait(true) -> None:
        while not true():
            time.sleep(0.01)

    monkeypatch.setattr(threads, "run_job", run_job)
    outcome = run(small(), tmp_path, devices=1, stop=stop, progress=lines)
    assert (outcome.exit_code, outcome.tiles_run) == (3, 2)
    left = sum(cell.num_steps - 10 for cell in small().cells) * 16 * 3  # replications, clients
    words = f"the 2 tiles in flight are finished, in about {duration(left * 0.01)} ("
    assert words in stream.getvalue()


def test_first_request_finishes_the_tiles_in_flight(tmp_path, monkeypatch) -> None:
    stop = Stop()

    def once(cell, first):
        if not stop.draining:
            stop()

    fake_engine(monkeypatch, once)
    outcome = run(small(), tmp_path, stop=stop)
    in_flight = {2, 4}  # one job of two cells, or two if the other device was as quick
    assert outcome.exit_code == 3
    assert {outcome.tiles_run, len(tiles(tmp_path))} <= in_flight


def test_many_devices_share_the_tiles(tmp_path, faked) -> None:
    outcome = run(small(), tmp_path, devices=[_Device(i) for i in range(4)])
    assert outcome.tiles_run == 10
    assert len(set(faked)) == len(faked) == 10


class _Device:
    platform, device_kind = "cpu", "cpu"

    def __init__(self, number: int) -> None:
        self.number = number


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"problems": [{"kind": "linear", "dim": 2, "num_clients": 3, "weights": [1, 1, 1]}]},
            ["problems[0].weights", "sum"],
        ),
        (
            {
                "methods": [
                    {"kind": "random_scaling", "mode": "contrasts", "contrasts": [[1, 1, 1]]}
                ]
            },
            ["problem linear", "contrasts", "2 columns"],
        ),
        ({"schedules": [{"family": "custom", "sequence": [1, 2]}]}, ["custom[2]", "local steps"]),
        ({"methods": ["random_scaling[paper]"], "levels": [0.85]}, ["Table 2", "0.85"]),
        ({"save_at": [39]}, ["save_at", "39"]),
    ],
)
def test_what_only_the_builders_can_tell_is_refused_before_anything_is_written(
    tmp_path, changes, words
) -> None:
    with pytest.raises(SpecError) as caught:
        run(small(**changes), tmp_path / "out")
    assert [word for word in words if word not in str(caught.value)] == []
    assert not (tmp_path / "out").exists()


def test_cells_of_one_program_run_behind_one_another(tmp_path, faked) -> None:
    three = [{"kind": "linear", "name": name, "dim": dim, "num_clients": 3, "noise": noise}
             for name, dim, noise in [("a", 2, 1), ("b", 3, 1), ("c", 2, 2)]]  # fmt: skip
    run(small(problems=three, schedules=["C1"], replications=32), tmp_path)
    assert [cell.split("-")[0] for cell, _ in faked] == ["a", "a", "c", "c", "b", "b"]


def test_progress_lines_have_cells_rate_time_and_memory(tmp_path, faked) -> None:
    stream = io.StringIO()
    run(small(), tmp_path, progress=progress.ShownProgress(Lines(stream)))
    last = stream.getvalue().strip().split("\n")[-1]
    assert last.startswith("cells 2/2, 100%, ")
    for word in ("replications/s", "0:00:00 left", "peak", "MB"):
        assert word in last


def test_live_line_is_written_over_and_warnings_stand_alone() -> None:
    stream = io.StringIO()
    live = progress.ShownProgress(LiveLine(stream))
    live.start(progress.Totals(2, 0, 32, 100.0))
    live.advance(16, 50.0)
    live._display.every = 0.0
    live.tick()
    live.warn("mind this")
    live.close()
    shown = stream.getvalue()
    assert shown.startswith("\r\x1b[Kcells 0/2, 50%")
    assert MEASURING in shown
    assert "\r\x1b[Kjaxlsgd: mind this\n" in shown
    assert shown.endswith("\n")


def test_closed_stream_does_not_end_a_study() -> None:
    stream = io.StringIO()
    lines = progress.ShownProgress(Lines(stream))
    stream.close()
    lines.warn("this goes nowhere")


def test_progress_means_the_same_as_in_a_simulation(tmp_path, faked, capsys) -> None:
    for asked, kind in [(None, "Silent"), (False, "Silent"), (True, "Shown"), (print, "Shared")]:
        found = progress.progress_of(asked, io.StringIO())
        assert type(found).__name__ == f"{kind}Progress"
    assert progress.progress_of(found) is found
    with refused("progress", "type"):
        run(small(), tmp_path, progress="yes")
    shares: list[float] = []
    assert run(small(), tmp_path, progress=shares.append).exit_code == 0
    assert shares == sorted(shares) and len(shares) == 10 and shares[-1] == 1.0
    assert run(small(replications=96), tmp_path, progress=True).exit_code == 0
    assert "cells 2/2, 100%" in capsys.readouterr().err
    assert [duration(x) for x in (3.2, 3723, float("nan"))] == ["0:00:03", "1:02:03", "?"]


def test_tiles_that_are_deleted_during_a_run_are_named_at_its_end(tmp_path, monkeypatch) -> None:
    gone: list[Path] = []

    def delete(cell, first):
        there = sorted(tmp_path.glob("cells/*/tile-*.npz"))
        if first == 64 and there and len(gone) < 3:
            gone.append(there[0])
            there[0].unlink()

    fake_engine(monkeypatch)
    run(small(replications=48), tmp_path, devices=[_Device(0)])
    fake_engine(monkeypatch, delete)
    outcome = run(small(), tmp_path, devices=[_Device(0)])
    assert len(gone) > 0
    assert sorted(outcome.lost) == sorted(str(path.relative_to(tmp_path)) for path in gone)
    assert (outcome.exit_code, outcome.tiles_left) == (1, len(gone))
    said = studies._outcome(outcome, "results")
    assert said.startswith(f"failed: {len(gone)} tile")
    assert outcome.lost[0] in said and "run the same command again" in said
    assert (
        f"end: failed; tiles run 4, to come {len(gone)}, gone {len(gone)}"
        in (tmp_path / "run.log").read_text()
    )
    again = run(small(), tmp_path, devices=[_Device(0)])
    assert (again.exit_code, again.tiles_run, again.lost) == (0, len(gone), ())


def test_lock_that_is_deleted_during_a_run_ends_it(tmp_path, monkeypatch) -> None:
    def delete(cell, first):
        if first == 32:
            (tmp_path / "lock").unlink(missing_ok=True)

    fake_engine(monkeypatch, delete)
    with refused(tmp_path / "lock", "busy", kind=StoreError):
        run(small(), tmp_path, devices=[_Device(0)])
    assert 0 < len(tiles(tmp_path)) < 10
    fake_engine(monkeypatch)
    assert run(small(), tmp_path).exit_code == 0


def test_devices_may_be_a_number(tmp_path, faked) -> None:
    assert machine.chosen(1) == jax.local_devices()[:1] == machine.chosen(jax.local_devices()[:1])
    assert machine.chosen(jax.local_devices()) == jax.local_devices()
    assert run(small(), tmp_path, devices=1).exit_code == 0
    most = len(jax.local_devices())
    for wrong in (0, -1, most + 1):
        with refused("devices", "value", f"from 1 to {most},", f"got {wrong}"):
            run(small(), tmp_path, devices=wrong)
    for wrong in ("cpu", True, 1.5, [], [1], jax.local_devices()[0]):
        with refused("devices", "type"):
            run(small(), tmp_path, devices=wrong)
