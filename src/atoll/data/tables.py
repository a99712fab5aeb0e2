"""Reads Parquet and Arrow files in small batches."""

import errno
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from atoll.errors import InputError, StoreError, shown
from atoll.storage import open_regular, reason_of

MAX_TABLE_READ = 2 << 30  # bytes of a record batch
TABLE_BATCH, TABLE_BATCH_BYTES = 256, 256 << 20  # maximum rows and approximate bytes of a Parquet batch


class Bounded:
    """A file that reads at most `limit` bytes per call, whatever its headers claim."""

    def __init__(self, file: BufferedReader, limit: int) -> None:
        self._file, self._limit = file, limit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= self._limit:
            raise OSError(errno.EFBIG, f"it claims a part of {shown(size)} bytes")
        return self._file.read(size)


def table_batches(
    path: Path, columns: list[str] | None = None, group: int = 0, root: Path | None = None
) -> Iterator[tuple[int, int, Any]]:
    """Yields (row group, number within it, record batch), starting from a group; an Arrow file is one group."""
    pa = pyarrow()
    damaged = (pa.ArrowException, OSError, ValueError, IndexError, KeyError)
    try:
        with open_regular(path, root) as raw:
            if path.suffix == ".parquet":
                from pyarrow import parquet

                with parquet.ParquetFile(raw, buffer_size=1 << 20) as file:
                    for g in range(group, file.num_row_groups):
                        about = file.metadata.row_group(g)
                        num = TABLE_BATCH_BYTES * about.num_rows // max(1, about.total_byte_size)
                        batches = file.iter_batches(max(1, min(TABLE_BATCH, num)), row_groups=[g], columns=columns)
                        yield from ((g, i, batch) for i, batch in enumerate(batches))
            else:
                is_file = raw.peek(6)[:6] == b"ARROW1"
                reader = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(Bounded(raw, MAX_TABLE_READ))
                batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
                yield from ((0, i, batch) for i, batch in enumerate(batches))
    except StoreError:
        raise
    except damaged as error:
        raise OSError(f"cannot be read as Parquet or Arrow: {reason_of(error)}") from error


def column_names(path: Path, root: Path | None = None) -> list[str]:
    """Returns the columns of a Parquet file; raises OSError for any other file."""
    pa = pyarrow()
    try:
        with open_regular(path, root) as raw:
            from pyarrow import parquet

            with parquet.ParquetFile(raw, buffer_size=1 << 20) as file:
                return list(file.schema_arrow.names)
    except StoreError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise OSError(f"cannot be read as Parquet: {reason_of(error)}") from error


def pyarrow() -> Any:
    """Imports pyarrow; if it is missing, the error says how to install it."""
    try:
        import pyarrow
    except ModuleNotFoundError as error:
        raise InputError("reading Parquet and Arrow needs pyarrow: pip install 'atoll[parquet]'") from error
    return pyarrow
