"""The API reference: every public name is in it, it reads well, and it needs no network."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import types
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

import jaxlsgd

pytest.importorskip("pdoc")

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "scripts" / "reference" / "build.py"
SCRIPTS = ("docs", "study", "test", "test_lowest", "test_places")
# Elements that a browser loads something for, and where they say what.
LOADED = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src"), ("source", "src")}


class Page(HTMLParser):
    """Identifiers, links, what a browser would load, and the text of a page, without source code."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self._words: list[str] = []
        self._hidden = False
        # Source code is the one block with numbered lines.
        self.feed(
            re.sub(
                r'(?s)<div class="pdoc-code codehilite"><pre><span></span><span id=.*?</div>',
                "",
                html,
            )
        )
        self.text = re.sub(r"\s+", " ", "".join(self._words))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden = tag in ("style", "script")
        for name, value in attrs:
            if name == "id":
                self.ids.add(value or "")
            if (tag, name) == ("a", "href"):
                self.links.append(value or "")
            if (tag, name) in LOADED:
                self.loads.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        self._hidden = self._hidden and tag not in ("style", "script")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self._words.append(data)


def build(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BUILD), *map(str, arguments)]
    settings = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, env=settings, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Path:
    """The whole reference, built once: some five seconds."""
    out = tmp_path_factory.mktemp("docs") / "reference"
    done = build(out)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return out


@pytest.fixture(scope="module")
def pages(reference: Path) -> dict[str, Page]:
    """Pages by the name of their module."""
    return {
        ".".join(path.relative_to(reference).with_suffix("").parts): Page(path.read_text("utf-8"))
        for path in sorted(reference.rglob("*.html"))
        if path.name != "index.html"
    }


def test_every_public_name_is_there_also_if_it_is_loaded_on_first_use(pages) -> None:
    for module in ("jaxlsgd", "jaxlsgd.algorithms", "jaxlsgd.study", "jaxlsgd.inference"):
        found = importlib.import_module(module)
        for name in found.__all__:
            value = getattr(found, name)
            if isinstance(value, types.ModuleType):
                assert value.__name__ in pages, name
            else:
                assert name in pages[module].ids, name
    assert "as jaxlsgd.measures" in pages["jaxlsgd"].text


def test_nothing_private_is_there(pages) -> None:
    for name, page in pages.items():
        if name.startswith("guides."):
            continue
        assert not any(part.startswith("_") for part in name.split("."))
        parts = {part for id_ in page.ids for part in re.sub(r"-.*", "", id_).split(".")}
        hidden = {part for part in parts if part.startswith("_")}
        assert hidden <= {"__init__", "__version__"}, name


def test_docstrings_are_rendered(pages, reference) -> None:
    text = pages["jaxlsgd.algorithms"].text
    assert "Arguments: mu: μ, at least 0; 0 is Local SGD." in text
    assert "d_k = g_k + μ (x_k − x̄)" in text
    for name, page in pages.items():
        assert "::" not in page.text, name
    html = (reference / "jaxlsgd" / "inference" / "random_scaling.html").read_text("utf-8")
    assert "<strong>mode:</strong>" in html  # Args: a list
    assert "(ȳ − x*)/√V̂ does not" in html  # stars are stars
    assert "t*(β)" in html
    assert '<span class="n">estimator</span> <span class="o">=</span>' in html  # Python in colours


def test_signatures_stand_as_they_are_written(pages) -> None:
    text = pages["jaxlsgd"].text
    assert "methods: Sequence[Estimator] = METHODS" in text
    assert "Sync( params: Params, E: Any, eta: Any, gradient: Params | None = None" in text
    assert "local steps of round m" in text  # the comment beside a field
    for name, page in pages.items():
        for ugly in ("ForwardRef", "Alias for field", "<function", "jax.jaxlib", "_src."):
            assert ugly not in page.text, (name, ugly)


def test_a_browser_needs_nothing_but_the_directory(pages, reference) -> None:
    for name, page in pages.items():
        for link in page.loads:
            assert link.startswith("data:"), (name, link)
    for path in reference.rglob("*"):
        if path.is_file():
            text = path.read_text("utf-8")
            assert not re.search(r"@import|url\(\s*['\"]?(https?:)?//|cdn", text), path
            assert str(ROOT) not in text, path


def test_links_lead_somewhere(pages) -> None:
    for name, page in pages.items():
        folder = Path(*name.split(".")).parent
        for link in page.links:
            target, _, anchor = unquote(link).partition("#")
            path = os.path.normpath(folder / target) if target else str(Path(*name.split(".")))
            found = pages[path.removesuffix(".html").replace(os.sep, ".")]
            assert not anchor or anchor in found.ids, (name, link)


def test_guides_are_in_it(pages) -> None:
    for path in (ROOT / "scripts" / "guides").glob("*.md"):
        page, text = pages[f"guides.{path.stem}"], path.read_text("utf-8")
        assert text.partition("\n")[0].removeprefix("# ") in page.text
        assert f"guides/{path.stem}.html" in pages["jaxlsgd"].links
        assert "](" not in page.text and "```" not in page.text and "|---" not in page.text


def test_the_index_leads_to_the_package(reference) -> None:
    assert "url=./jaxlsgd.html" in (reference / "index.html").read_text("utf-8")


def test_some_modules_alone_replace_an_old_reference_but_nothing_else(tmp_path) -> None:
    out = tmp_path / "reference"
    for _ in range(2):
        done = build(out, "jaxlsgd.schedules", "jaxlsgd.schedules.plan")
        assert done.returncode == 0, done.stderr
    assert (out / "jaxlsgd" / "schedules" / "plan.html").is_file()
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("years")
    done = build(tmp_path / "precious", "jaxlsgd.schedules")
    assert done.returncode == 1
    assert "holds something else" in done.stderr
    assert (tmp_path / "precious" / "thesis.tex").read_text() == "years"


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
