"""The documentation: every public name has a place, pages need no network, and notebooks run.

`scripts/docs` builds all of it and `scripts/test` checks all of it, strictly; here one small page goes through the same
settings.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import pytest

import jaxlsgd

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "scripts" / "reference"
NOTEBOOKS = sorted((ROOT / "scripts" / "notebooks").glob("*.ipynb"))
SCRIPTS = ("docs", "study", "test", "test_lowest", "test_places")
PAGE = """\
# Small

The mean $\\bar y$ and

$$
\\sqrt{T} (\\bar y - x^*).
$$

```{eval-rst}
.. autofunction:: jaxlsgd.problems.linear
.. autoclass:: jaxlsgd.problems.Solution
.. automodule:: jaxlsgd.inference.rivals.hulc
```
"""


def public_modules() -> list[str]:
    """Return the package, the modules among its public names, and those among theirs."""
    found = ["jaxlsgd"]
    for name in found:
        module = importlib.import_module(name)
        values = [getattr(module, public) for public in getattr(module, "__all__", ())]
        modules = [value.__name__ for value in values if isinstance(value, types.ModuleType)]
        found += [other for other in modules if other not in found]
    return found


def test_every_public_name_has_a_place() -> None:
    pages = {path: path.read_text("utf-8") for path in (REFERENCE / "api").glob("*.md")}
    given = re.findall(
        r"automodule:: (\S+)(?:\n +:exclude-members: (.+))?", "\n".join(pages.values())
    )
    assert sorted(name for name, _ in given) == sorted(public_modules())
    elsewhere = {*jaxlsgd.__all__, *jaxlsgd.measures.__all__, *jaxlsgd.report.page.__all__}
    for module, excluded in given:  # what is left out here has its place there
        names = excluded.split(", ") if excluded else []
        assert elsewhere >= {*names}, module
    contents = (REFERENCE / "index.md").read_text("utf-8")
    for page in pages:
        assert f"\napi/{page.stem}\n" in contents
    for page in [*(ROOT / "scripts" / "guides").glob("*.md"), *NOTEBOOKS]:
        assert f"\n../{page.parent.name}/{page.stem}\n" in contents


def test_pages_show_docstrings_as_they_are_written_and_need_no_network(tmp_path: Path) -> None:
    for package in ("sphinx", "furo", "myst_nb", "latex2mathml"):
        pytest.importorskip(package)
    source, out = tmp_path / "scripts" / "reference", tmp_path / "out"
    source.mkdir(parents=True)
    (source / "index.md").write_text(PAGE, encoding="utf-8")
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-c", REFERENCE, tmp_path, out]
    settings = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "url=scripts/reference/index.html" in (out / "index.html").read_text("utf-8")
    html = (out / "scripts" / "reference" / "index.html").read_text("utf-8")
    assert html.count("<math ") == 2 and "\\bar" not in html
    loaded = re.findall(
        r"<(?:script|img|iframe)[^>]* src=\"([^\"]+)|<link[^>]* href=\"([^\"]+)", html
    )
    assert loaded and not [link for link in loaded if "//" in "".join(link)]
    for path in (out / "_static").rglob("*.css"):
        assert not re.search(r"@import|url\(\s*['\"]?(https?:)?//", path.read_text("utf-8")), path
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", html))
    assert "weights: ArrayLike | None = None" in text  # as it is written
    assert "(d,) Monte-Carlo standard error of the truth" in text  # the comment beside a field
    assert "largest ∣gradient∣ of the sample" in text
    formula = re.search(
        r"<pre>(?:(?!</pre>).)*x\* = Σ_k p_k x\*_k(?:(?!</pre>).)*</pre>",
        re.sub(r"</?span[^>]*>", "", html),
        re.S,
    )
    assert formula  # an indented formula stays in its lines
    assert "::" not in text and "Alias for field" not in text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run_and_are_kept_without_outputs(
    path: Path, tmp_path: Path, monkeypatch
) -> None:
    for package in ("matplotlib", "pandas"):
        pytest.importorskip(package)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
            tree = ast.parse("".join(cell["source"]))
            last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, path.name, "exec"), names)
            if isinstance(last, ast.Expr):  # a notebook shows it
                value = eval(compile(ast.Expression(last.value), path.name, "eval"), names)
                assert value is None or repr(value) or value._repr_html_()


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_of_the_scripts_installs_nothing(script: str, option: str, tmp_path) -> None:
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    before = sorted(tmp_path.rglob("*"))
    command = [str(tmp_path / "scripts" / script), option]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"  scripts/{script}" in done.stdout
    assert "#" not in done.stdout
    assert sorted(tmp_path.rglob("*")) == before


def test_the_version_is_the_same_everywhere() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["version"] == jaxlsgd.__version__
    cited = (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\nversion: {jaxlsgd.__version__}\n" in cited
    assert f"\n## {jaxlsgd.__version__}" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_the_lowest_versions_that_are_tried_are_the_declared_ones() -> None:
    import tomllib

    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = {
        name: list(map(Requirement, rules))
        for name, rules in project["optional-dependencies"].items()
    }
    needed = list(map(Requirement, project["dependencies"]))
    (jax,) = (rule for rule in needed if rule.name == "jax")
    (jaxlib,) = (rule for rule in needed if rule.name == "jaxlib")
    accelerators = [rule for name in ("cuda12", "cuda13", "tpu") for rule in extras.pop(name)]
    assert all(rule.specifier == jax.specifier for rule in [jaxlib, *accelerators])

    developers = {"docs", "dev", "flower"}
    for name in extras.keys() - developers:
        needed += extras[name]
    script = ROOT / "scripts" / "test_lowest"
    done = subprocess.run([script, "--list"], capture_output=True, text=True, check=True)
    tried = dict(line.split("==") for line in done.stdout.split())
    assert {(rule.name, str(rule.specifier)) for rule in needed} == {
        (name, f">={version}") for name, version in tried.items()
    }
    assert f"PYTHON:-python{project['requires-python'].removeprefix('>=')}}}" in script.read_text(
        "utf-8"
    )
