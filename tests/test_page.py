"""The page of a study, read as text and in a real browser."""

from __future__ import annotations

import csv
import dataclasses
import html
import itertools
import json
import math
import re
import statistics
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import page_helpers
import pytest
from browser import CHROMIUM, Browser
from study_helpers import missing, small

from jaxlsgd import cli, register
from jaxlsgd.analysis.measures import summarise
from jaxlsgd.analysis.pairs import paired_difference
from jaxlsgd.core import registry
from jaxlsgd.core.rows import MethodRows
from jaxlsgd.report import page, tables
from jaxlsgd.report.page import build, data
from jaxlsgd.report.page.data import View
from jaxlsgd.report.page.provenance import study_file
from jaxlsgd.report.page.text import headline
from jaxlsgd.schedules import Schedule, custom
from jaxlsgd.study import Study
from jaxlsgd.study.store.reader import Count, Results
from jaxlsgd.study.store.writer import Writer

needs_browser = pytest.mark.skipif(not CHROMIUM, reason="needs chromium or google-chrome")
EVIL = ("<img src=x onerror=alert(1)>", "</script><script>alert(2)</script>", "{{data}}<b>&amp;")
TWO_LEVELS = {"levels": [0.95, 0.8], "methods": ["plug_in", "random_scaling", "one_step"]}


@pytest.fixture(scope="module")
def browser():
    with Browser() as found:
        yield found


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Results:
    return page_helpers.write(tmp_path_factory.mktemp("page") / "study", small(**TWO_LEVELS))


def opened(browser: Browser, results: Results, **options: Any) -> Path:
    """Writes and opens a page, and finds nothing wrong on the way."""
    path = page.write(results, results.directory / "report.html")
    browser.errors.clear()
    browser.requests.clear()
    browser.open(path, **options)
    assert not browser.errors
    assert [url for url in browser.requests if not url.startswith("data:")] == [path.as_uri()]
    return path


def texts(browser: Browser, selector: str) -> list[str]:
    found = f"[...document.querySelectorAll({json.dumps(selector)})].map((x) => x.textContent)"
    return browser.evaluate(found)


def table_lines(browser: Browser) -> list[list[str]]:
    line = "[...row.cells].map((cell) => cell.querySelector('.value').textContent)"
    return browser.evaluate(
        f"[...document.querySelectorAll('#numbers tbody tr')].map((row) => {line})"
    )


def choose(browser: Browser, key: str, value: str) -> None:
    browser.evaluate(
        f"(() => {{ const select = document.querySelector('#choices select[data-key={key}]');"
        f" select.value = {json.dumps(value)}; select.dispatchEvent(new Event('change')); }})()"
    )


def data_of(path: Path) -> dict[str, Any]:
    found = re.search(r'id="data">(.*?)</script>', path.read_text("utf-8"), re.S)
    assert found
    return json.loads(found[1])


# The headline.


def texts_in(markup: str) -> list[str]:
    """The texts of table cells."""
    found = re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", markup, re.S)
    return [html.unescape(re.sub(r"<[^>]*>", "", text)) for text in found]


def headline_of(path: Path) -> tuple[dict[str, list[str]], dict[tuple[str, str, str], str]]:
    """Summaries by method, and entries by setting, schedule and method, from the page's text alone."""
    text = path.read_text("utf-8")
    tables = re.findall(r"<table>(.*?)</table>", text.partition('id="out"')[2], re.S)
    summary = [texts_in(line) for line in re.findall(r"<tr>(.*?)</tr>", tables[0], re.S)]
    entries, setting, head = {}, "", []
    for line in re.findall(r"<tr[^>]*>(.*?)</tr>", tables[1], re.S):
        cells = texts_in(line)
        if len(cells) == 1:
            (setting,) = cells
        elif not head:
            head = cells[1:]
        else:
            entries |= {
                (setting, cells[0], name): x for name, x in zip(head, cells[1:], strict=True)
            }
    return {line[0]: line[1:] for line in summary[1:]}, entries


def from_csv(path: Path, level: float) -> dict[tuple[str, str, str], tuple[float, float, float]]:
    """Coverage over all coordinates, its standard error and mean length, with nothing of ours."""
    last: dict[Any, int] = {}
    with path.open(newline="") as file:
        lines = [line for line in csv.DictReader(file) if float(line["level"]) == level]
    for line in lines:
        key = (line["problem"], line["schedule"], line["method"])
        last[key] = max(last.get(key, 0), int(line["save_round"]))
    hits: dict[Any, dict[str, list[float]]] = {}
    lengths: dict[Any, list[float]] = {}
    for line in lines:
        key = (line["problem"], line["schedule"], line["method"])
        if int(line["save_round"]) == last[key]:
            half = float(line["half_width"])
            hit = abs(float(line["estimate"]) - float(line["truth"])) <= half
            hits.setdefault(key, {}).setdefault(line["replication"], []).append(hit)
            lengths.setdefault(key, []).append(2 * half)
    found = {}
    for key, runs in hits.items():
        means = [statistics.fmean(run) for run in runs.values()]
        error = statistics.pstdev(means) / math.sqrt(len(means))
        found[key] = statistics.fmean(means), error, statistics.fmean(lengths[key])
    return found


def test_the_headline_is_what_others_compute_from_the_csv(study, tmp_path):
    path = page.write(study, tmp_path / "report.html")
    out = str(tmp_path / "rows.csv")
    assert cli.main(["export", str(study.directory), "--format", "csv", "-o", out]) == 0
    own = from_csv(Path(out), 0.95)
    summary, entries = headline_of(path)
    assert len(own) == len(entries) == 6
    for (_, schedule, label), text in entries.items():
        coverage, error, length = own["linear", schedule, label.replace("-", "_")]
        shown = re.fullmatch(r"(?:[▼▲] )?([\d.]+) \(([\d.]+)\)(?: ×([\d.]+))?", text)
        assert shown, text
        # Rounded: to half a unit of the last digit that is shown.
        for number, value in zip(shown.groups()[:2], (coverage, error), strict=True):
            places = len(number.partition(".")[2])
            assert abs(float(number) - 100 * value) <= 0.5 * 10.0**-places + 1e-5
        # Lengths over the shortest: one_step's are 0.9² of plug_in's by construction, and fall short or not.
        if shown[3]:
            base = length / float(shown[3])
            assert (
                min(abs(base / own["linear", schedule, n][2] - 1) for n in TWO_LEVELS["methods"])
                < 0.01
            )
    for label, (text,) in summary.items():
        mine = [100 * own["linear", s, label.replace("-", "_")][0] for s in ("C1", "P(1/2)")]
        kept, _, ends = text.partition(" of 2: ")
        low, *high = (float(x) for x in ends.removesuffix(" %").split(" to "))
        assert [low, *(high or [low])] == pytest.approx(sorted(mine), abs=0.51)
        marks = [x for (_, _, name), x in entries.items() if name == label and x[0] in "▼▲"]
        assert int(kept) == 2 - len(marks)


def test_a_mean_over_coordinates_has_the_error_of_dependent_ones():
    rng = np.random.default_rng(0)
    error = np.repeat(rng.normal(size=(400, 1)), 5, axis=1)  # five coordinates that are the same
    ones = np.ones((1, 1, 400, 5))
    rows = MethodRows(error[None], ones[0], 1.96 * ones, np.zeros((1, 400), bool))
    found = data.measures(rows, np.zeros(5), 5)
    same = found["coverage_mcse"][0, 0]
    assert same[0] == pytest.approx(same[1], rel=1e-12)  # five that are one tell no more
    thirds = dataclasses.replace(
        rows, estimate=np.where(np.arange(5) < 3, 9.0, 0.0) + 0 * error[None]
    )
    assert (
        data.measures(thirds, np.zeros(5), 5)["coverage_mcse"][0, 0, 0] == 0
    )  # 2 of 5 in every run
    apart = dataclasses.replace(rows, estimate=rng.normal(size=(1, 400, 5)))
    other = data.measures(apart, np.zeros(5), 5)["coverage_mcse"][0, 0]
    assert other[0] == pytest.approx(other[1] / math.sqrt(5), rel=0.2)  # independent ones do


def test_exact_intervals_are_rarely_marked():
    rng, marked, runs, cells = np.random.default_rng(1), 0, 400, 8
    for _ in range(runs):
        hits = rng.random((cells, 200, 5)) < 0.95
        views = []
        for cell in hits.mean(-1):
            error = cell.std() / math.sqrt(200)
            views.append({0: View(cell.mean(), error, 1.0, 0.01, 200, 5)})
        where = [
            {"problem": "p", "algorithm": "local_sgd", "schedule": str(i), "steps": 9}
            for i in range(cells)
        ]
        found = headline(where, views, ["m"], 0.95)
        marked += found.summary[0][0].partition(" of")[0] != str(cells)
    # Promised: 5 %; the limit is four standard errors above.
    assert marked / runs <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / runs)


def test_the_headline_averages_no_unlike_cells_and_finds_intervals_that_are_too_short(tmp_path):
    made = small(
        replications=960,
        tile_size=480,
        save_at=[],
        algorithms=["local_sgd", {"kind": "fedprox", "mu": 0.5}],
    )
    found = build.collect(page_helpers.write(tmp_path, made, scale=0.5))["headline"]
    assert found.algorithms == ["local_sgd", "fedprox"]
    assert [name for name, _ in found.cells] == [
        "linear, local_sgd, 40 steps",
        "linear, fedprox, 40 steps",
    ]
    assert all(
        text.startswith("0 of 2: 6") for line in found.summary for text in line
    )  # 2Φ(0.98) − 1 = 67 %
    shades = {entry.shade for _, group in found.cells for _, line in group for entry in line}
    assert shades == {"b4"}


# The page as text.


def test_the_page_needs_nothing_else_and_only_its_own_script_runs(study, tmp_path):
    text = page.write(study, tmp_path / "report.html").read_text("utf-8")
    assert "http:" not in text.replace("http://www.w3.org/2000/svg", "") and "https:" not in text
    assert "default-src 'none'" in text
    assert text.count("<script") == 2 and "unsafe-inline" not in text
    assert str(study.directory.parent) not in text  # where it lay is nobody's business


def test_the_page_tells_what_was_asked_and_where_it_came_from(study, tmp_path):
    text = page.write(study, tmp_path / "report.html").read_text("utf-8")
    headings = (
        "Aims",
        "Data-generating mechanisms",
        "Estimands",
        "Methods",
        "Performance measures",
    )
    for told in (
        *headings,
        "seed 0",
        study.manifest["digest"],
        "jaxlsgd run study.toml --out study",
    ):
        assert told in text, told


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"warmup": 0.0, "schedules": ["Log", {"family": "constant", "E": 7, "warmup": 0.1}]},
        {
            "schedules": [
                {"family": "power", "beta": "1/4", "scale": 2, "name": 'a "quoted" name'},
                {"family": "power", "beta": 1.5, "allow_outside_theory": True},
                {"family": "logarithmic", "base": 10},
                {"family": "iterated_logarithmic", "scale": 3},
                {"family": "custom", "sequence": [1, 2, 4, 8] * 10},
            ]
        },
        {
            "problems": [
                {"kind": "linear", "dim": 2, "num_clients": 3, "gamma0": [0.25, 0.5], "alpha": 0.6},
                {"kind": "logistic", "name": "ünï", "dim": 2, "num_clients": 3},
            ],
            "methods": ["plug_in[finite]", {"kind": "random_scaling", "name": "q"}],
            "algorithms": ["local_sgd", {"kind": "fedprox", "mu": 0.5}],
            "exclude": [{"problem": "ünï", "algorithm": "local_sgd"}],
            "extra": [{"problem": "ünï", "schedule": "C1", "num_rounds": 30, "methods": ["q"]}],
            "horizons": [40, {"num_rounds": 20}],
            "dtype": "float64",
            "save_at": [3, 0.5],
        },
    ],
    ids=["small", "warmup", "families", "rules"],
)
def test_the_study_file_in_the_page_is_the_study(tmp_path, changes):
    study = small(**changes)
    text = study_file(Study.read(study.plain()))  # as a reader has it, without objects
    (tmp_path / "study.toml").write_text(text, "utf-8")
    again = Study.from_toml(tmp_path / "study.toml")
    assert again.digest == study.digest and again.replications == study.replications


def test_the_digest_is_that_of_the_rows(tmp_path):
    def digest(name: str, **changes: Any) -> str:
        results = page_helpers.write(tmp_path / name, small(**changes))
        return dict(build.collect(results)["provenance"])["Rows"]

    assert digest("a") == digest("b") != digest("c", replications=64)


def test_numbers_in_the_page_are_those_of_the_table(study, tmp_path, capsys):
    path = page.write(study, tmp_path / "report.html")
    asked = ["table", str(study.directory), "--coordinate", "all", "--measures", *tables.SHOWN]
    assert cli.main(asked) == 0
    printed = [re.split(r"\s{2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]
    table = data_of(path)["table"]
    assert len(table["lines"]) == 2 * 3 * 2 * 2
    for line in (table["header"], *table["lines"]):
        assert line in printed


def test_the_verb_writes_into_the_directory_or_where_it_is_told(study, tmp_path, capsys):
    assert cli.main(["report", str(study.directory)]) == 0
    assert cli.main(["report", str(study.directory), "-o", str(tmp_path / "own.html")]) == 0
    said = capsys.readouterr().out.split()
    assert said == [str(study.directory / "report.html"), str(tmp_path / "own.html")]
    assert (tmp_path / "own.html").read_bytes() == (study.directory / "report.html").read_bytes()


def test_a_page_is_written_again_while_a_run_writes(tmp_path, monkeypatch, capsys):
    out, seen = tmp_path / "report.html", []
    with Writer(tmp_path / "s", small(), page_helpers.ENVIRONMENT) as writer:
        tiles = missing(writer)

        def wait(seconds: float) -> None:
            seen.append((seconds, data_of(out)["refresh"], data_of(out)["partial"]))
            for cell, first in tiles[:5]:
                writer.describe(cell, page_helpers.about(cell))
                writer.commit(cell, first, page_helpers.rows(cell, first))
            del tiles[:5]
            if not tiles:
                writer.__exit__(None, None, None)

        monkeypatch.setattr("time.sleep", wait)
        assert cli.main(["report", str(tmp_path / "s"), "-o", str(out), "--watch", "7"]) == 0
    assert [x[:2] for x in seen] == [(7, 7)] * 2
    assert seen[0][2].startswith("Partial: 0 of 2 cells") and seen[1][2].startswith(
        "Partial: 1 of 2"
    )
    last = data_of(out)
    assert not last["refresh"] and not last["partial"] and "every 7 s" in capsys.readouterr().out


def test_a_schedule_of_ones_own_has_its_own_name():
    @register("schedule")
    def sawtooth(high: int = 3) -> Schedule:
        """E_m = 1, 2, … in turn."""
        return custom([1 + i % high for i in range(400)])

    try:
        own = ["C1", {"family": "sawtooth"}, {"family": "sawtooth", "high": 4}]
        own += [{"family": "custom", "sequence": [1, 2] * 40}]
        names = [part.name for part in small(schedules=own).schedules]
    finally:
        registry.forget(__name__)
    assert names == ["C1", "sawtooth", "sawtooth(4)", "custom[80]"]


def test_the_page_states_weights_and_the_error_of_the_truth(tmp_path):
    given = {"kind": "linear", "dim": 2, "num_clients": 3}
    weighted = given | {"name": "weighted", "weights": [0.5, 0.25, 0.25]}
    made = small(problems=[given, weighted])
    asked = dict(build.collect(page_helpers.write(tmp_path / "a", made))["question"])
    assert "3 clients, equal client weights" in asked["Data-generating mechanisms"][0]
    assert (
        "3 clients, client weights 0.5, 0.25, 0.25, step" in asked["Data-generating mechanisms"][1]
    )
    assert asked["Estimands"][1] == "linear, weighted: the truth has no error of its own."
    known = page_helpers.write(tmp_path / "b", small(), truth_error=[1e-4, 1e-4])
    assert "known to ±0.0001" in dict(build.collect(known)["question"])["Estimands"][1]


def test_a_place_that_cannot_be_written_is_refused(study, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for place, said in {
        tmp_path / "no" / "x.html": f"{tmp_path / 'no'}: there is no such directory; make it, or",
        tmp_path / "file" / "x.html": f"{tmp_path / 'file'}: it is not a directory; make it, or",
        tmp_path: f"{tmp_path}: it is a directory; give the name of a file",
    }.items():
        assert cli.main(["report", str(study.directory), "-o", str(place)]) != 0
        told = capsys.readouterr().err
        assert said in told
        assert "during the run" not in told


def test_own_parts_are_named_where_a_run_is_replayed(study, tmp_path, monkeypatch):
    given = dataclasses.replace(study.study.problems[0], identity="a" * 32)
    own = dataclasses.replace(study.study, problems=(given,))
    assert build.collect(Results.of(study.directory, own, study.manifest))["data"]["replay"] == (
        f"jaxlsgd replay {study.directory.name} --import FILE"
    )
    assert "--import" not in build.collect(study)["data"]["replay"]


def test_two_studies_are_compared_on_the_command_line(study, tmp_path, capsys):
    other = page_helpers.write(tmp_path / "other", small(**TWO_LEVELS, seed=1), scale=2.0)
    places = str(study.directory), str(other.directory)
    assert cli.main(["compare", *places]) == 0
    text = capsys.readouterr().out
    assert "12 of 12 pairs differ" in text and "combined in parentheses" in text
    assert max(map(len, text.splitlines()[3:])) <= 100
    assert cli.main(["compare", *places, "--format", "csv"]) == 0
    lines = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    found = {(x["schedule"], x["method"], x["level"]): x for x in lines}
    assert len(lines) == len(found) == 12
    for a, b in zip(study.read_all(), other.read_all(), strict=True):
        for here, there in zip(*(summarise(x, last_only=True) for x in (a, b)), strict=True):
            if here["coordinate"] != "x[0]":
                continue
            line = found[here["schedule"], here["method"], str(here["level"])]
            # Of two seeds, so that the errors add up as those of independent studies.
            error = math.hypot(here["coverage_mcse"], there["coverage_mcse"])
            assert float(line["coverage_difference_mcse"]) == pytest.approx(error)
            ratio = here["length"] / there["length"]
            assert float(line["length_ratio"]) == pytest.approx(ratio)
            relative = math.hypot(*(x["length_mcse"] / x["length"] for x in (here, there)))
            assert float(line["length_ratio_mcse"]) == pytest.approx(ratio * relative)
    assert cli.main(["compare", places[0], places[0], "--format", "markdown"]) == 0
    assert "0 of 12 pairs differ" in capsys.readouterr().out


def test_two_studies_are_compared_cell_by_cell(study, tmp_path, capsys):
    def told(other: Results) -> str:
        out = tmp_path / "report.html"
        assert cli.main(["report", str(study.directory), str(other.directory), "-o", str(out)]) == 0
        return out.read_text("utf-8").partition('id="comparison"')[2]

    again = page_helpers.write(tmp_path / "again", small(**TWO_LEVELS))
    assert "the same to the last bit in 2 of 2 cells" in told(again)
    assert "0 of 12 pairs differ" in told(again)
    other = page_helpers.write(tmp_path / "other", small(**TWO_LEVELS, seed=1), scale=2.0)
    text = told(other)
    assert "the same to the last bit in 0 of 2 cells" in text and "12 of 12 pairs differ" in text
    ratios = [float(x) for x in re.findall(r"<td>(0\.\d+) \(0\.\d+\)</td><td>\d", text)]
    assert ratios == pytest.approx([0.5] * 12, abs=0.05)  # half as long, up to noise in the widths
    longer = page_helpers.write(tmp_path / "longer", small(**TWO_LEVELS, replications=96))
    assert "in 2 of 2 cells in the replications that both have" in told(longer)
    few = page_helpers.write(tmp_path / "few", small(**TWO_LEVELS, schedules=["C1", "C5"]), most=0)
    assert "Cells in both: 1, of which 0 have rows in both. Only here: 1." in told(few)


# The page in a browser.


@needs_browser
def test_numbers_on_the_screen_are_those_of_the_table(browser, study):
    opened(browser, study)
    cells = study.read_all()
    rows = [r for cell in cells for r in summarise(cell, last_only=True)]
    shown = tables.for_people(rows)
    assert table_lines(browser) == shown.lines
    assert texts(browser, "#numbers thead th") == shown.header
    tip = browser.evaluate(
        "(() => { const svg = document.querySelector('#coverage svg');"
        " svg.focus(); svg.dispatchEvent(new KeyboardEvent('keydown', {key: 'End'}));"
        " return document.querySelector('.tip').textContent; })()"
    )
    shown = [
        row["coverage"] for row in rows if row["schedule"] == "P(1/2)" and row["level"] == 0.95
    ]
    means = [f"{50 * (a + b):.1f} %" for a, b in itertools.pairwise(shown)][::2]
    assert any(f"coverage {mean}" in tip for mean in means) and "80 runs" in tip


@needs_browser
def test_the_headline_follows_level_coordinate_and_filters(browser, study, tmp_path):
    path = opened(browser, study)
    summary, entries = headline_of(path)
    # Drawn by the script as it was written without one.
    assert texts(browser, "#out .matrix td") == list(entries.values())
    assert texts(browser, "#out .summary td") == [
        x for name, line in summary.items() for x in (name, *line)
    ]
    choose(browser, "coordinate", "x[1]")
    choose(browser, "level", "1")
    choose(browser, "schedule", "P(1/2)")
    assert texts(browser, "#out .scope") == ["80 % intervals, x[1], 1 cell."]
    rows = [r for cell in study.read_all() for r in summarise(cell, last_only=True)]
    asked = ("P(1/2)", "x[1]", 0.8)
    mine = [r["coverage"] for r in rows if (r["schedule"], r["coordinate"], r["level"]) == asked]
    shown = [float(re.sub(r"^[▼▲] ", "", x).split()[0]) for x in texts(browser, "#out .matrix td")]
    assert shown == pytest.approx([100 * x for x in mine], abs=0.51)
    # The choices stay when the page is loaded again.
    browser.evaluate("window.before = true; location.reload()")
    browser.wait(
        "!window.before && document.querySelector('#out .scope')?.textContent.startsWith('80 %')"
    )
    assert texts(browser, "#out .scope") == ["80 % intervals, x[1], 1 cell."]
    assert not browser.errors
    browser.evaluate("history.replaceState(null, '', '#')")


@needs_browser
def test_zip_plots_and_lengths_follow_the_level(browser, study):
    opened(browser, study)
    (place, name) = browser.evaluate(
        "(() => { const select = document.querySelector('#zip select'); return [Number(select.value), "
        "select.selectedOptions[0].textContent]; })()"
    )
    cell = study.read_all()[place]
    assert cell.schedule in name
    for chosen, level in enumerate(cell.levels):
        choose(browser, "level", str(chosen))
        rows = [r for r in summarise(cell, last_only=True) if r["level"] == level]
        firsts = [r for r in rows if r["coordinate"] == "x[0]"]
        panels = browser.evaluate(
            "[...document.querySelectorAll('#zip .panel')].map((panel) => [panel.textContent, "
            "panel.querySelectorAll('.misses').length, panel.querySelectorAll('.holds').length])"
        )
        assert len(panels) == len(firsts)
        for (text, misses, holds), row in zip(panels, firsts, strict=True):
            assert text.startswith(f"{row['label']}, x[0]: ")
            assert misses + holds == row["n_ok"]  # as few as these are all drawn
            assert holds / row["n_ok"] == pytest.approx(row["coverage"])
        tip = browser.evaluate(
            "(() => { document.querySelector('#numbers tbody tr').click();"
            " const svg = [...document.querySelectorAll('#cell svg')].at(-1); svg.focus();"
            " svg.dispatchEvent(new KeyboardEvent('keydown', {key: 'End'}));"
            " const told = document.querySelector('.tip').textContent;"
            " document.getElementById('cell').close(); return told; })()"
        )
        found = re.search(r"(.+): (\d+) % of lengths are below ([\d.]+)", tip)
        assert found, tip
        first = study.read_all()[0]  # the first line
        names = {label: name for name, label in first.labels.items()}
        rows_of = first.methods[names[found[1]]]
        lengths = 2 * rows_of.half_width[-1, chosen, rows_of.ok[-1], 0]
        near = np.quantile(lengths, int(found[2]) / 100)
        assert float(found[3]) == pytest.approx(near, rel=0.05)  # shares are rounded to a per cent
    browser.evaluate("history.replaceState(null, '', '#')")
    assert not browser.errors


def test_differences_in_the_page_are_the_paired_ones(study):
    cells = study.read_all()
    sides = [
        data._last(cell.methods[name], cell.truth[name], 9)
        for cell in cells
        for name in cell.methods
    ]
    found = data.differences(sides[4], sides[0])
    row = paired_difference(
        cells[1], "random_scaling", cells[0], "plug_in", level=0.8, coordinate="x[1]"
    )
    names = ("coverage_difference", "coverage_difference_mcse", "length_ratio", "length_ratio_mcse")
    for name, values in zip(names, found, strict=True):
        assert values[1, 2] == pytest.approx(row[name], rel=1e-9), name


@needs_browser
def test_every_figure_and_its_numbers_can_be_downloaded(browser, study, tmp_path):
    opened(browser, study, dark=True)
    browser.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    for name in ("coverage", "rounds", "zip"):  # a browser stops after ten files without a click
        for button in texts(browser, f"#{name} .downloads button"):
            browser.evaluate(
                f"[...document.querySelectorAll('#{name} .downloads button')]"
                f".find((x) => x.textContent === '{button}').click()"
            )
            path = tmp_path / f"{name}.{button.lower()}"
            deadline = time.monotonic() + 60  # a net: the browser writes when it likes
            while not (path.exists() and path.stat().st_size) and time.monotonic() < deadline:
                time.sleep(0.02)
            assert path.stat().st_size > 500, path
    picture = (tmp_path / "coverage.svg").read_text("utf-8")
    ElementTree.fromstring(picture)
    assert (
        "class=" not in picture and "rgb(22, 22, 22)" not in picture
    )  # light, and nothing beside it
    assert (tmp_path / "coverage.png").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "coverage.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    shown = data.measures(study.read_all()[0].methods["plug_in"], page_helpers.TRUTH, 2)
    assert len(lines) == 6 and lines[0]["coordinate"] == "mean over all"
    assert float(lines[0]["coverage"]) == pytest.approx(shown["coverage"][-1, 0, 0], rel=1e-6)
    assert not browser.errors


@needs_browser
def test_one_cell_at_zero_does_not_squeeze_the_axis(browser, tmp_path):
    results = page_helpers.write(tmp_path / "s", small(replications=960, tile_size=480), scale=0.02)
    opened(browser, results)
    ticks = [float(x) for x in texts(browser, "#coverage .label.middle:not(.title)")]
    assert min(ticks) >= 75
    assert browser.evaluate("document.querySelectorAll('#coverage .out').length") == 4
    assert set(texts(browser, "#coverage .label.ink")) == {"3"}  # 2Φ(0.04) − 1 is 3 %


@needs_browser
def test_sorting_and_filtering(browser, study):
    opened(browser, study)
    header = texts(browser, "#numbers thead th")
    column = header.index("length")

    def lengths() -> list[float]:
        return [float(line[column].split()[0]) for line in table_lines(browser)]

    press = f"document.querySelectorAll('#numbers thead button')[{column}].click()"
    before = lengths()
    for order in (sorted(before), sorted(before, reverse=True), before):
        browser.evaluate(press)
        assert lengths() == order
    sort = f"document.querySelectorAll('#numbers thead th')[{column}].ariaSort"
    browser.evaluate(press)
    assert browser.evaluate(sort) == "ascending"
    browser.evaluate("document.querySelector('#numbers input[type=search]').focus()")
    browser.type("p(1/2) one_step")
    assert [line[0] for line in table_lines(browser)] == ["P(1/2)"] * 4
    assert texts(browser, "#numbers .count") == ["4 of 4 lines, chosen from 24"]
    choose(browser, "coordinate", "x[1]")
    assert texts(browser, "#numbers .count") == ["2 of 2 lines, chosen from 24"]


@needs_browser
def test_marks_are_more_than_colour(browser, study):
    opened(browser, study)
    rows = [r for cell in study.read_all() for r in summarise(cell, last_only=True)]
    off = [
        row
        for row in rows
        if abs(row["coverage"] - row["level"])
        > 2 * math.sqrt(row["level"] * (1 - row["level"]) / row["n_ok"])
    ]
    assert 0 < len(off) < 24
    flags = texts(browser, "#numbers td.below, #numbers td.above")
    assert len(flags) == len(off)
    assert all(re.match(r"[▼▲](below|above) its level: ", flag) for flag in flags)
    browser.evaluate("document.querySelector('#numbers .only').click()")
    assert len(table_lines(browser)) == len(off)


@needs_browser
def test_choices_and_methods_change_all_figures(browser, study):
    opened(browser, study)
    count = "document.querySelectorAll('#coverage .mark').length"
    assert browser.evaluate(count) == 2 * 3
    browser.evaluate("document.querySelector('.method').click()")
    assert browser.evaluate(count) == 2 * 2
    assert browser.evaluate("document.querySelector('.method').ariaPressed") == "false"
    choose(browser, "schedule", "C1")
    choose(browser, "level", "1")
    assert browser.evaluate(count) == 2
    assert "nominal 80" in texts(browser, "#coverage .title")[0]
    for kind in ("length", "l2_error"):
        browser.evaluate(f"document.querySelector('#rounds input[value={kind}]').click()")
        assert browser.evaluate("document.querySelectorAll('#rounds path.line').length") > 0
    assert not browser.errors


@needs_browser
def test_hovering_tells_and_clicking_opens_a_cell(browser, study):
    opened(browser, study, height=4000)
    box = browser.evaluate(
        "(({x, y, width, height}) => [x + width / 2, y + height / 2])"
        "(document.querySelector('#coverage .mark').getBoundingClientRect())"
    )
    browser.mouse("move", *box)
    assert browser.evaluate("document.querySelector('.tip').hidden") is False
    assert (
        "plug-in" in texts(browser, ".tip")[0]
        and "numbers sent per client" in texts(browser, ".tip")[0]
    )
    browser.mouse("click", *box)
    assert browser.evaluate("document.getElementById('cell').open") is True
    cell = study.cells()[0]
    command = f"jaxlsgd replay study --cell {cell} --replication 0"
    assert command in texts(browser, "#cell code")
    assert texts(browser, "#cell h3") == [
        "Failures",
        "Intervals by rank",
        "Estimates against normal",
        "Lengths",
    ]
    assert not browser.errors


@needs_browser
def test_the_keyboard_alone_walks_points_opens_and_closes_a_cell(browser, study):
    opened(browser, study)
    browser.evaluate("document.querySelector('#tradeoff svg').focus()")
    said = set()
    for _ in range(6):
        browser.press("ArrowRight")
        said.update(texts(browser, "[aria-live]"))
    assert len(said) == 6 and all("coverage" in text for text in said)
    browser.press("Enter")
    assert browser.evaluate("document.activeElement.id") == "cell-name"
    browser.press("Escape")
    assert browser.evaluate("document.getElementById('cell').open") is False
    assert browser.evaluate("document.activeElement.closest('figure').id") == "tradeoff"
    browser.evaluate("document.querySelector('#numbers tbody tr').focus()")
    browser.press("Enter")
    assert browser.evaluate("document.getElementById('cell').open") is True
    browser.press("Escape")
    assert not browser.errors


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_sticks_out_and_colours_follow_the_system(browser, study, width, dark):
    opened(browser, study, width=width, dark=dark)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    back = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert back == ("rgb(22, 22, 22)" if dark else "rgb(255, 255, 255)")
    for name in ("coverage", "tradeoff", "rounds", "pairs", "zip"):
        assert browser.evaluate(f"document.querySelectorAll('#{name} svg').length") > 0, name


@needs_browser
def test_every_control_and_figure_has_a_name(browser, study):
    opened(browser, study)
    nameless = browser.evaluate(
        "[...document.querySelectorAll('button, select, input, svg[tabindex], [role=region]')]"
        ".filter((x) => !(x.ariaLabel || x.textContent.trim() || x.closest('label')?.textContent.trim()))"
        ".map((x) => x.outerHTML.slice(0, 80))"
    )
    assert nameless == []


@needs_browser
@pytest.mark.parametrize(
    "made, told, hidden",
    [
        ({"most": 0}, ["Partial: 0 of 2 cells", "There are no rows yet."], ["coverage"]),
        ({"most": 3}, ["Partial: 0 of 2 cells", "the least has 0."], ["tradeoff"]),
        ({"failed": 1.0}, ["Coverage is unknown", "80 not finite"], ["coverage", "pairs"]),
        ({"failed": 0.2}, ["a method failed", "all runs %"], []),
        ({"truth": False}, ["Coverage is unknown"], ["coverage", "zip"]),
        (
            {"study": {"schedules": ["C1"], "methods": ["plug_in"], "save_at": []}},
            ["one cell"],
            ["pairs"],
        ),
    ],
    ids=["empty", "partial", "failed", "some-failed", "no-truth", "one-cell"],
)
def test_sparse_studies_make_sensible_pages(browser, tmp_path, made, told, hidden):
    made = dict(made)
    results = page_helpers.write(tmp_path / "s", small(**made.pop("study", {})), **made)
    path = opened(browser, results)
    text = path.read_text("utf-8")
    for part in told:
        assert part in text, part
    for name in hidden:
        assert browser.evaluate(f"document.getElementById('{name}').offsetParent === null"), name
    if "Partial" in told[0] and made["most"]:
        captions = texts(browser, "figcaption")
        assert all(caption.startswith("Partial: ") for caption in captions)


@needs_browser
def test_names_are_text_wherever_they_stand(browser, tmp_path):
    problem = {"kind": "linear", "dim": 2, "num_clients": 3}
    results = page_helpers.write(
        tmp_path / "<i>",
        small(
            problems=[problem | {"name": EVIL[0]}, problem | {"name": "plain"}],
            schedules=["C1", {"family": "power", "beta": 0.5, "name": EVIL[2]}],
            methods=["plug_in", {"kind": "random_scaling", "name": EVIL[1]}],
        ),
    )
    opened(browser, results)
    assert browser.evaluate("document.querySelectorAll('img, b b, script').length") == 2
    assert EVIL[1] in texts(browser, ".method")
    assert any(EVIL[0] in title and EVIL[2] in title for title in texts(browser, "#rounds h4"))
    browser.evaluate("document.querySelector('#numbers tbody tr:last-child').click()")
    assert EVIL[2] in texts(browser, "#cell h2")[0]
    assert not browser.errors


class Made(Results):
    """Results whose rows are made when they are read: no disk can write 2,000 cells in a test's time."""

    def read(self, cell_id: str):
        cell = self.cell(cell_id)
        if not hasattr(self, "_rows"):
            self._rows = page_helpers.rows(cell, 0)
        return dataclasses.replace(page_helpers.about(cell), methods=self._rows)

    def counts(self) -> dict[str, Count]:
        return dict.fromkeys(self.cells(), Count(40, 40, 1, 1))


@pytest.fixture
def computed_once(monkeypatch):
    """All cells of `Made` have the same rows, so what is computed of one serves for all, under their names."""

    def once(module: Any, name: str, relabel: Any = lambda found, *given: found) -> None:
        compute, kept = getattr(module, name), []

        def again(*given: Any, **options: Any) -> Any:
            if not kept:
                kept.append(compute(*given, **options))
            return relabel(kept[0], *given)

        monkeypatch.setattr(module, name, again)

    def named(rows: list[Any], cell: Any) -> list[Any]:
        places = sorted({row["save_round"] for row in rows})
        where = {old: i for i, old in enumerate(places)}
        names = ("problem", "algorithm", "schedule", "num_steps", "num_rounds")
        facts = {name: getattr(cell, name) for name in names}
        return [
            row | facts | {"save_round": cell.save_at[where[row["save_round"]]]} for row in rows
        ]

    once(data, "summarise", named)
    once(build, "detail")
    once(data, "measures")
    once(data, "differences")


@needs_browser
@pytest.mark.parametrize("cells, saves, most", [(500, 4, 5e6), (2000, 1, 10e6)])
def test_large_studies_stay_small_and_open_at_once(
    browser, tmp_path, computed_once, cells, saves, most
):
    page_helpers.write(tmp_path / "s", page_helpers.large(cells, saves), most=0)
    path = page.write(Made(tmp_path / "s"), tmp_path / "report.html")
    assert path.stat().st_size < most
    browser.errors.clear()
    seconds = browser.open(path)
    assert not browser.errors
    # 0.4 and 0.9 s with nothing else running; a busy machine is given time.
    assert seconds < 10
    assert browser.evaluate("document.querySelectorAll('#nested .line').length") == 4
    assert texts(browser, "#numbers .count") == [f"50 of {8 * cells:,} lines"]
    browser.evaluate("document.querySelector('#numbers .more').click()")
    assert len(table_lines(browser)) == 200
