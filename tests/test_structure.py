"""The house: imports go one way, programs suit every accelerator."""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import momenta, paper_plan

import jaxlsgd
from jaxlsgd import Algorithm, Problem, one_step, plug_in, problems, random_scaling
from jaxlsgd.core import checks
from jaxlsgd.core.estimator import Estimator, Horizon
from jaxlsgd.engine import statistics
from jaxlsgd.engine.block import run_block, start_tile
from jaxlsgd.engine.draws import supply
from jaxlsgd.engine.layout import BLOCK_STEPS, SLOTS, Call, lay_out
from jaxlsgd.engine.program import LOOPS, make_data, make_program
from jaxlsgd.runs.cell import LOCAL_SGD

PACKAGE = Path(jaxlsgd.__file__).parent
# A room uses only rooms before it, and itself.
ROOMS = (
    "core",
    "schedules",
    "problems",
    "algorithms",
    "inference",
    "engine",
    "analysis",
    "runs",
    "federation",
    "regression",
    "study",
    "report",
    "cli",
)
# Pairs of files that know each other; the first imports the second only when it is called.
MUTUAL = {
    # `cell.save(...)` for `save(cell, ...)`.
    ("core.rows", "core.cell_file"),
    # `schedule.plan(...)` makes a plan, which knows its schedule.
    ("schedules.families", "schedules.plan"),
    # `Study.run()` for `run(study)`.
    ("study.study", "study.runner"),
}


@functools.cache
def files() -> dict[str, Path]:
    """Modules by their name within the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


@functools.cache
def imports(module: str) -> list[tuple[str, bool]]:
    """The package's modules that a module imports, and whether only when a function is called."""
    tree = ast.parse(files()[module].read_text(encoding="utf-8"))
    return list(_imports_below(tree, lazy=False))


def _imports_below(node: ast.AST, lazy: bool) -> Iterator[tuple[str, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            for name in _imported(child):
                yield name, lazy
        function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield from _imports_below(child, lazy or function)


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
        names = [alias.name for alias in node.names]
    for name in names:
        package, _, rest = name.partition(".")
        if package != "jaxlsgd":
            continue
        while rest not in files():  # a function of a module
            rest = rest.rpartition(".")[0]
        yield rest


def room(module: str) -> str:
    return module.partition(".")[0]


def test_imports_go_one_way():
    for module in files().keys() - {"", "typing"}:  # which collect names of the rooms
        assert room(module) in ROOMS, f"{module} has no place in the order of rooms"
        here = ROOMS.index(room(module))
        for target, _ in imports(module):
            # The package's own names lead everywhere, so only the last room may go by them.
            assert target or here == len(ROOMS) - 1, f"{module} imports the package itself"
            assert room(target) in ("", *ROOMS[: here + 1]), f"{module} imports {target}"


def test_one_module_imports_what_jax_may_change():
    """`jax.extend` may change with any version of JAX; private JAX is used nowhere."""
    using = {
        name
        for name, path in files().items()
        if re.search(
            r"^ *(from|import) jax(\.| import )(extend|_src)", path.read_text("utf-8"), re.M
        )
    }
    assert using == {"core.tracing"}


def test_the_steps_of_a_block_are_defined_once():
    """Methods that roll (bins of rounds) must mean the same blocks as the engine."""
    defined = [
        name
        for name, path in files().items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        if node.value.value == BLOCK_STEPS and "BLOCK" in ast.unparse(node.targets[0])
    ]
    assert defined == ["core.estimator"]


def test_the_package_itself_imports_nothing_at_once():
    assert imports("") == [("core.lazy", False)]
    assert imports("core.lazy") == imports("core") == []


def circles(mutual: set[tuple[str, str]]) -> set[str]:
    """Files that need themselves, by way of others."""
    edges = {
        (module, target)
        for module in files()
        for target, lazy in imports(module)
        if target != module and not (lazy and (module, target) in mutual)
    }
    # A package's __init__ is not needed by the files in it.
    edges = {(a, b) for a, b in edges if not f"{a}.".startswith(f"{b}.")}
    left = set(files())
    while free := {name for name in left if not any(a == name and b in left for a, b in edges)}:
        left -= free
    return left


def test_no_file_needs_itself():
    """No circles; those that are closed by an import within a function are on a short list."""
    assert not circles(MUTUAL)


@pytest.mark.parametrize("pair", sorted(MUTUAL), ids=" and ".join)
def test_the_short_list_is_not_longer_than_it_need_be(pair: tuple[str, str]):
    assert circles(MUTUAL - {pair})


def test_public_names_resolve():
    assert len(set(jaxlsgd.__all__)) == len(jaxlsgd.__all__)
    for name in jaxlsgd.__all__:
        assert getattr(jaxlsgd, name) is not None
    assert set(jaxlsgd.__all__) <= set(dir(jaxlsgd))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        jaxlsgd.nothing  # noqa: B018


def test_every_module_is_importable_and_says_what_it_is():
    for module, path in files().items():
        if not module.endswith("__main__"):
            found = importlib.import_module(f"jaxlsgd.{module}" if module else "jaxlsgd")
            assert found.__doc__ or not path.read_text(encoding="utf-8").strip(), module


# A name of the package that makes a refusal, as in `refusal(..., code="choice")` or `SpecError(text, where, "missing")`.
REFUSING = ("refusal", "Refusal", "SpecError", "ClusterError", "StoreError", "Damaged", "Missing")
# Plain errors that a caller's mistake raises all the same.
PLAIN = {
    # As Python refuses a keyword that a function does not have.
    "regression.fit_table": "TypeError",
}


def _calls(node: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for call in ast.walk(node):
        if isinstance(call, ast.Call):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else None
            yield name or getattr(call.func, "id", ""), call


def _codes(module: str) -> Iterator[str]:
    """The codes of a module's refusals, as they are written."""
    for name, call in _calls(ast.parse(files()[module].read_text(encoding="utf-8"))):
        if name in REFUSING:
            third = [] if name == "refusal" else call.args[2:3]  # of `refusal` it is the value
            for code in [word.value for word in call.keywords if word.arg == "code"] + third:
                yield from (x.value for x in ast.walk(code) if isinstance(x, ast.Constant))


def test_every_code_of_a_refusal_is_raised():
    """No code is left over from a refusal that is gone."""
    raised = {code for module in files() for code in _codes(module)} | {"value"}
    assert raised >= set(get_args(checks.Code))


def test_every_refusal_has_its_argument_and_a_code():
    """A plain error would have neither."""
    plain = {
        module: name
        for module, path in files().items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Raise) and node.exc is not None
        for name, _ in _calls(node.exc)
        if name in ("ValueError", "TypeError")
    }
    assert plain == PLAIN


# Programs for accelerators that are not here: exported as text and read.

PLATFORMS = ("cpu", "cuda", "tpu")
REPLICATIONS = 4
METHODS = (random_scaling(), plug_in())
ALL_METHODS = (
    *METHODS,
    random_scaling(mode="diagonal", name="diagonal"),
    plug_in("finite"),
    random_scaling("finite"),
    one_step(),
)


def _sample(key: jax.Array, client: Any) -> Any:
    a = jax.random.normal(key, (3,))
    return a, jnp.sum(a) + 0.1 * client


@functools.cache
def problem(name: str) -> Problem:
    if name == "sampled":
        return Problem(
            init=np.zeros(3), loss=problems.linear(3, 3).loss, num_clients=3, sample=_sample
        )
    return {"linear": problems.linear, "logistic": problems.logistic}[name](3, 3)


@functools.cache
def call_with(slots: int) -> Call:
    """A call with room for so many synchronisations."""
    plan = paper_plan("P(1/2)", num_steps=5000)
    calls = [call for group in lay_out(plan).groups for call in group]
    return next(call for call in calls if call.slots == slots)


def abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype), tree)


def block_function(
    name: str,
    slots: int,
    algorithm: Algorithm = LOCAL_SGD,
    shared_draws: bool = False,
    platform: str = "cpu",
) -> tuple[Any, tuple[Any, ...]]:
    """`run_block` as a function of arrays alone, and their shapes."""
    program = make_program(
        problem(name), METHODS, algorithm, shared_draws=shared_draws, platform=platform
    )
    assert program.draws_ahead == shared_draws
    data = abstract(make_data(problem(name), "float32"))
    state = jax.eval_shape(lambda d: start_tile(program, d, REPLICATIONS), data)
    words = jax.ShapeDtypeStruct((REPLICATIONS, 2), jnp.uint32)

    def run(data: Any, words: Any, state: Any, block: Any) -> Any:
        keys = jax.random.wrap_key_data(words, impl="threefry2x32")
        return run_block(program, slots, data, supply(program, data, keys, 0), state, block)

    return jax.jit(run), (data, words, state, abstract(call_with(slots).block))


def export(function: Any, shapes: tuple[Any, ...]) -> str:
    """A program's text for every platform, checked."""
    exported = jax.export.export(function, platforms=PLATFORMS)(*shapes)
    assert exported.platforms == PLATFORMS
    text = exported.mlir_module()
    check_text(text)
    return text


every_room = pytest.mark.parametrize("slots", [*SLOTS, BLOCK_STEPS])


@every_room
@pytest.mark.parametrize("name", ["linear", "logistic", "sampled"])
def test_blocks_export_for_every_platform(name: str, slots: int):
    export(*block_function(name, slots))


@every_room
@pytest.mark.parametrize("name", ["linear", "logistic"])
def test_blocks_on_shared_draws_export_for_every_platform(name: str, slots: int):
    export(*block_function(name, slots, shared_draws=True))


@every_room
def test_other_algorithms_export_for_every_platform(slots: int):
    """Where a round ends a CPU branches; an accelerator, which might ask its host, selects."""
    function, shapes = block_function("linear", slots, momenta())
    export(function, shapes)
    for platform in PLATFORMS:
        text = jax.export.export(function, platforms=[platform])(*shapes).mlir_module()
        assert branches_on_data(text) == (platform == "cpu"), platform
    assert not branches_on_data(export(*block_function("linear", slots)))


def branches_on_data(text: str) -> bool:
    """Whether a program branches on a flag that it has computed, and not on the platform alone."""
    flags = re.findall(r"(%\w+) = stablehlo\.convert .*\(tensor<i1>\) -> tensor<i32>", text)
    branches = re.findall(r'"stablehlo\.(?:case|if)"\((%\w+)\)', text)
    return not set(flags).isdisjoint(branches)


@pytest.mark.parametrize("method", ALL_METHODS, ids=lambda method: method.name)
def test_measurements_export_for_every_platform(method: Estimator):
    program = make_program(problem("linear"), (method,), LOCAL_SGD)
    data = abstract(make_data(problem("linear"), "float32"))
    state = jax.eval_shape(lambda d: start_tile(program, d, REPLICATIONS), data)
    horizon = abstract(Horizon.of(paper_plan("C5", num_steps=500), "float32"))

    def measure(data: Any, found: Any, horizon: Any) -> Any:
        states = statistics.states_of(program, found, method)
        parts, given = method.accumulators, horizon if method.needs_plan else None
        return statistics.measure_compiled(method.measure, parts, data.init, states, given)

    export(jax.jit(measure), (data, state.statistics, horizon))


def check_text(text: str) -> None:
    """No number of a float32 program is wider or narrower, and no product is of low precision."""
    types = set(re.findall(r"(?:<|x)((?:b?f|f\d+E|i|ui|complex<f)\d+)>", text))
    assert "f32" in types
    assert not types & {"f64", "bf16", "f16"}, types
    for product in re.findall(r"stablehlo\.dot_general.*", text):
        assert "HIGHEST" in product or "precision = [HIGHEST" in product, product


@pytest.mark.parametrize("algorithm", [LOCAL_SGD, momenta()], ids=lambda one: one.name)
@every_room
def test_loops_have_a_known_length(
    slots: int, algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch
):
    """A loop whose length is data would make a GPU ask the host at every step; on a CPU it may be."""
    monkeypatch.setitem(LOOPS, "gpu", LOOPS["gpu"]._replace(unroll=1))  # compiles faster
    function, shapes = block_function("linear", slots, algorithm, platform="gpu")
    text = function.lower(*shapes).compile().as_text()
    loops = re.findall(r"^.* while\(.*$", text, flags=re.MULTILINE)
    assert loops
    for loop in loops:
        assert "known_trip_count" in loop, loop
