"""Settings of JAX for all tests; they must be made before its backend starts."""

import os
import tempfile
from pathlib import Path

import jax
import pytest

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

# Compiling is most of their time, and what they ask does not depend on how well LLVM optimises. Whoever asks for
# the same bits, for many steps or for memory is not among them.
COMPILED_QUICKLY = {
    *("test_algorithms", "test_bad_input", "test_burn_in", "test_contracts", "test_estimators"),
    *("test_failures", "test_field_algorithms", "test_field_methods", "test_field_problems"),
    *("test_functions", "test_joint", "test_notebook", "test_observation_average"),
    *("test_participation",),
    *("test_own_method", "test_own_problems", "test_problems", "test_solution", "test_tracking"),
}


@pytest.fixture(autouse=True, scope="module")
def _compiled_quickly(request: pytest.FixtureRequest):
    jax.config.update("jax_disable_most_optimizations", request.module.__name__ in COMPILED_QUICKLY)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
