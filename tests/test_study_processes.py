"""A study on two real processes that JAX has joined: the same bytes, one writer, no hanging."""

from __future__ import annotations

from pathlib import Path

import processes
import pytest
from refusals import refused
from study_helpers import LIMIT, small, tiles
from study_helpers import TOML as BOTH

from jaxlsgd.study.store.writer import Writer

RUN = ("-m", "jaxlsgd.cli", "run")
# One cheap method: each process compiles for itself.
TOML = BOTH.replace(
    '["plug_in", "random_scaling"]', '[{kind = "random_scaling", mode = "diagonal"}]'
)


@pytest.fixture(scope="module")
def quiet_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The tiles of one process."""
    out = tmp_path_factory.mktemp("one") / "results"
    study = out.with_name("study.toml")
    study.write_text(TOML)
    ended = processes.run([*RUN, study, "--out", out, "--quiet"], processes.environment(2), LIMIT)
    assert ended.code == 0, ended.output
    return tiles(out)


def run_two(tmp_path: Path, *options: str) -> list[processes.Ended]:
    """Two processes, the second of which has another directory, to see that it leaves it alone."""
    study = tmp_path / "study.toml"
    study.write_text(TOML)
    started = [
        processes.start(
            [*RUN, study, "--out", tmp_path / out, "--distributed", *options],
            processes.environment(1, **meeting),
        )
        for out, meeting in zip(("results", "untouched"), processes.meetings(2), strict=True)
    ]
    return [processes.end(process, LIMIT) for process in started]


def test_two_processes_write_the_bytes_of_one(tmp_path: Path, quiet_run: dict[str, bytes]):
    """Begun, stopped before its first wave, and extended."""
    first, second = run_two(tmp_path, "--replications", "32")
    assert (first.code, second.code) == (0, 0), first.output + second.output
    begun = tiles(tmp_path / "results")
    assert len(begun) == 4
    first, second = run_two(tmp_path, "--max-time", "0s")
    assert (first.code, second.code) == (3, 0), first.output + second.output
    assert tiles(tmp_path / "results") == begun
    first, second = run_two(tmp_path)
    assert (first.code, second.code) == (0, 0), first.output + second.output
    assert f"done: {len(quiet_run) - len(begun)} tiles" in first.output
    assert "done" not in second.output
    assert tiles(tmp_path / "results") == quiet_run
    assert not (tmp_path / "untouched").exists()


def test_a_refused_directory_lets_all_processes_go(tmp_path: Path):
    with Writer(tmp_path / "results", small(seed=7), {}):
        pass
    first, second = run_two(tmp_path)
    assert first.code == 1 and "seed: 7 → 0" in first.output
    assert second.code == 0, second.output


def test_a_run_without_others_is_refused(tmp_path: Path):
    study = tmp_path / "study.toml"
    study.write_text(TOML)
    command = [*RUN, study, "--out", tmp_path / "results", "--distributed"]
    ended = processes.run(command, processes.environment(1), LIMIT)
    assert ended.code == 2 and "JAX_COORDINATOR_ADDRESS" in ended.output
    ended = processes.run([*command, "--dask", "local"], processes.environment(1), LIMIT)
    assert ended.code == 2 and "--distributed: must not be given with --dask" in ended.output
    assert not (tmp_path / "results").exists()


def test_a_client_and_other_processes_at_once_are_refused(tmp_path: Path):
    with refused("client", "unwanted"):
        small().run(tmp_path / "results", client=object(), distributed=True)
