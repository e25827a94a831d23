"""Rows of replications for other programs: `write` makes Parquet, CSV or netCDF, `to_xarray` a dataset."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxlsgd.analysis import looks
from jaxlsgd.analysis.measures import summarise
from jaxlsgd.core import checks
from jaxlsgd.core.causes import Cause
from jaxlsgd.core.display import Table, write_csv
from jaxlsgd.core.rows import CellRows, cells_of
from jaxlsgd.core.storage import replacing

Format = Literal["parquet", "netcdf", "csv"]
ENDINGS: dict[Format, str] = {"parquet": "parquet", "netcdf": "nc", "csv": "csv"}
_FACTS = ("problem", "algorithm", "schedule", "num_steps", "num_rounds")
_TEXTS = (*_FACTS[:3], "method", "coordinate", "cause")
_WHOLE = ("num_steps", "num_rounds", "save_round", "save_steps", "replication")
COLUMNS = (
    *_FACTS,
    *("save_round", "save_steps", "method", "level", "coordinate", "replication"),
    *("estimate", "scale", "half_width", "truth", "floored", "cause", "truth_error"),
)
_MISSING = 255  # cause of a replication that a cell does not have


def write(source: Any, path: str | Path, format: Format, *, force: bool = False) -> Path:
    """Write every row of every replication; the file is complete or not there.

    Parquet and CSV have the columns `COLUMNS`: one line for each cell, method, saved round, level,
    coordinate and replication, whose interval is estimate ± half_width. An unknown truth is missing, and
    so is its standard error, `truth_error`, which is 0 for an exact truth. netCDF has the arrays of
    `to_xarray`. Numbers keep every bit. If a cell has a rule for stopping, a last column `stop` is true at the round at
    which the run stops by the method's intervals, or else at its last.

    Args:
      source: `CellRows`, a sequence of them, or the results of a study.
      path: the file.
      format: "parquet", "netcdf" (both need the extra "tables") or "csv".
      force: whether to replace a file that is there.

    Returns:
      The path.

    Example::

        write(cells, "rows.parquet", "parquet")
        frame = pandas.read_parquet("rows.parquet")
    """
    checks.choice("format", format, Format)
    path, save = Path(path), _WRITERS[format]
    cells = cells_of(source)
    with replacing(path, force) as temporary:
        save(cells, temporary)
    return path


def to_frame(source: Any, rows: bool = False) -> Any:
    """Return a `pandas.DataFrame` of measures, or of the rows of all replications.

    Args:
      source: `CellRows`, a sequence of them, or the results of a study.
      rows: False for a line per cell, method, saved round, level and coordinate, with coverage, length and
        their standard errors, as `jaxlsgd table --format csv` has them; True for the lines of `write`.

    Example::

        results.to_frame().query("method == 'one_step'")[["schedule", "coverage", "coverage_mcse"]]
    """
    cells = cells_of(source)
    if rows:
        names = _columns(cells)
        return Table("", names, [x for cell in cells for x in _lines(cell, names)]).to_frame()
    found = [row for cell in cells for row in summarise(cell)]
    names = list(found[0]) if found else []
    return Table.of(found, names).to_frame()


def to_xarray(source: Any) -> Any:
    """Return replications, not their measures, as one `xarray.Dataset`.

    Args:
      source: `CellRows`, a sequence of them, or the results of a study.

    Returns:
      Variables estimate, scale, half_width, floored, cause (of `Cause`), truth and truth_error over cell,
      method, save, level, replication and coordinate, and for each cell its problem, algorithm, schedule,
      num_steps and num_rounds, and the rounds and steps of its saves. What a cell does not have is NaN,
      round 0, or cause 255.

    Example::

        rows = to_xarray(cells).sel({"method": "one_step"})  # `method=` is an option of xarray's own
        covered = abs(rows.estimate - rows.truth) <= rows.half_width
        covered.where(rows.cause <= 1).mean("replication")
    """
    xarray = _extra("xarray")
    cells = cells_of(source)
    axes = _axes(cells)
    names = ("cell", "method", "save", "level", "replication", "coordinate")
    size = {
        "cell": len(cells),
        "save": max((len(cell.save_at) for cell in cells), default=0),
        "replication": max((cell.replications for cell in cells), default=0),
        **{name: len(values) for name, values in axes.items()},
    }
    place = (*names[:3], *names[4:])
    dims: dict[str, tuple[str, ...]] = {
        "estimate": place,
        "scale": place,
        "half_width": names,
        "truth": ("cell", "method", "coordinate"),
        "truth_error": ("cell", "method", "coordinate"),
        "floored": place[:-1],
        "cause": place[:-1],
    }
    empty = {"floored": np.int8(0), "cause": np.int16(_MISSING)}
    made: dict[str, np.ndarray] = {
        name: np.full(tuple(size[x] for x in axis), empty.get(name, np.nan))
        for name, axis in dims.items()
    }
    rounds = {name: np.zeros((size["cell"], size["save"]), int) for name in ("save_at", "steps_at")}
    for i, cell in enumerate(cells):
        _fill(made, i, cell, axes)
        for name, values in rounds.items():
            values[i, : len(cell.save_at)] = getattr(cell, name)
    about = {name: ("cell", [getattr(cell, name) for cell in cells]) for name in _FACTS}
    about |= {"save_round": (("cell", "save"), rounds["save_at"])}
    about |= {"save_steps": (("cell", "save"), rounds["steps_at"])}
    return xarray.Dataset(
        {name: (dims[name], array) for name, array in made.items()}, {**axes, **about}
    )


def _axes(cells: Sequence[CellRows]) -> dict[str, list[Any]]:
    """Return methods, levels and coordinates of all cells."""
    return {
        "method": list(dict.fromkeys(name for cell in cells for name in cell.methods)),
        "level": list(dict.fromkeys(level for cell in cells for level in cell.levels)),
        "coordinate": list(
            dict.fromkeys(x for cell in cells for names in cell.coordinates.values() for x in names)
        ),
    }


def _fill(made: dict[str, np.ndarray], i: int, cell: CellRows, axes: dict[str, list[Any]]) -> None:
    levels = np.array([axes["level"].index(level) for level in cell.levels])
    saves, runs = np.arange(len(cell.save_at)), np.arange(cell.replications)
    for name, rows in cell.methods.items():
        m = axes["method"].index(name)
        columns = np.array([axes["coordinate"].index(x) for x in cell.coordinates[name]])
        where = np.ix_(saves, runs, columns)
        made["estimate"][i, m][where] = rows.estimate
        made["scale"][i, m][where] = rows.scale
        made["half_width"][i, m][np.ix_(saves, levels, runs, columns)] = rows.half_width
        made["floored"][i, m][np.ix_(saves, runs)] = rows.floored
        made["cause"][i, m][np.ix_(saves, runs)] = rows.cause
        if (truth := cell.truth[name]) is not None:
            made["truth"][i, m, columns] = truth
            made["truth_error"][i, m, columns] = cell.truth_error.get(name, 0.0)


def _to_netcdf(cells: Sequence[CellRows], path: Path) -> None:
    made = to_xarray(cells)
    # SciPy is always installed, but xarray takes it only if it is named.
    installed = [name for name in ("netCDF4", "h5netcdf") if importlib.util.find_spec(name)]
    made.to_netcdf(path, engine=None if installed else "scipy")


def _blocks(cell: CellRows) -> Iterator[dict[str, Any]]:
    """Yield the lines of a cell as columns, one method, saved round and level at a time.

    A column is one value for all its lines, or an array with a value for each.
    """
    n = cell.replications
    facts = {name: getattr(cell, name) for name in _FACTS}
    for name, rows in cell.methods.items():
        labels, truth = np.array(cell.coordinates[name]), cell.truth[name]
        d = len(labels)
        target = np.full(d, np.nan) if truth is None else truth
        error = cell.truth_error.get(name, 0 * target)
        stop = np.full(n, -1) if cell.until is None else looks.stops(cell, name, cell.until)[0]
        for i, (at, steps) in enumerate(zip(cell.save_at, cell.steps_at, strict=True)):
            known = {
                "coordinate": np.repeat(labels, n),
                "replication": np.tile(np.arange(n), d),
                "estimate": rows.estimate[i].T.ravel(),
                "scale": rows.scale[i].T.ravel(),
                "truth": np.repeat(target, n),
                "truth_error": np.repeat(error, n),
                "floored": np.tile(rows.floored[i], d),
                "cause": np.tile(np.array([Cause(c).text for c in rows.cause[i]]), d),
                "stop": np.tile(stop == i, d),
            }
            for j, level in enumerate(cell.levels):
                where = {"save_round": at, "save_steps": steps, "method": name, "level": level}
                half = {"half_width": rows.half_width[i, j].T.ravel()}
                yield facts | where | known | half


def _to_parquet(cells: Sequence[CellRows], path: Path) -> None:
    arrow, parquet = _extra("pyarrow"), _extra("pyarrow.parquet")
    kinds = dict.fromkeys(_columns(cells), arrow.float64())
    kinds |= dict.fromkeys(kinds.keys() & {"floored", "stop"}, arrow.bool_())
    kinds |= dict.fromkeys(_WHOLE, arrow.int64()) | dict.fromkeys(_TEXTS, arrow.string())
    schema = arrow.schema(list(kinds.items()))
    with parquet.ParquetWriter(path, schema) as writer:
        for cell in cells:
            tables = [arrow.table(_full(block, list(kinds)), schema) for block in _blocks(cell)]
            writer.write_table(arrow.concat_tables(tables))


def _columns(cells: Sequence[CellRows]) -> tuple[str, ...]:
    return (*COLUMNS, *(["stop"] if any(cell.until is not None for cell in cells) else []))


def _full(block: dict[str, Any], columns: Sequence[str]) -> dict[str, Any]:
    """Return the columns of a block with a value for every line, None for an unknown truth."""
    count = len(block["replication"])
    found = {}
    for name in columns:
        value = block[name]
        found[name] = value if isinstance(value, np.ndarray) else [value] * count
    if np.isnan(block["truth"]).all():
        found |= dict.fromkeys(("truth", "truth_error"), [None] * count)
    return found


def _to_csv(cells: Sequence[CellRows], path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        names = _columns(cells)
        write_csv(file, names, (line for cell in cells for line in _lines(cell, names)))


def _lines(cell: CellRows, names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    for block in _blocks(cell):
        columns = _full(block, names).values()
        yield from zip(
            *(x.tolist() if isinstance(x, np.ndarray) else x for x in columns), strict=True
        )


_WRITERS: dict[str, Callable[[Sequence[CellRows], Path], None]] = {
    "parquet": _to_parquet,
    "netcdf": _to_netcdf,
    "csv": _to_csv,
}


def _extra(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.split(".")[0]
        message = f"this format needs {name}: pip install 'jaxlsgd[tables]'"
        raise ImportError(message) from error
