"""Keep the law tables that tiles have used, so that a resumed run does not compute them again.

Each file holds rows that one tile was the first to use, and is named by a digest of its content. Files are
only added. A lost file does no harm: its rows are computed again.
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import numpy as np

from jaxlsgd.inference.laws.tables import Rows
from jaxlsgd.study.cells import digest_of
from jaxlsgd.study.store import files
from jaxlsgd.study.store.files import FORMAT, Damaged, StoreError

FOLDER = "tables"


def plain(rows: Rows) -> dict[str, list[float | None]]:
    """Return rows as JSON data, to the last bit; None stands for infinity."""
    return {
        key: [value if math.isfinite(value) else None for value in values.tolist()]
        for key, values in sorted(rows.items())
    }


def from_plain(content: Any) -> Rows:
    """Return the rows that `plain` describes; raise `Damaged` for anything else."""
    try:
        return {
            str(key): np.array([math.inf if x is None else float(x) for x in values])
            for key, values in content.items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise Damaged("its tables are not what was written") from error


def write(directory: Path, rows: Rows, code: str) -> None:
    """Add a file of rows that this code has computed."""
    folder = directory / FOLDER
    files.refuse_link(folder)
    content = {"format": FORMAT, "code": code, "rows": plain(rows)}
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise files.cannot("make", folder, error) from error
    files.write_json(folder / f"{digest_of(content)[:32]}.json", content)


def read(directory: Path, code: str) -> tuple[Rows, list[str]]:
    """Return all rows that this code has computed, and warnings of damaged files."""
    folder, rows, warnings = directory / FOLDER, Rows(), list[str]()
    files.refuse_link(folder)
    if folder.is_dir():
        files.remove_unfinished(folder)
    for path in sorted(folder.glob("*.json")):
        try:
            content = files.read_json(path)
            if content.get("code") == code:
                rows |= from_plain(content.get("rows"))
        except Damaged as error:
            with contextlib.suppress(OSError):  # the next run finds it again
                path.unlink()
            warnings.append(f"{error}; it is removed, and its tables are computed again")
        except StoreError as error:
            warnings.append(f"{error}; its tables are computed again")
    return rows, warnings
