"""What an installation gives, from a checkout or as a wheel, and where Python finds it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from study_helpers import ROOT

import jaxlsgd


def run(code: str, cwd: Path) -> str:
    """Runs code in a directory; returns what it prints."""
    command = [sys.executable, "-c", f"import pathlib, site, sys; {code}"]
    done = subprocess.run(command, cwd=cwd, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A folder of the package's own name with what is built from; nothing is written to the real one."""
    pytest.importorskip("setuptools", minversion="77")
    made = tmp_path_factory.mktemp("parent") / "jaxlsgd"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "jaxlsgd", made / "jaxlsgd", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "CHANGELOG.md"):
        shutil.copy(ROOT / name, made)
    (made / "tests").mkdir()
    (made / "tests" / "test_one.py").write_text("import helpers")  # needs a file that is not there
    return made


def made(clone: Path, kind: str) -> Path:
    """Builds by the backend that pip calls; returns the file."""
    out = clone.parent / kind
    out.mkdir()
    name = run(
        f"from setuptools import build_meta; print(build_meta.build_{kind}({str(out)!r}))", clone
    )
    return out / name.split()[-1]


def built(clone: Path, kind: str) -> Path:
    """Builds; returns a directory with the contents of the wheel."""
    path = made(clone, kind)
    with zipfile.ZipFile(path) as wheel:
        wheel.extractall(path.parent / "site")
    return path.parent / "site"


def test_a_source_distribution_has_the_package_and_no_tests_that_cannot_run(clone) -> None:
    with tarfile.open(made(clone, "sdist")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    package = {str(path.relative_to(clone)) for path in clone.rglob("jaxlsgd/**/*.*")}
    assert package and package <= names
    assert {"pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md"} <= names
    assert not any(name.startswith("tests") for name in names)


def test_a_wheel_has_all_files_of_the_package_and_the_command(clone) -> None:
    place = built(clone, "wheel")
    package = clone / "jaxlsgd"
    files = {str(path.relative_to(package)) for path in package.rglob("*") if path.is_file()}
    there = {str(path.relative_to(place / "jaxlsgd")) for path in place.rglob("jaxlsgd/**/*.*")}
    assert files <= there, sorted(files - there)[:5]
    assert {path.name for path in place.iterdir()} == {
        "jaxlsgd",
        f"jaxlsgd-{jaxlsgd.__version__}.dist-info",
    }
    (points,) = place.glob("*.dist-info/entry_points.txt")
    assert "jaxlsgd = jaxlsgd.cli:main" in points.read_text()
    code = f"sys.path.insert(0, {str(place)!r}); import jaxlsgd.cli; print(jaxlsgd.__file__); "
    found = run(f"{code}jaxlsgd.cli.main(['init', 'first.toml'])", clone.parent)
    assert Path(found.splitlines()[0]).is_relative_to(place)
    assert "next: jaxlsgd plan first.toml" in found
    assert (clone.parent / "first.toml").is_file()


def test_an_editable_install_is_found_in_the_parent_of_the_clone(clone) -> None:
    place = built(clone, "editable")
    assert not list(
        place.glob("*.py")
    )  # an import hook, which a folder of the same name would precede
    # What this Python has of the package already is put out of the way.
    code = "sys.meta_path[:] = [x for x in sys.meta_path if 'ditable' not in repr(x)]; "
    code += "sys.path[:] = [x for x in sys.path if not pathlib.Path(x, 'jaxlsgd/__init__.py').exists()]; "
    code += f"site.addsitedir({str(place)!r}); import jaxlsgd; print(sys.path[0], jaxlsgd.__file__)"
    first, _, found = run(code, clone.parent).rpartition(" ")
    assert first == ""  # the parent directory itself
    assert Path(found) == clone / "jaxlsgd" / "__init__.py"


def test_the_command_line_of_a_clone_needs_nothing_before(tmp_path) -> None:
    clone, elsewhere = tmp_path / "a clone", tmp_path / "elsewhere"
    (clone / "scripts").mkdir(parents=True)
    (clone / ".venv" / "bin").mkdir(parents=True)
    elsewhere.mkdir()
    for name in ("scripts/jaxlsgd", "scripts/environment", "pyproject.toml"):
        shutil.copy(ROOT / name, clone / name)
    python = clone / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    stamp = subprocess.check_output(["cksum"], input=(clone / "pyproject.toml").read_bytes())
    (clone / ".venv" / "installed-dev").write_bytes(stamp)
    command = [str(clone / "scripts" / "jaxlsgd"), "init", "mine.toml"]
    done = subprocess.run(
        command,
        cwd=elsewhere,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
        capture_output=True,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert (elsewhere / "mine.toml").is_file()
    assert f"next: {clone}/scripts/jaxlsgd plan mine.toml" in done.stdout
