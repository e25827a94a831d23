"""From outside the package: a problem, a method and an algorithm of somebody's own, in a study like any.

Each is one file (tests/own), that `--import` runs, or a module whose objects are given in Python.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import tomllib
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from cluster_helpers import cluster, ended, script
from own.batch_means import batch_means
from own.poisson import poisson
from own.prox import prox
from refusals import refused
from study_helpers import (
    ROOT,
    Held,
    call,
    count,
    start,
    tiles,
    wait_until,
)

from jaxlsgd import Accumulator, Algorithm, Estimator, Law, Measurement, Study, cli
from jaxlsgd.core import registry
from jaxlsgd.study import StoreError, imports
from jaxlsgd.study.progress import Stop

OWN = ROOT / "tests" / "own"
FILES = ("poisson.py", "batch_means.py", "prox.py")
TOML = """\
problems = [{kind = "poisson", num_clients = 2}]
schedules = ["C5"]
horizons = [40, 60]
methods = ["batch_means[3]"]
algorithms = [{kind = "prox", mu = 0.1}]
replications = 48
tile_size = 16
"""


def write(folder: Path) -> tuple[Path, list[str]]:
    """The study file and its three files; returns the first and the options for the others."""
    (folder / "study.toml").write_text(TOML)
    for name in FILES:
        shutil.copy(OWN / name, folder / name)
    options = [part for name in FILES for part in ("--import", str(folder / name))]
    return folder / "study.toml", options


@pytest.fixture(scope="module")
def mine(tmp_path_factory) -> Path:
    """A directory with a complete, undisturbed run of the study in `out`."""
    folder = tmp_path_factory.mktemp("mine")
    study, imports = write(folder)
    code, out, err = call("run", study, "--out", folder / "out", "--quiet", *imports)
    assert (code, out, err) == (0, "", "")
    return folder


@pytest.fixture(autouse=True)
def own_flags(monkeypatch) -> None:
    """What the command line sets for XLA is gone at the end of a test."""
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))


@pytest.fixture
def own_registry(monkeypatch) -> None:
    """What a test registers or imports is gone at its end."""
    known = {role: dict(found) for role, found in registry._KINDS.items()}
    monkeypatch.setattr(registry, "_KINDS", known)
    for name in FILES:
        registry.forget(f"own.{name.removesuffix('.py')}")
    monkeypatch.setattr(imports, "_sources", {})
    monkeypatch.setattr(imports, "_places", {})


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    """The command line in this process."""
    return (cli.main([str(argument) for argument in arguments]), *capsys.readouterr())


# From files.


def test_killed_in_its_middle_and_resumed_gives_the_same_bytes(tmp_path, mine) -> None:
    study, imports = write(tmp_path)
    out, held = tmp_path / "out", Held(tmp_path / "held")
    command = ("run", study, "--out", out, *imports)
    held.let(1)
    process = start(*command, "--devices", 1, env=held.environment)
    wait_until(lambda: count(out) == 2 and held.begun == 2, process)
    process.kill()
    process.communicate()
    assert tiles(out).items() < tiles(mine / "out").items()
    code, text, err = call(*command)
    assert (code, text.split(" in ")[0]) == (0, "done: 4 tiles"), err
    assert tiles(out) == tiles(mine / "out")


def test_results_are_read_without_the_files(capsys, tmp_path, mine) -> None:
    code, text, err = run(capsys, "table", mine / "out")
    assert (code, err) == (0, "")
    assert "problem poisson, algorithm prox" in text
    assert "batch_means" in text
    assert "cells 2/2, tiles 6/6" in run(capsys, "status", mine / "out")[1]
    pytest.importorskip("matplotlib")
    code, text, err = run(capsys, "plot", mine / "out", "--out", tmp_path / "figures")
    assert (code, err) == (0, "")
    assert list((tmp_path / "figures").iterdir())


def test_a_replication_is_run_again_with_the_files_and_refused_without(
    capsys, mine, own_registry
) -> None:
    command = ("replay", mine / "out", "--cell", "poisson-c5-40-prox", "--replication", 17)
    code, _, err = run(capsys, *command)
    assert code == 2
    assert err == (
        "jaxlsgd: error: method batch_means: its kind 'batch_means' is not registered here; import "
        "the file that registers it, as for the run (--import FILE)\n"
    )
    code, text, err = run(capsys, *command, *write(mine)[1])
    assert code == 0, err
    assert "batch_means, level 0.95: poisson-c5-40-prox-" in text
    assert "agrees with the stored row" in text


def test_dask_workers_need_no_files(tmp_path, mine) -> None:
    study, imports = write(tmp_path)
    held = Held(tmp_path / "held")
    held.open()
    where = ("--dask", "local", "--devices", 1, "--quiet")
    code, _, err = call(
        "run", study, "--out", tmp_path / "out", *imports, *where, env=held.environment
    )
    assert (code, err) == (0, "")
    assert tiles(tmp_path / "out") == tiles(mine / "out")


def test_kinds_lists_them(capsys, tmp_path, own_registry) -> None:
    text = run(capsys, "kinds", *write(tmp_path)[1])[1]
    assert "  poisson: Poisson regression with two covariates." in text
    assert "      num_clients, scale = 0.3, seed = 0" in text
    assert "  batch_means: Student's t" in text
    assert "  prox: FedProx." in text


# From objects.

OBJECTS = """
import sys
sys.path.insert(0, sys.argv[2])
import jaxlsgd
jaxlsgd.prepare(1)
from pathlib import Path
from distributed import Client
from study_helpers import tiles
from test_open_house import objects
from jaxlsgd.study import Results, StoreError, replay
from jaxlsgd.study.progress import Stop

class Once(Stop):  # asks to end when the first tile is there
    @property
    def draining(self):
        return any(Path("out").glob("cells/*/tile-*"))

study = objects()
stopped = study.run("out", stop=Once())
assert (stopped.exit_code, stopped.tiles_left) == (3, 4), stopped
assert objects().run("out").tiles_run == 4
whole = tiles(Path("out"))
assert study.run("again").tiles_run == 6 and tiles(Path("again")) == whole
results = Results("out")
cell = results.cells()[0]
assert replay(results, cell, 17, study=objects()).agrees
try:
    replay(results, cell, 17)
except ValueError as error:
    assert "was given as an object in Python; give the study as well" in str(error), error
else:
    raise AssertionError("what is an object cannot be built")
with Client(sys.argv[1], timeout=600) as client:
    assert study.run("on-dask", client=client).tiles_run == 6
    # A kind that was registered in Python, and not by a file that the worker could run.
    named = objects(problems=[{"kind": "poisson", "num_clients": 2}])
    outcome = named.run("by-name", client=client)
    assert (outcome.tiles_run, outcome.errors) == (6, {}), outcome
assert tiles(Path("on-dask")) == whole
"""


def objects(**changes: Any) -> Study:
    """The study of `TOML` from objects."""
    given = {
        "problems": [poisson(2)],
        "schedules": ["C5"],
        "horizons": [40, 60],
        "methods": [batch_means(3)],
        "algorithms": [prox(0.1)],
        "replications": 48,
        "tile_size": 16,
    }
    return Study(**(given | changes))


def test_objects_are_run_resumed_replayed_and_sent_to_workers(tmp_path) -> None:
    """The worker has none of the modules that the objects come from."""
    with cluster(workers=1) as made:
        process = script(OBJECTS, made.address, ROOT / "tests", cwd=tmp_path)
        code, _, err = ended(process)
    assert code == 0, err


def test_a_kind_and_its_object_have_one_identity() -> None:
    """They are two studies all the same, since only one of them can be built again."""
    by_name = Study.from_dict(tomllib.loads(TOML))
    assert by_name.problems[0].identity == objects().problems[0].identity
    assert by_name.digest != objects().digest


def test_objects_in_tables_have_names_and_steps() -> None:
    study = objects(problems=[{"problem": poisson(2), "name": "mine", "gamma0": [0.2, 0.4]}])
    found = [(part.name, part.gamma0, part.made.name) for part in study.problems]
    names = ["mine gamma0=0.2", "mine gamma0=0.4"]
    assert found == [(names[0], 0.2, names[0]), (names[1], 0.4, names[1])]
    assert {part.identity for part in study.problems} == {objects().problems[0].identity}


# Wrong ones are refused before anything is written.


def growing() -> Estimator:
    def init(params: Any) -> Any:
        return {"path": jnp.zeros(1)}

    def update(state: Any, sync: Any) -> Any:
        return {"path": jnp.append(state["path"], sync.eta)}

    return estimator("growing", Accumulator(init, update))


def estimator(name: str, part: Accumulator, measure: Any = None) -> Estimator:
    law = Law(lambda level, plan, detail: 2.0, lambda statistic, plan, detail: 0.5)
    return Estimator(name, (part,), measure or _mean, law)


def _mean(states: Any, horizon: Any) -> Measurement:
    return Measurement(states[0], states[0])


STILL = Accumulator(lambda params: params, lambda state, sync: state)


def narrowing() -> Algorithm:
    def receive(moved: Any, message: Any, round: Any) -> Any:
        return round.params + moved, round.server.astype(jnp.bfloat16)

    return Algorithm("narrowing", init_server=lambda x: x, receive=receive)


def broken(states: Any, horizon: Any) -> Measurement:
    return states[0].no_such_thing


WRONG = {
    "no name": (
        {"problems": [dataclasses.replace(poisson(2), name="")]},
        ("problems[0]", "missing", "Problem(..., name=...)"),
    ),
    "the same name": (
        {"problems": [poisson(2), poisson(3)]},
        ("problems[1]", "duplicate", "'poisson'"),
    ),
    "no step size": (
        {"problems": [dataclasses.replace(poisson(2), gamma0=None)]},
        ("problems[0].gamma0", "missing", "Problem(gamma0=...)"),
    ),
    "a growing state": (
        {"methods": [growing()]},
        ("problem poisson", "shape", "methods (growing).update", "float32[2]"),
    ),
    "a narrowing state": (
        {"algorithms": [narrowing()]},
        ("problem poisson", "shape", "algorithm (narrowing).receive", "bfloat16[2]"),
    ),
    "a short estimate": (
        {"methods": [estimator("short", STILL, lambda s, h: Measurement(s[0][:1], s[0]))]},
        ("problem poisson", "shape", "methods (short).measure", "(2,)"),
    ),
    "an error of its own": (
        {"methods": [estimator("broken", STILL, broken)]},
        (
            "problem poisson",
            "value",
            "`measure` of method 'broken' (test_open_house.py, line",
            "AttributeError",
            "no_such_thing",
        ),
    ),
    "a function for a problem": (
        {"problems": [poisson]},
        ("problems[0]", "type", "jaxlsgd.Problem"),
    ),
    "a method for an algorithm": (
        {"algorithms": [batch_means(3)]},
        ("algorithms[0]", "type", "jaxlsgd.Algorithm"),
    ),
    "an argument for an object": (
        {"problems": [{"problem": poisson(2), "num_clients": 3}]},
        ("problems[0].num_clients", "unknown", "name, problem"),
    ),
    "no argument": (
        {"problems": [{"kind": "poisson"}]},
        ("problems[0].num_clients", "missing"),
    ),
    "an unknown argument": (
        {"problems": [{"kind": "poisson", "num_client": 2}]},
        ("problems[0].num_client", "unknown", "'num_clients'"),
    ),
    "an argument of the wrong kind": (
        {"methods": [{"kind": "batch_means", "length": "long"}]},
        (
            "problem poisson",
            "value",
            "`update` of method 'batch_means' (batch_means.py, line 49)",
            "TypeError",
        ),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_objects_are_refused_before_anything_is_written(tmp_path, name: str) -> None:
    changes, why = WRONG[name]
    with refused(*why):
        objects(**changes).run(tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Wrong files are refused, with their line.

PLUGINS = {
    "raises": ("import jaxlsgd\n\nx = {}['none']\n", "mine.py, line 3: KeyError: 'none'"),
    "a wrong word": ("import jaxlsgd\ndef f(:\n", "mine.py, line 2: SyntaxError: invalid syntax"),
    "a taken name": (
        "import jaxlsgd\n\n@jaxlsgd.register('problem')\ndef linear():\n    pass\n",
        "mine.py, line 3: name: must be new, got 'linear', which is a problem of "
        "jaxlsgd.problems.linear",
    ),
    "an unknown role": (
        "import jaxlsgd\njaxlsgd.register('problems')\n",
        "mine.py, line 2: role: must be one of problem, method, algorithm, schedule, got "
        "'problems'; did you mean 'problem'?",
    ),
    "leaves": ("import sys\nsys.exit(3)\n", "mine.py, line 2: SystemExit: 3"),
    "no text": ("\udcff", "cannot be read: 'utf-8' codec"),
}


@pytest.mark.parametrize("name", PLUGINS)
def test_wrong_files_are_refused_with_their_line(capsys, tmp_path, own_registry, name) -> None:
    source, words = PLUGINS[name]
    study, _ = write(tmp_path)
    (tmp_path / "mine.py").write_text(source, errors="surrogateescape")
    out = tmp_path / "out"
    code, _, err = run(capsys, "run", study, "--out", out, "--import", tmp_path / "mine.py")
    assert code == 2
    assert words in err
    assert err.startswith("jaxlsgd: error: --import ") and err.count("\n") == 1
    assert not out.exists()


def test_plan_says_that_coverage_will_be_unknown(capsys, tmp_path, own_registry) -> None:
    path, mine = tmp_path / "study.toml", tmp_path / "mine.py"
    mine.write_text(
        "import dataclasses, jaxlsgd\n\n\n"
        "@jaxlsgd.register('problem')\n"
        "def truthless() -> jaxlsgd.Problem:\n"
        "    problem = jaxlsgd.problems.linear(2, 3)\n"
        "    return dataclasses.replace(problem, truth=None, name='truthless')\n"
    )
    path.write_text(
        'problems = ["paper-linear", "truthless"]\nmethods = ["plug_in"]\n'
        'schedules = ["C5"]\nhorizons = [40]\nreplications = 20\n'
    )
    code, _, err = run(capsys, "plan", path, "--rate", 1000, "--import", mine)
    assert code == 0
    assert err.startswith("jaxlsgd: warning: coverage will be unknown: no truth is declared by")
    assert "declared by truthless; give" in err and err.count("\n") == 1


def test_what_a_file_builds_wrongly_is_told_with_its_line(capsys, tmp_path, own_registry) -> None:
    study, _ = write(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import jaxlsgd\n@jaxlsgd.register('problem')\ndef poisson(num_clients):\n    return 1 / 0\n"
    )
    command = ("run", study, "--out", tmp_path / "out", "--import", tmp_path / "mine.py")
    code, _, err = run(capsys, *command)
    assert (code, err.count("\n")) == (2, 1)
    assert err == (
        "jaxlsgd: error: in your builder of problem 'poisson' (mine.py, line 4): ZeroDivisionError: division "
        "by zero; it was called for problems[0]\n"
    )
    (tmp_path / "mine.py").write_text(
        "import jaxlsgd\n@jaxlsgd.register('problem')\ndef poisson(num_clients):\n    return 3\n"
    )
    code, _, err = run(capsys, *command)
    assert "problems[0]: must be built as a jaxlsgd.Problem by poisson, got 3" in err
    (tmp_path / "mine.py").write_text(
        "import jaxlsgd\n@jaxlsgd.register('problem')\ndef poisson(num_clients):\n"
        "    problem = jaxlsgd.problems.linear(2, num_clients)\n"
        "    return jaxlsgd.problems.Solution(problem, 0, 0, 0)\n"
    )
    code, _, err = run(capsys, *command)
    assert code == 2 and err.endswith("; return its .problem\n")
    assert not (tmp_path / "out").exists()


# By what fails: a file, and the message.
FAILING = {
    "a loss": (
        """\
import jax, jaxlsgd, numpy as np
def loss(x, seen):
    raise ValueError("num_clients: of no use")
@jaxlsgd.register("problem")
def poisson(num_clients):
    sample = lambda key, client: jax.random.normal(key, (2,))
    return jaxlsgd.Problem(np.zeros(2), loss, num_clients, sample, name="mine", gamma0=0.5)
""",
        "in your `loss` of problem 'mine' (mine.py, line 3): ValueError: num_clients: of no use; it was called "
        "for problems[0]",
    ),
    "a builder": (
        """\
import jaxlsgd
@jaxlsgd.register("problem")
def poisson(num_clients):
    return jaxlsgd.problems.linear(2, num_clients, noise=-1)
""",
        "in your builder of problem 'poisson' (mine.py, line 4): noise: must be a finite number of "
        "at least 0, got -1; it was called for problems[0]",
    ),
    "a builder of schedules": (
        """\
import jaxlsgd
@jaxlsgd.register("problem")
def poisson(num_clients):
    return jaxlsgd.problems.linear(2, num_clients)
@jaxlsgd.register("schedule")
def doubling(start):
    return [][start]
""",
        "in your builder of schedule 'doubling' (mine.py, line 7): IndexError: list index out of range; it was "
        "called for schedules[0]",
    ),
}


@pytest.mark.parametrize("name", FAILING)
def test_an_error_in_a_file_is_not_blamed_on_the_study(
    capsys, tmp_path, own_registry, name
) -> None:
    source, words = FAILING[name]
    study, _ = write(tmp_path)
    text = study.read_text().replace('["C5"]', '[{family = "doubling", start = 1}]')
    study.write_text(text if "schedule" in name else study.read_text())
    (tmp_path / "mine.py").write_text(source)
    command = ("run", study, "--out", tmp_path / "out", "--import", tmp_path / "mine.py")
    code, _, err = run(capsys, *command)
    assert (code, err) == (2, f"jaxlsgd: error: {words}\n")
    assert not (tmp_path / "out").exists()


def test_a_builder_that_refuses_an_argument_means_the_study(capsys, tmp_path, own_registry) -> None:
    study, _ = write(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import jaxlsgd\n@jaxlsgd.register('problem')\ndef poisson(num_clients):\n"
        "    raise ValueError('num_clients: must be at least 3, got 2')\n"
    )
    command = ("run", study, "--out", tmp_path / "out", "--import", tmp_path / "mine.py")
    _, _, err = run(capsys, *command)
    assert err == (f"jaxlsgd: error: {study}: problems[0].num_clients: must be at least 3, got 2\n")


def test_a_tile_that_fails_in_somebodys_own_function_names_it(tmp_path) -> None:
    def multiplier(level: Any, plan: Any, detail: Any) -> Any:
        raise LookupError("no such level")

    method = dataclasses.replace(
        estimator("mine", STILL), law=Law(multiplier, lambda statistic, plan, detail: 0.5)
    )
    outcome = objects(methods=[method], horizons=[40], replications=16).run(tmp_path / "out")
    line = multiplier.__code__.co_firstlineno + 1
    assert list(outcome.errors.values()) == [
        f"in your `law.multiplier` of method 'mine' (test_open_house.py, line {line}): LookupError: no such level"
    ]


def test_two_files_of_one_name_or_one_kind_are_refused(capsys, tmp_path, own_registry) -> None:
    study, imports = write(tmp_path)
    (tmp_path / "other").mkdir()
    for name in ("poisson.py", "again.py"):
        shutil.copy(OWN / "poisson.py", tmp_path / "other" / name)
    command = ("run", study, "--out", tmp_path / "out", *imports, "--import")
    code, _, err = run(capsys, *command, tmp_path / "other" / "poisson.py")
    assert (code, err.count("\n")) == (2, 1)
    assert "must have another name than" in err and "got poisson.py" in err
    code, _, err = run(capsys, *command, tmp_path / "other" / "again.py")
    assert code == 2
    assert "again.py, line" in err and "must be new, got 'poisson'" in err
    assert not (tmp_path / "out").exists()


def test_a_study_without_its_files_says_what_to_do(capsys, tmp_path, own_registry) -> None:
    study, _ = write(tmp_path)
    for verb in (["plan", study], ["run", study, "--out", tmp_path / "out"]):
        code, _, err = run(capsys, *verb)
        assert (code, err.count("\n")) == (2, 1)
        assert "problems[0].kind: must be one of " in err
        assert "got 'poisson'; kinds of your own come from --import FILE" in err
    assert not (tmp_path / "out").exists()


# Rows belong to the code and the data that made them.


def imported(folder: Path, change: Any = lambda source: source) -> Study:
    """The study of a user who has edited poisson.py."""
    study, _ = write(folder)
    for name in FILES:
        source = (folder / name).read_text()
        imports.load_source(name, change(source) if name == "poisson.py" else source)
    return Study.from_toml(study)


def begin(study: Study, out: Path) -> int:
    """Writes the manifest, or compares with the one that is there; runs nothing."""
    return study.run(out, stop=Stop(0)).tiles_left


CHANGED = {
    "the loss": lambda source: source.replace("- y * (a @ x)", "- 2 * y * (a @ x)"),
    "a constant": lambda source: source.replace("MOST = 12", "MOST = 13"),
    "a helper": lambda source: source.replace("jnp.exp(-rate)", "jnp.exp(-1.1 * rate)"),
    "the data": lambda source: source.replace("thetas = scale", "thetas = 1.5 * scale"),
}
SAME = {
    "a comment": lambda source: source.replace("# the loss", "# the negative log-likelihood"),
    "blank lines": lambda source: source.replace("def loss", "\n\n\n# And now:\n\n\ndef loss"),
    "spaces": lambda source: source.replace("jnp.exp(a @ x) - y", "(jnp.exp( a @ x )) - y"),
    "a docstring": lambda source: source.replace("Counts by inversion", "By inversion: counts"),
}


@pytest.mark.parametrize("name", [*CHANGED, *SAME])
def test_edited_code_is_refused_and_edited_comments_are_not(tmp_path, own_registry, name) -> None:
    assert begin(imported(tmp_path), tmp_path / "out") == 6
    before = (tmp_path / "out" / "manifest.json").read_bytes()
    edit = (CHANGED | SAME)[name]
    assert edit((OWN / "poisson.py").read_text()) != (OWN / "poisson.py").read_text()
    edited = imported(tmp_path, edit)
    if name in SAME:
        assert begin(edited, tmp_path / "out") == 6
    else:
        with refused(tmp_path / "out", "conflict", "problem poisson", kind=StoreError):
            begin(edited, tmp_path / "out")
    assert (tmp_path / "out" / "manifest.json").read_bytes() == before


def test_a_replication_of_edited_code_is_refused(capsys, tmp_path, mine, own_registry) -> None:
    imports = write(tmp_path)[1]
    (tmp_path / "poisson.py").write_text(CHANGED["the loss"]((OWN / "poisson.py").read_text()))
    command = ("replay", mine / "out", "--cell", "poisson-c5-40-prox", "--replication", 17)
    code, _, err = run(capsys, *command, *imports)
    assert code == 2
    assert "problem poisson: its code or data changed since its rows were made" in err


def test_changed_objects_are_refused(tmp_path) -> None:
    assert begin(objects(), tmp_path / "out") == 6
    assert begin(objects(problems=[poisson(2)]), tmp_path / "out") == 6
    other = dataclasses.replace(poisson(2), clients=poisson(2).clients + np.float32(1e-6))
    with refused(tmp_path / "out", "conflict", "problem poisson", kind=StoreError):
        begin(objects(problems=[other]), tmp_path / "out")
    with refused(tmp_path / "out", "conflict", "algorithm prox", kind=StoreError):
        begin(objects(algorithms=[prox(0.2)]), tmp_path / "out")
    with refused(tmp_path / "out", "conflict", "method batch_means", kind=StoreError):
        begin(objects(methods=[batch_means(4)]), tmp_path / "out")


def test_another_python_is_told_as_such(tmp_path, monkeypatch) -> None:
    begin(objects(), tmp_path / "out")
    monkeypatch.setattr("jaxlsgd.core.identity.PYTHON", "py3.99")
    with refused(tmp_path / "out", "conflict", "Python 3.", "3.99", kind=StoreError):
        begin(objects(), tmp_path / "out")
