"""A file that is read once, a block of rows at a time: one pass of Local SGD over fresh rows.

The first rows are the pilot's. All rows, the pilot's too, then come by in chunks. A chunk is put in a random
order, and a step takes its share of every client's rows in it. Each row is met once, so the run's own noise is
that of the sample, and its interval is about the population. What is kept does not grow with the file.

The file must be in random order: if it is sorted, say by client, later rows are unlike the first.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from jaxlsgd.core.checks import refusal
from jaxlsgd.regression import files, running
from jaxlsgd.regression.assembling import assemble
from jaxlsgd.regression.chunks import Chunk, Chunks, Shape
from jaxlsgd.regression.columns import first_rows
from jaxlsgd.regression.design import Design, extra
from jaxlsgd.regression.hosted import Hosted, on_host
from jaxlsgd.regression.looping import DIVERGED, Along, Finished, Whitened, etas, plan_of
from jaxlsgd.regression.options import Options
from jaxlsgd.regression.reading import Reading, read
from jaxlsgd.regression.result import TableFit
from jaxlsgd.regression.rows import by_client, remarks
from jaxlsgd.regression.starting import start_from
from jaxlsgd.regression.warming import programs

FloatArray = NDArray[np.floating[Any]]
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
        self.carried = running.Carried(None, ())  # before the first chunk
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
                self.carried = running.start(inside, self.space.start)
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
        self.carried, told = running.run_batches(
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
