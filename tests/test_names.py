"""One word for one thing; and the words of before, in code, study files, results and on the command line."""

from __future__ import annotations

import base64
import dataclasses
import inspect
import shutil
import tomllib
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from refusals import refused

import jaxlsgd
from jaxlsgd import one_step, plug_in, problems, random_scaling
from jaxlsgd.analysis import looks
from jaxlsgd.cli import main
from jaxlsgd.core import registry, renamed
from jaxlsgd.core.renamed import OldName
from jaxlsgd.inference.rivals.bootstrap import bootstrap, perturbed
from jaxlsgd.inference.rivals.growing_batches import growing_batches
from jaxlsgd.inference.rivals.higrad import grow, higrad
from jaxlsgd.inference.rivals.hulc import hulc
from jaxlsgd.inference.rivals.parallel_runs import parallel_runs, split
from jaxlsgd.report import figures, tables
from jaxlsgd.report.page import build, data
from jaxlsgd.report.tables import Selection
from jaxlsgd.study import Study, parts
from jaxlsgd.study.store.reader import Results

# A study that was written and run, and rows that `simulate` saved, before names changed.
BEFORE = Path(__file__).parent / "named_before"
OLD, NEW = "random_scaling[finite_horizon]", "random_scaling[finite]"
BRACKETS = [kind for role in registry.ROLES for kind in registry.kinds(role).values() if kind.brief]
VALUES = {
    "one_step": ("estimate", "average"),
    "plug_in": ("asymptotic", "finite"),
    "random_scaling": ("asymptotic", "schedule", "paper", "finite"),
    "growing_batches": ("overlapping", "nonoverlapping"),
}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return shutil.copytree(BEFORE / "results", tmp_path / "results")


def study(**changes) -> Study:
    """The study in `BEFORE`, in today's words."""
    text = (BEFORE / "study.toml").read_text()
    for old, new in (("finite_horizon", "finite"), ("threshold", "delta")):
        text = text.replace(old, new)
    return dataclasses.replace(Study.from_dict(tomllib.loads(text)), **changes)


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


# --- old names in code ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        (lambda: random_scaling(critical="finite_horizon"), lambda: random_scaling("finite"), "'finite'"),
        (lambda: random_scaling("diagonal"), lambda: random_scaling(mode="diagonal"), "mode='diagonal'"),
        (
            lambda: random_scaling("diagonal", critical="schedule"),
            lambda: random_scaling("schedule", mode="diagonal"),
            "mode='diagonal'",
        ),
        (
            lambda: random_scaling("contrasts", contrasts=[[1.0, -1.0]]),
            lambda: random_scaling(contrasts=[[1.0, -1.0]]),
            "mode='contrasts'",
        ),
        (lambda: growing_batches(kind="nonoverlapping"), lambda: growing_batches("nonoverlapping"), "batches=..."),
    ],
)  # fmt: skip
def test_an_old_name_makes_the_same_method_with_a_warning(old, new, word: str):
    with pytest.warns(OldName, match="works for one more version; use") as seen:
        made = old()
    assert word in str(seen[0].message) and seen[0].filename == __file__
    assert made == new()


def test_old_names_of_the_rows_of_a_table():
    pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    frame = {"a": rng.normal(size=400), "client": np.repeat([0, 1], 200)}
    frame["y"] = frame["a"] + rng.normal(size=400)
    given = {"response": "y", "client": "client", "progress": False, "methods": ["one_step"]}
    with pytest.warns(OldName, match="use 'fresh'"):
        old = jaxlsgd.fit_table(frame, **given, rows="one pass")
    new = jaxlsgd.fit_table(frame, **given, rows="fresh")
    assert old.about["rows"] == "fresh" and old.estimate == new.estimate


@pytest.mark.parametrize(
    ("family", "old", "new"),
    [
        ("huber", {"threshold": 1.2}, {"delta": 1.2}),
        ("quantile", {"level": 0.3}, {"tau": 0.3}),
        ("squared", {}, {}),
    ],
)
def test_old_names_of_a_regression(family: str, old: dict, new: dict):
    with pytest.warns(OldName) as seen:
        before = problems.regression(2, 2, family, **old)
    today = problems.regression(2, 2, "gaussian" if family == "squared" else family, **new)
    assert len(seen) == 1 and before.structure() == today.structure()
    assert before.name == today.name == family
    np.testing.assert_array_equal(before.true_vector, today.true_vector)


# --- studies and results that still have them ----------------------------------------------


def test_a_study_file_of_before_is_the_same_study():
    with pytest.warns(OldName) as seen:
        old = Study.from_toml(BEFORE / "study.toml")
    assert any("use 'finite'" in str(one.message) for one in seen)
    new = study()
    assert old == new and old.digest == new.digest
    # As it was when names changed.
    assert new.digest == "89126cf9c9581a8e2ca483b0d671f277aaefb05c102210f9ea7f3580145e687f"
    assert [part.name for part in old.methods][1] == NEW


def test_results_of_before_are_read_under_todays_names(results: Path):
    found = Results(results)
    linear, huber = found.read_all()
    assert list(linear.methods) == ["plug_in", NEW, "growing_batches[nonoverlapping]"]
    assert list(huber.methods) == ["plug_in", "mine", "growing_batches[nonoverlapping]"]
    assert linear.until is not None and not found.warnings
    saved = jaxlsgd.load_cell(BEFORE / "cell.npz")
    assert list(saved.methods) == list(saved.coordinates) == list(saved.labels) == [NEW]
    text = tables.render(found, selection=Selection(methods=[NEW]))
    assert NEW in text and OLD not in text + str(found)
    assert OLD not in build.page(found)
    assert NEW in build.page(found)


def test_figures_of_results_of_before(results: Path, tmp_path: Path):
    pytest.importorskip("matplotlib")
    found = Results(results)
    names = [path.name for path in figures.save_all(found, tmp_path, level=0.8)]
    assert "coverage.png" in names  # without a suffix, as there is one level
    assert found.plot(level=0.8) is not None


@pytest.mark.parametrize("lost", [False, True])
def test_results_of_before_are_resumed(results: Path, lost: bool):
    before = {x.problem: x for x in Results(results).read_all()}
    if lost:
        (results / "manifest.json").unlink()
    wanted = study(replications=12)
    outcome = wanted.run(results, progress=False, devices=1, allow_other_code=True)
    assert (outcome.tiles_run, outcome.exit_code) == (2, 0)  # only the second tile of each cell
    for cell in Results(results).read_all():
        assert cell.replications == 12
        for name, rows in before[cell.problem].methods.items():
            assert np.array_equal(cell.methods[name].estimate[:, :6], rows.estimate)
            assert not np.array_equal(cell.methods[name].estimate[:, 6:], rows.estimate)


def test_objects_keep_the_identity_that_they_had_first():
    methods = [
        random_scaling("finite"),
        random_scaling(mode="diagonal"),
        random_scaling(contrasts=[[1.0, -1.0]], name="gap"),
    ]
    made = Study(
        problems=[{"problem": problems.linear(2, 2), "gamma0": 0.5, "name": "p"}],
        schedules=["C5"],
        horizons=[200],
        methods=methods,
        replications=10,
    )
    # As they were for random_scaling(critical="finite_horizon") and so on, when names changed.
    assert [part.identity for part in made.methods] == [
        "b42e8797983cc4e7",
        "2eacf95d903ba1a9",
        "6dc760635457300a",
    ]


def test_names_turn_around():
    plain = study().plain()
    assert renamed.current(renamed.first(plain)) == plain
    first = str(renamed.first(plain))
    assert OLD in first and NEW not in first and "'threshold': 1.2" in first
    nested = {"kind": "minibatch", "arguments": {"problem": {"kind": "regression", "delta": 2.0}}}
    assert renamed.first(nested)["arguments"]["problem"] == {"kind": "regression", "threshold": 2.0}


def test_stored_batches_are_built_again():
    part = parts.part("method", "growing_batches[nonoverlapping]", "methods[0]")
    again = parts.Part.read("method", part.plain()).built()
    assert again.made == growing_batches("nonoverlapping")


def test_names_that_are_asked_for(results: Path):
    cells = Results(results).read_all()
    with pytest.warns(OldName):
        chosen = Selection(methods=[OLD])
    assert list(chosen.methods) == [NEW]
    with pytest.warns(OldName):
        assert cells[0].method_named(OLD) == NEW
    with pytest.warns(OldName):
        assert jaxlsgd.Until(half_width=0.1, method=OLD).method == NEW


# --- the command line ----------------------------------------------------------------------


def test_options_that_take_several_are_plural(results: Path, capsys):
    def table(*options: str) -> str:
        assert main(["table", str(results), *options]) == 0
        return capsys.readouterr().out

    new = table("--methods", "plug_in", "mine", "--levels", "0.8", "--measures", "coverage")
    with pytest.warns(OldName) as seen:
        old = table(
            "--method", "plug_in", "--method", "mine", "--level", "0.8", "--measure", "coverage"
        )
    assert "use --methods" in str(seen[0].message) and len(seen) == 4
    assert old == new and "0.95" not in new and "mine" in new


def test_an_old_option_is_named_on_stderr(results: Path, monkeypatch, capsys):
    monkeypatch.setattr("sys.warnoptions", [])
    monkeypatch.setattr("sys.argv", ["jaxlsgd", "critical-value", "--beta", "0", "--level", "0.95"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as Python does by itself
        assert main() == 0
    found = capsys.readouterr()
    assert (
        found.err
        == "jaxlsgd: --level: has a new name and works for one more version; use --levels\n"
    )
    assert found.out == "6.7473\n"


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


def test_kinds_of_other_roles_keep_their_own_names():
    assert renamed.arguments("method", "regression", {"level": 0.2}) == {"level": 0.2}
    mine = {"methods": [{"kind": "regression", "arguments": {"tau": 0.3, "level": 1}}]}
    assert renamed.first(mine) == mine == renamed.current(mine)


def test_an_old_and_a_new_name_together_are_refused():
    with pytest.warns(OldName), refused("level", "duplicate", "tau"):
        jaxlsgd.problems.regression(3, 2, "quantile", level=0.3, tau=0.5)
    with pytest.warns(OldName), refused("diagonal", "duplicate", "mode"):
        jaxlsgd.random_scaling("diagonal", mode="full")


def test_the_command_line_takes_old_values(tmp_path, capfd):
    table = tmp_path / "t.csv"
    rng = np.random.default_rng(0)
    rows = "\n".join(
        f"{i % 3},{x:.4f},{y:.4f}" for i, (x, y) in enumerate(rng.normal(size=(60, 2)))
    )
    table.write_text(f"c,x,y\n{rows}\n")
    given = ["fit", str(table), "--response", "y", "--client", "c", "--quiet", "--rows"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert main([*given, "reshuffled"]) == 0
    old = capfd.readouterr().out
    assert main([*given, "reused"]) == 0
    assert capfd.readouterr().out == old
