"""Tables from CSV and Parquet files: whole, or a block of rows at a time."""

from __future__ import annotations

import bz2
import codecs
import contextlib
import gzip
import io
import itertools
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal
from jaxlsgd.regression.design import CSV_GAPS, extra, gaps_of

BLOCK_BYTES = 16 << 20  # of a CSV that are parsed at a time
BLOCK_ROWS = 1 << 17  # of a Parquet file
_KINDS = "a CSV (.csv, .tsv, .csv.gz) or Parquet (.parquet) file"


class Dialect(NamedTuple):
    """How a CSV file is written; None for what its first bytes say."""

    encoding: str | None = None
    separator: str | None = None
    decimal: str = "."

    @classmethod
    def of(cls, encoding: Any, separator: Any, decimal: Any) -> Dialect:
        """Refuse what is no encoding, separator or decimal mark."""
        if encoding is not None:
            try:
                codecs.lookup(encoding)
            except (LookupError, TypeError):
                hint = "; known are utf-8, latin-1, cp1252, utf-16 and all others of Python"
                raise refusal(
                    "encoding", "be one that Python has", encoding, hint, code="choice"
                ) from None
        if separator is not None and not (isinstance(separator, str) and len(separator) == 1):
            raise refusal("separator", "be one character", separator)
        checks.choice("decimal", decimal, (".", ","))
        if separator == decimal:
            raise refusal("decimal", "differ from the separator", decimal, code="conflict")
        return cls(encoding, separator, decimal)

    def options(
        self, csv: Any, path: Path, block: int | None = None, gaps: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Return the options of Arrow's parser for a file; `gaps` are read as missing as well."""
        start = _start(path)
        encoding = self.encoding or _encoding_of(start)
        separator = self.separator or _separator_of(start.decode(encoding, "replace"), path)
        if separator == self.decimal:
            hint = "; give separator=';' or what it is"
            raise refusal(
                "decimal", "differ from the separator", self.decimal, hint, code="conflict"
            )
        reading = csv.ReadOptions(encoding=encoding, **({"block_size": block} if block else {}))
        return {
            "read_options": reading,
            "parse_options": csv.ParseOptions(delimiter=separator),
            "convert_options": csv.ConvertOptions(
                decimal_point=self.decimal, null_values=[*CSV_GAPS, *gaps]
            ),
        }


def _start(path: Path) -> bytes:
    """Return the first bytes of a file, unpacked."""
    opened = {".gz": gzip.open, ".bz2": bz2.open}.get(path.suffix.lower(), open)
    with opened(path, "rb") as file:
        return file.read(1 << 16)


def _encoding_of(start: bytes) -> str:
    """Return what the mark at the beginning of a file says; UTF-8 without one."""
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    return "utf-8"  # Arrow skips its mark


def _separator_of(start: str, path: Path) -> str:
    """Return the separator that the first line has most of; a comma if it has none."""
    if ".tsv" in path.suffixes:
        return "\t"
    line = re.sub(r'"[^"]*"', "", start.partition("\n")[0])
    return max(",\t;|", key=lambda one: (line.count(one), one == ","))


def read_all(path: str | Path, dialect: Dialect = Dialect()) -> Any:  # noqa: B008
    """Read a whole file as a pandas table."""
    path = _checked(path, dialect)
    with _parsing(path, dialect):
        if _is_parquet(path):
            return extra("pyarrow.parquet").read_table(path).to_pandas()
        csv = extra("pyarrow.csv")
        found = csv.read_csv(path, **dialect.options(csv, path))
        _check_text(path, dialect, found.schema)
        if gaps := _other_gaps(found):
            found = csv.read_csv(path, **dialect.options(csv, path, gaps=gaps))
        return found.to_pandas()


def blocks(path: str | Path, dialect: Dialect = Dialect()) -> Iterator[Any]:  # noqa: B008
    """Yield Arrow batches of some rows each, in memory that does not grow with the file."""
    path = _checked(path, dialect)
    with _parsing(path, dialect):
        if _is_parquet(path):
            # With pre_buffer, it would keep all that it has read.
            with extra("pyarrow.parquet").ParquetFile(path, pre_buffer=False) as source:
                yield from source.iter_batches(BLOCK_ROWS)
            return
        csv = extra("pyarrow.csv")
        with csv.open_csv(path, **dialect.options(csv, path, BLOCK_BYTES)) as source:
            _check_text(path, dialect, source.schema)
            gaps = [gap for first in itertools.islice(source, 1) for gap in _other_gaps(first)]
        with csv.open_csv(path, **dialect.options(csv, path, BLOCK_BYTES, gaps)) as source:
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


def _checked(path: str | Path, dialect: Dialect | None = None) -> Path:
    """Refuse what cannot be a table before it is parsed."""
    path = Path(path)
    if path.is_dir():
        raise refusal("file", f"be {_KINDS}", f"the directory {path}", code="type")
    with path.open("rb") as file:
        start = file.read(4096)
    if not start:
        raise refusal("file", "hold a table", f"{path.name}, which is empty", code="data")
    zipped = path.suffix.lower() in (".gz", ".bz2")
    encoding = (dialect and dialect.encoding) or _encoding_of(start)
    wide = encoding.lower().replace("_", "-").startswith(("utf-16", "utf-32"))
    if not _is_parquet(path) and not zipped and not wide and b"\0" in start:
        raise refusal("file", f"be {_KINDS}", f"{path.name}, which is binary", code="type")
    return path


def _check_text(path: Path, dialect: Dialect, schema: Any) -> None:
    """Refuse a CSV with text that Arrow could not decode, and has left as bytes."""
    types = extra("pyarrow").types
    for field in schema:
        if types.is_binary(field.type):
            raise _misread(path, dialect, f"column {field.name!r}")


def _other_gaps(table: Any) -> list[str]:
    """Return gaps that made text of a column of numbers, as its parser does not know them."""
    types = extra("pyarrow").types
    texts = [one for one in table.columns if types.is_string(one.type)]
    return sorted({gap for column in texts for gap in gaps_of(column)})


def _misread(path: Path, dialect: Dialect, where: str) -> checks.Refusal:
    hint = f" ({where}); give its own, as in encoding='latin-1', or cp1252 or utf-16"
    return refusal("file", f"be written in {dialect.encoding or 'UTF-8'}", path.name, hint)


@contextlib.contextmanager
def _parsing(path: Path, dialect: Dialect) -> Iterator[None]:
    """Turn a parser's errors into one that names the file."""
    arrow = extra("pyarrow")
    try:
        yield
    except (UnicodeDecodeError, arrow.ArrowInvalid) as error:
        text = str(error).strip().splitlines()[0]
        if not isinstance(error, UnicodeDecodeError) and not re.search("utf-?8|codec", text, re.I):
            raise refusal(
                "file", f"be {_KINDS}", path.name, f" ({text})", code="damaged"
            ) from error
        raise _misread(path, dialect, text) from error
    except (arrow.ArrowTypeError, EOFError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk
        first = str(error).strip().splitlines()[0]
        raise refusal("file", f"be {_KINDS}", path.name, f" ({first})", code="damaged") from error
