"""README.md, the guides and CONTRIBUTING.md as they stand: their code is run, their commands, links and names tried.

Python blocks run unchanged, those of one section in one process, as a reader would go through them. Commands run
unchanged but for what would take minutes or a cluster:

- `jaxlsgd init study.toml` writes the file that everybody gets; `SHRUNK` then makes it small. `jaxlsgd run` is given
  one device, as programs are compiled for each. `simulate` of the ten lines makes 24 runs for a thousand.
- `--dask tcp://scheduler:8786` becomes a cluster in the process: `--dask local --devices 1`.
- `jaxlsgd reproduce all` becomes `reproduce table1`; tests/test_reproduce.py does all of it.
- `dask_jobqueue`, which needs SLURM, is a stand-in that starts a local cluster.
- `pip` is not run: its extras must be those of pyproject.toml. Scripts must be there and explain themselves.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from study_helpers import ROOT, TOML, environment

README, CONTRIBUTING = (ROOT / name for name in ("README.md", "CONTRIBUTING.md"))
GUIDES = sorted((ROOT / "scripts" / "guides").glob("*.md"))
STUDIES = ROOT / "scripts" / "guides" / "studies.md"
PAGES = (README, *GUIDES)
SHRUNK = {  # of the study file that `jaxlsgd init` writes
    "replications = 1000 ": "replications = 24\ntile_size = 24 ",
    "horizons = [5000] ": "horizons = [200] ",
}
LIMIT = 300  # seconds, of one process on a busy machine
# Runs commands, one list of arguments per line of standard input, in one process.
COMMANDS = """\
import json, sys
from jaxlsgd import cli
for line in sys.stdin:
    print("$", line.strip(), flush=True)
    code = cli.main(json.loads(line))
    if code:
        sys.exit(code)
"""
JOBQUEUE = """\
from dask.distributed import LocalCluster

class SLURMCluster(LocalCluster):
    def __init__(self, cores, processes, memory, walltime):
        super().__init__(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None)

    def adapt(self, maximum_jobs):
        pass
"""
# Names that the kinds of CONTRIBUTING.md go by, in a study of them.
OWN_STUDY = """\
problems = [{kind = "huber", dim = 2, num_clients = 3}]
methods = ["plug_in", "bonferroni"]
algorithms = ["local_sgd", "controlled"]
schedules = [{family = "doubling", every = 20}]
horizons = [200]
replications = 24
tile_size = 24
"""


class Block(NamedTuple):
    """A fenced block, and the heading that it is under."""

    section: str
    language: str
    text: str


def blocks(path: Path, language: str) -> list[Block]:
    found, section = [], ""
    for match in re.finditer(
        r"^#+ ([^\n]+)$|^```(\w+)\n(.*?)^```$", path.read_text("utf-8"), re.M | re.S
    ):
        if match[1]:
            section = match[1]
        elif match[2] == language:
            found.append(Block(section, match[2], match[3]))
    return found


def commands(path: Path, program: str) -> list[list[str]]:
    """The arguments of every call of a program in the shell blocks of a file, in order."""
    lines = [line for block in blocks(path, "bash") for line in block.text.splitlines()]
    split = [shlex.split(line, comments=True) for line in lines]
    return [words[1:] for words in split if words and words[0] == program]


def inline(start: str) -> str:
    """The one piece of inline code that starts so, in the README or a guide."""
    text = "\n".join(path.read_text("utf-8") for path in PAGES)
    (found,) = re.findall(rf"`({re.escape(start)}[^`]*)`", text)
    return found


def call(folder: Path, arguments: list[str], said: str = "") -> str:
    """Runs Python in a folder; returns what it printed. Blocks choose the number of their devices themselves."""
    done = subprocess.run(
        [sys.executable, *arguments],
        input=said,
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python(folder: Path, text: str) -> str:
    """Runs a program in a folder; returns what it printed."""
    (folder / "block.py").write_text(text, "utf-8")
    return call(folder, ["block.py"])


def cli(folder: Path, lines: list[list[str]]) -> str:
    """Runs commands in a folder, one after another; returns what they printed."""
    return call(folder, ["-c", COMMANDS], "".join(json.dumps(line) + "\n" for line in lines))


def all_blocks() -> list[Block]:
    return [block for path in PAGES for block in blocks(path, "python")]


def section(title: str) -> str:
    """The Python blocks of a section of the README or a guide, one after another."""
    return "\n\n".join(block.text for block in all_blocks() if block.section == title)


def test_no_python_block_is_forgotten() -> None:
    assert {block.section for block in all_blocks()} == {
        "Ten lines",
        "Your own problem, method, algorithm or loop",
        "A table whose rows belong to clients",
        "What is read from it",
        "Intervals in a training loop",
        "Problems made of others",
        "Rows for pandas and xarray",
        "How it runs",
        "Many machines",
        "What `one_step` does, and what it sends",
        "At the end: one message per client",
        "During training: rounds",
        "Look at every round, stop when it is sure enough",
        "The server",  # tests/test_flower.py
        "A client",
    }
    languages = [
        language
        for path in (*PAGES, CONTRIBUTING)
        for language in re.findall(r"^```(\w+)$", path.read_text("utf-8"), re.M)
    ]
    assert set(languages) == {"bash", "python"}


def test_messages_of_clients(capsys) -> None:
    names: dict[str, Any] = {}
    exec(section("At the end: one message per client"), names)
    exec(section("During training: rounds"), names)
    printed = capsys.readouterr().out
    assert "dose" in printed and "numbers" in printed
    assert len(names["fit"].estimate) == 3


def test_looking_at_every_round(tmp_path) -> None:
    printed = python(tmp_path, section("Look at every round, stop when it is sure enough"))
    assert "local_sgd on linear: 4 clients" in printed


def test_problems_made_of_others() -> None:
    names: dict[str, Any] = {}
    exec(section("Problems made of others"), names)
    assert [part.fact("dim") for part in names["study"].problems] == [5, 201 * 5, 6 * 5]


def test_what_is_said_to_be_sent_is_what_is_counted(capsys) -> None:
    """The table in the README, and the numbers beside the guide's code, by that code."""
    exec(section("What `one_step` does, and what it sends"), {})
    assert capsys.readouterr().out.split() == ["5", "7020", "0.2808", "100", "177600", "0.3552"]
    guide = (ROOT / "scripts/guides/intervals.md").read_text("utf-8")
    assert "# 7,020 and 177,600\n" in guide and "# 0.28 and 0.36 × Local SGD" in guide
    from jaxlsgd import numbers_sent, one_step, plug_in, problems, random_scaling, schedules

    increments = one_step(gradients="increments")
    methods = (random_scaling(), one_step(), increments, plug_in("finite"))
    told = README.read_text("utf-8")
    for d, name in ((5, "C1"), (5, "P(1/2)"), (100, "C1"), (100, "P(1/2)")):
        problem, warmed = problems.linear(d, 10), schedules.paper(name).with_warmup(0.05)
        plan = warmed.plan(schedules.power_decay(0.5), num_steps=5000)
        shares = [f"{numbers_sent(problem, plan, m) / (5000 * d):.3g}" for m in methods]
        assert f"| d = {d}, {name} | {plan.num_rounds:,} | {' | '.join(shares)} |" in told


def test_where_one_step_fails_is_told_as_it_was_measured() -> None:
    measured = (ROOT / "benchmarks/results/limits.md").read_text("utf-8")
    lines = [
        line.split(" | ") for line in measured.splitlines() if re.match(r"\| (un|lo|li)", line)
    ]
    found = {(line[1], line[2], line[3], line[5]) for line in lines}
    guide = (ROOT / "scripts/guides/intervals.md").read_text("utf-8")
    part = guide.partition("## Where `one_step` is known to fail")[2].partition("\n- **")[0]
    told = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| ")]
    assert len(told) == 10  # a header and nine of the cells
    assert all(tuple(line[1:]) in found for line in told[1:])
    failing = [line for line in lines if not re.search("C1|SCAFFOLD", line[0])]
    old = [float(line[1].split()[0]) for line in failing if line[1] != "none"]
    new = [float(line[3].split()[0]) for line in failing]
    text = (
        f"In {len(failing)} cells that were chosen because increments should fail there, they cover {min(old)} to {max(old)} % "
        f"or have no interval in any run ({len(failing) - len(old)} cells), and `one_step()` {min(new)} to {max(new)} %"
    )
    assert text in README.read_text("utf-8")


def test_ten_lines(tmp_path) -> None:
    lines = section("Ten lines")
    assert lines.count("replications=1000") == 1
    told = python(tmp_path, lines.replace("replications=1000", "replications=24"))
    assert "γ_m must never increase" in told  # plan.check()
    assert "local_sgd on logistic: 10 clients, schedule P(1/2)" in told
    assert re.search(r"plug_in\[finite\]: centre \d.* standard errors away, chance \d+ %", told)
    assert "24/24" in told


def test_your_own(tmp_path) -> None:
    """The sentence that puts the three together is run after their blocks."""
    given = """
key = jax.random.key(0)
plan = jaxlsgd.schedules.paper("C5").plan(jaxlsgd.schedules.power_decay(0.2), num_steps=500)
"""
    sentence = inline("fit(key, problem")
    simulated = """
cell = jaxlsgd.simulate(key, problem, plan, replications=8, methods=[naive], algorithm=clipped(2.0))
print(cell.algorithm, cell.methods["naive"].ok.all())
print((abs(estimate - 1) < 0.2).all(), (lower < upper).all())
"""
    blocks_of = section("Your own problem, method, algorithm or loop")
    told = python(tmp_path, f"{blocks_of}{given}\nprint(jaxlsgd.{sentence})\n{simulated}")
    assert "clipped is outside the theory of the intervals of " in told
    assert "['w'][2]" in told
    assert told.splitlines()[-2:] == ["clipped True", "True True"]


def test_your_own_data_and_loop(tmp_path) -> None:
    parts = (
        "A table whose rows belong to clients",
        "What is read from it",
        "Intervals in a training loop",
    )
    told = python(tmp_path, "\n\n".join(map(section, parts)) + "\nprint(prediction)\n")
    assert "dose" in told and "['w'][1]" in told, told


def test_studies_of_objects(tmp_path) -> None:
    python(tmp_path, section("How it runs"))
    told = cli(tmp_path, [["status", "objects"], ["table", "objects"]])
    assert "cells 12/12" in told  # (2 step sizes + paper-logistic) × 2 algorithms × 2 schedules
    assert "linear gamma0=0.25" in told
    assert "server_momentum" in told


@pytest.fixture(scope="module")
def walked(tmp_path_factory) -> tuple[Path, str]:
    """All commands of the README and the guides have been run in a folder, those of the studies' guide first."""
    folder = tmp_path_factory.mktemp("readme")
    (mine,) = [block for block in all_blocks() if block.text.startswith("# mine.py\n")]
    (folder / "mine.py").write_text(mine.text, "utf-8")
    first, *others = commands(STUDIES, "jaxlsgd")
    assert first == ["init", "study.toml"] == commands(README, "jaxlsgd")[0]
    told = cli(folder, [first])
    shrink(folder / "study.toml")
    others += [line for line in commands(README, "jaxlsgd")[1:] if line not in others]
    lines = [quickened(line) for line in others]
    own = quickened(["run", "own.toml", "--out", "own", *inline("--import mine.py").split()])
    (folder / "own.toml").write_text(f"{inline('algorithms = ')}\n{TOML}", "utf-8")
    return folder, told + cli(folder, [*lines, own, ["table", "own"]])


def shrink(path: Path) -> None:
    text = path.read_text("utf-8")
    for old, new in SHRUNK.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text, "utf-8")


def quickened(line: list[str]) -> list[str]:
    match line:
        case ["plan", *_]:  # with a rate it runs nothing; test_trial is about what it would run
            return [*line, "--rate", "1000"]
        case ["run", *_]:
            return [*line, "--devices", "1"]
        case ["reproduce", _, *options]:
            return ["reproduce", "table1", *options]
    return line


def test_commands(walked) -> None:
    folder, told = walked
    assert "cells 6/6" in told  # jaxlsgd status
    assert r"\begin{tabular}" in told  # jaxlsgd table --format latex
    assert list((folder / "results" / "figures").glob("*.pdf"))
    assert "agrees with the stored row" in told  # jaxlsgd replay
    assert "the same to the last bit in 6 of 6 cells" in told  # jaxlsgd compare
    assert "\n5.8069\n" in told  # jaxlsgd critical-value
    assert "server_momentum" in told  # jaxlsgd kinds
    assert (folder / "paper" / "table1.md").is_file()
    assert "clipped" in told.rpartition('["table", "own"]')[2]


def test_rows_for_pandas_and_xarray(walked) -> None:
    folder, _ = walked
    told = python(folder, section("Rows for pandas and xarray"))
    assert re.search(r"linear +C1( +[01]\.\d+){4}", told), told
    assert told.rstrip().endswith("]")


def test_many_machines(walked) -> None:
    """On the results of the commands above, so that there is nothing left to do: tests/test_dask.py does it."""
    folder, _ = walked
    (folder / "dask_jobqueue.py").write_text(JOBQUEUE, "utf-8")
    python(folder, section("Many machines"))
    (line,) = [line for path in GUIDES for line in commands(path, "jaxlsgd") if "--dask" in line]
    line[line.index("--dask") + 1] = "local"
    done = call(folder, ["-m", "jaxlsgd.cli", *line, "--devices", "1"])
    assert done.startswith("done: 0 tiles"), done


def test_extras_of_pip_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    calls = commands(README, "pip")
    assert len(calls) >= 4
    for call in calls:
        *install, what = call
        assert install == ["install", "-e"]
        given = re.fullmatch(r"\.(?:\[(\w+(?:,\w+)*)\])?", what)
        assert given, what
        assert set((given[1] or "").split(",")) - {""} <= set(project["optional-dependencies"])
    (core,) = re.findall(r"pip install -e \. +# core: (.*)", README.read_text("utf-8"))
    for name in core.split(", "):
        assert any(re.match(rf"{name}\b", needed) for needed in project["dependencies"]), name


def test_the_kinds_of_contributing_run_as_they_stand(tmp_path) -> None:
    found = blocks(CONTRIBUTING, "python")
    assert len(found) == 4
    lines = quickened(["run", "study.toml", "--out", "out"])
    for i, block in enumerate(found):
        (tmp_path / f"kind{i}.py").write_text(block.text, "utf-8")
        lines += ["--import", f"kind{i}.py"]
    (tmp_path / "study.toml").write_text(OWN_STUDY, "utf-8")
    told = cli(tmp_path, [lines, ["table", "out"], ["kinds"]])
    for name in ("huber", "bonferroni", "controlled", "doubling(20)"):
        assert name in told
    for path in sorted(tmp_path.glob("kind*.py")):
        checked = ["-m", "ruff", "check", "--isolated", "--line-length", "100", "--select", "E,F,B"]
        call(tmp_path, [*checked, path.name])


def test_the_scripts_and_tests_that_are_named_are_there() -> None:
    for path in (*PAGES, CONTRIBUTING):
        text = path.read_text("utf-8")
        for name in re.findall(r"\bscripts/\w+", text):
            assert (ROOT / name).stat().st_mode & 0o111, name
        for name in re.findall(r"\b(?:tests|benchmarks)/[\w/]+\.(?:py|md|png)", text):
            assert (ROOT / name).is_file(), name
    tried = [line for line in commands(CONTRIBUTING, "scripts/test") if line]
    ((path, _, expression, _),) = tried
    assert re.search(rf"def test_\w*{expression}", (ROOT / path).read_text("utf-8"))
    options = {word for line in commands(CONTRIBUTING, "python") for word in line}
    source = (ROOT / "benchmarks" / "__main__.py").read_text("utf-8")
    for option in options:
        assert not option.startswith("--") or f'"{option}"' in source, option


@pytest.mark.parametrize(
    "path", [*PAGES, CONTRIBUTING, ROOT / "CHANGELOG.md"], ids=lambda p: p.name
)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", path.read_text("utf-8")):
        if target.startswith("https://"):
            continue
        name, _, part = target.partition("#")
        page = path.parent / name if name else path
        assert page.exists(), target
        titles = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.M) if part else []
        slugs = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
        assert not part or part in slugs, target


def test_every_guide_is_in_the_readme() -> None:
    linked = re.findall(r"^- \[[^]]+\]\((scripts/guides/[^)]+)\)", README.read_text("utf-8"), re.M)
    assert [ROOT / target for target in sorted(linked)] == GUIDES


def test_the_rooms_are_those_that_there_are() -> None:
    tree = ast.parse((ROOT / "tests" / "test_structure.py").read_text("utf-8"))
    (rooms,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ROOMS"
    ]
    told = CONTRIBUTING.read_text("utf-8")
    assert re.findall(r"^\| `(\w+)` \|", told, re.M) == list(rooms)
    built = (
        README.read_text("utf-8").partition("## How it is built")[2].partition(" A *problem*")[0]
    )
    named = [name for name in re.findall(r"`(\w+)`", built) if name not in ("simulate", "fit")]
    assert named == list(rooms)
    for name in re.findall(r"`((?:" + "|".join(rooms) + r")/[\w/]+(?:\.py|/))`", told):
        assert (ROOT / "jaxlsgd" / name).exists(), name
    way = re.findall(
        r"`([\w.]+)` (?:\(|in )`([\w/]+\.py)`", told.partition("From `jaxlsgd run`")[2]
    )
    assert len(way) > 15
    for name, file in way:
        tree = ast.parse((ROOT / "jaxlsgd" / file).read_text("utf-8"))
        defined = {
            node.name
            for node in ast.walk(tree)
            if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        }
        assert {*name.split(".")} <= defined, f"{name} is not in {file}"


def test_the_guide_says_what_a_dask_scheduler_lets_others_do() -> None:
    text = (ROOT / "scripts" / "guides" / "machines.md").read_text("utf-8")
    assert "A Dask scheduler runs anybody's code" in text
