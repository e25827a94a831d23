"""Rows of a file in chunks of one size, whitened, sorted by client and in a random order.

The means of a chunk's columns are taken off in float64, as they may be large, and what is left is kept in
float32. Scales and whitening are then one product of matrices.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxlsgd.core.checks import refusal
from jaxlsgd.regression import running
from jaxlsgd.regression.columns import Columns, read_columns
from jaxlsgd.regression.design import Design
from jaxlsgd.regression.families import Family, check_range
from jaxlsgd.regression.looping import Whitened
from jaxlsgd.regression.products import times

FloatArray = NDArray[np.floating[Any]]
_UNLIKE = 0.5  # a chunk may have that much less or more of a client than the pilot, in its share
_EIGHT = 8  # numbers that a core multiplies at once
_SHUFFLE = "; shuffle its rows, or read it whole with stream=False"


class Chunk(NamedTuple):
    """What a run meets of a chunk."""

    batches: running.Batches
    sizes: NDArray[np.int64]  # (K,) rows of clients


class Shape(NamedTuple):
    """How a chunk is cut up."""

    rows: int  # of a chunk
    rounds: int
    E: int
    width: int  # rows of a client that a step has room for

    @classmethod
    def of(cls, share: FloatArray, rows: int, steps: int, E: int) -> Shape:
        """For clients with these shares of the rows.

        Sizes differ by chance from chunk to chunk. There is room for that, so that chunks share one program.
        """
        longest, rounds = rows * float(np.max(share)), steps // E
        return cls(rows, rounds, E, cls.wide(longest + 5 * np.sqrt(longest) + 1, rounds * E))

    @staticmethod
    def wide(longest: float, steps: int) -> int:
        """The room that a client with that many rows needs."""
        return -(-int(np.ceil(longest / steps)) // _EIGHT) * _EIGHT


class Chunks:
    """Makes chunks of the blocks of a file."""

    def __init__(
        self, plan: Design, space: Whitened, family: Family, shape: Shape, seed: int
    ) -> None:
        self.plan, self.space, self.family, self.shape = plan, space, family, shape
        self.share = space.rows.sizes / space.rows.sizes.sum()
        self.known = {label: k for k, label in enumerate(space.rows.labels)}
        self.rng = np.random.default_rng([seed, 2])
        scale = space.rows.coordinates.scale
        # Scales go into W where float32 has room for their inverses and for products with them.
        self.before = np.where((scale > 1e-15) & (scale < 1e15), 1.0, scale)
        self.W = (space.W * (self.before / scale)[:, None]).astype(np.float32)
        # Of few bits, as sorting is then by counting.
        self.kind = np.int16 if len(self.known) < 1 << 15 else np.int64
        self.filled = _Filled(shape.rows, len(self.W), self.kind)
        self.A = np.empty((shape.rows + 1, len(self.W)), np.float32)
        self.spare: list[FloatArray] = []  # arrays of chunks that a run is done with
        self.dropped = self.stub = self.seen = 0

    def of(self, blocks: Iterator[Any]) -> Iterator[Chunk]:
        """Chunks of one size; the last has what is left."""
        filled, first_row = self.filled, 0
        for batch in blocks:
            columns = read_columns(self.plan, batch, first_row)
            first_row += batch.num_rows
            self.dropped += columns.dropped
            check_range(self.family, self.plan.response, columns.y)
            place = self._places(columns)
            begin, n = 0, len(columns.y)
            while begin < n:
                begin += self._fill(filled, columns, place, begin)
                if filled.count == self.shape.rows:
                    yield self._chunk(filled)
                    filled.count = 0
        # A last chunk that is short is met in as many steps, of fewer rows; a stub would weigh too much.
        if filled.count >= self.shape.rows // 4:
            yield self._chunk(filled)
        else:
            self.stub = filled.count

    def _fill(self, filled: _Filled, columns: Columns, place: NDArray[Any], begin: int) -> int:
        """Takes means off what there is room for; returns how many rows that was."""
        frame, at = self.space.rows.coordinates, filled.count
        end = min(len(place), begin + self.shape.rows - at)
        count = end - begin
        taken, room = slice(begin, end), slice(at, at + count)
        for row, column, center, unit in zip(
            filled.X, columns.features, frame.center, self.before, strict=True
        ):
            values = column[taken] if np.ndim(column) else column
            if unit != 1.0:
                values, center = values / unit, center / unit
            np.subtract(values, center, out=row[room], dtype=np.float64, casting="same_kind")
        filled.y[room] = frame.response(columns.y[taken])
        filled.place[room] = place[taken]
        filled.count += count
        return count

    def _places(self, columns: Columns) -> NDArray[Any]:
        """Where each row's client stands among those of the first rows; refuses another."""
        table = np.array([self.known.get(label, -1) for label in columns.labels], self.kind)
        places = table[columns.codes]
        if (table < 0).any() and (places < 0).any():
            strange = columns.labels[columns.codes[np.argmax(places < 0)]]
            rule = f"be in random order: client {strange!r} is not among the first rows"
            raise refusal("file", rule, f"{self.seen:,} rows without", _SHUFFLE)
        return places

    def _chunk(self, filled: _Filled) -> Chunk:
        n, (_, rounds, E, width) = filled.count, self.shape
        sizes = np.bincount(filled.place[:n], minlength=len(self.share))
        self._check_alike(sizes)
        self.seen += n
        steps, A = rounds * E, self._whitened(filled.X[:, :n])
        y = np.append(filled.y[:n], np.float32(0))
        width = max(width, Shape.wide(int(sizes.max()), steps))
        by_client = np.argsort(filled.place[:n], kind="stable")
        index, weight = running.dealt(self.rng, by_client, sizes, steps, width)
        room = self.spare.pop() if self.spare else None
        if room is None or room.shape[2] != width:
            room = np.empty((*index.shape, A.shape[1]), np.float32)
        np.take(A, index, axis=0, mode="clip", out=room)
        return Chunk(running.Batches(room, np.take(y, index, mode="clip"), weight), sizes)

    def _whitened(self, X: FloatArray) -> FloatArray:
        """(n + 1, d) rows; the last, of zeros, stands for rows that are not there."""
        n = X.shape[1]
        A = self.A[: n + 1]
        times(X.T, self.W, out=A[:n])
        A[n] = 0
        return A

    def _check_alike(self, sizes: NDArray[np.int64]) -> None:
        """Refuses a chunk that is unlike the first rows: a file in order of clients."""
        found = sizes / sizes.sum()
        noise = 6 * np.sqrt(self.share * (1 - self.share) / sizes.sum())
        unlike = np.abs(found - self.share) > _UNLIKE * self.share + noise
        if unlike.any():
            k = int(np.argmax(unlike))
            name = self.space.rows.labels[k]
            what = f"{100 * found[k]:.2g} % after row {self.seen:,}"
            rule = f"be in random order: {100 * self.share[k]:.2g} % of the first rows are of client {name!r}"
            raise refusal("file", rule, what, _SHUFFLE)


class _Filled:
    """A chunk in the making, used again for the next."""

    def __init__(self, rows: int, d: int, kind: Any) -> None:
        self.X = np.empty((d, rows), np.float32)  # means taken off
        self.y = np.empty(rows, np.float32)
        self.place = np.empty(rows, kind)  # of each row's client
        self.count = 0
