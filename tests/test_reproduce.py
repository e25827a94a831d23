"""The paper's tables and figures, end to end at a small size."""

from __future__ import annotations

import csv
import dataclasses
import math
import re
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from refusals import refused
from study_helpers import environment, tiles

from jaxlsgd import cli, plug_in, simulate
from jaxlsgd.core.rows import CellRows, MethodRows
from jaxlsgd.inference.laws.critical_values import paper_value
from jaxlsgd.problems import paper_linear
from jaxlsgd.report.paper import experiments, printed, reproduce, tables
from jaxlsgd.report.paper.printed import FIGURES, TARGETS, title
from jaxlsgd.report.paper.reproduce import Size
from jaxlsgd.schedules import PAPER_SCHEDULES, paper, power_decay
from jaxlsgd.study import StoreError
from jaxlsgd.study.progress import SilentProgress
from jaxlsgd.study.store.reader import Results
from jaxlsgd.study.study import Study

SMALL = ("--replications", 24, "--horizons", 120, 60)


def run(*arguments):
    """The exit code of `jaxlsgd reproduce`."""
    try:
        return cli.main(["reproduce", *map(str, arguments)])
    except SystemExit as leaving:
        return leaving.code


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _completed(path):
    """Runs with an interval; not of one_step, whose intervals are withheld at short horizons."""
    return {row["n_ok"] for row in read(path) if row["method"] != "one_step"}


@pytest.fixture
def quick(tmp_path_factory, monkeypatch):
    """`paper.toml` with two schedules and without the method whose critical values take seconds."""
    text = reproduce.PAPER.read_text()
    text = re.sub(r"(?m)^schedules = .*$", 'schedules = ["C1", "P(1/2)"]\ntile_size = 8', text)
    text = text.replace(', "random_scaling[finite]"', "")
    path = tmp_path_factory.mktemp("paper") / "paper.toml"
    path.write_text(text)
    monkeypatch.setattr(reproduce, "PAPER", path)
    return path


# What the paper prints, and what paper.toml says.


def test_printed_numbers_are_all_there():
    for name in ("table3", "table4"):
        table = printed.study_table(name)
        assert len(table) == 80
        for (method, measure, schedule, steps), number in table.items():
            assert method in printed.METHODS.values()
            assert schedule in PAPER_SCHEDULES
            assert steps in printed.HORIZONS
            if measure == "coverage":
                error = math.sqrt(number.value * (1 - number.value) / 1000)
                assert number.standard_error == pytest.approx(error, abs=1e-5)
    first = printed.study_table("table3")["plug_in", "length", "C1", 5_000]
    assert first == pytest.approx((0.07857, 0.00099, 0.00099 / math.sqrt(1000)))


def test_printed_critical_values_are_those_of_the_methods():
    table = {
        0: (3.877, 5.324, 6.753, 8.634),
        1 / 3: (3.712, 5.048, 6.339, 8.0945),
        1 / 2: (3.446, 4.621, 5.851, 7.386),
        2 / 3: (3.027, 4.012, 4.993, 6.292),
    }
    for beta, values in table.items():
        levels = (0.8, 0.9, 0.95, 0.98)
        assert tuple(paper_value(beta, level) for level in levels) == values


def test_paper_toml_is_the_papers_study():
    study = Study.from_toml(reproduce.PAPER)
    assert [problem.kind for problem in study.problems] == ["paper-linear", "paper-logistic"]
    assert tuple(schedule.name for schedule in study.schedules) == PAPER_SCHEDULES
    assert {schedule.warmup for schedule in study.schedules} == {0.05}
    assert {method.name for method in study.methods} == set(experiments._NAMES)
    assert set(printed.METHODS) < set(experiments._NAMES)
    assert study.levels == (0.95,)
    assert study.replications == printed.RUNS


# Tables 1 and 2: the theory.


def test_table1_has_the_papers_limits(tmp_path):
    assert run("table1", "--out", tmp_path) == 0
    rows = read(tmp_path / "table1.csv")
    last = [row for row in rows if row["num_rounds"] == "1000000"]
    for row in last:
        if row["E_m"] != "<= 5, 1 to 5 in turn":
            assert float(row["nu_hat"]) == pytest.approx(float(row["paper_nu"]), rel=0.02)
        if row["paper_acf"]:
            assert float(row["acf"]) == pytest.approx(float(row["paper_acf"]), rel=0.08)
    cycle = next(row for row in last if row["E_m"].endswith("in turn"))
    assert float(cycle["nu_hat"]) == pytest.approx(3 * (1 + 1 / 2 + 1 / 3 + 1 / 4 + 1 / 5) / 5)
    assert (tmp_path / "table1.txt").read_text().startswith("Table 1")


def test_table2_is_exact_printed_and_simulated(tmp_path):
    assert run("table2", "--replications", 20, "--seed", 5, "--out", tmp_path) == 0
    rows = read(tmp_path / "table2.csv")
    assert len(rows) == 16
    exact = {(round(float(r["beta"]), 3), float(r["point"])): float(r["exact"]) for r in rows}
    points = [exact[beta, 0.975] for beta in (0.0, 0.333, 0.5, 0.667)]
    assert points == pytest.approx([6.7473, 6.3616, 5.8069, 4.9711], abs=1e-4)
    # 16 correlated comparisons of 1,000 paths each with the printed values: 5 is beyond chance.
    assert max(abs(float(row["z"])) for row in rows) < 5
    assert "1,000 paths of 1,000 steps, seed 5" in (tmp_path / "table2.md").read_text()


# Tables 3 and 4, and the figures: from studies.


@pytest.mark.usefixtures("quick")
def test_table4_end_to_end(tmp_path, capsys):
    arguments = [*SMALL, "--seed", 1, "--out", tmp_path]
    assert run("table4", *arguments) == 0
    rows = read(tmp_path / "table4.csv")
    assert tuple(rows[0]) == experiments.COLUMNS
    assert [int(row["num_steps"]) for row in rows] == [60, 60, 120, 120] * 4
    assert {row["model"] for row in rows} == {"logistic"}
    assert {row["critical"] for row in rows} == {"normal", "paper", "student"}
    assert _completed(tmp_path / "table4.csv") == {"24"}
    assert all(0 <= float(row["coverage"]) <= 1 for row in rows if row["n_ok"] != "0")
    assert all(row["paper_length"] == "" for row in rows), "the paper has no such horizon"
    text = (tmp_path / "table4.txt").read_text()
    assert text.startswith("Table 4: logistic regression, d = 5. Plug-in: coverage rate (%)")
    assert "t_T=60" in text
    assert experiments.CALIBRATION[:40] not in text
    told = capsys.readouterr()
    assert "left" in told.err, "the ordinary progress"
    assert "done: 24 tiles" in told.out
    assert "Table 4: no cell to compare with the paper." in told.out
    assert cli.main(["table", str(tmp_path / "study-tables")]) == 0, "an ordinary study"


@pytest.mark.usefixtures("quick")
def test_rows_are_those_of_the_papers_plan(tmp_path):
    """Of the key of the seed and the plan of the schedule, and nothing else."""
    assert run("table3", *SMALL, "--seed", 7, "--out", tmp_path) == 0
    results = Results(tmp_path / "study-tables")
    found = next(x for x in results.read_all() if (x.schedule, x.num_steps) == ("P(1/2)", 120))
    plan = paper("P(1/2)").with_warmup(0.05).plan(power_decay(0.5, 0.505), num_steps=120)
    alone = simulate(jax.random.key(7), paper_linear(), plan, replications=24, methods=[plug_in()])
    for name in ("estimate", "half_width"):
        mine, theirs = (getattr(x.methods["plug_in"], name) for x in (found, alone))
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)
    row = next(r for r in read(tmp_path / "table3.csv") if r["num_steps"] == "120")
    assert {row["method"], row["schedule"]} == {"plug_in", "C1"}


@pytest.mark.usefixtures("quick")
def test_figures_end_to_end(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    arguments = ["--replications", 8, "--horizons", 200, "--out", tmp_path]
    for name in ("figure1", "figure2"):
        assert run(name, *arguments) == 0
        assert (tmp_path / f"{name}.png").stat().st_size > 20_000
        assert (tmp_path / f"{name}.pdf").stat().st_size > 5_000
    out = capsys.readouterr().out
    assert "done: 4 tiles" in out
    assert "done: 0 tiles" in out, "both figures show the same rows"
    rows = read(tmp_path / "figure1.csv")
    assert {row["problem"] for row in rows} == {"linear", "logistic"}
    assert {row["problem"] for row in read(tmp_path / "figure2.csv")} == {"linear"}
    assert len({row["save_round"] for row in rows}) > 10
    last = max(int(row["save_round"]) for row in rows)
    ends = {(r["schedule"], int(r["save_steps"])) for r in rows if int(r["save_round"]) == last}
    steps = 2 + sum(math.isqrt(m - 1) + 1 for m in range(1, 41))  # 2 rounds of warm-up, then ⌈√m⌉
    assert ends == {("C1", 42), ("P(1/2)", steps)}


@pytest.mark.parametrize("horizon", [2, 19, 200, 5_000, 40_000])
def test_figures_warm_up_for_a_share_of_the_rounds(horizon):
    study = reproduce.study_of("figure1", Size((horizon,), 8, 0))
    step = power_decay(1.0)
    rounds = min(paper(x).plan(step, num_steps=horizon).num_rounds for x in PAPER_SCHEDULES)
    first = round(0.05 * rounds)
    assert {method.name for method in study.methods} == set(printed.METHODS)
    assert len(study.cells) == 2 * len(PAPER_SCHEDULES)
    for cell in study.cells:
        plan = cell.plan()
        rest = paper(cell.schedule.name).intervals(rounds - first)
        np.testing.assert_array_equal(plan.E, np.concatenate([np.ones(first), rest]))
        assert plan.warmup_rounds == first
        assert plan.beta == paper(cell.schedule.name).beta, "which the paper's q needs"
        assert cell.saved_rounds(plan)[-1] == rounds


# A directory: resumed, extended, put together, refused.


@pytest.mark.usefixtures("quick")
def test_two_targets_one_after_the_other_are_both_in_the_whole(tmp_path, capsys):
    assert run("table4", *SMALL, "--out", tmp_path) == 0
    before = tiles(tmp_path / "study-tables")
    assert run("table1", "--out", tmp_path) == 0
    assert run("table3", *SMALL, "--out", tmp_path) == 0
    assert "done: 0 tiles" in capsys.readouterr().out
    assert tiles(tmp_path / "study-tables") == before
    whole = (tmp_path / "reproduction.md").read_text()
    assert re.findall(r"(?m)^## (.*)$", whole) == ["Table 1", "Table 3", "Table 4"]
    for name in ("table1", "table3", "table4"):
        assert (tmp_path / f"{name}.md").read_text() in whole
    assert whole.count("Made from the rows in `study-tables`, seed 0.") == 2


@pytest.mark.usefixtures("quick")
def test_more_replications_extend_and_fewer_keep_what_is_there(tmp_path, capsys):
    arguments = ["--horizons", 60, "--quiet", "--out", tmp_path, "--replications"]
    assert run("table4", *arguments, 8) == 0
    before = tiles(tmp_path / "study-tables")
    assert run("table4", *arguments, 16) == 0
    after = tiles(tmp_path / "study-tables")
    assert len(after) == 2 * len(before)
    assert before.items() < after.items()
    assert _completed(tmp_path / "table4.csv") == {"16"}
    assert run("table4", *arguments, 8) == 0
    assert _completed(tmp_path / "table4.csv") == {"16"}


KILLED = """
import os, pathlib, signal, sys
from jaxlsgd import cli
from jaxlsgd.report.paper import reproduce
from jaxlsgd.study.store.writer import Writer

reproduce.PAPER = pathlib.Path(sys.argv[1])
commit, commits = Writer.commit, []

def commit_and_die(self, cell, first, rows):
    commit(self, cell, first, rows)
    commits.append(first)
    if len(commits) == 3:
        os.kill(os.getpid(), signal.SIGKILL)

Writer.commit = commit_and_die
cli.main(sys.argv[2:])
"""


def test_killed_after_three_tiles_it_goes_on_from_there(tmp_path, quick):
    arguments = ["reproduce", "table3", *SMALL, "--out", tmp_path / "killed"]
    command = [sys.executable, "-c", KILLED, quick, *arguments]
    code = subprocess.run(list(map(str, command)), env=environment(), timeout=120).returncode
    assert code == -signal.SIGKILL
    left = tiles(tmp_path / "killed" / "study-tables")
    assert len(left) == 3
    assert not (tmp_path / "killed" / "table3.csv").exists()
    assert cli.main(list(map(str, arguments))) == 0
    assert left.items() < tiles(tmp_path / "killed" / "study-tables").items()
    assert run("table3", *SMALL, "--out", tmp_path / "quiet") == 0
    pairs = zip(
        read(tmp_path / "killed/table3.csv"), read(tmp_path / "quiet/table3.csv"), strict=True
    )
    for resumed, whole in pairs:
        for key in ("schedule", "num_steps", "method", "coverage", "n_ok"):
            assert resumed[key] == whole[key]
        if whole["n_ok"] == "0":
            assert resumed["length"] == whole["length"] == ""
        else:
            assert float(resumed["length"]) == pytest.approx(float(whole["length"]), rel=1e-4)


@pytest.mark.usefixtures("quick")
def test_ctrl_c_leaves_what_is_committed(tmp_path, capsys, monkeypatch):
    pressed = []

    def press_once(self, replications, work):
        if not pressed:
            pressed.append(True)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(SilentProgress, "advance", press_once)
    handler = signal.getsignal(signal.SIGINT)
    assert run("table1", "--out", tmp_path) == 0
    assert run("table3", *SMALL, "--quiet", "--out", tmp_path) == 3
    assert signal.getsignal(signal.SIGINT) is handler
    assert re.search(r"partial: \d+ tiles .* the same command resumes", capsys.readouterr().out)
    left = tiles(tmp_path / "study-tables")
    assert 0 < len(left) < 24
    assert not (tmp_path / "table3.md").exists()
    assert "## Table 1" in (tmp_path / "reproduction.md").read_text()
    assert run("table3", *SMALL, "--out", tmp_path) == 0
    after = tiles(tmp_path / "study-tables")
    assert len(after) == 24
    assert left.items() < after.items()


@pytest.mark.usefixtures("quick")
def test_ctrl_c_in_one_study_keeps_the_next_from_beginning(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    done = []

    def press_at_the_last(self):
        done.append(True)
        if len(done) == 4:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(SilentProgress, "cell_done", press_at_the_last)
    arguments = ["all", "--replications", 8, "--horizons", 60, "--quiet", "--out", tmp_path]
    assert run(*arguments) == 3
    assert "partial: 0 tiles" in capsys.readouterr().out
    assert len(tiles(tmp_path / "study-tables")) == 4
    assert tiles(tmp_path / "study-figures") == {}
    whole = (tmp_path / "reproduction.md").read_text()
    assert re.findall(r"(?m)^## (.*)$", whole) == [f"Table {i}" for i in range(1, 5)]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (("--seed", "4"), ["with seed 0 and horizons 60, 120, not with seed 4"]),
        (("--horizons", "60"), ["not with seed 0 and horizons 60;"]),
    ],
)
def test_a_directory_of_another_reproduction_is_refused(tmp_path, capsys, changes, words):
    def refuse(study, directory):
        raise AssertionError("must not run")

    def start(study, directory):
        study.run(directory, max_time=0)
        return 3

    assert reproduce.reproduce(["table3"], tmp_path, Size((120, 60), 8, 0), start) == 3
    before = sorted(tmp_path.rglob("*"))
    assert run("table4", *SMALL, "--out", tmp_path, *changes) == 1
    told = capsys.readouterr().err
    place = tmp_path / "study-tables"
    assert told.startswith(f"jaxlsgd: error: {place} holds another study")
    assert f"give another --out, or delete {place}" in told
    assert [word for word in words if word not in told] == []
    assert sorted(tmp_path.rglob("*")) == before


def test_a_study_of_another_paper_toml_is_refused(tmp_path, quick):
    def start(study, directory):
        study.run(directory, max_time=0)
        return 3

    size = Size((60,), 8, 0)
    assert reproduce.reproduce(["table3"], tmp_path, size, start) == 3
    quick.write_text(quick.read_text().replace("warmup = 0.05", "warmup = 0.1"))
    with refused(tmp_path / "study-tables", "conflict", "paper.toml", kind=StoreError):
        reproduce.reproduce(["table3"], tmp_path, size, start)


def test_figures_of_the_same_rounds_are_the_same_study():
    """Figures show one path, as long as the longest horizon allows."""
    one, other = (reproduce.study_of("figure2", Size(h, 8, 0)) for h in ((60, 200), (200,)))
    assert one.digest == other.digest
    assert dataclasses.replace(one, seed=1).digest != one.digest


def test_bad_arguments_are_refused(capsys, tmp_path):
    for arguments, word in (
        (["table9"], "table9"),
        (["table3", "--replications", "-5"], "'-5'"),
        (["table3", "--replications", "1"], "must be an integer of at least 2, got '1'"),
        (["table3", "--replications", "1000000000"], "replications: must be an integer from 1 to"),
        (["table3", "--horizons", "many"], "'many'"),
        (["table3", "--horizons"], "--horizons"),
        (["table3", "--horizons", "1000000000"], "horizons[0]: must be an integer from 1 to"),
        (["figure1", "--horizons", "1000000000"], "horizons[0]: must be an integer from 1 to"),
        (["table3", "--seed", "-1"], "must be an integer from 0 to 4294967295, got '-1'"),
        (["table2", "--seed", "4294967296"], "got '4294967296'"),
    ):
        assert run(*arguments, "--out", tmp_path / "out") == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1
        assert word in told
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_a_message(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run("table1", "--out", tmp_path / "file") == 1
    assert f"cannot make {tmp_path / 'file'}" in capsys.readouterr().err
    (tmp_path / "out" / "study-tables").mkdir(parents=True)
    (tmp_path / "out" / "study-tables" / "mine.txt").write_text("")
    assert run("table3", *SMALL, "--out", tmp_path / "out") == 1
    assert "is not empty and holds no study" in capsys.readouterr().err


def test_figures_without_matplotlib_are_refused_before_any_work(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run("all", *SMALL, "--out", tmp_path / "out") == 1
    assert "pip install 'jaxlsgd[plots]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# The sheets: ours beside the printed numbers.


def printed_cell(table, schedule, steps, shift=0.0):
    """A cell that has exactly the printed coverage and length of Table 3, plus a shift of length."""
    methods, n = {}, 1000
    for name, method in printed.METHODS.items():
        number = {m: table[method, m, schedule, steps] for m in ("coverage", "length")}
        spread = number["length"].in_parentheses
        length = number["length"].value + shift + spread * np.tile([-1.0, 1.0], n // 2)
        missed = np.arange(n) >= round(n * number["coverage"].value)
        estimate = np.where(missed, 9.0, 0.0)[None, :, None]
        half = (length / 2)[None, None, :, None]
        methods[name] = MethodRows(estimate, half[:, 0], half, np.zeros((1, n), bool))
    return CellRows(
        problem="linear",
        algorithm="local_sgd",
        schedule=schedule,
        num_steps=steps,
        num_rounds=10,
        save_at=(10,),
        steps_at=(steps,),
        levels=(0.95,),
        coordinates=dict.fromkeys(methods, ("x[0]",)),
        truth=dict.fromkeys(methods, np.zeros(1)),
        standard_error=dict.fromkeys(methods, True),
        labels={name: name for name in methods},
        methods=methods,
    )


def test_the_printed_numbers_themselves_have_z_of_zero():
    table = printed.study_table("table3")
    cells = [printed_cell(table, s, t) for s in PAPER_SCHEDULES for t in printed.HORIZONS]
    found = experiments.study_sheet("table3", cells)
    assert "80 of 80 cells within 4 combined standard errors" in found.verdict[0]
    assert "largest |z| 0.0" in found.verdict[0]
    assert "20 of 20 within 0.5 %" in found.verdict[1]
    line = found.tables[0].lines[0]
    assert line[:4] == ["C1", "95.70(0.641)", "95.70", "+0.0"]
    assert [line[0] for line in found.tables[0].lines] == list(PAPER_SCHEDULES)
    assert any(experiments.CALIBRATION in table.notes for table in found.tables)


def test_a_planted_difference_is_found():
    table = printed.study_table("table3")
    cells = [printed_cell(table, s, 5_000) for s in ("C1", "C5")]
    cells.append(printed_cell(table, "Log", 5_000, shift=0.02))
    verdict = experiments.study_sheet("table3", cells).verdict
    assert "10 of 12" in verdict[0]
    assert "plug_in length, Log, t_T = 5,000" in verdict[0]
    assert "2 of 3 within 0.5 %" in verdict[1]
    error = 0.371e-2 * math.sqrt(1 / 999 + 1 / 1000)
    assert f"largest |z| {0.02 / error:.1f}" in verdict[0]


def test_a_coverage_of_a_hundred_per_cent_has_an_error():
    table = printed.study_table("table3")
    cell = printed_cell(table, "C1", 5_000)
    full = {
        name: dataclasses.replace(rows, estimate=np.zeros_like(rows.estimate))
        for name, rows in cell.methods.items()
    }
    found = experiments.study_sheet("table3", [dataclasses.replace(cell, methods=full)])
    # Wilson's lower limit of 1,000 out of 1,000 is 1/(1 + 1.96²/1,000).
    low = 100 / (1 + 1.959964**2 / 1000)
    assert found.tables[0].lines[0][1] == f"100.00[{low:.1f}, 100.0]"
    assert any("Wilson intervals" in note for note in found.tables[-1].notes)
    error = math.hypot((100 - low) / 3.92, 0.641)
    assert found.rows[0]["z_coverage"] == pytest.approx((100 - 95.7) / error, rel=1e-3)


def test_judged_counts_and_finds_the_largest():
    assert tables.judged([("a", 1.0), ("b", -5.0), ("c", None)]) == (1, 2, "b", -5.0)
    assert tables.judged([]) == (0, 0, None, 0.0)


def test_targets_have_the_papers_names():
    assert [title(target) for target in TARGETS][::3] == ["Table 1", "Table 4", "Figure 3"]
    assert set(FIGURES) < set(TARGETS)
