"""Rows of a file in chunks of one size, whitened, sorted by client and in a random order.

The means of a chunk's columns are taken off in float64, as they may be large, and what is left is kept in
float32. Scales and whitening are then one product of matrices.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from jaxlsgd.core.checks import refusal
from jaxlsgd.regression import files, local_sgd, pilot
from jaxlsgd.regression.design import (
    Columns,
    Design,
    client_counts,
    extra,
    first_rows,
    plain_design,
    read_columns,
)
from jaxlsgd.regression.in_memory import (
    DIVERGED,
    Along,
    Finished,
    Reading,
    Whitened,
    etas,
    plan_of,
    read,
)
from jaxlsgd.regression.local_sgd import Hosted, on_host
from jaxlsgd.regression.losses import Family, check_range
from jaxlsgd.regression.options import Options
from jaxlsgd.regression.pilot import start_from
from jaxlsgd.regression.result import TableFit, assemble
from jaxlsgd.regression.standardise import by_client, remarks, times

FloatArray = NDArray[np.floating[Any]]
_UNLIKE = 0.5  # a chunk may have that much less or more of a client than the pilot, in its share
_EIGHT = 8  # numbers that a core multiplies at once
_SHUFFLE = "; shuffle its rows, or read it whole with stream=False"


class Chunk(NamedTuple):
    """What a run meets of a chunk."""

    batches: local_sgd.Batches
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
        index, weight = local_sgd.dealt(self.rng, by_client, sizes, steps, width)
        room = self.spare.pop() if self.spare else None
        if room is None or room.shape[2] != width:
            room = np.empty((*index.shape, A.shape[1]), np.float32)
        np.take(A, index, axis=0, mode="clip", out=room)
        return Chunk(local_sgd.Batches(room, np.take(y, index, mode="clip"), weight), sizes)

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


def programs(
    table: Any, how: tuple[Any, ...], asked: Options, rows: int, steps: int
) -> Callable[[], Any] | None:
    """What compiles the programs, for a thread; None where their shapes cannot be told.

    Args:
      table: first rows, Arrow's.
      how: arguments of `design` after the table.
      asked: what is asked for.
      rows: of a chunk.
      steps: of a chunk.
    """
    plan = plain_design(table.schema, *how)
    counts = None if plan is None else client_counts(plan, table)
    if plan is None or counts is None:
        return None
    d = len(plan.names)
    E = pilot.LOCAL_STEPS if asked.local_steps is None else asked.local_steps
    shape = Shape.of(counts / counts.sum(), rows, steps, E)
    each = (shape.rounds * E, len(counts), shape.width)
    batches = local_sgd.Batches(_floats(*each, d), _floats(*each), _floats(len(counts)))
    setting = local_sgd.Setting(
        _floats(len(counts)), _floats(len(asked.family.in_units)), _floats(d, d)
    )
    # Tracing needs Python, so that only the rest is for a thread.
    outside = on_host(asked.methods)
    inside = () if outside else asked.methods
    starting = local_sgd.init.lower(inside, _floats(d))
    states = jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype), starting.out_info)
    meeting = local_sgd.run_batches.lower(
        asked.family.derivatives,
        asked.methods,
        batches,
        setting,
        _floats(shape.rounds),
        local_sgd.Carried(_floats(d), states),
        outside,
    )
    return lambda: (meeting.compile(), starting.compile())


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.float32)


CHUNK = 1 << 16  # rows
CHUNK_STEPS = 60
PILOT_ROWS = 100_000
_LOOK_EVERY = 16  # chunks
_AT_ONCE = 2  # chunks that XLA has, so that it need not wait
_FIRST_READING = 2  # chunks; each of the others after twice as many
_BLOCKS_AHEAD = 3
_CHUNKS_AHEAD = 3 << 26  # bytes

Fit = Callable[..., TableFit]


def fit_stream(
    path: str | Path, how: tuple[Any, ...], asked: Options, fit_block: Fit, progress: Any
) -> TableFit:
    """Fits a file in one pass.

    Args:
      path: of the file.
      how: arguments of `design` after the table.
      asked: what is asked for.
      fit_block: for a file with fewer rows than the pilot takes.
      progress: called with a line of text after every chunk, or None.
    """
    if asked.target == "sample":
        raise refusal("target", "be population for a file that is read once", asked.target)
    asked = dataclasses.replace(asked, rows="one pass")
    path = Path(path)
    source = _ahead(files.blocks(path), _BLOCKS_AHEAD)
    first = _pilot_blocks(source)
    table = extra("pyarrow").Table.from_batches(first).slice(0, PILOT_ROWS)
    if table.num_rows < PILOT_ROWS:
        plan, block = first_rows(table, how)
        return fit_block(plan, block, asked, progress)
    warming = threading.Thread(target=programs(table, how, asked, CHUNK, CHUNK_STEPS))
    warming.start()
    plan, block = first_rows(table, how)
    rows = by_client(plan, block, asked)
    loss, theta, exchanges = start_from(plan, rows, asked)
    space = Whitened(rows, loss, theta)
    total = files.rows_of(path, table)
    blocks = itertools.chain(first, source)
    for retry in range(3):
        stream = _Stream(plan, space, asked, total, 4.0**-retry, progress or (lambda text: None))
        found = stream.go(blocks, warming)
        if found is not None:
            notes, chunks = remarks(rows, asked), stream.chunks
            if chunks.stub:
                notes.append(f"the last {chunks.stub:,} rows of the file were too few for a chunk")
            return assemble(plan, asked, space, found, exchanges, chunks.dropped, notes)
        blocks = files.blocks(path)
    raise RuntimeError(DIVERGED)


def _ahead(source: Iterator[Any], count: int) -> Iterator[Any]:
    """The same, with the next few made in a thread while one is used."""
    pool = concurrent.futures.ThreadPoolExecutor(1)
    try:
        coming = collections.deque(pool.submit(next, source, None) for _ in range(count))
        while (one := coming.popleft().result()) is not None:
            coming.append(pool.submit(next, source, None))
            yield one
    finally:
        pool.shutdown(cancel_futures=True)


def _pilot_blocks(source: Iterator[Any]) -> list[Any]:
    taken, count = [], 0
    for batch in source:
        taken.append(batch)
        count += batch.num_rows
        if count >= PILOT_ROWS:
            break
    if not taken:
        raise refusal("file", "have rows", "none")
    return taken


class _Stream:
    """One pass, chunk after chunk."""

    def __init__(
        self,
        plan: Design,
        space: Whitened,
        asked: Options,
        total: int,
        slower: float,
        progress: Callable[[str], None],
    ) -> None:
        self.space, self.asked = space, asked
        self.total, self.slower, self.progress = total, slower, progress
        share = space.rows.sizes / space.rows.sizes.sum()
        sizes = np.maximum(1, (share * total).astype(np.int64))
        chunks = max(1, total // CHUNK)
        batches = np.maximum(1.0, share * CHUNK / CHUNK_STEPS)
        rule = space.rule(sizes, batches, chunks * CHUNK_STEPS, asked)
        self.rule = rule._replace(eta=rule.eta * slower)
        shape = Shape.of(share, CHUNK, CHUNK_STEPS, rule.E)
        size = 4 * shape.rounds * rule.E * shape.width * len(share) * (len(space.W) + 1)
        self.ahead = max(2, min(32, _CHUNKS_AHEAD // size))
        self.chunks = Chunks(plan, space, asked.family, shape, asked.seed)
        self.carried = local_sgd.Carried(None, ())  # before the first chunk
        self.hosted = Hosted(asked.methods, space.start) if on_host(asked.methods) else None
        self.setting = space.setting()
        self.met = np.zeros(len(share), np.int64)
        self.running: collections.deque[tuple[Any, Any, Any]] = collections.deque()
        self.rounds = 0
        self.along: list[Along] = []

    def go(self, blocks: Iterator[Any], warming: threading.Thread) -> Finished | None:
        """Runs over all rows; None where it diverged."""
        due = _FIRST_READING
        for number, chunk in enumerate(_ahead(self.chunks.of(blocks), self.ahead), start=1):
            if number == 1:  # others are made meanwhile
                warming.join()
                inside = () if self.hosted else self.asked.methods
                self.carried = local_sgd.start(inside, self.space.start)
            self._run(chunk)
            met = int(self.met.sum())
            self.progress(f"{met:,} of about {max(met, self.total):,} rows")
            if number % _LOOK_EVERY == 0 and not np.isfinite(self.carried.x).all():
                return None
            if number == due:
                due *= 2
                self.along.append(self.space.along(self._read()[0], self.rounds))
        self.progress("")
        readings = self._read()
        if not np.isfinite(readings[0].estimate).all():
            return None
        last = self.space.along(readings[0], self.rounds)
        self.along = [*(one for one in self.along if one.round < last.round), last]
        none = np.zeros((len(self.space.W), len(self.space.W)))
        return Finished(
            readings,
            [none] * len(readings),
            none[0],
            self.met,
            self.along,
            plan_of(self.rule, self.rounds),
            1,
            self.rule,
            0.0,
            self.slower,
        )

    def _read(self) -> list[Reading]:
        while self.running:
            self._finish()
        plan = plan_of(self.rule, self.rounds)
        states = self.hosted.states if self.hosted else self.carried.states
        pairs = zip(self.asked.methods, states, strict=True)
        return [read(method, state, plan) for method, state in pairs]

    def _run(self, chunk: Chunk) -> None:
        setting, sizes = self.setting, chunk.sizes
        if self.asked.weights == "size":
            setting = setting._replace(weights=(sizes / sizes.sum()).astype(np.float32))
        rounds = len(chunk.batches.A) // self.rule.E
        eta = etas(self.rule, self.rounds, rounds)
        self.carried, told = local_sgd.run_batches(
            self.space.loss.family.derivatives,
            self.asked.methods,
            chunk.batches,
            setting,
            eta,
            self.carried,
            self.hosted is not None,
        )
        self.rounds += rounds
        self.met += sizes
        self.running.append((told, eta, chunk.batches.A))
        if len(self.running) > _AT_ONCE:
            self._finish()

    def _finish(self) -> None:
        """Waits for the first chunk of those that XLA has."""
        told, eta, room = self.running.popleft()
        told = jax.block_until_ready(told)
        self.chunks.spare.append(room)
        if self.hosted:
            self.hosted.update(self.rule.E, eta, told)
