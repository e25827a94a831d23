"""Flags for XLA with which most tests run: most of their time is compiling, and few depend on how well that is done.

    python tests/compiling.py   prints the flags, or nothing if this XLA does not have them

Programs compile in a third of the time, and run eight times slower. Which multiplications and additions become one,
with one rounding, is left to chance, so that a test that compares bits, sizes or speed of different programs, or
that runs many steps, is marked `for_users` and runs in a process without these flags; so do all tests under a plain
`pytest`.
"""

from __future__ import annotations

import os
import subprocess
import sys

QUICKLY = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false "
    "--xla_cpu_parallel_codegen_split_count=1"
)


def inherited() -> dict[str, str]:
    """Return the environment with which another process compiles as this one does."""
    return {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "")}


def _works() -> bool:
    """Whether XLA has these flags: it ends a process that names others."""
    code = "import jax; jax.numpy.zeros(1).block_until_ready()"
    environment = os.environ | {"XLA_FLAGS": QUICKLY, "JAX_PLATFORMS": "cpu"}
    return not subprocess.run(
        [sys.executable, "-c", code], env=environment, stderr=subprocess.DEVNULL, check=False
    ).returncode


if __name__ == "__main__":
    print(QUICKLY if _works() else "")
