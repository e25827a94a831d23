"""What a test expects of a refusal: which argument and why, whatever the words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from jaxlsgd.core.checks import Code, Refusal


@contextmanager
def refused(argument: str, code: Code = "value") -> Iterator[pytest.ExceptionInfo[Any]]:
    """Expect a refusal of this argument for this reason inside."""
    with pytest.raises(Refusal) as caught:
        yield caught
    assert (caught.value.argument, caught.value.code) == (argument, code), str(caught.value)
