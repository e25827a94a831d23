"""Rows of a small study as version 0.1.0 made them: both models, five schedules, all its methods.

`golden_rows.json` has the estimates and 95 % half-widths of replication 7. On the machine that made them the
rows were the same to the last bit after the package was reorganised; other processors round otherwise.
"""

from __future__ import annotations

import json
from pathlib import Path

import chex
import jax
import numpy as np
import pytest

from jaxlsgd.study import Results, Study

pytestmark = pytest.mark.for_users

GOLDEN = json.loads((Path(__file__).parent / "golden_rows.json").read_text())
# Half-widths are square roots of sums of squares; float32 carries seven digits.
CLOSE = {"float32": 2e-4, "float64": 1e-8}
# Its critical values have since been computed otherwise, within this of those of the first version.
TABULATED, TABULATED_CLOSE = "random_scaling[finite]", 5e-4
METHODS = [
    *("plug_in", "plug_in[finite]", "random_scaling", "random_scaling[schedule]"),
    *("random_scaling[paper]", "random_scaling[finite]"),
]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_are_those_of_the_first_version(dtype: str, tmp_path: Path):
    study = Study(
        problems=["paper-linear", "paper-logistic"],
        schedules=["C1", "C5", "Log", "P(1/3)", "P(1/2)"],
        horizons=[300],
        warmup=0.05,
        methods=METHODS,
        replications=8,
        tile_size=8,
        seed=3,
        dtype=dtype,
    )
    assert study.run(tmp_path / "results", devices=jax.devices()[:1]).exit_code == 0
    found = {}
    for cell in Results(tmp_path / "results").read_all():
        for name, rows in cell.methods.items():
            key = f"{dtype}/{cell.problem}/{cell.schedule}/{name}"
            found[key] = [rows.estimate[-1, 7], rows.half_width[-1, 0, 7]]
    right = {key: list(map(np.asarray, x)) for key, x in GOLDEN.items() if key.startswith(dtype)}
    assert len(right) == 60
    for tabulated in (False, True):
        close = TABULATED_CLOSE if tabulated else CLOSE[dtype]
        mine, theirs = (
            {key: x for key, x in rows.items() if key.endswith(TABULATED) is tabulated}
            for rows in (found, right)
        )
        chex.assert_trees_all_close(mine, theirs, rtol=close, atol=close / 10)
