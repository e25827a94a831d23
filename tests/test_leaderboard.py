"""The leaderboard's study and what it makes of rows; nothing is run."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import leaderboard
from jaxlsgd.core.rows import MethodRows
from jaxlsgd.study import jobs
from jaxlsgd.study.jobs import work


def rows(better: str = "plug_in[finite]", wide: float = 1.5) -> list[dict[str, Any]]:
    """Made-up rows: one method keeps its level, one_step is longer than it, the others fall short."""
    found = []
    names = [x["name"] for x in leaderboard.problems()]
    algorithms = leaderboard.columns()
    for problem, algorithm, method in itertools.product(names, algorithms, leaderboard.PATH):
        good = method in (better, "one_step")
        length = 2.0 if method == "one_step" else wide
        found.append(
            {
                **{"problem": problem, "algorithm": algorithm, "schedule": "C5", "num_steps": 100},
                **{"method": method, "n_ok": 50, "n_failed": 0, "cost": "memory"},
                "sent_over_c1": 4.0 if good else 0.2,
                **{"coverage": 95.0 if good else 80.0, "mcse": 0.5, "over_efficient": length},
            }
        )
    return found


def test_the_full_one_stays_affordable():
    """At the 10 million client-steps per second and core of one that is busy, 27 core-minutes are 16 billion."""
    asked = leaderboard.study("full")
    steps = [work(cell) * asked.tiles_per_cell for cell in asked.cells]
    copies = [s for s, c in zip(steps, asked.cells, strict=True) if "copies" in c.problem.name]
    assert sum(steps) + leaderboard.COPIES / 5 * sum(copies) < 1.6e10
    grid = len(leaderboard.problems()) * len(leaderboard.columns()) * 4 * 2
    assert len(asked.cells) == grid + 4 * 4


def test_the_study_is_one_that_can_run():
    asked = leaderboard.study("quick")
    jobs.check(asked)
    known = [part.built().made for part in asked.problems if "," not in part.name]
    assert all(made.G is not None and made.S is not None for made in known)


def test_numbers_are_means_over_coordinates():
    """Two runs of two coordinates, three of four inside, and a run that failed."""
    estimate = np.array([[[0.0, 0.5], [0.2, 3.0], [np.nan, 0.0]]])
    half = np.ones((1, 1, 3, 2))
    found = leaderboard._numbers(
        MethodRows(estimate, half[:, 0], half, np.zeros((1, 3), bool)),
        np.zeros(2),
        np.array([1.0, 4.0]),
    )
    assert (found["n_ok"], found["n_failed"], found["coverage"]) == (2, 1, 75.0)
    assert found["over_efficient"] == pytest.approx((2 / 1 + 2 / 4) / 2)


def test_the_shortest_that_keeps_its_level_is_named():
    for better, wide, best in (
        ("plug_in[finite]", 1.5, "plug_in[finite]"),
        ("random_scaling", 3.0, "one_step"),
    ):
        text = leaderboard.report(rows(better, wide), "quick")
        shortest = text.partition("## The shortest")[2].partition("## Clients")[0]
        assert shortest.count(f"`{best}`") == len(leaderboard.problems()) * len(
            leaderboard.columns()
        )
        assert "| clipping | 4 of 4, ≥ 95.0 %" in text and "| 0 of 4, ≥ 80.0 %" in text
        assert "| cost | memory; sends 4 × |" in text and "| memory; sends 0.2 × |" in text


def test_the_figure_is_drawn(tmp_path: Path):
    pytest.importorskip("matplotlib")
    leaderboard.draw(rows(), tmp_path / "board.png")
    assert (tmp_path / "board.png").stat().st_size > 10_000
