"""Studies on Dask: the same bytes, whatever happens to workers and scheduler, and clear refusals."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from cluster_helpers import cli, cluster, ended, kill, script
from study_helpers import (
    LIMIT,
    TOML,
    Held,
    call,
    count,
    environment,
    read_until,
    small,
    tiles,
    wait_until,
)

from jaxlsgd.engine import machine
from jaxlsgd.study.cells import CellSpec
from jaxlsgd.study.jobs import Tile
from jaxlsgd.study.progress import Stop

psutil = pytest.importorskip("psutil")
pytest.importorskip("distributed")

# Many jobs of four tiles; nothing depends on how long one takes.
LONG = TOML.replace("replications = 80", "replications = 320").replace("[40]", "[300, 600]")


@pytest.fixture(scope="module")
def quiet(tmp_path_factory) -> dict[str, bytes]:
    """The tiles of a run in one process."""
    folder = tmp_path_factory.mktemp("quiet")
    (folder / "study.toml").write_text(LONG)
    code, _, err = call("run", folder / "study.toml", "--out", folder / "out", "--quiet")
    assert (code, err) == (0, "")
    return tiles(folder / "out")


@pytest.fixture
def study(tmp_path) -> Path:
    path = tmp_path / "study.toml"
    path.write_text(LONG)
    return path


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def held(tmp_path) -> Held:
    return Held(tmp_path / "held")


def workers_of(process) -> list[psutil.Process]:
    """The worker processes below a runner or a nanny."""
    below = psutil.Process(process.pid).children(recursive=True)
    return [child for child in below if "spawn_main" in " ".join(_arguments(child))]


def _arguments(child: psutil.Process) -> list[str]:
    try:
        return child.cmdline()
    except psutil.Error:
        return []


def test_a_cell_comes_back_from_plain_data() -> None:
    study = small(
        problems=["paper-logistic", {"kind": "linear", "dim": 2, "num_clients": 3, "noise": 2}],
        schedules=["C5", {"family": "custom", "sequence": [1] * 50, "name": "mine"}],
        horizons=[40, {"num_rounds": 30}],
        methods=["plug_in", {"kind": "random_scaling", "mode": "diagonal", "name": "quick"}],
    )
    for cell in study.cells:
        assert CellSpec.read(cell.plain()) == cell
        assert CellSpec.read(cell.plain()).digest == cell.digest


def test_local_workers_killed_again_and_again_give_the_same_bytes(study, out, held, quiet) -> None:
    where = ("--dask", "local", "--devices", 2)
    process = cli("run", study, "--out", out, *where, env=held.environment)
    for jobs in (0, 2, 4):
        held.let(held.begun + jobs)
        # Both workers wait with a job in hand, and one of them is killed.
        wait_until(lambda: held.begun >= held.allowed + 2, process)
        workers_of(process)[0].kill()
    held.open()
    code, text, err = ended(process)
    assert (code, text.split(":")[0]) == (0, "done"), err
    assert "cells 4/4, 100%" in err
    assert "Traceback" not in err
    assert tiles(out) == quiet


def test_interrupted_from_the_terminal_it_drains_and_leaves_no_process(
    study, out, held, quiet
) -> None:
    where = ("--dask", "local", "--devices", 2)
    held.let(1)
    process = cli("run", study, "--out", out, *where, env=held.environment)
    wait_until(lambda: count(out) == 4 and held.begun == 3, process)
    below = workers_of(process)
    for child in psutil.Process(process.pid).children(recursive=True):
        os.kill(child.pid, signal.SIGINT)  # as a terminal does, to all of them
    read_until(process.stderr, "tiles in flight are finished")
    held.open()
    code, text, err = ended(process)
    assert (code, text.split(":")[0]) == (3, "partial"), err
    assert "Traceback" not in err
    assert len(tiles(out)) == 12  # those in flight too, and no more
    assert tiles(out).items() < quiet.items()
    assert not any(child.is_running() for child in below)


def test_a_killed_runner_leaves_no_worker_behind(study, out, held, quiet) -> None:
    where = ("--dask", "local", "--devices", 2)
    held.let(1)
    process = cli("run", study, "--out", out, *where, env=held.environment)
    wait_until(lambda: count(out) == 4 and held.begun == 3, process)
    runner, below = psutil.Process(process.pid).children()[0], workers_of(process)
    runner.kill()
    ended(process)
    held.open()
    assert psutil.wait_procs(below, timeout=LIMIT)[1] == []
    assert tiles(out).items() < quiet.items()


def test_scheduler_killed_and_started_again(study, out, held, quiet) -> None:
    held.let(1)
    with cluster(workers=1, env=held.environment) as made:
        process = cli("run", study, "--out", out, "--dask", made.address, env=held.environment)
        wait_until(lambda: count(out) == 4 and held.begun == 2, process)
        for lost in made.processes:
            kill(lost)
        read_until(process.stderr, "the scheduler is lost; waiting for it")
        made.scheduler()
        made.worker()
        read_until(process.stderr, "the scheduler is back")
        assert count(out) == 4
        held.open()
        code, text, err = ended(process)
    assert (code, text.split(":")[0]) == (0, "done"), err
    assert "Traceback" not in err
    assert tiles(out) == quiet


RUN = """
import sys
from distributed import Client
from jaxlsgd.study import Study
if __name__ == "__main__":
    with Client(sys.argv[1], timeout=600) as client:
        client._timeout = 1  # from here on, so long may a lost scheduler take to come back
        outcome = Study.from_toml(sys.argv[2]).run(sys.argv[3], client=client)
    sys.exit(outcome.exit_code)
"""


def test_scheduler_lost_for_good_ends_partial_and_resumes_without_it(
    study, out, held, quiet
) -> None:
    held.let(1)
    with cluster(workers=1, env=held.environment) as made:
        process = script(RUN, made.address, study, out, env=held.environment)
        wait_until(lambda: count(out) == 4 and held.begun == 2, process)
        kill(made.processes[0])
        code, _, err = ended(process)
    assert code == 3, err
    assert "the scheduler did not come back; what is committed is kept" in err
    kept = {path: path.stat().st_mtime_ns for path in out.glob("cells/*/tile-*.npz")}
    assert len(kept) == 4
    assert call("run", study, "--out", out, "--quiet")[::2] == (0, "")
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in kept.items())
    assert tiles(out) == quiet


POISON = """
import os
from jaxlsgd.study import jobs

# Dask loads this twice, for the nanny and for the worker.
jobs.honest = honest = getattr(jobs, "honest", jobs.run_job)

def poisoned(job, device=None):
    names = [tile.cell.schedule.name for tile in job]
    if job[0].first == 32 and "C1" in names:
        os._exit(9)
    if job[0].first == 64 and "Log" in names:
        raise RuntimeError("poison")
    yield from honest(job, device)

jobs.run_job = poisoned
"""


def test_poisoned_tiles_fail_alone_after_their_retries(tmp_path, study, out, held, quiet) -> None:
    three = LONG.replace("[300, 600]", "[300]").replace('"C1"', '"C1", "Log"')
    study.write_text(three.replace("replications = 320", "replications = 96"))
    (tmp_path / "poison.py").write_text(POISON)
    held.open()
    few = held.environment | {"DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0"}
    with cluster(env=few) as made:
        for _ in range(2):
            made.worker("--preload", str(tmp_path / "poison.py"))
        command = ("run", study, "--out", out, "--dask", made.address)
        code, text, err = ended(cli(*command, env=held.environment))
    assert (code, text.split(":")[0]) == (1, "failed"), err
    told = [line for line in err.split("\n") if "failed and is left out" in line]
    assert len(told) == 2
    assert any("linear-c1-300" in line and "KilledWorker" in line for line in told)
    assert any("linear-log-300" in line and "RuntimeError: poison" in line for line in told)
    found = tiles(out)
    assert sum("p-1-2" in name for name in found) == 6  # all of the third cell
    assert not any("c1" in name and "000000032" in name for name in found)
    assert not any("log" in name and "000000064" in name for name in found)
    assert {name for name in found if "log" not in name} <= set(quiet)
    assert all(quiet[name] == content for name, content in found.items() if "log" not in name)


ANOTHER = """
from jaxlsgd.engine import machine
machine.version = lambda: "9.9"
"""


def test_workers_of_another_version_are_refused_before_anything_is_written(
    tmp_path, study, out, held
) -> None:
    (tmp_path / "another.py").write_text(ANOTHER)
    with cluster() as made:
        made.worker("--preload", str(tmp_path / "another.py"))
        command = ("run", study, "--out", out, "--dask", made.address)
        code, text, err = ended(cli(*command, env=held.environment))
    assert (code, text) == (2, "")
    last = err.strip().split("\n")[-1]
    assert last.startswith("jaxlsgd: error: the worker tcp://127.0.0.1:")
    assert "is refused: jaxlsgd '9.9' is not " in last
    assert "all workers need the versions of this process" in last
    assert not out.exists()


def test_workers_without_the_package_are_told_apart(tmp_path, study, out, held) -> None:
    # As if it were not installed, wherever the tests run.
    (tmp_path / "jaxlsgd.py").write_text("raise ModuleNotFoundError(\"No module named 'jaxlsgd'\")")
    with cluster() as made:
        made.worker(env=environment() | {"PYTHONPATH": str(tmp_path)}, cwd="/")
        command = ("run", study, "--out", out, "--dask", made.address)
        code, text, err = ended(cli(*command, env=held.environment))
    assert (code, text) == (2, "")
    assert "No module named 'jaxlsgd'" in err
    assert err.strip().endswith("install jaxlsgd there")
    assert not out.exists()


def test_other_xla_flags_that_join_later_end_the_run_with_a_word(study, out, held, quiet) -> None:
    held.let(1)
    with cluster(workers=1, env=held.environment) as made:
        process = cli("run", study, "--out", out, "--dask", made.address, env=held.environment)
        wait_until(lambda: count(out) == 4 and held.begun == 2, process)
        made.worker(env=held.environment | {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"})
        code, text, err = ended(process)  # the first worker is held until then
    assert (code, text.split(":")[0]) == (3, "partial"), err
    assert "the worker that joined later is refused: xla_flags" in err
    assert len(tiles(out)) == 4
    assert tiles(out).items() <= quiet.items()


def test_nobody_listens(study, out) -> None:
    code, _, err = call("run", study, "--out", out, "--dask", "tcp://127.0.0.1:9")
    assert code == 2
    assert "where none answers" in err
    assert err.count("\n") == 1
    code, _, err = call("run", study, "--out", out, "--dask", "scheduler")
    assert (code, err.count("\n")) == (2, 1)
    assert "tcp://" in err
    assert not out.exists()


def test_without_dask_the_way_to_get_it_is_told(tmp_path, study, out) -> None:
    (tmp_path / "distributed.py").write_text("raise ImportError('not here')")
    paths = f"{tmp_path}:{environment()['PYTHONPATH']}"
    code, _, err = call(
        "run", study, "--out", out, "--dask", "local", env=environment() | {"PYTHONPATH": paths}
    )
    assert code == 2
    assert err == "jaxlsgd: error: --dask needs Dask: pip install 'jaxlsgd[cluster]'\n"
    assert not out.exists()


def test_code_tells_one_source_from_another(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(machine, "PACKAGE", tmp_path)
    first = machine.code()
    (tmp_path / "more.py").write_text("x = 1")
    second = machine.code()
    assert second != first
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "more.py").write_text("x = 1")
    assert machine.code() == second  # what only reads rows changes none


def test_a_worker_that_dask_pauses_is_named_once_and_again_when_it_goes_on() -> None:
    from distributed import Client, LocalCluster, Status

    from jaxlsgd.study.executors.dask import _Workers

    said: list[str] = []
    place = {"dashboard_address": ":0", "host": "127.0.0.1", "protocol": "tcp"}
    with (
        # Without a limit, so that nobody but this test changes a worker's status.
        LocalCluster(1, threads_per_worker=1, processes=False, memory_limit=0, **place) as cluster,
        Client(cluster) as client,
    ):
        worker = cluster.workers[0]
        workers = _Workers(client, said.append)

        def turn(status: Status) -> None:
            worker.status = status
            deadline = time.monotonic() + LIMIT
            while client.scheduler_info()["workers"][worker.address]["status"] != status.name:
                assert time.monotonic() < deadline
                time.sleep(0.01)

        workers.look()
        assert (workers.threads, said) == (1, [])
        turn(Status.paused)
        workers.look()
        workers.look()
        assert len(said) == 1
        assert said[0].startswith(f"the worker {worker.address} is paused by Dask, for memory")
        turn(Status.running)
        workers.look()
        workers.look()
        assert said[1:] == [f"the worker {worker.address} goes on"]


class _FakeCluster:
    """A scheduler's words."""

    def __init__(self) -> None:
        self.workers = {"tcp://a:1": {"nthreads": 2, "status": "running"}}

    def scheduler_info(self, n_workers: int) -> dict:
        return {"workers": self.workers}


def test_the_memory_of_a_paused_worker_is_told() -> None:
    from jaxlsgd.study.executors.dask import _Workers

    said, cluster = [], _FakeCluster()
    workers = _Workers(cluster, said.append)
    workers.look()
    about = {"metrics": {"memory": 1_900_000_000}, "memory_limit": 2_000_000_000}
    cluster.workers["tcp://a:1"] |= about | {"status": "paused"}
    workers.look()
    assert "uses 1,900 MB of the 2,000 MB that it may; it begins no job until" in said[0]
    cluster.workers.clear()
    workers.look()
    assert said[1:] == ["no worker is left; waiting for one"]
    assert not workers.given_up  # other clusters may grow when they like


def test_a_local_cluster_without_workers_ends_a_run(monkeypatch) -> None:
    from distributed import Client, LocalCluster

    from jaxlsgd.study.executors import dask

    monkeypatch.setattr(dask, "_PATIENCE", 0.2)
    monkeypatch.setattr(dask, "_LOOK", 0.02)
    said: list[str] = []
    place = {"dashboard_address": ":0", "host": "127.0.0.1", "protocol": "tcp"}
    with LocalCluster(n_workers=0, processes=False, **place) as cluster, Client(cluster) as client:
        with pytest.raises(dask.WorkerError, match="again"):
            dask.environment(client, Stop(), said.append)
        jobs = [(Tile(small().cells[0], 0),)]
        assert set(dask.Dask(client, {}, said.append).run(jobs, Stop())) == {None}
    assert said[0] == "the cluster has no workers yet; waiting for the first"
    assert len(said) == 2 and said[1].endswith("the same command goes on from there")


def test_a_worker_that_does_not_start_is_no_riddle(monkeypatch) -> None:
    from jaxlsgd.study.executors import dask

    def dead(**options: object) -> None:
        raise RuntimeError("Nanny failed to start.")

    monkeypatch.setattr("distributed.LocalCluster", dead)
    with pytest.raises(dask.WorkerError) as caught, dask.connected("local", 1):
        pass
    assert all(word in str(caught.value) for word in ("Nanny failed to start", "--devices"))
