"""Reads the tables over Arrow Flight as analysts do, in a process of its own; exits with an error if one differs.

Arguments: a JSON object with the daemon's locations, an authority, a token, and what is to be found.
"""

import json
import sys

import duckdb
import polars
import pyarrow as pa
import pyarrow.compute
import pyarrow.flight as flight

told = json.loads(sys.argv[1])
mine, theirs, rows = told["mine"], told["theirs"], told["rows"]


def refused(what, do, *kinds):
    try:
        do()
    except kinds as e:
        return str(e)
    raise AssertionError(f"{what} was not refused")


def ask(**members):
    return flight.Ticket(json.dumps(members))


# Root, on the unix socket: all tables, and those of a tree.
root = flight.connect(told["unix"])
infos = {tuple(p.decode() for p in i.descriptor.path): i for i in root.list_flights()}
assert set(infos) == {(t,) for t in told["tables"]}, infos.keys()
for (name,), info in infos.items():
    assert info.schema.metadata[b"boxwood.table"] == name.encode()
    got = root.do_get(info.endpoints[0].ticket).read_all()
    assert got.schema.equals(info.schema, check_metadata=True), name
    got.validate(full=True)
    if name not in ("host", "scheduler"):  # whose last row is of now
        assert got.num_rows == info.total_records, (name, got.num_rows, info.total_records)
assert infos["turns",].schema.field("wall_ns").metadata[b"unit"] == b"ns"

of_tree = {i.descriptor.path[0].decode(): i for i in root.list_flights(mine.encode())}
assert set(of_tree) == set(told["tables"]) - {"host", "scheduler"}, of_tree.keys()
tables = {name: root.do_get(i.endpoints[0].ticket).read_all() for name, i in of_tree.items()}
assert {name: tables[name].num_rows for name in rows} == rows, tables

for descriptor in (
    flight.FlightDescriptor.for_path("turns", mine),
    flight.FlightDescriptor.for_command(json.dumps({"table": "turns", "tree_id": mine})),
):
    info = root.get_flight_info(descriptor)
    assert root.get_schema(descriptor).schema.equals(info.schema, check_metadata=True)
    assert root.do_get(info.endpoints[0].ticket).read_all().equals(tables["turns"])

# DuckDB and Polars over the result, also over the batches as they come.
turns = tables["turns"]
con = duckdb.connect()
assert con.execute("select count(*) from turns where verdict = 'files' and wall_ns > 0").fetchall() == [(1,)]
reader = root.do_get(ask(table="turns", tree_id=mine)).to_reader()
con.register("coming", reader)
assert con.execute("select sum(command_ns) from coming").fetchall() == [
    (pa.compute.sum(turns["command_ns"]).as_py(),)
]
frame = polars.from_arrow(turns)
assert frame.height == rows["turns"] and frame["tree"].unique().to_list() == [mine], frame
assert sorted(frame["verdict"].cast(polars.String).to_list()) == ["files", "none"], frame

# Less than a table: by verdict, and by time.
some = root.do_get(ask(table="turns", tree_id=mine, verdicts=["files"])).read_all()
assert some["verdict"].to_pylist() == ["files"], some
later = some["started_at"].cast(pa.int64()).to_pylist()[0]
assert root.do_get(ask(table="turns", tree_id=mine, since=later)).read_all().equals(some)
assert root.do_get(ask(table="turns", tree_id=mine, until=later)).read_all().num_rows == rows["turns"] - 1

# What isn't there.
assert "no table" in refused(
    "another table", lambda: root.do_get(ask(table="nonsense")).read_all(), pa.ArrowException, KeyError
)
for bad in (b"", b"turns", b'{"table": 1}', b'{"file": "/etc/passwd"}', b"x" * 5000):
    message = refused(
        bad[:40], lambda: root.do_get(flight.Ticket(bad)).read_all(), pa.ArrowException, KeyError
    )
    assert "ticket" in message or "no table" in message, message
for path in ((), ("turns", mine, "more")):
    refused(path, lambda: root.get_flight_info(flight.FlightDescriptor.for_path(*path)), pa.ArrowException)
refused(
    "an upload",
    lambda: root.do_put(flight.FlightDescriptor.for_path("turns"), turns.schema)[0].close(),
    NotImplementedError,
    pa.ArrowException,
)

# An account, over TLS: what is its own.
with open(told["authority"], "rb") as f:
    authority = f.read()
alice = flight.connect(told["tls"], tls_root_certs=authority)
as_alice = flight.FlightCallOptions(headers=[(b"authorization", b"Bearer " + told["token"].encode())])
hers = {tuple(p.decode() for p in i.descriptor.path) for i in alice.list_flights(options=as_alice)}
assert hers == {(name, mine) for name in of_tree}, hers
assert alice.do_get(ask(table="turns", tree_id=mine), as_alice).read_all().equals(turns)

denied = flight.FlightUnauthorizedError
for name in told["tables"]:
    refused(f"all of {name}", lambda: alice.do_get(ask(table=name), as_alice).read_all(), denied)
    refused(
        f"all of {name}",
        lambda: alice.get_flight_info(flight.FlightDescriptor.for_path(name), as_alice),
        denied,
    )
    refused(
        f"another's {name}",
        lambda: alice.do_get(ask(table=name, tree_id=theirs), as_alice).read_all(),
        denied,
    )
    refused(
        f"another's {name}",
        lambda: alice.do_get(
            flight.Ticket(json.dumps({"table": name, "treeId": theirs})), as_alice
        ).read_all(),
        denied,
    )
command = flight.FlightDescriptor.for_command(json.dumps({"table": "turns", "tree_id": theirs}))
for descriptor in (flight.FlightDescriptor.for_path("turns", theirs), command):
    refused("another's tree", lambda: alice.get_flight_info(descriptor, as_alice), denied)
    message = refused("its schema", lambda: alice.get_schema(descriptor, as_alice), denied, OSError)
    assert "another client" in message, message
refused("a list of another's", lambda: list(alice.list_flights(theirs.encode(), options=as_alice)), denied)
refused("an action", lambda: list(alice.do_action("x", as_alice)), denied)
refused("a list of actions", lambda: alice.list_actions(as_alice), denied)
refused(
    "an upload",
    lambda: alice.do_put(flight.FlightDescriptor.for_path("turns"), turns.schema, as_alice)[0].close(),
    denied,
)
for headers in ([], [(b"authorization", b"Bearer nobody's")]):
    call = flight.FlightCallOptions(headers=headers)
    refused(
        "a stranger", lambda: list(alice.list_flights(options=call)), denied, flight.FlightUnavailableError
    )

# An account without the verb.
writer = flight.FlightCallOptions(headers=[(b"authorization", b"Bearer " + told["writer"].encode())])
refused("one who may not read", lambda: list(alice.list_flights(options=writer)), denied)
print("ok")
