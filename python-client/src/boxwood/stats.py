"""Statistics: the daemon's tables as Arrow."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from . import errors
from ._tar import ChunkReader

if TYPE_CHECKING:
    import pyarrow


def arrow() -> Any:
    """Imports pyarrow, or says how to get it."""
    try:
        import pyarrow
        import pyarrow.ipc  # pyright: ignore[reportUnusedImport]
    except ImportError as problem:
        raise errors.unsupported(
            f"statistics as Arrow tables need pyarrow, which can't be imported: {problem}",
            'pip install "boxwood[arrow]", or take the bytes of Client.stats_chunks()',
        ) from None
    return pyarrow


def reader(chunks: Iterable[bytes]) -> pyarrow.RecordBatchReader:
    """Reads a stream of Arrow IPC bytes batch by batch, as they come."""
    pa = arrow()
    batches: pyarrow.RecordBatchReader = pa.ipc.open_stream(io.BufferedReader(ChunkReader(chunks), 1 << 20))
    return batches


def table(chunks: Iterable[bytes]) -> pyarrow.Table:
    """Reads all of a stream."""
    with contextlib.closing(reader(chunks)) as batches:
        return batches.read_all()
