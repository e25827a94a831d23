"""Settings of JAX for all tests; they must be made before its backend starts."""

import gc
import os
import tempfile
from pathlib import Path
from typing import Any

import jax
import pytest

# Compiling is most of the tests' time, so programs are kept from one run of the tests to the next.
# A user's own choice goes first.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _CACHE = Path(tempfile.gettempdir()) / f"jaxlsgd-test-cache-{os.getuid()}" / "tests"
    jax.config.update("jax_compilation_cache_dir", str(_CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
# A key that is used twice is an error.
jax.config.update("jax_debug_key_reuse", True)
# Two devices, so that what runs on several is tested on any machine. But JAX compiles for each of them, so who is not
# about devices uses the first, unless it asks for others.
jax.config.update("jax_num_cpu_devices", 2)
ON_ALL_DEVICES = {
    *("test_engine", "test_jobs", "test_open_house", "test_runner", "test_together"),
    *("test_trial", "test_progress"),
}
_all_devices = jax.local_devices
# Tracing makes many objects that live on: to look through them all the time was a twentieth of the tests' time.
gc.set_threshold(100_000, 20, 100)


def _first_device(*arguments: Any, **options: Any) -> list[jax.Device]:
    return _all_devices(*arguments, **options)[:1]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    jax.local_devices = _all_devices if item.path.stem in ON_ALL_DEVICES else _first_device
