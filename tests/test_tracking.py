"""Estimators in somebody else's loop: any pytree, scan and vmap, checkpoints, and the worked examples."""

from __future__ import annotations

import gc
import importlib.util
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import Why, refused

import jaxlsgd
from jaxlsgd import Plan, one_step, random_scaling, track

EXAMPLES = Path(__file__).parent.parent / "scripts" / "examples"
PARAMS = {"w": jnp.zeros((2, 2)), "b": jnp.zeros(1)}
TRUTH = {"w": jnp.arange(4.0).reshape(2, 2), "b": jnp.ones(1)}
ROUNDS = 40


def path(key: Any, dtype: Any = jnp.float32) -> Any:
    """Averages around TRUTH, (ROUNDS, ...) leaves."""
    noise = jax.random.normal(key, (ROUNDS, 5))
    return jax.tree.map(
        lambda leaf: leaf.astype(dtype),
        {"w": TRUTH["w"] + noise[:, :4].reshape(-1, 2, 2), "b": TRUTH["b"] + noise[:, 4:]},
    )


def scanned(tracker: Any, averages: Any) -> Any:
    start = tracker.init(jax.tree.map(lambda leaf: leaf[0], averages))
    return jax.lax.scan(
        lambda state, x: (tracker.update(state, x, eta=0.1, E=2), None), start, averages
    )[0]


def test_intervals_have_the_shape_and_names_of_the_parameters():
    """A loop, a scan and a vmap agree with the estimator on flat vectors."""
    tracker, averages = track(random_scaling(), PARAMS, rows="fresh"), path(jax.random.key(0))
    state = jax.jit(lambda x: scanned(tracker, x))(averages)
    found = tracker.interval(state)
    assert jax.tree.structure(found.lower) == jax.tree.structure(PARAMS)
    assert tracker.names == ("['b'][0]", "['w'][0,0]", "['w'][0,1]", "['w'][1,0]", "['w'][1,1]")
    estimator = random_scaling()
    flat = jnp.concatenate([averages["b"], averages["w"].reshape(ROUNDS, 4)], axis=1)
    plain, update = estimator.init(flat[0]), jax.jit(estimator.update)
    for x in flat:
        plain = update(plain, jaxlsgd.Sync(x, 2, 0.1))
    lower = estimator.interval(plain, 0.95).lower
    np.testing.assert_allclose(found.lower["b"], lower[:1], rtol=1e-5)
    np.testing.assert_allclose(found.lower["w"].ravel(), lower[1:], rtol=1e-5, atol=1e-5)
    both = jax.tree.map(lambda leaf: jnp.stack([leaf + 1, leaf]), averages)
    many = jax.jit(jax.vmap(lambda x: scanned(tracker, x)))(both)
    for a, b in zip(jax.tree.leaves(many), jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(a[1], b, rtol=1e-4, atol=1e-4)


def test_functions_by_the_delta_method():
    """A linear function is the contrast; a prediction has J M Jᵀ, written out."""
    tracker = track(random_scaling(), PARAMS, rows="fresh")
    state = scanned(tracker, path(jax.random.key(1)))
    whole = tracker.interval(state)
    same = tracker.function(state, lambda p: p["w"][1, 0])
    np.testing.assert_allclose(same.upper, whole.upper["w"][1, 0], rtol=1e-4)
    x = jnp.array([1.0, -2.0])
    predicted = tracker.function(state, lambda p: jnp.tanh(x @ p["w"] + p["b"]))
    M = np.asarray(random_scaling().matrix(state.states, None))
    center = whole.estimate
    slope = 1 / np.cosh(np.asarray(x @ center["w"] + center["b"])) ** 2
    J = np.array(
        [[s, *(s * v if j == i else 0.0 for v in x for j in range(2))] for i, s in enumerate(slope)]
    )
    half = 6.7473 * np.sqrt(np.diagonal(J @ M @ J.T))
    np.testing.assert_allclose(predicted.upper - predicted.estimate, half, rtol=1e-3)
    one = tracker.interval(state, level=0.975, side="lower")
    np.testing.assert_allclose(one.lower["w"], whole.lower["w"], rtol=1e-4, atol=1e-4)
    assert np.all(np.isinf(one.upper["w"]))


def test_the_critical_value_is_said_and_a_plan_can_be_built_from_what_was_seen():
    tracker = track(random_scaling(critical="schedule"), PARAMS, rows="fresh")
    state = scanned(tracker, path(jax.random.key(2)))
    plan = Plan.from_arrays([1] * 20 + [4] * 20, [0.1] * 40)
    assert "critical value 6.747" in track(random_scaling(), PARAMS, rows="fresh").table(state)
    assert "no plan was given: E_m is taken to be constant" in track(
        random_scaling(), PARAMS, rows="fresh"
    ).table(state)
    text = tracker.table(state, plan=plan)
    q = jaxlsgd.inference.critical_values.for_plan(plan, 0.95)
    assert f"critical value {q:.4g}" in text
    assert "no plan" not in text
    with refused("plan", "missing"):
        track(jaxlsgd.plug_in("finite"), PARAMS, rows="fresh").interval((), plan=None)


def test_bfloat16_is_added_up_in_float32():
    tracker = track(
        random_scaling(mode="diagonal"),
        jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS),
        rows="fresh",
    )
    state = scanned(tracker, path(jax.random.key(3), jnp.bfloat16))
    floats = [x.dtype for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert set(floats) == {jnp.dtype("float32")}
    assert tracker.interval(state).estimate["w"].dtype == jnp.float32


def test_another_pytree_is_refused_in_words():
    tracker = track(random_scaling(), PARAMS, rows="fresh")
    state = tracker.init(PARAMS)
    why = ("params", "shape", "['b'] (1,), ['w'] (2, 2), ")
    with refused(*why):
        tracker.update(state, {"w": jnp.zeros((2, 3)), "b": jnp.zeros(1)}, eta=0.1)
    with refused(*why):
        tracker.update(state, {"w": jnp.zeros((2, 2))}, eta=0.1)
    with refused("params", "type", "'int32'"):
        track(random_scaling(), jnp.arange(3), rows="fresh")
    with refused("estimator", "type"):
        track("random_scaling", PARAMS, rows="fresh")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_orbax_restores_a_state_bit_by_bit(tmp_path: Path):
    checkpoint = pytest.importorskip("orbax.checkpoint")
    tracker = track(one_step(gradients="increments"), PARAMS, rows="fresh")
    state = tracker.update(tracker.init(PARAMS), TRUTH, eta=0.1, hessian=jnp.eye(5))
    keeper = checkpoint.StandardCheckpointer()
    keeper.save(tmp_path / "state", state)
    keeper.wait_until_finished()
    back = keeper.restore(tmp_path / "state", state)
    keeper.close()
    gc.collect()  # orbax leaves loops unclosed; better here than in the next test
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(back), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"eta": 0.0}, ("eta", "value")),
        ({"eta": float("nan")}, ("eta", "not_finite")),
        ({"eta": 0.1, "E": 0}, ("E", "value")),
        ({"eta": 0.1, "hessian": np.eye(4)}, ("hessian", "shape", "(5, 5)")),
        ({"eta": 0.1, "hessian": np.full((5, 5), np.nan)}, ("hessian[0, 0]", "not_finite")),
        (
            {"eta": 0.1, "anchored": jaxlsgd.Anchored(PARAMS, np.eye(3), np.eye(3), 4)},
            ("anchored.hessian", "shape", "(5, 5)"),
        ),
    ],
)
def test_an_update_is_checked(given: dict[str, Any], why: Why):
    tracker = track(random_scaling(), PARAMS, rows="fresh")
    with refused(*why):
        tracker.update(tracker.init(PARAMS), PARAMS, **given)
    broken = {"w": jnp.full((2, 2), jnp.nan), "b": jnp.zeros(1)}
    with refused("params['w'][0, 0]", "not_finite"):
        tracker.update(tracker.init(PARAMS), broken, eta=0.1)


def test_one_update_has_no_table():
    tracker = track(random_scaling(), PARAMS, rows="fresh")
    state = tracker.init(PARAMS)
    for count in (0, 1):
        with refused("state", "data", f"got {count}"):
            tracker.table(state)
        state = tracker.update(state, TRUTH, eta=0.1)
    assert "estimate" in tracker.table(tracker.update(state, PARAMS, eta=0.1))


def test_a_table_says_what_it_is_about():
    with pytest.raises(TypeError, match="rows"):
        track(random_scaling(), PARAMS)  # pyright: ignore[reportCallIssue]
    with refused("rows", "choice"):
        track(random_scaling(), PARAMS, rows="same")
    fresh, reused = (track(random_scaling(), PARAMS, rows=rows) for rows in ("fresh", "reused"))
    state = scanned(fresh, path(jax.random.key(4)))
    assert "about the population" in fresh.table(state)
    told = reused.table(state)
    assert "about these rows" in told and "outside: the steps do not fall" in told
    assert "momentum, Adam" in told and "network" not in told
    both = reused.interval(state, sampling=np.eye(5))
    alone = reused.interval(state)
    half, own = (np.asarray(one.upper["w"] - one.estimate["w"]) for one in (both, alone))
    np.testing.assert_allclose(half, np.sqrt(own**2 + 1.959964**2), rtol=1e-4)
    assert "about the population: the run" in reused.table(state, sampling=np.eye(5))
    with refused("sampling", "unwanted"):
        fresh.interval(state, sampling=np.eye(5))
    anchored = track(one_step(), PARAMS, rows="reused")
    assert not any("outside" in one for one in anchored.about(state))


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_optax_example(capsys: pytest.CaptureFixture[str]):
    """The truth is within five standard errors, and a restored run goes on bit by bit."""
    found = example("optax_loop").main(steps=400)
    assert found["same"]
    interval, truth = found["interval"], {"w": np.array([1.0, -0.5]), "b": np.array(0.25)}
    for name, value in truth.items():
        half = np.asarray(interval.upper[name] - interval.estimate[name])
        assert np.all(np.abs(np.asarray(interval.estimate[name]) - value) < 2.5 * half)
    assert "one_step: critical value" in capsys.readouterr().out


def test_the_network_example(capsys: pytest.CaptureFixture[str]):
    found = example("network").main(steps=400)
    assert all(one.lower < one.estimate < one.upper for one in found)
    told = capsys.readouterr().out
    assert "which none of the intervals includes" in told
    assert "of a network: about this minimum only" in told


def test_the_federation_of_others():
    module = example("other_federation")
    for one in module.main(rounds=150).values():
        half = np.asarray(one.upper - one.estimate)
        assert np.all(np.abs(np.asarray(one.estimate) - module.TRUTH) < 3 * half)
