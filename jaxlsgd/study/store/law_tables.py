"""Tables that tiles have used, kept beside them, so that a run that goes on tabulates nothing again.

Each file holds what one tile was the first to use, and is named by its content. Files are only ever added.
They can be lost without harm: what is not there is computed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxlsgd.inference.laws.tables import Rows
from jaxlsgd.study.cells import digest_of
from jaxlsgd.study.store import files
from jaxlsgd.study.store.files import FORMAT, Damaged, StoreError

FOLDER = "tables"


def plain(rows: Mapping[str, Any]) -> dict[str, list[float | None]]:
    """Rows for JSON, to the last bit; None stands for infinity."""
    return {
        key: [value if math.isfinite(value) else None for value in values.tolist()]
        for key, values in sorted(rows.items())
    }


def from_plain(content: Any) -> Rows:
    """Rows from what `plain` made; raises `Damaged` unless it can be that."""
    try:
        return {
            str(key): np.array([math.inf if x is None else float(x) for x in values])
            for key, values in content.items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise Damaged("its tables are not what was written") from error


def write(directory: Path, rows: Mapping[str, Any], code: str) -> None:
    """Adds a file of rows that this code made."""
    folder = directory / FOLDER
    files.refuse_link(folder)
    content = {"format": FORMAT, "code": code, "rows": plain(rows)}
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise files.cannot("make", folder, error) from error
    files.write_json(folder / f"{digest_of(content)[:32]}.json", content)


def read(directory: Path, code: str) -> tuple[Rows, list[str]]:
    """All rows that this code has made, and what is to be said of files that are damaged."""
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
            with contextlib.suppress(OSError):  # it is found again, and said again
                path.unlink()
            warnings.append(f"{error}; it is removed, and its tables are computed again")
        except StoreError as error:
            warnings.append(f"{error}; its tables are computed again")
    return rows, warnings
