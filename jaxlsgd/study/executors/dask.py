"""Run jobs on a Dask cluster, each as a Dask task.

Dask schedules, runs the jobs of a lost worker elsewhere, and reconnects. `Dask` bounds how many jobs it
holds, and turns its answers into events.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from jaxlsgd.core.checks import Refusal, shown
from jaxlsgd.engine import machine
from jaxlsgd.inference.laws.tables import Rows
from jaxlsgd.study.executors import dask_worker
from jaxlsgd.study.executors.base import Event, Events, TileFailed
from jaxlsgd.study.jobs import Job, Tabulated, Tile, TileAdvanced, TileFinished
from jaxlsgd.study.progress import Dropped, Stop
from jaxlsgd.study.store import files, law_tables

Client = Any  # distributed.Client: what its methods return depends on how it is used

CONNECT = 10.0  # seconds in which a scheduler must answer at first
RECONNECT = 60.0  # seconds in which a lost one may come back
_FETCH = 60.0  # seconds in which the result of a finished job must arrive
_FETCHERS = 8  # threads that fetch, as a dead worker blocks one of them
_TICK = 0.05  # seconds between two events while nothing happens
_LOOK = 5.0  # seconds between counts of the workers
_PATIENCE = 60.0  # seconds in which a local cluster without workers may start one
_NO_WORKER = "no worker of this machine has started for a minute"
_AHEAD = 3  # jobs per thread that Dask has, so that no thread waits
_LEAST = 16  # jobs that Dask has in any case, for clusters that grow with demand


class ClusterError(Refusal):
    """A cluster that cannot be used as it is."""


class WorkerError(RuntimeError):
    """An error in a worker, as text."""


@contextlib.contextmanager
def connected(address: str, workers: int | None = None) -> Iterator[Client]:
    """Yield a client of the scheduler at an address, or of new worker processes.

    Args:
      address: "tcp://host:8786", or "local" for one process per core of this machine.
      workers: number of processes, with "local".

    Example::

        with connected("local") as client:
            study.run("results", client=client)
    """
    try:
        import distributed
        from distributed.comm.addressing import get_address_host_port
    except ImportError as error:
        text = "--dask needs Dask: pip install 'jaxlsgd[cluster]'"
        raise ClusterError(text, "--dask", "unavailable") from error
    if address == "local":
        with _local(workers or machine.cores()) as cluster, distributed.Client(cluster) as client:
            yield client
        return
    for name in ("distributed", "distributed.client"):  # messages that matter come from here
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        get_address_host_port(address, strict=True)  # a client hangs on an invalid one
        distributed.Client(address, timeout=CONNECT, set_as_default=False).close()
        client = distributed.Client(address, timeout=RECONNECT, set_as_default=False)
    except (OSError, ValueError, TypeError) as error:
        text = (
            f"--dask: must be the address of a Dask scheduler, got {shown(address)}, where none answers "
            f"within {CONNECT:g} s; start one with `dask scheduler`, or use --dask local "
            f"({_brief(error)})"
        )
        raise ClusterError(text, "--dask", "unavailable") from error
    try:
        yield client
    finally:
        client.close(timeout=2)


def _local(workers: int) -> Any:
    from distributed import LocalCluster

    options: dict[str, Any] = {"dashboard_address": None, "preload": dask_worker.__name__}
    try:
        return LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            processes=True,
            host="127.0.0.1",
            silence_logs=logging.CRITICAL,
            **options,
        )
    except (RuntimeError, OSError) as error:  # one was killed while it started
        text = (
            f"--dask: the workers of this machine did not start ({_brief(error)}); run the same command "
            "again, or ask for fewer of them with --devices"
        )
        raise WorkerError(text) from error


def _brief(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().partition("\n")[0][:200]


def environment(client: Client, stop: Stop, warn: Callable[[str], None]) -> dict[str, Any] | None:
    """Return what all workers have in common; refuse those that differ. None if asked to stop first."""
    if client.asynchronous:
        raise ClusterError("client: must be a synchronous distributed.Client", "client", "type")
    warned, start, patience = False, time.monotonic(), _patience(client)
    while not (found := _environments(client)):
        if stop.draining:
            return None
        if not warned:
            warned = True
            warn("the cluster has no workers yet; waiting for the first")
        if time.monotonic() - start > patience:
            raise WorkerError(f"{_NO_WORKER}; run the same command again")
        time.sleep(0.5)
    expected = None
    for address, theirs in found.items():
        if isinstance(theirs, BaseException):
            cause = _brief(theirs)
            hint = "install jaxlsgd there" if "No module named 'jaxlsgd'" in cause else ""
            raise ClusterError(_refusal(address, cause, hint), address, "unavailable")
        expected = expected or theirs | {"jaxlsgd": machine.version(), "code": machine.code()}
        if difference := machine.difference(theirs, expected):
            raise ClusterError(_refusal(address, difference), address, "conflict")
    return expected


def _patience(client: Client) -> float:
    """Return for how many seconds to wait for a first worker; other clusters may grow when they like."""
    from distributed import LocalCluster

    return _PATIENCE if isinstance(client.cluster, LocalCluster) else math.inf


def _environments(client: Client) -> dict[str, Any]:
    """Return the environment of each worker; one that dies in the meantime is left out."""
    found = client.run(dask_worker.environment, on_error="return")
    return {address: theirs for address, theirs in found.items() if not isinstance(theirs, OSError)}


def _refusal(which: str, cause: str, hint: str = "") -> str:
    same = "all workers need the versions of this process, the same kind of machine and XLA_FLAGS"
    return f"the worker {which} is refused: {cause}; {hint or same}"


class Dask:
    """Executor on the workers of a cluster.

    A run ends early, with a warning, if the scheduler is lost for good or if a worker joins that would
    compute other digits.

    Args:
      client: a synchronous `distributed.Client`.
      expected: the environment of its workers, from `environment`.
      warn: called with messages that must not be missed.
    """

    def __init__(
        self, client: Client, expected: dict[str, Any], warn: Callable[[str], None]
    ) -> None:
        self._client, self._expected, self._warn = client, expected, warn
        self.environment = dict(expected)
        self.size = 1
        with contextlib.suppress(OSError):
            self.size = max(1, sum(client.nthreads().values()))

    def remember(self, rows: Rows) -> None:
        """See `Executor.remember`; workers that join later compute tables themselves."""
        if rows:
            self._client.run(dask_worker.remember, law_tables.plain(rows), on_error="ignore")

    def run(self, jobs: Iterable[Job], stop: Stop) -> Events:
        """See `Executor.run`."""
        fleet = _Fleet(self._client, self._expected, iter(jobs), self._warn)
        try:
            while not fleet.ended:
                if stop.dropping:
                    return
                if stop.draining:
                    fleet.drain()
                else:
                    fleet.fill()
                events = fleet.collect()
                yield from events
                if not events:
                    yield None
                    time.sleep(_TICK)
        finally:
            fleet.cancel()
            fleet.fetchers.shutdown(wait=False, cancel_futures=True)


class _Flight(NamedTuple):
    """A job that Dask has, and whether it has no other."""

    job: Job
    future: Any
    alone: bool = False


class _Workers:
    """The workers of a cluster, with a warning when they are paused, go on, or are all lost.

    Args:
      patience: seconds without a worker after which none is expected any more.
    """

    def __init__(
        self, client: Client, warn: Callable[[str], None], patience: float = math.inf
    ) -> None:
        self._client, self._warn, self._patience = client, warn, patience
        self._paused: set[str] = set()
        self._seen = time.monotonic()  # when there was one
        self.threads = 0

    @property
    def given_up(self) -> bool:
        """Whether there has been no worker for too long."""
        return not self.threads and time.monotonic() - self._seen > self._patience

    def look(self) -> None:
        """Count the threads, and warn of changes."""
        with contextlib.suppress(OSError):
            known = self._client.scheduler_info(n_workers=-1)["workers"]
            before, self.threads = self.threads, sum(x["nthreads"] for x in known.values())
            if before and not self.threads:
                self._warn("no worker is left; waiting for one")
            self._seen = time.monotonic() if self.threads else self._seen
            paused = {where for where, x in known.items() if x.get("status") == "paused"}
            for where in sorted(paused - self._paused):
                self._warn(_paused(where, known[where]))
            for where in sorted((self._paused - paused) & known.keys()):
                self._warn(f"the worker {where} goes on")
            self._paused = paused


def _paused(where: str, about: dict[str, Any]) -> str:
    used, limit = (about.get("metrics") or {}).get("memory"), about.get("memory_limit")
    has = f": it uses {used / 1e6:,.0f} MB" if used else ""
    has += f" of the {limit / 1e6:,.0f} MB that it may" if used and limit else ""
    return (
        f"the worker {where} is paused by Dask, for memory{has}; it begins no job until it uses less. If "
        "it stays so, give workers more memory, or make another study with a smaller tile_size"
    )


class _Fleet:
    """The jobs that Dask has, and those to submit."""

    def __init__(
        self,
        client: Client,
        expected: dict[str, Any],
        jobs: Iterator[Job],
        warn: Callable[[str], None],
    ) -> None:
        from distributed import as_completed

        self.client, self.expected, self.jobs, self.warn = client, expected, jobs, warn
        self.flying: dict[str, _Flight] = {}
        self.fetchers = concurrent.futures.ThreadPoolExecutor(_FETCHERS, "jaxlsgd-fetch")
        self.fetching: dict[concurrent.futures.Future[dask_worker.Answer], str] = {}
        self.again: collections.deque[Job] = collections.deque()
        self.suspects: collections.deque[Job] = collections.deque()
        self.done = as_completed(loop=client.loop)
        self.exhausted = self.draining = self.broken = self.lost = False
        self._counted = -_LOOK
        self._workers = _Workers(client, warn, _patience(client))

    @property
    def ended(self) -> bool:
        """Whether nothing is left to wait for."""
        idle = not (self.flying or self.again or self.suspects)
        return self.broken or (idle and (self.exhausted or self.draining))

    def fill(self) -> None:
        """Submit jobs, up to a few per thread, and at the end suspects one by one."""
        if not self._connection():
            return
        self._count()
        while len(self.flying) < max(_LEAST, _AHEAD * self._workers.threads):
            job = self.again.popleft() if self.again else next(self.jobs, None)
            if job is None:
                self.exhausted = True
                break
            self._submit(job)
        if self.suspects and not self.flying:
            self._submit(self.suspects.popleft(), alone=True)

    def _connection(self) -> bool:
        """Whether there is a scheduler; warn when it is lost, back, or gone."""
        status = self.client.status
        if status == "closed":
            self.broken = True
            self.warn("the scheduler did not come back; what is committed is kept")
        elif (status != "running") != self.lost:
            self.lost = not self.lost
            self.warn(f"the scheduler is {'lost; waiting for it' if self.lost else 'back'}")
        return status == "running"

    def _count(self) -> None:
        now = time.monotonic()
        if now - self._counted >= _LOOK:
            self._counted = now
            self._workers.look()
            if self._workers.given_up:
                self.broken = True
                kept = "what is committed is kept, and the same command goes on from there"
                self.warn(f"{_NO_WORKER}; {kept}")

    def _submit(self, job: Job, alone: bool = False) -> None:
        packed = dask_worker.pack([tile.cell for tile in job], job[0].first)
        future = self.client.submit(dask_worker.work, packed, self.expected, pure=False, retries=0)
        self.flying[future.key] = _Flight(job, future, alone)
        self.done.add(future)

    def collect(self) -> list[Event]:
        """Return the events since the last call."""
        events: list[Event] = []
        for future in self.done.next_batch(block=False):
            if future.key in self.flying:
                self.fetching[self.fetchers.submit(future.result, _FETCH)] = future.key
        for fetched in [fetched for fetched in self.fetching if fetched.done()]:
            flight = self.flying.pop(self.fetching.pop(fetched), None)
            if flight is not None:
                events += self._judge(flight, fetched)
        return events

    def _judge(
        self, flight: _Flight, fetched: concurrent.futures.Future[dask_worker.Answer]
    ) -> list[Event]:
        try:
            answer = fetched.result()
        except (OSError, TimeoutError, concurrent.futures.CancelledError):
            # The scheduler is lost, and the job with it.
            if not self.draining:
                self.again.append(flight.job)
            return []
        except Exception as error:
            return self._failed(flight, error)
        if "tiles" in answer:
            parts = zip(flight.job, answer["tiles"], strict=True)
            events = [event for tile, part in parts for event in _decoded(tile, part)]
            return [*_tabulated(answer), *events]
        if "error" in answer:
            return self._failed(flight, WorkerError(answer["error"]))
        if not self.broken:
            unlike = machine.difference(answer.get("unlike", {}), self.expected)
            self.warn(_refusal("that joined later", unlike))
        self.broken = True
        return []

    def _failed(self, flight: _Flight, error: Exception) -> list[Event]:
        from distributed import KilledWorker

        if self.draining:
            return [TileFailed(tile, Dropped()) for tile in flight.job]
        if len(flight.job) > 1:
            self.again.extend((tile,) for tile in flight.job)
        elif isinstance(error, KilledWorker) and not flight.alone:
            # Dask blames all tasks of a worker that died: run each alone to find the one.
            self.suspects.append(flight.job)
        else:
            return [TileFailed(tile, error) for tile in flight.job]
        return []

    def drain(self) -> None:
        """Cancel all jobs that have not started, at the first call."""
        self._count()
        if self.draining:
            return
        self.draining = True
        self.again.clear()
        self.suspects.clear()
        futures = {key: flight.future for key, flight in self.flying.items()}
        begun: set[str] = set()
        with contextlib.suppress(OSError):
            stacks = self.client.call_stack(list(futures.values())) or {}
            begun = {str(key) for stack in stacks.values() for key in stack}
        self.cancel(key for key in futures if key not in begun and not futures[key].done())

    def cancel(self, keys: Iterable[str] | None = None) -> None:
        """Cancel jobs, all if None."""
        given = list(self.flying if keys is None else keys)
        dropped = [self.flying.pop(key).future for key in given]
        if dropped and self.client.status == "running":
            with contextlib.suppress(OSError):
                self.client.cancel(dropped, force=True)


def _tabulated(answer: dask_worker.Answer) -> list[Event]:
    """Return the tables that came with tiles; damaged ones are left out and computed again."""
    with contextlib.suppress(files.Damaged):
        return [Tabulated(law_tables.from_plain(answer.get("tables", {})))]
    return []


def _decoded(tile: Tile, content: bytes) -> list[Event]:
    try:
        rows = files.decode_tile(content, tile.cell, tile.first)
    except files.Damaged as error:
        return [TileFailed(tile, files.Damaged(f"what a worker sent is damaged: {error}"))]
    # Workers report no progress: all steps of a tile come with its rows.
    return [TileAdvanced(tile, tile.cell.num_steps), TileFinished(tile, rows)]
