"""One-step intervals against a plain NumPy oracle, in float32, in the engine, and by their coverage."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from engine_helpers import paper_plan

from jaxlsgd import Sync, fit, one_step, plug_in, problems, random_scaling, schedules, simulate
from jaxlsgd.analysis import measures, verdict
from jaxlsgd.inference import binned_rounds
from jaxlsgd.inference.one_step import multiplier

BLOCK = 64


class Path(NamedTuple):
    """A run as the server sees it."""

    x: np.ndarray  # (T + 1, d)
    h: np.ndarray  # (T, d)
    H: np.ndarray  # (T + 1, d, d), those at x
    E: np.ndarray  # (T,)
    eta: np.ndarray  # (T,)


def make_path(num_rounds: int, dim: int = 3, center: float = 0.0, seed: int = 0) -> Path:
    """A linear model with one client whose local steps are summed up by their exact mean and noise."""
    rng = np.random.default_rng(seed)
    m = np.arange(1, num_rounds + 1)
    E = np.ceil(m ** (1 / 3)).astype(int)
    eta = 0.5 * m**-0.505 / E
    truth = center + np.linspace(0, 1, dim)
    x, h, H = [np.full(dim, center)], [], []
    for E_m, eta_m in zip(E, eta, strict=True):
        a = rng.standard_normal((E_m, dim))
        b = a @ truth + rng.standard_normal(E_m)
        here, total = x[-1].copy(), np.zeros(dim)
        for a_l, b_l in zip(a, b, strict=True):
            g = (a_l @ here - b_l) * a_l
            total += g
            here = here - eta_m * g
        H.append(np.outer(a[0], a[0]))
        x.append(here)
        h.append(total)
    H.append(np.eye(dim))
    return Path(np.array(x), np.array(h), np.array(H), E, eta)


def bins_of(path: Path) -> list[np.ndarray]:
    """The rounds of each bin, by the rule as it is written down."""
    blocks = np.cumsum(path.E) // BLOCK
    bins, start = [], 0
    for m in range(1, len(path.E)):
        first, last = start, m - 1
        changed = (
            last + 2 >= 2 * (first + 1)
            or path.E[last] >= 2 * path.E[first]
            or 2 * path.E[last] <= path.E[first]
            or path.eta[last] * 2**1.01 <= path.eta[first]
        )
        if blocks[m] > blocks[m - 1] and changed and len(bins) < binned_rounds.BINS - 1:
            bins.append(np.arange(start, m))
            start = m
    bins.append(np.arange(start, len(path.E)))
    if len(bins) > 1 and path.E[bins[-1]].sum() < 0.03 * path.E.sum():
        bins[-2:] = [np.concatenate(bins[-2:])]
    return bins


class Found(NamedTuple):
    """What the oracle found."""

    estimate: np.ndarray
    scale: np.ndarray
    half_width: np.ndarray


def oracle(path: Path, level: float = 0.95) -> Found:
    """The formulas of the module, round by round, with the residuals written out."""
    bins, E = bins_of(path), path.E.astype(float)
    known = np.arange(len(E)) > 0  # the first round's Hessian is not fed to statistics
    total = E.sum()
    after = [E[np.concatenate(bins[b:])].sum() for b in range(len(bins))]
    mean_H = [_weighted(path.H[:-1], E, rounds[known[rounds]]) for rounds in bins]
    first_G = max(b for b in range(len(bins)) if after[b] >= 0.75 * total)
    G = sum(mean_H[b] * E[bins[b]].sum() for b in range(first_G, len(bins))) / after[first_G]
    lam, Q = np.linalg.eigh((G + G.T) / 2)
    best = None
    for b0 in range(len(bins)):
        if after[b0] >= 0.5 * total:
            found = _from(path, bins[b0:], mean_H[b0:], G, lam, Q)
            score = np.log(found.half_width).mean()
            if best is None or score < best[0]:
                best = (score, found)
    assert best is not None
    return best[1]


def _weighted(values: np.ndarray, weights: np.ndarray, rounds: np.ndarray) -> np.ndarray:
    return np.einsum("m,mij->ij", weights[rounds], values[rounds]) / weights[rounds].sum()


def _from(
    path: Path, bins: Any, mean_H: Any, G: np.ndarray, lam: np.ndarray, Q: np.ndarray
) -> Found:
    E, eta = path.E.astype(float), path.eta
    pulled = [
        np.mean([(1 - (1 - eta[m] * lam) ** E[m]) / eta[m] for m in r], 0) * len(r) / E[r].sum()
        for r in bins
    ]
    D = sum(p * E[r].sum() for p, r in zip(pulled, bins, strict=True))
    newton = sum(
        p * (Q.T @ (E[r] @ path.x[:-1][r])) - Q.T @ path.h[r].sum(0)
        for p, r in zip(pulled, bins, strict=True)
    )
    x0 = Q @ (newton / D)
    bent = np.zeros_like(x0)
    for r, H_b in zip(bins, mean_H, strict=True):
        seen = r[r > 0]
        gaps = path.x[:-1] - x0
        c = path.x[r[0]]
        # Σ E H (x̄ − c) has no term of the first round, where x̄ = c; the rest of the bin is its mean.
        bent += sum(E[m] * path.H[m] @ (path.x[m] - c) for m in seen)
        bent += E[r].sum() * H_b @ (c - x0) - G @ (E[r] @ gaps[r])
    curvature = -0.5 * Q @ ((Q.T @ bent) / D)
    x = x0 - curvature
    L = Q @ np.diag(1 / D) @ Q.T
    v = []
    for r, H_b, p in zip(bins, mean_H, pulled, strict=True):
        K = Q @ np.diag(p) @ Q.T + 0.5 * (H_b - G)
        residuals = path.h[r] - E[r][:, None] * ((path.x[:-1][r] - x) @ K.T)
        v.append(np.diag(L @ (residuals.T @ residuals) @ L.T))
    v = np.array(v)
    se = np.sqrt(v.sum(0))
    df = v.sum(0) ** 2 / (v**2 / np.array([[len(r)] for r in bins])).sum(0)
    t = scipy.stats.t.ppf(0.975, df) / scipy.stats.norm.ppf(0.975)
    cv = np.sqrt(
        scipy.stats.ncx2.ppf(0.95, 1, np.maximum(0.15 * np.abs(curvature) / se, 1e-6) ** 2)
    )
    return Found(x, se, se * t * cv)


@functools.partial(jax.jit, static_argnums=1)
def stream(path: Path, with_sums: bool = True) -> Any:
    """The path through `one_step`, as in somebody's own loop."""
    method = one_step()

    def body(state: Any, m: Any) -> tuple[Any, None]:
        h = path.h[m] if with_sums else None
        sync = Sync(path.x[m + 1], path.E[m], path.eta[m], None, path.H[m + 1], h)
        return method.update(state, sync), None

    states, _ = jax.lax.scan(body, method.init(path.x[0]), jnp.arange(path.E.shape[0]))
    return method.measure(states, None)


@pytest.mark.parametrize("num_rounds", [20, 700])
def test_the_stream_agrees_with_the_oracle(num_rounds: int):
    path = make_path(num_rounds)
    with jax.enable_x64(True):
        found = stream(path)
        half = multiplier(0.95, None, found.detail) * np.asarray(found.scale)
    right = oracle(path)
    # λ̃ is interpolated between the points of a grid.
    chex.assert_trees_all_close(
        np.asarray(found.estimate), right.estimate, atol=1e-5 * right.scale.min()
    )
    chex.assert_trees_all_close(np.asarray(found.scale), right.scale, rtol=1e-5)
    chex.assert_trees_all_close(half, right.half_width, rtol=1e-4)


def test_a_wrong_formula_would_be_found():
    """The comparison above is sharp enough to see λ in place of λ̃."""
    path = make_path(700)
    right = oracle(path)
    lazy = oracle(path._replace(eta=path.eta * 1e-6))  # λ̃ = λ where steps are tiny
    assert np.abs((lazy.estimate - right.estimate) / right.scale).max() > 1e-3


def test_movements_tell_the_sums_of_gradients():
    path = make_path(700)
    with jax.enable_x64(True):
        with_sums, without = stream(path), stream(path, False)
    chex.assert_trees_all_close(with_sums.estimate, without.estimate, rtol=1e-10)


def test_float32_far_from_the_origin_over_100_000_rounds():
    """At |x*| = 100 the stream is within 1e-3 standard errors of the oracle on the same rounded path."""
    path = make_path(100_000, dim=2, center=100.0)
    narrow = Path(*(np.asarray(leaf, np.float32) for leaf in path[:3]), path.E, path.eta)
    found = stream(narrow._replace(eta=narrow.eta.astype(np.float32)))
    right = oracle(Path(*(np.asarray(leaf, np.float64) for leaf in narrow)))
    gap = np.abs(np.asarray(found.estimate, np.float64) - right.estimate) / right.scale
    # An estimate near 100 is itself rounded to 4e-6.
    assert gap.max() < 1e-3 + 4e-6 / right.scale.min()
    chex.assert_trees_all_close(np.asarray(found.scale), right.scale, rtol=2e-3)


@pytest.mark.parametrize("schedule", ["C1", "C5", "P(1/2)"])
def test_bins_are_closed_between_blocks_where_the_stream_closes_them(schedule: str):
    plan = paper_plan(schedule, 0.5, num_steps=5_000)
    found = binned_rounds.roll_before(plan.E, plan.eta)
    path = Path(np.zeros((plan.num_rounds + 1, 1)), None, None, plan.E, plan.eta)  # type: ignore[arg-type]
    blocks = np.cumsum(plan.E) // BLOCK
    ends = [blocks[rounds[-1]] + 1 for rounds in _unjoined(path)[:-1]]
    assert found.tolist() == ends and 3 <= len(ends) < binned_rounds.BINS


def _unjoined(path: Path) -> list[np.ndarray]:
    bins = bins_of(path._replace(E=np.concatenate([path.E, path.E[-1:] * 10**6])))
    return bins


@pytest.mark.parametrize("schedule", ["C1", "C5", "P(1/2)"])
def test_the_engine_agrees_with_a_loop_of_ones_own(schedule: str):
    """Blocks with bins closed between them, against the stream that closes them itself."""
    problem, plan = problems.paper_logistic(), paper_plan(schedule, 2.0, num_steps=600)
    key = jax.random.key(3)
    engine = simulate(key, problem, plan, replications=2, methods=one_step(), dtype="float64")
    alone = fit(key, problem, plan, methods=one_step(), dtype="float64", replication=1)
    chex.assert_trees_all_close(
        engine.methods["one_step"].estimate[:, 1], alone.rows["one_step"].estimate[:, 0], rtol=1e-12
    )
    mesh = jax.make_mesh((1, 2), ("replications", "clients"))
    spread = simulate(
        key, problem, plan, replications=2, methods=one_step(), dtype="float64", mesh=mesh
    )
    for name in ("estimate", "scale", "half_width"):
        pair = [getattr(cell.methods["one_step"], name) for cell in (engine, spread)]
        chex.assert_trees_all_close(*pair, rtol=1e-9)


def test_reading_on_the_way_changes_nothing():
    problem, plan = problems.paper_linear(), paper_plan("C5", 0.5, num_steps=900)
    how = {"replications": 3, "methods": one_step(), "dtype": "float64"}
    whole = simulate(jax.random.key(0), problem, plan, **how)
    often = simulate(jax.random.key(0), problem, plan, save_at=(7, 60, 100), **how)
    pair = [cell.methods["one_step"].half_width[-1] for cell in (whole, often)]
    chex.assert_trees_all_close(*pair, rtol=1e-12)


REPLICATIONS = 1_000
# Coverages are compared with 5 standard errors: a false alarm in 20 comparisons once in 80,000 runs.
SIGMAS = 5.0


@functools.cache
def paper_cell(model: str, schedule: str) -> Any:
    problem = problems.paper_problem(model)
    assert problem.gamma0 is not None
    plan = paper_plan(schedule, problem.gamma0, num_steps=1_000)
    methods = (one_step(), plug_in(), random_scaling(critical="schedule"))
    return simulate(
        jax.random.key(17), problem, plan, replications=REPLICATIONS, methods=methods, tile_size=256
    )


@pytest.mark.parametrize("schedule", ["C1", "P(1/2)"])
@pytest.mark.parametrize("model", ["linear", "logistic"])
def test_it_covers_and_the_verdict_tells_who_does_not(model: str, schedule: str):
    cell = paper_cell(model, schedule)
    rows = measures.summarise(cell, last_only=True)
    error = SIGMAS * np.sqrt(0.95 * 0.05 / REPLICATIONS)
    for name in cell.methods:
        mine = [row for row in rows if row["method"] == name]
        covered = np.mean([row["coverage"] for row in mine])
        expected = np.mean([row["expected_coverage"] for row in mine])
        if name == "one_step":
            assert abs(covered - 0.95) < error
        assert abs(covered - expected) < 0.02 + error / 2
    if schedule == "P(1/2)":
        doubted = [row for row in rows if row["method"].startswith("random_scaling")]
        assert np.mean([row["coverage"] for row in doubted]) < 0.92, (
            "the verdict had nothing to tell"
        )
        for row in doubted:
            assert row["n_trusted"] + row["n_doubted"] == REPLICATIONS
            assert row["coverage_doubted"] < row["coverage_trusted"]


@pytest.mark.parametrize("model", ["linear", "logistic"])
def test_communicating_less_costs_no_length(model: str):
    lengths = [
        np.mean(paper_cell(model, schedule).methods["one_step"].half_width)
        for schedule in ("C1", "P(1/2)")
    ]
    assert lengths[1] < 1.05 * lengths[0]


def test_one_fit_says_what_to_expect():
    problem = problems.linear(5, 10, init=np.full(5, 10.0))
    plan = schedules.paper("C5").with_warmup(0.05).plan(schedules.power_decay(0.5), num_steps=1_000)
    result = fit(jax.random.key(2), problem, plan)
    found = {one.method: one for one in result.verdicts()}
    assert not found["one_step"].doubted and "left out" in str(found["one_step"])
    assert found["plug_in[finite]"].doubted and "standard errors from" in str(
        found["plug_in[finite]"]
    )
    assert "What to expect" in str(result)
    only = fit(jax.random.key(2), problem, plan, methods=plug_in())
    assert only.verdicts() == [] and "What to expect" not in str(only)


def test_an_early_explosion_is_left_out():
    problem, plan = problems.linear(5, 10), paper_plan("C5", 8.0, num_steps=2_000)
    cell = simulate(jax.random.key(0), problem, plan, replications=200, methods=one_step())
    rows = cell.methods["one_step"]
    assert rows.ok.all()
    covered = np.abs(rows.estimate[-1] - cell.truth["one_step"]) <= rows.half_width[-1, 0]
    assert abs(covered.mean() - 0.95) < SIGMAS * np.sqrt(0.95 * 0.05 / 200)


def test_p_values_invert_the_intervals():
    path = make_path(300)
    method = one_step()
    with jax.enable_x64(True):
        detail = jax.tree.map(np.asarray, stream(path).detail)
    for level in (0.5, 0.95, 0.999):
        q = method.law.multiplier(level, None, detail)
        chex.assert_trees_all_close(
            method.law.tail(q, None, detail), np.full(3, 1 - level), rtol=1e-6
        )


def test_verdicts_need_the_same_coordinates():
    contrast = random_scaling("contrasts", contrasts=[[1.0, -1.0, 0, 0, 0]], name="difference")
    plan = paper_plan("C5", 0.5, num_steps=300)
    cell = simulate(
        jax.random.key(0),
        problems.paper_linear(),
        plan,
        replications=4,
        methods=(one_step(), contrast),
    )
    assert np.isnan(verdict.expected_coverage(cell, "difference")).all()
    assert not np.isnan(verdict.expected_coverage(cell, "one_step")).any()


def test_a_hessian_is_asked_for():
    method = one_step()
    with pytest.raises(ValueError, match="sync: must have hessian.*one_step needs"):
        method.update(method.init(jnp.zeros(2)), Sync(jnp.zeros(2), 1, 0.1))
