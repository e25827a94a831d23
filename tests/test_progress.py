"""The estimate of the time left: never without a basis, never absurd."""

from __future__ import annotations

import pytest

from jaxlsgd.core.progress import TimeLeft


def time_left(work: float = 1000.0, kinds: int = 1) -> TimeLeft:
    return TimeLeft(work, kinds, 0.0)


def test_there_is_no_estimate_before_there_is_a_basis() -> None:
    found = time_left()
    assert found.seconds(100.0) is None  # compiling
    found.begin(120.0)
    found.advance(1e-3, 120.0)
    assert found.seconds(120.1) is None  # a millionth of the work after two minutes: not 1,400 days
    found.advance(1.0, 121.0)
    assert found.seconds(121.0) is None
    for second in range(122, 125):
        found.advance(1.0, float(second))
    assert found.seconds(124.0) == pytest.approx(996, rel=0.01)


def test_a_rate_that_changes_is_followed_and_what_is_slow_to_come_counts() -> None:
    found = time_left()
    found.begin(10.0)
    for second in range(10, 111):
        found.advance(1.0 if second < 60 else 10.0, float(second))
    done = 50 + 51 * 10
    assert found.seconds(110.0) == pytest.approx((1000 - done) / 10, rel=0.03)
    assert found.seconds(160.0) == pytest.approx(
        (1000 - done) / 5, rel=0.03
    )  # nothing came for 50 s


def test_kinds_to_come_are_compiled_too() -> None:
    found = time_left(kinds=3)
    found.begin(20.0)
    for second in range(20, 31):
        found.advance(10.0, float(second))
    assert found.seconds(30.0) == pytest.approx(2 * 20 + 89, rel=0.01)
    found.begin(50.0)
    for second in range(50, 61):
        found.advance(10.0, float(second))
    assert found.seconds(60.0) == pytest.approx(20 + 78, rel=0.1)


def test_the_end_is_the_end_however_many_marks_there_were() -> None:
    found = time_left()
    found.begin(1.0)
    for step in range(1000):
        found.advance(1.0, 1.0 + step / 100)
    assert found.seconds(12.0) == 0.0
    assert len(found._marks) <= 201


def test_a_tile_that_comes_whole_is_no_basis() -> None:
    """As from Dask workers: all steps at once, with the time that was compiled in."""
    found = time_left()
    found.begin(60.0)
    found.advance(500.0, 60.0)
    assert found.seconds(90.0) is None
    found.advance(100.0, 100.0)
    assert found.seconds(100.0) == pytest.approx(160.0)


def test_programs_that_are_compiled_in_mid_run_are_not_taken_for_slow_work() -> None:
    """A second per unit, and twenty for one in ten of them."""
    found, now = time_left(), 10.0
    found.begin(now)
    for step in range(100):
        now += 20.0 if step % 10 == 5 else 1.0
        found.advance(1.0, now)
        if step > 5:
            assert found.seconds(now) == pytest.approx(1000 - step, rel=0.02), step


def test_one_long_wait_in_a_short_run_is_not_the_rate() -> None:
    """As in a study whose intervals are read for the first time after six tenths of its steps."""
    found = time_left()
    found.begin(10.0)
    for step in range(60):
        found.advance(10.0, 10.0 + step / 20)
    found.advance(40.0, 24.0)
    assert found.seconds(24.0) == pytest.approx(360 / 200, rel=0.1)
