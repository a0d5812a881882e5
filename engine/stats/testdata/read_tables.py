"""Reads exported tables as analysts do; exits with an error if one differs."""

import datetime
import glob
import os
import sys

import duckdb
import polars
import pyarrow as pa
import pyarrow.parquet as pq

folder = sys.argv[1]


def of(table, ext):
    return os.path.join(folder, table + ext)


# pyarrow: the stream, with types, metadata, values and nulls.
with pa.ipc.open_stream(of("turns", ".arrows")) as reader:
    batches = list(reader)
    turns = pa.Table.from_batches(batches)
assert all(b.nbytes < 2 << 20 for b in batches), [b.nbytes for b in batches]
assert turns.schema.metadata[b"boxwood.table"] == b"turns"
assert turns.schema.metadata[b"boxwood.schema_version"] == b"1"
wall = turns.schema.field("wall_ns")
assert wall.type == pa.int64() and not wall.nullable and wall.metadata[b"unit"] == b"ns"
assert turns.schema.field("started_at").type == pa.timestamp("ns", "UTC")
assert pa.types.is_dictionary(turns.schema.field("verdict").type)
assert turns.num_rows == 5000
turns.validate(full=True)
row = turns.slice(1, 1).to_pylist()[0]
assert row["node"] == "nd_1" and row["verdict"] == "files" and row["turn_verdict"] == "none", row
assert row["exit_code"] == 1 and row["signal"] is None, row
assert row["files_created"] == 2 and row["unknown_effects"] == 1 and row["files_deleted"] == 0, row

nodes = pa.ipc.open_stream(of("nodes", ".arrows")).read_all().to_pylist()
assert nodes[0]["parent"] is None and nodes[0]["verdict"] is None, nodes
assert nodes[0]["checkpoint_bytes"] is None
assert nodes[1]["checkpoint_bytes"] == 4096 and nodes[1]["own_checkpoint"] is True, nodes
assert nodes[1]["process_kind"] == "empty" and nodes[1]["rewards"] == '{"tests":1}', nodes
assert nodes[1]["action"] == "echo \ufffd", nodes
assert [n["capture_policy"] for n in nodes] == ["sparse", "full"], nodes
forks = pa.ipc.open_stream(of("forks", ".arrows")).read_all().to_pylist()
assert forks[0]["reason"] == "pool_full" and forks[0]["sandbox"] is None, forks
captures = pa.ipc.open_stream(of("captures", ".arrows")).read_all().to_pylist()
assert captures[0]["bytes"] is None and captures[0]["urgent"] is True, captures
scheduler = pa.ipc.open_stream(of("scheduler", ".arrows")).read_all().to_pylist()
assert [(r["line"], r["class"]) for r in scheduler] == [("captures", "fork"), ("captures", "shadow")], (
    scheduler
)
fork, shadow = scheduler
assert fork["running"] == 1 and fork["done"] == 0 and fork["took_p95_ns"] is None, fork
assert shadow["failed"] == shadow["done"] == 1 and shadow["wasted_ns"] == shadow["took_ns"] == 7_000_000, (
    shadow
)
assert 3_000_000 <= shadow["wait_p95_ns"] <= 6_000_000 and shadow["exposed_p95_ns"] is None, shadow
host = pa.ipc.open_stream(of("host", ".arrows")).read_all().to_pylist()
assert host[0]["cpu_some_ns"] == 1_000_000 and host[1]["cpu_some_ns"] is None, host
assert host[0]["memory_total"] == 1 << 30, host

restores = pa.ipc.open_stream(of("restores", ".arrows")).read_all().to_pylist()
assert (
    restores[0]["purpose"] == "trial" and restores[0]["kind"] == "dump" and restores[0]["attach_ns"] == 0
), restores
replays = pa.ipc.open_stream(of("replays", ".arrows")).read_all().to_pylist()
assert replays[0]["same_exit"] and not replays[0]["same_output"] and replays[0]["node"] is None, replays
sandboxes = pa.ipc.open_stream(of("sandboxes", ".arrows")).read_all().to_pylist()
assert sandboxes[0]["ended"] == "gone_at_start" and sandboxes[0]["memory_limit"] == 1 << 30, sandboxes
assert sandboxes[0]["disk_limit"] is None and sandboxes[1]["started_at"] is None, sandboxes
made = sandboxes[0]["ended_at"] - sandboxes[0]["started_at"]
assert datetime.timedelta(0) <= made < datetime.timedelta(hours=1), sandboxes

assert pa.ipc.open_file(of("turns", ".arrow")).read_all().equals(turns)

# The daemon's own history: partitions by day, which each of them reads without the daemon.
history = os.path.join(folder, "spill", "turns-v1")
kept = glob.glob(os.path.join(history, "date=*", "*.parquet"))
assert len(kept) == 1, kept
assert pq.ParquetFile(kept[0]).metadata.row_group(0).column(0).compression == "ZSTD"
assert pq.read_table(kept[0]).equals(turns.slice(0, 4500).cast(pq.read_schema(kept[0])))
assert pq.read_table(history)["date"].unique().to_pylist() == [kept[0].split("date=")[1][:10]]
by_day = duckdb.sql(
    f"select date, count(*), count(verdict) from read_parquet('{history}/**/*.parquet', hive_partitioning = true) group by 1"
).fetchall()
assert len(by_day) == 1 and by_day[0][1:] == (4500, 4500), by_day
lazy = polars.scan_parquet(f"{history}/**/*.parquet", hive_partitioning=True)
assert lazy.select(polars.col("wall_ns").sum()).collect().item() == 4500 * 4_000_000

# polars: stream, file and Parquet give the same frame.
stream = polars.read_ipc_stream(of("turns", ".arrows"))
assert stream.height == 5000
assert stream["verdict"].cast(polars.String).unique().to_list() == ["files"]
assert polars.read_ipc(of("turns", ".arrow"))["wall_ns"].sum() == 5000 * 4_000_000
assert polars.read_parquet(of("turns", ".parquet"))["node"].to_list() == stream["node"].to_list()

# DuckDB: Parquet, and an Arrow table of this process.
con = duckdb.connect()
got = con.execute(
    f"select verdict, count(*), sum(command_ns), count(signal), min(started_at) from '{of('turns', '.parquet')}' group by 1"
).fetchall()
assert got[0][:4] == ("files", 5000, 5000 * 2_000_000, 0), got
assert got[0][4].astimezone(datetime.timezone.utc).replace(microsecond=0) == datetime.datetime(
    2026, 1, 2, 3, 4, 5, tzinfo=datetime.timezone.utc
), got
assert con.execute("select count(*) from turns where turn_verdict = 'none' and exit_code = 2").fetchone() == (
    1666,
)

# Parquet keeps units, descriptions and what a null means.
schema = pq.read_schema(of("captures", ".parquet"))
assert schema.field("freeze_ns").metadata[b"unit"] == b"ns", schema.field("freeze_ns").metadata
assert schema.field("bytes").metadata[b"null"] == b"unknown"
assert pq.ParquetFile(of("captures", ".parquet")).metadata.row_group(0).column(0).compression == "ZSTD"
for table in ("turns", "nodes", "forks", "captures", "scheduler", "host", "restores", "replays", "sandboxes"):
    back = pq.read_table(of(table, ".parquet"))
    assert back.to_pylist() == pa.ipc.open_stream(of(table, ".arrows")).read_all().to_pylist(), table
print("ok")
