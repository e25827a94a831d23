"""Run jobs on the devices of several processes that JAX has joined: the first leads, the others follow.

The leader alone reads and writes the directory. Messages between joined processes are collective, so work
goes in waves: the leader sends out jobs, each process runs its own, and all send back their tiles. A wave
is as long as its longest job.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence

from jaxlsgd.core.checks import describe
from jaxlsgd.engine import distributed, machine
from jaxlsgd.inference.laws import tables
from jaxlsgd.runs.simulate import Device
from jaxlsgd.study.cells import canonical
from jaxlsgd.study.executors.base import Event, Events, TileFailed
from jaxlsgd.study.executors.threads import Threads
from jaxlsgd.study.jobs import Job, Tabulated, Tile, TileAdvanced, TileFinished
from jaxlsgd.study.progress import Stop
from jaxlsgd.study.store import files, law_tables
from jaxlsgd.study.study import Study

LEADER = 0
_ROWS, _ERROR = b"+", b"-"  # first byte of a tile's content


def meet(study: Study, devices: Sequence[Device]) -> list[int]:
    """Refuse processes that differ in study, versions or devices; return their device counts."""
    import jax

    about = [study.digest, study.replications, machine.describe(devices[0])]
    distributed.agree("distributed run (study, versions, flags and kind of device)", about)
    count, everybody = str(len(devices)).encode(), range(jax.process_count())
    return [int(part) for part in distributed.share({jax.process_index(): count}, everybody)]


@contextlib.contextmanager
def leading() -> Iterator[None]:
    """Dismiss the followers at the end, also after an error."""
    try:
        yield
    finally:
        _order(b"")


class Leader:
    """Executor on the devices of all processes, in the first of them.

    Args:
      devices: of this process.
      counts: devices of each process, by `meet`.
    """

    def __init__(self, devices: Sequence[Device], counts: Sequence[int]) -> None:
        self._here = Threads(devices)
        self.environment, self.size = self._here.environment, sum(counts)
        # Processes take turns, so that a wave that is not full is spread over all of them.
        rounds = range(max(counts))
        self._places = [who for i in rounds for who, count in enumerate(counts) if i < count]

    def remember(self, rows: tables.Rows) -> None:
        """See `Executor.remember`."""
        self._here.remember(rows)
        _order(canonical({"tables": law_tables.plain(rows)}))

    def run(self, jobs: Iterable[Job], stop: Stop) -> Events:
        """See `Executor.run`; tiles of other processes come when a wave is over."""
        left = iter(jobs)
        while not stop.draining and (wave := list(itertools.islice(left, len(self._places)))):
            shares = list(zip(self._places[: len(wave)], wave, strict=True))
            named = [[(tile.cell.id, tile.first) for tile in job] for job in wave]
            _order(canonical({"owners": [owner for owner, _ in shares], "jobs": named}))
            theirs = [(owner, tile) for owner, job in shares if owner != LEADER for tile in job]
            found: list[bytes] = []
            try:
                mine = (job for owner, job in shares if owner == LEADER)
                yield from self._here.run(mine, stop)
            finally:
                # The others wait to send their tiles, also after an error here.
                if theirs:
                    found = distributed.share({}, [owner for owner, _ in theirs])
            for (_, tile), content in zip(theirs, found, strict=True):
                yield TileAdvanced(tile, tile.cell.num_steps)
                yield from _events(tile, content)


def follow(study: Study, devices: Sequence[Device]) -> int:
    """Run the leader's jobs until it dismisses this process; return the number of tiles."""
    import jax

    cells, here, count = {cell.id: cell for cell in study.cells}, jax.process_index(), 0
    threads = Threads(devices)
    while order := _order():
        wave = json.loads(order)
        if "tables" in wave:
            threads.remember(law_tables.from_plain(wave["tables"]))
            continue
        jobs = [tuple(Tile(cells[name], first) for name, first in job) for job in wave["jobs"]]
        shares = list(zip(wave["owners"], jobs, strict=True))
        theirs = [(owner, tile) for owner, job in shares if owner != LEADER for tile in job]
        contents: dict[Tile, bytes] = {}
        used = tables.Rows()
        mine = (job for owner, job in shares if owner == here)
        for event in threads.run(mine, Stop()):
            if isinstance(event, Tabulated):
                used |= event.rows
            elif isinstance(event, (TileFinished, TileFailed)):
                contents[event.tile] = _content(event, used)
                used = tables.Rows()
        if theirs:
            found = {i: contents[tile] for i, (who, tile) in enumerate(theirs) if who == here}
            distributed.share(found, [owner for owner, _ in theirs])
        count += len(contents)
    return count


def _order(content: bytes | None = None) -> bytes:
    """Return the leader's message, in all processes."""
    return distributed.share({} if content is None else {LEADER: content}, [LEADER])[0]


def _content(event: TileFinished | TileFailed, used: tables.Rows) -> bytes:
    if isinstance(event, TileFailed):
        return _ERROR + describe(event.error).encode()
    tabulated = canonical(law_tables.plain(used))
    tile = files.encode_tile(event.tile.cell, event.tile.first, event.rows)
    return _ROWS + len(tabulated).to_bytes(8) + tabulated + tile


def _events(tile: Tile, content: bytes) -> Iterator[Event]:
    kind, content = content[:1], content[1:]
    if kind == _ERROR:
        yield TileFailed(tile, RuntimeError(content.decode()))
        return
    end = 8 + int.from_bytes(content[:8])
    if used := law_tables.from_plain(json.loads(content[8:end])):
        yield Tabulated(used)
    yield TileFinished(tile, files.decode_tile(content[end:], tile.cell, tile.first))
