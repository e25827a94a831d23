"""Settings to make before JAX starts, the machine's cores, devices and memory, and what to record of it."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxlsgd.core import checks

PACKAGE = Path(__file__).parents[1]
_READERS = ("analysis", "report", "cli")  # rooms that make no rows
_WIDTH_FLAG = "--xla_cpu_prefer_vector_width"
# XLA ends the process if it does not support a flag, so this one is set only for versions that were tried.
_WIDTH_VERSIONS = ("0.10.",)


def prepare(devices: int | None = None) -> None:
    """Set JAX up for studies: one device per core, full vectors, a cache of compiled programs.

    Call it before JAX makes its first array. Settings of the user are kept. If the cache cannot be written
    (in a read-only home directory, for example), there is none, and every process compiles for itself.

    Args:
      devices: CPU devices; one per core of this process if None.
    """
    import jax

    flags = os.environ.get("XLA_FLAGS", "")
    if "--xla_force_host_platform_device_count" not in flags:
        wanted = devices or (cores() if _setting("jax_num_cpu_devices") < 1 else None)
        try:
            if wanted:
                jax.config.update("jax_num_cpu_devices", wanted)
        except RuntimeError:
            return  # JAX has already started, and reads nothing more
    if _WIDTH_FLAG not in flags and _has_wide_vectors():
        os.environ["XLA_FLAGS"] = f"{flags} {_WIDTH_FLAG}=512".strip()
    directory = cache_directory() if _setting("jax_compilation_cache_dir") is None else None
    if directory is not None:
        jax.config.update("jax_compilation_cache_dir", str(directory))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _setting(name: str) -> Any:
    import jax

    return getattr(jax.config, name)


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def most_cpu_devices() -> int:
    """Return a limit on CPU devices: more would only share the cores, each with its own memory."""
    return 4 * cores()


def chosen(devices: Any = None) -> list[Any]:
    """Return the devices of this process to run on: an entry per thread, and on a CPU all are its first device.

    That device runs the programs of several threads at once, and JAX compiles every program for each device that it
    is to run on.

    Args:
      devices: None for as many as the default backend has, a number for so many of them, or a sequence of
        JAX devices, which is taken as it is.

    Example::

        chosen(2)  # as jax.local_devices()[:2] on a GPU, and the first device twice on a CPU
    """
    import jax

    here = jax.local_devices()
    found = [here[0] if device.platform == "cpu" else device for device in here]
    if devices is None:
        return found
    rule = "be a number of devices or a list of JAX devices"
    if isinstance(devices, int) and not isinstance(devices, bool):
        if not 1 <= devices <= len(found):
            hint = ""
            if devices > 0 and found[0].platform == "cpu":
                hint = (
                    f'; jax.config.update("jax_num_cpu_devices", {devices}) makes more from a CPU, '
                    "before JAX makes its first array"
                )
            few = f"be from 1 to {len(found)}, the number of devices here"
            raise checks.refusal("devices", few, devices, hint)
        return found[:devices]
    if isinstance(devices, (str, bytes)) or not isinstance(devices, Iterable):
        raise checks.refusal("devices", rule, devices, code="type")
    given = list(devices)
    if not given or not all(hasattr(device, "platform") for device in given):
        raise checks.refusal("devices", rule, devices, code="type")
    return given


def memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process can use in all, including those that it already uses.

    This is the available memory that the system reports, or the limit of the control group (a container, a
    batch job) if that is lower; None if the system reports neither.

    Args:
      root: of the file system with /proc and /sys.
    """
    found = [x for x in (_available(root), *_limits(root)) if x is not None]
    return min(found, default=None)


def _available(root: Path) -> int | None:
    try:
        lines = dict(x.split(":") for x in (root / "proc/meminfo").read_text().splitlines())
        free = 1024 * int(lines["MemAvailable"].split()[0])
        ours = int((root / "proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return free + ours
    except (OSError, ValueError, KeyError, IndexError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def _limits(root: Path) -> list[int]:
    """Return the memory limits of the control groups, v1 or v2, that this process is in."""
    groups = root / "sys/fs/cgroup"
    paths = [groups / "memory" / "memory.limit_in_bytes"]
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            place = Path(line.split(":")[-1].strip("/"))
            names = (place, *place.parents)
            paths += [groups / name / "memory.max" for name in names]
            paths += [groups / "memory" / name / "memory.limit_in_bytes" for name in names]
    limits = []
    for path in paths:
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            limits.append(int(path.read_text()))
    return limits


def release_programs(root: Path = Path("/"), share: float = 0.5) -> bool:
    """Forget JAX's compiled programs if they have used up much of what the system lets a process map.

    Each program on the CPU needs dozens of memory maps, Linux allows 65,530 by default, and JAX ends with
    "LLVM compilation error: Cannot allocate memory" when there are no more: after some seventy different
    cells in one process. Programs that are needed again come back from the cache on disk.

    Args:
      root: of the file system with /proc.
      share: of the allowed maps, from which on programs are forgotten.

    Returns:
      Whether they were.
    """
    import jax

    try:
        allowed = int((root / "proc/sys/vm/max_map_count").read_text())
        used = (root / "proc/self/maps").read_bytes().count(b"\n")
    except (OSError, ValueError):
        return False
    if used < share * allowed:
        return False
    jax.clear_caches()
    return True


def device_memory(device: Any) -> int | None:
    """Return the bytes that JAX may use on a device with memory of its own; None if that is unknown."""
    if device.platform == "cpu":
        return None
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except (AttributeError, RuntimeError, NotImplementedError):
        return None


def cache_directory() -> Path | None:
    """Make and return the directory that keeps compiled programs between runs; None if it cannot be written.

    There is no fallback: in a directory that others may write to, a program that is read back and run could
    be theirs. And JAX would warn at every program that it cannot write.
    """
    try:
        path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxlsgd"
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except (OSError, RuntimeError):  # RuntimeError: there is no home at all
        return None


def _has_wide_vectors() -> bool:
    """Return whether the CPU has vectors of 512 bits, which LLVM uses only if it is set to prefer them."""
    try:
        version = importlib.metadata.version("jaxlib")
        known = "avx512f" in Path("/proc/cpuinfo").read_text().split()
    except (OSError, importlib.metadata.PackageNotFoundError):
        return False
    return known and version.startswith(_WIDTH_VERSIONS)


def describe(device: Any) -> dict[str, Any]:
    """Return what may change a row: versions, the code of this package, kind of device, compiler flags."""
    import jax
    import numpy

    return {
        "jaxlsgd": version(),
        "code": code(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "platform": device.platform,
        "device_kind": device.device_kind,
        "machine": platform.machine(),
        "xla_flags": _flags(),
    }


def difference(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    """Return in words how two descriptions differ in what may change a digit; '' if they do not."""
    keys = [key for key in dict.fromkeys([*ours, *theirs]) if key != "python"]
    return ", ".join(
        f"{key} {theirs.get(key)!r} is not {ours.get(key)!r}"
        for key in keys
        if theirs.get(key) != ours.get(key)
    )


def version() -> str:
    """Return the installed version of this package."""
    try:
        return importlib.metadata.version("jaxlsgd")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def code() -> str:
    """Return a digest of the source that makes rows, which may change in a checkout while the version stays."""
    total = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.*")):
        name = path.relative_to(PACKAGE)
        if path.suffix in (".py", ".csv") and name.parts[0] not in _READERS:
            total.update(f"{name.as_posix()}\n".encode() + path.read_bytes())
    return total.hexdigest()[:12]


def _flags() -> str:
    """Return XLA_FLAGS without the number of devices, which changes no row."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    return " ".join(sorted(flag for flag in flags if "device_count" not in flag))
