"""Tables from CSV and Parquet files: whole, or a block of rows at a time."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxlsgd.core.checks import refusal
from jaxlsgd.regression.design import extra

BLOCK_BYTES = 16 << 20  # of a CSV that are parsed at a time
BLOCK_ROWS = 1 << 17  # of a Parquet file
_KINDS = "a CSV (.csv, .tsv, .csv.gz) or Parquet (.parquet) file"


def read_all(path: str | Path) -> Any:
    """Read a whole file as a pandas table."""
    path = _checked(path)
    with _parsing(path):
        if _is_parquet(path):
            return extra("pyarrow.parquet").read_table(path).to_pandas()
        csv = extra("pyarrow.csv")
        return csv.read_csv(path, parse_options=_dialect(csv, path)).to_pandas()


def blocks(path: str | Path) -> Iterator[Any]:
    """Yield Arrow batches of some rows each, in memory that does not grow with the file."""
    path = _checked(path)
    with _parsing(path):
        if _is_parquet(path):
            # With pre_buffer, it would keep all that it has read.
            with extra("pyarrow.parquet").ParquetFile(path, pre_buffer=False) as source:
                yield from source.iter_batches(BLOCK_ROWS)
            return
        csv = extra("pyarrow.csv")
        options = csv.ReadOptions(block_size=BLOCK_BYTES)
        with csv.open_csv(path, read_options=options, parse_options=_dialect(csv, path)) as source:
            yield from source


def is_large(path: str | Path) -> bool:
    """Return whether a table and a copy of it would take more than about a quarter of the memory."""
    path = _checked(path)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    packed = 4 if _is_parquet(path) or path.suffix.lower() in (".gz", ".bz2") else 1
    return packed * path.stat().st_size > memory / 4


def rows_of(path: Path, table: Any) -> int:
    """Return how many rows a file has: for CSV about, from the length of its first rows, Arrow's table."""
    if _is_parquet(path):
        return extra("pyarrow.parquet").read_metadata(path).num_rows
    csv, sample, written = extra("pyarrow.csv"), table.slice(0, 1000), io.BytesIO()
    csv.write_csv(sample, written, csv.WriteOptions(include_header=False, quoting_style="none"))
    length = written.tell() / sample.num_rows
    return max(table.num_rows, round(path.stat().st_size / length))


def _is_parquet(path: Path) -> bool:
    return path.suffix.lower() in (".parquet", ".pq")


def _dialect(csv: Any, path: Path) -> Any:
    return csv.ParseOptions(delimiter="\t" if ".tsv" in path.suffixes else ",")


def _checked(path: str | Path) -> Path:
    """Refuse what cannot be a table before it is parsed."""
    path = Path(path)
    if path.is_dir():
        raise refusal("file", f"be {_KINDS}", f"the directory {path}")
    with path.open("rb") as file:
        start = file.read(4096)
    if not start:
        raise refusal("file", "hold a table", f"{path.name}, which is empty")
    zipped = path.suffix.lower() in (".gz", ".bz2")
    if not _is_parquet(path) and not zipped and b"\0" in start:
        raise refusal("file", f"be {_KINDS}", f"{path.name}, which is binary")
    return path


@contextlib.contextmanager
def _parsing(path: Path) -> Iterator[None]:
    """Turn a parser's errors into one that names the file."""
    arrow = extra("pyarrow")
    try:
        yield
    except (arrow.ArrowInvalid, arrow.ArrowTypeError, UnicodeDecodeError) as error:
        first = str(error).strip().splitlines()[0]
        raise refusal("file", f"be {_KINDS}", path.name, f" ({first})") from error
