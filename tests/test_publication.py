"""Figures in the width of a column or a page."""

from __future__ import annotations

import re
from typing import get_args

import matplotlib.image
import numpy as np
import page_helpers
import pytest
from refusals import refused
from report_helpers import fake_cell
from study_helpers import small

from jaxlsgd import cli
from jaxlsgd.report import figures, style
from jaxlsgd.report.figures import save_for_print


@pytest.fixture(scope="module")
def cells():
    names = ("C1", "C5", "P(1/2)")
    return [fake_cell(name, num_steps=100 * (i + 1), seed=i) for i, name in enumerate(names)] + [
        fake_cell(name, problem="logistic", seed=i, diverged=2) for i, name in enumerate(names)
    ]


@pytest.mark.parametrize("width", style.WIDTHS)
@pytest.mark.parametrize("figure", get_args(figures.PrintedFigure))
def test_a_figure_has_the_width_that_was_asked_for(cells, tmp_path, figure, width):
    path = save_for_print(cells, tmp_path, figure, format="png", width=width)
    assert path == tmp_path / f"{figure}_{width}.png"
    pixels = matplotlib.image.imread(path)
    assert pixels.shape[1] == round(600 * style.WIDTHS[width])
    # Nothing is cut off: the outermost pixels are blank.
    for edge in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]):
        assert np.all(edge[..., :3] == 1)


def test_a_figure_of_a_level_and_a_coordinate(tmp_path):
    cells = [fake_cell(name, levels=(0.95, 0.8)) for name in ("C1", "C5")]
    chosen = {"level": 0.8, "coordinate": "x[1]"}
    path = save_for_print(cells, tmp_path, "coverage", format="svg", **chosen)
    assert path.name == "coverage_column_80_x-1-.svg"
    text = path.read_text("utf-8")
    assert "x[1], 80 % intervals" in text
    for argument, wrong in (("level", 0.5), ("coordinate", "y")):
        with refused(argument, "choice"):
            save_for_print(cells, tmp_path, "coverage", **{argument: wrong})


def test_what_is_left_out_is_said_before_anything_is_drawn(tmp_path, monkeypatch, caplog):
    cells = [fake_cell("C1", problem=f"p{i}", saves=3) for i in range(4)]
    drawn = []
    monkeypatch.setattr(
        style, "save", lambda figure, stem: drawn.append(len(caplog.records)) or [stem]
    )
    figures.save_all(cells, tmp_path, most=2)
    assert drawn == [1, 1]
    (said,) = caplog.messages
    assert said.startswith("the first 2 of 7 figures will be drawn, not l2_error, rounds_p0_1000, ")


def test_a_method_has_one_colour_whatever_is_beside_it():
    alone = style.method_looks(["one_step"])["one_step"]
    for others in (["plug_in"], ["plug_in", "plug_in[finite]", "random_scaling", "mine"]):
        found = style.method_looks([*others, "one_step"])
        assert found["one_step"] == alone
        assert len({look.color for look in found.values()}) == len(found)
    many = style.method_looks([f"m{i}" for i in range(12)])
    assert len({look[:2] for look in many.values()}) == 12


@pytest.mark.parametrize("format", ["pdf", "svg"])
def test_the_same_rows_give_the_same_bytes(cells, tmp_path, format):
    one = save_for_print(cells, tmp_path / "a", "tradeoff", format=format)
    assert (
        one.read_bytes()
        == save_for_print(cells, tmp_path / "b", "tradeoff", format=format).read_bytes()
    )


def test_a_figure_says_what_it_shows(cells, tmp_path):
    text = save_for_print(cells, tmp_path, "coverage", format="svg", width="page").read_text()
    for told in (
        "x[0], 95 % intervals, 40 replications",
        "Wilson intervals",
        "Hollow:",
        "logistic",
    ):
        assert told in text
    assert "Triangles" not in text
    missing = fake_cell(truth=(5.0, 1.0))  # no interval comes near
    text = save_for_print(missing, tmp_path, "coverage", format="svg", width="page").read_text()
    assert "Triangles: below the axis" in text and ">0</text>" in re.sub(r"<!--.*?-->", "", text)


def test_what_cannot_be_drawn_is_refused(tmp_path):
    unknown = fake_cell(truth=None)
    with refused("figure", "unsupported"):
        save_for_print(unknown, tmp_path, "coverage")
    assert save_for_print(unknown, tmp_path, "tradeoff").is_file()
    with refused("width", "choice"):
        save_for_print(unknown, tmp_path, "tradeoff", width="wide")


def test_the_verb_draws_one_figure(tmp_path, capsys):
    page_helpers.write(tmp_path / "s", small())
    asked = [
        "plot",
        str(tmp_path / "s"),
        "--figure",
        "tradeoff",
        "--format",
        "svg",
        "--width",
        "page",
    ]
    assert cli.main(asked) == 0
    path = tmp_path / "s" / "figures" / "tradeoff_page.svg"
    assert capsys.readouterr().out.strip() == str(path) and path.is_file()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--format", "png"], "--format: must be given with --figure"),
        (["--width", "page"], "--width: must be given with --figure"),
        (["--out", "FILE"], "--out: must be a directory"),
    ],
)
def test_the_verb_refuses_what_it_would_not_follow(tmp_path, capsys, given, words):
    page_helpers.write(tmp_path / "s", small())
    (tmp_path / "FILE").touch()
    given = [str(tmp_path / word) if word == "FILE" else word for word in given]
    assert cli.main(["plot", str(tmp_path / "s"), *given]) == 2
    assert words in capsys.readouterr().err
