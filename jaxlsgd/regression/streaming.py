"""A file that is read once, a block of rows at a time: one pass of Local SGD over fresh rows.

The first rows are the pilot's. All rows, the pilot's too, then come by in chunks. A chunk is put in a random
order, and a step takes its share of every client's rows in it. Each row is met once, so the run's own noise is
that of the sample, and its interval is about the population. What is kept does not grow with the file.

The file must be in random order: if it is sorted, say by client, later rows are unlike the first.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxlsgd.core.checks import refusal
from jaxlsgd.regression import files, running
from jaxlsgd.regression.assembling import assemble
from jaxlsgd.regression.design import Block, Design, design, extra
from jaxlsgd.regression.families import check_range
from jaxlsgd.regression.looping import DIVERGED, Along, Finished, Whitened, etas, plan_of
from jaxlsgd.regression.options import Options
from jaxlsgd.regression.reading import Reading, read
from jaxlsgd.regression.result import TableFit
from jaxlsgd.regression.rows import by_client, remarks
from jaxlsgd.regression.starting import start_from

FloatArray = NDArray[np.floating[Any]]
CHUNK = 1 << 16  # rows
CHUNK_STEPS = 60
PILOT_ROWS = 100_000
_READ_EVERY = 16  # chunks
_UNLIKE = 0.5  # a chunk may have that much less or more of a client than the pilot, in its share

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
    source = files.blocks(path)
    first = _pilot_frame(source)
    plan = design(first, *how)
    block = plan.read(first)
    if len(block.y) < PILOT_ROWS:
        return fit_block(plan, block, asked, progress)
    rows = by_client(plan, block, asked)
    loss, theta, exchanges = start_from(plan, rows, asked)
    space = Whitened(rows, loss, theta)
    total = files.rows_of(path, len(first), first)
    frames = itertools.chain([first], source)
    for retry in range(3):
        stream = _Stream(plan, space, asked, total, 4.0**-retry, progress or (lambda text: None))
        found = stream.go(frames)
        if found is not None:
            notes = remarks(rows, asked)
            if stream.stub:
                notes.append(f"the last {stream.stub:,} rows of the file were too few for a chunk")
            return assemble(plan, asked, space, found, exchanges, stream.dropped, notes)
        frames = files.blocks(path)
    raise RuntimeError(DIVERGED)


def _ahead(frames: Iterator[Any]) -> Iterator[Any]:
    """The same, with the next one read while this one is used."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, frames, None)
        while (frame := coming.result()) is not None:
            coming = pool.submit(next, frames, None)
            yield frame


def _pilot_frame(source: Iterator[Any]) -> Any:
    taken, count = [], 0
    for frame in source:
        taken.append(frame)
        count += len(frame)
        if count >= PILOT_ROWS:
            break
    if not taken:
        raise refusal("file", "have rows", "none")
    return taken[0] if len(taken) == 1 else extra("pandas").concat(taken, ignore_index=True)


class _Chunk(NamedTuple):
    """Rows of one chunk, sorted by client."""

    A: FloatArray  # (n, d) whitened, float32
    y: FloatArray  # (n,)
    sizes: NDArray[np.int64]  # (K,)


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
        self.plan, self.space, self.asked = plan, space, asked
        self.total, self.slower, self.progress = total, slower, progress
        share = space.rows.sizes / space.rows.sizes.sum()
        sizes = np.maximum(1, (share * total).astype(np.int64))
        chunks = max(1, total // CHUNK)
        batches = np.maximum(1.0, share * CHUNK / CHUNK_STEPS)
        rule = space.rule(sizes, batches, chunks * CHUNK_STEPS, asked)
        self.rule = rule._replace(eta=rule.eta * slower)
        self.share, self.rng = share, np.random.default_rng([asked.seed, 2])
        self.W = space.W.astype(np.float32)
        self.longest = int(1.1 * CHUNK * share.max()) + 50
        self.carried = running.start(asked.methods, space.start)
        self.setting = running.on_device(space.setting())
        self.met = np.zeros(len(share), np.int64)
        self.rounds = self.dropped = self.stub = 0
        self.along: list[Along] = []

    def go(self, frames: Iterator[Any]) -> Finished | None:
        """Runs over all rows; None where it diverged."""
        for number, chunk in enumerate(self._chunks(_ahead(frames)), start=1):
            self._run(chunk)
            met = int(self.met.sum())
            self.progress(f"{met:,} of about {max(met, self.total):,} rows")
            if number % _READ_EVERY == 0:
                if not np.isfinite(self.carried.x).all():
                    return None
                self.along.append(self.space.along(self._read()[0], self.rounds))
        self.progress("")
        readings = self._read()
        if not np.isfinite(readings[0].estimate).all():
            return None
        self.along.append(self.space.along(readings[0], self.rounds))
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
        plan = plan_of(self.rule, self.rounds)
        pairs = zip(self.asked.methods, self.carried.states, strict=True)
        return [read(method, state, plan) for method, state in pairs]

    def _run(self, chunk: _Chunk) -> None:
        sizes = chunk.sizes
        rounds = CHUNK_STEPS // self.rule.E
        steps, longest = rounds * self.rule.E, max(self.longest, int(sizes.max()))
        data = running.by_client(chunk.A, chunk.y, sizes, longest)
        width = running.padded(-(-longest // steps))
        order = running.reshuffled(self.rng, sizes, steps, self.rule.E, width)
        setting = self.setting
        if self.asked.weights == "size":
            setting = setting._replace(weights=(sizes / sizes.sum()).astype(np.float32))
        self.carried, _ = running.run_pass(
            self.space.loss.family.derivatives,
            self.asked.methods,
            running.ClientRows(*data),
            setting,
            order,
            etas(self.rule, self.rounds, rounds),
            self.carried,
        )
        self.rounds += rounds
        self.met += sizes

    def _chunks(self, frames: Iterator[Any]) -> Iterator[_Chunk]:
        """Rows as numbers, in chunks of one size; the last has what is left."""
        held: list[Block] = []
        count = first_row = 0
        for frame in frames:
            block = self.plan.read(frame, first_row)
            first_row += len(frame)
            self.dropped += block.dropped
            held.append(block)
            count += len(block.y)
            while count >= CHUNK:
                whole = _joined(held)
                yield self._chunk(whole, slice(0, CHUNK))
                held, count = [_part(whole, slice(CHUNK, None))], count - CHUNK
        # A last chunk that is short is met in as many steps, of fewer rows; a stub would weigh too much.
        if count >= CHUNK // 4:
            yield self._chunk(_joined(held), slice(None))
        else:
            self.stub = count

    def _chunk(self, block: Block, part: slice) -> _Chunk:
        X, y, labels, _ = _part(block, part)
        check_range(self.asked.family, self.plan.response, y)
        rows, frame = self.space.rows, self.space.rows.coordinates
        place = _places(rows.labels, labels)
        if (place < 0).any():
            rule = f"be in random order: client {str(labels[place < 0][0])!r} is not among the first rows"
            raise refusal("file", rule, f"{int(self.met.sum()):,} rows without", _SHUFFLE)
        sizes = np.bincount(place, minlength=len(self.share))
        self._check_alike(sizes)
        order = np.argsort(place, kind="stable")
        # Standardised in float64; the product is of numbers around 1.
        A = frame.features(X).astype(np.float32)[order] @ self.W
        return _Chunk(A, frame.response(y[order]), sizes)

    def _check_alike(self, sizes: NDArray[np.int64]) -> None:
        """Refuses a chunk that is unlike the first rows: a file in order of clients."""
        found = sizes / sizes.sum()
        noise = 6 * np.sqrt(self.share * (1 - self.share) / sizes.sum())
        unlike = np.abs(found - self.share) > _UNLIKE * self.share + noise
        if unlike.any():
            k = int(np.argmax(unlike))
            name = self.space.rows.labels[k]
            what = f"{100 * found[k]:.2g} % after row {int(self.met.sum()):,}"
            rule = f"be in random order: {100 * self.share[k]:.2g} % of the first rows are of client {name!r}"
            raise refusal("file", rule, what, _SHUFFLE)


_SHUFFLE = "; shuffle its rows, or read it whole with stream=False"


def _joined(blocks: list[Block]) -> Block:
    if len(blocks) == 1:
        return blocks[0]
    X, y, client = (np.concatenate([one[i] for one in blocks]) for i in range(3))
    return Block(X, y, client, 0)


def _part(block: Block, part: slice) -> Block:
    return Block(block.X[part], block.y[part], block.client[part], 0)


def _places(known: tuple[str, ...], labels: NDArray[Any]) -> NDArray[np.integer[Any]]:
    """Where each label stands among the known ones; −1 for another."""
    pandas = extra("pandas")
    codes, found = pandas.factorize(labels)
    index = pandas.Index(known).get_indexer([str(one) for one in found])
    # Of few bits, as sorting is then by counting.
    kind = np.int16 if len(known) < 1 << 15 else np.int64
    return index[codes].astype(kind)
