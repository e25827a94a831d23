"""One pass over a file that need not fit in memory; start with `fit_stream`.

Threads read blocks and make chunks of one size ahead of the run: rows whitened, sorted by client, in a random
order. The means of columns are taken off in float64, as they may be large, and what is left is kept in float32.
Scales and whitening are then one product of matrices.
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
from jaxlsgd.core.products import times
from jaxlsgd.core.progress import Report
from jaxlsgd.regression import files, local_sgd, pilot
from jaxlsgd.regression.design import (
    Block,
    Columns,
    Design,
    Model,
    client_counts,
    extra,
    first_rows,
    plain_design,
    read_columns,
)
from jaxlsgd.regression.in_memory import DIVERGED, fit_block
from jaxlsgd.regression.local_sgd import Hosted, on_host
from jaxlsgd.regression.options import METHODS, STEPS, Options, no_interval
from jaxlsgd.regression.pilot import Whitened, start_from
from jaxlsgd.regression.result import Along, Finished, MethodReading, TableFit, assemble, read
from jaxlsgd.regression.standardise import by_client, remarks

FloatArray = NDArray[np.floating[Any]]
CHUNK = 1 << 16  # rows
CHUNK_STEPS = 60
PILOT_ROWS = 100_000
_RETRIES = 3
_LOOK_EVERY = 16  # chunks
_AT_ONCE = 2  # chunks that XLA has, so that it need not wait
_FIRST_READING = 2  # chunks; each of the others after twice as many
_BLOCKS_AHEAD = 3
_CHUNKS_AHEAD = 3 << 26  # bytes
_UNLIKE = 0.5  # a chunk may have that much less or more of a client than the pilot, in its share
_EIGHT = 8  # numbers that a core multiplies at once
_SHUFFLE = "; shuffle its rows, or read it whole with stream=False"


def fit_stream(
    path: str | Path,
    model: Model,
    options: Options,
    report: Report | None,
    dialect: files.Dialect = files.Dialect(),  # noqa: B008
) -> TableFit:
    """Fit a file in one pass.

    Args:
      path: of the file.
      model: the columns.
      options: of the fit.
      report: called with the share of the rows that were met, after every chunk, or None.
      dialect: of a CSV file.
    """
    if options.target == "sample":
        raise refusal(
            "target", "be population for a file that is read once", options.target, code="conflict"
        )
    for name, plain in (("variance", "clients"), ("clients", "given")):
        if getattr(options, name) != plain:
            rule = f"be {plain} for a file that is read once"
            raise refusal(
                name, rule, getattr(options, name), "; or give stream=False", code="unsupported"
            )
    if not options.methods and not options.by_default:
        raise refusal("methods", "have one for a file that is read once", (), code="missing")
    given, methods = options, options.methods or (METHODS["one_step"],)
    options = dataclasses.replace(options, rows="fresh", methods=methods)
    path = Path(path)
    source = _ahead(files.blocks(path, dialect), _BLOCKS_AHEAD)
    first = _pilot_blocks(source)
    table = extra("pyarrow").Table.from_batches(first).slice(0, PILOT_ROWS)
    if table.num_rows < PILOT_ROWS:
        return _fit_whole(*first_rows(table, model), given, report)
    compiling = threading.Thread(target=_compiler(table, model, options))
    compiling.start()
    plan, block = first_rows(table, model)
    rows = by_client(plan, block, options)
    space = start_from(plan, rows, options)
    total = files.rows_of(path, table)
    blocks = itertools.chain(first, source)
    for retry in range(_RETRIES):
        stream = _Stream(plan, space, options, total, 4.0**-retry, report or (lambda share: None))
        found = stream.go(blocks, compiling)
        if found is not None:
            notes, chunks = remarks(rows, options), stream.chunks
            if stream.stopped:
                notes.append(
                    f"stopped when all intervals were at most {options.until:g} to either side, after "
                    f"{int(found.sizes.sum()):,} of about {total:,} rows"
                )
            elif options.until is not None:
                notes.append(f"not all intervals are at most {options.until:g} to either side")
            if chunks.stub:
                notes.append(f"the last {chunks.stub:,} rows of the file were too few for a chunk")
            return assemble(plan, options, space, found, chunks.dropped, notes, part=True)
        blocks = files.blocks(path, dialect)
    raise no_interval(options.first, DIVERGED, options, stream=True)


def _fit_whole(plan: Design, block: Block, options: Options, report: Report | None) -> TableFit:
    """Fit a file that was read to its end by the pilot: by Newton's method, or by the methods that were asked for."""
    if options.methods and not options.by_default:
        sizes = np.unique(block.client.astype(str), return_counts=True)[1]
        enough = len(sizes) and sizes.min() >= STEPS  # for one pass
        options = dataclasses.replace(options, rows="fresh" if enough else "reused")
    else:
        options = dataclasses.replace(options, rows="reused", methods=())
    found = fit_block(plan, block, options, report)
    if options.until is None:
        return found
    note = f"not stopped before its end: a file of fewer than {PILOT_ROWS:,} rows is read whole, whatever until is"
    return dataclasses.replace(found, warnings=(*found.warnings, note))


def _ahead(source: Iterator[Any], count: int) -> Iterator[Any]:
    """Yield the same, with the next few made in a thread while one is used."""
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
        raise refusal("file", "have rows", "none", code="data")
    return taken


class _Stream:
    """One pass, chunk after chunk."""

    def __init__(
        self,
        plan: Design,
        space: Whitened,
        options: Options,
        total: int,
        slower: float,
        report: Report,
    ) -> None:
        self.space, self.options = space, options
        self.total, self.slower, self.report = total, slower, report
        share = space.rows.sizes / space.rows.sizes.sum()
        sizes = np.maximum(1, (share * total).astype(np.int64))
        chunks = max(1, total // CHUNK)
        batches = (
            share * CHUNK / CHUNK_STEPS
        )  # below 1 for a client that stands still in some steps
        rule = space.rule(sizes, batches, chunks * CHUNK_STEPS, options)
        self.rule = rule._replace(eta=rule.eta * slower)
        shape = _Shape.of(share, CHUNK, CHUNK_STEPS, rule.E)
        size = 4 * shape.rounds * rule.E * shape.width * len(share) * (len(space.W) + 1)
        self.ahead = max(2, min(32, _CHUNKS_AHEAD // size))
        self.chunks = _Chunks(plan, space, shape, options.seed)
        self.carried = local_sgd.Carried(None, ())  # before the first chunk
        self.hosted = Hosted(options.methods, space.start) if on_host(options.methods) else None
        self.setting = local_sgd.setting(space)
        self.met = np.zeros(len(share), np.int64)
        self.running: collections.deque[tuple[Any, Any, Any]] = collections.deque()
        self.rounds = 0
        self.stopped = False
        self.along: list[Along] = []

    def go(self, blocks: Iterator[Any], compiling: threading.Thread) -> Finished | None:
        """Run over all rows; return None if the run diverged."""
        due = _FIRST_READING
        for number, chunk in enumerate(_ahead(self.chunks.of(blocks), self.ahead), start=1):
            if number == 1:  # meanwhile, further chunks are made
                compiling.join()
                inside = () if self.hosted else self.options.methods
                self.carried = local_sgd.start(inside, self.space.start)
            self._run(chunk)
            met = int(self.met.sum())
            self.report(min(0.99, met / self.total))
            if number % _LOOK_EVERY == 0 and not np.isfinite(self.carried.x).all():
                return None
            if number == due:
                due *= 2
                self.along.append(Along.at(self.space, self._read()[0], self.rounds))
            if self.options.until is not None and number >= _FIRST_READING and self._is_sure():
                self.stopped = True
                break
        self.report(1.0)
        readings = self._read()
        if not np.isfinite(readings[0].estimate).all():
            return None
        last = Along.at(self.space, readings[0], self.rounds)
        self.along = [*(one for one in self.along if one.round < last.round), last]
        return Finished(
            readings=readings,
            finished=[],
            sizes=self.met,
            along=self.along,
            rounds=self.rounds,
            passes=1,
            rule=self.rule,
            share=0.0,
            slower=self.slower,
        )

    def _is_sure(self) -> bool:
        """Return whether all intervals of the first method are short enough, on the scale of the table."""
        reading, goal = self._read()[0], self.options.until
        error = Along.at(self.space, reading, self.rounds).run_error
        half = reading.multiplier(self.options.level) * error
        return goal is not None and bool(np.all(np.isfinite(half)) and np.all(half <= goal))

    def _read(self) -> list[MethodReading]:
        while self.running:
            self._finish()
        plan = local_sgd.plan_of(self.rule, self.rounds)
        states = self.hosted.states if self.hosted else self.carried.states
        pairs = zip(self.options.methods, states, strict=True)
        return [read(method, state, plan) for method, state in pairs]

    def _run(self, chunk: _Chunk) -> None:
        setting, sizes, sums = self.setting, chunk.sizes, chunk.sums
        if self.options.weights == "size":
            setting = setting._replace(weights=(sums / sums.sum()).astype(np.float32))
        rounds = len(chunk.batches.A) // self.rule.E
        eta = local_sgd.etas(self.rule, self.rounds, rounds)
        self.carried, results = local_sgd.run_batches(
            self.options.family.loss,
            self.options.methods,
            chunk.batches,
            setting,
            eta,
            self.carried,
            self.hosted is not None,
        )
        self.rounds += rounds
        self.met += sizes
        self.running.append((results, eta, chunk.batches.A))
        if len(self.running) > _AT_ONCE:
            self._finish()

    def _finish(self) -> None:
        """Wait for the oldest chunk of those that XLA has."""
        results, eta, room = self.running.popleft()
        results = jax.block_until_ready(results)
        self.chunks.spare.append(room)
        if self.hosted:
            self.hosted.update(self.rule.E, eta, results)


class _Chunk(NamedTuple):
    """Rows of a file, ready for a run."""

    batches: local_sgd.Batches
    sizes: NDArray[np.int64]  # (K,) rows of clients
    sums: NDArray[Any]  # (K,) of their weights


class _Shape(NamedTuple):
    """Sizes of a chunk and of its steps."""

    rows: int  # of a chunk
    rounds: int
    E: int
    width: int  # room for rows of a client in a step

    @classmethod
    def of(cls, share: FloatArray, rows: int, steps: int, E: int) -> _Shape:
        """Return the shape for clients with these shares of the rows.

        Sizes differ by chance from chunk to chunk. There is room for that, so that chunks share one program.
        """
        longest, rounds = rows * float(np.max(share)), steps // E
        return cls(rows, rounds, E, cls.wide(longest + 5 * np.sqrt(longest) + 1, rounds * E))

    @staticmethod
    def wide(longest: float, steps: int) -> int:
        """Return the room for a client with that many rows."""
        return -(-int(np.ceil(longest / steps)) // _EIGHT) * _EIGHT


class _Chunks:
    """Makes chunks of the blocks of a file."""

    def __init__(self, plan: Design, space: Whitened, shape: _Shape, seed: int) -> None:
        self.plan, self.space, self.shape = plan, space, shape
        self.share = space.rows.sizes / space.rows.sizes.sum()
        self.known = {label: k for k, label in enumerate(space.rows.labels)}
        self.rng = np.random.default_rng([seed, 2])
        scale = space.rows.coordinates.scale
        # Scales go into W if float32 has room for their inverses and for products with them.
        self.before = np.where((scale > 1e-15) & (scale < 1e15), 1.0, scale)
        self.W = (space.W * (self.before / scale)[:, None]).astype(np.float32)
        # Sorting integers of 16 bits is by counting.
        self.kind = np.int16 if len(self.known) < 1 << 15 else np.int64
        self.filled = _Filled(shape.rows, len(self.W), self.kind)
        self.A = np.empty((shape.rows + 1, len(self.W)), np.float32)
        self.spare: list[FloatArray] = []  # arrays of chunks that a run is done with
        self.dropped = self.stub = self.seen = 0

    def of(self, blocks: Iterator[Any]) -> Iterator[_Chunk]:
        """Yield chunks of one size; the last has what is left."""
        filled, first_row, family = self.filled, 0, self.space.objective.family
        for batch in blocks:
            columns = read_columns(self.plan, batch, first_row)
            first_row += batch.num_rows
            self.dropped += columns.dropped
            family.check_range(self.plan.response, columns.y)
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
        """Take means off as many rows as there is room for; return how many."""
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
        y, offset = columns.y[taken], columns.offset
        if offset is not None and self.space.objective.family.scaled:
            y = y - offset[taken]
        elif offset is not None:
            filled.offset[room] = offset[taken]
        if columns.weight is not None:
            filled.weight[room] = columns.weight[taken]
        filled.y[room] = frame.response(y)
        filled.place[room] = place[taken]
        filled.count += count
        return count

    def _places(self, columns: Columns) -> NDArray[Any]:
        """Return the number of each row's client; refuse one that the first rows do not have."""
        table = np.array([self.known.get(label, -1) for label in columns.labels], self.kind)
        places = table[columns.codes]
        if (table < 0).any() and (places < 0).any():
            strange = columns.labels[columns.codes[np.argmax(places < 0)]]
            rule = f"be in random order: client {strange!r} is not among the first rows"
            raise refusal("file", rule, f"{self.seen:,} rows without", _SHUFFLE, code="data")
        return places

    def _chunk(self, filled: _Filled) -> _Chunk:
        n, (_, rounds, E, width) = filled.count, self.shape
        sizes = np.bincount(filled.place[:n], minlength=len(self.share))
        self._check_alike(sizes)
        self.seen += n
        steps, A = rounds * E, self._whitened(filled.X[:, :n])
        y = np.append(filled.y[:n], np.float32(0))
        width = max(width, _Shape.wide(int(sizes.max()), steps))
        by_client = np.argsort(filled.place[:n], kind="stable")
        index, weight = local_sgd.dealt(self.rng, by_client, sizes, steps, width)
        room = self.spare.pop() if self.spare else None
        if room is None or room.shape[2] != width:
            room = np.empty((*index.shape, A.shape[1]), np.float32)
        np.take(A, index, axis=0, mode="clip", out=room)
        place, sums, each, offset = filled.place[:n], sizes, None, None
        if self.plan.row_weights is not None:
            sums = np.bincount(place, filled.weight[:n], minlength=len(sizes))
            scaled = filled.weight[:n] * (sizes / np.maximum(sums, 1e-300))[place]
            each = np.take(np.append(scaled, 0).astype(np.float32), index, mode="clip")
        if self.space.rows.offset is not None:
            offset = np.take(np.append(filled.offset[:n], np.float32(0)), index, mode="clip")
        batches = local_sgd.Batches(room, np.take(y, index, mode="clip"), weight, each, offset)
        return _Chunk(batches, sizes, sums)

    def _whitened(self, X: FloatArray) -> FloatArray:
        """Return whitened rows, (n + 1, d); the last, of zeros, is for padding."""
        n = X.shape[1]
        A = self.A[: n + 1]
        times(X.T, self.W, out=A[:n])
        A[n] = 0
        return A

    def _check_alike(self, sizes: NDArray[np.int64]) -> None:
        """Refuse a chunk that is unlike the first rows: a file in order of clients."""
        found = sizes / sizes.sum()
        noise = 6 * np.sqrt(self.share * (1 - self.share) / sizes.sum())
        unlike = np.abs(found - self.share) > _UNLIKE * self.share + noise
        if unlike.any():
            k = int(np.argmax(unlike))
            name = self.space.rows.labels[k]
            what = f"{100 * found[k]:.2g} % after row {self.seen:,}"
            rule = f"be in random order: {100 * self.share[k]:.2g} % of the first rows are of client {name!r}"
            raise refusal("file", rule, what, _SHUFFLE, code="data")


class _Filled:
    """A chunk in the making, used again for the next."""

    def __init__(self, rows: int, d: int, kind: Any) -> None:
        self.X = np.empty((d, rows), np.float32)  # means taken off
        self.y = np.empty(rows, np.float32)
        self.place: NDArray[Any] = np.empty(rows, kind)  # of each row's client
        self.weight = np.ones(rows)
        self.offset = np.zeros(rows, np.float32)
        self.count = 0


def _compiler(table: Any, model: Model, options: Options) -> Callable[[], Any] | None:
    """Return a function that compiles the programs, for a thread; None if it needs pandas to learn their shapes.

    Args:
      table: first rows, Arrow's.
      model: the columns.
      options: of the fit.
    """
    plan = plain_design(table.schema, model)
    counts = None if plan is None else client_counts(plan, table)
    if plan is None or counts is None:
        return None
    d = len(plan.names)
    E = pilot.LOCAL_STEPS if options.local_steps is None else options.local_steps
    shape = _Shape.of(counts / counts.sum(), CHUNK, CHUNK_STEPS, E)
    each = (shape.rounds * E, len(counts), shape.width)
    weight = None if plan.row_weights is None else _floats(*each)
    shifts = (plan.offset or plan.exposure) and not options.family.scaled
    offset = _floats(*each) if shifts else None
    batches = local_sgd.Batches(
        _floats(*each, d), _floats(*each), _floats(len(counts)), weight, offset
    )
    setting = local_sgd.Setting(
        _floats(len(counts)), _floats(len(options.family.in_units)), _floats(d, d)
    )
    # Tracing holds Python's lock, so that only compiling is left to the thread.
    outside = on_host(options.methods)
    inside = () if outside else options.methods
    starting = local_sgd.init.lower(inside, _floats(d))
    states = jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype), starting.out_info)
    meeting = local_sgd.run_batches.lower(
        options.family.loss,
        options.methods,
        batches,
        setting,
        _floats(shape.rounds),
        local_sgd.Carried(_floats(d), states),
        outside,
    )
    return lambda: (meeting.compile(), starting.compile())


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.float32)
