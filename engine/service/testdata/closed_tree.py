"""Reads the nodes of a closed tree as analysts do; exits with an error if one differs."""

import sys

import duckdb
import polars
import pyarrow.parquet as pq

path, root, turn = sys.argv[1:]
columns = ["node", "parent", "action", "verdict", "capture", "own_checkpoint"]
nodes = {row["node"]: row for row in pq.read_table(path, columns=columns).to_pylist()}
assert list(nodes) == [root, turn], nodes
assert nodes[root]["parent"] is None and nodes[turn]["parent"] == root, nodes
assert nodes[turn]["action"] == "echo two > /root/two" and nodes[turn]["verdict"] == "files", nodes
assert nodes[turn]["capture"] in ("captured", "proven") and nodes[turn]["own_checkpoint"], nodes

frame = polars.read_parquet(path).filter(polars.col("depth") > 0)
assert frame["node"].to_list() == [turn] and frame["rewards"].to_list() == ['{"tests":0.5}'], frame

found = duckdb.sql(f"select node, exit_code from '{path}' where parent = '{root}'").fetchall()
assert found == [(turn, 0)], found
