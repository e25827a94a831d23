"""Blocks of a file as columns of numbers: where Arrow has numbers already, they are not copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxlsgd.regression.design import INTERCEPT, MISSING, Block, Design, design, extra

_NEAR = 1024  # whole numbers within that range are codes already
FloatArray = NDArray[np.floating[Any]]


class Columns(NamedTuple):
    """Some rows of a file."""

    features: Sequence[Any]  # d of them: (n,) numbers, or one number for all rows
    y: NDArray[Any]  # (n,)
    codes: NDArray[np.integer[Any]]  # (n,) which of the labels each row has
    labels: list[str]  # of clients; some may have no row
    dropped: int  # rows left out, as something was missing


def first_rows(table: Any, how: tuple[Any, ...]) -> tuple[Design, Block]:
    """What is read of a file, and its first rows.

    Args:
      table: the first rows, Arrow's.
      how: arguments of `design` after the table.
    """
    arrow = extra("pyarrow")
    plan = plain_design(table.schema, *how)
    if plan is None:
        plan = design(table.to_pandas(), *how)
        return plan, read_block(plan, table)
    whole = table.combine_chunks().to_batches()[0]
    found = _plain(arrow, plan, whole)
    if found is None:
        return plan, read_block(plan, table)
    n = len(found.y)
    X = np.stack([np.broadcast_to(column, n) for column in found.features], axis=1)
    labels = np.asarray(found.labels, object)[found.codes]
    if plan.client is not None and arrow.types.is_integer(table.schema.field(plan.client).type):
        labels = np.from_dlpack(whole.column(plan.client))
    return plan, Block(X.astype(np.float64, copy=False), found.y.astype(np.float64), labels, 0)


def plain_design(
    schema: Any,
    response: str | None,
    client: str | None,
    features: Sequence[str] | None = None,
    formula: str | None = None,
    intercept: bool = True,
    missing: str = "refuse",
) -> Design | None:
    """What `design` works out, where columns are numbers and nothing is to be refused; else None.

    It spares a file of numbers pandas, which takes longer to import than a million rows to read.
    """
    types, names = extra("pyarrow").types, schema.names
    if formula is not None or missing not in MISSING or len(set(names)) < len(names):
        return None
    if response == client or not {response, client, *(features or ())} <= {None, *names}:
        return None
    chosen = [one for one in names if one not in (response, client)]
    chosen = chosen if features is None else list(features)
    named = ((INTERCEPT,) if intercept else ()) + tuple(chosen)
    if response is None or not chosen or len(set(named)) < len(named):
        return None
    kinds = [schema.field(name).type for name in (response, *chosen)]
    if not all(types.is_integer(one) or types.is_floating(one) for one in kinds):
        return None
    columns = (response, *(() if client is None else (client,)), *chosen)
    return Design(response, client, named, columns, missing, None, intercept)


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
    return Columns([*block.X.T], block.y, codes, [str(one) for one in labels], block.dropped)


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
    found = np.from_dlpack(column)
    # A sum is cheaper than a look at each; one that overflows costs the way by pandas, and no more.
    with np.errstate(over="ignore", invalid="ignore"):
        return found if np.isfinite(found.sum()) else None


def client_counts(plan: Design, table: Any) -> NDArray[np.integer[Any]] | None:
    """How many rows each client has, in no order; None where labels need pandas."""
    found = _clients(extra("pyarrow"), plan, table.combine_chunks().to_batches()[0])
    if found is None:
        return None
    counts = np.bincount(found[0])
    return counts[counts > 0]


def _clients(arrow: Any, plan: Design, batch: Any) -> tuple[NDArray[Any], list[str]] | None:
    """Codes and labels, where Arrow's labels read as NumPy's do."""
    if plan.client is None:
        return np.zeros(batch.num_rows, np.int8), ["0"]
    column, types = batch.column(plan.client), arrow.types
    if types.is_integer(column.type) and not column.null_count and len(column):
        values: Any = np.from_dlpack(column)
        low, high = int(values.min()), int(values.max())
        if high - low < _NEAR:
            return values - low, [str(one) for one in range(low, high + 1)]
    if not types.is_dictionary(column.type):
        column = column.dictionary_encode()
    kind = column.dictionary.type
    simple = types.is_integer(kind) or types.is_string(kind) or types.is_large_string(kind)
    if not simple or column.null_count or column.dictionary.null_count:
        return None
    labels = [str(one) for one in column.dictionary.to_pylist()]
    return np.from_dlpack(column.indices), labels
