"""Looking at every round and stopping: laws against published tables and Brownian motion, and the way to users."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import Why, refused
from scipy.special import ndtri
from study_helpers import fake_rows, missing, small

import jaxlsgd
from jaxlsgd import looks, problems, schedules
from jaxlsgd.cli import main
from jaxlsgd.core import registry
from jaxlsgd.core.causes import Cause
from jaxlsgd.core.cell_file import Unfit, about_from_json, about_to_json, load_cell
from jaxlsgd.core.rows import CellRows, MethodRows
from jaxlsgd.inference.laws import sequential
from jaxlsgd.inference.one_step import AnchoredDetail, first_look, looks_law, one_step
from jaxlsgd.report import export, figures
from jaxlsgd.report.page.build import page
from jaxlsgd.runs.cell import Cell
from jaxlsgd.study import Study, imports, jobs
from jaxlsgd.study.store.reader import Results
from jaxlsgd.study.store.writer import Writer

# Jennison and Turnbull (2000), tables 2.1 and 2.3, two-sided 5 %.
POCOCK = {2: 2.178, 5: 2.413, 10: 2.555}
OBRIEN_FLEMING = {2: 1.977, 5: 2.040, 10: 2.087}
Z = float(-ndtri(0.025))


@pytest.mark.parametrize("count", [2, 5, 10])
def test_constants_are_those_of_published_tables(count: int) -> None:
    clocks = range(1, count + 1)
    assert round(sequential.looks_value(0.95, clocks), 3) == POCOCK[count]
    late = sequential.looks_value(0.95, clocks, "obrien_fleming")
    assert abs(late - OBRIEN_FLEMING[count]) <= 0.00051


def test_constant_for_many_looks_does_not_depend_on_the_unit_of_the_clock() -> None:
    assert sequential.looks_value(0.95, np.geomspace(0.05, 1, 50)) == pytest.approx(2.79, abs=0.005)
    assert sequential.looks_value(0.95, [3.0, 5.0]) == pytest.approx(
        sequential.looks_value(0.95, [300, 500]), abs=1e-8
    )
    assert sequential.looks_value(0.975, [7.0], sides=1) == pytest.approx(Z)


def test_robbins_is_shortest_where_it_is_told_to_be() -> None:
    u = sequential.best_ratio(0.95)
    q = sequential.robbins(0.95, u)
    assert (round(u, 2), round(float(q), 3)) == (8.21, 3.035)
    # For one t, ρ² is the free number.
    assert all(sequential.robbins(0.95, u * f) > q for f in (0.8, 1.25))


@pytest.mark.parametrize("u", [0.3, 8.2, 100.0])
def test_p_values_and_intervals_agree(u: float) -> None:
    assert sequential.robbins_p(sequential.robbins(0.99, u), u) == pytest.approx(0.01, rel=1e-6)
    one = sequential.robbins_one_sided(0.95, u)
    assert sequential.robbins_p(one, u, 1) == pytest.approx(0.05, rel=1e-6)
    assert one < sequential.robbins(0.95, u)


def test_p_value_at_a_look_is_the_level_whose_band_reaches_it() -> None:
    clocks = (1, 2, 4, 7)
    for shape in get_args(sequential.Shape):
        c = sequential.looks_value(0.9, clocks, shape)
        z = c * float(sequential.shape_of(2, clocks, shape))
        assert sequential.looks_p(z, clocks, 2, shape) == pytest.approx(0.1, abs=1e-6)


@pytest.mark.parametrize("clocks", [(), (1, 1), (0, 1), (2, 1), range(1, 1002)])
def test_impossible_looks_are_refused(clocks: tuple[int, ...]) -> None:
    with refused("looks"):
        sequential.looks_value(0.95, clocks)


RUNS, CLOCKS = 20_000, np.unique(np.geomspace(50, 1000, 60).astype(int))


@pytest.fixture(scope="module")
def brownian() -> np.ndarray:
    """B(t)/√t at the looks, (looks, runs)."""
    steps = np.sqrt(np.diff(CLOCKS, prepend=0))[:, None]
    B = np.cumsum(steps * np.random.default_rng(7).standard_normal((len(CLOCKS), RUNS)), 0)
    return B / np.sqrt(CLOCKS)[:, None]


def _held(z: np.ndarray, q: np.ndarray | float) -> float:
    return float((np.abs(z) <= np.reshape(q, (-1, 1))).all(0).mean())


def test_laws_hold_on_brownian_motion_and_the_fixed_one_does_not(brownian: np.ndarray) -> None:
    error = 4 * np.sqrt(0.05 * 0.95 / RUNS)  # three comparisons at 4 standard errors: 2e-4
    for shape in get_args(sequential.Shape):
        q = sequential.looks_value(0.95, CLOCKS, shape) * sequential.shape_of(CLOCKS, CLOCKS, shape)
        assert abs(_held(brownian, q) - 0.95) < error
    always = sequential.robbins(0.95, sequential.best_ratio() * CLOCKS / 500)
    assert _held(brownian, always) > 0.95 - error
    # The planted bug: the multiplier of one look.
    assert _held(brownian, Z) < 0.8
    p = sequential.robbins_p(brownian, sequential.best_ratio() * CLOCKS[:, None] / 500)
    assert (p.min(0) <= 0.05).mean() < 0.05 + error


def _detail(t: float, df: float = 1e6, used: float = 1.0) -> AnchoredDetail:
    rest = [np.zeros(2), np.asarray(used), *np.zeros(5)]
    return AnchoredDetail(np.full(2, df), *rest, clock=np.asarray(t))


def test_method_has_the_law_with_students_t_of_the_same_tail() -> None:
    law = one_step(valid="always", best_at=1000).law
    assert law.multiplier(0.95, None, _detail(1000)) == pytest.approx(3.035, abs=1e-3)
    few = law.multiplier(0.95, None, _detail(1000, 20.0))
    assert np.all(few > 3.3)
    for df in (1e6, 20.0):
        detail = _detail(700, df)
        q = law.half(0.9, "both", None, detail)
        assert law.tail(q, None, detail) == pytest.approx(0.1, rel=1e-3)
    assert np.all(
        law.half(0.95, "lower", None, _detail(700)) < law.half(0.95, "both", None, _detail(700))
    )


def test_before_the_first_look_there_is_no_interval_and_no_evidence() -> None:
    early = _detail(first_look(2) - 1)
    for method in (
        one_step(valid="always", best_at=1000),
        one_step(valid="looks", looks=(100, 500, 1000)),
    ):
        assert np.all(np.isinf(method.law.multiplier(0.95, None, early)))
        assert np.all(method.law.tail(np.full(2, 9.0), None, early) == 1)
    # A look without an interval costs nothing.
    two = looks_law("pocock", (500, 1000)).multiplier(0.95, None, _detail(500))
    assert np.allclose(method.law.multiplier(0.95, None, _detail(500)), two)


def test_observations_that_do_not_count_delay_the_first_look() -> None:
    # 192 have to count, as do 256 without the 64 before the first anchor.
    law = ALWAYS.law
    for t, used, begun in (
        (400, 1.0, True),
        (400, 0.5, False),
        (455, 0.5, True),
        (2000, 0.05, False),
    ):
        detail = _detail(t, used=used)
        assert np.all(np.isfinite(law.multiplier(0.95, None, detail)) == begun)
        assert np.all((law.tail(np.full(2, 9.0), None, detail) < 0.05) == begun)
        assert ("no interval yet" in str(ALWAYS.notes(detail))) != begun  # type: ignore[misc]
    assert f"after 400, {50} % count" in ALWAYS.notes(_detail(400, used=0.5))[0]  # type: ignore[misc]


def test_a_path_that_arrives_late_is_a_brownian_motion_that_begins_late() -> None:
    lost, clocks = 240, np.unique(np.geomspace(260, 2000, 90).astype(int))
    own = (clocks - lost)[:, None]
    steps = np.sqrt(np.diff(own, prepend=0, axis=0))
    z = np.cumsum(steps * np.random.default_rng(11).standard_normal((len(own), RUNS)), 0) / own**0.5
    law = looks_law("pocock", tuple(map(int, clocks)))
    details = [_detail(t, used=(t - lost) / (t - 64)) for t in clocks]
    q = np.array([law.multiplier(0.95, None, detail)[0] for detail in details])
    assert np.isinf(q[0]) and np.isfinite(q[-1])
    error = 4 * np.sqrt(0.05 * 0.95 / RUNS)
    assert (
        abs(_held(z, q) - 0.95) < 0.01 + error
    )  # the clock of the constant begins at 260, not at 192
    # Looks before that many count are the ones that fail.
    assert _held(z, np.min(q)) < 0.935


def test_looks_are_those_of_the_saved_rounds() -> None:
    plan = schedules.paper("C5").plan(schedules.power_decay(0.5), num_steps=1000)
    method = one_step(valid="looks")
    cell = Cell(problems.linear(2, 2), plan, (method,), save_at=(100, 150))
    law = cell.with_looks(method).law
    wanted = sequential.looks_value(0.95, (500, 750, 1000))
    assert law.multiplier(0.95, plan, _detail(750)) == pytest.approx(wanted, rel=1e-4)
    with refused("looks", "missing"):
        method.law.multiplier(0.95, None, _detail(500))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"valid": "always"}, ("best_at", "missing")),
        ({"valid": "never"}, ("valid", "choice")),
        ({"best_at": 10}, ("best_at", "unwanted")),
        ({"looks": (1, 2)}, ("looks", "unwanted")),
        ({"shape": "obrien_fleming"}, ("shape", "unwanted")),
        ({"valid": "looks", "center": "average"}, ("valid", "unsupported")),
    ],
)
def test_options_that_do_not_suit_are_refused(given: dict, why: Why) -> None:
    with refused(*why):
        one_step(**given)


def _cell() -> CellRows:
    """Three looks of four runs, truth 0: held, wrong at the second, no interval at first, diverged at last."""
    estimate = np.array([[0.1, 0.1, 9, 0.1], [0.1, 0.9, 0.1, 0.1], [0.1, 0.1, 0.1, np.nan]])[
        ..., None
    ]
    half = np.array([[1, 1, np.inf, 1], [0.5, 0.5, 0.5, 0.5], [0.2, 0.2, 0.2, 0.2]])[
        :, None, :, None
    ]
    rows = MethodRows(estimate, half[:, 0] / 2, half, np.zeros((3, 4), bool))
    return CellRows(
        problem="p", algorithm="local_sgd", schedule="C1", num_steps=40, num_rounds=40,
        save_at=(10, 20, 40), steps_at=(10, 20, 40), levels=(0.95,), coordinates={"m": ("x",)},
        truth={"m": np.zeros(1)}, standard_error={"m": True}, labels={"m": "m"},
        methods={"m": rows}, numbers_sent={"m": (1.0, 2.0, 4.0)}, sent_under_c1=(1, 2, 4),
    )  # fmt: skip


def test_measures_of_looks_from_rows() -> None:
    (row,) = looks.summarise_looks(_cell())
    assert (row["held"], row["coverage_last"], row["first_wrong"]) == (0.5, 0.75, 30.0)
    assert row["held_mcse"] == pytest.approx(0.25)
    assert row["no_interval"] == 0
    share, error = looks.wrong_so_far(_cell(), "m")
    assert share.tolist() == [0, 0.25, 0.5] and error[0] == 0
    assert "50 (25)" in str(looks.looks_table(_cell()))


def test_a_table_of_looks_names_once_what_its_lines_share() -> None:
    table = looks.plain_table(looks.summarise(_cell()))
    assert table.title == "problem p, schedule C1, level 0.95, coordinate x"
    assert table.header[:3] == ["steps", "method", "looks"] and table.lines[0][:2] == ["40", "m"]
    assert not any("save_at" in note for note in table.notes)
    other = dataclasses.replace(_cell(), problem="q")
    two = looks.plain_table(looks.summarise([_cell(), other]))
    assert two.header[0] == "problem" and [line[0] for line in two.lines] == ["p", "q"]


def test_a_table_of_one_look_says_how_to_have_more() -> None:
    cell, rows = _cell(), _cell().methods["m"]
    last = MethodRows(rows.estimate[-1:], rows.scale[-1:], rows.half_width[-1:], rows.floored[-1:])
    one = dataclasses.replace(
        cell, save_at=(40,), steps_at=(40,), methods={"m": last}, numbers_sent={"m": (4.0,)}
    )
    assert "save_at in a study file" in str(looks.looks_table(one))


def test_a_look_without_an_interval_is_not_wrong_whatever_its_estimate() -> None:
    cell = _cell()
    rows = cell.methods["m"]
    cause = np.where(np.isinf(rows.half_width[:, 0, :, 0]), Cause.EXPLODED, rows.cause)
    withheld = dataclasses.replace(rows, cause=cause.astype(np.uint8))
    told = looks.wrong(dataclasses.replace(cell, methods={"m": withheld}), "m")
    assert np.array_equal(told, looks.wrong(cell, "m"))
    # Of a diverged run that has a finite interval, or none that is a number, nothing holds.
    assert told[2, 0, 3, 0]


def test_what_is_withheld_is_infinite_and_never_not_a_number() -> None:
    state = jax.tree.map(
        lambda x: x * jnp.nan if x.dtype == jnp.float32 else x, ALWAYS.init(jnp.zeros(2))
    )
    detail = ALWAYS.measure(state, None).detail
    assert bool(detail.withheld) and bool(jnp.all(jnp.isfinite(detail.df)))


imports.find("method", "hulc", "")  # importing it has registered all methods
KINDS = registry.kinds("method")
OTHERS = {name: kind for name, kind in KINDS.items() if name != "one_step" and not kind.own}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("given", [{"valid": "always", "best_at": 1000}, {"valid": "looks"}])
def test_other_methods_refuse_several_looks_with_the_reason(
    name: str, given: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build = getattr(jaxlsgd, name, None) or getattr(jaxlsgd.inference, name)
    with refused("valid", "unsupported", name, "one_step("):
        build(**given)
    with refused("methods[0].valid", "unsupported", name, "one_step("):
        small(methods=[{"kind": name, **given}])
    table = ", ".join(f"{key} = {json.dumps(value)}" for key, value in given.items())
    study = tmp_path / "study.toml"
    study.write_text(
        'problems = [{kind = "linear", dim = 2, num_clients = 2}]\nschedules = ["C1"]\n'
        f'methods = [{{kind = "{name}", {table}}}]\n'
    )
    assert main(["plan", str(study)]) == 2
    assert f'methods[0].valid: must be "fixed" for {name}' in capsys.readouterr().err


def test_methods_that_refuse_several_looks_are_otherwise_what_they_were() -> None:
    assert len(OTHERS) >= 9 and not any("valid" in kind.parameters for kind in OTHERS.values())
    build: Any = jaxlsgd.plug_in
    assert build("finite", valid="fixed") == jaxlsgd.plug_in("finite")
    with pytest.raises(TypeError, match="unexpected keyword argument 'valit'"):
        build(valit="always")

    def own() -> None: ...

    try:  # whoever writes a method says what it takes
        assert registry.register("method", "own_looks")(own) is own
    finally:
        registry.forget(__name__)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("plug_in[valid=always]", ("methods[0].horizon", "choice")),
        ("one_step[always]", ("methods[0].center", "choice")),
        ("hulc[always]", ("methods[0]", "unwanted")),
    ],
)
def test_brackets_with_another_argument_are_told_of_tables(given: str, why: Why) -> None:
    kind = given.partition("[")[0]
    with refused(*why, f'{{kind = "{kind}", ...}}'):
        small(methods=[given])


def test_rules_are_saved_with_rows(tmp_path: Path) -> None:
    rule = looks.Until(half_width=0.5, coordinates=("x",), method="m", level=0.95)
    cell = dataclasses.replace(_cell(), until=rule)
    assert load_cell(cell.save(tmp_path / "cell.npz")).until == rule
    assert load_cell(_cell().save(tmp_path / "other.npz")).until is None
    plain = looks.summarise(cell)[0]
    assert (plain["held"], plain["stopped"], plain["coverage_stop"]) == (0.5, 1.0, 0.75)
    lines = export.write(cell, tmp_path / "rows.csv", "csv").read_text().splitlines()
    assert lines[0].endswith(",stop")
    assert [line.split(",")[5] for line in lines[1:] if line.endswith("True")] == ["20"] * 4


def test_figures_of_looks(tmp_path: Path) -> None:
    made = figures.save_looks(_cell(), tmp_path)
    assert {path.stem for path in made} == {"bands", "wrong_so_far"}
    axis = figures.wrong_so_far(_cell(), ["m"]).axes[0]
    assert axis.lines[0].get_ydata().tolist() == [0, 25, 50]
    assert (
        len(figures.bands(_cell(), ["m"], run=2).axes[0].lines[0].get_xdata()) == 2
    )  # no interval at first


def _study(**changes: Any) -> Study:
    return small(schedules=["C1"], methods=["plug_in"], replications=16, **changes)


def test_a_study_has_a_rule_that_its_tables_rows_and_page_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = _study(until={"half_width": 9.5})
    assert Study.read(study.plain()).until == looks.Until(half_width=9.5)
    assert study.digest == _study().digest  # rows do not depend on it
    assert len(_study(until=0.1, save_at=()).save_at) == 50
    with Writer(tmp_path / "out", study, {"jax": "0", "xla_flags": ""}) as writer:
        for cell, first in missing(writer):
            writer.describe(cell, jobs.about(cell))
            writer.commit(cell, first, fake_rows(cell, first))
    results = Results(tmp_path / "out")
    (cell,) = results.read_all()
    assert cell.until == study.until
    assert main(["looks", str(tmp_path / "out"), "--format", "csv"]) == 0
    (row, *_) = csv.DictReader(capsys.readouterr().out.splitlines())
    # The half-width of run r is r + 2: eight of sixteen stop, all of them at once.
    assert (float(row["stopped"]), row["looks"]) == (0.5, "4")
    assert main(["looks", str(tmp_path / "out"), "--until", "4.5", "--format", "json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)[0]["stopped"] == 3 / 16
    assert "jaxlsgd: Intervals of plug_in hold at one time only" in told.err
    assert main(["looks", str(tmp_path / "out"), "--excludes", "0"]) == 0
    assert "Not valid for plug_in: intervals that hold at one time" in capsys.readouterr().out
    assert main(["looks", str(tmp_path / "out")]) == 0
    assert "coverage at the stop %" in capsys.readouterr().out
    shown = page(results)
    assert "Looking at every saved round" in shown and "50 (12" in shown
    assert "half_width = 9.5" in shown


@pytest.mark.parametrize(
    ("until", "why"),
    [
        ({"half_width": 0.1, "methd": "x"}, ("until.methd", "unknown")),
        ({}, ("until", "missing")),
        ("soon", ("half_width", "type")),
    ],
)
def test_rules_that_cannot_be_read_are_refused(until: Any, why: Why) -> None:
    with refused(*why):
        _study(until=until)


def test_a_study_refuses_a_rule_that_its_methods_cannot_keep() -> None:
    with refused("problem linear", "unsupported", "until: "):
        jobs.check(_study(until={"excludes": 0.0}))
    with refused("problem linear", "choice", "until.coordinates"):
        jobs.check(_study(until={"half_width": 0.1, "coordinates": ["z"]}))


def test_measures_of_stops_from_rows() -> None:
    (row,) = looks.summarise_stops(_cell(), 0.5)
    assert (row["stopped"], row["stop_50"], row["coverage_stop"]) == (1.0, 20.0, 0.75)
    assert row["observations_saved"] == row["sent_saved"] == 0.5
    (row,) = looks.summarise_stops(_cell(), looks.Until(excludes=0.0))
    assert (row["stopped"], row["coverage_stop"]) == (0.25, 0.5)
    assert "coverage at the stop" in str(looks.looks_table(_cell(), 0.5))


@pytest.mark.parametrize("valid", ["fixed", "looks", "always"])
@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (0.5, "Intervals of m hold at one time only: stopping by their width is valid only in"),
        (
            looks.Until(excludes=0.0),
            "Not valid for m: intervals that hold at one time only exclude",
        ),
        (looks.Until(half_width=0.5, excludes=0.0), "Not valid for m: intervals that hold at one"),
    ],
)
def test_stops_of_intervals_for_one_time_are_cautioned_against(
    valid: str, rule: float | looks.Until, words: str, tmp_path: Path
) -> None:
    told = {} if valid == "fixed" else {"m": valid}
    path = dataclasses.replace(_cell(), valid=told).save(tmp_path / "cell.npz")
    cell = load_cell(path)  # the file says at which times intervals hold
    (row,) = looks.summarise_stops(cell, rule)
    assert row["valid"] == valid
    shown = " ".join(str(looks.looks_table(cell, rule)).split())
    assert (words in shown) == (valid == "fixed") == bool(looks.cautions([row]))
    assert not looks.cautions(looks.summarise(cell))  # looking is what is measured


@pytest.mark.parametrize("wrong", [["m"], {"m": "never"}, {"m": ["looks"]}, {"n": "looks"}])
def test_times_of_validity_that_cannot_be_are_refused(wrong: Any) -> None:
    about = json.loads(json.dumps(about_to_json(_cell())))
    assert "valid" not in about  # files are those of earlier versions
    with pytest.raises(Unfit, match="validity"):
        about_from_json(about | {"valid": wrong}, ["m"])


def test_what_a_simulation_of_an_always_valid_method_says_of_its_stops(sixteen: CellRows) -> None:
    assert sixteen.valid == {ALWAYS.name: "always"}
    assert not looks.cautions(looks.summarise_stops(sixteen, looks.Until(excludes=0.0)))


PLAN = schedules.paper("C5").plan(schedules.power_decay(0.5), num_steps=700)
PROBLEM = problems.linear(2, 2)
ALWAYS = one_step(valid="always", best_at=500)


@pytest.fixture(scope="module")
def sixteen() -> CellRows:
    return jaxlsgd.simulate(
        jax.random.key(0), PROBLEM, PLAN, methods=[ALWAYS], replications=16, until=0.3,
        save_at=[60, 70, 90, 110], devices=1, progress=False,
    )  # fmt: skip


def test_one_run_stops_where_a_loop_of_ones_own_would() -> None:
    whole = jaxlsgd.fit(
        jax.random.key(0),
        PROBLEM,
        PLAN,
        methods=[ALWAYS],
        save_at=[60, 70, 90, 110],
        progress=False,
    )
    widths = whole.rows[ALWAYS.name].half_width[:, 0, 0].max(-1)
    goal = float(widths[2]) * 1.0001
    first = int(np.argmax(widths <= goal))
    found = jaxlsgd.fit(
        jax.random.key(0),
        PROBLEM,
        PLAN,
        methods=[ALWAYS],
        save_at=[60, 70, 90, 110],
        until=goal,
        progress=False,
    )
    assert (
        found.stopped and found.cell.plan.num_rounds == (60, 70, 90, 110)[first] < PLAN.num_rounds
    )
    same = whole.rows[ALWAYS.name].half_width[first]
    assert np.array_equal(found.rows[ALWAYS.name].half_width[-1], same)
    assert "Stopped when it was sure enough" in str(found)
    tracker = jaxlsgd.track(ALWAYS, PROBLEM.init, rows="fresh")
    state = tracker.init(PROBLEM.init)._replace(states=found.states[ALWAYS.name], rounds=60)
    both = jax.jit(lambda state: [tracker.done(state, half_width=x) for x in (goal, goal / 2)])
    assert jnp.stack(both(state)).tolist() == [True, False]


def test_a_loop_of_ones_own_ends_when_it_is_sure_enough() -> None:
    tracker = jaxlsgd.track(jaxlsgd.random_scaling(mode="diagonal"), jnp.zeros(2), rows="fresh")
    noise = jax.random.normal(jax.random.key(3), (400, 2))
    start = tracker.init(jnp.zeros(2))
    assert not tracker.done(start, half_width=1e9)
    one = tracker.update(start, noise[0], eta=0.1)
    assert not tracker.done(one, half_width=1e9)  # its scale is 0

    def step(state: Any) -> Any:
        return tracker.update(state, noise[state.rounds], eta=0.1)

    ended = jax.lax.while_loop(lambda state: ~tracker.done(state, half_width=0.4), step, start)
    state = start
    for m in range(1, 400):
        state = step(state)
        if m >= 2:
            _, lower, upper = tracker.interval(state, 0.95)
            if np.max(np.asarray(upper - lower)) / 2 <= 0.4:
                break
    assert 2 < m < 399 and int(ended.rounds) == m


@pytest.mark.parametrize(
    ("method", "given", "why"),
    [
        (ALWAYS, {}, ("half_width", "missing")),
        (ALWAYS, {"half_width": 0}, ("half_width", "value")),
        (ALWAYS, {"half_width": 0.1, "level": 95}, ("level", "value", "0.95")),
        (ALWAYS, {"excludes": np.nan}, ("excludes", "not_finite")),
        (one_step(), {"excludes": 0}, ("excludes", "unsupported")),
        (one_step(valid="looks"), {"half_width": 0.1}, ("estimator", "missing")),
    ],
)
def test_a_loop_of_ones_own_is_told_what_is_wrong_with_its_rule(
    method: Any, given: dict[str, Any], why: Why
) -> None:
    tracker = jaxlsgd.track(method, jnp.zeros(2), rows="fresh")
    state = tracker.init(jnp.zeros(2))
    with refused(*why):
        tracker.done(state, **given)
    with refused("state", "type"):
        tracker.done(state.states, half_width=0.1)  # type: ignore[arg-type]


def test_a_run_without_an_interval_says_why() -> None:
    plan = schedules.paper("C5").plan(schedules.power_decay(0.5), num_steps=200)
    told = str(jaxlsgd.fit(jax.random.key(0), PROBLEM, plan, methods=[ALWAYS], progress=False))
    assert "for several looks there is none before 256 observations per client" in told


def test_names_that_rows_do_not_have_are_refused(sixteen: CellRows, tmp_path: Path) -> None:
    until = looks.Until(half_width=0.1, method="one_step")
    for argument, wrong in (
        ("method", lambda: looks.stops(sixteen, "one_step", 0.1)),
        ("method", lambda: looks.wrong(sixteen, "one_step")),
        ("until.method", lambda: looks.summarise_stops(sixteen, until)),
        ("method", lambda: figures.save_looks(sixteen, tmp_path, banded=["one_step"])),
    ):
        with refused(argument, "choice", "one_step[always, best at 500]"):
            wrong()
    with refused("until.coordinates", "type"):
        looks.Until(half_width=0.1, coordinates="x[0]")  # type: ignore[arg-type]
    with refused("until.coordinates", "choice"):
        jaxlsgd.simulate(
            jax.random.key(0), PROBLEM, PLAN, methods=[ALWAYS], replications=2,
            until=looks.Until(half_width=0.1, coordinates=("x0",)),
        )  # fmt: skip


def test_a_simulation_stops_every_run_where_its_rows_say(sixteen: CellRows) -> None:
    cell, name = sixteen, ALWAYS.name
    assert cell.until == looks.Until(half_width=0.3) and len(cell.save_at) == 5
    at, stopped = looks.stops(cell, name, cell.until)
    for run, (look, did) in enumerate(zip(at, stopped, strict=True)):
        sure = (cell.methods[name].half_width[:, 0, run] <= 0.3).all(-1)
        assert did == sure.any() and look == (np.argmax(sure) if did else 4)
    (row,) = [row for row in looks.summarise(cell) if row["coordinate"] == "x[0]"]
    assert row["stopped"] == stopped.mean()


def test_a_rule_that_a_method_cannot_keep_is_refused() -> None:
    with refused("until", "unsupported"):
        jaxlsgd.fit(
            jax.random.key(0), PROBLEM, PLAN, methods=[one_step()],
            until=looks.Until(excludes=0.0),
        )  # fmt: skip
    with refused("half_width"):
        looks.Until(half_width=-1.0)
    with refused("until", "missing"):
        looks.Until()
