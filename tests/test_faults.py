"""Faults, for real: processes that are killed, disks that fill up, clocks that jump."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_helpers import cli, ended, limited, script
from study_helpers import (
    CACHE,
    ROOT,
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
from test_store import ENVIRONMENT, fill

from jaxlsgd.study import Results
from jaxlsgd.study.store.writer import Writer

MANY = TOML.replace("replications = 80", "replications = 480")


@pytest.fixture(scope="module")
def quiet(tmp_path_factory) -> dict[str, bytes]:
    """The tiles of a run that nothing happens to."""
    folder = tmp_path_factory.mktemp("quiet")
    (folder / "study.toml").write_text(MANY)
    code, _, err = call("run", folder / "study.toml", "--out", folder / "out", "--quiet")
    assert (code, err) == (0, "")
    return tiles(folder / "out")


@pytest.fixture
def study(tmp_path) -> Path:
    path = tmp_path / "study.toml"
    path.write_text(MANY)
    return path


# Kills itself at a chosen call of a function of `os`, while it writes tiles that cost nothing.
SUICIDE = """
import os, signal, sys
sys.path.insert(0, sys.argv[4])
from pathlib import Path
from study_helpers import small
from test_store import fill
name, left = sys.argv[2], int(sys.argv[3])
honest = getattr(os, name)

def last(*arguments):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    return honest(*arguments)

setattr(os, name, last)
fill(Path(sys.argv[1]), small())
"""


@pytest.mark.parametrize("call_of", ["replace", "fsync"])
@pytest.mark.parametrize("number", [1, 2, 3, 6, 11])
def test_writer_killed_at_any_step_of_a_commit(tmp_path, call_of, number) -> None:
    out = tmp_path / "out"
    code, _, err = ended(script(SUICIDE, out, call_of, number, ROOT / "tests"))
    assert code in (-9, 137), err
    fill(tmp_path / "whole", small())
    whole = tiles(tmp_path / "whole")
    before = tiles(out)
    assert before.items() <= whole.items()
    if (out / "manifest.json").exists():
        assert Results(out).manifest["digest"] == small().digest
    fill(out, small())
    assert tiles(out) == whole
    assert not [name for name in os.listdir(out) if name.startswith(".")]
    assert not list(out.glob("cells/*/.*"))


def in_own_mounts(text: str, env: dict[str, str]) -> subprocess.Popen[str]:
    """A shell that may mount, seen by nobody else; the test is skipped where that is not allowed."""
    unshare = shutil.which("unshare")
    if (
        not unshare
        or subprocess.run(
            [unshare, "-rm", "mount", "-t", "tmpfs", "none", "/mnt"],
            capture_output=True,
            check=False,
        ).returncode
    ):
        pytest.skip("no mounts of our own here")
    caches = {"PYTHONDONTWRITEBYTECODE": "1", "JAX_COMPILATION_CACHE_DIR": str(CACHE / "jaxlsgd")}
    return limited([unshare, "-rm", "bash", "-c", text], env=env | caches)


def shell_run(study: Path, out: Path) -> str:
    return shlex.join([sys.executable, "-m", "jaxlsgd.cli", "run", str(study), "--out", str(out)])


def test_disk_that_fills_up_and_is_given_room(tmp_path, study, quiet) -> None:
    out, kept = tmp_path / "out", tmp_path / "kept"
    out.mkdir()
    run = f"{shell_run(study, out / 'study')} --quiet"
    # With its source named, a mount is changed as asked, without the options that it has so far: an ordinary user
    # may not repeat all of them.
    code, text, err = ended(
        in_own_mounts(
            f"out={shlex.quote(str(out))} kept={shlex.quote(str(kept))}\n"
            f'mount -t tmpfs -o size=400k none "$out" && {run}; echo code $?\n'
            'cp -r "$out/study" "$kept"; mount -o remount,size=100m none "$out"\n'
            f'{run}; echo code $?; cp -r "$out/study/." "${{kept}}2"',
            environment(),
        )
    )
    assert code == 0, err
    assert [line for line in text.split("\n") if line.startswith("code")] == ["code 1", "code 0"]
    last = err.strip().split("\n")[-1]
    assert last.startswith("jaxlsgd: error: cannot write")
    assert "No space left on device; free some space and run the same command again" in last
    assert 0 < len(tiles(kept)) < len(quiet)
    assert tiles(kept).items() < quiet.items()
    assert not list(kept.glob("cells/*/.*"))
    assert tiles(tmp_path / "kept2") == quiet


OUTPUTS = {
    "csv": ("export", "OUT", "--format", "csv", "-o", "DISK/rows.csv"),
    "parquet": ("export", "OUT", "-o", "DISK/rows.parquet"),
    "netcdf": ("export", "OUT", "--format", "netcdf", "-o", "DISK/rows.nc"),
    "page": ("report", "OUT", "-o", "DISK/report.html"),
    "figures": ("plot", "OUT", "--out", "DISK"),
    "print": ("plot", "OUT", "--figure", "coverage", "--out", "DISK"),
}


def test_disk_that_has_no_room_for_outputs(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    fill(tmp_path / "out", small())
    disk, names = tmp_path / "disk", {"OUT": str(tmp_path / "out")}
    disk.mkdir()
    lines = [
        shlex.join(
            names.get(word, word).replace("DISK", str(disk))
            for word in (sys.executable, "-m", "jaxlsgd.cli", *arguments)
        )
        for arguments in OUTPUTS.values()
    ]
    tests = [f'{line}; echo code $?; ls -A "$disk"' for line in lines]
    text = f"disk={shlex.quote(str(disk))}\nmount -t tmpfs -o size=4k none $disk\n"
    code, out, err = ended(in_own_mounts(text + "\n".join(tests), environment()))
    assert (code, out) == (0, "code 1\n" * len(tests)), err
    errors = err.strip().split("\n")
    for line, arguments in zip(errors, OUTPUTS.values(), strict=True):
        path = f"{disk}/{arguments[-1].removeprefix('DISK').removeprefix('/')}"
        assert line.startswith((f"jaxlsgd: error: {path}", f"jaxlsgd: error: cannot write {path}"))
        assert line.endswith(
            ": No space left on device; free some space and run the same command again"
        )


def test_directory_that_turns_read_only_under_a_run(tmp_path, study, quiet) -> None:
    out, cells, held = tmp_path / "out", tmp_path / "out" / "cells", Held(tmp_path / "held")
    held.let(1)
    # One job of two tiles is done, and the next ones wait, while the mount is made.
    code, text, err = ended(
        in_own_mounts(
            f"cells={shlex.quote(str(cells))} held={shlex.quote(str(held.folder))}\n"
            f"{shell_run(study, out)} --quiet & run=$!\n"
            'until [ $(ls "$cells"/*/tile-* 2>/dev/null | wc -l) = 2 ]; do\n'
            "  kill -0 $run || exit 1; sleep 0.05; done\n"
            'mount --bind "$cells" "$cells" && mount -o remount,ro,bind "$cells"\n'
            'echo 1000000 > "$held/new" && mv "$held/new" "$held/let"\n'
            "wait $run; echo code $?",
            held.environment,
        )
    )
    assert code == 0, err
    assert "code 1" in text, (text, err)
    last = err.strip().split("\n")[-1]
    assert last.startswith("jaxlsgd: error: cannot write")
    assert "Read-only file system; choose a directory that you may write to" in last
    assert len(tiles(out)) == 2
    assert tiles(out).items() < quiet.items()


# The wall clock jumps by up to a century at every look; the time since the start does not.
JUMPING = """
import itertools, sys, time
jumps = itertools.cycle([0.0, 4e9, 1.0, 2e9])
time.time = lambda: next(jumps)
time.time_ns = lambda: int(next(jumps) * 1e9)
from jaxlsgd.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_clock_that_jumps(tmp_path, study, quiet) -> None:
    out, held = tmp_path / "out", Held(tmp_path / "held")
    run = ("run", study, "--out", out)
    held.let(3)
    process = script(JUMPING, *run, "--max-time", "10h", env=held.environment)
    wait_until(lambda: count(out) == 6, process)
    process.terminate()  # the time limit's process, which hands it on
    read_until(process.stderr, "tiles in flight are finished")
    held.open()
    code, _, err = ended(process)
    assert code in (3, 143, -15), err
    stamps = {}
    for i, path in enumerate(sorted(out.rglob("*"))):
        os.utime(path, (0, 0) if i % 2 else (4e9, 4e9))
    for path in out.glob("cells/*/tile-*"):
        stamps[path] = path.stat().st_mtime_ns
    code, text, err = ended(script(JUMPING, *run))
    assert (code, text.split(":")[0]) == (0, "done"), err
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())
    assert tiles(out) == quiet


def test_second_process_is_told_who_writes(tmp_path, study) -> None:
    out = tmp_path / "out"
    # The lock is held until the second process has ended, so that one that waited would not end.
    with Writer(out, small(replications=480), ENVIRONMENT):
        code, _, err = ended(cli("run", study, "--out", out, "--quiet"))
    assert code == 1
    assert f"is being written by another run (process {os.getpid()} on " in err
    assert tiles(out) == {}


def test_short_soak() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "soak"), "--faults", "3", "--seed", "7"]
    code, text, err = ended(limited(command))
    assert code == 0, text + err
    for line in ("committed tiles lost: 0", "committed tiles computed again: 0", "wrong rows: 0"):
        assert line in text
    assert "that of the quiet run" in text
