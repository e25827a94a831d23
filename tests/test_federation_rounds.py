"""Rounds in which some clients take part: what is estimated, what is waited for, and what the server keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from refusals import refused

from jaxlsgd.federation import (
    RoundMessage,
    begin,
    broadcast,
    finish,
    receive,
    round_message,
    strata,
)
from jaxlsgd.inference import anchored_step

SIZES = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 5.0}
MINIMA = {"a": 0.0, "b": 0.0, "c": 0.5, "d": 1.0}
TRUTH = 0.6875  # the mean of minima, by sizes; rounds of two clients that are reweighted give 0.51
E, BATCH = 5, 8


def linear(
    rng: np.random.Generator, state: Any, name: str, steps: int = E, **how: Any
) -> RoundMessage:
    """Return the message of a client with least squares of one column."""
    sent, n = broadcast(state), steps * BATCH
    A = rng.standard_normal((n, 1))
    y = A[:, 0] * MINIMA[name] + rng.standard_normal(n)
    x = np.array(state.params)
    for i in range(0, n, BATCH):
        x = x - 0.1 * (A[i : i + BATCH] @ x - y[i : i + BATCH]) @ A[i : i + BATCH] / BATCH
    given = {"hessians": sent.asks(name), **how}
    examples = int(100 * SIZES[name])
    return round_message(
        "gaussian", (A, y), sent.anchors, round=sent.round, steps=steps, examples=examples,
        params=x, **given,
    )  # fmt: skip


def run(
    rounds: int, seed: int = 0, weights: Any = SIZES, who: Any = None, state: Any = None
) -> Any:
    """Two of the four clients per round, or `who(m)`."""
    rng = np.random.default_rng(seed)
    state = begin(np.zeros(1), rows="fresh", weights=weights) if state is None else state
    for m in range(1, rounds + 1):
        names = rng.choice(list(SIZES), 2, replace=False) if who is None else who(m)
        messages = {str(name): linear(rng, state, str(name)) for name in names}
        state = receive(state, messages, eta=0.1)
    return state


@pytest.mark.parametrize("weights", [SIZES, None])
def test_the_estimate_does_not_depend_on_who_takes_part(weights: Any):
    """False alarms: 4 standard errors, 1 in 16,000; the mean over those of a round is 15 away."""
    found = finish(run(200, weights=weights), None)
    assert abs(found.estimate[0] - TRUTH) < 4 * found.std_error[0]
    assert 0.51 < TRUTH - 10 * found.std_error[0]
    # As precise as clients that report as often by themselves.
    alone = np.sqrt(sum((p / 8) ** 2 for p in SIZES.values()) / (100 * E * BATCH))
    assert 0.8 * alone < found.std_error[0] < 1.6 * alone


def test_secure_aggregation_needs_the_probability_of_taking_part():
    """The sum of p_k/π_k h_k is the message of one client. False alarms: 4 standard errors, 1 in 16,000."""
    rng, total = np.random.default_rng(1), sum(SIZES.values())
    state = begin(np.zeros(1), rows="fresh", weights={"all": 1.0})
    for _ in range(200):
        names = rng.choice(list(SIZES), 2, replace=False)
        asked = broadcast(state).asks("all")
        parts = [
            (SIZES[str(k)] / total / 0.5, linear(rng, state, str(k), hessians=asked)) for k in names
        ]
        first = parts[0][1]
        sums = {
            field: sum(share * getattr(one, field) for share, one in parts)
            for field in ("gradient_sum", "hessian", "hessian_before")
            if getattr(first, field) is not None
        }
        model = sum(one.params for _, one in parts) / 2
        state = receive(state, {"all": first._replace(params=None, **sums)}, eta=0.1, params=model)
    found = finish(state, None)
    assert abs(found.estimate[0] - TRUTH) < 4 * found.std_error[0] < 0.2


def test_a_bin_of_all_clients_by_hand():
    """The reader's estimate is a − G⁻¹ Σ p ḡ, its covariance G⁻¹ (Σ p² S/t) G⁻ᵀ."""
    rng, d = np.random.default_rng(2), 2
    p, reports = np.array([0.2, 0.3, 0.5]), (2, 5, 9)
    H = np.array([[2.0, 0.3], [0.3, 1.0]])
    sums, mean, C = [], np.zeros(d), np.zeros((d, d))
    for weight, count in zip(p, reports, strict=True):
        steps = rng.integers(1, 6, count)
        h = np.sqrt(steps)[:, None] * rng.standard_normal((count, d)) + 3 * steps[:, None]
        own = strata.empty(d)
        for one, E_one in zip(h, steps.tolist(), strict=True):
            own = strata.with_report(own, RoundMessage(None, 1, E_one, one, 0, H, H, 10))
        g = h.sum(0) / steps.sum()
        off = h - steps[:, None] * g
        S = (off / steps[:, None]).T @ off / (count - 1)
        mean, C = mean + weight * g, C + weight**2 * S / steps.sum()
        np.testing.assert_allclose(own.mean, g)
        sums.append(own)
    a = np.array([1.0, -1.0])
    zero = np.zeros((d, d))
    nothing = anchored_step.Bins(a, 0 * a, 0 * a, 0 * a, zero, np.zeros((2, d, d)), zero)
    bin, counts = strata.together(sums, p, nothing)
    pair = [
        type(one)(*(np.stack([0 * np.asarray(leaf), np.asarray(leaf)]) for leaf in one))
        for one in (bin, counts)
    ]
    with np.errstate(all="ignore"):
        found = anchored_step.read(*pair)
    inverse = np.linalg.inv(H)
    np.testing.assert_allclose(found.estimate, a - inverse @ mean, rtol=1e-12)
    np.testing.assert_allclose(found.V, inverse @ C @ inverse, rtol=1e-9)
    assert 1 < float(counts.n) - 1 < sum(reports) - 3


def test_degrees_of_freedom_of_clients_that_are_alike_add_up():
    """K clients with n reports each have about K (n − 1); the mean of 400 estimates, which vary by a third."""
    rng, K = np.random.default_rng(3), 20
    zero = np.zeros((1, 1))
    nothing = anchored_step.Bins(
        zero[0], zero[0], zero[0], zero[0], zero, np.zeros((2, 1, 1)), zero
    )
    for count in (2, 6):
        found = []
        for _ in range(400):
            square = rng.chisquare(count - 1, K)[:, None, None]
            sums = [
                strata.empty(1)._replace(n=count, t=count, square=one, seen=np.ones(2))
                for one in square
            ]
            found.append(float(strata.together(sums, np.full(K, 1 / K), nothing)[1].n) - 1)
        assert 0.85 < np.median(found) / (K * (count - 1)) <= 1


def test_an_anchor_waits_for_all_clients_and_says_so():
    def without_d(m: int) -> list[str]:
        return ["a", "b", "c"]

    state = run(40, who=without_d)
    first = broadcast(state).anchors[0]
    assert state.waiting == ("d",) and "have not: d" in state.remarks[0]
    with refused("at", "data"):
        finish(state, None)
    state = run(2, who=lambda m: ["d"], state=state)
    assert state.waiting == ()
    state = run(20, who=lambda m: list(SIZES), state=state)
    assert broadcast(state).anchors[0] != first
    assert not any("have not" in one for one in state.remarks)


def test_a_bin_that_waits_asks_only_those_for_hessians_that_owe_them():
    state, had = begin(np.zeros(1), rows="fresh", weights=SIZES), []
    for _ in range(60):
        state = run(1, who=lambda m: ["a", "b"], state=state)
        had.append(state.clients["a"].hessians if state.clients else 0)
    assert had[-1] == had[30] <= 4  # as many as in a bin that need not wait
    sent = broadcast(state)
    assert not sent.asks("a") and sent.asks("c") and sent.asks("d")


def test_clients_that_join_change_what_is_estimated():
    """Without weights, earlier rounds are about fewer clients, and do not count."""
    state = run(80, weights=None, who=lambda m: ["a", "b", "c"])
    assert finish(state, None).estimate[0] == pytest.approx(1 / 6, abs=0.1)
    joined = run(1, who=lambda m: list(SIZES), state=state)
    assert "d joined" in " ".join(joined.remarks) and joined.names == tuple(SIZES)
    found = finish(run(120, who=lambda m: list(SIZES), state=joined), None)
    assert abs(found.estimate[0] - TRUTH) < 4 * found.std_error[0]  # false alarms: 1 in 16,000
