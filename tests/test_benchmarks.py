"""The benchmarks' rival does the engine's job, and their judgements and readings are right."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import PAPER_PROBLEMS, paper_plan

from jaxlsgd import plug_in, random_scaling, simulate

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "accelerators")]

import hlo  # noqa: E402

from benchmarks import (  # noqa: E402
    cost_model,
    coverage_promise,
    numpy_baseline,
    timing,
    writing,
)

RUNS, STEPS = 256, 300
# 45 comparisons: chance alone would pass 4.5 standard errors once in 3,000 runs of this file.
LIMIT = 4.5
CASES = [("linear", "C1", 0.5), ("linear", "P(1/2)", 0.5), ("logistic", "C1", 2.0)]
METHODS = (random_scaling(), plug_in())


def engine_means(problem, plan) -> dict[str, np.ndarray]:
    """What the engine finds: estimates and lengths, (replications, d)."""
    found = simulate(jax.random.key(5), problem, plan, replications=RUNS, methods=METHODS).methods
    return {
        "estimate": found["plug_in"].estimate[-1],
        "random_scaling": 2 * found["random_scaling"].half_width[-1, 0],
        "plug_in": 2 * found["plug_in"].half_width[-1, 0],
    }


def rival_means(problem, plan) -> dict[str, np.ndarray]:
    """What the rival finds."""
    model, path = numpy_baseline.Model.of(problem), numpy_baseline.Path.of(plan)
    found = numpy_baseline.run(model, path, RUNS, seed=3)
    return {
        "estimate": found.estimate,
        "random_scaling": 2 * found.random_scaling,
        "plug_in": 2 * found.plug_in,
    }


def apart(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Differences of the means, in standard errors."""
    error = np.sqrt(ours.var(0, ddof=1) / len(ours) + theirs.var(0, ddof=1) / len(theirs))
    return np.abs(ours.mean(0) - theirs.mean(0)) / error


@pytest.mark.parametrize(("name", "schedule", "gamma0"), CASES)
def test_the_rival_does_the_same_job(name: str, schedule: str, gamma0: float) -> None:
    problem, plan = PAPER_PROBLEMS[name](), paper_plan(schedule, gamma0, num_steps=STEPS)
    ours, theirs = engine_means(problem, plan), rival_means(problem, plan)
    for what, values in ours.items():
        assert apart(values, theirs[what]).max() < LIMIT, what
    # Half of the steps left out, which the comparison must notice.
    wrong = rival_means(problem, paper_plan(schedule, gamma0, num_steps=STEPS // 2))
    assert max(apart(ours[what], wrong[what]).max() for what in ours) > LIMIT


def test_findings_are_judged_by_their_median() -> None:
    spread = timing.ratio([3.0, 4.0, 5.0], [1.0, 2.0, 2.0])
    assert spread == (2.5, 2.25, 2.75)
    assert timing.finding("case", "gain", spread, at_least=2.0).met
    both = timing.finding("case", "slope", 1.2, "exponent", at_least=0.9, at_most=1.1)
    assert (both.met, both.target) == (False, "≥ 0.9 and ≤ 1.1")
    assert timing.finding("case", "rate", 1.0).met is None
    assert timing.finding("case", "rate", math.nan, at_least=2.0).met is False


def test_rates_are_those_of_every_job() -> None:
    one, two = timing.rates("case", 6.0, {"engine": [1.0, 2.0, 3.0], "NumPy": [6.0, 6.0, 6.0]})
    assert (one.what, one.value, one.low, one.high) == ("engine", 3.0, 2.5, 4.5)
    assert (two.what, two.value, two.unit) == ("NumPy", 1.0, "million client-steps per second")


def test_tables_and_rows_are_written_once_for_all(tmp_path: Path) -> None:
    lines = writing.pipe_table(["cell", "n"], [["`a`", 1], ["b", writing.percent(math.nan)]])
    assert lines == ["| cell | n |", "|---|--:|", "| `a` | 1 |", "| b | - |"]
    writing.write_csv(tmp_path / "rows.csv", [{"cell": "a, b", "n": 1 / 3}])
    assert (tmp_path / "rows.csv").read_text() == f'cell,n\n"a, b",{1 / 3!r}\n'
    options = writing.parser("field", "", replications=5, seed=7).parse_args(["--out", "here"])
    assert (options.out, options.replications, options.seed) == (Path("here"), 5, 7)


def test_the_stored_page_on_coverage_is_that_of_its_rows() -> None:
    kept = ROOT / "benchmarks" / "results"
    page = (kept / "coverage_promise.md").read_text(encoding="utf-8")
    for part, (heading, _) in coverage_promise.PARTS.items():
        rows = coverage_promise.read_csv(kept / f"coverage_promise_{part}.csv")
        assert coverage_promise.markdown(rows, heading).strip() in page


def test_exponents_are_fitted_in_every_repeat() -> None:
    sizes = [1.0, 2.0, 4.0]
    times = [[s, 3 * s] for s in sizes]
    np.testing.assert_allclose(timing.exponent(sizes, times), 1.0, rtol=1e-12)


def test_jobs_take_turns_there_and_back() -> None:
    seen: list[str] = []
    jobs = {name: lambda name=name: seen.append(name) for name in "ab"}
    assert {name: len(each) for name, each in timing.interleaved(jobs, 3).items()} == {
        "a": 3,
        "b": 3,
    }
    assert "".join(seen) == "abbaab"


@pytest.mark.for_users
def test_loops_and_precision_are_read_from_programs() -> None:
    x = jnp.zeros(128)

    def scanned(x):
        return jax.lax.scan(lambda c, y: (jnp.sin(c + y), None), x, jnp.arange(5.0))[0]

    def until(x):
        return jax.lax.while_loop(lambda c: c.sum() < 1, jnp.cos, x)

    known, unknown = (jax.jit(f).lower(x).compile().as_text() for f in (scanned, until))
    assert [loop.trips for loop in hlo.loops(known, scalars=True)] == [5]
    assert all(loop.kernels for loop in hlo.loops(known, scalars=True))
    assert [loop.trips for loop in hlo.loops(unknown, scalars=True)] == [None]
    assert hlo.low_precision(known) == []
    low = jax.jit(lambda a: a.astype(jnp.bfloat16) + 1).lower(x).compile().as_text()
    assert hlo.low_precision(low)
    line = "  ROOT %d.0 = f32[4,4]{1,0} dot(f32[4,4]{1,0} %a, f32[4,4]{1,0} %b)"
    assert hlo.low_precision(line) == ["dot d.0 without full precision"]
    assert hlo.low_precision(line + ", operand_precision={highest,highest}") == []


def test_the_cost_model_knows_what_binds() -> None:
    few, many = (cost_model.PAPER._replace(replications=n) for n in (1_000, 10**6))
    assert cost_model.cost(few, cost_model.H100, 1).binds == "launches"
    one, shared = (cost_model.cost(many, cost_model.H100, n) for n in (1, 64))
    assert one.binds == "memory"
    assert one.work == pytest.approx(64 * shared.work)
    assert one.launches == shared.launches
    large = cost_model.Size(10**4, 100, 1_000, 200, 1_000)
    assert cost_model.cost(large, cost_model.H100, 8).network == 0
    assert cost_model.cost(large, cost_model.H100, 8, shard_clients=True).network > 0
    with pytest.raises(ValueError, match="shard its clients"):
        cost_model.cost(large._replace(clients=10**9), cost_model.H100, 1)
    assert cost_model.markdown().count("H100 |") == len(cost_model.TABLE)
    # Lanes share launches and draws.
    apart, together = cost_model.grid_seconds(1_000)
    assert together < apart / 3
    lanes = few._replace(lanes=20)
    assert cost_model.cost(lanes, cost_model.H100, 1).launches == pytest.approx(
        cost_model.cost(few, cost_model.H100, 1).launches
    )


@pytest.mark.for_users
def test_the_cost_model_moves_the_bytes_that_were_compiled() -> None:
    """As read from the H100's programs for linear regression: a cell alone, and 20 as lanes."""
    assert cost_model.step_bytes(cost_model.PAPER) == pytest.approx(210, rel=0.1)
    assert cost_model.step_bytes(cost_model.PAPER._replace(lanes=20)) == pytest.approx(84, rel=0.1)
