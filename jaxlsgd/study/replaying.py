"""Run one replication of a study again, alone, and return its path."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

from jaxlsgd.core import checks
from jaxlsgd.core.rows import CellRows
from jaxlsgd.runs.simulate import Finished, run_cells
from jaxlsgd.study import jobs
from jaxlsgd.study.cells import CellSpec
from jaxlsgd.study.store.files import StoreError
from jaxlsgd.study.store.reader import Results
from jaxlsgd.study.study import Study

# A replication alone runs at another vector width than in its tile, so sums round differently.
TOLERANCE = {"float32": 1e-2, "float64": 1e-6}  # of a half-width


class Replay(NamedTuple):
    """The path of a replication, and its difference from the stored row."""

    path: CellRows  # one replication
    difference: float | None  # largest, in half-widths; None if there is no stored row
    agrees: bool | None


def replay(
    results: Results,
    cell_id: str,
    replication: int,
    rounds: int = 20,
    study: Study | None = None,
) -> Replay:
    """Run one replication again and compare its last round with the stored row.

    Args:
      results: the study's results.
      cell_id: the cell.
      replication: its number, from 0; it need not be stored.
      rounds: roughly how many rounds of the path to show.
      study: the study, if parts of it were given as objects; all others are built again.
    """
    spec = _spec(results, cell_id, study)
    checks.count("replication", replication, 0, 2**32 - 1)
    plan = spec.plan()
    num_rounds = plan.num_rounds
    wanted = np.unique(np.linspace(1, num_rounds, min(rounds, num_rounds)).round().astype(int))
    saves = sorted({*wanted.tolist(), *spec.saved_rounds(plan)})
    cell = jobs.runnable(spec, tuple(saves))
    key = jax.random.key(spec.seed)
    events = run_cells(key, [cell], replication, 1, shared_draws=False)
    path = cell.with_rows(next(event.rows for event in events if isinstance(event, Finished)))
    difference = _difference(results, cell_id, replication, path)
    agrees = None if difference is None else difference <= TOLERANCE[spec.dtype]
    return Replay(path, difference, agrees)


def _spec(results: Results, cell_id: str, study: Study | None) -> CellSpec:
    stored = results.cell(cell_id)
    if study is None:
        return stored.built()
    for spec in study.cells:
        if spec.digest == stored.digest:
            return spec
    text = f"study: must be the one that was run, got one without the cell {cell_id}"
    raise StoreError(text, "study", "conflict")


def _difference(results: Results, cell_id: str, replication: int, path: CellRows) -> float | None:
    """Return the largest difference from the stored row, in half-widths; infinite if only one is finite."""
    first = replication - replication % results.study.tile_size
    if not results.tile_path(cell_id, first).is_file():
        return None
    tile = results.read_tile(cell_id, first)
    largest = 0.0
    for name, alone in path.methods.items():
        stored, at = tile[name], replication - first
        size = np.abs(stored.half_width[-1, 0, at])
        pairs = [
            (alone.estimate[-1, 0], stored.estimate[-1, at]),
            (alone.half_width[-1, 0, 0], stored.half_width[-1, 0, at]),
        ]
        for new, old in pairs:
            both = ~np.isfinite(new) & ~np.isfinite(old)
            with np.errstate(invalid="ignore", divide="ignore"):
                gap = np.where(both, 0.0, np.abs(new - old) / size)
            largest = max(largest, float(np.nan_to_num(gap, nan=np.inf).max()))
    return largest
