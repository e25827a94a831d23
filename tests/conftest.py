"""Settings of JAX for all tests; they must be made before its backend starts."""

import os
import tempfile
from pathlib import Path

import jax

# Compiling is most of the tests' time, so programs are kept from one run of the tests to the next.
# A user's own choice goes first.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _CACHE = Path(tempfile.gettempdir()) / f"jaxlsgd-test-cache-{os.getuid()}" / "tests"
    jax.config.update("jax_compilation_cache_dir", str(_CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
# A key that is used twice is an error.
jax.config.update("jax_debug_key_reuse", True)
# Two devices, so that what runs on several is tested on any machine.
jax.config.update("jax_num_cpu_devices", 2)
