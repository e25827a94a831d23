"""Tables of finite-horizon critical values, in a process-wide cache.

A study records the table rows that its tiles use (`recording`), keeps them beside the tiles' rows, and restores
them (`remember`) in later processes. Start reading at `interpolated`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import RectBivariateSpline

from jaxlsgd.core.checks import refusal
from jaxlsgd.inference.laws import finite_horizon
from jaxlsgd.inference.laws.finite_horizon import FloatArray
from jaxlsgd.schedules import Plan

Rows = dict[str, NDArray[np.float64]]  # by plan, level and eigenvalues; never NaN

_MOST = 100_000
_cache: Rows = {}
_lock = threading.Lock()
_here = threading.local()


def cached(key: str) -> NDArray[np.float64] | None:
    """Return the cached row of a key, or None."""
    with _lock:
        found = _cache.get(key)
    if found is not None:
        _note(key, found)
    return found


def remember(rows: Mapping[str, NDArray[np.float64]]) -> None:
    """Put rows into the cache; beyond 100,000 of them the oldest are removed."""
    with _lock:
        _cache.update(rows)
        for key in list(_cache)[: max(0, len(_cache) - _MOST)]:
            del _cache[key]
    for key, values in rows.items():
        _note(key, values)


def forget(keys: Iterable[str]) -> None:
    """Remove rows from the cache."""
    with _lock:
        for key in keys:
            _cache.pop(key, None)


@contextlib.contextmanager
def recording(used: Rows) -> Iterator[None]:
    """Add to `used` all rows that this thread reads from or puts into the cache meanwhile."""
    before = getattr(_here, "used", None)
    _here.used = used
    try:
        yield
    finally:
        _here.used = before


def _note(key: str, values: NDArray[np.float64]) -> None:
    used: Rows | None = getattr(_here, "used", None)
    if used is not None:
        used[key] = values


# Knots in log λ and in the start's bias over the standard error.
_EIGENVALUE_STEP = 0.5 * np.log(2.0)
# Dense near 0: a slow direction's critical value falls steeply with the bias.
_BIASES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0)

# Tiles of one cell, each in its own thread, need the same table at the same time.
_making = threading.Lock()


def interpolated(
    plan: Plan, eigenvalues: FloatArray, biases: FloatArray, level: float
) -> FloatArray:
    """Return critical values for every direction of many runs.

    A bicubic spline in log λ and the bias, linear in the logarithm of the start's fading rate, which is
    the run's largest eigenvalue. At levels from 80 to 99 % the interpolation error was measured as less
    than 0.1 % if the path is nearly stationary, at most 2 % for biases up to 1 and 4 % beyond; up to
    5 % for 20 rounds and up to 20 % for ten. A bias above 6 is replaced by 6.

    Args:
      plan: the plan that was run.
      eigenvalues: λ > 0, (..., d).
      biases: bias that the start leaves in ȳ_T, over its standard deviation, (..., d).
      level: confidence level.

    Returns:
      Critical values (..., d); NaN for a run whose eigenvalues are not positive and finite, infinite
      if the plan's first steps are so long that the path overflows.
    """
    if plan.num_rounds < 2:
        raise refusal("plan", "have at least 2 rounds", plan.num_rounds)
    values, shift = np.broadcast_arrays(
        np.asarray(eigenvalues, np.float64), np.abs(np.asarray(biases, np.float64))
    )
    shift = np.minimum(shift, _BIASES[-1])
    result = np.full(values.shape, np.nan)
    good = np.all(np.isfinite(values) & (values > 0) & np.isfinite(shift), axis=-1)
    place = np.log(np.where(good[..., None], values, 1.0)) / _EIGENVALUE_STEP
    fastest = np.floor(place.max(axis=-1)).astype(int)
    for knot in np.unique(fastest[good]):
        runs = good & (fastest == knot)
        share = (place[runs].max(axis=-1) - knot)[..., None]
        ends = [_spline(plan, place[runs], shift[runs], level, int(knot) + i) for i in (0, 1)]
        result[runs] = np.exp((1 - share) * ends[0] + share * ends[1])
    return result


def _spline(
    plan: Plan, place: FloatArray, shift: FloatArray, level: float, fastest: int
) -> FloatArray:
    low = int(np.floor(place.min())) - 1
    rows = range(low, max(low + 4, int(np.floor(place.max())) + 3))
    columns = _BIASES[: max(4, int(np.searchsorted(_BIASES, shift.max())) + 2)]
    table = table_rows(plan, level, rows, fastest)[:, : len(columns)]
    known = int(np.argmin(np.append(np.isfinite(table).all(axis=1), False)))
    if known < 4:
        return np.full(place.shape, np.inf)
    found = RectBivariateSpline(rows[:known], columns, np.log(table[:known])).ev(place, shift)
    return np.where(place <= rows[known - 1], found, np.inf)


def table_rows(plan: Plan, level: float, places: range, fastest: int) -> FloatArray:
    """Return critical values (places, biases) at eigenvalues exp(place · step).

    `fastest` is the place of a run's largest eigenvalue. Values are infinite if the path overflows, so that one
    such run does not end a batch.
    """
    keys = {place: _key(plan, level, place, fastest) for place in places}
    with _making:
        found = {place: cached(key) for place, key in keys.items()}
        missing = [place for place in places if found[place] is None]
        if missing:
            made = _made(plan, level, missing, fastest)
            remember({keys[place]: row for place, row in made.items()})
            found |= made
    return np.array([found[place] for place in places])


def _key(plan: Plan, level: float, place: int, fastest: int) -> str:
    # The name that the method had first: keys of tables that studies keep.
    return f"random_scaling[finite_horizon] {plan.digest} {level!r} {place} {fastest}"


def _made(plan: Plan, level: float, places: list[int], fastest: int) -> dict[int, FloatArray]:
    start = finite_horizon.start_path(plan, float(np.exp(fastest * _EIGENVALUE_STEP)))
    biases, rows = np.array(_BIASES), {}
    for place, noise in zip(places, _noises(plan, places), strict=True):
        rows[place] = np.full(biases.size, np.inf)
        if noise is not None:
            form = finite_horizon.quadratic_form(noise, start)
            rows[place] = np.asarray(finite_horizon.critical_value(form, biases, level))
    return rows


def _noises(plan: Plan, places: list[int]) -> list[finite_horizon.Noise | None]:
    """Return the forms' parts that do not depend on the start; None if the path overflows."""
    kept = _noises_of(plan)
    if missing := [place for place in places if place not in kept]:
        path = finite_horizon.paths(plan, np.exp(np.array(missing) * _EIGENVALUE_STEP))
        for place, covariance in zip(missing, path.covariance, strict=True):
            fine = np.isfinite(covariance).all()
            one = path._replace(covariance=covariance)
            kept[place] = finite_horizon.noise_form(one) if fine else None
    return [kept[place] for place in places]


@functools.lru_cache(maxsize=16)
def _noises_of(plan: Plan) -> dict[int, finite_horizon.Noise | None]:
    return {}
