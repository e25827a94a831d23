"""The digest of an object: the same in every process, and another when anything changes that counts."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import subprocess
import sys
import threading
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from study_helpers import environment

import jaxlsgd
from jaxlsgd.core.identity import PYTHON, digest, modules

multinomial = importlib.import_module("jaxlsgd.problems.multinomial")  # not the builder


def defined(source: str, name: str = "f") -> Any:
    space: dict[str, Any] = {"__name__": "somebody_elses"}
    exec(compile(source, "<somebody else's>", "exec"), space)
    return space[name]


BASE = """
scale = 2.0
table = {"a": [1, 2]}
def helper(x): return x + scale
def build(k):
    def inner(x, y=1, *, z=2):
        return helper(x) * k
    return inner
class Part:
    weight = 3
    def __init__(self, x): self.x = x
    def __call__(self, y): return helper(y) * self.weight * self.x
f = build(3)
g = Part(1.5)
def h(x): return [helper(v) for v in x], (lambda u: helper(u) - 1)(x)
"""
SAME = {
    "a comment": ("scale = 2.0", "scale = 2.0  # twice"),
    "blank lines": ("def helper", "\n\n\n\ndef helper"),
    "a docstring": ("def helper(x): return", 'def helper(x):\n    """Adds."""\n    return'),
    "brackets": ("return x + scale", "return (x + (scale))"),
    "a name that is not used": ("table =", "other ="),
}
OTHER = {
    "a global": ("scale = 2.0", "scale = 2.5"),
    "a helper": ("x + scale", "x - scale"),
    "an operator of a helper": ("x + scale", "scale + x"),
}
OF_F = OTHER | {
    "a closure": ("build(3)", "build(4)"),
    "a default": ("y=1", "y=2"),
    "a keyword's default": ("z=2", "z=3"),
    "the body": ("helper(x) * k", "helper(x) / k"),
}
OF_G = OTHER | {
    "a field": ("Part(1.5)", "Part(1.6)"),
    "a constant of the class": ("weight = 3", "weight = 4"),
    "a method": ("* self.weight", "+ self.weight"),
}
OF_H = OTHER | {"a lambda inside": ("- 1)", "- 2)")}


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("which", ["f", "g", "h"])
def test_what_does_not_count(which: str, name: str) -> None:
    edited = BASE.replace(*SAME[name])
    assert edited != BASE
    assert digest(defined(edited, which)) == digest(defined(BASE, which))


@pytest.mark.parametrize(
    ("which", "name"),
    [*(("f", name) for name in OF_F), *(("g", x) for x in OF_G), *(("h", x) for x in OF_H)],
)
def test_what_counts(which: str, name: str) -> None:
    edited = BASE.replace(*{"f": OF_F, "g": OF_G, "h": OF_H}[which][name])
    assert edited != BASE
    assert digest(defined(edited, which)) != digest(defined(BASE, which))


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Record:
    x: Any
    y: int = 0


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: int) -> None:
        self.x = x


def double(x: Any, factor: float = 2.0) -> Any:
    return x * factor


DIFFERENT = {
    "numbers": (1, 2),
    "an integer and a float": (1, 1.0),
    "a number and its text": (1, "1"),
    "true and one": (True, 1),
    "arrays": (np.zeros(3), np.zeros(4)),
    "one entry": (np.zeros(3), np.array([0, 0, 1e-30])),
    "dtypes of arrays": (np.zeros(3, np.float32), np.zeros(3)),
    "shapes": (np.zeros((2, 3)), np.zeros((3, 2))),
    "arrays of objects": (np.array([{}, 1], object), np.array([{}, 2], object)),
    "arrays of JAX": (jnp.zeros(2), jnp.ones(2)),
    "random keys": (jax.random.key(0), jax.random.key(1)),
    "dtypes": (np.dtype("f4"), np.dtype("f8")),
    "tuples": ((1, (2, 3)), ((1, 2), 3)),
    "a list and a tuple": ([1], (1,)),
    "sets": ({"a", "b"}, {"a", "c"}),
    "dicts": ({"a": 1}, {"a": 2}),
    "keys of dicts": ({"a": 1}, {"b": 1}),
    "named tuples": (Pair(1, 2), Pair(2, 1)),
    "dataclasses": (Record(1), Record(1, 1)),
    "slots": (Slotted(1), Slotted(2)),
    "partials": (functools.partial(double, 1), functools.partial(double, 2)),
    "defaults of partials": (
        functools.partial(double, factor=1.0),
        functools.partial(double, factor=3.0),
    ),
    "bound methods": (Record(1).__repr__, Record(2).__repr__),
    "options of vmap": (jax.vmap(double, in_axes=0), jax.vmap(double, in_axes=1)),
    "what is jitted": (jax.jit(double), jax.jit(lambda x: x)),
    "what is differentiated": (jax.grad(double), jax.grad(lambda x: x)),
    "rates of optax": (optax.adam(0.1), optax.adam(0.2)),
    "what a library's closure holds": (
        jaxlsgd.algorithms.server_optimizer(optax.sgd(0.1)),
        jaxlsgd.algorithms.server_optimizer(optax.sgd(0.2)),
    ),
    "arguments of the package": (
        jaxlsgd.algorithms.fedprox(0.1),
        jaxlsgd.algorithms.fedprox(0.2),
    ),
    "lambdas on one line": (lambda x: x + 1, lambda x: x + 2),
    # The object that comes again is not the same one.
    "which object comes again": (
        (lambda a, b: [a, b, a])([1], [2]),
        (lambda a, b: [a, b, b])([1], [2]),
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_things_have_different_digests(name: str) -> None:
    left, right = DIFFERENT[name]
    assert digest(left) != digest(right)
    assert digest(left) == digest(left)


def test_every_one_of_many_alike_objects_counts() -> None:
    """An object that is gone must not lend its id to the next."""
    many = [Record([i]) for i in range(200)]
    whole = digest(many)
    for i in (0, 100, 199):
        changed = [*many[:i], Record([-1]), *many[i + 1 :]]
        assert digest(changed) != whole


def test_circles_and_things_without_content_have_an_end() -> None:
    circle: list[Any] = [1]
    circle.append(circle)
    assert digest(circle) == digest(circle)
    assert digest(threading.Lock()) == digest(threading.Lock())
    recursive = defined("def f(n): return f(n - 1) if n else 0")
    assert digest(recursive) == digest(recursive)


def test_a_function_that_was_called_is_the_same() -> None:
    function = jax.jit(jax.vmap(double))
    before = digest(function)
    function(jnp.ones(3))
    assert digest(function) == before


def test_versions_of_python_matter_to_code_alone() -> None:
    assert digest(double).endswith(f"-{PYTHON}")
    assert len(digest([1, np.zeros(3), np.sin, jnp.sin])) == 16
    assert len(digest(jaxlsgd.problems.linear(2, 3))) == 16


def test_modules_of_somebodys_own() -> None:
    assert modules([double, Record(1), np.sin, jaxlsgd.plug_in()]) == {__name__}
    assert modules(jaxlsgd.problems.linear(2, 3)) == set()


ELSEWHERE = """
import sys, types
sys.path.insert(0, sys.argv[1])
import numpy as np
from jaxlsgd.core.identity import digest
from test_identity import BASE, defined, double, Pair, Record
print(digest([double, Pair(1, {"a", "b", "c"}), Record(np.arange(3)), defined(BASE, "g")]))
"""


def test_the_same_in_every_process() -> None:
    here = digest([double, Pair(1, {"a", "b", "c"}), Record(np.arange(3)), defined(BASE, "g")])
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", ELSEWHERE, __file__.rpartition("/")[0]],
            env=environment() | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == here
