"""Jobs on the devices of several processes that JAX has joined: the first leads, the others follow.

The leader alone reads and writes the directory. Joined processes speak all at once or not at all, so
work goes in waves: the leader says who runs what, everybody runs its jobs on its own devices, and then
all hand over what they have found. A wave is as long as its longest job.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

from jaxlsgd.core.rows import MethodRows
from jaxlsgd.engine import distributed, machine
from jaxlsgd.study import build
from jaxlsgd.study.executors import threads as local
from jaxlsgd.study.grid import Cell, canonical
from jaxlsgd.study.jobs import Finished, Job, Tile
from jaxlsgd.study.spec import Study
from jaxlsgd.study.stop import Stop
from jaxlsgd.study.store import codec as files

LEADER = 0
_ROWS, _ERROR = b"+", b"-"  # what a tile's content begins with


def meet(study: Study, devices: Sequence[Any]) -> list[int]:
    """Makes sure that all processes run the same thing alike; returns how many devices each has."""
    import jax

    about = [study.digest, study.replications, machine.describe(devices[0])]
    distributed.agree("distributed run (study, versions, flags and kind of device)", about)
    count, everybody = str(len(devices)).encode(), range(jax.process_count())
    return [int(part) for part in distributed.share({jax.process_index(): count}, everybody)]


@contextlib.contextmanager
def leading() -> Iterator[None]:
    """Lets the followers go at the end, however it ends."""
    try:
        yield
    finally:
        _order(b"")


def lead(
    jobs: Iterable[Job],
    counts: Sequence[int],
    compute: local.Compute,
    devices: Sequence[Any],
    stop: Stop,
    on_theirs: Callable[[Tile], None],
) -> Generator[Finished | None, None, None]:
    """Yields tiles as they finish here, and those of the others when a wave is over.

    Args:
      jobs: what is to be done; taken wave by wave.
      counts: devices of each process, by `meet`.
      compute: runs a job here.
      devices: of this process.
      stop: ends the run with the wave.
      on_theirs: hears of each tile that another process has computed.
    """
    import jax

    here, left = jax.process_index(), iter(jobs)
    # One process after another, so that a wave that is not full is spread over all of them.
    rounds = range(max(counts))
    places = [process for i in rounds for process, count in enumerate(counts) if i < count]
    while not stop.draining and (wave := list(itertools.islice(left, len(places)))):
        owners = places[: len(wave)]
        named = [[(tile.cell.id, tile.first) for tile in job] for job in wave]
        _order(canonical({"owners": owners, "jobs": named}))
        shares = list(zip(owners, wave, strict=True))
        theirs = [(owner, tile) for owner, job in shares if owner != here for tile in job]
        found: list[bytes] = []
        try:
            mine = (job for owner, job in shares if owner == here)
            yield from local.run_jobs(mine, compute, devices, stop)
        finally:
            # The others wait to hand over, whatever has happened here.
            if theirs:
                found = distributed.share({}, [owner for owner, _ in theirs])
        for (_, tile), content in zip(theirs, found, strict=True):
            on_theirs(tile)
            yield _finished(tile, content)


def follow(study: Study, devices: Sequence[Any]) -> int:
    """Runs what the leader says, until it says no more; returns how many tiles that were."""
    import jax

    cells, here, count = {cell.id: cell for cell in study.cells}, jax.process_index(), 0
    while order := _order():
        wave = json.loads(order)
        jobs = [tuple(Tile(cells[name], first) for name, first in job) for job in wave["jobs"]]
        shares = list(zip(wave["owners"], jobs, strict=True))
        theirs = [(owner, tile) for owner, job in shares if owner != LEADER for tile in job]
        contents: dict[Tile, bytes] = {}
        mine = (job for owner, job in shares if owner == here)
        for finished in local.run_jobs(mine, _compute, devices, Stop()):
            if finished is not None:
                contents[finished.tile] = _content(finished)
        if theirs:
            found = {i: contents[tile] for i, (who, tile) in enumerate(theirs) if who == here}
            distributed.share(found, [owner for owner, _ in theirs])
        count += len(contents)
    return count


def _order(content: bytes | None = None) -> bytes:
    """What the leader says, on all processes."""
    return distributed.share({} if content is None else {LEADER: content}, [LEADER])[0]


def _compute(job: Job, device: Any, on_tile: local.OnTile) -> None:
    def on_rows(index: int, rows: dict[str, MethodRows]) -> None:
        on_tile(job[index], rows)

    cells: list[Cell] = [tile.cell for tile in job]
    build.compute_job(cells, job[0].first, device, on_rows=on_rows)


def _content(finished: Finished) -> bytes:
    tile, rows, error = finished
    if rows is None:
        return _ERROR + f"{type(error).__name__}: {error}".encode()
    return _ROWS + files.encode_tile(tile.cell, tile.first, rows)


def _finished(tile: Tile, content: bytes) -> Finished:
    kind, content = content[:1], content[1:]
    if kind == _ERROR:
        return Finished(tile, None, RuntimeError(content.decode()))
    return Finished(tile, files.decode_tile(content, tile.cell, tile.first), None)
