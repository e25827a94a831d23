"""Blocks of a file as columns of numbers: where Arrow has numbers already, they are not copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxlsgd.regression.design import INTERCEPT, Block, Design, extra

FloatArray = NDArray[np.floating[Any]]


class Columns(NamedTuple):
    """Some rows of a file."""

    features: Sequence[Any]  # d of them: (n,) numbers, or one number for all rows
    y: NDArray[Any]  # (n,)
    codes: NDArray[np.integer[Any]]  # (n,) which of the labels each row has
    labels: list[str]  # of clients
    dropped: int  # rows left out, as something was missing


def read_block(plan: Design, table: Any, first_row: int = 0) -> Block:
    """Rows of an Arrow table, by way of pandas.

    Args:
      plan: what is read.
      table: Arrow's.
      first_row: how many rows came before, for messages.
    """
    whole = table.select(list(plan.columns))
    if plan.missing == "drop":
        # Before pandas makes fractions of whole numbers with gaps among them, and 1.0 of the client 1.
        whole = whole.drop_null()
    block = plan.read(whole.to_pandas(), first_row)
    return block._replace(dropped=block.dropped + table.num_rows - whole.num_rows)


def read_columns(plan: Design, batch: Any, first_row: int = 0) -> Columns:
    """Rows of a batch; refuses what `Design.read` refuses."""
    arrow = extra("pyarrow")
    found = _plain(arrow, plan, batch)
    if found is not None:
        return found
    block = read_block(plan, arrow.Table.from_batches([batch]), first_row)
    codes, labels = extra("pandas").factorize(block.client)
    return Columns(block.X.T, block.y, codes, [str(one) for one in labels], block.dropped)


def _plain(arrow: Any, plan: Design, batch: Any) -> Columns | None:
    """Columns that are numbers without gaps; None where pandas must see to one of them."""
    if plan.spec is not None:
        return None
    y = _numbers(arrow, batch.column(plan.response))
    ones = plan.intercept
    names = [name for name in plan.names if name != INTERCEPT or not ones]
    features = [_numbers(arrow, batch.column(name)) for name in names]
    who = _clients(arrow, plan, batch)
    if y is None or who is None or any(column is None for column in features):
        return None
    return Columns([1.0, *features] if ones else features, y, *who, 0)


def _numbers(arrow: Any, column: Any) -> NDArray[Any] | None:
    """A column as it is in memory, if all of it is finite."""
    kind = column.type
    if arrow.types.is_boolean(kind):
        column = column.cast(arrow.uint8())
    elif not (arrow.types.is_integer(kind) or arrow.types.is_floating(kind)):
        return None
    if column.null_count:
        return None
    found = column.to_numpy(zero_copy_only=True)
    # A sum is cheaper than a look at each; one that overflows costs the way by pandas, and no more.
    with np.errstate(over="ignore", invalid="ignore"):
        return found if np.isfinite(found.sum()) else None


def _clients(arrow: Any, plan: Design, batch: Any) -> tuple[NDArray[Any], list[str]] | None:
    """Codes and labels, where Arrow's labels read as NumPy's do."""
    if plan.client is None:
        return np.zeros(batch.num_rows, np.int8), ["0"]
    column, types = batch.column(plan.client), arrow.types
    if not types.is_dictionary(column.type):
        column = column.dictionary_encode()
    kind = column.dictionary.type
    simple = types.is_integer(kind) or types.is_string(kind) or types.is_large_string(kind)
    if not simple or column.null_count or column.dictionary.null_count:
        return None
    labels = [str(one) for one in column.dictionary.to_pylist()]
    return column.indices.to_numpy(zero_copy_only=True), labels
