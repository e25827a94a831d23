"""One word for one thing: names, levels, methods and coordinates in code, study files and on the command line."""

from __future__ import annotations

import base64
import dataclasses
import inspect
from pathlib import Path
from typing import get_args

import jax
import numpy as np
import pytest
from refusals import refused

import jaxlsgd
from jaxlsgd import one_step, plug_in, problems, random_scaling
from jaxlsgd.analysis import looks
from jaxlsgd.cli import main
from jaxlsgd.core import registry
from jaxlsgd.inference.rivals.bootstrap import bootstrap, perturbed
from jaxlsgd.inference.rivals.growing_batches import growing_batches
from jaxlsgd.inference.rivals.higrad import grow, higrad
from jaxlsgd.inference.rivals.hulc import hulc
from jaxlsgd.inference.rivals.parallel_runs import parallel_runs, split
from jaxlsgd.report import figures
from jaxlsgd.report.page import build, data
from jaxlsgd.report.tables import Selection
from jaxlsgd.study import Study, parts
from jaxlsgd.study.store.reader import Results

BRACKETS = [
    kind for role in get_args(registry.Role) for kind in registry.kinds(role).values() if kind.brief
]
VALUES = {
    "one_step": ("estimate", "average"),
    "plug_in": ("asymptotic", "finite"),
    "random_scaling": ("asymptotic", "schedule", "paper", "finite"),
    "growing_batches": ("overlapping", "nonoverlapping"),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("names") / "results"
    study = Study(
        problems=[
            "paper-linear",
            {"kind": "regression", "family": "huber", "dim": 2, "num_clients": 3},
        ],
        schedules=["C5"],
        horizons=[200],
        methods=["plug_in", {"kind": "random_scaling", "critical": "finite", "name": "mine"}],
        levels=[0.95, 0.8],
        replications=12,
        tile_size=12,
    )
    study.run(folder, progress=False, devices=1)
    return folder


# --- brackets ------------------------------------------------------------------------------


def test_every_kind_with_brackets_is_checked():
    assert {kind.name for kind in BRACKETS if not kind.own} == set(VALUES)


@pytest.mark.parametrize("kind", [kind for kind in BRACKETS if not kind.own], ids=lambda k: k.name)
def test_brackets_are_the_first_argument(kind):
    first, *others = inspect.signature(kind.build).parameters.values()
    assert first.name == kind.brief and first.kind is first.POSITIONAL_OR_KEYWORD
    assert all(other.kind is other.KEYWORD_ONLY for other in others)
    for value in VALUES[kind.name]:
        read = parts.part("method", f"{kind.name}[{value}]", "methods[0]").made
        made = kind.build(value)
        assert read == made
        assert made.name in (f"{kind.name}[{value}]", kind.name)


def test_brackets_that_are_not_the_first_argument_are_refused():
    with refused("brief", "value", "second"):

        @jaxlsgd.register("method", brief="b")
        def second(a: int, b: int) -> jaxlsgd.Estimator:
            """Nothing."""
            raise NotImplementedError


# --- the command line ----------------------------------------------------------------------


def test_stored_batches_are_built_again():
    part = parts.part("method", "growing_batches[nonoverlapping]", "methods[0]")
    again = parts.Part.read("method", part.plain()).built()
    assert again.made == growing_batches("nonoverlapping")


def test_options_that_take_several_are_plural(results: Path, capsys):
    def table(*options: str) -> str:
        assert main(["table", str(results), *options]) == 0
        return capsys.readouterr().out

    together = table("--methods", "plug_in", "mine", "--levels", "0.8", "--measures", "coverage")
    apart = table(
        "--methods", "plug_in", "--methods", "mine", "--levels", "0.8", "--measures", "coverage"
    )
    assert apart == together and "0.95" not in together and "mine" in together


def test_a_coordinate_is_given_by_name_or_number(results: Path, capsys):
    def replay(*options: str) -> str:
        assert (
            main(["replay", str(results), "--cell", "linear", "--replication", "0", *options]) == 0
        )
        return capsys.readouterr().out

    assert replay("--coordinate", "1") == replay("--coordinate", "x[1]") != replay()
    assert "level 0.8" in replay("--level", "0.8")


# --- levels, methods and dim ---------------------------------------------------------------


def plan(steps: int = 200):
    step = jaxlsgd.schedules.power_decay(0.5)
    return jaxlsgd.schedules.constant(2).plan(step, num_steps=steps)


def test_several_levels_may_be_one_number():
    key, problem = jax.random.key(0), problems.linear(2, 2)
    run = jaxlsgd.fit(key, problem, plan(), methods=plug_in(), levels=0.8, progress=False)
    assert run.cell.levels == (0.8,)
    spec = {"problems": ["paper-linear"], "schedules": ["C5"], "horizons": [200]}
    assert Study(**spec, levels=0.8) == Study(**spec, levels=[0.8])
    assert Selection(levels=0.8).levels == (0.8,)


def test_method_and_level_of_a_fit_are_optional():
    methods = (plug_in(), random_scaling())
    found = jaxlsgd.fit(
        jax.random.key(0), problems.linear(2, 2), plan(), methods=methods, levels=(0.8, 0.95),
        progress=False,
    )  # fmt: skip
    same = np.testing.assert_array_equal
    same(found.interval(), found.interval("plug_in", 0.8))
    same(found.estimate_of(), found.estimate)
    same(found.test().p_value, found.test("plug_in").p_value)
    assert found.joint_test() == found.joint_test("plug_in", level=0.8)
    assert found.joint_test().critical < found.joint_test(level=0.95).critical
    same(found.function(lambda x: x[0]), found.function(lambda x: x[0], "plug_in", 0.8))
    same(found.joint().estimate, found.joint("plug_in").estimate)


def test_method_of_rows_is_optional():
    saves = {"save_at": (50, 100), "until": 0.2, "progress": False}
    cell = jaxlsgd.simulate(
        jax.random.key(0),
        problems.linear(2, 2),
        plan(),
        replications=8,
        methods=(plug_in(),),
        **saves,
    )
    assert np.array_equal(looks.wrong(cell), looks.wrong(cell, "plug_in"))
    assert np.array_equal(looks.wrong_so_far(cell)[0], looks.wrong_so_far(cell, "plug_in", 0.95)[0])
    assert np.array_equal(looks.stops(cell)[0], looks.stops(cell, "plug_in", cell.until)[0])
    pair = jaxlsgd.measures.paired_difference
    assert pair(cell, None, cell) == pair(cell, "plug_in", cell, "plug_in")


@pytest.mark.parametrize("case", ["bootstrap", "runs", "tree"])
def test_dim_is_that_of_the_problem(case: str):
    problem, arguments = problems.linear(2, 4, heterogeneity=0.0), {}
    if case == "bootstrap":
        many = perturbed(problem, 3)
        pairs = [(bootstrap(3), bootstrap(3, 2)), (bootstrap(3, interval="percentile"), None)]
    elif case == "runs":
        many, arguments["algorithm"] = split(problem, 2)
        pairs = [(hulc(2), hulc(2, 2)), (parallel_runs(2), parallel_runs(2, 2))]
    else:
        many, arguments["algorithm"], given = grow(problem, plan(240), (2,))
        pairs = [(higrad((2,), (60,)), given)]
        assert given == higrad((2,), (60,), dim=2)
    methods = [new for new, _ in pairs]
    methods += [dataclasses.replace(old, name=f"{old.name} given") for _, old in pairs if old]
    cell = jaxlsgd.simulate(
        jax.random.key(0), many, plan(240), replications=3, methods=methods, levels=0.5,
        progress=False, **arguments,
    )  # fmt: skip
    for new, old in pairs:
        assert cell.coordinates[new.name] == ("contrast[0]", "contrast[1]")
        if old is not None:
            mine, theirs = cell.methods[new.name], cell.methods[f"{old.name} given"]
            assert np.array_equal(mine.half_width, theirs.half_width)
            assert np.array_equal(cell.truth[new.name], problem.true_vector)


def test_copies_that_do_not_fit_are_refused():
    with refused("problem", "unsupported", "4 copies"):
        jaxlsgd.simulate(
            jax.random.key(0), problems.linear(2, 2), plan(), replications=2, methods=bootstrap(3)
        )


# --- levels of the page and of figures -----------------------------------------------------


def test_the_page_has_intervals_and_lengths_of_every_level(results: Path):
    linear, _ = Results(results).read_all()
    kept = data.detail(linear, 2, 5, 20)
    rows = linear.methods["plug_in"]
    (first, *_) = (one["of"][1] for one in kept)
    assert len(first["zip"]) == len(first["length"]) == len(linear.levels) == 2
    for place, (ends, lengths) in enumerate(zip(first["zip"], first["length"], strict=True)):
        found = unpacked(ends).reshape(-1, 2)
        half = rows.half_width[-1, place, :, 1]
        np.testing.assert_allclose(np.sort(np.ptp(found, axis=1)), np.sort(2 * half), rtol=1e-5)
        np.testing.assert_allclose(unpacked(lengths)[2], np.median(2 * half), rtol=1e-5)


def unpacked(packed: dict[str, str]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(packed["f4"]), "<f4")


def test_the_page_shows_the_level_that_is_asked_for(results: Path, tmp_path: Path):
    assert main(["report", str(results), "-o", str(tmp_path / "page.html"), "--level", "0.8"]) == 0
    text = (tmp_path / "page.html").read_text()
    assert '"levels":[0.95,0.8],"level":1' in text
    assert "80 % intervals" in text
    with refused("level", "choice", "0.95, 0.8"):
        build.page(Results(results), level=0.9)


def test_figures_of_looks_have_the_level_that_is_asked_for():
    pytest.importorskip("matplotlib")
    cell = jaxlsgd.simulate(
        jax.random.key(0), problems.linear(2, 2), plan(), replications=8,
        methods=(plug_in(), one_step()), levels=(0.95, 0.8), save_at=(50, 100), progress=False,
    )  # fmt: skip
    (line,) = (
        x for x in figures.wrong_so_far(cell, level=0.8).axes[0].lines if x.get_linestyle() == ":"
    )
    assert line.get_ydata()[0] == pytest.approx(20)
    upper = figures.bands(cell, ["plug_in"], "x[1]", level=0.8).axes[0].lines[1].get_ydata()
    rows = cell.methods["plug_in"]
    np.testing.assert_allclose(upper, rows.estimate[:, 0, 1] + rows.half_width[:, 1, 0, 1])
