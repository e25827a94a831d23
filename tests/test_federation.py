"""Messages of a federation: beside statsmodels on pooled rows, hand-made oracles, and wrong clients."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused
from scipy import stats

from jaxlsgd.federation import (
    FinalMessage,
    agree,
    begin,
    broadcast,
    estimate,
    final_message,
    finish,
    flatten,
    numbers_leaving,
    receive,
    round_message,
    what_leaves,
)
from jaxlsgd.federation.agreement import _new_client, paule_mandel
from jaxlsgd.federation.client import distinct_rows

NAMES = "abcdefgh"


def rows(seed: int, n: int = 120, d: int = 3, shift: float = 0.0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    A = rng.standard_normal((n, d))
    A[:, 0] = 1.0
    x = np.arange(d) / d - 0.3 + shift
    return A, (rng.uniform(size=n) < 1 / (1 + np.exp(-A @ x))).astype(float)


def logistic(params: Any, row: Any) -> Any:
    z = jnp.dot(row[0], params["w"])
    return jnp.logaddexp(z, 0.0) - row[1] * z


def federation(count: int = 4, **options: Any) -> dict[str, tuple[Any, Any]]:
    return {NAMES[k]: rows(k, 120 + 40 * k, **options) for k in range(count)}


def finals(data: dict[str, Any], x: Any, **options: Any) -> dict[str, Any]:
    return {
        name: final_message("logistic", own, x, least_rows=0, **options)
        for name, own in data.items()
    }


def settled(data: dict[str, Any], **options: Any) -> Any:
    """Final messages until the last step is short."""
    x = np.zeros(next(iter(data.values()))[0].shape[1])
    for _ in range(8):
        fit = finish(x, finals(data, x), **options)
        x = fit.estimate
    return fit


def left_out(found: Any) -> set[str]:
    """Return the clients that notes name as left out."""
    notes = getattr(found, "remarks", ()) or getattr(found, "notes", ())
    return {one for note in notes for one in re.findall(r"client (.+?) is left out", note)}


def pooled(data: dict[str, Any]) -> tuple[Any, Any]:
    return tuple(np.concatenate([own[i] for own in data.values()]) for i in range(2))


def test_messages_agree_with_statsmodels_on_pooled_rows():
    sm = pytest.importorskip("statsmodels.api")
    data = federation()
    A, y = pooled(data)
    right = sm.GLM(y, A, family=sm.families.Binomial()).fit(cov_type="HC0")
    fit = settled(data)
    np.testing.assert_allclose(fit.estimate, right.params, atol=1e-8)
    # Scores are centred within clients, which n − 1 and the clients' own means change a little.
    np.testing.assert_allclose(fit.std_error, right.bse, rtol=0.02)
    assert fit.remainder < 1e-6
    assert "about the population of these clients" in str(fit)
    wald = fit.test([[0.0, 1.0, 0.0]])
    np.testing.assert_allclose(wald.p_value, fit.p_values[1], rtol=1e-6)
    same = fit.function(lambda x: x[2])
    np.testing.assert_allclose(same.upper, fit.interval().upper[2], rtol=1e-9)


def test_a_family_and_a_jax_loss_send_the_same_message():
    own, x = rows(1), np.array([0.1, 0.2, -0.3])
    by_family = final_message("logistic", own, x)
    by_jax = final_message(logistic, own, {"w": jnp.asarray(x, jnp.float32)})
    for a, b in zip(by_family[:4], by_jax[:4], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert numbers_leaving(by_family) == 2 * 9 + 3 + 2
    # Another loss, tuned.
    huber = final_message("huber", own, x, numbers=(1.0,))
    A, y = own
    np.testing.assert_allclose(huber.score, np.mean(np.clip(A @ x - y, -1, 1)[:, None] * A, 0))
    with refused("numbers", "shape", "delta"):
        final_message("huber", own, x)


def test_a_round_message_by_hand():
    own, anchors = rows(2, n=20), (np.zeros(3), np.ones(3))
    sent = round_message("logistic", own, anchors, round=1, steps=5, examples=300, hessians=True)
    A, y = own
    np.testing.assert_allclose(sent.gradient_sum, 5 * np.mean((0.5 - y)[:, None] * A, 0))
    np.testing.assert_allclose(sent.hessian, A.T @ A / 80, rtol=1e-12)
    assert sent.hessian_before is not None
    assert not np.allclose(sent.hessian, sent.hessian_before)
    text = what_leaves(3)
    assert "18" in text and "what it reveals" in text


def test_a_client_with_few_rows_refuses():
    own, x = rows(3, n=19), np.zeros(3)
    with refused("rows", "disclosure"):
        final_message("logistic", own, x)
    with refused("rows", "disclosure"):
        final_message("logistic", rows(3, n=29, d=6), np.zeros(6))
    assert final_message("logistic", rows(3, n=20), x).examples == 20
    assert final_message("logistic", own, x, least_rows=19).examples == 19
    assert final_message("logistic", rows(3, n=3), x, least_rows=0).examples == 3
    with refused("rows", "data"):
        final_message("logistic", rows(3, n=0), x, least_rows=0)
    # Copies, and rows without weight, are no more rows.
    A, y = rows(3, n=2)
    with refused("rows", "disclosure"):
        final_message("logistic", (np.tile(A, (10, 1)), np.tile(y, 10)), x)
    A, y = rows(3, n=50)
    with refused("rows", "disclosure"):
        final_message("logistic", (A, y, np.where(np.arange(50) < 2, 1.0, 0.0)), x)
    with refused("rows", "disclosure"):
        final_message("logistic", (np.tile(A[:2], (25, 1)), np.tile(y[:2], 25), 1 + y), x)


def test_hessians_of_a_round_need_rows_and_the_refusal_says_how_many():
    (A, y), x = rows(3, n=300), np.zeros(3)

    def sent(picked: Any, steps: int, **options: Any) -> Any:
        given = {"examples": 300, "hessians": True, **options}
        own = A[np.asarray(picked)], y[np.asarray(picked)]
        return round_message("logistic", own, (x, x), round=1, steps=steps, **given)

    assert sent(range(15), 5).hessian is not None
    assert sent(range(3), 3, least_rows=0).hessian is not None
    assert sent([0, 1, 1, 0] * 5, 5, hessians=False).hessian is None
    with refused("rows", "disclosure"):
        sent([0, 1, 1, 0] * 5, 5)
    with refused("examples", "disclosure"):
        sent(range(15), 5, examples=19)
    with refused("rows", "disclosure") as caught:
        sent(range(8), 4)
    text = r"batches of (\d+) in (\d+) steps, or (\d+) steps with batches of (\d+)"
    (found,) = re.findall(text, str(caught.value))
    batch, steps, more, width = map(int, found)
    assert (batch, steps, more, width) == (4, 4, 8, 2)
    assert sent(range(batch * steps), steps).hessian is not None
    assert sent(range(more * width), more).hessian is not None


def test_rows_are_counted_once_and_only_with_weight():
    A, y = np.arange(12.0).reshape(6, 2), np.arange(6)
    assert distinct_rows((A, y), None, 100) == 6
    assert distinct_rows({"a": np.concatenate([A, A]), "b": np.tile(y, 2)}, None, 100) == 6
    assert distinct_rows((A, y), np.array([1, 0, 0, 2, np.nan, -1]), 100) == 2
    assert distinct_rows((np.array([0.0, -0.0]),), None, 100) == 1
    # Counting goes on until there are enough, in blocks.
    many = np.arange(100_000.0)[:, None] // 3000
    assert distinct_rows((many,), None, 100) == 34
    assert distinct_rows((many * 0, np.arange(100_000) > 99_998), None, 2) == 2


def test_wrong_clients_are_left_out_with_words():
    data = federation()
    right = settled(data)
    sent = finals(data, right.estimate)
    sent["nan"] = sent["a"]._replace(score=np.full(3, np.nan))
    sent["other shape"] = sent["a"]._replace(hessian=np.eye(4))
    sent["empty"] = sent["a"]._replace(examples=0)
    fit = finish(right.estimate, sent, expected=[*sent, "gone"])
    np.testing.assert_allclose(fit.covariance, right.covariance, rtol=1e-6)
    assert left_out(fit) == {"nan", "other shape", "empty", "gone"}
    with refused("messages", "missing"):
        finish(right.estimate, {"nan": sent["nan"]})
    with refused("messages", "data"):
        finish(right.estimate, {"a": sent["a"]._replace(hessian=np.ones((3, 3)))})
    far = finish(np.ones(3), finals(data, np.ones(3)))
    assert "take final messages again at fit.params" in str(far)


def run(rounds: int, spoil: bool = False, rows_are: str = "reused") -> tuple[Any, Any]:
    """Plain rounds over rows that are drawn again and again, in NumPy."""
    data, rng = federation(), np.random.default_rng(0)
    state = begin(np.zeros(3), rows=rows_are)
    for m in range(1, rounds + 1):
        sent, eta = broadcast(state), 1.0 / m**0.6
        messages = {}
        for name, (A, y) in data.items():
            picked = rng.integers(0, len(y), (5, 8))
            x = np.array(state.params)
            for one in picked:
                x -= eta * ((1 / (1 + np.exp(-A[one] @ x)) - y[one]) @ A[one]) / 8
            seen = picked.ravel()
            messages[name] = round_message(
                "logistic",
                (A[seen], y[seen]),
                sent.anchors,
                round=sent.round,
                steps=5,
                examples=len(y),
                params=x,
                hessians=sent.asks(name),
            )
        if spoil:
            first = messages["a"]
            messages["nan"] = first._replace(gradient_sum=first.gradient_sum * np.nan)
        if m % 7 == 0:
            del messages["b"]
        state = receive(state, messages, eta=eta)
    return state, data


def test_rounds_with_clients_that_leave_and_clients_that_are_wrong():
    state, data = run(60, spoil=True)
    right = settled(data)
    assert state.remarks[0].startswith(
        "60 of rounds 1 to 60: client nan is left out: gradient_sum:"
    )
    found = finish(state, None, about="rows")
    assert np.all(np.abs(found.estimate - right.estimate) < 4 * found.std_error)
    assert np.all(found.std_error < right.std_error)
    assert "about the minimiser of these rows, and not the population" in str(found)
    with refused("messages", "missing"):
        finish(state, None)
    sent = finals(data, flatten(estimate(state)))
    whole = finish(state, sent)
    np.testing.assert_allclose(whole.estimate, right.estimate, atol=0.02 * right.std_error.min())
    at = finish(state, sent, correct=False)
    np.testing.assert_allclose(at.covariance, whole.covariance + found.covariance, rtol=1e-6)
    nobody = receive(state, {}, eta=0.1)
    assert "no client sent a usable message" in nobody.remarks[-1]


@pytest.mark.parametrize(("dtype", "center"), [(np.float64, 1e5), (np.float32, 10.0)])
def test_what_the_rounds_say_has_the_precision_of_the_model(dtype: Any, center: float):
    """Far from 0, float32 would move the estimate of a float64 model by several standard errors."""
    rng, start, data = np.random.default_rng(0), np.array([center - 1], dtype), []
    state = begin(start, rows="fresh", weights={"a": 1, "b": 1})
    for _ in range(60):
        sent, messages = broadcast(state), {}
        for name in ("a", "b"):
            y = center + 0.01 * rng.standard_normal(200)
            if sent.anchors[0][0] != start:  # rounds before the first anchor do not count
                data.append(y)
            messages[name] = round_message(
                "gaussian", (np.ones((200, 1)), y), sent.anchors, round=sent.round, steps=200,
                examples=200, params=np.array([center]), hessians=sent.asks(name),
            )  # fmt: skip
        state = receive(state, messages, eta=0.1)
    found, digits = estimate(state), np.finfo(dtype).eps
    assert found.dtype == dtype
    fit = finish(state, None)
    np.testing.assert_allclose(fit.estimate, np.mean(data), rtol=digits)
    np.testing.assert_allclose(fit.std_error, 0.01 / np.sqrt(np.size(data)), rtol=0.2)
    interval = state.tracker.interval(state.tracked)  # of the server's own sums, in any case
    assert interval.lower[0] < np.mean(data) < interval.upper[0]
    np.testing.assert_allclose(interval.estimate, np.mean(data), rtol=1e-13)


def test_sampled_clients_by_the_jackknife():
    """Against leaving out one client after the other, each time to the minimum."""
    data = {f"c{k}": rows(k, 150, shift=0.3 * np.sin(k)) for k in range(8)}
    fit = settled(data, clients="sampled")
    left = [settled({k: v for k, v in data.items() if k != name}).estimate for name in data]
    off = np.array(left) - fit.estimate
    np.testing.assert_allclose(fit.std_error, np.sqrt(7 / 8 * np.sum(off**2, 0)), rtol=0.02)
    assert fit.df == 7
    assert "about the mean of all clients" in str(fit) and "8 clients are few" in str(fit)
    constant = {
        name: (np.column_stack([A, np.full(len(A), k % 3)]), y)
        for k, (name, (A, y)) in enumerate(data.items())
    }
    told = settled(constant, clients="sampled", names=["one", "u", "v", "size"]).notes
    assert any("one and size differ between clients only" in note for note in told)
    assert not any("differ between" in note for note in fit.notes)


def test_units_do_not_decide_whether_clients_can_be_a_sample():
    """Columns with means and scales of their own give the same standard errors, and the same refusal."""
    rng, apart, alike = np.random.default_rng(0), {}, {}
    for k in range(6):
        A = np.column_stack([np.ones(100), rng.standard_normal(100)])
        y = A @ [0.3, 0.2 * np.sin(k)] + rng.standard_normal(100)
        alike[f"c{k}"], apart[f"c{k}"] = (A, y), (A @ [[1.0, 5e4], [0.0, 2e4]], y)

    def of(data: dict[str, Any]) -> Any:
        parts = [np.concatenate(part) for part in zip(*data.values(), strict=True)]
        x = np.linalg.lstsq(*parts)[0]
        return finish(x, {k: final_message("gaussian", v, x) for k, v in data.items()}, clients="sampled")  # fmt: skip

    np.testing.assert_allclose(of(apart).std_error[1] * 2e4, of(alike).std_error[1], rtol=1e-6)
    for data in (apart, alike):
        alone = {
            name: (np.column_stack([A, (name == "c2") * (np.arange(100) % 2)]), y)
            for name, (A, y) in data.items()
        }
        with refused("clients", "data", "c2 alone informs"):
            of(alone)


def test_clients_that_agree_and_one_that_does_not():
    data = {f"c{k}": rows(10 + k, 200) for k in range(10)}
    same = settled(data).agreement()
    assert same.p_value > 0.05 and same.stands_out == ()
    assert same.df[0] == pytest.approx(9 * 3, rel=0.1)
    data["odd"] = rows(99, 200, shift=1.5)
    fit = settled(data)
    found = fit.agreement()
    assert found.p_value < 1e-6 and found.stands_out[0] == "odd"
    assert "clients differ" in str(found)
    assert np.all(found.tau2 > 0)
    # A client's own one-step estimate is near its own fit.
    alone = settled({"c0": data["c0"]})
    gap = np.abs(found.estimates[0] - alone.estimate)
    assert np.all(gap < 0.5 * alone.std_error)
    # Tiny and separated clients are no obstacle.
    data["tiny"] = (np.ones((4, 3)) + 0.1 * rows(5, 4)[0], np.ones(4))
    assert np.isfinite(settled(data).agreement().client_p_values).all()
    with refused("messages", "data"):
        agree({"a": fit.messages["odd"]})


def gaussian_federation(
    seed: int, sizes: list[int], shift: Any = 0.0, constant: int = 0
) -> dict[str, Any]:
    """Clients with 1, u and a factor, of which the first `constant` clients have one level."""
    rng, data = np.random.default_rng(seed), {}
    for k, n in enumerate(sizes):
        factor = (rng.uniform(size=n) < 0.4) * 1.0 if k >= constant else np.full(n, k % 2)
        A = np.column_stack([np.ones(n), rng.standard_normal(n) + 0.2 * k, factor])
        x = np.array([0.1, 0.5, -0.4]) + shift * rng.standard_normal(3)
        data[f"c{k}"] = A, A @ x + rng.standard_normal(n)
    return data


def agreement_of(data: dict[str, Any]) -> Any:
    """Two steps reach the minimum of a squared loss."""
    x = np.zeros(3)
    for _ in range(2):
        sent = {name: final_message("gaussian", own, x, least_rows=0) for name, own in data.items()}
        fit = finish(x, sent)
        x = fit.estimate
    return fit.agreement()


def slow_comparison(data: dict[str, Any], j: int, minimum: Any) -> tuple[float, Any, Any]:
    """p-value, estimates and standard errors of a coefficient, client by client, of those in `data`."""
    n, u, bread, plain, excess = [], [], [], [], []
    for A, y in data.values():
        H, (m, d) = A.T @ A / len(A), A.shape
        s = A.T @ (A @ minimum - y) / m
        scores = A * (A @ minimum - y)[:, None]
        S = np.cov(scores.T)
        inverse = np.linalg.pinv(H)  # some clients do not identify other coefficients
        others = [i for i in range(d) if i != j]
        # The shift of the other coefficients if coefficient j is shared.
        part = H[np.ix_(others, others)]
        delta = -np.linalg.pinv(part) @ s[others]
        noise = np.trace(np.linalg.pinv(part) @ S[np.ix_(others, others)]) / m
        n.append(m)
        u.append(minimum[j] - (inverse @ s)[j])
        bread.append(inverse[j, j])
        plain.append((inverse @ S @ inverse)[j, j] / inverse[j, j])
        excess.append((delta @ part @ delta - noise) * m / (m - 1) * m / (m - d + 1))
    n, u, bread, plain, excess = map(np.array, (n, u, bread, plain, excess))
    middle, off = np.average(excess, weights=n), excess - np.average(excess, weights=n)
    rest = plain - np.average(plain, weights=n)
    base = max(np.average(plain, weights=n) - middle, np.average(plain, weights=n) / 10)
    blur = sum(4 * base * max(np.mean(excess), 0) + 2 * (d - 1) * base**2 / m for m in n)
    spread = max(np.sum(n * off**2) - blur, 0) + 2 * np.average(plain, weights=n) ** 2
    noise = plain - np.clip(np.sum(n * off * rest) / spread, 0, 1) * excess
    W, K = np.diag(n / bread), len(n)
    M = W - W @ np.ones((K, K)) @ W / W.sum()
    mean = max(
        np.trace(M @ np.diag(noise * bread / n)), np.trace(M @ np.diag(plain * bread / n)) / 10
    )
    common = mean / np.sum(1 - n / bread / np.sum(n / bread))
    noise = np.maximum(noise, common / 10)
    V = np.diag(noise * bread / n)
    squares = np.trace(M @ V @ M @ V)
    own = np.sum(2 * (np.diagonal(M) * plain * bread / n) ** 2 / (n - 1))
    squares = max(squares - own, mean**2 / (K - 1))
    p = stats.f.sf(u @ M @ u / mean, mean**2 / squares, 2 * mean**2 / own)
    blended = ((n - 1) * noise + 3 * common) / (n + 2)
    return float(p), u, np.sqrt(blended * bread / n)


def test_coefficients_are_compared_between_the_clients_that_identify_them():
    data = gaussian_federation(1, [40, 50, 60, 70, 80, 90], shift=np.array([0.8, 0, 0]), constant=2)
    found = agreement_of(data)
    minimum = np.linalg.lstsq(*pooled(data), rcond=None)[0]
    # Of c0 the factor is 0, of c1 it is 1 like the intercept.
    assert found.informed_by.tolist() == [5, 6, 4]
    assert np.isnan(found.estimates[1]).tolist() == [True, False, True]
    assert np.isnan(found.estimates[0]).tolist() == [False, False, True]
    for j, left_out in [(0, {"c1"}), (1, set()), (2, {"c0", "c1"})]:
        kept = np.isfinite(found.estimates[:, j])
        assert {name for name, one in zip(data, kept, strict=True) if not one} == left_out
        p, u, errors = slow_comparison(
            {k: v for k, v in data.items() if k not in left_out}, j, minimum
        )
        np.testing.assert_allclose(found.p_values[j], p, rtol=1e-6)
        np.testing.assert_allclose(found.estimates[kept, j], u, rtol=1e-6)
        np.testing.assert_allclose(found.errors[kept, j], errors, rtol=1e-6)
    assert "4 of 6 clients" in str(found)
    assert np.all(np.isfinite(found.new_client)) and np.max(np.abs(found.new_client)) < 10


def test_comparisons_do_not_depend_on_units():
    units = np.array([1.0, 1e6, 1e-5])
    data = gaussian_federation(3, [40, 50, 60, 70, 80, 90], constant=2)
    found = agreement_of(data)
    other = agreement_of({name: (A * units, y) for name, (A, y) in data.items()})
    np.testing.assert_allclose(other.p_values, found.p_values, rtol=1e-6)
    np.testing.assert_allclose(other.errors * units, found.errors, rtol=1e-6)
    with refused("messages", "data"):
        agree({k: FinalMessage(30, np.zeros(2), np.eye(2), np.ones((2, 2)), 0) for k in "ab"})


def test_too_few_clients_that_identify_a_coefficient_are_said_so():
    found = agreement_of(gaussian_federation(2, [60] * 4, constant=2))
    assert found.informed_by.tolist() == [3, 4, 2]
    assert np.isfinite(found.p_values[2]) and np.isinf(found.new_client[1][2])
    found = agreement_of(gaussian_federation(2, [60] * 4, constant=3))
    assert found.informed_by[2] == 1
    assert np.isnan(found.p_values[2]) and np.isnan(found.tau2[2])
    (factor,) = [line.split() for line in str(found).splitlines() if line.startswith("x[2]")]
    assert factor[1:] == ["-"] * 4 and "no comparison" in str(found)


def test_a_coefficient_that_is_shared_is_rejected_as_often_as_it_should_be():
    """2 × 150 federations: 5 of 20 clients with one level of the factor, and 8 clients whose intercepts alone differ.

    Counts at 5 % are binomial, of 150 and of 2 × 150 tests. Bounds are those of a false alarm in 10,000.
    """
    levels, shifts = [], []
    for seed in range(150):
        some = agreement_of(gaussian_federation(seed, [30] * 20, constant=5))
        levels.append(some.p_values[2] < 0.05)
        other = agreement_of(gaussian_federation(seed, [60] * 8, shift=np.array([1.0, 0, 0])))
        shifts.append(other.p_values[1:] < 0.05)
    for count, tests in ((np.sum(levels), 150), (np.sum(shifts), 300)):
        low, high = stats.binom.ppf([5e-5, 1 - 5e-5], tests, 0.05)
        assert low <= count <= high


def test_paule_and_mandel_by_hand():
    assert paule_mandel(np.array([1.0, 1.1, 0.9]), np.ones(3)) == 0
    # Equal variances: τ² = s² − v.
    y = np.array([0.0, 4.0, 8.0])
    assert paule_mandel(y, np.ones(3)) == pytest.approx(15.0)


def test_an_interval_for_a_new_client_allows_for_an_unknown_spread():
    """Estimates that happen to agree leave open that clients differ; many that differ settle it."""
    v = np.full(8, 0.02)
    tau2, _, low, high = _new_client(np.linspace(-0.2, 0.2, 8), v, 0.95)
    assert tau2 == 0 and high - low > 1.5 * 2 * 1.96 * np.sqrt(0.02 / 8)
    y = np.random.default_rng(0).standard_normal(4000)
    tau2, center, low, high = _new_client(y, np.full(4000, 1e-6), 0.95)
    half = 1.96 * y.std()
    np.testing.assert_allclose([low, high], [center - half, center + half], rtol=0.01)
    assert _new_client(y[:2], v[:2], 0.95)[2:] == (-np.inf, np.inf)


def test_numpy_and_jax_arrays_alike():
    own, x = rows(4), np.array([0.1, 0.0, -0.1])
    a = final_message("logistic", own, x)
    b = final_message("logistic", tuple(map(jnp.asarray, own)), jnp.asarray(x, jnp.float32))
    jax.tree.map(lambda u, v: np.testing.assert_allclose(u, v, rtol=1e-4, atol=1e-5), a, b)
