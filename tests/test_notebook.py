"""What people see while they wait and in a notebook: progress, and results as HTML."""

from __future__ import annotations

import io
import sys
import types
from html.parser import HTMLParser

import chex
import jax
import pytest
from refusals import refused
from report_helpers import fake_cell
from study_helpers import small
from test_store import fill

from jaxlsgd import Study, fit, measures, plug_in, problems, schedules, simulate
from jaxlsgd.core import progress
from jaxlsgd.report import export
from jaxlsgd.study import Outcome, Results

PROBLEM = problems.linear(2, 3)
PLAN = schedules.paper("C5").plan(schedules.power_decay(0.5), num_steps=300)
HOW = {"methods": (plug_in(),)}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Tables(HTMLParser):
    """The texts of all cells of all tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_data(self, data):
        if self.cells and self.tags[-1] in ("td", "th"):
            self.cells[-1] += data


def told(asked, stream) -> str:
    with progress.shown(asked, "linear, C5", stream) as tell:
        for share in (0.25, 0.5, 1.0):
            if tell is not None:
                tell(share)
    return stream.getvalue()


def test_progress_is_shown_where_somebody_looks_on(monkeypatch):
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name: None)  # without rich
    assert told(None, io.StringIO()) == told(False, Terminal()) == ""
    assert told(True, io.StringIO()).endswith("linear, C5: 100%, 0:00:00 left\n")
    live = told(None, Terminal())
    assert "\rlinear" in live.replace("\x1b[K", "") and live.endswith("\r\x1b[K")


def test_progress_is_a_bar_where_rich_is_installed():
    pytest.importorskip("rich")
    shown = told(None, Terminal())
    assert "linear, C5: 25%, measuring the time" in shown and "━" in shown


def test_progress_is_a_bar_in_a_notebook(monkeypatch):
    class Handle:
        def update(self, content):
            contents.append(content)

    contents: list[str] = []

    def display(content, display_id):
        contents.append(content)
        return Handle()

    kernel = types.SimpleNamespace(kernel=1)
    shell = types.SimpleNamespace(get_ipython=lambda: kernel)
    monkeypatch.setitem(sys.modules, "IPython", shell)
    parts = types.SimpleNamespace(HTML=str, display=display)
    monkeypatch.setitem(sys.modules, "IPython.display", parts)
    stream = io.StringIO()
    assert told(None, stream) == ""  # nothing on stderr
    first = '<progress max="1" value="0.2500"></progress> linear, C5: 25%, measuring the time'
    assert contents[0] == first
    assert 'value="1.0000"' in contents[-2] and contents[-1] == ""


def shares_at(monkeypatch, stream, *times: float, **options) -> str:
    """What is shown of 25, 50 and 100 %, reported at given times after a start at 0."""
    clock = iter([0.0, *times])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with progress.shown(True, "truth", stream, **options) as tell:
        for share in (0.25, 0.5, 1.0):
            tell(share)
    return stream.getvalue().replace("\x1b[K", "")


def test_plain_lines_come_every_few_seconds_with_a_time_once_it_can_be_told(monkeypatch):
    # Compiling takes the first 100 s. A quarter takes 6 s from there on, so that two take 12 s.
    lines = shares_at(monkeypatch, io.StringIO(), 100.0, 106.0, 118.0)
    assert lines == (
        "truth: 25%, measuring the time\ntruth: 50%, 0:00:12 left\ntruth: 100%, 0:00:00 left\n"
    )
    lines = shares_at(monkeypatch, io.StringIO(), 1.0, 2.0, 3.0)
    assert lines == "truth: 25%, measuring the time\ntruth: 100%, 0:00:00 left\n"


def test_progress_may_wait_for_what_is_often_done_sooner(monkeypatch):
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name: None)  # without rich
    assert shares_at(monkeypatch, Terminal(), 0.5, 1.9, 1.95, after=2.0) == "\r"
    shown = shares_at(monkeypatch, Terminal(), 1.0, 5.0, 9.0, after=2.0)
    assert shown == "\rtruth: 50%, 0:00:08 left\rtruth: 100%, 0:00:00 left\r"


def test_a_wrong_progress_is_refused():
    with refused("progress", "type"):
        fit(jax.random.key(0), PROBLEM, PLAN, progress="yes")


def test_results_do_not_depend_on_progress(capsys):
    shares: list[float] = []
    ways = (False, True, shares.append)
    many = [
        simulate(jax.random.key(0), PROBLEM, PLAN, replications=4, progress=p, **HOW) for p in ways
    ]
    assert "linear, C5: 100%" in capsys.readouterr().err
    ones = [fit(jax.random.key(0), PROBLEM, PLAN, progress=p, **HOW) for p in ways]
    assert "linear, C5: 100%" in capsys.readouterr().err
    assert shares[-1] == 1.0 and shares.count(1.0) >= 2
    for found in many[1:]:
        chex.assert_trees_all_equal(
            vars(found.methods["plug_in"]), vars(many[0].methods["plug_in"])
        )
    for found in ones[1:]:
        chex.assert_trees_all_equal(vars(found.rows["plug_in"]), vars(ones[0].rows["plug_in"]))


def test_a_fit_in_a_notebook_has_the_numbers_of_its_text():
    one = fit(jax.random.key(0), PROBLEM, PLAN)
    cells = Tables(one._repr_html_()).cells
    assert cells.count("estimate") == 2  # a table per method
    text = " ".join(str(one).split())
    assert {"x[0]", "x[1]"} <= set(cells)
    for cell in cells:
        assert cell in text
    assert "Notes on these intervals" not in one._repr_html_()


def test_a_table_in_a_notebook_is_the_same_table():
    found = measures.coverage_table(
        [fake_cell("<b>", problem="a & b"), fake_cell("C5", diverged=3)]
    )
    page = Tables(found._repr_html_())
    assert "b" not in page.tags and "<b>" in page.cells and "a & b" in page.cells
    body, _, notes = found.partition("\n\n")
    header, _, *lines = [line.split() for line in body.splitlines()]
    assert " ".join(page.cells).split() == [word for line in (header, *lines) for word in line]
    assert notes.splitlines()[0] in found._repr_html_()


def test_a_cell_in_a_notebook_says_what_it_is():
    cell = fake_cell("P(1/2)", diverged=2)
    row = measures.summarise(cell)[0]
    page = cell._repr_html_()
    assert "linear, local_sgd, P(1/2), 1,000 observations per client in 100 rounds" in page
    cells = Tables(page).cells
    assert cells[5:8] == ["plug_in", "38", "0"]
    assert cells[8:10] == [f"{row['bias']:.4g}", f"{row['length']:.4g}"]  # its truth is 0
    assert "-" in Tables(fake_cell(truth=None, diverged=40)._repr_html_()).cells


def test_objects_print_as_tables_and_are_tables_in_a_notebook(tmp_path):
    study = Study(
        [{"kind": "linear", "dim": 2, "num_clients": 3}], ["C1"], [40], ["plug_in"], replications=7
    )
    outcome = Outcome(3, 2, {"a-cell": "ValueError: no\nmore"}, 61.0)
    for shown, words in [
        (PLAN, ["plan", "C5", "300", "60", "0.5 m^-0.505"]),
        (PROBLEM, ["problem", "linear", "2: x[0] … x[1]", "3", "equal"]),
        (study, ["study", "1 cell", "plug_in", "7 per cell, 1 tile of 512"]),
        (
            outcome,
            ["outcome", "failed", "3", "2", "0:01:01", "cell a-cell failed", "ValueError: no"],
        ),
        (fake_cell("C5"), ["plug_in", "completed"]),
    ]:
        cells = Tables(shown._repr_html_()).cells
        text = " ".join(str(shown).split())
        assert set(words) <= set(cells)
        assert all(" ".join(cell.split()) in text for cell in cells)
        assert "\n" not in repr(shown) and len(repr(shown)) < 300
    assert str(PLAN.check()) == repr(PLAN.check())
    assert Tables(PLAN.check()._repr_html_()).cells[:5] == [
        *("assumption", "verdict", "why"),
        *("3.3", "holds"),
    ]
    table = measures.coverage_table(fake_cell("C5"))
    assert repr(table) == str(table) and isinstance(table, str)
    assert table.table.latex().count("plug\\_in") >= 1


def test_results_show_the_coverage_of_their_cells(tmp_path):
    fill(tmp_path, small())
    found = Results(tmp_path)
    assert "2 of 2 cells complete" in str(found)
    assert "random_scaling" in Tables(found._repr_html_()).cells
    assert repr(found) == f"Results({str(tmp_path)!r}, cells=2)"
    frame = found.to_frame()
    assert list(frame["schedule"].unique()) == ["C1", "P(1/2)"] and "coverage_mcse" in frame
    rows = found.to_frame(rows=True)
    assert tuple(rows.columns) == export.COLUMNS
    assert len(rows) == sum(len(rows.query(f"schedule == '{x}'")) for x in ("C1", "P(1/2)"))
    with refused("measure", "choice"):
        found.plot("width")


def test_figures_show_themselves_and_frames_have_the_numbers():
    one = fit(jax.random.key(0), PROBLEM, PLAN, **HOW)
    axis = one.plot().axes[0]
    assert [text.get_text() for text in axis.get_yticklabels()] == ["x[0]", "x[1]"]
    frame = one.to_frame()
    estimate, lower, upper = one.interval("plug_in")
    assert frame["estimate"].tolist() == estimate.tolist()
    assert frame["lower"].tolist() == lower.tolist() and frame["upper"].tolist() == upper.tolist()
    drawn = [segment for lines in axis.collections for segment in lines.get_segments()]
    assert sorted(x[0] for x, _ in drawn) == pytest.approx(sorted(lower))
    cell = fake_cell("C5")
    row = measures.summarise(cell)[0]
    (points,) = [x for x in cell.plot().axes[0].lines if len(x.get_xdata()) == 1][:1]
    assert points.get_ydata()[0] == pytest.approx(100 * row["coverage"])
    assert cell.plot("length")._repr_png_().startswith(b"\x89PNG")
    assert cell.to_frame()["coverage"][0] == row["coverage"]
    assert PLAN.to_frame()["observations"].tolist()[-1] == 300
