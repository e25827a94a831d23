"""Truths are kept beside compiled programs: found again by content, in another process, and lost without harm."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused

from jaxlsgd import Draws, Problem, problems
from jaxlsgd.problems import _kept_truths, solution

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Path]:
    """A directory of compiled programs of this test's own."""
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "programs"))
    yield tmp_path / "programs"
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets an entry whenever a sample is solved."""
    calls, solve_on = list[int](), solution._solve_on

    def counted(sample: Any, parts: int, x: np.ndarray) -> Any:
        calls.append(parts)
        return solve_on(sample, parts, x)

    monkeypatch.setattr(solution, "_solve_on", counted)
    return calls


def skewed(sharp: float = 1.0, power: int = 2, weights: Any = None, shift: Any = 0.0) -> Problem:
    """A smooth distance to uniforms; made anew, as another process would."""
    scale = np.full(3, sharp)
    return Problem(
        init={"x": np.zeros(2)},
        loss=lambda params, obs: jnp.sum(jnp.sqrt(scale[0] + (params["x"] - obs) ** power)),
        num_clients=2,
        draws=Draws(uniform=2),
        observe=lambda draws, client: draws.uniform**2 + client,
        clients=np.arange(2.0) + shift,
        weights=weights,
    )


def bits(found: problems.Solution) -> list[Any]:
    """All numbers of a solution, with their kinds."""
    problem = found.problem
    arrays = problem.truth["x"], problem.truth_covariance, problem.G, problem.S  # type: ignore[index]
    arrays = *arrays, found.standard_error, np.float64(found.residual)
    return [(x.dtype, x.shape, x.tobytes()) for x in map(np.asarray, arrays)] + [found.observations]


def test_a_kept_truth_is_a_fresh_one_to_the_last_bit(programs: Path, solved: list[int]) -> None:
    first = solution.solve(skewed(), 2_000)
    assert solved and len(list((programs / "truths").iterdir())) == 1
    solved.clear()
    shares = list[float]()
    again = solution.solve(skewed(), 2_000, progress=shares.append)
    assert not solved and shares == [1.0]
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        fresh = solution.solve(skewed(), 2_000)
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    assert solved
    assert bits(first) == bits(again) == bits(fresh)
    assert again.problem.G.flags.writeable  # as that of a fresh one
    assert len(list((programs / "truths").iterdir())) == 1


def test_another_process_does_not_solve_again(tmp_path: Path) -> None:
    code = (
        "import jax, sys\n"
        "jax.config.update('jax_compilation_cache_dir', sys.argv[1])\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "from test_kept_truths import solution, skewed, bits\n"
        "old, calls = solution._solve_on, []\n"
        "solution._solve_on = lambda *given: (calls.append(1), old(*given))[1]\n"
        "found = solution.solve(skewed(), 2_000)\n"
        "print(len(calls), bits(found))\n"
    )
    told = []
    for seed in "12":  # of the hashes of texts
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", code, str(tmp_path), str(Path(__file__).parent)]
        told.append(subprocess.check_output(command, env=environment, text=True).split(" ", 1))
    assert [count for count, _ in told] == ["2", "0"]
    assert told[0][1] == told[1][1]


@pytest.mark.parametrize(
    "other",
    [
        lambda: solution.solve(skewed(sharp=1.5), 2_000),  # a number that the loss holds
        lambda: solution.solve(skewed(power=4), 2_000),  # another body of the loss
        lambda: solution.solve(skewed(weights=[0.25, 0.75]), 2_000),
        lambda: solution.solve(skewed(shift=0.5), 2_000),
        lambda: solution.solve(skewed(), 2_000, seed=1),
        lambda: solution.solve(skewed(), 2_001),
    ],
    ids=["number", "loss", "weights", "clients", "seed", "observations"],
)
def test_other_content_is_solved_again(
    programs: Path, solved: list[int], other: Callable[[], problems.Solution]
) -> None:
    one = solution.solve(skewed(), 2_000)
    solved.clear()
    assert bits(other()) != bits(one)
    assert solved


def test_another_tolerance_or_version_is_solved_again(
    programs: Path, solved: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    solution.solve(skewed(), 2_000)
    monkeypatch.setattr(solution, "_SOLVED", 0.001)
    solved.clear()
    solution.solve(skewed(), 2_000)
    assert solved
    monkeypatch.setattr(_kept_truths.importlib.metadata, "version", lambda name: "1.0")
    solved.clear()
    solution.solve(skewed(), 2_000)
    assert solved


@pytest.mark.parametrize(
    "harm",
    [
        lambda content: b"",
        lambda content: content[: len(content) // 2],
        lambda content: content.replace(b"\x3f", b"\x3e"),  # the truth's exponents
        lambda content: b"\0" * 1_000_000,
    ],
    ids=["empty", "short", "altered", "huge"],
)
def test_a_damaged_truth_is_solved_again_and_kept_again(
    programs: Path, solved: list[int], harm: Callable[[bytes], bytes]
) -> None:
    first = solution.solve(skewed(), 2_000)
    (path,) = (programs / "truths").iterdir()
    content = path.read_bytes()
    assert harm(content) != content
    path.write_bytes(harm(content))
    solved.clear()
    assert bits(solution.solve(skewed(), 2_000)) == bits(first)
    assert solved and path.read_bytes() == content


def test_a_truth_under_the_name_of_another_is_not_taken(programs: Path, solved: list[int]) -> None:
    solution.solve(skewed(), 2_000)
    (one,) = (programs / "truths").iterdir()
    content = one.read_bytes()
    one.unlink()
    other = solution.solve(skewed(sharp=1.5), 2_000)
    (two,) = (programs / "truths").iterdir()
    two.write_bytes(content)
    assert bits(solution.solve(skewed(sharp=1.5), 2_000)) == bits(other)


def test_nothing_is_kept_where_others_can_write(programs: Path, solved: list[int]) -> None:
    solution.solve(skewed(), 2_000)
    folder = programs / "truths"
    assert folder.stat().st_mode & 0o777 == 0o700
    (kept,) = folder.iterdir()
    for mode in (0o777, 0o770):
        folder.chmod(mode)
        solved.clear()
        solution.solve(skewed(), 2_000)
        assert solved
    folder.rename(programs / "elsewhere")
    folder.symlink_to(programs / "elsewhere")
    (programs / "elsewhere").chmod(0o700)
    solved.clear()
    solution.solve(skewed(), 2_000)
    assert solved and _kept_truths.folder() is None
    assert [path.name for path in (programs / "elsewhere").iterdir()] == [kept.name]


def test_a_place_that_cannot_be_written_costs_nothing_else(
    programs: Path, solved: list[int]
) -> None:
    programs.write_text("a file in the way")
    solution.solve(skewed(), 2_000)
    solved.clear()
    solution.solve(skewed(), 2_000)
    assert solved


def test_what_has_no_solution_is_refused_every_time(programs: Path) -> None:
    down = Problem(
        init=np.zeros(1),
        loss=lambda x, obs: x[0] + obs,
        num_clients=1,
        sample=lambda key, client: jax.random.normal(key),
    )
    for _ in range(2):
        with refused("problem", "data", "gradient"):
            solution.solve(down, 1_000)
    assert not list((programs / "truths").iterdir())


def test_a_program_that_calls_the_host_is_solved_every_time(
    programs: Path, solved: list[int]
) -> None:
    places = iter((1.0, 5.0))

    def at(place: float) -> np.ndarray:
        return np.full(2, place, np.float32)

    for place in places:
        value = functools.partial(at, place)  # such as the content of a file

        def observe(draws: Any, client: Any, value: Any = value) -> Any:
            shape = jax.ShapeDtypeStruct((2,), np.float32)
            host = jax.pure_callback(lambda _: value(), shape, client, vmap_method="sequential")
            return draws.uniform + host.astype(draws.uniform.dtype)

        problem = Problem(
            init=np.zeros(2),
            loss=lambda x, seen: jnp.sum((x - seen) ** 2),
            num_clients=2,
            draws=Draws(uniform=2),
            observe=observe,
            clients=np.arange(2.0),
        )
        found = problems.solve(problem, observations=2_000)
        np.testing.assert_allclose(found.problem.true_vector, place + 0.5, atol=0.1)
    assert not list(programs.rglob("*.npz"))


def test_a_truth_with_a_factorisation_is_kept(programs: Path, solved: list[int]) -> None:
    problem = Problem(
        init=np.zeros(2),
        loss=lambda x, seen: x @ jnp.linalg.solve(seen, x) / 2 - x[0],
        num_clients=2,
        draws=Draws(uniform=2),
        observe=lambda draws, client: jnp.eye(2) + jnp.diag(draws.uniform),
        clients=np.arange(2.0),
    )
    problems.solve(problem, observations=2_000)
    assert len(list(programs.rglob("*.npz"))) == 1
