"""Tables and figures from small made-up cells."""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import json
import re
import shutil
import subprocess
import sys
from typing import get_args

import numpy as np
import page_helpers
import pandas
import pytest
import xarray
from refusals import refused
from report_helpers import fake_cell
from study_helpers import small

from jaxlsgd.analysis import measures
from jaxlsgd.cli import results as results_lib
from jaxlsgd.core import display
from jaxlsgd.core.causes import Cause
from jaxlsgd.core.display import Table
from jaxlsgd.report import export, figures, style, tables
from jaxlsgd.report.tables import Selection

X1 = Selection(coordinate="x[1]")


@pytest.fixture
def cells():
    return [fake_cell("C1", saves=3), fake_cell("P(1/2)", saves=3, seed=1, diverged=2)]


def summaries(cells):
    return [row for cell in cells for row in measures.summarise(cell)]


def test_csv_holds_every_number_and_no_nan(cells):
    text = tables.render(cells, "csv")
    records = list(csv.DictReader(io.StringIO(text)))
    rows = summaries(cells)
    assert len(records) == len(rows) == 2 * 3 * 2 * 2
    assert "nan" not in text.lower()
    for record, row in zip(records, rows, strict=True):
        assert set(record) <= set(row)
        for key, field in record.items():
            expected = row[key]
            found = expected if isinstance(expected, str) else float(field) if field else None
            assert found == expected


def test_json_is_the_same_records(cells):
    rows = summaries(cells)
    for record, row in zip(json.loads(tables.render(cells, "json")), rows, strict=True):
        assert record == {key: row[key] for key in record}


@pytest.mark.parametrize("format", get_args(tables.Format))
def test_every_format_takes_every_kind_of_source(cells, format):
    class Results:
        def read_all(self):
            return cells

    expected = tables.render(cells, format)
    assert tables.render(Results(), format) == expected
    assert tables.render([*cells, None], format) == expected
    assert tables.render(cells[0], format) == tables.render(cells[:1], format)
    assert tables.render([], format)


def test_one_table_is_written_in_five_formats():
    table = Table("All & <one>", ["name", "a|b"], [["x_1", "-0.5"], ["=y", "2"]], (0,), ("Why.",))
    assert table.width == 10
    assert table.text().splitlines()[2:] == [
        "name   a|b",
        "----  ----",
        "x_1   -0.5",
        "=y       2",
        "",
        "Why.",
    ]
    assert "| x_1  | -0.5 |" in table.markdown() and "a\\|b" in table.markdown()
    assert (
        r"x\_1 & $-$0.5 \\" in table.latex()
        and r"\caption{All \& \textless{}one\textgreater{}. Why.}" in table.latex()
    )
    assert table.html(" class=l", "").startswith(
        "<table><caption class=l>All &amp; &lt;one&gt;</caption>"
    )
    assert "<td class=l>x_1</td><td>-0.5</td>" in table.html(" class=l", "")
    assert table.html().endswith("</table><p>Why.</p>")
    assert table.csv() == "name,a|b\nx_1,'-0.5\n'=y,2\n"
    assert Table.of([{"a": 1 / 3, "b": None, "c": 0}], ["b", "a"]).csv() == f"b,a\n,{1 / 3!r}\n"


def test_tables_for_people_show_errors_counts_and_failures(cells):
    text = tables.render(cells)
    title = "problem linear, steps 1,000, rounds 100, level 0.95, coordinate x[0]\n"
    assert text.startswith(title)
    assert "all runs %" in text and "SE bias" in text
    header, _, first, *_, last = text.splitlines()[2:7]
    assert header.split()[-2:] == ["completed", "failed"]
    assert first.split()[-2:] == ["40", "0"]
    assert last.split()[-2:] == ["38", "2"]
    assert "Why runs failed: see jaxlsgd failures." in text
    assert tables.render(cells, "markdown").count(" 2 not finite |") == 2
    assert len({len(line) for line in text.splitlines()[2:7]}) == 1
    row = measures.summarise(cells[0], last_only=True)[0]
    assert f"{100 * row['coverage']:.1f} ({100 * row['coverage_mcse']:.1f})" in first
    assert "all runs" not in tables.render(cells[:1])


def test_the_algorithm_is_named_where_it_is_not_local_sgd(cells):
    other = fake_cell("C1", algorithm="fedprox", seed=3)
    assert "algorithm" not in tables.render(cells)
    assert "algorithm" not in tables.render_differences(cells)
    assert tables.render(other).startswith("problem linear, algorithm fedprox, schedule C1")
    both = [*cells, other]
    header = tables.render(both).splitlines()[2]
    assert header.split()[:2] == ["algorithm", "schedule"]
    assert "algorithm" in tables.render_differences(both)
    for render in (tables.render, tables.render_differences):
        records = csv.DictReader(io.StringIO(render(both, "csv")))
        assert {record["algorithm"] for record in records} == {"local_sgd", "fedprox"}
    assert json.loads(tables.render(cells, "json"))[0]["algorithm"] == "local_sgd"


def test_notes_explain_what_is_shown(cells):
    text = tables.render(cells)
    assert "standard errors in parentheses" in text
    assert "counts those that failed as misses" in text
    assert "SE bias: " not in tables.render(cells, measures=["length"])


def test_measures_and_coordinates_can_be_chosen(cells):
    text = tables.render(
        cells, selection=Selection(coordinate="all"), measures=["length_sd", "acf"]
    )
    assert "length SD" in text
    assert "coverage" not in text
    assert text.count("x[1]") == 4
    record = next(csv.DictReader(io.StringIO(tables.render(cells, "csv", measures=["rmse"]))))
    end = ("rmse", "rmse_mcse", *measures.TRUTH, "cost")
    assert list(record) == [*measures.IDENTITY, *measures.COUNTS, *end]
    assert len(json.loads(tables.render(cells, "json", selection=X1))) == 12


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"format": "markdwn"}, ("format", "choice", "'markdown'")),
        ({"measures": ["converage"]}, ("measure", "choice", "'coverage'")),
        ({"sort": "lenght"}, ("sort", "choice", "'length'")),
        ({"coordinate": "x[9]"}, ("coordinate", "choice", "x[0], x[1]")),
        ({"methods": ["plugin"]}, ("method", "choice", "'plug_in'")),
        ({"schedules": ["P(1/3)"]}, ("schedule", "choice", "'P(1/2)'")),
        ({"problems": ["linaer"]}, ("problem", "choice", "'linear'")),
        ({"levels": [0.9]}, ("level", "choice", "0.95")),
    ],
)
def test_bad_arguments_are_refused(cells, arguments, why):
    fields = {field.name for field in dataclasses.fields(Selection)}
    chosen = {key: value for key, value in arguments.items() if key in fields}
    rest = {key: value for key, value in arguments.items() if key not in fields}
    with refused(*why):
        tables.render(cells, selection=Selection(**chosen), **rest)


def test_something_else_than_rows_is_refused():
    with refused("cells", "type"):
        tables.render([1, 2])


def test_markdown_is_a_pipe_table(cells):
    lines = [line for line in tables.render(cells, "markdown").splitlines() if "|" in line]
    assert re.fullmatch(r"(\| -+:? )+\|", lines[1])
    assert len({line.count("|") for line in lines}) == 1


def test_latex_is_escaped_and_balanced():
    cell = fake_cell("50%_{E}&$x^2#~\\", problem="a_b")
    text = tables.render([cell, fake_cell("C1", seed=2)], "latex")
    assert r"50\%\_\{E\}\&\$x\textasciicircum{}2\#\textasciitilde{}\textbackslash{}" in text
    rows = re.search(r"\\toprule(.*)\\bottomrule", text, re.DOTALL)[1]
    lines = [line for line in rows.splitlines() if line and not line.startswith("\\midrule")]
    columns = re.search(r"\\begin{tabular}{(\w+)}", text)[1]
    assert {len(re.findall(r"(?<!\\)&", line)) for line in lines} == {len(columns) - 1}
    assert all(line.endswith(r" \\") for line in lines)
    bare = re.sub(r"\\[\\%_{}&$#]", "", text)
    assert bare.count("{") == bare.count("}")
    assert not re.search(r"(?<!\\)[_#]", text.split("\n", 1)[1])


def test_latex_is_for_a_paper():
    cells = [fake_cell(f"E = {i}", seed=i) for i in range(1, 30)]
    long = tables.render(cells, "latex")
    assert "Cost of" not in long and "Left out" not in long
    assert long.count(r"\begin{longtable}") == 1 and long.count(r"\endhead") == 1
    short = tables.render(cells[:4], "latex", across=True)
    assert (
        r"\begin{tabular}{lrr}" in short and r"random\_scaling\\{[}paper]\end{tabular} \\" in short
    )
    assert short.count(r"\toprule") == short.count(r"\bottomrule") == 1


def test_methods_across_have_the_numbers_of_the_long_table(cells):
    text = tables.render(cells, across=True, measures=["coverage", "length"])
    for measure in ("coverage %", "length"):
        assert f"{measure}: problem linear" in text
    long = tables.tabulate(
        [r for c in cells for r in measures.summarise(c, last_only=True) if r["coordinate"] == "x[0]"],
        ("schedule", "method"), ("coverage",), (),
    )  # fmt: skip
    first = text.split("length: ")[0]
    for schedule, method, coverage in long.lines:
        line = next(x for x in first.splitlines() if x.startswith(schedule))
        assert coverage in line, method


@pytest.mark.skipif(not shutil.which("pdflatex"), reason="needs pdflatex, with booktabs")
def test_latex_compiles_and_stays_between_the_margins(tmp_path):
    names = {"problem": "logistic", "levels": (0.9, 0.95)}
    cells = [fake_cell(f"P({i}/40)", seed=i, **names) for i in range(1, 30)]
    cells += [fake_cell("C1", seed=40, diverged=3, **names)]
    parts = [tables.render(cells, "latex", across=across) for across in (False, True)]
    parts.append(tables.render(cells[:3], "latex"))
    body = "\n\\clearpage\n".join(parts)
    head = "\\documentclass{article}\n\\usepackage{booktabs,longtable}\n\\begin{document}\n"
    (tmp_path / "a.tex").write_text(f"{head}{body}\\end{{document}}\n", encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "a.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-800:]
    for wrong in ("Overfull", "Float too large"):
        assert wrong not in done.stdout


def test_parts_of_a_table_have_the_same_columns():
    # Rounds vary in the first part and not in the second: they are a column of both.
    cells = [fake_cell(name, problem=p) for p in ("p", "q") for name in ("C1", "C5")]
    cells[1] = dataclasses.replace(cells[1], num_rounds=50, save_at=(50,))
    parts = [
        [r for c in part for r in measures.summarise(c, last_only=True)]
        for part in (cells[:2], cells[2:])
    ]
    found = tables._alike(parts, ())
    assert found[0].header == found[1].header and "rounds" in found[0].header


def test_the_algorithm_is_named_in_all_parts_of_a_table():
    long = "a problem with a name that is long enough to cut the table"
    cells = [
        fake_cell(f"{long[:30]} {i}", algorithm=x)
        for i in range(2)
        for x in ("local_sgd", "fedprox")
    ]
    cells += [dataclasses.replace(cell, problem=long) for cell in cells]
    titles = [line for line in tables.render(cells).splitlines() if line.startswith("problem")]
    assert len(titles) > 1 and all("algorithm" in line for line in titles), titles


def test_a_negative_number_gets_a_real_minus_in_latex():
    assert display.escape_latex("-0.5 (0.1)") == "$-$0.5 (0.1)"
    assert display.escape_latex("[0.2, 1]") == "{[}0.2, 1]"
    assert display.escape_latex("-") == "-"


HOSTILE = "y\n\\input{/etc/passwd}\x1b[31m\r\u202e%"


def test_text_of_others_stays_in_its_cell():
    """Neither a terminal, nor LaTeX, nor Markdown gets line breaks or control characters from a table's cells."""
    table = Table(f"Of {HOSTILE}", ["a", HOSTILE], [[HOSTILE, "1"], ["b", "2"]], (0,), (HOSTILE,))
    for made in (table.text(), table.markdown(), table.latex()):
        assert made.replace("\n", "").isprintable()
        assert not any(line.startswith(("\\input", "| \\input")) for line in made.splitlines())
    assert len(table.markdown().splitlines()) == 8  # title, head, rule, two lines and the note
    assert r"y\textbackslash{}n\textbackslash{}input\{/etc/passwd\}" in table.latex()
    assert "\\input" not in table.latex()
    assert display.align([["name"], [HOSTILE]]).count("\n") == 2


@pytest.mark.parametrize("first", "=+-@\t\r\n")
def test_no_cell_of_a_csv_is_a_formula(first):
    text = f"{first}HYPERLINK(1)"
    read = list(csv.reader(io.StringIO(Table("", [text, "b"], [["a", text]]).csv())))
    text = text.replace("\t", "\\t").replace("\r", "\\r")
    assert read == [[f"'{text}", "b"], ["a", f"'{text}"]]


def test_no_csv_tells_a_terminal_what_to_do():
    assert Table("", ["a"], [["x\x1b[31m\ry"], [1.5]]).csv() == "a\nx\\x1b[31m\\ry\n1.5\n"


def test_unknown_truth_is_empty_and_not_wrong():
    cell = fake_cell(truth=None)
    record = next(csv.DictReader(io.StringIO(tables.render(cell, "csv"))))
    assert record["coverage"] == record["bias"] == record["l2_error_mcse"] == ""
    assert float(record["length"]) > 0
    line = tables.render(cell).splitlines()[4]
    assert " - " in line


def test_differences_are_rendered(cells):
    text = tables.render_differences(cells)
    assert "reference schedule C1, reference method\n  plug_in" in text
    assert len(text.splitlines()) == 12
    records = json.loads(tables.render_differences(cells, "json", selection=X1))
    assert {record["n_pairs"] for record in records} == {38, 40}


def test_rows_are_chosen_and_sorted(cells):
    cells = [*cells, fake_cell("C1", problem="other", levels=(0.9, 0.95), seed=2)]
    wanted = Selection(problems=["linear", "other"], methods=["plug_in"], levels=[0.95])
    found = json.loads(
        tables.render(cells, "json", selection=wanted, sort="length", descending=True)
    )
    rows = [row for row in summaries(cells) if row["method"] == "plug_in" and row["level"] == 0.95]
    assert [x["length"] for x in found] == sorted((r["length"] for r in rows), reverse=True)
    one = tables.render(cells, selection=Selection(schedules=["P(1/2)"], methods=["plug_in"]))
    assert one.startswith(
        "problem linear, schedule P(1/2), steps 1,000, rounds 100, method plug_in"
    )
    unknown = json.loads(tables.render([fake_cell(truth=None), cells[0]], "json", sort="coverage"))
    assert [x["coverage"] is None for x in unknown] == [False] * 12 + [True] * 4  # those come last
    chosen = Selection(schedules=["P(1/2)"], problems=["linear"], methods=["plug_in"])
    text = tables.render_differences(cells, selection=chosen, sort="length_ratio")
    assert text.count("\nP(1/2)") + text.count("schedule P(1/2)") == 1
    assert "reference\n  schedule C1" in text


def test_text_fits_a_terminal_and_says_what_it_left_out(cells):
    wide = [
        fake_cell(schedule, problem=problem, levels=(0.9, 0.95), num_steps=steps, diverged=2)
        for schedule in ("C1", "P(1/2)")
        for problem in ("paper-linear", "paper-logistic")
        for steps in (5000, 40000)
    ]
    for rows in (cells, wide):
        text = tables.render(rows)
        assert max(map(len, text.splitlines())) <= display.WIDTH
        assert "Left out for width: RMSE" in text
    asked = tables.render(wide, measures=tables.SHOWN)
    assert "RMSE" in asked.splitlines()[2] and "Left out" not in asked
    assert "Left out" not in tables.render(wide, "markdown")
    alone = Selection(schedules=["C1"], methods=["plug_in"])
    assert "Left out" not in tables.render(cells, selection=alone)


@pytest.mark.parametrize("format", ["parquet", "netcdf"])
def test_extras_say_what_to_install(cells, format, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "xarray", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxlsgd\[tables\]'"):
        export.write(cells, tmp_path / "x", format)
    assert not list(tmp_path.iterdir())


def test_exports_hold_every_replication(cells, tmp_path):
    """Against loops over the arrays themselves."""
    other = fake_cell("C5", levels=(0.9, 0.95), replications=7, truth=None, seed=5)
    cells = [*cells, other]
    frame = pandas.read_parquet(export.write(cells, tmp_path / "x.parquet", "parquet"))
    assert list(frame.columns) == list(export.COLUMNS)
    assert len(frame) == sum(
        rows.half_width.size for cell in cells for rows in cell.methods.values()
    )
    read = pandas.read_csv(export.write(cells, tmp_path / "x.csv", "csv"))
    pandas.testing.assert_frame_equal(read, frame, check_dtype=False, check_exact=True)
    file = export.write(cells, tmp_path / "x.nc", "netcdf")
    for arrays in (xarray.load_dataset(file), export.to_xarray(cells)):
        for i, cell in enumerate(cells):
            place = frame[(frame.schedule == cell.schedule) & (frame.coordinate == "x[1]")]
            for name, rows in cell.methods.items():
                here = arrays.isel(cell=i).sel({"method": name, "coordinate": "x[1]"})
                assert here.schedule == cell.schedule
                lines = place[(place.method == name) & (place.save_round == cell.save_at[-1])]
                for j, level in enumerate(cell.levels):
                    n, save = cell.replications, len(cell.save_at) - 1
                    right = rows.half_width[save, j, :, 1]
                    found = here.half_width.isel(save=save).sel(level=level).values
                    np.testing.assert_array_equal(found[:n], right)
                    assert np.isnan(found[n:]).all()
                    at = lines[lines.level == level].sort_values("replication")
                    np.testing.assert_array_equal(at.half_width, right)
                    np.testing.assert_array_equal(at.estimate, rows.estimate[save, :, 1])
                    causes = [Cause(c).text for c in rows.cause[save]]
                    assert at.cause.tolist() == causes
    assert frame[frame.schedule == "C5"].truth.isna().all()


def test_an_export_is_whole_and_replaces_nothing_unasked(cells, tmp_path, monkeypatch):
    path = tmp_path / "rows.csv"
    path.write_text("mine")
    with pytest.raises(FileExistsError):
        export.write(cells, path, "csv")
    assert path.read_text() == "mine"
    monkeypatch.setattr(export, "_blocks", lambda cell: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export.write(cells, path, "csv", force=True)
    assert path.read_text() == "mine" and list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    export.write(cells, path, "csv", force=True)
    assert path.read_text().startswith("problem,algorithm,")


@pytest.mark.parametrize(
    "name",
    [
        "report.tables",
        "report.figures",
        "report.style",
        "report.paper",
        "analysis.measures",
        "analysis.pairs",
        "inference.joint",
        "inference.critical_values",
        "inference.NORMAL",
    ],
)
def test_rooms_are_there_after_importing_the_package(name):
    room, part = name.split(".")
    code = f"import jaxlsgd; assert {part!r} in dir(jaxlsgd.{room}); jaxlsgd.{room}.{part}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_tables_start_without_jax_and_matplotlib():
    code = (
        "import sys, jaxlsgd.report.tables, jaxlsgd.report.figures, jaxlsgd.report.paper.reproduce;"
        "sys.exit(bool({'jax', 'matplotlib'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_figures_are_saved_as_png_and_pdf(cells, tmp_path):
    cells = [*cells, fake_cell("custom[9]", problem="my problem", saves=3)]
    paths = figures.save_all(cells, tmp_path / "new" / "figures")
    names = {path.stem for path in paths}
    assert names == {
        "coverage",
        "length",
        "rounds_linear_1000",
        "rounds_my-problem_1000",
        "l2_error",
    }
    assert {path.suffix for path in paths} == {".png", ".pdf"}
    assert all(path.stat().st_size > 5_000 for path in paths)
    assert paths[0].read_bytes().startswith(b"\x89PNG")


def titles(figure):
    return [axis.get_title(loc="left") for axis in figure.axes]


def test_figures_use_the_labels_that_rows_carry(cells):
    rows = [row for cell in cells for row in figures.first_coordinate(cell)]
    several = [*rows, *(row | {"num_steps": 10 * row["num_steps"]} for row in rows)]
    labels = ["Plug-in", "Random scaling, paper's q"]
    assert titles(figures.by_schedule(several, "length")) == labels
    assert titles(figures.along_rounds(rows))[0] == "Plug-in: coverage (%)"
    same = [row | {"label": "plug-in"} for row in rows]
    (legend,) = figures.by_schedule(same, "length").legends
    told = [text.get_text().replace("\n", " ") for text in legend.get_texts()]
    assert told == ["plug-in (plug_in)", "plug-in (random_scaling[paper])"]


def test_algorithms_have_panels_and_files_of_their_own(cells, tmp_path):
    other = fake_cell("C1", algorithm="fedprox", saves=3, seed=3)
    names = {path.stem for path in figures.save_all([*cells, other], tmp_path)}
    assert names >= {"rounds_linear_1000", "rounds_linear_fedprox_1000"}
    rows = [row for cell in [*cells, other] for row in figures.first_coordinate(cell)]
    found = titles(figures.by_schedule([r for r in rows if r["save_round"] == 100], "coverage"))
    assert [title.split(", ")[:2] for title in found] == [
        ["Linear", "local_sgd"],
        ["Linear", "fedprox"],
    ]
    assert titles(figures.error_along_rounds(rows)) == ["Linear, local_sgd", "Linear, fedprox"]
    alone = figures.first_coordinate(other)
    assert titles(figures.along_rounds(alone))[0] == "Plug-in, fedprox: coverage (%)"
    lines = [len(axis.get_lines()) for axis in figures.error_along_rounds(rows).axes]
    assert lines == [4, 2]


def test_a_schedule_looks_as_in_the_legend_in_every_panel():
    cells = [fake_cell("x", saves=3), fake_cell("y", saves=3), fake_cell("y", problem="p", saves=3)]
    rows = [row for cell in cells for row in figures.first_coordinate(cell)]
    several = [*rows, *(row | {"num_steps": 10 * row["num_steps"]} for row in rows)]
    for figure in (figures.error_along_rounds(rows), figures.by_schedule(several, "length")):
        (legend,) = figure.legends
        expected = legend.legend_handles[1].get_color()
        assert figure.axes[-1].get_lines()[0].get_color() == expected


def last_rounds(*cells):
    rows = [row for cell in cells for row in figures.first_coordinate(cell)]
    return [row for row in rows if row["save_round"] == row["num_rounds"]]


def texts(figure):
    return [text.get_text() for axis in figure.axes for text in axis.texts]


def test_schedules_are_along_x_where_there_is_one_horizon():
    rows = last_rounds(fake_cell("C1"), fake_cell("C5"), fake_cell("Log", seed=1))
    figure = figures.by_schedule(rows, "coverage")
    (axis,) = figure.axes
    assert [label.get_text() for label in axis.get_xticklabels()] == ["C1", "C5", "Log"]
    assert (
        "x[0], 95 % intervals, 40 replications per cell. Bars: 95 % Wilson"
        in figure.get_supxlabel()
    )
    several = figures.by_schedule(
        [*rows, *(row | {"num_steps": 10 * row["num_steps"]} for row in rows)], "coverage"
    )
    assert [label.get_text() for label in several.axes[0].get_xticklabels()] == ["1,000", "10,000"]


def test_a_figure_names_its_problem_in_a_title_or_below():
    cells = [fake_cell("C1", num_steps=steps, saves=3) for steps in (500, 1000)]
    rows = [row for cell in cells for row in figures.first_coordinate(cell)]
    last = [row for row in rows if row["save_round"] == row["num_rounds"]]
    assert figures.by_schedule(last, "coverage").get_supxlabel().startswith("linear: x[0], 95 %")
    along = figures.along_rounds(figures.first_coordinate(cells[0])).get_supxlabel()
    assert along.startswith("linear, 500 observations per client: x[0], 95 %")
    other = [row | {"problem": "logistic"} for row in last]
    assert figures.by_schedule([*last, *other], "coverage").get_supxlabel().startswith("x[0], ")


def test_what_is_below_the_axis_is_marked_with_its_number(cells):
    low = fake_cell("C5", truth=(0.15, 1.0), saves=3, seed=4)  # off by more than a standard error
    rows = last_rounds(cells[0], low)
    lowest = sorted({f"{100 * row['coverage']:.0f}" for row in rows if row["schedule"] == "C5"})
    assert max(map(float, lowest)) < 75
    assert sorted(set(texts(figures.by_schedule(rows, "coverage")))) == lowest
    along = [row for cell in (cells[0], low) for row in figures.first_coordinate(cell)]
    figure = figures.along_rounds(along)
    assert set(lowest) <= set(texts(figure))
    assert "Triangles: below the axis" in figure.get_supxlabel()
    # All panels of a measure have one range, and every line in it or marked.
    assert len({axis.get_ylim() for axis in figure.axes[::2]}) == 1
    assert len({axis.get_ylim() for axis in figure.axes[1::2]}) == 1
    assert figure.axes[0].get_ylim()[0] == 75


def test_the_end_of_the_warm_up_is_marked(tmp_path):
    results = page_helpers.write(tmp_path / "s", small())
    warmup = functools.cache(results_lib._warmup)(str(tmp_path / "s"))
    rows = figures.first_coordinate(results.read_all()[0])
    assert warmup(rows[0]) == results.cell(results.cells()[0]).plan().warmup_rounds == 2
    figure = figures.along_rounds(rows, warmup(rows[0]))
    for axis in figure.axes:
        assert any(list(line.get_xdata()) == [2, 2] for line in axis.get_lines())
    told = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "end of warm-up" in told


def test_the_error_has_bands(cells):
    (axis,) = figures.error_along_rounds(figures.first_coordinate(cells[0])).axes
    row = figures.first_coordinate(cells[0])[0]
    ((corner, *_),) = [path.vertices for path in axis.collections[0].get_paths()]
    assert len(axis.collections) == 1
    ends = {row["l2_error"] + sign * 1.96 * row["l2_error_mcse"] for sign in (-1, 1)}
    assert any(corner[1] == pytest.approx(end) for end in ends)


def test_long_titles_have_several_lines():
    rows = figures.first_coordinate(fake_cell(problem="p" * 30, saves=3, algorithm="a" * 30))
    (title,) = titles(figures.error_along_rounds(rows))
    assert title == "P" + "p" * 29 + ",\n" + "a" * 30


def test_figures_leave_out_what_is_not_known(tmp_path):
    cell = fake_cell(truth=None, levels=(0.9, 0.95))
    assert {path.stem for path in figures.save_all(cell, tmp_path)} == {"length_90", "length_95"}
    assert figures.save_all(fake_cell(diverged=40), tmp_path) == []
    assert figures.save_all([], tmp_path) == []


def test_the_error_is_drawn_once_per_schedule_at_its_longest_horizon():
    sizes = [("C1", 500), ("C1", 900), ("C5", 700)]
    cells = [fake_cell(s, num_steps=n, saves=3, levels=(0.9, 0.95)) for s, n in sizes]
    rows = [row for cell in cells for row in figures.first_coordinate(cell)]
    lines = figures.error_along_rounds(rows).axes[0].get_lines()
    assert [len(line.get_xdata()) for line in lines] == [3, 2, 3, 2]  # lines and marks


def test_a_schedule_has_one_look_everywhere():
    alone, together = style.looks(["Log"]), style.looks(["x", "C1", "Log", "y"])
    assert alone["Log"] == together["Log"]
    found = style.looks([*(f"custom[{i}]" for i in range(20)), "C5"])
    assert len(set(found.values())) == len(found)


def test_figures_say_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxlsgd\[plots\]'"):
        figures.save_all(fake_cell(), tmp_path)
