"""Statistics: the exported stream as others read it."""

from __future__ import annotations

import datetime
import io
import math
import sys
from pathlib import Path
from typing import Any

import pytest

import boxwood
from boxwood import stats

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


@pytest.mark.parametrize("to", ["arrow", "pandas", "polars"])
def test_each_form_holds_the_same(client: boxwood.Client, rows: list[dict[str, object]], to: Any) -> None:
    pytest.importorskip({"arrow": "pyarrow"}.get(to, to))
    table = client.stats("turns", to=to)
    assert type(table).__module__.split(".")[0] == {"arrow": "pyarrow"}.get(to, to)
    assert len(table) == 2000
    assert stats.skip_share(table) == 1333 / 2000


def test_a_form_that_is_unknown_or_missing(
    daemon: FakeDaemon, client: boxwood.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(boxwood.InvalidArgument, match="to must be"):
        client.stats("turns", to="csv")  # type: ignore[call-overload]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(boxwood.Unsupported, match="pip install pandas"):
        client.stats("turns", to="pandas")
    assert not daemon.fake.named("ExportStats")  # said before anything was fetched


def test_what_is_asked_for(daemon: FakeDaemon, client: boxwood.Client, rows: list[dict[str, object]]) -> None:
    zone = datetime.timezone(datetime.timedelta(hours=2))
    since = datetime.datetime(2026, 1, 31, 14, 0, 0, 1, tzinfo=zone)
    client.stats("turns", tree="tr_1", since=since, verdicts=["files", "both"])
    _, asked, _, _ = daemon.fake.named("ExportStats")[-1]
    assert (asked.tree_id, list(asked.verdicts), asked.until) == ("tr_1", ["files", "both"], 0)
    assert asked.since == 1769860800_000001000  # 2026-01-31T12:00:00.000001Z
    with pytest.raises(boxwood.InvalidArgument, match="names no zone"):
        client.stats("turns", until=datetime.datetime(2026, 1, 31))


# A tree: root - a - b - {c, d}, root - e. Leaves c and d at depth 3, e at depth 1.
NODES = pa.table(
    {
        "node": ["r", "a", "b", "c", "d", "e"],
        "tree": ["t"] * 6,
        "parent": ["", "r", "a", "b", "b", "r"],
        "depth": [0, 1, 2, 3, 3, 1],
    }
)


def test_turns_saved() -> None:
    saved = stats.turns_saved(NODES)
    assert (saved.run, saved.alone, saved.saved, saved.share) == (5, 7, 2, 2 / 7)
    # The order of the rows doesn't matter, nor does a null for the root's parent.
    turned = pa.Table.from_pylist(
        [{**row, "parent": row["parent"] or None} for row in NODES.to_pylist()[::-1]]
    )
    assert stats.turns_saved(turned) == saved
    empty = stats.turns_saved(NODES.slice(0, 0))
    assert (empty.run, empty.saved, empty.share) == (0, 0, 0)


def test_tokens_saved() -> None:
    tokens = {"a": 10, "b": 5, "c": 1, "d": 2, "e": 4}
    saved = stats.tokens_saved(NODES, tokens)
    # Run: 10+5+1+2+4. Alone: c 16, d 17, e 4.
    assert (saved.run, saved.alone, saved.saved) == (22, 37, 15)


def test_a_deep_tree_is_no_recursion() -> None:
    deep = pa.table(
        {"node": [str(n) for n in range(5000)], "parent": ["", *(str(n) for n in range(4999))]}
    ).take(list(reversed(range(5000))))
    assert stats.turns_saved(deep).alone == 4999


@pytest.mark.parametrize(
    ("depths", "branching"),
    [
        ([0], 0.0),
        ([0, 1, 2, 3], 1.0),
        ([0, 1, 1, 2, 2, 2, 2], 2.0),
        ([0, *[1] * 7], 7.0),
        ([0, *[1] * 3, *[2] * 9, *[3] * 27], 3.0),
        # 5 nodes, 3 deep: b + b^2 + b^3 = 5.
        ([0, 1, 1, 2, 3, 3], 1.2785),
    ],
)
def test_effective_branching(depths: list[int], branching: float) -> None:
    table = pa.table({"tree": ["t"] * len(depths), "depth": depths})
    (found,) = stats.effective_branching(table).values()
    assert found == pytest.approx(branching, abs=5e-4)
    if depths[-1]:
        deepest = max(depths)
        assert sum(found**level for level in range(1, deepest + 1)) == pytest.approx(len(depths) - 1)


def test_fork_latency() -> None:
    forks = pa.table(
        {
            "outcome": ["ok"] * 20 + ["failed"] * 2,
            "ready_ns": [n * 1_000_000 for n in range(20, 0, -1)] + [999_000_000, 0],
        }
    )
    found = stats.fork_latency(forks)
    assert (found.ready, found.failed) == (20, 2)
    assert (found.p50, found.p95, found.longest) == (0.010, 0.019, 0.020)
    none = stats.fork_latency(forks.slice(20))
    assert none.ready == 0
    assert math.isnan(none.p50)
    assert math.isnan(stats.skip_share(pa.table({"verdict": pa.array([], pa.string())})))
