"""The anchored one-step: against an oracle, in the engine, and where increments fail."""

from __future__ import annotations

import functools
from typing import Any

import anchored_oracle
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from engine_helpers import numpy_draws
from refusals import refused

import jaxlsgd
from jaxlsgd import Anchored, Problem, Sync, algorithms, one_step, problems, schedules, simulate
from jaxlsgd.core.algorithm import check_measure
from jaxlsgd.core.estimator import BLOCK_STEPS
from jaxlsgd.engine.draws import replication_keys
from jaxlsgd.inference import anchored_rounds, anchored_step
from jaxlsgd.inference.anchored_step import Reason
from jaxlsgd.inference.one_step import _REASONS, _anchored_notes
from jaxlsgd.schedules import Plan

METHOD = one_step()
PLANS = {
    "E = 3": np.full(200, 3),
    "E grows": np.ceil(np.arange(1, 101) ** 0.5).astype(int),
    "E = 50": np.full(14, 50),
    "few degrees of freedom": np.full(12, 40),
}


def read(state: Any) -> Any:
    return METHOD.measure_one(state, None)


@pytest.mark.parametrize("name", PLANS)
def test_the_stream_agrees_with_the_oracle(name: str):
    E, K, d = PLANS[name], 4, 3
    eta = 1.0 * np.arange(1, len(E) + 1) ** -0.505 / E
    rounds = anchored_oracle.make_rounds(E, K, d)
    chosen = anchored_rounds.hessian_rounds(E, K, d)
    bins, seen = anchored_oracle.run(rounds, eta, np.zeros(d), chosen)
    assert len(bins) > 3
    with jax.enable_x64(True):
        state, update = METHOD.init(jnp.zeros(d)), jax.jit(METHOD.update)
        places = []
        for m, one in enumerate(seen):
            here, before = one.hessians or (None, None)
            given = Anchored(one.h, here, before, one.observations)
            places.append(np.asarray(METHOD.anchors(state)[0]))
            state = update(state, Sync(one.x, int(E[m]), eta[m], anchored=given))
        found = read(state)
    # Every round of a bin was evaluated at its anchor.
    expected = [b.a for b in bins for _ in b.rounds]
    chex.assert_trees_all_close(np.array(places), np.array(expected), rtol=1e-9, atol=1e-12)
    right = anchored_oracle.read(bins)
    chex.assert_trees_all_close(np.asarray(found.estimate), right.estimate, rtol=1e-9)
    assert bool(found.detail.withheld) == right.missing
    df = np.clip(right.df, 1, 1e6)
    assert np.any(df < 3) == name.startswith("few")
    chex.assert_trees_all_close(np.asarray(found.detail.df), df, rtol=1e-7)
    quantiles = METHOD.law.half(0.95, "both", None, found.detail)
    chex.assert_trees_all_close(quantiles, scipy.stats.t.ppf(0.975, df), rtol=1e-6)
    if not right.missing:
        chex.assert_trees_all_close(np.asarray(found.scale), right.scale, rtol=1e-8)
        assert float(found.detail.gap) == pytest.approx(right.gap, rel=1e-7)


def test_blocks_roll_where_a_loop_of_ones_own_does():
    update = jax.jit(METHOD.update)
    for E in PLANS.values():
        state, starts = METHOD.init(jnp.zeros(3)), []
        for E_m in E:
            now = int(state[0].clock.bin)
            sync = Sync(
                jnp.zeros(3), int(E_m), 0.1, anchored=Anchored(jnp.ones(3), observations=None)
            )
            state = update(state, sync)
            if int(state[0].clock.bin) > now:
                starts.append(int(state[0].clock.start) // BLOCK_STEPS)
        assert anchored_rounds.roll_before(E, E / 1.0, 3).tolist() == starts


@functools.cache
def unlike(num_clients: int = 4) -> Problem:
    """Linear clients whose covariances and optima both differ: drift within a round moves the increments."""
    scales, optima = np.sqrt([1.0, 2.0, 4.0, 8.0]), np.array([[1.0, 0], [-1, 1], [0, -1], [1, 1]])
    weights = scales**2 / (scales**2).sum()

    def observe(draws: Any, client: Any) -> Any:
        a = client["scale"] * draws.normal[:2]
        return a, jnp.sum(a * client["optimum"]) + draws.normal[2]

    def loss(x: Any, observation: Any) -> Any:
        return 0.5 * (jnp.sum(observation[0] * x) - observation[1]) ** 2

    return Problem(
        init=np.zeros(2),
        loss=loss,
        num_clients=num_clients,
        draws=jaxlsgd.Draws(normal=3),
        observe=observe,
        clients={"scale": scales, "optimum": optima},
        truth=weights @ optima,
    )


@pytest.mark.parametrize(
    "algorithm",
    [None, algorithms.scaffold(), algorithms.client_dropout(0.4), algorithms.stragglers(0.5)],
    ids=lambda given: "local_sgd" if given is None else given.name,
)
def test_the_engine_agrees_with_plain_rounds(algorithm: Any):
    """The same statistic from the same draws, by blocks and by rounds on paper."""
    problem, plan = unlike(), schedules.constant(7).plan(schedules.power_decay(0.2), num_steps=420)
    key = jax.random.key(3)
    options = {} if algorithm is None else {"algorithm": algorithm}
    cell = simulate(
        key, problem, plan, replications=1, methods=[METHOD], dtype="float64", **options
    )
    rows = cell.methods[METHOD.name]
    with jax.enable_x64(True):
        found = read(_by_rounds(problem, plan, key, algorithm))
    assert not bool(found.detail.withheld)
    chex.assert_trees_all_close(rows.estimate[-1, 0], np.asarray(found.estimate), rtol=1e-7)
    chex.assert_trees_all_close(rows.scale[-1, 0], np.asarray(found.scale), rtol=1e-6)


def _by_rounds(problem: Problem, plan: Plan, key: Any, algorithm: Any) -> Any:
    """The statistics of replication 0, by rounds on paper."""
    drawn = numpy_draws(key, [0], plan.num_steps, range(problem.num_clients), problem.draws).normal
    clients = jax.tree.map(jnp.asarray, problem.clients)
    one = lambda z, client: problem.observe(jaxlsgd.Draws(normal=z), client)  # noqa: E731
    observe = jax.vmap(jax.vmap(one, (0, 0)), (0, None))
    observations = observe(jnp.asarray(drawn[..., 0], float), clients)
    rounds = algorithms.plain_rounds(problem.loss, problem.weights, algorithm)
    own = replication_keys(key, jnp.zeros(1, jnp.uint32))[0]
    begun = () if algorithm is None or not algorithm.random else (own,)
    state, statistics = rounds.init(jnp.zeros(2), *begun), METHOD.init(jnp.zeros(2))
    update, first = jax.jit(METHOD.update), 0
    chosen = anchored_rounds.hessian_rounds(plan.E, problem.num_clients, problem.dim)
    for m, E in enumerate(plan.E.tolist()):
        seen = jax.tree.map(lambda x, i=first, E=E: x[i : i + E], observations)
        anchors = METHOD.anchors(statistics)
        state, sync = rounds.round(state, seen, plan.eta[m], anchors, hessians=bool(chosen[m]))
        statistics, first = update(statistics, sync), first + E
    return statistics


def test_some_clients_take_part():
    """Coverage with 2 of 4 unlike clients in a round, in which the choice is noise of its own."""
    cell = simulate(
        jax.random.key(1),
        unlike(),
        schedules.constant(5).plan(schedules.power_decay(0.1), num_steps=1500),
        replications=200,
        methods=[METHOD],
        algorithm=algorithms.participation(2),
    )
    assert_covers(cell)


def assert_covers(cell: Any, level: float = 0.95) -> None:
    """Within 4 standard errors of the level: a false alarm in 16,000."""
    rows = cell.methods[METHOD.name]
    given = np.isfinite(rows.half_width[-1, 0]).all(-1)
    assert given.mean() > 0.97
    off = np.abs(rows.estimate[-1] - cell.truth[METHOD.name])
    hits = (off <= rows.half_width[-1, 0])[given].mean(1)
    assert abs(hits.mean() - level) < 4 * hits.std() / np.sqrt(len(hits))
    assert (off / rows.scale[-1])[given].max() < 10


@pytest.mark.for_users
@pytest.mark.parametrize(
    ("algorithm", "E", "step"),
    [
        (None, 50, 0.02),
        (algorithms.server_adam(), 20, 0.05),
        (algorithms.local_momentum(), 20, 0.02),
    ],
    ids=["constant steps", "FedAdam", "momentum"],
)
def test_any_optimiser_will_do(algorithm: Any, E: int, step: float):
    """Constant steps and unlike clients, where increments cover 2 to 50 %, or are withheld."""
    plan = schedules.constant(E).plan(schedules.constant_step(step * E), num_steps=4000)
    options = {} if algorithm is None else {"algorithm": algorithm}
    old = one_step(gradients="increments")
    cell = simulate(
        jax.random.key(2), unlike(), plan, replications=300, methods=[METHOD, old], **options
    )
    assert_covers(cell)
    rows = cell.methods[old.name]
    half = rows.half_width[-1, 0]
    held = (np.abs(rows.estimate[-1] - cell.truth[old.name]) <= half) & np.isfinite(half)
    assert held.mean() < 0.9


def test_a_path_that_has_not_converged_does_not_matter_for_a_quadratic_loss():
    """Steps so small that the optimiser is far away at the end: Newton's method has converged all the same."""
    plan = schedules.constant(20).plan(schedules.power_decay(0.001), num_steps=2000)
    cell = simulate(
        jax.random.key(4), problems.linear(3, 5), plan, replications=100, methods=[METHOD]
    )
    assert_covers(cell)


def without(loss: Any, dim: int, observe: Any, **more: Any) -> Problem:
    """Return a problem of one client with `dim` normals and one uniform."""
    draws = jaxlsgd.Draws(normal=dim, uniform=1)
    more = {"init": np.zeros(dim), **more}
    return Problem(loss=loss, num_clients=1, draws=draws, observe=observe, **more)


def squares(covariates: Any, dim: int = 2, **more: Any) -> Problem:
    """Return least squares on covariates that are made of the draws; the response is the uniform."""

    def loss(x: Any, seen: Any) -> Any:
        return 0.5 * (jnp.sum(seen[0] * x) - seen[1]) ** 2

    return without(loss, dim, lambda z, _: (covariates(z), z.uniform[0]), **more)


def saturated() -> Problem:
    """Return logistic regression of one client that is nearly separable, where curvature falls by nine tenths."""
    return problems.logistic(3, 1, center=[4.0, -4.0, 4.0])


# A loss whose Hessian does not change, and covariates whose squares have no mean: a few of them dominate it.
HEAVY = squares(lambda z: z.normal * z.uniform[0] ** -0.8)
REASONS: dict[str, tuple[Reason, Problem, float, int]] = {
    "short": (Reason.SHORT, problems.linear(2, 1), 0.1, 100),
    "singular": (Reason.SINGULAR, squares(lambda z: z.normal[:1] * jnp.ones(2)), 0.1, 600),
    "far away": (Reason.CHANGING, saturated(), 0.01, 200),
    "heavy tails": (Reason.NOISY, HEAVY, 1e-5, 2_000),
    "diverged": (Reason.DIVERGED, squares(lambda z: z.normal), 1e4, 100),
}
WORDS = {
    Reason.SHORT: "too few rounds",
    Reason.NO_HESSIANS: "clients sent no Hessians",
    Reason.SINGULAR: "singular, or nearly",
    Reason.CHANGING: "have not converged",
    Reason.NOISY: "a few observations dominate",
    Reason.NOT_FINITE: "at the anchors are not finite",
    Reason.DIVERGED: "take smaller steps",
}


@pytest.mark.parametrize("name", REASONS)
def test_a_missing_interval_has_its_own_reason(name: str):
    reason, problem, gamma0, num_steps = REASONS[name]
    plan = schedules.constant(5).plan(schedules.power_decay(gamma0), num_steps=num_steps)
    found = jaxlsgd.fit(jax.random.key(0), problem, plan, methods=[METHOD])
    detail = found.details[METHOD.name]
    assert detail.withheld and Reason(int(detail.reason)) == reason
    (told,) = _anchored_notes(detail)
    assert told.startswith("no interval is reported: ") and WORDS[reason] in told
    assert reason == Reason.DIVERGED or WORDS[reason] in str(found)


@pytest.mark.parametrize("reason", [Reason.NO_HESSIANS, Reason.NOT_FINITE], ids=lambda x: x.name)
def test_what_clients_send_can_be_the_reason(reason: Reason):
    tracker = jaxlsgd.track(METHOD, jnp.zeros(2), rows="fresh")
    state, rng = tracker.init(jnp.zeros(2)), np.random.default_rng(0)
    broken = reason == Reason.NOT_FINITE
    for m in range(80):
        x, H = jnp.asarray(rng.normal(size=2), jnp.float32), jnp.eye(2)
        h = 1e30 * x if broken and m == 75 else x  # whose square overflows
        given = Anchored(h, H, H, 5) if broken else Anchored(h, None, None, None)
        state = tracker.update(state, x, E=5, eta=0.1, anchored=given)
    (told,) = tracker.notes(state)
    assert WORDS[reason] in told


def test_every_reason_has_words():
    assert set(WORDS) | {Reason.NONE} == set(Reason) == set(_REASONS)


def test_units_of_the_parameters_do_not_matter():
    """Everything that is read scales with the units, though one parameter is counted in millionths."""
    E, K, d = PLANS["E = 3"], 4, 3
    rounds, units = anchored_oracle.make_rounds(E, K, d), np.array([1e-6, 1.0, 1e3])
    eta = 1.0 * np.arange(1, len(E) + 1) ** -0.505 / E
    chosen = anchored_rounds.hessian_rounds(E, K, d)
    _, seen = anchored_oracle.run(rounds, eta, np.zeros(d), chosen)
    with jax.enable_x64(True):
        found = [_read_of(seen, E, eta, s) for s in (np.ones(d), units)]
    plain, scaled = found
    assert not bool(plain.detail.withheld) and not bool(scaled.detail.withheld)
    for ours, theirs in (
        (plain.estimate, scaled.estimate / units),
        (plain.scale, scaled.scale / units),
        (plain.detail.df, scaled.detail.df),
        (plain.detail.gap, scaled.detail.gap),
    ):
        chex.assert_trees_all_close(np.asarray(ours), np.asarray(theirs), rtol=1e-6)


def _read_of(seen: Any, E: np.ndarray, eta: np.ndarray, units: np.ndarray) -> Any:
    state, update = METHOD.init(jnp.zeros(len(units))), jax.jit(METHOD.update)
    for m, one in enumerate(seen):
        here, before = (H / np.outer(units, units) for H in one.hessians or (np.zeros(()),) * 2)
        given = (here, before) if one.hessians else (None, None)
        anchored = Anchored(one.h / units, *given, one.observations)
        state = update(state, Sync(one.x * units, int(E[m]), eta[m], anchored=anchored))
    return read(state)


def test_a_raw_calendar_year_has_an_interval():
    """A covariate of 2,000 ± 30 beside an intercept: its standard error is that of the centred one."""
    rate, plans = 1e-7, schedules.constant(5)
    ours = squares(lambda z: jnp.stack([jnp.ones(()), 2_000 + 30 * z.normal[0]]))
    centred = squares(lambda z: jnp.stack([jnp.ones(()), z.normal[0]]))
    plan = plans.plan(schedules.power_decay(rate), num_steps=2_000)
    usual = plans.plan(schedules.power_decay(0.1), num_steps=2_000)
    year = jaxlsgd.fit(jax.random.key(0), ours, plan, methods=[METHOD])
    other = jaxlsgd.fit(jax.random.key(0), centred, usual, methods=[METHOD])
    found, right = (one.rows[METHOD.name].scale[-1, 0, 1] for one in (year, other))
    assert found * 30 == pytest.approx(right, rel=0.02)


def test_steps_are_lengthened_where_the_hessian_falls():
    """Rare events: Newton's step from 0 moves a log-odds by about 1, and the Hessian falls along it."""
    G, m = np.diag([0.05, 0.2]), np.array([-1.0, 0.0])
    for D, y in (
        (np.diag([-0.03, -0.01]), np.array([-0.8, 0.0])),  # falls: longer, at most twice
        (np.diag([0.03, 0.01]), np.array([-0.8, 0.1])),  # rises: shorter
        (np.diag([-0.03, -0.01]), np.array([-1.5, 0.0])),  # further than the last move: shorter
        (np.diag([-0.2, 0.0]), np.array([-0.9, 0.0])),  # the cap
    ):
        fit = anchored_step._Fit(*[None] * len(anchored_step._Fit._fields))._replace(
            G=G, inverse=np.linalg.inv(G), D=D, known=np.array(True)
        )
        theta = float(anchored_step._bend(fit, y, m))
        chex.assert_trees_all_close(y / (1 + theta), anchored_oracle.damped(y, m, G, D), rtol=1e-12)
        longer = D[0, 0] < 0 and abs(y[0]) < 1
        assert (-0.5 <= theta < 0) == longer and (theta > 0) != longer


def test_numbers_sent_count_anchors_and_hessians():
    """Under P(1/2) at t_T = 5,000 less than a third of what Local SGD sends after every step."""
    schedule = schedules.paper("P(1/2)").with_warmup(0.05)
    plan = schedule.plan(schedules.power_decay(0.5), num_steps=5000)
    for d in (5, 50):
        problem = problems.linear(d, 10)
        chosen = np.count_nonzero(anchored_rounds.hessian_rounds(plan.E, 10, d))
        begins = np.cumsum(plan.E) - plan.E
        late = np.count_nonzero(begins >= anchored_rounds.first_edge(d))
        sent = (plan.num_rounds + late) * d + chosen * d * (d + 1)
        assert jaxlsgd.numbers_sent(problem, plan, METHOD) == sent
        assert sent <= 5000 * d / 3


def test_bad_input():
    with refused("gradients", "choice"):
        one_step(gradients="both")
    with refused("hessians", "unwanted"):
        one_step(hessians=3)
    state = METHOD.init(jnp.zeros(2))
    with refused("sync", "missing"):
        METHOD.update(state, Sync(jnp.zeros(2), 1, 0.1))
    increments = one_step(gradients="increments")
    with refused("estimator", "unsupported"):
        increments.anchors(increments.init(jnp.zeros(2)))


def test_many_columns_need_no_lapack():
    """Two devices of a CPU that are in a factorisation at once can wait for ever, and bins roll on all devices."""
    (part,) = METHOD.accumulators
    assert part.rolling is not None
    state = jax.eval_shape(part.init, jnp.zeros(20))
    assert "lapack" not in jax.jit(part.rolling.roll).lower(state).as_text()


def test_more_parameters_than_it_is_for_are_refused_before_anything_is_traced() -> None:
    check_measure(one_step(), 500, "float32")
    with refused("methods", "unsupported", "501"):
        check_measure(one_step(), 501, "float32")
