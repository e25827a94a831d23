"""Single checks of what a message may hold."""

from __future__ import annotations

import datetime
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused

from jaxlsgd.core.checks import Code
from jaxlsgd.federation import validate
from jaxlsgd.federation.client import digest


class Hostile:
    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (None, "type"),
        ("123", "type"),
        (["1", "2", "3"], "type"),
        (b"abc", "type"),
        (np.array(["2020-01-01"] * 3, "M8[D]"), "type"),
        ([datetime.datetime(2020, 1, 1)] * 3, "type"),
        (np.ones(3, bool), "type"),
        (np.ones(3, complex), "type"),
        ([1, 2, 10**400], "type"),
        ([1, [2], 3], "type"),
        ({"a": 1}, "type"),
        (np.ma.array, "type"),
        (Hostile(), "type"),
        (1.0, "shape"),
        (np.ones((3, 1)), "shape"),
        (np.array([1, np.nan, 1]), "not_finite"),
        (np.array([1, np.inf, 1]), "not_finite"),
        (np.array([1, -1e200, 1]), "untrusted"),
    ],
)
def test_a_field_holds_real_finite_numbers_of_its_shape(value: Any, code: Code):
    with refused("score", code):
        validate.real("score", value, (3,))


def test_arrays_of_any_library_and_lists_of_numbers_are_read():
    for value in (
        [1, 2, 3],
        np.arange(1, 4),
        jnp.arange(1.0, 4.0),
        jnp.arange(1, 4, dtype="bfloat16"),
    ):
        found = validate.real("score", value, (3,))
        assert found.dtype == np.float64 and found.tolist() == [1, 2, 3]


@pytest.mark.parametrize("value", [0, -3, 2.5, 2**53, 10**400, -(10**400), np.int64(-1)])
def test_a_count_is_whole_and_positive(value: Any):
    with refused("examples", "untrusted"):
        validate.whole("examples", value)


@pytest.mark.parametrize("value", [True, "3", None, 3j, [3], np.nan, np.inf])
def test_a_count_is_a_number(value: Any):
    code = "shape" if value == [3] else "type"
    with refused("examples", "not_finite" if isinstance(value, float) else code):
        validate.whole("examples", value)
    for good in (3, 3.0, np.int32(3), np.array(3.0), jnp.asarray(3)):
        assert validate.whole("examples", good) == 3


def test_matrices_up_to_rounding():
    A = np.random.default_rng(0).standard_normal((50, 3)).astype("f4") * np.array(
        [1, 1e4, 1e-4], "f4"
    )
    S = (A.T @ A).astype(float)
    S[0, 1] *= 1 + 1e-6
    np.testing.assert_array_equal(validate.positive("covariance", S), (S + S.T) / 2)
    rank_one = np.outer(A[0], A[0])  # float32
    validate.positive("covariance", rank_one.astype(float))
    validate.positive("covariance", np.zeros((3, 3)))
    turned = np.array([[0, 50.0, 0], [-50, 0, 0], [0, 0, 0]])
    for wrong in (np.cov(A.T / A.std(0)[:, None]) + turned, -S, S - 0.9 * np.diag(np.diagonal(S))):
        with refused("covariance", "untrusted"):
            validate.positive("covariance", wrong)
    with refused("hessian", "untrusted"):
        validate.symmetric("hessian", turned)
    np.testing.assert_array_equal(validate.symmetric("hessian", -S), -(S + S.T) / 2)


def test_a_digest_tells_places_and_rounds_apart_but_not_precisions():
    x = np.random.default_rng(1).standard_normal(5)
    own = digest(x, 3)
    assert own == digest(x.astype("f4"), 3) and 0 <= own < 2**53
    others = [
        digest(x),
        digest(x, 4),
        digest(x * 1.001, 3),
    ]
    assert len({own, *others}) == 4
    assert digest(np.zeros(2)) == digest(-np.zeros(2))


def test_names_and_reasons_stay_on_their_line():
    note = validate.left_out("\x1b[31mred\nfake: all is well", "bad\r\nline")
    assert note.isprintable() and note.startswith(r"client \x1b[31mred\nfake")
    assert len(validate.shown_name("x" * 1000)) == 60
