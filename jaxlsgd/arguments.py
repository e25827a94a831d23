"""Arguments that come from people: each refusal names the argument, the rule and the value."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

LARGEST_INTERVAL = 2**31 - 1  # an interval is an int32 on the device


def must(argument: str, rule: str, value: object) -> str:
    """The sentence of a refusal."""
    return f"{argument} must {rule}; received {value!r}"


def real(argument: str, value: object, rule: str = "be finite", above: float = -math.inf) -> float:
    """A finite number greater than `above`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(must(argument, "be a number", value))
    number = float(value)
    if not (math.isfinite(number) and number > above):
        raise ValueError(must(argument, rule, value))
    return number


def integer(argument: str, value: object) -> int:
    """An integer of at least 1."""
    rule, number = "be an integer from 1 to 2**53", 0
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        number = int(value)
    else:
        real(argument, value, rule)
    if not 1 <= number <= 2**53:
        raise ValueError(must(argument, rule, value))
    return number


def positive(argument: str, value: object) -> float:
    """A finite number greater than 0."""
    return real(argument, value, "be finite and greater than 0", 0.0)


def positive_array(argument: str, values: ArrayLike) -> NDArray[Any]:
    """A non-empty vector of finite numbers greater than 0, whatever its dtype."""
    array = np.asarray(values)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(must(argument, "be a sequence that is not empty", values))
    # NumPy reads [2, True] as [2, 1].
    has_bool = isinstance(values, (list, tuple)) and any(isinstance(v, bool) for v in values)
    if has_bool or array.dtype.kind not in "iuf":
        raise TypeError(must(argument, "hold numbers only", "bool" if has_bool else array.dtype))
    good = np.isfinite(array) & (array > 0)
    if not good.all():
        first = int(good.argmin())
        raise ValueError(must(f"{argument}[{first}]", "be finite and > 0", array[first].item()))
    return array


def interval_array(argument: str, values: ArrayLike) -> NDArray[np.int64]:
    """A non-empty vector of integers from 1 to the largest interval."""
    array = positive_array(argument, values)
    good = (array == np.floor(array)) & (array <= LARGEST_INTERVAL)
    if not good.all():
        first, rule = int(good.argmin()), f"be an integer from 1 to {LARGEST_INTERVAL}"
        raise ValueError(must(f"{argument}[{first}]", rule, array[first].item()))
    return array.astype(np.int64)
