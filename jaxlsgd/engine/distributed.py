"""Join several processes to one JAX program, check that they make the same calls, and share their results."""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxlsgd.core import checks
from jaxlsgd.core.problem import Array

# A user sets these if no scheduler does; of the three, JAX by itself reads only the address.
ADDRESS, COUNT, NUMBER = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"


def start(timeout: int = 300, heartbeat: int = 100) -> None:
    """Join the processes of one run; call it before anything else of JAX.

    Takes the settings from the environment as JAX does (SLURM, Open MPI, Cloud TPU, Kubernetes), or from
    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID.

    Args:
      timeout: seconds to wait for the others.
      heartbeat: seconds of silence after which a process counts as dead, and all others end.

    Example::

        jaxlsgd.engine.distributed.start()
        mesh = jax.make_mesh((jax.device_count(),), ("clients",))
    """
    timeout, heartbeat = (
        checks.count("timeout", timeout, 1),
        checks.count("heartbeat", heartbeat, 1),
    )
    given = _from_environment()
    # Processes on CPUs communicate by Gloo; for other devices this changes nothing.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # That service would catch SIGTERM, which a scheduler sends so that a run can finish its jobs and stop.
    jax.config.update("jax_enable_preemption_service", False)
    initialize = functools.partial(
        jax.distributed.initialize,
        **given,
        # JAX kills the process when its own limit has passed, so ours must come first.
        initialization_timeout=timeout + 60,
        heartbeat_timeout_seconds=heartbeat,
        shutdown_timeout_seconds=timeout,
    )
    try:
        _within(timeout, initialize)
    except ValueError as error:
        text = (
            "distributed: the environment has no settings of SLURM, Open MPI, Cloud TPU or Kubernetes; "
            f"set {ADDRESS}=host:port, {COUNT} and {NUMBER} ({error})"
        )
        raise checks.Refusal(text, "distributed", "missing") from error
    except TimeoutError as error:
        who = {name: os.environ[name] for name in (ADDRESS, COUNT, NUMBER) if name in os.environ}
        raise RuntimeError(
            f"distributed: not all processes had joined after {timeout} s; check that all of them are "
            f"started and can reach the coordinator. Settings: {who or 'those of the scheduler'}"
        ) from error


def _within(seconds: float, function: Callable[[], None]) -> None:
    """Call a function that may never return, and wait at most so many seconds for it."""
    failed: list[BaseException] = []

    def call() -> None:
        try:
            function()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=call, name="jaxlsgd-distributed", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError
    if failed:
        raise failed[0]


def _from_environment() -> dict[str, Any]:
    """Return the three settings of a user; refuse some without the others."""
    found = {name: os.environ[name] for name in (ADDRESS, COUNT, NUMBER) if os.environ.get(name)}
    if COUNT not in found and NUMBER not in found:
        return {}  # an address alone is combined with the settings of a scheduler
    if missing := [name for name in (ADDRESS, COUNT, NUMBER) if name not in found]:
        raise checks.refusal(" and ".join(missing), "be set as well", found, code="missing")
    if not found[COUNT].isdecimal() or not found[NUMBER].isdecimal():
        raise checks.refusal(f"{COUNT} and {NUMBER}", "be integers", found, code="type")
    count, number = int(found[COUNT]), int(found[NUMBER])
    if not number < count:
        raise checks.refusal(NUMBER, f"be in 0..{count - 1}", number)
    if ":" not in found[ADDRESS]:
        raise checks.refusal(ADDRESS, "be host:port", found[ADDRESS])
    # Otherwise JAX would look for a scheduler's settings as well.
    method = {"cluster_detection_method": "deactivate"}
    return {
        "coordinator_address": found[ADDRESS],
        "num_processes": count,
        "process_id": number,
    } | method


def whole(x: Array) -> np.ndarray:
    """Return an array as NumPy on every process, wherever its parts are."""
    if x.is_fully_addressable:
        return np.asarray(x)
    return _gathered(x, tiled=True)


def _gathered(x: Any, tiled: bool = False) -> np.ndarray:
    """Return the `x` of every process; wait until all have called this."""
    try:
        return np.asarray(multihost_utils.process_allgather(x, tiled=tiled))
    except (RuntimeError, ValueError) as error:  # the type depends on the backend
        raise RuntimeError(
            f"distributed: another process has ended or cannot be reached ({error})"
        ) from error


def spans(devices: Sequence[Any]) -> bool:
    """Return whether devices belong to all processes, not to this one alone; refuse those of only some."""
    found, here = {device.process_index for device in devices}, jax.process_index()
    if found == {here}:
        return False
    if len(found) < jax.process_count():
        got = f"those of processes {sorted(found)} of {jax.process_count()} in process {here}"
        raise checks.refusal("mesh", "have devices of this process alone or of every process", got)
    return True


def agree(what: str, content: Sequence[Any]) -> None:
    """Refuse calls that differ between processes, which would then wait for one another forever."""
    digest = hashlib.sha256(repr(content).encode()).digest()
    all_digests = _gathered(np.frombuffer(digest, np.uint8))
    differing = [i for i, other in enumerate(all_digests) if other.tobytes() != digest]
    if differing:
        text = (
            f"{what}: every process must make the same call; process {jax.process_index()} differs "
            f"from processes {differing}"
        )
        raise checks.Refusal(text, what, "conflict")


def share(mine: dict[int, bytes], owners: Sequence[int]) -> list[bytes]:
    """Return, on every process, what each of them has found.

    Args:
      mine: what this process has found, by index.
      owners: the process that has the content of each index; the same on all processes.
    """
    slots = max(owners.count(owner) for owner in owners)
    content = [mine[i] for i in sorted(mine)]
    lengths = np.zeros(slots, np.int32)
    lengths[: len(content)] = [len(part) for part in content]
    all_lengths = _gathered(lengths)
    # A power of two, because every new shape is compiled.
    buffer = np.zeros((slots, 1 << int(all_lengths.max()).bit_length()), np.uint8)
    for row, part in zip(buffer, content, strict=False):
        row[: len(part)] = np.frombuffer(part, np.uint8)
    buffers = _gathered(buffer)
    place = [list(owners[:i]).count(owner) for i, owner in enumerate(owners)]
    return [
        buffers[owner, at, : all_lengths[owner, at]].tobytes()
        for owner, at in zip(owners, place, strict=True)
    ]
