"""Faulty and hostile clients: every field of both messages, wrong in every way. Who is left out is named."""

from __future__ import annotations

import datetime
import functools
import itertools
import re
from typing import Any

import numpy as np
import pytest
from refusals import refused

from jaxlsgd.federation import (
    FinalMessage,
    RoundMessage,
    begin,
    broadcast,
    estimate,
    final_message,
    finish,
    flatten,
    receive,
    round_message,
)

CLIENTS = ("a", "b", "c", "d")
WEIGHTS = {"a": 0.3, "b": 0.1, "c": 0.3, "d": 0.3}
ROWS, E, DIM = 60, 5, 2
HERE = np.array([0.2, -0.1])


@functools.cache
def rows(name: str) -> tuple[Any, Any]:
    rng = np.random.default_rng(CLIENTS.index(name))
    A = np.column_stack([np.ones(ROWS), rng.standard_normal(ROWS)])
    return A, A @ [0.5, -0.5] + rng.standard_normal(ROWS)


def a_round(state: Any, seed: int, who: Any = CLIENTS) -> dict[str, RoundMessage]:
    """All clients take part, or some."""
    rng, sent, messages = np.random.default_rng(seed), broadcast(state), {}
    for name in who:
        A, y = rows(name)
        seen = rng.permutation(ROWS)[: E * 6]
        x = state.params - 0.1 * (A[seen] @ state.params - y[seen]) @ A[seen] / len(seen)
        messages[name] = round_message(
            "gaussian", (A[seen], y[seen]), sent.anchors, round=sent.round, steps=E,
            examples=ROWS, params=x, hessians=sent.asks(name),
        )  # fmt: skip
    return messages


@functools.cache
def prepared(weights: bool = True) -> Any:
    """A server that asks all clients for Hessians in its next round."""
    state = begin(np.zeros(DIM), rows="reused", weights=WEIGHTS if weights else None)
    for m in itertools.count():
        if m > 14 and broadcast(state).asks("a"):
            return state
        state = receive(state, a_round(state, m), eta=0.1)


@functools.cache
def finals() -> dict[str, FinalMessage]:
    return {name: final_message("gaussian", rows(name), HERE) for name in CLIENTS}


def wrong_values(good: Any, matrix: bool) -> dict[str, Any]:
    """Return wrong values for a field that holds `good`."""
    array = np.asarray(good, float)
    found: dict[str, Any] = {
        "NaN": array * np.nan,
        "infinity": array + np.inf,
        "text": np.full(array.shape, "0.1").tolist(),
        "bytes": b"0.1",
        "dates": np.full(array.shape, datetime.datetime(2020, 1, 1)).tolist(),
        "bools": np.ones(array.shape, bool),
        "complex": array * 1j,
        "an object": object(),
        "a table": {"x": 1.0},
        "longer": np.ones((*array.shape, 2)),
        "size": array * 0 + 1e200,
    }
    if array.ndim:
        found |= {"a number": 1.0, "shorter": array[1:], "ragged": [1.0, [2.0]]}
    else:
        found |= {"sign": -array, "zero": 0, "half": 0.5, "digits": 10**400, "beyond": 2.0**60}
    if matrix:
        found["turned"] = array + 50 * np.array([[0.0, 1.0], [-1.0, 0.0]])
    return found


MATRICES = ("hessian", "hessian_before", "covariance")


def cases(kind: Any) -> list[tuple[str, str]]:
    """Return every field of a message with every way in which it can be wrong."""
    whole = ("examples", "steps", "answers", "observations")
    found = []
    for field in kind._fields:
        good = 1 if field in whole else np.ones((DIM, DIM) if field in MATRICES else DIM)
        found += [(field, way) for way in wrong_values(good, field in MATRICES)]
        found += [(field, "None")]
    return found


def spoilt(message: Any, field: str, way: str) -> Any:
    good = getattr(message, field)
    value = None if way == "None" else wrong_values(good, field in MATRICES)[way]
    return message._replace(**{field: value})


def left_out(notes: Any) -> set[str]:
    return {one for note in notes for one in re.findall(r"client (\S+?) is left out", note)}


def same_sums(one: Any, other: Any) -> None:
    assert list(one.clients) == list(other.clients)
    for a, b in zip(one.clients.values(), other.clients.values(), strict=True):
        for left, right in zip(a, b, strict=True):
            np.testing.assert_array_equal(left, right)
    np.testing.assert_array_equal(flatten(one.params), flatten(other.params))


@pytest.mark.parametrize(("field", "way"), cases(RoundMessage))
def test_a_wrong_field_of_a_round_leaves_that_client_out(field: str, way: str):
    state, messages = prepared(), a_round(prepared(), 99)
    others = {name: one for name, one in messages.items() if name != "b"}
    wrong = receive(state, {**messages, "b": spoilt(messages["b"], field, way)}, eta=0.1)
    assert left_out(wrong.remarks) == {"b"}
    same_sums(wrong, receive(state, others, eta=0.1))


@pytest.mark.parametrize(("field", "way"), cases(FinalMessage))
def test_a_wrong_field_of_a_final_message_leaves_that_client_out(field: str, way: str):
    others = {name: one for name, one in finals().items() if name != "b"}
    fit = finish(HERE, {**finals(), "b": spoilt(finals()["b"], field, way)}, weights=WEIGHTS)
    assert left_out(fit.notes) == {"b"}
    np.testing.assert_array_equal(fit.covariance, finish(HERE, others, weights=WEIGHTS).covariance)


def test_a_covariance_is_not_negative():
    for wrong in (-finals()["b"].covariance, -1e4 * np.eye(DIM)):
        fit = finish(HERE, {**finals(), "b": finals()["b"]._replace(covariance=wrong)})
        assert left_out(fit.notes) == {"b"}
    none = {name: one._replace(covariance=np.zeros((DIM, DIM))) for name, one in finals().items()}
    with refused("messages", "data"):
        finish(HERE, {"a": none["a"], "b": none["b"]._replace(score=np.ones(DIM))})


OTHER_KINDS = (None, {"examples": 1}, (1, 2, 3), "text", 3.0)


@pytest.mark.parametrize("message", [*OTHER_KINDS, "the other kind"])
def test_what_is_no_message_leaves_its_client_out(message: Any):
    state = prepared()
    other: Any = finals()["b"] if message == "the other kind" else message
    assert left_out(receive(state, {**a_round(state, 9), "b": other}, eta=0.1).remarks) == {"b"}
    other = a_round(state, 9)["b"] if message == "the other kind" else message
    assert left_out(finish(HERE, {**finals(), "b": other}).notes) == {"b"}


def test_replays_and_strangers():
    state = prepared()
    old = a_round(state, 1)
    state = receive(state, old, eta=0.1)
    stranger = receive(state, {**a_round(state, 2), "x": a_round(state, 3)["a"]}, eta=0.1)
    assert left_out(stranger.remarks) == {"x"}
    same_sums(stranger, receive(state, a_round(state, 2), eta=0.1))
    replay = receive(state, {**a_round(state, 2), "b": old["b"]}, eta=0.1)
    assert left_out(replay.remarks) == {"b"}
    there = final_message("gaussian", rows("b"), HERE + 1e-3)
    assert left_out(finish(HERE, {**finals(), "b": there}).notes) == {"b"}
    for known in ({"expected": CLIENTS}, {"weights": WEIGHTS}):
        fit = finish(HERE, {**finals(), "x": final_message("gaussian", rows("a"), HERE)}, **known)
        assert left_out(fit.notes) == {"x"}
    assert left_out(finish(HERE, {"a": finals()["a"]}, expected=["a", "b"]).notes) == {"b"}


def test_duplicates_are_named():
    """Equal final messages are left out unless the server has named the clients; equal rounds are reported."""
    twice = {**finals(), "z": finals()["a"]}
    assert left_out(finish(HERE, twice).notes) == {"z"}
    np.testing.assert_array_equal(finish(HERE, twice).estimate, finish(HERE, finals()).estimate)
    named = finish(HERE, twice, weights={**WEIGHTS, "z": 0.3}).notes
    assert not left_out(named) and any("client z is used" in note for note in named)
    state = begin(np.zeros(DIM), rows="reused")
    for m in range(15):
        messages = a_round(state, m)
        state = receive(state, {**messages, "z": messages["a"]}, eta=0.1)
    assert any("clients a, z sent the same sums" in note for note in state.remarks)
    assert not any("the same sums" in note for note in prepared(weights=False).remarks)


def test_hessians_count_only_if_they_were_asked_for():
    state = prepared()
    state = receive(state, a_round(state, 1), eta=0.1)
    assert not broadcast(state).asks("b")
    messages = a_round(state, 2)
    H = np.eye(DIM)
    unasked = messages["b"]._replace(hessian=H, hessian_before=H, observations=30)
    wrong = receive(state, {**messages, "b": unasked}, eta=0.1)
    assert left_out(wrong.remarks) == {"b"}


@pytest.mark.parametrize(("field", "way"), cases(RoundMessage))
def test_a_wrong_field_leaves_the_client_out_if_no_hessians_are_due(field: str, way: str):
    state = prepared()
    state = receive(state, a_round(state, 1), eta=0.1)
    messages = a_round(state, 2)
    assert messages["b"].hessian is None
    if field in ("hessian", "hessian_before"):
        value = None if way == "None" else wrong_values(np.eye(DIM), True)[way]
        both = {"hessian": value, "hessian_before": value}
        far = messages["b"]._replace(**both)
    else:
        far = spoilt(messages["b"], field, way)
    wrong = receive(state, {**messages, "b": far}, eta=0.1)
    right = way == "None" and field.startswith("hessian")
    right |= field == "observations" and way in ("zero", "sign")
    assert left_out(wrong.remarks) == (set() if right else {"b"})


def rounds_of(
    count: int, spoil: Any, who: Any = lambda m: CLIENTS, dtype: Any = float, rows: Any = "fresh"
) -> Any:
    """Return the state after rounds in which b sends `spoil(m, message)`."""
    state = begin(np.zeros(DIM, dtype), rows=rows, weights=WEIGHTS)
    for m in range(count):
        messages = a_round(state, m, who(m))
        if "b" in messages:
            messages["b"] = spoil(m, messages["b"])
        state = receive(state, messages, eta=0.1)
    return state


def in_turn(m: int) -> Any:
    return (("a", "b"), ("c", "d"))[m % 2]


def named(notes: Any, words: str) -> set[str]:
    return {one for note in notes for one in re.findall(rf"client (\S+?) {words}", note)}


UNLIKE, INFLUENCE = "is unlike", "has more influence than its weight"


@pytest.mark.parametrize("factor", [40.0, 999.0, 1e6, -20.0])
def test_who_changes_standard_errors_by_its_hessians_is_named(factor: float):
    """Of final messages and of rounds, whether all take part or two of four."""
    b = finals()["b"]
    fit = finish(HERE, {**finals(), "b": b._replace(hessian=factor * b.hessian)}, weights=WEIGHTS)
    assert named(fit.notes, INFLUENCE) | left_out(fit.notes) == {"b"}

    def spoil(_: int, one: RoundMessage) -> RoundMessage:
        if one.hessian is None or one.hessian_before is None:
            return one
        return one._replace(
            hessian=factor * one.hessian, hessian_before=factor * one.hessian_before
        )

    for who in (in_turn, lambda _: CLIENTS):
        remarks = rounds_of(40, spoil, who).remarks
        assert named(remarks, INFLUENCE) == {"b"}
        assert named(remarks, UNLIKE) == ({"b"} if abs(factor) > 1e3 or factor < 0 else set())
    assert not rounds_of(40, lambda _, one: one, in_turn).remarks
    with refused("at", "data", "client b"):
        finish(rounds_of(20, lambda _, one: spoil(0, one._replace(steps=20)), in_turn), None)


def test_who_moves_the_estimate_is_named():
    for score in (np.array([1e50, -1e50]), np.array([1e3, 0.0])):
        b = finals()["b"]._replace(score=score)
        fit = finish(HERE, {**finals(), "b": b}, weights=WEIGHTS)
        assert named(fit.notes, INFLUENCE) == named(fit.notes, UNLIKE) == {"b"}
    many = finish(HERE, {**finals(), "b": finals()["b"]._replace(examples=10**15)}, weights=WEIGHTS)
    assert named(many.notes, UNLIKE) == {"b"}

    def spoil(_: int, one: RoundMessage) -> RoundMessage:
        return one._replace(gradient_sum=1e8 * one.gradient_sum, params=one.params + 1e3)

    assert named(rounds_of(40, spoil, in_turn).remarks, UNLIKE) == {"b"}


@pytest.mark.parametrize("clients", [3, 5, 20])
@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_honest_clients_are_not_named(clients: int, spread: float):
    """Unequal sizes and minima that differ. Less than 1 in 100 is expected to be named; 5 of 60 are 1 in 5,000."""
    rng, count = np.random.default_rng(clients), 0
    for _ in range(60):
        messages = {}
        for k in range(clients):
            n = int(60 + 300 * np.exp(rng.normal()))
            A = np.column_stack([np.ones(n), np.exp(rng.normal(0, 0.3)) * rng.normal(size=n)])
            y = A @ (HERE + spread * rng.normal(size=DIM)) + rng.normal(size=n)
            messages[str(k)] = final_message("gaussian", (A, y), HERE)
        count += bool(named(finish(HERE, messages).notes, INFLUENCE))
    assert count < 5


@pytest.mark.parametrize("hessian", [[[1.0, 1e6], [1e6, 1.0]], "-20"])
def test_a_client_that_makes_the_mean_hessian_indefinite_is_left_out(hessian: Any):
    b = finals()["b"]
    wrong = b._replace(hessian=-20 * b.hessian if hessian == "-20" else np.array(hessian))
    fit = finish(HERE, {**finals(), "b": wrong}, weights=WEIGHTS)
    assert left_out(fit.notes) == {"b"}
    others = {name: one for name, one in finals().items() if name != "b"}
    np.testing.assert_array_equal(fit.covariance, finish(HERE, others, weights=WEIGHTS).covariance)


def test_refusals_have_the_notes():
    flat = {name: one._replace(hessian=np.diag([1.0, 0])) for name, one in finals().items()}
    with refused("messages", "data", "client b is left out", "positive definite"):
        finish(HERE, {**flat, "b": None})


def test_one_model_does_not_end_a_fit():
    """What overflows is left out; a step that is far too long is cut, and both are named."""
    state = rounds_of(
        20, lambda m, b: b._replace(params=np.array([1e60, 0.0])) if m == 5 else b, dtype="f4"
    )
    assert left_out(state.remarks) == {"b"}
    assert np.all(np.isfinite(state.params)) and len(state.remarks) == 1
    for who in (lambda _: CLIENTS, in_turn):
        state = rounds_of(
            80, lambda m, b: b._replace(params=np.array([1e99, 0.0])) if m == 6 else b, who
        )
        right = rounds_of(80, lambda m, b: b, who)
        assert named(state.remarks, UNLIKE) == {"b"}
        fit, other = finish(state, None), finish(right, None)
        assert np.all(np.abs(fit.estimate - other.estimate) < 4 * other.std_error)


def test_steps_of_one_client_do_not_stop_the_anchors():
    """One client per round, and the first is the hostile one."""
    who = lambda m: ("bacd"[m % 4],)  # noqa: E731

    def spoil(m: int, one: RoundMessage) -> RoundMessage:
        if m > 40:
            return one
        share = (2**31 - 1) / one.steps
        return one._replace(steps=2**31 - 1, gradient_sum=share * one.gradient_sum)

    state, right = rounds_of(120, spoil, who), rounds_of(120, lambda m, one: one, who)
    assert named(state.remarks, UNLIKE) == {"b"}
    fit, other = finish(state, None), finish(right, None)
    assert np.all(fit.std_error < 2 * other.std_error)


def test_a_crafted_covariance_does_not_shorten_the_interval():
    """A negative eigenvalue within what rounding explains counts as 0."""
    right = finish(HERE, finals(), weights=WEIGHTS)
    B = np.linalg.inv(sum(w * finals()[name].hessian for name, w in right.weights.items()))
    v = B[0]
    M = np.array([[1, -np.sign(v[0] * v[1]) * (1 + 1.99e-5)]] * 2)
    M[1] = M[1][::-1]
    S = np.diag(1 / np.abs(v)) @ M @ np.diag(1 / np.abs(v))
    own = lambda S: (WEIGHTS["b"] ** 2 / ROWS) * (v @ S @ v)  # noqa: E731
    rest = right.covariance[0, 0] - own(finals()["b"].covariance)
    for share in (0.9999, 1.01):
        b = finals()["b"]._replace(covariance=-share * rest / own(S) * S)
        fit = finish(HERE, {**finals(), "b": b}, weights=WEIGHTS)
        assert not left_out(fit.notes) and named(fit.notes, UNLIKE) == {"b"}
        assert fit.covariance[0, 0] >= rest * (1 - 1e-6)


def test_a_covariance_of_few_directions_does_not_break_the_comparison_of_clients():
    for S in (np.diag([1.0, 0.0]), np.array([[1, 1 + 1e-6], [1 + 1e-6, 1]])):
        b = finals()["b"]._replace(examples=2**52, covariance=S)
        fit = finish(HERE, {**finals(), "b": b}, weights=WEIGHTS)
        assert np.isfinite(fit.agreement().p_value)


def test_strangers_do_not_hide_who_is_left_out():
    state = prepared()
    strangers = {f"s{i}": None for i in range(1200)}
    state = receive(state, {**a_round(state, 1), **strangers}, eta=0.1)  # pyright: ignore[reportArgumentType]
    state = receive(state, {**a_round(state, 2), "b": None, "late": None}, eta=0.1)  # pyright: ignore[reportArgumentType]
    assert "b" in left_out(state.remarks) and "late" not in left_out(state.remarks)
    assert len(state.remarks) == 1002 and state.remarks[-1].startswith("201 more messages")


def test_after_a_client_has_joined_the_reason_is_that_there_are_too_few_rounds():
    state = begin(np.zeros(DIM), rows="fresh")
    for m in range(70):
        state = receive(state, a_round(state, m, CLIENTS if m >= 62 else CLIENTS[:3]), eta=0.1)
    with refused("at", "data", "too few rounds", "d joined") as caught:
        finish(state, None)
    assert "sent no Hessians" not in str(caught.value)


def test_what_is_possible_but_unlike_the_others_is_reported():
    final, state = finals()["b"], prepared()
    sizes = {"covariance": 1e6, "hessian": 1e6}
    for field, factor in sizes.items():
        for one in (factor, 1 / factor):
            fit = finish(
                HERE, {**finals(), "b": final._replace(**{field: one * getattr(final, field)})}
            )
            assert any("client b is unlike the others" in note for note in fit.notes)
    negative = final._replace(hessian=-0.1 * final.hessian)
    assert any(
        "client b is unlike" in note for note in finish(HERE, {**finals(), "b": negative}).notes
    )
    good = a_round(state, 5)
    for field in ("gradient_sum", "steps", "params", "hessian", "hessian_before", "observations"):
        far = good["b"]._replace(**{field: getattr(good["b"], field) * 10**6})
        found = receive(state, {**good, "b": far}, eta=0.1)
        assert any("client b is unlike the others" in note for note in found.remarks), field
        assert not left_out(found.remarks)
    assert not any("unlike" in note for note in finish(HERE, finals()).notes)
    assert not any("unlike" in note for note in prepared().remarks)


def test_rows_of_final_messages_are_those_of_the_rounds_and_most_of_the_weight_is_named():
    state = prepared(weights=False)
    x = estimate(state)
    sent = {name: final_message("gaussian", rows(name), x) for name in CLIENTS}
    more = {**sent, "b": sent["b"]._replace(examples=ROWS + 1)}
    assert left_out(finish(state, more).notes) == {"b"}
    heavy = {**finals(), "b": finals()["b"]._replace(examples=10**12)}
    assert any("client b has 100 % of the weight" in note for note in finish(HERE, heavy).notes)
    assert any(
        "client a has 60 % of the weight" in n
        for n in finish(HERE, finals(), weights={**WEIGHTS, "a": 1.05}).notes
    )


@pytest.mark.parametrize("field", ["score", "covariance", "hessian", "examples"])
def test_the_influence_of_a_client_is_at_most_its_weight(field: str):
    """With weights, whatever passes moves the estimate by p_b of what the client says, and V by its own part."""
    rng, right, p = np.random.default_rng(0), finish(HERE, finals(), weights=WEIGHTS), WEIGHTS["b"]
    assert right.weights["b"] == pytest.approx(p)
    G = sum(w * finals()[name].hessian for name, w in right.weights.items())
    rest = sum(
        (w**2 / ROWS) * finals()[name].covariance
        for name, w in right.weights.items()
        if name != "b"
    )
    for _ in range(20):
        R = rng.standard_normal((DIM, DIM))
        value = {
            "score": R[0] * 10.0 ** rng.integers(-2, 3),
            "covariance": R @ R.T * 10.0 ** rng.integers(-6, 6),
            "hessian": (R @ R.T) * 10.0 ** rng.integers(-6, 0),
            "examples": int(10 ** rng.integers(0, 15)),
        }[field]
        b = finals()["b"]._replace(**{field: value})
        fit = finish(HERE, {**finals(), "b": b}, weights=WEIGHTS)
        H = G + p * (b.hessian - finals()["b"].hessian)
        # Never shorter than the noise of the others with this G.
        floor = np.linalg.inv(H) @ rest @ np.linalg.inv(H)
        assert np.all(np.diagonal(fit.covariance) >= np.diagonal(floor) * (1 - 1e-9))
        if field == "score":
            moved = -np.linalg.inv(G) @ (p * (value - finals()["b"].score))
            np.testing.assert_allclose(fit.estimate - right.estimate, moved, rtol=1e-6, atol=1e-12)
            np.testing.assert_allclose(fit.covariance, right.covariance)
        if field in ("covariance", "examples"):
            np.testing.assert_array_equal(fit.estimate, right.estimate)


def test_misuse_is_refused():
    state, nan = prepared(), np.nan
    for wrong, code in (
        (-0.01, "value"),
        (nan, "not_finite"),
        (np.inf, "not_finite"),
        (None, "type"),
    ):
        with refused("ridge", code):
            finish(HERE, finals(), ridge=wrong)  # pyright: ignore[reportArgumentType]
    with refused("ridge[1]"):
        finish(HERE, finals(), ridge=[0.1, -1.0])
    with refused("ridge", "shape"):
        finish(HERE, finals(), ridge=[0.1])
    with refused("at[1]", "not_finite"):
        finish(np.array([0.0, nan]), finals())
    with refused("at", "type"):
        finish("here", finals())
    with refused("names[1]", "duplicate"):
        finish(HERE, finals(), names=["a", "a"])
    with refused("names", "type"):
        finish(HERE, finals(), names="ab")
    with refused("expected", "type"):
        finish(HERE, finals(), expected="abcd")
    with refused("eta", "not_finite"):
        receive(state, {}, eta=nan)
    with refused("state", "type"):
        receive(None, {}, eta=0.1)  # pyright: ignore[reportArgumentType]
    with refused("state", "type"):
        broadcast(np.zeros(2))  # pyright: ignore[reportArgumentType]
    with refused("method", "type"):
        begin(np.zeros(2), rows="fresh", method="one_step")  # pyright: ignore[reportArgumentType]
    with refused("expected", "type"):
        finish(HERE, finals(), expected=[["a"]])  # pyright: ignore[reportArgumentType]
    for wrong in (None, [], "text", {1: finals()["a"]}):
        with refused("messages", "type"):
            receive(state, wrong, eta=0.1)  # pyright: ignore[reportArgumentType]
        if wrong is not None:
            with refused("messages", "type"):
                finish(HERE, wrong)  # pyright: ignore[reportArgumentType]
    with refused("params", "missing"):
        bare = {name: one._replace(params=None) for name, one in a_round(state, 1).items()}
        receive(state, bare, eta=0.1)
    with refused("params", "not_finite"):
        receive(state, a_round(state, 1), eta=0.1, params=np.full(DIM, nan))
    with refused("params", "shape"):
        begin(np.zeros(0), rows="fresh")
    with refused("params[1]", "not_finite"):
        begin(np.array([0.0, nan]), rows="fresh")
    for wrong, argument, code in (
        ({}, "weights", "missing"),
        ([1.0], "weights", "type"),
        ({"a": 0.0}, "weights['a']", "value"),
        ({"a": nan}, "weights['a']", "not_finite"),
    ):
        with refused(argument, code):  # pyright: ignore[reportArgumentType]
            begin(np.zeros(2), rows="fresh", weights=wrong)  # pyright: ignore[reportArgumentType]
    with refused("weights", "missing"):
        finish(HERE, finals(), weights={"a": 1.0}, expected=["a", "b"])


def test_names_are_printed_without_control_characters():
    name = "\x1b[31mred\nfake: all is well"
    table = str(finish(HERE, {**finals(), name: None}))
    assert "\x1b" not in table and r"client \x1b[31mred\nfake: all is well is left out" in table
    remarks = receive(prepared(False), {**a_round(prepared(False), 1), name: None}, eta=0.1).remarks
    assert all(one.isprintable() for one in remarks)


def test_a_client_refuses_what_gives_no_message():
    A, y = rows("a")
    sent = broadcast(prepared())
    for anchors in (sent, sent.anchors[:1], sent.anchors[0], None):
        with refused("anchors", "type"):
            round_message("gaussian", (A, y), anchors, round=1, steps=5, examples=ROWS)  # pyright: ignore[reportArgumentType]
    nan, zero = A * np.nan, np.zeros(ROWS)
    for wrong, argument, code in (
        ((A, y.astype(str)), "rows", "type"),
        ((A, np.array(["a"] * ROWS)), "rows", "type"),
        ((nan, y), "rows[0, 0]", "not_finite"),
        ((A, y, zero), "rows[2]", "value"),
        ((A, y, zero - 1), "rows[2]", "value"),
    ):
        with refused(argument, code):  # pyright: ignore[reportArgumentType]
            final_message("gaussian", wrong, HERE, least_rows=0)
    for numbers in (None, 1.345):
        with refused("numbers", "shape"):
            final_message("huber", (A, y), HERE, numbers=numbers)  # pyright: ignore[reportArgumentType]
    for matrix, code in ((np.eye(3), "shape"), (np.zeros((2, 2)), "data")):
        with refused("all_rows", code):  # pyright: ignore[reportArgumentType]
            final_message("gaussian", (A, y), HERE, all_rows=matrix)  # pyright: ignore[reportArgumentType]
