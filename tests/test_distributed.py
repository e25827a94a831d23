"""Several real processes as one run, on loopback; none of them can hang the tests."""

from __future__ import annotations

import os
import signal
import subprocess
import textwrap
from pathlib import Path
from typing import NamedTuple

import jax
import mesh_cases
import numpy as np
import processes
import pytest
from mesh_cases import FIELDS, JOINED_CASES
from refusals import refused
from test_mesh import check_distance

from jaxlsgd import algorithms, plug_in, problems
from jaxlsgd.core.checks import Code
from jaxlsgd.engine import distributed
from jaxlsgd.runs.cell import Cell
from jaxlsgd.runs.simulate import _digest


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, np.ndarray]]:
    """What two processes have found, on meshes of both their devices."""
    out = tmp_path_factory.mktemp("distributed") / "rows"
    arguments = [mesh_cases.__file__, out, *JOINED_CASES]
    for ended in processes.run_together(arguments, count=2, devices=1, limit=180):
        assert ended.code == 0, ended.output
    return [dict(np.load(f"{out}-{number}.npz", allow_pickle=False)) for number in range(2)]


def test_every_process_has_all_rows(found: list[dict[str, np.ndarray]]):
    paths = [path for path in found[0] if "/mesh/" in path]
    assert len(paths) == len(FIELDS) * sum(len(case.methods) for case in JOINED_CASES.values())
    for path in paths:
        assert found[0][path].tobytes() == found[1][path].tobytes(), path


def test_replications_on_two_processes_do_not_change_a_bit(found: list[dict[str, np.ndarray]]):
    for method in JOINED_CASES["joined, replications"].methods:
        for field in FIELDS:
            where = f"{method.name}/{field}"
            alone = found[0][f"joined, replications/alone/{where}"]
            assert alone.tobytes() == found[0][f"joined, replications/mesh/{where}"].tobytes(), (
                where
            )


def test_clients_on_two_processes_keep_to_the_stated_distance(found: list[dict[str, np.ndarray]]):
    check_distance(found[0], "joined, clients")


def script(path: Path, code: str) -> Path:
    """A script that joins the others and goes on with `code`."""
    start = """\
        import time
        import jax
        import mesh_cases
        from jaxlsgd.engine import distributed
        distributed.start(timeout=30, heartbeat=3)
        case = mesh_cases.CASES["four devices"]
        number = jax.process_index()
    """
    path.write_text(textwrap.dedent(start) + textwrap.dedent(code))
    return path


def test_processes_that_ask_for_different_things_are_refused(tmp_path: Path):
    code = """\
        case = case._replace(schedule=["C1", "C5"][number])
        mesh_cases.rows(case, mesh=mesh_cases.mesh({"replications": 2}))
    """
    arguments = [script(tmp_path / "differ.py", code)]
    for number, ended in enumerate(processes.run_together(arguments, 2, 1, limit=60)):
        assert ended.code == 1, ended.output
        told = f"process {number} differs from processes [{1 - number}]"
        assert told in ended.output and "same call" in ended.output


def test_what_processes_must_agree_on():
    case = mesh_cases.CASES["four devices"]
    problem, plan, mesh = (
        mesh_cases.problem(case),
        mesh_cases.plan(case),
        mesh_cases.mesh({"clients": 2}),
    )
    cells = [
        Cell(problem, plan, case.methods),
        Cell(problem, plan.prefix(9), case.methods),
        Cell(problem, plan, (plug_in(),)),
        Cell(problem, plan, case.methods, levels=(0.9,)),
        Cell(problem, plan, case.methods, save_at=(3,)),
        Cell(problem, plan, case.methods, dtype="float64"),
        Cell(problem, plan, case.methods, algorithm=algorithms.fedprox(0.1)),
        Cell(problems.linear(3, 4), plan, case.methods),
    ]
    keys = [jax.random.key(seed) for seed in range(2)]
    digests = [_digest(keys[0], cell, 4, 2, mesh) for cell in cells]
    digests += [_digest(keys[1], cells[0], 4, 2, mesh), _digest(keys[0], cells[0], 5, 2, mesh)]
    assert len(set(map(repr, digests))) == len(digests)
    assert _digest(keys[0], cells[0], 4, 2, mesh) == digests[0]


class _Device(NamedTuple):
    process_index: int


@pytest.mark.parametrize(
    "owners, spans", [((1,), False), ((1, 1), False), ((0, 1, 2), True), ((2, 1, 0, 1), True)]
)
def test_whose_devices_a_mesh_has(
    monkeypatch: pytest.MonkeyPatch, owners: tuple[int, ...], spans: bool
):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    assert distributed.spans([_Device(owner) for owner in owners]) is spans


@pytest.mark.parametrize("owners", [(0,), (0, 1), (0, 2)])
def test_a_mesh_of_some_processes_only_is_refused(
    monkeypatch: pytest.MonkeyPatch, owners: tuple[int, ...]
):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    with refused("mesh"):
        distributed.spans([_Device(owner) for owner in owners])


def test_a_killed_process_ends_the_others(tmp_path: Path):
    """They wait for its rows, but not for ever."""
    code = """\
        assert distributed.share({number: b"here"}, [0, 1]) == [b"here", b"here"]
        print("ready", flush=True)
        if number:
            time.sleep(1000)
        mesh_cases.rows(case, mesh=mesh_cases.mesh({"replications": 2}))
        print("done", flush=True)
    """
    path = script(tmp_path / "killed.py", code)
    first, second = (
        processes.start([path], processes.environment(1, **meeting))
        for meeting in processes.meetings(2)
    )
    try:
        assert second.stdout is not None
        assert any("ready" in line for line in second.stdout)
    finally:
        os.killpg(second.pid, signal.SIGKILL)
        second.communicate()
    ended = processes.end(first, limit=60)
    assert ended.code not in (None, 0), ended.output
    assert "another process has ended or cannot be reached" in ended.output
    assert "done" not in ended.output


def slurm(count: int) -> list[dict[str, str]]:
    """What SLURM sets for so many tasks on one node, and a port that is free here."""
    port = processes.meetings(1)[0][distributed.ADDRESS].rpartition(":")[2]
    common = {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": str(count)}
    return [
        common | {"SLURM_PROCID": str(n), "SLURM_LOCALID": str(n), "JAX_COORDINATOR_PORT": port}
        for n in range(count)
    ]


def test_settings_of_slurm_are_enough(tmp_path: Path):
    code = """\
        print(distributed.share({number: str(number).encode()}, [0, 1]), jax.device_count())
    """
    path = script(tmp_path / "slurm.py", code)
    started = [processes.start([path], processes.environment(1, **task)) for task in slurm(2)]
    for process in started:
        ended = processes.end(process, limit=60)
        assert ended.code == 0, ended.output
        assert "[b'0', b'1'] 2" in ended.output


def start_alone(**environment: str) -> subprocess.Popen[str]:
    code = "from jaxlsgd import distributed; distributed.start(timeout=2)"
    return processes.start(["-c", code], processes.environment(1, **environment))


def test_nobody_there():
    # The coordinator of one meeting and a guest of another.
    alone = [processes.meetings(2)[number] for number in range(2)]
    started = [start_alone(**meeting) for meeting in alone]
    for meeting, process in zip(alone, started, strict=True):
        ended = processes.end(process, limit=60)
        assert ended.code == 1, ended.output
        assert "not all processes had joined after 2 s" in ended.output
        assert meeting["JAX_COORDINATOR_ADDRESS"] in ended.output


def test_no_settings():
    ended = processes.end(start_alone(), limit=60)
    assert ended.code == 1
    assert "set JAX_COORDINATOR_ADDRESS=host:port" in ended.output


WRONG = {
    "no address": (
        {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"},
        ("JAX_COORDINATOR_ADDRESS", "missing"),
    ),
    "no number": (
        {"JAX_NUM_PROCESSES": "2", "JAX_COORDINATOR_ADDRESS": "a:1"},
        ("JAX_PROCESS_ID", "missing"),
    ),
    "no port": (
        {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0", "JAX_COORDINATOR_ADDRESS": "a"},
        ("JAX_COORDINATOR_ADDRESS", "value"),
    ),
    "number too high": (
        {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2", "JAX_COORDINATOR_ADDRESS": "a:1"},
        ("JAX_PROCESS_ID", "value"),
    ),
    "no integer": (
        {"JAX_NUM_PROCESSES": "two", "JAX_PROCESS_ID": "0", "JAX_COORDINATOR_ADDRESS": "a:1"},
        ("JAX_NUM_PROCESSES and JAX_PROCESS_ID", "type"),
    ),
}


@pytest.mark.parametrize(("settings", "why"), WRONG.values(), ids=WRONG)
def test_wrong_settings_are_refused(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], why: tuple[str, Code]
):
    for name in (distributed.ADDRESS, distributed.COUNT, distributed.NUMBER):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with refused(*why):
        distributed.start()


def test_wrong_limits_are_refused():
    with refused("timeout"):
        distributed.start(timeout=0)
    with refused("heartbeat", "type"):
        distributed.start(heartbeat=1.5)  # pyright: ignore[reportArgumentType]


def test_a_process_that_hangs_is_killed():
    """The tests' own safety: SIGKILL, and nothing is left behind."""
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"
    process = processes.start(["-c", code], processes.environment(1))
    ended = processes.end(process, limit=1)
    assert ended.code is None and process.returncode == -signal.SIGKILL
