"""Statistics: the exported stream as others read it."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

import boxwood

from fakeserver import FakeDaemon

pa = pytest.importorskip("pyarrow")


@pytest.fixture
def rows(daemon: FakeDaemon) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = [
        {"node_id": f"nd_{n}", "total_ns": n, "verdict": "none" if n % 3 else "files"} for n in range(2000)
    ]
    table = pa.Table.from_pylist(rows)
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=256)
    daemon.fake.tables["turns"] = sink.getvalue()
    return rows


def test_tables(client: boxwood.Client, rows: list[dict[str, object]]) -> None:
    (table,) = client.tables()
    assert (table.name, table.rows, table.columns[0].type) == ("turns", 3, "string")


def test_as_table_and_batches(client: boxwood.Client, rows: list[dict[str, object]]) -> None:
    assert client.stats("turns").to_pylist() == rows
    with client.stats_reader("turns") as reader:
        assert [batch.num_rows for batch in reader] == [256] * 7 + [208]


def test_polars_and_duckdb_read_it(
    client: boxwood.Client, rows: list[dict[str, object]], tmp_path: Path
) -> None:
    polars = pytest.importorskip("polars")
    duckdb = pytest.importorskip("duckdb")
    data = b"".join(client.stats_chunks("turns"))
    assert polars.read_ipc_stream(io.BytesIO(data)).to_dicts() == rows
    turns = client.stats("turns")
    found = duckdb.sql("select verdict, count(*) from turns group by 1 order by 1").fetchall()
    assert found == [("files", 667), ("none", 1333)]
    assert turns.num_rows == 2000


def test_no_such_table(client: boxwood.Client) -> None:
    with pytest.raises(boxwood.NotFound):
        client.stats("nothing")


def test_a_reader_left_early_ends_its_call(client: boxwood.Client, rows: list[dict[str, object]]) -> None:
    reader = client.stats_reader("turns")
    reader.read_next_batch()
    reader.close()
    assert client.info().version == "fake"


def test_without_pyarrow(client: boxwood.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(boxwood.Unsupported, match=r"need pyarrow.*boxwood\[arrow\]"):
        client.stats("turns")
