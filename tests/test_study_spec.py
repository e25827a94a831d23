"""The study as data: what is accepted, what is refused and how, and what the hash covers."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
import subprocess
import sys
from typing import Any

import pytest
from refusals import refused
from study_helpers import ROOT, TOML, small

from jaxlsgd import Problem, schedules
from jaxlsgd.core import registry
from jaxlsgd.core.checks import Refusal
from jaxlsgd.runs.cell import saved_rounds
from jaxlsgd.study import SpecError, Study, jobs, parts
from jaxlsgd.study.cells import CellSpec
from jaxlsgd.study.executors.dask import ClusterError
from jaxlsgd.study.store.files import Damaged
from jaxlsgd.study.study import differences

LINEAR = {"kind": "linear", "dim": 2, "num_clients": 3}

# What is changed in the small study, and words of the refusal: key, value, nearest right name.
BAD = {
    "unknown key": ({"replicatons": 3}, ["replicatons", "unknown key", "mean 'replications'"]),
    "misspelt schedule": ({"schedules": ["Lgo"]}, ["schedules[0]", "'Lgo'", "mean 'Log'"]),
    "misspelt kind": ({"problems": ["paper-linaer"]}, ["problems[0].kind", "mean 'paper-linear'"]),
    "misspelt method": ({"methods": ["plugin"]}, ["methods[0]", "'plugin'", "mean 'plug_in'"]),
    "misspelt option": (
        {"methods": ["random_scaling[schedul]"]},
        ["methods[0].critical", "'schedul'", "mean 'schedule'"],
    ),
    "open bracket": ({"methods": ["plug_in[finite"]}, ["methods[0].kind", "'plug_in[finite'"]),
    "a bracket as a key": (
        {"methods": [{"kind": "plug_in", "[": "finite"}]},
        ["methods[0].[", "unknown key"],
    ),
    "no brackets": ({"algorithms": ["local_sgd[x]"]}, ["algorithms[0]", "no brackets", "[x]"]),
    "misspelt algorithm": (
        {"algorithms": [{"kind": "fedprx", "mu": 1}]},
        ["algorithms[0].kind", "'fedprx'", "mean 'fedprox'"],
    ),
    "mu missing": ({"algorithms": ["fedprox"]}, ["algorithms[0].mu", "missing"]),
    "negative mu": (
        {"algorithms": [{"kind": "fedprox", "mu": -1}]},
        ["algorithms[0].mu", "at least 0", "-1"],
    ),
    "no algorithms": ({"algorithms": []}, ["algorithms", "[]", "at least one"]),
    "unknown kind": ({"problems": ["probit"]}, ["problems[0].kind", "'probit'", "--import FILE"]),
    "a number for a problem": ({"problems": [7]}, ["problems[0]", "jaxlsgd.Problem", "7"]),
    "no step": ({"problems": [LINEAR | {"gamma0": []}]}, ["problems[0].gamma0", "[]"]),
    "twice the step": (
        {"problems": [LINEAR | {"gamma0": [0.5, 0.5]}]},
        ["problems[1]", "'linear gamma0=0.5'"],
    ),
    "misspelt family": (
        {"schedules": [{"family": "powr", "beta": 0.5}]},
        ["schedules[0].family", "'powr'", "mean 'power'"],
    ),
    "misspelt argument": (
        {"problems": [LINEAR | {"heterogenity": 1}]},
        ["problems[0].heterogenity", "mean 'heterogeneity'"],
    ),
    "misspelt schedule argument": (
        {"schedules": [{"family": "power", "beat": 0.5}]},
        ["schedules[0].beat", "mean 'beta'"],
    ),
    "missing argument": ({"problems": [{"kind": "linear", "dim": 2}]}, ["num_clients", "missing"]),
    "no problems": ({"problems": []}, ["problems", "[]", "at least one"]),
    "no horizons": ({"horizons": []}, ["horizons", "[]", "at least one"]),
    "all excluded": ({"exclude": [{"problem": "linear"}]}, ["grid is empty", "excluded"]),
    "no cells listed": ({"cross": False}, ["grid is empty", "extra"]),
    "negative replications": ({"replications": -1}, ["replications", "-1"]),
    "replications as text": ({"replications": "10"}, ["replications", "'10'"]),
    "true is no number": ({"replications": True}, ["replications", "True"]),
    "misspelt step": (
        {"problems": [LINEAR | {"gamma": 0.5}]},
        ["problems[0].gamma: unknown key", "mean 'gamma0'"],
    ),
    "level twice": ({"levels": [0.9, 0.9]}, ["levels[1]: must differ from the others, got 0.9"]),
    "level 95": ({"levels": [95]}, ["levels[0]", "95", "did you mean 0.95"]),
    "level 1": ({"levels": [1.0]}, ["levels[0]", "1.0"]),
    "negative seed": ({"seed": -1}, ["seed", "-1"]),
    "seed of 64 bits": ({"seed": 2**32}, ["seed", str(2**32)]),
    "dtype": ({"dtype": "float16"}, ["dtype", "'float16'", "mean 'float"]),
    "warm-up of 5": ({"warmup": 5}, ["warmup", "5"]),
    "save at 0": ({"save_at": [0.0]}, ["save_at[0]", "0.0"]),
    "alpha": ({"problems": [LINEAR | {"alpha": 0.3}]}, ["problems[0]", "alpha", "0.3"]),
    "beta": ({"schedules": [{"family": "power", "beta": 1.5}]}, ["schedules[0]", "1.5"]),
    "nan": ({"problems": [LINEAR | {"noise": float("nan")}]}, ["problems[0].noise", "nan"]),
    "a table as argument": ({"problems": [LINEAR | {"center": {}}]}, ["problems[0].center", "{}"]),
    "twice the schedule": ({"schedules": ["C1", "C1"]}, ["schedules[1]", "'C1'"]),
    "twice the horizon": ({"horizons": [40, {"num_steps": 40}]}, ["horizons[1]", "40"]),
    "both lengths": ({"horizons": [{"num_steps": 1, "num_rounds": 1}]}, ["horizons[0]"]),
    "excluded name": ({"exclude": [{"schedule": "C2"}]}, ["exclude[0].schedule", "'C2'"]),
    "empty exclusion": ({"exclude": [{}]}, ["exclude[0]", "empty"]),
    "extra without schedule": ({"extra": [{"problem": "linear"}]}, ["extra[0]", "schedule"]),
    "extra in the grid": (
        {"extra": [{"problem": "linear", "schedule": "C1", "num_steps": 40}]},
        ["cells[2]", "'C1'"],
    ),
    "too many steps": ({"horizons": [10**12]}, ["horizons[0]", str(10**12)]),
    "too many cells": (
        {"horizons": list(range(1, 60_000)), "schedules": ["C1", "C5"]},
        ["119998", "100000"],
    ),
    "too many parameters": (
        {"problems": [{"kind": "linear", "dim": 10**5, "num_clients": 10**5}]},
        ["problems[0].num_clients"],
    ),
    "a name with a newline": ({"problems": [LINEAR | {"name": "a\nb"}]}, ["problems[0].name"]),
    "horizons no list": ({"horizons": 40}, ["horizons", "40", "list"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_study_is_refused_with_key_value_and_nearest_name(name: str) -> None:
    changes, words = BAD[name]
    with pytest.raises(SpecError) as caught:
        small(**changes)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("seed = = 3", ["not valid TOML", "line 1"]),
        ("# only this", ["problems", "missing"]),
        (TOML.replace('"C1"', '"c1"'), ["schedules[0]", "'c1'", "mean 'C1'"]),
        (TOML + "nois = 2\n", ["problems[0].nois", "mean 'noise'"]),
        ("x = " + "[" * 5000 + "]" * 5000, ["not valid TOML"]),
        ("#" * 1_000_001, ["larger than 1000000"]),
    ],
)
def test_bad_file_is_refused_by_name(tmp_path, content: str, words: list[str]) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(content)
    with pytest.raises(SpecError) as caught:
        Study.from_toml(path)
    assert [word for word in ["bad.toml", *words] if word not in str(caught.value)] == []


def test_missing_file_and_bytes_that_are_no_text(tmp_path) -> None:
    with refused("path", "unavailable", "no.toml", "No such file"):
        Study.from_toml(tmp_path / "no.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with refused("path", "damaged", "bytes.toml"):
        Study.from_toml(tmp_path / "bytes.toml")


@pytest.mark.parametrize(
    "error",
    [
        Refusal("x: must be finite, got nan", "x", "not_finite"),
        SpecError("problems[0].noise: is missing", "problems[0].noise", "missing"),
        ClusterError("--dask needs Dask", "--dask", "unavailable"),
        Damaged("manifest.json is damaged", "manifest.json"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_refusals_keep_argument_and_code_on_the_way_to_another_process(error: Any) -> None:
    """Dask pickles what a worker raises."""
    other = pickle.loads(pickle.dumps(error))
    assert type(other) is type(error) and str(other) == str(error)
    assert (other.argument, other.code) == (error.argument, error.code)


def test_toml_and_python_make_the_same_study(tmp_path) -> None:
    path = tmp_path / "study.toml"
    path.write_text(TOML)
    assert Study.from_toml(path) == small()
    assert Study.from_toml(path).digest == small().digest


def test_plain_data_goes_through_json_unchanged() -> None:
    study = small(
        schedules=[
            schedules.power(0.25, 2.0).with_warmup(0.1),
            {"family": "custom", "sequence": [1, 2, 40], "warmup": 0, "name": "own"},
            {"family": "power", "beta": "1/3"},
            {"family": "power", "beta": 1.0, "allow_outside_theory": True},
            {"family": "logarithmic", "base": 10},
        ],
        horizons=[20, {"num_rounds": 3}],
        problems=[LINEAR | {"covariance": [[2, 0], [0, 1]]}],
        methods=["plug_in", {"kind": "random_scaling", "mode": "diagonal", "beta": "1/2"}],
        exclude=[{"schedule": "Log(1,1,10)", "method": "plug_in"}],
        extra=[{"problem": "linear", "schedule": "own", "num_steps": 9, "methods": ["plug_in"]}],
    )
    again = Study.read(json.loads(json.dumps(study.plain())))
    assert again == study
    assert again.digest == study.digest
    assert [cell.id for cell in again.cells] == [cell.id for cell in study.cells]
    assert study.schedules[2].name == "P(1/3)"
    assert [schedule.warmup for schedule in study.schedules[:3]] == [0.1, 0.0, 0.05]


def test_grid_is_crossed_less_exclusions_and_with_extras() -> None:
    study = small(
        problems=[LINEAR, LINEAR | {"name": "other"}],
        horizons=[40, 80],
        exclude=[{"problem": "other", "num_steps": 80}, {"schedule": "C1", "method": "plug_in"}],
        extra=[{"problem": "other", "schedule": "C1", "num_steps": 99, "methods": ["plug_in"]}],
    )
    found = [(*cell.coordinates, [m.name for m in cell.methods]) for cell in study.cells]
    both = ["plug_in", "random_scaling"]
    assert found == [
        ("linear", "C1", "40", ["random_scaling"]),
        ("linear", "C1", "80", ["random_scaling"]),
        ("linear", "P(1/2)", "40", both),
        ("linear", "P(1/2)", "80", both),
        ("other", "C1", "40", ["random_scaling"]),
        ("other", "P(1/2)", "40", both),
        ("other", "C1", "99", ["plug_in"]),
    ]


def test_cell_ids_are_plain_names_that_cannot_leave_the_directory() -> None:
    study = small(problems=[LINEAR | {"name": "../../etc/passwd"}, LINEAR | {"name": "…"}])
    for cell in study.cells:
        assert set(cell.id) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
        assert not cell.id.startswith("-")


def test_hash_covers_all_but_the_replications() -> None:
    base = small()
    assert small(replications=5).digest == base.digest
    assert small(replications=5).cells[0].id == base.cells[0].id
    changes = [
        {"seed": 1},
        {"levels": [0.9]},
        {"tile_size": 8},
        {"dtype": "float64"},
        {"save_at": []},
        {"warmup": 0.1},
        {"horizons": [41]},
        {"methods": ["plug_in"]},
        {"problems": [LINEAR | {"gamma0": 0.4}]},
    ]
    for change in changes:
        assert small(**change).digest != base.digest, change
        assert small(**change).cells[0].id != base.cells[0].id, change


def test_number_spelt_as_integer_or_float_is_the_same() -> None:
    one, same = (small(problems=[LINEAR | {"noise": noise}]) for noise in (2, 2.0))
    assert one.digest == same.digest


def test_differences_name_keys_old_and_new() -> None:
    lines = differences(small().plain(), small(seed=3, levels=[0.95, 0.9]).plain())
    assert sorted(lines) == ["levels[1]: (absent) → 0.9", "seed: 0 → 3"]


def test_saved_rounds_from_shares_and_counts() -> None:
    """Shares are of the observations: half of them are used after three of five rounds."""
    cell = small(save_at=[0.001, 0.5, 4]).cells[0]
    step = schedules.power_decay(0.5)
    even, uneven = (
        schedules.custom(E).plan(step, num_rounds=len(E)) for E in ([1] * 40, [2, 1, 2, 3, 2])
    )
    assert cell.saved_rounds(even) == (1, 4, 20, 40)
    assert cell.saved_rounds(uneven) == (1, 3, 4, 5)
    assert small(save_at=4).cells[0].saved_rounds(even) == (10, 20, 30, 40)
    with refused("save_at"):
        cell.saved_rounds(even.prefix(3))


def test_looks_are_the_same_in_python_and_in_a_study() -> None:
    cell = small(until=0.1, save_at=[], schedules=["P(1/2)"], horizons=[5000]).cells[0]
    plan = cell.plan()
    rounds = cell.saved_rounds(plan)
    assert rounds == saved_rounds(plan, None, 0.1)
    assert plan.ends[rounds[0] - 1] >= 0.02 * plan.num_steps > plan.ends[rounds[0] - 2]


def test_the_tree_is_frozen_and_hashable() -> None:
    study = small()
    with pytest.raises(dataclasses.FrozenInstanceError):
        study.seed = 1  # type: ignore[misc]
    assert isinstance(study.cells[0], CellSpec)
    assert len({*study.cells, *small().cells}) == len(study.cells)


def test_steps_of_the_papers_problems_are_the_default() -> None:
    kinds = [LINEAR, LINEAR | {"kind": "logistic"}, "paper-linear", "paper-logistic"]
    for kind, step in zip(kinds, (0.5, 2.0, 0.5, 2.0), strict=True):
        (problem,) = small(problems=[kind]).problems
        assert (problem.gamma0, problem.alpha) == (step, 0.505)


def test_alpha_0_is_a_constant_step() -> None:
    study = small(problems=[LINEAR | {"gamma0": 0.25, "alpha": 0}])
    steps = study.cells[0].plan().gamma
    assert steps.min() == steps.max() == 0.25


def test_lists_of_steps_make_a_grid() -> None:
    study = small(problems=[LINEAR | {"gamma0": [0.25, 0.5], "alpha": [0.6, "2/3"]}])
    found = [(problem.name, problem.gamma0, problem.alpha) for problem in study.problems]
    assert found == [
        ("linear gamma0=0.25 alpha=0.6", 0.25, 0.6),
        ("linear gamma0=0.25 alpha=0.666667", 0.25, 2 / 3),
        ("linear gamma0=0.5 alpha=0.6", 0.5, 0.6),
        ("linear gamma0=0.5 alpha=0.666667", 0.5, 2 / 3),
    ]
    assert len(study.cells) == 8


def test_algorithms_are_crossed_excluded_and_named_in_cells() -> None:
    study = small(
        algorithms=["local_sgd", {"kind": "fedprox", "mu": 0.1}],
        exclude=[{"algorithm": "fedprox", "schedule": "C1"}],
        extra=[{"problem": "linear", "algorithm": "fedprox", "schedule": "C1", "num_steps": 9}],
    )
    assert [cell.coordinates for cell in study.cells] == [
        ("linear", "C1", "40"),
        ("linear", "P(1/2)", "40"),
        ("linear", "P(1/2)", "40", "fedprox"),
        ("linear", "C1", "9", "fedprox"),
    ]
    assert Study.read(study.plain()) == study


def test_method_names_are_those_of_the_builders() -> None:
    from jaxlsgd.inference.random_scaling import random_scaling

    for critical in ("asymptotic", "schedule", "paper"):
        name = random_scaling(critical=critical).name
        assert parts.part("method", name, "").name == name
    brief = parts.part("method", "random_scaling[schedule]", "")
    assert dict(brief.arguments) == {"critical": "schedule"}


Real = float
Wrapped = Problem


def test_arguments_are_read_by_the_types_of_a_builder_and_not_by_the_text_of_its_annotations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def around(inner: Wrapped, noise: Real | None = None, floats: int = 1) -> Problem:
        return inner

    kind = registry.Kind("problem", "around", around, "")
    monkeypatch.setitem(registry._KINDS["problem"], "around", kind)
    inner = {"kind": "linear", "dim": 2, "num_clients": 3}
    table = {"kind": "around", "inner": inner, "noise": 2, "floats": 2, "gamma0": 0.5}
    (part,) = parts.problems(table, "problems[0]")
    found = dict(part.arguments)
    assert dict(found["inner"])["kind"] == "linear" and part.made.dim == 2
    assert type(found["noise"]) is float and type(found["floats"]) is int


def test_annotations_that_cannot_be_evaluated_are_no_types() -> None:
    def build(noise: Nowhere = 1.0) -> None:  # type: ignore[name-defined] # noqa: F821
        ...

    assert parts._type_hints(build) == {}


def test_sizes_of_problems_are_read_without_building_them() -> None:
    from jaxlsgd.problems import paper_problem

    study = Study.read(small(problems=["paper-linear", "paper-logistic"]).plain())
    for part in study.problems:
        problem = paper_problem(part.name)
        assert part.made is None
        assert (part.fact("dim"), part.fact("num_clients")) == (problem.dim, problem.num_clients)
        assert part.built().made.dim == problem.dim


@pytest.mark.parametrize("name", ["template.toml", "paper.toml"])
def test_packaged_study_files_are_valid(name: str) -> None:
    study = Study.from_toml(ROOT / "jaxlsgd" / "study" / name)
    jobs.check(study)
    assert study.replications == 1000
    assert len(study.cells) == (10 if name == "paper.toml" else 6)


def uncommented() -> list[str]:
    """The template with one of its commented lines, or tables, in use."""
    text = (ROOT / "jaxlsgd" / "study" / "template.toml").read_text()
    lines = re.findall(r"^ *# (?:\{family|\{kind|\w+ = ).*(?<!\")$", text, re.MULTILINE)
    whole = re.findall(r"^# \[\[\w+\]\]\n(?:# \w+ = .*\n)+", text, re.MULTILINE)
    alone = [line for line in lines if not any(line in table for table in whole)]
    uncomment = [(part, re.sub(r"^( *)# ", r"\1", part, flags=re.MULTILINE)) for part in alone]
    tables = [(part, re.sub(r"^# ", "", part, flags=re.MULTILINE)) for part in whole]
    return [text.replace(*pair) for pair in [*uncomment, *tables]]


def test_every_suggestion_of_the_template_can_be_used(tmp_path) -> None:
    path, refused = tmp_path / "study.toml", []
    for text in uncommented():
        path.write_text(text)
        try:
            jobs.check(Study.from_toml(path))
        except SpecError as error:
            refused.append(str(error))
    assert len(uncommented()) >= 10
    # All but the problem of somebody's own.
    assert len(refused) == 1 and "got 'probit'" in refused[0], refused


def test_reading_a_study_imports_no_jax() -> None:
    code = "import sys, jaxlsgd.study; sys.exit(any(m in sys.modules for m in ('jax', 'scipy')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
