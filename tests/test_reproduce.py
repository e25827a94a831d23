"""The paper's tables and figures, end to end at a small size."""

from __future__ import annotations

import argparse
import csv
import math

import numpy as np
import pytest

from jaxlsgd.core.rows import CellRows, MethodRows
from jaxlsgd.report.paper import experiments as paper_studies
from jaxlsgd.report.paper import numbers as paper_numbers
from jaxlsgd.report.paper import reproduce
from jaxlsgd.report.paper import tables as paper_tables
from jaxlsgd.schedules import PAPER_SCHEDULES

paper_cells = pytest.importorskip("jaxlsgd.report.paper.cells")


def run(*arguments):
    parser = argparse.ArgumentParser()
    reproduce.add_arguments(parser)
    return reproduce.main(parser.parse_args([str(argument) for argument in arguments]))


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def quick(monkeypatch):
    """Two schedules, and without our random scaling, whose critical values take seconds a plan."""
    monkeypatch.setattr(paper_cells, "PAPER_SCHEDULES", ("C1", "P(1/2)"))
    monkeypatch.setattr(paper_cells, "OUR_METHODS", paper_cells.OUR_METHODS[:1])


def test_printed_numbers_are_all_there():
    for name in ("table3", "table4"):
        table = paper_numbers.study_table(name)
        assert len(table) == 80
        for (_, measure, schedule, steps), number in table.items():
            assert schedule in PAPER_SCHEDULES
            assert steps in paper_numbers.HORIZONS
            if measure == "coverage":
                error = math.sqrt(number.value * (1 - number.value) / 1000)
                assert number.standard_error == pytest.approx(error, abs=1e-5)
    first = paper_numbers.study_table("table3")["plug_in", "length", "C1", 5_000]
    assert first == pytest.approx((0.07857, 0.00099, 0.00099 / math.sqrt(1000)))


def test_methods_are_the_papers_and_ours():
    methods = paper_cells.PAPER_METHODS + paper_cells.OUR_METHODS
    assert {method.name for method in methods} == set(paper_studies._NAMES)


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
    assert run("table2", "--replications", 20, "--out", tmp_path) == 0
    rows = read(tmp_path / "table2.csv")
    assert len(rows) == 16
    exact = {(round(float(r["beta"]), 3), float(r["point"])): float(r["exact"]) for r in rows}
    points = [exact[beta, 0.975] for beta in (0.0, 0.333, 0.5, 0.667)]
    assert points == pytest.approx([6.7473, 6.3616, 5.8069, 4.9711], abs=1e-4)
    # 16 correlated comparisons of 1,000 paths each with the printed values: 5 is beyond chance.
    assert max(abs(float(row["z"])) for row in rows) < 5


@pytest.mark.usefixtures("quick")
def test_table4_end_to_end(tmp_path, capsys):
    arguments = ["--replications", 24, "--horizons", 120, 60, "--seed", 1, "--out", tmp_path]
    assert run("table4", *arguments) == 0
    rows = read(tmp_path / "table4.csv")
    assert tuple(rows[0]) == paper_studies.COLUMNS
    assert len(rows) == 2 * 2 * 3
    assert {row["critical"] for row in rows} == {"normal", "paper"}
    assert {row["n_ok"] for row in rows} == {"24"}
    assert all(0 <= float(row["coverage"]) <= 1 for row in rows)
    assert all(row["paper_length"] == "" for row in rows), "the paper has no such horizon"
    text = (tmp_path / "table4.txt").read_text()
    assert text.startswith("Table 4: logistic regression, d = 5. Plug-in: coverage rate (%)")
    assert "t_T=60" in text
    assert "calibr" not in text
    assert "Table 4" in (tmp_path / "reproduction.md").read_text()
    assert "left" in capsys.readouterr().err


@pytest.mark.usefixtures("quick")
def test_figures_end_to_end(tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("figure1", "figure2"):
        arguments = ["--replications", 8, "--horizons", 200, "--quiet", "--out", tmp_path]
        assert run(name, *arguments) == 0
        assert (tmp_path / f"{name}.png").stat().st_size > 20_000
        assert (tmp_path / f"{name}.pdf").stat().st_size > 5_000
    rows = read(tmp_path / "figure1.csv")
    assert {row["problem"] for row in rows} == {"linear", "logistic"}
    assert len({row["save_round"] for row in rows}) > 10
    last = max(int(row["save_round"]) for row in rows)
    ends = {(r["schedule"], int(r["save_steps"])) for r in rows if int(r["save_round"]) == last}
    steps = 2 + sum(math.isqrt(m - 1) + 1 for m in range(1, 41))  # 2 rounds of warm-up, then ⌈√m⌉
    assert ends == {("C1", 42), ("P(1/2)", steps)}


def printed_cell(table, schedule, steps, shift=0.0):
    """A cell that has exactly the printed coverage and length of Table 3, plus a shift of length."""
    methods, n = {}, 1000
    for name, (method, _, known) in paper_studies._NAMES.items():
        if not known:
            continue
        number = {m: table[method, m, schedule, steps] for m in ("coverage", "length")}
        spread = number["length"].in_parentheses
        length = number["length"].value + shift + spread * np.tile([-1.0, 1.0], n // 2)
        missed = np.arange(n) >= round(n * number["coverage"].value)
        estimate = np.where(missed, 9.0, 0.0)[None, :, None]
        half = (length / 2)[None, None, :, None]
        methods[name] = MethodRows(estimate, half[:, 0], half, np.zeros((1, n), bool))
    one = dict.fromkeys(methods, ("x[0]",))
    zero = dict.fromkeys(methods, np.zeros(1))
    return CellRows("linear", schedule, steps, 10, (10,), (steps,), (0.95,), one, zero, methods)


def test_the_printed_numbers_themselves_have_z_of_zero():
    table = paper_numbers.study_table("table3")
    cells = [printed_cell(table, s, t) for t in paper_numbers.HORIZONS for s in PAPER_SCHEDULES]
    sheet = paper_studies.study_sheet("table3", cells)
    assert "80 of 80 cells within 4 combined standard errors" in sheet.verdict[0]
    assert "largest |z| 0.0" in sheet.verdict[0]
    assert "20 of 20 within 0.5 %" in sheet.verdict[1]
    line = sheet.tables[0].lines[0]
    assert line[:4] == ["C1", "95.70(0.641)", "95.70", "+0.0"]
    assert any(paper_studies.CALIBRATION in table.notes for table in sheet.tables)


def test_a_planted_difference_is_found():
    table = paper_numbers.study_table("table3")
    cells = [printed_cell(table, s, 5_000) for s in ("C1", "C5")]
    cells.append(printed_cell(table, "Log", 5_000, shift=0.02))
    verdict = paper_studies.study_sheet("table3", cells).verdict
    assert "10 of 12" in verdict[0]
    assert "plug_in length, Log, t_T = 5,000" in verdict[0]
    assert "2 of 3 within 0.5 %" in verdict[1]
    error = 0.371e-2 * math.sqrt(1 / 999 + 1 / 1000)
    assert f"largest |z| {0.02 / error:.1f}" in verdict[0]


def test_bad_arguments_are_refused(capsys, tmp_path):
    for arguments in (
        ["table9"],
        ["table3", "--replications", "-5"],
        ["table3", "--horizons", "many"],
        ["table3", "--seed", "-1"],
    ):
        with pytest.raises(SystemExit):
            run(*arguments, "--out", tmp_path)
    assert "must be an integer of at least 2, got 'many'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_a_message(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run("table1", "--out", tmp_path / "file") == 1
    assert "cannot write" in capsys.readouterr().err


def test_judged_counts_and_finds_the_largest():
    assert paper_tables.judged([("a", 1.0), ("b", -5.0), ("c", None)]) == (1, 2, "b", -5.0)
    assert paper_tables.judged([]) == (0, 0, None, 0.0)
