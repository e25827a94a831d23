"""How programs are compiled in tests: most of their time is compiling, and what most of them ask does not depend on it.

A test says what it needs by a mark:

- `compiled_for_users`: whether programs of different shape give the same bits, how large they are, or what users get;
- `many_steps`: running costs as much as compiling;
- `same_draws`: two programs are compared closely, so their draws must not be rounded differently;
- none: anything that runs will do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import pytest
from jax._src import compiler

Flags = Mapping[str, bool | int]  # of XLA

FOR_USERS: Flags = {}
# Compiles in four fifths of the time, and runs as fast.
FOR_MANY_STEPS: Flags = {"xla_backend_optimization_level": 1}
# Compiles in half the time. Most programs run a third slower, some several times.
SAME_DRAWS: Flags = {
    "xla_backend_optimization_level": 1,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
# Compiles in a third of the time, and runs eight times slower. Which multiplications and additions become one, with
# one rounding, is left to chance.
QUICKLY: Flags = {**SAME_DRAWS, "xla_backend_optimization_level": 0}
MARKS = {
    "compiled_for_users": FOR_USERS,
    "many_steps": FOR_MANY_STEPS,
    "same_draws": SAME_DRAWS,
}

_now: list[Flags] = [FOR_USERS]


def variables(flags: Flags) -> dict[str, str]:
    """The environment of a process that compiles so from its start."""
    words = [f"--{name}={str(value).lower()}" for name, value in flags.items()]
    return {"XLA_FLAGS": " ".join(words)}


def compile_as_asked(item: pytest.Item) -> None:
    """Before a test: its programs are to be compiled as its marks say."""
    asked = [flags for mark, flags in MARKS.items() if item.get_closest_marker(mark)]
    flags = asked[0] if asked else QUICKLY
    if flags is not _now[-1]:
        # Rows are compared with those of other processes, to the bit: no program of another kind may stay.
        jax.clear_caches()
        _now[-1] = flags


_options = compiler.get_compile_options


def _options_as_asked(*arguments: Any, **named: Any) -> Any:
    named["env_options_overrides"] = {**_now[-1], **(named.get("env_options_overrides") or {})}
    return _options(*arguments, **named)


def install() -> None:
    """JAX takes flags of XLA for a whole process only, so this reaches inside it."""
    compiler.get_compile_options = _options_as_asked
