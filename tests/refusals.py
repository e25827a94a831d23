"""What a test expects of a refusal: which argument and why, whatever the words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jaxlsgd.core.checks import Code, Refusal
from jaxlsgd.study.store.files import StoreError

Why = tuple[Any, ...]  # the arguments of `refused`, in tables of cases


@contextmanager
def refused(
    argument: str | Path,
    code: Code = "value",
    *named: str,
    kind: type[Refusal | StoreError] = Refusal,
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Expect a refusal of this argument, or file, for this reason inside.

    Args:
      named: what its words must name, such as a value, a file or the name that was meant.
    """
    with pytest.raises(kind) as caught:
        yield caught
    text = str(caught.value)
    assert (caught.value.argument, caught.value.code) == (str(argument), code), text
    assert [name for name in named if name not in text] == [], text
